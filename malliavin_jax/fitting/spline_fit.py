"""The smooth spline nearest to observed gradients and Hessians, its smoothing chosen by restricted likelihood.

In units in which the box is four wide along each axis, so that gradients and Hessians compare, and with rows divided
by the variances v_g and v_H of what is left of them, least squares with a penalty on third differences along each axis
is θ = (A + λP)⁻¹ b, A = A_g/v_g + A_H/v_H, b = b_g/v_g + b_H/v_H. The smoothing λ minimises

    yᵀy − 2θᵀb + θᵀAθ + λ θᵀPθ + log det(A + λP) − rank(P) log λ,

the restricted likelihood of a Gaussian prior with precision λP (Wahba 1985; Wood 2011); then v_g and v_H are
estimated from the residuals, and so on a few times. The posterior covariance (A + λP)⁻¹ gives standard errors that
include the smoothing bias on average (Wahba 1983; Nychka 1988).

All this is done on the host in float64: the matrices are small, and a compiler would take longer than the solution.
"""

import functools
import itertools
import math
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float
from numpy.linalg import LinAlgError
from scipy.linalg import cho_factor, cho_solve

from .bsplines import DEGREE, SUPPORT, in_legendre, products_in_legendre
from .spline_sums import SplineSums

_ROUNDS = 6
_RIDGE = 16  # units of rounding of the sums, of the mean diagonal: cells without data, the constant nothing sees
_TOLERANCE = 0.15  # of log λ: the fit does not feel it
_FLOOR = 1e-3  # least variance of Hessians in units of that of gradients: what is left of exact ones is misfit


class Equations(NamedTuple):
    """A_g, A_H, b_g, b_H, the sums of squares, and the numbers of rows, in units in which the box is four wide."""

    gradient_gram: np.ndarray
    hessian_gram: np.ndarray
    gradient_right: np.ndarray
    hessian_right: np.ndarray
    gradient_squares: float
    hessian_squares: float
    gradient_rows: float
    hessian_rows: float


class Solution(NamedTuple):
    """θ, the Cholesky factor of A + λP, and what was chosen."""

    coefficients: Float[np.ndarray, "..."]
    factor: np.ndarray
    smoothing: float
    gradient_variance: float
    hessian_variance: float
    criterion: float


def equations(sums: SplineSums) -> Equations:
    """The normal equations of least squares on gradients and on Hessians, each by itself."""
    d, shape = sums.dim, sums.intervals
    unit = (np.asarray(sums.high, np.float64) - np.asarray(sums.low, np.float64)) / 4
    per_cell = np.asarray(shape) / 4  # cells in one unit of the box that is four wide
    moments = np.asarray(sums.totals.moments, np.float64).reshape(-1, *(2 * DEGREE + 1,) * d)

    def of_order(order: int, products: Any, squares: Any) -> tuple[np.ndarray, np.ndarray, float]:
        size = math.prod(n + DEGREE for n in shape)
        gram, right, total = np.zeros((size, size)), np.zeros(size), 0.0
        columns = np.asarray(products, np.float64).reshape(len(moments), *(SUPPORT,) * d, -1)
        for number, axes in enumerate(itertools.combinations_with_replacement(range(d), order)):
            orders = tuple(axes.count(i) for i in range(d))
            times = len(set(itertools.permutations(axes)))  # ∂_i∂_j counts for ∂_j∂_i too
            slope = math.prod(per_cell[i] for i in axes)
            y_unit = math.prod(unit[i] for i in axes)
            gram += times * slope**2 * _gram(moments, orders, shape)
            right += times * slope * y_unit * _right(columns[..., number], orders, shape)
            total += times * y_unit**2 * float(squares[number])
        return gram, right, total

    gradient = of_order(1, sums.totals.gradient, sums.totals.gradient_squares)
    if float(sums.totals.hessians) > 0:
        hessian = of_order(2, sums.totals.hessian, sums.totals.hessian_squares)
    else:
        hessian = np.zeros_like(gradient[0]), np.zeros_like(gradient[1]), 0.0
    return Equations(
        gradient_gram=gradient[0], gradient_right=gradient[1], gradient_squares=gradient[2],
        hessian_gram=hessian[0], hessian_right=hessian[1], hessian_squares=hessian[2],
        gradient_rows=float(sums.totals.points) * d, hessian_rows=float(sums.totals.hessians) * d * d,
    )  # fmt: skip


def _gram(moments: np.ndarray, orders: tuple[int, ...], shape: tuple[int, ...]) -> np.ndarray:
    """Σ over points of the products of the basis' derivatives of these orders: blocks of cells, added in place."""
    block = moments
    for order in orders:  # (cells, k, k', …) → (cells, k', …, a b)
        block = np.tensordot(block, products_in_legendre(order).reshape(SUPPORT**2, -1), ((1,), (1,)))
    d = len(orders)
    block = block.reshape(-1, *(SUPPORT, SUPPORT) * d)
    block = np.moveaxis(block, range(2, 2 * d + 1, 2), range(d + 1, 2 * d + 1))  # all a first, then all b
    block = block.reshape(-1, SUPPORT**d, SUPPORT**d)
    where = _coefficients_of_cells(shape)
    size = math.prod(n + DEGREE for n in shape)
    out = np.zeros((size, size))
    for a, b in np.ndindex(block.shape[1:]):
        out[where[:, a], where[:, b]] += block[:, a, b]  # no two cells meet in one entry
    return out


def _right(products: np.ndarray, orders: tuple[int, ...], shape: tuple[int, ...]) -> np.ndarray:
    """Σ over points of y times the basis' derivatives of these orders."""
    for order in orders:
        products = np.tensordot(products, in_legendre(order), ((1,), (1,)))
    where = _coefficients_of_cells(shape)
    size = math.prod(n + DEGREE for n in shape)
    return np.bincount(where.ravel(), products.reshape(where.shape).ravel(), size)


