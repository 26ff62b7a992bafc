"""The learner: stochastic gradient Langevin dynamics with restarts, as the discrete chain it really is.

    X_{k+1} = X_k − ε g_k + σ ξ_{k+1},   σ = sqrt(2ε/β),   ξ ~ N(0, I),   X_0 ~ π_0 at each episode start

with ε the step size, β the inverse temperature and g_k the gradient the learner used at X_k: the exact
∇L(X_k), that of a minibatch, or either with additive noise.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from .._base.checks import check_count, check_key, is_static_zero
from .._base.types import Key, Scalar, Vector
from ..potentials.base import AbstractMinibatchPotential
from ..potentials.products import matrix_of
from . import random
from .carry import Carry, Layout, Noise, Packed
from .learner import ForwardLearner, Path, Point, Transition, check_matrix, initial_shape, point_at
from .schedule import NOWHERE, EvenStops, Rows, make_schedule


class Episode(NamedTuple):
    """One episode of a learner, as functions of its key: where it starts, what noise it meets, how it steps.

    Steps come in blocks of `width`; step number `phase` of a block is known when tracing.
    """

    learner: ForwardLearner
    words: random.Words
    start: Vector
    step_size: Scalar
    inverse_temperature: Scalar

    @property
    def dim(self) -> int:
        return self.start.shape[0]

    @property
    def dtype(self) -> Any:
        return self.start.dtype

    @property
    def width(self) -> int:
        return random.steps_per_block(self.dim)

    @property
    def has_minibatches(self) -> bool:
        return isinstance(self.learner.potential, AbstractMinibatchPotential)

    @property
    def has_noisy_gradients(self) -> bool:
        return not is_static_zero(self.learner.gradient_noise)

    def draw(self, streams: tuple[int, int, int], block: Array) -> Noise:
        """The normals of a block; `streams` are those of the first point or of the later ones."""
        xi, gradient, _ = streams
        return Noise(
            random.draw_block(self.words, xi, block, self.dim, self.dtype),
            random.draw_block(self.words, gradient, block, self.dim, self.dtype) if self.has_noisy_gradients else None,
        )

    def seen_at(self, x: Vector, noise: Noise, streams: tuple[int, int, int], block: Array, phase: int) -> Point:
        """What the learner sees at x."""
        extra = None if noise.gradient is None else random.normals(noise.gradient, phase, self.dim, self.dtype)
        number = self.width * block + phase
        batch_key = random.derived_key(self.words, streams[2], number) if self.has_minibatches else None
        return point_at(self.learner, x, extra, batch_key)

    def first_point(self) -> Point:
        zero = jnp.asarray(0)
        return self.seen_at(self.start, self.draw(random.FIRST, zero), random.FIRST, zero, 0)

    def step(self, before: Point, noise: Noise, block: Array, phase: int) -> Transition:
        """X_{k+1} = X_k − ε g_k + σ ξ_{k+1}, step number width·block + phase."""
        sigma = jnp.sqrt(2 * self.step_size / self.inverse_temperature)
        xi = random.normals(noise.xi, phase, self.dim, self.dtype)
        x = before.x - self.step_size * before.gradient + sigma * xi
        after = self.seen_at(x, noise, random.LATER, block, phase)
        return Transition(before, after, self.step_size, self.inverse_temperature)

    def last_step(self) -> Int[Array, ""]:
        """Steps until the restart: geometric, P(last_step ≥ k) = (1 − p)^k, drawn without looking at the path."""
        if is_static_zero(self.learner.restart_probability):
            return jnp.asarray(jnp.iinfo(jnp.int32).max, jnp.int32)
        survive = jnp.log1p(-jnp.asarray(self.learner.restart_probability, self.dtype))
        u = 1 - random.uniform(self.words, random.LAST_STEP, self.dtype)  # in (0, 1]: its logarithm is finite
        return jnp.minimum(jnp.floor(jnp.log(u) / survive), 2.0**30).astype(jnp.int32)


def make_episode(key: Key, learner: ForwardLearner) -> Episode:
    words = random.key_words(key)
    x = learner.initial(random.derived_key(words, random.INITIAL, jnp.asarray(0)))
    return Episode(
        learner, words, x, jnp.asarray(learner.step_size, x.dtype), jnp.asarray(learner.inverse_temperature, x.dtype)
    )


class Fold(NamedTuple):
    """What is folded along an episode: a state that follows its transitions, and what is read of point and state."""

    init: Callable[[Point], Any]
    step: Callable[[Any, Transition], Any]
    read: Callable[[Point, Any], Any]


class March:
    """One episode with a fold along it, as the functions of a scan: blocks of steps on the packed carry."""

    def __init__(self, episode: Episode, fold: Fold):
        self.episode, self.fold = episode, fold
        point = episode.first_point()
        first = Carry(point, fold.init(point), episode.draw(random.LATER, jnp.asarray(0)))
        # A one-dimensional gradient and Hessian without noise cost less to compute again than to carry through memory.
        self.slim = episode.dim == 1 and not episode.has_minibatches and not episode.has_noisy_gradients
        self.has_matrix = matrix_of(point.hessian) is not None  # products are made again of x, which is carried
        self.layout = Layout(self._kept(first), episode.dim)
        self.start = self.pack(first)

    def _kept(self, carry: Carry) -> Any:
        x, gradient, hessian = carry.point
        return x, None if self.slim else gradient, hessian if self.has_matrix and not self.slim else None, carry.state

    def pack(self, carry: Carry) -> Packed:
        return Packed(self.layout.pack(self._kept(carry)), carry.noise)

    def unpack(self, packed: Packed) -> Carry:
        x, gradient, hessian, state = self.layout.unpack(packed.arrays)
        potential = self.episode.learner.potential
        gradient = potential.gradient(x) if gradient is None else gradient
        hessian = potential.curvature(x) if hessian is None else hessian
        return Carry(Point(x, gradient, hessian), state, packed.noise)

    def step(self, carry: Carry, block: Array, phase: int) -> Carry:
        transition = self.episode.step(carry.point, carry.noise, block, phase)
        return Carry(transition.after, self.fold.step(carry.state, transition), carry.noise)

    def read(self, packed: Packed) -> Any:
        carry = self.unpack(packed)
        return self.fold.read(carry.point, carry.state)

    def _with_noise_of(self, carry: Carry, block: Array) -> Packed:
        # Drawn one row ahead: what a scan carries is computed once, while XLA would hash anew in every expression that
        # uses a number drawn on the spot.
        return self.pack(carry._replace(noise=self.episode.draw(random.LATER, block)))

    def whole_block(self, packed: Packed, block: Array) -> tuple[Packed, None]:
        carry = self.unpack(packed)
        for phase in range(self.episode.width):
            carry = self.step(carry, block, phase)
        return self._with_noise_of(carry, block + 1), None

    def part_of_block(self, packed: Packed, row: Rows) -> Packed:
        """The phases begin … end − 1 of a block; the others are computed and dropped."""
        carry = self.unpack(packed)
        for phase in range(self.episode.width):
            moved = self.step(carry, row.block, phase)
            is_done = (row.begin <= phase) & (phase < row.end)
            carry = jax.tree.map(lambda new, old, is_done=is_done: jnp.where(is_done, new, old), moved, carry)
        return self._with_noise_of(carry, row.next_block)


def march(key: Key, learner: ForwardLearner, stops: Sequence[int], fold: Fold) -> tuple[Any, Int[Array, ""]]:
    """Run one episode, fold along it, and read at each of the `stops`, increasing step numbers known when tracing.

    Nothing else is kept: memory does not grow with the number of steps. Returns what was read, stacked along the
    stops, and the number of steps after which the episode stops.
    """
    episode = make_episode(key, learner)
    schedule, one = make_schedule(stops, episode.width), March(episode, fold)

    def to_next_stop(packed: Packed, blocks: Int[Array, " blocks"]) -> tuple[Packed, Any]:
        packed, _ = lax.scan(one.whole_block, packed, blocks)
        return packed, one.read(packed)

    if isinstance(schedule, EvenStops):
        _, readings = lax.scan(to_next_stop, one.start, schedule.blocks)
        return readings, episode.last_step()

    def to_next_row(carry: tuple[Packed, Any], row: Rows) -> tuple[tuple[Packed, Any], None]:
        packed, readings = carry
        packed = one.whole_block(packed, row.block)[0] if schedule.whole_blocks else one.part_of_block(packed, row)
        # The slot is the same for every episode of a `vmap`, so that what is not read is not computed.
        return (packed, lax.cond(row.slot == NOWHERE, keep, write, readings, packed, row.slot)), None

    def keep(readings: Any, packed: Packed, slot: Array) -> Any:
        return readings

    def write(readings: Any, packed: Packed, slot: Array) -> Any:
        def put(rows: Array, row: Array) -> Array:
            return lax.dynamic_update_index_in_dim(rows, row, slot, 0)

        return jax.tree.map(put, readings, one.read(packed))

    shapes = jax.eval_shape(one.read, one.start)
    empty = jax.tree.map(lambda leaf: jnp.zeros((schedule.number, *leaf.shape), leaf.dtype), shapes)
    (_, readings), _ = lax.scan(to_next_row, (one.start, empty), schedule.rows)
    return readings, episode.last_step()


def simulate(key: Key, learner: ForwardLearner, num_steps: int) -> Path:
    """Simulate one episode; `jax.vmap` over keys for many.

        paths = jax.vmap(lambda k: mj.simulate(k, learner, 80))(jax.random.split(key, 5000))

    is, key for key, what `observe(key, learner, num_episodes=5000, …)` weighs without storing it.

    Args:
        key: the episode is a function of it.
        learner: the learner that is watched; its potential must offer its Hessian, which is stored.
        num_steps: how many steps to make.

    Returns:
        The `Path` of num_steps + 1 points; rows past a restart hold NaN.

    Raises:
        ValueError: if `num_steps` is not a whole number of at least 1, or the learner's parts do not fit together.

    Example:
        ```python
        import jax
        import malliavin_jax as mj

        learner = mj.ForwardLearner(mj.potentials.Quartic(), mj.initial.Normal(), step_size=0.01, gradient_noise=0.5)
        path = jax.jit(lambda key: mj.simulate(key, learner, 80))(jax.random.key(0))
        path.x.shape  # (81, 1): row 0 is the start
        ```
    """
    check_key("key", key)
    num_steps = check_count("num_steps", num_steps)
    initial_shape(learner)
    check_matrix(learner)
    episode = make_episode(key, learner)
    first = episode.first_point()

    def one_block(carry: tuple[Point, Noise], block: Array) -> tuple[tuple[Point, Noise], Point]:
        point, noise = carry
        points = []
        for phase in range(episode.width):
            point = episode.step(point, noise, block, phase).after
            points.append(point)
        return (point, episode.draw(random.LATER, block + 1)), jax.tree.map(lambda *rows: jnp.stack(rows), *points)

    blocks = jnp.arange(-(-num_steps // episode.width))
    _, later = lax.scan(one_block, (first, episode.draw(random.LATER, jnp.asarray(0))), blocks)
    last_step = episode.last_step()
    seen = jnp.arange(num_steps + 1, dtype=last_step.dtype) <= last_step

    def column(start: Array, rest: Array) -> Array:
        rows = jnp.concatenate([start[None], rest.reshape(-1, *start.shape)[:num_steps]])
        return jnp.where(seen.reshape(-1, *(1,) * start.ndim), rows, jnp.nan)

    x, gradient, hessian = jax.tree.map(column, first, later)
    return Path(x, gradient, hessian, episode.step_size, episode.inverse_temperature, last_step)
