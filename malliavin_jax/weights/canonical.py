"""Malliavin weights S(u) as online recursions over one observed path.

The learner is a function of finitely many Gaussians, so integration by parts is finite-dimensional and exact:
for u_k with Σ_k (∂X_n/∂ξ_k) u_k = I, the Skorohod integral is the Gaussian divergence
S = Σ_k u_k·ξ_k − Σ_k div_{ξ_k} u_k, and E[∂_i φ(X_n)] = E[φ(X_n) S_i] for every smooth φ. Nothing below
discretises a continuous-time formula: with the third derivative of L handed in, each recursion *is* that divergence.

A scheme has `init(dim, dtype)`, `step(state, transition)` and `weight(state)`; the weight may be read at
every step. Throughout, M = I − εH_k is the Jacobian of one step and σ² = 2ε/β.

The divergence needs ∂³L; the argument `third` says where it comes from (see `third_derivative.py`).
"""

from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp

from .._base import small_tensors
from .._base.small_tensors import Leaves, Tensor, matmul, unroll
from .._base.types import Vector
from ..learner.learner import Transition
from .third_derivative import Third, check_third, jacobian, matrices, rank_one, relative_size, scaled_noise, trace_term


class CanonicalState(NamedTuple):
    """F is a vector, R and V = R⁻¹ are lower triangular, E has the index r first and is symmetric in the other two.

    In one dimension R stands for A itself. V is carried because XLA's CPU backend makes one loop for each array that a
    scan carries, and computes in it all that the array depends on and that is not carried: each entry of E would make
    R⁻¹ anew.
    """

    F: Leaves
    R: Leaves
    V: Leaves
    E: Leaves


