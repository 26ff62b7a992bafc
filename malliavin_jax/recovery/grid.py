"""From the edges of a grid back to the function: integration in d = 1, least squares in d > 1."""

from collections.abc import Sequence
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from .._base.types import Scalar
from .quadrature import Edges


class Fit(NamedTuple):
    """The function on the grid: value (NaN where unknown), standard error, and the part that is no gradient."""

    value: Float[Array, "..."]
    stderr: Float[Array, "..."]
    curl: Scalar
    curl_expected: Scalar


class Curl(NamedTuple):
    """The residual of the fit, and what noise alone would make it, both relative to the field."""

    found: Scalar
    expected: Scalar


@eqx.filter_jit
def potential_of(edges: tuple[Edges, ...], usable: Bool[Array, "..."]) -> Fit:
    """The function on the grid whose differences along the edges fit the integrals of a gradient along them.

    An edge joins two neighbouring usable points. In d = 1 the fit is the running sum; in d > 1 it minimises
    Σ_edges w (ΔL − ∫)²/h², w = m/(m + se²) with m the geometric mean of se² over the edges, by
    conjugate gradients. Only the largest set of points joined by edges is kept: from one set to the next the
    constant is unknown.
    """
    dtype = edges[0].integral.dtype
    if len(edges) == 1:
        value = jnp.append(jnp.zeros(1, dtype), jnp.cumsum(edges[0].integral))
    else:
        value = _least_squares(edges, usable)

    number = jnp.arange(usable.size, dtype=dtype).reshape(usable.shape)
    inside = _largest_region(edges, usable, number)
    lowest = jnp.argmin(jnp.where(inside, value, jnp.inf))
    # The sd of an integral is at most the integral of the sd, along any path: take the cheapest one.
    costs = [jnp.where(e.joined, e.spacing * e.stderr + e.quadrature, jnp.inf) for e in edges]
    bound = _cheapest(jnp.where(number == lowest.astype(number.dtype), 0.0, jnp.inf).astype(number.dtype), costs)
    curl = _curl(value, edges)
    return Fit(
        value=jnp.where(inside, value - value.ravel()[lowest], jnp.nan),
        stderr=jnp.where(inside, bound, jnp.inf),
        curl=curl.found,
        curl_expected=curl.expected,
    )


def _largest_region(edges: Sequence[Edges], usable: Array, number: Array) -> Array:
    """Which points belong to the largest set that edges join; `number` counts the points of the grid."""
    free = [jnp.where(e.joined, 0.0, jnp.inf).astype(number.dtype) for e in edges]
    label = _cheapest(jnp.where(usable, number, jnp.inf), free)  # the lowest number that edges lead to
    sizes = jnp.bincount(jnp.where(usable, label, usable.size).astype(jnp.int32).ravel(), length=usable.size)
    return usable & (label == jnp.argmax(sizes).astype(number.dtype))


def _least_squares(edges: Sequence[Edges], usable: Array) -> Array:
    logs = sum(jnp.sum(jnp.where(e.joined, 2 * jnp.log(e.stderr), 0)) for e in edges)
    number = sum(jnp.sum(e.joined, dtype=e.stderr.dtype) for e in edges)
    m = jnp.exp(logs / number)  # zero if any error is: then all edges weigh the same
    weights = [jnp.where(e.joined, jnp.where(m > 0, m / (m + e.stderr**2), 1.0), 0.0) / e.spacing**2 for e in edges]

    def divergence(flows: list[Array]) -> Array:
        """The transpose of taking differences along each axis."""
        total = jnp.zeros_like(usable, flows[0].dtype)
        for i, flow in enumerate(flows):
            total = total - jnp.diff(_pad(flow, i, 1, 1, 0.0), axis=i)
        return total

    def normal(value: Array) -> Array:
        return divergence([w * jnp.diff(value, axis=i) for i, w in enumerate(weights)])

    # The diagonal of the normal matrix: the weights of the edges that meet at a point.
    diagonal = sum(_pad(w, i, 1, 0, 0.0) + _pad(w, i, 0, 1, 0.0) for i, w in enumerate(weights))
    scale = jnp.where(diagonal > 0, 1 / jnp.where(diagonal > 0, diagonal, 1), 0)
    right = divergence([w * e.integral for w, e in zip(weights, edges, strict=True)])
    tolerance = 10 * float(jnp.finfo(right.dtype).eps) ** 0.75
    value, _ = jax.scipy.sparse.linalg.cg(
        normal, right, tol=tolerance, maxiter=50 * max(right.shape), M=lambda r: scale * r
    )
    return value


def _cheapest(start: Array, costs: Sequence[Array]) -> Array:
    """The least start + cost over all paths along the edges (Bellman–Ford, on the whole grid at once)."""

    def relax(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        old, _ = carry
        value = old
        for i, cost in enumerate(costs):
            before = jax.lax.slice_in_dim(old, 0, -1, axis=i) + cost
            after = jax.lax.slice_in_dim(old, 1, None, axis=i) + cost
            value = jnp.minimum(value, jnp.minimum(_pad(before, i, 1, 0), _pad(after, i, 0, 1)))
        return value, jnp.any(value < old)

    return jax.lax.while_loop(lambda carry: carry[1], relax, (start, jnp.asarray(True)))[0]


def _pad(array: Array, axis: int, before: int, after: int, value: float = jnp.inf) -> Array:
    widths = [(0, 0)] * array.ndim
    widths[axis] = (before, after)
    return jnp.pad(array, widths, constant_values=value)


def _curl(value: Array, edges: Sequence[Edges]) -> Curl:
    """Residual and its expected size, both relative to the field.

    Independent noise on the d components splits evenly: 1/d of its square looks like a gradient and is
    fitted, (d − 1)/d is curl.
    """
    d = len(edges)

    def square(parts: Sequence[Array]) -> Array | int:
        return sum(jnp.sum(jnp.where(e.joined, part**2, 0)) for part, e in zip(parts, edges, strict=True))

    means = [e.integral / e.spacing for e in edges]
    residual = [
        mean - jnp.diff(value, axis=i) / e.spacing for i, (mean, e) in enumerate(zip(means, edges, strict=True))
    ]
    field = jnp.sqrt(square(means))
    expected = jnp.sqrt((d - 1) / d * square([e.stderr for e in edges])) / field
    return Curl(found=jnp.sqrt(square(residual)) / field, expected=expected)
