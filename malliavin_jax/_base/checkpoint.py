"""Long runs: legs, a progress bar, and checkpoints that are replaced whole or not at all, never pickled."""

import json
import os
import time
import zipfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from .fingerprint import _is_key, _raw, fingerprint
from .progress import Bar

# What a damaged or foreign file makes NumPy and zipfile raise.
_UNREADABLE = (
    *(OSError, ValueError, KeyError, TypeError, AttributeError, EOFError, NotImplementedError),
    *(zipfile.BadZipFile, zlib.error),
)
_CONFIGURATION = "configuration"
_SAVE_EVERY = 30.0  # seconds between the checkpoints of a journal


def save(path: Path, configuration: dict[str, str], trees: dict[str, Any]) -> None:
    """Write `trees` and the fingerprints of the run to `path`, atomically.

    The file is written beside its final place, flushed to disk and moved over the old one, so that `path`
    holds the old checkpoint or the new one, whole, whenever the process dies. A leftover of a killed write
    has a fixed name and is overwritten by the next one.
    """
    arrays = {_CONFIGURATION: np.asarray(json.dumps(configuration))}
    for name, tree in trees.items():
        for number, leaf in enumerate(jax.tree.leaves(tree)):
            arrays[f"{name}_{number}"] = _raw(leaf)
    draft = path.with_name(f".{path.name}.tmp")
    try:
        with open(draft, "wb") as file:
            np.savez(file, allow_pickle=False, **arrays)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    if os.name == "posix":  # the move itself is only durable once the directory is
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def read(path: Path, names: tuple[str, ...]) -> tuple[dict[str, str], dict[str, list[np.ndarray]]]:
    """The configuration in the file at `path`, and the leaves of each named tree."""
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as stored:
            written = dict(json.loads(str(stored[_CONFIGURATION])))
            # Members keep the order they were written in, which is that of the leaves.
            trees = {name: [stored[f] for f in stored.files if f.startswith(f"{name}_")] for name in names}
    except _UNREADABLE as error:
        raise ValueError(
            f"checkpoint {path} cannot be read: truncated, damaged or not a checkpoint ({error}). "
            "It was left as it is; move it away to start again"
        ) from error
    return written, trees


def load(path: Path, configuration: dict[str, str], names: tuple[str, ...]) -> dict[str, list[np.ndarray]]:
    """The leaves of each named tree in the checkpoint at `path`, which must be of this configuration."""
    written, trees = read(path, names)
    if written != configuration:
        differs = [name for name in configuration if written.get(name) != configuration[name]]
        raise ValueError(
            f"checkpoint {path} belongs to another configuration: it differs in {', '.join(differs)}. "
            "It was left as it is; give another path, or the arguments it was made with"
        )
    return trees


def checked_path(path: Any) -> Path:
    """Where a checkpoint may be written."""
    path = Path(path)
    if path.is_dir() or not path.parent.is_dir():
        raise ValueError(f"checkpoint must be a file in a directory that exists, got {str(path)!r}")
    return path


def restore(leaves: list[np.ndarray], like: Any) -> Any:
    """A tree shaped as `like` from its stored leaves, with keys wrapped again."""

    def rebuild(leaf: np.ndarray, model: Any) -> Any:
        array = jnp.asarray(leaf)
        return jax.random.wrap_key_data(array, impl=jax.random.key_impl(model)) if _is_key(model) else array

    models, structure = jax.tree.flatten(like)
    return structure.unflatten([rebuild(leaf, model) for leaf, model in zip(leaves, models, strict=True)])


class Checkpoints(NamedTuple):
    """Where to save, after which steps, and the fingerprints of the run."""

    path: Path
    marks: frozenset[int]
    configuration: dict[str, str]


def run_in_legs(
    advance: Callable[[Any, int, int], tuple[Any, Sequence[np.ndarray]]],
    state: Any,
    marks: Sequence[int],
    *,
    checkpoints: Checkpoints | None,
    progress: bool,
) -> list[np.ndarray]:
    """Carry `state` from mark to mark, and join the (chains, kept, …) arrays that each leg records.

    `advance(state, start, stop)` does the steps start … stop − 1. Each mark in `checkpoints` is saved; a file
    that is already there is where the run begins.
    """
    step = 0
    parts: list[Sequence[np.ndarray]] = []
    if checkpoints is not None and checkpoints.path.exists():
        stored = load(checkpoints.path, checkpoints.configuration, ("step", "state", "records"))
        step, state = int(stored["step"][0]), restore(stored["state"], state)
        parts.append(stored["records"])
    with Bar(marks[-1], step, enabled=progress) as bar:
        for mark in (m for m in marks if m > step):
            state, records = advance(state, step, mark)
            parts.append(records)
            if checkpoints is not None and mark in checkpoints.marks:
                parts[:] = [_join(parts)]
                save(
                    checkpoints.path,
                    checkpoints.configuration,
                    {"step": np.asarray(mark), "state": state, "records": parts[0]},
                )
            bar.advance(mark - step)
            step = mark
    return _join(parts)


def _join(parts: Sequence[Sequence[np.ndarray]]) -> list[np.ndarray]:
    return [np.concatenate(leaves, axis=1) for leaves in zip(*parts, strict=True)]


class Journal:
    """The checkpoint of a stream of unknown length: how much of it is done, and the state then.

    As a context it saves when the stream ends, and when something goes wrong in it: what is done stays done. Of several
    processes, which all hold the same state, the first one writes and all must be able to read.
    """

    def __init__(self, path: Any, **things: Any):
        self._path = None if path is None else checked_path(path)
        self._configuration = {} if path is None else {name: fingerprint(thing) for name, thing in things.items()}
        self._unsaved: tuple[int, Any] | None = None
        self._saved_at = time.monotonic()

    def resume(self, state: Any) -> tuple[int, Any]:
        """How much is done, and the state to go on from: that of the file if there is one, else `state`."""
        done = 0
        if self._path is not None and self._path.exists():
            stored = load(self._path, self._configuration, ("done", "state"))
            done, state = int(stored["done"][0]), restore(stored["state"], state)
        if self._path is not None and jax.process_count() > 1:
            multihost_utils.assert_equal(np.asarray(done), f"checkpoint {self._path} must be seen by every process")
        return done, state

    def note(self, done: int, state: Any) -> None:
        self._unsaved = done, state
        if time.monotonic() - self._saved_at > _SAVE_EVERY:
            self._save()

    def _save(self) -> None:
        if self._path is not None and self._unsaved is not None and jax.process_index() == 0:
            done, state = self._unsaved
            save(self._path, self._configuration, {"done": np.asarray(done, np.int64), "state": state})
        self._unsaved, self._saved_at = None, time.monotonic()

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, kind: Any, *exception: object) -> None:
        self._save()
        if kind is None and self._path is not None and jax.process_count() > 1:
            multihost_utils.sync_global_devices("checkpoint saved")
