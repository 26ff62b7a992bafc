"""Spline potentials: tensor products of uniform B-splines of degree 5, in one, two and three dimensions."""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float

from .._base.checks import check_count, check_nonnegative, check_shape, float_array, is_concrete
from .._base.host import on_one_thread, on_threads, to_device
from .._base.mesh import count
from .._base.types import Matrix, Scalar, Vector
from ..fitting.bsplines import DEGREE, SUPPORT, basis
from ..fitting.errors import LinearFit, spline_rows
from ..fitting.spline_equations import Equations, added, equations
from ..fitting.spline_fit import FAMILIES, Family, Solution, Tuning, refit, solve_families
from ..fitting.spline_sums import SplineSums, add_points, box_of, no_sums
from .base import AbstractPotential

_MESHES = {1: (24, 96, 192, 384), 2: (12, 28, 40), 3: (5, 8, 12)}  # from coarse, where the smoothing is soon found
_ROWS_PER_COEFFICIENT = 4
# Coefficients from which on one family is tried: that of rough losses, unless the loss is analytic. (Fifth differences
# let splines run wild in cells with few data, where a fine mesh has many.)
_LARGE = 2000
_MISFIT_POINTS, _CENTRAL = 2000, 0.9  # at which a misfit is measured: of the outskirts it would be that of wild splines
_RESOLVED = 3.0  # cells in a length of the prior
_GAIN = 2.0  # of −2 log likelihood that a finer mesh must bring


class Spline(AbstractPotential):
    """L(x) = Σ_j θ_j Π_i B((x_i − low_i)/Δ_i − j_i), with B the uniform B-spline of degree 5 and Δ = (high − low)/K.

    Outside the box each B-spline goes on as its Taylor polynomial of second order. A query costs 6^d multiplications,
    however many points the spline was fitted to.

    Args:
        coefficients: θ, one axis of K_i + 5 for each of d = 1, 2 or 3 coordinates.
        low: the lower ends of the box of the mesh, (d,).
        high: the upper ones.

    Raises:
        ValueError: for more than three dimensions, fewer than 6 coefficients along an axis, or an empty box.

    Example:
        ```python
        import jax
        import jax.numpy as jnp
        import malliavin_jax as mj

        loss = mj.potentials.Quartic()
        x = jnp.linspace(-2.0, 2.0, 400)[:, None]
        fitted = mj.potentials.Spline.fit(x, jax.vmap(loss.gradient)(x))
        fitted.gradient(jnp.array([0.5]))  # near 0.625
        ```
    """

    coefficients: Float[Array, "..."]
    low: Float[Array, " d"]
    high: Float[Array, " d"]

    def __init__(self, coefficients: Any, low: Any, high: Any):
        self.coefficients = float_array("coefficients", coefficients)
        d, shape = self.coefficients.ndim, self.coefficients.shape
        if not 1 <= d <= 3 or min(shape) < SUPPORT:
            raise ValueError(f"coefficients must have 1, 2 or 3 axes of at least {SUPPORT}, got shape {shape}")
        self.low, self.high = float_array("low", low), float_array("high", high)
        for name, end in (("low", self.low), ("high", self.high)):
            check_shape(name, end, (d,))
        if is_concrete(self.low, self.high) and not np.all(np.asarray(self.low) < np.asarray(self.high)):
            raise ValueError(f"low must be below high on each axis, got {self.low} and {self.high}")

    @staticmethod
    def fit(
        x: Float[ArrayLike, "n d"],
        gradient: Float[ArrayLike, "n d"],
        hessian: Float[ArrayLike, "n d d"] | None = None,
        *,
        weights: Float[ArrayLike, " n"] | Bool[ArrayLike, " n"] | None = None,
        intervals: int | Sequence[int] | None = None,
    ) -> "Spline":
        """The smooth spline whose gradients and Hessians are nearest to the observed ones.

        Penalised least squares on the box of the points; how smooth the spline is, in differences of third or of fifth
        order or as a Gaussian process, and how much a Hessian counts against a gradient, are chosen by restricted
        likelihood (`fitting/spline_fit.py`). The points are passed over once for each mesh, in chunks.

        Args:
            x: positions, (n, d), d at most 3.
            gradient: observed gradients, noisy or not, of the same shape.
            hessian: observed Hessians, (n, d, d), or None.
            weights: how much each point counts, often a 0/1 mask; where it is 0 the data may hold NaN.
            intervals: cells of the mesh, one number or one an axis. None refines the mesh, from 24 cells to 384 in one
                dimension, 12 to 40 in two, 5 to 12 in three, as long as the likelihood grows.

        Returns:
            The fitted `Spline`, of the dtype of `x`, with mean coefficient 0: no derivative sees a constant.

        Raises:
            ValueError: if the shapes do not fit together, if the arrays have no values (inside `jit`), if a point that
                counts is not finite, or if fewer points than 2 differ.
        """
        data = _checked(x, gradient, hessian, weights)
        low, high = box_of(data.x, data.weights)
        return fit_parts([data], low, high, intervals=intervals).potential(data.x.dtype)

    @property
    def intervals(self) -> tuple[int, ...]:
        """Cells of the mesh along each axis."""
        return tuple(n - DEGREE for n in self.coefficients.shape)

    def value(self, x: Vector) -> Scalar:
        return self._derivatives(x, [()])[0]

    def gradient(self, x: Vector) -> Vector:
        return self._derivatives(x, [(i,) for i in range(len(self.intervals))])

    def hessian(self, x: Vector) -> Matrix:
        d = len(self.intervals)
        return self._derivatives(x, list(np.ndindex(d, d))).reshape(d, d)

    def third_derivative(self, x: Vector) -> Float[Array, "d d d"]:
        """∂³L(x), continuous inside the box: what `third=` of a weight scheme takes."""
        d = len(self.intervals)
        return self._derivatives(x, list(np.ndindex(d, d, d))).reshape(d, d, d)

    def _derivatives(self, x: Vector, wanted: Sequence[tuple[int, ...]]) -> Float[Array, " wanted"]:
        """∂_i∂_j… L(x) for each (i, j, …) that is wanted, all of one order."""
        d, most = len(self.intervals), len(wanted[0])
        check_shape("x", x, (d,))
        width = (self.high - self.low).astype(x.dtype) / jnp.asarray(self.intervals, x.dtype)
        t = (x - self.low.astype(x.dtype)) / width
        cells, tables = zip(*(basis(t[i], n, most + 1) for i, n in enumerate(self.intervals)), strict=True)
        block = jax.lax.dynamic_slice(self.coefficients.astype(x.dtype), cells, (SUPPORT,) * d)
        scaled = [table / width[i] ** jnp.arange(most + 1, dtype=x.dtype)[:, None] for i, table in enumerate(tables)]

        @functools.cache
        def derivative(*orders: int) -> Scalar:
            # One sum of products: many small matrix products under `vmap` are slow.
            shares = [
                scaled[i][order].reshape(*(1,) * i, SUPPORT, *(1,) * (d - 1 - i)) for i, order in enumerate(orders)
            ]
            return jnp.sum(block * functools.reduce(jnp.multiply, shares))

        return jnp.stack([derivative(*(axes.count(i) for i in range(d))) for axes in wanted])


