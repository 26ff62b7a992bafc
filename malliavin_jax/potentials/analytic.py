"""Losses in closed form: bowls, wells and the Müller–Brown surface."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .._base.checks import check_finite, check_shape
from .._base.small_tensors import HIGHEST, matmul
from .._base.types import Matrix, Scalar, Vector
from .base import AbstractPotential, check_parameter, check_symmetric, like, parameter


class Quadratic(AbstractPotential):
    """L(x) = ½ (x − c)ᵀ P (x − c), in any dimension.

    Args:
        precision: P, a symmetric (d, d) matrix, or a number p for p I.
        center: c, (d,) or a number.

    Raises:
        ValueError: if `precision` is not square or not symmetric, `center` is of another dimension, or one of them is
            not finite.

    Example:
        ```python
        import jax.numpy as jnp
        import malliavin_jax as mj

        bowl = mj.potentials.Quadratic(precision=2.0, center=1.0)
        bowl.gradient(jnp.array([3.0]))  # [4.]
        ```
    """

    precision: Float[Array, "..."] | float = parameter("precision", 1.0)
    center: Float[Array, "..."] | float = parameter("center", 0.0)

    def __check_init__(self):
        shape = np.shape(self.precision)
        if shape != () and (len(shape) != 2 or shape[0] != shape[1]):
            raise ValueError(f"precision must be a number or a square matrix, got shape {shape}")
        if shape != ():
            check_symmetric("precision", self.precision)
        if np.shape(self.center) != ():
            check_shape("center", self.center, shape[:1] or (None,))
        check_finite("precision", self.precision)
        check_finite("center", self.center)

    def value(self, x: Vector) -> Scalar:
        return 0.5 * matmul(x - like(x, self.center), self.gradient(x))

    def gradient(self, x: Vector) -> Vector:
        offset = x - like(x, self.center)
        if np.shape(self.precision) == ():  # spare the product with a multiple of I
            return jnp.asarray(self.precision, x.dtype) * offset
        return matmul(self.hessian(x), offset)

    def hessian(self, x: Vector) -> Matrix:
        precision = jnp.asarray(self.precision, x.dtype)
        if precision.ndim == 0:
            return precision * jnp.eye(x.shape[0], dtype=x.dtype)
        check_shape("x", x, precision.shape[:1])
        return precision


class Quartic(AbstractPotential):
    """L(x) = Σ_i (x_i⁴/4 + x_i²/2) + γ Σ_i x_i x_{i+1}, in any dimension.

    In d = 1 it is x⁴/4 + x²/2, the loss of the paper's example.

    Args:
        coupling: γ.

    Raises:
        ValueError: if `coupling` is not one finite number.

    Example:
        ```python
        import jax.numpy as jnp
        import malliavin_jax as mj

        mj.potentials.Quartic(coupling=0.5).gradient(jnp.array([1.0, 0.0]))  # [2. 0.5]
        ```
    """

    coupling: Float[Array, "..."] | float = parameter("coupling", 0.0)

    def __check_init__(self):
        check_parameter("coupling", self.coupling)

    def value(self, x: Vector) -> Scalar:
        return jnp.sum(x**4 / 4 + x**2 / 2) + jnp.asarray(self.coupling, x.dtype) * jnp.sum(x[:-1] * x[1:])

    def gradient(self, x: Vector) -> Vector:
        neighbours = jnp.pad(x[1:], (0, 1)) + jnp.pad(x[:-1], (1, 0))
        return x**3 + x + jnp.asarray(self.coupling, x.dtype) * neighbours

    def hessian(self, x: Vector) -> Matrix:
        eye, above, below = (jnp.eye(x.shape[0], k=k, dtype=x.dtype) for k in (0, 1, -1))
        return eye * (3 * x**2 + 1)[:, None] + jnp.asarray(self.coupling, x.dtype) * (above + below)


class DoubleWell(AbstractPotential):
    """L(x) = h (x_0² − 1)² + t x_0 + ½ k Σ_{i≥1} x_i², in any dimension.

    Without tilt the wells are at x_0 = ±1, with barrier h.

    Args:
        height: h, positive.
        tilt: t.
        stiffness: k, positive.

    Raises:
        ValueError: if one of them is not one finite number, or `height` or `stiffness` is not positive.

    Example:
        ```python
        import jax.numpy as jnp
        import malliavin_jax as mj

        mj.potentials.DoubleWell(tilt=0.0).value(jnp.zeros(1))  # the barrier: 1
        ```
    """

    height: Float[Array, "..."] | float = parameter("height", 1.0)
    tilt: Float[Array, "..."] | float = parameter("tilt", 0.25)
    stiffness: Float[Array, "..."] | float = parameter("stiffness", 1.0)

    def __check_init__(self):
        check_parameter("height", self.height, positive=True)
        check_parameter("tilt", self.tilt)
        check_parameter("stiffness", self.stiffness, positive=True)

    def value(self, x: Vector) -> Scalar:
        height, tilt, stiffness = (jnp.asarray(p, x.dtype) for p in (self.height, self.tilt, self.stiffness))
        return height * (x[0] ** 2 - 1) ** 2 + tilt * x[0] + 0.5 * stiffness * jnp.sum(x[1:] ** 2)

    def gradient(self, x: Vector) -> Vector:
        height, tilt, stiffness = (jnp.asarray(p, x.dtype) for p in (self.height, self.tilt, self.stiffness))
        return (stiffness * x).at[0].set(4 * height * x[0] * (x[0] ** 2 - 1) + tilt)

    def hessian(self, x: Vector) -> Matrix:
        height = jnp.asarray(self.height, x.dtype)
        return jnp.diag(like(x, self.stiffness).at[0].set(height * (12 * x[0] ** 2 - 4)))


class MullerBrown(AbstractPotential):
    """The Müller–Brown surface (Theoretica Chimica Acta 53, 1979) times a factor, in d = 2.

    L(x) = scale Σ_k A_k exp(a_k p² + b_k p q + c_k q²), (p, q) = x − (centre of term k).

    Unscaled, its minima lie at (−.558, 1.442), (.623, .028) and (−.050, .467), where it is −146.7, −108.2
    and −80.8, and its saddles at (−.822, .624) and (.212, .293), where it is −40.7 and −72.2. The largest
    eigenvalue of its Hessian in the region where it is below 100 is λ = 4099, beside the deepest minimum.
    The default scale makes that 57.4, so that a step ε = .01 is stable (ε λ = .57); the barriers out of the
    three wells are then 1.48, .50 and .12. Barriers of several units need a larger scale, and a step smaller
    in proportion. Far outside the wells the surface grows like the exponential of a quadratic.

    Args:
        scale: the factor, positive.

    Raises:
        ValueError: if `scale` is not one positive number.

    Example:
        ```python
        import jax.numpy as jnp
        import malliavin_jax as mj

        surface = mj.potentials.MullerBrown(scale=1.0)
        surface.value(jnp.array([-0.558, 1.442]))  # about -146.7
        ```
    """

    scale: Float[Array, "..."] | float = parameter("scale", 0.014)

    def __check_init__(self):
        check_parameter("scale", self.scale, positive=True)

    def _terms(self, x: Vector) -> "_Terms":
        check_shape("x", x, (2,))
        size = jnp.asarray(self.scale, x.dtype) * jnp.asarray([-200.0, -100.0, -170.0, 15.0], x.dtype)
        centers = jnp.asarray([[1.0, 0.0], [0.0, 0.5], [-0.5, 1.5], [-1.0, 1.0]], x.dtype)
        a, b, c = [-1.0, -1.0, -6.5, 0.7], [0.0, 0.0, 11.0, 0.6], [-10.0, -10.0, -6.5, 0.7]
        curve = jnp.asarray([[[2 * a, b], [b, 2 * c]] for a, b, c in zip(a, b, c, strict=True)], x.dtype)
        offset = x[None] - centers
        slope = jnp.einsum("kij,kj->ki", curve, offset, precision=HIGHEST)
        return _Terms(size * jnp.exp(0.5 * jnp.sum(slope * offset, axis=1)), slope, curve)

    def value(self, x: Vector) -> Scalar:
        return jnp.sum(self._terms(x).value)

    def gradient(self, x: Vector) -> Vector:
        terms = self._terms(x)
        return matmul(terms.value, terms.slope)

    def hessian(self, x: Vector) -> Matrix:
        terms = self._terms(x)
        products = terms.slope[:, :, None] * terms.slope[:, None, :]
        return jnp.einsum("k,kij->ij", terms.value, products + terms.curve, precision=HIGHEST)


class _Terms(NamedTuple):
    """Each term A e^q of the Müller–Brown surface, with the gradient and the (constant) Hessian of its exponent q."""

    value: Float[Array, " k"]
    slope: Float[Array, "k 2"]
    curve: Float[Array, "k 2 2"]
