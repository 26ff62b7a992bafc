"""Losses with closed-form derivatives: what a learner descends, and what we try to recover from it."""

import abc
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float, Int

from ._misc import check_count, check_nonnegative, check_positive, check_shape, float_array, is_concrete
from ._polynomial import all_exponents, check_exponents, derivatives, fit_derivatives, num_terms as num_terms
from ._types import Key, Matrix, Scalar, Vector


class AbstractPotential(eqx.Module):
    """A loss L: R^d → R with its first two derivatives, each a function of one point x of shape (d,).

    Results have the dtype of `x`, whatever the dtype of the parameters.
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


class AbstractMinibatchPotential(AbstractPotential):
    """A potential that is a sum over data, of which a learner may see a random batch at each step."""

    @abc.abstractmethod
    def minibatch(self, key: Key) -> AbstractPotential:
        """The potential of a random batch; its value, gradient and Hessian are unbiased for the full ones."""


def _number(name: str, value: Any) -> Any:
    """A Python number stays one (it follows any dtype and can be static); all else becomes a float array."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    return float_array(name, value)


def _parameter(name: str, default: float) -> Any:
    return eqx.field(converter=functools.partial(_number, name), default=default)


def _check_parameter(name: str, value: Any, *, positive: bool = False) -> None:
    check_shape(name, value, ())
    _check_finite(name, value)
    if positive:
        check_positive(name, value)


def _check_finite(name: str, value: Any) -> None:
    if is_concrete(value) and not np.all(np.isfinite(value)):
        raise ValueError(f"{name} must be finite, got {value}")


def _check_symmetric(name: str, matrix: Any) -> None:
    """Refuse a matrix (or a stack of them) that differs from its transpose by more than float32 rounding."""
    if is_concrete(matrix):
        array = np.asarray(matrix)
        if np.abs(array - array.mT).max(initial=0) > 1e-5 * np.abs(array).max(initial=0):
            raise ValueError(f"{name} must be symmetric, got {array}")


def _like(x: Vector, parameter: Any) -> Array:
    """A scalar or (d,) parameter, as an array of the shape and dtype of x."""
    return jnp.broadcast_to(jnp.asarray(parameter, x.dtype), x.shape)


class _Static(eqx.Module):
    """A plain function made part of the tree's structure, so that `jax.jit` and `jax.vmap` take it along."""

    function: Callable = eqx.field(static=True)

    def __call__(self, x: Vector) -> Array:
        return self.function(x)


class Potential(AbstractPotential):
    """A potential from three callables of x: L, ∇L and ∇²L.

    Callables that are PyTrees (an `eqx.Module`, or a method of one) keep their parameters as leaves, so that
    derivatives from outside flow into them; plain functions become static. Nothing checks that the three
    agree with one another.
    """

    _value: Callable
    _gradient: Callable
    _hessian: Callable

    def __init__(self, value: Callable, gradient: Callable, hessian: Callable):
        for name, function in (("value", value), ("gradient", gradient), ("hessian", hessian)):
            if not callable(function):
                raise ValueError(f"{name} must be callable, got {function!r}")
            is_plain = jax.tree_util.all_leaves([function])
            setattr(self, f"_{name}", _Static(function) if is_plain else function)

    def value(self, x: Vector) -> Scalar:
        return self._value(x)

    def gradient(self, x: Vector) -> Vector:
        return self._gradient(x)

    def hessian(self, x: Vector) -> Matrix:
        return self._hessian(x)


