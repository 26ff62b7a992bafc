"""Uniform B-splines of degree 5, cell by cell: arrays in, arrays out.

On a cell of the mesh, u ∈ [0, 1] from its lower to its upper end, six B-splines are not zero, each a polynomial of
degree 5 in u. Everything else follows from the 6 × 6 table of their coefficients: values and derivatives at a point,
and the inner products of a fit. Products of two pieces are polynomials of degree at most 10, that is, combinations of
the Legendre polynomials P_0 … P_10 of s = 2u − 1: sums of P_k(s) over the points of a cell are all that the normal
equations need to know about where the points are.
"""

import functools
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from numpy.polynomial import Polynomial as Series, legendre

from .._base.small_tensors import matmul

DEGREE = 5  # third derivatives are continuous
SUPPORT = DEGREE + 1  # B-splines that are not zero on a cell


@functools.cache
def pieces() -> Float[np.ndarray, "6 6"]:
    """Row j: coefficients of 1, u, …, u⁵ of the j-th B-spline of a cell, by the recursion of Cox and de Boor."""
    row = [Series([1.0])]
    for p in range(1, SUPPORT):
        below = [Series([0.0]), *row, Series([0.0])]
        row = [Series([p - j, 1.0]) / p * below[j] + Series([j + 1, -1.0]) / p * below[j + 1] for j in range(p + 1)]
    return np.stack([np.pad(piece.coef, (0, SUPPORT - len(piece.coef))) for piece in row])


@functools.cache
def derivative_pieces(order: int) -> Float[np.ndarray, "6 6"]:
    """The same for the derivative of that order in u."""
    table = pieces()
    for _ in range(order):
        table = np.pad(table[:, 1:] * np.arange(1, SUPPORT), ((0, 0), (0, 1)))
    return table


@functools.cache
def in_legendre(order: int) -> Float[np.ndarray, "6 6"]:
    """Row j: coefficients of P_0 … P_5 (of s = 2u − 1) of the derivative of that order of the j-th B-spline."""
    rows = [Series(row)(Series([0.5, 0.5])).coef for row in derivative_pieces(order)]
    return np.stack([np.pad(legendre.poly2leg(row), (0, SUPPORT - len(row))) for row in rows])


@functools.cache
def products_in_legendre(order: int) -> Float[np.ndarray, "6 6 11"]:
    """Entry (a, b): coefficients of P_0 … P_10 of the product of two derivatives of that order."""
    rows = in_legendre(order)
    out = np.zeros((SUPPORT, SUPPORT, 2 * DEGREE + 1))
    for a, b in np.ndindex(SUPPORT, SUPPORT):
        product = legendre.legmul(rows[a], rows[b])
        out[a, b, : len(product)] = product
    return out


def legendre_values(s: Any, degree: int, xp: Any = jnp) -> Any:
    """P_0(s) … P_degree(s), by their three-term recursion, along a new last axis."""
    values = [xp.ones_like(s), s]
    for k in range(1, degree):
        values.append(((2 * k + 1) * s * values[-1] - k * values[-2]) / (k + 1))
    return xp.stack(values[: degree + 1], -1)


def basis(t: Float[Array, ""], intervals: int, orders: int) -> tuple[Array, Float[Array, "orders 6"]]:
    """The cell of t, in units of cells from the lower end, and there the six B-splines' derivatives of order 0, 1, ….

    Outside [0, intervals] each B-spline goes on as its own Taylor polynomial of second order: value, gradient and
    Hessian of a spline then fit together everywhere, and grow no faster than a quadratic along each axis.
    """
    inside = jnp.clip(t, 0, intervals)
    cell = jnp.clip(jnp.floor(inside).astype(jnp.int32), 0, intervals - 1)
    u, beyond = inside - cell.astype(t.dtype), t - inside
    powers = jnp.stack([u**k for k in range(SUPPORT)])
    taken = [matmul(jnp.asarray(derivative_pieces(order), t.dtype), powers) for order in range(max(orders, 3))]
    rows = []
    for order in range(orders):
        if order > 2:
            rows.append(jnp.where(beyond == 0, taken[order], 0))
            continue
        terms = [taken[order + j] * beyond**j / math.factorial(j) for j in range(3 - order)]
        rows.append(functools.reduce(jnp.add, terms))
    return cell, jnp.stack(rows)


def host_basis(t: Float[np.ndarray, " n"], intervals: int, orders: int) -> tuple[np.ndarray, np.ndarray]:
    """`basis` for many t inside the mesh, with NumPy: the cells (n,), and the derivatives (orders, n, 6)."""
    cell = np.clip(np.floor(t).astype(np.int64), 0, intervals - 1)
    powers = np.clip(t - cell, 0, 1)[:, None] ** np.arange(SUPPORT)
    return cell, np.stack([powers @ derivative_pieces(order).T for order in range(orders)])
