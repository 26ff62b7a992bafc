"""A field on a regular grid, interpolated."""

import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .._base.checks import check_shape
from .._base.types import Key, Vector
from ..estimate.ratio import Estimate


class TabulatedField(eqx.Module):
    """A field evaluated once on a regular grid, then interpolated linearly: for chains that query millions of times.

    `interpolation_error` is the largest difference between the table and the field halfway between nodes: at (up to
    4096 of) the centres of the cells and of their faces and edges, one of which is worst for linear interpolation of a
    smooth field, whatever the signs of its second derivatives. Outside the grid the value at the nearest point is
    continued with the stiffness 1/(half-width)².

    ```python
    table = mj.TabulatedField(mj.TrueField(loss), (jnp.linspace(-1.5, 1.5, 33),))
    table.interpolation_error  # small; `field` in place of the true one makes chains fast
    ```
    """

    estimates: Estimate
    low: Vector
    step: Vector
    interpolation_error: Vector

    def __init__(self, field, axes: tuple[Float[Array, " nodes"], ...], *, batch_size: int = 256):
        axes = tuple(jnp.asarray(axis) for axis in axes)
        for i, axis in enumerate(axes):
            check_shape(f"axes[{i}]", axis, (None,))
            steps = jnp.diff(axis)
            if axis.shape[0] < 2 or not bool(jnp.all(steps > 0)) or not bool(jnp.allclose(steps, steps[0], rtol=1e-3)):
                raise ValueError(f"axes[{i}] must be an increasing regular grid of at least 2 nodes")
        self.low = jnp.stack([axis[0] for axis in axes])
        self.step = jnp.stack([(axis[-1] - axis[0]) / (axis.shape[0] - 1) for axis in axes])
        nodes = jnp.stack(jnp.meshgrid(*axes, indexing="ij"), -1)
        evaluate = eqx.filter_jit(lambda field, points: jax.lax.map(field, points, batch_size=batch_size))
        flat = evaluate(field, nodes.reshape(-1, len(axes)))
        self.estimates = jax.tree.map(lambda leaf: leaf.reshape(*nodes.shape[:-1], *leaf.shape[1:]), flat)
        self.interpolation_error = jnp.zeros_like(self.low)
        halfway = _halfway_points(axes)
        halfway = halfway[:: -(-len(halfway) // 4096)]
        difference = jax.vmap(lambda point: self(point).value)(halfway) - evaluate(field, halfway).value
        self.interpolation_error = jnp.max(jnp.abs(difference), 0)

    def __call__(self, alpha: Vector, *, key: Key | None = None) -> Estimate:
        check_shape("alpha", alpha, self.low.shape)
        d = self.low.shape[0]
        cells = jnp.asarray(self.estimates.density.shape) - 1
        high = self.low + self.step * cells.astype(alpha.dtype)
        nearest = jnp.clip(alpha, self.low, high)
        place = (nearest - self.low) / self.step
        index = jnp.clip(jnp.floor(place).astype(jnp.int32), 0, cells.astype(jnp.int32) - 1)
        part = place - index.astype(place.dtype)
        leaves = (self.estimates.value, self.estimates.stderr, self.estimates.density, self.estimates.density_stderr)
        total, trusted = [jnp.zeros_like(leaf[(0,) * d]) for leaf in leaves], jnp.asarray(True)
        for corner in range(2**d):
            bits = [(corner >> i) & 1 for i in range(d)]
            share = jnp.asarray(1, alpha.dtype)
            for i, bit in enumerate(bits):
                share = share * (part[i] if bit else 1 - part[i])
            at = tuple(index[i] + bit for i, bit in enumerate(bits))
            used = share > 0  # an infinite standard error at a corner that does not count must not make a NaN
            terms = [jnp.where(used, share * leaf[at], 0) for leaf in leaves]
            total = [a + b for a, b in zip(total, terms, strict=True)]
            trusted = trusted & (self.estimates.trusted[at] | ~used)
        value, stderr, density, density_stderr = total
        outside = jnp.any(alpha != nearest)
        spring = 4 / (high - self.low) ** 2
        return Estimate(
            value + spring * (alpha - nearest),
            jnp.where(outside, jnp.inf, stderr),
            density,
            density_stderr,
            trusted & ~outside,
        )


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
