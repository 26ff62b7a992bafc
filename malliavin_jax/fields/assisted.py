"""A field whose queries do not depend on the number of samples: a fitted model, and a table of what it leaves.

At every node of a regular grid over the observed box the table holds the correction (the estimate minus the model's
gradient, 0 where the model stands alone), its standard error, the density with its own, and the extrapolation of
`extrapolation.py`. Between nodes they are interpolated linearly, while the model is evaluated where it is asked for:
what the table must resolve is only what the model leaves.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from .._base.host import to_device
from .._base.types import Vector
from ..estimate.ratio import TRUSTED_FROM, Estimate, Ratios
from ..models.folds import Ratio, gradients, on_hand
from ..potentials.base import AbstractPotential
from ..potentials.on_host import is_known
from .extrapolation import TabulatedTail, Tail, planes_at
from .tables import corners_around, interpolate

NODES = {1: 513, 2: 65, 3: 21}  # along each axis
_HALFWAY = 256  # places at which the error of interpolation is measured
_GROUPS = 4  # of these places, by density


class AssistedTable(eqx.Module):
    """α ↦ model plus correction, with error bars; see the head of this file."""

    model: AbstractPotential
    columns: Float[Array, "*nodes columns"]  # correction, stderr, tail (d each), stiffness, density, its stderr
    low: Vector
    high: Vector
    interpolation_error: Vector  # of the correction, root mean square in the middle of cells, by density

    def ask(self, alpha: Vector) -> Estimate:
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


def grid(low: Float[np.ndarray, " d"], high: Float[np.ndarray, " d"], nodes: int) -> Float[np.ndarray, "*nodes d"]:
    """The nodes of a regular grid over a box."""
    axes = [low[i] + (high[i] - low[i]) * np.linspace(0, 1, nodes, dtype=low.dtype) for i in range(len(low))]
    return np.stack(np.meshgrid(*axes, indexing="ij"), -1)


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
    dtype, limits = low.dtype, jnp.finfo(low.dtype)
    nodes = grid(np.asarray(low), np.asarray(high), NODES[len(low)])
    flat = nodes.reshape(-1, len(low))
    found = _at_many(estimate, flat)
    gradient, (planes, stiffness) = _gradients(model, flat), planes_at(tail, flat)
    own = variance(np.asarray(flat, np.float64)).astype(dtype)
    error = np.zeros(len(low), dtype)
    if corrects:
        correction = np.where(found.trusted[:, None], found.value - gradient, 0)
        off = _off_between_nodes(model, estimate, correction.reshape(nodes.shape), nodes)
        squares = found.stderr**2 + own + off.at(found.density)
        error = off.typical
    else:
        correction, squares = np.zeros_like(gradient), own
    # Rounding is an error too: an exact fit of exact gradients is not known better than that.
    rounding = 16 * limits.eps * (np.abs(gradient) + np.sqrt(np.mean(gradient**2)))
    stderr = np.sqrt(np.where(np.isfinite(squares), squares, limits.max) + rounding**2)
    # What the ratio does not trust, for too few episodes too, the table must not trust either.
    doubtful = np.maximum(found.density_stderr, 1.001 * found.density / TRUSTED_FROM)
    scalars = (stiffness, found.density, np.where(found.trusted, found.density_stderr, doubtful))
    columns = np.concatenate([correction, stderr, planes, *(scalar[:, None] for scalar in scalars)], 1)
    columns = to_device(columns.reshape(*nodes.shape[:-1], -1), dtype)
    return AssistedTable(model, columns, low, high, to_device(error, dtype))


def _at_many(estimate: Callable[[Vector], Estimate], points: Float[np.ndarray, "n d"]) -> Ratios:
    """The estimate at many points, which come first: made by NumPy where that is sooner done than compiled."""
    if isinstance(estimate, Ratio) and on_hand(estimate.folds, estimate.localizer, len(points)):
        value, stderr, *rest = estimate.on_host(points)
        return Ratios(value.T, stderr.T, *rest)
    found = _evaluate(estimate, to_device(points))
    return Ratios(*(np.asarray(getattr(found, name)) for name in Ratios._fields))


def _gradients(model: AbstractPotential, points: Float[np.ndarray, "n d"]) -> Float[np.ndarray, "n d"]:
    return gradients(model, points) if is_known(model) else np.asarray(_evaluate(model.gradient, to_device(points)))


@eqx.filter_jit
def _evaluate(function: Callable[[Vector], Any], points: Float[Array, "n d"]) -> Any:
    # By some dozens, a divisor of their number where there is one: the rest would be a second program.
    divisors = [size for size in range(33, 97) if len(points) % size == 0]
    return lax.map(function, points, batch_size=min(divisors, key=lambda size: abs(size - 64), default=64))


class _Off(NamedTuple):
    """Squared errors of an interpolated correction at some places where an estimate is trusted, and the density there.

    Where data are few a correction is rough, and its errors many times those in the middle: they go by the density."""

    squares: Float[np.ndarray, "n d"]
    density: Float[np.ndarray, " n"]

    @property
    def typical(self) -> Float[np.ndarray, " d"]:
        """The root mean square, places counted by their density."""
        share = self.density / max(self.density.sum(), np.finfo(self.density.dtype).tiny)
        return np.sqrt(share @ self.squares)

    def at(self, density: Float[np.ndarray, " m"]) -> Float[np.ndarray, "m d"]:
        """Mean squares at places of such a density: between those of a few groups."""
        if len(self.density) == 0:
            return np.zeros((len(density), self.squares.shape[1]), self.squares.dtype)
        groups = np.array_split(np.argsort(self.density), max(1, min(_GROUPS, len(self.density) // 8)))
        level = [float(np.log(self.density[group]).mean()) for group in groups]
        means = np.stack([self.squares[group].mean(0) for group in groups])
        where = np.log(np.maximum(density, np.finfo(density.dtype).tiny))
        return np.stack([np.interp(where, level, column) for column in means.T], 1).astype(density.dtype)


def _off_between_nodes(
    model: AbstractPotential,
    estimate: Callable[[Vector], Estimate],
    correction: Float[np.ndarray, "*nodes d"],
    nodes: Float[np.ndarray, "*nodes d"],
) -> _Off:
    """The errors at the centres of some cells, where linear interpolation is the mean of the corners."""
    d = nodes.shape[-1]

    def at_centres(table: np.ndarray) -> Float[np.ndarray, "cells d"]:
        for axis in range(d):
            rows = np.moveaxis(table, axis, 0)
            table = np.moveaxis((rows[1:] + rows[:-1]) / 2, 0, axis)
        flat = table.reshape(-1, d)
        return flat[:: max(1, len(flat) // _HALFWAY)]

    centres, read = at_centres(nodes), at_centres(correction)
    exact = _at_many(estimate, centres)
    squares = (read + _gradients(model, centres) - exact.value) ** 2
    return _Off(squares[exact.trusted], exact.density[exact.trusted])
