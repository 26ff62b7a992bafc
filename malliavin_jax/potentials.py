"""Losses with closed-form derivatives: what a learner descends, and what we try to recover from it."""

from collections.abc import Callable, Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float, Int

from ._matrix_free import MatrixFree as MatrixFree
from ._misc import check_positive, check_shape, float_array
from ._polynomial import all_exponents, check_exponents, derivatives, fit_derivatives, num_terms as num_terms
from ._potential import (
    AbstractMinibatchPotential as AbstractMinibatchPotential,
    AbstractPotential as AbstractPotential,
    Static,
    check_finite,
    check_parameter,
    check_symmetric,
    like,
    number,
    parameter,
)
from ._statistical import GaussianMixture as GaussianMixture, LogisticRegression as LogisticRegression
from ._types import Matrix, Scalar, Vector


class Potential(AbstractPotential):
    """A potential from three callables of x: L, ∇L and ∇²L.

    Callables that are PyTrees (an `eqx.Module`, or a method of one) keep their parameters as leaves, so that
    derivatives from outside flow into them; plain functions become static. Nothing checks that the three
    agree with one another.

    ```python
    own = mj.Potential(lambda x: jnp.sum(x**4), lambda x: 4 * x**3, lambda x: jnp.diag(12 * x**2))
    own.gradient(jnp.array([2.0]))  # [32.]
    ```
    """

    _value: Callable
    _gradient: Callable
    _hessian: Callable

    def __init__(self, value: Callable, gradient: Callable, hessian: Callable):
        for name, function in (("value", value), ("gradient", gradient), ("hessian", hessian)):
            if not callable(function):
                raise ValueError(f"{name} must be callable, got {function!r}")
            is_plain = jax.tree_util.all_leaves([function])
            setattr(self, f"_{name}", Static(function) if is_plain else function)

    def value(self, x: Vector) -> Scalar:
        return self._value(x)

    def gradient(self, x: Vector) -> Vector:
        return self._gradient(x)

    def hessian(self, x: Vector) -> Matrix:
        return self._hessian(x)


