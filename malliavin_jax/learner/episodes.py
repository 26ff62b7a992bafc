"""The learner: stochastic gradient Langevin dynamics with restarts, as the discrete chain it really is.

    X_{k+1} = X_k − ε g_k + σ ξ_{k+1},   σ = sqrt(2ε/β),   ξ ~ N(0, I),   X_0 ~ π_0 at each episode start

with ε the step size, β the inverse temperature and g_k the gradient the learner used at X_k: the exact
∇L(X_k), that of a minibatch, or either with additive noise.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from .._base import small_tensors
from .._base.checks import check_count, is_static_zero
from .._base.types import Key, Vector
from ..potentials.base import AbstractMinibatchPotential
from . import random
from .learner import ForwardLearner, Path, Point, Transition, check_matrix, initial_shape, offers_matrix, point_at

State = TypeVar("State")
Output = TypeVar("Output")


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
    words = random.key_words(key)
    x = learner.initial(random.derived_key(words, random.INITIAL, jnp.asarray(0)))
    dim, dtype = x.shape[0], x.dtype
    step_size = jnp.asarray(learner.step_size, dtype)
    inverse_temperature = jnp.asarray(learner.inverse_temperature, dtype)
    sigma = jnp.sqrt(2 * step_size / inverse_temperature)

    width = random.steps_per_block(dim)

    def draw(streams: tuple[int, int, int], block: Array) -> _Noise:
        xi, gradient, _ = streams
        noisy = not is_static_zero(learner.gradient_noise)
        return _Noise(
            random.draw_block(words, xi, block, dim, dtype),
            random.draw_block(words, gradient, block, dim, dtype) if noisy else None,
        )

    def seen_at(x: Vector, noise: _Noise, streams: tuple[int, int, int], block: Array, phase: int) -> Point:
        extra = None if noise.gradient is None else random.normals(noise.gradient, phase, dim, dtype)
        batch_key = random.derived_key(words, streams[2], width * block + phase) if minibatch else None
        return point_at(learner, x, extra, batch_key)

    def one_step(carry: _Carry, block: Array, phase: int) -> _Carry:
        """Step number width·block + phase."""
        before, state, noise = carry
        x = before.x - step_size * before.gradient + sigma * random.normals(noise.xi, phase, dim, dtype)
        after = seen_at(x, noise, random.LATER, block, phase)
        state = step(state, Transition(before, after, step_size, inverse_temperature))
        # The noise of the next block is drawn one block ahead: what a scan carries is computed once, while XLA would
        # hash anew in every expression that uses a number drawn on the spot.
        return _Carry(after, state, draw(random.LATER, block + 1) if phase == width - 1 else noise)

    minibatch = isinstance(learner.potential, AbstractMinibatchPotential)
    # A one-dimensional gradient and Hessian without noise cost less to compute again than to carry through memory.
    slim = dim == 1 and not minibatch and is_static_zero(learner.gradient_noise)
    matrix_free = not offers_matrix(learner)  # products need nothing but x, which is carried already

    def strip(carry: _Carry) -> tuple[Any, Callable[[Any], _Carry]]:
        """What a scan carries, and the way back."""
        kept = (carry.point.x,) if slim else carry.point[:2] if matrix_free else carry.point
        leaves = tuple(small_tensors.pack(small_tensors.unroll(leaf)) for leaf in kept)
        paired, unpair = small_tensors.pair((leaves, carry.state), pairs=dim == 1)

        def restore(stripped: Any) -> _Carry:
            paired, noise = stripped
            leaves, state = unpair(paired)
            ranks = (1, 1, 2)
            tensors = [small_tensors.unpack(leaf, rank) for leaf, rank in zip(leaves, ranks, strict=False)]
            x, *rest = map(small_tensors.roll, tensors)
            if matrix_free and not slim:
                rest = [*rest, learner.potential.curvature(x)]
            return _Carry(point_at(learner, x, None, None) if slim else Point(x, *rest), state, noise)

        return (paired, carry.noise), restore

    def segment(carry: _Carry, block: Array, phase: int, count: int) -> _Carry:
        """`count` steps from number width·block + phase on."""
        before_block = min(count, -phase % width)
        for offset in range(before_block):
            carry = one_step(carry, block, phase + offset)
        blocks, rest = divmod(count - before_block, width)
        block = block + (phase + before_block) // width
        if blocks:
            stripped, restore = strip(carry)

            def one_block(stripped: Any, block: Array) -> tuple[Any, None]:
                carry = restore(stripped)
                for phase in range(width):
                    carry = one_step(carry, block, phase)
                return strip(carry)[0], None

            carry = restore(lax.scan(one_block, stripped, block + jnp.arange(blocks))[0])
        for offset in range(rest):
            carry = one_step(carry, block + blocks, offset)
        return carry

    zero = jnp.asarray(0)
    first = seen_at(x, draw(random.FIRST, zero), random.FIRST, zero, 0)
    carry, start, outputs = _Carry(first, init(first), draw(random.LATER, zero)), 0, []
    carry, bring_back = strip(carry) if matrix_free else (carry, lambda stripped: stripped)
    for gap, repeats in _runs(stops):
        # A gap that is no multiple of the block changes the phase from stop to stop: a few stops then make a period.
        stops_per_period = width // math.gcd(gap, width)

        def period(carry, base, *, gap=gap, count=stops_per_period, phase=start % width):
            carry, read_out = bring_back(carry), []
            for offset in range(phase, phase + count * gap, gap):
                carry = segment(carry, base + offset // width, offset % width, gap)
                read_out.append(read(carry.point, carry.state))
            carry = strip(carry)[0] if matrix_free else carry
            return carry, jax.tree.map(lambda *leaves: jnp.stack(leaves), *read_out)

        periods, rest = divmod(repeats, stops_per_period)
        if periods:
            bases = start // width + jnp.arange(periods) * (stops_per_period * gap // width)
            carry, out = lax.scan(period, carry, bases)
            outputs.append(jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), out))
            start += periods * stops_per_period * gap
        if rest:
            carry, out = period(carry, jnp.asarray(start // width), count=rest, phase=start % width)
            outputs.append(out)
            start += rest * gap
    stacked = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *outputs)
    return first, stacked, _length(words, learner, dtype)


class _Noise(NamedTuple):
    """The normals of one block of steps: what moves the state, and what is added to the gradient at the new one."""

    xi: small_tensors.Leaves
    gradient: small_tensors.Leaves


class _Carry(NamedTuple):
    point: Any
    state: Any
    noise: _Noise


def simulate(key: Key, learner: ForwardLearner, num_steps: int) -> Path:
    """Simulate one episode of `num_steps` steps; `jax.vmap` over keys for many.

        paths = jax.vmap(lambda k: mj.simulate(k, learner, 80))(jax.random.split(key, 5000))

    is, key for key, what `observe(key, learner, num_episodes=5000, …)` weighs without storing it.

    ```python
    path = jax.jit(lambda key: mj.simulate(key, learner, 80))(jax.random.key(0))
    path.x.shape  # (81, 1): row 0 is the start
    ```
    """
    num_steps = check_count("num_steps", num_steps)
    initial_shape(learner)
    check_matrix(learner)
    first, points, last_step = march(
        key,
        learner,
        range(1, num_steps + 1),
        init=lambda point: None,
        step=lambda state, transition: None,
        read=lambda point, state: point,
    )
    seen = jnp.arange(num_steps + 1, dtype=last_step.dtype) <= last_step

    def column(start: Array, rest: Array) -> Array:
        rows = jnp.concatenate([start[None], rest])
        return jnp.where(seen.reshape(-1, *(1,) * start.ndim), rows, jnp.nan)

    x, gradient, hessian = jax.tree.map(column, first, points)
    step_size = jnp.asarray(learner.step_size, x.dtype)
    return Path(x, gradient, hessian, step_size, jnp.asarray(learner.inverse_temperature, x.dtype), last_step)


def _length(words: random.Words, learner: ForwardLearner, dtype: Any) -> Int[Array, ""]:
    """Steps until the restart: geometric, P(length ≥ k) = (1 − p)^k, drawn without looking at the path."""
    if is_static_zero(learner.restart_probability):
        return jnp.asarray(jnp.iinfo(jnp.int32).max, jnp.int32)
    survive = jnp.log1p(-jnp.asarray(learner.restart_probability, dtype))
    u = 1 - random.uniform(words, random.LENGTH, dtype)  # in (0, 1]: its logarithm is finite
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
