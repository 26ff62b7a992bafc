"""Spline potentials: tensor products of uniform B-splines of degree 5, in one, two and three dimensions."""

import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .._base.checks import check_shape, float_array, is_concrete
from .._base.types import Matrix, Scalar, Vector
from .base import AbstractPotential
from .bspline import DEGREE, SUPPORT, basis


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
        """Entry (a, b, …): the derivative of order a along the first axis, b along the second, …, each at most `most`."""
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


def _orders(d: int, *axes: int) -> tuple[int, ...]:
    """How often each of d axes is differentiated."""
    return tuple(axes.count(i) for i in range(d))
