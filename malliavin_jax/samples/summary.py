"""What every estimator asks of samples: box, mean, deviation, spread."""

import jax
import jax.numpy as jnp

from .._base.types import Scalar, Vector
from .samples import Samples


def bounds(samples: Samples) -> tuple[Vector, Vector]:
    """The smallest box that holds every observed position."""
    seen = samples.observed[..., None]
    low = jnp.min(jnp.where(seen, samples.x, jnp.inf), (0, 1))
    return low, jnp.max(jnp.where(seen, samples.x, -jnp.inf), (0, 1))


@jax.jit
def _mean_and_deviation(samples: Samples) -> tuple[Vector, Vector]:
    where = samples.observed[:, :, None]
    count = jnp.sum(samples.observed).astype(samples.x.dtype)
    x = jnp.where(where, samples.x, 0.0)
    mean = jnp.sum(x, (0, 1)) / count
    centred = jnp.where(where, x - mean[None, None, :], 0.0)
    return mean, jnp.sqrt(jnp.sum(centred**2, (0, 1)) / count)


def spread(samples: Samples) -> Scalar:
    """Standard deviation of the observed positions, averaged over the axes."""
    seen = samples.observed[..., None]
    count = jnp.maximum(jnp.sum(seen), 1).astype(samples.x.dtype)
    x = jnp.where(seen, samples.x, 0)
    mean = jnp.sum(x, (0, 1)) / count
    centred = jnp.where(seen, samples.x - mean[None, None, :], 0)
    variance = jnp.sum(centred**2) / (count * samples.dim)
    return jnp.sqrt(jnp.maximum(variance, jnp.finfo(variance.dtype).tiny))
