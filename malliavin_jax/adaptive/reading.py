"""What a query needs of an adaptive field: coefficients, their covariance, and where there are data."""

import functools
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from .._base.small_tensors import matmul
from .._base.types import Flag, Scalar, Vector
from ..estimate.ratio import TRUSTED_FROM, Estimate
from ..fitting.bsplines import SUPPORT
from .equations import Mesh, units
from .fit import Tuning, first_of_least, no_tuning

_REACH = {1: 2, 2: 1}  # cells on each side that speak for a cell: a B-spline is six wide, a plane has more neighbours
_SOME = 0.5  # episodes of equal weight, from which on a cell is not empty


class Reading(NamedTuple):
    """The fit, as queries see it."""

    theta: Float[Array, " p"]
    covariance: Float[Array, "p p"]
    tuning: Tuning
    density: Float[Array, " cells"]  # of the points, in 1/(units of x)^d
    near: Float[Array, " cells"]  # episodes of equal weight in a cell
    firm: Bool[Array, " cells"]  # whether a cell and those around it hold enough of them
    low: Vector  # the box of the cells with any data in them
    high: Vector
    episodes: Scalar  # of equal weight, in all
    updates: Scalar


def no_reading(mesh: Mesh) -> Reading:
    cells = len(mesh.touched())
    zero = jnp.zeros((), jnp.float64)
    return Reading(
        jnp.zeros(mesh.size, jnp.float64), jnp.zeros((mesh.size,) * 2, jnp.float64), no_tuning(),
        jnp.zeros(cells, jnp.float64), jnp.zeros(cells, jnp.float64), jnp.zeros(cells, bool),
        mesh.low, mesh.high, zero, zero,
    )  # fmt: skip


def read(mesh: Mesh, tuning: Tuning, theta: Array, V: Array, sums: Any) -> Reading:
    """The fit to one memory, with where its points are."""
    counts = sums.points
    points = jnp.maximum(jnp.sum(counts), jnp.finfo(counts.dtype).tiny)
    volume = jnp.prod((mesh.high - mesh.low) / jnp.asarray(mesh.intervals, counts.dtype))
    equal = sums.episodes**2 / jnp.maximum(sums.squares, jnp.finfo(counts.dtype).tiny)
    # Points of one episode may be near each other: as many of them as an episode has count for one.
    near = counts / points * equal
    around = near.reshape(mesh.intervals)
    for axis in range(mesh.dim):
        around = _with_neighbours(around, axis)
    firm = around >= TRUSTED_FROM**2  # a count that is three of its standard errors above zero
    low, high = _box(mesh, near.reshape(mesh.intervals) >= _SOME)
    return Reading(theta, V, tuning, counts / points / volume, near, firm.ravel(), low, high, equal, sums.updates)


def _with_neighbours(array: Array, axis: int) -> Array:
    moved = jnp.moveaxis(array, axis, 0)
    reach = _REACH[array.ndim]
    padded = jnp.pad(moved, [(reach, reach)] + [(0, 0)] * (moved.ndim - 1))
    shifted = [padded[k : k + len(moved)] for k in range(2 * reach + 1)]
    return jnp.moveaxis(functools.reduce(jnp.add, shifted), 0, axis)


def _box(mesh: Mesh, seen: Bool[Array, "..."]) -> tuple[Vector, Vector]:
    """The smallest box of cells around those where something was seen; all of the mesh where nothing was."""
    low, high = [], []
    for axis, n in enumerate(mesh.intervals):
        along = jnp.any(seen, tuple(i for i in range(mesh.dim) if i != axis))
        along = along | ~jnp.any(along)
        number = jnp.arange(n, dtype=mesh.low.dtype)
        width = (mesh.high[axis] - mesh.low[axis]) / n
        low.append(mesh.low[axis] + width * jnp.min(jnp.where(along, number, n)))
        high.append(mesh.low[axis] + width * jnp.max(jnp.where(along, number + 1, 0)))
    return jnp.stack(low), jnp.stack(high)


