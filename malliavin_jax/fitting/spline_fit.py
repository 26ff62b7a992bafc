"""The smooth spline nearest to observed gradients and Hessians, its smoothing chosen by restricted likelihood.

In the units of `spline_equations.py`, and with rows divided by the variances v_g and v_H of what is left of them,
least squares with a penalty on third differences along each axis is θ = (A + λP)⁻¹ b, A = A_g/v_g + A_H/v_H,
b = b_g/v_g + b_H/v_H. The smoothing λ minimises

    yᵀy − 2θᵀb + θᵀAθ + λ θᵀPθ + log det(A + λP) − rank(P) log λ,

the restricted likelihood of a Gaussian prior with precision λP (Wahba 1985; Wood 2011); then v_g and v_H are
estimated from the residuals, and so on a few times. The posterior covariance (A + λP)⁻¹ gives standard errors that
include the smoothing bias on average (Wahba 1983; Nychka 1988).

All this is done on the host in float64: the matrices are small, and a compiler would take longer than the solution.
"""

import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from numpy.linalg import LinAlgError
from scipy.linalg import cho_solve_banded, cholesky_banded

from .bsplines import DEGREE
from .spline_equations import Band, Equations, banded_penalty, log_prior_volume, squares_left

_ROUNDS = 6
_RIDGE = 16  # units of rounding of the sums, of the mean diagonal, for cells without data
_MORE = 1e3  # by how much the ridge grows where that is not enough
_TOLERANCE = 0.2  # of log λ: the fit does not feel it
_LESS = (0.0, -4.0, -8.0, -12.0, -18.0, -24.0, -30.0, -36.0)  # steps of log λ from a coarser mesh's
_MOST = 1e9  # of the penalty's diagonal, in units of that of the data: beyond, its rounding hides what the data say
_SETTLED = 0.02  # of the logarithms of the variances
_MOVES = 20  # of the search for λ, at most
_FLOOR = 1e-3  # least variance of Hessians in units of that of gradients: what is left of exact ones is misfit


class Tuning(NamedTuple):
    """What a fit chooses besides θ: the smoothing λ (by its logarithm), and the variances v_g and v_H."""

    log_smoothing: float
    gradient_variance: float
    hessian_variance: float


class Solution(NamedTuple):
    """θ, the Cholesky factor of A + λP, and what was chosen."""

    coefficients: Float[np.ndarray, "..."]
    factor: Band
    tuning: Tuning
    criterion: float  # −2 log restricted likelihood

    def solve(self, right: Float[np.ndarray, "p *n"]) -> Float[np.ndarray, "p *n"]:
        """(A + λP)⁻¹ times `right`."""
        return cho_solve_banded((self.factor, True), right)


def solve(shape: tuple[int, ...], parts: Equations, start: Tuning | None = None) -> Solution:
    """The fit on a mesh, with λ, v_g and v_H chosen in turn, beginning at `start` where one is known."""
    tuning, best = start, None
    for number in range(_ROUNDS):
        variances = (1.0, 1.0) if tuning is None else (tuning.gradient_variance, tuning.hessian_variance)
        problem = _problem(shape, parts, *variances)
        place = None if tuning is None else tuning.log_smoothing
        if place is not None and number == 0:
            # What a coarser mesh took for noise a finer one may resolve, with much less smoothing: look there too.
            place = min((_attempt(problem, place + shift) for shift in _LESS), key=_criterion).log_smoothing
        best = _least(problem, place)
        if not math.isfinite(best.criterion):
            best = _firm_attempt(problem, best.log_smoothing)
        last, tuning = tuning, Tuning(best.log_smoothing, *_variances(parts, best.theta))
        if last is not None and _is_settled(last, tuning):
            break
    assert best is not None
    assert tuning is not None
    return _solution(shape, parts, tuning, best)


def refit(shape: tuple[int, ...], parts: Equations, tuning: Tuning) -> Solution:
    """The fit to other data, with a tuning chosen before: one factorisation."""
    problem = _problem(shape, parts, tuning.gradient_variance, tuning.hessian_variance)
    return _solution(shape, parts, tuning, _firm_attempt(problem, tuning.log_smoothing))


def _problem(shape: tuple[int, ...], parts: Equations, v_g: float, v_h: float) -> "Problem":
    A = parts.gradient_gram / v_g + parts.hessian_gram / v_h
    A[0] += _RIDGE * float(np.finfo(A.dtype).eps) * np.mean(A[0])
    # No derivative sees a constant: one coefficient is held near 0, which changes nothing else, and leaves no direction
    # in which rounding alone decides whether the matrix is positive.
    held = int(np.argmax(A[0]))
    pull = float(A[0, held]) or 1.0  # 1 without any data
    A[0, held] += pull
    P = banded_penalty(shape)
    return Problem(
        A,
        parts.gradient_right / v_g + parts.hessian_right / v_h,
        parts.gradient_squares / v_g + parts.hessian_squares / v_h,
        P,
        A.shape[1] - 3 ** len(shape),
        math.log(_MOST * float(np.mean(A[0]) / np.max(P[0]))),  # A is not zero here: one coefficient is held
        math.log(pull / A.shape[1]),
    )


