"""Weights along a shift that is settled beforehand: exact with observed Hessians alone, no third derivative.

Move the whole path by h_0, …, h_n, matrices that do not depend on the noise, with h_0 = 0 and h_n = I. The noise that
does it, u_{k+1} = (h_{k+1} − M_k h_k)/σ, depends on the noise before step k + 1 only, so its Skorohod integral is the
Itô sum Σ_k u_{k+1}ᵀ ξ_{k+1}: there is no divergence to subtract, and ∂³L never enters. Every such h is exact. This is
Bismut's integration by parts, for the discrete chain.

The variance is Σ_k E|h_{k+1} − M_k h_k|²/σ². To leading order in ε, and if the law of H does not change in time, it
depends on h through h'² + h E[H²] h alone, and is least for h_k = sinh(κkε)/sinh(κnε) with κ² = E[H²].

Where step sizes vary, by a schedule settled beforehand, M_k and σ_k are those of each step, and the time t_k elapsed at
step k takes the place of kε. All of the above holds for it: exact for every h, and least to leading order for the same
function of time.
"""

from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .._base import small_tensors
from .._base.checks import check_nonnegative, check_shape
from .._base.small_tensors import HIGHEST, Leaves, Tensor, matmul, unroll
from .._base.types import Matrix, Scalar, Vector
from ..learner.learner import Transition
from .third_derivative import scaled_noise, times


class AdaptedState(NamedTuple):
    """S is a vector, the weight itself; k counts the steps."""

    S: Leaves
    k: Int[Array, ""]


class Adapted(eqx.Module):
    """u_{k+1} = (h_{k+1} − M_k h_k)/σ with h settled beforehand: exact whatever the loss, and the cheapest of all.

        S ← v_k (S − M_k ξ_{k+1}/σ) + ξ_{k+1}/σ,   v_k = sinh(κkε)/sinh(κ(k+1)ε)

    E[∂_i φ(X_n)] = E[φ(X_n) S_i] holds exactly, for every κ, with observed Hessians alone: rough losses, noisy
    gradients, minibatches and long steps do not bias it. κ decides the variance, which is flat around its least, at
    κ² = E[H²]; `Adapted.fit` takes it from Hessians. On smooth losses E|S|² is then a few per cent above that of
    `Canonical`; on rough ones it is several times below. One product of H with a vector a step, so that a
    `potentials.MatrixFree` loss serves as well, and nothing to solve. With a schedule of step sizes, v_k is
    sinh(κt_k)/sinh(κt_{k+1}), where t_k is the time elapsed at step k.

    Args:
        rate: κ, in inverse units of time, at least 0: one number, or one for each direction, (d,).
        directions: the directions that the rates belong to, orthonormal columns of a matrix (d, d); None for the
            coordinates. Where a loss is steep along one direction and flat along another, each needs its own rate.

    Raises:
        ValueError: if a rate is negative or not finite, or if the shapes do not go together.

    Example:
        ```python
        import jax
        import malliavin_jax as mj

        loss = mj.potentials.Quartic()
        learner = mj.ForwardLearner(loss, mj.initial.Normal(), step_size=0.01, gradient_noise=0.5)
        path = jax.jit(lambda key: mj.simulate(key, learner, 80))(jax.random.key(0))
        mj.weigh(path, mj.Adapted(3.0)).shape  # (81, 1): a weight for every step
        mj.Adapted.fit(path.hessian).rate  # sqrt(E[H²]) along this path
        ```
    """

    rate: float | Scalar | Float[Array, " d"]
    directions: Matrix | None = None

    def __check_init__(self):
        check_nonnegative("rate", self.rate)
        if jnp.ndim(self.rate) > 1:
            raise ValueError(f"rate must be one number or one for each direction, got shape {jnp.shape(self.rate)}")
        if self.directions is not None:
            if jnp.ndim(self.rate) != 1:
                raise ValueError(f"rate must hold one number for each of the directions, got {self.rate}")
            check_shape("directions", self.directions, (jnp.shape(self.rate)[0],) * 2)

    @staticmethod
    def fit(hessian: Float[Array, "n d d"], where: Bool[Array, " n"] | None = None) -> "Adapted":
        """The rates of least variance for these Hessians: the roots of the eigenvalues of E[H²].

        Args:
            hessian: Hessians met along paths, (n, d, d). They should come from other episodes than those to be weighed;
                of N episodes, a few among those leave a dependence of order 1/N.
            where: which of them count, (n,); None for all.

        Returns:
            The `Adapted` scheme, with directions beyond one dimension.

        Raises:
            ValueError: if `hessian` has another shape.
        """
        check_shape("hessian", hessian, (None, None, None))
        counts = jnp.isfinite(hessian).all((1, 2))
        counts = counts if where is None else counts & where
        kept = jnp.where(counts[:, None, None], hessian, 0)
        total = jnp.einsum("nab,nbc->ac", kept, kept, precision=HIGHEST)
        return adapted_to(total / jnp.maximum(jnp.sum(counts), 1).astype(total.dtype))

    def init(self, dim: int, dtype: Any) -> AdaptedState:
        """The state before the first step: all zero."""
        if jnp.ndim(self.rate) == 1:
            check_shape("rate", self.rate, (dim,))
        return AdaptedState(small_tensors.zeros(dim, 1, dtype), jnp.zeros((), jnp.int32))

    def step(self, state: AdaptedState, transition: Transition) -> AdaptedState:
        """The recursion above, one step on."""
        S, noise, step_size = small_tensors.unpack(state.S, 1), scaled_noise(transition), transition.step_size
        moved = noise - small_tensors.scale(times(transition.before.hessian, noise), step_size)
        # The time elapsed, in units of this step: a whole number where all steps are alike.
        steps = state.k if transition.time is None else transition.time / step_size
        S = self._shorten(S - moved, steps, step_size) + noise
        return AdaptedState(small_tensors.pack(S), state.k + 1)

    def _shorten(self, vector: Tensor, steps: Int[Array, ""] | Scalar, step_size: Scalar) -> Tensor:
        """v_k times a vector."""
        share = kept_share(jnp.asarray(self.rate, step_size.dtype) * step_size, steps)
        if share.ndim == 0:
            return small_tensors.scale(vector, share)
        if self.directions is None:
            return vector * unroll(share)
        Q = unroll(jnp.asarray(self.directions, step_size.dtype))
        return matmul(Q, unroll(share) * matmul(Q.T, vector))

    def weight(self, state: AdaptedState) -> Vector:
        """S after the last step taken."""
        return small_tensors.roll(small_tensors.unpack(state.S, 1))


def adapted_to(second_moment: Matrix) -> Adapted:
    """The `Adapted` scheme for Hessians with E[H²] = `second_moment`."""
    if second_moment.shape[0] == 1:
        return Adapted(jnp.sqrt(second_moment[0, 0]))
    squares, directions = jnp.linalg.eigh(second_moment)
    return Adapted(jnp.sqrt(jnp.maximum(squares, 0)), directions)


def kept_share(turn: Array, k: Int[Array, ""] | Scalar) -> Array:
    """sinh(k·turn)/sinh((k + 1)·turn), k/(k + 1) at 0, with no exponential that grows; k need not be whole."""
    still = turn == 0
    decay, k = -2 * jnp.where(still, 1, turn), k.astype(turn.dtype)
    ratio = jnp.exp(decay / 2) * jnp.expm1(decay * k) / jnp.expm1(decay * (k + 1))
    return jnp.where(still, k / (k + 1), ratio)
