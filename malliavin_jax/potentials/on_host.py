"""Fitted potentials at many points with NumPy, where it would take longer to compile them."""

from typing import Any

import numpy as np
from jaxtyping import Float

from .._base.host import on_host
from ..fitting.bsplines import SUPPORT, host_basis
from ..fitting.errors import polynomial_rows
from .base import AbstractPotential
from .polynomial import Polynomial
from .spline import Spline

_AT_ONCE = 4096  # points

Points = Float[np.ndarray, "n d"]
Derivatives = tuple[Float[np.ndarray, "n d"], Float[np.ndarray, "n d d"]]


def is_known(potential: AbstractPotential | None) -> bool:
    """Whether there is a form for NumPy: of none, of splines and of polynomials, if their numbers are here."""
    return potential is None or (isinstance(potential, Spline | Polynomial) and on_host(potential))


def derivatives_on_host(potential: AbstractPotential | None, x: Points) -> Derivatives:
    """Gradients and Hessians at x, in float64; of a spline inside its box alone."""
    x = np.asarray(x, np.float64)
    d = x.shape[1]
    if potential is None or len(x) == 0:
        return np.zeros((len(x), d)), np.zeros((len(x), d, d))
    of_points: Any = _of_spline if isinstance(potential, Spline) else _of_polynomial
    parts = [of_points(potential, x[start : start + _AT_ONCE]) for start in range(0, len(x), _AT_ONCE)]
    gradient, hessian = (np.concatenate(column) for column in zip(*parts, strict=True))
    return gradient, hessian


def _of_spline(spline: Spline, x: Points) -> Derivatives:
    """Contracted axis by axis, the last first: each takes its index in the block and leaves that of its orders."""
    low, high = (np.asarray(end, np.float64) for end in (spline.low, spline.high))
    coefficients, d = np.asarray(spline.coefficients, np.float64), x.shape[1]
    density = np.asarray(spline.intervals) / (high - low)
    t = (np.clip(x, low, high) - low) * density
    cells, tables = zip(*(host_basis(t[:, i], n, 3) for i, n in enumerate(spline.intervals)), strict=True)
    offsets = np.indices((SUPPORT,) * d).reshape(d, -1)
    block = coefficients[tuple(cell[:, None] + offset[None] for cell, offset in zip(cells, offsets, strict=True))]
    for i in reversed(range(d)):
        scaled = tables[i] * (density[i] ** np.arange(3))[:, None, None]
        rest = block.reshape(len(x), -1, *(SUPPORT,) * (i + 1))
        block = np.einsum("nr...a,ona->nro...", rest, scaled).reshape(len(x), -1, *(SUPPORT,) * i)
    table = block.reshape(len(x), *(3,) * d)  # orders of the last axis first

    axes = range(d)
    gradient = np.stack([_derivative(table, i) for i in axes], 1)
    return gradient, np.stack([np.stack([_derivative(table, i, j) for j in axes], 1) for i in axes], 1)


def _derivative(table: np.ndarray, *axes: int) -> np.ndarray:
    """That along these axes, of a table of all orders along each, the last axis first."""
    return table[(slice(None), *(axes.count(i) for i in reversed(range(table.ndim - 1))))]


def _of_polynomial(fitted: Polynomial, x: Points) -> Derivatives:
    d = x.shape[1]
    center, scale = (np.broadcast_to(np.asarray(each, np.float64), (d,)) for each in (fitted.center, fitted.scale))
    found = polynomial_rows(center, scale, fitted.exponents)(x)
    theta = np.asarray(fitted.coefficients, np.float64)
    return found.gradient @ theta, _square(found.hessian @ theta, d)


def _square(pairs: Float[np.ndarray, "n pairs"], d: int) -> Float[np.ndarray, "n d d"]:
    """Symmetric matrices of their entries (i, j), i ≤ j, in order."""
    out = np.zeros((len(pairs), d, d))
    i, j = np.triu_indices(d)
    out[:, i, j] = out[:, j, i] = pairs
    return out
