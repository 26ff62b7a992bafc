"""Do the older data still agree with the newer? A test of each memory against the next shorter one.

Memories k < m hold the same points with weights ρ_k^age ≤ ρ_m^age. What m has and k has not, O = m − k, is again a sum
over points with weights that are not negative, most of them old. Let θ_O be the fit to it. If the loss stood still,

    U = b_k − A_k θ_O,   Cov U = J_k + A_k V_O A_k,   J = Σ w² s sᵀ over episodes,

has mean zero, V_O being the covariance of θ_O (see `fit.py`). The shared points make U smaller than this, and
(w_m − w_k)² ≤ w_m² − w_k² makes J_m − J_k at least the J of O, so the test is cautious. The statistic

    T = Uᵀ (A_k + λP)⁻¹ U

is the energy of the correction that the newer data would make to the older fit. Its law is that of Σ λ_j z_j², λ the
eigenvalues of Cov U in the metric of the statistic; its first three cumulants are traces, and the χ² with these
cumulants (Hall 1983; Buckley & Eagleson 1988) gives the p-value.
"""

import jax.numpy as jnp
from jax.scipy.linalg import cho_solve, solve_triangular
from jax.scipy.special import gammaincc
from jaxtyping import Array, Float

from .._base.types import Scalar
from .equations import Equations, Mesh
from .fit import Tuning, covariance, mixed, sandwich, solve

LEAST_ROWS = 8.0  # of older data, below which there is nothing to test against


def p_value(
    mesh: Mesh,
    tuning: Tuning,
    newer: Equations,
    longer: Equations,
    newer_scores: Float[Array, "powers p p"],
    longer_scores: Float[Array, "powers p p"],
) -> Scalar:
    """The probability of a disagreement at least this large if the loss stood still."""
    older = Equations(*(a - b for a, b in zip(longer, newer, strict=True)))
    reference = solve(mesh, older, tuning)
    spread = covariance(mesh, tuning, reference, longer_scores - newer_scores)
    A, b = mixed(newer.gram, tuning.ratio), mixed(newer.right, tuning.ratio)
    score = b - A @ reference.theta
    noise = mixed(newer_scores, tuning.ratio) + sandwich(A, spread)
    factor = solve(mesh, newer, tuning).factor
    statistic = score @ cho_solve((factor, True), score)
    half = solve_triangular(factor, noise, lower=True)
    K = solve_triangular(factor, half.T, lower=True)
    enough = jnp.sum(older.rows) >= LEAST_ROWS
    return jnp.where(enough & (jnp.sum(newer.rows) > 0), tail((K + K.T) / 2, statistic), 1)


def tail(K: Float[Array, "p p"], statistic: Scalar) -> Scalar:
    """P(Σ λ_j z_j² ≥ statistic), λ the eigenvalues of K, by the χ² of the same first three cumulants."""
    square = K @ K
    first, second, third = jnp.trace(K), 2 * jnp.trace(square), 8 * jnp.sum(square * K)
    is_sound = (second > 0) & (third > 0)
    second, third = jnp.where(is_sound, second, 1), jnp.where(is_sound, third, 1)
    freedom = 8 * second**3 / third**2
    place = freedom + (statistic - first) * jnp.sqrt(2 * freedom / second)
    # In float32, which is enough for a p-value: JAX cannot lower it for float64 inside a program of float32.
    found = gammaincc(*((half / 2).astype(jnp.float32) for half in (freedom, jnp.maximum(place, 0))))
    return jnp.where(is_sound, found, 1).astype(K.dtype)


def levels(false_alarm: float, pairs: int) -> Float[Array, " pairs"]:
    """What each test may spend of the rate of false alarms, most of it where one costs least: on the longest memory."""
    shares = 2.0 ** jnp.arange(pairs, dtype=jnp.float64)
    return false_alarm * shares / jnp.sum(shares)


def longest_agreeing(p_values: Float[Array, " pairs"], level: Float[Array, " pairs"]) -> Array:
    """The number of the longest memory such that it and every shorter one agree with the next shorter."""
    return jnp.sum(jnp.cumprod((p_values >= level).astype(jnp.int32)))
