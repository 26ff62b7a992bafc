"""The loss, by integrating a gradient field over a grid."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .._base.checks import check_count, check_shape, float_array, is_concrete
from .._base.types import Key
from ..estimate.ratio import Estimate
from .grid import potential_of
from .loss import Loss

# --- from the field --------------------------------------------------------------------------------------


def loss_from_field(field: Callable[..., Estimate], grid: Any, *, key: Key | None = None, batch_size: int = 64) -> Loss:
    """L̂ by integrating an estimated gradient: L̂(α) = ∫ Ĝ in d = 1, least squares over the grid in d = 2, 3.

    - `field`: `field(alpha, *, key) -> Estimate`, evaluated at every grid point, `batch_size` at a time.
    - `grid`: increasing points in d = 1, shape (points,); in d = 2, 3 a tuple of axes.
    - `key`: passed to the field, for fields that draw fresh episodes.

    Each edge between neighbouring points carries the integral of Ĝ along it, by the trapezoid rule with slope
    correction: fourth order in the spacing on an even grid. In d > 1 the edges disagree where Ĝ has a curl;
    the fit is the least-squares one, noisy edges weighing less, and `Loss.curl` reports the disagreement.

    Points where the field is not trusted, and points they cut off from the largest trusted region, hold NaN.

    Standard errors: the field's errors at different α are correlated in a way that its own standard errors do
    not tell, so the bound that holds for any correlation is reported, sd(∫ Ĝ) ≤ ∫ se(Ĝ), along the path from
    the lowest point on which it is least. Fully correlated errors reach it, others stay below; in d > 1 it
    is that of the best single path, which the fit improves on.

    ```python
    integrated = mj.loss_from_field(field, jnp.linspace(-1.0, 1.0, 21))
    integrated.value, integrated.stderr
    ```
    """
    is_tuple = isinstance(grid, tuple | list) and all(np.ndim(axis) > 0 for axis in grid)
    axes = [float_array("grid", axis) for axis in (grid if is_tuple else (grid,))]
    d = len(axes)
    if not 1 <= d <= 3:
        raise ValueError(f"grid must have 1, 2 or 3 axes, got {d}")
    for axis in axes:
        check_shape("grid", axis, (None,))
        if len(axis) < 2 or (is_concrete(axis) and not np.all(np.diff(axis) > 0)):
            raise ValueError(f"grid must hold at least 2 increasing, finite points on each axis, got {axis}")
    check_count("batch_size", batch_size)
    dtype = jnp.result_type(*axes)
    axes = tuple(axis.astype(dtype) for axis in axes)

    shape = tuple(len(axis) for axis in axes)
    estimate = _evaluate(field, jnp.stack(jnp.meshgrid(*axes, indexing="ij"), -1).reshape(-1, d), key, batch_size)
    gradient, stderr = (leaf.astype(dtype).reshape(*shape, d) for leaf in (estimate.value, estimate.stderr))
    usable = estimate.trusted.reshape(shape) & jnp.all(jnp.isfinite(gradient) & jnp.isfinite(stderr), -1)
    if is_concrete(usable) and not np.any(usable):
        raise ValueError("grid must hold points where the field is trusted, got none")
    fit = potential_of(axes, gradient, stderr, usable)
    if d == 1:
        return Loss(axes[0], fit.value, fit.stderr)
    return Loss(axes, fit.value, fit.stderr, fit.curl, fit.curl_expected)


@eqx.filter_jit
def _evaluate(field: Callable[..., Estimate], points: Float[Array, "n d"], key: Any, batch_size: int) -> Estimate:
    estimate = jax.lax.map(lambda alpha: field(alpha, key=key), points, batch_size=batch_size)
    if estimate.value.shape != points.shape:
        raise ValueError(
            f"field must be of dimension {points.shape[1]}, that of the grid, got {estimate.value.shape[1:]}"
        )
    return estimate
