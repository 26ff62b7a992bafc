"""Conditional expectations on events of probability zero, with standard errors.

For every localizer (K, G), with w = K(X−α) + G(X−α)·S,

    E[ℓ | X_s = α] = E[w ℓ − ∇ℓ·G] / E[w],        p_s(α) = E[w].

Numerators and denominators are sums over episodes and times; the standard error is that of a ratio (delta method),
with the points of one episode, which are dependent, added up before they are squared.
"""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from .._base.checks import check_positive, check_shape
from .._base.types import Scalar, Vector
from ..samples.samples import Samples, check_samples
from ..samples.summary import box
from .localizers import Localizer
from .ratio import Estimate, ratio_estimate
from .sums import localized_sums, make_bank


def conditional_expectation(
    samples: Samples,
    values: Float[Array, "episodes times m"],
    jacobians: Float[Array, "episodes times m d"],
    alpha: Vector,
    localizer: Localizer,
) -> Estimate:
    """E[ℓ(X_s) | X_s = α] for any ℓ with m components, given its `values` ℓ(X_s) and `jacobians` ∇ℓ(X_s).

    ℓ = g, the learner's gradient, with the Hessian for Jacobian, is the counterfactual gradient. `stderr` is that of
    the ratio, clustered by episode. The estimate is unbiased for every length of the localizer (up to the core of
    `Gaussian`).

    ```python
    # E[X² | X = ½] is ¼: here from ℓ = X² with Jacobian 2X
    half = jnp.array([0.5])
    mj.conditional_expectation(samples, samples.x**2, 2 * samples.x[..., None], half, mj.Laplace(0.5))
    ```
    """
    check_samples(samples)
    shape = samples.x.shape
    check_shape("alpha", alpha, (samples.dim,))
    check_shape("values", values, (*shape[:2], None))
    check_shape("jacobians", jacobians, (*values.shape, samples.dim))
    seen = samples.observed[..., None]
    # Squares of centred values do not cancel in float32.
    centre = jnp.sum(jnp.where(seen, values, 0), (0, 1)) / jnp.maximum(jnp.sum(seen), 1).astype(values.dtype)
    bank = make_bank(samples, values - centre[None, None, :], jacobians)
    low, high = box(samples)
    inside = jnp.all((alpha >= low) & (alpha <= high))
    sums = localized_sums(bank, alpha, localizer)
    estimate = ratio_estimate(sums, samples.num_episodes, jnp.sum(samples.observed), inside)
    return eqx.tree_at(lambda e: e.value, estimate, estimate.value + centre)


def density(samples: Samples, alpha: Vector, localizer: Localizer) -> tuple[Scalar, Scalar]:
    """The density p̂_s(α) of the observed positions, averaged over the times, and its standard error.

    ```python
    p, stderr = mj.density(samples, jnp.array([0.5]), mj.Laplace(0.5))
    ```
    """
    nothing = jnp.zeros((*samples.x.shape[:2], 1), samples.x.dtype)
    estimate = conditional_expectation(
        samples, nothing, jnp.zeros((*nothing.shape, samples.dim), nothing.dtype), alpha, localizer
    )
    return estimate.density, estimate.density_stderr


def score(samples: Samples, alpha: Vector, length: float | Scalar) -> tuple[Vector, Vector]:
    """The score ∇ log p_s(α) = −E[S | X_s = α], and its standard error, by a Gaussian kernel of the given length.

    The weights' own derivative is not observed, so this average keeps the kernel's bias, of order length². The standard
    error is infinite where the kernel's mass is not significant (α far from the samples).

    ```python
    slope, stderr = mj.score(samples, jnp.array([0.5]), length=0.2)
    ```
    """
    check_positive("length", length)
    check_samples(samples)
    check_shape("alpha", alpha, (samples.dim,))
    bank = make_bank(samples, -samples.weight, jnp.zeros((*samples.x.shape, samples.dim), samples.x.dtype))

    def kernel_only(y: Vector) -> tuple[Scalar, Vector]:
        h = jnp.asarray(length, y.dtype)
        return jnp.exp(-jnp.sum(y * y) / (2 * h * h)), jnp.zeros_like(y)

    sums = localized_sums(bank, alpha, kernel_only)
    estimate = ratio_estimate(sums, samples.num_episodes, jnp.sum(samples.observed), jnp.asarray(True))
    return estimate.value, jnp.where(estimate.trusted, estimate.stderr, jnp.inf)
