"""The learner: stochastic gradient Langevin dynamics with restarts, as the discrete chain it really is.

    X_{k+1} = X_k − ε g_k + σ ξ_{k+1},   σ = sqrt(2ε/β),   ξ ~ N(0, I),   X_0 ~ π_0 at each episode start

with ε the step size, β the inverse temperature and g_k the gradient the learner used at X_k: the exact
∇L(X_k), that of a minibatch, or either with additive noise.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from . import _noise
from ._misc import check_count, check_nonnegative, check_positive, is_concrete, is_static_zero
from ._types import Key, Matrix, Scalar, Vector
from .potentials import AbstractMinibatchPotential, AbstractPotential

State = TypeVar("State")
Output = TypeVar("Output")


class ForwardLearner(eqx.Module):
    """A learner that we watch.

    - `potential`: the loss L it minimises; one with minibatches is sampled anew at every step.
    - `initial`: the law π_0 of an episode's start, as a function key ↦ X_0 of shape (d,). Its dtype is the
      dtype of the whole simulation.
    - `step_size`: ε > 0.
    - `inverse_temperature`: β > 0.
    - `gradient_noise`: standard deviation of independent Gaussian noise added to every gradient; the
      learner moves along the noisy gradient, and the noisy gradient is what is observed.
    - `restart_probability`: chance of a restart before each step. Episode lengths are then geometric and
      independent of the path, as integration by parts needs; 0 means that no episode stops early.
    """

    potential: AbstractPotential
    initial: Callable[[Key], Vector]
    step_size: float | Scalar
    inverse_temperature: float | Scalar = 1.0
    gradient_noise: float | Scalar = 0.0
    restart_probability: float | Scalar = 0.0

    def __check_init__(self):
        check_positive("step_size", self.step_size)
        check_positive("inverse_temperature", self.inverse_temperature)
        check_nonnegative("gradient_noise", self.gradient_noise)
        check_nonnegative("restart_probability", self.restart_probability)
        if is_concrete(self.restart_probability) and self.restart_probability >= 1:
            raise ValueError(f"restart_probability must be below 1, got {self.restart_probability}")


class Point(NamedTuple):
    """What is observed at one step."""

    x: Vector
    gradient: Vector
    hessian: Matrix


class Transition(NamedTuple):
    """One step of the learner, as observed: `before` at k, `after` at k + 1."""

    before: Point
    after: Point
    step_size: Scalar
    inverse_temperature: Scalar


class Path(eqx.Module):
    """One observed episode; rows past `length` steps, after the episode stopped, hold NaN."""

    x: Float[Array, "points d"]
    gradient: Float[Array, "points d"]
    hessian: Float[Array, "points d d"]
    step_size: Scalar
    inverse_temperature: Scalar
    length: Int[Array, ""]

    @property
    def num_steps(self) -> int:
        return self.x.shape[0] - 1


def initial_shape(learner: ForwardLearner) -> tuple[int, Any]:
    """Dimension and dtype of the learner's state, from its initial law; a clear error if it has none."""
    spec = jax.eval_shape(learner.initial, jax.random.key(0))
    if not hasattr(spec, "shape") or len(spec.shape) != 1 or spec.shape[0] == 0:
        raise ValueError(f"initial must return an array of shape (d,), got {getattr(spec, 'shape', spec)}")
    if not jnp.issubdtype(spec.dtype, jnp.floating):
        raise ValueError(f"initial must return floating-point numbers, got dtype {spec.dtype}")
    for name, expected in (("gradient", spec.shape), ("hessian", spec.shape * 2)):
        try:
            got = jax.eval_shape(getattr(learner.potential, name), spec).shape
        except (TypeError, ValueError, IndexError) as error:
            raise ValueError(
                f"initial returns a state of shape {spec.shape}, which potential.{name} does not take: {error}"
            ) from error
        if got != expected:
            raise ValueError(
                f"potential.{name} must return shape {expected} at the states of shape {spec.shape} "
                f"that initial returns, got {got}"
            )
    return spec.shape[0], spec.dtype


