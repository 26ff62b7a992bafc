"""Does the fit hold on the latest episodes? The debiased estimate of what it leaves is the judge.

At places α_j spread over the box, an episode's part in the debiased sum of the residuals ℓ = g − ∇L_θ(X) is

    r_j = Σ over its times of K(X − α_j) ℓ + G(X − α_j)·(ℓ S − ∇ℓ),   E r_j = p(α_j) (∇L − ∇L_θ)(α_j),

K and G those of a `Gaussian` localizer, ∇ℓ = H − ∇²L_θ (0 where no Hessians are fitted: the fit's own stand for them).
A fit that is right leaves noise, whatever the weights S; with those of the episodes, what is wrong is seen point by
point, finer than the kernel and finer than the mesh, which no comparison of older fits with newer ones can.

R = Σ r over the latest episodes is linear in θ, R = R₀ − Bθ, and these episodes are among those that θ was fitted to.
With s their scores, M and V as in `fit.py`, and θ − θ₀ = M⁻¹(Σ s − λPθ₀),

    Cov R = Σ r rᵀ − (Σ r sᵀ) M⁻¹Bᵀ − its transpose + B V Bᵀ,

and |R|² has the law of Σ λ_j z_j², λ the eigenvalues of that (see `change.tail`). A ring of the latest updates keeps
R₀, B, Σ r rᵀ and Σ r sᵀ of each: all that their episodes have to say, for whatever θ is fitted next.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy.linalg import cho_solve
from jaxtyping import Array, Float

from .._base.small_tensors import HIGHEST, matmul
from .._base.types import Scalar
from ..estimate.localizers import Gaussian
from .change import LEAST_ROWS, tail
from .equations import Batch, Mesh, observed_in_units
from .fit import Solved, Tuning, mixed

SLOTS = 8  # updates in the ring
_PLACES = {1: 12, 2: 4}  # along each axis
_LENGTH, _CORE = 1 / 3, 1 / 15  # of the localizer, in units of the wide box, which is four wide
_POINTS = 4096  # looked at together


class Ring(NamedTuple):
    """What the judge keeps of each of the latest updates, from the newest on; a is places × dimensions."""

    right: Float[Array, "slots a"]  # R₀
    slope: Float[Array, "slots a p"]  # B
    spread: Float[Array, "slots a a"]  # Σ r rᵀ
    cross: Float[Array, "slots kinds a p"]  # Σ r s_gᵀ, Σ r s_Hᵀ
    episodes: Float[Array, " slots"]


def no_ring(mesh: Mesh) -> Ring:
    """A ring of nothing."""
    a, p, kinds = len(_places(mesh)) * mesh.dim, mesh.size, 2 if mesh.hessians else 1
    shapes = ((a,), (a, p), (a, a), (kinds, a, p), ())
    return Ring(*(jnp.zeros((SLOTS, *shape), jnp.float64) for shape in shapes))


def with_update(
    ring: Ring,
    mesh: Mesh,
    batch: Batch,
    theta: Float[Array, " p"],
    score: Float[Array, "episodes kinds p"],
    inflation: Scalar,
) -> Ring:
    """The ring with one more update, the oldest one gone; residuals and scores are those at θ."""
    right, slope, part = _parts(mesh, batch, theta)
    size = jnp.maximum(jnp.sum(batch.sound), 1).astype(part.dtype)
    part = jnp.where(batch.sound[:, None], part - jnp.sum(part, 0, keepdims=True) / size, 0)
    spread = inflation * jnp.einsum("ea,eb->ab", part, part, precision=HIGHEST)
    cross = inflation * jnp.einsum("ea,ekp->kap", part, score, precision=HIGHEST)
    new = Ring(right + matmul(slope, theta), slope, spread, cross, jnp.sum(batch.sound).astype(jnp.float64))
    return jax.tree.map(lambda old, now: jnp.concatenate([now[None], old[:-1]]), ring, new)


def verdict(
    ring: Ring, tuning: Tuning, solved: Solved, V: Float[Array, "p p"], weight: Float[Array, " slots"]
) -> Scalar:
    """The probability of a misfit at least this large if the fit were right; `weight` is that of each update in it."""
    right, slope, spread, cross, _ = ring
    R = matmul(weight, right - matmul(slope, solved.theta))
    B = jnp.tensordot(weight, slope, 1, precision=HIGHEST)
    J, C = (jnp.tensordot(weight**2, part, 1, precision=HIGHEST) for part in (spread, cross))
    both = jnp.matmul(mixed(C, tuning.ratio), cho_solve((solved.factor, True), B.T), precision=HIGHEST)
    of_fit = jnp.matmul(jnp.matmul(B, V, precision=HIGHEST), B.T, precision=HIGHEST)
    return jnp.where(matmul(weight, ring.episodes) >= LEAST_ROWS, tail(J - both - both.T + of_fit, matmul(R, R)), 1)


def _places(mesh: Mesh) -> Float[np.ndarray, "places d"]:
    """In units of the wide box, from its lower corner."""
    count = _PLACES[mesh.dim]
    axis = 4 * (np.arange(count) + 0.5) / count
    return np.stack(np.meshgrid(*[axis] * mesh.dim, indexing="ij"), -1).reshape(-1, mesh.dim)


def _parts(mesh: Mesh, batch: Batch, theta: Array) -> tuple[Array, Array, Float[Array, "episodes a"]]:
    """R at θ, B, and r of each episode; in units of the wide box. Some episodes at a time: B of a point is large."""
    episodes, times, d = batch.x.shape
    chunk = max(1, min(episodes, _POINTS // times))
    numbers = (batch.x, observed_in_units(mesh, batch), batch.weight * mesh.unit[None, None], batch.counts)

    def chunked(leaf: Array) -> Array:
        padded = jnp.pad(leaf, [(0, -episodes % chunk)] + [(0, 0)] * (leaf.ndim - 1))
        return padded.reshape(-1, chunk, *leaf.shape[1:])

    def add(slope: Array, some: tuple[Any, ...]) -> tuple[Array, Array]:
        found, basis, index = jax.vmap(jax.vmap(lambda *point: _at(mesh, theta, *point)))(*some)
        basis, index = (leaf.reshape(-1, *leaf.shape[2:]) for leaf in (basis, index))
        return slope.at[:, index].add(basis.transpose(1, 0, 2)), jnp.sum(found, 1)

    empty = jnp.zeros((len(_places(mesh)) * d, mesh.size), jnp.float64)
    slope, part = lax.scan(add, empty, jax.tree.map(chunked, numbers))
    part = part.reshape(-1, part.shape[-1])[:episodes]
    return jnp.sum(part, 0), slope, part


def _at(mesh: Mesh, theta: Array, x: Array, y: list[Array], weight: Array, counts: Array) -> tuple[Array, Array, Array]:
    """At one point: r at every place, its derivative by the local coefficients (less a sign), and their numbers."""
    d = mesh.dim
    cells, tables = mesh.derivatives(x, 2)
    index = mesh.number(cells, mesh.shape) + jnp.asarray(mesh.touched()[0], jnp.int32)
    K, G = jax.vmap(Gaussian(_LENGTH, core=_CORE))(((x - mesh.low) / mesh.unit)[None] - jnp.asarray(_places(mesh)))
    once = K + matmul(G, weight)  # of ℓ
    rows = mesh.rows(tables, 1)
    basis = once[:, None, None] * rows[None]
    found = once[:, None] * (y[0] - matmul(rows, theta[index]))[None]
    if mesh.hessians:
        rows = mesh.rows(tables, 2)
        square = np.zeros((d, d), int)  # the number of ∂_i∂_j among the second derivatives with i ≤ j
        square[np.triu_indices(d)] = np.arange(len(rows))
        square = np.maximum(square, square.T)
        found = found - jnp.einsum("aj,ij->ai", G, (y[1] - matmul(rows, theta[index]))[square], precision=HIGHEST)
        basis = basis - jnp.einsum("aj,ijl->ail", G, rows[square], precision=HIGHEST)
    return jnp.where(counts, found.ravel(), 0), jnp.where(counts, basis.reshape(found.size, -1), 0), index
