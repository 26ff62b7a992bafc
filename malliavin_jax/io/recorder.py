"""A recorder for training loops that are not ours: one row a step, saved as the loop runs."""

import os
import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np

from .._base.checks import check_count, check_positive
from .._base.files import write_whole
from .arrays import check_row, hessian_of, positive_number, vector
from .blocks import LOCK, SETTINGS, Settings, block_path, list_blocks, read_blocks, read_settings, write_settings

_MOST_ROWS, _MOST_BYTES = 4096, 1 << 22  # in a file, unless told


class Recorder:
    """Writes the steps of a training loop into a folder that `load` reads, whatever happens to the process.

    Call `step(x, gradient)` once for each move of the learner, X_{k+1} = X_k − ε g_k + sqrt(2ε/β) ξ, *before* it: with
    the position X_k and the gradient g_k that it is about to use, its own, minibatch, noise and all. Call `restart()`
    when the learner is put somewhere else: the next row begins a new episode.

    Rows are saved in files that are replaced whole. At every moment another process can read all that was saved, and a
    process that is killed loses no more than the rows since the last saving. A folder that is there already is
    continued, with a new episode. One recorder at a time writes to a folder.

    Args:
        path: the folder; made if it is not there.
        step_size: ε. `step` may give another one for its own step. None: given at every step, or not known.
        inverse_temperature: β; None if not known.
        flush_every: how many rows a file holds when it is full, and after how many rows it is saved at the latest;
            None takes 4096, or 4 MiB of rows if that is less.
        flush_seconds: save as soon as a row comes that many seconds after the last saving. The file of the last rows is
            then written again.
        overwrite: remove what a recorder has written into the folder before.

    Raises:
        ValueError: if an argument is out of range, if the folder holds something else or was recorded with other
            settings, if a file in it is damaged, or if another recorder is writing to it.

    Example:
        ```python
        import tempfile
        import numpy as np
        import malliavin_jax as mj

        rng, folder = np.random.default_rng(0), tempfile.mkdtemp()
        with mj.io.Recorder(folder, step_size=0.01, inverse_temperature=1.0) as recorder:
            for episode in range(20):
                recorder.restart()
                x = rng.normal(size=2)
                for _ in range(50):
                    gradient = x**3 + x  # the learner's own
                    recorder.step(x, gradient, hessian=3 * x**2 + 1)  # here only its diagonal
                    x = x - 0.01 * gradient + np.sqrt(0.02) * rng.normal(size=2)
        recording = mj.io.load(folder)
        recording.num_episodes, recording.num_steps  # 20, 49
        ```
    """

    def __init__(
        self,
        path: str | os.PathLike,
        step_size: Any = None,
        inverse_temperature: Any = 1.0,
        *,
        flush_every: int | None = None,
        flush_seconds: float = 30.0,
        overwrite: bool = False,
    ):
        self._path = Path(path)
        self._step_size = positive_number("step_size", step_size)
        self._inverse_temperature = positive_number("inverse_temperature", inverse_temperature)
        every = None if flush_every is None else check_count("flush_every", flush_every)
        self._flush_seconds = flush_seconds
        check_positive("flush_seconds", flush_seconds if flush_seconds != np.inf else 1.0)
        self._path.mkdir(parents=True, exist_ok=True)
        foreign = sorted(file.name for file in self._path.glob("*.npy"))
        if foreign:
            raise ValueError(f"{self._path} must be a recorder's folder or an empty one, it holds {', '.join(foreign)}")
        lock = _locked(self._path)
        try:
            _tidy(self._path, overwrite)
            settings = read_settings(self._path)
            self._check_settings(settings)
            last = list_blocks(self._path)[-1:]
            first = read_blocks(self._path, start=last[0][0]).next if last else 0
        except BaseException:
            lock.close()
            raise
        self._file = _NewestFile(self._path, settings, first, every, lock)
        self._fresh = True  # the next row begins an episode
        # What a recorder that is never closed has not saved is saved when it is forgotten, or when Python ends.
        self._end = weakref.finalize(self, self._file.close)

    @property
    def num_rows(self) -> int:
        """All rows in the folder, with those not yet saved."""
        return self._file.first + self._file.count

    @property
    def num_saved(self) -> int:
        """The rows that are safe: in the folder, whole."""
        return self._file.first + self._file.saved

    def step(self, x: Any, gradient: Any = None, hessian: Any = None, *, step_size: Any = None) -> None:
        """Append one row: where the learner is, and what it uses there for its next move.

        NumPy, JAX and PyTorch arrays will do, on any device and with or without gradients attached; numbers in one
        dimension; and a list of arrays, such as the parameters of a model, which are strung together. The numbers are
        copied.

        Args:
            x: the position, (d,).
            gradient: the gradient used there, (d,); None for a log of positions alone.
            hessian: the Hessian, (d, d), of the same minibatch; or its diagonal, (d,); or None.
            step_size: the size of the step from here, if it is not that of the recorder: a number, or an array of one.

        Raises:
            ValueError: if an array has another shape than in the first row, is missing or there are more than then, or
                is not finite; the row is then not recorded.
            OSError: if a file cannot be written. The rows stay in memory, and are saved with the next ones; once the
                file is full, further rows are refused.
        """
        if self._file.lock.closed:
            raise ValueError(f"the recorder of {self._path} is closed")
        row = {"x": vector("x", x)}
        if gradient is not None:
            row["gradient"] = vector("gradient", gradient)
        if hessian is not None:
            row["hessian"] = hessian_of(hessian, row["x"].shape[0])
        size = positive_number("step_size", step_size)
        settings = self._file.settings or self._settings_of(row, size)
        for name, shape in settings.shapes().items():
            if name in ("x", "gradient", "hessian"):
                check_row(name, row.get(name), shape)
        for name in row.keys() - settings.shapes().keys():
            raise ValueError(f"{name} must not be given: it is not in the rows of {self._path} so far")
        if (settings.step_size is None and size is not None) or (settings.step_size == "each" and size is None):
            raise ValueError(
                f"step_size must be given at every step or at none, unless the recorder has it; got {size}"
            )
        if self._file.settings is None:
            write_settings(self._path, settings)
            self._file.settings = settings
        size = settings.step_size if size is None and isinstance(settings.step_size, float) else size
        self._file.put(row, size, self._fresh)
        self._fresh = False
        if self._file.count == self._file.room or time.monotonic() - self._file.saved_at > self._flush_seconds:
            self._file.save()

    def restart(self) -> None:
        """The next row begins a new episode: the learner has been put there, and did not move."""
        self._fresh = True

    def flush(self) -> None:
        """Save all rows so far."""
        self._file.save()

    def close(self) -> None:
        """Save all rows and let go of the folder."""
        self._end()

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _check_settings(self, settings: Settings | None) -> None:
        """Refuse to go on with other settings than those of the folder."""
        if settings is not None:
            for name, given in (("step_size", self._step_size), ("inverse_temperature", self._inverse_temperature)):
                there = getattr(settings, name)
                if given != (None if there == "each" else there):
                    raise ValueError(
                        f"{name} must be {there}, as in the rows that {self._path} holds, got {given}: "
                        "record to another folder, or pass overwrite=True to remove them"
                    )

    def _settings_of(self, row: dict[str, np.ndarray], size: float | None) -> Settings:
        """What every row will hold, from the first."""
        hessian = row.get("hessian")
        kind = None if hessian is None else "full" if hessian.ndim == 2 else "diagonal"
        step_size = "each" if self._step_size is None and size is not None else self._step_size
        return Settings(len(row["x"]), "gradient" in row, kind, step_size, self._inverse_temperature)


