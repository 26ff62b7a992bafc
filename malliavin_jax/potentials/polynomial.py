"""Polynomial losses, and their least-squares fit to observed gradients and Hessians."""

import functools
import operator
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, Bool, Float, Int

from .._base.checks import check_count, check_nonnegative, check_positive, check_shape, float_array
from .._base.types import Matrix, Scalar, Vector
from .base import AbstractPotential, check_finite, like, number
from .monomials import (
    _HIGHEST,
    all_exponents,
    check_exponents,
    combine,
    derivative_table,
    derivatives,
    monomials,
    num_terms,
)


class Polynomial(AbstractPotential):
    """L(x) = Σ_t θ_t Π_i z_i^{e_ti}, with z = (x − center) / scale.

    - `coefficients`: θ, (terms,). `exponents`: e, `terms` tuples of d whole numbers, all different.
    - `center`, `scale`: (d,) or a number.

    ```python
    cubic = mj.Polynomial([1.0, 2.0], [[3], [1]])  # x³ + 2x
    cubic.gradient(jnp.array([1.0]))  # [5.]
    fitted = mj.Polynomial.fit(samples.x[:, 0], samples.gradient[:, 0], samples.hessian[:, 0], degree=4)
    ```
    """

    coefficients: Float[Array, " terms"]
    exponents: tuple[tuple[int, ...], ...] = eqx.field(static=True)
    center: Float[Array, "..."] | float
    scale: Float[Array, "..."] | float

    def __init__(
        self,
        coefficients: Float[ArrayLike, " terms"] | Sequence,
        exponents: Sequence | Int[ArrayLike, "terms d"],
        center: Float[ArrayLike, "..."] | Sequence | float = 0.0,
        scale: Float[ArrayLike, "..."] | Sequence | float = 1.0,
    ):
        self.coefficients = float_array("coefficients", coefficients)
        self.exponents = check_exponents(exponents)
        self.center, self.scale = number("center", center), number("scale", scale)
        check_shape("coefficients", self.coefficients, (len(self.exponents),))
        for name in ("center", "scale"):
            if np.shape(getattr(self, name)) != ():
                check_shape(name, getattr(self, name), (len(self.exponents[0]),))
        check_finite("center", self.center)
        check_positive("scale", self.scale)

    def _derivatives(self, x: Vector, order: int) -> Array:
        check_shape("x", x, (len(self.exponents[0]),))
        z = (x - like(x, self.center)) / like(x, self.scale)
        return derivatives(self.coefficients.astype(x.dtype), z, self.exponents, order)

    def value(self, x: Vector) -> Scalar:
        return self._derivatives(x, 0)[0]

    def gradient(self, x: Vector) -> Vector:
        return self._derivatives(x, 1) / like(x, self.scale)

    def hessian(self, x: Vector) -> Matrix:
        scale = like(x, self.scale)
        return self._derivatives(x, 2).reshape(x.shape * 2) / (scale[:, None] * scale[None, :])

    @staticmethod
    def fit(
        x: Float[ArrayLike, "n d"],
        gradient: Float[ArrayLike, "n d"],
        hessian: Float[ArrayLike, "n d d"],
        *,
        degree: int = 6,
        weights: Float[ArrayLike, " n"] | Int[ArrayLike, " n"] | Bool[ArrayLike, " n"] | None = None,
        passes: int = 2,
        chunk_size: int = 4096,
    ) -> "Polynomial":
        """The polynomial of the given degree whose gradients and Hessians are nearest to the observed ones.

        In standardised units z = (x − mean)/sd, in which gradients and Hessians both have the unit of L, it
        minimises Σ_n w_n [ p |∇_z L(x_n) − g_n|² + q |∇²_z L(x_n) − H_n|² ], |·| the Frobenius norm. The
        first pass takes p = q = 1; each later one takes for 1/p and 1/q the mean squared residuals per entry
        of the fit before, so that exact Hessians are not spoilt by noisy gradients, nor the reverse. The
        constant term, which no derivative sees, is 0.

        `weights` (n,): w, often a 0/1 mask; where it is 0 the data may hold NaN. With no usable point the
        result is the zero polynomial. Data are read in chunks of `chunk_size` points.
        """
        theta, center, scale = fit_derivatives(
            x, gradient, hessian, weights, degree=degree, passes=passes, chunk_size=chunk_size
        )
        return Polynomial(theta, all_exponents(center.shape[0], degree), center, scale)


def fit_derivatives(
    x: Any, gradient: Any, hessian: Any, weights: Any, *, degree: int, passes: int, chunk_size: int
) -> tuple[Float[Array, " terms"], Float[Array, " d"], Float[Array, " d"]]:
    """Check the data of `Polynomial.fit`, bring them to the dtype of x, and fit."""
    x = float_array("x", x)
    check_shape("x", x, (None, None))
    n, d = x.shape
    check_count("the number of points in x", n)
    check_count("the dimension of x", d)
    gradient = float_array("gradient", gradient).astype(x.dtype)
    check_shape("gradient", gradient, (n, d))
    hessian = float_array("hessian", hessian).astype(x.dtype)
    check_shape("hessian", hessian, (n, d, d))
    w = jnp.ones((n,), x.dtype) if weights is None else jnp.asarray(weights).astype(x.dtype)
    check_shape("weights", w, (n,))
    check_nonnegative("weights", w)
    sizes = {
        "degree": check_count("degree", degree),
        "passes": check_count("passes", passes),
        "chunk_size": check_count("chunk_size", chunk_size),
    }
    return _least_squares(x, gradient, hessian, w, **sizes)


