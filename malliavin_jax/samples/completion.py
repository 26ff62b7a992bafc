"""What was not observed, from a model of the loss: a ladder from whole Hessians down to positions alone.

    "hessians"    positions, gradients, Hessians    nothing is missing
    "diagonals"   …, the diagonals of Hessians      what lies beside the diagonal is the model's
    "gradients"   positions and gradients           Hessians are the model's
    "positions"   positions                         a move is a gradient with much noise, which the model smooths:
                                                    −(X_{k+1} − X_k)/ε = g_k − σ ξ_{k+1}/ε, of variance 2/(βε)

The model is a spline fitted to all points of all paths, and cross-fitted: what is missing of an even episode comes from
the model of the odd ones, and the other way round, so that an episode's weight does not depend on its own noise through
the model. Weights made of a model's Hessians are right as far as these are; `MalliavinField` knows, and holds the model
against an average that needs no Hessian. Where nothing is missing and a model is asked for all the same, it serves
`MalliavinField` alone: it has seen all points of the paths, and not only those at the conditioning times.
"""

import functools
from collections.abc import Callable
from typing import Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from .._base.checks import is_concrete
from ..fitting.errors import VarianceTable, variance_table
from ..potentials.base import AbstractPotential
from ..potentials.spline import fit_parts

Rung = Literal["hessians", "diagonals", "gradients", "positions"]
Model = AbstractPotential | Literal["spline"] | None  # what a caller may ask for

MISSING = {
    "diagonals": "what lies beside the diagonals of Hessians comes from the model",
    "gradients": "no Hessians were observed: they come from the model",
    "positions": "only positions were observed: moves are noisy gradients, and Hessians come from the model",
}
_MOST_POINTS = 2_000_000  # that the model is fitted to; of more, evenly spaced rows


