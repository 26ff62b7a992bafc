"""Malliavin weights S(u) as online recursions over one observed path.

The learner is a function of finitely many Gaussians, so integration by parts is finite-dimensional and exact:
for u_k with Σ_k (∂X_n/∂ξ_k) u_k = I, the Skorohod integral is the Gaussian divergence
S = Σ_k u_k·ξ_k − Σ_k div_{ξ_k} u_k, and E[∂_i φ(X_n)] = E[φ(X_n) S_i] for every smooth φ. Nothing below
discretises a continuous-time formula: with the third derivative of L handed in, each recursion *is* that divergence.

A scheme has `init(dim, dtype)`, `step(state, transition)` and `weight(state)`; the weight may be read at
every step. Throughout, M = I − εH_k is the Jacobian of one step and σ² = 2ε/β.

The divergence needs ∂³L. `third` says where from:

- `"covariation"`: ε ∂_a∂_b∂_p L ≈ ε ΔH_ab ξ_p/σ, the quadratic covariation of Hessian and noise; any dimension,
  observed Hessians only. By Stein's lemma its mean is ε E ∂_a∂_b∂_p L(X_{k+1}) whatever the gradient noise and the
  minibatches: ΔX in place of σξ would add the noise's own variance to ξ's, and the covariance of a batch's gradient
  and Hessian. The default.
- `"divided"`: ε ΔH/ΔX, in one dimension.
- `"ito"`: β (g_{k+1} − g_k − H_k ΔX), the paper's; biased when gradients are noisy, because the noise of the last
  gradient then enters both the weight and the value it multiplies. `Canonical` takes it in one dimension only.
- a function x ↦ ∂³L(x) of shape (d, d, d): exact.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol, TypeVar, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from . import _tensor
from ._misc import check_count, check_nonnegative, is_concrete
from ._tensor import Leaves, Tensor, unroll
from ._types import Scalar, Vector
from .forward import Path, Point, Transition

Third = Literal["covariation", "divided", "ito"] | Callable[[Vector], Float[Array, "d d d"]]
State = TypeVar("State")


@runtime_checkable
class Scheme(Protocol[State]):
    """What `weigh` and `observe` need of a weight scheme."""

    def init(self, dim: int, dtype: Any) -> State: ...
    def step(self, state: State, transition: Transition) -> State: ...
    def weight(self, state: State) -> Vector: ...


class CanonicalState(NamedTuple):
    """F is a vector, R a matrix, E has three indices; in one dimension R stands for A itself."""

    F: Leaves
    R: Leaves
    E: Leaves


class Canonical(eqx.Module):
    """u = (DX_n)ᵀ γ⁻¹ with γ the Malliavin covariance: least variance of the closed forms, never singular.

    With T_abp = ε ∂_a∂_b∂_p L(X_k) and every right-hand side taken before the step,

        F ← M F + ξ_{k+1}/σ + T:A           (T:A)_b = Σ_{a,p} T_abp A_ap
        E ← (M⊗M⊗M) E + Q                   Q_qrs = Σ_{p,c} (MA)_qp T_rcp (MA)_sc
        A ← M A M + I
        S = A⁻¹ (F − e1 − e2)               e1_s = Σ_{q,r} (A⁻¹)_qr E_qrs,  e2_r = Σ_{q,s} (A⁻¹)_qs E_qrs

    A ⪰ I, so nothing is divided by zero even where εH ≥ 1. O(d⁴) a step and O(d³) memory: meant for d ≤ 5.

    Where one direction spreads and another does not, A is as ill-conditioned as the spread squared, and float32 would
    lose the other. Beyond one dimension the recursion therefore runs in the coordinates in which A is I: with A = R Rᵀ
    and the orthonormal rows [W V] of [MR I] = R⁺ [W V], that is W = R⁺⁻¹MR and V = R⁺⁻¹, both of norm at most one,

        F ← W F + V (ξ_{k+1}/σ + T:A),   E ← (W⊗W⊗W) E + (V⊗V⊗V) Q,   R ← R⁺,   S = Vᵀ (F − Σ_q E_qq· − Σ_q E_q·q).
    """

    third: Third = eqx.field(default="covariation", static=True)

    def __check_init__(self):
        _check_third(self.third)

    def init(self, dim: int, dtype: Any) -> CanonicalState:
        if dim > 1 and self.third in ("divided", "ito"):
            raise ValueError(f"third={self.third!r} serves Canonical in one dimension only, got d = {dim}")
        return CanonicalState(*(_tensor.zeros(dim, rank, dtype) for rank in (1, 2, 3)))

    def step(self, state: CanonicalState, transition: Transition) -> CanonicalState:
        F, R, E = (_tensor.unpack(leaves, rank) for leaves, rank in zip(state, (1, 2, 3), strict=True))
        M, noise = _jacobian(transition), _scaled_noise(transition)
        if len(M) == 1:
            return self._step_on_the_line(F[0], R[0, 0], E[0, 0, 0], M[0, 0], noise[0], transition)
        R_next, W, V = _tensor.factor_with_identity(M @ R)
        Y = W @ R.T  # V M A
        if callable(self.third):
            T = unroll(transition.step_size * self.third(transition.before.x))
            drift = (T * (R @ R.T)[:, None, :]).sum((0, 2))
            Q = (Y @ ((V @ T.reshape(len(V), -1)).reshape(T.shape) @ Y.T)).transpose(2, 0, 1)
        else:
            K, y = _rank_one(self.third, transition)  # T_abp = K_ab y_p
            drift = K @ (R @ (R.T @ y))
            Q = (Y @ y)[:, None, None] * (V @ K @ Y.T)[None, :, :]
        for _ in range(3):  # W on the first index, then the indices turn
            E = (W @ E.reshape(len(W), -1)).reshape(E.shape).transpose(1, 2, 0)
        return CanonicalState(*map(_tensor.pack, (W @ F + V @ (noise + drift), R_next, E + Q)))

    def _step_on_the_line(self, F: Any, A: Any, E: Any, m: Any, noise: Any, transition: Transition) -> CanonicalState:
        if callable(self.third):
            b = transition.step_size * self.third(transition.before.x)[0, 0, 0]
        else:
            b = _trace_term(self.third, transition)[0]
        mA = m * A
        return CanonicalState(*((leaf,) for leaf in (m * F + noise + b * A, m * mA + 1, m * m * m * E + mA * b * mA)))

    def weight(self, state: CanonicalState) -> Vector:
        F, R, E = (_tensor.unpack(leaves, rank) for leaves, rank in zip(state, (1, 2, 3), strict=True))
        if len(F) == 1:
            return _tensor.roll((F - 2 * E[0, 0] / R[0]) / R[0])
        pairs = range(len(F))
        traced = F - sum(E[q, q] for q in pairs) - sum(E[q, :, q] for q in pairs)
        return _tensor.roll(_tensor.inverse_of_lower(R).T @ traced)


class WindowState(NamedTuple):
    """V is a vector, c the sum of the window so far; S = V/c."""

    V: Leaves
    c: Scalar
    k: Int[Array, ""]


class Windowed(eqx.Module):
    """u_k = (a_k/σ) (∂X_n/∂ξ_k)⁻¹ σ with a late window a_k ∝ ρ^{n−k}, ρ = exp(−2·rate·ε), in any dimension.

        V ← M⁻¹ ρ (V − c b_k) + ξ_{k+1}/σ,   c ← ρ c + 1,   S = V/c

    with (b_k)_j = ε Σ_{p,a} (M⁻¹)_pa ∂_a∂_j∂_p L(X_k), to leading order ε times the gradient of the Laplacian. A
    positive rate puts the weight late, where the inverse Jacobian is tame. O(d²) memory and one solve with M a step;
    `neumann=m` replaces the solve by m terms of Σ (εH)^j v, which needs only Hessian-vector products.

    Where M is not positive definite (εH ≥ 1 in some direction, after X_0) the chain is too coarse for this scheme: the
    weight is NaN from there on, and `weigh` and `observe` raise an error. `Canonical` has no such limit.
    """

    rate: float | Scalar
    third: Third = eqx.field(default="covariation", static=True)
    neumann: int | None = eqx.field(default=None, static=True)

    def __check_init__(self):
        check_nonnegative("rate", self.rate)
        _check_third(self.third)
        if self.neumann is not None:
            check_count("neumann", self.neumann)

    def init(self, dim: int, dtype: Any) -> WindowState:
        return _window_init(dim, dtype, self.third)

    def step(self, state: WindowState, transition: Transition) -> WindowState:
        rho = jnp.exp(-2 * jnp.asarray(self.rate, transition.step_size.dtype) * transition.step_size)
        return _window_step(state, transition, self.third, decay=rho, gain=1, neumann=self.neumann)

    def weight(self, state: WindowState) -> Vector:
        return _window_weight(state)


class Reciprocal(eqx.Module):
    """The paper's choice u_t = 1/(s D_tX_s): the window of `Windowed` at rate 0.

    Its variance is some seventy times that of `Canonical` on the paper's own example; it is here to compare with.
    `jacobian="exponential"` takes the paper's left-point exp(−εH_k) (one dimension) for the Jacobian 1 − εH_k of the
    chain the learner really runs, which leaves a bias of order ε. The same limit εH < 1 as for `Windowed` holds
    for the exact Jacobian.
    """

    third: Third = eqx.field(default="covariation", static=True)
    jacobian: Literal["exact", "exponential"] = eqx.field(default="exact", static=True)

    def __check_init__(self):
        _check_third(self.third)
        if self.jacobian not in ("exact", "exponential"):
            raise ValueError(f"jacobian must be 'exact' or 'exponential', got {self.jacobian!r}")

    def init(self, dim: int, dtype: Any) -> WindowState:
        if self.jacobian == "exponential" and dim > 1:
            raise ValueError(f"jacobian='exponential' is the paper's, for one dimension, got d = {dim}")
        return _window_init(dim, dtype, self.third)

    def step(self, state: WindowState, transition: Transition) -> WindowState:
        exponential = self.jacobian == "exponential"
        return _window_step(state, transition, self.third, decay=1, gain=1, exponential=exponential)

    def weight(self, state: WindowState) -> Vector:
        return _window_weight(state)


class FixedWindow(eqx.Module):
    """A window given as numbers, a_1 … a_n, for conditioning at step n; see `minimum_variance_window`."""

    window: Float[Array, " steps"]
    third: Third = eqx.field(default="covariation", static=True)

    def init(self, dim: int, dtype: Any) -> WindowState:
        return _window_init(dim, dtype, self.third)

    def step(self, state: WindowState, transition: Transition) -> WindowState:
        gain = jnp.take(self.window, state.k, mode="fill", fill_value=0)
        return _window_step(state, transition, self.third, decay=1, gain=gain)

    def weight(self, state: WindowState) -> Vector:
        return _window_weight(state)


def weigh(path: Path, scheme: Scheme) -> Float[Array, "points d"]:
    """The weights of one path: row k is S(u) for conditioning at step k; row 0, with no noise yet, is 0."""
    dim, dtype = path.x.shape[1], path.x.dtype
    points = Point(path.x, path.gradient, path.hessian)
    before, after = (jax.tree.map(lambda leaf, s=s: leaf[s], points) for s in (slice(-1), slice(1, None)))

    def body(state: Any, pair: tuple[Point, Point]) -> tuple[Any, Vector]:
        before, after = pair
        state = scheme.step(state, Transition(before, after, path.step_size, path.inverse_temperature))
        return state, scheme.weight(state)

    _, weights = lax.scan(body, scheme.init(dim, dtype), (before, after))
    check_fine_enough(weights, jnp.arange(1, path.num_steps + 1, dtype=path.length.dtype) <= path.length, scheme)
    return jnp.concatenate([jnp.zeros((1, dim), dtype), weights])


def check_fine_enough(weight: Array, observed: Array, scheme: Scheme) -> None:
    """Raise where a window scheme met a step with εH ≥ 1 (silent while tracing: the weight is NaN then)."""
    if not is_concrete(weight, observed):
        return
    seen = np.asarray(observed)  # NumPy: inside another function's jit these concrete values stay concrete
    bad = np.count_nonzero(seen & ~np.isfinite(np.asarray(weight)).all(-1))
    if bad:
        raise ValueError(
            f"the chain is too coarse for {type(scheme).__name__}: I − εH was not positive definite before "
            f"{bad} of {np.count_nonzero(seen)} weights (or the path itself is not finite); "
            "use Canonical(), or a learner with a smaller step_size"
        )


def _check_third(third: Third) -> None:
    if not callable(third) and third not in ("covariation", "divided", "ito"):
        raise ValueError(f"third must be 'covariation', 'divided', 'ito' or a function, got {third!r}")


def _jacobian(transition: Transition) -> Tensor:
    scaled = unroll(transition.step_size * transition.before.hessian)
    return _tensor.eye(scaled) - scaled


def _scaled_noise(transition: Transition) -> Tensor:
    """ξ_{k+1}/σ, read off the observed step: σξ = X_{k+1} − X_k + ε g_k."""
    before, after, step_size, inverse_temperature = transition
    noise = after.x - before.x + step_size * before.gradient
    return unroll(noise * (inverse_temperature / (2 * step_size)))


def _rank_one(third: str, transition: Transition) -> tuple[Tensor, Tensor]:
    """K and y with ε ∂_a∂_b∂_p L ≈ K_ab y_p."""
    if third == "covariation":
        change = transition.after.hessian - transition.before.hessian
        return unroll(transition.step_size * change), _scaled_noise(transition)
    return _trace_term(third, transition)[:, None], unroll(jnp.ones_like(transition.before.x))  # one dimension


def _trace_term(third: str, transition: Transition) -> Tensor:
    """ε times the gradient of the Laplacian of L, from what is observed."""
    if third == "covariation":
        change, noise = _rank_one(third, transition)
        return change @ noise
    before, after, step_size, inverse_temperature = transition
    dx, dh = after.x - before.x, after.hessian - before.hessian
    if third == "ito":
        change = inverse_temperature * (after.gradient - before.gradient)
        return unroll(change) - unroll(inverse_temperature * before.hessian) @ unroll(dx)
    moved = dx != 0
    return unroll(jnp.where(moved, step_size * dh[0] / jnp.where(moved, dx, 1), 0))


def _window_init(dim: int, dtype: Any, third: Third) -> WindowState:
    if dim > 1 and third == "divided":
        raise ValueError(f"third='divided' is for one dimension, got d = {dim}")
    return WindowState(_tensor.zeros(dim, 1, dtype), jnp.zeros((), dtype), jnp.zeros((), jnp.int32))


def _window_step(
    state: WindowState,
    transition: Transition,
    third: Third,
    *,
    decay: Any,
    gain: Any,
    exponential: bool = False,
    neumann: int | None = None,
) -> WindowState:
    """V ← M⁻¹ decay (V − c b) + gain ξ/σ,  c ← decay c + gain."""
    V, c = _tensor.unpack(state.V, 1), state.c
    # M_0 has nothing to carry, V and c being 0 there: a start far out, where εH_0 ≥ 1, does no harm.
    hessian = jnp.where(state.k == 0, 0, transition.before.hessian)
    M = _jacobian(transition._replace(before=transition.before._replace(hessian=hessian)))
    if callable(third):
        T = unroll(transition.step_size * third(transition.before.x))
        weighting = _tensor.eye(M) if exponential else _tensor.inverse(M)
        b = (T * weighting.T[:, None, :]).sum((0, 2))
    else:
        b = _trace_term(third, transition)
    V = _tensor.scale(V - _tensor.scale(b, c), decay)
    if exponential:
        V = _tensor.scale(V, jnp.exp(transition.step_size * transition.before.hessian[0, 0]))
    elif neumann is None:
        V = _tensor.solve_positive(M, V)
    else:
        V = _neumann(M, V, neumann)
    V = V + _tensor.scale(_scaled_noise(transition), gain)
    return WindowState(_tensor.pack(V), decay * c + gain, state.k + 1)


def _neumann(M: Tensor, V: Tensor, terms: int) -> Tensor:
    """Σ_{j ≤ terms} (I − M)^j V, NaN where the terms grow instead of shrinking."""
    total = term = V
    for _ in range(terms):
        term = term - M @ term
        total = total + term
    return _tensor.scale(total, jnp.where((term * term).sum() <= (V * V).sum(), 1.0, jnp.nan))


def _window_weight(state: WindowState) -> Vector:
    c = jnp.where(state.c == 0, 1, state.c)  # a window that has not begun: V is 0, and so is the weight
    return _tensor.roll(_tensor.scale(_tensor.unpack(state.V, 1), 1 / c))
