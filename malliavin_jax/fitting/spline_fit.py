"""The smooth spline nearest to observed gradients and Hessians, its prior and its smoothing by restricted likelihood.

In the units of `spline_equations.py`, and with rows divided by the variances v_g and v_H of what is left of them,
penalised least squares is θ = (A + λP)⁻¹ b, A = A_g/v_g + A_H/v_H, b = b_g/v_g + b_H/v_H, with P one of the priors of
`smoothing.py`. The smoothing λ minimises

    yᵀy − 2θᵀb + θᵀAθ + λ θᵀPθ + log det(A + λP) − rank(P) log λ,

the restricted likelihood of a Gaussian prior with precision λP (Wahba 1985; Wood 2011); then v_g and v_H are
estimated from the residuals, and so on a few times. The posterior covariance (A + λP)⁻¹ gives standard errors that
include the smoothing bias on average (Wahba 1983; Nychka 1988).

To compare meshes and priors (differences of order 3, for a loss that is rough somewhere, or of order 5, for one that is
smooth throughout, or a Gaussian process of some length, for one that is analytic), a prior needs its normalisation. Of
the polynomials that P does not see it knows as much as one row of the data tells: their part of the determinant is then
that of the number of rows, to the power of how many there are, whatever units the loss is in.

All this is done on the host in float64, in the coordinates of `smoothing.py`: the matrices are small, and a compiler
would take longer than the solution.
"""

import math
from collections.abc import Mapping
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Float

from .._base.host import on_one_thread, on_threads
from .bsplines import DEGREE
from .smoothing import Attempt, Modes, Prior, Problem, firm_attempt, least, log_det, lower_start, modes_of
from .spline_equations import Equations, dense, squares_left

_ROUNDS = 6
_SETTLED_SMOOTHING, _SETTLED = 0.2, 0.02  # of log λ, and of the logarithms of the variances
_LESS = (-4.0, -8.0, -12.0, -18.0, -24.0, -30.0, -36.0)  # steps of log λ from a coarser mesh's
_PATIENCE = 2500  # coefficients, from which on an attempt takes a second
_FLOOR = 1e-3  # least variance of Hessians in units of that of gradients: what is left of exact ones is misfit
_LENGTHS = (1.4, 0.7, 0.35, 0.175, 0.09)  # of a Gaussian prior, from which the search begins; the box is four wide
_LONGEST = 2.8
_FACTOR = math.sqrt(2)  # from one length that is tried to the next
_QUICK = 400  # coefficients: with more, the search begins at the coarser mesh's length alone
_FEW = 2000  # with more, that length stays

Family = Literal["third differences", "fifth differences", "Gaussian"]
FAMILIES: tuple[Family, ...] = ("third differences", "fifth differences", "Gaussian")
_DIFFERENCES: dict[Family, Prior] = {"third differences": Prior(3), "fifth differences": Prior(5)}


Spare = list[Float[np.ndarray, "modes modes"]]


class Tuning(NamedTuple):
    """What a fit chooses besides θ: the smoothing λ (by its logarithm), the variances v_g and v_H, the prior."""

    log_smoothing: float
    gradient_variance: float
    hessian_variance: float
    prior: Prior = Prior()


class Solution(NamedTuple):
    """θ, the Cholesky factor of A + λP in the coordinates of its modes, and what was chosen."""

    coefficients: Float[np.ndarray, "..."]
    modes: Modes
    attempt: Attempt
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
def solve_families(
    shape: tuple[int, ...], parts: Equations, starts: Mapping[Family, Tuning], families: tuple[Family, ...] = FAMILIES
) -> dict[Family, Solution]:
    """The fit on a mesh under the best prior of each family, beginning at what a coarser mesh chose."""
    spare: Spare = []
    differences: list[Family] = [family for family in families if family != "Gaussian"]
    forms = {family: _Forms.of(modes_of(shape, _DIFFERENCES[family]), parts, spare) for family in differences}

    def of_differences(family: Family) -> Solution:
        return _solve(shape, parts, forms[family], starts.get(family), _DIFFERENCES[family])

    found = dict(zip(differences, on_threads(of_differences, differences), strict=True))
    if "Gaussian" in families:  # last: the variances of the others serve it
        start, of_third = starts.get("Gaussian"), forms.get("third differences")
        if of_third is None:
            of_third = _Forms.of(modes_of(shape, Prior()), parts, spare)  # a Gaussian prior has the same modes
        if found:
            least_known = min(found.values(), key=lambda one: one.criterion).tuning
            start = _best_length(shape, parts, of_third, least_known, start)
        assert start is not None
        found["Gaussian"] = _solve(shape, parts, of_third, start, start.prior, placed=bool(found))
    return found


@on_one_thread
def solve(
    shape: tuple[int, ...],
    parts: Equations,
    start: Tuning | None = None,
    *,
    prior: Prior = Prior(),  # noqa: B008
    placed: bool = False,
) -> Solution:
    """The fit on a mesh under one prior, with λ, v_g and v_H chosen in turn, beginning at `start` where one is known.

    A start that is `placed` was found on this mesh, others on coarser ones."""
    return _solve(shape, parts, _Forms.of(modes_of(shape, prior), parts, []), start, prior, placed)


