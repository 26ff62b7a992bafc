"""Do the older data still agree with the newer? A test at each place where what is remembered can be cut in two.

The newer episodes have the normal equations A, b and the squared scores J = Σ s sᵀ; the older ones, other episodes,
have the fit θ_O with covariance V_O (see `fit.py`). If the loss stood still,

    U = b − A θ_O   has mean zero and   Cov U = J + A V_O A.

The statistic T = Uᵀ (A + λP)⁻¹ U is the energy of the correction that the newer data would make to the older fit. Its
law is that of Σ λ_j z_j², λ the eigenvalues of Cov U in the metric of the statistic; its first three cumulants are
traces, and the χ² with these cumulants (Hall 1983; Buckley & Eagleson 1988) gives the p-value.
"""

import jax.numpy as jnp
import numpy as np
from jax.scipy.linalg import cho_solve, solve_triangular
from jax.scipy.special import gammaincc
from jaxtyping import Array, Float, Int

from .._base.small_tensors import matmul
from .._base.types import Scalar
from .equations import Equations, Mesh
from .fit import EXACT, Tuning, covariance, first_of_least, mixed, sandwich, solve

LEAST_ROWS = 8.0  # on either side, below which there is nothing to test


def p_value(
    mesh: Mesh,
    tuning: Tuning,
    newer: Equations,
    older: Equations,
    newer_scores: Float[Array, "powers p p"],
    older_scores: Float[Array, "powers p p"],
) -> Scalar:
    """The probability of a disagreement at least this large if the loss stood still."""
    reference = solve(mesh, older, tuning)
    spread = covariance(mesh, tuning, reference, older_scores)
    A, b = mixed(newer.gram, tuning.ratio), mixed(newer.right, tuning.ratio)
    score = b - matmul(A, reference.theta)
    # Where data are exact the scores are rounding, and rounding is no change of the loss.
    exact = EXACT * mixed(newer.squares, tuning.ratio) / jnp.maximum(jnp.sum(newer.rows), 1)
    noise = mixed(newer_scores, tuning.ratio) + exact * A + sandwich(A, spread)
    factor = solve(mesh, newer, tuning).factor
    statistic = matmul(score, cho_solve((factor, True), score))
    half = solve_triangular(factor, noise, lower=True)
    K = solve_triangular(factor, half.T, lower=True)
    enough = (jnp.sum(older.rows) >= LEAST_ROWS) & (jnp.sum(newer.rows) >= LEAST_ROWS)
    return jnp.where(enough, tail((K + K.T) / 2, statistic), 1)


def tail(K: Float[Array, "p p"], statistic: Scalar) -> Scalar:
    """P(Σ λ_j z_j² ≥ statistic), λ the eigenvalues of K, by the χ² of the same first three cumulants."""
    square = matmul(K, K)
    first, second, third = jnp.trace(K), 2 * jnp.trace(square), 8 * jnp.sum(square * K)
    is_sound = (second > 0) & (third > 0)
    second, third = jnp.where(is_sound, second, 1), jnp.where(is_sound, third, 1)
    freedom = 8 * second**3 / third**2
    place = freedom + (statistic - first) * jnp.sqrt(2 * freedom / second)
    # In float32, which is enough for a p-value: JAX cannot lower it for float64 inside a program of float32.
    found = gammaincc(*((half / 2).astype(jnp.float32) for half in (freedom, jnp.maximum(place, 0))))
    return jnp.where(is_sound, found, 1).astype(K.dtype)


def levels(false_alarm: float, cuts: int) -> Float[Array, " cuts"]:
    """What each test may spend of the rate of false alarms, most of it where one costs least: on the oldest cut."""
    shares = 2.0 ** np.arange(cuts)
    return jnp.asarray(false_alarm * shares / np.sum(shares), jnp.float64)


def keep(p_values: Float[Array, " cuts"], level: Float[Array, " cuts"]) -> Int[Array, ""]:
    """How many groups to keep, from the newest on: all, or those before the cut with the clearest evidence."""
    evidence = p_values / level
    return jnp.where(jnp.all(evidence >= 1), p_values.shape[0], first_of_least(evidence)).astype(jnp.int32) + 1