def _variances(parts: Equations, theta: np.ndarray) -> tuple[float, float]:
    """v_g and v_H: the mean squares of what θ leaves."""
    v_g = squares_left(theta, parts.gradient_gram, parts.gradient_right, parts.gradient_squares) / parts.gradient_rows
    if parts.hessian_rows == 0:
        return v_g, 1.0
    v_h = squares_left(theta, parts.hessian_gram, parts.hessian_right, parts.hessian_squares) / parts.hessian_rows
    return v_g, max(v_h, _FLOOR * v_g)


def _is_settled(before: Tuning, after: Tuning) -> bool:
    pairs = zip(before[1:], after[1:], strict=True)
    moved = abs(after.log_smoothing - before.log_smoothing)
    return moved < _TOLERANCE and all(abs(math.log(new / old)) < _SETTLED for old, new in pairs)


def _solution(shape: tuple[int, ...], parts: Equations, tuning: Tuning, best: "Attempt") -> Solution:
    likelihood = (
        best.criterion
        - log_prior_volume(shape)
        + parts.gradient_rows * math.log(tuning.gradient_variance)
        + parts.hessian_rows * math.log(tuning.hessian_variance)
    )
    theta = (best.theta - best.theta.mean()).reshape([n + DEGREE for n in shape])
    return Solution(theta, best.factor, tuning, likelihood)


class Problem(NamedTuple):
    """Minimise yᵀy − 2θᵀb + θᵀAθ + λ θᵀPθ over θ, and the restricted likelihood over λ; A and P by their diagonals."""

    gram: Band
    right: Float[np.ndarray, " p"]
    squares: float
    penalty: Band
    rank: int  # of the penalty
    most: float  # log λ at which rounding begins to matter
    log_held: float  # log of what the coefficient that is held adds to the determinant


class Attempt(NamedTuple):
    """−2 log restricted likelihood at one smoothing, θ there, and the Cholesky factor of A + λP."""

    criterion: float
    log_smoothing: float
    theta: np.ndarray
    factor: Band


def _attempt(problem: Problem, log_smoothing: float) -> Attempt:
    log_smoothing = min(log_smoothing, problem.most)
    try:
        system = problem.gram + math.exp(log_smoothing) * problem.penalty
        factor = cholesky_banded(system, lower=True, overwrite_ab=True)
    except LinAlgError:  # cells without data, and too little smoothing to fill them
        return Attempt(math.inf, log_smoothing, problem.right, problem.gram)
    theta = cho_solve_banded((factor, True), problem.right)
    logdet = 2 * float(np.sum(np.log(factor[0]))) - problem.log_held
    left = float(problem.squares - theta @ problem.right)
    return Attempt(left + logdet - problem.rank * log_smoothing, log_smoothing, theta, factor)


def _firm_attempt(problem: Problem, log_smoothing: float) -> Attempt:
    """The attempt at a smoothing that must serve, with as much of a ridge as its factorisation takes."""
    found, ridge = _attempt(problem, log_smoothing), _RIDGE * float(np.finfo(problem.gram.dtype).eps)
    while not math.isfinite(found.criterion):
        ridge *= _MORE
        problem.gram[0] += ridge * np.mean(problem.gram[0])
        found = _attempt(problem, log_smoothing)
    return found


def _least(problem: Problem, start: float | None) -> Attempt:
    """The least criterion over log λ: a coarse grid the first time, then the vertex of a parabola through three."""
    step = 1.0
    if start is None:
        middle, step = math.log(np.sum(problem.gram[0]) / np.sum(problem.penalty[0])), 3.0
        start = min((_attempt(problem, middle + step * k) for k in range(-6, 7)), key=_criterion).log_smoothing
    known: dict[float, Attempt] = {}

    def at(place: float) -> Attempt:
        if place not in known:
            known[place] = _attempt(problem, place)
        return known[place]

    for _ in range(_MOVES):
        left, middle, right = at(start - step), at(start), at(start + step)
        best = min((left, middle, right), key=_criterion)
        if best is not middle and math.isfinite(best.criterion):
            start = best.log_smoothing
            continue
        bend = left.criterion - 2 * middle.criterion + right.criterion
        shift = (left.criterion - right.criterion) / (2 * bend) * step if 0 < bend < math.inf else 0.0
        if step > 1 and shift != 0:
            start, step = start + shift, 1.0
            continue
        return min((middle, at(start + shift)), key=_criterion) if abs(shift) > _TOLERANCE else middle
    return min(known.values(), key=_criterion)


def _criterion(attempt: Attempt) -> float:
    return attempt.criterion
