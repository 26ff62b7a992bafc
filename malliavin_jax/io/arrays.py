"""Rows of numbers from NumPy, JAX, PyTorch or plain Python, for a recorder."""

from typing import Any

import numpy as np

from .._base.checks import check_positive


def positive_number(name: str, value: Any) -> float | None:
    """A positive number, or None."""
    if value is None:
        return None
    array = _numbers(name, value)
    if array.size != 1:
        raise ValueError(f"{name} must be one number, got shape {array.shape}")
    number = float(array.reshape(()))
    check_positive(name, number)
    return number


def vector(name: str, value: Any) -> np.ndarray:
    """A row of numbers, (d,), from a number, an array or several arrays."""
    array = _numbers(name, value)
    array = array.reshape(1) if array.ndim == 0 else array
    if array.ndim != 1 or array.size == 0:
        raise ValueError(f"{name} must be a number or have shape (d,), got shape {array.shape}")
    return array


def hessian_of(value: Any, dim: int) -> np.ndarray:
    """A Hessian, (d, d), or its diagonal, (d,); in one dimension from a number too."""
    array = _numbers("hessian", value)
    return array.reshape(1, 1) if dim == 1 and array.size == 1 else array


def _numbers(name: str, value: Any) -> np.ndarray:
    """Real numbers in memory, in float32 or float64, from whatever holds them; several arrays are strung together."""
    if type(value) in (list, tuple) and any(hasattr(part, "shape") for part in value):
        return np.concatenate([_numbers(name, part).reshape(-1) for part in value])
    if hasattr(value, "detach"):  # PyTorch, which need not be imported to be asked
        value = value.detach().cpu()
        value = (value.float() if "bfloat16" in str(value.dtype) else value).numpy()  # NumPy has no bfloat16
    try:
        array = np.asarray(value)
        if array.dtype.kind == "V":  # JAX's bfloat16 and its kin
            array = array.astype(np.float32)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} must be an array of numbers, got {type(value).__name__}") from error
    if array.dtype.kind not in "iuf":
        raise ValueError(f"{name} must hold real numbers, got dtype {array.dtype}")
    if array.dtype.kind == "f" and array.dtype.itemsize <= 4:
        return array.astype(np.float32)
    return array.astype(np.float64)


def check_row(name: str, array: np.ndarray | None, shape: tuple[int, ...]) -> None:
    """Refuse what is missing, of another shape than before, or not finite."""
    if array is None:
        raise ValueError(f"{name} must be given at every step: it was at the first")
    if array.shape != shape:
        raise ValueError(f"{name} must have shape {shape}, got {array.shape}")
    if not np.isfinite(array).all():
        raise ValueError(f"{name} must be finite, got {np.array2string(array, precision=4, threshold=12)}")
