"""The learners of a recording, each with its report and its findings, in passes of bounded memory."""

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from .causes import findings_of
from .identities import WEIGHED
from .residuals import Block, LearnerReport, ResidualSums, Settings

_BLOCK = 1 << 21  # numbers held at a time
_LEARNERS = 64


@runtime_checkable
class Log(Protocol):
    """What is asked of a `Recording`, which stands below this room."""

    step_size: Any
    inverse_temperature: Any
    last_steps: Any

    @property
    def num_episodes(self) -> int:
        """How many episodes."""
        ...

    @property
    def num_steps(self) -> int:
        """The steps of the longest."""
        ...

    @property
    def dim(self) -> int:
        """d."""
        ...

    def part(self, start: int = 0, stop: int | None = None, *, hessian: bool = True) -> Any:
        """Some episodes in memory."""
        ...


class Learners(NamedTuple):
    """The different settings in a recording, and the number of each episode's among them.

    Episodes with a schedule of step sizes, (episodes, points), have its mean for their step size.
    """

    settings: tuple[Settings, ...]
    member: np.ndarray


class Checked(NamedTuple):
    """The residuals of one learner, and what does not fit about them."""

    report: LearnerReport
    findings: list[str]


def learner_reports(recording: Log) -> list[Checked]:
    """The residuals of each learner, in two passes: the step size that the moves show, then the residuals.

    Where something does not fit, the cause is looked for in the learner's first episodes.
    """
    schedule = _mean_of_schedule(recording)
    settings, member = _learners(recording, schedule)
    has_gradient = getattr(recording, "has_gradient", True)
    sums = [ResidualSums(recording.dim) for _ in settings]
    for start, block in _blocks(recording, schedule):
        for number, total in enumerate(sums):
            total.add_moves(block.of(member[start : start + len(block.x)] == number))
    step_sizes = [
        total.slope() if one.step_size is None or not has_gradient else one.step_size
        for one, total in zip(settings, sums, strict=True)
    ]
    samples: list[list[Block]] = [[] for _ in settings]
    room = [_BLOCK for _ in settings]
    for start, block in _blocks(recording, schedule):
        for number, (step_size, total) in enumerate(zip(step_sizes, sums, strict=True)):
            mine = block.of(member[start : start + len(block.x)] == number)
            total.add_residuals(mine, step_size)
            if room[number] > 0 and len(mine.x):
                samples[number].append(mine)
                room[number] -= mine.x.size
    found = []
    for number, (one, step_size, total) in enumerate(zip(settings, step_sizes, sums, strict=True)):
        report = total.report(int(np.sum(member == number)), one, step_size)
        some = Block(*(np.concatenate(column) for column in zip(*samples[number], strict=True)))
        found.append(Checked(report, findings_of(report, some, has_gradient)))
    return found


def first_episodes(recording: Log) -> Any:
    """As many as the weights are looked at, with their Hessians."""
    episodes = max(2, min(WEIGHED, _BLOCK // (recording.num_steps + 1) // recording.dim**2))
    return recording.part(0, episodes)


def _mean_of_schedule(recording: Log) -> float | None:
    """The mean step size of recorded schedules, None where there are none."""
    sizes = recording.step_size
    if sizes is None or np.ndim(sizes) < 2:
        return None
    last_steps = recording.last_steps
    made = np.arange(sizes.shape[1])[None, :] < last_steps[:, None]
    return float(np.mean(sizes[made])) if made.any() else float(np.mean(sizes))


def _learners(recording: Log, schedule: float | None) -> Learners:
    step_size = recording.step_size if schedule is None else np.asarray(schedule)
    values = {"step_size": step_size, "inverse_temperature": recording.inverse_temperature}
    recorded = {name: value for name, value in values.items() if value is not None}
    if all(value.ndim == 0 for value in recorded.values()):
        one = Settings(**{name: float(value) for name, value in recorded.items()})
        return Learners((one,), np.broadcast_to(0, recording.num_episodes))
    each = np.stack([np.broadcast_to(value, recording.num_episodes) for value in recorded.values()], 1)
    kinds, member = np.unique(each, axis=0, return_inverse=True)
    if len(kinds) > _LEARNERS:
        raise ValueError(f"recording must hold at most {_LEARNERS} different learners, got {len(kinds)}")
    settings = (Settings(**dict(zip(recorded, kind.tolist(), strict=True))) for kind in kinds)
    return Learners(tuple(settings), member.reshape(-1))


def _blocks(recording: Log, schedule: float | None) -> Iterator[tuple[int, Block]]:
    """All episodes in blocks of bounded memory, each with the number of its first episode."""
    block = max(1, _BLOCK // ((recording.num_steps + 1) * recording.dim))
    for start in range(0, recording.num_episodes, block):
        part = recording.part(start, start + block, hessian=False)
        x = part["x"].astype(np.float64)
        gradient = part.get("gradient")
        gradient = np.zeros_like(x) if gradient is None else gradient.astype(np.float64)
        scale = np.broadcast_to(1.0, x.shape[:2]) if schedule is None else part["step_size"] / schedule
        yield start, Block(x, gradient, part["last_steps"], scale)
