"""Have the chains mixed? R-hat, effective sample size, and how well the data carry the estimate along the chain.

R-hat and the effective sample size are written here, although ArviZ has them. They run where the chain is, jitted and
on its device, in the chain's own dtype; and the package needs no ArviZ at run time, whose versions 0.23 and 1.x differ
in their interface. The tests hold both against ArviZ, on chains that mix, stick, alternate, drift, tie and break.
"""

import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Shaped

from .._base.checks import check_shape, float_array
from .._base.types import Scalar
from ..chain.passive import Chain


def split_rhat(positions: Shaped[ArrayLike, "..."], *, method: str = "rank") -> Float[Array, " d"]:
    """Split R-hat of each coordinate: 1 when the halves of all chains agree, more when they do not.

    With B the variance of the means of the half-chains times their length n, and W the mean of their variances,
    R-hat is sqrt((B/W + n − 1)/n), as in ArviZ.

    Args:
        positions: the chains, of shape (chains, kept, d).
        method: "rank", the larger of R-hat on the normal scores of the values and of their distances from the
            median [1]; or "split", R-hat on the values as they are.

    Returns:
        One number for each coordinate; NaN where a position is not finite, or all are equal.

    Raises:
        ValueError: if `positions` has another shape or fewer than four positions a chain, or `method` is not known.

    References:
        [1] A. Vehtari, A. Gelman, D. Simpson, B. Carpenter, P.-C. Bürkner, "Rank-normalization, folding, and
        localization: an improved R-hat for assessing convergence of MCMC", Bayesian Analysis, 2021.

    Example:
        ```python
        import jax
        import malliavin_jax as mj

        positions = jax.random.normal(jax.random.key(0), (8, 80, 1))  # 8 chains
        mj.diagnostics.split_rhat(positions)  # near [1.]
        ```
    """
    if method not in ("rank", "split"):
        raise ValueError(f"method must be one of rank, split, got {method!r}")
    return _per_coordinate(_rank_rhat if method == "rank" else _plain_rhat, positions)


def effective_sample_size(positions: Shaped[ArrayLike, "..."]) -> Float[Array, " d"]:
    """Bulk effective sample size of each coordinate, as in ArviZ.

    The number of independent draws whose mean is as precise as that of all positions, measured on the normal
    scores of split chains: n/τ with τ = −1 + 2 Σ ρ_t, the sum cut by Geyer's initial monotone sequence.

    Args:
        positions: the chains, of shape (chains, kept, d).

    Returns:
        One number for each coordinate; NaN where a position is not finite.

    Raises:
        ValueError: if `positions` has another shape or fewer than four positions a chain.

    Example:
        ```python
        import jax
        import malliavin_jax as mj

        positions = jax.random.normal(jax.random.key(0), (8, 80, 1))  # 8 chains
        mj.diagnostics.effective_sample_size(positions)  # about 640: these are independent
        ```
    """
    return _per_coordinate(_bulk_ess, positions)


def density_significance(chain: Chain) -> Float[Array, "chains kept"]:
    """The density estimate in units of its standard error at each kept position.

    The gradient estimate divides by the density: small values mark where the chain went beyond what the data carry.

    Args:
        chain: what `passive_langevin` returned.

    Returns:
        density / density_stderr, of shape (chains, kept).

    Example:
        ```python
        import jax
        import jax.numpy as jnp
        import malliavin_jax as mj

        loss = mj.potentials.Quartic()
        learner = mj.ForwardLearner(loss, mj.initial.Normal(), step_size=0.01, gradient_noise=0.5)
        samples = mj.observe(jax.random.key(0), learner, num_episodes=2000, times=[0.4, 0.8])
        chain = mj.passive_langevin(
            jax.random.key(1), mj.MalliavinField(samples), jnp.zeros((8, 1)),
            num_steps=100, burn_in=20, step_size=0.05, inverse_temperature=1.0,
        )
        mj.diagnostics.density_significance(chain).min()
        ```
    """
    return chain.density / chain.density_stderr


# --- the pieces ------------------------------------------------------------------------------------------


