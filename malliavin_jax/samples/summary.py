"""What estimators ask of samples as a whole: their box, their mean and deviation, their spread.

Unobserved points count nowhere. Arrays that are here and now are looked at with NumPy: there is nothing to compile.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from .._base import host
from .._base.types import Numbers, Scalar, Vector
from .samples import Samples

CENTRAL = 0.9  # the part of the positions, the nearest to their mean, at which choices are made


def box(samples: Samples) -> tuple[Vector, Vector]:
    """Lower and upper corner of the smallest box that holds every observed position."""
    xp, x, seen = _arrays(samples.x, samples.observed)
    low = xp.min(xp.where(seen, x, xp.inf), (0, 1))
    high = xp.max(xp.where(seen, x, -xp.inf), (0, 1))
    return host.to_device(low), host.to_device(high)


def mean_and_deviation(samples: Samples) -> tuple[Vector, Vector]:
    """Mean and standard deviation of the observed positions, one of each for every axis."""
    xp, count, mean, centred = _centred(samples)
    deviation = xp.sqrt(xp.sum(centred**2, (0, 1)) / count)
    return host.to_device(mean), host.to_device(deviation)


def distance_from_mean(samples: Samples, x: Float[Numbers, "*points d"]) -> Float[Numbers, "*points"]:
    """How far places are from the mean of the observed positions, in their deviations along each axis."""
    xp = host.module_of(x)
    mean, deviation = (xp.asarray(each).reshape(*(1,) * (x.ndim - 1), -1) for each in mean_and_deviation(samples))
    away = (x - mean) / (deviation + xp.finfo(x.dtype).tiny)
    return xp.sqrt(xp.sum(away**2, -1))


def central_radius(samples: Samples) -> Scalar:
    """The distance from their mean within which the central nine tenths of the observed positions are."""
    xp, x, seen = _arrays(samples.x, samples.observed)
    distance = xp.where(seen[..., 0], distance_from_mean(samples, x), xp.nan).ravel()
    return host.to_device(xp.nanquantile(distance, CENTRAL), samples.x.dtype)


def spread(samples: Samples) -> Scalar:
    """One length for all axes: the root of the mean variance of the coordinates, never quite 0."""
    xp, count, _, centred = _centred(samples)
    variance = xp.sum(centred**2) / (count * samples.dim)
    return host.to_device(xp.sqrt(xp.maximum(variance, xp.finfo(variance.dtype).tiny)))


def masked_mean(
    values: Float[Array, "episodes times m"], observed: Bool[Array, "episodes times"]
) -> Float[Array, " m"]:
    """The mean of `values` over the observed points (0 where there are none)."""
    return host.to_device(_mean(*_arrays(values, observed)))


def points_and_scale(samples: Samples) -> tuple[Array, Scalar]:
    """The number of observed points, and the root mean square of the gradients' lengths."""
    xp, gradient, seen = _arrays(samples.gradient, samples.observed)
    return host.to_device(xp.sum(seen)), host.to_device(xp.sqrt(xp.sum(_mean(xp, gradient**2, seen))))


def _arrays(values: Array, observed: Array) -> tuple[Any, Any, Any]:
    """What to compute with, the values, and where they are observed, with an axis more."""
    xp = np if host.on_host(values, observed) else jnp
    return xp, xp.asarray(values), xp.asarray(observed)[:, :, None]


def _mean(xp: Any, values: Any, seen: Any) -> Any:
    return xp.sum(xp.where(seen, values, 0), (0, 1)) / xp.maximum(xp.sum(seen), 1).astype(values.dtype)


def _centred(samples: Samples) -> tuple[Any, Any, Any, Any]:
    """What to compute with, the number of observed points, their mean, and positions minus it (0 where unobserved)."""
    xp, x, seen = _arrays(samples.x, samples.observed)
    count = xp.maximum(xp.sum(seen), 1).astype(x.dtype)
    mean = _mean(xp, x, seen)
    return xp, count, mean, xp.where(seen, x - mean[None, None, :], 0)