def _solve(
    shape: tuple[int, ...],
    parts: Equations,
    forms: "_Forms",
    start: Tuning | None,
    prior: Prior,
    placed: bool = False,
) -> Solution:
    modes = modes_of(shape, prior)
    tuning, best, problem = start, None, None
    for number in range(_ROUNDS):
        variances = (1.0, 1.0) if tuning is None else (tuning.gradient_variance, tuning.hessian_variance)
        problem = _problem(modes, forms, parts, *variances)
        place = None if tuning is None else tuning.log_smoothing
        if place is not None and number == 0 and not placed:
            # What a coarser mesh took for noise a finer one may resolve, with much less smoothing: look there too.
            place = lower_start(problem, place, _LESS, patient=len(problem.right) <= _PATIENCE)
        best = least(problem, place)
        if not math.isfinite(best.criterion):
            best = firm_attempt(problem, best.log_smoothing)
        last, tuning = tuning, Tuning(best.log_smoothing, *_variances(parts, modes.back(best.theta)), prior)
        if last is not None and _is_settled(last, tuning):
            break
    assert best is not None
    assert problem is not None
    assert tuning is not None
    if best.factor is None:
        best = firm_attempt(problem, best.log_smoothing)
    return _solution(shape, modes, parts, tuning, best)


@on_one_thread
def refit(shape: tuple[int, ...], parts: Equations, tuning: Tuning) -> Solution:
    """The fit to other data, with a tuning chosen before: one factorisation."""
    modes = modes_of(shape, tuning.prior)
    forms = _Forms.of(modes, parts, [])
    problem = _problem(modes, forms, parts, tuning.gradient_variance, tuning.hessian_variance)
    return _solution(shape, modes, parts, tuning, firm_attempt(problem, tuning.log_smoothing))


def _best_length(
    shape: tuple[int, ...], parts: Equations, forms: "_Forms", known: Tuning, start: Tuning | None
) -> Tuning:
    """The Gaussian prior of most likelihood at given variances: from one length to its neighbours, as it gets better.

    Lengths are between half a cell and most of the box."""
    shortest = 2 / max(shape)
    tried: list[_Trial] = []

    def attempt_at(length: float, place: float | None) -> _Trial:
        modes = modes_of(shape, Prior(length=length))
        problem = _problem(modes, forms, parts, known.gradient_variance, known.hessian_variance)
        tried.append(_Trial(length, least(problem, place, 3.0), problem, modes))
        return tried[-1]

    size = math.prod(n + DEGREE for n in shape)
    if start is not None and start.prior.length is not None:
        attempt_at(start.prior.length, start.log_smoothing)
    if start is None or size < _QUICK:
        for length in _LENGTHS:
            if length >= shortest:
                attempt_at(length, None)
    best = min(tried, key=_Trial.criterion)
    while size < _FEW:
        steps = [best.length / _FACTOR, best.length * _FACTOR]
        new = [step for step in steps if shortest <= step <= _LONGEST and all(one.is_far(step) for one in tried)]
        nearest = min([best, *(attempt_at(step, best.smoothing_at(step)) for step in new)], key=_Trial.criterion)
        if nearest is best:
            break
        best = nearest
    return Tuning(best.found.log_smoothing, known.gradient_variance, known.hessian_variance, Prior(length=best.length))


class _Trial(NamedTuple):
    """What a Gaussian prior of one length finds."""

    length: float
    found: Attempt
    problem: Problem
    modes: Modes

    def criterion(self) -> float:
        return self.found.criterion

    def is_far(self, length: float) -> bool:
        return abs(math.log(length / self.length)) > 0.1

    def smoothing_at(self, length: float) -> float:
        """log λ that leaves the prior as it is at the lowest frequency where it outweighs the data."""
        heavier = math.exp(self.found.log_smoothing) * self.problem.roughness > np.diag(self.problem.gram)
        frequency = float(np.min(self.modes.frequency[heavier])) if heavier.any() else 0.0
        return self.found.log_smoothing - (length**2 - self.length**2) * frequency / 2


class _Forms(NamedTuple):
    """A_g and A_H in the coordinates of the modes."""

    gradient: Float[np.ndarray, "modes modes"]
    hessian: Float[np.ndarray, "modes modes"] | None
    spare: Spare  # see `Problem`

    @staticmethod
    def of(modes: Modes, parts: Equations, spare: Spare) -> "_Forms":
        grams = [parts.gradient_gram, parts.hessian_gram][: 2 if parts.hessian_rows > 0 else 1]
        found = on_threads(lambda gram: modes.of_matrix(dense(gram)), grams)
        return _Forms(found[0], found[1] if len(found) > 1 else None, spare)


def _problem(modes: Modes, forms: _Forms, parts: Equations, v_g: float, v_h: float) -> Problem:
    A = forms.gradient / v_g if forms.hessian is None else forms.gradient / v_g + forms.hessian / v_h
    unseen = ~modes.seen
    known = log_det(A[np.ix_(unseen, unseen)])
    rows = parts.gradient_rows + parts.hessian_rows
    return Problem(
        A,
        modes.of(parts.gradient_right / v_g + parts.hessian_right / v_h),
        parts.gradient_squares / v_g + parts.hessian_squares / v_h,
        modes.roughness,
        modes.log_prior_volume + known - int(np.sum(unseen)) * math.log(max(rows, 1)),
        forms.spare,
    )


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
    return bool(moved < _SETTLED_SMOOTHING) and all(abs(math.log(new / old)) < _SETTLED for old, new in pairs)


def _solution(shape: tuple[int, ...], modes: Modes, parts: Equations, tuning: Tuning, best: Attempt) -> Solution:
    likelihood = (
        best.criterion
        + parts.gradient_rows * math.log(tuning.gradient_variance)
        + parts.hessian_rows * math.log(tuning.hessian_variance)
    )
    theta = modes.back(best.theta).reshape([n + DEGREE for n in shape])
    return Solution(theta, modes, best, tuning, likelihood)
