"""Localized sums over episodes: the numerators, denominators and squares behind every estimate."""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from .._base import host, mesh
from .._base.types import Numbers, Vector
from ..samples.samples import Samples
from .localizers import Localizer, at_points

T = TypeVar("T")

CHUNK = 4096  # points weighed at once: queries × CHUNK numbers sit in memory, never queries × samples


class Bank(eqx.Module):
    """Points with the values ℓ to average and their Jacobians ∇ℓ; unobserved points have been set to 0.

    Episodes stand in chunks, the last filled up with unobserved ones, and coordinates come first: one coordinate of the
    points of a chunk is contiguous, so that sums over them are vectorised.
    """

    x: Float[Numbers, "chunks d times size"]
    weight: Float[Numbers, "chunks d times size"]
    values: Float[Numbers, "chunks m times size"]
    jacobians: Float[Numbers, "chunks m d times size"]
    observed: Bool[Numbers, "chunks times size"]
    episodes: int = eqx.field(static=True)


class Sums(NamedTuple):
    """Sums over episodes of n = Σ_times (w ℓ − ∇ℓ·G), of w = Σ_times w, and of their products."""

    n: Float[Numbers, "m *places"]
    w: Float[Numbers, "*places"]
    nn: Float[Numbers, "m *places"]
    nw: Float[Numbers, "m *places"]
    ww: Float[Numbers, "*places"]

    def shifted(self, by: Float[Numbers, "m *places"]) -> "Sums":
        """The sums for ℓ + by: n becomes n + by·w."""
        nn = self.nn + 2 * by * self.nw + by**2 * self.ww
        return Sums(self.n + by * self.w, self.w, nn, self.nw + by * self.ww, self.ww)


def add_up(parts: Sequence[T]) -> T:
    """The sum of several PyTrees of one structure, leaf by leaf."""
    return jax.tree.map(lambda *leaves: functools.reduce(operator.add, leaves), *parts)


def by_episode(array: Array) -> Array:
    """Numbers of a bank's points, (chunks, times, size), as (episodes, times); its filling is at the end."""
    return jnp.moveaxis(array, 1, 2).reshape(-1, array.shape[1])


def make_bank(samples: Samples, values: Numbers, jacobians: Numbers) -> Bank:
    """A bank with zeros in place of what was not observed (a zero times a mask is zero; a NaN is not)."""
    arrays = samples.x, samples.weight, values, jacobians, samples.observed
    episodes, devices = samples.num_episodes, mesh.parts()
    if devices == 1:
        return Bank(*_tiled(*arrays), episodes=episodes)
    # Each device makes chunks of its own episodes; unobserved ones fill up the last device.
    full = [jnp.pad(array, [(0, -episodes % devices)] + [(0, 0)] * (array.ndim - 1)) for array in arrays]
    return Bank(*mesh.by_device(_tiled, *full), episodes=episodes)


def _tiled(x: Numbers, weight: Numbers, values: Numbers, jacobians: Numbers, observed: Numbers) -> tuple[Numbers, ...]:
    """The arrays of a bank, in its order, from arrays over (episodes, times)."""
    xp = host.module_of(x)
    episodes, times, _ = x.shape
    chunks = -(-episodes // max(1, CHUNK // times))
    size = -(-episodes // chunks)

    def tiles(array: Numbers) -> Numbers:
        filled = xp.pad(array, [(0, chunks * size - episodes)] + [(0, 0)] * (array.ndim - 1))
        split = filled.reshape(chunks, size, *array.shape[1:])
        return xp.moveaxis(split, (1, 2), (-1, -2))

    def clean(array: Numbers) -> Numbers:
        seen = observed.reshape(*observed.shape, *(1,) * (array.ndim - 2))
        return tiles(xp.where(seen, array, 0))

    return clean(x), clean(weight), clean(values), clean(jacobians), tiles(observed)


def episode_terms(part: Bank, alpha: Numbers, localizer: Localizer) -> tuple[list[Numbers], Numbers]:
    """n, a list of m arrays (size,), and w (size,): the terms of each episode of one chunk, summed over its times."""
    # Coordinates stay apart, each an array over the points of the chunk: XLA then computes a sum in one vectorised
    # loop. (Its CPU backend, jaxlib 0.10.2, was also seen to return wrong numbers for a fused reduction over a short
    # axis under vmap; tests/estimate/test_conditional.py compares vmap with a loop.)
    # With NumPy α may be (d, alphas, 1, 1), and the terms are (alphas, size).
    axes = range(alpha.shape[0])
    K, G = at_points(localizer, [part.x[j] - alpha[j] for j in axes])
    # An unobserved point has weight, values and Jacobian 0: only its kernel wants a mask.
    w = part.observed.astype(part.x.dtype) * K + _sum([G[j] * part.weight[j] for j in axes])
    n = [
        w * value - _sum([jacobian[j] * G[j] for j in axes])
        for value, jacobian in zip(part.values, part.jacobians, strict=True)
    ]
    times = range(w.shape[-2])
    return [_sum([row[..., t, :] for t in times]) for row in n], _sum([w[..., t, :] for t in times])


def _sum(terms: list[Numbers]) -> Numbers:
    """Written out: the terms are few, and each is an array."""
    return functools.reduce(operator.add, terms)


def localized_sums(bank: Bank, alpha: Vector, localizer: Localizer) -> Sums:
    """The sums at α, chunk by chunk."""

    def sums(part: Bank) -> Sums:
        n, w = episode_terms(part, alpha, localizer)
        return Sums(
            jnp.stack([jnp.sum(row) for row in n]),
            jnp.sum(w),
            jnp.stack([jnp.sum(row * row) for row in n]),
            jnp.stack([jnp.sum(row * w) for row in n]),
            jnp.sum(w * w),
        )

    return sum_over_chunks(sums, bank)


def sum_over_chunks(function: Callable[[Bank], Any], bank: Bank) -> Any:
    """Σ of `function(part)` over the chunks of `bank`."""
    devices = mesh.parts()
    if devices > 1 and bank.x.shape[0] % devices == 0:
        return mesh.total_over_devices(lambda bank: sum_over_chunks(function, bank), bank)

    def chunk(index: Array) -> Bank:
        return jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, index, keepdims=False), bank)

    def add(carry: tuple[Any, Bank], index: Array) -> tuple[tuple[Any, Bank], None]:
        total, part = carry
        # The next chunk is fetched one turn ahead: what a scan carries is contiguous, while XLA would read a slice of
        # the bank element by element inside every expression that uses it.
        return (jax.tree.map(jnp.add, total, function(part)), chunk(index)), None

    first = chunk(jnp.asarray(0))
    count = bank.x.shape[0]
    if count == 1:
        return function(first)
    zero = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(function, first))
    (total, last), _ = lax.scan(add, (zero, first), jnp.arange(1, count))
    return jax.tree.map(jnp.add, total, function(last))
