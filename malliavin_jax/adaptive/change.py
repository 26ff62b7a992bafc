"""Do the older data still agree with the newer? A test at each place where what is remembered can be cut in two.

The newer episodes have the normal equations A, b and the squared scores J = Σ s sᵀ; the older ones, other episodes,
have the fit θ_O with covariance V_O (see `fit.py`). If the loss stood still,

    U = b − A θ_O   has mean zero and   Cov U = J + A V_O A.

The statistic T = Uᵀ (A + λP)⁻¹ U is the energy of the correction that the newer data would make to the older fit. Its
law is that of Σ λ_j z_j², λ the eigenvalues of Cov U in the metric of the statistic; its first three cumulants are
traces, and the χ² with these cumulants (Hall 1983; Buckley & Eagleson 1988) gives the p-value.

A slow drift passes each of these tests until it has done harm; it shows where evidence adds up over updates. Let Φ be
the linear and the quadratic functions, G = ΦᵀAΦ and B, below, what V allows for a drift. The fit to all that is
remembered before an update is a mean age a behind it. So if the loss moves by Φv an update, its score at that fit,

    u = Φᵀ(b − Aθ),   has mean a G v   and   C = Cov u = Φᵀ(J + A V A)Φ − G B G,

and the u of successive updates are uncorrelated. Least squares with a memory as long as the fit's own,

    N = Σ ρ^j a G C⁻¹ u,   D = Σ ρ^j a² G C⁻¹ G,   E = Cov N = Σ ρ^2j a² G C⁻¹ G,   v̂ = D⁻¹ N,

outlives what is dropped. With Γ the part of gradients in G, the energy v̂ᵀΓv̂ has under v = 0 the law of Σ λ_j z_j²
again. Where it is too large, the memory is cut near the m updates that cost least, lag and noise together:

    (v̂ᵀΓv̂ − tr Γ Cov v̂) m²/4 + tr(Γ G⁻¹ΦᵀJΦG⁻¹)/m,

and grows slowly from there. The next fit, a mean age a' behind, has B = a'² v̂v̂ᵀ added to its covariance, less where v̂
may be chance.
"""

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.scipy.linalg import cho_solve, solve_triangular
from jax.scipy.special import gammaincc
from jaxtyping import Array, Bool, Float, Int

from .._base.small_tensors import matmul
from .._base.types import Scalar
from .equations import Equations, Mesh
from .fit import EXACT, Tuning, covariance, first_of_least, mixed, sandwich, solve
from .groups import Sums

LEAST_ROWS = 8.0  # on either side, below which there is nothing to test
OF_DRIFTS = 0.2  # of the rate of false alarms, the share of the test of drifts: it is made of what adds up
_LEAST_WINDOW = 8.0  # updates over which a drift is averaged, when the fit remembers fewer
_LEAST_MEMORY = 4.0  # updates that the fit must stand on before a drift is told from a bad start
_CLIP = 3.0  # standard errors of u, beyond which an update says no more of a drift: a jump is none
_GROWTH = 1.1  # an update, of the longest memory after a drift was found
_AGAIN = 0.05  # the level of the test while the memory is short because of a drift: more of the same is likely
_ROUNDING = 1e-10  # relative, of what is inverted


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


class Drift(NamedTuple):
    """What the updates have said of a slow drift: see the head of this file."""

    score: Float[Array, " q"]  # N
    information: Float[Array, "q q"]  # D
    spread: Float[Array, "q q"]  # E
    age: Scalar  # a of the latest update
    longest: Scalar  # updates that may be remembered
    allowed: Float[Array, "q q"]  # B of the latest fit
    p_value: Scalar


def no_drift(mesh: Mesh) -> Drift:
    q = smooth(mesh).shape[1]
    none = jnp.zeros((q, q), jnp.float64)
    one, infinite = (jnp.asarray(value, jnp.float64) for value in (1.0, jnp.inf))
    return Drift(none[0], none, none, one, infinite, none, one)


def smooth(mesh: Mesh) -> Float[Array, "p q"]:
    """Φ: the coefficients of x_i and of x_i x_j in units of the wide box, up to constants."""
    axes = [4 / n * (np.arange(size) - (size - 1) / 2) for size, n in zip(mesh.shape, mesh.intervals, strict=True)]
    x = [axis.ravel() for axis in np.meshgrid(*axes, indexing="ij")]
    columns = [*x, *(x[i] * x[j] for i in range(mesh.dim) for j in range(i, mesh.dim))]
    return jnp.asarray(np.stack([column - column.mean() for column in columns], 1), jnp.float64)


