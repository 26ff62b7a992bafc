"""The losses of statistics: negative logarithms of a Gaussian mixture and of the posterior of a logistic regression."""

import functools
import math
from collections.abc import Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float

from .._base.checks import check_count, check_nonnegative, check_positive, check_shape, float_array, is_concrete
from .._base.types import Key, Matrix, Scalar, Vector
from .base import (
    AbstractMinibatchPotential,
    AbstractPotential,
    check_finite,
    check_parameter,
    check_symmetric,
    number,
    parameter,
)


class GaussianMixture(AbstractPotential):
    """L(x) = −log Σ_k w_k N(x; μ_k, Σ_k).

    - `means`: μ, (k, d). `weights`: w, (k,), positive, normalised here (None: equal).
    - `covariances`: Σ, (k, d, d), or a number v for v I (None: I).

    With responsibilities r_k ∝ w_k N(x; μ_k, Σ_k) and s_k = Σ_k⁻¹ (x − μ_k): ∇L = Σ_k r_k s_k and
    ∇²L = Σ_k r_k [Σ_k⁻¹ − (s_k − ∇L)(s_k − ∇L)ᵀ], which stay accurate where every density underflows.
    Kept are the logarithms of the weights and W_k, the inverse of Σ_k's Cholesky factor (Σ_k⁻¹ = W_kᵀ W_k).

    ```python
    wells = mj.potentials.GaussianMixture([[-1.0], [1.0]], weights=[0.3, 0.7], covariances=0.2)
    wells.value(jnp.array([1.0])) < wells.value(jnp.array([-1.0]))  # the heavier well is deeper
    ```
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
        check_finite("means", self.means)
        k, d = self.means.shape
        dtype = self.means.dtype
        raw = jnp.ones((k,), dtype) if weights is None else float_array("weights", weights).astype(dtype)
        check_shape("weights", raw, (k,))
        check_positive("weights", raw)
        self.log_weights = jnp.log(raw / jnp.sum(raw))
        spread = jnp.asarray(number("covariances", 1.0 if covariances is None else covariances), dtype)
        if spread.ndim == 0:
            check_positive("covariances", spread)
            self.whiten = jnp.broadcast_to(jnp.eye(d, dtype=dtype) / jnp.sqrt(spread), (k, d, d))
            return
        check_shape("covariances", spread, (k, d, d))
        check_symmetric("covariances", spread)
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

    ```python
    features, labels = jax.random.normal(jax.random.key(0), (50, 2)), jnp.arange(50) % 2
    regression = mj.potentials.LogisticRegression(features, labels, batch_size=10)
    regression.hessian(jnp.zeros(2)).shape  # (2, 2): of all the data; a learner sees minibatches
    ```
    """

    features: Float[Array, "n d"] = eqx.field(converter=functools.partial(float_array, "features"))
    labels: Float[Array, " n"] = eqx.field(converter=functools.partial(float_array, "labels"))
    prior_precision: Float[Array, "..."] | float = parameter("prior_precision", 1.0)
    batch_size: int | None = eqx.field(static=True, default=None)
    data_scale: Float[Array, "..."] | float = parameter("data_scale", 1.0)

    def __check_init__(self):
        check_shape("features", self.features, (None, None))
        check_count("the number of rows of features", self.features.shape[0])
        check_shape("labels", self.labels, self.features.shape[:1])
        check_finite("features", self.features)
        if is_concrete(self.labels) and not np.isin(np.asarray(self.labels), (0, 1)).all():
            raise ValueError(f"labels must be 0 or 1, got {np.unique(self.labels)}")
        check_shape("prior_precision", self.prior_precision, ())
        check_nonnegative("prior_precision", self.prior_precision)
        check_parameter("data_scale", self.data_scale, positive=True)
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
