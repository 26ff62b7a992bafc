"""What a spline fit must know of its data: sums over the points of each cell, which add, stream, shard and forget.

With s ∈ [−1, 1]^d the place of a point in its cell, P_k the product of Legendre polynomials of orders k, and w its
weight, the sums are, for each cell,

    Σ w P_k(s), k ≤ 10 along each axis;   Σ w g_i P_k(s) and Σ w H_ij P_k(s), k ≤ 5 along each axis.

The normal equations of least squares on gradients and Hessians are linear in them (see `spline_fit.py`), for every
smoothing and every weighing of gradients against Hessians: no design matrix is ever formed, and no point is needed
twice. Sums of two data sets on one mesh are added; a sum multiplied by a factor below one forgets.
"""

import functools
import itertools
import math
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, Float
from scipy.sparse import csr_array

from .._base import host, mesh
from .._base.types import Scalar, Vector
from .bsplines import DEGREE, SUPPORT, legendre_values

_ON_HOST = 7_000_000  # moments of points up to which the host is as fast, or slower by less than a compiler takes
_AT_ONCE = 100_000  # moments of points that are looked at together on the host: what fits in the cache


class Totals(NamedTuple):
    """The sums themselves. The pairs of a Hessian are its entries (i, j) with i ≤ j."""

    moments: Float[Array, "cells k10"]
    gradient: Float[Array, "cells k5 d"]
    hessian: Float[Array, "cells k5 pairs"]
    gradient_squares: Float[Array, " d"]
    hessian_squares: Float[Array, " pairs"]
    points: Scalar  # the sum of the weights
    hessians: Scalar  # the same over points with a Hessian: all of them, or 0


class SplineSums(eqx.Module):
    """Sums on a mesh of `intervals` cells along each axis of the box from `low` to `high`, in float64.

    `diagonal`: of Hessians only their diagonals were observed, and their other entries count nowhere.
    """

    low: Vector
    high: Vector
    totals: Totals
    intervals: tuple[int, ...] = eqx.field(static=True)
    diagonal: bool = eqx.field(static=True, default=False)

    @property
    def dim(self) -> int:
        return len(self.intervals)

    def __add__(self, other: "SplineSums") -> "SplineSums":
        with jax.enable_x64(True):
            return self.having(jax.tree.map(jnp.add, self.totals, other.totals))

    def scaled(self, factor: float | Scalar) -> "SplineSums":
        """Every sum times `factor`."""
        with jax.enable_x64(True):
            return self.having(jax.tree.map(lambda leaf: leaf * jnp.asarray(factor, leaf.dtype), self.totals))

    def having(self, totals: Totals) -> "SplineSums":
        """The same mesh with other sums."""
        return SplineSums(self.low, self.high, totals, self.intervals, self.diagonal)


def no_sums(
    low: Float[ArrayLike, " d"], high: Float[ArrayLike, " d"], intervals: tuple[int, ...], diagonal: bool = False
) -> SplineSums:
    """The sums over no points."""
    d, cells = len(intervals), math.prod(intervals)
    local, pairs = SUPPORT**d, d * (d + 1) // 2
    shapes = ((cells, (2 * DEGREE + 1) ** d), (cells, local, d), (cells, local, pairs), (d,), (pairs,), (), ())
    with jax.enable_x64(True):
        start, stop = (host.to_device(np.asarray(end), np.float64) for end in (low, high))
        totals = Totals(*(host.to_device(np.zeros(shape)) for shape in shapes))
        return SplineSums(start, stop, totals, intervals, diagonal)


def box_of(x: Array, weights: Array) -> tuple[np.ndarray, np.ndarray]:
    """The box of the points that count, in float64."""
    seen = np.asarray(x, np.float64)[np.asarray(weights) > 0]
    low, high = (end(seen, axis=0) if len(seen) else np.zeros(x.shape[1]) for end in (np.min, np.max))
    if not np.all(high > low):
        raise ValueError(f"x must hold points that differ along each axis, got a box from {low} to {high}")
    return low, high


