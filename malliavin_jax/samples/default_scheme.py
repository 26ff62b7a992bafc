"""The weight scheme taken where none is given.

- Whole Hessians, up to five dimensions: `Canonical()`.
- Whole Hessians beyond: `Windowed(rate)`, at the rate with the least E|S|² on pilot episodes (`best_rate`).
- Products of the Hessian with vectors: `Windowed(rate, neumann=8)`, at the rate with the least E|S|² at the last
  conditioning time of pilot episodes.

The pilot episodes are the first of those to be weighed, at most 256.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from .._base.types import Key, Scalar
from ..learner.episodes import simulate
from ..learner.learner import ForwardLearner, Path, initial_shape, offers_matrix
from ..learner.random import episode_keys
from ..weights.canonical import Canonical
from ..weights.scheme import Scheme
from ..weights.tuning import best_rate
from ..weights.windowed import Windowed
from .episode import weighed_episode

_CANONICAL_UP_TO = 5  # beyond, its O(d⁴) step costs more than its smaller variance gains
_PILOT_EPISODES = 256
_PILOT_RATES = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
_NEUMANN = 8  # leaves out (ε|H|)⁹ and later terms: less than float32 rounding up to ε|H| = 0.15


def choose_scheme(
    key: Key, learner: ForwardLearner, scheme: Scheme | None, num_episodes: int, num_steps: int
) -> Scheme:
    """The scheme given; for None, the one for episodes of `learner`, conditioned at step `num_steps` at the latest."""
    if scheme is not None:
        return scheme
    whole = offers_matrix(learner)
    if whole and initial_shape(learner)[0] <= _CANONICAL_UP_TO:
        return Canonical()
    keys = episode_keys(key, 0, min(num_episodes, _PILOT_EPISODES))
    if whole:
        return _tuned(eqx.filter_jit(jax.vmap(lambda k: simulate(k, learner, num_steps)))(keys))
    return Windowed(_best_rate_by_products(keys, learner, num_steps), neumann=_NEUMANN)


def default_scheme(paths: Path) -> Scheme:
    """The scheme for recorded `paths`, which hold whole Hessians."""
    if paths.x.shape[-1] <= _CANONICAL_UP_TO:
        return Canonical()
    return _tuned(jax.tree.map(lambda leaf: leaf[:_PILOT_EPISODES], paths))


def _tuned(pilot: Path) -> Windowed:
    """The window scheme of the best rate on the paths of `pilot`."""
    return Windowed(best_rate(pilot, jnp.asarray(_PILOT_RATES, pilot.x.dtype)))


@eqx.filter_jit
def _best_rate_by_products(keys: Array, learner: ForwardLearner, num_steps: int) -> Scalar:
    """`best_rate` where no path can be stored: each rate runs the pilot episodes anew."""

    def second_moment(rate: Scalar) -> Scalar:
        scheme = Windowed(rate, neumann=_NEUMANN)
        seen = jax.vmap(lambda k: weighed_episode(k, learner, scheme, (num_steps,)))(keys)
        moment = jnp.mean(jnp.sum(seen.weight**2, -1), where=seen.observed)
        return jnp.where(jnp.isfinite(moment), moment, jnp.inf)

    rates = jnp.asarray(_PILOT_RATES, initial_shape(learner)[1])
    return rates[jnp.argmin(lax.map(second_moment, rates))]
