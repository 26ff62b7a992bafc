"""Samples of a simulated learner: episodes run and weighed in one pass."""

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array, Float

from .._base import host, mesh
from .._base.checks import check_count, check_key, floats_to_arrays, steps_at
from .._base.types import Key
from ..learner.learner import ForwardLearner, initial_shape
from ..learner.random import episode_keys
from ..weights.scheme import Scheme, check_fine_enough
from .default_scheme import choose_scheme
from .episode import weighed_episode
from .samples import Samples

_BLOCK = 1024  # episodes that small numbers of them are made of
_IN_BLOCKS = 16 * _BLOCK  # up to which a program for the very number saves milliseconds, and costs a second
_EXCESS = 0.3  # part of the episodes that may be made too many


def observe(
    key: Key,
    learner: ForwardLearner,
    *,
    num_episodes: int,
    times: Sequence[float] | Float[Any, " times"] | float,
    scheme: Scheme | None = None,
) -> Samples:
    """Simulate `num_episodes` episodes and weigh them in the same pass; no path is stored.

    Episode i is `simulate(jax.random.split(key, num_episodes)[i], learner, …)` weighed by `weigh`; the numbers do not
    depend on batching or on the number of devices, nor, for a scheme given, on `times`.

    Args:
        key: a typed key, `jax.random.key(seed)`.
        learner: who is watched.
        num_episodes: how many episodes are run.
        times: increasing conditioning times s, positive multiples of the learner's step size.
        scheme: the weight scheme. None takes `Adapted`, with which E[∂_i φ(X_s)] = E[φ(X_s) S_i] is exact whatever
            the loss, at the rates that a pilot of other episodes, up to the last time, finds best.

    Returns:
        The `Samples` of all episodes at all times. From a `potentials.MatrixFree` loss they hold no Hessians.

    Raises:
        ValueError: if an argument is out of its range, if the potential does not take the states that `initial`
            returns, if the scheme needs a Hessian that the potential does not offer, or if the chain is too coarse
            for the scheme (εH ≥ 1 under a window scheme).

    Example:
        ```python
        import jax
        import malliavin_jax as mj

        loss = mj.potentials.Quartic()
        learner = mj.ForwardLearner(loss, mj.initial.Normal(), step_size=0.01, gradient_noise=0.5)
        samples = mj.observe(jax.random.key(0), learner, num_episodes=2000, times=[0.4, 0.8])
        samples.x.shape  # (2000, 2, 1)
        ```
    """
    check_key("key", key)
    num_episodes = check_count("num_episodes", num_episodes)
    _, dtype = initial_shape(learner)
    stops = steps_at(times, learner.step_size)
    learner = floats_to_arrays(learner, dtype)
    weighing: Scheme = floats_to_arrays(choose_scheme(learner, scheme, stops[-1]), dtype)
    observed = _in_blocks if _is_small(num_episodes, key, learner, weighing) else observe_steps
    samples = observed(key, learner, weighing, num_episodes, stops)
    check_fine_enough(samples.weight, samples.observed, weighing)
    return samples


def _is_small(num_episodes: int, *trees: Any) -> bool:
    """Whether blocks are made in less time than a program for this number of episodes, and hardly more of them."""
    excess = -num_episodes % _BLOCK
    return num_episodes <= _IN_BLOCKS and excess <= _EXCESS * num_episodes and mesh.parts() == 1 and host.on_host(trees)


def _in_blocks(key: Key, learner: ForwardLearner, scheme: Scheme, num_episodes: int, stops: tuple[int, ...]) -> Samples:
    """`observe_steps`, block by block: one program for every number of episodes."""
    starts = [host.to_device(np.uint32(first)) for first in range(0, num_episodes, _BLOCK)]
    blocks = [observe_steps(key, learner, scheme, _BLOCK, stops, first) for first in starts]

    def join(*leaves: Array) -> Array:
        return host.to_device(np.concatenate([np.asarray(leaf) for leaf in leaves])[:num_episodes])

    return jax.tree.map(join, *blocks)


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
    episodes = jax.vmap(lambda key: weighed_episode(key, learner, scheme, stops))
    keys, devices = episode_keys(key, first, num_episodes), mesh.parts()
    if devices == 1:
        return Samples(*episodes(keys))
    if num_episodes % devices:
        raise ValueError(f"num_episodes must be a multiple of the mesh's {devices} devices, got {num_episodes}")
    return Samples(*mesh.by_device(episodes, keys))
