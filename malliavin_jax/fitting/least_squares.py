"""The least-squares fit of a polynomial to observed gradients and, where there are any, Hessians, in chunks of points.

In standardised units z the derivatives of the polynomial are Bφ(z), with φ the monomials of a `DerivativeTable` and B
linear in the coefficients θ. All that the fit needs of the points are therefore the means of φφᵀ, of φ times what θ
leaves over of the data, and of squares: `Moments`. The normal equations for θ are made from these.
"""

import functools
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from .._base.checks import check_count, check_nonnegative, check_shape, float_array
from .._base.small_tensors import HIGHEST
from .._base.types import Scalar
from .monomials import DerivativeTable, all_exponents, combine, derivative_table, monomials, num_terms


class Data(NamedTuple):
    """Observed points, of which those of weight 0 do not count and may hold NaN."""

    x: Float[Array, "n d"]
    gradient: Float[Array, "n d"]
    hessian: Float[Array, "n d d"] | None
    weights: Float[Array, " n"]


class Units(NamedTuple):
    """z = (x − center)/scale, and the total weight of the points behind these."""

    center: Float[Array, " d"]
    scale: Float[Array, " d"]
    total: Scalar

    @property
    def of_rows(self) -> Float[Array, " rows"]:
        """What gradients and Hessians, as one row of d + d² numbers, are multiplied with to be derivatives in z."""
        return jnp.concatenate([self.scale, jnp.outer(self.scale, self.scale).ravel()])


class Moments(NamedTuple):
    """Weighted means over the points; a row is a derivative, of which there are d + d², or d without Hessians."""

    gram: Float[Array, "u u"]  # φφᵀ
    product: Float[Array, "u rows"]  # φ times what θ leaves over
    residual_squares: Float[Array, " rows"]
    data_squares: Float[Array, " rows"]


class Fit(NamedTuple):
    """The polynomial Σ_t θ_t z^{e_t} with z = (x − center)/scale and e the exponents of `all_exponents`."""

    theta: Float[Array, " terms"]
    center: Float[Array, " d"]
    scale: Float[Array, " d"]


def fit_derivatives(
    x: Any, gradient: Any, hessian: Any, weights: Any, *, degree: int, passes: int, chunk_size: int
) -> Fit:
    """Check the data of `Polynomial.fit`, bring them to the dtype of x, and fit."""
    x = float_array("x", x)
    check_shape("x", x, (None, None))
    n, d = x.shape
    check_count("the number of points in x", n)
    check_count("the dimension of x", d)
    gradient = float_array("gradient", gradient).astype(x.dtype)
    check_shape("gradient", gradient, (n, d))
    if hessian is not None:
        hessian = float_array("hessian", hessian).astype(x.dtype)
        check_shape("hessian", hessian, (n, d, d))
    weights = jnp.ones((n,), x.dtype) if weights is None else jnp.asarray(weights).astype(x.dtype)
    check_shape("weights", weights, (n,))
    check_nonnegative("weights", weights)
    return _fit(
        Data(x, gradient, hessian, weights),
        degree=check_count("degree", degree),
        passes=check_count("passes", passes),
        chunk_size=min(check_count("chunk_size", chunk_size), n),
    )


@functools.partial(jax.jit, static_argnames=("degree", "passes", "chunk_size"))
def _fit(data: Data, *, degree: int, passes: int, chunk_size: int) -> Fit:
    """The fit that `Polynomial.fit` describes.

    Later passes fit what the earlier ones left over, so they also repair rounding and the ridge's shrinkage.
    """
    d, dtype = data.x.shape[1], data.x.dtype
    table = derivative_table(all_exponents(d, degree), (1,) if data.hessian is None else (1, 2))
    units = _standardise(data)
    moments = functools.partial(_moments, data=data, units=units, table=table, chunk_size=chunk_size)

    theta = jnp.zeros((num_terms(d, degree),), dtype)
    first = moments(theta)
    theta = _solve(jnp.ones((table.order.shape[0],), dtype), first.gram, first.product, table)
    for _ in range(passes - 1):
        left = moments(theta)
        noise = _noise_of_rows(left, table, d)
        theta = theta + _solve(jnp.min(noise) / noise, first.gram, left.product, table)
    return Fit(theta, units.center, units.scale)


def _standardise(data: Data) -> Units:
    """The weighted mean and standard deviation of the points; a coordinate that does not vary has scale 1."""
    used = (data.weights > 0)[:, None]  # unused points may hold NaN, which a product with zero would keep
    total = jnp.maximum(data.weights.sum(), jnp.finfo(data.x.dtype).tiny)
    clean = jnp.where(used, data.x, 0.0)
    center = jnp.matmul(data.weights, clean, precision=HIGHEST) / total
    deviation = jnp.where(used, data.x - center[None], 0.0)
    variance = jnp.matmul(data.weights, deviation**2, precision=HIGHEST) / total
    return Units(center, jnp.sqrt(jnp.where(variance > 0, variance, 1.0)), total)