class Quadratic(AbstractPotential):
    """L(x) = ½ (x − c)ᵀ P (x − c), with P = `precision` (a number p stands for p I) and c = `center`."""

    precision: Float[Array, "..."] | float = _parameter("precision", 1.0)
    center: Float[Array, "..."] | float = _parameter("center", 0.0)

    def __check_init__(self):
        shape = np.shape(self.precision)
        if shape != () and (len(shape) != 2 or shape[0] != shape[1]):
            raise ValueError(f"precision must be a number or a square matrix, got shape {shape}")
        if shape != ():
            _check_symmetric("precision", self.precision)
        if np.shape(self.center) != ():
            check_shape("center", self.center, shape[:1] or (None,))
        _check_finite("precision", self.precision)
        _check_finite("center", self.center)

    def value(self, x: Vector) -> Scalar:
        return 0.5 * jnp.dot(x - _like(x, self.center), self.gradient(x))

    def gradient(self, x: Vector) -> Vector:
        offset = x - _like(x, self.center)
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
    """

    coupling: Float[Array, "..."] | float = _parameter("coupling", 0.0)

    def __check_init__(self):
        _check_parameter("coupling", self.coupling)

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
    """

    height: Float[Array, "..."] | float = _parameter("height", 1.0)
    tilt: Float[Array, "..."] | float = _parameter("tilt", 0.25)
    stiffness: Float[Array, "..."] | float = _parameter("stiffness", 1.0)

    def __check_init__(self):
        _check_parameter("height", self.height, positive=True)
        _check_parameter("tilt", self.tilt)
        _check_parameter("stiffness", self.stiffness, positive=True)

    def value(self, x: Vector) -> Scalar:
        height, tilt, stiffness = (jnp.asarray(p, x.dtype) for p in (self.height, self.tilt, self.stiffness))
        return height * (x[0] ** 2 - 1) ** 2 + tilt * x[0] + 0.5 * stiffness * jnp.sum(x[1:] ** 2)

    def gradient(self, x: Vector) -> Vector:
        height, tilt, stiffness = (jnp.asarray(p, x.dtype) for p in (self.height, self.tilt, self.stiffness))
        return (stiffness * x).at[0].set(4 * height * x[0] * (x[0] ** 2 - 1) + tilt)

    def hessian(self, x: Vector) -> Matrix:
        height = jnp.asarray(self.height, x.dtype)
        return jnp.diag(_like(x, self.stiffness).at[0].set(height * (12 * x[0] ** 2 - 4)))


class MullerBrown(AbstractPotential):
    """The Müller–Brown surface (Theoretica Chimica Acta 53, 1979) times `scale`, in d = 2.

    L(x) = scale Σ_k A_k exp(a_k p² + b_k p q + c_k q²), (p, q) = x − (centre of term k).

    Unscaled, its minima lie at (−.558, 1.442), (.623, .028) and (−.050, .467), where it is −146.7, −108.2
    and −80.8, and its saddles at (−.822, .624) and (.212, .293), where it is −40.7 and −72.2. The largest
    eigenvalue of its Hessian in the region where it is below 100 is λ = 4099, beside the deepest minimum.
    The default scale makes that 57.4, so that a step ε = .01 is stable (ε λ = .57); the barriers out of the
    three wells are then 1.48, .50 and .12. Barriers of several units need a larger scale, and a step smaller
    in proportion. Far outside the wells the surface grows like the exponential of a quadratic.
    """

    scale: Float[Array, "..."] | float = _parameter("scale", 0.014)

    def __check_init__(self):
        _check_parameter("scale", self.scale, positive=True)

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


