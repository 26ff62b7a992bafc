"""Gradient fields α ↦ ∇L(α): PyTree callables `field(alpha, *, key=None) -> Estimate`."""

import equinox as eqx
import jax.numpy as jnp

from ._types import Key, Vector
from .conditional import Estimate


class TrueField(eqx.Module):
    """The field of a known potential: what a perfect estimator would return.

    Its standard errors are zero and its density, which it has none of, is NaN.
    """

    potential: eqx.Module

    def __call__(self, alpha: Vector, *, key: Key | None = None) -> Estimate:
        value = self.potential.gradient(alpha)
        nan = jnp.full((), jnp.nan, alpha.dtype)
        return Estimate(value, jnp.zeros_like(value), nan, nan, jnp.asarray(True))
