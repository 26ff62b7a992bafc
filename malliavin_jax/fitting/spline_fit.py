"""The smooth spline nearest to observed gradients and Hessians, its smoothing chosen by restricted likelihood.

In the units of `spline_equations.py`, and with rows divided by the variances v_g and v_H of what is left of them,
least squares with a penalty on differences of some order along each axis is θ = (A + λP)⁻¹ b, A = A_g/v_g + A_H/v_H,
b = b_g/v_g + b_H/v_H. The smoothing λ minimises

    yᵀy − 2θᵀb + θᵀAθ + λ θᵀPθ + log det(A + λP) − rank(P) log λ,

the restricted likelihood of a Gaussian prior with precision λP (Wahba 1985; Wood 2011); then v_g and v_H are
estimated from the residuals, and so on a few times. The posterior covariance (A + λP)⁻¹ gives standard errors that
include the smoothing bias on average (Wahba 1983; Nychka 1988).

To compare meshes, and differences of order 3 (a loss that is rough somewhere) with those of order 5 (one that is smooth
throughout), the prior needs its normalisation. Of the polynomials that P does not see the prior knows as much as one
row of the data tells: their part of the determinant is then that of the number of rows, to the power of how many there
are, whatever units the loss is in.

All this is done on the host in float64, in the coordinates of `spline_modes.py`: the matrices are small, and a compiler
would take longer than the solution.
"""

import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from scipy.linalg import LinAlgError, cho_solve, cholesky

from .._base.mesh import on_one_thread
from .bsplines import DEGREE
from .spline_equations import ORDER, Equations, dense, squares_left
from .spline_modes import Modes, log_prior_volume, modes_of

_ROUNDS = 6
_RIDGE = 1e-14  # of the diagonal, for cells without data
_MORE = 1e3  # by how much the ridge grows where that is not enough
_TOLERANCE = 0.2  # of log λ: the fit does not feel it
_LESS = (0.0, -4.0, -8.0, -12.0, -18.0, -24.0, -30.0, -36.0)  # steps of log λ from a coarser mesh's
_LARGE = 2500  # coefficients
_SETTLED = 0.02  # of the logarithms of the variances
_MOVES = 20  # of the search for λ, at most
_FLOOR = 1e-3  # least variance of Hessians in units of that of gradients: what is left of exact ones is misfit


class Tuning(NamedTuple):
    """What a fit chooses besides θ: the smoothing λ (by its logarithm), the variances v_g and v_H.

    `order` is that of the differences whose squares are penalised."""

    log_smoothing: float
    gradient_variance: float
    hessian_variance: float
    order: int = ORDER


class Solution(NamedTuple):
    """θ, the Cholesky factor of A + λP in the coordinates of its modes, and what was chosen."""

    coefficients: Float[np.ndarray, "..."]
    modes: Modes
    attempt: "Attempt"
    tuning: Tuning
    criterion: float  # −2 log restricted likelihood

    def solve(self, right: Float[np.ndarray, "p *n"]) -> Float[np.ndarray, "p *n"]:
        """(A + λP)⁻¹ times `right`."""
        return self.modes.back(self.attempt.solve(self.modes.of(right)))

    def pull(self, right: Float[np.ndarray, "p n"]) -> Float[np.ndarray, " n"]:
        """fᵀ (A + λP)⁻¹ λP (A + λP)⁻¹ f for each column f of `right`: the mean squared bias of the smoothing."""
        reach = self.attempt.solve(self.modes.of(right))
        return math.exp(self.tuning.log_smoothing) * (self.modes.roughness @ reach**2)