class Canonical(eqx.Module):
    """u = (DX_n)ᵀ γ⁻¹ with γ the Malliavin covariance: least variance on smooth losses, never singular.

    With T_abp = ε ∂_a∂_b∂_p L(X_k) and every right-hand side taken before the step,

        F ← M F + ξ_{k+1}/σ + T:A           (T:A)_b = Σ_{a,p} T_abp A_ap
        E ← (M⊗M⊗M) E + Q                   Q_qrs = Σ_{p,c} (MA)_qp T_rcp (MA)_sc, symmetric in q and s as T is
        A ← M A M + I
        S = A⁻¹ (F − e1 − e2)               e1_s = Σ_{q,r} (A⁻¹)_qr E_qrs,  e2_r = Σ_{q,s} (A⁻¹)_qs E_qrs

    Where step sizes vary, A, F and E are counted in units of the first step: with r = ε_k/ε_0 the noise enters as
    r ξ_{k+1}/σ_k, and A ← M A M + r I.

    A ⪰ I, so nothing is divided by zero even where εH ≥ 1. O(d⁴) a step and O(d³) memory: meant for d ≤ 5.

    Where one direction spreads and another does not, A is as ill-conditioned as the spread squared, and float32 would
    lose the other. Beyond one dimension the recursion therefore runs in the coordinates in which A is I: with A = R Rᵀ
    and the orthonormal rows [W V] of [MR I] = R⁺ [W V], that is W = R⁺⁻¹MR and V = R⁺⁻¹, both of norm at most one,

        F ← W F + V (ξ_{k+1}/σ + T:A),   E ← (W⊗W⊗W) E + (V⊗V⊗V) Q,   R ← R⁺,   S = Vᵀ (F − Σ_q E_qq· − Σ_q E_q·q).

    Args:
        third: where ∂³L comes from: "covariation" (from observed Hessians and noise; any dimension; right to leading
            order in ε, see `Adapted` for rough losses), "divided" or "ito" (one dimension), or a function x ↦ ∂³L(x)
            of shape (d, d, d), with which the weight is exact.

    Raises:
        ValueError: if `third` is none of these, or is one for one dimension where d > 1; or, at the first step, if
            the learner shows only products of its Hessian with vectors.

    Example:
        ```python
        import jax
        import malliavin_jax as mj

        loss = mj.potentials.Quartic()
        learner = mj.ForwardLearner(loss, mj.initial.Normal(), step_size=0.01, gradient_noise=0.5)
        path = jax.jit(lambda key: mj.simulate(key, learner, 80))(jax.random.key(0))
        weights = mj.weigh(path, mj.Canonical())
        exact = mj.weigh(path, mj.Canonical(third=lambda x: (6 * x).reshape(1, 1, 1)))  # ∂³ of the quartic x⁴/4 + x²/2
        ```
    """

    third: Third = eqx.field(default="covariation", static=True)

    def __check_init__(self):
        check_third(self.third)

    def init(self, dim: int, dtype: Any) -> CanonicalState:
        """The state before the first step: all zero."""
        if dim > 1 and self.third in ("divided", "ito"):
            raise ValueError(f"third={self.third!r} serves Canonical in one dimension only, got d = {dim}")
        F, R, E = (small_tensors.zeros(dim, rank, dtype) for rank in (1, 2, 3))
        R, E = (small_tensors.pack_lower(small_tensors.unpack(*whole)) for whole in ((R, 2), (E, 3)))
        return CanonicalState(F, R, () if dim == 1 else R, E)

    def step(self, state: CanonicalState, transition: Transition) -> CanonicalState:
        """The recursion above, one step on."""
        M, noise = jacobian(matrices(transition).before, transition), scaled_noise(transition)
        if len(M) == 1:
            return self._step_on_the_line(state, M[0, 0], noise[0], transition)
        F, R, _, E = _tensors(state)
        size = relative_size(transition)
        MR = matmul(M, R)
        if size is None:
            R_next, V = small_tensors.factor_with_identity(MR)
        else:  # A ← M A M + r I is √r times the factor of MA M/r + I
            root = jnp.sqrt(size)
            R_next, V = small_tensors.factor_with_identity(small_tensors.scale(MR, 1 / root))
            R_next, V = small_tensors.scale(R_next, root), small_tensors.scale(V, 1 / root)
            noise = small_tensors.scale(noise, size)
        W = matmul(V, MR)
        Y = matmul(W, R.T)  # V M A
        if callable(self.third):
            T = unroll(transition.step_size * self.third(transition.before.x))
            drift = (T * matmul(R, R.T)[:, None, :]).sum((0, 2))
            turned = matmul(V, T.reshape(len(V), -1)).reshape(T.shape)
            Q = matmul(Y, matmul(turned, Y.T))
        else:
            # T_abp = K_ab y_p. Of the indices of T_rcp the noise has c or p, half each, and not r, on which V acts:
            # V depends on the same noise, and the product would not average out.
            K, y = rank_one(self.third, transition)
            drift = matmul(K, matmul(R, matmul(R.T, y)))
            P = matmul(matmul(V, K), small_tensors.scale(Y.T, 0.5))[:, :, None] * matmul(Y, y)[None, None, :]
            Q = P + P.transpose(0, 2, 1)
        turned = matmul(W, E.reshape(len(W), -1)).reshape(E.shape)
        return CanonicalState(
            small_tensors.pack(matmul(W, F) + matmul(V, noise + drift)),
            small_tensors.pack_lower(R_next),
            small_tensors.pack_lower(V),
            small_tensors.pack_lower(matmul(W, matmul(turned, W.T)) + Q),
        )

    def _step_on_the_line(self, state: CanonicalState, m: Any, noise: Any, transition: Transition) -> CanonicalState:
        """One dimension: the first recursion, with numbers for tensors."""
        (F,), (A,), _, (E,) = state
        if callable(self.third):
            b = transition.step_size * self.third(transition.before.x)[0, 0, 0]
        else:
            b = trace_term(self.third, transition)[0]
        size, mA = relative_size(transition), m * A
        noise, floor = (noise, 1) if size is None else (size * noise, size)
        return CanonicalState((m * F + noise + b * A,), (m * mA + floor,), (), (m * m * m * E + mA * b * mA,))

    def weight(self, state: CanonicalState) -> Vector:
        """S after the last step taken."""
        if len(state.F) == 1:
            (F,), (A,), _, (E,) = state
            return jnp.stack([(F - 2 * E / A) / A])
        F, _, V, E = _tensors(state)
        pairs = range(len(F))
        traced = F - sum(E[q, q] for q in pairs) - sum(E[:, q, q] for q in pairs)
        return small_tensors.roll(matmul(V.T, traced))


def _tensors(state: CanonicalState) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """F, R, V and E[r, q, s] to compute with."""
    dim = len(state.F)
    R, V = (small_tensors.unpack_lower(leaves, dim) for leaves in (state.R, state.V))
    return small_tensors.unpack(state.F, 1), R, V, small_tensors.unpack_lower(state.E, dim, mirror=True)
