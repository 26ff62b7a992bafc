"""The loss, from the density of the positions of a chain."""

import math
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Shaped

from .._base.checks import check_count, check_positive, check_shape, float_array, is_concrete
from .._base.types import Scalar
from .loss import Loss

METHODS = ("histogram", "kde")


# --- from samples ----------------------------------------------------------------------------------------


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

    - `positions`: (chains, kept, d), or (kept, d) for one chain.
    - `inverse_temperature`: β of the chain.
    - `bins`, `range`: bins per axis, and (low, high), in d > 1 one pair per axis; without it, the extremes of
      the positions. Positions outside are left out. The grid is the bins' centres.
    - `method`: "histogram", or "kde", the histogram smoothed by a Gaussian kernel.
    - `bandwidth`: the kernel's standard deviation, one or one per axis. The default is half the normal
      reference rule sd·(4/((d+2)·n))^(1/(d+4)) with n the effective number of positions: half, because a loss
      with several wells is narrower than its spread, and the bias it leaves is in no standard error.

    A bin without a position holds NaN, also with "kde": nothing is invented there.

    Standard errors allow for the dependence of successive positions: π̂ is computed for each of U independent
    units, the chains if there are 8 or more, else 32 or so batches of successive positions; the variance
    of log π̂ less its value at the lowest point follows from theirs by the delta method. Batches must be
    longer than the chain's memory. Bias (bin width, kernel, step size of the chain) is not in them.

    ```python
    mj.loss_from_samples(chain.positions, inverse_temperature=1.0, bins=10)
    ```
    """
    x = float_array("positions", positions)
    x = x[None] if x.ndim == 2 else x
    check_shape("positions", x, (None, None, None))
    chains, kept, d = x.shape
    if not 1 <= d <= 3:
        raise ValueError(f"positions must have 1, 2 or 3 dimensions (their last axis), got {d}")
    if chains < 8 and chains * (kept // 2) < 2:
        raise ValueError(f"positions must hold at least 4 positions or 8 chains, got shape {x.shape}")
    if is_concrete(x) and not np.all(np.isfinite(x)):
        bad = np.count_nonzero(~np.isfinite(x).all(-1))
        raise ValueError(f"positions must be finite, got {bad} that are not; leave out the chains that diverged")
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

    batches = 1 if chains >= 8 else min(-(-32 // chains), kept // 2)
    length = kept // batches
    units = x[:, : batches * length].reshape(chains * batches, length, d)
    beta = jnp.asarray(inverse_temperature, x.dtype)
    # Without a range nothing lies outside it; with one, half of it on each side is room for the kernel.
    margins = tuple(0 if range is None else -(-n // 2) for n in counts) if method == "kde" else None
    value, stderr = _log_density(x.reshape(-1, d), units, beta, low, high, bandwidth, counts, margins)
    axes = tuple(_centres(low[i], high[i], n) for i, n in enumerate(counts))
    return Loss(axes[0] if d == 1 else axes, value, stderr)


@eqx.filter_jit
def _log_density(
    points: Float[Array, "n d"],
    units: Float[Array, "units length d"],
    beta: Scalar,
    low: Float[Array, " d"],
    high: Float[Array, " d"],
    bandwidth: Float[Array, " d"] | None,
    bins: tuple[int, ...],
    margins: tuple[int, ...] | None,
) -> tuple[Array, Array]:
    if margins is None:
        density = partial(cell_counts, low=low, high=high, bins=bins)
    else:
        h = _bandwidth(points, units) if bandwidth is None else bandwidth
        density = partial(_smoothed, low=low, high=high, h=h, bins=bins, margins=margins)

    mean = density(points) / len(points)
    filled = cell_counts(points, low, high, bins) > 0
    lowest = jnp.argmax(jnp.where(filled, mean, -1))
    safe = jnp.where(filled, mean, 1)

    def add(sums: tuple[Array, Array], unit: Array) -> tuple[tuple[Array, Array], None]:
        ratio = density(unit) / (unit.shape[0] * safe)
        influence = ratio - ratio.ravel()[lowest]
        return (sums[0] + influence, sums[1] + influence**2), None

    (first, second), _ = jax.lax.scan(add, (jnp.zeros_like(mean), jnp.zeros_like(mean)), units)
    number = len(units)
    variance = (second - first**2 / number) / (number * (number - 1))
    value = (jnp.log(safe.ravel()[lowest]) - jnp.log(safe)) / beta
    stderr = jnp.sqrt(jnp.maximum(variance, 0)) / beta
    return jnp.where(filled, value, jnp.nan), jnp.where(filled, stderr, jnp.inf)


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
        out = jnp.moveaxis(jnp.tensordot(kernel, out, (1, axis)), 0, axis)
    return out


def _bandwidth(points: Array, units: Array) -> Array:
    """Half the normal reference rule, with the number of independent positions that the units' means show."""
    n, d = points.shape
    variance = points.var(0)
    effective = len(units) * variance / jnp.maximum(units.mean(1).var(0, ddof=1), variance / units.shape[1])
    return jnp.sqrt(variance) * (4 / ((d + 2) * jnp.clip(effective.min(), 2, n))) ** (1 / (d + 4)) / 2