class Quadratic(AbstractPotential):
    """L(x) = ½ (x − c)ᵀ P (x − c), with P = `precision` (a number p stands for p I) and c = `center`.

    ```python
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
        return 0.5 * jnp.dot(x - like(x, self.center), self.gradient(x))

    def gradient(self, x: Vector) -> Vector:
        offset = x - like(x, self.center)
        if np.shape(self.precision) == ():  # spare the product with a multiple of I
            return jnp.asarray(self.precision, x.dtype) * offset
        return self.hessian(x) @ offset

    def hessian(self, x: Vector) -> Matrix:
        precision = jnp.asarray(self.precision, x.dtype)
        if precision.ndim == 0:
            return precision * jnp.eye(x.shape[0], dtype=x.dtype)
        check_shape("x", x, precision.shape[:1])
        return precision


class Quartic(AbstractPotential):
    """L(x) = Σ_i (x_i⁴/4 + x_i²/2) + γ Σ_i x_i x_{i+1}, with γ = `coupling`, in any dimension.

    In d = 1 it is x⁴/4 + x²/2, the loss of the paper's example.

    ```python
    mj.potentials.Quartic(coupling=0.5).gradient(jnp.array([1.0, 0.0]))  # [2. 0.5]
    ```
    """

    coupling: Float[Array, "..."] | float = parameter("coupling", 0.0)

    def __check_init__(self):
        check_parameter("coupling", self.coupling)

    def value(self, x: Vector) -> Scalar:
        return jnp.sum(x**4 / 4 + x**2 / 2) + jnp.asarray(self.coupling, x.dtype) * jnp.dot(x[:-1], x[1:])

    def gradient(self, x: Vector) -> Vector:
        neighbours = jnp.pad(x[1:], (0, 1)) + jnp.pad(x[:-1], (1, 0))
        return x**3 + x + jnp.asarray(self.coupling, x.dtype) * neighbours

    def hessian(self, x: Vector) -> Matrix:
        eye, above, below = (jnp.eye(x.shape[0], k=k, dtype=x.dtype) for k in (0, 1, -1))
        return eye * (3 * x**2 + 1)[:, None] + jnp.asarray(self.coupling, x.dtype) * (above + below)


class DoubleWell(AbstractPotential):
    """L(x) = h (x_0² − 1)² + t x_0 + ½ k Σ_{i≥1} x_i², in any dimension.

    h = `height`, t = `tilt`, k = `stiffness`. Without tilt the wells are at x_0 = ±1, with barrier h.

    ```python
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
    """The Müller–Brown surface (Theoretica Chimica Acta 53, 1979) times `scale`, in d = 2.

    L(x) = scale Σ_k A_k exp(a_k p² + b_k p q + c_k q²), (p, q) = x − (centre of term k).

    Unscaled, its minima lie at (−.558, 1.442), (.623, .028) and (−.050, .467), where it is −146.7, −108.2
    and −80.8, and its saddles at (−.822, .624) and (.212, .293), where it is −40.7 and −72.2. The largest
    eigenvalue of its Hessian in the region where it is below 100 is λ = 4099, beside the deepest minimum.
    The default scale makes that 57.4, so that a step ε = .01 is stable (ε λ = .57); the barriers out of the
    three wells are then 1.48, .50 and .12. Barriers of several units need a larger scale, and a step smaller
    in proportion. Far outside the wells the surface grows like the exponential of a quadratic.

    ```python
    surface = mj.potentials.MullerBrown(scale=1.0)
    surface.value(jnp.array([-0.558, 1.442]))  # about -146.7
    ```
    """

    scale: Float[Array, "..."] | float = parameter("scale", 0.014)

    def __check_init__(self):
        check_parameter("scale", self.scale, positive=True)

    def _terms(self, x: Vector) -> tuple[Array, Array, Array]:
        """Each term A e^q, with the gradient and the (constant) Hessian of its exponent q."""
        check_shape("x", x, (2,))
        size = jnp.asarray(self.scale, x.dtype) * jnp.asarray([-200.0, -100.0, -170.0, 15.0], x.dtype)
        centers = jnp.asarray([[1.0, 0.0], [0.0, 0.5], [-0.5, 1.5], [-1.0, 1.0]], x.dtype)
        a, b, c = [-1.0, -1.0, -6.5, 0.7], [0.0, 0.0, 11.0, 0.6], [-10.0, -10.0, -6.5, 0.7]
        curve = jnp.asarray([[[2 * a, b], [b, 2 * c]] for a, b, c in zip(a, b, c, strict=True)], x.dtype)
        offset = x[None] - centers
        slope = jnp.einsum("kij,kj->ki", curve, offset)
        return size * jnp.exp(0.5 * jnp.sum(slope * offset, axis=1)), slope, curve

    def value(self, x: Vector) -> Scalar:
        return jnp.sum(self._terms(x)[0])

    def gradient(self, x: Vector) -> Vector:
        term, slope, _ = self._terms(x)
        return term @ slope

    def hessian(self, x: Vector) -> Matrix:
        term, slope, curve = self._terms(x)
        return jnp.einsum("k,kij->ij", term, slope[:, :, None] * slope[:, None, :] + curve)


class Polynomial(AbstractPotential):
    """L(x) = Σ_t θ_t Π_i z_i^{e_ti}, with z = (x − center) / scale.

    - `coefficients`: θ, (terms,). `exponents`: e, `terms` tuples of d whole numbers, all different.
    - `center`, `scale`: (d,) or a number.

    ```python
    cubic = mj.Polynomial([1.0, 2.0], [[3], [1]])  # x³ + 2x
    cubic.gradient(jnp.array([1.0]))  # [5.]
    fitted = mj.Polynomial.fit(samples.x[:, 0], samples.gradient[:, 0], samples.hessian[:, 0], degree=4)
    ```
    """

    coefficients: Float[Array, " terms"]
    exponents: tuple[tuple[int, ...], ...] = eqx.field(static=True)
    center: Float[Array, "..."] | float
    scale: Float[Array, "..."] | float

    def __init__(
        self,
        coefficients: Float[ArrayLike, " terms"] | Sequence,
        exponents: Sequence | Int[ArrayLike, "terms d"],
        center: Float[ArrayLike, "..."] | Sequence | float = 0.0,
        scale: Float[ArrayLike, "..."] | Sequence | float = 1.0,
    ):
        self.coefficients = float_array("coefficients", coefficients)
        self.exponents = check_exponents(exponents)
        self.center, self.scale = number("center", center), number("scale", scale)
        check_shape("coefficients", self.coefficients, (len(self.exponents),))
        for name in ("center", "scale"):
            if np.shape(getattr(self, name)) != ():
                check_shape(name, getattr(self, name), (len(self.exponents[0]),))
        check_finite("center", self.center)
        check_positive("scale", self.scale)

    def _derivatives(self, x: Vector, order: int) -> Array:
        check_shape("x", x, (len(self.exponents[0]),))
        z = (x - like(x, self.center)) / like(x, self.scale)
        return derivatives(self.coefficients.astype(x.dtype), z, self.exponents, order)

    def value(self, x: Vector) -> Scalar:
        return self._derivatives(x, 0)[0]

    def gradient(self, x: Vector) -> Vector:
        return self._derivatives(x, 1) / like(x, self.scale)

    def hessian(self, x: Vector) -> Matrix:
        scale = like(x, self.scale)
        return self._derivatives(x, 2).reshape(x.shape * 2) / (scale[:, None] * scale[None, :])

    @staticmethod
    def fit(
        x: Float[ArrayLike, "n d"],
        gradient: Float[ArrayLike, "n d"],
        hessian: Float[ArrayLike, "n d d"],
        *,
        degree: int = 6,
        weights: Float[ArrayLike, " n"] | Int[ArrayLike, " n"] | Bool[ArrayLike, " n"] | None = None,
        passes: int = 2,
        chunk_size: int = 4096,
    ) -> "Polynomial":
        """The polynomial of the given degree whose gradients and Hessians are nearest to the observed ones.

        In standardised units z = (x − mean)/sd, in which gradients and Hessians both have the unit of L, it
        minimises Σ_n w_n [ p |∇_z L(x_n) − g_n|² + q |∇²_z L(x_n) − H_n|² ], |·| the Frobenius norm. The
        first pass takes p = q = 1; each later one takes for 1/p and 1/q the mean squared residuals per entry
        of the fit before, so that exact Hessians are not spoilt by noisy gradients, nor the reverse. The
        constant term, which no derivative sees, is 0.

        `weights` (n,): w, often a 0/1 mask; where it is 0 the data may hold NaN. With no usable point the
        result is the zero polynomial. Data are read in chunks of `chunk_size` points.
        """
        theta, center, scale = fit_derivatives(
            x, gradient, hessian, weights, degree=degree, passes=passes, chunk_size=chunk_size
        )
        return Polynomial(theta, all_exponents(center.shape[0], degree), center, scale)