class _NewestFile:
    """The newest file of rows: written whole, and again with more rows, until it is full and another one begins."""

    def __init__(self, folder: Path, settings: Settings | None, first: int, flush_every: int | None, lock: Any):
        self.folder, self.settings, self.first = folder, settings, first
        self.flush_every, self.lock = flush_every, lock
        self.count = self.saved = self.room = 0
        self.saved_at = time.monotonic()
        self.process = os.getpid()
        self.arrays: dict[str, np.ndarray] = {}

    def put(self, row: dict[str, np.ndarray], size: float | None, fresh: bool) -> None:
        if self.count == self.room:
            self.save()  # which has been done, unless the disk refused it
            self._begin(row)
        values = {**row, "step_size": np.float64(np.nan if size is None else size), "starts": np.bool_(fresh)}
        for name, value in values.items():
            if value.dtype.itemsize > self.arrays[name].dtype.itemsize:  # nothing is lost to the type of the first row
                self.arrays[name] = self.arrays[name].astype(value.dtype)
            self.arrays[name][self.count] = value
        self.count += 1

    def _begin(self, row: dict[str, np.ndarray]) -> None:
        most = _MOST_BYTES // sum(array.nbytes for array in row.values())
        self.room = self.flush_every or max(1, min(_MOST_ROWS, most))
        self.first, self.count, self.saved = self.first + self.count, 0, 0
        self.arrays = {name: np.zeros((self.room, *array.shape), array.dtype) for name, array in row.items()}
        self.arrays |= {"step_size": np.zeros(self.room), "starts": np.zeros(self.room, bool)}

    def save(self) -> None:
        """Write the rows, with their step sizes where these are not all the one in the settings."""
        self.saved_at = time.monotonic()
        if self.settings is None or self.count == self.saved or os.getpid() != self.process:
            return  # nothing new; or a fork, which has a copy of the rows and no right to it
        default = self.settings.step_size
        rows = {name: array[: self.count] for name, array in self.arrays.items()}
        if default is None or (default != "each" and np.all(rows["step_size"] == default)):
            del rows["step_size"]
        write_whole(block_path(self.folder, self.first), lambda file: np.savez(file, allow_pickle=False, **rows))
        self.saved = self.count

    def close(self) -> None:
        """Save the rows and let go of the folder."""
        try:
            self.save()
        finally:
            self.lock.close()


def _locked(folder: Path) -> Any:
    """An open file that no other recorder has; the lock goes with the process, however it ends."""
    file = open(folder / LOCK, "ab")  # noqa: SIM115
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:  # not on this system
        pass
    except OSError as error:
        file.close()
        raise ValueError(f"{folder} is in use: another recorder is writing to it, or was not closed") from error
    return file


def _tidy(folder: Path, overwrite: bool) -> None:
    """Remove the drafts of a process that was killed; with `overwrite`, its rows too."""
    stale = [*folder.glob(".rows-*.tmp"), folder / f".{SETTINGS}.tmp"]
    if overwrite:
        stale += [folder / SETTINGS, *(file for _, file in list_blocks(folder))]
    for file in stale:
        file.unlink(missing_ok=True)
