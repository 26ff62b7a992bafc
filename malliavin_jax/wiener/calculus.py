"""Malliavin calculus on the increments of one Brownian path, where it is finite-dimensional and exact.

A functional F is a function of the increments ΔW of shape (steps, noises), each N(0, ε). In the scaling of continuous
time, which the limit ε → 0 keeps,

    D_k F = ∂F/∂ΔW_k,    ⟨a, b⟩ = ε Σ_k a_k·b_k,    S(u) = Σ_k u_k·ΔW_k − ε Σ_k div_k u_k,

with div_k the divergence in ΔW_k, and Gaussian integration by parts gives E[F S(u)] = E⟨DF, u⟩ at every ε.
Conditioning on a real functional g needs a process u with ⟨Dg, u⟩ = 1.

The exact divergence takes one directional derivative an increment, all of them in forward mode, so any functional that
JAX can evaluate will do. With many increments a few random signs r estimate it without bias, E[rᵀAr] = tr A
(Hutchinson, 1990): the second derivatives then cost a few passes, and Dg, one first derivative an increment, the rest.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from .._base.checks import check_count
from .._base.types import Key, Scalar

Increments = Float[Array, "steps noises"]
Process = Float[Array, "steps noises"]

DIRECTIONS = 256  # derivatives taken side by side on one path


class Weight(NamedTuple):
    """A process u and its Skorohod integral S(u), on one path."""

    integral: Scalar
    u: Process


class Probes(NamedTuple):
    """How the divergence is taken: `number` random sign vectors from `key`, or exactly if `number` is None."""

    number: int | None
    key: Key | None


def derivative(functional: Callable[[Increments], Array], increments: Increments) -> Float[Array, "... steps noises"]:
    """DF, the derivative of a functional in each increment, in forward mode.

    Args:
        functional: F, a function of the increments, real or an array.
        increments: ΔW, of shape (steps, noises).

    Returns:
        D_k F, of shape (steps, noises); a vector F has one such row a component, in front.

    Example:
        ```python
        import jax.numpy as jnp
        from malliavin_jax import wiener

        wiener.derivative(lambda dw: jnp.sum(dw) ** 2, jnp.ones((4, 1)))  # 8 for each increment
        ```
    """

    def along(direction: Increments) -> Array:
        return jax.jvp(functional, (increments,), (direction,))[1]

    rows = over_increments(along, increments)
    return jnp.moveaxis(rows, 0, -1).reshape(*rows.shape[1:], *increments.shape)


def inner(a: Process, b: Process, step_size: float | Scalar) -> Scalar:
    """⟨a, b⟩ = ε Σ_k a_k·b_k, the inner product of two processes.

    Args:
        a: a process, of shape (steps, noises).
        b: another.
        step_size: ε.

    Returns:
        One number.

    Example:
        ```python
        import jax.numpy as jnp
        from malliavin_jax import wiener

        wiener.inner(jnp.ones((4, 1)), jnp.ones((4, 1)), 0.25)  # 1
        ```
    """
    return jnp.asarray(step_size, a.dtype) * jnp.sum(a * b)


def canonical(functional: Callable[[Increments], Scalar], increments: Increments, step_size: float | Scalar) -> Process:
    """u = Dg/‖Dg‖², the process of least norm with ⟨Dg, u⟩ = 1.

    Args:
        functional: g, a real function of the increments.
        increments: ΔW, of shape (steps, noises).
        step_size: ε.

    Returns:
        u, of the shape of the increments.

    Example:
        ```python
        import jax.numpy as jnp
        from malliavin_jax import wiener

        wiener.canonical(lambda dw: jnp.sum(dw), jnp.ones((4, 1)), 0.25)  # 1 for each increment
        ```
    """
    D = derivative(functional, increments)
    return D / inner(D, D, step_size)


def reciprocal(
    functional: Callable[[Increments], Scalar], increments: Increments, step_size: float | Scalar
) -> Process:
    """u_k = D_k g/(T |D_k g|²), with one noise 1/(T D_k g); infinite or NaN where D_k g = 0.

    It is a process of finite norm in continuous time only if ∫|D_t g|⁻² dt is finite.

    Args:
        functional: g, a real function of the increments.
        increments: ΔW, of shape (steps, noises).
        step_size: ε.

    Returns:
        u, of the shape of the increments.

    Example:
        ```python
        import jax.numpy as jnp
        from malliavin_jax import wiener

        wiener.reciprocal(lambda dw: jnp.sum(dw), jnp.ones((4, 1)), 0.25)  # 1 for each increment
        ```
    """
    return _reciprocal(derivative(functional, increments), step_size)


def skorohod(
    integrand: Callable[[Increments], Process],
    increments: Increments,
    step_size: float | Scalar,
    *,
    probes: int | None = None,
    key: Key | None = None,
) -> Scalar:
    """S(u) = Σ_k u_k·ΔW_k − ε Σ_k div_k u_k, the Skorohod integral of the process u = `integrand(increments)`.

    Args:
        integrand: u as a function of the increments, of their shape.
        increments: ΔW, of shape (steps, noises).
        step_size: ε.
        probes: None takes the divergence exactly, at the cost of one derivative of u an increment; a number estimates
            it without bias from as many random sign vectors.
        key: to draw these from.

    Returns:
        S(u), one number.

    Raises:
        ValueError: if `probes` is given without a key, or is not a whole number of at least 1.

    Example:
        ```python
        import jax.numpy as jnp
        from malliavin_jax import wiener

        wiener.skorohod(lambda dw: dw, 0.5 * jnp.ones((4, 1)), 0.25)  # Σ ΔW² − T = 0
        ```
    """
    ways = Probes(probes, key)
    check_probes(ways)

    def stretch(direction: Increments) -> Scalar:
        return jnp.sum(direction * jax.jvp(integrand, (increments,), (direction,))[1])

    divergence = _sum_of(stretch, increments, ways)
    return jnp.sum(integrand(increments) * increments) - jnp.asarray(step_size, increments.dtype) * divergence


def canonical_weight(
    functional: Callable[[Increments], Scalar], increments: Increments, step_size: Scalar, ways: Probes
) -> Weight:
    """The canonical u with its integral. With γ = ‖Dg‖² the chain rule leaves only D²g to be traced:

    S = [Σ_k D_k g·ΔW_k − ε tr D²g + 2ε² D²g[Dg, Dg]/γ]/γ.
    """
    if ways.number is None:  # one pass along each increment gives D_k g and D²_kk g together
        slopes, curvatures = over_increments(lambda v: _jet(functional, increments, v), increments)
        D, trace = slopes.reshape(increments.shape), jnp.sum(curvatures)
    else:
        D = derivative(functional, increments)
        trace = _sum_of(lambda v: _jet(functional, increments, v)[1], increments, ways)
    norm = inner(D, D, step_size)
    bend = 2 * step_size**2 * _jet(functional, increments, D)[1] / norm
    return Weight((jnp.sum(D * increments) - step_size * trace + bend) / norm, D / norm)


def reciprocal_weight(
    functional: Callable[[Increments], Scalar], increments: Increments, step_size: Scalar, ways: Probes
) -> Weight:
    """The reciprocal u with its integral. With H_k the block of D²g at step k,

    div_k u_k = [tr H_k − 2 D_k gᵀ H_k D_k g/|D_k g|²]/(T |D_k g|²).
    """
    steps, noises = increments.shape
    if ways.number is not None:
        field = partial(derivative, functional)
        u = _reciprocal(field(increments), step_size)
        S = skorohod(
            lambda w: _reciprocal(field(w), step_size), increments, step_size, probes=ways.number, key=ways.key
        )
        return Weight(S, u)
    slopes, curvatures = over_increments(lambda v: _jet(functional, increments, v), increments)
    D, traces = slopes.reshape(increments.shape), jnp.sum(curvatures.reshape(increments.shape), 1)
    squares = jnp.sum(D * D, 1)
    if noises == 1:
        along = traces
    else:

        def own_direction(step: Array) -> Scalar:
            at_step = (jnp.arange(steps) == step).astype(D.dtype)
            return _jet(functional, increments, at_step[:, None] * D)[1]

        along = map_in_chunks(own_direction, jnp.arange(steps), DIRECTIONS) / squares
    u = _reciprocal(D, step_size)
    return Weight(jnp.sum(u * increments) - jnp.sum((traces - 2 * along) / squares) / steps, u)


def supplied_weight(
    integrand: Callable[[Increments], Process], increments: Increments, step_size: Scalar, ways: Probes
) -> Weight:
    """Any other u with its integral."""
    return Weight(skorohod(integrand, increments, step_size, probes=ways.number, key=ways.key), integrand(increments))


def check_probes(ways: Probes) -> None:
    """Refuse probes without a key to draw them from."""
    if ways.number is not None:
        check_count("probes", ways.number)
        if ways.key is None:
            raise ValueError("key must be given with probes, to draw them from")


def over_increments(function: Callable[[Increments], Any], increments: Increments) -> Any:
    """`function` of the unit vector along each increment, stacked."""
    count = increments.size

    def along(index: Array) -> Any:
        return function((jnp.arange(count) == index).astype(increments.dtype).reshape(increments.shape))

    return map_in_chunks(along, jnp.arange(count), DIRECTIONS)


def map_in_chunks(function: Callable[[Any], Any], items: Array, chunk_size: int) -> Any:
    """`vmap(function)(items)` with at most `chunk_size` items in memory at once; the results do not depend on it."""
    count = items.shape[0]
    chunks = -(-count // chunk_size)
    if chunks == 1:
        return jax.vmap(function)(items)
    size = -(-count // chunks)
    index = jnp.minimum(jnp.arange(chunks * size), count - 1)  # one program for all: the last is filled up
    parts = lax.map(jax.vmap(function), items[index].reshape(chunks, size, *items.shape[1:]))
    return jax.tree.map(lambda leaf: leaf.reshape(chunks * size, *leaf.shape[2:])[:count], parts)


def _jet(functional: Callable[[Increments], Scalar], increments: Increments, v: Increments) -> tuple[Scalar, Scalar]:
    """The first two derivatives of g along v: Σ_k D_k g·v_k and D²g[v, v]."""

    def slope(w: Increments) -> Scalar:
        return jax.jvp(functional, (w,), (v,))[1]

    return jax.jvp(slope, (increments,), (v,))


def _sum_of(quadratic: Callable[[Increments], Scalar], increments: Increments, ways: Probes) -> Scalar:
    """The trace of a quadratic form: its sum over the increments, or its mean over random signs."""
    if ways.number is None or ways.key is None:
        return jnp.sum(over_increments(quadratic, increments))
    signs = jax.random.rademacher(ways.key, (ways.number, *increments.shape), increments.dtype)
    return jnp.mean(map_in_chunks(quadratic, signs, DIRECTIONS))


def _reciprocal(D: Process, step_size: float | Scalar) -> Process:
    """u_k = D_k g/(T |D_k g|²)."""
    horizon = D.shape[0] * jnp.asarray(step_size, D.dtype)
    return D / (horizon * jnp.sum(D * D, 1, keepdims=True))
