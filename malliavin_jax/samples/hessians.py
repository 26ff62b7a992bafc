"""Hessians of recorded episodes: full, from diagonals, or from secants in one dimension."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from .._base.checks import check_shape, is_concrete

# Secants over the shortest tenth of the moves may be this much larger than over the longest: with exact gradients
# the ratio is 1, with noise of a sixteenth of a step's change of gradient about 1.5, with noise alone about 25.
_ROUGHNESS = 1.5


def full_hessians(hessian: Any, x: Array, gradient: Array, last_steps: Array) -> Array:
    """Hessians (episodes, points, d, d) from full ones, from their diagonals, or, in one dimension, from secants."""
    if hessian is None:
        return secant_hessians(x, gradient, last_steps)
    if hessian.ndim == 3:
        check_shape("hessian", hessian, x.shape)
        return hessian[..., None] * jnp.eye(x.shape[-1], dtype=hessian.dtype)[None, None]
    check_shape("hessian", hessian, (*x.shape, x.shape[-1]))
    return hessian


def secant_hessians(
    x: Float[Array, "episodes points 1"],
    gradient: Float[Array, "episodes points 1"],
    last_steps: Int[Array, " episodes"],
) -> Float[Array, "episodes points 1 1"]:
    """L'' along recorded one-dimensional paths, from exact gradients alone.

    At row k it is the slope at X_k of the parabola through the gradients at three neighbouring rows (k − 1, k, k + 1;
    at the ends of an episode the three last), so its error is L''''/6 times the product of two moves. Noise of size ν
    in the gradients would become ν/|ΔX|, of infinite variance: noisy gradients are refused.
    """
    if x.shape[-1] > 1:
        raise ValueError(
            f"hessian must be given in {x.shape[-1]} dimensions: secants along a path see one direction only. "
            "Ways out: record its diagonal, of shape (episodes, points, d), which is exact for a loss that is a sum "
            "over coordinates; hand in the Hessians of a model fitted to the gradients; or have the learner take "
            "finite differences of its gradient where it stands"
        )
    _check_smooth(x, gradient, last_steps)

    def episode(x: Float[Array, " points"], g: Float[Array, " points"], last_step: Int[Array, ""]) -> Array:
        rows = jnp.arange(x.shape[0], dtype=last_step.dtype)
        middle = jnp.clip(rows, 1, jnp.maximum(last_step - 1, 1))
        (xa, ga), (xb, gb), (xc, gc) = ((x[i], g[i]) for i in (middle - 1, middle, middle + 1))

        def slope(dg: Array, dx: Array) -> Array:
            return jnp.where(dx != 0, dg / jnp.where(dx != 0, dx, 1), 0)

        before, after = slope(gb - ga, xb - xa), slope(gc - gb, xc - xb)
        # Two rows at one place (a float32 log meets some) leave a single secant, as does an episode of one step.
        parabola = (xa != xb) & (xb != xc) & (xa != xc) & (last_step >= 2)
        bend = jnp.where(parabola, slope(after - before, xc - xa), 0)
        line = jnp.where((xa != xb) | (last_step < 2), before, after)
        return jnp.where(parabola, before + bend * ((x - xa) + (x - xb)), line)

    return jax.vmap(episode)(x[..., 0], gradient[..., 0], last_steps)[..., None, None]


def _check_smooth(x: Array, gradient: Array, last_steps: Array) -> None:
    """Refuse gradients that change as much over a short move as over a long one."""
    if not is_concrete(x, gradient, last_steps):
        return
    slopes = secant_slopes(x, gradient, last_steps)
    if slopes is not None and slopes.noisy:
        raise ValueError(
            f"hessian must be given: the gradients are too noisy for secants (|Δg|/|ΔX| has median {slopes.short:.3g} "
            f"over the shortest tenth of the moves, {slopes.long:.3g} over the longest; without noise these are equal)"
        )


class SecantSlopes(NamedTuple):
    """Medians of |Δg|/|ΔX| over the shortest and over the longest tenth of the moves: equal for exact gradients."""

    short: float
    long: float

    @property
    def noisy(self) -> bool:
        """Whether the gradients are too noisy for secants."""
        return self.short > _ROUGHNESS * self.long


def secant_slopes(x: Any, gradient: Any, last_steps: Any) -> SecantSlopes | None:
    """How steep the secants along recorded one-dimensional paths are; None with too few moves to tell."""
    seen = np.arange(1, x.shape[1])[None, :] <= np.asarray(last_steps)[:, None]
    moves, changes = (np.abs(np.diff(np.asarray(array)[..., 0], axis=1))[seen] for array in (x, gradient))
    order = np.argsort(moves)
    order = order[moves[order] > 0]
    tenth = len(order) // 10
    if tenth < 20:
        return None
    short, long = (float(np.median(changes[part] / moves[part])) for part in (order[:tenth], order[-tenth:]))
    return SecantSlopes(short, long)
