"""Recordings loaded and saved; what files there are is described in `malliavin_jax.io`."""

import os
from pathlib import Path
from typing import Any

import numpy as np

from .._base.files import write_whole
from ..recording.long_log import split_log
from ..recording.npy import Column, archived_arrays
from ..recording.recording import OnBad, Recording
from .blocks import MAX_BYTES, SETTINGS, read_blocks

ARRAYS = ("x", "gradient", "hessian", "step_size", "inverse_temperature", "last_steps", "block_size", "starts")
_ROWS = 65536  # episodes written at a time


def load(
    path: str | os.PathLike,
    *,
    step_size: Any = None,
    inverse_temperature: Any = None,
    piece_steps: int | None = None,
    blocks: int | None = None,
    on_bad: OnBad = "refuse",
    max_bytes: int = MAX_BYTES,
) -> Recording:
    """The recording in the `.npz` file, the folder of `.npy` files or the folder of a `Recorder` at `path`.

    A folder of `.npy` files has no limit of size: they are mapped into memory and read in parts (`Recording.chunks`),
    except for one long log, which is cut in memory, as is that of a recorder.

    Args:
        path: the file or folder.
        step_size: if the files do not hold it.
        inverse_temperature: likewise.
        piece_steps: for one long log: cut its episodes, or all of it if it never restarts, into pieces of so many
            steps, as in `split_log`.
        blocks: how many blocks these make, about, as in `split_log`.
        on_bad: "refuse" the first bad episode, or "drop" the bad ones, as in `Recording`.
        max_bytes: refuse a `.npz` file, a recorder's among them, that unpacks to more (default 8 GiB).

    Returns:
        The recording, checked.

    Raises:
        ValueError: if there is nothing at `path`, if what is there is damaged, is not made of arrays of numbers with
            the names above, or is no recording, and if `step_size` or `inverse_temperature` contradict it.

    Example:
        ```python
        import tempfile
        from pathlib import Path

        import numpy as np
        import malliavin_jax as mj

        x = np.random.default_rng(0).normal(size=(20, 5, 1))
        path = Path(tempfile.mkdtemp()) / "log.npz"
        np.savez(path, x=x, gradient=x)
        mj.io.load(path, step_size=0.01, inverse_temperature=1.0).num_episodes  # 20
        ```
    """
    path = Path(path)
    arrays = _arrays_at(path, max_bytes)
    for name, value in (("step_size", step_size), ("inverse_temperature", inverse_temperature)):
        if value is not None:
            if name in arrays and not np.array_equal(np.asarray(arrays[name][...]), np.asarray(value)):
                raise ValueError(f"{name} is in {path} already, and is not {value}")
            arrays[name] = value
    try:
        if "starts" not in arrays and piece_steps is None and blocks is None:
            return Recording(**arrays, on_bad=on_bad)
        for name in ("last_steps", "block_size"):
            if name in arrays:
                raise ValueError(f"{name} do not go with starts: an episode lasts until the next one starts")
        if "starts" in arrays:
            arrays["starts"] = np.asarray(arrays["starts"])
        return split_log(**arrays, piece_steps=piece_steps, blocks=blocks, on_bad=on_bad)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _arrays_at(path: Path, max_bytes: int) -> dict[str, Any]:
    """The arrays at `path` by their names, which must be those of a recording."""
    if (path / SETTINGS).is_file():
        return _recorded(path, max_bytes)
    if path.is_dir():
        names = sorted(file.stem for file in path.glob("*.npy"))
        arrays: dict[str, Any] = {name: Column(path / f"{name}.npy", str(path / f"{name}.npy")) for name in names}
    elif path.is_file():
        arrays = dict(archived_arrays(path, max_bytes))
    else:
        raise ValueError(f"{path} must be a .npz file or a folder of .npy files, and is not there")
    if "lengths" in arrays:
        raise ValueError(f"{path} holds lengths, as version 0.1.0 wrote it: the array is now called last_steps")
    unknown = sorted(set(arrays) - set(ARRAYS))
    if unknown:
        raise ValueError(f"{path} holds unknown arrays {', '.join(unknown)}; the names are {', '.join(ARRAYS)}")
    if "x" not in arrays:
        raise ValueError(f"{path} must hold x; it holds {', '.join(sorted(arrays)) or 'no array'}")
    arrays.setdefault("gradient", None)  # positions alone are a recording too
    if "block_size" in arrays:
        number = np.asarray(arrays["block_size"])
        if number.shape != () or number.dtype.kind not in "iu":
            raise ValueError(f"{path} must hold a whole number block_size, got {number.dtype} of shape {number.shape}")
        arrays["block_size"] = int(number)
    return arrays


