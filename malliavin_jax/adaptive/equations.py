"""The normal equations of a spline's fit on the device, and the scores of episodes, for use inside `jit` and `scan`.

The sums are those of `fitting/spline_sums.py`; the units (a box four wide along each axis) and the unknowns are those
of `fitting/spline_equations.py`. What is different is where: matrices here are dense, on the device, in float64
whatever the dtype of the data, because a second derivative is a difference of coefficients over a small width squared.
"""

import functools
import itertools
import math
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from .._base.small_tensors import HIGHEST, matmul
from ..fitting.bsplines import DEGREE, SUPPORT, basis, in_legendre, products_in_legendre
from ..fitting.spline_equations import penalty_of
from ..fitting.spline_sums import SplineSums, Totals, add_points, no_sums
from ..samples.samples import Samples

_LARGEST = 1e60  # of a number that is observed: a larger one is a mistake, whose square would drown all the others


class Equations(NamedTuple):
    """A, b and the sum of squares of gradients [0] and of Hessians [1], and the numbers of rows; [1] only if used."""

    gram: Float[Array, "kinds p p"]
    right: Float[Array, "kinds p"]
    squares: Float[Array, " kinds"]
    rows: Float[Array, " kinds"]


class Batch(NamedTuple):
    """The points of some episodes as float64, and which of them count: finite, observed and in the box."""

    x: Float[Array, "episodes times d"]
    gradient: Float[Array, "episodes times d"]
    hessian: Float[Array, "episodes times d d"] | None
    weight: Float[Array, "episodes times d"]
    counts: Bool[Array, "episodes times"]
    sound: Bool[Array, " episodes"]  # with an observed point, and all that is observed finite
    refused: Int[Array, ""]  # episodes with a number that is not finite


class Mesh(eqx.Module):
    """Where the spline lives: a box, and the cells along each of its axes."""

    low: Float[Array, " d"]
    high: Float[Array, " d"]
    intervals: tuple[int, ...] = eqx.field(static=True)
    hessians: bool = eqx.field(static=True)  # whether Hessians are fitted too

    @property
    def dim(self) -> int:
        return len(self.intervals)

    @property
    def shape(self) -> tuple[int, ...]:
        """Coefficients along each axis."""
        return tuple(n + DEGREE for n in self.intervals)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def unit(self) -> Float[Array, " d"]:
        return (self.high - self.low) / 4

    @property
    def null_dim(self) -> int:
        """How many polynomials the penalty does not see, the constant among them."""
        return 3**self.dim

    def penalty(self) -> Float[Array, "p p"]:
        return jnp.asarray(penalty_of(self.intervals).toarray(), jnp.float64)

    def touched(self) -> Int[np.ndarray, "cells local"]:
        """The numbers of the coefficients that are not idle on each cell."""
        cells = np.indices(self.intervals).reshape(self.dim, -1)
        local = np.indices((SUPPORT,) * self.dim).reshape(self.dim, -1)
        return np.asarray(np.ravel_multi_index(tuple(cells[:, :, None] + local[:, None, :]), self.shape))

    @staticmethod
    def number(places: tuple[Int[Array, ""], ...], shape: tuple[int, ...]) -> Int[Array, ""]:
        """The number of a place in an array of that shape, the last axis running fastest."""
        return functools.reduce(lambda total, pair: total * pair[1] + pair[0], zip(places, shape, strict=True), 0)  # type: ignore[return-value]

    def derivatives(self, x: Float[Array, " d"], most: int) -> tuple[tuple[Array, ...], list[Float[Array, "orders 6"]]]:
        """The cell of x along each axis, and there the derivatives of the six B-splines, in units of the wide box."""
        t = (x - self.low) / (self.high - self.low)
        cells, rows = [], []
        for i, n in enumerate(self.intervals):
            cell, table = basis(t[i] * n, n, most + 1)
            cells.append(cell)
            rows.append(table * jnp.asarray((n / 4.0) ** np.arange(most + 1), table.dtype)[:, None])
        return tuple(cells), rows

    def rows(self, tables: list[Float[Array, "orders 6"]], order: int) -> Float[Array, "rows local"]:
        """The derivatives of that order of the tensor products: one row each, or the gradient's, or the Hessian's."""
        found = []
        for axes in itertools.combinations_with_replacement(range(self.dim), order):
            factors = [tables[i][axes.count(i)] for i in range(self.dim)]
            found.append(functools.reduce(lambda a, b: (a[:, None] * b[None, :]).ravel(), factors))
        return jnp.stack(found)