def _moments(
    theta: Float[Array, " terms"], *, data: Data, units: Units, table: DerivativeTable, chunk_size: int
) -> Moments:
    """The moments that θ leaves, chunk after chunk."""
    n, dtype = data.x.shape[0], data.x.dtype
    prediction, of_rows = combine(theta, table), units.of_rows[: table.order.shape[0]]

    def add(sums: Moments, index: Array) -> tuple[Moments, None]:
        # The last chunk is slid back to stay inside the arrays; its points seen before count for nothing.
        start = jnp.minimum(index * chunk_size, n - chunk_size)
        chunk = jax.tree.map(lambda leaf: lax.dynamic_slice_in_dim(leaf, start, chunk_size), data)
        is_new = start + jnp.arange(chunk_size) >= index * chunk_size
        weight = jnp.where(is_new, chunk.weights, 0.0)
        used = (weight > 0)[:, None]
        rows = chunk.gradient
        if chunk.hessian is not None:
            rows = jnp.concatenate([rows, chunk.hessian.reshape(chunk_size, -1)], axis=1)
        rows = jnp.where(used, rows, 0.0) * of_rows[None]
        z = jnp.where(used, (chunk.x - units.center[None]) / units.scale[None], 0.0)
        phi = jax.vmap(monomials, in_axes=(0, None))(z, table.monomials)
        left = rows - jnp.matmul(phi, prediction.T, precision=HIGHEST)
        weighted = (phi * weight[:, None]).T
        new = Moments(
            gram=jnp.matmul(weighted, phi, precision=HIGHEST),
            product=jnp.matmul(weighted, left, precision=HIGHEST),
            residual_squares=jnp.matmul(weight, left**2, precision=HIGHEST),
            data_squares=jnp.matmul(weight, rows**2, precision=HIGHEST),
        )
        return jax.tree.map(operator.add, sums, new), None

    u, r = table.monomials.shape[0], table.order.shape[0]
    zeros = Moments(*(jnp.zeros(shape, dtype) for shape in ((u, u), (u, r), (r,), (r,))))
    sums, _ = lax.scan(add, zeros, jnp.arange(-(-n // chunk_size)))
    return jax.tree.map(lambda total: total / units.total, sums)


def _solve(
    row_weights: Float[Array, " rows"],
    gram: Float[Array, "u u"],
    product: Float[Array, "u rows"],
    table: DerivativeTable,
) -> Float[Array, " terms"]:
    """The weighted normal equations, with unit diagonal and a ridge of some units of rounding."""
    dtype, terms = gram.dtype, table.target.shape[1]
    multiple, target = jnp.asarray(table.multiple, dtype), jnp.asarray(table.target)

    def add(matrix: Array, row: tuple[Array, Array, Array]) -> tuple[Array, None]:
        weight, where, times = row
        return matrix + weight * times[:, None] * gram[where][:, where] * times[None, :], None

    matrix, _ = lax.scan(add, jnp.zeros((terms, terms), dtype), (row_weights, target, multiple))
    picked = jax.vmap(lambda where, column: column[where])(target, product.T)
    right = jnp.sum(row_weights[:, None] * multiple * picked, axis=0)
    diagonal = jnp.diagonal(matrix)
    inverse = 1.0 / jnp.sqrt(jnp.where(diagonal > 0, diagonal, 1.0))
    # The scaled matrix has unit diagonal: this ridge is relative to the mean of its eigenvalues.
    ridge = 128 * float(jnp.finfo(dtype).eps)
    scaled = matrix * inverse[:, None] * inverse[None, :] + ridge * jnp.eye(terms, dtype=dtype)
    return inverse * jax.scipy.linalg.cho_solve(jax.scipy.linalg.cho_factor(scaled), inverse * right)


def _noise_of_rows(left: Moments, table: DerivativeTable, d: int) -> Float[Array, " rows"]:
    """For each row the mean squared residual of its group, which is that of the gradients or of the Hessians."""
    is_gradient = jnp.asarray(table.order == 1)

    def group_mean(values: Float[Array, " rows"]) -> Float[Array, " rows"]:
        hessians = values[d:] if len(values) > d else values  # without Hessians there is one group
        return jnp.where(is_gradient, jnp.mean(values[:d]), jnp.mean(hessians))

    # A group that is fitted exactly has no variance: a millionth of its own size stands for it.
    noise = jnp.maximum(group_mean(left.residual_squares), 1e-6 * group_mean(left.data_squares))
    return jnp.where(noise > 0, noise, 1.0)
