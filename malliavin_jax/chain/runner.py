"""Many steps of the outer chain: in one compiled call, or in legs between which the host shows and saves progress."""

import itertools
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from .._base.long_runs import Bar, Checkpoint, Journal
from .dynamics import Draws, Dynamics, Layout, Record, State


class Schedule(NamedTuple):
    """Which steps are made and which are kept: the step burn_in + (j + 1)·thinning is kept as number j < num_kept."""

    burn_in: int
    thinning: int
    num_kept: int

    @property
    def num_evaluations(self) -> int:
        """Evaluations of the field: one a step, and one at the last position."""
        return self.burn_in + self.num_kept * self.thinning + 1

    def kept_before(self, step: int) -> int:
        """How many of the steps before this one are kept."""
        return max(0, (step - 1 - self.burn_in) // self.thinning)


class Saved(NamedTuple):
    """What a checkpoint holds: the state after so many steps, and the records kept so far."""

    current: State
    records: Record


def run_at_once(dynamics: Dynamics, state: State, schedule: Schedule) -> Record:
    """The kept records of a whole run, in one compiled call."""
    total = schedule.num_evaluations
    length = _block_length(total, state.x.size)
    leg = _arguments(schedule, 0, total)
    return advance(
        dynamics, state, **leg, num_blocks=-(-total // length), block_length=length, max_kept=schedule.num_kept
    )[1]


def run_in_legs(
    dynamics: Dynamics, state: State, schedule: Schedule, *, progress: bool, checkpoint: Checkpoint | None
) -> Record:
    """The kept records of a whole run, as a loop over legs that end where the bar moves or a checkpoint is due."""
    total = schedule.num_evaluations
    if checkpoint is not None and checkpoint.every is None:
        checkpoint = Checkpoint(checkpoint.path, every=-(-total // 10))
    stops = _leg_stops(total, progress=progress, every=None if checkpoint is None else checkpoint.every)
    legs = list(itertools.pairwise([0, *stops]))
    # The longest leg and the one that keeps most set the sizes of the one program that makes them all.
    length = _block_length(max(stop - start for start, stop in legs), state.x.size)
    max_kept = max(schedule.kept_before(stop) - schedule.kept_before(start) for start, stop in legs)

    journal = Journal(checkpoint, **_identity(dynamics, state, schedule))
    records = _room_for(dynamics, state, schedule.num_kept)
    done, saved = journal.resume(Saved(state, _cut(records, 0, 0)))
    state = saved.current
    _fill(records, 0, saved.records)
    with Bar(total, done, enabled=progress) as bar, journal:
        for stop in (stop for stop in stops if stop > done):
            leg = _arguments(schedule, done, stop)
            blocks = _index(-(-(stop - done) // length))  # an array: legs of all lengths share one program
            state, new = advance(dynamics, state, **leg, num_blocks=blocks, block_length=length, max_kept=max_kept)
            first, last = schedule.kept_before(done), schedule.kept_before(stop)
            _fill(records, first, _cut(new, 0, last - first))
            journal.note(stop, Saved(state, _cut(records, 0, last)))
            bar.advance(stop - done)
            done = stop
    return records


@eqx.filter_jit
def advance(
    dynamics: Dynamics,
    state: State,
    *,
    start: Int[Array, ""],
    stop: Int[Array, ""],
    kept_before: Int[Array, ""],
    burn_in: Int[Array, ""],
    thinning: Int[Array, ""],
    num_blocks: Any,
    block_length: int,
    max_kept: int,
) -> tuple[State, Record]:
    """Steps start … stop − 1 in blocks, and the records kept among them, `max_kept` of them at most.

    `kept_before` is the number of records kept by the steps before `start`.
    The records are filled in place; one place more takes what is not kept. So burn-in and thinning are mere
    numbers of one program, in which the field is compiled once.
    """
    shapes = eqx.filter_eval_shape(dynamics.record, state.x, start)
    layout = Layout(shapes)
    records = jnp.zeros((max_kept + 1, layout.columns, len(state.x)), layout.dtype)

    def step(carry: tuple[State, Array], inputs: tuple[Array, Draws | None]) -> tuple[tuple[State, Array], None]:
        (state, records), (k, draws) = carry, inputs
        record = dynamics.record(state.x, k)
        since = k - burn_in
        is_kept = (since > 0) & (since % thinning == 0) & (k < stop)
        place = jnp.where(is_kept, since // thinning - 1 - kept_before, max_kept)
        records = jax.lax.dynamic_update_index_in_dim(records, layout.pack(record), place, 0)
        moved = dynamics.move(state, record.gradients, draws)
        # The last block may reach past the end: those steps change nothing.
        return (jax.tree.map(lambda new, old: jnp.where(k < stop, new, old), moved, state), records), None

    def block(number: Array, carry: tuple[State, Array]) -> tuple[State, Array]:
        k = start + number * block_length + jnp.arange(block_length, dtype=start.dtype)
        return jax.lax.scan(step, carry, (k, dynamics.draws(k, state.x)))[0]

    state, records = jax.lax.fori_loop(0, num_blocks, block, (state, records))
    return state, layout.unpack(records[:max_kept])


def _arguments(schedule: Schedule, start: int, stop: int) -> dict[str, Int[Array, ""]]:
    """What `advance` is told of the steps start … stop − 1: arrays, so that no number compiles anew."""
    numbers = dict(
        start=start,
        stop=stop,
        kept_before=schedule.kept_before(start),
        burn_in=schedule.burn_in,
        thinning=schedule.thinning,
    )
    return {name: _index(number) for name, number in numbers.items()}


def _block_length(steps: int, width: int) -> int:
    """Steps per block of noise: at most 128 and four million numbers, in blocks of about equal length."""
    most = max(1, min(128, 4_000_000 // width))
    return -(-steps // -(-steps // most))


def _leg_stops(total: int, *, progress: bool, every: int | None) -> list[int]:
    """Where legs end: at each hundredth that the bar shows, where a checkpoint is due, and at the end."""
    stops = {total}
    if progress:
        stops |= {*range(0, total, -(-total // 100))}
    if every is not None:
        stops |= {*range(every, total, every)}
    return sorted(stops - {0})


def _identity(dynamics: Dynamics, state: State, schedule: Schedule) -> dict[str, Any]:
    """What makes a run what it is, by the names of `passive_langevin`'s arguments."""
    return dict(
        key=(dynamics.noise_key, dynamics.field_key),
        field=dynamics.field,
        initial=state.x,
        num_steps=schedule.num_evaluations,
        burn_in=schedule.burn_in,
        thinning=schedule.thinning,
        step_size=dynamics.step_size,
        inverse_temperature=dynamics.inverse_temperature,
        update=(dynamics.method, dynamics.optimizer, state.optimizer),
    )


def _room_for(dynamics: Dynamics, state: State, num_kept: int) -> Record:
    """Empty records of a whole run, in the host's memory."""
    shapes = eqx.filter_eval_shape(dynamics.record, state.x, _index(0))
    return jax.tree.map(lambda leaf: np.zeros((leaf.shape[0], num_kept, *leaf.shape[1:]), leaf.dtype), shapes)


def _cut(records: Record, first: int, last: int) -> Record:
    return jax.tree.map(lambda leaf: np.asarray(leaf)[:, first:last], records)


def _fill(records: Record, first: int, new: Record) -> None:
    """Write `new` into `records`, from number `first` on."""
    for store, leaf in zip(records, new, strict=True):
        store[:, first : first + leaf.shape[1]] = leaf


def _index(number: int) -> Int[Array, ""]:
    return jnp.asarray(number, jnp.int32)
