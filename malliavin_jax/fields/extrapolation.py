"""Where there is no data: an average of observed tangent planes, and a spring beyond the observed region.

A ratio whose denominator is noise can take any value. There a field returns instead the average of the planes
g_i + H_i (α − X_i) of the samples around α, with positive weights (1 + |X_i − α|²/ℓ²)^{−(3 + d/2)} that reach far when
nothing is near. It is a first-order extrapolation with observed Hessians: its values are bounded by those of the
planes, and it leads a chain back to the data.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from .._base import host
from .._base.small_tensors import HIGHEST, einsum, matmul
from .._base.types import Numbers, Scalar, Vector
from ..estimate.ratio import TRUSTED_FROM, Estimate, ratio_estimate
from ..estimate.sums import Sums
from ..potentials.base import AbstractPotential
from ..samples.completion import Completion
from ..samples.samples import Samples
from ..samples.summary import box, spread
from .tables import corners_around, interpolate

_PLANES = 2048  # tangent planes kept: enough for an extrapolation, few enough to be evaluated at every query
_REACH = 0.2  # ℓ, in units of the spread of the positions
_TABLE = 257  # nodes of the one-dimensional table
_AT_ONCE = 128  # places at which NumPy averages the planes


class Tail(eqx.Module):
    """α ↦ the weighted mean of tangent planes inside the observed box, continued linearly outside it."""

    x: Float[Numbers, "d planes"]
    planes: Float[Numbers, "planes columns"]  # 1, the gradient of each plane at `middle`, and its Hessian
    low: Float[Numbers, " d"]
    high: Float[Numbers, " d"]
    reach: Float[Numbers, ""]
    floor: Float[Numbers, ""]  # least stiffness outside: 1/variance of the positions, that of a Gaussian of their width

    @property
    def middle(self) -> Float[Numbers, " d"]:
        return (self.low + self.high) / 2

    def at(self, nearest: Vector) -> tuple[Vector, Scalar]:
        """The mean plane at a place in the box, and the stiffness with which it goes on beyond."""
        d = nearest.shape[0]
        square = functools.reduce(jnp.add, [(self.x[j] - nearest[j]) ** 2 for j in range(d)])
        kernel = 1 / (1 + square / self.reach**2) ** ((d + 6) // 2)
        mass, rest = jnp.split(jnp.dot(kernel, self.planes, precision=HIGHEST), [1])
        gradient, hessian = jnp.split(rest / jnp.maximum(mass, jnp.finfo(mass.dtype).tiny), [d])
        hessian = hessian.reshape(d, d)
        stiffness = jnp.maximum(jnp.trace(hessian) / d, self.floor)
        return gradient + matmul(hessian, nearest - self.middle), stiffness

    def __call__(self, alpha: Vector) -> Vector:
        nearest = jnp.clip(alpha, self.low, self.high)
        value, stiffness = self.at(nearest)
        return value + stiffness * (alpha - nearest)


class TabulatedTail(eqx.Module):
    """The same in one dimension, read from a table: a query must not cost more than that of a sorted bank."""

    value: Float[Numbers, " nodes"]
    stiffness: Float[Numbers, "2"]  # left and right of the box
    low: Float[Numbers, " d"]
    high: Float[Numbers, " d"]

    def at(self, nearest: Vector) -> tuple[Vector, Scalar]:
        """The mean plane at a place in the box, and the stiffness with which it goes on beyond."""
        place = (nearest - self.low) / (self.high - self.low) * (self.value.shape[0] - 1)
        is_left = nearest[0] < (self.low + self.high)[0] / 2
        stiffness = jnp.where(is_left, self.stiffness[0], self.stiffness[1])
        return interpolate(self.value, corners_around(place, self.value.shape)).reshape(1), stiffness

    def __call__(self, alpha: Vector) -> Vector:
        nearest = jnp.clip(alpha, self.low, self.high)
        value, stiffness = self.at(nearest)
        return value + stiffness * (alpha - nearest)


def planes_at(
    tail: "Tail | TabulatedTail", places: Float[np.ndarray, "n d"]
) -> tuple[Float[np.ndarray, "n d"], Float[np.ndarray, " n"]]:
    """`tail.at` of many places in the box, with NumPy: before a program for their number could be compiled."""
    tail = host.to_host(tail)
    if isinstance(tail, TabulatedTail):
        low, high = tail.low[0], tail.high[0]
        value = np.interp(places[:, 0], np.linspace(low, high, len(tail.value)), tail.value)
        side = (places[:, 0] >= (low + high) / 2).astype(int)
        return value[:, None].astype(places.dtype), np.asarray(tail.stiffness)[side]
    d = places.shape[1]

    @host.silently
    def some(near: Float[np.ndarray, "some d"]) -> tuple[np.ndarray, np.ndarray]:
        square = functools.reduce(np.add, [(tail.x[j] - near[:, j, None]) ** 2 for j in range(d)])
        kernel = 1 / (1 + square / tail.reach**2) ** ((d + 6) // 2)
        mass, rest = np.split(kernel @ tail.planes, [1], 1)
        gradient, hessian = np.split(rest / np.maximum(mass, np.finfo(mass.dtype).tiny), [d], 1)
        hessian = hessian.reshape(-1, d, d)
        stiffness = np.maximum(np.trace(hessian, axis1=1, axis2=2) / d, tail.floor)
        return gradient + np.einsum("nij,nj->ni", hessian, near - tail.middle), stiffness

    groups = host.on_threads(some, [places[start : start + _AT_ONCE] for start in range(0, len(places), _AT_ONCE)])
    value, stiffness = (np.concatenate(column) for column in zip(*groups, strict=True))
    return value, stiffness


class _Kept(NamedTuple):
    """Some of the samples, zeros where they were not observed, and the box and spread of all."""

    x: Float[Numbers, "planes d"]
    gradient: Float[Numbers, "planes d"]
    hessian: Float[Numbers, "planes d d"]
    seen: Bool[Numbers, " planes"]
    low: Float[Numbers, " d"]
    high: Float[Numbers, " d"]
    spread: Float[Numbers, ""]


def _keep(samples: Samples) -> _Kept:
    """At most 2048 samples: what comes after does not depend on how many there were."""
    arrays = samples.x, samples.gradient, samples.require_hessian("an extrapolation by tangent planes")
    xp = np if host.on_host(samples) else jnp
    seen = xp.asarray(samples.observed).reshape(-1)
    total = seen.shape[0]
    pick = np.linspace(0, total - 1, min(total, _PLANES), dtype=np.float32).astype(np.int32)

    def keep(array: Array) -> Array:
        rows = xp.asarray(array).reshape(total, *array.shape[2:])[pick]
        return host.to_device(xp.where(seen[pick].reshape(-1, *(1,) * (rows.ndim - 1)), rows, 0))

    (x, gradient, hessian), (low, high) = map(keep, arrays), box(samples)
    return _Kept(x, gradient, hessian, host.to_device(seen[pick]), low, high, spread(samples))


def tangent_planes(samples: Samples) -> Tail:
    """The tail of a set of samples, made of at most 2048 of them."""
    kept = _keep(samples)
    return _planes(host.on_host(kept), kept)


@host.here_or_compiled
def _planes(kept: _Kept) -> Tail:
    x, gradient, hessian, seen, low, high, scale = kept
    xp = host.module_of(x)
    back = einsum("pij,pj->pi", hessian, (low + high)[None, :] / 2 - x)
    mass = seen.astype(x.dtype)[:, None]  # an unobserved point is a row of zeros
    planes = xp.concatenate([mass, gradient + back, hessian.reshape(len(x), -1)], 1)
    return Tail(x.T, planes, low, high, _REACH * scale, 1 / scale**2)


def make_tail(samples: Samples) -> Tail | TabulatedTail:
    """The tail of a bank that is queried often: a table in one dimension."""
    tail = tangent_planes(samples)
    return tail if samples.dim > 1 else _table(host.on_host(tail), tail)


@host.here_or_compiled
def _table(tail: Tail) -> TabulatedTail:
    low, high, xp = tail.low, tail.high, host.module_of(tail.x)
    nodes = low[None] + (high - low)[None] * xp.linspace(0, 1, _TABLE, dtype=low.dtype)[:, None]
    value, stiffness = planes_at(tail, nodes) if xp is np else jax.vmap(tail.at)(nodes)
    return TabulatedTail(value[:, 0], xp.stack([stiffness[0], stiffness[-1]]), low, high)


def smoothed(samples: Samples, completion: Completion) -> Samples:
    """The samples with a model's gradients in place of observed ones: where these are moves, planes would be noise."""
    return _with_gradients_of(samples, completion.models.whole)