class Data(NamedTuple):
    """Points with what was observed there; those of weight 0 do not count, and may hold NaN."""

    x: Array
    gradient: Array
    hessian: Array | None
    weights: Array


class SplineFits(NamedTuple):
    """The fit to all parts of some data, and what the fits to single parts take."""

    whole: Solution
    parts: list[Equations]
    low: Float[np.ndarray, " d"]
    high: Float[np.ndarray, " d"]
    mesh: tuple[int, ...]
    diagonal: bool = False  # whether only the diagonals of Hessians were fitted to
    misfit: Float[np.ndarray, " d"] | float = 0.0  # what a finer mesh would still mend of the gradient, mean squared

    @property
    def cells_per_length(self) -> float:
        """How well the mesh resolves the length of a Gaussian prior; differences have none."""
        return (self.whole.tuning.prior.length or math.inf) * min(self.mesh) / 4

    def linear(self) -> LinearFit:
        """The fit to all parts as its errors see it."""
        tuning = self.whole.tuning
        return LinearFit(
            spline_rows(self.low, self.high, self.mesh),
            self.whole.coefficients.ravel(),
            self.whole.solve,
            self.whole.pull,
            (self.high - self.low) / 4,
            tuning.gradient_variance,
            tuning.hessian_variance,
            self.diagonal,
            self.misfit,
        )

    def potential(self, dtype: Any, part: int | None = None) -> Spline:
        """The spline of all data, or of one part with the same smoothing."""
        solution = self.whole if part is None else refit(self.mesh, self.parts[part], self.whole.tuning)
        return Spline(*(to_device(array, dtype) for array in (solution.coefficients, self.low, self.high)))


