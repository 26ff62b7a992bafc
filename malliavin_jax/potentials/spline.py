"""Spline potentials: tensor products of uniform B-splines of degree 5, in one, two and three dimensions."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float

from .._base.checks import check_count, check_nonnegative, check_shape, float_array, is_concrete
from .._base.types import Matrix, Scalar, Vector
from ..fitting.bsplines import DEGREE, SUPPORT, basis
from ..fitting.spline_fit import solve
from ..fitting.spline_sums import add_points, no_sums
from .base import AbstractPotential

_MESHES = {1: (12, 24, 48, 96), 2: (8, 12, 18, 28), 3: (4, 6, 8)}
_ROWS_PER_COEFFICIENT = 4
_GAIN = 2.0  # of −2 log likelihood that a finer mesh must bring


class Spline(AbstractPotential):
    """L(x) = Σ_j θ_j Π_i B((x_i − low_i)/Δ_i − j_i), with B the uniform B-spline of degree 5 and Δ = (high − low)/K.

    Outside the box each B-spline goes on as its Taylor polynomial of second order. A query costs 6^d multiplications,
    however many points the spline was fitted to.

    Args:
        coefficients: θ, one axis of K_i + 5 for each of d = 1, 2 or 3 coordinates.
        low, high: the ends of the box of the mesh, (d,).

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
        d = self.coefficients.ndim
        if not 1 <= d <= 3 or min(self.coefficients.shape) < SUPPORT:
            raise ValueError(
                f"coefficients must have 1, 2 or 3 axes of at least {SUPPORT}, got shape {self.coefficients.shape}"
            )
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

        Penalised least squares on the box of the points; how smooth the spline is, and how much a Hessian counts
        against a gradient, are chosen by restricted likelihood (see `fitting/spline_fit.py`). The points are passed
        over once for each mesh, in chunks; nothing is random.

        Args:
            x: positions, (n, d), d at most 3.
            gradient: observed gradients, noisy or not, of the same shape.
            hessian: observed Hessians, (n, d, d), or None.
            weights: how much each point counts, often a 0/1 mask; where it is 0 the data may hold NaN.
            intervals: cells of the mesh, one number or one an axis. None refines the mesh, from 12 cells to 96 in one
                dimension, 8 to 28 in two, 4 to 8 in three, as long as the likelihood grows.

        Returns:
            The fitted `Spline`, of the dtype of `x`, with mean coefficient 0: no derivative sees a constant.

        Raises:
            ValueError: if the shapes do not fit together, if the arrays have no values (inside `jit`), if a point that
                counts is not finite, or if fewer points than 2 differ.
        """
        return fit_spline(x, gradient, hessian, weights=weights, intervals=intervals)

    @property
    def intervals(self) -> tuple[int, ...]:
        """Cells of the mesh along each axis."""
        return tuple(n - DEGREE for n in self.coefficients.shape)

    def value(self, x: Vector) -> Scalar:
        return self._derivatives(x, 0)[(0,) * len(self.intervals)]

    def gradient(self, x: Vector) -> Vector:
        table, d = self._derivatives(x, 1), len(self.intervals)
        return jnp.stack([table[_orders(d, i)] for i in range(d)])

    def hessian(self, x: Vector) -> Matrix:
        table, d = self._derivatives(x, 2), len(self.intervals)
        return jnp.stack([jnp.stack([table[_orders(d, i, j)] for j in range(d)]) for i in range(d)])

    def third_derivative(self, x: Vector) -> Float[Array, "d d d"]:
        """∂³L(x), continuous inside the box: what `third=` of a weight scheme takes."""
        table, d = self._derivatives(x, 3), len(self.intervals)
        entries = [table[_orders(d, i, j, k)] for i in range(d) for j in range(d) for k in range(d)]
        return jnp.stack(entries).reshape(d, d, d)

    def _derivatives(self, x: Vector, most: int) -> Array:
        """Entry (a, b, …): the derivative of order a along the first axis, b along the second, …, up to `most`."""
        check_shape("x", x, (len(self.intervals),))
        width = (self.high - self.low).astype(x.dtype) / jnp.asarray(self.intervals, x.dtype)
        t = (x - self.low.astype(x.dtype)) / width
        cells, tables = zip(*(basis(t[i], n, most + 1) for i, n in enumerate(self.intervals)), strict=True)
        block = jax.lax.dynamic_slice(self.coefficients.astype(x.dtype), cells, (SUPPORT,) * len(cells))
        for i, table in enumerate(tables):
            scaled = table / width[i] ** jnp.arange(most + 1, dtype=x.dtype)[:, None]
            # The axis contracted is always the first; its orders come last, so that the axes end up in their order.
            block = jnp.tensordot(block, scaled, ((0,), (1,)), precision=jax.lax.Precision.HIGHEST)
        return block


def fit_spline(x: Any, gradient: Any, hessian: Any, *, weights: Any, intervals: Any) -> Spline:
    """`Spline.fit`, whose docstring explains it."""
    data = _checked(x, gradient, hessian, weights)
    d = data.x.shape[1]
    low, high = box_of(data.x, data.weights)
    if intervals is None:
        meshes = [(n,) * d for n in _MESHES[d]]
    else:
        meshes = [(intervals,) * d if isinstance(intervals, int) else tuple(intervals)]
        check_shape("intervals", meshes[0], (d,))
        meshes = [tuple(check_count("intervals", n) for n in meshes[0])]
    best = None
    for mesh in meshes:
        if best is not None and math.prod(n + DEGREE for n in mesh) * _ROWS_PER_COEFFICIENT > data.rows:
            break  # a finer mesh would have hardly more data than coefficients
        sums = add_points(no_sums(low, high, mesh), data.x, data.gradient, data.hessian, data.weights)
        solution = solve(sums)
        if best is not None and solution.criterion > best.criterion - _GAIN:
            break
        best = solution
    assert best is not None
    dtype = data.x.dtype
    return Spline(*(jnp.asarray(array, dtype) for array in (best.coefficients, low, high)))


class _Data(NamedTuple):
    x: Array
    gradient: Array
    hessian: Array | None
    weights: Array

    @property
    def rows(self) -> int:
        """Numbers observed."""
        n, d = int(np.count_nonzero(np.asarray(self.weights))), self.x.shape[1]
        return n * (d if self.hessian is None else d + d * (d + 1) // 2)


def _checked(x: Any, gradient: Any, hessian: Any, weights: Any) -> _Data:
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
    return _Data(x, gradient, hessian, w)


def box_of(x: Array, weights: Array) -> tuple[np.ndarray, np.ndarray]:
    """The box of the points that count, a hair wider, in float64."""
    seen = np.asarray(x, np.float64)[np.asarray(weights) > 0]
    low, high = (end(seen, axis=0) if len(seen) else np.zeros(x.shape[1]) for end in (np.min, np.max))
    if not np.all(high > low):
        raise ValueError(f"x must hold points that differ along each axis, got a box from {low} to {high}")
    margin = 1e-3 * (high - low)
    return low - margin, high + margin


def _orders(d: int, *axes: int) -> tuple[int, ...]:
    """How often each of d axes is differentiated."""
    return tuple(axes.count(i) for i in range(d))
