"""The loss, by integrating a gradient over a grid: a field's, or estimates that are already there."""

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


def loss_from_field(field: Callable[..., Estimate], grid: Any, *, key: Key | None = None, chunk_size: int = 64) -> Loss:
    """L̂ by integrating an estimated gradient: L̂(α) = ∫ Ĝ in d = 1, least squares over the grid in d = 2, 3.

    The field is evaluated at every grid point; the rest is `loss_from_estimates`.

    Args:
        field: `field(alpha, *, key) -> Estimate`.
        grid: increasing points in d = 1, shape (points,); in d = 2, 3 a tuple of axes.
        key: passed to the field, for fields that draw fresh episodes.
        chunk_size: how many grid points are evaluated at a time.

    Returns:
        The loss on the grid, NaN where the field is not trusted or where such points cut it off.

    Raises:
        ValueError: if an axis of `grid` is not increasing, if `field` is of another dimension than `grid`, or if it is
            trusted nowhere on it.

    Example:
        ```python
        import jax
        import jax.numpy as jnp
        import malliavin_jax as mj

        loss = mj.potentials.Quartic()
        learner = mj.ForwardLearner(loss, mj.initial.Normal(), step_size=0.01, gradient_noise=0.5)
        samples = mj.observe(jax.random.key(0), learner, num_episodes=2000, times=[0.4, 0.8])
        integrated = mj.loss_from_field(mj.MalliavinField(samples), jnp.linspace(-1.0, 1.0, 21))
        integrated.value, integrated.stderr
        ```
    """
    axes = axes_of(grid)
    chunk_size = check_count("chunk_size", chunk_size)
    points = jnp.stack(jnp.meshgrid(*axes, indexing="ij"), -1).reshape(-1, len(axes))
    return loss_from_estimates(_evaluate(field, points, key, chunk_size), axes)


def loss_from_estimates(estimates: Estimate, grid: Any) -> Loss:
    """L̂ from estimates of the gradient at the points of a grid: their integral in d = 1, least squares in d = 2, 3.

    Each edge between neighbouring points carries the integral of Ĝ along it, by the trapezoid rule with slope
    correction: fourth order in the spacing on an even grid. In d > 1 the edges disagree where Ĝ has a curl;
    the fit is the least-squares one, noisy edges weighing less, and `Loss.curl` reports the disagreement.

    Points where the estimate is not trusted, and points they cut off from the largest trusted region, hold NaN.

    Standard errors: the errors at different α are correlated in a way that the standard errors themselves do
    not tell, so the bound that holds for any correlation is reported, sd(∫ Ĝ) ≤ ∫ se(Ĝ), along the path from
    the lowest point on which it is least. Fully correlated errors reach it, others stay below; in d > 1 it
    is that of the best single path, which the fit improves on.

    Args:
        estimates: an `Estimate` whose leaves have one leading axis, the q points of the grid, in the order of
            `jnp.stack(jnp.meshgrid(*axes, indexing="ij"), -1).reshape(-1, d)`: the last axis runs fastest. `value` and
            `stderr` are (q, d), `trusted` is (q,). So `jax.vmap(field)(points)` and `Accumulator.estimate()` give it.
        grid: increasing points in d = 1, shape (points,); in d = 2, 3 a tuple of axes.

    Returns:
        The loss on the grid.

    Raises:
        ValueError: if an axis of `grid` is not increasing, if the estimates are not those of its points, or if none of
            them is trusted.

    Example:
        ```python
        import jax
        import jax.numpy as jnp
        import malliavin_jax as mj

        axes = (jnp.linspace(-1.0, 1.0, 21), jnp.linspace(-1.5, 1.5, 31))
        points = jnp.stack(jnp.meshgrid(*axes, indexing="ij"), -1).reshape(-1, 2)
        estimates = jax.vmap(mj.TrueField(mj.potentials.Quartic()))(points)
        integrated = mj.loss_from_estimates(estimates, axes)
        integrated.value.shape, integrated.curl  # (21, 31), near 0
        ```
    """
    axes = axes_of(grid)
    d, shape, dtype = len(axes), tuple(len(axis) for axis in axes), axes[0].dtype
    _check_estimates(estimates, shape)
    gradient, stderr = (leaf.astype(dtype).reshape(*shape, d) for leaf in (estimates.value, estimates.stderr))
    usable = estimates.trusted.reshape(shape) & jnp.all(jnp.isfinite(gradient) & jnp.isfinite(stderr), -1)
    if is_concrete(usable) and not np.any(usable):
        raise ValueError("grid must hold points where the field is trusted, got none")
    fit = potential_of(axes, gradient, stderr, usable)
    if d == 1:
        return Loss(axes[0], fit.value, fit.stderr)
    return Loss(axes, fit.value, fit.stderr, fit.curl, fit.curl_expected)


def axes_of(grid: Any) -> tuple[Float[Array, " _"], ...]:
    """The axes of a grid, of one dtype, from points or from a tuple of axes."""
    is_tuple = isinstance(grid, tuple | list) and all(np.ndim(axis) > 0 for axis in grid)
    axes = [float_array("grid", axis) for axis in (grid if is_tuple else (grid,))]
    if not 1 <= len(axes) <= 3:
        raise ValueError(f"grid must have 1, 2 or 3 axes, got {len(axes)}")
    for axis in axes:
        check_shape("grid", axis, (None,))
        if len(axis) < 2 or (is_concrete(axis) and not np.all(np.diff(axis) > 0)):
            raise ValueError(f"grid must hold at least 2 increasing, finite points on each axis, got {axis}")
    dtype = jnp.result_type(*axes)
    return tuple(axis.astype(dtype) for axis in axes)


def _check_estimates(estimates: Estimate, shape: tuple[int, ...]) -> None:
    """Refuse estimates that are not those of the points of a grid of this shape."""
    points, d = int(np.prod(shape)), len(shape)
    axes = " × ".join(str(n) for n in shape)
    for name, expected in (("value", (points, d)), ("stderr", (points, d)), ("trusted", (points,))):
        got = np.shape(getattr(estimates, name))
        if got != expected:
            raise ValueError(
                f"estimates.{name} must have shape {expected}, one row for each point of a grid of {axes} points"
                f"{' and d columns' if len(expected) > 1 else ''}, got {got}"
            )


@eqx.filter_jit
def _evaluate(field: Callable[..., Estimate], points: Float[Array, "n d"], key: Any, chunk_size: int) -> Estimate:
    estimate = jax.lax.map(lambda alpha: field(alpha, key=key), points, batch_size=chunk_size)
    if estimate.value.shape != points.shape:
        raise ValueError(
            f"field must be of dimension {points.shape[1]}, that of the grid, got {estimate.value.shape[1:]}"
        )
    return estimate