class GaussianMixture(AbstractPotential):
    """L(x) = −log Σ_k w_k N(x; μ_k, Σ_k).

    - `means`: μ, (k, d). `weights`: w, (k,), positive, normalised here (None: equal).
    - `covariances`: Σ, (k, d, d), or a number v for v I (None: I).

    With responsibilities r_k ∝ w_k N(x; μ_k, Σ_k) and s_k = Σ_k⁻¹ (x − μ_k): ∇L = Σ_k r_k s_k and
    ∇²L = Σ_k r_k [Σ_k⁻¹ − (s_k − ∇L)(s_k − ∇L)ᵀ], which stay accurate where every density underflows.
    Kept are the logarithms of the weights and W_k, the inverse of Σ_k's Cholesky factor (Σ_k⁻¹ = W_kᵀ W_k).
    """

    means: Float[Array, "k d"]
    log_weights: Float[Array, " k"]
    whiten: Float[Array, "k d d"]

    def __init__(
        self,
        means: Float[ArrayLike, "k d"] | Sequence,
        weights: Float[ArrayLike, " k"] | Sequence | None = None,
        covariances: Float[ArrayLike, "k d d"] | Sequence | float | None = None,
    ):
        self.means = float_array("means", means)
        check_shape("means", self.means, (None, None))
        _check_finite("means", self.means)
        k, d = self.means.shape
        dtype = self.means.dtype
        raw = jnp.ones((k,), dtype) if weights is None else float_array("weights", weights).astype(dtype)
        check_shape("weights", raw, (k,))
        check_positive("weights", raw)
        self.log_weights = jnp.log(raw / jnp.sum(raw))
        spread = jnp.asarray(_number("covariances", 1.0 if covariances is None else covariances), dtype)
        if spread.ndim == 0:
            check_positive("covariances", spread)
            self.whiten = jnp.broadcast_to(jnp.eye(d, dtype=dtype) / jnp.sqrt(spread), (k, d, d))
            return
        check_shape("covariances", spread, (k, d, d))
        _check_symmetric("covariances", spread)
        factor = jnp.linalg.cholesky(spread)
        if is_concrete(factor) and not np.all(np.isfinite(factor)):
            raise ValueError(f"covariances must be positive definite, got {np.asarray(spread)}")
        eye = jnp.broadcast_to(jnp.eye(d, dtype=dtype), (k, d, d))
        self.whiten = jax.scipy.linalg.solve_triangular(factor, eye, lower=True)

    def _terms(self, x: Vector) -> tuple[Array, Array, Array]:
        """log w_k N(x; μ_k, Σ_k), s_k and Σ_k⁻¹ for each k."""
        check_shape("x", x, (self.means.shape[1],))
        whiten, means = self.whiten.astype(x.dtype), self.means.astype(x.dtype)
        white = jnp.einsum("kij,kj->ki", whiten, x[None] - means)
        log_det = jnp.sum(jnp.log(jnp.diagonal(whiten, axis1=1, axis2=2)), axis=1)
        log_weights = jax.nn.log_softmax(self.log_weights.astype(x.dtype))
        constant = 0.5 * x.shape[0] * math.log(2 * math.pi)
        log_term = log_weights + log_det - 0.5 * jnp.sum(white**2, axis=1) - constant
        precision = jnp.einsum("kia,kib->kab", whiten, whiten)
        return log_term, jnp.einsum("kij,ki->kj", whiten, white), precision

    def value(self, x: Vector) -> Scalar:
        return -jax.nn.logsumexp(self._terms(x)[0])

    def gradient(self, x: Vector) -> Vector:
        log_term, slope, _ = self._terms(x)
        return jax.nn.softmax(log_term) @ slope

    def hessian(self, x: Vector) -> Matrix:
        log_term, slope, precision = self._terms(x)
        share = jax.nn.softmax(log_term)
        spread = slope - (share @ slope)[None]
        return jnp.einsum("k,kij->ij", share, precision - spread[:, :, None] * spread[:, None, :])


