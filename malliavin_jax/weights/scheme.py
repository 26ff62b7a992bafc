"""What a weight scheme is, and how it weighs a path."""

from typing import Any, Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from .._base.checks import is_traced
from .._base.mesh import array_module
from .._base.types import Vector
from ..learner.learner import Path, Point, Transition

State = TypeVar("State")


@runtime_checkable
class Scheme(Protocol[State]):
    """What `weigh` and `observe` need of a weight scheme.

    ```python
    isinstance(mj.Windowed(4.0), mj.Scheme)  # True: it has init, step and weight
    ```
    """

    def init(self, dim: int, dtype: Any) -> State: ...
    def step(self, state: State, transition: Transition) -> State: ...
    def weight(self, state: State) -> Vector: ...


def weigh(path: Path, scheme: Scheme) -> Float[Array, "points d"]:
    """The weights of one path: row k is S(u) for conditioning at step k; row 0, with no noise yet, is 0.

    ```python
    weights = mj.weigh(path, mj.Canonical())  # (81, 1); row 0 is 0
    ```
    """
    dim, dtype = path.x.shape[1], path.x.dtype
    points = Point(path.x, path.gradient, path.hessian)
    before, after = (jax.tree.map(lambda leaf, s=s: leaf[s], points) for s in (slice(-1), slice(1, None)))

    def body(state: Any, pair: tuple[Point, Point]) -> tuple[Any, Vector]:
        before, after = pair
        state = scheme.step(state, Transition(before, after, path.step_size, path.inverse_temperature))
        return state, scheme.weight(state)

    _, weights = lax.scan(body, scheme.init(dim, dtype), (before, after))
    check_fine_enough(weights, jnp.arange(1, path.num_steps + 1, dtype=path.last_step.dtype) <= path.last_step, scheme)
    return jnp.concatenate([jnp.zeros((1, dim), dtype), weights])


def check_fine_enough(weight: Array, observed: Array, scheme: Scheme) -> None:
    """Raise where a window scheme met a step with εH ≥ 1 (silent while tracing: the weight is NaN then)."""
    if is_traced(weight, observed):
        return
    xp = array_module(weight, observed)  # NumPy: inside another function's jit these concrete values stay concrete
    seen = xp.asarray(observed)
    bad = int(xp.count_nonzero(seen & ~xp.isfinite(xp.asarray(weight)).all(-1)))
    if bad:
        raise ValueError(
            f"the chain is too coarse for {type(scheme).__name__}: I − εH was not positive definite before "
            f"{bad} of {xp.count_nonzero(seen)} weights (or the path itself is not finite); "
            "use Canonical(), or a learner with a smaller step_size"
        )
