"""What estimators ask of samples as a whole: their box, their mean and deviation, their spread.

Unobserved points count nowhere.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from .._base.types import Scalar, Vector
from .samples import Samples


def box(samples: Samples) -> tuple[Vector, Vector]:
    """Lower and upper corner of the smallest box that holds every observed position."""
    seen = samples.observed[..., None]
    low = jnp.min(jnp.where(seen, samples.x, jnp.inf), (0, 1))
    return low, jnp.max(jnp.where(seen, samples.x, -jnp.inf), (0, 1))


@jax.jit
def mean_and_deviation(samples: Samples) -> tuple[Vector, Vector]:
    """Mean and standard deviation of the observed positions, one of each for every axis."""
    count, mean, centred = _centred(samples)
    return mean, jnp.sqrt(jnp.sum(centred**2, (0, 1)) / count)


def spread(samples: Samples) -> Scalar:
    """One length for all axes: the root of the mean variance of the coordinates, never quite 0."""
    count, _, centred = _centred(samples)
    variance = jnp.sum(centred**2) / (count * samples.dim)
    return jnp.sqrt(jnp.maximum(variance, jnp.finfo(variance.dtype).tiny))


def masked_mean(
    values: Float[Array, "episodes times m"], observed: Bool[Array, "episodes times"]
) -> Float[Array, " m"]:
    """The mean of `values` over the observed points (0 where there are none)."""
    seen = observed[:, :, None]
    return jnp.sum(jnp.where(seen, values, 0), (0, 1)) / jnp.maximum(jnp.sum(seen), 1).astype(values.dtype)


def _centred(samples: Samples) -> tuple[Scalar, Vector, Float[Array, "episodes times d"]]:
    """The number of observed points, their mean, and the positions minus it (0 where unobserved)."""
    seen = samples.observed[:, :, None]
    count = jnp.maximum(jnp.sum(seen), 1).astype(samples.x.dtype)
    mean = masked_mean(samples.x, samples.observed)
    return count, mean, jnp.where(seen, samples.x - mean[None, None, :], 0)