def multiplicities(d: int, order: int) -> Float[np.ndarray, " rows"]:
    """How often each derivative of an order counts: ∂_i∂_j stands for ∂_j∂_i too."""
    axes = itertools.combinations_with_replacement(range(d), order)
    return np.asarray([len(set(itertools.permutations(each))) for each in axes], np.float64)


def units(mesh: Mesh, order: int) -> Float[Array, " rows"]:
    """What an observed derivative of that order is multiplied by, in units of the wide box."""
    axes = itertools.combinations_with_replacement(range(mesh.dim), order)
    return jnp.stack([functools.reduce(jnp.multiply, [mesh.unit[i] for i in each]) for each in axes])


def no_equations(mesh: Mesh) -> Equations:
    """The equations of no points."""
    kinds, p = 2 if mesh.hessians else 1, mesh.size
    return Equations(*(jnp.zeros(shape, jnp.float64) for shape in ((kinds, p, p), (kinds, p), (kinds,), (kinds,))))


def _usable(array: Array) -> Bool[Array, "..."]:
    """Finite, and its fourth power too: sums of squares, and products of these, must stay what they are."""
    return jnp.abs(array.astype(jnp.float64)) < _LARGEST


def batch_of(mesh: Mesh, samples: Samples) -> Batch:
    """The episodes that can be used; one with a number that is absurd or not finite is refused as a whole."""
    hessian = samples.hessian if mesh.hessians else None
    finite = _usable(samples.x).all(-1) & _usable(samples.gradient).all(-1)
    if hessian is not None:
        finite = finite & _usable(hessian).all((-2, -1))
    bad = jnp.any(samples.observed & ~finite, 1)
    sound = ~bad & jnp.any(samples.observed, 1)
    used = samples.observed & sound[:, None]

    def clean(array: Array) -> Array:
        return jnp.where(used.reshape(*used.shape, *(1,) * (array.ndim - 2)), array, 0).astype(jnp.float64)

    x = clean(samples.x)
    inside = jnp.all((x >= mesh.low[None, None]) & (x <= mesh.high[None, None]), -1)
    # Weights are no part of the fit: one that is not sound costs the judge a little, and the fit nothing.
    weight = clean(jnp.where(_usable(samples.weight), samples.weight, 0))
    hessian = None if hessian is None else clean(hessian)
    return Batch(x, clean(samples.gradient), hessian, weight, used & inside, sound, jnp.sum(bad))


def totals_of(mesh: Mesh, batch: Batch) -> Totals:
    """The sums over the points that count."""
    d, n = mesh.dim, batch.counts.size
    empty = no_sums(np.zeros(d), np.ones(d), mesh.intervals)
    sums = SplineSums(mesh.low, mesh.high, empty.totals, mesh.intervals)
    hessian = None if batch.hessian is None else batch.hessian.reshape(n, d, d)
    weights = batch.counts.reshape(n).astype(jnp.float64)
    points = (batch.x.reshape(n, d), batch.gradient.reshape(n, d), hessian, weights)
    return add_points(sums, *points, chunk_size=min(n, 4096)).totals


def equations(mesh: Mesh, totals: Totals) -> Equations:
    """The normal equations of gradients, and of Hessians where they are used."""
    index = jnp.asarray(mesh.touched())
    moments = totals.moments.reshape(-1, *(2 * DEGREE + 1,) * mesh.dim)
    kinds = [(1, totals.gradient, totals.gradient_squares, totals.points)]
    if mesh.hessians:
        kinds.append((2, totals.hessian, totals.hessian_squares, totals.hessians))
    grams, rights, squares, rows = [], [], [], []
    for order, products, of_squares, points in kinds:
        columns = products.reshape(-1, *(SUPPORT,) * mesh.dim, products.shape[-1])
        times, unit = multiplicities(mesh.dim, order), units(mesh, order)
        block, right = jnp.zeros(()), jnp.zeros(())
        for number, axes in enumerate(itertools.combinations_with_replacement(range(mesh.dim), order)):
            orders = [axes.count(i) for i in range(mesh.dim)]
            slope = math.prod(mesh.intervals[i] / 4 for i in axes)
            block = block + times[number] * slope**2 * _blocks(moments, orders)
            right = right + times[number] * slope * unit[number] * _right(columns[..., number], orders)
        size = mesh.size
        grams.append(jnp.zeros((size, size), block.dtype).at[index[:, :, None], index[:, None, :]].add(block))
        rights.append(jnp.zeros(size, right.dtype).at[index].add(right))
        squares.append(jnp.sum(jnp.asarray(times) * unit**2 * of_squares))
        rows.append(points * mesh.dim**order)
    return Equations(jnp.stack(grams), jnp.stack(rights), jnp.stack(squares), jnp.stack(rows))


