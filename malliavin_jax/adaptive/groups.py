"""What is remembered of a stream: sums over the points of its updates, in groups that grow with age.

The newest update is a group of its own; before it come groups of up to 4, 16 and 64 updates, and one of all the rest.
When a group is full it is poured into the next. So a cut between groups, at any time, parts the newer from the older
at some five places that lie evenly in the logarithm of age, and the memory does not grow.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .._base.small_tensors import HIGHEST
from .._base.types import Scalar
from .equations import Equations, Mesh, no_equations

CAPACITY = (1, 4, 16, 64)  # updates in each group, from the newest on; one more group takes all that is older


class Sums(NamedTuple):
    """Normal equations, squared scores, and sums of weights; with an axis of groups in front, those of each."""

    equations: Equations
    points: Float[Array, "*groups cells"]  # Σ w over points, cell by cell
    scores: Float[Array, "*groups powers p p"]  # Σ w² s sᵀ
    episodes: Float[Array, "*groups"]  # Σ w over episodes
    squares: Float[Array, "*groups"]  # Σ w² over episodes
    updates: Float[Array, "*groups"]  # Σ w over updates
    ages: Float[Array, "*groups"]  # Σ w age over updates, that of the newest being 0


def no_groups(mesh: Mesh, groups: int) -> Sums:
    """Groups of nothing."""
    scores = jnp.zeros((3 if mesh.hessians else 1, mesh.size, mesh.size), jnp.float64)
    points = jnp.zeros(len(mesh.touched()), jnp.float64)
    one = Sums(no_equations(mesh), points, scores, *(jnp.zeros((), jnp.float64) for _ in range(4)))
    return jax.tree.map(lambda leaf: jnp.stack([leaf] * groups), one)


def newest_of(found: Equations, points: Array, scores: Array, episodes: Scalar) -> Sums:
    """The sums of one update."""
    return Sums(found, points, scores, episodes, episodes, jnp.ones((), jnp.float64), jnp.zeros((), jnp.float64))


def with_newest(old: Sums, forgetting: Scalar | None, new: Sums) -> Sums:
    """The groups with one more update; or, where `forgetting` is a number, the one group discounted by it."""
    old = old._replace(ages=old.ages + old.updates)
    if forgetting is not None:
        once = jax.tree.map(lambda before, now: forgetting * before + now[None], old, new)
        twice = jax.tree.map(lambda before, now: forgetting**2 * before + now[None], old, new)
        return once._replace(scores=twice.scores, squares=twice.squares)
    groups = len(CAPACITY) + 1
    number = jnp.arange(groups)
    is_full = old.updates >= jnp.asarray((*CAPACITY, jnp.inf), jnp.float64)
    target = jnp.where(is_full, number + 1, number)  # the newest update is always full
    pour = (target[None, :] == number[:, None]).astype(jnp.float64)

    def poured(before: Array, now: Array) -> Array:
        return jnp.tensordot(pour, before, 1, precision=HIGHEST).at[0].add(now)

    return jax.tree.map(poured, old, new)


def parted(sums: Sums, groups: Int[Array, ""]) -> tuple[Sums, Sums]:
    """The newest so many groups, and the others; zero where they are not."""

    def part(leaf: Array, is_newer: bool) -> Array:
        chosen = (jnp.arange(leaf.shape[0], dtype=groups.dtype) < groups) == is_newer
        return jnp.where(chosen.reshape(-1, *(1,) * (leaf.ndim - 1)), leaf, 0)

    return jax.tree.map(lambda leaf: part(leaf, True), sums), jax.tree.map(lambda leaf: part(leaf, False), sums)
