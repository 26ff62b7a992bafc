"""Observed points with their Malliavin weights: the hub that the estimators consume."""

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from . import _mesh
from ._misc import (
    check_count,
    check_shape,
    float_array,
    floats_to_arrays,
    is_concrete,
    steps_at,
)
from ._pilot import best_rate
from ._recorded import full_hessians, per_episode, stops_of
from ._samples import (
    Samples as Samples,
    check_finite as check_finite,
    check_samples as check_samples,
    check_values,
    masked,
)
from ._types import Key
from .forward import ForwardLearner, Path, Point, check_matrix, initial_shape, march, simulate
from .weights import Canonical, Scheme, Windowed, check_fine_enough, weigh

_CANONICAL_UP_TO = 5  # beyond, its O(d⁴) step costs more than its smaller variance gains
_PILOT_EPISODES = 256
_PILOT_RATES = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)


def observe(
    key: Key,
    learner: ForwardLearner,
    *,
    num_episodes: int,
    times: Sequence[float] | Float[Any, " times"] | float,
    scheme: Scheme | None = None,
) -> Samples:
    """Simulate `num_episodes` episodes and weigh them in the same pass; no path is stored.

    - `times`: increasing conditioning times s, positive multiples of the learner's step size.
    - `scheme`: the weight scheme; None takes `Canonical()` up to five dimensions and, beyond, `Windowed` at the rate
      that is best on the first 256 episodes.

    Episode i is `simulate(jax.random.split(key, num_episodes)[i], learner, …)` weighed by `weigh`; the numbers do not
    depend on `times`, on batching or on the number of devices.

    ```python
    few = mj.observe(jax.random.key(2), learner, num_episodes=2000, times=[0.4, 0.8])
    few.x.shape  # (2000, 2, 1)
    ```
    """
    num_episodes = check_count("num_episodes", num_episodes)
    _, dtype = initial_shape(learner)
    stops = steps_at(times, learner.step_size)
    learner = floats_to_arrays(learner, dtype)
    weighing: Scheme = floats_to_arrays(choose_scheme(key, learner, scheme, num_episodes, stops[-1]), dtype)
    samples = observe_steps(key, learner, weighing, num_episodes, stops)
    check_fine_enough(samples.weight, samples.observed, weighing)
    return samples


def choose_scheme(
    key: Key, learner: ForwardLearner, scheme: Scheme | None, num_episodes: int, num_steps: int
) -> Scheme:
    """The scheme given, or that of `observe` for None."""
    if scheme is not None:
        return scheme
    if initial_shape(learner)[0] <= _CANONICAL_UP_TO:
        return Canonical()
    keys = episode_keys(key, 0, min(num_episodes, _PILOT_EPISODES))
    return _tuned(eqx.filter_jit(jax.vmap(lambda k: simulate(k, learner, num_steps)))(keys))


def episode_keys(key: Key, first: Array | int, count: int) -> Array:
    """The keys of `count` episodes from number `first` on.

    Key i is a function of `key` and i alone, so that episodes may be made in chunks, on any device or process. It is
    `jax.random.split(key, n)[i]` for every n, as long as JAX's Threefry is the partitionable one (its default).
    """
    index = jnp.asarray(first, jnp.uint32) + jnp.arange(count, dtype=jnp.uint32)
    return jax.vmap(jax.random.fold_in, (None, 0))(key, index)


@eqx.filter_jit
def observe_steps(
    key: Key,
    learner: ForwardLearner,
    scheme: Scheme,
    num_episodes: int,
    stops: tuple[int, ...],
    first: Array | int = 0,
) -> Samples:
    """`observe` in steps, checked and converted already: what a scan may call at every iteration.

    `first` is the number of the first of the `num_episodes` episodes.
    """

    def episode(key: Key) -> tuple[Array, ...]:
        _, (point, weight), length = march(
            key,
            learner,
            stops,
            init=lambda point: scheme.init(point.x.shape[0], point.x.dtype),
            step=scheme.step,
            read=lambda point, state: (point, scheme.weight(state)),
        )
        return masked(point, weight, jnp.asarray(stops, length.dtype) <= length)

    check_matrix(learner)
    return Samples(*over_episodes(episode, key, first, num_episodes))


def over_episodes(episode: Callable[[Key], Any], key: Key, first: Array | int, num_episodes: int) -> Any:
    """`episode` of each key, on the devices of the mesh in force."""
    keys, devices = episode_keys(key, first, num_episodes), _mesh.parts()
    if devices == 1:
        return jax.vmap(episode)(keys)
    if num_episodes % devices:
        raise ValueError(f"num_episodes must be a multiple of the mesh's {devices} devices, got {num_episodes}")
    return _mesh.by_device(jax.vmap(episode), keys)


