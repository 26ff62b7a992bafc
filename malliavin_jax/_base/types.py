"""Shapes shared by every signature: d is the dimension of the learner's state."""

from collections.abc import Sequence

from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, PRNGKeyArray

Vector = Float[Array, " d"]
Matrix = Float[Array, "d d"]
Scalar = Float[Array, ""]
Flag = Bool[Array, ""]
Key = PRNGKeyArray
Place = ArrayLike | Sequence[float | int]  # a vector, or what `estimate.field.place_of` makes one of

__all__ = ["Array", "Flag", "Key", "Matrix", "Place", "Scalar", "Vector"]