def _blocks(moments: Array, orders: list[int]) -> Float[Array, "cells local local"]:
    """For each cell Σ over its points of the products of the basis' derivatives of these orders."""
    block = moments
    for order in orders:
        # The first axis of Legendre orders is contracted, and its pair of basis functions goes to the end.
        block = jnp.tensordot(block, jnp.asarray(products_in_legendre(order)), ((1,), (2,)), precision=HIGHEST)
    d, local = len(orders), SUPPORT ** len(orders)
    return block.transpose(0, *range(1, 2 * d, 2), *range(2, 2 * d + 1, 2)).reshape(-1, local, local)


def _right(columns: Array, orders: list[int]) -> Float[Array, "cells local"]:
    block = columns
    for order in orders:
        block = jnp.tensordot(block, jnp.asarray(in_legendre(order)), ((1,), (1,)), precision=HIGHEST)
    return block.reshape(block.shape[0], -1)


def observed_in_units(mesh: Mesh, batch: Batch) -> list[Float[Array, "episodes times rows"]]:
    """Gradients, and the upper halves of Hessians where they are fitted, in units of the wide box."""
    y = [batch.gradient * units(mesh, 1)[None, None]]
    if batch.hessian is not None:
        H, d = batch.hessian, mesh.dim
        upper = jnp.stack([(H[..., i, j] + H[..., j, i]) / 2 for i in range(d) for j in range(i, d)], -1)
        y.append(upper * units(mesh, 2)[None, None])
    return y


def episode_scores(mesh: Mesh, batch: Batch, theta: Float[Array, " p"]) -> Float[Array, "episodes kinds p"]:
    """The scores of each episode, s_g and s_H, less their mean over the episodes.

    An episode's s_g is Σ over its times of Fᵀ(y − Fθ), F the derivatives of the basis that go with its gradients y; s_H
    is the same of its Hessians.
    """
    episodes, _, d = batch.x.shape
    first = jnp.asarray(mesh.touched()[0], jnp.int32)

    def at(x: Array, y: list[Array], counts: Array) -> tuple[Array, Array]:
        cells, tables = mesh.derivatives(x, 2 if mesh.hessians else 1)
        index = mesh.number(cells, mesh.shape) + first
        found = []
        for order, observed in enumerate(y, 1):
            F = mesh.rows(tables, order)
            left = (observed - matmul(F, theta[index])) * jnp.asarray(multiplicities(d, order))
            found.append(jnp.where(counts, matmul(left, F), 0))
        return index, jnp.stack(found)

    index, local = jax.vmap(jax.vmap(at))(batch.x, observed_in_units(mesh, batch), batch.counts)
    dense = jnp.zeros((episodes, local.shape[2], mesh.size), local.dtype)
    number = jnp.arange(episodes)[:, None, None]
    kind = jnp.arange(local.shape[2])
    score = dense.at[number[..., None], kind[None, None, :, None], index[:, :, None, :]].add(local)
    # Scores have mean zero at the minimum but for the penalty; what is left of it is no noise.
    size = jnp.maximum(jnp.sum(batch.sound), 1).astype(score.dtype)
    return jnp.where(batch.sound[:, None, None], score - jnp.sum(score, 0, keepdims=True) / size, 0)


def squared_scores(score: Float[Array, "episodes kinds p"]) -> Float[Array, "powers p p"]:
    """Σ over episodes of s sᵀ, s = s_g + κ s_H, as the coefficients of 1, κ, κ² (of 1 alone without Hessians).

    κ, the weight of a Hessian against a gradient, may change from fit to fit.
    """
    products = jnp.einsum("eap,ebq->abpq", score, score, precision=HIGHEST)
    if score.shape[1] == 1:
        return products[0]
    return jnp.stack([products[0, 0], products[0, 1] + products[1, 0], products[1, 1]])
