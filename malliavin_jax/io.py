"""Recordings on disk: one `.npz` file, or a folder of `.npy` files that may be larger than memory.

Both hold arrays of these names, as in `Recording`; nothing else, and nothing is ever unpickled:

    x                     (episodes, points, d)
    gradient              (episodes, points, d)
    hessian               (episodes, points, d, d), or (episodes, points, d) for its diagonal; may be absent
    step_size             () or (episodes,); may be absent
    inverse_temperature   () or (episodes,); may be absent
    lengths               (episodes,), whole numbers of steps; may be absent: all rows count

or, for one long log with restarts inside (see `split_log`), `x` and `gradient` of shape (rows, d), `hessian` of shape
(rows, d, d) or (rows, d), and

    starts                (episodes,), the row at which each episode starts, or (rows,) flags.

In a folder `x` is the file `x.npy`. Numbers may be of any real dtype; they are used in float32 if none is wider.
"""

import os
from pathlib import Path
from typing import Any

import numpy as np

from .recording.npy import Column, archived_arrays
from .recording.recording import OnBad, Recording, split_log

ARRAYS = ("x", "gradient", "hessian", "step_size", "inverse_temperature", "lengths", "starts")
MAX_BYTES = 8 * 2**30
_ROWS = 65536  # episodes written at a time


def load(
    path: str | os.PathLike,
    *,
    step_size: Any = None,
    inverse_temperature: Any = None,
    on_bad: OnBad = "refuse",
    max_bytes: int = MAX_BYTES,
) -> Recording:
    """The recording in the `.npz` file or in the folder of `.npy` files at `path`.

    - `step_size`, `inverse_temperature`: what the files do not hold; an error if they hold something else.
    - `on_bad`: "refuse" the first bad episode, or "drop" the bad ones, as in `Recording`.
    - `max_bytes`: refuse a `.npz` file that unpacks to more (default 8 GiB). A folder has no limit: its files are
      mapped into memory and read in parts (`Recording.chunks`), except for one long log, which is cut in memory.

    ```python
    mj.io.save(recording, folder / "log.npz")
    mj.io.load(folder / "log.npz").num_episodes  # 2000
    ```
    """
    path = Path(path)
    if path.is_dir():
        names = sorted(file.stem for file in path.glob("*.npy"))
        arrays: dict[str, Any] = {name: Column(path / f"{name}.npy", str(path / f"{name}.npy")) for name in names}
    elif path.is_file():
        arrays = dict(archived_arrays(path, max_bytes))
    else:
        raise ValueError(f"{path} must be a .npz file or a folder of .npy files, and is not there")
    unknown = sorted(set(arrays) - set(ARRAYS))
    if unknown:
        raise ValueError(f"{path} holds unknown arrays {', '.join(unknown)}; the names are {', '.join(ARRAYS)}")
    for name in ("x", "gradient"):
        if name not in arrays:
            raise ValueError(f"{path} must hold {name}; it holds {', '.join(sorted(arrays)) or 'no array'}")
    for name, value in (("step_size", step_size), ("inverse_temperature", inverse_temperature)):
        if value is not None:
            if name in arrays and not np.array_equal(np.asarray(arrays[name][...]), np.asarray(value)):
                raise ValueError(f"{name} is in {path} already, and is not {value}")
            arrays[name] = value
    main = [arrays.pop(name, None) for name in ("x", "gradient", "hessian")]
    try:
        if "starts" not in arrays:
            return Recording(*main, **arrays, on_bad=on_bad)
        if "lengths" in arrays:
            raise ValueError("lengths do not go with starts: an episode lasts until the next one starts")
        arrays["starts"] = np.asarray(arrays["starts"])
        return split_log(*main, **arrays, on_bad=on_bad)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def save(recording: Recording, path: str | os.PathLike, *, compress: bool = False) -> None:
    """Write a recording to `path`: a `.npz` file if it is called so, else a folder of `.npy` files, in parts.

    `compress` is for `.npz` files. Dropped episodes are not written. A file is replaced whole or not at all.

    ```python
    mj.io.save(recording, folder / "episodes")  # a folder of .npy files, which may be larger than memory
    mj.io.load(folder / "episodes").dim  # 1
    ```
    """
    path = Path(path)
    settings = {
        name: value
        for name, value in recording.part(0, 0).items()
        if name in ("step_size", "inverse_temperature") and value is not None and value.ndim == 0
    }
    if path.suffix == ".npz":
        draft = path.with_name(f".{path.name}.tmp")
        arrays = {**{n: v for n, v in recording.part().items() if v is not None}, **settings}
        try:
            with open(draft, "wb") as file:
                (np.savez_compressed if compress else np.savez)(file, allow_pickle=False, **arrays)
            os.replace(draft, path)
        finally:
            draft.unlink(missing_ok=True)
        return
    if compress:
        raise ValueError(f"compress needs a .npz file, got {path}")
    path.mkdir(parents=True, exist_ok=True)
    stale = [file.name for file in path.glob("*.npy")]
    if stale:
        raise ValueError(f"{path} must be a new or an empty folder, it holds {', '.join(sorted(stale))}")
    for name, value in settings.items():
        np.save(path / f"{name}.npy", value, allow_pickle=False)
    files: dict[str, np.ndarray] = {}
    for start in range(0, recording.num_episodes, _ROWS):
        for name, rows in recording.part(start, start + _ROWS).items():
            if rows is None or name in settings:
                continue
            if name not in files:
                shape = (recording.num_episodes, *rows.shape[1:])
                files[name] = np.lib.format.open_memmap(path / f"{name}.npy", "w+", rows.dtype, shape)
            files[name][start : start + len(rows)] = rows
