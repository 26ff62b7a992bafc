"""The normal equations of a spline's fit, from the sums over its data, by their diagonals.

Unknowns that share no cell do not meet: along an axis a coefficient meets the five next to it, so the matrices have few
diagonals that are not zero, and these are all that is kept of them. Everything is in units in which the box is four
wide along each axis, so that gradients and Hessians compare, on the host and in float64.
"""

import functools
import itertools
import math
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float
from scipy import sparse

from .._base.host import on_one_thread
from .bsplines import DEGREE, SUPPORT, in_legendre, products_in_legendre
from .spline_sums import SplineSums

# Data are never taken for more exact than this part of their squares. Where the equations say 10¹² times as much as the
# prior, rounding of them outweighs the prior in cells without data, which then hold anything.
_EXACT = 1e-9

Band = Float[np.ndarray, "band p"]  # row k: the k-th diagonal below the main one


class Equations(NamedTuple):
    """A_g, A_H, b_g, b_H, the sums of squares, and the numbers of rows."""

    gradient_gram: Band
    hessian_gram: Band
    gradient_right: Float[np.ndarray, " p"]
    hessian_right: Float[np.ndarray, " p"]
    gradient_squares: float
    hessian_squares: float
    gradient_rows: float
    hessian_rows: float


def added(first: Equations, second: Equations) -> Equations:
    """The equations of two data sets together."""
    return Equations(*(a + b for a, b in zip(first, second, strict=True)))  # type: ignore[arg-type]


@on_one_thread
def equations(sums: SplineSums) -> Equations:
    """The normal equations of least squares on gradients and on Hessians, each by itself."""
    d, shape = sums.dim, sums.intervals
    unit = (np.asarray(sums.high, np.float64) - np.asarray(sums.low, np.float64)) / 4
    per_cell = np.asarray(shape) / 4  # cells in one unit of the box that is four wide
    moments = np.asarray(sums.totals.moments, np.float64).reshape(*shape, *(2 * DEGREE + 1,) * d)

    def of_order(order: int, products: Any, squares: Any) -> tuple[np.ndarray, np.ndarray, float]:
        size = math.prod(n + DEGREE for n in shape)
        gram, right, total = 0.0, np.zeros(size), 0.0
        squares, columns = np.asarray(squares), np.asarray(products, np.float64).reshape(*shape, *(SUPPORT,) * d, -1)
        for number, axes in enumerate(itertools.combinations_with_replacement(range(d), order)):
            if sums.diagonal and len(set(axes)) > 1:
                continue  # an entry beside the diagonal, which was not observed
            orders = tuple(axes.count(i) for i in range(d))
            times = len(set(itertools.permutations(axes)))  # ∂_i∂_j counts for ∂_j∂_i too
            slope = math.prod(per_cell[i] for i in axes)
            y_unit = math.prod(unit[i] for i in axes)
            gram = gram + times * slope**2 * _gram(moments, orders, shape)
            right += times * slope * y_unit * _right(columns[..., number], orders, shape)
            total += times * y_unit**2 * float(squares[number])
        return banded(_full(np.asarray(gram), shape), shape), right, total

    gradient = of_order(1, sums.totals.gradient, sums.totals.gradient_squares)
    if float(sums.totals.hessians) > 0:
        hessian = of_order(2, sums.totals.hessian, sums.totals.hessian_squares)
    else:
        hessian = np.zeros_like(gradient[0]), np.zeros_like(gradient[1]), 0.0
    return Equations(
        gradient_gram=gradient[0], gradient_right=gradient[1], gradient_squares=gradient[2],
        hessian_gram=hessian[0], hessian_right=hessian[1], hessian_squares=hessian[2],
        gradient_rows=float(sums.totals.points) * d,
        hessian_rows=float(sums.totals.hessians) * d * (1 if sums.diagonal else d),
    )  # fmt: skip


def _gram(moments: np.ndarray, orders: tuple[int, ...], shape: tuple[int, ...]) -> np.ndarray:
    """Σ over points of the products of the basis' derivatives of these orders, one axis after the other.

    Each axis has two in the result: entry (i, k) is of the B-splines i and i + k. That is all: the products of an axis
    are symmetric, and B-splines further apart than five share no cell.
    """
    d, block = len(shape), moments
    for axis, (order, n) in enumerate(zip(orders, shape, strict=True)):
        # The first axis left is that of cells, and d − axis further on stands that of Legendre orders.
        in_cells = np.tensordot(products_in_legendre(order), block, ((2,), (d - axis,)))
        total = np.zeros((n + DEGREE, SUPPORT, *in_cells.shape[3:]))
        for a, b in itertools.combinations_with_replacement(range(SUPPORT), 2):
            total[a : a + n, b - a] += in_cells[a, b]
        block = np.moveaxis(total, (0, 1), (-2, -1))
    return block


