"""What a weight scheme is, and how it weighs a path."""

from typing import Any, Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from .._base.checks import described, is_traced
from .._base.mesh import array_module
from .._base.types import Vector
from ..learner.learner import Path, Point, Transition

State = TypeVar("State")


@runtime_checkable
class Scheme(Protocol[State]):
    """What `weigh` and `observe` need of a weight scheme: a recursion over the observed steps of one episode.

    `init(dim, dtype)` gives the state before the first step, `step(state, transition)` the state after one more step,
    and `weight(state)` reads S(u), of shape (d,), off the state, at any step. The state is a PyTree of arrays.

    Example:
        ```python
        import jax.numpy as jnp
        import malliavin_jax as mj

        isinstance(mj.Windowed(4.0), mj.weights.Scheme)  # True: it has init, step and weight
        state = mj.Windowed(4.0).init(1, jnp.float32)
        ```
    """

    def init(self, dim: int, dtype: Any) -> State:
        """The state before the first step, in `dim` dimensions."""
        ...

    def step(self, state: State, transition: Transition) -> State:
        """The state after one more observed step."""
        ...

    def weight(self, state: State) -> Vector:
        """S(u) for conditioning at the last step taken."""
        ...


def check_scheme(scheme: Any) -> None:
    """Refuse a class, or what is no scheme at all."""
    if isinstance(scheme, type) or not isinstance(scheme, Scheme):
        raise ValueError(f"scheme must be a weight scheme, such as Adapted(4.0), got {described(scheme)}")


def weigh(path: Path, scheme: Scheme) -> Float[Array, "points d"]:
    """The weights of one path; `jax.vmap` over paths for many.

    Args:
        path: one observed episode.
        scheme: the weight scheme, such as `Canonical()`.

    Returns:
        An array of shape (points, d): row k is S(u) for conditioning at step k; row 0, with no noise yet, is 0.

    Raises:
        ValueError: if the chain is too coarse for the scheme, that is, a window scheme met a step with εH ≥ 1. Under
            `jit` or `vmap` the weights are NaN from there on instead.

    Example:
        ```python
        import jax
        import malliavin_jax as mj

        loss = mj.potentials.Quartic()
        learner = mj.ForwardLearner(loss, mj.initial.Normal(), step_size=0.01, gradient_noise=0.5)
        path = jax.jit(lambda key: mj.simulate(key, learner, 80))(jax.random.key(0))
        weights = mj.weigh(path, mj.Canonical())  # (81, 1); row 0 is 0
        ```
    """
    if not isinstance(path, Path):
        raise ValueError(f"path must be a Path, as simulate makes them, got {described(path)}")
    check_scheme(scheme)
    dim, dtype = path.x.shape[1], path.x.dtype
    points = Point(path.x, path.gradient, path.hessian)
    before, after = (jax.tree.map(lambda leaf, s=s: leaf[s], points) for s in (slice(-1), slice(1, None)))

    beta = path.inverse_temperature

    def body(state: Any, seen: tuple[Point, Point, tuple[Array, Array] | None]) -> tuple[Any, Vector]:
        before, after, scheduled = seen
        if scheduled is None:
            transition = Transition(before, after, path.step_size, beta)
        else:
            transition = Transition(before, after, scheduled[0], beta, scheduled[1], path.step_size[0])
        state = scheme.step(state, transition)
        return state, scheme.weight(state)

    _, weights = lax.scan(body, scheme.init(dim, dtype), (before, after, _scheduled(path)))
    steps = jnp.arange(1, path.num_steps + 1, dtype=path.last_step.dtype)
    check_fine_enough(weights, steps <= path.last_step, scheme)
    return jnp.concatenate([jnp.zeros((1, dim), dtype), weights])


def _scheduled(path: Path) -> tuple[Array, Array] | None:
    """The size of each step and the time elapsed before it, where a path has a schedule."""
    if path.step_size.ndim == 0:
        return None
    sizes = path.step_size[:-1]
    return sizes, jnp.concatenate([jnp.zeros(1, sizes.dtype), jnp.cumsum(sizes)[:-1]])


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
            "use Adapted or Canonical(), or a learner with a smaller step_size"
        )
