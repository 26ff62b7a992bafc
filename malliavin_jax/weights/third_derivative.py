"""What one observed step tells the weights: its Jacobian, its noise, and the third derivative of the loss.

The divergence behind a weight needs ∂³L. `third` says where from:

- `"covariation"`: ε ∂_a∂_b∂_p L ≈ ε ΔH_ab ξ_p/σ, the quadratic covariation of Hessian and noise; any dimension,
  observed Hessians only. By Stein's lemma its mean is ε E ∂_a∂_b∂_p L(X_{k+1}) whatever the gradient noise and the
  minibatches: ΔX in place of σξ would add the noise's own variance to ξ's, and the covariance of a batch's gradient
  and Hessian. The default. What multiplies it depends on the same ξ, so E[φ S] − E[φ'] is of order ε: nothing to be
  seen on smooth losses, 4 % where |L'''| reaches 200 at ε = .01. `Adapted` needs no third derivative.
- `"divided"`: ε ΔH/ΔX, in one dimension.
- `"ito"`: β (g_{k+1} − g_k − H_k ΔX), the paper's; biased when gradients are noisy, because the noise of the last
  gradient then enters both the weight and the value it multiplies. `Canonical` takes it in one dimension only.
- a function x ↦ ∂³L(x) of shape (d, d, d): exact.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from .._base import small_tensors
from .._base.small_tensors import Tensor, matmul, unroll
from .._base.types import Matrix, Scalar, Vector
from ..learner.learner import Transition
from ..potentials.products import Curvature, matrix_of

Third = Literal["covariation", "divided", "ito"] | Callable[[Vector], Float[Array, "d d d"]]


def check_third(third: Third) -> None:
    """Refuse what `third` cannot be."""
    if not callable(third) and third not in ("covariation", "divided", "ito"):
        raise ValueError(f"third must be 'covariation', 'divided', 'ito' or a function, got {third!r}")


class Hessians(NamedTuple):
    """The matrices H_k and H_{k+1} of a step."""

    before: Matrix
    after: Matrix


def matrices(transition: Transition) -> Hessians:
    """The Hessians of a step as matrices; an error where the learner shows only their products with vectors."""
    before, after = matrix_of(transition.before.hessian), matrix_of(transition.after.hessian)
    if before is None or after is None:
        raise ValueError(
            "the potential offers Hessian-vector products only: weigh by Windowed(rate, neumann=m) "
            "with third='covariation', or give the learner a Potential with a hessian"
        )
    return Hessians(before, after)


def jacobian(hessian: Matrix, transition: Transition) -> Tensor:
    """M = I − εH."""
    scaled = unroll(transition.step_size * hessian)
    return small_tensors.eye(scaled) - scaled


def scaled_noise(transition: Transition) -> Tensor:
    """ξ_{k+1}/σ, read off the observed step: σξ = X_{k+1} − X_k + ε g_k."""
    before, after, step_size, inverse_temperature, *_ = transition
    noise = after.x - before.x + step_size * before.gradient
    return unroll(noise * (inverse_temperature / (2 * step_size)))


def relative_size(transition: Transition) -> Scalar | None:
    """ε_k/ε_0, the size of this step in units of the first; None where all steps are alike."""
    return None if transition.first_step_size is None else transition.step_size / transition.first_step_size


def rank_one(third: str, transition: Transition) -> tuple[Tensor, Tensor]:
    """K and y with ε ∂_a∂_b∂_p L ≈ K_ab y_p."""
    if third == "covariation":
        hessians = matrices(transition)
        return unroll(transition.step_size * (hessians.after - hessians.before)), scaled_noise(transition)
    return trace_term(third, transition)[:, None], unroll(jnp.ones_like(transition.before.x))  # one dimension


def trace_term(third: str, transition: Transition) -> Tensor:
    """ε times the gradient of the Laplacian of L, from observed matrices."""
    if third == "covariation":
        change, noise = rank_one(third, transition)
        return matmul(change, noise)
    before, after, step_size, inverse_temperature, *_ = transition
    dx, hessians = after.x - before.x, matrices(transition)
    if third == "ito":
        change = inverse_temperature * (after.gradient - before.gradient)
        return unroll(change) - matmul(unroll(inverse_temperature * hessians.before), unroll(dx))
    moved, dh = dx != 0, hessians.after - hessians.before
    return unroll(jnp.where(moved, step_size * dh[0] / jnp.where(moved, dx, 1), 0))


def trace_term_by_products(transition: Transition) -> Tensor:
    """`trace_term("covariation", …)` as ε (H_{k+1} y − H_k y), which takes two products and no matrix."""
    noise = scaled_noise(transition)
    change = times(transition.after.hessian, noise) - times(transition.before.hessian, noise)
    return small_tensors.scale(change, transition.step_size)


def times(curvature: Curvature, vector: Tensor) -> Tensor:
    """H v, be H a matrix or known by its products."""
    matrix = matrix_of(curvature)
    if matrix is None:
        return unroll(curvature @ small_tensors.roll(vector))
    return matmul(unroll(matrix), vector)