def sums_of_points(on: SplineSums, x: Any, gradient: Any, hessian: Any | None, weights: Any, xp: Any = jnp) -> Totals:
    """The totals of some points: x and gradient (n, d), hessian (n, d, d) or None, weights (n,).

    Where a weight is 0 the data may hold NaN. Points outside the box are left out: no cell holds them. `xp`
    is what to compute with, `jax.numpy` or NumPy.
    """
    d, cells = on.dim, math.prod(on.intervals)
    low, high, counts = (xp.asarray(each, x.dtype) for each in (on.low, on.high, on.intervals))
    t = (x - low[None]) / (high - low)[None] * counts[None]
    used = (weights > 0) & xp.all((t >= 0) & (t <= counts[None]), 1)
    t = xp.where(used[:, None], t, 0)
    cell = xp.minimum(xp.floor(t), counts[None] - 1)
    s = 2 * (t - cell) - 1
    flat = xp.ravel_multi_index(tuple(cell.astype(np.int32).T), on.intervals, mode="clip")
    w = xp.where(used, weights, 0)
    axes = [legendre_values(s[:, i], 2 * DEGREE, xp) for i in range(d)]
    local = _outer([axis[:, :SUPPORT] for axis in axes])
    g = xp.where(used[:, None], gradient, 0)
    columns = [g]
    if hessian is not None:
        H = xp.where(used[:, None, None], hessian, 0)
        columns.append(xp.stack([(H[:, i, j] + H[:, j, i]) / 2 for i in range(d) for j in range(i, d)], 1))
    y = xp.concatenate(columns, 1)
    rows = [_outer(axes), (local[:, :, None] * y[:, None, :]).reshape(len(x), -1), xp.ones_like(w)[:, None], y**2]
    ends = list(itertools.accumulate(row.shape[1] for row in rows))[:-1]
    added = _by_cell(xp.concatenate(rows, 1) * w[:, None], flat, cells)
    moments, products, counts_of_cells, squares = xp.split(added, ends, 1)
    products, squares = products.reshape(cells, -1, y.shape[1]), xp.sum(squares, 0)
    points = xp.sum(counts_of_cells)
    if hessian is None:
        rest = xp.zeros_like(on.totals.hessian), xp.zeros_like(on.totals.hessian_squares), xp.zeros_like(points)
    else:
        rest = products[..., d:], squares[d:], points
    by_hessian, hessian_squares, hessians = rest
    return Totals(moments, products[..., :d], by_hessian, squares[:d], hessian_squares, points, hessians)


def _by_cell(rows: Any, cell: Any, cells: int) -> Any:
    """The sums of the rows that belong to each cell."""
    if isinstance(rows, np.ndarray):
        return csr_array((np.ones(len(rows)), cell, np.arange(len(rows) + 1)), shape=(len(rows), cells)).T @ rows
    return jax.ops.segment_sum(rows, cell, cells)


def _outer(axes: list[Any]) -> Any:
    """Row by row the outer product of the axes, flattened, the last axis running fastest."""
    return functools.reduce(lambda a, b: (a[:, :, None] * b[:, None, :]).reshape(a.shape[0], -1), axes)


def add_points(
    sums: SplineSums, x: Array, gradient: Array, hessian: Array | None, weights: Array, *, chunk_size: int = 4096
) -> SplineSums:
    """`sums` with points added, chunk by chunk, in float64 whatever the dtype of the points.

    A second derivative of a spline is a difference of coefficients divided by the square of a small width: with sums
    in float32 what exact Hessians say would drown in rounding.
    """
    with jax.enable_x64(True):
        if mesh.parts() > 1 and x.shape[0] % mesh.parts() == 0:
            empty = sums.having(jax.tree.map(jnp.zeros_like, sums.totals))
            return sums + empty.having(_over_devices(empty, x, gradient, hessian, weights, chunk_size))
        is_small = x.shape[0] * sums.totals.moments.shape[1] <= _ON_HOST
        if is_small and host.on_host(sums, x, gradient, hessian, weights):
            return _add_on_host(sums, x, gradient, hessian, weights)
        return _add_points(sums, x, gradient, hessian, weights, chunk_size)


def _add_on_host(sums: SplineSums, x: Array, *rest: Array | None) -> SplineSums:
    """With NumPy: nothing to compile for every mesh and every number of points."""
    total, size = [np.asarray(leaf) for leaf in sums.totals], _AT_ONCE // sums.totals.moments.shape[1] + 1
    arrays = [None if array is None else np.asarray(array) for array in (x, *rest)]
    for start in range(0, len(x), size):
        part = (None if array is None else array[start : start + size].astype(np.float64) for array in arrays)
        total = [np.add(old, new) for old, new in zip(total, sums_of_points(sums, *part, xp=np), strict=True)]
    return sums.having(Totals(*map(host.to_device, total)))


@functools.partial(jax.jit, static_argnums=5)
def _over_devices(
    empty: SplineSums, x: Array, gradient: Array, hessian: Array | None, weights: Array, chunk_size: int
) -> Totals:
    """The totals of points that are split over devices: each sums its own, and only sums travel."""

    def own(*part: Array) -> Totals:
        h = part[3] if len(part) == 4 else None
        return _add_points(empty, part[0], part[1], h, part[2], chunk_size).totals

    given = (x, gradient, weights) if hessian is None else (x, gradient, weights, hessian)
    return mesh.total_over_devices(own, *given)


@functools.partial(jax.jit, static_argnums=5)
def _add_points(
    sums: SplineSums, x: Array, gradient: Array, hessian: Array | None, weights: Array, chunk_size: int
) -> SplineSums:
    n = x.shape[0]
    chunks = -(-n // chunk_size)

    def tiles(array: Array) -> Array:
        filled = jnp.pad(array, [(0, chunks * chunk_size - n)] + [(0, 0)] * (array.ndim - 1))
        return filled.reshape(chunks, chunk_size, *array.shape[1:])

    def add(total: Totals, part: tuple[Array, Array, Array | None, Array]) -> tuple[Totals, None]:
        new = sums_of_points(sums, *jax.tree.map(lambda array: array.astype(jnp.float64), part))
        return jax.tree.map(jnp.add, total, new), None

    parts = (tiles(x), tiles(gradient), None if hessian is None else tiles(hessian), tiles(weights))
    return sums.having(lax.scan(add, sums.totals, parts)[0])
