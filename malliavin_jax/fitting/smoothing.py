"""Priors of a spline's coefficients, coordinates in which they are diagonal, and the smoothing of most likelihood.

Along an axis the coefficients are written as a polynomial of degree below `order`, which differences of that order do
not see, and the right singular vectors of the differences, from smooth to rough; in several dimensions as products of
these. There θᵀPθ = Σ_m Λ_m θ_m², and a smoothing that is enormous for the rough modes does not drown in its rounding
what the data say of the smooth ones: a Cholesky factorisation does not feel the scale of its rows. The first mode is
the constant, which no derivative sees; it is left out.

A singular value σ of differences of order k belongs to a wave of frequency ω = σ^(1/k), which gives a second family of
priors in the same coordinates. The prior of squared differences is Λ = Σ_axes ω_i^{2k}: it is right for a loss that is
rough somewhere, and lets through a little of every frequency. A Gaussian process whose covariance is exp(−r²/2ℓ²) has
the spectrum of Λ = exp(ℓ²|ω|²/2): nothing is much shorter than ℓ, which is right for a loss that is analytic.
"""

import functools
import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from numpy.polynomial import legendre
from scipy.linalg import LinAlgError, cho_solve

from .._base.host import on_threads
from .bsplines import DEGREE
from .spline_equations import ORDER, scaled_differences

_RIDGE = 1e-14  # of the diagonal, for cells without data
_MORE = 1e3  # by how much the ridge grows where that is not enough
_TOLERANCE = 0.2  # of log λ: the fit does not feel it
_MOVES = 20  # of the search for λ, at most
_COARSE = 3.0  # step of that search in log λ where nothing is known
_MOST = 230.0  # log of a roughness: such a mode is 0 for any data, and nothing overflows
_WORTH_A_THREAD = 300  # coefficients; with fewer a factorisation is sooner done than a thread is awake
_WIDEST = 90.0  # range of log λ that is looked at under a Gaussian prior


class Prior(NamedTuple):
    """Squared differences of an order, or, with a length (the box is four wide), a Gaussian process in their modes."""

    order: int = ORDER
    length: float | None = None


class Modes(NamedTuple):
    """Orthogonal matrices along each axis, modes in columns; frequencies and roughness of their products.

    The constant is left out."""

    axes: tuple[Float[np.ndarray, "basis modes"], ...]
    frequency: Float[np.ndarray, " modes"]  # |ω|²
    roughness: Float[np.ndarray, " modes"]  # Λ

    def of(self, rows: Float[np.ndarray, "p *n"]) -> Float[np.ndarray, "modes *n"]:
        """Coefficients, or functionals of them, in the coordinates of the modes."""
        return self._turn(rows, 0)[1:]

    def back(self, rows: Float[np.ndarray, "modes *n"]) -> Float[np.ndarray, "p *n"]:
        """And from modes to coefficients."""
        return self._turn(np.concatenate([np.zeros_like(rows[:1]), rows]), 1)

    def of_matrix(self, matrix: Float[np.ndarray, "p p"]) -> Float[np.ndarray, "modes modes"]:
        """A quadratic form."""
        return self.of(self.of(matrix).T)

    def _turn(self, rows: np.ndarray, side: int) -> np.ndarray:
        block = rows
        for number, axis in enumerate(self.axes):
            # Axis after axis where it stands: with what is behind it in one, no entry has to move.
            before = math.prod(len(other) for other in self.axes[:number])
            block = (axis.T if side == 0 else axis) @ block.reshape(before, len(axis), -1)
        return block.reshape(rows.shape)

    @property
    def seen(self) -> np.ndarray:
        """Which modes are rough at all."""
        return self.roughness > 0

    @property
    def log_prior_volume(self) -> float:
        """log of the product of the roughnesses that are not zero: the normalisation of the prior."""
        return math.fsum(np.log(self.roughness[self.seen]))


@functools.lru_cache(maxsize=32)
def modes_of(shape: tuple[int, ...], prior: Prior) -> Modes:
    """The modes of a mesh, with their roughness under a prior."""
    if prior.length is not None:
        base = modes_of(shape, Prior(prior.order))
        volume = math.prod(4 / n for n in shape)
        rough = volume * np.exp(np.minimum(prior.length**2 * base.frequency / 2, _MOST))
        return base._replace(roughness=np.where(base.seen, rough, 0.0))
    axes, frequency, roughness = [], np.zeros(1), np.zeros(1)
    volume = math.prod(4 / n for n in shape)
    for number, n in enumerate(shape):
        polynomials = legendre.legvander(np.linspace(-1, 1, n + DEGREE), prior.order - 1)
        smooth, rest = np.split(np.linalg.qr(polynomials, "complete")[0], [prior.order], axis=1)
        _, singular, vectors = np.linalg.svd(scaled_differences(shape, number, prior.order) @ rest)
        axes.append(np.concatenate([smooth, rest @ vectors[::-1].T], 1))
        squares = np.concatenate([np.zeros(prior.order), singular[::-1] ** 2])
        roughness = (roughness[:, None] + squares[None, :]).ravel()
        frequency = (frequency[:, None] + (squares / volume)[None, :] ** (1 / prior.order)).ravel()
    return Modes(tuple(axes), frequency[1:], roughness[1:])


class Problem(NamedTuple):
    """Minimise yᵀy − 2θᵀb + θᵀAθ + λ Σ_m Λ_m θ_m² over θ, and the restricted likelihood over λ.

    `spare` are matrices that attempts write in and leave behind: the pages of new ones take half as long to come as
    the factorisation itself. Problems of one size share them.
    """

    gram: Float[np.ndarray, "modes modes"]
    right: Float[np.ndarray, " modes"]
    squares: float
    roughness: Float[np.ndarray, " modes"]  # Λ
    log_prior: float  # log of the prior's normalisation, without λ
    spare: list[Float[np.ndarray, "modes modes"]]


