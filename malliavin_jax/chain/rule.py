"""The Langevin update, as an optax transformation."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int, PyTree

from .._base.checks import check_positive, check_shape
from .._base.types import Key

METHODS = ("leimkuhler-matthews", "euler")


class LangevinState(NamedTuple):
    """State of `langevin`: its key, the number of updates made, and the noise w_k of the one to come."""

    key: Key
    count: Int[Array, ""]  # pyright: ignore[reportIncompatibleMethodOverride]
    noise: PyTree


def mix(w: Array, w_next: Array, method: str) -> Array:
    """The noise n_k of a move from w_k and w_{k+1}."""
    return (w + w_next) / 2 if method == "leimkuhler-matthews" else w


def normal_like(key: Key, step: Any, tree: PyTree) -> PyTree:
    """Standard normals in the shape of `tree`, those of step number `step`."""
    return optax.tree.random_like(jax.random.fold_in(key, step), tree, sampler=jax.random.normal)


def langevin(
    key: Key, step_size: Any, inverse_temperature: Any, *, method: str = "leimkuhler-matthews"
) -> optax.GradientTransformation:
    """Langevin dynamics as an optax update: it turns a gradient g_k into the move

        −η g_k + sqrt(2η/β) n_k,    n_k = w_k (Euler)  or  (w_k + w_{k+1})/2 (Leimkuhler–Matthews),

    with w_k independent standard normals. The law exp(−βL) is stationary up to O(η) with Euler and up to
    O(η²) with Leimkuhler–Matthews [1], at the same cost. Use it as the last link of an `optax.chain`: what
    comes before (clipping, preconditioning) changes g_k.

    [1] B. Leimkuhler, C. Matthews, "Rational construction of stochastic numerical methods for molecular
    sampling", Applied Mathematics Research eXpress, 2013.

    Args:
        key: the noise w_k depends on `key` and k alone.
        step_size: η, a number or an optax schedule of the update's number k.
        inverse_temperature: β.
        method: "leimkuhler-matthews" or "euler".

    Returns:
        An `optax.GradientTransformation`, for parameters of any shape or tree of them.

    Raises:
        ValueError: if `step_size` or `inverse_temperature` is not one positive number, or `method` is unknown.

    Example:
        ```python
        import jax
        import jax.numpy as jnp
        import malliavin_jax as mj
        import optax

        moves = optax.chain(optax.clip(10.0), mj.langevin(jax.random.key(0), 0.05, 1.0))
        state = moves.init(jnp.zeros(1))
        move, state = moves.update(jnp.ones(1), state)
        ```
    """
    check_rule(step_size, inverse_temperature)
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {method!r}")

    def init(params: PyTree) -> LangevinState:
        return LangevinState(key, jnp.zeros((), jnp.int32), normal_like(key, 0, params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, LangevinState]:
        del params
        eta = step_size(state.count) if callable(step_size) else step_size
        count: Any = optax.safe_increment(state.count)
        following = normal_like(state.key, count, updates)

        def move(g: Array, w: Array, w_next: Array) -> Array:
            size, beta = jnp.asarray(eta, g.dtype), jnp.asarray(inverse_temperature, g.dtype)
            return -size * g + jnp.sqrt(2 * size / beta) * mix(w.astype(g.dtype), w_next, method)

        moves = jax.tree.map(move, updates, state.noise, following)
        return moves, LangevinState(state.key, count, following)

    return optax.GradientTransformation(init, update)


def check_rule(step_size: Any, inverse_temperature: Any) -> None:
    """Refuse what is not one positive number; a step size may also be a schedule."""
    for name, value in (("step_size", step_size), ("inverse_temperature", inverse_temperature)):
        if value is None:
            raise ValueError(f"{name} must be given")
        if name != "step_size" or not callable(value):
            check_shape(name, value, ())
            check_positive(name, value)
