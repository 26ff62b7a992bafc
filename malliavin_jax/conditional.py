"""Conditional expectations on events of probability zero, with standard errors.

For every localizer (K, G), with w = K(X−α) + G(X−α)·S,

    E[ℓ | X_s = α] = E[w ℓ − ∇ℓ·G] / E[w],        p_s(α) = E[w].

Numerators and denominators are sums over episodes and times; the standard error is that of a ratio (delta method),
with the points of one episode, which are dependent, added up before they are squared.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from . import _mesh
from ._misc import check_positive, check_shape
from ._types import Flag, Scalar, Vector
from .localize import AbstractRadial, Localizer
from .observe import Samples, check_samples

CHUNK = 4096  # points weighed at once: queries × CHUNK numbers sit in memory, never queries × samples
SIGNIFICANT = 3.0  # a density this many standard errors above zero carries an estimate


class Estimate(eqx.Module):
    """An estimate at one point α, with its error bars.

    - `value`: the conditional expectation E[ℓ | X_s = α], one entry per component of ℓ.
    - `stderr`: its standard error, in the units of `value`.
    - `density`: the estimated density p̂_s(α), in 1/(units of x)^d, averaged over the conditioning times.
    - `density_stderr`: its standard error.
    - `trusted`: False where the data cannot carry the estimate (α outside the observed region, or a density
      not significantly positive).

    ```python
    low, high = (estimates.value + z * estimates.stderr for z in (-1.96, 1.96))  # at nine α at once
    ```
    """

    value: Float[Array, " m"]
    stderr: Float[Array, " m"]
    density: Scalar
    density_stderr: Scalar
    trusted: Flag


class Bank(eqx.Module):
    """Points with the values ℓ to average and their Jacobians ∇ℓ; unobserved points have been set to 0.

    Episodes stand in chunks, the last filled up with unobserved ones, and coordinates come first: one coordinate of the
    points of a chunk is contiguous, which is what a processor wants.
    """

    x: Float[Array, "chunks d times size"]
    weight: Float[Array, "chunks d times size"]
    values: Float[Array, "chunks m times size"]
    jacobians: Float[Array, "chunks m d times size"]
    observed: Bool[Array, "chunks times size"]
    episodes: int = eqx.field(static=True)


class Sums(NamedTuple):
    """Sums over episodes of n = Σ_times (w ℓ − ∇ℓ·G), of w = Σ_times w, and of their products."""

    n: Float[Array, " m"]
    w: Scalar
    nn: Float[Array, " m"]
    nw: Float[Array, " m"]
    ww: Scalar

    def shifted(self, by: Float[Array, " m"]) -> "Sums":
        """The sums for ℓ + by: n becomes n + by·w."""
        nn = self.nn + 2 * by * self.nw + by**2 * self.ww
        return Sums(self.n + by * self.w, self.w, nn, self.nw + by * self.ww, self.ww)


def make_bank(samples: Samples, values: Array, jacobians: Array) -> Bank:
    """A bank with zeros in place of what was not observed (a zero times a mask is zero; a NaN is not)."""
    arrays = samples.x, samples.weight, values, jacobians, samples.observed
    episodes, devices = samples.num_episodes, _mesh.parts()
    if devices == 1:
        return Bank(*_tiled(*arrays), episodes=episodes)
    # Each device makes chunks of its own episodes; unobserved ones fill up the last device.
    full = [jnp.pad(array, [(0, -episodes % devices)] + [(0, 0)] * (array.ndim - 1)) for array in arrays]
    return Bank(*_mesh.by_device(_tiled, *full), episodes=episodes)


def _tiled(x: Array, weight: Array, values: Array, jacobians: Array, observed: Array) -> tuple[Array, ...]:
    episodes, times, _ = x.shape
    chunks = -(-episodes // max(1, CHUNK // times))
    size = -(-episodes // chunks)

    def tiles(array: Array) -> Array:
        filled = jnp.pad(array, [(0, chunks * size - episodes)] + [(0, 0)] * (array.ndim - 1))
        split = filled.reshape(chunks, size, *array.shape[1:])
        return jnp.moveaxis(split, (1, 2), (-1, -2))

    def clean(array: Array) -> Array:
        seen = observed.reshape(*observed.shape, *(1,) * (array.ndim - 2))
        return tiles(jnp.where(seen, array, 0))

    return clean(x), clean(weight), clean(values), clean(jacobians), tiles(observed)


def episode_terms(part: Bank, alpha: Vector, localizer: Localizer) -> tuple[list[Array], Array]:
    """n, a list of m arrays (size,), and w (size,): the terms of each episode of one chunk, summed over its times."""

    # Coordinates stay apart, each an array over the points of the chunk: XLA then computes a sum in one vectorised
    # loop. (Its CPU backend, jaxlib 0.10.2, was also seen to return wrong numbers for a fused reduction over a short
    # axis under vmap; tests/test_conditional.py compares vmap with a loop.)
    axes = range(alpha.shape[0])
    y = [part.x[j] - alpha[j] for j in axes]
    if isinstance(localizer, AbstractRadial):
        K, B = localizer.radial(_sum([y[j] * y[j] for j in axes]), len(y))
        G = [y[j] * B for j in axes]
    else:
        K, G = jax.vmap(jax.vmap(lambda *y: localizer(jnp.stack(y)), out_axes=(0, 1)), out_axes=(0, 1))(*y)
    # An unobserved point has weight, values and Jacobian 0: only its kernel wants a mask.
    w = part.observed.astype(part.x.dtype) * K + _sum([G[j] * part.weight[j] for j in axes])
    n = [
        w * value - _sum([jacobian[j] * G[j] for j in axes])
        for value, jacobian in zip(part.values, part.jacobians, strict=True)
    ]
    return [_sum(list(row)) for row in n], _sum(list(w))


def _sum(terms: list[Array]) -> Array:
    """Written out: the terms are few, and each is an array."""
    return functools.reduce(jnp.add, terms)


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
    devices = _mesh.parts()
    if devices > 1 and bank.x.shape[0] % devices == 0:
        return _mesh.total_over_devices(lambda bank: sum_over_chunks(function, bank), bank)

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


def ratio_estimate(sums: Sums, episodes: Array | int, points: Array | int, inside: Flag) -> Estimate:
    """The ratio with its standard errors, `points` being the number of observed points in all `episodes`."""
    tiny, points = jnp.finfo(sums.w.dtype).tiny, jnp.asarray(points, sums.w.dtype)
    empty = jnp.abs(sums.w) <= tiny  # nothing to divide by; a NaN is not empty, and stays one
    safe = jnp.where(empty, 1, sums.w)
    value = jnp.where(empty, 0, sums.n / safe)
    variance = jnp.maximum(sums.shifted(-value).nn, 0)  # Σ (n − ρ w)²
    stderr = jnp.where(empty, jnp.inf, jnp.sqrt(variance) / jnp.abs(safe))
    density = sums.w / points
    spread = jnp.maximum(sums.ww - sums.w**2 / episodes, 0)
    density_stderr = jnp.sqrt(spread) / points
    trusted = inside & (density > SIGNIFICANT * density_stderr)
    return Estimate(value, stderr, density, density_stderr, trusted)


def bounds(samples: Samples) -> tuple[Vector, Vector]:
    """The smallest box that holds every observed position."""
    seen = samples.observed[..., None]
    low = jnp.min(jnp.where(seen, samples.x, jnp.inf), (0, 1))
    return low, jnp.max(jnp.where(seen, samples.x, -jnp.inf), (0, 1))


def conditional_expectation(
    samples: Samples,
    values: Float[Array, "episodes times m"],
    jacobians: Float[Array, "episodes times m d"],
    alpha: Vector,
    localizer: Localizer,
) -> Estimate:
    """E[ℓ(X_s) | X_s = α] for any ℓ with m components, given its `values` ℓ(X_s) and `jacobians` ∇ℓ(X_s).

    ℓ = g, the learner's gradient, with the Hessian for Jacobian, is the counterfactual gradient. `stderr` is that of
    the ratio, clustered by episode. The estimate is unbiased for every length of the localizer (up to the core of
    `Gaussian`).

    ```python
    # E[X² | X = ½] is ¼: here from ℓ = X² with Jacobian 2X
    half = jnp.array([0.5])
    mj.conditional_expectation(samples, samples.x**2, 2 * samples.x[..., None], half, mj.Laplace(0.5))
    ```
    """
    check_samples(samples)
    shape = samples.x.shape
    check_shape("alpha", alpha, (samples.dim,))
    check_shape("values", values, (*shape[:2], None))
    check_shape("jacobians", jacobians, (*values.shape, samples.dim))
    seen = samples.observed[..., None]
    # Squares of centred values do not cancel in float32.
    centre = jnp.sum(jnp.where(seen, values, 0), (0, 1)) / jnp.maximum(jnp.sum(seen), 1).astype(values.dtype)
    bank = make_bank(samples, values - centre[None, None, :], jacobians)
    low, high = bounds(samples)
    inside = jnp.all((alpha >= low) & (alpha <= high))
    sums = localized_sums(bank, alpha, localizer)
    estimate = ratio_estimate(sums, samples.num_episodes, jnp.sum(samples.observed), inside)
    return eqx.tree_at(lambda e: e.value, estimate, estimate.value + centre)


def density(samples: Samples, alpha: Vector, localizer: Localizer) -> tuple[Scalar, Scalar]:
    """The density p̂_s(α) of the observed positions, averaged over the times, and its standard error.

    ```python
    p, stderr = mj.density(samples, jnp.array([0.5]), mj.Laplace(0.5))
    ```
    """
    nothing = jnp.zeros((*samples.x.shape[:2], 1), samples.x.dtype)
    estimate = conditional_expectation(
        samples, nothing, jnp.zeros((*nothing.shape, samples.dim), nothing.dtype), alpha, localizer
    )
    return estimate.density, estimate.density_stderr


def score(samples: Samples, alpha: Vector, length: float | Scalar) -> tuple[Vector, Vector]:
    """The score ∇ log p_s(α) = −E[S | X_s = α], and its standard error, by a Gaussian kernel of the given length.

    The weights' own derivative is not observed, so this average keeps the kernel's bias, of order length². The standard
    error is infinite where the kernel's mass is not significant (α far from the samples).

    ```python
    slope, stderr = mj.score(samples, jnp.array([0.5]), length=0.2)
    ```
    """
    check_positive("length", length)
    check_samples(samples)
    check_shape("alpha", alpha, (samples.dim,))
    bank = make_bank(samples, -samples.weight, jnp.zeros((*samples.x.shape, samples.dim), samples.x.dtype))

    def kernel_only(y: Vector) -> tuple[Scalar, Vector]:
        h = jnp.asarray(length, y.dtype)
        return jnp.exp(-jnp.sum(y * y) / (2 * h * h)), jnp.zeros_like(y)

    sums = localized_sums(bank, alpha, kernel_only)
    estimate = ratio_estimate(sums, samples.num_episodes, jnp.sum(samples.observed), jnp.asarray(True))
    return estimate.value, jnp.where(estimate.trusted, estimate.stderr, jnp.inf)