def _full(pairs: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The matrix whose entries `_gram` has."""
    d, block = len(shape), pairs
    for n in shape:
        i, j = np.indices((n + DEGREE, n + DEGREE))
        apart = np.abs(i - j)
        place = np.where(apart < SUPPORT, np.minimum(i, j) * SUPPORT + apart, (n + DEGREE) * SUPPORT)
        rows = block.reshape(-1, *block.shape[2:])
        rows = np.concatenate([rows, np.zeros_like(rows[:1])])  # what is further apart
        block = np.moveaxis(rows[place], (0, 1), (-2, -1))
    size = math.prod(n + DEGREE for n in shape)
    return block.transpose(*range(0, 2 * d, 2), *range(1, 2 * d, 2)).reshape(size, size)


def _right(products: np.ndarray, orders: tuple[int, ...], shape: tuple[int, ...]) -> np.ndarray:
    """Σ over points of y times the basis' derivatives of these orders."""
    d, block = len(shape), products
    for axis, (order, n) in enumerate(zip(orders, shape, strict=True)):
        in_cells = np.tensordot(in_legendre(order), block, ((1,), (d - axis,)))
        total = np.zeros((n + DEGREE, *in_cells.shape[2:]))
        for a in range(SUPPORT):
            total[a : a + n] += in_cells[a]
        block = np.moveaxis(total, 0, -1)
    return block.ravel()


ORDER = 3  # of the differences that are penalised, unless said otherwise


@functools.lru_cache(maxsize=8)
def penalty_of(shape: tuple[int, ...], order: int = ORDER) -> sparse.csr_array:
    """θᵀPθ = Σ over axes of ∫ (∂^order L)², about: squared differences, in the units of the box that is four wide."""
    sizes = [n + DEGREE for n in shape]
    total = sparse.csr_array((math.prod(sizes),) * 2)
    for axis in range(len(sizes)):
        difference = scaled_differences(shape, axis, order)
        factors = [difference.T @ difference if i == axis else np.eye(m) for i, m in enumerate(sizes)]
        total = total + functools.reduce(sparse.kron, map(sparse.csr_array, factors))
    return sparse.csr_array(total)


def scaled_differences(shape: tuple[int, ...], axis: int, order: int) -> Float[np.ndarray, "rows basis"]:
    """Differences of the coefficients along one axis, so scaled that their squares add up to an integral."""
    n, volume = shape[axis], math.prod(4 / n for n in shape)
    return np.diff(np.eye(n + DEGREE), order, axis=0) * (n / 4) ** order * math.sqrt(volume)


def bandwidth(shape: tuple[int, ...]) -> int:
    """How far from the diagonal the last entry that is not zero lies."""
    sizes = [n + DEGREE for n in shape]
    return min(DEGREE * sum(math.prod(sizes[i + 1 :]) for i in range(len(sizes))), math.prod(sizes) - 1)


def banded(matrix: Any, shape: tuple[int, ...]) -> Band:
    """The diagonals of a symmetric matrix, dense or sparse."""
    width, p = bandwidth(shape), matrix.shape[0]
    band = np.zeros((width + 1, p))
    for k in range(width + 1):
        band[k, : p - k] = matrix.diagonal(-k)
    return band


def dense(band: Band) -> Float[np.ndarray, "p p"]:
    """The symmetric matrix of these diagonals."""
    width, p = band.shape
    matrix = np.zeros((p + width, p))
    size, views = matrix.itemsize, np.lib.stride_tricks.as_strided
    # Row k of such a view is the k-th diagonal above, or below, the main one. What a diagonal of `band` has beyond its
    # end, zeros, goes from above to where the view below writes last or nothing is, and from below to rows cut off.
    views(matrix, band.shape, (size, (p + 1) * size))[...] = band
    views(matrix, band.shape, (p * size, (p + 1) * size))[...] = band
    return matrix[:p]


def quadratic_form(band: Band, theta: Float[np.ndarray, " p"]) -> float:
    """θᵀAθ."""
    p = len(theta)
    off = sum(float(band[k, : p - k] @ (theta[: p - k] * theta[k:])) for k in range(1, len(band)))
    return float(band[0] @ theta**2) + 2 * off


def squares_left(theta: Float[np.ndarray, " p"], band: Band, right: Float[np.ndarray, " p"], squares: float) -> float:
    """The sum of squared residuals, never below what counts as exact."""
    return max(squares - 2 * float(theta @ right) + quadratic_form(band, theta), _EXACT * squares + 1e-300)
