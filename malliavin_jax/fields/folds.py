"""Residuals against a model: folds of episodes, each with a control fitted to the others."""

from collections.abc import Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from .._base import mesh
from .._base.types import Vector
from ..estimate.localizers import AbstractLocalizer
from ..estimate.sums import Bank, Sums, add_up, localized_sums, make_bank
from ..fitting.monomials import num_terms
from ..potentials.base import AbstractPotential
from ..potentials.polynomial import Polynomial
from ..samples.samples import Samples

_DEGREE = {1: 10, 2: 10}  # of the fitted control; beyond the plane _DEGREE_BEYOND, for the sake of its number of terms
_DEGREE_BEYOND = 6
_ROWS_PER_TERM = 20  # fewer observed rows than this per coefficient, and the control's degree is lowered


class Fold(eqx.Module):
    """Residuals g − ∇m(X), H − ∇²m(X) of some episodes against a potential m fitted elsewhere (or none)."""

    bank: Bank
    potential: AbstractPotential | None

    def model(self, alpha: Vector) -> Vector:
        """∇m(α)."""
        return jnp.zeros_like(alpha) if self.potential is None else self.potential.gradient(alpha)

    def with_model(self, sums: Sums, alpha: Vector) -> Sums:
        """Sums of residuals at α with the model added back: ℓ = (g − ∇m(X)) + ∇m(α)."""
        return sums.shifted(self.model(alpha))


@eqx.filter_jit
def make_fold(samples: Samples, potential: AbstractPotential | None) -> Fold:
    """The residuals of `samples` against `potential`, which must not have been fitted to them."""
    hessian = samples.require_hessian("a debiased gradient")
    if potential is None:
        return Fold(make_bank(samples, samples.gradient, hessian), None)
    safe = jnp.where(samples.observed[..., None], samples.x, 0)
    gradient = samples.gradient - jax.vmap(jax.vmap(potential.gradient))(safe)
    hessian = hessian - jax.vmap(jax.vmap(potential.hessian))(safe)
    return Fold(make_bank(samples, gradient, hessian), potential)


def folded_sums(folds: Sequence[Fold], alpha: Vector, localizer: AbstractLocalizer) -> Sums:
    """The localized sums of several folds at α, each with its own model added back."""
    return add_up([fold.with_model(localized_sums(fold.bank, alpha, localizer), alpha) for fold in folds])


def cross_fitted(samples: Samples) -> tuple[Fold, Fold]:
    """Even and odd episodes, each with the polynomial fitted to the other: θ never sees the points it corrects."""
    even, odd = (_every_other(samples, first) for first in (0, 1))
    rows = odd.x.shape[0] * samples.num_times * samples.dim
    degree = _DEGREE.get(samples.dim, _DEGREE_BEYOND)
    while degree > 2 and num_terms(samples.dim, degree) * _ROWS_PER_TERM > rows:
        degree -= 2
    return make_fold(even, _fit(odd, degree)), make_fold(odd, _fit(even, degree))


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
    """The polynomial of given degree that fits the observed gradients and Hessians best."""

    def flat(array: Array) -> Array:
        return array.reshape(-1, *array.shape[2:])

    return Polynomial.fit(
        flat(samples.x),
        flat(samples.gradient),
        flat(samples.require_hessian("a fitted control")),
        degree=degree,
        weights=flat(samples.observed).astype(samples.x.dtype),
    )
