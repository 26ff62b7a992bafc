"""Rows of a recorder's folder as updates of an adaptive field, the same ones wherever a reader stops in between.

An update is so many consecutive episodes. Where one begins depends on the rows alone, and not on when they were read:
who is killed and reads on from the first row not yet learned makes the same updates as who was not.

Every row is an observation of the gradient, at a place that its noise does not know: all of them count, not only those
at some conditioning times. Of positions alone the gradient is that of the move, −(X_{k+1} − X_k)/ε, whose noise is
large and as independent. An episode is a cluster of the standard errors.
"""

import os
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ..samples.samples import Samples
from .blocks import RecordedRows, read_blocks

_ROWS = 1 << 17  # read at a time, unless an update needs more


class Update(NamedTuple):
    """Some episodes, (episodes, rows of the longest), and the numbers of their first row and of the one after them."""

    samples: Samples
    first: int
    next: int


def rung_of(rows: RecordedRows) -> str:
    """What a fit can use of these rows: "hessians", "gradients" or "positions"."""
    if rows.gradient is None:
        return "positions"
    whole = rows.hessian is not None and (rows.hessian.ndim == 3 or rows.x.shape[1] == 1)
    return "hessians" if whole else "gradients"


def rows_from(path: str | os.PathLike, start: int, episodes: int, piece_steps: int | None) -> tuple[RecordedRows, bool]:
    """The rows from `start` on, as many as hold an update if there is one, and whether these are all there are."""
    most = _ROWS
    while True:
        rows = read_blocks(path, start=start, stop=start + most)
        is_all = len(rows.x) < most
        if is_all or len(begins_of(rows, piece_steps)) > episodes:
            return rows, is_all
        most *= 2


def updates_in(rows: RecordedRows, *, episodes: int, piece_steps: int | None, ended: bool) -> Iterator[Update]:
    """The updates that are whole in these rows, of which the first begins an update.

    Args:
        rows: those from the first row not yet learned on.
        episodes: how many make an update.
        piece_steps: cut longer episodes into pieces of so many steps, each an episode of its own.
        ended: whether the last row ends its episode; else only the row after it tells.
    """
    begins = begins_of(rows, piece_steps)
    ends = np.append(begins[1:], len(rows.x)) if ended else begins[1:]
    gradient, known = _gradients(rows)
    for number in range(episodes, len(ends) + 1, episodes):
        begin, end = begins[number - episodes : number], ends[number - episodes : number]
        yield Update(_samples(rows, gradient, known, begin, end), rows.first + int(begin[0]), rows.first + int(end[-1]))


def begins_of(rows: RecordedRows, piece_steps: int | None) -> np.ndarray:
    """Where episodes, or pieces of them, begin; the first row begins one in any case."""
    number = np.arange(len(rows.x))
    starts = rows.starts.copy()
    starts[:1] = True
    if piece_steps is not None:
        since = number - np.maximum.accumulate(np.where(starts, number, 0))
        starts = since % piece_steps == 0
    return np.flatnonzero(starts)


def _gradients(rows: RecordedRows) -> tuple[np.ndarray, np.ndarray]:
    """The gradient at each row, and where there is one: the last position of an episode has no move."""
    if rows.gradient is not None:
        return rows.gradient, np.ones(len(rows.x), bool)
    if rows.step_size is None:
        raise ValueError("of positions alone the gradient is that of the moves, which needs step_size: record it")
    moved = np.append(~rows.starts[1:], False)
    after = np.append(rows.x[1:], rows.x[-1:], axis=0)
    return (rows.x - after) / rows.step_size[:, None], moved


def _samples(
    rows: RecordedRows, gradient: np.ndarray, known: np.ndarray, begin: np.ndarray, end: np.ndarray
) -> Samples:
    """The episodes of an update side by side, in float64."""
    longest = int(np.max(end - begin))
    grain = 2 ** max(0, longest.bit_length() - 4)  # so that lengths that differ a little share a compiled program
    index = begin[:, None] + np.arange(-(-longest // grain) * grain)
    index, within = np.minimum(index, len(rows.x) - 1), index < end[:, None]
    observed = within & known[index]
    hessian = rows.hessian if rung_of(rows) == "hessians" else None

    def column(array: np.ndarray) -> Float[Array, "..."]:
        seen = observed.reshape(*observed.shape, *(1,) * (array.ndim - 1))
        return jnp.asarray(np.where(seen, array[index], np.nan), jnp.float64)

    with jax.enable_x64(True):
        x, g = column(rows.x), column(gradient)
        whole = None if hessian is None else column(hessian.reshape(len(rows.x), x.shape[-1], -1))
        return Samples(x, g, whole, jnp.zeros_like(x), jnp.asarray(observed))
