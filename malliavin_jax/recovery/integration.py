"""The loss, by integrating a gradient over a grid: a field's, or estimates that are already there."""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from .._base.checks import check_count, check_shape, float_array, is_concrete
from .._base.types import Key
from ..estimate.field import check_field
from ..estimate.ratio import Estimate
from .grid import potential_of
from .loss import Loss
from .quadrature import Edges, edges_of

_PIECES = {1: 40, 2: 20, 3: 10}  # into which an axis is divided at least, by dimension


def loss_from_field(
    field: Callable[..., Estimate],
    grid: Any,
    *,
    key: Key | None = None,
    chunk_size: int = 64,
    pieces: int | None = None,
) -> Loss:
    """L̂ by integrating an estimated gradient: L̂(α) = ∫ Ĝ in d = 1, least squares over the grid in d = 2, 3.

    The field is evaluated at every grid point and, on a coarse grid, at points between them along its edges; the rest
    is `loss_from_estimates`. An edge with a point that is not trusted joins nothing.

    Args:
        field: `field(alpha, *, key) -> Estimate`.
        grid: increasing points in d = 1, shape (points,); in d = 2, 3 a tuple of axes.
        key: passed to the field, for fields that draw fresh episodes.
        chunk_size: how many grid points are evaluated at a time.
        pieces: how many pieces each edge is integrated in; 1 evaluates the field on the grid alone. None divides the
            edges of a coarse axis: into at least 40 pieces in all on one axis, 20 and 10 on each of two and three.

    Returns:
        The loss on the grid, NaN where the field is not trusted or where such points cut it off.

    Raises:
        ValueError: if `pieces` is no positive whole number, if an axis of `grid` is not increasing, if `field` is of
            another dimension than `grid`, or if it is trusted nowhere on it.

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
    check_field(field)
    chunk_size = check_count("chunk_size", chunk_size)
    least = _PIECES[len(axes)]
    divided = [-(-least // (len(axis) - 1)) if pieces is None else check_count("pieces", pieces) for axis in axes]
    try:
        on_grid = _on(field, axes, key, chunk_size)
    except ValueError as error:
        if not str(error).startswith("alpha must have shape"):
            raise
        raise ValueError(f"grid must have an axis for each dimension of the field, got {len(axes)}: {error}") from error
    if all(number == 1 for number in divided):
        return loss_from_estimates(on_grid, axes)
    usable = _gradients_on(axes, on_grid).usable
    _check_trusted(usable)
    edges = []
    for i, number in enumerate(divided):
        finer = tuple(_divided(axis, number) if i == j else axis for j, axis in enumerate(axes))
        found = _gradients_on(finer, on_grid if number == 1 else _on(field, finer, key, chunk_size))
        edges.append(edges_of(i, finer[i], found.gradient[..., i], found.stderr[..., i], found.usable, number))
    return _loss(axes, tuple(edges), usable)


def loss_from_estimates(estimates: Estimate, grid: Any) -> Loss:
    """L̂ from estimates of the gradient at the points of a grid: their integral in d = 1, least squares in d = 2, 3.

    Each edge between neighbouring points carries the integral of Ĝ along it, of the cubic through four points: fourth
    order in the spacing on an even grid. In d > 1 the edges disagree where Ĝ has a curl;
    the fit is the least-squares one, noisy edges weighing less, and `Loss.curl` reports the disagreement.

    Points where the estimate is not trusted, and points they cut off from the largest trusted region, hold NaN.

    Standard errors: the errors at different α are correlated in a way that the standard errors themselves do
    not tell, so the bound that holds for any correlation is reported, sd(∫ Ĝ) ≤ ∫ se(Ĝ), along the path from
    the lowest point on which it is least. Fully correlated errors reach it, others stay below; in d > 1 it
    is that of the best single path, which the fit improves on. The error of the integration rule itself, estimated
    from how the higher differences of Ĝ change along the edges, is added along the path, where it stands out of the
    noise: on a coarse grid it is what matters.

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
    _check_estimates(estimates, tuple(len(axis) for axis in axes))
    gradient, stderr, usable = _gradients_on(axes, estimates)
    _check_trusted(usable)
    edges = tuple(edges_of(i, axis, gradient[..., i], stderr[..., i], usable) for i, axis in enumerate(axes))
    return _loss(axes, edges, usable)


class _Gradients(NamedTuple):
    """Estimates in the shape of a grid."""

    gradient: Float[Array, "... d"]
    stderr: Float[Array, "... d"]
    usable: Bool[Array, "..."]


def _gradients_on(axes: tuple[Array, ...], estimates: Estimate) -> _Gradients:
    d, shape, dtype = len(axes), tuple(len(axis) for axis in axes), axes[0].dtype
    gradient, stderr = (leaf.astype(dtype).reshape(*shape, d) for leaf in (estimates.value, estimates.stderr))
    usable = estimates.trusted.reshape(shape) & jnp.all(jnp.isfinite(gradient) & jnp.isfinite(stderr), -1)
    return _Gradients(gradient, stderr, usable)


def _check_trusted(trusted: Array) -> None:
    if is_concrete(trusted) and not np.any(trusted):
        raise ValueError("grid must hold points where the field is trusted, got none")


def _loss(axes: tuple[Array, ...], edges: tuple[Edges, ...], usable: Array) -> Loss:
    fit = potential_of(edges, usable)
    if len(axes) == 1:
        return Loss(axes[0], fit.value, fit.stderr)
    return Loss(axes, fit.value, fit.stderr, fit.curl, fit.curl_expected)


def _divided(axis: Float[Array, " _"], number: int) -> Float[Array, " _"]:
    """The axis with each of its intervals in so many equal pieces; its own points are kept to the bit."""
    shares = jnp.arange(number, dtype=axis.dtype) / number
    inner = axis[:-1, None] + jnp.diff(axis)[:, None] * shares[None, :]
    return jnp.append(inner.reshape(-1), axis[-1])


def _on(field: Callable[..., Estimate], axes: tuple[Array, ...], key: Key | None, chunk_size: int) -> Estimate:
    points = jnp.stack(jnp.meshgrid(*axes, indexing="ij"), -1).reshape(-1, len(axes))
    return _evaluate(field, points, key, chunk_size)


def axes_of(grid: Any) -> tuple[Float[Array, " _"], ...]:
    """The axes of a grid, of one dtype, from points or from a tuple of axes."""
    is_tuple = isinstance(grid, tuple | list) and all(np.ndim(axis) > 0 for axis in grid)
    axes = [float_array("grid", axis) for axis in (grid if is_tuple else (grid,))]
    if not 1 <= len(axes) <= 3:
        raise ValueError(f"grid must have 1, 2 or 3 axes, got {len(axes)}")
    for axis in axes:
        check_shape("grid", axis, (None,), "points")
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
