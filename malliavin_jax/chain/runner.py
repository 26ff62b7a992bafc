"""The machine under the outer chain: blocks of steps in one compiled program, and legs of a long run."""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int, PyTree

from .._base import checkpoint as _checkpoint
from .._base.checks import check_count
from .._base.types import Key
from ..estimate.ratio import Estimate
from .rule import LangevinState, mix, normal_like


class State(NamedTuple):
    x: Float[Array, "chains d"]
    rule: PyTree  # the optimizer's state; () for the built-in rule, whose noise is a function of the step


class Walk(eqx.Module):
    """What stays fixed along a run. Its numbers are arrays, so that none of them compiles anew."""

    field: Callable[..., Estimate]
    noise_key: Key
    field_key: Key
    eta: Float[Array, "..."] | None  # one number, or one per step
    beta: Float[Array, ""] | None
    burn_in: Int[Array, ""]
    thinning: Int[Array, ""]
    method: str = eqx.field(static=True)
    optimizer: optax.GradientTransformation | None

    @eqx.filter_jit
    def init(self, x: Float[Array, "chains d"]) -> State:
        if self.optimizer is None:
            return State(x, ())
        rule = jax.vmap(self.optimizer.init)(x)
        return State(x, jax.vmap(_own_randomness)(rule, jnp.arange(len(x), dtype=jnp.int32)))

    def estimate(self, x: Float[Array, "chains d"], k: Int[Array, ""]) -> Estimate:
        key = jax.random.fold_in(self.field_key, k)
        estimate = jax.vmap(lambda alpha: self.field(alpha, key=key))(x)
        if not isinstance(estimate, Estimate) or estimate.value.shape != x.shape:
            got = jax.tree.map(lambda leaf: leaf.shape[1:], estimate)
            raise ValueError(f"field must return an Estimate with a value of shape {x.shape[1:]}, got {got}")
        return estimate

    def draws(self, k: Int[Array, " block"], x: Float[Array, "chains d"]) -> tuple[Array, Array] | None:
        """η and sqrt(2η/β)·n of each step of a block. One draw for all: drawing inside the scan is slow."""
        if self.eta is None or self.beta is None:
            return None
        eta = self.eta[jnp.minimum(k, len(self.eta) - 1)] if self.eta.ndim else jnp.full(k.shape, self.eta)
        keys = jax.vmap(jax.random.fold_in, (None, 0))(self.noise_key, jnp.append(k, k[-1] + 1))
        w = jax.vmap(lambda key: jax.random.normal(key, x.shape, x.dtype))(keys)
        return eta, jnp.sqrt(2 * eta / self.beta)[:, None, None] * mix(w[:-1], w[1:], self.method)

    def move(self, state: State, gradient: Array, drawn: tuple[Array, Array] | None) -> State:
        gradient = gradient.astype(state.x.dtype)
        if self.optimizer is None:
            assert drawn is not None
            eta, kick = drawn
            return State(state.x - eta * gradient + kick, ())
        update: Callable[..., Any] = self.optimizer.update
        updates, rule = jax.vmap(update)(gradient, state.rule, state.x)
        return State(state.x + updates.astype(state.x.dtype), rule)