def _recorded(path: Path, max_bytes: int) -> dict[str, Any]:
    """The rows of a recorder's folder as one long log; a log of positions alone has None for its gradients."""
    rows = read_blocks(path, max_bytes=max_bytes)
    if len(rows.x) < 2:
        raise ValueError(f"{path} must hold at least two rows, a start and a step, it holds {len(rows.x)}")
    arrays: dict[str, Any] = {"x": rows.x, "gradient": rows.gradient, "hessian": rows.hessian, "starts": rows.starts}
    if rows.step_size is not None:
        even = np.all(rows.step_size == rows.step_size[0])
        arrays["step_size"] = rows.step_size[0] if even else rows.step_size
    if rows.inverse_temperature is not None:
        arrays["inverse_temperature"] = np.asarray(rows.inverse_temperature)
    return arrays


def save(path: str | os.PathLike, recording: Recording, *, compress: bool = False) -> None:
    """Write a recording: to a `.npz` file if `path` is called so, else to a folder of `.npy` files, in parts.

    Dropped episodes are not written. A file is replaced whole or not at all.

    Args:
        path: a file that ends in `.npz`, or a folder that is new or empty.
        recording: the episodes.
        compress: for `.npz` files.

    Raises:
        ValueError: if the folder holds `.npy` files already, or if it is to be compressed.

    Example:
        ```python
        import tempfile
        from pathlib import Path

        import numpy as np
        import malliavin_jax as mj

        x = np.random.default_rng(0).normal(size=(20, 5, 1))
        folder = Path(tempfile.mkdtemp()) / "episodes"
        mj.io.save(folder, mj.Recording(x, x, step_size=0.01))  # .npy files, which may be larger than memory
        mj.io.load(folder).dim  # 1
        ```
    """
    path = Path(path)
    if path.suffix == ".npz":
        arrays: dict[str, Any] = {name: array for name, array in recording.part().items() if array is not None}
        arrays |= {"block_size": recording.block_size} if recording.block_size > 1 else {}
        savez = np.savez_compressed if compress else np.savez
        write_whole(path, lambda file: savez(file, allow_pickle=False, **arrays))
        return
    if compress:
        raise ValueError(f"compress needs a .npz file, got {path}")
    path.mkdir(parents=True, exist_ok=True)
    stale = [file.name for file in path.glob("*.npy")]
    if stale:
        raise ValueError(f"{path} must be a new or an empty folder, it holds {', '.join(sorted(stale))}")
    for name, value in (("step_size", recording.step_size), ("inverse_temperature", recording.inverse_temperature)):
        if value is not None and value.ndim == 0:  # one number for all episodes
            np.save(path / f"{name}.npy", value, allow_pickle=False)
    if recording.block_size > 1:
        np.save(path / "block_size.npy", recording.block_size, allow_pickle=False)
    files: dict[str, np.ndarray] = {}
    for start in range(0, recording.num_episodes, _ROWS):
        for name, rows in recording.part(start, start + _ROWS).items():
            if not isinstance(rows, np.ndarray) or rows.ndim == 0:
                continue
            if name not in files:
                shape = (recording.num_episodes, *rows.shape[1:])
                files[name] = np.lib.format.open_memmap(path / f"{name}.npy", "w+", rows.dtype, shape)
            files[name][start : start + len(rows)] = rows
