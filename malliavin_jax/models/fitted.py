"""Models of the loss fitted to all episodes, and to each half of them: a spline, a polynomial, or none.

The halves are the even and the odd episodes. What a half's model leaves of the *other* half is the held-out error by
which models are compared, at the central nine tenths of the points, and the residual that the debiased estimate
corrects it with; the model of all episodes is what is reported.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from scipy.linalg import cho_factor, cho_solve

from .._base import host
from .._base.types import Scalar
from ..fitting.errors import LinearFit, VarianceTable, polynomial_rows, variance_table
from ..fitting.monomials import num_terms
from ..potentials.base import AbstractPotential
from ..potentials.polynomial import Polynomial
from ..potentials.spline import fit_parts
from ..samples.completion import Completion
from ..samples.samples import Samples
from ..samples.summary import box, central_radius, distance_from_mean
from .folds import Fold, every_other, make_fold

_DEGREE = {1: 10, 2: 10}  # of a polynomial; beyond the plane _DEGREE_BEYOND, for the sake of its number of terms
_DEGREE_BEYOND = 6
_ROWS_PER_TERM = 20  # fewer observed rows than this per coefficient, and the degree is lowered
_NEGLIGIBLE = 1e-10  # squared residuals below this part of the squared data are rounding

Kind = Literal["spline", "polynomial"]


class FittedModel(NamedTuple):
    """A model of one kind."""

    kind: Kind
    whole: AbstractPotential  # fitted to all episodes
    folds: tuple[Fold, Fold]  # residuals of the even and the odd episodes, each against the model of the others
    variance: Callable[[Float[np.ndarray, "n d"]], Float[np.ndarray, "n d"]]  # of the gradient of `whole`
    score: float  # held-out −2 log likelihood: less is better


def fit_models(samples: Samples, kinds: tuple[Kind, ...]) -> FittedModel | None:
    """The best of these kinds on held-out episodes, or None if no model is better than none."""
    contest = _Contest(samples)
    best, least = None, contest.without_model
    low, high = box(samples)
    for kind in kinds:
        if kind == "spline" and not np.all(np.asarray(low) < np.asarray(high)):
            continue  # all positions alike along an axis: no mesh
        fitted = _fit_splines(samples, contest) if kind == "spline" else _fit_polynomials(samples, contest)
        if fitted.score < least:  # NaN, from a fit without enough data, loses
            best, least = fitted, fitted.score
    return best


def completed_model(samples: Samples, completion: Completion) -> FittedModel:
    """The model that was fitted to all points of the paths as a model of samples."""
    even, odd = every_other(samples, 0), every_other(samples, 1)
    whole, halves, _ = completion.models
    folds = make_fold(even, halves[1]), make_fold(odd, halves[0])
    if completion.rung == "hessians":
        return FittedModel("spline", whole, folds, completion.variance, float("nan"))
    own = ~jnp.eye(samples.dim, dtype=bool) if completion.rung == "diagonals" else jnp.ones((samples.dim,) * 2, bool)
    hessian = samples.require_hessian("a model of them")
    left = max(float(jnp.max(jnp.abs(fold.bank.jacobians[:, own]))) for fold in folds)
    size = float(jnp.nanmax(jnp.abs(hessian)))
    if left > 1e-3 * size:
        raise ValueError(
            "samples must hold the episodes they were made of, in their order: their Hessians are not those of the "
            "models that stood in for what was not observed. Make samples anew of the episodes wanted"
        )
    return FittedModel("spline", whole, folds, completion.variance, float("nan"))


def kinds_for(samples: Samples) -> tuple[Kind, ...]:
    """What is worth a try: on the line a spline tells all that a polynomial can; splines end at three dimensions."""
    return ("spline",) if samples.dim == 1 else ("spline", "polynomial") if samples.dim <= 3 else ("polynomial",)


class Squares(NamedTuple):
    """Sums of squares over central points of what is left of gradients and Hessians, and how many points these are."""

    gradient: float
    hessian: float
    points: int


def make_squares(fold: Fold, samples: Samples, radius: Scalar) -> Squares:
    """Those of residuals; of the data themselves where no model was subtracted.

    Points beyond `radius`, the central nine tenths of all samples, do not count: there a spline may be wild and a
    polynomial is, and what they leave may outweigh all the rest, though no chain goes there and few estimates are
    trusted.
    """
    xp: Any = np if host.on_host(fold.bank, samples) else jnp
    x, seen, values, jacobians = (
        xp.asarray(array) for array in (fold.bank.x, fold.bank.observed, fold.bank.values, fold.bank.jacobians)
    )
    distance = distance_from_mean(samples, xp.moveaxis(x, 1, -1))
    inside = seen & (distance <= xp.asarray(radius))
    gradient = xp.sum(xp.where(inside[:, None], values, 0) ** 2)
    hessian = xp.sum(xp.where(inside[:, None, None], jacobians, 0) ** 2)
    return Squares(float(gradient), float(hessian), int(xp.sum(inside)))


class _Contest:
    """What models of some samples are compared on: two halves, and what there is of them without a model."""

    def __init__(self, samples: Samples):
        self.samples, self.halves = samples, (every_other(samples, 0), every_other(samples, 1))
        self.radius = central_radius(samples)
        self.data = self._squares(tuple(make_fold(half, None) for half in self.halves))
        self.without_model = self._score(self.data)

    def held_out(self, models: Sequence[AbstractPotential]) -> tuple[tuple[Fold, Fold], float]:
        """The folds of the two halves, each against the other's model, and their score."""
        folds = make_fold(self.halves[0], models[1]), make_fold(self.halves[1], models[0])
        return folds, self._score(self._squares(folds))

    def _squares(self, folds: tuple[Fold, ...]) -> list[Squares]:
        return [make_squares(fold, self.samples, self.radius) for fold in folds]

    def _score(self, left: list[Squares]) -> float:
        """−2 log likelihood of residuals of two unknown variances, up to a constant; rounding counts for nothing."""
        points, total, d = max(sum(half.points for half in left), 1), 0.0, self.samples.dim
        for entries, name in ((d, "gradient"), (d * d, "hessian")):
            squares, size = (sum(getattr(half, name) for half in halves) for halves in (left, self.data))
            if not np.isfinite(squares):
                return float("nan")
            total += entries * points * float(np.log(max(squares, _NEGLIGIBLE * size, 1e-300) / points))
        return total


