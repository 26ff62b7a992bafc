"""Losses whose Hessian is known by its products with vectors: for dimensions in which no d × d array is wanted."""

from collections.abc import Callable

import equinox as eqx

from .._base.types import Matrix, Scalar, Vector
from .base import part_of_tree


class HessianProduct(eqx.Module):
    """∇²L(x) as an operation: `curvature @ v` is ∇²L(x) v, and there is no matrix to ask for.

    A PyTree like any other, so that a scan may carry it.
    """

    x: Vector
    product: Callable[[Vector, Vector], Vector]

    @property
    def shape(self) -> tuple[int, int]:
        return self.x.shape[0], self.x.shape[0]

    def __matmul__(self, v: Vector) -> Vector:
        return self.product(self.x, v)


Curvature = Matrix | HessianProduct  # what a learner shows of the second derivative at a point


def matrix_of(curvature: Curvature) -> Matrix | None:
    """The Hessian as a matrix; None where only its products with vectors are known."""
    return None if isinstance(curvature, HessianProduct) else curvature


class MatrixFree(eqx.Module):
    """A loss from callables: L(x), ∇L(x), and the product ∇²L(x)v as a function of x and v.

    It has no `hessian`. A learner may descend it: `observe` weighs its episodes by `Windowed(rate, neumann=m)`, with
    m + 2 products a step and O(d) memory an episode, and keeps no Hessians. The estimators that need none take such
    samples: `density`, `score`, the kernel fields, and `conditional_expectation` with Jacobians of its own.

    Args:
        value: x ↦ L(x), a scalar.
        gradient: x ↦ ∇L(x), of shape (d,).
        product: (x, v) ↦ ∇²L(x)v, of shape (d,). As in `Potential`, a callable that is a PyTree keeps its parameters
            as leaves; a plain function becomes static.

    Raises:
        ValueError: if one of the three cannot be called.

    Example:
        ```python
        import jax
        import jax.numpy as jnp
        import malliavin_jax as mj

        loss = mj.potentials.MatrixFree(
            lambda x: jnp.sum(x**4) / 4, lambda x: x**3, lambda x, v: 3 * x**2 * v  # L, ∇L and ∇²L v
        )
        learner = mj.ForwardLearner(loss, mj.initial.Normal(dim=100), step_size=0.01)
        scheme = mj.Windowed(4.0, neumann=2)
        wide = mj.observe(jax.random.key(0), learner, num_episodes=10, times=[0.1], scheme=scheme)
        wide.weight.shape, wide.hessian  # (10, 1, 100), None
        ```
    """

    _value: Callable
    _gradient: Callable
    _product: Callable

    def __init__(self, value: Callable, gradient: Callable, product: Callable):
        self._value = part_of_tree("value", value)
        self._gradient = part_of_tree("gradient", gradient)
        self._product = part_of_tree("product", product)

    def value(self, x: Vector) -> Scalar:
        """L(x)."""
        return self._value(x)

    def gradient(self, x: Vector) -> Vector:
        """∇L(x)."""
        return self._gradient(x)

    def curvature(self, x: Vector) -> HessianProduct:
        """What a learner shows of the second derivative at x: products of ∇²L(x) with vectors."""
        return HessianProduct(x, self._product)
