"""Recorded runs of a learner that is not ours: arrays, checked once, read a part at a time."""

import warnings
from collections.abc import Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from .._base.checks import check_count
from ..learner.learner import Path
from ..samples.default_scheme import default_scheme
from ..samples.hessians import full_hessians
from ..samples.recorded import per_episode, samples_from_paths
from ..samples.samples import Samples
from ..weights.scheme import Scheme
from .validation import column_of, faults, lengths_of, setting_of

_BLOCK = 1 << 21  # numbers looked at together while checking
_PILOT = 256

OnBad = Literal["refuse", "drop"]


class Recording:
    """Episodes of one or several learners, as they were logged.

    - `x` (episodes, points, d): row k is the position after k steps, row 0 the start of the episode.
    - `gradient` (episodes, points, d): row k is the gradient that the learner *used* at row k of `x`, for its step to
      row k + 1: that of its minibatch, noise and all, not a cleaner one.
    - `hessian` (episodes, points, d, d), of the same minibatch; or (episodes, points, d), its diagonal; or None.
    - `step_size`, `inverse_temperature`: one number, or (episodes,) for several learners; None where not known
      (`consistency` estimates them).
    - `lengths` (episodes,): how many steps each episode made, if they differ; rows past the end are not looked at.

    Everything is checked here, in blocks of bounded memory. The first bad episode and step are named: a shape, a value
    that is not finite, a Hessian that is not symmetric (to 1e-4 of its largest entry), an impossible length, step size
    or temperature. `on_bad="drop"` leaves out the bad episodes instead, warns how many, and keeps the number in
    `dropped`; a wrong shape or dtype is always an error.

    What ends an episode must not depend on its path. Given that a learner has not yet stopped at a threshold, or has
    not yet converged, its noise is no longer Gaussian, and integration by parts acquires a boundary term: at long
    localizer lengths the estimates are biased, whatever the number of episodes. A restart at random, after a fixed
    number of steps or at a deadline is harmless. Where that is not given, `short_localizer` is the safe choice:
    the bias is of the order of the length squared, as that of a kernel.

    ```python
    recording = mj.Recording(paths.x, paths.gradient, paths.hessian, step_size=0.01, inverse_temperature=1.0)
    recording.num_episodes, recording.num_steps, recording.dim  # 2000, 80, 1
    ```
    """

    def __init__(
        self,
        x: Any,
        gradient: Any,
        hessian: Any = None,
        *,
        step_size: Any = None,
        inverse_temperature: Any = None,
        lengths: Any = None,
        on_bad: OnBad = "refuse",
    ):
        if on_bad not in ("refuse", "drop"):
            raise ValueError(f"on_bad must be 'refuse' or 'drop', got {on_bad!r}")
        columns = {"x": column_of("x", x), "gradient": column_of("gradient", gradient)}
        if hessian is not None:
            columns["hessian"] = column_of("hessian", hessian)
        shape = columns["x"].shape
        if len(shape) != 3 or 0 in shape:
            raise ValueError(f"x must have shape (episodes, points, d), none of them 0, got {shape}")
        episodes, points, d = shape
        if points < 2:
            raise ValueError(f"x must hold at least 2 points an episode, the start and one step, got {points}")
        if columns["gradient"].shape != shape:
            raise ValueError(f"gradient must have the shape of x, {shape}, got {columns['gradient'].shape}")
        if hessian is not None and columns["hessian"].shape not in (shape, (*shape, d)):
            raise ValueError(
                f"hessian must have shape {(*shape, d)}, or {shape} for its diagonal, got {columns['hessian'].shape}"
            )
        self._columns = columns
        self._rows: Any = range(episodes)  # the episodes kept
        self.step_size = setting_of("step_size", step_size, episodes)
        self.inverse_temperature = setting_of("inverse_temperature", inverse_temperature, episodes)
        self.lengths = lengths_of(lengths, episodes, points)
        kinds = np.result_type(*(c.dtype if c.dtype.kind == "f" else np.float64 for c in columns.values()))
        self.dtype = np.dtype(np.float32 if kinds.itemsize <= 4 else np.float64)
        self.dropped = self._check(on_bad)

    @property
    def has_hessian(self) -> bool:
        return "hessian" in self._columns

    @property
    def num_episodes(self) -> int:
        return len(self._rows)

    @property
    def num_steps(self) -> int:
        """The steps of the longest episode that the arrays have room for."""
        return self._columns["x"].shape[1] - 1

    @property
    def dim(self) -> int:
        return self._columns["x"].shape[2]

    def part(self, start: int = 0, stop: int | None = None, *, hessian: bool = True) -> dict[str, Any]:
        """Episodes `start` to `stop` in memory, as the arguments of `samples_from_paths` (`hessian`: that too)."""
        stop = self.num_episodes if stop is None else min(stop, self.num_episodes)
        rows = self._rows[start:stop]
        if len(rows) and rows[-1] - rows[0] == len(rows) - 1:  # a slice is read without a detour
            rows = slice(int(rows[0]), int(rows[-1]) + 1)
        wanted = {name: column for name, column in self._columns.items() if hessian or name != "hessian"}
        arrays = {name: np.asarray(column[rows], self.dtype) for name, column in wanted.items()}
        settings = {
            name: value if value is None or value.ndim == 0 else value[start:stop]
            for name, value in (("step_size", self.step_size), ("inverse_temperature", self.inverse_temperature))
        }
        return {**arrays, **settings, "lengths": self.lengths[start:stop]}

    def samples(self, *, times: Any = None, steps: Any = None, scheme: Scheme | None = None) -> Samples:
        """All episodes, weighed: `samples_from_paths` on the whole recording."""
        self._check_settings()
        return samples_from_paths(**self.part(), times=times, steps=steps, scheme=scheme)

    def chunks(self, size: int, *, times: Any = None, steps: Any = None, scheme: Scheme | None = None) -> "Chunks":
        """The same samples, `size` episodes at a time: what `accumulate` consumes. Memory is that of one chunk."""
        size = check_count("size", size)
        self._check_settings()
        return Chunks(self, size, {"times": times, "steps": steps, "scheme": scheme or self._scheme()})

    def _scheme(self) -> Scheme:
        part = self.part(0, _PILOT)
        x, gradient, lengths = (jnp.asarray(part[name]) for name in ("x", "gradient", "lengths"))
        hessian = jnp.asarray(part["hessian"]) if "hessian" in part else None
        sizes, betas = (per_episode(n, part[n], len(x), x.dtype) for n in ("step_size", "inverse_temperature"))
        full = full_hessians(hessian, x, gradient, lengths)
        return default_scheme(jax.vmap(Path)(x, gradient, full, sizes, betas, lengths.astype(jnp.int32)))

    def _check_settings(self) -> None:
        for name in ("step_size", "inverse_temperature"):
            if getattr(self, name) is None:
                raise ValueError(f"{name} is not recorded and must be given; consistency(recording) estimates it")

    def _check(self, on_bad: OnBad) -> int:
        """Walk through all episodes in blocks; returns how many were dropped."""
        episodes, points, d = self.num_episodes, self.num_steps + 1, self.dim
        size = max(1, _BLOCK // (points * d * d))
        bad, first = [], ""
        for start in range(0, episodes, size):
            part = self.part(start, start + size)
            for episode, fault in faults(part, points):
                if on_bad == "refuse" or not bad:
                    first = f"episode {start + episode}{fault}"
                    if on_bad == "refuse":
                        raise ValueError(first)
                bad.append(start + episode)
        if not bad:
            return 0
        if len(bad) == episodes:
            raise ValueError(f"every one of the {episodes} episodes is bad; {first}")
        self._rows = np.setdiff1d(np.arange(episodes), bad)
        self.lengths = self.lengths[self._rows]
        for name in ("step_size", "inverse_temperature"):
            value = getattr(self, name)
            if value is not None and value.ndim == 1:
                setattr(self, name, value[self._rows])
        warnings.warn(
            f"dropped {len(bad)} of {episodes} episodes; the first: {first}", RuntimeWarning, stacklevel=3
        )  # fmt: skip
        return len(bad)


class Chunks:
    """The samples of a recording, some episodes at a time, in order: `len`, an index or a loop give `Samples`.

    The weights of an episode depend on no other one, so chunks of any size hold the same numbers (a scheme that is
    tuned is tuned once, on the first episodes).
    """

    def __init__(self, recording: Recording, size: int, options: dict[str, Any]):
        self._recording, self._size, self._options = recording, size, options

    def __len__(self) -> int:
        return -(-self._recording.num_episodes // self._size)

    def __getitem__(self, number: int) -> Samples:
        if not 0 <= number < len(self):
            raise IndexError(f"there are {len(self)} chunks, got number {number}")
        part = self._recording.part(number * self._size, (number + 1) * self._size)
        return samples_from_paths(**part, **self._options)

    def __iter__(self) -> Iterator[Samples]:
        return (self[number] for number in range(len(self)))


def split_log(
    x: Any,
    gradient: Any,
    hessian: Any = None,
    *,
    starts: Any,
    step_size: Any = None,
    inverse_temperature: Any = None,
    max_steps: int | None = None,
    on_bad: OnBad = "refuse",
) -> Recording:
    """One long log with restarts inside, cut into episodes: `x` and `gradient` (rows, d), `hessian` (rows, d, d).

    - `starts`: the rows at which an episode starts, increasing from 0; or a flag for each row, True at a start.
    - `max_steps`: leave out what an episode does after so many steps. The episodes stand in arrays as long as the
      longest of them, which one long episode would make large.

    The rest is as in `Recording`. The move into a start is a restart, and is not part of any episode.

    ```python
    log = mj.split_log(paths.x[:10].reshape(-1, 1), paths.gradient[:10].reshape(-1, 1), starts=np.arange(10) * 81)
    log.num_episodes  # 10
    ```
    """
    columns = {"x": column_of("x", x)[:], "gradient": column_of("gradient", gradient)[:]}
    if hessian is not None:
        columns["hessian"] = column_of("hessian", hessian)[:]
    rows = len(columns["x"])
    if columns["x"].ndim != 2:
        raise ValueError(f"x must have shape (rows, d) for one long log, got {columns['x'].shape}")
    for name, column in columns.items():
        if len(column) != rows:
            raise ValueError(f"{name} must have as many rows as x, {rows}, got {len(column)}")
    begin = np.asarray(starts)
    if begin.ndim != 1 or begin.dtype.kind not in "biu":
        raise ValueError(f"starts must be a list of rows or of flags, got {begin.dtype} of shape {begin.shape}")
    if begin.dtype.kind == "b":
        if len(begin) != rows:
            raise ValueError(f"starts must hold one flag for each of the {rows} rows, got {len(begin)}")
        begin = np.flatnonzero(begin)
    begin = begin.astype(np.int64)
    if len(begin) == 0 or begin[0] != 0:
        raise ValueError(f"starts must begin with row 0, got {begin[:1].tolist()}")
    steps = np.diff(begin, append=rows)
    if np.any(steps <= 0):
        wrong = int(np.argmax(steps <= 0))
        following = begin[wrong + 1] if wrong + 1 < len(begin) else f"the end of the log, row {rows}"
        raise ValueError(f"starts must increase and stay below {rows}: episode {wrong} starts at row {begin[wrong]}, "
                         f"then comes {following}")  # fmt: skip
    lengths = steps - 1
    if max_steps is not None:
        lengths = np.minimum(lengths, check_count("max_steps", max_steps))
    index = np.minimum(begin[:, None] + np.arange(max(2, lengths.max() + 1))[None, :], rows - 1)
    return Recording(
        *(columns[name][index] if name in columns else None for name in ("x", "gradient", "hessian")),
        step_size=step_size,
        inverse_temperature=inverse_temperature,
        lengths=lengths,
        on_bad=on_bad,
    )