def _flat(array: Array) -> Array:
    shape = (-1, *array.shape[2:])
    return host.to_device(np.asarray(array).reshape(shape)) if host.on_host(array) else array.reshape(shape)


@host.on_one_thread
def _fit_splines(samples: Samples, contest: _Contest) -> FittedModel:
    low, high = (np.asarray(end, np.float64) for end in box(samples))
    parts = [
        (_flat(h.x), _flat(h.gradient), _flat(h.require_hessian("a spline")), _flat(h.observed)) for h in contest.halves
    ]
    fits = fit_parts(parts, low, high)
    dtype = samples.x.dtype
    folds, score = contest.held_out(host.on_threads(lambda part: fits.potential(dtype, part), (0, 1)))
    return FittedModel("spline", fits.potential(dtype), folds, _variance_of(fits.linear, samples), score)


def _fit_polynomials(samples: Samples, contest: _Contest) -> FittedModel:
    degree = degree_for(samples)
    folds, score = contest.held_out([_fit_polynomial(half, degree) for half in contest.halves])
    whole = _fit_polynomial(samples, degree)
    linear = functools.partial(_linear_polynomial, whole, samples)
    return FittedModel("polynomial", whole, folds, _variance_of(linear, samples), score)


def degree_for(samples: Samples) -> int:
    """The degree of a polynomial that half of the samples can carry."""
    rows = samples.num_episodes // 2 * samples.num_times * samples.dim
    degree = _DEGREE.get(samples.dim, _DEGREE_BEYOND)
    while degree > 2 and num_terms(samples.dim, degree) * _ROWS_PER_TERM > rows:
        degree -= 2
    return degree


def _variance_of(
    linear: Callable[[], LinearFit], samples: Samples
) -> Callable[[Float[np.ndarray, "n d"]], Float[np.ndarray, "n d"]]:
    """The variance of a model's gradient at many points, computed once at the nodes of a grid over the samples."""

    @functools.cache
    def table() -> VarianceTable:
        low, high = (np.asarray(end, np.float64) for end in box(samples))
        return variance_table(linear(), samples, low, high)

    return lambda points: table()(points)


def _fit_polynomial(samples: Samples, degree: int) -> Polynomial:
    """The polynomial of given degree that fits the observed gradients and Hessians best."""
    return Polynomial.fit(
        _flat(samples.x),
        _flat(samples.gradient),
        _flat(samples.require_hessian("a fitted control")),
        degree=degree,
        weights=_flat(samples.observed).astype(samples.x.dtype),
    )


def _linear_polynomial(fitted: Polynomial, samples: Samples) -> LinearFit:
    """The normal equations anew, from some of the episodes: a polynomial's own fit keeps none."""
    center, scale = (np.asarray(array, np.float64) for array in (fitted.center, fitted.scale))
    some = min(samples.num_episodes, max(200, 20_000 // samples.num_times))
    arrays = samples.x, samples.gradient, samples.require_hessian("a polynomial"), samples.observed
    x, gradient, hessian, seen = (np.asarray(a[:some]).reshape(-1, *a.shape[2:]) for a in arrays)
    rows = polynomial_rows(center, scale, fitted.exponents)
    F = rows(np.where(seen[:, None], x, 0))
    theta = np.asarray(fitted.coefficients, np.float64)
    d, p = samples.dim, len(theta)
    pairs = [(i, j) for i in range(d) for j in range(i, d)]
    y = np.concatenate([gradient, np.stack([hessian[:, i, j] for i, j in pairs], 1)], 1)
    units = np.concatenate([scale, [scale[i] * scale[j] for i, j in pairs]])
    times = np.concatenate([np.ones(d), [1 if i == j else 2 for i, j in pairs]])
    design = np.concatenate([F.gradient, F.hessian], 1) * (seen[:, None] * units)[:, :, None]
    left = np.where(seen[:, None], y, 0) * units - design @ theta
    count = max(seen.sum(), 1)
    v_g = max(float(np.sum(left[:, :d] ** 2)) / (count * d), 1e-300)
    v_h = max(float(np.sum(times[d:] * left[:, d:] ** 2)) / (count * d * d), v_g / 1000)
    precision = np.concatenate([np.full(d, 1 / v_g), times[d:] / v_h])
    weighted = (design * np.sqrt(precision)[None, :, None]).reshape(-1, p)
    gram = weighted.T @ weighted * (samples.num_episodes / some)
    gram[np.diag_indices(p)] *= 1 + 1e-10  # a hair, for the factorisation
    return LinearFit(rows, theta, functools.partial(cho_solve, cho_factor(gram, lower=True)), None, scale, v_g, v_h)
