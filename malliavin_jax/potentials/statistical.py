"""The losses of statistics: negative logarithms of a Gaussian mixture and of the posterior of a logistic regression."""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float

from .._base.checks import (
    check_count,
    check_finite,
    check_nonnegative,
    check_positive,
    check_shape,
    float_array,
    is_concrete,
)
from .._base.small_tensors import HIGHEST, matmul
from .._base.types import Key, Matrix, Scalar, Vector
from .base import (
    AbstractMinibatchPotential,
    AbstractPotential,
    check_parameter,
    check_symmetric,
    number,
    parameter,
)


class GaussianMixture(AbstractPotential):
    """L(x) = −log Σ_k w_k N(x; μ_k, Σ_k).

    With responsibilities r_k ∝ w_k N(x; μ_k, Σ_k) and s_k = Σ_k⁻¹ (x − μ_k): ∇L = Σ_k r_k s_k and
    ∇²L = Σ_k r_k [Σ_k⁻¹ − (s_k − ∇L)(s_k − ∇L)ᵀ], which stay accurate where every density underflows.
    Kept are the logarithms of the weights and W_k, the inverse of Σ_k's Cholesky factor (Σ_k⁻¹ = W_kᵀ W_k).

    Args:
        means: μ, (k, d).
        weights: w, (k,), positive, normalised here (None: equal).
        covariances: Σ, (k, d, d), or a number v for v I (None: I).

    Raises:
        ValueError: if the shapes do not go together, a weight is not positive, or a covariance is not symmetric and
            positive definite.

    Example:
        ```python
        import jax.numpy as jnp
        import malliavin_jax as mj

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

    def _terms(self, x: Vector) -> "_Components":
        check_shape("x", x, (self.means.shape[1],))
        whiten, means = self.whiten.astype(x.dtype), self.means.astype(x.dtype)
        white = jnp.einsum("kij,kj->ki", whiten, x[None] - means, precision=HIGHEST)
        log_det = jnp.sum(jnp.log(jnp.diagonal(whiten, axis1=1, axis2=2)), axis=1)
        log_weights = jax.nn.log_softmax(self.log_weights.astype(x.dtype))
        constant = 0.5 * x.shape[0] * math.log(2 * math.pi)
        log_term = log_weights + log_det - 0.5 * jnp.sum(white**2, axis=1) - constant
        precision = jnp.einsum("kia,kib->kab", whiten, whiten, precision=HIGHEST)
        return _Components(log_term, jnp.einsum("kij,ki->kj", whiten, white, precision=HIGHEST), precision)

    def value(self, x: Vector) -> Scalar:
        return -jax.nn.logsumexp(self._terms(x).log_density)

    def gradient(self, x: Vector) -> Vector:
        terms = self._terms(x)
        return matmul(jax.nn.softmax(terms.log_density), terms.slope)

    def hessian(self, x: Vector) -> Matrix:
        terms = self._terms(x)
        share = jax.nn.softmax(terms.log_density)
        spread = terms.slope - matmul(share, terms.slope)[None]
        return jnp.einsum(
            "k,kij->ij", share, terms.precision - spread[:, :, None] * spread[:, None, :], precision=HIGHEST
        )


class _Components(NamedTuple):
    """What the components of a Gaussian mixture are at x: log w_k N(x; μ_k, Σ_k), s_k and Σ_k⁻¹."""

    log_density: Float[Array, " k"]
    slope: Float[Array, "k d"]
    precision: Float[Array, "k d d"]


class LogisticRegression(AbstractMinibatchPotential):
    """The negative log posterior of logistic regression under a Gaussian prior,

    L(x) = c Σ_i [log(1 + exp(a_i·x)) − y_i a_i·x] + ½ λ |x|².

    Args:
        features: rows a_i, (n, d).
        labels: y, (n,), each 0 or 1.
        prior_precision: λ, non-negative.
        batch_size: B rows, drawn with replacement, make a minibatch (None: the whole data).
        data_scale: c, positive. A minibatch has c n/B in its place and the full prior, which makes it unbiased.

    Raises:
        ValueError: if the shapes do not go together, a label is not 0 or 1, or a number is out of its range.

    Example:
        ```python
        import jax
        import jax.numpy as jnp
        import malliavin_jax as mj

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

    def _data(self, x: Vector) -> "_Data":
        check_shape("x", x, self.features.shape[1:])
        features = self.features.astype(x.dtype)
        return _Data(
            features=features,
            labels=self.labels.astype(x.dtype),
            logits=matmul(features, x),
            scale=jnp.asarray(self.data_scale, x.dtype),
            prior=jnp.asarray(self.prior_precision, x.dtype),
        )

    def value(self, x: Vector) -> Scalar:
        data = self._data(x)
        losses = jax.nn.softplus(data.logits) - data.labels * data.logits
        return data.scale * jnp.sum(losses) + 0.5 * data.prior * jnp.sum(x * x)

    def gradient(self, x: Vector) -> Vector:
        data = self._data(x)
        return data.scale * matmul(jax.nn.sigmoid(data.logits) - data.labels, data.features) + data.prior * x

    def hessian(self, x: Vector) -> Matrix:
        data = self._data(x)
        # σ(z) σ(−z), not σ(1 − σ): the latter cancels where the prediction is sure
        curve = jax.nn.sigmoid(data.logits) * jax.nn.sigmoid(-data.logits)
        of_data = matmul((data.features * curve[:, None]).T, data.features)
        return data.scale * of_data + data.prior * jnp.eye(x.shape[0], dtype=x.dtype)

    def minibatch(self, key: Key) -> "LogisticRegression":
        if self.batch_size is None:
            return self
        n = self.features.shape[0]
        rows = jax.random.randint(key, (self.batch_size,), 0, n)
        scale = self.data_scale * (n / self.batch_size)
        return LogisticRegression(
            self.features[rows], self.labels[rows], prior_precision=self.prior_precision, data_scale=scale
        )


class _Data(NamedTuple):
    """The data of a logistic regression in the dtype of x, with a_i·x."""

    features: Float[Array, "n d"]
    labels: Float[Array, " n"]
    logits: Float[Array, " n"]
    scale: Scalar
    prior: Scalar