@eqx.filter_jit  # so that a query outside `jit` is one program and not a hundred
def estimate_at(mesh: Mesh, reading: Reading, alpha: Vector) -> Estimate:
    """The gradient of the fit inside the box of the data; beyond it goes on with its slope, or that of a spring."""
    dtype, place = alpha.dtype, alpha.astype(jnp.float64)
    nearest = jnp.clip(place, reading.low, reading.high)
    cells, tables = mesh.derivatives(nearest, 2)
    F = mesh.rows(tables, 1) / units(mesh, 1)[:, None]
    theta = lax.dynamic_slice(reading.theta.reshape(mesh.shape), cells, (SUPPORT,) * mesh.dim).ravel()
    whole = reading.covariance.reshape(*mesh.shape, *mesh.shape)
    V = lax.dynamic_slice(whole, (*cells, *cells), (SUPPORT,) * (2 * mesh.dim)).reshape(len(theta), -1)
    rows = jnp.stack([mesh.rows(tables, 2)[_diagonal(mesh.dim, i)] for i in range(mesh.dim)])
    bends = matmul(rows, theta)
    stiffness = jnp.maximum(bends / mesh.unit**2, 4 / (reading.high - reading.low) ** 2)
    value = matmul(F, theta) + stiffness * (place - nearest)
    variance = jnp.maximum(jnp.sum(matmul(F, V) * F, 1), 0)
    rounding = float(jnp.finfo(dtype).eps) * jnp.abs(value)
    stderr = jnp.sqrt(variance + rounding**2)
    cell, trusted = _cell(mesh, reading, place)
    inside = jnp.all((place >= mesh.low) & (place <= mesh.high))
    density = jnp.where(inside, reading.density[cell], 0)
    density_stderr = density / jnp.sqrt(jnp.maximum(reading.near[cell], 1))
    return Estimate(
        value.astype(dtype),
        jnp.where(trusted, stderr, jnp.inf).astype(dtype),
        density.astype(dtype),
        density_stderr.astype(dtype),
        trusted,
    )


def _diagonal(d: int, i: int) -> int:
    """The number of ∂_i∂_i among the second derivatives ∂_i∂_j with i ≤ j."""
    return sum(d - k for k in range(i))


def _cell(mesh: Mesh, reading: Reading, place: Vector) -> tuple[Array, Flag]:
    """The number of the cell of a place, and whether there are data around it."""
    cells, _ = mesh.derivatives(place, 0)
    number = mesh.number(cells, mesh.intervals)
    inside = jnp.all((place >= mesh.low) & (place <= mesh.high))
    return number, inside & reading.firm[number]


def loss_on(mesh: Mesh, reading: Reading, axes: tuple[Array, ...]) -> tuple[Array, Array]:
    """Values above the lowest trusted point of a grid, and their standard errors; NaN where not trusted."""
    dtype, shape = axes[0].dtype, tuple(len(axis) for axis in axes)
    points = jnp.stack(jnp.meshgrid(*axes, indexing="ij"), -1).reshape(-1, mesh.dim).astype(jnp.float64)

    def row(x: Vector) -> tuple[Array, Flag]:
        cells, tables = mesh.derivatives(x, 0)
        values = functools.reduce(jnp.multiply.outer, [table[0] for table in tables])
        dense = lax.dynamic_update_slice(jnp.zeros(mesh.shape, x.dtype), values, cells)
        return dense.ravel(), _cell(mesh, reading, x)[1]

    rows, trusted = jax.vmap(row)(points)
    value = matmul(rows, reading.theta)
    lowest = first_of_least(jnp.where(trusted, value, jnp.inf))
    apart = rows - rows[lowest][None]
    variance = jnp.maximum(jnp.sum(matmul(apart, reading.covariance) * apart, 1), 0)
    value = jnp.where(trusted, value - value[lowest], jnp.nan)
    stderr = jnp.where(trusted, jnp.sqrt(variance), jnp.inf)
    return value.reshape(shape).astype(dtype), stderr.reshape(shape).astype(dtype)