def followed(
    drift: Drift, mesh: Mesh, tuning: Tuning, newest: Sums, older: Sums, theta: Array, V: Array, level: float
) -> tuple[Drift, Bool[Array, ""]]:
    """The drift after one more update, B for a lag of one update, and whether a drift is found that was not known."""
    Phi, rows = smooth(mesh), newest.equations.rows
    A, b = mixed(newest.equations.gram, tuning.ratio), mixed(newest.equations.right, tuning.ratio)
    exact = EXACT * mixed(newest.equations.squares, tuning.ratio) / jnp.maximum(jnp.sum(rows), 1)
    G, slopes = (sandwich(Phi.T, part) for part in (A, newest.equations.gram[0]))
    J = sandwich(Phi.T, mixed(newest.scores, tuning.ratio) + exact * A)
    inverse = _inverse(J + sandwich(matmul(Phi.T, A), V) - sandwich(G, drift.allowed))
    u = matmul(Phi.T, b - matmul(A, theta))
    size = jnp.sqrt(jnp.maximum(matmul(u, matmul(inverse, u)), 1))
    u = u * jnp.minimum(1, _CLIP * len(u) ** 0.5 / size)

    age = (older.ages + older.updates) / jnp.maximum(older.updates, 1)
    known = (older.updates > 0) & (jnp.sum(rows) >= LEAST_ROWS) & jnp.all(jnp.isfinite(inverse))
    rho = 1 - 1 / jnp.maximum(older.updates, _LEAST_WINDOW)
    # After a cut, what long lags have said counts for no more than if it had been said by short ones.
    less = jnp.minimum(1, age / jnp.maximum(drift.age, 1)) ** 2
    N, D, E = (
        jnp.where(known, less * forget * old + new, old)
        for forget, old, new in (
            (rho, drift.score, age * matmul(G, matmul(inverse, u))),
            (rho, drift.information, age**2 * sandwich(G, inverse)),
            (rho**2, drift.spread, age**2 * sandwich(G, inverse)),
        )
    )
    bread = _inverse(D)
    v, spread = matmul(bread, N), sandwich(bread, E)
    # Half of the slopes on either side, so that the eigenvalues are those of a symmetric matrix.
    root = jnp.linalg.cholesky(slopes + _ROUNDING * jnp.diag(jnp.diagonal(slopes) + 1))
    energy, K = jnp.sum(matmul(v, root) ** 2), sandwich(root.T, spread)
    p = tail(K, energy)
    one = jnp.trace(sandwich(matmul(root.T, _inverse(G)), J))
    tiny = jnp.finfo(A.dtype).tiny
    best = jnp.cbrt(2 * one / jnp.maximum(energy - jnp.trace(K), tiny))
    is_short = drift.longest <= older.updates
    found = known & (p < jnp.where(is_short, _AGAIN, level)) & (is_short | (older.updates >= _LEAST_MEMORY))
    longest = jnp.where(found, best, _GROWTH * drift.longest)
    sure = jnp.where(found | is_short, 1, jnp.maximum(1 - 2 * jnp.trace(K) / jnp.maximum(energy, tiny), 0))
    after = Drift(N, D, E, jnp.where(known, age, drift.age), longest, sure * jnp.outer(v, v), p)
    return after, found & ~is_short


def within(updates: Float[Array, " groups"], longest: Scalar) -> Int[Array, ""]:
    """How many groups to keep, from the newest on, so that about so many updates are remembered."""
    total = jnp.cumsum(updates)
    off = jnp.abs(jnp.log(jnp.maximum(total, 1) / jnp.maximum(longest, 1)))
    closest = first_of_least(jnp.where(total > 0, off, jnp.inf)).astype(jnp.int32) + 1
    return jnp.where(total[-1] > longest, closest, len(updates)).astype(jnp.int32)


def _inverse(matrix: Float[Array, "q q"]) -> Float[Array, "q q"]:
    """Of a covariance that may be singular, as that of points all at one place: then a large one there."""
    diagonal, tiny = jnp.diagonal(matrix), math.sqrt(np.finfo(np.float64).tiny)
    scale = jnp.sqrt(jnp.maximum(diagonal, 0) + 1e-30 * jnp.trace(matrix) + tiny)
    unit = jnp.outer(scale, scale)
    return jnp.linalg.inv(matrix / unit + _ROUNDING * jnp.eye(len(scale), dtype=scale.dtype)) / unit
