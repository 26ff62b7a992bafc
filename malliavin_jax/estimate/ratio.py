"""An estimate with its error bars, as a ratio of localized sums."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from .._base.types import Flag, Scalar
from .sums import Sums

TRUSTED_FROM = 3.0  # a density this many standard errors above zero carries an estimate
EPISODES_FROM = 5.0  # and no fewer episodes of equal weight than this


class Estimate(eqx.Module):
    """An estimate at one point α, with its error bars.

    `jax.vmap(field)(alphas)`, `jax.lax.map(field, alphas)` and an `Accumulator` return estimates at many α in one such
    object: every array then has the axes of the α in front, `value` and `stderr` of shape (α, m), the others (α,).

    Attributes:
        value: the conditional expectation E[ℓ | X_s = α], one entry per component of ℓ.
        stderr: its standard error, in the units of `value`.
        density: the estimated density p̂_s(α), in 1/(units of x)^d, averaged over the conditioning times.
        density_stderr: its standard error.
        trusted: False where the data cannot carry the estimate (α outside the observed region, or a density
            not significantly positive).

    Example:
        ```python
        import jax
        import jax.numpy as jnp
        import malliavin_jax as mj

        field = mj.TrueField(mj.potentials.Quartic())
        estimates = jax.vmap(field)(jnp.linspace(-1.0, 1.0, 9)[:, None])  # at nine α at once
        low, high = (estimates.value + z * estimates.stderr for z in (-1.96, 1.96))  # each (9, 1)
        ```
    """

    value: Float[Array, " m"]
    stderr: Float[Array, " m"]
    density: Scalar
    density_stderr: Scalar
    trusted: Flag


def ratio_estimate(
    sums: Sums, episodes: Array | int, points: Array | int, inside: Flag, scale: Scalar | float = 0.0
) -> Estimate:
    """The ratio with its standard errors, `points` being the number of observed points in all `episodes`.

    `scale` is the size of the values averaged: no standard error is below their rounding.
    """
    tiny, points = jnp.finfo(sums.w.dtype).tiny, jnp.asarray(points, sums.w.dtype)
    empty = jnp.abs(sums.w) <= tiny  # nothing to divide by; a NaN is not empty, and stays one
    safe = jnp.where(empty, 1, sums.w)
    value = jnp.where(empty, 0, sums.n / safe)
    variance = jnp.maximum(sums.shifted(-value).nn, 0)  # Σ (n − ρ w)²
    # Of the values as they were computed: those of a model of many terms are right to some units of rounding.
    rounding = 16 * jnp.finfo(sums.w.dtype).eps * (jnp.abs(value) + scale)
    stderr = jnp.where(empty, jnp.inf, jnp.sqrt(variance / safe**2 + rounding**2))
    density = sums.w / points
    spread = jnp.maximum(sums.ww - sums.w**2 / episodes, 0)
    density_stderr = jnp.sqrt(spread) / points
    # Of very few episodes the spread may be 0 by chance, and says nothing: so many must carry the estimate.
    enough = sums.w**2 >= EPISODES_FROM * sums.ww
    trusted = inside & enough & (density > TRUSTED_FROM * density_stderr)
    return Estimate(value, stderr, density, density_stderr, trusted)