def samples_from_paths(
    x: Any,
    gradient: Any,
    hessian: Any = None,
    *,
    step_size: Any,
    times: Sequence[float] | Float[Any, " times"] | float | None = None,
    steps: Sequence[int] | Int[Any, " times"] | int | None = None,
    scheme: Scheme | None = None,
    inverse_temperature: Any = 1.0,
    lengths: Any = None,
) -> Samples:
    """Weigh recorded episodes: `x` and `gradient` (episodes, points, d), `hessian` (episodes, points, d, d).

    Row k is the state after k steps of size `step_size`, and the gradient and Hessian that the learner used there;
    row 0 is the start.

    - `hessian`: of shape (episodes, points, d), its diagonal; what lies beside it is taken for zero, which is exact for
      a loss that is a sum over coordinates and biases the weights otherwise. None: in one dimension, with exact
      gradients, secants along the path serve (an error elsewhere).
    - `step_size`, `inverse_temperature`: one number, or one for each episode where several learners were recorded.
    - `times`: as in `observe`, multiples of every step size; or `steps`, the same numbers of steps for all episodes.
    - `lengths` (episodes,): the number of steps each episode really made, if they differ: later rows are ignored,
      whatever they hold, and conditioning times past an episode's end are marked unobserved. What ends an episode must
      not depend on its path: integration by parts does not hold given an event of the noise (see `Recording`).
    - `scheme`: as in `observe`.

    ```python
    recorded = mj.samples_from_paths(paths.x, paths.gradient, paths.hessian, step_size=0.01, times=[0.4, 0.8])
    recorded.weight.shape  # (2000, 2, 1)
    ```
    """
    x, gradient = float_array("x", x), float_array("gradient", gradient)
    hessian = None if hessian is None else float_array("hessian", hessian)
    check_shape("x", x, (None, None, None))
    episodes, points, _ = x.shape
    check_shape("gradient", gradient, x.shape)
    epsilon = per_episode("step_size", step_size, episodes, x.dtype)
    beta = per_episode("inverse_temperature", inverse_temperature, episodes, x.dtype)
    stops = stops_of(times, steps, step_size, episodes, points)
    lengths = jnp.full(episodes, points - 1, jnp.int32) if lengths is None else jnp.asarray(lengths)
    check_shape("lengths", lengths, (episodes,))
    if not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise ValueError(f"lengths must be whole numbers of steps, got dtype {lengths.dtype}")
    if is_concrete(lengths) and not (0 <= np.min(lengths) <= np.max(lengths) < points):
        raise ValueError(
            f"lengths must be between 0 and {points - 1} steps, got {np.min(lengths)} to {np.max(lengths)}"
        )
    hessian = full_hessians(hessian, x, gradient, lengths)
    seen = jnp.arange(points, dtype=lengths.dtype)[None, :] <= lengths[:, None]
    check_values({"x": x, "gradient": gradient, "hessian": hessian}, seen, "step")
    paths = jax.vmap(Path)(x, gradient, hessian, epsilon, beta, lengths.astype(jnp.int32))
    if scheme is None:
        scheme = default_scheme(paths)
    samples = _weigh_at(paths, floats_to_arrays(scheme, x.dtype), jnp.asarray(stops))
    check_fine_enough(samples.weight, samples.observed, scheme)
    return samples


def default_scheme(paths: Path) -> Scheme:
    """`Canonical()` up to five dimensions; beyond, `Windowed` at the rate that is best on the first 256 of `paths`."""
    if paths.x.shape[-1] <= _CANONICAL_UP_TO:
        return Canonical()
    return _tuned(jax.tree.map(lambda leaf: leaf[:_PILOT_EPISODES], paths))


@eqx.filter_jit
def _weigh_at(paths: Path, scheme: Scheme, stops: Int[Array, "episodes times"]) -> Samples:
    def episode(path: Path, at: Int[Array, " times"]) -> tuple[Array, ...]:
        row = jnp.minimum(at, path.num_steps)
        point = Point(path.x[row], path.gradient[row], path.hessian[row])
        return masked(point, weigh(path, scheme)[row], at <= path.length)

    return Samples(*jax.vmap(episode)(paths, stops))


def _tuned(pilot: Path) -> Windowed:
    return Windowed(best_rate(pilot, jnp.asarray(_PILOT_RATES, pilot.x.dtype)))