class Attempt(NamedTuple):
    """−2 log restricted likelihood at one smoothing, θ there, and, if kept, the upper Cholesky factor of A + λP."""

    criterion: float
    log_smoothing: float
    theta: Float[np.ndarray, " modes"]
    factor: Float[np.ndarray, "modes modes"] | None = None

    def solve(self, right: Float[np.ndarray, "modes *n"]) -> Float[np.ndarray, "modes *n"]:
        return cho_solve((self.factor, False), right, check_finite=False)


def log_det(matrix: Float[np.ndarray, "n n"]) -> float:
    """Of a matrix that may be singular by rounding."""
    scale = np.sqrt(np.maximum(np.diag(matrix), np.finfo(matrix.dtype).tiny))
    eigenvalues = np.linalg.eigvalsh(matrix / scale[:, None] / scale[None, :])
    return float(np.sum(np.log(np.maximum(eigenvalues, _RIDGE))) + 2 * np.sum(np.log(scale)))


def attempt(problem: Problem, log_smoothing: float, ridge: float = _RIDGE, *, keep: bool = False) -> Attempt:
    """The solution at one smoothing; its criterion is infinite where the matrix cannot be factorised.

    The factor is part of it if `keep`."""
    system = _spare_matrix(problem)
    np.copyto(system, problem.gram)
    diagonal = np.einsum("ii->i", system)
    diagonal += math.exp(log_smoothing) * problem.roughness
    diagonal[...] = np.where(diagonal > 0, diagonal, 1) * (1 + ridge)
    try:
        factor = np.linalg.cholesky(system).T  # SciPy's, which could write in place, holds up the other threads
    except LinAlgError:  # cells without data, and too little smoothing to fill them
        return Attempt(math.inf, log_smoothing, problem.right)
    finally:
        problem.spare.append(system)
    theta = cho_solve((factor, False), problem.right, check_finite=False)
    logdet = 2 * float(np.sum(np.log(np.diag(factor))))
    rank = np.count_nonzero(problem.roughness)
    left = float(problem.squares - theta @ problem.right)
    criterion = left + logdet - rank * log_smoothing - problem.log_prior
    return Attempt(criterion, log_smoothing, theta, factor if keep else None)


def _spare_matrix(problem: Problem) -> Float[np.ndarray, "modes modes"]:
    try:
        return problem.spare.pop()  # which no other thread then has
    except IndexError:
        return np.empty_like(problem.gram)


def attempts(problem: Problem, places: Iterable[float]) -> list[Attempt]:
    """Those at several smoothings."""
    threads = None if len(problem.right) >= _WORTH_A_THREAD else 1
    return on_threads(lambda place: attempt(problem, place), places, most=threads)


def firm_attempt(problem: Problem, log_smoothing: float) -> Attempt:
    """The attempt at a smoothing that must serve, with as much of a ridge as its factorisation takes."""
    ridge = _RIDGE
    found = attempt(problem, log_smoothing, keep=True)
    while not math.isfinite(found.criterion):
        ridge *= _MORE
        found = attempt(problem, log_smoothing, ridge, keep=True)
    return found


def least(problem: Problem, start: float | None, step: float = 1.0) -> Attempt:
    """The least criterion over log λ: a coarse grid the first time, then the vertex of a parabola through three."""
    low, high = _range(problem)
    if start is None:
        step = _COARSE
        start = min(attempts(problem, np.arange(low, high, step).tolist()), key=_criterion).log_smoothing
    known: dict[float, Attempt] = {}

    def at(*places: float) -> list[Attempt]:
        wanted = [min(place, high) for place in places]
        new = sorted(set(wanted) - set(known))
        known.update(zip(new, attempts(problem, new), strict=True))
        return [known[place] for place in wanted]

    for _ in range(_MOVES):
        left, middle, right = at(start - step, start, start + step)
        best = min((left, middle, right), key=_criterion)
        if best is not middle and math.isfinite(best.criterion):
            start = best.log_smoothing
            continue
        bend = left.criterion - 2 * middle.criterion + right.criterion
        shift = (left.criterion - right.criterion) / (2 * bend) * step if 0 < bend < math.inf else 0.0
        if step > 1 and shift != 0:
            start, step = start + shift, 1.0
            continue
        return min((middle, *at(start + shift)), key=_criterion) if abs(shift) > _TOLERANCE else middle
    return min(known.values(), key=_criterion)


def lower_start(problem: Problem, start: float, steps: tuple[float, ...], *, patient: bool) -> float:
    """The best of some smoothings below one; where not `patient`, only as far as it gets better."""
    if patient:
        return min(attempts(problem, [start, *(start + step for step in steps)]), key=_criterion).log_smoothing
    best = attempt(problem, start)
    for step in steps:
        lower = attempt(problem, start + step)
        if lower.criterion < best.criterion:
            best = lower
        else:
            break
    return best.log_smoothing


def _range(problem: Problem) -> tuple[float, float]:
    """log λ from where the prior says nothing of any mode to where it says all of each."""
    rough = problem.roughness > 0
    data = np.diag(problem.gram)[rough]
    told = data > 0
    if not told.any():
        return 0.0, 3.0
    ratios = np.log(data[told] / problem.roughness[rough][told])
    high = float(ratios.max()) + 15.0
    return max(float(ratios.min()) - 6.0, high - _WIDEST), high


def _criterion(attempt: Attempt) -> float:
    return attempt.criterion
