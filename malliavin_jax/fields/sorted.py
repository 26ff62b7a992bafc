"""The Laplace localizer in one dimension, at O(log N) a query.

Right of α every sum is Σ_{x > α} e^{−(x−α)/h} c = e^{−(x_j−α)/h} R_j, with x_j the first sample right of α and R_j
the running sum R_j = c_j + e^{−(x_{j+1}−x_j)/h} R_{j+1}; left of α likewise. The running sums come from one
associative scan whose factors are all at most 1, so nothing cancels, in float32 either.

The squares that standard errors need are running sums too. Write an episode's term as n = R + L, its samples right
and left of α. When α passes a sample, R and L change by that sample's coefficients, so R² (which decays at rate
2/h), L² and the product RL (which does not decay) are running sums of increments made of the sample and of its own
episode's partial sums.
"""

from typing import NamedTuple

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from .._base.checks import is_concrete
from .._base.small_tensors import matmul
from .._base.types import Scalar, Vector
from ..estimate.localizers import refuse_derivative
from ..estimate.sums import Bank, Sums, by_episode

_STEPS = 4  # a search takes a multiple of so many


class Places(eqx.Module):
    """How many samples are left of α: equal buckets count all but those in α's own bucket, bisection counts these.

    With as many buckets as samples a few steps are enough, while a bisection of all samples would read memory outside
    the cache at most of its steps; and however the samples lie there are never more than log₂ N steps. Their number is
    known when tracing, in few sizes so that other samples do not compile anew: they are written out and become part of
    one loop over the queries, and no accelerator has to ask its host whether to go on.
    """

    x: Float[Array, " points"]
    first: Int[Array, " edges"]  # sample of each bucket, and at the end the number of all
    low: Scalar
    scale: Scalar  # buckets per unit of x
    steps: int = eqx.field(static=True)

    def __call__(self, alpha: Scalar) -> Int[Array, ""]:
        """The number of samples x ≤ α."""
        bucket = _bucket(alpha, self.low, self.scale, self.x.shape[0])
        low, high = self.first[bucket], self.first[bucket + 1]
        for _ in range(self.steps):
            middle = (low + high) // 2
            is_left = (low < high) & (self.x[middle] <= alpha)
            low, high = jnp.where(is_left, middle + 1, low), jnp.where(is_left, high, middle)
        return low


