"""A recovered loss on a grid."""

import equinox as eqx
from jaxtyping import Array, Float

from .._base.types import Scalar


class Loss(eqx.Module):
    """A loss on a grid, fixed by min L̂ = 0: only differences of a loss can be seen.

    Attributes:
        grid: the points in d = 1, a tuple of axes in d > 1.
        value: L̂ at the grid points, in the units of the loss; NaN where the data say nothing.
        stderr: standard error of L̂ less L̂ at its lowest point (so zero there); infinite where `value` is NaN.
        curl: of a loss integrated from a field in d > 1, the part of the field that is no gradient (the residual of
            the fit) relative to the field, as root mean squares; for a true gradient it is the error of the grid.
        curl_expected: roughly, the curl that the field's standard errors alone would cause.

    Example:
        ```python
        import jax.numpy as jnp
        import malliavin_jax as mj

        field = mj.TrueField(mj.potentials.Quartic())
        integrated = mj.loss_from_field(field, jnp.linspace(-1.0, 1.0, 21))
        integrated.grid[jnp.nanargmin(integrated.value)]  # where it is lowest: 0
        ```
    """

    grid: Float[Array, " points"] | tuple[Float[Array, " _"], ...]
    value: Float[Array, "..."]
    stderr: Float[Array, "..."]
    curl: Scalar | None = None
    curl_expected: Scalar | None = None
