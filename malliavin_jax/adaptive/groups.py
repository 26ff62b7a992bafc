"""What is remembered of a stream: sums over the points of its updates, in groups that grow with age.

The newest update is a group of its own; before it come groups of up to 4, 16 and 64 updates, and one of all the rest.
When a group is full it is poured into the next. So a cut between groups, at any time, parts the newer from the older
at some five places that lie evenly in the logarithm of age, and the memory does not grow.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .._base.types import Scalar
from ..fitting.spline_sums import Totals
from .equations import Mesh, empty_totals

CAPACITY = (1, 4, 16, 64)  # updates in each group, from the newest on; one more group takes all that is older


class Sums(NamedTuple):
    """Sums over points, squared scores, and sums of weights; with an axis of groups in front, those of each."""

    totals: Totals
    scores: Float[Array, "*groups powers p p"]  # Σ w² s sᵀ
    episodes: Float[Array, "*groups"]  # Σ w over episodes
    squares: Float[Array, "*groups"]  # Σ w² over episodes
    updates: Float[Array, "*groups"]  # Σ w over updates


def no_groups(mesh: Mesh, groups: int) -> Sums:
    """Groups of nothing."""
    scores = jnp.zeros((3 if mesh.hessians else 1, mesh.size, mesh.size), jnp.float64)
    one = Sums(empty_totals(mesh).totals, scores, *(jnp.zeros((), jnp.float64) for _ in range(3)))
    return jax.tree.map(lambda leaf: jnp.stack([leaf] * groups), one)


def with_newest(old: Sums, forgetting: float | None, totals: Totals, scores: Array, episodes: Scalar) -> Sums:
    """The groups with one more update; or, where `forgetting` is a number, the one group discounted by it."""
    new = Sums(totals, scores, episodes, episodes, jnp.ones((), jnp.float64))
    if forgetting is not None:
        squared = forgetting**2  # of what is a sum of squared weights
        factors = Sums(jax.tree.map(lambda _: forgetting, totals), squared, forgetting, squared, forgetting)  # type: ignore[arg-type]
        return jax.tree.map(lambda before, factor, now: factor * before + now[None], old, factors, new)
    groups = len(CAPACITY) + 1
    number = jnp.arange(groups)
    is_full = old.updates >= jnp.asarray((*CAPACITY, jnp.inf), jnp.float64)
    target = jnp.where(is_full, number + 1, number)  # the newest update is always full
    pour = (target[None, :] == number[:, None]).astype(jnp.float64)

    def poured(before: Array, now: Array) -> Array:
        return jnp.tensordot(pour, before, 1, precision="highest").at[0].add(now)

    return jax.tree.map(poured, old, new)


def parted(sums: Sums, groups: Int[Array, ""]) -> tuple[Sums, Sums]:
    """The newest so many groups, and the others; zero where they are not."""

    def part(leaf: Array, is_newer: bool) -> Array:
        chosen = (jnp.arange(leaf.shape[0]) < groups) == is_newer
        return jnp.where(chosen.reshape(-1, *(1,) * (leaf.ndim - 1)), leaf, 0)

    return jax.tree.map(lambda leaf: part(leaf, True), sums), jax.tree.map(lambda leaf: part(leaf, False), sums)
