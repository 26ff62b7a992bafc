"""The weight scheme taken where none is given, and the keys of the episodes it may be tuned on."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from .._base.types import Key
from ..learner.episodes import simulate
from ..learner.learner import ForwardLearner, Path, initial_shape
from ..weights.canonical import Canonical
from ..weights.scheme import Scheme
from ..weights.tuning import best_rate
from ..weights.windowed import Windowed

_CANONICAL_UP_TO = 5  # beyond, its O(d⁴) step costs more than its smaller variance gains
_PILOT_EPISODES = 256
_PILOT_RATES = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)


def choose_scheme(
    key: Key, learner: ForwardLearner, scheme: Scheme | None, num_episodes: int, num_steps: int
) -> Scheme:
    """The scheme given, or that of `observe` for None."""
    if scheme is not None:
        return scheme
    if initial_shape(learner)[0] <= _CANONICAL_UP_TO:
        return Canonical()
    keys = episode_keys(key, 0, min(num_episodes, _PILOT_EPISODES))
    return _tuned(eqx.filter_jit(jax.vmap(lambda k: simulate(k, learner, num_steps)))(keys))


def episode_keys(key: Key, first: Array | int, count: int) -> Array:
    """The keys of `count` episodes from number `first` on.

    Key i is a function of `key` and i alone, so that episodes may be made in chunks, on any device or process. It is
    `jax.random.split(key, n)[i]` for every n, as long as JAX's Threefry is the partitionable one (its default).
    """
    index = jnp.asarray(first, jnp.uint32) + jnp.arange(count, dtype=jnp.uint32)
    return jax.vmap(jax.random.fold_in, (None, 0))(key, index)


def default_scheme(paths: Path) -> Scheme:
    """`Canonical()` up to five dimensions; beyond, `Windowed` at the rate that is best on the first 256 of `paths`."""
    if paths.x.shape[-1] <= _CANONICAL_UP_TO:
        return Canonical()
    return _tuned(jax.tree.map(lambda leaf: leaf[:_PILOT_EPISODES], paths))


def _tuned(pilot: Path) -> Windowed:
    return Windowed(best_rate(pilot, jnp.asarray(_PILOT_RATES, pilot.x.dtype)))
