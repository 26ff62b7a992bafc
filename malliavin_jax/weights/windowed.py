"""Weights by a window in time: the inverse Jacobian of the path, weighed late (or, as in the paper, evenly)."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .._base import small_tensors
from .._base.checks import check_count, check_nonnegative
from .._base.small_tensors import Leaves, Tensor, unroll
from .._base.types import Scalar, Vector
from ..learner.learner import Transition
from ..potentials.matrix_free import HessianProduct
from .third_derivative import Third, apply, check_third, jacobian, scaled_noise, trace_term


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

    ```python
    mj.weigh(path, mj.Windowed(4.0)).shape  # (81, 1): a weight for every step
    ```
    """

    rate: float | Scalar
    third: Third = eqx.field(default="covariation", static=True)
    neumann: int | None = eqx.field(default=None, static=True)

    def __check_init__(self):
        check_nonnegative("rate", self.rate)
        check_third(self.third)
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

    ```python
    as_printed = mj.Reciprocal(third="ito", jacobian="exponential")  # the paper, literally
    mj.weigh(path, as_printed)[-1]
    ```
    """

    third: Third = eqx.field(default="covariation", static=True)
    jacobian: Literal["exact", "exponential"] = eqx.field(default="exact", static=True)

    def __check_init__(self):
        check_third(self.third)
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
    """A window given as numbers, a_1 … a_n, for conditioning at step n; see `minimum_variance_window`.

    ```python
    late = jnp.arange(80) >= 40
    mj.weigh(path, mj.FixedWindow(late / 40.0))[-1]
    ```
    """

    window: Float[Array, " steps"]
    third: Third = eqx.field(default="covariation", static=True)

    def init(self, dim: int, dtype: Any) -> WindowState:
        return _window_init(dim, dtype, self.third)

    def step(self, state: WindowState, transition: Transition) -> WindowState:
        gain = jnp.take(self.window, state.k, mode="fill", fill_value=0)
        return _window_step(state, transition, self.third, decay=1, gain=gain)

    def weight(self, state: WindowState) -> Vector:
        return _window_weight(state)


def _window_init(dim: int, dtype: Any, third: Third) -> WindowState:
    if dim > 1 and third == "divided":
        raise ValueError(f"third='divided' is for one dimension, got d = {dim}")
    return WindowState(small_tensors.zeros(dim, 1, dtype), jnp.zeros((), dtype), jnp.zeros((), jnp.int32))


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
    V, c = small_tensors.unpack(state.V, 1), state.c
    # M_0 has nothing to carry, V and c being 0 there: a start far out, where εH_0 ≥ 1, does no harm.
    hessian = transition.before.hessian
    if isinstance(hessian, HessianProduct):
        return _matrix_free_step(state, transition, hessian, third, decay=decay, gain=gain, neumann=neumann)
    hessian = jnp.where(state.k == 0, 0, hessian)
    M = jacobian(transition._replace(before=transition.before._replace(hessian=hessian)))
    if callable(third):
        T = unroll(transition.step_size * third(transition.before.x))
        weighting = small_tensors.eye(M) if exponential else small_tensors.inverse(M)
        b = (T * weighting.T[:, None, :]).sum((0, 2))
    else:
        b = trace_term(third, transition)
    V = small_tensors.scale(V - small_tensors.scale(b, c), decay)
    if exponential:
        V = small_tensors.scale(V, jnp.exp(transition.step_size * transition.before.hessian[0, 0]))
    elif neumann is None:
        V = small_tensors.solve_positive(M, V)
    else:
        V = _neumann(lambda v: v - M @ v, V, neumann)
    V = V + small_tensors.scale(scaled_noise(transition), gain)
    return WindowState(small_tensors.pack(V), decay * c + gain, state.k + 1)


def _matrix_free_step(
    state: WindowState,
    transition: Transition,
    hessian: HessianProduct,
    third: Third,
    *,
    decay: Any,
    gain: Any,
    neumann: int | None,
) -> WindowState:
    """`_window_step` by Hessian-vector products alone."""
    if third != "covariation" or neumann is None:
        raise ValueError(
            "the potential offers Hessian-vector products only: weigh by Windowed(rate, neumann=m) with "
            f"third='covariation', got neumann={neumann} and third={third!r}"
        )
    V, c = small_tensors.unpack(state.V, 1), state.c
    V = small_tensors.scale(V - small_tensors.scale(trace_term("covariation", transition), c), decay)
    step_size = jnp.where(state.k == 0, 0, transition.step_size)
    V = _neumann(lambda v: small_tensors.scale(apply(hessian, v), step_size), V, neumann)
    V = V + small_tensors.scale(scaled_noise(transition), gain)
    return WindowState(small_tensors.pack(V), decay * c + gain, state.k + 1)


def _neumann(times_step: Callable[[Tensor], Tensor], V: Tensor, terms: int) -> Tensor:
    """Σ_{j ≤ terms} (εH)^j V with εH v = `times_step(v)`, NaN where the terms grow instead of shrinking."""
    total = term = V
    for _ in range(terms):
        term = times_step(term)
        total = total + term
    return small_tensors.scale(total, jnp.where((term * term).sum() <= (V * V).sum(), 1.0, jnp.nan))


def _window_weight(state: WindowState) -> Vector:
    c = jnp.where(state.c == 0, 1, state.c)  # a window that has not begun: V is 0, and so is the weight
    return small_tensors.roll(small_tensors.scale(small_tensors.unpack(state.V, 1), 1 / c))
