"""Residuals against a model: folds of episodes, each with a control fitted to the others."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from .._base import mesh
from .._base.types import Vector
from ..estimate.sums import Bank, Sums, make_bank
from ..potentials.base import AbstractPotential
from ..potentials.monomials import num_terms
from ..potentials.polynomial import Polynomial
from ..samples.samples import Samples


class Fold(eqx.Module):
    """Residuals g − ∇m(X), H − ∇²m(X) of some episodes against a potential m fitted elsewhere (or none)."""

    bank: Bank
    potential: AbstractPotential | None

    def model(self, alpha: Vector) -> Vector:
        return jnp.zeros_like(alpha) if self.potential is None else self.potential.gradient(alpha)


@eqx.filter_jit
def make_fold(samples: Samples, potential: AbstractPotential | None) -> Fold:
    """The residuals of `samples` against `potential`, which must not have been fitted to them."""
    if potential is None:
        return Fold(make_bank(samples, samples.gradient, samples.hessian), None)
    safe = jnp.where(samples.observed[..., None], samples.x, 0)
    gradient = samples.gradient - jax.vmap(jax.vmap(potential.gradient))(safe)
    hessian = samples.hessian - jax.vmap(jax.vmap(potential.hessian))(safe)
    return Fold(make_bank(samples, gradient, hessian), potential)


def fold_sums(fold: Fold, alpha: Vector, sums: Sums) -> Sums:
    """Sums of residuals with the model added back: ℓ = (g − m(X)) + m(α)."""
    return sums.shifted(fold.model(alpha))


def add_sums(parts: list[Sums]) -> Sums:
    return jax.tree.map(lambda *leaves: sum(leaves[1:], leaves[0]), *parts)


_DEGREE = {1: 10, 2: 10}  # of the fitted control; beyond the plane _DEGREE_BEYOND, for the sake of its number of terms
_DEGREE_BEYOND = 6
_ROWS_PER_TERM = 20  # fewer observed rows than this per coefficient, and the control's degree is lowered


def _cross_fitted(samples: Samples) -> tuple[Fold, ...]:
    """Even and odd episodes, each with the polynomial fitted to the other: θ never sees the points it corrects."""
    halves = [_every_other(samples, i) for i in (0, 1)]
    rows = halves[1].x.shape[0] * samples.num_times * samples.dim
    degree = _DEGREE.get(samples.dim, _DEGREE_BEYOND)
    while degree > 2 and num_terms(samples.dim, degree) * _ROWS_PER_TERM > rows:
        degree -= 2
    return tuple(make_fold(half, _fit(other, degree)) for half, other in zip(halves, halves[::-1], strict=True))


@eqx.filter_jit
def _every_other(samples: Samples, first: int) -> Samples:
    def half(samples: Samples) -> Samples:
        return jax.tree.map(lambda leaf: leaf[first::2], samples)

    devices = mesh.parts()
    if devices > 1 and samples.num_episodes % (2 * devices) == 0:
        return mesh.by_device(half, samples)
    return half(samples)


@eqx.filter_jit
def _fit(samples: Samples, degree: int) -> Polynomial:
    def flat(array: Array) -> Array:
        return array.reshape(-1, *array.shape[2:])

    return Polynomial.fit(
        flat(samples.x),
        flat(samples.gradient),
        flat(samples.hessian),
        degree=degree,
        weights=flat(samples.observed).astype(samples.x.dtype),
    )
