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
from .third_derivative import (
    Third,
    check_third,
    jacobian,
    matrices,
    relative_size,
    scaled_noise,
    times,
    trace_term,
    trace_term_by_products,
)


class WindowState(NamedTuple):
    """V is a vector, c the sum of the window so far; S = V/c."""

    V: Leaves
    c: Scalar
    k: Int[Array, ""]


class Windowed(eqx.Module):
    """u_k = (a_k/σ) (∂X_n/∂ξ_k)⁻¹ σ with a late window a_k ∝ ρ^{n−k}, ρ = exp(−2·rate·ε), in any dimension.

        V ← M⁻¹ ρ (V − c b_k) + ξ_{k+1}/σ,   c ← ρ c + 1,   S = V/c

    with (b_k)_j = ε Σ_{p,a} (M⁻¹)_pa ∂_a∂_j∂_p L(X_k), to leading order ε times the gradient of the Laplacian. A
    positive rate puts the weight late, where the inverse Jacobian is tame. Where step sizes vary, a step counts by its
    size: a_k ∝ ε_k exp(−2·rate·(t_n − t_{k+1})). O(d²) memory and one solve with M a step;
    `neumann=m` replaces the solve by m terms of Σ (εH)^j v, which needs only Hessian-vector products.

    Where M is not positive definite (εH ≥ 1 in some direction, after X_0) the chain is too coarse for this scheme: the
    weight is NaN from there on, and `weigh` and `observe` raise an error. `Canonical` has no such limit.

    Args:
        rate: how late the window lies, at least 0, in inverse units of time; `weights.best_rate` finds a good one.
        third: where ∂³L comes from: "covariation", "ito", "divided" (one dimension), or a function x ↦ ∂³L(x) of
            shape (d, d, d).
        neumann: m, the number of terms after the first in place of the solve; None solves. With m and
            third="covariation" a learner that shows only products of its Hessian with vectors can be weighed.

    Raises:
        ValueError: if an argument is out of its range; or, at the first step, if the learner shows only products of
            its Hessian with vectors and `neumann` is None.

    Example:
        ```python
        import jax
        import malliavin_jax as mj

        loss = mj.potentials.Quartic()
        learner = mj.ForwardLearner(loss, mj.initial.Normal(), step_size=0.01, gradient_noise=0.5)
        path = jax.jit(lambda key: mj.simulate(key, learner, 80))(jax.random.key(0))
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
        """The state before the first step: all zero."""
        return _window_init(dim, dtype, self.third)

    def step(self, state: WindowState, transition: Transition) -> WindowState:
        """The state after one more observed step."""
        rho = jnp.exp(-2 * jnp.asarray(self.rate, transition.step_size.dtype) * transition.step_size)
        if self.neumann is None:
            return _window_step(state, transition, self.third, decay=rho, gain=_gain(transition))
        return _neumann_step(state, transition, self.third, self.neumann, decay=rho)

    def weight(self, state: WindowState) -> Vector:
        """S after the last step taken."""
        return _window_weight(state)


class Reciprocal(eqx.Module):
    """The paper's choice u_t = 1/(s D_tX_s): the window of `Windowed` at rate 0.

    Its variance is some seventy times that of `Canonical` on the paper's own example; it is here to compare with.
    `jacobian="exponential"` takes the paper's left-point exp(−εH_k) (one dimension) for the Jacobian 1 − εH_k of the
    chain the learner really runs, which leaves a bias of order ε. The same limit εH < 1 as for `Windowed` holds
    for the exact Jacobian.

    Args:
        third: where ∂³L comes from, as in `Windowed`.
        jacobian: "exact" or "exponential".

    Raises:
        ValueError: if an argument is none of its values, or is one for one dimension where d > 1; or, at the first
            step, if the learner shows only products of its Hessian with vectors.

    Example:
        ```python
        import jax
        import malliavin_jax as mj

        loss = mj.potentials.Quartic()
        learner = mj.ForwardLearner(loss, mj.initial.Normal(), step_size=0.01, gradient_noise=0.5)
        path = jax.jit(lambda key: mj.simulate(key, learner, 80))(jax.random.key(0))
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
        """The state before the first step: all zero."""
        if self.jacobian == "exponential" and dim > 1:
            raise ValueError(f"jacobian='exponential' is the paper's, for one dimension, got d = {dim}")
        return _window_init(dim, dtype, self.third)

    def step(self, state: WindowState, transition: Transition) -> WindowState:
        """The state after one more observed step."""
        if self.jacobian == "exponential":
            return _exponential_step(state, transition, self.third)
        return _window_step(state, transition, self.third, decay=1, gain=_gain(transition))

    def weight(self, state: WindowState) -> Vector:
        """S after the last step taken."""
        return _window_weight(state)


class FixedWindow(eqx.Module):
    """A window given as numbers, a_1 … a_n, for conditioning at step n; see `minimum_variance_window`.

    Args:
        window: the numbers, of shape (n,); they need not sum to 1. Steps past the n-th get none of the weight.
        third: where ∂³L comes from, as in `Windowed`.

    Raises:
        ValueError: at the first step, if `third` is one for one dimension where d > 1, or if the learner shows only
            products of its Hessian with vectors.

    Example:
        ```python
        import jax
        import jax.numpy as jnp
        import malliavin_jax as mj

        loss = mj.potentials.Quartic()
        learner = mj.ForwardLearner(loss, mj.initial.Normal(), step_size=0.01, gradient_noise=0.5)
        path = jax.jit(lambda key: mj.simulate(key, learner, 80))(jax.random.key(0))
        late = jnp.arange(80) >= 40
        mj.weigh(path, mj.weights.FixedWindow(late / 40.0))[-1]
        ```
    """

    window: Float[Array, " steps"]
    third: Third = eqx.field(default="covariation", static=True)

    def init(self, dim: int, dtype: Any) -> WindowState:
        """The state before the first step: all zero."""
        return _window_init(dim, dtype, self.third)

    def step(self, state: WindowState, transition: Transition) -> WindowState:
        """The state after one more observed step."""
        gain = jnp.take(self.window, state.k, mode="fill", fill_value=0)
        return _window_step(state, transition, self.third, decay=1, gain=gain)

    def weight(self, state: WindowState) -> Vector:
        """S after the last step taken."""
        return _window_weight(state)


def _window_init(dim: int, dtype: Any, third: Third) -> WindowState:
    """The state before the first step; an error if `third` does not serve the dimension."""
    if dim > 1 and third == "divided":
        raise ValueError(f"third='divided' is for one dimension, got d = {dim}")
    return WindowState(small_tensors.zeros(dim, 1, dtype), jnp.zeros((), dtype), jnp.zeros((), jnp.int32))


def _window_step(state: WindowState, transition: Transition, third: Third, *, decay: Any, gain: Any) -> WindowState:
    """One step of the recursion with the matrix M."""
    M = _jacobian(state, transition)
    b = _trace(third, transition, M)
    return _advance(state, transition, b, lambda V: small_tensors.solve_positive(M, V), decay=decay, gain=gain)


def _exponential_step(state: WindowState, transition: Transition, third: Third) -> WindowState:
    """One step, in one dimension, of an even window with exp(−εH) for M."""
    inverse = jnp.exp(transition.step_size * matrices(transition).before[0, 0])
    b = _trace(third, transition, None)
    return _advance(state, transition, b, lambda V: small_tensors.scale(V, inverse), decay=1, gain=_gain(transition))


def _neumann_step(state: WindowState, transition: Transition, third: Third, terms: int, *, decay: Any) -> WindowState:
    """One step with Σ_{j ≤ terms} (εH)^j for M⁻¹: products of H with vectors serve, from a matrix or without one."""
    hessian, step_size = transition.before.hessian, jnp.where(state.k == 0, 0, transition.step_size)

    def inverse(V: Tensor) -> Tensor:
        return _neumann(lambda v: small_tensors.scale(times(hessian, v), step_size), V, terms)

    if third == "covariation":
        b = trace_term_by_products(transition)
    else:
        b = _trace(third, transition, _jacobian(state, transition))
    return _advance(state, transition, b, inverse, decay=decay, gain=_gain(transition))


def _advance(
    state: WindowState, transition: Transition, b: Tensor, inverse: Callable[[Tensor], Tensor], *, decay: Any, gain: Any
) -> WindowState:
    """V ← M⁻¹ decay (V − c b) + gain ξ/σ,  c ← decay c + gain, with M⁻¹ v = `inverse(v)`."""
    V, c = small_tensors.unpack(state.V, 1), state.c
    V = inverse(small_tensors.scale(V - small_tensors.scale(b, c), decay))
    V = V + small_tensors.scale(scaled_noise(transition), gain)
    return WindowState(small_tensors.pack(V), decay * c + gain, state.k + 1)


def _gain(transition: Transition) -> Scalar | int:
    """What a step adds to a window that is even in time: 1, or its size in units of the first where sizes vary."""
    size = relative_size(transition)
    return 1 if size is None else size


def _jacobian(state: WindowState, transition: Transition) -> Tensor:
    """M, but I at the first step: V and c are 0 there, and a start far out, where εH_0 ≥ 1, does no harm."""
    return jacobian(jnp.where(state.k == 0, 0, matrices(transition).before), transition)


def _trace(third: Third, transition: Transition, M: Tensor | None) -> Tensor:
    """b of the recursion: with M⁻¹ (with I for None) where ∂³L is a function, to leading order in ε elsewhere."""
    if not callable(third):
        return trace_term(third, transition)
    T = unroll(transition.step_size * third(transition.before.x))
    weighting = small_tensors.eye(T[0]) if M is None else small_tensors.inverse(M)
    return (T * weighting.T[:, None, :]).sum((0, 2))


def _neumann(times_step: Callable[[Tensor], Tensor], V: Tensor, terms: int) -> Tensor:
    """Σ_{j ≤ terms} (εH)^j V with εH v = `times_step(v)`, NaN where the terms grow instead of shrinking."""
    total = term = V
    for _ in range(terms):
        term = times_step(term)
        total = total + term
    return small_tensors.scale(total, jnp.where((term * term).sum() <= (V * V).sum(), 1.0, jnp.nan))


def _window_weight(state: WindowState) -> Vector:
    """S = V/c."""
    c = jnp.where(state.c == 0, 1, state.c)  # a window that has not begun: V is 0, and so is the weight
    return small_tensors.roll(small_tensors.scale(small_tensors.unpack(state.V, 1), 1 / c))
