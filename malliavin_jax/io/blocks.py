"""The folder of a recorder: how its files are named, written and read (`malliavin_jax.io` describes the layout)."""

import json
import os
import re
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from .._base.checks import check_count
from .._base.files import write_whole
from ..recording.npy import Refused, archived_arrays

MAX_BYTES = 8 * 2**30
SETTINGS = "recorder.json"
LOCK = ".recorder.lock"
_FORMAT, _VERSION = "malliavin_jax recorder", 1
_BLOCK = re.compile(r"rows-(\d{12})\.npz")


class Settings(NamedTuple):
    """What every row of a folder holds; `step_size` is one number, "each" for one a row, or None where not known."""

    dim: int
    gradient: bool
    hessian: str | None
    step_size: float | str | None
    inverse_temperature: float | None

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of one row of each array that a block must hold."""
        d = self.dim
        shapes: dict[str, tuple[int, ...]] = {"x": (d,), "starts": ()}
        if self.gradient:
            shapes["gradient"] = (d,)
        if self.hessian is not None:
            shapes["hessian"] = (d, d) if self.hessian == "full" else (d,)
        if self.step_size == "each":
            shapes["step_size"] = ()
        return shapes


class RecordedRows(NamedTuple):
    """Rows of a recorder's folder, in order: what `read_blocks` returns.

    Attributes:
        first: the number of the first of them, counted from 0.
        x: (rows, d), the positions.
        gradient: (rows, d), the gradients used there; None if not recorded.
        hessian: (rows, d, d), or (rows, d) for diagonals; None if not recorded.
        step_size: (rows,), the size of the step from each row; None if not known.
        inverse_temperature: β; None if not known.
        starts: (rows,), True at the first row of an episode.

    Example:
        ```python
        import tempfile
        import malliavin_jax as mj

        folder = tempfile.mkdtemp()
        with mj.io.Recorder(folder, step_size=0.01) as recorder:
            recorder.step(0.3, gradient=0.6)
        rows = mj.io.read_blocks(folder)
        rows.x, rows.next  # [[0.3]], 1
        ```
    """

    first: int
    x: np.ndarray
    gradient: np.ndarray | None
    hessian: np.ndarray | None
    step_size: np.ndarray | None
    inverse_temperature: float | None
    starts: np.ndarray

    @property
    def next(self) -> int:
        """The number of the row after the last: where to read on."""
        return self.first + len(self.x)


def read_blocks(
    path: str | os.PathLike, *, start: int = 0, stop: int | None = None, max_bytes: int = MAX_BYTES
) -> RecordedRows:
    """The rows that a `Recorder` has saved, from number `start` on; it may be writing at the same time.

    Files that hold other rows only are not opened, so that following a recorder costs what is new:
    `rows = read_blocks(folder, start=rows.next)`.

    Args:
        path: the folder.
        start: the first row wanted, counted from 0.
        stop: the one after the last wanted; None for all.
        max_bytes: refuse a file that unpacks to more (default 8 GiB).

    Returns:
        The rows; none if there are no new ones yet.

    Raises:
        ValueError: if `path` is not a recorder's folder, if a file in it is damaged or missing, or if there are fewer
            than `start` rows.

    Example:
        ```python
        import tempfile
        import malliavin_jax as mj

        folder = tempfile.mkdtemp()
        recorder = mj.io.Recorder(folder, step_size=0.01)
        recorder.step(0.3, gradient=0.6)
        recorder.flush()
        rows = mj.io.read_blocks(folder)  # perhaps in another process
        recorder.step(0.2, gradient=0.4)
        recorder.flush()
        mj.io.read_blocks(folder, start=rows.next).x  # [[0.2]]
        ```
    """
    folder, start = Path(path), check_count("start", start, at_least=0)
    settings = read_settings(folder)
    if settings is None:
        raise ValueError(f"{folder} must be the folder of a Recorder with at least one row: there is no {SETTINGS}")
    blocks = list_blocks(folder)
    later = [first for first, _ in blocks[1:]]
    wanted = blocks[int(np.searchsorted(later, start, side="right")) :]  # from the block that holds row `start`
    if stop is not None:
        check_count("stop", stop, at_least=start)
        wanted = [block for number, block in enumerate(wanted) if number == 0 or block[0] < stop]
    parts, reached = [], wanted[0][0] if wanted else 0
    if blocks and blocks[0][0] != 0:
        raise ValueError(f"{folder} lacks its rows from 0 to {blocks[0][0] - 1}: a file is missing")
    for first, file in wanted:
        if first != reached:
            raise ValueError(f"{folder} lacks its rows from {reached} to {first - 1}, or holds them twice: {file.name}")
        parts.append(_read_block(file, settings, max_bytes))
        reached = first + len(parts[-1]["x"])
    if start > reached:
        raise ValueError(f"start must be at most {reached}, the number of rows in {folder}, got {start}")
    skipped = start - wanted[0][0] if wanted else 0
    names = [*settings.shapes(), *(["step_size"] if isinstance(settings.step_size, float) else [])]
    empty = {
        name: np.zeros((0, *settings.shapes().get(name, ())), bool if name == "starts" else float) for name in names
    }
    chosen = slice(skipped, None if stop is None else skipped + stop - start)
    columns = {name: np.concatenate([part[name] for part in parts or [empty]])[chosen] for name in names}
    gradient, hessian, step_size = (columns.get(name) for name in ("gradient", "hessian", "step_size"))
    beta = settings.inverse_temperature
    return RecordedRows(start, columns["x"], gradient, hessian, step_size, beta, columns["starts"])


def list_blocks(folder: Path) -> list[tuple[int, Path]]:
    """The files of rows, each with the number of its first row, in order."""
    names = sorted(name for name in os.listdir(folder) if _BLOCK.fullmatch(name))
    return [(int(name[5:17]), folder / name) for name in names]


def block_path(folder: Path, first: int) -> Path:
    """The file of the rows from number `first` on."""
    return folder / f"rows-{first:012d}.npz"


def _read_block(file: Path, settings: Settings, max_bytes: int) -> dict[str, np.ndarray]:
    """The arrays of one file of rows, checked against the settings; the step sizes are filled in."""
    remedy = "move it away to read the rows before it"
    try:
        arrays = dict(archived_arrays(file, max_bytes))
    except (OSError, Refused) as error:
        raise ValueError(f"{error}; {remedy}") from error
    shapes = settings.shapes()
    rows = len(arrays["x"]) if "x" in arrays and arrays["x"].ndim else 0
    for name, shape in shapes.items():
        if name not in arrays or arrays[name].shape != (rows, *shape):
            got = arrays[name].shape if name in arrays else "none"
            raise ValueError(f"{file} must hold {name} of shape {('rows', *shape)}, got {got}; {remedy}")
    unknown = sorted(set(arrays) - {*shapes, "step_size"})
    if unknown or rows == 0 or arrays["starts"].dtype != bool:
        raise ValueError(f"{file} is not a file of rows: it holds {', '.join(sorted(arrays))}; {remedy}")
    if isinstance(settings.step_size, float):
        sizes = arrays.setdefault("step_size", np.full(rows, settings.step_size))
        if sizes.shape != (rows,):
            raise ValueError(f"{file} must hold step_size of shape ({rows},), got {sizes.shape}; {remedy}")
    return arrays


def write_settings(folder: Path, settings: Settings) -> None:
    """Write the settings of a folder, whole."""
    text = json.dumps({"format": _FORMAT, "version": _VERSION, **settings._asdict()}, indent=1)

    def write(file: BinaryIO) -> None:
        file.write(text.encode())

    write_whole(folder / SETTINGS, write)


def read_settings(folder: Path) -> Settings | None:
    """The settings of a folder; None if it has none."""
    try:
        text = (folder / SETTINGS).read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{folder / SETTINGS} cannot be read: {error}") from error
    try:
        stored: dict[str, Any] = dict(json.loads(text))
        if stored.pop("format") != _FORMAT or stored.pop("version") != _VERSION:
            raise ValueError("another format or version")
        settings = Settings(**stored)
        _check(settings)
        return settings
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{folder / SETTINGS} is damaged or not of this version: {error}") from error


def _check(settings: Settings) -> None:
    """Refuse settings that no recorder writes."""
    check_count("dim", settings.dim)
    size, beta = settings.step_size, settings.inverse_temperature
    good = (
        isinstance(settings.gradient, bool)
        and settings.hessian in ("full", "diagonal", None)
        and (size in ("each", None) or (isinstance(size, float) and 0 < size < np.inf))
        and (beta is None or (isinstance(beta, float) and 0 < beta < np.inf))
    )
    if not good:
        raise ValueError(f"{settings}")