@eqx.filter_jit
def advance(
    walk: Walk, state: State, start: Array, stop: Array, num_blocks: Any, size: int, slots: int
) -> tuple[State, tuple[Array, ...]]:
    """Steps start … stop − 1 in blocks of `size`, and the positions kept among them with their estimates.

    The records are filled in place; one slot more takes what is not kept. So burn-in and thinning are mere
    numbers of one program, in which the field is compiled once.
    """
    sample = eqx.filter_eval_shape(_record, walk, state.x, start)
    records = jax.tree.map(lambda leaf: jnp.zeros((slots + 1, *leaf.shape), leaf.dtype), sample)
    first = jnp.maximum(0, (start - 1 - walk.burn_in) // walk.thinning)  # kept by the steps before start

    def step(carry: tuple[State, Any], inputs: Any) -> tuple[tuple[State, Any], None]:
        (state, records), (k, drawn) = carry, inputs
        record = _record(walk, state.x, k)
        since = k - walk.burn_in
        is_kept = (since > 0) & (since % walk.thinning == 0) & (k < stop)
        slot = jnp.where(is_kept, since // walk.thinning - 1 - first, slots)
        records = jax.tree.map(
            lambda store, leaf: jax.lax.dynamic_update_index_in_dim(store, leaf, slot, 0), records, record
        )
        moved = walk.move(state, record[1], drawn)
        # The last block may reach past the end: those steps change nothing.
        return (jax.tree.map(lambda new, old: jnp.where(k < stop, new, old), moved, state), records), None

    def block(number: Array, carry: tuple[State, Any]) -> tuple[State, Any]:
        k = start + number * size + jnp.arange(size, dtype=start.dtype)
        return jax.lax.scan(step, carry, (k, walk.draws(k, state.x)))[0]

    state, records = jax.lax.fori_loop(0, num_blocks, block, (state, records))
    return state, jax.tree.map(lambda store: jnp.moveaxis(store[:slots], 0, 1), records)


def _record(walk: Walk, x: Float[Array, "chains d"], k: Int[Array, ""]) -> tuple[Array, ...]:
    e = walk.estimate(x, k)
    return x, e.value, e.stderr, e.density, e.density_stderr, e.trusted


def run_in_legs(
    walk: Walk, state: State, total: int, progress: bool, checkpoint: Any, checkpoint_every: int | None
) -> list[np.ndarray]:
    """The run as a Python loop over legs that end where the bar moves or a checkpoint is due."""
    marks, checkpoints = {total}, None
    if progress:
        marks |= set(range(0, total, -(-total // 100)))
    if checkpoint is not None:
        path = _checkpoint.checked_path(checkpoint)
        every = check_count("checkpoint_every", -(-total // 10) if checkpoint_every is None else checkpoint_every)
        saves = frozenset({total, *range(every, total, every)})
        things = dict(
            key=(walk.noise_key, walk.field_key), field=walk.field, initial=state.x, num_steps=total,
            burn_in=walk.burn_in, thinning=walk.thinning, step_size=walk.eta, inverse_temperature=walk.beta,
            method=walk.method, optimizer=(walk.optimizer, state.rule),
        )  # fmt: skip
        configuration = {name: _checkpoint.fingerprint(thing) for name, thing in things.items()}
        marks, checkpoints = marks | saves, _checkpoint.Checkpoints(path, saves, configuration)
    ends = sorted(marks - {0})
    burn_in, thinning = int(walk.burn_in), int(walk.thinning)
    size = block_size(int(np.diff([0, *ends]).max()), state.x.size)

    def kept_by(step: int) -> int:
        return max(0, (step - 1 - burn_in) // thinning)

    slots = int(np.diff([kept_by(end) for end in (0, *ends)]).max())

    def leg(state: State, start: int, stop: int) -> tuple[State, list[np.ndarray]]:
        num_blocks = whole(-(-(stop - start) // size))  # an array: legs of all lengths share one program
        state, records = advance(walk, state, whole(start), whole(stop), num_blocks, size, slots)
        kept = kept_by(stop) - kept_by(start)
        return state, [np.asarray(leaf)[:, :kept] for leaf in records]

    return _checkpoint.run_in_legs(leg, state, ends, checkpoints=checkpoints, progress=progress)


def block_size(steps: int, width: int) -> int:
    """Steps per block of noise: at most 128 and four million numbers, in blocks of about equal size."""
    most = max(1, min(128, 4_000_000 // width))
    return -(-steps // -(-steps // most))


def _own_randomness(state: PyTree, chain: Int[Array, ""]) -> PyTree:
    """A fresh optimizer state made this chain's: its random keys, and what `langevin` drew from its own."""

    def own(leaf: Any) -> Any:
        if isinstance(leaf, LangevinState):
            key = jax.random.fold_in(leaf.key, chain)
            return LangevinState(key, leaf.count, normal_like(key, 0, leaf.noise))
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.vmap(jax.random.fold_in, (0, None))(leaf.reshape(-1), chain).reshape(leaf.shape)
        return leaf

    return jax.tree.map(own, state, is_leaf=lambda leaf: isinstance(leaf, LangevinState))


def whole(number: int) -> Int[Array, ""]:
    return jnp.asarray(number, jnp.int32)
