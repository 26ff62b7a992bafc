"""Shapes shared by every signature: d is the dimension of the learner's state."""

from jaxtyping import Array, Bool, Float, PRNGKeyArray

Vector = Float[Array, " d"]
Matrix = Float[Array, "d d"]
Scalar = Float[Array, ""]
Flag = Bool[Array, ""]
Key = PRNGKeyArray

__all__ = ["Array", "Flag", "Key", "Matrix", "Scalar", "Vector"]
