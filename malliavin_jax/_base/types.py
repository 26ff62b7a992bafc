"""Shapes shared by every signature: d is the dimension of the learner's state."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, PRNGKeyArray

if TYPE_CHECKING:
    Numbers = Any
else:  # what formulas that serve both take and make; that they do is for tests to tell, not for a type checker
    Numbers = Array | np.ndarray | np.generic
Vector = Float[Array, " d"]
Matrix = Float[Array, "d d"]
Scalar = Float[Array, ""]
Flag = Bool[Array, ""]
Key = PRNGKeyArray
Place = ArrayLike | Sequence[float | int]  # a vector, or what `estimate.field.place_of` makes one of

__all__ = ["Array", "Flag", "Key", "Matrix", "Numbers", "Place", "Scalar", "Vector"]
