"""Monomials, their derivatives, and least squares on derivatives: arrays in, arrays out.

A derivative of a monomial is a multiple of a lower one, ∂^δ z^e = (e!/(e−δ)!) z^{e−δ}. So the derivatives of
Σ_t θ_t z^{e_t} are all linear in one short vector φ(z) of monomials, and the normal equations of a fit to
them are linear in the one matrix Σ_n φ(z_n) φ(z_n)ᵀ: no design matrix is ever formed.
"""

import functools
import itertools
import math
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from ._misc import check_count, check_nonnegative, check_shape, float_array

Exponents = tuple[tuple[int, ...], ...]

# Accelerators multiply float32 matrices in fewer bits unless told otherwise; the normal equations need all.
_HIGHEST = lax.Precision.HIGHEST


def num_terms(d: int, degree: int) -> int:
    """Number of monomials in d variables of degree 1 to `degree`: (d + degree choose d) − 1.

    ```python
    mj.potentials.num_terms(2, 2)  # 5: x, y, x², xy, y²
    ```
    """
    return math.comb(d + degree, d) - 1


def all_exponents(d: int, degree: int) -> Exponents:
    """Exponents of those monomials, by increasing degree; the constant is left out."""
    choices = itertools.product(range(degree, -1, -1), repeat=d)
    return tuple(sorted((e for e in choices if 1 <= sum(e) <= degree), key=sum))


def check_exponents(exponents: Any) -> Exponents:
    """Exponents as tuples: one tuple per term, of one length, all different."""
    checked = tuple(tuple(check_count("each exponent", e, at_least=0) for e in term) for term in exponents)
    lengths = {len(term) for term in checked}
    if len(lengths) != 1 or 0 in lengths:
        raise ValueError(f"exponents must be tuples of one length, at least 1, got lengths {sorted(lengths)}")
    if len(set(checked)) != len(checked):
        raise ValueError(f"exponents must all be different, got {checked}")
    return checked


class DerivativeTable(NamedTuple):
    """How the derivatives ∂^δ, one row per δ, of Σ_t θ_t z^{e_t} come out of φ(z) (all arrays are constants).

    - `monomials` (u, d): the exponents of φ.
    - `source`, `factor` (rows, u): row r of the derivatives is Σ_u factor[r, u] θ[source[r, u]] φ_u.
    - `target`, `multiple` (rows, terms): the same from the side of the terms, ∂^{δ_r} z^{e_t} =
      multiple[r, t] φ[target[r, t]].
    - `order` (rows,): |δ|.
    """

    monomials: np.ndarray
    source: np.ndarray
    factor: np.ndarray
    target: np.ndarray
    multiple: np.ndarray
    order: np.ndarray


@functools.lru_cache(maxsize=64)
def derivative_table(exponents: Exponents, orders: tuple[int, ...]) -> DerivativeTable:
    """The table for all derivatives of the given orders: 1 row for order 0, d for order 1, d² for order 2."""
    d = len(exponents[0])
    axes = [c for order in orders for c in itertools.product(range(d), repeat=order)]
    shifts = [tuple(chosen.count(i) for i in range(d)) for chosen in axes]
    lowered = [[tuple(map(operator.sub, e, shift)) for e in exponents] for shift in shifts]
    # The constant is kept in φ even if unused, so that φ is never empty.
    kept = sorted({(0,) * d, *(e for row in lowered for e in row if min(e) >= 0)}, key=lambda e: (sum(e), e))
    place = {e: u for u, e in enumerate(kept)}
    rows, terms = len(shifts), len(exponents)
    source, factor = np.zeros((rows, len(kept)), np.int32), np.zeros((rows, len(kept)))
    target, multiple = np.zeros((rows, terms), np.int32), np.zeros((rows, terms))
    for r, t in itertools.product(range(rows), range(terms)):
        if min(lowered[r][t]) >= 0:
            u = place[lowered[r][t]]
            size = float(math.prod(map(math.perm, exponents[t], shifts[r])))
            source[r, u], factor[r, u], target[r, t], multiple[r, t] = t, size, u, size
    return DerivativeTable(
        np.asarray(kept), source, factor, target, multiple, np.asarray([len(chosen) for chosen in axes])
    )


def monomials(z: Float[Array, " d"], exponents: np.ndarray) -> Float[Array, " u"]:
    """z^e for each row e of `exponents`, from a table of powers: right at z = 0, as are its derivatives."""
    powers = [jnp.ones_like(z)]
    for _ in range(int(exponents.max())):
        powers.append(powers[-1] * z)
    table = jnp.stack(powers)
    return functools.reduce(operator.mul, (table[exponents[:, i], i] for i in range(z.shape[0])))


def combine(theta: Float[Array, " terms"], table: DerivativeTable) -> Float[Array, "rows u"]:
    """The matrix that takes φ(z) to the derivatives of Σ_t θ_t z^{e_t}; it does not depend on z."""
    return jnp.asarray(table.factor, theta.dtype) * theta[table.source]


def derivatives(
    theta: Float[Array, " terms"], z: Float[Array, " d"], exponents: Exponents, order: int
) -> Float[Array, " rows"]:
    """All derivatives of one order, in z, of Σ_t θ_t z^{e_t}."""
    table = derivative_table(exponents, (order,))
    return jnp.matmul(combine(theta, table), monomials(z, table.monomials), precision=_HIGHEST)


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
