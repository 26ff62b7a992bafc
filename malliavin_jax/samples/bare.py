"""Weights without Hessians, for dimensions in which no d × d array is wanted."""

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from .._base.checks import check_count, floats_to_arrays, steps_at
from .._base.types import Key
from ..learner.episodes import Fold, march
from ..learner.learner import ForwardLearner, initial_shape
from ..weights.scheme import Scheme, check_fine_enough
from .simulated import over_episodes


class Weighed(eqx.Module):
    """Positions, gradients and weights as in `Samples`, without Hessians: memory is O(d) a point.

    ```python
    bare = mj.Weighed(samples.x, samples.gradient, samples.weight, samples.observed)  # no Hessians
    bare.weight.shape  # (2000, 2, 1)
    ```
    """

    x: Float[Array, "episodes times d"]
    gradient: Float[Array, "episodes times d"]
    weight: Float[Array, "episodes times d"]
    observed: Bool[Array, "episodes times"]


def observe_weights(
    key: Key,
    learner: ForwardLearner,
    *,
    num_episodes: int,
    times: Sequence[float] | Float[Any, " times"] | float,
    scheme: Scheme,
) -> Weighed:
    """The episodes of `observe` without their Hessians, for dimensions in which no d × d array is wanted.

    With a `potentials.MatrixFree` loss and `Windowed(rate, neumann=m)` nothing larger than (d,) is made for an episode.

    ```python
    quartic = mj.potentials.MatrixFree(lambda x: jnp.sum(x**4) / 4, lambda x: x**3, lambda x, v: 3 * x**2 * v)
    wide = mj.ForwardLearner(quartic, lambda key: jnp.zeros(100), step_size=0.01)
    bare = mj.observe_weights(
        jax.random.key(0), wide, num_episodes=10, times=[0.1], scheme=mj.Windowed(4.0, neumann=2)
    )
    bare.weight.shape  # (10, 1, 100), and no 100 × 100 array
    ```
    """
    num_episodes = check_count("num_episodes", num_episodes)
    _, dtype = initial_shape(learner)
    stops = steps_at(times, learner.step_size)
    weighing: Scheme = floats_to_arrays(scheme, dtype)
    weighed = weights_at_steps(key, floats_to_arrays(learner, dtype), weighing, num_episodes, stops)
    check_fine_enough(weighed.weight, weighed.observed, weighing)
    return weighed


@eqx.filter_jit
def weights_at_steps(
    key: Key, learner: ForwardLearner, scheme: Scheme, num_episodes: int, stops: tuple[int, ...]
) -> Weighed:
    """`observe_weights` in steps, checked and converted already."""

    fold = Fold(
        init=lambda point: scheme.init(point.x.shape[0], point.x.dtype),
        step=scheme.step,
        read=lambda point, state: (point.x, point.gradient, scheme.weight(state)),
    )

    def episode(key: Key) -> Any:
        read, last_step = march(key, learner, stops, fold)
        observed = jnp.asarray(stops, last_step.dtype) <= last_step
        return *(jnp.where(observed[:, None], leaf, jnp.nan) for leaf in read), observed

    return Weighed(*over_episodes(episode, key, 0, num_episodes))