@functools.partial(jax.jit, static_argnames=("degree", "passes", "chunk_size"))
def _least_squares(
    x: Float[Array, "n d"],
    gradient: Float[Array, "n d"],
    hessian: Float[Array, "n d d"],
    weights: Float[Array, " n"],
    *,
    degree: int,
    passes: int,
    chunk_size: int,
) -> tuple[Float[Array, " terms"], Float[Array, " d"], Float[Array, " d"]]:
    """Coefficients, centre and scale of the fit that `Polynomial.fit` describes.

    Later passes fit what the earlier ones left over, so they also repair rounding and the ridge's shrinkage.
    """
    n, d = x.shape
    dtype = x.dtype
    table = derivative_table(all_exponents(d, degree), (1, 2))
    is_gradient = jnp.asarray(table.order == 1)
    multiple, target = jnp.asarray(table.multiple, dtype), jnp.asarray(table.target)

    used = (weights > 0)[:, None]  # unused points may hold NaN, which a product with zero would keep
    total = jnp.maximum(weights.sum(), jnp.finfo(dtype).tiny)
    clean = jnp.where(used, x, 0.0)
    center = jnp.matmul(weights, clean, precision=_HIGHEST) / total
    deviation = jnp.where(used, x - center[None], 0.0)
    variance = jnp.matmul(weights, deviation**2, precision=_HIGHEST) / total
    scale = jnp.sqrt(jnp.where(variance > 0, variance, 1.0))
    units = jnp.concatenate([scale, jnp.outer(scale, scale).ravel()])

    size = min(chunk_size, n)

    def accumulate(theta):
        """Means over the points: φφᵀ, φ times what θ leaves over, that squared, and the data squared."""
        prediction = combine(theta, table)

        def add(sums, index):
            # The last chunk is slid back to stay inside the arrays; its points seen before count for nothing.
            start = jnp.minimum(index * size, n - size)
            cut = functools.partial(lax.dynamic_slice_in_dim, start_index=start, slice_size=size)
            fresh = start + jnp.arange(size) >= index * size
            weight = jnp.where(fresh, cut(weights), 0.0)
            rows = jnp.concatenate([cut(gradient), cut(hessian).reshape(size, d * d)], axis=1)
            rows = jnp.where((weight > 0)[:, None], rows, 0.0) * units[None]
            z = jnp.where((weight > 0)[:, None], (cut(x) - center[None]) / scale[None], 0.0)
            phi = jax.vmap(monomials, in_axes=(0, None))(z, table.monomials)
            left = rows - jnp.matmul(phi, prediction.T, precision=_HIGHEST)
            weighted = (phi * weight[:, None]).T
            new = (
                jnp.matmul(weighted, phi, precision=_HIGHEST),
                jnp.matmul(weighted, left, precision=_HIGHEST),
                jnp.matmul(weight, left**2, precision=_HIGHEST),
                jnp.matmul(weight, rows**2, precision=_HIGHEST),
            )
            return jax.tree.map(operator.add, sums, new), None

        u, r = table.monomials.shape[0], table.order.shape[0]
        zeros = tuple(jnp.zeros(shape, dtype) for shape in ((u, u), (u, r), (r,), (r,)))
        sums, _ = lax.scan(add, zeros, jnp.arange(-(-n // size)))
        return jax.tree.map(lambda s: s / total, sums)

    def solve(row_weights, gram, product):
        """The weighted normal equations, with unit diagonal and a ridge of some units of rounding."""

        def add(matrix, row):
            w, where, times = row
            return matrix + w * times[:, None] * gram[where][:, where] * times[None, :], None

        terms = target.shape[1]
        matrix, _ = lax.scan(add, jnp.zeros((terms, terms), dtype), (row_weights, target, multiple))
        picked = jax.vmap(lambda where, column: column[where])(target, product.T)
        right = jnp.sum(row_weights[:, None] * multiple * picked, axis=0)
        diagonal = jnp.diagonal(matrix)
        inverse = 1.0 / jnp.sqrt(jnp.where(diagonal > 0, diagonal, 1.0))
        # The scaled matrix has unit diagonal: this ridge is relative to the mean of its eigenvalues.
        ridge = 128 * float(jnp.finfo(dtype).eps)
        scaled = matrix * inverse[:, None] * inverse[None, :] + ridge * jnp.eye(terms, dtype=dtype)
        return inverse * jax.scipy.linalg.cho_solve(jax.scipy.linalg.cho_factor(scaled), inverse * right)

    def group_mean(values):
        gradients, hessians = jnp.mean(values[:d]), jnp.mean(values[d:])
        return jnp.where(is_gradient, gradients, hessians)

    theta = jnp.zeros((num_terms(d, degree),), dtype)
    gram, product, _, _ = accumulate(theta)
    theta = solve(jnp.ones((units.shape[0],), dtype), gram, product)
    for _ in range(passes - 1):
        _, product, squares, sizes = accumulate(theta)
        # A group that is fitted exactly has no variance: a millionth of its own size stands for it.
        noise = jnp.maximum(group_mean(squares), 1e-6 * group_mean(sizes))
        noise = jnp.where(noise > 0, noise, 1.0)
        theta = theta + solve(jnp.min(noise) / noise, gram, product)
    return theta, center, scale
