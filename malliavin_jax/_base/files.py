"""Files that are replaced whole or not at all, and archives of named arrays in them; nothing is ever pickled."""

import json
import os
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

# What a damaged or foreign file makes NumPy and zipfile raise.
_UNREADABLE = (
    *(OSError, ValueError, KeyError, TypeError, AttributeError, EOFError, NotImplementedError),
    *(zipfile.BadZipFile, zlib.error),
)
_HEADER = "header"


def write_whole(path: str | os.PathLike, write: Callable[[BinaryIO], None]) -> None:
    """Make the file at `path` what `write(file)` writes, atomically.

    The file is written beside its final place, flushed to disk and moved over the old one: `path` holds the old
    content or the new one, whole, whenever the process dies. If `write` raises, the draft is removed and the old file
    stays. The draft of a killed process stays behind; its name is fixed, so that the next write replaces it.
    """
    path = Path(path)
    draft = path.with_name(f".{path.name}.tmp")
    try:
        with open(draft, "wb") as file:
            write(file)
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


class Archive(NamedTuple):
    """What an archive holds: a few strings that describe it, and arrays by name."""

    header: dict[str, str]
    arrays: dict[str, np.ndarray]


def write_archive(path: Path, header: Mapping[str, str], arrays: Mapping[str, Any]) -> None:
    """Write an `.npz` archive, whole or not at all."""
    columns = {_HEADER: np.asarray(json.dumps(dict(header))), **arrays}
    write_whole(path, lambda file: np.savez(file, allow_pickle=False, **columns))


def read_archive(path: Path, names: Iterable[str] | None = None, *, kind: str, remedy: str = "") -> Archive:
    """The archive at `path`, with the arrays of these names (None: all); errors name its `kind`, and a `remedy`."""
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as stored:
            header = dict(json.loads(str(stored[_HEADER])))
            wanted = [name for name in stored.files if name != _HEADER] if names is None else list(names)
            return Archive(header, {name: stored[name] for name in wanted})
    except _UNREADABLE as error:
        raise ValueError(
            f"{kind} {path} cannot be read: truncated, damaged or not a {kind} ({error}). It was left as it is{remedy}"
        ) from error