def make_places(x: Float[Array, " points"]) -> Places:
    """The search among sorted x."""
    first, low, scale, most = _buckets(x)
    digits = (int(most) if is_concrete(most) else len(x)).bit_length()  # of the largest count: steps that it takes
    return Places(x, first, low, scale, -(-digits // _STEPS) * _STEPS)


@eqx.filter_jit
def _buckets(x: Float[Array, " points"]) -> tuple[Array, Scalar, Scalar, Array]:
    """The first sample of each bucket, where buckets begin, how many there are to a unit, and the most in one."""
    width = x[-1] - x[0]
    scale = jnp.where(width > 0, len(x) / jnp.where(width > 0, width, 1), 0)
    counts = jnp.zeros(len(x) + 1, jnp.int32).at[1 + _bucket(x, x[0], scale, len(x))].add(1)
    return jnp.cumsum(counts, dtype=jnp.int32), x[0], scale, jnp.max(counts)


def _bucket(x: Array, low: Scalar, scale: Scalar, buckets: int) -> Array:
    """The bucket of x. It is monotone in x whatever the rounding, and the same for samples and queries.

    The search needs no more than that.
    """
    place = jnp.clip((x - low) * scale, 0, buckets - 1)
    return jnp.where(jnp.isnan(place), 0, place).astype(jnp.int32)


class Row(NamedTuple):
    """What a query needs, for α between two neighbouring samples. The five sums of a side are n, w, nn, nw, ww."""

    right: Float[Array, "*rows 5"]  # of the samples right of α, as seen from the first of them
    left: Float[Array, "*rows 5"]  # of the samples left of α, as seen from the last of them
    mixed: Float[Array, "*rows 3"]  # nn, nw, ww of one side with the other, which do not decay
    x_left: Float[Array, "*rows 1"]  # the two neighbours
    x_right: Float[Array, "*rows 1"]


# Row j of the table is for α between samples j − 1 and j. It is filled up to 16 columns: in float32 one line of cache,
# and a query touches no other. The rows follow each other in one flat array, which a TPU does not fill up to 128.
_WIDTHS, _COLUMNS = (5, 5, 3, 1, 1), 16


def _pack(rows: Row) -> Float[Array, " entries"]:
    """The rows as one table."""
    filling = jnp.zeros((len(rows.x_left), _COLUMNS - sum(_WIDTHS)), rows.x_left.dtype)
    return jnp.concatenate([*rows, filling], 1).reshape(-1)


class SortedBank(eqx.Module):
    """Sorted positions with their running sums; `sums(alpha)` is `localized_sums(bank, alpha, Laplace(length))`."""

    places: Places
    table: Float[Array, " entries"]
    length: Scalar

    def sums(self, alpha: Vector) -> Sums:
        x = refuse_derivative(alpha)[0]
        begin = _COLUMNS * self.places(x)
        entries = iter(lax.platform_dependent(self.table, begin, cpu=_at_once, default=_one_by_one))
        right, left, mixed, (x_left,), (x_right,) = ([next(entries) for _ in range(width)] for width in _WIDTHS)
        near_left, near_right = (jnp.exp(-jnp.maximum(y, 0) / self.length) for y in (x - x_left, x_right - x))
        n, w = (right[i] * near_right + left[i] * near_left for i in (0, 1))
        nn, nw, ww = (right[i] * near_right**2 + left[i] * near_left**2 + mixed[i - 2] for i in (2, 3, 4))
        return Sums(n[None], w, nn[None], nw[None], ww)


def _at_once(table: Float[Array, " entries"], begin: Int[Array, ""]) -> list[Scalar]:
    """The row that begins there, for a processor: a line of cache, read once. What finds it is computed once, too."""
    row = lax.dynamic_slice(table, (lax.optimization_barrier(begin),), (_COLUMNS,))
    return [row[i] for i in range(sum(_WIDTHS))]


def _one_by_one(table: Float[Array, " entries"], begin: Int[Array, ""]) -> list[Scalar]:
    """The same for an accelerator: one number of each query after another, all of it in one kernel."""
    return [table.at[begin + i].get(mode="promise_in_bounds") for i in range(sum(_WIDTHS))]


def _decay(distance: Array) -> Array:
    """First powers for the sums, second powers for the squares."""
    powers = jnp.asarray([1, 1, 2, 2, 2], distance.dtype).reshape(*(1,) * distance.ndim, 5)
    return jnp.exp(-distance[..., None] * powers)


def sort_bank(bank: Bank, length: float | Scalar) -> SortedBank:
    """Sort a one-dimensional bank and accumulate its running sums."""
    x, seen = refuse_derivative(by_episode(bank.x[:, 0])), by_episode(bank.observed)
    x = jnp.where(seen, x, jnp.max(jnp.where(seen, x, -jnp.inf)))
    flat = x.reshape(-1)
    # NumPy sorts far faster than XLA on a CPU.
    order = jnp.asarray(np.argsort(np.asarray(flat))) if is_concrete(flat) else jnp.argsort(flat)
    h = jnp.asarray(length, x.dtype)
    flat, table = _accumulate(bank, x, order, h)
    return SortedBank(make_places(flat), table, h)


@eqx.filter_jit
def _accumulate(
    bank: Bank, x: Float[Array, "episodes times"], order: Int[Array, " points"], h: Scalar
) -> tuple[Float[Array, " points"], Float[Array, " entries"]]:
    """The sorted positions and the table of length h, given the positions and the `order` that sorts them."""
    given = bank.weight[:, 0], bank.values[:, 0], bank.jacobians[:, 0, 0], bank.observed.astype(x.dtype)
    S, value, slope, seen = map(by_episode, given)
    # (n, w) of a sample per unit of e^{−|x−α|/h}: G = ±½ e^{−|y|/h} right and left of α.
    w_right, w_left = seen * (1 / h + S) / 2, seen * (1 / h - S) / 2
    right = jnp.stack([w_right * value - seen * slope / 2, w_right], -1)
    left = jnp.stack([w_left * value + seen * slope / 2, w_left], -1)
    others_right, others_left = _episode_partial_sums(x, right, left, h)
    right_all = jnp.concatenate([right, _increments(right, others_right)], -1)
    left_all = jnp.concatenate([left, _increments(left, others_left)], -1)
    mixed = _products(others_right, left) - _products(right, others_left)

    flat = x.reshape(-1)[order]
    gap = jnp.diff(flat) / h
    zero = jnp.zeros((1,), x.dtype)
    left_sums = _running_sum(left_all.reshape(-1, 5)[order], jnp.concatenate([zero, gap]))
    right_sums = _running_sum(right_all.reshape(-1, 5)[order][::-1], jnp.concatenate([gap, zero])[::-1])[::-1]
    none = jnp.zeros((1, 5), x.dtype)
    rows = Row(
        right=jnp.concatenate([right_sums, none]),
        left=jnp.concatenate([none, left_sums]),
        mixed=jnp.concatenate([none[:, :3], jnp.cumsum(mixed.reshape(-1, 3)[order], 0)]),
        # Beyond the ends there is nothing to decay: the last sample stands in for the neighbour that is not there.
        x_left=jnp.concatenate([flat[:1], flat])[:, None],
        x_right=jnp.concatenate([flat, flat[-1:]])[:, None],
    )
    return flat, _pack(rows)


def _running_sum(terms: Float[Array, "points 5"], gaps: Float[Array, " points"]) -> Float[Array, "points 5"]:
    """y_j = terms_j + decay(gaps_j) y_{j−1}.

    Distances are added and their decay taken afterwards: a product of a million factors, each a rounding error below
    one, would be off by a million of them.
    """

    def combine(before, after):
        return before[0] + after[0], _decay(after[0]) * before[1] + after[1]

    return lax.associative_scan(combine, (gaps, terms))[1]


def _episode_partial_sums(x: Array, right: Array, left: Array, h: Scalar) -> tuple[Array, Array]:
    """For each sample: its own episode's other samples, right of it and left of it, scaled to its place."""
    times = x.shape[1]
    if times == 1:
        return jnp.zeros_like(right), jnp.zeros_like(left)
    apart = x[:, None, :] - x[:, :, None]  # [e, t, t']: from sample t to sample t'
    later = jnp.arange(times)[None, :] > jnp.arange(times)[:, None]
    is_right = (apart > 0) | ((apart == 0) & later[None])
    decay = jnp.exp(-jnp.abs(apart) / h)
    off_diagonal = ~jnp.eye(times, dtype=bool)[None]
    to_right = jnp.where(is_right & off_diagonal, decay, 0)
    to_left = jnp.where(~is_right & off_diagonal, decay, 0)
    return matmul(to_right, right), matmul(to_left, left)


def _increments(own: Array, others: Array) -> Array:
    """Growth of nn, nw, ww when `own` joins `others`."""
    (n, w), (N, W) = jnp.moveaxis(own, -1, 0), jnp.moveaxis(others, -1, 0)
    return jnp.stack([n * n + 2 * n * N, n * w + n * W + w * N, w * w + 2 * w * W], -1)


def _products(right: Array, left: Array) -> Array:
    """What the product of the two sides adds to nn, nw, ww."""
    (n, w), (N, W) = jnp.moveaxis(right, -1, 0), jnp.moveaxis(left, -1, 0)
    return jnp.stack([2 * n * N, n * W + w * N, 2 * w * W], -1)
