"""A diffusion on a uniform grid of times, as a function of its Brownian increments."""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from .._base.checks import check_count, check_positive, check_shape, is_concrete
from .._base.small_tensors import matmul
from .._base.types import Key, Scalar, Vector


class Trajectory(eqx.Module):
    """One path: X at the times t_0 = 0, …, t_n = T, and the increments ΔW that made it.

    A functional is any function of it. One that goes its own way from the increments may use `dw` and leave `x`.

    Attributes:
        t: the times, of shape (points,).
        x: the states, of shape (points, d).
        dw: the increments, of shape (steps, noises), steps = points − 1.

    Example:
        ```python
        import jax.numpy as jnp
        from malliavin_jax import wiener

        brownian = wiener.Diffusion(
            lambda x, t: jnp.zeros(1), lambda x, t: jnp.ones((1, 1)), jnp.zeros(1), step_size=0.25, num_steps=4
        )
        one = brownian.solve(jnp.zeros(1), jnp.ones((4, 1)))
        one.t, one.x[:, 0]  # 0, ¼, …, 1 and 0, 1, …, 4
        ```
    """

    t: Float[Array, " points"]
    x: Float[Array, "points d"]
    dw: Float[Array, "steps noises"]


class Diffusion(eqx.Module):
    """dX = b(X, t) dt + σ(X, t) dW, as the chain X_{k+1} = X_k + ε b(X_k, t_k) + σ(X_k, t_k) ΔW_k (Euler–Maruyama).

    Args:
        drift: b(x, t) of shape (d,).
        diffusion: σ(x, t) of shape (d, noises); it may depend on x.
        initial: X_0, an array of shape (d,), or a function key ↦ X_0 for a random start, independent of W. Its dtype
            is that of the simulation.
        step_size: ε, positive.
        num_steps: n, so that T = nε.

    Raises:
        ValueError: if `step_size` is not positive or `num_steps` is not a whole number of at least 1. Shapes that do
            not fit together are refused by `weigh` and `greeks`.

    Example:
        ```python
        import jax
        import jax.numpy as jnp
        from malliavin_jax import wiener

        brownian = wiener.Diffusion(
            lambda x, t: jnp.zeros(1), lambda x, t: jnp.ones((1, 1)), jnp.zeros(1), step_size=0.25, num_steps=4
        )
        path = brownian.solve(*brownian.draw(jax.random.key(0)))
        ```
    """

    drift: Callable[[Vector, Scalar], Vector]
    diffusion: Callable[[Vector, Scalar], Float[Array, "d noises"]]
    initial: Vector | Callable[[Key], Vector]
    step_size: float | Scalar
    num_steps: int = eqx.field(static=True)

    def __check_init__(self):
        check_positive("step_size", self.step_size)
        check_count("num_steps", self.num_steps)

    def start(self, key: Key) -> Vector:
        """X_0."""
        return self.initial(key) if callable(self.initial) else jnp.asarray(self.initial)

    def draw(self, key: Key) -> tuple[Vector, Float[Array, "steps noises"]]:
        """X_0 and the increments of one path."""
        start_key, noise_key = jax.random.split(key)
        x = self.start(start_key)
        noises = jax.eval_shape(self.diffusion, x, jnp.zeros((), x.dtype)).shape[1]
        step_size = jnp.asarray(self.step_size, x.dtype)
        return x, jnp.sqrt(step_size) * jax.random.normal(noise_key, (self.num_steps, noises), x.dtype)

    def step(self, x: Vector, t: Scalar, dw: Float[Array, " noises"]) -> Vector:
        """X_{k+1} from X_k."""
        return x + jnp.asarray(self.step_size, x.dtype) * self.drift(x, t) + matmul(self.diffusion(x, t), dw)

    def times(self, dtype: Any) -> Float[Array, " points"]:
        """t_0, …, t_n."""
        return jnp.asarray(self.step_size, dtype) * jnp.arange(self.num_steps + 1, dtype=dtype)

    def solve(self, initial: Vector, increments: Float[Array, "steps noises"]) -> Trajectory:
        """The path that starts at `initial` and is driven by `increments`."""
        t = self.times(initial.dtype)

        def body(x: Vector, inputs: tuple[Scalar, Array]) -> tuple[Vector, Vector]:
            x = self.step(x, *inputs)
            return x, x

        _, x = lax.scan(body, initial, (t[:-1], increments))
        return Trajectory(t, jnp.concatenate([initial[None], x]), increments)


class Sizes(NamedTuple):
    """Of a diffusion."""

    dim: int
    noises: int
    dtype: Any


def sizes_of(diffusion: Diffusion) -> Sizes:
    """Dimension of the state, number of noises and dtype; a clear error where the parts do not fit together."""
    start = jax.eval_shape(diffusion.start, jax.random.key(0))
    if not hasattr(start, "shape") or len(start.shape) != 1 or start.shape[0] == 0:
        raise ValueError(f"initial must have shape (d,), got {getattr(start, 'shape', start)}")
    if not jnp.issubdtype(start.dtype, jnp.floating):
        raise ValueError(f"initial must hold floating-point numbers, got dtype {start.dtype}")
    if not callable(diffusion.initial) and is_concrete(diffusion.initial) and not np.isfinite(diffusion.initial).all():
        raise ValueError(f"initial must be finite, got {diffusion.initial}")
    time = jax.ShapeDtypeStruct((), start.dtype)
    for name, expected in (("drift", start.shape), ("diffusion", (*start.shape, None))):
        got = jax.eval_shape(getattr(diffusion, name), start, time)
        check_shape(f"{name}(x, t)", got, expected)
        if got.dtype != start.dtype:
            raise ValueError(f"{name}(x, t) must keep the dtype {start.dtype} of initial, got {got.dtype}")
    return Sizes(start.shape[0], jax.eval_shape(diffusion.diffusion, start, time).shape[1], start.dtype)
