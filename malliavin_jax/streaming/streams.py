"""Streams that fill an accumulator: chunks of samples, or episodes simulated on the spot."""

from collections.abc import Callable, Iterable, Sequence, Sized
from pathlib import Path
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .._base import checkpoint as _checkpoint, mesh
from .._base.checks import check_count, floats_to_arrays, steps_at
from .._base.types import Key
from ..learner.learner import ForwardLearner, initial_shape
from ..samples.default_scheme import choose_scheme
from ..samples.samples import Samples
from ..samples.simulated import observe_steps
from ..weights.scheme import Scheme
from .accumulator import Accumulator, _add, _state


def _resume(journal: _checkpoint.Journal, accumulator: Accumulator) -> tuple[int, Accumulator]:
    done, state = journal.resume(_state(accumulator))
    return done, eqx.tree_at(_state, accumulator, state)


def accumulate(
    chunks: Iterable[Samples | Callable[[], Samples]],
    accumulator: Accumulator,
    *,
    progress: bool = False,
    checkpoint: str | Path | None = None,
) -> Accumulator:
    """Add every chunk of a stream: `Samples`, or functions that make them when their turn comes.

    - `progress`: a bar on stderr.
    - `checkpoint`: a file (`.npz`, no pickle) that holds the state twice a minute, at the end, and when the stream is
      interrupted. A run that finds one goes on behind the chunks it holds: functions among these are not called.

    Memory is that of one chunk.

    ```python
    halves = (jax.tree.map(lambda leaf, i=i: leaf[i::2], samples) for i in (0, 1))
    sums = mj.accumulate(halves, mj.Accumulator(alphas, mj.Laplace(0.5)))
    sums.num_episodes  # 2000
    ```
    """
    journal = _checkpoint.Journal(checkpoint, accumulator=accumulator)
    done, accumulator = _resume(journal, accumulator)
    total, number = len(chunks) if isinstance(chunks, Sized) else None, 0
    with _checkpoint.Bar(total, done, enabled=progress, unit="chunk", name="accumulate") as bar, journal:
        for number, chunk in enumerate(chunks, start=1):
            if number > done:
                accumulator = accumulator.add(chunk() if callable(chunk) else chunk)
                journal.note(number, _state(accumulator))
                bar.advance(1)
    if number < done:
        raise ValueError(f"checkpoint {checkpoint} holds {done} chunks, more than the {number} given")
    return accumulator


def observe_and_accumulate(
    key: Key,
    learner: ForwardLearner,
    accumulator: Accumulator,
    *,
    num_episodes: int,
    times: Sequence[float] | Float[Any, " times"] | float,
    scheme: Scheme | None = None,
    chunk_size: int = 2**17,
    progress: bool = False,
    checkpoint: str | Path | None = None,
) -> Accumulator:
    """Simulate, weigh and add `num_episodes` episodes, `chunk_size` at a time: memory is that of one chunk.

    The episodes are those of `observe(key, learner, num_episodes=…, …)`, whatever the chunks, and so are the estimates
    up to rounding. `times` and `scheme` are as there, `progress` and `checkpoint` as in `accumulate`; a finished run
    is continued by asking for more episodes.

    ```python
    empty = mj.Accumulator(alphas, mj.Laplace(0.5))
    sums = mj.observe_and_accumulate(jax.random.key(0), learner, empty, num_episodes=2000, times=[0.4, 0.8])
    sums.estimate().stderr
    ```
    """
    num_episodes, size = check_count("num_episodes", num_episodes), check_count("chunk_size", chunk_size)
    if num_episodes > 2**32:
        raise ValueError(f"num_episodes must be at most 2**32, the number of keys, got {num_episodes}")
    dim, dtype = initial_shape(learner)
    if dim != accumulator.alphas.shape[1] or dtype != accumulator.alphas.dtype:
        raise ValueError(
            f"alphas must be {dtype} in {dim} dimensions, as the learner's states are, "
            f"got {accumulator.alphas.dtype} in {accumulator.alphas.shape[1]}"
        )
    stops, devices = steps_at(times, learner.step_size), mesh.parts()
    size = -(-min(size, num_episodes) // devices) * devices  # the surplus, if any, is not counted
    learner = floats_to_arrays(learner, dtype)
    weighing: Scheme = floats_to_arrays(choose_scheme(key, learner, scheme, num_episodes, stops[-1]), dtype)
    run = dict(key=key, learner=learner, scheme=weighing, times=stops)
    journal = _checkpoint.Journal(checkpoint, accumulator=accumulator, **run)
    done, accumulator = _resume(journal, accumulator)
    if done > num_episodes:
        raise ValueError(f"checkpoint {checkpoint} holds {done} episodes, more than num_episodes = {num_episodes}")
    with _checkpoint.Bar(num_episodes, done, enabled=progress, unit="episode", name="accumulate") as bar, journal:
        for first in range(done, num_episodes, size):
            count = min(size, num_episodes - first)
            following, bad = _observe_and_add(
                key, learner, weighing, accumulator, np.uint32(first), np.int32(count), size, stops
            )
            if int(bad):
                raise ValueError(
                    f"{int(bad)} observed points among episodes {first} to {first + count - 1} are not finite: "
                    f"the learner diverges, or its chain is too coarse for {type(weighing).__name__}; "
                    "use a smaller step_size"
                )
            accumulator = following
            journal.note(first + count, _state(accumulator))
            bar.advance(count)
    return accumulator


@eqx.filter_jit
def _observe_and_add(
    key: Key,
    learner: ForwardLearner,
    scheme: Scheme,
    accumulator: Accumulator,
    first: Any,
    count: Any,
    size: int,
    stops: tuple[int, ...],
) -> tuple[Accumulator, Array]:
    """Episodes first … first + count − 1 added, and the number of points among them that are not finite."""
    samples = observe_steps(key, learner, scheme, size, stops, first)
    counts = jnp.arange(size, dtype=jnp.int32) < jnp.asarray(count, jnp.int32)
    samples = eqx.tree_at(lambda s: s.observed, samples, samples.observed & counts[:, None])
    finite = jnp.isfinite(samples.x) & jnp.isfinite(samples.gradient) & jnp.isfinite(samples.weight)
    whole = jnp.all(finite, -1) & jnp.all(jnp.isfinite(samples.require_hessian("observe_and_accumulate")), (-2, -1))
    return _add(accumulator, samples, jnp.asarray(count, jnp.int32)), jnp.sum(samples.observed & ~whole)
