"""How far are the positions of a chain from the Gibbs law exp(−βL)? Total variation and Wasserstein distances."""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Shaped

from .._base.checks import check_count, check_positive, check_shape, float_array
from .._base.small_tensors import HIGHEST
from .._base.types import Scalar
from ..recovery.density import cell_counts, range_ends


class _Comparison(NamedTuple):
    """Positions x (n, d) and the law exp(−β · energy) on the box from `low` to `high`, each (d,)."""

    x: Array
    energy: Callable[[Array], Array]
    beta: Array
    low: Array
    high: Array


def total_variation(
    positions: Shaped[ArrayLike, "..."],
    potential: Any,
    *,
    inverse_temperature: Any,
    range: Any,
    bins: int = 50,
) -> Scalar:
    """½ Σ |p̂ − π| over bins: the histogram of the positions against exp(−βL), in one, two or three dimensions.

    n independent draws from π itself are not at zero but at about Σ sqrt(p/(6.28 n)), p the bins' masses.

    Args:
        positions: of shape (chains, kept, d), or (n, d).
        potential: an object with `value(x)`, or the function L itself, of x with shape (d,).
        inverse_temperature: β.
        range: (low, high), in d > 1 a pair per axis, wide enough to hold the Gibbs law; π is normalised on it, and
            positions outside count in full.
        bins: number of bins on each axis.

    Returns:
        The distance, between 0 and 1.

    Raises:
        ValueError: if `positions` is empty or not of dimension 1, 2 or 3, β or `bins` is not positive, or `range`
            does not run from low to high.

    Example:
        ```python
        import jax
        import malliavin_jax as mj

        positions = jax.random.normal(jax.random.key(0), (8, 80, 1))
        loss = mj.potentials.Quadratic()  # x²/2: the positions are draws from its Gibbs law
        mj.diagnostics.total_variation(positions, loss, inverse_temperature=1.0, range=(-4, 4), bins=12)
        ```
    """
    compared = _compare(positions, potential, inverse_temperature, range)
    return _total_variation(compared, check_count("bins", bins))


@eqx.filter_jit
def _total_variation(compared: _Comparison, bins: int) -> Scalar:
    x, energy, beta, low, high = compared
    n, d = x.shape
    nodes, weights = (jnp.asarray(a, x.dtype) for a in np.polynomial.legendre.leggauss({1: 8, 2: 4, 3: 2}[d]))
    offsets = (jnp.arange(bins, dtype=x.dtype)[:, None] + (nodes[None] + 1) / 2).ravel() / bins
    axes = [a + (b - a) * offsets for a, b in zip(low, high, strict=True)]
    points = jnp.stack(jnp.meshgrid(*axes, indexing="ij"), -1).reshape(-1, d)
    minus = -beta * jax.lax.map(energy, points, batch_size=4096)
    mass = jnp.exp(minus - minus.max()).reshape((bins, len(nodes)) * d)
    for axis in (5, 3, 1)[3 - d :]:  # bins and nodes alternate: the nodes are summed away, from the last axis on
        mass = jnp.tensordot(mass, weights, (axis, 0), precision=HIGHEST)
    share = cell_counts(x, low, high, (bins,) * d) / n
    return (jnp.sum(jnp.abs(share - mass / mass.sum())) + 1 - share.sum()) / 2


def wasserstein(
    positions: Shaped[ArrayLike, "..."],
    potential: Any,
    *,
    inverse_temperature: Any,
    range: Any,
    order: int = 1,
    points: int = 4001,
) -> Scalar:
    """Wasserstein distance of order 1 or 2 between one-dimensional positions and exp(−βL), in the units of x.

    W_p^p = ∫_0^1 |F̂⁻¹(u) − F⁻¹(u)|^p du, by the midpoint rule with a whole number of nodes per position, at
    least `points` in all. F comes from quadrature on `points` points of `range`.

    Args:
        positions: of shape (chains, kept, 1), or (n, 1).
        potential: an object with `value(x)`, or the function L itself, of x with shape (1,).
        inverse_temperature: β.
        range: (low, high), wide enough to hold the Gibbs law.
        order: p, 1 or 2.
        points: number of points of the quadrature.

    Returns:
        The distance.

    Raises:
        ValueError: if `positions` is empty or not one-dimensional, `order` is neither 1 nor 2, β is not positive,
            `points` is less than 2, or `range` does not run from low to high.

    Example:
        ```python
        import jax
        import malliavin_jax as mj

        positions = jax.random.normal(jax.random.key(0), (8, 80, 1))
        loss = mj.potentials.Quadratic()  # x²/2: the positions are draws from its Gibbs law
        mj.diagnostics.wasserstein(positions, loss, inverse_temperature=1.0, range=(-4, 4), points=201)
        ```
    """
    compared = _compare(positions, potential, inverse_temperature, range)
    if compared.x.shape[1] != 1:
        raise ValueError(f"positions must be one-dimensional for wasserstein, got d = {compared.x.shape[1]}")
    if order not in (1, 2):
        raise ValueError(f"order must be 1 or 2, got {order!r}")
    return _wasserstein(compared, order, check_count("points", points, at_least=2))


@eqx.filter_jit
def _wasserstein(compared: _Comparison, order: int, points: int) -> Scalar:
    x, energy, beta, low, high = compared
    grid = jnp.linspace(low[0], high[0], points, dtype=x.dtype)
    minus = -beta * jax.vmap(energy)(grid[:, None])
    density = jnp.exp(minus - minus.max())
    cdf = jnp.append(jnp.zeros(1, x.dtype), jnp.cumsum((density[1:] + density[:-1]) / 2))
    per_position = -(-points // len(x))
    nodes = (jnp.arange(len(x) * per_position, dtype=x.dtype) + 0.5) / (len(x) * per_position)
    gaps = jnp.abs(jnp.repeat(jnp.sort(x[:, 0]), per_position) - jnp.interp(nodes, cdf / cdf[-1], grid))
    return jnp.mean(gaps**order) ** (1 / order)


def _compare(positions: Any, potential: Any, inverse_temperature: Any, range: Any) -> _Comparison:
    """The arguments that both distances have, checked."""
    x = float_array("positions", positions)
    x = x.reshape(-1, x.shape[-1]) if x.ndim == 3 else x
    check_shape("positions", x, (None, None))
    n, d = x.shape
    if n == 0 or not 1 <= d <= 3:
        raise ValueError(f"positions must be non-empty, of dimension 1, 2 or 3, got shape {x.shape}")
    check_positive("inverse_temperature", inverse_temperature)
    low, high = range_ends(range, x)
    return _Comparison(x, getattr(potential, "value", potential), jnp.asarray(inverse_temperature, x.dtype), low, high)