@on_one_thread
def solve(shape: tuple[int, ...], parts: Equations, start: Tuning | None = None, *, order: int = ORDER) -> Solution:
    """The fit on a mesh, with λ, v_g and v_H chosen in turn, beginning at `start` where one is known."""
    modes = modes_of(shape, order)
    forms = _Forms.of(modes, parts)
    tuning, best = start, None
    for number in range(_ROUNDS):
        variances = (1.0, 1.0) if tuning is None else (tuning.gradient_variance, tuning.hessian_variance)
        problem = _problem(modes, forms, parts, *variances)
        place = None if tuning is None else tuning.log_smoothing
        if place is not None and number == 0:
            # What a coarser mesh took for noise a finer one may resolve, with much less smoothing: look there too.
            place = _descend(problem, place) if len(problem.right) > _LARGE else _look_below(problem, place)
        best = _least(problem, place)
        if not math.isfinite(best.criterion):
            best = _firm_attempt(problem, best.log_smoothing)
        last, tuning = tuning, Tuning(best.log_smoothing, *_variances(parts, modes.back(best.theta)), order)
        if last is not None and _is_settled(last, tuning):
            break
    assert best is not None
    assert tuning is not None
    return _solution(shape, modes, parts, tuning, best)


@on_one_thread
def refit(shape: tuple[int, ...], parts: Equations, tuning: Tuning) -> Solution:
    """The fit to other data, with a tuning chosen before: one factorisation."""
    modes = modes_of(shape, tuning.order)
    forms = _Forms.of(modes, parts)
    problem = _problem(modes, forms, parts, tuning.gradient_variance, tuning.hessian_variance)
    return _solution(shape, modes, parts, tuning, _firm_attempt(problem, tuning.log_smoothing))


class _Forms(NamedTuple):
    """A_g and A_H in the coordinates of the modes."""

    gradient: Float[np.ndarray, "modes modes"]
    hessian: Float[np.ndarray, "modes modes"] | None

    @staticmethod
    def of(modes: Modes, parts: Equations) -> "_Forms":
        seen = parts.hessian_rows > 0
        return _Forms(
            modes.of_matrix(dense(parts.gradient_gram)), modes.of_matrix(dense(parts.hessian_gram)) if seen else None
        )


def _problem(modes: Modes, forms: _Forms, parts: Equations, v_g: float, v_h: float) -> "Problem":
    A = forms.gradient / v_g if forms.hessian is None else forms.gradient / v_g + forms.hessian / v_h
    unseen = ~modes.seen
    known = _log_det(A[np.ix_(unseen, unseen)])
    rows = parts.gradient_rows + parts.hessian_rows
    return Problem(
        A,
        modes.of(parts.gradient_right / v_g + parts.hessian_right / v_h),
        parts.gradient_squares / v_g + parts.hessian_squares / v_h,
        modes.roughness,
        log_prior_volume(modes) + known - int(np.sum(unseen)) * math.log(max(rows, 1)),
    )


def _log_det(matrix: Float[np.ndarray, "n n"]) -> float:
    """Of a matrix that may be singular by rounding."""
    scale = np.sqrt(np.maximum(np.diag(matrix), np.finfo(matrix.dtype).tiny))
    eigenvalues = np.linalg.eigvalsh(matrix / scale[:, None] / scale[None, :])
    return float(np.sum(np.log(np.maximum(eigenvalues, _RIDGE))) + 2 * np.sum(np.log(scale)))


def _variances(parts: Equations, theta: np.ndarray) -> tuple[float, float]:
    """v_g and v_H: the mean squares of what θ leaves."""
    v_g = squares_left(theta, parts.gradient_gram, parts.gradient_right, parts.gradient_squares) / parts.gradient_rows
    if parts.hessian_rows == 0:
        return float(v_g), 1.0
    v_h = squares_left(theta, parts.hessian_gram, parts.hessian_right, parts.hessian_squares) / parts.hessian_rows
    return float(v_g), float(max(v_h, _FLOOR * v_g))


def _is_settled(before: Tuning, after: Tuning) -> bool:
    pairs = zip(before[1:3], after[1:3], strict=True)
    moved = abs(after.log_smoothing - before.log_smoothing)
    return bool(moved < _TOLERANCE) and all(abs(math.log(new / old)) < _SETTLED for old, new in pairs)


def _solution(shape: tuple[int, ...], modes: Modes, parts: Equations, tuning: Tuning, best: "Attempt") -> Solution:
    likelihood = (
        best.criterion
        + parts.gradient_rows * math.log(tuning.gradient_variance)
        + parts.hessian_rows * math.log(tuning.hessian_variance)
    )
    theta = modes.back(best.theta).reshape([n + DEGREE for n in shape])
    return Solution(theta, modes, best, tuning, likelihood)


