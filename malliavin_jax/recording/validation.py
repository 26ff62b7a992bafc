"""What may be wrong with recorded arrays, found before anything is made of them."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from .npy import Column

_ASYMMETRY = 1e-4  # of the largest entry: more than float32 and finite differences leave


def column_of(name: str, value: Any) -> Any:
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


def setting_of(name: str, value: Any, episodes: int) -> np.ndarray | None:
    if value is None:
        return None
    array = np.asarray(column_of(name, value)[...], np.float64)
    if array.shape not in ((), (episodes,)):
        raise ValueError(f"{name} must be one number or have shape ({episodes},), got shape {array.shape}")
    if array.ndim == 0 and not (np.isfinite(array) and array > 0):
        raise ValueError(f"{name} must be positive and finite, got {array}")
    return array


def lengths_of(lengths: Any, episodes: int, points: int) -> np.ndarray:
    if lengths is None:
        return np.broadcast_to(np.int64(points - 1), (episodes,))  # a view: no memory for each episode
    array = np.asarray(column_of("lengths", lengths)[...])
    if array.shape != (episodes,):
        raise ValueError(f"lengths must have shape ({episodes},), got {array.shape}")
    if array.dtype.kind not in "iu":
        raise ValueError(f"lengths must be whole numbers of steps, got dtype {array.dtype}")
    return array.astype(np.int64)


def faults(part: dict[str, Any], points: int) -> Iterator[tuple[int, str]]:
    """Each bad episode of a block, in order, with the first thing that is wrong with it."""
    lengths = part["lengths"]
    found = {int(i): f": lengths must be between 0 and {points - 1} steps, got {lengths[i]}"
             for i in np.flatnonzero((lengths < 0) | (lengths >= points))}  # fmt: skip
    for name in ("step_size", "inverse_temperature"):
        value = part[name]
        if value is not None and value.ndim > 0:
            for i in np.flatnonzero(~(np.isfinite(value) & (value > 0))):
                found.setdefault(int(i), f": {name} must be positive and finite, got {value[i]}")
    seen = np.arange(points)[None, :] <= lengths[:, None]
    wrong = {
        f"{name} must be finite": seen & ~np.isfinite(part[name]).reshape(*seen.shape, -1).all(-1)
        for name in ("x", "gradient", "hessian")
        if name in part
    }
    hessian = part.get("hessian")
    if hessian is not None and hessian.ndim == 4 and hessian.shape[-1] > 1:
        with np.errstate(invalid="ignore", over="ignore"):
            gap = np.abs(hessian - np.swapaxes(hessian, -1, -2)).max((-1, -2))
            wrong["hessian must be symmetric"] = seen & (gap > _ASYMMETRY * np.abs(hessian).max((-1, -2)))
    for rule, where in wrong.items():
        for i in np.flatnonzero(where.any(1)):
            step = int(np.argmax(where[i]))
            found.setdefault(int(i), f", step {step}: {rule}, got {_shown(part[rule.split()[0]][i, step])}")
    yield from sorted(found.items())


def _shown(value: np.ndarray) -> str:
    return np.array2string(value, precision=4, threshold=12, separator=", ").replace("\n", "")