def march(
    key: Key,
    learner: ForwardLearner,
    stops: Sequence[int],
    init: Callable[[Point], State],
    step: Callable[[State, Transition], State],
    read: Callable[[Point, State], Output],
) -> tuple[Point, Output, Int[Array, ""]]:
    """Run one episode, fold `step` over its transitions, and `read` at each of the `stops`.

    `stops` are increasing step numbers, known when tracing. Nothing else is kept: memory does not grow with
    the number of steps. Returns the initial point, the outputs stacked along the stops, and the number
    of steps after which the episode stops.
    """
    initial_key, noise_key = jax.random.split(key)
    words = _noise.key_words(noise_key)
    x = learner.initial(initial_key)
    dim, dtype = x.shape[0], x.dtype
    step_size = jnp.asarray(learner.step_size, dtype)
    inverse_temperature = jnp.asarray(learner.inverse_temperature, dtype)
    sigma = jnp.sqrt(2 * step_size / inverse_temperature)

    width = _noise.steps_per_block(dim)

    def draw(streams: tuple[int, int, int], block: Array, phase: int) -> _Draws:
        xi, gradient, batch = streams
        noise, batch_key = None, None
        if not is_static_zero(learner.gradient_noise):
            noise = _noise.normals(words, gradient, block, phase, dim, dtype)
        if isinstance(learner.potential, AbstractMinibatchPotential):
            batch_key = _noise.batch_key(words, batch, width * block + phase)
        return _Draws(_noise.normals(words, xi, block, phase, dim, dtype), noise, batch_key)

    def one_step(carry: tuple[Point, State], block: Array, phase: int) -> tuple[Point, State]:
        """Step number width·block + phase."""
        before, state = carry
        draws = draw(_noise.LATER, block, phase)
        x = before.x - step_size * before.gradient + sigma * draws.xi
        after = _point_at(learner, x, draws)
        return after, step(state, Transition(before, after, step_size, inverse_temperature))

    # A one-dimensional gradient and Hessian without noise cost less to compute again than to carry through memory.
    has_noise = not is_static_zero(learner.gradient_noise) or isinstance(learner.potential, AbstractMinibatchPotential)
    slim = dim == 1 and not has_noise

    def strip(carry: tuple[Point, State]) -> Any:
        return (carry[0].x, carry[1]) if slim else carry

    def restore(carry: Any) -> tuple[Point, State]:
        return (_point_at(learner, carry[0], _Draws(carry[0], None, None)), carry[1]) if slim else carry

    def one_block(carry: Any, block: Array) -> tuple[Any, None]:
        carry = restore(carry)
        for phase in range(width):
            carry = one_step(carry, block, phase)
        return strip(carry), None

    def segment(carry: tuple[Point, State], block: Array, phase: int, count: int) -> tuple[Point, State]:
        """`count` steps from number width·block + phase on."""
        if phase > 0:
            carry, block, count = one_step(carry, block, phase), block + 1, count - 1
        blocks, rest = divmod(count, width)
        if blocks:
            carry, _ = lax.scan(one_block, strip(carry), block + jnp.arange(blocks), unroll=width)
            carry = restore(carry)
        return one_step(carry, block + blocks, 0) if rest else carry

    first = _point_at(learner, x, draw(_noise.FIRST, jnp.asarray(0), 0))
    carry, start, outputs = (first, init(first)), 0, []
    for gap, repeats in _runs(stops):
        # A gap that is no multiple of the block changes the phase from stop to stop: `width` stops then make a period.
        stops_per_period = 1 if gap % width == 0 else width

        def period(carry, base, *, gap=gap, count=stops_per_period, phase=start % width):
            read_out = []
            for offset in range(phase, phase + count * gap, gap):
                carry = segment(carry, base + offset // width, offset % width, gap)
                read_out.append(read(*carry))
            return carry, jax.tree.map(lambda *leaves: jnp.stack(leaves), *read_out)

        periods, rest = divmod(repeats, stops_per_period)
        if periods:
            bases = start // width + jnp.arange(periods) * (stops_per_period * gap // width)
            carry, out = lax.scan(period, carry, bases)
            outputs.append(jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), out))
            start += periods * stops_per_period * gap
        if rest:
            carry, out = period(carry, jnp.asarray(start // width), count=1, phase=start % width)
            outputs.append(out)
            start += gap
    stacked = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *outputs)
    return first, stacked, _length(words, learner, dtype)


class _Draws(NamedTuple):
    """The random numbers of one step: what moves the state, and what is seen at the new one."""

    xi: Vector
    gradient: Vector | None
    batch_key: Key | None


def _point_at(learner: ForwardLearner, x: Vector, draws: _Draws) -> Point:
    """What the learner sees at x: the potential's derivatives, or a minibatch's, plus its gradient noise."""
    potential = learner.potential
    if draws.batch_key is not None:
        assert isinstance(potential, AbstractMinibatchPotential)
        potential = potential.minibatch(draws.batch_key)
    gradient = potential.gradient(x)
    if draws.gradient is not None:
        gradient = gradient + jnp.asarray(learner.gradient_noise, x.dtype) * draws.gradient
    return Point(x, gradient, potential.hessian(x))


def simulate(key: Key, learner: ForwardLearner, num_steps: int) -> Path:
    """Simulate one episode of `num_steps` steps; `jax.vmap` over keys for many.

        paths = jax.vmap(lambda k: mj.simulate(k, learner, 80))(jax.random.split(key, 5000))

    is, key for key, what `observe(key, learner, num_episodes=5000, …)` weighs without storing it.
    """
    num_steps = check_count("num_steps", num_steps)
    initial_shape(learner)
    first, points, length = march(
        key,
        learner,
        range(1, num_steps + 1),
        init=lambda point: None,
        step=lambda state, transition: None,
        read=lambda point, state: point,
    )
    seen = jnp.arange(num_steps + 1, dtype=length.dtype) <= length

    def column(start: Array, rest: Array) -> Array:
        rows = jnp.concatenate([start[None], rest])
        return jnp.where(seen.reshape(-1, *(1,) * start.ndim), rows, jnp.nan)

    x, gradient, hessian = jax.tree.map(column, first, points)
    step_size = jnp.asarray(learner.step_size, x.dtype)
    return Path(x, gradient, hessian, step_size, jnp.asarray(learner.inverse_temperature, x.dtype), length)


def _length(words: _noise.Words, learner: ForwardLearner, dtype: Any) -> Int[Array, ""]:
    """Steps until the restart: geometric, P(length ≥ k) = (1 − p)^k, drawn without looking at the path."""
    if is_static_zero(learner.restart_probability):
        return jnp.asarray(jnp.iinfo(jnp.int32).max, jnp.int32)
    survive = jnp.log1p(-jnp.asarray(learner.restart_probability, dtype))
    u = 1 - _noise.uniform(words, _noise.LENGTH, dtype)  # in (0, 1]: its logarithm is finite
    return jnp.minimum(jnp.floor(jnp.log(u) / survive), 2.0**30).astype(jnp.int32)


def _runs(stops: Sequence[int]) -> list[tuple[int, int]]:
    """Run-length encoding of the gaps between stops: evenly spaced stops compile to one scan."""
    runs: list[tuple[int, int]] = []
    for before, after in zip([0, *stops], stops, strict=False):
        gap = after - before
        if runs and runs[-1][0] == gap:
            runs[-1] = (gap, runs[-1][1] + 1)
        else:
            runs.append((gap, 1))
    return runs
