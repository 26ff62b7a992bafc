"""The bandwidth of a kernel, by cross-validation over whole episodes."""

import math
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

from .._base.checks import check_positive, float_array
from .._base.types import Flag, Scalar, Vector
from ..samples.samples import Samples, check_samples
from ..samples.summary import mean_and_deviation
from .local_fit import check_degree, cut_points, values_without

_GRID = 16  # bandwidths on the grid of cross-validation
SUBSAMPLE = 3000  # points in each of its subsamples


def cross_validated_bandwidth(
    samples: Samples, degree: int = 0, candidates: ArrayLike | Sequence[float] | None = None
) -> Scalar:
    """The bandwidth, in the units of x, that best predicts the gradients of episodes it has not seen.

        CV(h) = mean over points i of |g_i − value_h(x_i), fitted without the episode of i|²

    The whole episode is left out because its other times stand close by and share its noise. Points beyond two standard
    deviations on some axis are not scored (they still serve as neighbours): there the fit has neighbours on one side
    only, and its large errors would decide for all.

    Beyond 3000 points the curve is averaged over at most 8 disjoint subsamples of that size (evenly spaced
    episodes; nothing is random), and h is carried from their n episodes to all N at the rate of the optimal
    bandwidth, h_N = h_n (n/N)^{1/(d+2q)}, for a bias of order h^q (q = 2 for degrees 0 and 1, 4 for 2 and 3).
    This is bagged cross-validation (Hall & Robinson, Biometrika 96, 2009). Predicting a few points from all
    the others costs as much and fails: with many samples every reasonable bandwidth predicts them equally
    well up to their own noise, whereas the errors of small fits, over many points, stand out from it.

    Without `candidates`, 16 bandwidths are tried, in equal ratios from 0.02 to 2 times the root mean square of the
    axes' standard deviations, then one parabola in log h through the least error and its two neighbours. A minimum at
    an end of the grid moves the grid beyond that end (by a factor of 74), at most twice; a minimum still at an end is
    returned as it is. At the upper end a global polynomial predicts best; at the lower end the gradients are free of
    noise.

    Args:
        samples: positions and gradients; Hessians are not used.
        degree: of the local fit: 0 is for `NadarayaWatson`, 1 to 3 for `LocalPolynomial`.
        candidates: bandwidths, one-dimensional, of which the best is returned; None searches as above.

    Returns:
        One bandwidth for all axes.

    Raises:
        ValueError: if `degree` is not 0 to 3, if a candidate is not positive, if an observed number is not finite,
            with fewer than two episodes, or if no position differs.

    Example:
        ```python
        import jax
        import malliavin_jax as mj

        loss = mj.potentials.Quartic()
        learner = mj.ForwardLearner(loss, mj.initial.Normal(), step_size=0.01, gradient_noise=0.5)
        samples = mj.observe(jax.random.key(0), learner, num_episodes=2000, times=[0.4, 0.8])
        h = mj.kernel.cross_validated_bandwidth(samples, candidates=[0.1, 0.2, 0.4])
        ```
    """
    check_samples(samples)
    degree = check_degree(degree, (0, 1, 2, 3))
    mean, deviation = mean_and_deviation(samples)
    check_positive("the standard deviation of samples.x", jnp.max(deviation))
    if candidates is None:
        return _search(samples, mean, deviation, degree)
    listed = float_array("candidates", candidates).astype(mean.dtype)
    if listed.ndim != 1 or listed.size == 0:
        raise ValueError(f"candidates must be a non-empty list of bandwidths, got shape {listed.shape}")
    check_positive("candidates", listed)
    return listed[_last_argmin(prediction_errors(samples, mean, deviation, listed, degree))]


