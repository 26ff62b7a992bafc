"""What may be wrong with recorded arrays, found before anything is made of them."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from ..samples.axes import check_axes, check_hessian_axes
from ..samples.recorded import made_steps, per_step
from .npy import Column
from .weighing import Part

_ASYMMETRY = 1e-4  # of the largest entry: more than float32 and finite differences leave


class Fault(NamedTuple):
    """What is wrong with one episode: which array, where in it (None: not a matter of one step), and why."""

    episode: int
    array: str
    step: int | None
    rule: str
    got: str

    def __str__(self) -> str:
        place = "" if self.step is None else f", step {self.step}"
        return f"episode {self.episode}{place}: {self.array} must be {self.rule}, got {self.got}"


def column_of(name: str, value: Any) -> Any:
    """An array of real numbers in memory, or a column on disk."""
    if isinstance(value, Column):
        column = value
    else:
        try:
            column = np.asarray(value)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{name} must be an array of numbers, got {type(value).__name__}") from error
    if column.dtype.kind not in "iuf":
        raise ValueError(f"{name} must hold real numbers, got dtype {column.dtype}")
    return column


def columns_of(x: Any, gradient: Any, hessian: Any) -> dict[str, Any]:
    """The arrays by their names, without those that are None; their shapes must fit."""
    given = {"x": x, "gradient": gradient, "hessian": hessian}
    columns = {name: column_of(name, array) for name, array in given.items() if array is not None or name == "x"}
    if hessian is not None and gradient is None:
        raise ValueError("gradient must be given where hessian is: gradients were used wherever Hessians were")
    shape = columns["x"].shape
    check_axes("x", shape)
    if shape[1] < 2:
        raise ValueError(f"x must hold at least 2 points an episode, the start and one step, got {shape[1]}")
    if gradient is not None:
        check_axes("gradient", columns["gradient"].shape, shape)
    if hessian is not None:
        check_hessian_axes(columns["hessian"].shape, shape)
    return columns


def setting_of(name: str, value: Any, episodes: int) -> np.ndarray | None:
    """One positive number, or one for each episode (looked at in `faults`)."""
    if value is None:
        return None
    array = np.asarray(column_of(name, value)[...], np.float64)
    if array.shape not in ((), (episodes,)):
        raise ValueError(f"{name} must be one number or have shape ({episodes},), got shape {array.shape}")
    if array.ndim == 0 and not (np.isfinite(array) and array > 0):
        raise ValueError(f"{name} must be positive and finite, got {array}")
    return array


def step_size_of(value: Any, episodes: int, points: int) -> np.ndarray | None:
    """One positive number, one for each episode, or one for each step, (episodes, points) (looked at in `faults`)."""
    if value is None:
        return None
    array = per_step(np.asarray(column_of("step_size", value)[...], np.float64), episodes, points)
    return array if array.ndim == 2 else setting_of("step_size", array, episodes)


def last_steps_of(last_steps: Any, episodes: int, points: int) -> np.ndarray:
    """Whole numbers, one for each episode (their range is looked at in `faults`); None: all rows count."""
    if last_steps is None:
        return np.broadcast_to(np.int64(points - 1), (episodes,))  # a view: no memory for each episode
    array = np.asarray(column_of("last_steps", last_steps)[...])
    if array.shape != (episodes,):
        raise ValueError(f"last_steps must have shape ({episodes},), got {array.shape}")
    if array.dtype.kind not in "iu":
        raise ValueError(f"last_steps must be whole numbers of steps, got dtype {array.dtype}")
    return array.astype(np.int64)


def faults(part: Part, points: int, first: int = 0) -> Iterator[Fault]:
    """Each bad episode of a part, in order, with the first thing that is wrong with it.

    The first episode of the part counts as number `first`.
    """
    found: dict[int, Fault] = {}
    for fault in (*_faults_of_episodes(part, points), *_faults_of_steps(part, points)):
        found.setdefault(fault.episode, fault)
    for episode in sorted(found):
        yield found[episode]._replace(episode=first + episode)


def _faults_of_episodes(part: Part, points: int) -> Iterator[Fault]:
    last_steps = part["last_steps"]
    for i in np.flatnonzero((last_steps < 0) | (last_steps >= points)):
        yield Fault(int(i), "last_steps", None, f"between 0 and {points - 1} steps", str(last_steps[i]))
    for name in ("step_size", "inverse_temperature"):
        value = part[name]
        if value is not None and value.ndim == 1:
            for i in np.flatnonzero(~(np.isfinite(value) & (value > 0))):
                yield Fault(int(i), name, None, "positive and finite", str(value[i]))


def _faults_of_steps(part: Part, points: int) -> Iterator[Fault]:
    seen = np.arange(points)[None, :] <= part["last_steps"][:, None]
    hessian = part.get("hessian")
    for name, array in (("x", part["x"]), ("gradient", part.get("gradient")), ("hessian", hessian)):
        if array is not None:
            finite = np.isfinite(array).reshape(*seen.shape, -1).all(-1)
            yield from _first_steps(seen & ~finite, name, "finite", array)
    sizes = part["step_size"]
    if sizes is not None and sizes.ndim == 2:
        with np.errstate(invalid="ignore"):
            wrong = made_steps(part["last_steps"], points) & ~(np.isfinite(sizes) & (sizes > 0))
        yield from _first_steps(wrong, "step_size", "positive and finite", sizes[..., None])
    if hessian is not None and hessian.ndim == 4 and hessian.shape[-1] > 1:
        with np.errstate(invalid="ignore", over="ignore"):
            gap = np.abs(hessian - np.swapaxes(hessian, -1, -2)).max((-1, -2))
            wrong = seen & (gap > _ASYMMETRY * np.abs(hessian).max((-1, -2)))
        yield from _first_steps(wrong, "hessian", "symmetric", hessian)


def _first_steps(wrong: np.ndarray, name: str, rule: str, array: np.ndarray) -> Iterator[Fault]:
    """The first bad step of each bad episode, from flags (episodes, points)."""
    for i in np.flatnonzero(wrong.any(1)):
        step = int(np.argmax(wrong[i]))
        yield Fault(int(i), name, step, rule, _shown(array[i, step]))


def _shown(value: np.ndarray) -> str:
    return np.array2string(value, precision=4, threshold=12, separator=", ").replace("\n", "")
