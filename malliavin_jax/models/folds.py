"""Residuals against a model: folds of episodes, each with a potential that was fitted to others."""

from collections.abc import Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .._base import host, mesh
from .._base.types import Numbers, Scalar, Vector
from ..estimate import on_host
from ..estimate.localizers import AbstractLocalizer
from ..estimate.ratio import Estimate, Ratios, ratio_with_error, ratios
from ..estimate.sums import Bank, Sums, add_up, localized_sums, make_bank
from ..potentials.base import AbstractPotential
from ..potentials.on_host import derivatives_on_host, is_known
from ..samples.samples import Samples

_EXACT = 1e-6  # of a gradient: what is not more than this of it is rounding, in the choice of a localizer
_ON_HOST = 200_000  # points, up to which residuals are computed before a program for them could be compiled


class Fold(eqx.Module):
    """Residuals g − ∇m(X), H − ∇²m(X) of some episodes against a potential m fitted elsewhere (or none)."""

    bank: Bank
    potential: AbstractPotential | None

    def model(self, alpha: Vector) -> Vector:
        """∇m(α)."""
        return jnp.zeros_like(alpha) if self.potential is None else self.potential.gradient(alpha)

    def model_at(self, alphas: Float[Numbers, "alphas d"]) -> Float[Numbers, "alphas d"]:
        """∇m at many α."""
        return gradients(self.potential, alphas)

    def with_model(self, sums: Sums, alpha: Vector) -> Sums:
        """Sums of residuals at α with the model added back: ℓ = (g − ∇m(X)) + ∇m(α)."""
        return sums.shifted(self.model(alpha))


def gradients(potential: AbstractPotential | None, alphas: Float[Numbers, "alphas d"]) -> Float[Numbers, "alphas d"]:
    """∇m at many α, 0 of no potential; with NumPy for places that are its own."""
    if isinstance(alphas, np.ndarray):
        return derivatives_on_host(potential, alphas)[0].astype(alphas.dtype)
    return jnp.zeros_like(alphas) if potential is None else jax.vmap(potential.gradient)(alphas)


def make_fold(samples: Samples, potential: AbstractPotential | None) -> Fold:
    """The residuals of `samples` against `potential`, which must not have been fitted to them."""
    small = samples.observed.size <= _ON_HOST and mesh.parts() == 1
    if small and is_known(potential) and host.on_host(samples):
        return _fold_on_host(samples, potential)
    return _make_fold(samples, potential)


@eqx.filter_jit
def _make_fold(samples: Samples, potential: AbstractPotential | None) -> Fold:
    hessian = samples.require_hessian("a debiased gradient")
    if potential is None:
        return Fold(make_bank(samples, samples.gradient, hessian), None)
    safe = jnp.where(samples.observed[..., None], samples.x, 0)
    gradient = samples.gradient - jax.vmap(jax.vmap(potential.gradient))(safe)
    hessian = hessian - jax.vmap(jax.vmap(potential.hessian))(safe)
    return Fold(make_bank(samples, gradient, hessian), potential)


def _fold_on_host(samples: Samples, potential: AbstractPotential | None) -> Fold:
    hessian = samples.require_hessian("a debiased gradient")
    here = host.to_host(Samples(samples.x, samples.gradient, hessian, samples.weight, samples.observed))
    flat = np.where(here.observed[..., None], here.x, 0).reshape(-1, samples.dim)
    model = derivatives_on_host(potential, flat)
    left = [
        (data - own.reshape(data.shape)).astype(data.dtype)
        for data, own in zip((here.gradient, here.hessian), model, strict=True)
    ]
    return Fold(jax.tree.map(host.to_device, make_bank(here, *left)), potential)


def folded_sums(folds: Sequence[Fold], alpha: Vector, localizer: AbstractLocalizer) -> Sums:
    """The localized sums of several folds at α, each with its own model added back."""
    return add_up([fold.with_model(localized_sums(fold.bank, alpha, localizer), alpha) for fold in folds])


def variances_at(
    folds: Sequence[Fold], alphas: Float[Numbers, "alphas d"], localizer: AbstractLocalizer
) -> Float[Numbers, " alphas"]:
    """The variance of the ratio of these sums, added over its entries, at many α."""
    if isinstance(alphas, np.ndarray):
        return _variance(_sums_at(folds, alphas, localizer))
    return jax.vmap(lambda alpha: _variance(folded_sums(folds, alpha, localizer)))(alphas)


def _variance(sums: Sums) -> Float[Numbers, "*places"]:
    """No residual is taken for more exact than a millionth: where all are, the least noisy density is the best."""
    value, stderr = ratio_with_error(sums)
    xp = host.module_of(sums.w)
    safe = xp.where(sums.w == 0, 1, sums.w)  # the standard error is infinite there
    return xp.sum(stderr**2 + (_EXACT * value) ** 2 * (sums.ww / safe**2), 0)


def _sums_at(folds: Sequence[Fold], alphas: Float[np.ndarray, "alphas d"], localizer: AbstractLocalizer) -> Sums:
    """`folded_sums` at many α, with NumPy."""
    return add_up([on_host.sums_at(fold.bank, alphas, localizer).shifted(fold.model_at(alphas).T) for fold in folds])


class Ratio(eqx.Module):
    """α ↦ the ratio of the localized sums of some folds, wherever α is; `points` are their observed points."""

    folds: tuple[Fold, ...]
    localizer: AbstractLocalizer
    points: Array
    scale: Scalar

    def __call__(self, alpha: Vector) -> Estimate:
        return Estimate(*self._of(folded_sums(self.folds, alpha, self.localizer), self.points, self.scale))

    @host.silently
    def on_host(self, alphas: Float[np.ndarray, "alphas d"]) -> Ratios:
        """At many α, with NumPy; whether that is sooner done `on_hand` says."""
        return self._of(_sums_at(self.folds, alphas, self.localizer), *map(np.asarray, (self.points, self.scale)))

    def _of(self, sums: Sums, points: Numbers, scale: Numbers) -> Ratios:
        return ratios(sums, sum(fold.bank.episodes for fold in self.folds), points, True, scale)


def on_hand(folds: Sequence[Fold], localizer: AbstractLocalizer, places: int) -> bool:
    """Whether so many places are asked of so few points that NumPy is done before a compiler."""
    known = all(is_known(fold.potential) for fold in folds)
    return known and on_host.serves(localizer, places, *(fold.bank for fold in folds))


def every_other(samples: Samples, first: int) -> Samples:
    """Every second episode: the even ones for `first` = 0, the odd ones for 1."""
    if host.on_host(samples):
        return jax.tree.map(lambda leaf: host.to_device(np.asarray(leaf)[first::2]), samples)
    return _every_other(samples, first)


@eqx.filter_jit
def _every_other(samples: Samples, first: int) -> Samples:
    def half(samples: Samples) -> Samples:
        return jax.tree.map(lambda leaf: leaf[first::2], samples)

    devices = mesh.parts()
    if devices > 1 and samples.num_episodes % (2 * devices) == 0:
        return mesh.by_device(half, samples)
    return half(samples)
