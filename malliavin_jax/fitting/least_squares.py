"""The least-squares fit of a polynomial to observed gradients and, where there are any, Hessians, in chunks of points.

In standardised units z the derivatives of the polynomial are Bφ(z), with φ the monomials of a `DerivativeTable` and B
linear in the coefficients θ. All that the fit needs of the points are therefore the means of φφᵀ, of φ times what θ
leaves over of the data, and of squares: `Moments`. The normal equations for θ are made from these. Of few points that
are in the host's memory NumPy makes them, in float64, before a program for their number could be compiled.
"""

import functools
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float
from scipy.linalg import LinAlgError, cho_factor, cho_solve

from .._base import host, mesh
from .._base.checks import check_count, check_nonnegative, check_shape, float_array
from .._base.small_tensors import matmul
from .._base.types import Numbers
from .monomials import DerivativeTable, all_exponents, combine, derivative_table, monomials, num_terms

_ON_HOST = 200_000  # points, up to which NumPy is as quick


class Data(NamedTuple):
    """Observed points, of which those of weight 0 do not count and may hold NaN."""

    x: Float[Numbers, "n d"]
    gradient: Float[Numbers, "n d"]
    hessian: Float[Numbers, "n d d"] | None
    weights: Float[Numbers, " n"]


class Units(NamedTuple):
    """z = (x − center)/scale, and the total weight of the points behind these."""

    center: Float[Numbers, " d"]
    scale: Float[Numbers, " d"]
    total: Float[Numbers, ""]

    @property
    def of_rows(self) -> Float[Numbers, " rows"]:
        """What gradients and Hessians, as one row of d + d² numbers, are multiplied with to be derivatives in z."""
        xp = host.module_of(self.scale)
        return xp.concatenate([self.scale, xp.outer(self.scale, self.scale).ravel()])


class Moments(NamedTuple):
    """Weighted means over the points; a row is a derivative, of which there are d + d², or d without Hessians."""

    gram: Float[Numbers, "u u"]  # φφᵀ
    product: Float[Numbers, "u rows"]  # φ times what θ leaves over
    residual_squares: Float[Numbers, " rows"]
    data_squares: Float[Numbers, " rows"]


class Fit(NamedTuple):
    """The polynomial Σ_t θ_t z^{e_t} with z = (x − center)/scale and e the exponents of `all_exponents`."""

    theta: Float[Numbers, " terms"]
    center: Float[Numbers, " d"]
    scale: Float[Numbers, " d"]


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
    data = Data(x, gradient, hessian, weights)
    settings = {
        "degree": check_count("degree", degree),
        "passes": check_count("passes", passes),
        "chunk_size": min(check_count("chunk_size", chunk_size), n),
        "ridge": 128 * float(jnp.finfo(x.dtype).eps),
    }
    if n > _ON_HOST or mesh.parts() > 1 or not host.on_host(data):
        return _compiled_fit(data, **settings)
    fit = _fit(jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), data), **settings)
    return jax.tree.map(lambda leaf: host.to_device(leaf, x.dtype), fit)


def _fit(data: Data, *, degree: int, passes: int, chunk_size: int, ridge: float) -> Fit:
    """The fit that `Polynomial.fit` describes.

    Later passes fit what the earlier ones left over, so they also repair rounding and the ridge's shrinkage.
    """
    xp, d, dtype = host.module_of(data.x), data.x.shape[1], data.x.dtype
    table = derivative_table(all_exponents(d, degree), (1,) if data.hessian is None else (1, 2))
    units = _standardise(data)
    moments = functools.partial(_moments, data=data, units=units, table=table, chunk_size=chunk_size)

    theta = xp.zeros((num_terms(d, degree),), dtype)
    first = moments(theta)
    theta = _solve(xp.ones((table.order.shape[0],), dtype), first.gram, first.product, table, ridge)
    for _ in range(passes - 1):
        left = moments(theta)
        noise = _noise_of_rows(left, table, d)
        theta = theta + _solve(xp.min(noise) / noise, first.gram, left.product, table, ridge)
    return Fit(theta, units.center, units.scale)


_compiled_fit = functools.partial(jax.jit, static_argnames=("degree", "passes", "chunk_size", "ridge"))(_fit)


def _standardise(data: Data) -> Units:
    """The weighted mean and standard deviation of the points; a coordinate that does not vary has scale 1."""
    xp = host.module_of(data.x)
    used = (data.weights > 0)[:, None]  # unused points may hold NaN, which a product with zero would keep
    total = xp.maximum(data.weights.sum(), xp.finfo(data.x.dtype).tiny)
    clean = xp.where(used, data.x, 0.0)
    center = matmul(data.weights, clean) / total
    deviation = xp.where(used, data.x - center[None], 0.0)
    variance = matmul(data.weights, deviation**2) / total
    return Units(center, xp.sqrt(xp.where(variance > 0, variance, 1.0)), total)


