"""The length of a localizer.

Every length is unbiased, so nothing is traded: the one with the least *estimated variance* is taken, averaged over
places α in the way that the caller asks for.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from .._base.types import Scalar, Vector
from .localizers import AbstractLocalizer
from .ratio import ratio_estimate
from .sums import Sums


class BestLength(NamedTuple):
    """A length, and the estimated variance at each α that it gives, summed over the components of ℓ."""

    length: Scalar
    variance: Float[Array, " alphas"]


def length_of_least_variance(
    sums: Callable[[Vector, AbstractLocalizer], Sums],
    localizer: Callable[[Scalar], AbstractLocalizer],
    *,
    lengths: Float[Array, " lengths"],
    alphas: Float[Array, "alphas d"],
    average: Callable[[Float[Array, "lengths alphas"]], Float[Array, " lengths"]],
) -> BestLength:
    """The best of `lengths` for `localizer(length)`, with `sums(alpha, localizer)` the localized sums at α.

    `average` makes one number a length of its variances at each of `alphas`; the length where it is least is taken.
    """

    def variances(length: Scalar) -> Float[Array, " alphas"]:
        def at(alpha: Vector) -> Scalar:
            # Neither the value nor its standard error depends on the numbers of episodes and points.
            return jnp.sum(ratio_estimate(sums(alpha, localizer(length)), 1, 1, jnp.asarray(True)).stderr ** 2)

        return jax.vmap(at)(alphas)

    found = lax.map(variances, lengths)
    best = jnp.argmin(average(found))
    return BestLength(lengths[best], found[best])
