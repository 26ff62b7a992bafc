"""One step of the outer chain: estimate the gradient, draw the noise, move."""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, PyTree

from .._base.checks import described
from .._base.fingerprint import is_key
from .._base.types import Key, Scalar
from ..estimate.ratio import Estimate
from .rule import LangevinState, mix, normal_like


class State(NamedTuple):
    """What a step changes."""

    x: Float[Array, "chains d"]
    optimizer: PyTree  # the optimizer's state; () for the built-in rule, whose noise is a function of the step


class Record(NamedTuple):
    """The position of each chain at one step and the field's estimate there; with an axis `kept`, those of many steps.

    The names are those of `Chain`.
    """

    positions: Float[Array, "chains *kept d"]
    gradients: Float[Array, "chains *kept d"]
    gradient_stderr: Float[Array, "chains *kept d"]
    density: Float[Array, "chains *kept"]
    density_stderr: Float[Array, "chains *kept"]
    trusted: Bool[Array, "chains *kept"]


class Layout:
    """Records of one shape as the columns of one array, (columns, chains), so that a step writes them all at once.

    On a GPU each array written is one more kernel to launch, and chains are bound by their launches; with the chains
    last a TPU, whose arrays have 128 lanes, does not fill them up for a handful of coordinates.
    """

    def __init__(self, shapes: Record):
        self._shapes = shapes
        self.dtype = jnp.result_type(*(leaf.dtype for leaf in shapes if jnp.issubdtype(leaf.dtype, jnp.floating)))
        self._widths = [leaf.shape[1] if leaf.ndim == 2 else 1 for leaf in shapes]
        self.columns = sum(self._widths)

    def pack(self, record: Record) -> Float[Array, "columns chains"]:
        return jnp.concatenate([leaf.astype(self.dtype).reshape(len(leaf), -1).T for leaf in record])

    def unpack(self, store: Float[Array, "kept columns chains"]) -> Record:
        """The records of many steps, chains first again."""
        ends = [*itertools.accumulate(self._widths)]
        parts = jnp.split(jnp.moveaxis(store, 2, 0), ends[:-1], axis=2)
        pairs = zip(parts, self._shapes, strict=True)
        return Record(*((part if like.ndim == 2 else part[..., 0]).astype(like.dtype) for part, like in pairs))


class Draws(NamedTuple):
    """What the built-in rule needs at a step (or, with a leading axis, at each step of a block)."""

    step_size: Scalar
    kick: Float[Array, "chains d"]  # sqrt(2η/β)·n


class Dynamics(eqx.Module):
    """What stays fixed along a run. Its numbers are arrays, so that none of them compiles anew."""

    field: Callable[..., Estimate]
    noise_key: Key
    field_key: Key
    step_size: Float[Array, "..."] | None  # one number, or one per step
    inverse_temperature: Float[Array, ""] | None
    method: str | None = eqx.field(static=True)  # None, as the two above, where an optimizer takes their place
    optimizer: optax.GradientTransformation | None

    @eqx.filter_jit
    def start(self, x: Float[Array, "chains d"]) -> State:
        if self.optimizer is None:
            return State(x, ())
        fresh = jax.vmap(self.optimizer.init)(x)
        return State(x, jax.vmap(_own_randomness)(fresh, jnp.arange(len(x), dtype=jnp.int32)))

    def record(self, x: Float[Array, "chains d"], k: Int[Array, ""]) -> Record:
        """The estimates at step k; its key is the same for all chains."""
        key = jax.random.fold_in(self.field_key, k)
        estimate = jax.vmap(lambda alpha: self.field(alpha, key=key))(x)
        if not isinstance(estimate, Estimate) or estimate.value.shape != x.shape:
            is_one = isinstance(estimate, Estimate)
            got = estimate.value.shape[1:] if is_one else f"{described(estimate)} for all chains"
            raise ValueError(f"field must return an Estimate with a value of shape {x.shape[1:]}, got {got}")
        return Record(
            positions=x,
            gradients=estimate.value,
            gradient_stderr=estimate.stderr,
            density=estimate.density,
            density_stderr=estimate.density_stderr,
            trusted=estimate.trusted,
        )

    def draws(self, k: Int[Array, " block"], x: Float[Array, "chains d"]) -> Draws | None:
        """What is drawn for each step of a block, in one call: drawing inside the scan is slow."""
        if self.step_size is None or self.inverse_temperature is None or self.method is None:
            return None
        eta = self.step_size
        eta = eta[jnp.minimum(k, len(eta) - 1)] if eta.ndim else jnp.full(k.shape, eta)
        keys = jax.vmap(jax.random.fold_in, (None, 0))(self.noise_key, jnp.append(k, k[-1] + 1))
        w = jax.vmap(lambda key: jax.random.normal(key, x.shape, x.dtype))(keys)
        kick = jnp.sqrt(2 * eta / self.inverse_temperature)[:, None, None] * mix(w[:-1], w[1:], self.method)
        return Draws(eta, kick)

    def move(self, state: State, gradient: Float[Array, "chains d"], draws: Draws | None) -> State:
        gradient = gradient.astype(state.x.dtype)
        if self.optimizer is None:
            assert draws is not None
            return State(state.x - draws.step_size * gradient + draws.kick, ())
        update: Callable[..., Any] = self.optimizer.update
        moves, following = jax.vmap(update)(gradient, state.optimizer, state.x)
        return State(state.x + moves.astype(state.x.dtype), following)


def _own_randomness(state: PyTree, chain: Int[Array, ""]) -> PyTree:
    """A fresh optimizer state made this chain's: its random keys, and what `langevin` drew from its own."""

    def own(leaf: Any) -> Any:
        if isinstance(leaf, LangevinState):
            key = jax.random.fold_in(leaf.key, chain)
            return LangevinState(key, leaf.count, normal_like(key, 0, leaf.noise))
        if is_key(leaf):
            return jax.vmap(jax.random.fold_in, (0, None))(leaf.reshape(-1), chain).reshape(leaf.shape)
        return leaf

    return jax.tree.map(own, state, is_leaf=lambda leaf: isinstance(leaf, LangevinState))
