"""A field whose queries do not depend on the number of samples: a fitted model, and a table of what it leaves.

At every node of a regular grid over the observed box the table holds the correction (the estimate minus the model's
gradient, 0 where the model stands alone), its standard error, the density with its own, and the extrapolation of
`extrapolation.py`. Between nodes they are interpolated linearly, while the model is evaluated where it is asked for:
what the table must resolve is only what the model leaves.
"""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from .._base.types import Vector
from ..estimate.ratio import TRUSTED_FROM, Estimate
from ..potentials.base import AbstractPotential
from .extrapolation import TabulatedTail, Tail
from .tables import corners_around, interpolate

NODES = {1: 513, 2: 65, 3: 21}  # along each axis
_HALFWAY = 256  # places at which the error of interpolation is measured


class AssistedTable(eqx.Module):
    """α ↦ model plus correction, with error bars; see the head of this file."""

    model: AbstractPotential
    columns: Float[Array, "*nodes columns"]  # correction, stderr, tail (d each), stiffness, density, its stderr
    low: Vector
    high: Vector
    interpolation_error: Vector  # root mean square error of the interpolated correction in the middle of cells

    def __call__(self, alpha: Vector) -> Estimate:
        d, shape = alpha.shape[0], self.columns.shape[:-1]
        nearest = jnp.clip(alpha, self.low, self.high)
        cells = jnp.asarray(shape, alpha.dtype) - 1
        row = interpolate(self.columns, corners_around((nearest - self.low) / (self.high - self.low) * cells, shape))
        correction, stderr, tail, rest = jnp.split(row, [d, 2 * d, 3 * d])
        stiffness, density, density_stderr = rest
        inside = jnp.all(alpha == nearest)
        z = density / jnp.maximum(density_stderr, jnp.finfo(alpha.dtype).tiny)
        trusted = inside & (z > TRUSTED_FROM)
        confidence = jnp.where(inside, jnp.clip(2 * z / TRUSTED_FROM - 1, 0, 1), 0)
        planes = tail + stiffness * (alpha - nearest)
        value = self.model.gradient(nearest) + correction
        return Estimate(
            value=planes + confidence * (value - planes),
            stderr=jnp.where(trusted, stderr, jnp.inf),
            density=jnp.where(inside, density, 0),
            density_stderr=density_stderr,
            trusted=trusted,
        )


def grid(low: Vector, high: Vector, nodes: int) -> Float[Array, "*nodes d"]:
    """The nodes of a regular grid over a box."""
    axes = [low[i] + (high[i] - low[i]) * jnp.linspace(0, 1, nodes, dtype=low.dtype) for i in range(len(low))]
    return jnp.stack(jnp.meshgrid(*axes, indexing="ij"), -1)


def make_table(
    model: AbstractPotential,
    estimate: Callable[[Vector], Estimate],
    tail: Tail | TabulatedTail,
    low: Vector,
    high: Vector,
    *,
    variance: Callable[[Float[np.ndarray, "n d"]], Float[np.ndarray, "n d"]],
    corrects: bool,
) -> AssistedTable:
    """The table of `estimate(alpha)`, a ratio with its density, where `corrects`; of the model alone otherwise.

    `variance` is that of the model at many places; it is added to the squared standard errors of a correction.
    """
    nodes = grid(low, high, NODES[len(low)])
    flat = nodes.reshape(-1, len(low))
    found = _evaluate(estimate, flat)
    gradient, planes, stiffness = _around(model, tail, flat)
    own = jnp.asarray(variance(np.asarray(flat, np.float64)), low.dtype)
    error = jnp.zeros_like(low)
    if corrects:
        correction, squares = found.value - gradient, found.stderr**2 + own
        correction = jnp.where(found.trusted[:, None], correction, 0)
        error = _interpolation_error(model, estimate, correction.reshape(nodes.shape), low, high)
        squares = squares + error[None] ** 2
    else:
        correction, squares = jnp.zeros_like(gradient), own
    # Rounding is an error too: an exact fit of exact gradients is not known better than that.
    rounding = 16 * jnp.finfo(low.dtype).eps * (jnp.abs(gradient) + jnp.sqrt(jnp.mean(gradient**2)))
    stderr = jnp.sqrt(jnp.where(jnp.isfinite(squares), squares, jnp.finfo(low.dtype).max) + rounding**2)
    # What the ratio does not trust, for too few episodes too, the table must not trust either.
    doubtful = jnp.maximum(found.density_stderr, 1.001 * found.density / TRUSTED_FROM)
    scalars = (stiffness, found.density, jnp.where(found.trusted, found.density_stderr, doubtful))
    columns = jnp.concatenate([correction, stderr, planes, *(scalar[:, None] for scalar in scalars)], 1)
    return AssistedTable(model, columns.reshape(*nodes.shape[:-1], -1), low, high, error)


@eqx.filter_jit
def _evaluate(estimate: Callable[[Vector], Estimate], points: Float[Array, "n d"]) -> Estimate:
    return lax.map(estimate, points, batch_size=64)


@eqx.filter_jit
def _around(
    model: AbstractPotential, tail: Tail | TabulatedTail, points: Float[Array, "n d"]
) -> tuple[Array, Array, Array]:
    """At each node the model's gradient, the extrapolation, and its stiffness beyond the box."""
    return lax.map(lambda point: (model.gradient(point), *tail.at(point)), points, batch_size=64)


def _interpolation_error(
    model: AbstractPotential,
    estimate: Callable[[Vector], Estimate],
    correction: Float[Array, "*nodes d"],
    low: Vector,
    high: Vector,
) -> Vector:
    """The root mean square error of the interpolated correction at the centres of some cells."""
    shape = correction.shape[:-1]
    steps = (high - low) / (jnp.asarray(shape, low.dtype) - 1)
    centres = grid(low, high - steps, shape[0] - 1).reshape(-1, len(low)) + (steps / 2)[None]
    centres = centres[:: max(1, len(centres) // _HALFWAY)]
    exact = _evaluate(estimate, centres)

    def off(point: Vector, value: Vector) -> Vector:
        read = interpolate(correction, corners_around((point - low) / steps, shape))
        return (read + model.gradient(point) - value) ** 2

    squares = jax.jit(jax.vmap(off))(centres, exact.value)
    kept = exact.trusted[:, None]
    return jnp.sqrt(jnp.sum(jnp.where(kept, squares, 0), 0) / jnp.maximum(jnp.sum(kept.astype(low.dtype)), 1))