@eqx.filter_jit
def _with_gradients_of(samples: Samples, model: AbstractPotential) -> Samples:
    safe = jnp.where(samples.observed[..., None], samples.x, 0)
    return eqx.tree_at(lambda s: s.gradient, samples, jax.vmap(jax.vmap(model.gradient))(safe))


def guarded_estimate(
    alpha: Vector,
    sums: Callable[[Vector], Sums],
    tail: Callable[[Vector], Vector],
    *,
    low: Vector,
    high: Vector,
    episodes: int,
    points: Int[Array, ""],
    scale: Scalar,
) -> Estimate:
    """The ratio where the data carry it, the tail where they do not, and a continuous passage between.

    `low` and `high` are the box of the `points` observed points of all `episodes`, `scale` the size of gradients.
    """
    inside = jnp.all((alpha >= low) & (alpha <= high))
    # Outside the box the sums are taken at its nearest point: they are finite there, and not used.
    ratio = ratio_estimate(sums(jnp.clip(alpha, low, high)), episodes, points, inside, scale)
    z = ratio.density / jnp.maximum(ratio.density_stderr, jnp.finfo(alpha.dtype).tiny)
    confidence = jnp.where(inside, jnp.clip(2 * z / TRUSTED_FROM - 1, 0, 1), 0)
    planes = tail(alpha)
    value = jnp.where(confidence > 0, planes + confidence * (ratio.value - planes), planes)
    stderr = jnp.where(ratio.trusted, ratio.stderr, jnp.inf)
    return Estimate(value, stderr, jnp.where(inside, ratio.density, 0), ratio.density_stderr, ratio.trusted)