class LogisticRegression(AbstractMinibatchPotential):
    """The negative log posterior of logistic regression under a Gaussian prior,

    L(x) = c Σ_i [log(1 + exp(a_i·x)) − y_i a_i·x] + ½ λ |x|².

    - `features`: rows a_i, (n, d). `labels`: y, (n,), each 0 or 1. `prior_precision`: λ.
    - `batch_size`: B rows, drawn with replacement, make a batch (None: the whole data).
    - `data_scale`: c. A batch has c n/B in its place and the full prior, which makes it unbiased.
    """

    features: Float[Array, "n d"] = eqx.field(converter=functools.partial(float_array, "features"))
    labels: Float[Array, " n"] = eqx.field(converter=functools.partial(float_array, "labels"))
    prior_precision: Float[Array, "..."] | float = _parameter("prior_precision", 1.0)
    batch_size: int | None = eqx.field(static=True, default=None)
    data_scale: Float[Array, "..."] | float = _parameter("data_scale", 1.0)

    def __check_init__(self):
        check_shape("features", self.features, (None, None))
        check_count("the number of rows of features", self.features.shape[0])
        check_shape("labels", self.labels, self.features.shape[:1])
        _check_finite("features", self.features)
        if is_concrete(self.labels) and not np.isin(np.asarray(self.labels), (0, 1)).all():
            raise ValueError(f"labels must be 0 or 1, got {np.unique(self.labels)}")
        check_shape("prior_precision", self.prior_precision, ())
        check_nonnegative("prior_precision", self.prior_precision)
        _check_parameter("data_scale", self.data_scale, positive=True)
        if self.batch_size is not None:
            check_count("batch_size", self.batch_size)

    def _data(self, x: Vector) -> tuple[Array, Array, Array, Array, Array]:
        check_shape("x", x, self.features.shape[1:])
        features = self.features.astype(x.dtype)
        scale, prior = jnp.asarray(self.data_scale, x.dtype), jnp.asarray(self.prior_precision, x.dtype)
        return features, self.labels.astype(x.dtype), features @ x, scale, prior

    def value(self, x: Vector) -> Scalar:
        _, labels, logits, scale, prior = self._data(x)
        return scale * jnp.sum(jax.nn.softplus(logits) - labels * logits) + 0.5 * prior * jnp.dot(x, x)

    def gradient(self, x: Vector) -> Vector:
        features, labels, logits, scale, prior = self._data(x)
        return scale * ((jax.nn.sigmoid(logits) - labels) @ features) + prior * x

    def hessian(self, x: Vector) -> Matrix:
        features, _, logits, scale, prior = self._data(x)
        # σ(z) σ(−z), not σ(1 − σ): the latter cancels where the prediction is sure
        curve = jax.nn.sigmoid(logits) * jax.nn.sigmoid(-logits)
        return scale * ((features * curve[:, None]).T @ features) + prior * jnp.eye(x.shape[0], dtype=x.dtype)

    def minibatch(self, key: Key) -> "LogisticRegression":
        if self.batch_size is None:
            return self
        n = self.features.shape[0]
        rows = jax.random.randint(key, (self.batch_size,), 0, n)
        scale = self.data_scale * (n / self.batch_size)
        return LogisticRegression(self.features[rows], self.labels[rows], self.prior_precision, None, scale)


class Polynomial(AbstractPotential):
    """L(x) = Σ_t θ_t Π_i z_i^{e_ti}, with z = (x − center) / scale.

    - `coefficients`: θ, (terms,). `exponents`: e, `terms` tuples of d whole numbers, all different.
    - `center`, `scale`: (d,) or a number.
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
        self.center, self.scale = _number("center", center), _number("scale", scale)
        check_shape("coefficients", self.coefficients, (len(self.exponents),))
        for name in ("center", "scale"):
            if np.shape(getattr(self, name)) != ():
                check_shape(name, getattr(self, name), (len(self.exponents[0]),))
        _check_finite("center", self.center)
        check_positive("scale", self.scale)

    def _derivatives(self, x: Vector, order: int) -> Array:
        check_shape("x", x, (len(self.exponents[0]),))
        z = (x - _like(x, self.center)) / _like(x, self.scale)
        return derivatives(self.coefficients.astype(x.dtype), z, self.exponents, order)

    def value(self, x: Vector) -> Scalar:
        return self._derivatives(x, 0)[0]

    def gradient(self, x: Vector) -> Vector:
        return self._derivatives(x, 1) / _like(x, self.scale)

    def hessian(self, x: Vector) -> Matrix:
        scale = _like(x, self.scale)
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