def _per_coordinate(statistic: Callable[[Array], Array], positions: Any) -> Array:
    """The statistic of each coordinate, positions checked."""
    x = float_array("positions", positions)
    check_shape("positions", x, (None, None, None), "chains kept d")
    if x.shape[1] < 4:
        raise ValueError(f"positions must hold at least 4 per chain, got shape {x.shape}")
    return _apply(statistic, x)


@eqx.filter_jit
def _apply(statistic: Callable[[Array], Array], x: Float[Array, "chains kept d"]) -> Float[Array, " d"]:
    return jnp.where(jnp.isfinite(x).all((0, 1)), jax.vmap(statistic, in_axes=2)(x), jnp.nan)


def _plain_rhat(x: Float[Array, "chains kept"]) -> Scalar:
    return _rhat(_split(x))


def _rank_rhat(x: Float[Array, "chains kept"]) -> Scalar:
    halves = _split(x)
    folded = jnp.abs(halves - jnp.median(halves))
    return jnp.max(jax.vmap(lambda values: _rhat(_normal_scores(values)))(jnp.stack([halves, folded])))


def _bulk_ess(x: Float[Array, "chains kept"]) -> Scalar:
    return _ess(_normal_scores(_split(x)))


def _split(x: Float[Array, "chains kept"]) -> Float[Array, "halves half"]:
    """First and last half of each chain; the middle position of an odd number is left out."""
    half = x.shape[1] // 2
    return jnp.concatenate([x[:, :half], x[:, -half:]])


def _normal_scores(x: Float[Array, "chains kept"]) -> Float[Array, "chains kept"]:
    """Φ⁻¹((rank − 3/8)/(n + 1/4)), ties sharing their mean rank (Blom's scores)."""
    flat, n = x.ravel(), x.size
    order = jnp.argsort(flat)
    ordered = flat[order]
    place = jnp.arange(n)
    new = jnp.append(jnp.ones(1, bool), ordered[1:] != ordered[:-1])
    first = jax.lax.cummax(jnp.where(new, place, 0))
    last = jax.lax.cummin(jnp.where(jnp.append(new[1:], True), place, n), reverse=True)
    rank = jnp.zeros(n, x.dtype).at[order].set((first + last).astype(x.dtype) / 2 + 1)
    return jax.scipy.special.ndtri((rank - 0.375) / (n + 0.25)).reshape(x.shape)


def _rhat(x: Float[Array, "chains kept"]) -> Scalar:
    n = x.shape[1]
    between, within = n * x.mean(1).var(ddof=1), x.var(1, ddof=1).mean()
    return jnp.where(jnp.ptp(x) > 0, jnp.sqrt((between / within + n - 1) / n), jnp.nan)


def _ess(x: Float[Array, "chains kept"]) -> Scalar:
    chains, n = x.shape
    centred = x - x.mean(1, keepdims=True)
    spectrum = jnp.abs(jnp.fft.rfft(centred, 2 * n, axis=1)) ** 2
    covariance = jnp.fft.irfft(spectrum, 2 * n, axis=1)[:, :n].mean(0) / n
    within = covariance[0] * n / (n - 1)
    total = covariance[0] + (x.mean(1).var(ddof=1) if chains > 1 else 0.0)
    rho = (1 - (within - covariance) / total).at[0].set(1)

    # Pairs of successive correlations are positive and decrease: cut at the first that is not positive.
    even, odd = rho[: n - n % 2].reshape(-1, 2).T
    pairs, number = even + odd, jnp.arange(len(even))
    end = jnp.argmax((pairs <= 0) | (2 * number + 1 >= n - 3))
    monotone = jax.lax.cummin(pairs)
    rest = jnp.where((even[end] > 0) | (pairs[end] >= 0), even[end], 0)
    tau = -1 + 2 * jnp.sum(jnp.where(number < end, monotone, 0)) + rest
    ess = x.size / jnp.maximum(tau, 1 / math.log10(x.size))
    return jnp.where(jnp.ptp(x) < 1e-15, float(x.size), ess)
