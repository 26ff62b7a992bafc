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
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, Float

from .._base import mesh
from .._base.types import Scalar, Vector
from .bsplines import DEGREE, SUPPORT, legendre_values


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
        start, stop = (jnp.asarray(np.asarray(end), jnp.float64) for end in (low, high))
        totals = Totals(*(jnp.zeros(shape, jnp.float64) for shape in shapes))
        return SplineSums(start, stop, totals, intervals, diagonal)


def sums_of_points(on: SplineSums, x: Array, gradient: Array, hessian: Array | None, weights: Array) -> Totals:
    """The totals of some points: x and gradient (n, d), hessian (n, d, d) or None, weights (n,).

    Where a weight is 0 the data may hold NaN. Points outside the box are left out: no cell holds them.
    """
    d, cells = on.dim, math.prod(on.intervals)
    counts = jnp.asarray(on.intervals, x.dtype)
    t = (x - on.low[None]) / (on.high - on.low)[None] * counts[None]
    used = (weights > 0) & jnp.all((t >= 0) & (t <= counts[None]), 1)
    t = jnp.where(used[:, None], t, 0)
    cell = jnp.minimum(jnp.floor(t), counts[None] - 1)
    s = 2 * (t - cell) - 1
    flat = jnp.ravel_multi_index(tuple(cell.astype(jnp.int32).T), on.intervals, mode="clip")
    w = jnp.where(used, weights, 0)
    axes = [legendre_values(s[:, i], 2 * DEGREE) for i in range(d)]
    local = _outer([axis[:, :SUPPORT] for axis in axes])
    g = jnp.where(used[:, None], gradient, 0)
    columns = [g]
    if hessian is not None:
        H = jnp.where(used[:, None, None], hessian, 0)
        columns.append(jnp.stack([(H[:, i, j] + H[:, j, i]) / 2 for i in range(d) for j in range(i, d)], 1))
    y = jnp.concatenate(columns, 1)
    rows = [_outer(axes), (local[:, :, None] * y[:, None, :]).reshape(len(x), -1), jnp.ones_like(w)[:, None], y**2]
    ends = list(itertools.accumulate(row.shape[1] for row in rows))[:-1]
    added = jax.ops.segment_sum(jnp.concatenate(rows, 1) * w[:, None], flat, cells)
    moments, products, counts_of_cells, squares = jnp.split(added, ends, 1)
    products, squares = products.reshape(cells, -1, y.shape[1]), jnp.sum(squares, 0)
    points = jnp.sum(counts_of_cells)
    if hessian is None:
        rest = jnp.zeros_like(on.totals.hessian), jnp.zeros_like(on.totals.hessian_squares), jnp.zeros_like(points)
    else:
        rest = products[..., d:], squares[d:], points
    by_hessian, hessian_squares, hessians = rest
    return Totals(moments, products[..., :d], by_hessian, squares[:d], hessian_squares, points, hessians)


def _outer(axes: list[Array]) -> Array:
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
        return _add_points(sums, x, gradient, hessian, weights, chunk_size)


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
