"""From recorded arrays to samples. Nothing is checked again here: the recording has looked at every number."""

from collections.abc import Callable, Iterator
from typing import Any, NotRequired, TypedDict

import jax.numpy as jnp
import numpy as np

from ..learner.learner import Path
from ..samples.completion import Completion, Log, Model, fill, make_completion
from ..samples.recorded import paths_of, per_episode, stops_of, weigh_log
from ..samples.samples import Samples, in_blocks
from ..weights.scheme import Scheme

PILOT = 256  # episodes on which a scheme is tuned where none is given


class Part(TypedDict):
    """Some episodes of a recording, in memory: the arrays of `Recording.part`, which `samples_from_paths` takes.

    Attributes:
        x: (episodes, points, d).
        gradient: (episodes, points, d); absent if not recorded.
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
    gradient: NotRequired[np.ndarray]
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
        completion: what stands in for what was not recorded.

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
        completion: Completion | None = None,
    ):
        self._read, self._num_episodes, self._chunk_size = read, num_episodes, chunk_size
        self._options = {"times": times, "steps": steps, "scheme": scheme, "block_size": block_size}
        self._completion = completion

    def __len__(self) -> int:
        return -(-self._num_episodes // self._chunk_size)

    def __getitem__(self, number: int) -> Samples:
        if not 0 <= number < len(self):
            raise IndexError(f"there are {len(self)} chunks, got number {number}")
        first = number * self._chunk_size
        part = self._read(first, first + self._chunk_size)
        return weigh_part(part, self._completion, first, **self._options)

    def __iter__(self) -> Iterator[Samples]:
        return (self[number] for number in range(len(self)))


def weigh_part(
    part: Part,
    completion: Completion | None,
    first: int = 0,
    *,
    times: Any,
    steps: Any,
    scheme: Scheme | None,
    block_size: int = 1,
) -> Samples:
    """The samples of a part that begins at episode `first`, `block_size` of its episodes as one."""
    episodes, points, _ = part["x"].shape
    stops = stops_of(times, steps, part["step_size"], episodes, points, part["last_steps"])
    samples = weigh_log(log_of(part, block_size), _temperature(part), stops, scheme, completion, first)
    return in_blocks(samples, block_size)


def completion_of(part: Part, model: Model, block_size: int = 1) -> Completion | None:
    """What stands in for what was not recorded, from these episodes or from a model that is given."""
    return make_completion(log_of(part, block_size), model)


def path_batch(part: Part, completion: Completion | None, block_size: int = 1) -> Path:
    """The first episodes of a recording as a batch of paths, with nothing missing."""
    log = log_of(part, block_size)
    return paths_of(log, fill(log, completion), _temperature(part))


def log_of(part: Part, block_size: int = 1) -> Log:
    """A part as arrays on the device, None where nothing was recorded."""
    x, gradient, hessian = jnp.asarray(part["x"]), part.get("gradient"), part.get("hessian")
    gradient, hessian = (None if array is None else jnp.asarray(array) for array in (gradient, hessian))
    step_size = jnp.asarray(part["step_size"]).astype(x.dtype)
    step_size = step_size if step_size.ndim == 2 else jnp.broadcast_to(step_size, (len(x),))  # a schedule, or one each
    return Log(x, gradient, hessian, step_size, jnp.asarray(part["last_steps"]).astype(jnp.int32), block_size)


def _temperature(part: Part) -> Any:
    return per_episode("inverse_temperature", part["inverse_temperature"], len(part["x"]), part["x"].dtype)
