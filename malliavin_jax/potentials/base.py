"""What a potential is: a loss with its gradient and Hessian, and the checks that parameters share."""

import abc
import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from .._base.checks import check_finite, check_positive, check_shape, described, float_array, is_concrete
from .._base.types import Key, Matrix, Scalar, Vector


class AbstractPotential(eqx.Module):
    """A loss L: R^d → R with its first two derivatives, each a function of one point x of shape (d,).

    A loss of one's own is a subclass with the methods `value`, `gradient` and `hessian`. Results have the dtype of `x`,
    whatever the dtype of the parameters.

    Example:
        ```python
        import jax.numpy as jnp
        import malliavin_jax as mj


        class Linear(mj.potentials.AbstractPotential):
            slope: float

            def value(self, x):
                return self.slope * jnp.sum(x)

            def gradient(self, x):
                return jnp.full_like(x, self.slope)

            def hessian(self, x):
                return jnp.zeros((x.shape[0],) * 2, x.dtype)


        Linear(2.0).gradient(jnp.zeros(3))  # [2. 2. 2.]
        ```
    """

    @abc.abstractmethod
    def value(self, x: Vector) -> Scalar:
        """L(x)."""

    @abc.abstractmethod
    def gradient(self, x: Vector) -> Vector:
        """∇L(x)."""

    @abc.abstractmethod
    def hessian(self, x: Vector) -> Matrix:
        """∇²L(x), symmetric."""

    def curvature(self, x: Vector) -> Matrix:
        """What a learner shows of the second derivative at x: here all of it, ∇²L(x)."""
        return self.hessian(x)


def check_potential(name: str, potential: Any, also: str = "") -> None:
    """Refuse what has no gradient or curvature of its own, functions and classes among them."""
    methods = (getattr(potential, method, None) for method in ("gradient", "curvature"))
    if isinstance(potential, type) or not all(map(callable, methods)):
        remedy = "wrap functions as Potential(value, gradient, hessian), or take one of malliavin_jax.potentials"
        raise ValueError(f"{name} must be a potential{also}, got {described(potential)}: {remedy}")


class Static(eqx.Module):
    """A plain function made part of the tree's structure, so that `jax.jit` and `jax.vmap` take it along."""

    function: Callable = eqx.field(static=True)

    def __call__(self, *arguments: Array) -> Array:
        return self.function(*arguments)


def part_of_tree(name: str, function: Any) -> Callable:
    """A callable as part of a PyTree: a plain function as static structure, one that is a PyTree as it is."""
    if not callable(function):
        raise ValueError(f"{name} must be callable, got {function!r}")
    return Static(function) if jax.tree_util.all_leaves([function]) else function


class AbstractMinibatchPotential(AbstractPotential):
    """A potential that is a sum over data, of which a learner may see a random batch at each step.

    A subclass has, besides `value`, `gradient` and `hessian` of all the data, the method `minibatch(key)`.

    Example:
        ```python
        import jax
        import jax.numpy as jnp
        import malliavin_jax as mj

        regression = mj.potentials.LogisticRegression([[1.0, 0.5], [-0.3, 2.0]], [1.0, 0.0], batch_size=1)
        one = regression.minibatch(jax.random.key(0))  # what the learner sees at one step
        one.gradient(jnp.zeros(2)).shape  # (2,)
        ```
    """

    @abc.abstractmethod
    def minibatch(self, key: Key) -> AbstractPotential:
        """The potential of a random batch; its value, gradient and Hessian are unbiased for the full ones."""


def number(name: str, value: Any) -> Any:
    """A Python number stays one (it follows any dtype and can be static); all else becomes a float array."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    return float_array(name, value)


def parameter(name: str, default: float) -> Any:
    """A field of a potential that holds a number."""
    return eqx.field(converter=functools.partial(number, name), default=default)


def check_parameter(name: str, value: Any, *, positive: bool = False) -> None:
    """Refuse what is not one finite number, or one positive number."""
    check_shape(name, value, ())
    check_finite(name, value)
    if positive:
        check_positive(name, value)


def check_symmetric(name: str, matrix: Any) -> None:
    """Refuse a matrix (or a stack of them) that differs from its transpose by more than float32 rounding."""
    if is_concrete(matrix):
        array = np.asarray(matrix)
        if np.abs(array - array.mT).max(initial=0) > 1e-5 * np.abs(array).max(initial=0):
            raise ValueError(f"{name} must be symmetric, got {array}")


def like(x: Vector, value: Any) -> Array:
    """A scalar or (d,) parameter, as an array of the shape and dtype of x."""
    return jnp.broadcast_to(jnp.asarray(value, x.dtype), x.shape)


class Potential(AbstractPotential):
    """A potential from three callables of x: L, ∇L and ∇²L.

    Callables that are PyTrees (an `eqx.Module`, or a method of one) keep their parameters as leaves, so that
    derivatives from outside flow into them; plain functions become static. Nothing checks that the three
    agree with one another.

    Args:
        value: L, a function of x (d,) with values ().
        gradient: ∇L, a function of x with values (d,).
        hessian: ∇²L, a function of x with values (d, d), symmetric.

    Raises:
        ValueError: if one of the three is not callable.

    Example:
        ```python
        import jax.numpy as jnp
        import malliavin_jax as mj

        own = mj.Potential(lambda x: jnp.sum(x**4), lambda x: 4 * x**3, lambda x: jnp.diag(12 * x**2))
        own.gradient(jnp.array([2.0]))  # [32.]
        ```
    """

    _value: Callable
    _gradient: Callable
    _hessian: Callable

    def __init__(self, value: Callable, gradient: Callable, hessian: Callable):
        self._value = part_of_tree("value", value)
        self._gradient = part_of_tree("gradient", gradient)
        self._hessian = part_of_tree("hessian", hessian)

    def value(self, x: Vector) -> Scalar:
        return self._value(x)

    def gradient(self, x: Vector) -> Vector:
        return self._gradient(x)

    def hessian(self, x: Vector) -> Matrix:
        return self._hessian(x)