@functools.lru_cache(maxsize=8)
def _coefficients_of_cells(shape: tuple[int, ...]) -> np.ndarray:
    """(cells, 6^d): the numbers of the coefficients that each cell touches."""
    cells, local = (
        np.indices(shape).reshape(len(shape), -1),
        np.indices((SUPPORT,) * len(shape)).reshape(len(shape), -1),
    )
    index = cells[:, :, None] + local[:, None, :]
    return np.asarray(np.ravel_multi_index(tuple(index), tuple(n + DEGREE for n in shape)))


@functools.lru_cache(maxsize=8)
def _penalty(shape: tuple[int, ...]) -> np.ndarray:
    """θᵀPθ = Σ over axes of ∫ (∂³L)², about: squared third differences, in the units of the box that is four wide."""
    sizes = [n + DEGREE for n in shape]
    volume = math.prod(4 / n for n in shape)
    total = np.zeros((math.prod(sizes),) * 2)
    for axis, n in enumerate(sizes):
        difference = np.diff(np.eye(n), 3, axis=0) * (shape[axis] / 4) ** 3
        factors = [difference.T @ difference if i == axis else np.eye(m) for i, m in enumerate(sizes)]
        total += volume * functools.reduce(np.kron, factors)
    return total


def solve(sums: SplineSums, around: Float[np.ndarray, "..."] | None = None) -> Solution:
    """The fit, with λ, v_g and v_H chosen in turn.

    `around` are the coefficients of a spline θ₀ whose gradients and Hessians were taken off the data behind `sums`.
    The equations are then solved for the difference from θ₀, which is small: what rounding spoils in the sums is
    spoilt in proportion to it, so that two passes make float32 data as good as float64.
    """
    parts, penalty = equations(sums), _penalty(sums.intervals)
    center = np.zeros(len(penalty)) if around is None else np.asarray(around, np.float64).ravel()
    ridge = _RIDGE * float(np.finfo(sums.totals.moments.dtype).eps)
    v_g, v_h, start, best = 1.0, 1.0, None, None
    for _ in range(_ROUNDS):
        A = parts.gradient_gram / v_g + parts.hessian_gram / v_h
        problem = Problem(
            A + ridge * np.trace(A) / len(A) * np.eye(len(A)),
            parts.gradient_right / v_g + parts.hessian_right / v_h,
            parts.gradient_squares / v_g + parts.hessian_squares / v_h,
            penalty,
            len(penalty) - 3**sums.dim,
            center,
        )
        best = _least(problem, start)
        start, step = best.log_smoothing, best.step
        v_g = _left(step, parts.gradient_gram, parts.gradient_right, parts.gradient_squares) / parts.gradient_rows
        if parts.hessian_rows > 0:
            v_h = _left(step, parts.hessian_gram, parts.hessian_right, parts.hessian_squares) / parts.hessian_rows
            v_h = max(v_h, _FLOOR * v_g)
    assert best is not None
    theta = center + best.step
    likelihood = best.criterion + parts.gradient_rows * math.log(v_g) + parts.hessian_rows * math.log(v_h)
    shape = tuple(n + DEGREE for n in sums.intervals)
    return Solution(
        (theta - theta.mean()).reshape(shape), best.factor, math.exp(best.log_smoothing), v_g, v_h, likelihood
    )


class Problem(NamedTuple):
    """Minimise yᵀy − 2δᵀb + δᵀAδ + λ (θ₀ + δ)ᵀP(θ₀ + δ) over δ, and the restricted likelihood over λ."""

    gram: np.ndarray
    right: np.ndarray
    squares: float
    penalty: np.ndarray
    rank: int  # of the penalty
    center: np.ndarray


class Attempt(NamedTuple):
    """−2 log restricted likelihood at one smoothing, δ there, and the Cholesky factor of A + λP."""

    criterion: float
    log_smoothing: float
    step: np.ndarray
    factor: np.ndarray


def _attempt(problem: Problem, log_smoothing: float) -> Attempt:
    smoothing = math.exp(log_smoothing)
    pull = smoothing * problem.penalty @ problem.center
    try:
        factor = cho_factor(problem.gram + smoothing * problem.penalty, lower=True)
    except LinAlgError:  # so much smoothing that rounding of the penalty hides the data
        return Attempt(math.inf, log_smoothing, problem.right, problem.gram)
    right = problem.right - pull
    step = cho_solve(factor, right)
    logdet = 2 * float(np.sum(np.log(np.diag(factor[0]))))
    left = float(problem.squares + problem.center @ pull - step @ right)
    return Attempt(left + logdet - problem.rank * log_smoothing, log_smoothing, step, factor[0])


def _least(problem: Problem, start: float | None) -> Attempt:
    """The least criterion over log λ: a coarse grid the first time, then steps that halve."""
    if start is None:
        middle = math.log(np.trace(problem.gram) / np.trace(problem.penalty))
        tried = [_attempt(problem, middle + shift) for shift in np.linspace(-18, 18, 13)]
        step = 1.5
    else:
        tried, step = [_attempt(problem, start)], 1.0
    best = min(tried, key=lambda one: one.criterion)
    while step > _TOLERANCE:
        sides = [_attempt(problem, best.log_smoothing + move) for move in (-step, step)]
        side = min(sides, key=lambda one: one.criterion)
        if side.criterion < best.criterion:
            best = side
        else:
            step /= 2
    return best


def _left(step: np.ndarray, gram: np.ndarray, right: np.ndarray, squares: float) -> float:
    """The sum of squared residuals, never below rounding."""
    return max(float(squares - 2 * step @ right + step @ gram @ step), 1e-12 * squares + 1e-300)