class Problem(NamedTuple):
    """Minimise yᵀy − 2θᵀb + θᵀAθ + λ Σ_m Λ_m θ_m² over θ, and the restricted likelihood over λ."""

    gram: Float[np.ndarray, "modes modes"]
    right: Float[np.ndarray, " modes"]
    squares: float
    roughness: Float[np.ndarray, " modes"]  # Λ
    log_prior: float  # log of the prior's normalisation, without λ


class Attempt(NamedTuple):
    """−2 log restricted likelihood at one smoothing, θ there, and the Cholesky factor of A + λP, its rows scaled."""

    criterion: float
    log_smoothing: float
    theta: Float[np.ndarray, " modes"]
    factor: Float[np.ndarray, "modes modes"]
    scale: Float[np.ndarray, " modes"]

    def solve(self, right: Float[np.ndarray, "modes *n"]) -> Float[np.ndarray, "modes *n"]:
        scale = self.scale.reshape(-1, *(1,) * (right.ndim - 1))
        return cho_solve((self.factor, True), right / scale, check_finite=False) / scale


def _attempt(problem: Problem, log_smoothing: float, ridge: float = _RIDGE) -> Attempt:
    system = problem.gram.copy()
    diagonal = np.einsum("ii->i", system)
    diagonal += math.exp(log_smoothing) * problem.roughness
    scale = np.sqrt(np.where(diagonal > 0, diagonal, 1))
    system /= scale[:, None]
    system /= scale[None, :]
    diagonal[...] = 1 + ridge
    try:
        factor = cholesky(system, lower=True, overwrite_a=True, check_finite=False)
    except LinAlgError:  # cells without data, and too little smoothing to fill them
        return Attempt(math.inf, log_smoothing, problem.right, problem.gram, scale)
    found = Attempt(0.0, log_smoothing, problem.right, factor, scale)
    theta = found.solve(problem.right)
    logdet = 2 * float(np.sum(np.log(np.diag(factor)) + np.log(scale)))
    rank = np.count_nonzero(problem.roughness)
    left = float(problem.squares - theta @ problem.right)
    return found._replace(criterion=left + logdet - rank * log_smoothing - problem.log_prior, theta=theta)


def _firm_attempt(problem: Problem, log_smoothing: float) -> Attempt:
    """The attempt at a smoothing that must serve, with as much of a ridge as its factorisation takes."""
    ridge = _RIDGE
    found = _attempt(problem, log_smoothing)
    while not math.isfinite(found.criterion):
        ridge *= _MORE
        found = _attempt(problem, log_smoothing, ridge)
    return found


def _least(problem: Problem, start: float | None) -> Attempt:
    """The least criterion over log λ: a coarse grid the first time, then the vertex of a parabola through three."""
    low, high = _range(problem)
    step = 1.0
    if start is None:
        step = 3.0
        places = np.arange(low, high, step).tolist()
        start = min((_attempt(problem, place) for place in places), key=_criterion).log_smoothing
    known: dict[float, Attempt] = {}

    def at(place: float) -> Attempt:
        place = min(place, high)
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


def _look_below(problem: Problem, start: float) -> float:
    return min((_attempt(problem, start + shift) for shift in _LESS), key=_criterion).log_smoothing


def _descend(problem: Problem, start: float) -> float:
    """The same where an attempt takes a second: only as far as it gets better."""
    best = _attempt(problem, start)
    for shift in _LESS[1:]:
        lower = _attempt(problem, start + shift)
        if lower.criterion >= best.criterion:
            break
        best = lower
    return best.log_smoothing


def _range(problem: Problem) -> tuple[float, float]:
    """log λ from where the prior says nothing of any mode to where it says all of each."""
    rough = problem.roughness > 0
    data = np.diag(problem.gram)[rough]
    told = data > 0
    if not told.any():
        return 0.0, 3.0
    ratios = np.log(data[told] / problem.roughness[rough][told])
    return float(ratios.min()) - 6.0, float(ratios.max()) + 15.0


def _criterion(attempt: Attempt) -> float:
    return attempt.criterion
