"""Residuals against a model: folds of episodes, each with a potential that was fitted to others."""

from collections.abc import Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from .._base import mesh
from .._base.types import Vector
from ..estimate.localizers import AbstractLocalizer
from ..estimate.sums import Bank, Sums, add_up, localized_sums, make_bank
from ..potentials.base import AbstractPotential
from ..samples.samples import Samples


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


def every_other(samples: Samples, first: int) -> Samples:
    """Every second episode: the even ones for `first` = 0, the odd ones for 1."""
    if mesh.on_host(samples):
        return jax.tree.map(lambda leaf: mesh.to_device(np.asarray(leaf)[first::2]), samples)
    return _every_other(samples, first)


@eqx.filter_jit
def _every_other(samples: Samples, first: int) -> Samples:
    def half(samples: Samples) -> Samples:
        return jax.tree.map(lambda leaf: leaf[first::2], samples)

    devices = mesh.parts()
    if devices > 1 and samples.num_episodes % (2 * devices) == 0:
        return mesh.by_device(half, samples)
    return half(samples)
