"""Streams that fill an accumulator: chunks of samples, or episodes simulated on the spot."""

import functools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from .._base import mesh
from .._base.checks import check_count, check_key, floats_to_arrays, steps_at
from .._base.long_runs import Bar, Checkpoint, Journal, as_checkpoint
from .._base.types import Key
from ..learner.learner import ForwardLearner, initial_shape
from ..samples.default_scheme import choose_scheme
from ..samples.samples import Samples
from ..samples.simulated import observe_steps
from ..weights.scheme import Scheme
from .accumulator import Accumulator, add_samples, with_contents


def accumulate(
    chunks: Iterable[Samples | Callable[[], Samples]],
    accumulator: Accumulator,
    *,
    progress: bool = False,
    checkpoint: str | os.PathLike | Checkpoint | None = None,
) -> Accumulator:
    """Add every chunk of a stream, one after another: memory is that of one chunk.

    Args:
        chunks: `Samples`, or functions that make them when their turn comes.
        accumulator: what they are added to.
        progress: show a bar on stderr.
        checkpoint: a file that holds the state twice a minute, at the end, and when the stream is interrupted, or a
            `Checkpoint`, which also says after how many chunks to write. A run that finds one goes on behind the
            chunks it holds: functions among these are not called.

    Returns:
        A new accumulator, with all chunks added.

    Raises:
        ValueError: if a chunk does not go with the accumulator, or the checkpoint is damaged, of another accumulator,
            or of more chunks than are given.

    Example:
        ```python
        import jax
        import jax.numpy as jnp
        import malliavin_jax as mj

        loss = mj.potentials.Quartic()
        learner = mj.ForwardLearner(loss, mj.initial.Normal(), step_size=0.01, gradient_noise=0.5)
        samples = mj.observe(jax.random.key(0), learner, num_episodes=2000, times=[0.4, 0.8])
        halves = (jax.tree.map(lambda leaf, i=i: leaf[i::2], samples) for i in (0, 1))
        empty = mj.Accumulator(jnp.linspace(-1.0, 1.0, 9)[:, None], mj.Laplace(0.5))
        mj.accumulate(halves, empty).num_episodes  # 2000
        ```
    """
    saved = as_checkpoint(checkpoint)

    def add(chunk: Samples | Callable[[], Samples], accumulator: Accumulator) -> Accumulator:
        return accumulator.add(chunk() if callable(chunk) else chunk)

    def parts(done: int) -> Iterator[Part]:
        number = 0
        for number, chunk in enumerate(chunks, start=1):
            if number > done:
                yield Part(number, functools.partial(add, chunk))
        if saved is not None and number < done:
            raise ValueError(f"checkpoint {saved.path} holds {done} chunks, more than the {number} given")

    total = len(chunks) if isinstance(chunks, Sized) else None
    journal = Journal(saved, accumulator=accumulator)
    return _fill(accumulator, parts, journal, progress=progress, total=total, unit="chunk")


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
    checkpoint: str | os.PathLike | Checkpoint | None = None,
) -> Accumulator:
    """Simulate, weigh and add episodes, a chunk of them at a time: memory is that of one chunk.

    The episodes are those of `observe(key, learner, num_episodes=…, …)`, whatever the chunks, and so are the estimates
    up to rounding.

    Args:
        key: the randomness of all episodes.
        learner: as in `observe`.
        accumulator: what the episodes are added to.
        num_episodes: how many in all. A finished run with a checkpoint is continued by asking for more.
        times: as in `observe`.
        scheme: as in `observe`.
        chunk_size: episodes simulated and added at a time.
        progress: show a bar on stderr.
        checkpoint: as in `accumulate`; the `every` of a `Checkpoint` counts episodes.

    Returns:
        A new accumulator, with all episodes added.

    Raises:
        ValueError: if an argument is out of its range, the accumulator is of another dimension or dtype than the
            learner, an episode is not finite, or the checkpoint is damaged, of another run, or of more episodes.

    Example:
        ```python
        import jax
        import jax.numpy as jnp
        import malliavin_jax as mj

        loss = mj.potentials.Quartic()
        learner = mj.ForwardLearner(loss, mj.initial.Normal(), step_size=0.01, gradient_noise=0.5)
        empty = mj.Accumulator(jnp.linspace(-1.0, 1.0, 9)[:, None], mj.Laplace(0.5))
        sums = mj.observe_and_accumulate(jax.random.key(0), learner, empty, num_episodes=2000, times=[0.4, 0.8])
        sums.estimate().stderr.shape  # (9, 1)
        ```
    """
    check_key("key", key)
    num_episodes, chunk_size = check_count("num_episodes", num_episodes), check_count("chunk_size", chunk_size)
    if num_episodes > 2**32:
        raise ValueError(f"num_episodes must be at most 2**32, the number of keys, got {num_episodes}")
    dtype = _check_goes_with(learner, accumulator)
    saved = as_checkpoint(checkpoint)
    stops, devices = steps_at(times, learner.step_size), mesh.parts()
    chunk_size = -(-min(chunk_size, num_episodes) // devices) * devices  # the surplus, if any, is not counted
    learner = floats_to_arrays(learner, dtype)
    weighing: Scheme = floats_to_arrays(choose_scheme(learner, scheme, stops[-1]), dtype)

    def add(first: int, count: int, accumulator: Accumulator) -> Accumulator:
        following, bad = observe_and_add(
            accumulator,
            key=key,
            learner=learner,
            scheme=weighing,
            first=np.uint32(first),
            count=np.int32(count),
            chunk_size=chunk_size,
            stops=stops,
        )
        if int(bad):
            raise ValueError(
                f"{int(bad)} observed points among episodes {first} to {first + count - 1} are not finite: "
                f"the learner diverges, or its chain is too coarse for {type(weighing).__name__}; "
                "use a smaller step_size"
            )
        return following

    def parts(done: int) -> Iterator[Part]:
        if saved is not None and done > num_episodes:
            raise ValueError(f"checkpoint {saved.path} holds {done} episodes, more than num_episodes = {num_episodes}")
        for first in range(done, num_episodes, chunk_size):
            count = min(chunk_size, num_episodes - first)
            yield Part(first + count, functools.partial(add, first, count))

    journal = Journal(saved, accumulator=accumulator, key=key, learner=learner, scheme=weighing, times=stops)
    return _fill(accumulator, parts, journal, progress=progress, total=num_episodes, unit="episode")


def _check_goes_with(learner: ForwardLearner, accumulator: Accumulator) -> Any:
    """The dtype of the learner's states, which must be that of the accumulator's places, as must the dimension."""
    dim, dtype = initial_shape(learner)
    if dim != accumulator.alphas.shape[1] or dtype != accumulator.alphas.dtype:
        raise ValueError(
            f"alphas must be {dtype} in {dim} dimensions, as the learner's states are, "
            f"got {accumulator.alphas.dtype} in {accumulator.alphas.shape[1]}"
        )
    return dtype


class Part(NamedTuple):
    """A part of a stream: how much of the stream is done once it is added, and what adds it."""

    done: int
    add: Callable[[Accumulator], Accumulator]


def _fill(
    accumulator: Accumulator,
    parts: Callable[[int], Iterator[Part]],
    journal: Journal,
    *,
    progress: bool,
    total: int | None,
    unit: str,
) -> Accumulator:
    """Add the parts of a stream that remain: `parts(done)`, where so much is in the checkpoint."""
    done, contents = journal.resume(accumulator.contents)
    accumulator = with_contents(accumulator, contents)
    with Bar(total, done, enabled=progress, unit=unit, name="accumulate") as bar, journal:
        for part in parts(done):
            accumulator = part.add(accumulator)
            journal.note(part.done, accumulator.contents)
            bar.advance(part.done - done)
            done = part.done
    return accumulator


@eqx.filter_jit
def observe_and_add(
    accumulator: Accumulator,
    *,
    key: Key,
    learner: ForwardLearner,
    scheme: Scheme,
    first: Any,
    count: Any,
    chunk_size: int,
    stops: tuple[int, ...],
) -> tuple[Accumulator, Int[Array, ""]]:
    """Episodes first … first + count − 1 added, and the number of points among them that are not finite."""
    samples = observe_steps(key, learner, scheme, chunk_size, stops, first)
    counts = jnp.arange(chunk_size, dtype=jnp.int32) < jnp.asarray(count, jnp.int32)
    samples = eqx.tree_at(lambda s: s.observed, samples, samples.observed & counts[:, None])
    finite = jnp.isfinite(samples.x) & jnp.isfinite(samples.gradient) & jnp.isfinite(samples.weight)
    whole = jnp.all(finite, -1) & jnp.all(jnp.isfinite(samples.require_hessian("observe_and_accumulate")), (-2, -1))
    return add_samples(accumulator, samples, jnp.asarray(count, jnp.int32)), jnp.sum(samples.observed & ~whole)
