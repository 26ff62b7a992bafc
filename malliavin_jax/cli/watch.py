"""`malliavin-jax watch`: the loss of a run that is still being recorded, in a process of its own.

The rows are learned in updates that depend on them alone (`io/updates.py`), and the state after an update, with the
number of the first row not yet learned, is one archive, replaced whole. All outputs are functions of that state. So
whatever is killed, writer or watcher, and whenever, the next watcher ends where one never killed would have.
"""

import json
import time
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from .. import io
from .._base.long_runs import Checkpoint, Journal
from ..adaptive.field import AdaptiveField
from ..io.blocks import RecordedRows, read_settings
from ..io.updates import Update, begins_of, rows_from, rung_of, updates_in
from .output import Place, Voice, as_json, gradient_rows, loss_rows, stop_if_interrupted

STATE, OUTPUTS = "state.npz", ("loss.csv", "loss.png", "watch.json")
_POINTS = {1: 61, 2: 25}  # of the default grid, on each axis
_MOMENTS, _CURVE = 256, 129  # of the history that is kept, and of the points of each loss in it
_RECENT = 128  # updates whose first rows are known: a change is found within the 85 newest
_LONG = 100_000  # rows of an episode that make one wonder


class Watch(NamedTuple):
    """What is asked of `watch`, as the user gave it."""

    grid: list[np.ndarray] | None
    episodes: int
    piece_steps: int | None
    forgetting: float | None
    every: float
    once: bool
    idle: float | None


class History(NamedTuple):
    """Moments of the run, evenly spread over all of it: when there is no room for more, every second one goes."""

    stride: np.ndarray  # () updates from one to the next
    update: np.ndarray  # (moments,) counted from 1; 0 where there is none yet
    row: np.ndarray  # (moments,) rows learned by then
    memory: np.ndarray  # (moments,) updates that the fit stood on
    changes: np.ndarray  # (moments,) found by then
    loss: np.ndarray  # (moments, points) in d = 1, where there are data


class State(NamedTuple):
    """All that is known after an update."""

    field: AdaptiveField
    history: History
    first_rows: np.ndarray  # (recent,) of the newest updates, at their number modulo `_RECENT`
    changed_row: np.ndarray  # () where what is remembered begins after the latest change; −1 before any
    outside: np.ndarray  # () the share of the newest update's points that are not in the box


def run_watch(data: Path, place: Place, request: Watch, voice: Voice) -> int:
    """Follow the folder until there is a reason to end; an interrupt is one."""
    resuming = place.folder is not None and not place.overwrite and (place.folder / STATE).exists()
    if not resuming:
        place.check([STATE, *OUTPUTS])
    place.overwrite = True  # from here on what is there is ours
    with jax.enable_x64(True):
        first = _first_row(data, request, voice)
        dim, hessians = first.x.shape[1], rung_of(first) == "hessians"
        template = _field(request, hessians, np.zeros(dim), np.ones(dim))
        checkpoint = None
        if place.folder is not None:
            place.folder.mkdir(parents=True, exist_ok=True)
            if not resuming:
                (place.folder / STATE).unlink(missing_ok=True)
            checkpoint = Checkpoint(place.folder / STATE, every=1)
        asked = {name: getattr(request, name) for name in ("grid", "episodes", "piece_steps", "forgetting")}
        with Journal(checkpoint, run=(first.x, read_settings(data)), **asked) as journal:
            done, state = journal.resume(_nothing(template, request))
            if done:
                voice.note(f"going on from row {done}, after update {int(state.field.updates)}")
                _write(data, place, request, voice, done, state, rung_of(first))
            _follow(data, place, request, voice, journal, done, state)
    if place.written:
        voice.say(place.said())
    return 0


def _follow(data: Path, place: Place, request: Watch, voice: Voice, journal: Journal, done: int, state: State) -> None:
    """Learn, write, wait, and again."""
    seen, news, warned = 0, time.monotonic(), False
    while True:
        stop_if_interrupted()
        began, before = time.monotonic(), done
        rows, is_all = rows_from(data, done, request.episodes, request.piece_steps)
        if rows.next > seen:
            seen, news = rows.next, began
        idle = request.idle is not None and began - news > request.idle
        ended = is_all and (request.once or idle)
        for update in updates_in(rows, episodes=request.episodes, piece_steps=request.piece_steps, ended=ended):
            state, done = _learned(state, update, request, voice), update.next
            if time.monotonic() - began > request.every:
                break
        if done > before:
            journal.note(done, state)
            _write(data, place, request, voice, done, state, rung_of(rows))
            if done < rows.next or not is_all:
                continue  # there may be more to learn at once
        waiting = len(begins_of(rows, request.piece_steps)) if done == before else 0
        if not warned and waiting == 1 and len(rows.x) > _LONG:
            voice.note(f"no episode has ended in {len(rows.x)} rows: --piece-steps N cuts a run that never restarts")
            warned = True
        if ended:
            break
        time.sleep(max(0.0, request.every - (time.monotonic() - began)))
    if done == 0:
        raise ValueError(f"{data} holds {waiting} episodes, and an update takes {request.episodes}: give --episodes")
    if waiting:
        voice.note(f"{waiting} episodes are left, and an update takes {request.episodes}")


