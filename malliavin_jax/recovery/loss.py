"""A recovered loss on a grid."""

import equinox as eqx
import numpy as np
from jaxtyping import Array, Float

from .._base.checks import has_numbers
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

    def __repr__(self) -> str:
        if not has_numbers(self):
            return super().__repr__()
        axes = [np.asarray(axis) for axis in (self.grid if isinstance(self.grid, tuple) else (self.grid,))]
        value, stderr = np.asarray(self.value), np.asarray(self.stderr)
        size = " × ".join(str(len(axis)) for axis in axes)
        places = ", ".join(f"{float(axis[0]):.3g} to {float(axis[-1]):.3g}" for axis in axes)
        known = np.isfinite(value)
        if value.ndim != len(axes) or not known.any():
            return super().__repr__() if known.any() else f"Loss({size} points, {places}: nothing known)"
        lowest = np.unravel_index(np.nanargmin(value), value.shape)
        spacings = [float(np.max(np.abs(axis))) * 1e-6 for axis in axes]  # what is nearer to 0 is its rounding
        near = [float(axis[i]) for axis, i in zip(axes, lowest, strict=True)]
        where = ", ".join(f"{0.0 if abs(at) < tiny else at:.3g}" for at, tiny in zip(near, spacings, strict=True))
        notes = [
            f"lowest at {where}",
            f"highest {np.nanmax(value):.4g}",
            f"median stderr {np.median(stderr[known]):.2g}",
        ]
        notes += [f"{known.size - known.sum()} of {known.size} points without data"] if not known.all() else []
        if self.curl is not None and self.curl_expected is not None:
            notes.append(f"curl {float(self.curl):.2g} ({float(self.curl_expected):.2g} expected)")
        return f"Loss({size} points, {places}: {', '.join(notes)})"
