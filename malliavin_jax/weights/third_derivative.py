"""What one observed step tells the weights: its Jacobian, its noise, and the third derivative of the loss.

The divergence behind a weight needs ∂³L. `third` says where from:

- `"covariation"`: ε ∂_a∂_b∂_p L ≈ ε ΔH_ab ξ_p/σ, the quadratic covariation of Hessian and noise; any dimension,
  observed Hessians only. By Stein's lemma its mean is ε E ∂_a∂_b∂_p L(X_{k+1}) whatever the gradient noise and the
  minibatches: ΔX in place of σξ would add the noise's own variance to ξ's, and the covariance of a batch's gradient
  and Hessian. The default.
- `"divided"`: ε ΔH/ΔX, in one dimension.
- `"ito"`: β (g_{k+1} − g_k − H_k ΔX), the paper's; biased when gradients are noisy, because the noise of the last
  gradient then enters both the weight and the value it multiplies. `Canonical` takes it in one dimension only.
- a function x ↦ ∂³L(x) of shape (d, d, d): exact.
"""

from collections.abc import Callable
from typing import Any, Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

from .._base import small_tensors
from .._base.small_tensors import Tensor, unroll
from .._base.types import Vector
from ..learner.learner import Transition
from ..potentials.matrix_free import HessianProduct

Third = Literal["covariation", "divided", "ito"] | Callable[[Vector], Float[Array, "d d d"]]


def check_third(third: Third) -> None:
    if not callable(third) and third not in ("covariation", "divided", "ito"):
        raise ValueError(f"third must be 'covariation', 'divided', 'ito' or a function, got {third!r}")


def jacobian(transition: Transition) -> Tensor:
    if isinstance(transition.before.hessian, HessianProduct):
        raise ValueError("the potential offers Hessian-vector products only: weigh by Windowed(rate, neumann=m)")
    scaled = unroll(transition.step_size * transition.before.hessian)
    return small_tensors.eye(scaled) - scaled


def apply(hessian: Any, vector: Tensor) -> Tensor:
    return unroll(hessian @ small_tensors.roll(vector))


def scaled_noise(transition: Transition) -> Tensor:
    """ξ_{k+1}/σ, read off the observed step: σξ = X_{k+1} − X_k + ε g_k."""
    before, after, step_size, inverse_temperature = transition
    noise = after.x - before.x + step_size * before.gradient
    return unroll(noise * (inverse_temperature / (2 * step_size)))


def rank_one(third: str, transition: Transition) -> tuple[Tensor, Tensor]:
    """K and y with ε ∂_a∂_b∂_p L ≈ K_ab y_p."""
    if third == "covariation":
        change = transition.after.hessian - transition.before.hessian
        return unroll(transition.step_size * change), scaled_noise(transition)
    return trace_term(third, transition)[:, None], unroll(jnp.ones_like(transition.before.x))  # one dimension


def trace_term(third: str, transition: Transition) -> Tensor:
    """ε times the gradient of the Laplacian of L, from what is observed."""
    if third == "covariation" and isinstance(transition.before.hessian, HessianProduct):
        noise = scaled_noise(transition)
        change = apply(transition.after.hessian, noise) - apply(transition.before.hessian, noise)
        return small_tensors.scale(change, transition.step_size)
    if third == "covariation":
        change, noise = rank_one(third, transition)
        return change @ noise
    before, after, step_size, inverse_temperature = transition
    dx, dh = after.x - before.x, after.hessian - before.hessian
    if third == "ito":
        change = inverse_temperature * (after.gradient - before.gradient)
        return unroll(change) - unroll(inverse_temperature * before.hessian) @ unroll(dx)
    moved = dx != 0
    return unroll(jnp.where(moved, step_size * dh[0] / jnp.where(moved, dx, 1), 0))
