"""Hessians known by what they do to a vector: for dimensions in which no d × d array is wanted."""

from collections.abc import Callable

import equinox as eqx
import jax

from .._base.types import Scalar, Vector
from .base import AbstractPotential, Static


class HessianProduct(eqx.Module):
    """∇²L(x) in the place of its matrix: `hessian @ v` is all it can do."""

    x: Vector
    product: Callable[[Vector, Vector], Vector]

    @property
    def shape(self) -> tuple[int, int]:
        return self.x.shape[0], self.x.shape[0]

    def __matmul__(self, v: Vector) -> Vector:
        return self.product(self.x, v)


class MatrixFree(AbstractPotential):
    """A potential from callables: L(x), ∇L(x), and the product ∇²L(x)v as a function of x and v.

    `Windowed(rate, neumann=m)` weighs its episodes in O(d) memory, by m + 2 products a step; see `observe_weights`.

    ```python
    quartic = mj.potentials.MatrixFree(
        lambda x: jnp.sum(x**4) / 4, lambda x: x**3, lambda x, v: 3 * x**2 * v  # L, ∇L and ∇²L v
    )
    quartic.gradient(jnp.array([2.0]))  # [8.]
    ```
    """

    _value: Callable
    _gradient: Callable
    _product: Callable

    def __init__(self, value: Callable, gradient: Callable, product: Callable):
        for name, function in (("value", value), ("gradient", gradient), ("product", product)):
            if not callable(function):
                raise ValueError(f"{name} must be callable, got {function!r}")
            setattr(self, f"_{name}", Static(function) if jax.tree_util.all_leaves([function]) else function)

    def value(self, x: Vector) -> Scalar:
        return self._value(x)

    def gradient(self, x: Vector) -> Vector:
        return self._gradient(x)

    def hessian(self, x: Vector) -> HessianProduct:  # pyright: ignore[reportIncompatibleMethodOverride]
        return HessianProduct(x, self._product)