class Log(NamedTuple):
    """Episodes as they were recorded: what is None was not. `hessian` may be diagonals, of the shape of x.

    Halves are made of blocks of `block_size` consecutive episodes, which may depend on each other.
    """

    x: Float[Array, "episodes points d"]
    gradient: Float[Array, "episodes points d"] | None
    hessian: Array | None
    step_size: Array  # (episodes,), or (episodes, points) where it changes
    last_steps: Int[Array, " episodes"]
    block_size: int = 1

    def half(self, number: int, first: int = 0) -> Int[np.ndarray, " some"]:
        """The episodes of the even blocks for 0, of the odd ones for 1; the log's first is episode `first` of all."""
        return np.flatnonzero((first + np.arange(self.x.shape[0])) // self.block_size % 2 == number)

    @property
    def rung(self) -> Rung:
        if self.gradient is None:
            return "positions"
        if self.hessian is None:
            return "gradients"
        return "diagonals" if self.hessian.ndim == 3 and self.x.shape[-1] > 1 else "hessians"


class Filled(NamedTuple):
    """A log with nothing missing."""

    gradient: Float[Array, "episodes points d"]  # as observed, or moves
    drift: Float[Array, "episodes points d"]  # the gradients by which the noise is told from the moves
    hessian: Float[Array, "episodes points d d"]
    last_steps: Int[Array, " episodes"]


class Models(NamedTuple):
    """A model fitted to all episodes, those of the even and of the odd ones, and the variance of the first's gradient.

    The variance is None for a model that was given."""

    whole: AbstractPotential
    halves: tuple[AbstractPotential, AbstractPotential]
    variance: VarianceTable | None


class Completion:
    """Models of what was logged, made when they are first asked for; compared by identity, and no part of a PyTree."""

    def __init__(self, rung: Rung, make: Callable[[], Models], *, given: bool = False):
        self.rung: Rung = rung
        self.given = given  # whether the model is the user's
        self._make: Callable[[], Models] | None = make

    @functools.cached_property
    def models(self) -> Models:
        """The models; the log they are made of is let go."""
        assert self._make is not None
        made, self._make = self._make(), None
        return made

    def variance(self, points: Float[np.ndarray, "n d"]) -> Float[np.ndarray, "n d"]:
        """The variance of the gradient of the model of all episodes, 0 for one that was given."""
        table = self.models.variance
        return np.zeros_like(points) if table is None else table(points)


def make_completion(log: Log, model: Model = None) -> Completion | None:
    """The models of a log; None where nothing is missing, unless a spline is asked for and there is what to fit."""
    rung, d = log.rung, log.x.shape[-1]
    if isinstance(model, str) and model != "spline":
        raise ValueError(f"model must be 'spline', a potential or None, got {model!r}")
    if rung == "hessians" and (model != "spline" or d > 3 or not is_concrete(log) or not _is_spread(log)):
        return None
    if model is not None and not isinstance(model, str):
        return Completion(rung, lambda: Models(model, (model, model), None), given=True)
    if not is_concrete(log):
        raise ValueError(f"samples of {rung} alone are made outside jit, vmap and grad: a model must be fitted first")
    if d > 3:
        missing = {"diagonals": "whole Hessians", "gradients": "Hessians", "positions": "gradients and Hessians"}
        raise ValueError(
            f"{missing[rung]} must be given in {d} dimensions, or a model of the loss to take them from "
            "(model=…, a potential): splines, which stand in for what was not observed, end at three"
        )
    if not _is_spread(log):
        raise ValueError(
            "a model of what was not observed needs at least two episodes, with positions that differ along each axis, "
            f"got {log.x.shape[0]} episodes"
        )
    return Completion(rung, functools.partial(_fit, log))


def _is_spread(log: Log) -> bool:
    """Whether each half of the episodes has a move, and positions differ along each axis."""
    x, moved = np.asarray(log.x), np.asarray(log.last_steps) > 0
    first = x[moved, 0]
    both = moved[log.half(0)].any() and moved[log.half(1)].any()
    return bool(both and np.all(np.ptp(np.concatenate([first, x[moved, 1]]), 0) > 0))


def _fit(log: Log) -> Models:
    """The splines of a log."""
    points, dtype = _points(log), log.x.dtype
    parts = [
        tuple(None if a is None else a[log.half(number)].reshape(-1, *a.shape[2:]) for a in points) for number in (0, 1)
    ]
    x, seen = np.asarray(points.x, np.float64), np.asarray(points.observed)
    low, high = x[seen].min(0), x[seen].max(0)
    fits = fit_parts(parts, low, high, diagonal=log.rung == "diagonals")  # type: ignore[arg-type]
    variance = variance_table(fits.linear(), points.in_blocks(log.block_size), low, high)
    return Models(fits.potential(dtype), (fits.potential(dtype, 0), fits.potential(dtype, 1)), variance)


class _Points(NamedTuple):
    """Rows that count, with axes (episodes, rows)."""

    x: Array
    gradient: Array
    hessian: Array | None
    observed: Array

    def in_blocks(self, size: int) -> "_Points":
        """So many consecutive episodes as one; the last is filled up with rows that do not count."""
        missing = -self.x.shape[0] % size

        def block(array: Array) -> Array:
            filled = jnp.pad(array, [(0, missing), *((0, 0),) * (array.ndim - 1)])
            return filled.reshape(filled.shape[0] // size, -1, *array.shape[2:])

        return _Points(*(None if array is None else block(array) for array in self))  # type: ignore[arg-type]


def _points(log: Log) -> _Points:
    gradient, last_steps = _gradients(log)
    episodes, rows, d = log.x.shape
    seen = jnp.arange(rows, dtype=last_steps.dtype)[None, :] <= last_steps[:, None]
    hessian = log.hessian
    if hessian is not None and hessian.ndim == 3:
        hessian = hessian[..., None] * jnp.eye(d, dtype=log.x.dtype)[None, None]
    stride = -(-episodes * rows // _MOST_POINTS)
    every = slice(None, None, stride)
    return _Points(log.x[:, every], gradient[:, every], None if hessian is None else hessian[:, every], seen[:, every])


def _gradients(log: Log) -> tuple[Array, Array]:
    """Observed gradients, or moves; and the last rows that have one."""
    if log.gradient is not None:
        return log.gradient, log.last_steps
    steps = log.step_size.reshape(log.x.shape[0], -1, 1)[:, : log.x.shape[1] - 1]
    moves = -jnp.diff(log.x, axis=1) / steps
    return jnp.concatenate([moves, jnp.zeros_like(moves[:, :1])], 1), log.last_steps - 1


def fill(log: Log, completion: Completion | None, first: int = 0) -> Filled:
    """The log with what it lacks taken from the models; its first episode is number `first` of the recording."""
    gradient, last_steps = _gradients(log)
    if completion is None or completion.rung == "hessians":
        assert log.hessian is not None
        whole = log.hessian if log.hessian.ndim == 4 else log.hessian[..., None]
        return Filled(gradient, gradient, whole, last_steps)
    halves = completion.models.halves
    drift, hessian = _of_others(halves, (log.half(0, first), log.half(1, first)), log.x)
    if log.rung == "diagonals":
        assert log.hessian is not None
        eye = jnp.eye(log.x.shape[-1], dtype=bool)[None, None]
        hessian = jnp.where(eye, log.hessian[..., None], hessian)
    return Filled(gradient, drift if log.rung == "positions" else gradient, hessian, last_steps)


@eqx.filter_jit
def _of_others(
    halves: tuple[AbstractPotential, AbstractPotential],
    members: tuple[Array | np.ndarray, Array | np.ndarray],
    x: Array,
) -> tuple[Array, Array]:
    """Gradients and Hessians at the episodes of each half, of the model of the other."""
    episodes, rows, d = x.shape
    safe = jnp.where(jnp.isfinite(x), x, 0)
    gradient, hessian = jnp.zeros((episodes, rows, d), x.dtype), jnp.zeros((episodes, rows, d, d), x.dtype)
    for model, own in ((halves[1], members[0]), (halves[0], members[1])):
        gradient = gradient.at[own].set(jax.vmap(jax.vmap(model.gradient))(safe[own]))
        hessian = hessian.at[own].set(jax.vmap(jax.vmap(model.hessian))(safe[own]))
    return gradient, hessian
