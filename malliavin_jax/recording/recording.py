"""Recorded runs of a learner that is not ours: arrays, checked once, read a part at a time."""

import warnings
from typing import Any, Literal

import numpy as np

from .._base.checks import check_count
from ..samples.completion import Model
from ..samples.default_scheme import default_scheme
from ..samples.samples import Samples
from ..weights.scheme import Scheme
from .validation import Fault, columns_of, faults, last_steps_of, setting_of, step_size_of
from .weighing import PILOT, Chunks, Part, completion_of, path_batch, weigh_part

_BLOCK = 1 << 21  # numbers looked at together while checking
_FITTED = 2_000_000  # points that a model of what was not recorded is fitted to, where episodes come in chunks

OnBad = Literal["refuse", "drop"]


class Recording:
    """Episodes of one or several learners, as they were logged.

    Everything is checked here, in blocks of bounded memory, and nothing that is made of a recording checks it again.
    The first bad episode and step are named: a shape, a value that is not finite, a Hessian that is not symmetric (to
    1e-4 of its largest entry), an impossible number of steps, step size or temperature.

    What ends an episode must not depend on its path. Given that a learner has not yet stopped at a threshold, or has
    not yet converged, its noise is no longer Gaussian, and integration by parts acquires a boundary term: at long
    localizer lengths the estimates are biased, whatever the number of episodes. A restart at random, after a fixed
    number of steps or at a deadline is harmless. Where that is not given, `short_localizer` is the safe choice:
    the bias is of the order of the length squared, as that of a kernel.

    Args:
        x: (episodes, points, d): row k is the position after k steps, row 0 the start of the episode.
        gradient: (episodes, points, d): row k is the gradient that the learner *used* at row k of `x`, for its step to
            row k + 1: that of its minibatch, noise and all, not a cleaner one. None where only positions were logged.
        hessian: (episodes, points, d, d), of the same minibatch; or (episodes, points, d), its diagonal; or None. What
            is missing comes from a model of the loss (see `samples_from_paths`).
        step_size: one number, or (episodes,) for several learners; or a schedule settled beforehand, (points,) or
            (episodes, points): entry k is the size of the step from row k, and the last one is never used. With as many
            episodes as points, one dimension means episodes, and (1, points) is the schedule. None where not known
            (`consistency` estimates it).
        inverse_temperature: one number, or (episodes,); None where not known.
        last_steps: (episodes,), how many steps each episode made, if they differ; rows past them are not looked at.
        block_size: how many consecutive episodes may depend on each other, as pieces of one chain do (`split_log` cuts
            it). So many of them become one episode of `Samples`, and standard errors are those of independent blocks.
        on_bad: "refuse" raises at the first bad episode; "drop" leaves out the bad episodes, warns how many, and keeps
            the number in `dropped`. A wrong shape or dtype is always an error.

    Raises:
        ValueError: if an array is not as described above.

    Example:
        ```python
        import jax
        import malliavin_jax as mj

        loss = mj.potentials.Quartic()
        learner = mj.ForwardLearner(loss, mj.initial.Normal(), step_size=0.01, gradient_noise=0.5)
        paths = jax.jit(jax.vmap(lambda key: mj.simulate(key, learner, 80)))(jax.random.split(jax.random.key(0), 500))
        recording = mj.Recording(paths.x, paths.gradient, paths.hessian, step_size=0.01, inverse_temperature=1.0)
        recording.num_episodes, recording.num_steps, recording.dim  # 500, 80, 1
        samples = recording.samples(times=[0.4, 0.8])
        ```
    """

    def __init__(
        self,
        x: Any,
        gradient: Any = None,
        hessian: Any = None,
        *,
        step_size: Any = None,
        inverse_temperature: Any = None,
        last_steps: Any = None,
        block_size: int = 1,
        on_bad: OnBad = "refuse",
    ):
        if on_bad not in ("refuse", "drop"):
            raise ValueError(f"on_bad must be 'refuse' or 'drop', got {on_bad!r}")
        self._columns = columns_of(x, gradient, hessian)
        episodes, points, _ = self._columns["x"].shape
        self._rows: Any = range(episodes)  # the episodes kept
        self.step_size = step_size_of(step_size, episodes, points)
        self.inverse_temperature = setting_of("inverse_temperature", inverse_temperature, episodes)
        self.last_steps = last_steps_of(last_steps, episodes, points)
        kinds = np.result_type(*(c.dtype if c.dtype.kind == "f" else np.float64 for c in self._columns.values()))
        self.dtype = np.dtype(np.float32 if kinds.itemsize <= 4 else np.float64)
        self.block_size = check_count("block_size", block_size)
        self.dropped = self._check(on_bad)

    def __repr__(self) -> str:
        diagonal = self.has_hessian and self._columns["hessian"].ndim == 3 and self.dim > 1
        hessians = " and diagonals of Hessians" if diagonal else " and Hessians" if self.has_hessian else ""
        what = f"gradients{hessians}" if self.has_gradient else "positions alone"
        ended = int(np.sum(np.asarray(self.last_steps) < self.num_steps))
        notes = [f"{self.num_episodes} episodes × {self.num_steps + 1} points × d = {self.dim}", what]
        for name in ("step_size", "inverse_temperature"):
            value = getattr(self, name)
            one = value is not None and value.ndim == 0
            notes.append(f"{name} {value:.4g}" if one else f"{name} {'not known' if value is None else value.shape}")
        notes += [f"{ended} episodes end early"] if ended else []
        notes += [f"blocks of {self.block_size}"] if self.block_size > 1 else []
        notes += [f"{self.dropped} dropped"] if self.dropped else []
        return f"Recording({', '.join(notes)})"

    @property
    def has_gradient(self) -> bool:
        """Whether gradients were recorded."""
        return "gradient" in self._columns

    @property
    def has_hessian(self) -> bool:
        """Whether Hessians, or their diagonals, were recorded."""
        return "hessian" in self._columns

    @property
    def num_episodes(self) -> int:
        """How many episodes there are, without those dropped."""
        return len(self._rows)

    @property
    def num_steps(self) -> int:
        """The steps of the longest episode that the arrays have room for."""
        return self._columns["x"].shape[1] - 1

    @property
    def dim(self) -> int:
        """d, the dimension of the learner's state."""
        return self._columns["x"].shape[2]

    def part(self, start: int = 0, stop: int | None = None, *, hessian: bool = True) -> Part:
        """Some episodes in memory, as the keyword arguments of `samples_from_paths`.

        Args:
            start: the first episode.
            stop: the one after the last; None for all.
            hessian: read the Hessians too, if there are any.

        Returns:
            The arrays by name: `x`, `gradient` and `hessian` if recorded, `step_size`, `inverse_temperature` and
            `last_steps`.
        """
        stop = self.num_episodes if stop is None else min(stop, self.num_episodes)
        rows = self._rows[start:stop]
        if len(rows) and rows[-1] - rows[0] == len(rows) - 1:  # a slice is read without a detour
            rows = slice(int(rows[0]), int(rows[-1]) + 1)

        def read(name: str) -> np.ndarray:
            return np.asarray(self._columns[name][rows], self.dtype)

        def setting(value: np.ndarray | None) -> np.ndarray | None:
            return value if value is None or value.ndim == 0 else value[start:stop]

        part = Part(
            x=read("x"),
            step_size=setting(self.step_size),
            inverse_temperature=setting(self.inverse_temperature),
            last_steps=self.last_steps[start:stop],
        )
        if self.has_gradient:
            part["gradient"] = read("gradient")
        if hessian and self.has_hessian:
            part["hessian"] = read("hessian")
        return part

    def samples(
        self,
        *,
        times: Any = None,
        steps: Any = None,
        scheme: Scheme | None = None,
        model: Model = None,
    ) -> Samples:
        """All episodes, weighed.

        Args:
            times: conditioning times, multiples of every step size, or met by every schedule.
            steps: or the numbers of steps, the same for all episodes. Without both, `usual_steps`.
            scheme: the weight scheme; None takes that of `observe`.
            model: a potential to take what was not recorded from; None fits a spline where something is missing,
                "spline" in any case (as `MalliavinField` of a recording does).

        Returns:
            The samples: what `samples_from_paths` makes of the same arrays, with `block_size` episodes as one.

        Raises:
            ValueError: if `step_size` or `inverse_temperature` are not recorded, if both `times` and `steps` are given
                or lie outside the episodes, or if something was not recorded in more than three dimensions.
        """
        self._check_settings()
        if times is None and steps is None:
            steps = self.usual_steps()
        part, blocks = self.part(), self.block_size
        completion = completion_of(part, model, blocks)
        return weigh_part(part, completion, times=times, steps=steps, scheme=scheme, block_size=blocks)

    def usual_steps(self) -> list[int]:
        """Eight conditioning steps, from a quarter to the whole of the median length of the episodes."""
        # Of positions alone the last row has no move, and says nothing.
        longest = max(1, int(np.median(self.last_steps)) - (not self.has_gradient))
        return sorted({max(1, round(longest * share)) for share in np.linspace(0.25, 1, 8)})

    def chunks(
        self,
        chunk_size: int,
        *,
        times: Any = None,
        steps: Any = None,
        scheme: Scheme | None = None,
        model: Model = None,
    ) -> Chunks:
        """The same samples, some episodes at a time: what `accumulate` consumes. Memory is that of one chunk.

        Args:
            chunk_size: how many episodes are read and weighed at a time (a multiple of `block_size`, if need be more).
            times: as in `samples`.
            steps: likewise.
            scheme: likewise; one that is tuned is tuned once, on the first episodes.
            model: likewise; a spline is fitted once, to as many episodes as hold two million points.

        Returns:
            The chunks, made when they are asked for: by a loop, or by number.

        Raises:
            ValueError: as `samples`, and if `chunk_size` is not a positive whole number.
        """
        chunk_size, block_size = check_count("chunk_size", chunk_size), self.block_size
        chunk_size += -chunk_size % block_size
        self._check_settings()
        whole = self.has_hessian and self._columns["hessian"].ndim == 4
        some = PILOT if whole else max(PILOT, _FITTED // (self.num_steps + 1))
        completion = None if whole else completion_of(self.part(0, some), model, block_size)
        if scheme is None:
            scheme = default_scheme(path_batch(self.part(0, PILOT), completion, block_size))
        options = {"times": times, "steps": steps, "scheme": scheme, "block_size": block_size}
        return Chunks(self.part, self.num_episodes, chunk_size, **options, completion=completion)

    def _check_settings(self) -> None:
        for name, value in (("step_size", self.step_size), ("inverse_temperature", self.inverse_temperature)):
            if value is None:
                raise ValueError(f"{name} is not recorded and must be given; consistency(recording) estimates it")

    def _check(self, on_bad: OnBad) -> int:
        """Walk through all episodes in blocks; returns how many were dropped."""
        episodes, points, d = self.num_episodes, self.num_steps + 1, self.dim
        block = max(1, _BLOCK // (points * d * d))
        bad: list[Fault] = []
        for start in range(0, episodes, block):
            for fault in faults(self.part(start, start + block), points, start):
                if on_bad == "refuse":
                    raise ValueError(str(fault))
                bad.append(fault)
        if not bad:
            return 0
        if len(bad) == episodes:
            raise ValueError(f"every one of the {episodes} episodes is bad; {bad[0]}")
        self._rows = np.setdiff1d(np.arange(episodes), [fault.episode for fault in bad])
        self.last_steps = self.last_steps[self._rows]
        for name in ("step_size", "inverse_temperature"):
            value = getattr(self, name)
            if value is not None and value.ndim > 0:
                setattr(self, name, value[self._rows])
        warnings.warn(
            f"dropped {len(bad)} of {episodes} episodes; the first: {bad[0]}", RuntimeWarning, stacklevel=3
        )  # fmt: skip
        return len(bad)
