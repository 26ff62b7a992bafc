"""Integrals of a gradient along the edges of a grid, with the error of the rule itself."""

from typing import NamedTuple

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

# Errors of the rule that integrates the cubic through four points, over the middle interval and over an end one, are
# 11/720 and 19/720 of h times the fourth difference, which is 12 times the change of what two parabolas disagree by.
_INSIDE, _AT_AN_END = 11 / 60, 19 / 60
_LEAST = 0.1  # of what the parabolas disagree by: the fourth difference may vanish by chance, as it does by symmetry
# A fourth difference of independent errors moves the estimated error by 0.13 h se: what is below this is no evidence.
_NOISE = 0.35


class Edges(NamedTuple):
    """The edges along one axis of the grid, one fewer than there are points on it."""

    integral: Float[Array, "..."]  # of the gradient along the edge; 0 if not joined
    quadrature: Float[Array, "..."]  # about how far off the rule that gave it may be
    spacing: Float[Array, "..."]
    stderr: Float[Array, "..."]  # of the gradient on it, the mean over it
    joined: Bool[Array, "..."]  # whether both ends are usable, and all points between


class Rule(NamedTuple):
    """An integral over each interval, and an estimate of its error."""

    integral: Array
    error: Array


@eqx.filter_jit
def edges_of(
    axis: int,
    points: Float[Array, " _"],
    gradient: Float[Array, "..."],
    stderr: Float[Array, "..."],
    usable: Bool[Array, "..."],
    pieces: int = 1,
) -> Edges:
    """The edges along one axis, from the component of the gradient along it.

    Args:
        axis: which one.
        points: on this axis, `pieces` of whose intervals make an edge.
        gradient: the component along the axis, at all points of a grid with these on this axis.
        stderr: its standard error.
        usable: where it is trusted.
        pieces: intervals to an edge.

    Returns:
        The edges; an edge with a point that is not usable joins nothing.
    """
    g, se, ok = (jnp.moveaxis(array, axis, 0) for array in (gradient, stderr, usable))
    h = jnp.diff(points).reshape(-1, *(1,) * (usable.ndim - 1))
    joined = ok[1:] & ok[:-1]
    se = jnp.where(ok, se, 0)
    error = (se[1:] + se[:-1]) / 2
    rule = integrate(jnp.where(ok, g, 0), h, joined)
    beyond = jnp.maximum(rule.error - _NOISE * h * error, 0)

    def gathered(array: Array) -> Array:
        """The sum over the pieces of each edge."""
        return jnp.sum(array.reshape(-1, pieces, *array.shape[1:]), 1, dtype=array.dtype)

    whole = gathered(h)
    joined = jnp.all(joined.reshape(-1, pieces, *joined.shape[1:]), 1)
    along = Edges(
        integral=jnp.where(joined, gathered(rule.integral), 0),
        quadrature=jnp.where(joined, gathered(beyond), 0),
        spacing=jnp.broadcast_to(whole, joined.shape),
        stderr=gathered(h * error) / whole if pieces > 1 else error,
        joined=joined,
    )
    return Edges(*(jnp.moveaxis(part, 0, axis) for part in along))


def integrate(g: Array, h: Array, edge: Array) -> Rule:
    """∫ g over each interval of the first axis, by the parabolas through it and the point before, or the one after.

    Their mean is the integral of the cubic through all four points, on an even grid: of fourth order. An interval at an
    end has one parabola; what the other would add is taken from the neighbour, which makes it a cubic too. An interval
    whose only neighbour is an end itself is left to the parabola, and one with no neighbour to the trapezoid rule.

    The error is estimated by how the disagreement D of the two parabolas changes from one interval to the next (on an
    even grid this is the fourth difference of g), by D itself where there is one alone or where the grid is uneven, by
    parabola against trapezoid where there is none, and on a single interval by the range of a monotone gradient.
    """
    slope = jnp.diff(g, axis=0) / h
    trapezoid = h * (g[1:] + g[:-1]) / 2
    inner = (h[1:] * slope[:-1] + h[:-1] * slope[1:]) / (h[1:] + h[:-1])
    ends = ((1, 1), *((0, 0),) * (g.ndim - 1))
    inner, valid = jnp.pad(inner, ends), jnp.pad(edge[1:] & edge[:-1], ends)
    has_left, has_right = valid[:-1], valid[1:]
    by_left = trapezoid - h**2 / 6 * (slope - inner[:-1])
    by_right = trapezoid - h**2 / 6 * (inner[1:] - slope)

    both = has_left & has_right
    third = jnp.where(both, (by_right - by_left) / h**4, 0)  # a twelfth of the third derivative, up to its sign
    has_next, has_last = _after(both) & has_right, _before(both) & has_left
    known = both | has_next | has_last
    third = jnp.where(both, third, jnp.where(has_next, _after(third), jnp.where(has_last, _before(third), 0)))
    half = h**4 * third / 2
    cubic = jnp.where(has_left, by_left + half, by_right - half)
    parabola = jnp.where(has_left, by_left, by_right)
    integral = jnp.where(known, cubic, jnp.where(has_left | has_right, parabola, trapezoid))

    error = jnp.where(
        known,
        h**4 * _change(third, both, has_next, has_last) + jnp.abs(half) * (_LEAST + _unevenness(h)),
        jnp.where(has_left | has_right, jnp.abs(parabola - trapezoid), h**2 * jnp.abs(slope) / 2),
    )
    return Rule(jnp.where(edge, integral, 0), jnp.where(edge, error, 0))


def _change(third: Array, both: Array, has_next: Array, has_last: Array) -> Array:
    """What the change of the third derivative between neighbouring intervals contributes to the error, over h⁴."""
    after, before = both & _after(both), both & _before(both)
    step_after = jnp.where(after, jnp.abs(_after(third) - third), 0)
    step_before = jnp.where(before, jnp.abs(_before(third) - third), 0)
    alone = jnp.abs(third) / 2
    inside = jnp.where(after | before, _INSIDE * jnp.maximum(step_after, step_before), alone)
    from_next = jnp.where(_after(after), _AT_AN_END * _after(step_after), alone)
    from_last = jnp.where(_before(before), _AT_AN_END * _before(step_before), alone)
    return jnp.where(both, inside, jnp.where(has_next, from_next, jnp.where(has_last, from_last, 0)))


def _unevenness(h: Array) -> Array:
    """0 on an even grid; up to 2 where neighbouring intervals are of very different lengths."""
    ratio = jnp.abs(jnp.diff(h, axis=0)) / (h[1:] + h[:-1])
    ratio = jnp.where(ratio > 1e-3, ratio, 0)  # the spacings of an even grid differ by rounding
    ratio = jnp.pad(ratio, ((1, 1), *((0, 0),) * (h.ndim - 1)))
    return 2 * jnp.maximum(ratio[1:], ratio[:-1])


def _after(array: Array) -> Array:
    """At each interval, what is at the next one; zero at the last."""
    return jnp.concatenate([array[1:], jnp.zeros_like(array[:1])])


def _before(array: Array) -> Array:
    """At each interval, what is at the one before; zero at the first."""
    return jnp.concatenate([jnp.zeros_like(array[:1]), array[:-1]])
