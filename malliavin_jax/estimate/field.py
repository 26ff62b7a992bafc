"""What every gradient field is: a function of a place α, with numbers inside."""

import abc
from typing import Any

import equinox as eqx

from .._base.checks import check_shape, described, float_array
from .._base.types import Key, Place, Vector
from .ratio import Estimate


class AbstractField(eqx.Module):
    """A function α ↦ `Estimate`, compared and hashed as functions are, by identity: `jax.jit(field)` takes it."""

    @abc.abstractmethod
    def __call__(self, alpha: Place, *, key: Key | None = None) -> Estimate:
        """The estimate at one α, of shape (d,); in one dimension a number will do."""

    def __eq__(self, other: object) -> bool:  # type: ignore[override]
        return self is other

    def __hash__(self) -> int:
        return id(self)


def check_field(field: Any) -> None:
    """Refuse a potential, samples or a class in place of a field."""
    if callable(field) and not isinstance(field, type):
        return
    remedy = "a function alpha ↦ Estimate is one, MalliavinField(samples) for example"
    if hasattr(field, "gradient") and hasattr(field, "value"):
        remedy = "TrueField(potential) is one"
    elif hasattr(field, "weight"):
        remedy = "MalliavinField(samples) is one"
    raise ValueError(f"field must be a gradient field, got {described(field)}: {remedy}")


def place_of(alpha: Any, dim: int | None = None, dtype: Any = None) -> Vector:
    """α as a vector of `dim` coordinates, from any numbers of this shape, or from one number in one dimension."""
    array = float_array("alpha", alpha)
    array = array if dtype is None else array.astype(dtype)
    if array.ndim == 0 and dim in (1, None):
        return array.reshape(1)
    remedy = "one point α"
    if array.ndim == 2 and dim in (None, array.shape[1]):
        remedy = "for many points at once, jax.vmap(field)(alphas)"
    elif array.ndim == 1 and dim == 1:
        remedy = "for many points at once, jax.vmap(field)(alphas[:, None])"
    check_shape("alpha", array, (dim,), "d", remedy)
    return array
