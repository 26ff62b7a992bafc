"""The penalised spline of some sums, on the device: its smoothing by restricted likelihood, and its error.

With κ the weight of a Hessian against a gradient, A = A_g + κ A_H, b = b_g + κ b_H and n rows in all,

    θ = M⁻¹ b,   M = A + λP,   Q = yᵀy − θᵀb,   σ² = Q/(n − null(P)),

and λ minimises the restricted likelihood of the prior N(0, σ²(λP)⁻), with σ² put in its place:

    (n − null(P)) log Q + log det M − rank(P) log λ.

It is found on a grid of log λ, then at the vertex of the parabola through the three lowest: no search whose length
depends on the data. κ is what is left of the gradients over what is left of the Hessians, found in turn with λ.

Sums that forget weigh old points less, Σ w FᵀF with w = ρ^age; they are fitted as if w counted points. The error knows
better. With s_i the scores of the episodes, θ − θ₀ = M⁻¹(Σ w_i s_i − λPθ₀), so that

    V = M⁻¹ (Σ_i w_i² s_i s_iᵀ + σ²λP) M⁻¹,

the first term true for any noise, dependent within an episode or of unequal size, and the second the mean squared bias
of the smoothing (see `fitting/errors.py`). With ρ = 1 and white noise it is σ²M⁻¹, the posterior variance.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy.linalg import cho_solve
from jaxtyping import Array, Float, Int

from .._base.small_tensors import HIGHEST, matmul
from .._base.types import Scalar
from .equations import Equations, Mesh

_GRID = np.arange(-15.0, 15.1, 3.0)  # of log λ, around the one at which penalty and data weigh the same
_ROUNDS = 3  # of λ and κ in turn
_MOST = 1e3  # a Hessian counts for no more gradients than this: what is left of exact ones is misfit
EXACT = 1e-9  # data are not taken for more exact than this part of their squares
_RIDGE = 16 * float(np.finfo(np.float64).eps)  # of the mean diagonal, for what neither data nor penalty sees


class Tuning(NamedTuple):
    """What is chosen besides θ: log λ, κ, and the variance σ² of a gradient, in the units of the wide box."""

    log_smoothing: Scalar
    ratio: Scalar
    variance: Scalar


class Solved(NamedTuple):
    """θ, and the lower Cholesky factor of M."""

    theta: Float[Array, " p"]
    factor: Float[Array, "p p"]


def no_tuning() -> Tuning:
    return Tuning(*(jnp.asarray(value, jnp.float64) for value in (0.0, 1.0, 1.0)))


def mixed(parts: Array, ratio: Scalar) -> Array:
    """parts[0] + κ parts[1] + κ² parts[2], as many as there are."""
    total = parts[0]
    for power in range(1, parts.shape[0]):
        total = total + ratio**power * parts[power]
    return total


def solve(mesh: Mesh, eq: Equations, tuning: Tuning) -> Solved:
    """The fit with a tuning chosen before."""
    A, b = mixed(eq.gram, tuning.ratio), mixed(eq.right, tuning.ratio)
    return _solve(A, b, jnp.exp(tuning.log_smoothing) * mesh.penalty())


def _solve(A: Array, b: Array, Q: Array) -> Solved:
    p = A.shape[0]
    mean = jnp.trace(A) / p + jnp.finfo(A.dtype).tiny
    # No derivative sees a constant: the mean of θ is held at 0, as firmly as the data hold the rest.
    M = A + Q + mean / p + _RIDGE * mean * jnp.eye(p, dtype=A.dtype)
    factor = jnp.linalg.cholesky(M)
    return Solved(cho_solve((factor, True), b), factor)


def restricted_fit(mesh: Mesh, eq: Equations) -> tuple[Tuning, Solved]:
    """The fit with λ, κ and σ² chosen from the sums alone."""
    P = mesh.penalty()
    rank = mesh.size - mesh.null_dim
    free = jnp.maximum(jnp.sum(eq.rows) - mesh.null_dim, 1)

    def at_ratio(ratio: Scalar) -> tuple[Tuning, Solved]:
        A, b, squares = (mixed(part, ratio) for part in (eq.gram, eq.right, eq.squares))

        def left(theta: Array) -> Scalar:
            return jnp.maximum(squares - matmul(theta, b), EXACT * squares + jnp.finfo(A.dtype).tiny)

        def criterion(place: Scalar) -> Scalar:
            theta, factor = _solve(A, b, jnp.exp(place) * P)
            logdet = 2 * jnp.sum(jnp.log(jnp.diagonal(factor)))
            value = free * jnp.log(left(theta)) + logdet - rank * place
            return jnp.where(jnp.isfinite(value), value, jnp.inf)

        middle = jnp.log(jnp.trace(A) + jnp.finfo(A.dtype).tiny) - jnp.log(jnp.trace(P))
        places = middle + jnp.asarray(_GRID)
        place = _vertex(places, lax.map(criterion, places))
        solved = _solve(A, b, jnp.exp(place) * P)
        return Tuning(place, ratio, left(solved.theta) / free), solved

    if not mesh.hessians:
        return at_ratio(jnp.ones((), eq.gram.dtype))

    def again(ratio: Scalar, _: None) -> tuple[Scalar, None]:
        theta = at_ratio(ratio)[1].theta
        fitted = jnp.einsum("p,kpq,q->k", theta, eq.gram, theta, precision=HIGHEST)
        left = eq.squares - 2 * matmul(eq.right, theta) + fitted
        left = jnp.maximum(left, EXACT * eq.squares + jnp.finfo(left.dtype).tiny) / jnp.maximum(eq.rows, 1)
        return jnp.minimum(left[0] / left[1], _MOST), None

    ratio, _ = lax.scan(again, jnp.ones((), eq.gram.dtype), None, length=_ROUNDS - 1)
    return at_ratio(ratio)


def _vertex(places: Float[Array, " n"], values: Float[Array, " n"]) -> Scalar:
    """Where the parabola through the lowest value and its neighbours is lowest; at an end, the end."""
    lowest = first_of_least(values)
    best = jnp.clip(lowest, 1, len(_GRID) - 2)
    low, middle, high = (values[best + k] for k in (-1, 0, 1))
    bend = low - 2 * middle + high
    is_inside = (middle <= low) & (middle <= high) & (bend > 0) & jnp.isfinite(bend)
    shift = jnp.where(is_inside, (low - high) / (2 * jnp.where(is_inside, bend, 1)), 0)
    return jnp.where(is_inside, places[best] + shift * (places[1] - places[0]), places[lowest])


def first_of_least(values: Float[Array, " n"]) -> Int[Array, ""]:
    """`argmin`, which JAX cannot lower for float64 inside a program of float32."""
    number = jnp.arange(values.shape[0], dtype=jnp.int32)
    return jnp.min(jnp.where(values == jnp.min(values), number, values.shape[0] - 1))


def covariance(mesh: Mesh, tuning: Tuning, solved: Solved, scores: Float[Array, "powers p p"]) -> Float[Array, "p p"]:
    """V of the head of this file, from Σ w² s sᵀ by powers of κ."""
    inverse = cho_solve((solved.factor, True), jnp.eye(mesh.size, dtype=solved.factor.dtype))
    prior = tuning.variance * jnp.exp(tuning.log_smoothing) * mesh.penalty()
    return sandwich(inverse, mixed(scores, tuning.ratio) + prior)


def sandwich(bread: Float[Array, "p q"], filling: Float[Array, "q q"]) -> Float[Array, "p p"]:
    found = matmul(matmul(bread, filling), bread.T)
    return (found + found.T) / 2


def inflation(eq: Equations, tuning: Tuning, solved: Solved) -> Scalar:
    """n/(n − effective parameters): residuals at a fit of the same points are too small by this."""
    used = jnp.trace(cho_solve((solved.factor, True), mixed(eq.gram, tuning.ratio)))
    rows = jnp.sum(eq.rows)
    return jnp.where(rows > 0, jnp.clip(rows / jnp.maximum(rows - used, 1), 1, 4), 1)
