"""Where episodes start: ready-made initial laws, functions key ↦ X_0 whose parameters are arrays.

A learner takes any function of a key. These are modules, so that another mean or scale is another number of the same
compiled program, where another lambda would be another program.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .._base.checks import check_nonnegative, check_shape, float_array, is_concrete
from .._base.types import Key, Vector


class Normal(eqx.Module):
    """X_0 ~ N(mean, scale²), coordinates independent.

    Args:
        mean: one number, or one for each of d coordinates.
        scale: standard deviation, one number, or one for each coordinate.
        dim: d; without it, the size of `mean` or `scale`, or 1.

    Example:
        ```python
        import jax
        import malliavin_jax as mj

        start = mj.initial.Normal([0.0, 1.0], 0.5)
        start(jax.random.key(0)).shape  # (2,)
        ```
    """

    mean: Float[Array, " d"]
    scale: Float[Array, " d"]

    def __init__(self, mean: Any = 0.0, scale: Any = 1.0, *, dim: int | None = None):
        self.mean, self.scale = _vectors(dim, mean=mean, scale=scale)
        check_nonnegative("scale", self.scale)

    def __call__(self, key: Key) -> Vector:
        return self.mean + self.scale * jax.random.normal(key, self.mean.shape, self.mean.dtype)


class Uniform(eqx.Module):
    """X_0 uniform on the box from `low` to `high`.

    Args:
        low: lower ends, one number, or one for each of d coordinates.
        high: upper ends, likewise, above `low`.
        dim: d; without it, the size of `low` or `high`, or 1.

    Example:
        ```python
        import jax
        import malliavin_jax as mj

        mj.initial.Uniform(-2.0, 2.0, dim=3)(jax.random.key(0)).shape  # (3,)
        ```
    """

    low: Float[Array, " d"]
    high: Float[Array, " d"]

    def __init__(self, low: Any = -1.0, high: Any = 1.0, *, dim: int | None = None):
        self.low, self.high = _vectors(dim, low=low, high=high)
        if is_concrete(self.low, self.high) and not np.all(np.asarray(self.low) < np.asarray(self.high)):
            raise ValueError(f"low must be below high on each axis, got {self.low} and {self.high}")

    def __call__(self, key: Key) -> Vector:
        return jax.random.uniform(key, self.low.shape, self.low.dtype, self.low, self.high)


class Points(eqx.Module):
    """X_0 is one of the rows of `x`, each as likely as the others.

    Args:
        x: the starting points, of shape (points, d).

    Example:
        ```python
        import jax
        import malliavin_jax as mj

        mj.initial.Points([[-1.0], [1.0]])(jax.random.key(0))  # [-1.] or [1.]
        ```
    """

    x: Float[Array, "points d"]

    def __init__(self, x: Any):
        self.x = float_array("x", x)
        check_shape("x", self.x, (None, None), "points d")
        if self.x.size == 0 or (is_concrete(self.x) and not np.all(np.isfinite(self.x))):
            raise ValueError(f"x must hold at least one point, all finite, got shape {self.x.shape}")

    def __call__(self, key: Key) -> Vector:
        return self.x[jax.random.randint(key, (), 0, self.x.shape[0])]


def _vectors(dim: int | None, **values: Any) -> list[Float[Array, " d"]]:
    """Each of `values` as an array (d,), from one number or from one for each coordinate."""
    arrays = {name: float_array(name, value) for name, value in values.items()}
    sizes = {array.shape[0] for array in arrays.values() if array.ndim == 1}
    if dim is not None:
        sizes.add(dim)
    for name, array in arrays.items():
        if array.ndim > 1 or len(sizes) > 1 or 0 in sizes:
            raise ValueError(f"{name} must be one number or of shape (d,), with one d for all, got {array.shape}")
        if is_concrete(array) and not np.all(np.isfinite(array)):
            raise ValueError(f"{name} must be finite, got {array}")
    d = sizes.pop() if sizes else 1
    dtype = jnp.result_type(*arrays.values())
    return [jnp.broadcast_to(array.astype(dtype), (d,)) for array in arrays.values()]
