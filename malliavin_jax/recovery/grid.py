"""From a gradient on a grid back to the function: integration in d = 1, least squares in d > 1."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from .._base.types import Scalar


class Fit(eqx.Module):
    value: Float[Array, "..."]
    stderr: Float[Array, "..."]
    curl: Scalar
    curl_expected: Scalar


@eqx.filter_jit
def potential_of(
    axes: tuple[Float[Array, " _"], ...],
    gradient: Float[Array, "... d"],
    stderr: Float[Array, "... d"],
    usable: Bool[Array, "..."],
) -> Fit:
    """The function on the grid whose differences along the edges fit the integrals of `gradient` along them.

    An edge joins two neighbouring usable points. In d = 1 the fit is the running sum; in d > 1 it minimises
    Σ_edges w (ΔL − ∫)²/h², w = m/(m + se²) with m the geometric mean of se² over the edges, by
    conjugate gradients. Only the largest set of points joined by edges is kept: from one set to the next the
    constant is unknown.
    """
    d = len(axes)
    spacings = [jnp.diff(axis) for axis in axes]
    integrals, lengths, errors, joined = [], [], [], []
    for i, h in enumerate(spacings):
        g, se, ok = (jnp.moveaxis(a, i, 0) for a in (gradient[..., i], stderr[..., i], usable))
        h = h.reshape(-1, *(1,) * (d - 1))
        edge = ok[1:] & ok[:-1]
        se = jnp.where(ok, se, 0)
        parts = (
            _edge_integrals(jnp.where(ok, g, 0), h, edge),
            jnp.broadcast_to(h, edge.shape),
            (se[1:] + se[:-1]) / 2,
            edge,
        )
        for store, part in zip((integrals, lengths, errors, joined), parts, strict=True):
            store.append(jnp.moveaxis(part, 0, i))

    if d == 1:
        value = jnp.append(jnp.zeros(1, gradient.dtype), jnp.cumsum(integrals[0]))
    else:
        value = _least_squares(integrals, lengths, errors, joined, usable)

    free = [jnp.where(edge, 0.0, jnp.inf).astype(gradient.dtype) for edge in joined]
    number = jnp.arange(usable.size, dtype=gradient.dtype).reshape(usable.shape)
    label = _spread(jnp.where(usable, number, jnp.inf), free)
    sizes = jnp.bincount(jnp.where(usable, label, usable.size).astype(jnp.int32).ravel(), length=usable.size)
    inside = usable & (label == jnp.argmax(sizes).astype(gradient.dtype))
    lowest = jnp.argmin(jnp.where(inside, value, jnp.inf))
    # The sd of an integral is at most the integral of the sd, along any path: take the cheapest one.
    cost = [jnp.where(edge, h * se, jnp.inf) for edge, h, se in zip(joined, lengths, errors, strict=True)]
    bound = _spread(jnp.where(number == lowest.astype(number.dtype), 0.0, jnp.inf).astype(number.dtype), cost)
    curl, expected = _curl(value, integrals, lengths, errors, joined)
    return Fit(
        jnp.where(inside, value - value.ravel()[lowest], jnp.nan),
        jnp.where(inside, bound, jnp.inf),
        curl,
        expected,
    )


def _edge_integrals(g: Array, h: Array, edge: Array) -> Array:
    """∫ g over each edge of the first axis: h (g₀ + g₁)/2 − h² (g₁′ − g₀′)/12, with slopes from parabolas.

    The corrected trapezoid rule is the integral of the cubic through both values and slopes; with slopes of
    second order it is of fourth order on an even grid. A point with one neighbour takes the slope of the
    neighbour's parabola; an edge with none is left to the plain rule.
    """
    slope = jnp.diff(g, axis=0) / h
    inner = (h[1:] * slope[:-1] + h[:-1] * slope[1:]) / (h[1:] + h[:-1])
    ends = ((1, 1), *((0, 0),) * (g.ndim - 1))
    inner, valid = jnp.pad(inner, ends), jnp.pad(edge[1:] & edge[:-1], ends)
    left, right, has_left, has_right = inner[:-1], inner[1:], valid[:-1], valid[1:]
    change = jnp.where(has_left, slope - left, 0) + jnp.where(has_right, right - slope, 0)
    change = jnp.where(has_left & has_right, change, 2 * change)
    return jnp.where(edge, h * (g[1:] + g[:-1]) / 2 - h**2 * change / 12, 0)


def _least_squares(
    integrals: list[Array], lengths: list[Array], errors: list[Array], joined: list[Array], usable: Array
) -> Array:
    logs = sum(jnp.sum(jnp.where(edge, 2 * jnp.log(se), 0)) for edge, se in zip(joined, errors, strict=True))
    number = sum(jnp.sum(edge, dtype=errors[0].dtype) for edge in joined)
    m = jnp.exp(logs / number)  # zero if any error is: then all edges weigh the same
    weights = [
        jnp.where(edge, jnp.where(m > 0, m / (m + se**2), 1.0), 0.0) / h**2
        for edge, se, h in zip(joined, errors, lengths, strict=True)
    ]

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
    right = divergence([w * flow for w, flow in zip(weights, integrals, strict=True)])
    tolerance = 10 * float(jnp.finfo(right.dtype).eps) ** 0.75
    value, _ = jax.scipy.sparse.linalg.cg(
        normal, right, tol=tolerance, maxiter=50 * max(right.shape), M=lambda r: scale * r
    )
    return value


def _spread(start: Array, costs: list[Array]) -> Array:
    """The least start + cost over all paths along the edges (Bellman–Ford, on the whole grid at once)."""

    def relax(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        old, value = carry[0], carry[0]
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


def _curl(value: Array, integrals: list[Array], lengths: list[Array], errors: list[Array], joined: list[Array]):
    """Residual and its expected size, both relative to the field.

    Independent noise on the d components splits evenly: 1/d of its square looks like a gradient and is
    fitted, (d − 1)/d is curl.
    """
    d = len(integrals)

    def square(parts):
        return sum(jnp.sum(jnp.where(edge, part**2, 0)) for part, edge in zip(parts, joined, strict=True))

    means = [flow / h for flow, h in zip(integrals, lengths, strict=True)]
    residual = [m - jnp.diff(value, axis=i) / lengths[i] for i, m in enumerate(means)]
    field = jnp.sqrt(square(means))
    return jnp.sqrt(square(residual)) / field, jnp.sqrt((d - 1) / d * square(errors)) / field
