"""From recorded arrays to samples. Nothing is checked again here: the recording has looked at every number."""

from collections.abc import Callable, Iterator
from typing import Any, NotRequired, TypedDict

import jax
import jax.numpy as jnp
import numpy as np

from ..learner.learner import Path
from ..samples.default_scheme import default_scheme
from ..samples.hessians import full_hessians
from ..samples.recorded import stops_of, weigh_at
from ..samples.samples import Samples, in_blocks
from ..weights.scheme import Scheme, check_fine_enough

PILOT = 256  # episodes on which a scheme is tuned where none is given


class Part(TypedDict):
    """Some episodes of a recording, in memory: the arrays of `Recording.part`, which `samples_from_paths` takes.

    Attributes:
        x: (episodes, points, d).
        gradient: (episodes, points, d).
        hessian: (episodes, points, d, d), or (episodes, points, d) for its diagonal; absent if not recorded or not
            asked for.
        step_size: one number, (episodes,), or a schedule (episodes, points); None if not recorded.
        inverse_temperature: one number, or (episodes,); None if not recorded.
        last_steps: (episodes,), the number of steps that each episode made.

    Example:
        ```python
        import numpy as np
        import malliavin_jax as mj

        x = np.random.default_rng(0).normal(size=(3, 5, 1))
        part = mj.Recording(x, x, step_size=0.01).part(0, 2)
        part["x"].shape, part["last_steps"]  # (2, 5, 1), [4 4]
        ```
    """

    x: np.ndarray
    gradient: np.ndarray
    hessian: NotRequired[np.ndarray]
    step_size: np.ndarray | None
    inverse_temperature: np.ndarray | None
    last_steps: np.ndarray


class Chunks:
    """The samples of a recording, some episodes at a time, in order: `len`, an index or a loop give `Samples`.

    The weights of an episode depend on no other one, so chunks of any size hold the same numbers (a scheme that is
    tuned is tuned once, on the first episodes). `Recording.chunks` makes them.

    Args:
        read: the part of the recording from one episode to another.
        num_episodes: how many episodes there are in all.
        chunk_size: how many of them are read and weighed at a time.
        times: as in `Recording.samples`.
        steps: likewise.
        scheme: the weight scheme.
        block_size: how many consecutive episodes become one of the samples; `chunk_size` is a multiple of it.

    Raises:
        IndexError: if a chunk is asked for that is not there.

    Example:
        ```python
        import jax
        import malliavin_jax as mj

        loss = mj.potentials.Quartic()
        learner = mj.ForwardLearner(loss, mj.initial.Normal(), step_size=0.01, gradient_noise=0.5)
        paths = jax.jit(jax.vmap(lambda key: mj.simulate(key, learner, 80)))(jax.random.split(jax.random.key(0), 500))
        recording = mj.Recording(paths.x, paths.gradient, paths.hessian, step_size=0.01, inverse_temperature=1.0)
        chunks = recording.chunks(250, times=[0.4, 0.8])
        len(chunks), chunks[0].num_episodes  # 2, 250
        ```
    """

    def __init__(
        self,
        read: Callable[[int, int], Part],
        num_episodes: int,
        chunk_size: int,
        *,
        times: Any,
        steps: Any,
        scheme: Scheme,
        block_size: int = 1,
    ):
        self._read, self._num_episodes, self._chunk_size = read, num_episodes, chunk_size
        self._times, self._steps, self._scheme, self._block_size = times, steps, scheme, block_size

    def __len__(self) -> int:
        return -(-self._num_episodes // self._chunk_size)

    def __getitem__(self, number: int) -> Samples:
        if not 0 <= number < len(self):
            raise IndexError(f"there are {len(self)} chunks, got number {number}")
        part = self._read(number * self._chunk_size, (number + 1) * self._chunk_size)
        samples = weigh_part(part, times=self._times, steps=self._steps, scheme=self._scheme)
        return in_blocks(samples, self._block_size)

    def __iter__(self) -> Iterator[Samples]:
        return (self[number] for number in range(len(self)))


def weigh_part(part: Part, *, times: Any, steps: Any, scheme: Scheme | None) -> Samples:
    """The samples of a part, with the default scheme for None; an error if the chain is too coarse for the scheme."""
    episodes, points, _ = part["x"].shape
    stops = stops_of(times, steps, part["step_size"], episodes, points, part["last_steps"])
    paths = paths_of(part)
    scheme = default_scheme(paths) if scheme is None else scheme
    samples = weigh_at(paths, scheme, stops)
    check_fine_enough(samples.weight, samples.observed, scheme)
    return samples


def paths_of(part: Part) -> Path:
    """The episodes of a part as a batch of paths, with Hessians from secants where none are recorded."""
    x, gradient, last_steps = (jnp.asarray(array) for array in (part["x"], part["gradient"], part["last_steps"]))
    hessian = jnp.asarray(part["hessian"]) if "hessian" in part else None
    step_size, inverse_temperature = (
        jnp.broadcast_to(setting, setting.shape if setting.ndim == 2 else (len(x),))  # a schedule, or one an episode
        for setting in (jnp.asarray(part[name]).astype(x.dtype) for name in ("step_size", "inverse_temperature"))
    )
    hessian = full_hessians(hessian, x, gradient, last_steps)
    return jax.vmap(Path)(x, gradient, hessian, step_size, inverse_temperature, last_steps.astype(jnp.int32))
