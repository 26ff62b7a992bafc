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
from .._base.types import Place, Scalar, Vector
from ..samples.samples import Samples, check_samples
from ..samples.summary import box, masked_mean
from .field import place_of
from .localizers import Localizer, check_localizer
from .ratio import Estimate, ratio_estimate
from .sums import localized_sums, make_bank


def conditional_expectation(
    samples: Samples,
    values: Float[Array, "episodes times m"],
    jacobians: Float[Array, "episodes times m d"],
    alpha: Place,
    localizer: Localizer,
) -> Estimate:
    """E[ℓ(X_s) | X_s = α] = E[w ℓ − ∇ℓ·G] / E[w], w = K + G·S, for any ℓ with m components.

    K is the kernel of the localizer at X_s − α, G the term that removes its bias, S the weight of the path.

    ℓ = g, the learner's gradient, with the Hessian for Jacobian, is the counterfactual gradient. The estimate is
    unbiased for every length of the localizer (up to the core of `Gaussian`).

    Args:
        samples: positions and weights; their gradients and Hessians are not used.
        values: ℓ(X_s) at each sample, of shape (episodes, times, m).
        jacobians: ∇ℓ(X_s) at each sample, of shape (episodes, times, m, d).
        alpha: α, of shape (d,); in one dimension a number will do.
        localizer: `Laplace`, `Gaussian`, `Heaviside`, `Centered` or your own.

    Returns:
        An `Estimate` with m entries; `stderr` is that of the ratio, clustered by episode.

    Raises:
        ValueError: if a shape does not fit, if an observed number is not finite, or with fewer than two episodes.

    Example:
        ```python
        import jax
        import jax.numpy as jnp
        import malliavin_jax as mj

        loss = mj.potentials.Quartic()
        learner = mj.ForwardLearner(loss, mj.initial.Normal(), step_size=0.01, gradient_noise=0.5)
        samples = mj.observe(jax.random.key(0), learner, num_episodes=2000, times=[0.4, 0.8])
        # E[X² | X = ½] is ¼: here from ℓ = X² with Jacobian 2X
        half = jnp.array([0.5])
        mj.conditional_expectation(samples, samples.x**2, 2 * samples.x[..., None], half, mj.Laplace(0.5))
        ```
    """
    check_samples(samples)
    check_localizer(localizer)
    shape = samples.x.shape
    alpha = place_of(alpha, samples.dim, samples.x.dtype)
    check_shape("values", values, (*shape[:2], None), "episodes times m")
    check_shape("jacobians", jacobians, (*values.shape, samples.dim), "episodes times m d")
    centre = masked_mean(values, samples.observed)  # squares of centred values do not cancel in float32
    bank = make_bank(samples, values - centre[None, None, :], jacobians)
    low, high = box(samples)
    inside = jnp.all((alpha >= low) & (alpha <= high))
    sums = localized_sums(bank, alpha, localizer)
    estimate = ratio_estimate(sums, samples.num_episodes, jnp.sum(samples.observed), inside)
    return eqx.tree_at(lambda e: e.value, estimate, estimate.value + centre)


def density(samples: Samples, alpha: Place, localizer: Localizer) -> tuple[Scalar, Scalar]:
    """The density p̂_s(α) = mean of w of the observed positions, averaged over the times.

    Args:
        samples: positions and weights; their gradients and Hessians are not used.
        alpha: α, of shape (d,); in one dimension a number will do.
        localizer: `Laplace`, `Gaussian`, `Heaviside`, `Centered` or your own.

    Returns:
        The density, in 1/(units of x)^d, and its standard error.

    Raises:
        ValueError: if a shape does not fit, if an observed number is not finite, or with fewer than two episodes.

    Example:
        ```python
        import jax
        import jax.numpy as jnp
        import malliavin_jax as mj

        loss = mj.potentials.Quartic()
        learner = mj.ForwardLearner(loss, mj.initial.Normal(), step_size=0.01, gradient_noise=0.5)
        samples = mj.observe(jax.random.key(0), learner, num_episodes=2000, times=[0.4, 0.8])
        p, stderr = mj.density(samples, jnp.array([0.5]), mj.Laplace(0.5))
        ```
    """
    check_samples(samples)
    nothing = jnp.zeros((*samples.x.shape[:2], 1), samples.x.dtype)
    estimate = conditional_expectation(
        samples, nothing, jnp.zeros((*nothing.shape, samples.dim), nothing.dtype), alpha, localizer
    )
    return estimate.density, estimate.density_stderr


def score(samples: Samples, alpha: Place, length: float | Scalar) -> tuple[Vector, Vector]:
    """The score ∇ log p_s(α) = −E[S | X_s = α], by a Gaussian kernel.

    The weights' own derivative is not observed, so this average keeps the kernel's bias, of order length².

    Args:
        samples: positions and weights; their gradients and Hessians are not used.
        alpha: α, of shape (d,); in one dimension a number will do.
        length: standard deviation of the kernel, positive, in the units of x.

    Returns:
        The score and its standard error, both of shape (d,), in 1/(units of x). The standard error is infinite where
        the kernel's mass is not significant (α far from the samples).

    Raises:
        ValueError: if `length` is not positive, if a shape does not fit, if an observed number is not finite, or with
            fewer than two episodes.

    Example:
        ```python
        import jax
        import jax.numpy as jnp
        import malliavin_jax as mj

        loss = mj.potentials.Quartic()
        learner = mj.ForwardLearner(loss, mj.initial.Normal(), step_size=0.01, gradient_noise=0.5)
        samples = mj.observe(jax.random.key(0), learner, num_episodes=2000, times=[0.4, 0.8])
        slope, stderr = mj.score(samples, jnp.array([0.5]), length=0.2)
        ```
    """
    check_positive("length", length)
    check_samples(samples)
    alpha = place_of(alpha, samples.dim, samples.x.dtype)
    bank = make_bank(samples, -samples.weight, jnp.zeros((*samples.x.shape, samples.dim), samples.x.dtype))

    def kernel_only(y: Vector) -> tuple[Scalar, Vector]:
        h = jnp.asarray(length, y.dtype)
        return jnp.exp(-jnp.sum(y * y) / (2 * h * h)), jnp.zeros_like(y)

    sums = localized_sums(bank, alpha, kernel_only)
    estimate = ratio_estimate(sums, samples.num_episodes, jnp.sum(samples.observed), jnp.asarray(True))
    return estimate.value, jnp.where(estimate.trusted, estimate.stderr, jnp.inf)