# Reading.


def _first_row(data: Path, request: Watch, voice: Voice) -> RecordedRows:
    """The first row of the folder, once there is one; what it holds must be enough for a fit."""
    if data.is_file():
        raise ValueError(f"{data} is a file, and watch follows the folder of a Recorder: recover reads files")
    began, told = time.monotonic(), False
    while True:
        stop_if_interrupted()
        rows = io.read_blocks(data, stop=1) if data.is_dir() and read_settings(data) is not None else None
        if rows is not None and len(rows.x):
            break
        if request.once or (request.idle is not None and time.monotonic() - began > request.idle):
            raise ValueError(f"{data} must be the folder of a Recorder with at least one row: there is none")
        if not told:
            voice.note(f"waiting for a recorder to write to {data} (Ctrl-C ends)")
            told = True
        time.sleep(request.every)
    if (dim := rows.x.shape[1]) > 2:
        raise ValueError(f"watch serves 1 and 2 dimensions, {data} has {dim}; recover and estimate read it too")
    if request.grid is not None and len(request.grid) != dim:
        raise ValueError(f"--grid must have {dim} axes for these data, got {len(request.grid)}")
    rung = rung_of(rows)
    if rung == "positions" and rows.step_size is None:
        raise ValueError(f"{data} holds positions alone, and no step_size: its moves say nothing about the gradient")
    if rung != "hessians":
        what = "positions alone: their moves stand for gradients, with all their noise"
        known = "gradients" if rows.hessian is None else "gradients and diagonals of Hessians, which are left out"
        voice.note(f"{data} holds {what if rung == 'positions' else known}")
    return rows


# Learning.


def _field(request: Watch, hessians: bool, low: np.ndarray, high: np.ndarray) -> AdaptiveField:
    forgetting = "auto" if request.forgetting is None else request.forgetting
    return AdaptiveField(low, high, forgetting=forgetting, hessians=hessians)


def _nothing(field: AdaptiveField, request: Watch) -> State:
    """Before any update; the box of the field is still to be chosen."""
    points = len(_axes(field, request, thin=True)[0]) if field.mesh.dim == 1 else 0
    update, row, changes = (np.zeros(_MOMENTS, np.int64) for _ in range(3))
    loss = np.full((_MOMENTS, points), np.nan)
    history = History(np.asarray(1), update, row, np.zeros(_MOMENTS), changes, loss)
    return State(field, history, np.zeros(_RECENT, np.int64), np.asarray(-1), np.asarray(0.0))


def _learned(state: State, update: Update, request: Watch, voice: Voice) -> State:
    """The state after one more update; what there is to tell is told."""
    samples, before = update.samples, state.field
    x = np.asarray(samples.x)[np.asarray(samples.observed)]
    x = x[np.isfinite(x).all(1)]
    if int(before.updates) == 0 and len(x):
        empty = _field(request, before.mesh.hessians, *_box(x, request))
        before = eqx.tree_at(lambda field: field.refused, empty, before.refused)
    field = before.update(samples)
    low, high = (np.asarray(end) for end in (field.mesh.low, field.mesh.high))
    outside = np.mean(np.any((x < low) | (x > high), 1)) if len(x) else 0.0
    refused = int(field.refused - before.refused)
    if refused:
        place = f"rows {update.first} to {update.next - 1}"
        voice.note(f"{place}: {refused} of {samples.num_episodes} episodes refused, with a number that is not finite")
    if int(field.updates) == int(before.updates):  # nothing in it: what was learned stays as it is
        return state._replace(field=field)
    number = int(field.updates) - 1
    first_rows = state.first_rows.copy()
    first_rows[number % _RECENT] = update.first
    changed = state.changed_row
    if int(field.changes) > int(before.changes):
        changed = np.asarray(first_rows[int(field.changed_at) % _RECENT])
        voice.note(f"update {number + 1}: the loss has changed, at about row {int(changed)}")
    history = _remembered(state.history, field, request, number + 1, update.next)
    return State(field, history, first_rows, changed, np.asarray(outside))


