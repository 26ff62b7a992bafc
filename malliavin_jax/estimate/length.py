"""The length of a localizer.

Every length is unbiased, so nothing is traded: the one with the least *estimated variance* is taken, averaged over
places α in the way that the caller asks for.
"""

from collections.abc import Callable
from typing import NamedTuple

from jaxtyping import Array, Float

from .._base.host import each
from .._base.types import Numbers, Scalar


class BestLength(NamedTuple):
    """A length, and the estimated variance at each α that it gives, summed over the components of ℓ."""

    length: Scalar
    variance: Float[Array, " alphas"]


def length_of_least_variance(
    variances: Callable[[Float[Numbers, ""]], Float[Numbers, " alphas"]],
    *,
    lengths: Float[Numbers, " lengths"],
    average: Callable[[Float[Numbers, "lengths alphas"]], Float[Numbers, " lengths"]],
) -> BestLength:
    """The best of `lengths`, with `variances(length)` the estimated variances at some places.

    `average` makes one number a length of these; the length where it is least is taken.
    """
    found = each(variances, lengths)
    best = average(found).argmin()
    return BestLength(lengths[best], found[best])
