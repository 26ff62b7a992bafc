"""Coordinates in which a spline's roughness is a diagonal matrix.

Along an axis the coefficients are written as a polynomial of degree below `order`, which differences of that order do
not see, and the right singular vectors of the differences, from smooth to rough; in several dimensions as products of
these. There θᵀPθ = Σ_m Λ_m θ_m², and a smoothing that is enormous for the rough modes does not drown in its rounding
what the data say of the smooth ones: a Cholesky factorisation does not feel the scale of its rows. The first mode is
the constant, which no derivative sees; it is left out.
"""

import functools
import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from numpy.polynomial import legendre

from .bsplines import DEGREE
from .spline_equations import scaled_differences


class Modes(NamedTuple):
    """Orthogonal matrices along each axis, modes in columns, and the roughness Λ of their products."""

    axes: tuple[Float[np.ndarray, "basis modes"], ...]
    roughness: Float[np.ndarray, " modes"]  # without the constant's

    def of(self, rows: Float[np.ndarray, "p *n"]) -> Float[np.ndarray, "modes *n"]:
        """Coefficients, or functionals of them, in the coordinates of the modes."""
        return self._turn(rows, 0)[1:]

    def back(self, rows: Float[np.ndarray, "modes *n"]) -> Float[np.ndarray, "p *n"]:
        """And from modes to coefficients."""
        return self._turn(np.concatenate([np.zeros_like(rows[:1]), rows]), 1)

    def of_matrix(self, matrix: Float[np.ndarray, "p p"]) -> Float[np.ndarray, "modes modes"]:
        """A quadratic form."""
        return self.of(self.of(matrix).T)

    def _turn(self, rows: np.ndarray, side: int) -> np.ndarray:
        block = rows.reshape(*(len(axis) for axis in self.axes), -1)
        for axis in self.axes:
            # The axis contracted is always the first; it ends up last but for the columns, which go behind at the end.
            block = np.tensordot(block, axis, ((0,), (side,)))
        return np.moveaxis(block, 0, -1).reshape(rows.shape)

    @property
    def seen(self) -> np.ndarray:
        """Which modes are rough at all."""
        return self.roughness > 0


@functools.lru_cache(maxsize=8)
def modes_of(shape: tuple[int, ...], order: int) -> Modes:
    """The modes of differences of some order on a mesh."""
    axes, roughness = [], np.zeros(1)
    for number, n in enumerate(shape):
        polynomials = legendre.legvander(np.linspace(-1, 1, n + DEGREE), order - 1)
        smooth, rest = np.split(np.linalg.qr(polynomials, "complete")[0], [order], axis=1)
        _, singular, vectors = np.linalg.svd(scaled_differences(shape, number, order) @ rest)
        axes.append(np.concatenate([smooth, rest @ vectors[::-1].T], 1))
        along = np.concatenate([np.zeros(order), singular[::-1] ** 2])
        roughness = (roughness[:, None] + along[None, :]).ravel()
    return Modes(tuple(axes), roughness[1:])


def log_prior_volume(modes: Modes) -> float:
    """log of the product of the roughnesses that are not zero: the normalisation of the prior."""
    return math.fsum(np.log(modes.roughness[modes.seen]))