def _box(x: np.ndarray, request: Watch) -> tuple[np.ndarray, np.ndarray]:
    """That of the grid; or around the first positions, with room to move, and without the farthest of them."""
    if request.grid is not None:
        low, high = (np.asarray([axis[end] for axis in request.grid]) for end in (0, -1))
        return low, high
    low, high = np.percentile(x, [0.5, 99.5], axis=0)
    room = np.maximum(0.25 * (high - low), 1e-6 * np.maximum(1.0, np.abs(high)))
    return low - room, high + room


def _remembered(history: History, field: AdaptiveField, request: Watch, update: int, row: int) -> History:
    """The history with the moment after this update, if it is one of those that are kept."""
    stride = int(history.stride)
    if update % stride:
        return history
    kept = History(history.stride, *(array.copy() for array in history[1:]))
    if kept.update[-1]:  # full
        stride *= 2
        half = [np.concatenate([array[1::2], np.zeros_like(array[::2])]) for array in history[1:]]
        kept = History(np.asarray(stride), *half)
    if update % stride == 0:
        at = int(np.count_nonzero(kept.update))
        kept.update[at], kept.row[at] = update, row
        kept.memory[at], kept.changes[at] = float(field.memory), int(field.changes)
        if field.mesh.dim == 1:
            kept.loss[at] = np.asarray(field.loss(_axes(field, request, thin=True)[0]).value)
    return kept


def _axes(field: AdaptiveField, request: Watch, *, thin: bool = False) -> tuple[np.ndarray, ...]:
    """The grid over the box of the field; a thin one has no more points than the history keeps."""
    dim = field.mesh.dim
    counts = [_POINTS[dim]] * dim if request.grid is None else [len(axis) for axis in request.grid]
    counts = [min(count, _CURVE) for count in counts] if thin else counts
    low, high = (np.asarray(end) for end in (field.mesh.low, field.mesh.high))
    return tuple(np.linspace(low[i], high[i], counts[i]) for i in range(dim))


# Writing.


def _write(data: Path, place: Place, request: Watch, voice: Voice, done: int, state: State, rung: str) -> None:
    """Everything, from the state alone."""
    from . import pictures  # here, so that matplotlib is imported only where something is drawn

    field, history = state.field, state.history
    if int(field.updates) == 0:
        return
    axes = _axes(field, request)
    alphas = np.stack(np.meshgrid(*axes, indexing="ij"), -1).reshape(-1, len(axes))
    loss = field.loss(axes)
    estimates = jax.jit(jax.vmap(field))(jnp.asarray(alphas))
    told = _told(data, request, done, state, rung)
    moments = int(np.count_nonzero(history.update))
    told["history"] = {
        name: getattr(history, name)[:moments].tolist() for name in ("update", "row", "memory", "changes")
    }
    if len(axes) == 1:
        axis = _axes(field, request, thin=True)[0]
        told["history"] |= {"alpha": axis.tolist(), "loss": history.loss[:moments].tolist()}
    content = as_json({**told, "loss": loss_rows(alphas, loss), "gradient": gradient_rows(alphas, estimates)})
    place.written.clear()
    place.table("loss.csv", loss_rows(alphas, loss))
    place.write("watch.json", content)
    past = History(history.stride, *(array[:moments] for array in history[1:]))
    place.picture("loss.png", lambda file: pictures.draw_watch(file, loss, past, _axes(field, request, thin=True)[0]))
    if voice.emit is not None:
        voice.emit(json.dumps(json.loads(content)) + "\n")
    known = np.asarray(estimates.trusted)
    error = f"{np.median(np.asarray(estimates.stderr)[known]):.2g}" if known.any() else "unknown"
    voice.note(
        f"update {told['updates']}, row {done}: memory of {told['memory']:g} updates, {told['changes']} changes, "
        f"standard error of the gradient {error}"
    )
    if told["outside"] > 0.05 and request.grid is None:
        share = f"{told['outside']:.0%} of the newest points"
        voice.note(f"{share} are outside the grid: --grid LOW:HIGH:COUNT --overwrite")


def _told(data: Path, request: Watch, done: int, state: State, rung: str) -> dict[str, Any]:
    """The numbers of the state, for JSON."""
    field, changed = state.field, int(state.changed_row)
    return {
        "data": str(data),
        "observed": rung,
        "rows": done,
        "updates": int(field.updates),
        "episodes_per_update": request.episodes,
        "refused": int(field.refused),
        "memory": float(field.memory),
        "effective_episodes": float(field.effective_episodes),
        "changes": int(field.changes),
        "changed_at_row": None if changed < 0 else changed,
        "p_values": np.asarray(field.p_values).tolist(),
        "fit_p_value": float(field.fit_p_value),
        "outside": float(state.outside),
    }
