"""Derivatives of expectations in the start of a diffusion, for functions that need not have any."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from .._base import small_tensors
from .._base.checks import check_count, check_key, floats_to_arrays, is_concrete
from .._base.small_tensors import HIGHEST, matmul
from .._base.types import Flag, Key, Matrix, Scalar, Vector
from .calculus import map_in_chunks
from .diffusion import Diffusion, sizes_of

_NUMBERS = 2**21  # numbers that the increments of one chunk of paths may hold


class Greeks(eqx.Module):
    """E[f(X_T)] and its derivative in each coordinate of X_0, with their standard errors.

    Attributes:
        value: E[f(X_T)], one entry per component of f.
        value_stderr: its standard error.
        delta: the derivatives, of shape (m, d), in the units of f over those of x.
        delta_stderr: their standard errors.

    Example:
        ```python
        import jax
        import jax.numpy as jnp
        from malliavin_jax import wiener

        brownian = wiener.Diffusion(
            lambda x, t: jnp.zeros(1), lambda x, t: jnp.ones((1, 1)), jnp.zeros(1), step_size=0.25, num_steps=4
        )
        rates = wiener.greeks(
            jax.random.key(0), brownian, lambda x: (x[0] > 0).astype(x.dtype), num_paths=400
        )
        rates.value, rates.delta, rates.delta_stderr  # ½, and about 0.4 for the derivative
        ```
    """

    value: Float[Array, " m"]
    value_stderr: Float[Array, " m"]
    delta: Float[Array, "m d"]
    delta_stderr: Float[Array, "m d"]


def greeks(
    key: Key,
    diffusion: Diffusion,
    payoff: Callable[[Vector], Array],
    *,
    num_paths: int,
    chunk_size: int | None = None,
) -> Greeks:
    """∂/∂x_0 E[f(X_T)] = E[f(X_T) S], with f evaluated and never differentiated: it may jump.

    With Y_k = ∂X_k/∂X_0, the columns of u_k = σ_k⁻¹ Y_{k+1}/T move X_T as those of X_0 do, ⟨DX_T, u⟩ = Y_n (Fournié,
    Lasry, Lebuchoux, Lions & Touzi, 1999), and their Skorohod integral is

        S = Σ_k [σ_k⁻¹ Y_{k+1}]ᵀ ΔW_k/T − (1/n) Σ_k Σ_j [σ_k⁻¹ (∂_x σ_k)_j Y_k]_j,

    (∂_x σ_k)_j being the Jacobian of column j of σ at X_k: Y_{k+1} knows ΔW_k if σ depends on x. This is exact for the
    chain. As E[S] = 0, the mean of (f − c) S is the same for every c, and the c of least variance is taken.

    Args:
        key: for the paths.
        diffusion: σ(x, t) must be square and invertible. With a random start the derivative is in a common shift of it.
        payoff: f(x), of shape () or (m,), at the state X_T.
        num_paths: at least 2.
        chunk_size: how many paths are in memory at once; None chooses. The numbers do not depend on it.

    Returns:
        The expectation and its derivatives, with their standard errors.

    Raises:
        ValueError: if σ is not square, if a shape does not fit, or if a weight or f is not finite on a path (σ is
            singular, or the path exploded).

    Example:
        ```python
        import jax
        import jax.numpy as jnp
        from malliavin_jax import wiener

        brownian = wiener.Diffusion(
            lambda x, t: jnp.zeros(1), lambda x, t: jnp.ones((1, 1)), jnp.zeros(1), step_size=0.25, num_steps=4
        )
        rates = wiener.greeks(
            jax.random.key(0), brownian, lambda x: (x[0] > 0).astype(x.dtype), num_paths=400
        )
        rates.delta  # ∂P(x₀ + W₁ > 0)/∂x₀ at 0: about 0.4
        ```
    """
    check_key("key", key)
    num_paths = check_count("num_paths", num_paths, 2)
    dim, noises, dtype = sizes_of(diffusion)
    if noises != dim:
        raise ValueError(f"diffusion(x, t) must be square for greeks, got shape {(dim, noises)}")
    out = jax.eval_shape(payoff, jax.ShapeDtypeStruct((dim,), dtype))
    if not hasattr(out, "shape") or len(out.shape) > 1:
        raise ValueError(f"payoff must return an array of shape () or (m,), got {getattr(out, 'shape', out)}")
    if chunk_size is None:
        chunk_size = max(1, min(num_paths, _NUMBERS // (diffusion.num_steps * dim)))
    chunk_size = check_count("chunk_size", chunk_size)
    result, finite = _greeks(key, floats_to_arrays(diffusion, dtype), payoff, num_paths, chunk_size)
    if is_concrete(finite):
        if not finite:
            raise ValueError("payoff and weights must be finite: diffusion(x, t) is singular, or a path exploded")
        return result
    return eqx.error_if(result, ~finite, "payoff and weights must be finite")


@eqx.filter_jit
def _greeks(
    key: Key, diffusion: Diffusion, payoff: Callable[[Vector], Array], num_paths: int, chunk_size: int
) -> tuple[Greeks, Flag]:
    """The result, and whether every number behind it is finite."""

    def one_path(key: Key) -> tuple[Array, Vector]:
        x, weight = end_and_weight(diffusion, *diffusion.draw(key))
        return jnp.atleast_1d(payoff(x)).astype(x.dtype), weight

    f, S = map_in_chunks(one_path, jax.random.split(key, num_paths), chunk_size)
    root = jnp.sqrt(jnp.asarray(num_paths, f.dtype))
    centre = jnp.einsum("pm,pd->md", f, S * S, precision=HIGHEST) / jnp.sum(S * S, 0)[None]

    def moments(pair: tuple[Array, Array]) -> tuple[Array, Array]:
        row, c = pair  # one component of f on all paths (paths,), and its c for each coordinate (d,)
        terms = (row[:, None] - c[None]) * S
        return jnp.mean(terms, 0), jnp.std(terms, 0, ddof=1) / root

    delta, stderr = lax.map(moments, (f.T, centre))
    result = Greeks(jnp.mean(f, 0), jnp.std(f, 0, ddof=1) / root, delta, stderr)
    return result, jnp.isfinite(f).all() & jnp.isfinite(S).all()


def end_and_weight(diffusion: Diffusion, initial: Vector, increments: Float[Array, "steps d"]) -> tuple[Vector, Vector]:
    """X_T and the weight S of `greeks`, one entry per coordinate of X_0, on one path."""
    t = diffusion.times(initial.dtype)[:-1]
    eye = jnp.eye(initial.shape[0], dtype=initial.dtype)
    step_size = jnp.asarray(diffusion.step_size, initial.dtype)

    def body(carry: tuple[Vector, Matrix, Vector], inputs: tuple[Scalar, Array]) -> tuple[tuple, None]:
        x, Y, S = carry
        time, dw = inputs

        def move(v: Vector) -> tuple[Vector, Vector, Matrix]:
            """X_{k+1}, and the derivatives along v of X_{k+1} and of σ."""
            (x_next, _), (Mv, slope) = jax.jvp(
                lambda x: (diffusion.step(x, time, dw), diffusion.diffusion(x, time)), (x,), (v,)
            )
            return x_next, Mv, slope

        x_next, Y_next, slopes = jax.vmap(move, 1, (None, 1, 0))(Y)  # slopes: (coordinate of X_0, d, noises)
        inverse = small_tensors.roll(small_tensors.inverse(small_tensors.unroll(diffusion.diffusion(x, time))))
        drawn = matmul(matmul(inverse, Y_next).T, dw)
        divergence = jnp.einsum("ja,iaj->i", inverse, slopes, precision=HIGHEST)
        return (x_next, Y_next, S + drawn - step_size * divergence), None

    (x, _, S), _ = lax.scan(body, (initial, eye, jnp.zeros_like(initial)), (t, increments))
    return x, S / (diffusion.num_steps * step_size)
