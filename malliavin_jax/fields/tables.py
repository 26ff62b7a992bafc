"""A field on a regular grid, interpolated, and linear interpolation itself."""

import itertools
from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .._base.checks import check_count, check_shape
from .._base.types import Key, Place, Scalar, Vector
from ..estimate.field import AbstractField, check_field, place_of
from ..estimate.ratio import Estimate

_HALFWAY = 4096  # places at which the error of interpolation is measured


class Corner(NamedTuple):
    """A node of the cell around a place, and its share in linear interpolation there."""

    node: tuple[Array, ...]
    share: Scalar


def corners_around(place: Vector, shape: tuple[int, ...]) -> list[Corner]:
    """The 2^d nodes around `place`, which counts in cells from the first node, in a grid of `shape` nodes."""
    cells = jnp.asarray(shape, jnp.int32) - 1
    index = jnp.clip(jnp.floor(place).astype(jnp.int32), 0, cells - 1)
    part = place - index.astype(place.dtype)
    found = []
    for number in range(2 ** len(shape)):
        bits = [(number >> i) & 1 for i in range(len(shape))]
        share = jnp.asarray(1, place.dtype)
        for i, bit in enumerate(bits):
            share = share * (part[i] if bit else 1 - part[i])
        found.append(Corner(tuple(index[i] + bit for i, bit in enumerate(bits)), share))
    return found


def interpolate(table: Array, corners: list[Corner]) -> Array:
    """The multilinear interpolation of a table whose first axes are those of the grid."""
    total = jnp.zeros_like(table[corners[0].node])
    for node, share in corners:
        entry = table[node]
        # An infinite entry at a corner without a share must not make a NaN.
        total = total + share * jnp.where((share > 0) | jnp.isfinite(entry), entry, 0)
    return total


class TabulatedField(AbstractField):
    """A field evaluated once on a regular grid, then interpolated linearly: for chains that query millions of times.

    Outside the grid the value at the nearest point is continued with the stiffness 1/(half-width)².

    Args:
        field: any gradient field, `field(alpha) -> Estimate`.
        axes: one increasing, equally spaced array of nodes for each dimension.
        chunk_size: at how many nodes the field is evaluated at a time.

    Attributes:
        estimates: those of the field at the nodes, with the axes of the grid in front.
        low: the first node of each axis.
        step: the distance of the nodes on each axis.
        interpolation_error: the largest difference between the table and the field halfway between nodes: at (up to
            4096 of) the centres of the cells and of their faces and edges, one of which is worst for linear
            interpolation of a smooth field, whatever the signs of its second derivatives.

    Raises:
        ValueError: if an axis has fewer than two nodes, or if they are not increasing and equally spaced.

    Example:
        ```python
        import jax.numpy as jnp
        import malliavin_jax as mj

        field = mj.TrueField(mj.potentials.Quartic())  # or a MalliavinField
        table = mj.TabulatedField(field, (jnp.linspace(-1.5, 1.5, 33),))
        table(jnp.array([0.5])).value, table.interpolation_error
        ```
    """

    estimates: Estimate
    low: Vector
    step: Vector
    interpolation_error: Vector

    def __init__(
        self, field: Callable[..., Estimate], axes: tuple[Float[Array, " nodes"], ...], *, chunk_size: int = 256
    ):
        check_field(field)
        axes = tuple(jnp.asarray(axis) for axis in axes)
        _check_axes(axes)
        chunk_size = check_count("chunk_size", chunk_size)
        evaluate = eqx.filter_jit(lambda field, points: jax.lax.map(field, points, batch_size=chunk_size))
        self.low = jnp.stack([axis[0] for axis in axes])
        self.step = jnp.stack([(axis[-1] - axis[0]) / (axis.shape[0] - 1) for axis in axes])
        nodes = jnp.stack(jnp.meshgrid(*axes, indexing="ij"), -1)
        flat = evaluate(field, nodes.reshape(-1, len(axes)))
        self.estimates = jax.tree.map(lambda leaf: leaf.reshape(*nodes.shape[:-1], *leaf.shape[1:]), flat)
        self.interpolation_error = jnp.zeros_like(self.low)  # a table must be whole before it can be queried
        halfway = _halfway_points(axes)
        halfway = halfway[:: -(-len(halfway) // _HALFWAY)]
        difference = jax.vmap(lambda point: self(point).value)(halfway) - evaluate(field, halfway).value
        self.interpolation_error = jnp.max(jnp.abs(difference), 0)

    def __call__(self, alpha: Place, *, key: Key | None = None) -> Estimate:
        alpha = place_of(alpha, len(self.low), self.low.dtype)
        table = self.estimates
        shape = table.density.shape
        high = self.low + self.step * (jnp.asarray(shape) - 1).astype(alpha.dtype)
        nearest = jnp.clip(alpha, self.low, high)
        corners = corners_around((nearest - self.low) / self.step, shape)
        outside = jnp.any(alpha != nearest)
        trusted = ~outside
        for node, share in corners:
            trusted = trusted & (table.trusted[node] | ~(share > 0))
        spring = 4 / (high - self.low) ** 2
        return Estimate(
            value=interpolate(table.value, corners) + spring * (alpha - nearest),
            stderr=jnp.where(outside, jnp.inf, interpolate(table.stderr, corners)),
            density=interpolate(table.density, corners),
            density_stderr=interpolate(table.density_stderr, corners),
            trusted=trusted,
        )


def _check_axes(axes: tuple[Float[Array, " nodes"], ...]) -> None:
    for i, axis in enumerate(axes):
        check_shape(f"axes[{i}]", axis, (None,), "nodes")
        steps = jnp.diff(axis)
        if axis.shape[0] < 2 or not bool(jnp.all(steps > 0)) or not bool(jnp.allclose(steps, steps[0], rtol=1e-3)):
            raise ValueError(f"axes[{i}] must be an increasing regular grid of at least 2 nodes")


def _halfway_points(axes: tuple[Float[Array, " nodes"], ...]) -> Float[Array, "points d"]:
    """The centres of the cells of a grid, and of their faces and edges."""
    halves = [(axis[1:] + axis[:-1]) / 2 for axis in axes]
    choices = itertools.product((False, True), repeat=len(axes))
    grids = [
        jnp.meshgrid(*(half if between else axis for between, half, axis in zip(choice, halves, axes, strict=True)))
        for choice in choices
        if any(choice)
    ]
    return jnp.concatenate([jnp.stack(grid, -1).reshape(-1, len(axes)) for grid in grids])