@partial(jax.jit, static_argnames="degree")
def prediction_errors(
    samples: Samples, mean: Vector, deviation: Vector, candidates: Float[Array, " m"], degree: int
) -> Float[Array, " m"]:
    """CV of each candidate, the sum over the subsamples divided by the number of points scored."""
    episodes, times, d = samples.x.shape
    size = min(episodes, max(SUBSAMPLE // times, 100))
    stride = episodes // size
    # The cost of a fit grows with its terms, and the noise of the curve is small already: fewer subsamples then.
    bags = min(stride, 8, max(2, 60 // math.comb(d + degree, degree)))
    # Evenly spaced episodes: start, start + stride, …, with the starts spread over the first stride.
    chosen = (np.arange(bags) * stride // bags)[:, None] + stride * np.arange(size)[None, :]
    bandwidths = candidates * (episodes / size) ** (1 / (d + (4 if degree < 2 else 8)))
    scale = jnp.sqrt(jnp.mean(deviation**2))
    # An axis on which nothing moves must not rule out every point: hence the maximum.
    reach = jnp.maximum(2 * deviation, scale)
    central = jnp.all(jnp.abs(samples.x - mean[None, None, :]) <= reach[None, None, :], -1)

    def bag(index: Int[Array, " size"]) -> Float[Array, " m"]:
        part = jax.tree.map(lambda leaf: leaf[index], samples)
        points = cut_points(part, degree, 256)

        def error(point: Int[Array, ""]) -> Float[Array, " m"]:
            episode, time = point // times, point % times
            scored = part.observed[episode, time] & central[index[episode], time]
            alpha = jnp.where(scored, part.x[episode, time], mean)
            value = values_without(points, bandwidths, degree, scale, alpha, episode)
            squares = jnp.sum((value - part.gradient[episode, time][None, :]) ** 2, -1)
            return jnp.where(scored, squares, 0.0)

        return jnp.sum(lax.map(error, jnp.arange(size * times), batch_size=8), 0)

    scored = (samples.observed & central)[chosen.reshape(-1)]
    return jnp.sum(lax.map(bag, jnp.asarray(chosen)), 0) / jnp.sum(scored).astype(scale.dtype)


def _last_argmin(errors: Float[Array, " m"]) -> Int[Array, ""]:
    """The last of equals: below the spacing of the points every bandwidth predicts the same."""
    return errors.shape[0] - 1 - jnp.argmin(errors[::-1])


class _Search(NamedTuple):
    """The state of the search for a bandwidth."""

    rounds: Int[Array, ""]
    grid: Float[Array, " m"]  # logarithms of the bandwidths
    errors: Float[Array, " m"]


@partial(jax.jit, static_argnames="degree")
def _search(samples: Samples, mean: Vector, deviation: Vector, degree: int) -> Scalar:
    """The least error on a grid that moves until it holds the minimum, refined by a parabola."""
    spacing = math.log(100.0) / (_GRID - 1)
    scale = jnp.sqrt(jnp.mean(deviation**2))
    base = jnp.linspace(math.log(0.02), math.log(2.0), _GRID, dtype=scale.dtype) + jnp.log(scale)

    def at_end(best: Int[Array, ""]) -> Flag:
        return (best == 0) | (best == _GRID - 1)

    def unfinished(state: _Search) -> Flag:
        return (state.rounds == 0) | ((state.rounds < 3) & at_end(_last_argmin(state.errors)))

    def evaluate(state: _Search) -> _Search:
        # Two points of the old grid stay on the new one: a minimum at the seam has both its neighbours.
        stride = jnp.where(_last_argmin(state.errors) == 0, 2 - _GRID, _GRID - 2).astype(base.dtype) * spacing
        grid = jnp.where(state.rounds == 0, state.grid, state.grid + stride)
        return _Search(state.rounds + 1, grid, prediction_errors(samples, mean, deviation, jnp.exp(grid), degree))

    _, grid, errors = lax.while_loop(unfinished, evaluate, _Search(jnp.asarray(0), base, jnp.zeros_like(base)))
    best = _last_argmin(errors)
    middle = jnp.clip(best, 1, _GRID - 2)
    left, least, right = errors[middle - 1], errors[middle], errors[middle + 1]
    curvature = left - 2 * least + right
    vertex = 0.5 * (left - right) / jnp.where(curvature > 0, curvature, 1.0)
    offset = jnp.where(at_end(best) | (curvature <= 0), 0.0, jnp.clip(vertex, -0.5, 0.5))
    return jnp.exp(grid[best] + spacing * offset)
