"""Long runs: legs, a progress bar, and checkpoints that are replaced whole or not at all, never pickled."""

import functools
import hashlib
import json
import os
import re
import time
import types
import zipfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

# What a damaged or foreign file makes NumPy and zipfile raise.
_UNREADABLE = (
    *(OSError, ValueError, KeyError, TypeError, AttributeError, EOFError, NotImplementedError),
    *(zipfile.BadZipFile, zlib.error),
)
_CONFIGURATION = "configuration"
_SAVE_EVERY = 30.0  # seconds between the checkpoints of a journal


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _raw(leaf: Any) -> np.ndarray:
    """The numbers of an array; for a typed key, the words behind it."""
    return np.asarray(jax.random.key_data(leaf) if _is_key(leaf) else leaf)


def fingerprint(thing: Any) -> str:
    """A digest equal for equal configurations, also from one process to the next.

    Arrays count by dtype, shape and bytes; keys by their words and generator; Python functions by name,
    bytecode, constants, defaults and what they close over; other objects by their `repr`, less any memory
    address.
    """
    digest = hashlib.blake2b(digest_size=16)
    _feed(digest, thing, ())
    return digest.hexdigest()


def _feed(digest: Any, thing: Any, above: tuple[int, ...]) -> None:
    if id(thing) in above:  # a function that closes over itself
        return digest.update(b"cycle")
    above = (*above, id(thing))
    if isinstance(thing, jax.Array | np.ndarray | np.generic):
        kind = str(jax.random.key_impl(cast(Any, thing))) if _is_key(thing) else ""
        values = _raw(thing)
        digest.update(f"array{kind}{values.dtype}{values.shape}".encode() + values.tobytes())
    elif isinstance(thing, types.FunctionType):
        digest.update(f"function{thing.__module__}{thing.__qualname__}".encode())
        _feed(digest, thing.__code__, above)
        cells = [cell.cell_contents for cell in thing.__closure__ or ()]
        _feed(digest, [thing.__defaults__, thing.__kwdefaults__, cells], above)
    elif isinstance(thing, types.CodeType):
        digest.update(thing.co_code + " ".join(thing.co_names).encode())
        _feed(digest, list(thing.co_consts), above)
    elif isinstance(thing, types.MethodType):
        _feed(digest, [thing.__func__, thing.__self__], above)
    elif isinstance(thing, functools.partial):
        _feed(digest, [thing.func, thing.args, thing.keywords], above)
    elif callable(thing) and hasattr(thing, "__wrapped__"):  # jitted and otherwise decorated functions
        _feed(digest, [type(thing).__name__, cast(Any, thing).__wrapped__], above)
    else:
        leaves, structure = jax.tree.flatten(thing)
        if len(leaves) == 1 and leaves[0] is thing:  # not a container: described by its repr
            digest.update(re.sub(r" at 0x[0-9a-f]+", "", f"{type(thing)}{thing!r};").encode())
        else:
            digest.update(re.sub(r" at 0x[0-9a-f]+", "", str(structure)).encode())
            for leaf in leaves:
                _feed(digest, leaf, above)


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


class Bar:
    """A progress bar on stderr that turns itself off, rather than raise, when anything in it goes wrong."""

    def __init__(
        self, total: int | None, done: int, *, enabled: bool, unit: str = "step", name: str = "passive Langevin"
    ):
        self._bar: Any = None
        if enabled:
            self._attempt(lambda: self._open(total, done, unit, name))

    def _open(self, total: int | None, done: int, unit: str, name: str) -> None:
        from tqdm import tqdm

        self._bar = tqdm(total=total, initial=done, unit=unit, desc=name)

    def _attempt(self, action: Callable[[], Any]) -> None:
        try:
            action()
        except Exception:  # a closed terminal must not cost the run
            self._bar = None

    def advance(self, steps: int) -> None:
        if self._bar is not None:
            self._attempt(lambda: self._bar.update(steps))

    def __enter__(self) -> "Bar":
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._attempt(lambda: self._bar.close())