@on_one_thread
def fit_parts(
    parts: Sequence[tuple[Array, Array, Array | None, Array]],
    low: Float[np.ndarray, " d"],
    high: Float[np.ndarray, " d"],
    *,
    intervals: int | Sequence[int] | None = None,
    diagonal: bool = False,
) -> SplineFits:
    """The fit to all parts of the data.

    `low` and `high` are the box of all points. The smoothing is found on a coarse mesh first, where it costs little.
    With `diagonal` only the diagonals of the Hessians count.
    """
    d = len(low)
    ends = low - 1e-3 * (high - low), high + 1e-3 * (high - low)
    add = [functools.partial(_sums_of, Data(*part), *ends, diagonal) for part in parts]
    entries = 0 if parts[0][2] is None else d if diagonal else d * (d + 1) // 2
    rows = sum(count(part[3]) for part in parts) * (d + entries)
    best: SplineFits | None = None
    coarser: SplineFits | None = None
    tunings: dict[Family, Tuning] = {}
    families: tuple[Family, ...] = FAMILIES
    for mesh in _meshes(d, intervals):
        coefficients = math.prod(n + DEGREE for n in mesh)
        if best is not None and coefficients * _ROWS_PER_COEFFICIENT > rows:
            break  # a finer mesh would have hardly more data than coefficients
        parts_of_mesh = on_threads(lambda add_part, mesh=mesh: equations(add_part(mesh)), add)
        whole = functools.reduce(added, parts_of_mesh)
        if tunings and coefficients >= _LARGE:
            families = ("Gaussian",) if families[0] == "Gaussian" else ("third differences",)
        solutions = solve_families(mesh, whole, tunings, families)
        families = tuple(sorted(solutions, key=lambda family: solutions[family].criterion))
        tunings = {family: solution.tuning for family, solution in solutions.items()}
        found = solutions[families[0]]
        last = math.inf if best is None else best.whole.criterion
        # Under a Gaussian prior the likelihood says little of the mesh, which must resolve the prior's length.
        blurred = best is not None and best.cells_per_length < _RESOLVED
        if best is None or found.criterion < last or blurred:
            coarser, best = best, SplineFits(found, parts_of_mesh, *ends, mesh, diagonal)
        if found.criterion > last - _GAIN and best.cells_per_length >= _RESOLVED:
            coarser = None  # no finer mesh is worth a try
            break
    assert best is not None
    return best if coarser is None else best._replace(misfit=_misfit(best, coarser, Data(*parts[0])))


def _misfit(fine: SplineFits, coarse: SplineFits, data: Data) -> Float[np.ndarray, " d"]:
    """The mean squared error that meshes finer than the budget would mend, from what the last refinement mended.

    Errors are taken to fall as the square of the cells' size: slower than those of a smooth loss.
    """
    x = np.asarray(data.x, np.float64)[np.asarray(data.weights) > 0]
    away = np.sum((x - x.mean(0)) ** 2 / x.var(0), 1)
    x = x[away <= np.quantile(away, _CENTRAL)]
    x = x[:: max(1, len(x) // _MISFIT_POINTS)]

    def gradient(fits: SplineFits) -> Float[np.ndarray, "n d"]:
        rows = spline_rows(fits.low, fits.high, fits.mesh)(x)
        return np.einsum("nik,nk->ni", rows.gradient, fits.whole.coefficients.ravel()[rows.basis])

    ratio = max(many / few for many, few in zip(fine.mesh, coarse.mesh, strict=True)) ** 2
    return np.mean((gradient(fine) - gradient(coarse)) ** 2, 0) / (ratio - 1) ** 2


def _meshes(d: int, intervals: int | Sequence[int] | None) -> list[tuple[int, ...]]:
    """The meshes to try, from coarse to fine: those of the budget, or the one that is given."""
    if intervals is None:
        return [(n,) * d for n in _MESHES[d]]
    given = (intervals,) * d if isinstance(intervals, int) else tuple(intervals)
    check_shape("intervals", given, (d,))
    return [tuple(check_count("intervals", n) for n in given)]


def _sums_of(part: Data, low: np.ndarray, high: np.ndarray, diagonal: bool, mesh: tuple[int, ...]) -> SplineSums:
    return add_points(no_sums(low, high, mesh, diagonal), part.x, part.gradient, part.hessian, part.weights)


def _checked(x: Any, gradient: Any, hessian: Any, weights: Any) -> Data:
    """The data as arrays of one dtype, with 0 where the weight is 0."""
    x = float_array("x", x)
    check_shape("x", x, (None, None))
    n, d = x.shape
    if not 1 <= d <= 3:
        raise ValueError(f"x must have 1, 2 or 3 coordinates for a spline, got {d}: use Polynomial.fit beyond")
    gradient = float_array("gradient", gradient).astype(x.dtype)
    check_shape("gradient", gradient, (n, d))
    if hessian is not None:
        hessian = float_array("hessian", hessian).astype(x.dtype)
        check_shape("hessian", hessian, (n, d, d))
    w = jnp.ones((n,), x.dtype) if weights is None else jnp.asarray(weights).astype(x.dtype)
    check_shape("weights", w, (n,))
    check_nonnegative("weights", w)
    if not is_concrete(x, gradient, hessian, w):
        raise ValueError("x, gradient, hessian and weights must have values: Spline.fit runs outside jit and vmap")
    counts = np.asarray(w) > 0
    for name, array in (("x", x), ("gradient", gradient), ("hessian", hessian)):
        if array is not None and not np.all(np.isfinite(np.asarray(array).reshape(n, -1)[counts])):
            raise ValueError(f"{name} must be finite where weights are positive")
    return Data(x, gradient, hessian, w)
