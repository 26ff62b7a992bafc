"""The whole adaptive problem in one scan: episodes arrive, the field learns, the chains go on and never restart."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, ArrayLike, Bool, Float, Int

from .._base.checks import check_count, check_key, check_shape, float_array, floats_to_arrays, steps_at
from .._base.types import Key
from ..chain.dynamics import Dynamics, State
from ..chain.rule import check_rule
from ..estimate.ratio import Estimate
from ..learner.learner import ForwardLearner, initial_shape
from ..potentials.moving import AbstractMoving
from ..recovery.integration import axes_of
from ..samples.default_scheme import choose_scheme
from ..samples.samples import Samples
from ..samples.simulated import observe_steps
from .field import AdaptiveField

Stream = Callable[[Key, Array], Samples]


class Tracking(eqx.Module):
    """What `track` saw, update by update.

    Attributes:
        field: the field after the last update, ready for more.
        grid: where the loss was recorded: the points in d = 1, a tuple of axes in d = 2.
        loss: the loss on the grid after each update, (updates, points) or (updates, points, points), above its lowest
            point; NaN where there are no data.
        loss_stderr: its standard error; infinite where the loss is NaN.
        gradients: the estimates at the points of the grid after each update: every array of the `Estimate` has the axes
            (updates, points of the grid in the order of `loss_from_estimates`) in front.
        positions: of the chains after each update, (updates, chains, d).
        memory: how many updates the field stood on, (updates,).
        changed: whether the update found a change, (updates,).
        changed_at: the first update that was remembered after the latest change found so far, (updates,).
        p_values: of the tests, (updates, cuts).
        fit_p_values: of the fit on the latest updates, (updates,).
        refused: episodes refused so far, (updates,).

    Example:
        ```python
        import jax
        import jax.numpy as jnp
        import malliavin_jax as mj

        loss = mj.potentials.DriftingTilt(rate=0.05)
        learner = mj.ForwardLearner(loss, mj.initial.Normal(), step_size=0.01, gradient_noise=0.5)
        tracked = mj.track(
            jax.random.key(0), learner, mj.AdaptiveField(-2.5, 2.5), num_updates=3, episodes_per_update=100,
            times=[0.4, 0.8], grid=jnp.linspace(-1.0, 1.0, 9), initial=jnp.zeros((8, 1)), step_size=0.02,
            inverse_temperature=1.0,
        )
        tracked.loss.shape, tracked.memory  # (3, 9), …
        ```
    """

    field: AdaptiveField
    grid: Float[Array, " points"] | tuple[Float[Array, " _"], ...]
    loss: Float[Array, "updates ..."]
    loss_stderr: Float[Array, "updates ..."]
    gradients: Estimate
    positions: Float[Array, "updates chains d"]
    memory: Float[Array, " updates"]
    changed: Bool[Array, " updates"]
    changed_at: Int[Array, " updates"]
    p_values: Float[Array, "updates cuts"]
    fit_p_values: Float[Array, " updates"]
    refused: Int[Array, " updates"]


def track(
    key: Key,
    source: ForwardLearner | Stream,
    field: AdaptiveField,
    *,
    num_updates: int,
    grid: Any,
    initial: Float[ArrayLike, "chains d"],
    step_size: ArrayLike,
    inverse_temperature: ArrayLike,
    episodes_per_update: int | None = None,
    times: Sequence[float] | Float[Any, " times"] | float | None = None,
    steps_per_update: int = 10,
    method: str = "leimkuhler-matthews",
) -> Tracking:
    """Follow a loss while its learner keeps learning: the passive chains go on as the field under them is updated.

    For update t = 0, 1, …: episodes arrive, at time t of a loss that moves; the field learns them; every chain takes
    `steps_per_update` steps α ← α − η Ĝ_t(α) + sqrt(2η/β) n on it, from where it stands. One compiled `lax.scan`.

    Args:
        key: for the episodes and the chains.
        source: a learner, whose potential may be an `potentials.AbstractMoving`; or a function
            `(key, update number) -> Samples` that JAX can trace.
        field: what is known already, such as a fresh `AdaptiveField(low, high)`.
        num_updates: how often episodes arrive.
        grid: where the loss is recorded: increasing points in d = 1, a tuple of axes in d = 2.
        initial: where the chains start, (chains, d).
        step_size: η of the chains, a number or an optax schedule of the step's number.
        inverse_temperature: β of the chains.
        episodes_per_update: of a learner.
        times: conditioning times of a learner's episodes, as for `observe`.
        steps_per_update: of each chain.
        method: of the chain's noise, as for `langevin`.

    Returns:
        A `Tracking`.

    Raises:
        ValueError: if an argument is out of its range, if the dimensions differ, or if `episodes_per_update` and
            `times` are not given with a learner, or are given with a stream.

    Example:
        ```python
        import jax
        import jax.numpy as jnp
        import malliavin_jax as mj

        loss = mj.potentials.SwitchingWell([0, 0, 0, 1], [[-0.5], [0.5]])
        learner = mj.ForwardLearner(loss, mj.initial.Normal(), step_size=0.01, gradient_noise=0.5)
        tracked = mj.track(
            jax.random.key(0), learner, mj.AdaptiveField(-2.5, 2.5), num_updates=5, episodes_per_update=100,
            times=[0.4, 0.8], grid=jnp.linspace(-1.0, 1.0, 9), initial=jnp.zeros((8, 1)), step_size=0.02,
            inverse_temperature=1.0,
        )
        tracked.changed, tracked.changed_at[-1]  # the fourth update, number 3
        ```
    """
    check_key("key", key)
    num_updates, steps = check_count("num_updates", num_updates), check_count("steps_per_update", steps_per_update)
    axes = axes_of(grid)
    x = float_array("initial", initial)
    check_shape("initial", x, (None, field.mesh.dim), "chains d")
    if len(axes) != field.mesh.dim:
        raise ValueError(f"grid must have {field.mesh.dim} axes, as many as the field, got {len(axes)}")
    check_rule(step_size, inverse_temperature)
    if method not in ("leimkuhler-matthews", "euler"):
        raise ValueError(f'method must be "leimkuhler-matthews" or "euler", got {method!r}')
    stream = _stream_of(source, episodes_per_update, times)
    eta = _step_sizes(step_size, num_updates * steps, x.dtype)
    beta = jnp.asarray(inverse_temperature, x.dtype)
    final, seen = _follow(key, stream, field, axes, x, eta, beta, num_updates, steps, method)
    loss, loss_stderr, gradients, positions, number, *rest = seen
    changed = jnp.diff(number, prepend=field.changes[None]) > 0
    return Tracking(
        final, axes[0] if len(axes) == 1 else axes, loss, loss_stderr, gradients, positions, rest[0], changed, *rest[1:]
    )


class _LearnerStream(eqx.Module):
    """The episodes of a learner at each time, as a function of a key and the time."""

    learner: ForwardLearner
    scheme: Any
    episodes: int = eqx.field(static=True)
    stops: tuple[int, ...] = eqx.field(static=True)

    def __call__(self, key: Key, time: Array) -> Samples:
        learner = self.learner
        if isinstance(learner.potential, AbstractMoving):
            learner = eqx.tree_at(lambda one: one.potential, learner, learner.potential.at(time))
        return observe_steps(key, learner, self.scheme, self.episodes, self.stops)


class _Function(eqx.Module):
    """A plain function, made part of what is compiled."""

    function: Callable = eqx.field(static=True)

    def __call__(self, key: Key, time: Array) -> Samples:
        return self.function(key, time)


def _stream_of(source: Any, episodes: Any, times: Any) -> Stream:
    if not isinstance(source, ForwardLearner):
        if not callable(source):
            raise ValueError(f"source must be a ForwardLearner or a function of key and time, got {source!r}")
        if episodes is not None or times is not None:
            raise ValueError("episodes_per_update and times must be left out with a stream, which settles them itself")
        stream: Any = source if isinstance(source, eqx.Module) else _Function(source)
        return stream
    if episodes is None or times is None:
        raise ValueError("episodes_per_update and times must be given with a learner")
    _, dtype = initial_shape(source)
    stops = steps_at(times, source.step_size)
    learner = floats_to_arrays(source, dtype)
    scheme = floats_to_arrays(choose_scheme(learner, None, stops[-1]), dtype)
    return _LearnerStream(learner, scheme, check_count("episodes_per_update", episodes), stops)


def _step_sizes(step_size: Any, steps: int, dtype: Any) -> Float[Array, "..."]:
    if callable(step_size):
        return jax.vmap(lambda k: jnp.asarray(step_size(k), dtype))(jnp.arange(steps))
    return jnp.asarray(step_size, dtype)


class _Carry(NamedTuple):
    field: AdaptiveField
    x: Float[Array, "chains d"]


@eqx.filter_jit
def _follow(
    key: Key,
    stream: Stream,
    field: AdaptiveField,
    axes: tuple[Array, ...],
    x: Array,
    eta: Array,
    beta: Array,
    num_updates: int,
    steps: int,
    method: str,
) -> tuple[AdaptiveField, tuple[Any, ...]]:
    stream_key, noise_key, field_key = jax.random.split(key, 3)
    points = jnp.stack(jnp.meshgrid(*axes, indexing="ij"), -1).reshape(-1, len(axes))

    def update(carry: _Carry, t: Array) -> tuple[_Carry, tuple[Any, ...]]:
        learned = carry.field.update(stream(jax.random.fold_in(stream_key, t), t))
        moves = Dynamics(learned, noise_key, field_key, eta, beta, method, None)
        number = t * steps + jnp.arange(steps, dtype=t.dtype)

        def step(state: State, drawn: Any) -> tuple[State, None]:
            return moves.move(state, jax.vmap(learned)(state.x).value, drawn), None

        state, _ = lax.scan(step, State(carry.x, ()), moves.draws(number, carry.x))
        recovered = learned.loss(axes)
        return _Carry(learned, state.x), (
            recovered.value, recovered.stderr, jax.vmap(learned)(points), state.x, learned.changes, learned.memory,
            learned.changed_at, learned.p_values, learned.fit_p_value, learned.refused,
        )  # fmt: skip

    last, seen = lax.scan(update, _Carry(field, x), jnp.arange(num_updates, dtype=jnp.int32))
    return last.field, seen
