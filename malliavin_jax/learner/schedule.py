"""Where an episode is read: the stops, as rows of a scan whose program does not depend on them.

Steps are taken in blocks of `width` (four in one dimension, one beyond: see `random.steps_per_block`); the steps of a
block are its phases 0 … width − 1.

- Evenly spaced stops at ends of blocks (a single one included) need no test: a scan over the stops holds a scan over
  the blocks between two of them.
- Any other stops are data of one scan over rows. A row does the phases begin … end − 1 of a block and is read at its
  end, if it ends at a stop. Most rows are whole blocks; one with a stop inside is passed over in two rows or more.

The number and the spacing of the stops change lengths and numbers, not the size of the program.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

NOWHERE = -1  # the slot of a row that is not read


class EvenStops(NamedTuple):
    """Row i holds the numbers of the blocks that lead to stop i."""

    blocks: Int[Array, "stops blocks"]


class Rows(NamedTuple):
    """The columns of the schedule of a scan, in which every row has its own numbers."""

    block: Int[Array, " rows"]
    begin: Int[Array, " rows"]
    end: Int[Array, " rows"]
    next_block: Int[Array, " rows"]  # whose noise is to be drawn for the row that follows
    slot: Int[Array, " rows"]  # where the reading at the end of the row goes, or NOWHERE


class UnevenStops(NamedTuple):
    """Any stops: the rows, the number of stops, and whether every row is a whole block."""

    rows: Rows
    number: int
    whole_blocks: bool


def make_schedule(stops: Sequence[int], width: int) -> EvenStops | UnevenStops:
    """The schedule of increasing `stops`, numbers of steps from 1 on, in blocks of `width` steps."""
    steps = np.asarray(stops)
    gap = int(steps[0])
    if gap % width == 0 and np.all(np.diff(steps) == gap):
        return EvenStops(jnp.arange(len(steps) * gap // width).reshape(len(steps), -1))
    last = int(steps[-1])
    cuts = np.union1d(np.arange(0, last, width), steps)  # a row ends at each end of a block and at each stop
    start, stop = np.append(0, cuts[cuts > 0])[:-1], cuts[cuts > 0]
    block = start // width
    slot = np.where(np.isin(stop, steps), np.searchsorted(steps, stop), NOWHERE)
    begin, end = start - width * block, stop - width * block

    def column(numbers: np.ndarray) -> Array:
        return jnp.asarray(numbers.astype(np.int32))

    rows = Rows(column(block), column(begin), column(end), column(stop // width), column(slot))
    return UnevenStops(rows, len(steps), bool(np.all(end - begin == width)))