def _moments(
    theta: Float[Numbers, " terms"], *, data: Data, units: Units, table: DerivativeTable, chunk_size: int
) -> Moments:
    """The moments that θ leaves, chunk after chunk."""
    n, prediction = data.x.shape[0], combine(theta, table)
    of_part = functools.partial(_sums, units=units, table=table, prediction=prediction)
    if isinstance(data.x, np.ndarray):
        starts = range(0, n, chunk_size)
        parts = [jax.tree.map(lambda leaf, i=i: leaf[i : i + chunk_size], data) for i in starts]
        sums = functools.reduce(lambda a, b: jax.tree.map(operator.add, a, b), map(of_part, parts))
        return jax.tree.map(lambda total: total / units.total, sums)

    def add(sums: Moments, index: Array) -> tuple[Moments, None]:
        # The last chunk is slid back to stay inside the arrays; its points seen before count for nothing.
        start = jnp.minimum(index * chunk_size, n - chunk_size)
        chunk = jax.tree.map(lambda leaf: lax.dynamic_slice_in_dim(leaf, start, chunk_size), data)
        is_new = start + jnp.arange(chunk_size) >= index * chunk_size
        new = of_part(chunk._replace(weights=jnp.where(is_new, chunk.weights, 0.0)))
        return jax.tree.map(operator.add, sums, new), None

    u, r = table.monomials.shape[0], table.order.shape[0]
    zeros = Moments(*(jnp.zeros(shape, data.x.dtype) for shape in ((u, u), (u, r), (r,), (r,))))
    sums, _ = lax.scan(add, zeros, jnp.arange(-(-n // chunk_size)))
    return jax.tree.map(lambda total: total / units.total, sums)


def _sums(part: Data, *, units: Units, table: DerivativeTable, prediction: Float[Numbers, "rows u"]) -> Moments:
    """Sums over some of the points, where the means are wanted."""
    xp, used = host.module_of(part.x), (part.weights > 0)[:, None]
    rows = part.gradient
    if part.hessian is not None:
        rows = xp.concatenate([rows, part.hessian.reshape(len(rows), -1)], axis=1)
    rows = xp.where(used, rows, 0.0) * units.of_rows[: table.order.shape[0]][None]
    z = xp.where(used, (part.x - units.center[None]) / units.scale[None], 0.0)
    phi = monomials(z.T, table.monomials).T
    left = rows - matmul(phi, prediction.T)
    weighted = (phi * part.weights[:, None]).T
    return Moments(
        gram=matmul(weighted, phi),
        product=matmul(weighted, left),
        residual_squares=matmul(part.weights, left**2),
        data_squares=matmul(part.weights, rows**2),
    )


def _solve(
    row_weights: Float[Numbers, " rows"],
    gram: Float[Numbers, "u u"],
    product: Float[Numbers, "u rows"],
    table: DerivativeTable,
    ridge: float,
) -> Float[Numbers, " terms"]:
    """The weighted normal equations, with unit diagonal and a ridge, relative to the mean of their eigenvalues."""
    xp, dtype, terms = host.module_of(gram), gram.dtype, table.target.shape[1]

    def add(matrix: Numbers, row: tuple[Numbers, Numbers, Numbers]) -> tuple[Numbers, None]:
        weight, where, times = row
        return matrix + weight * times[:, None] * gram[where][:, where] * times[None, :], None

    zeros, rows = xp.zeros((terms, terms), dtype), (row_weights, table.target, table.multiple.astype(dtype))
    if xp is np:
        matrix = functools.reduce(lambda matrix, row: add(matrix, row)[0], zip(*rows, strict=True), zeros)
    else:
        matrix, _ = lax.scan(add, zeros, tuple(map(jnp.asarray, rows)))
    picked = xp.take_along_axis(product.T, table.target, 1)
    right = xp.sum(row_weights[:, None] * table.multiple.astype(dtype) * picked, axis=0)
    diagonal = xp.diagonal(matrix)
    inverse = 1.0 / xp.sqrt(xp.where(diagonal > 0, diagonal, 1.0))
    scaled = matrix * inverse[:, None] * inverse[None, :] + ridge * xp.eye(terms, dtype=dtype)
    if xp is np:
        return inverse * _solution(scaled, inverse * right)
    return inverse * jax.scipy.linalg.cho_solve(jax.scipy.linalg.cho_factor(scaled), inverse * right)


def _solution(matrix: Float[np.ndarray, "n n"], right: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
    """As JAX solves: NaN, and no exception, of data that are none."""
    try:
        return cho_solve(cho_factor(matrix, check_finite=False), right, check_finite=False)
    except LinAlgError:
        return np.full_like(right, np.nan)


def _noise_of_rows(left: Moments, table: DerivativeTable, d: int) -> Float[Numbers, " rows"]:
    """For each row the mean squared residual of its group, which is that of the gradients or of the Hessians."""
    xp, is_gradient = host.module_of(left.gram), table.order == 1

    def group_mean(values: Float[Numbers, " rows"]) -> Float[Numbers, " rows"]:
        hessians = values[d:] if len(values) > d else values  # without Hessians there is one group
        return xp.where(is_gradient, xp.mean(values[:d]), xp.mean(hessians))

    # A group that is fitted exactly has no variance: a millionth of its own size stands for it.
    noise = xp.maximum(group_mean(left.residual_squares), 1e-6 * group_mean(left.data_squares))
    return xp.where(noise > 0, noise, 1.0)
