"""Observed points with their Malliavin weights: the hub that the estimators consume."""

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .._base import mesh
from .._base.checks import check_count, floats_to_arrays, steps_at
from .._base.types import Key
from ..learner.episodes import Fold, march
from ..learner.learner import ForwardLearner, check_matrix, initial_shape
from ..weights.scheme import Scheme, check_fine_enough
from .default_scheme import choose_scheme, episode_keys
from .samples import Samples, masked


def observe(
    key: Key,
    learner: ForwardLearner,
    *,
    num_episodes: int,
    times: Sequence[float] | Float[Any, " times"] | float,
    scheme: Scheme | None = None,
) -> Samples:
    """Simulate `num_episodes` episodes and weigh them in the same pass; no path is stored.

    - `times`: increasing conditioning times s, positive multiples of the learner's step size.
    - `scheme`: the weight scheme; None takes `Canonical()` up to five dimensions and, beyond, `Windowed` at the rate
      that is best on the first 256 episodes.

    Episode i is `simulate(jax.random.split(key, num_episodes)[i], learner, …)` weighed by `weigh`; the numbers do not
    depend on `times`, on batching or on the number of devices.

    ```python
    few = mj.observe(jax.random.key(2), learner, num_episodes=2000, times=[0.4, 0.8])
    few.x.shape  # (2000, 2, 1)
    ```
    """
    num_episodes = check_count("num_episodes", num_episodes)
    _, dtype = initial_shape(learner)
    stops = steps_at(times, learner.step_size)
    learner = floats_to_arrays(learner, dtype)
    weighing: Scheme = floats_to_arrays(choose_scheme(key, learner, scheme, num_episodes, stops[-1]), dtype)
    samples = observe_steps(key, learner, weighing, num_episodes, stops)
    check_fine_enough(samples.weight, samples.observed, weighing)
    return samples


@eqx.filter_jit
def observe_steps(
    key: Key,
    learner: ForwardLearner,
    scheme: Scheme,
    num_episodes: int,
    stops: tuple[int, ...],
    first: Array | int = 0,
) -> Samples:
    """`observe` in steps, checked and converted already: what a scan may call at every iteration.

    `first` is the number of the first of the `num_episodes` episodes.
    """

    fold = Fold(
        init=lambda point: scheme.init(point.x.shape[0], point.x.dtype),
        step=scheme.step,
        read=lambda point, state: (point, scheme.weight(state)),
    )

    def episode(key: Key) -> tuple[Array, ...]:
        (point, weight), last_step = march(key, learner, stops, fold)
        return masked(point, weight, jnp.asarray(stops, last_step.dtype) <= last_step)

    check_matrix(learner)
    return Samples(*over_episodes(episode, key, first, num_episodes))


def over_episodes(episode: Callable[[Key], Any], key: Key, first: Array | int, num_episodes: int) -> Any:
    """`episode` of each key, on the devices of the mesh in force."""
    keys, devices = episode_keys(key, first, num_episodes), mesh.parts()
    if devices == 1:
        return jax.vmap(episode)(keys)
    if num_episodes % devices:
        raise ValueError(f"num_episodes must be a multiple of the mesh's {devices} devices, got {num_episodes}")
    return mesh.by_device(jax.vmap(episode), keys)
