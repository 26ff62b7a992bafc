"""The loss, from the density of the positions of a chain."""

import math
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Shaped

from .._base.checks import check_count, check_positive, check_shape, described, float_array, is_concrete
from .._base.small_tensors import HIGHEST
from .._base.types import Scalar
from .loss import Loss

METHODS = ("histogram", "kde")
_MANY_CHAINS = 8  # from here on the chains themselves are the independent units of the standard errors
_UNITS = 32  # of successive positions, where there are fewer chains


class LogDensity(NamedTuple):
    """−log π̂/β in each bin, fixed by its minimum 0, and its standard error."""

    value: Float[Array, "..."]
    stderr: Float[Array, "..."]


class Moments(NamedTuple):
    """Sums over the independent units."""

    first: Float[Array, "..."]
    second: Float[Array, "..."]


def loss_from_samples(
    positions: Shaped[ArrayLike, "..."],
    *,
    inverse_temperature: Any,
    bins: int | tuple[int, ...] = 40,
    range: Any = None,
    method: str = "histogram",
    bandwidth: Any = None,
) -> Loss:
    """L̂ = −β⁻¹ log π̂ with π̂ the density of positions drawn from exp(−βL), d = 1, 2 or 3.

    A bin without a position holds NaN, also with "kde": nothing is invented there.

    Standard errors allow for the dependence of successive positions: π̂ is computed for each of U independent
    units, the chains if there are 8 or more, else 32 or so batches of successive positions; the variance
    of log π̂ less its value at the lowest point follows from theirs by the delta method. Batches must be
    longer than the chain's memory. Bias (bin width, kernel, step size of the chain) is not in them.

    Args:
        positions: (chains, kept, d), or (kept, d) for one chain.
        inverse_temperature: β of the chain.
        bins: how many on each axis, one number or one for each axis; the grid is their centres.
        range: (low, high), in d > 1 one pair for each axis; positions outside are left out. Without it, the extremes
            of the positions.
        method: "histogram", or "kde", the histogram smoothed by a Gaussian kernel.
        bandwidth: the kernel's standard deviation, one number or one for each axis. The default is half the normal
            reference rule sd·(4/((d+2)·n))^(1/(d+4)) with n the effective number of positions: half, because a loss
            with several wells is narrower than its spread, and the bias that smoothing leaves is in no standard error.

    Returns:
        The loss on the centres of the bins.

    Raises:
        ValueError: if positions are not finite, too few or of more than 3 dimensions, or if another argument is out of
            its range.

    Example:
        ```python
        import jax
        import malliavin_jax as mj

        positions = jax.random.normal(jax.random.key(0), (8, 1000, 1))  # of a chain on L(x) = x²/2
        loss = mj.loss_from_samples(positions, inverse_temperature=1.0, bins=10)
        loss.value, loss.stderr
        ```
    """
    x = _checked_positions(positions)
    d = x.shape[-1]
    check_positive("inverse_temperature", inverse_temperature)
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {method!r}")
    counts = bins if isinstance(bins, tuple) else (bins,) * d
    check_shape("bins", counts, (d,))
    counts = tuple(check_count("bins", n, at_least=2) for n in counts)
    low, high = range_ends(range, x.reshape(-1, d))
    if bandwidth is not None:
        check_positive("bandwidth", bandwidth)
        bandwidth = jnp.broadcast_to(jnp.asarray(bandwidth, x.dtype), (d,))

    # Without a range nothing lies outside it; with one, half of it on each side is room for the kernel.
    margins = tuple(0 if range is None else -(-n // 2) for n in counts) if method == "kde" else None
    log_density = _log_density(
        x.reshape(-1, d),
        _units(x),
        jnp.asarray(inverse_temperature, x.dtype),
        low=low,
        high=high,
        bandwidth=bandwidth,
        bins=counts,
        margins=margins,
    )
    axes = tuple(_centres(low[i], high[i], n) for i, n in enumerate(counts))
    return Loss(axes[0] if d == 1 else axes, log_density.value, log_density.stderr)


def _checked_positions(positions: Shaped[ArrayLike, "..."]) -> Float[Array, "chains kept d"]:
    """Positions with an axis of chains: finite, in 1 to 3 dimensions, enough for standard errors."""
    if hasattr(positions, "positions"):
        raise ValueError(f"positions must be an array, got {described(positions)}: pass chain.positions")
    x = float_array("positions", positions)
    x = x[None] if x.ndim == 2 else x
    check_shape("positions", x, (None, None, None), "chains kept d", "in one dimension add the last axis, [..., None]")
    chains, kept, d = x.shape
    if not 1 <= d <= 3:
        raise ValueError(f"positions must have 1, 2 or 3 dimensions (their last axis), got {d}")
    if chains < _MANY_CHAINS and chains * (kept // 2) < 2:
        raise ValueError(f"positions must hold at least 4 positions or {_MANY_CHAINS} chains, got shape {x.shape}")
    if is_concrete(x) and not np.all(np.isfinite(x)):
        bad = np.count_nonzero(~np.isfinite(x).all(-1))
        raise ValueError(f"positions must be finite, got {bad} that are not; leave out the chains that diverged")
    return x


def _units(x: Float[Array, "chains kept d"]) -> Float[Array, "units each d"]:
    """The chains, or batches of successive positions of few chains."""
    chains, kept, d = x.shape
    batches = 1 if chains >= _MANY_CHAINS else min(-(-_UNITS // chains), kept // 2)
    each = kept // batches
    return x[:, : batches * each].reshape(chains * batches, each, d)


@eqx.filter_jit
def _log_density(
    points: Float[Array, "n d"],
    units: Float[Array, "units each d"],
    beta: Scalar,
    *,
    low: Float[Array, " d"],
    high: Float[Array, " d"],
    bandwidth: Float[Array, " d"] | None,
    bins: tuple[int, ...],
    margins: tuple[int, ...] | None,
) -> LogDensity:
    if margins is None:
        density = partial(cell_counts, low=low, high=high, bins=bins)
    else:
        h = _bandwidth(points, units) if bandwidth is None else bandwidth
        density = partial(_smoothed, low=low, high=high, h=h, bins=bins, margins=margins)

    mean = density(points) / len(points)
    filled = cell_counts(points, low, high, bins) > 0
    lowest = jnp.argmax(jnp.where(filled, mean, -1))
    safe = jnp.where(filled, mean, 1)

    def add(sums: Moments, unit: Array) -> tuple[Moments, None]:
        ratio = density(unit) / (unit.shape[0] * safe)
        influence = ratio - ratio.ravel()[lowest]
        return Moments(sums.first + influence, sums.second + influence**2), None

    sums, _ = jax.lax.scan(add, Moments(jnp.zeros_like(mean), jnp.zeros_like(mean)), units)
    number = len(units)
    variance = (sums.second - sums.first**2 / number) / (number * (number - 1))
    value = (jnp.log(safe.ravel()[lowest]) - jnp.log(safe)) / beta
    stderr = jnp.sqrt(jnp.maximum(variance, 0)) / beta
    return LogDensity(jnp.where(filled, value, jnp.nan), jnp.where(filled, stderr, jnp.inf))


def range_ends(range: Any, x: Float[Array, "n d"]) -> tuple[Float[Array, " d"], Float[Array, " d"]]:
    """The ends of the range along each axis; without one, the extremes of x."""
    if range is None:
        low, high = x.min(0), x.max(0)
    else:
        pairs = jnp.asarray(range, x.dtype)
        pairs = pairs[None] if pairs.ndim == 1 else pairs
        check_shape("range", pairs, (x.shape[1], 2))
        low, high = pairs.T
    if is_concrete(low, high) and not np.all(np.asarray(low) < np.asarray(high)):
        raise ValueError(f"range must run from low to high on each axis, got {low} to {high}")
    return low, high


def _centres(low: Array, high: Array, n: int) -> Array:
    return low + (high - low) * (jnp.arange(n, dtype=low.dtype) + 0.5) / n


def cell_counts(points: Array, low: Array, high: Array, bins: tuple[int, ...]) -> Array:
    """Counts of the points in each bin; a point on the upper edge is in the last one, as in NumPy."""
    cell = jnp.floor((points - low[None]) / (high - low)[None] * jnp.asarray(bins, points.dtype)[None])
    last = jnp.asarray(bins, jnp.int32) - 1
    inside = jnp.all((points >= low[None]) & (points <= high[None]), 1)
    index = jnp.minimum(cell.astype(jnp.int32), last[None])
    total = math.prod(bins)
    flat = jnp.ravel_multi_index(tuple(index.T), bins, mode="clip")
    counts = jnp.bincount(jnp.where(inside, flat, total), length=total + 1)[:-1]
    return counts.reshape(bins).astype(points.dtype)


def _smoothed(
    points: Array, low: Array, high: Array, h: Array, bins: tuple[int, ...], margins: tuple[int, ...]
) -> Array:
    """Kernel density (times n) at the bins' centres, from finer counts that go `margins` bins past the range.

    Moving a point to the centre of its fine bin, of width δ, adds δ²/12 to the kernel's variance; the kernel
    is narrowed by as much.
    """
    per_bin = {1: 8, 2: 2, 3: 1}[len(bins)]
    fine = tuple((n + 2 * m) * per_bin for n, m in zip(bins, margins, strict=True))
    reach = (high - low) * jnp.asarray([m / n for m, n in zip(margins, bins, strict=True)], low.dtype)
    out = cell_counts(points, low - reach, high + reach, fine)
    for axis, (n, n_fine) in enumerate(zip(bins, fine, strict=True)):
        to = _centres(low[axis], high[axis], n)
        at = _centres(low[axis] - reach[axis], high[axis] + reach[axis], n_fine)
        step = at[1] - at[0]
        variance = jnp.maximum(h[axis] ** 2 - step**2 / 12, step**2 / 4)
        kernel = jnp.exp(-((to[:, None] - at[None]) ** 2) / (2 * variance)) / jnp.sqrt(2 * jnp.pi * variance)
        out = jnp.moveaxis(jnp.tensordot(kernel, out, (1, axis), precision=HIGHEST), 0, axis)
    return out


def _bandwidth(points: Array, units: Array) -> Array:
    """Half the normal reference rule, with the number of independent positions that the units' means show."""
    n, d = points.shape
    variance = points.var(0)
    effective = len(units) * variance / jnp.maximum(units.mean(1).var(0, ddof=1), variance / units.shape[1])
    return jnp.sqrt(variance) * (4 / ((d + 2) * jnp.clip(effective.min(), 2, n))) ** (1 / (d + 4)) / 2
