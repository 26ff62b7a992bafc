"""Local least squares in chunks: the sums behind the kernel fields and their cross-validation."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from .._base.checks import check_count
from .._base.small_tensors import HIGHEST
from .._base.types import Flag, Scalar, Vector
from ..estimate.ratio import Estimate
from ..fitting.monomials import factors_up_to, monomials_of_points
from ..samples.samples import Samples
from ..samples.summary import box

# φ uses u clipped to this many bandwidths: beyond 38.6 of them K is 0 even in float64, so no trusted estimate
# feels it, and the powers of u cannot overflow far from the data.
_REACH = 50.0


class Points(eqx.Module):
    """The samples cut into chunks of whole episodes, point index last (the axis that is summed over)."""

    x: Float[Array, "chunks d points"]
    gradient: Float[Array, "chunks d points"]
    penalty: Float[Array, "chunks points"]  # added to −log K: 0 where observed, else inf
    observed: Scalar  # how many points are
    low: Vector  # the box of the observed points
    high: Vector
    num_times: int = eqx.field(static=True)


class Chunk(NamedTuple):
    """One of the chunks of `Points`."""

    x: Float[Array, "d points"]
    gradient: Float[Array, "d points"]
    penalty: Float[Array, " points"]
    number: Int[Array, ""]


def check_degree(degree: Any, allowed: tuple[int, ...]) -> int:
    """The degree of a local polynomial, refused if it is not among those allowed."""
    if isinstance(degree, bool) or degree not in allowed:
        raise ValueError(f"degree must be one of {', '.join(map(str, allowed))}, got {degree!r}")
    return int(degree)


@partial(jax.jit, static_argnames=("degree", "chunk_size"))
def cut_points(samples: Samples, degree: int, chunk_size: int | None) -> Points:
    """The observed points in chunks of about `chunk_size` points; None chooses, for a fit of the given degree."""
    episodes, times, d = samples.x.shape
    if chunk_size is None:
        # φ and K φ are held for every α of a vmap: with many monomials, few points at a time stay in cache.
        chunk_size = max(128, 8192 // len(factors_up_to(d, degree)) ** 2)
    in_chunk = min(max(1, check_count("chunk_size", chunk_size) // times), episodes)
    chunks = -(-episodes // in_chunk)
    missing = (0, chunks * in_chunk - episodes)
    dtype = samples.x.dtype
    where = samples.observed[:, :, None]
    observed = jnp.pad(samples.observed, (missing, (0, 0)))
    low, high = box(samples)

    def cut(values: Float[Array, "episodes times d"]) -> Float[Array, "chunks d points"]:
        padded = jnp.pad(jnp.where(where, values.astype(dtype), 0.0), (missing, (0, 0), (0, 0)))
        return jnp.swapaxes(padded.reshape(chunks, in_chunk * times, d), 1, 2)

    return Points(
        x=cut(samples.x),
        gradient=cut(samples.gradient),
        penalty=jnp.where(observed, 0.0, jnp.inf).astype(dtype).reshape(chunks, in_chunk * times),
        observed=jnp.sum(observed).astype(dtype),
        low=low,
        high=high,
        num_times=times,
    )


def _sum_over_times(values: Float[Array, "*lead points"], num_times: int) -> Float[Array, "*lead episodes"]:
    """One number an episode: the sum over its points."""
    return jnp.sum(values.reshape(*values.shape[:-1], -1, num_times), -1)


def _over_chunks(step: Callable[[Any, Chunk], Any], init: Any, points: Points) -> Any:
    """`step(state, chunk)` chunk after chunk, from the state `init`."""
    chunks = Chunk(points.x, points.gradient, points.penalty, jnp.arange(points.x.shape[0]))
    return lax.scan(lambda state, chunk: (step(state, chunk), None), init, chunks)[0]


def _scaled(x: Array, penalty: Array, alpha: Vector, length: Vector) -> tuple[Array, Array]:
    """u = (x − α)/length and ½|u|² + penalty, which is finite at every observed point for every finite α."""
    bound = math.sqrt(jnp.finfo(x.dtype).max) / (1e3 * x.shape[0])
    u = jnp.clip((x - alpha[:, None]) / length[:, None], -bound, bound)
    return u, 0.5 * jnp.sum(u * u, 0) + penalty


def _product(a: Float[Array, "m points"], b: Float[Array, "n points"]) -> Float[Array, "m n"]:
    """a bᵀ, in all bits on accelerators too."""
    return jnp.matmul(a, b.T, precision=HIGHEST)


class Fit(NamedTuple):
    """The solution of the local least squares at one α."""

    weights: Float[Array, " terms"]  # c = A⁻¹e₀, for the shifted kernel
    coefficients: Float[Array, "terms d"]  # β; its first row is the value
    solid: Flag  # whether the polynomial could be fitted; if not, c and β are those of degree 0


def _solve(matrix: Float[Array, "terms terms"], target: Float[Array, "terms d"], squares: Scalar, shift: Scalar) -> Fit:
    """A β = Σ K φ gᵀ and A c = e₀, or the local constant where the data cannot carry the polynomial.

    `squares` is Σ_e (Σ_{t∈e} K)²; all the sums are over the shifted kernel K e^shift ≤ 1.
    """
    terms, dtype = matrix.shape[0], matrix.dtype
    mass = matrix[0, 0]
    eye = jnp.eye(terms, dtype=dtype)
    first = eye[:, :1]
    constant = jnp.concatenate([first / mass, first * (target[:1] / mass)], 1)
    # Effective episodes: (Σ_e K_e)² / Σ_e K_e², which is their number when all weigh the same.
    solid = mass * mass >= max(10, terms + 1) * squares
    solution = constant
    if terms > 1:
        # Unit diagonal, and a ridge of the size of its rounding error. Where the factor fails even so, the
        # identity takes its place beforehand, so that no NaN reaches a user's derivative.
        scale = jnp.sqrt(jnp.diagonal(matrix) + jnp.finfo(dtype).tiny)
        unit = matrix / (scale[:, None] * scale[None, :]) + terms * jnp.finfo(dtype).eps * eye
        solid = solid & jnp.all(jnp.isfinite(jnp.linalg.cholesky(lax.stop_gradient(unit))))
        factor = jnp.linalg.cholesky(jnp.where(solid, unit, eye))
        right = jnp.concatenate([first, target], 1) / scale[:, None]
        solution = jax.scipy.linalg.cho_solve((factor, True), right) / scale[:, None]
    # With the kernel as it is, K ≤ 1 and so Σ w² ≤ e₀ᵀA⁻¹e₀: the value is no noisier than one gradient.
    solid = solid & (solution[0, 0] > 0) & (solution[0, 0] <= jnp.exp(-shift))
    solution = jnp.where(solid, solution, constant)
    return Fit(solution[:, 0], solution[:, 1:], solid)


class _Moments(NamedTuple):
    """Sums over the points, of the kernel shifted so that its largest value is 1."""

    products: Float[Array, "..."]  # Σ K φ [φ, g]ᵀ
    squares: Float[Array, "..."]  # Σ_e (Σ_{t∈e} K)²


class _Squares(NamedTuple):
    """Sums over the episodes of squares of what each adds to the value and to the density."""

    value: Vector
    density: Scalar


def local_estimate(points: Points, bandwidth: Vector, degree: int, alpha: Vector) -> Estimate:
    """The local polynomial fit at α with its standard errors: three passes over the points."""
    d, dtype = alpha.shape[0], alpha.dtype
    n = len(factors_up_to(d, degree))

    # Far from the data every K underflows, but the ratios of sums do not see a common factor: take out the
    # largest K. The value does not depend on the shift, so neither does its derivative.
    def least(shift: Scalar, chunk: Chunk) -> Scalar:
        return jnp.minimum(shift, jnp.min(_scaled(chunk.x, chunk.penalty, alpha, bandwidth)[1]))

    shift = lax.stop_gradient(_over_chunks(least, jnp.asarray(jnp.inf, dtype), points))

    def kernel(chunk: Chunk) -> tuple[Array, Array]:
        u, exponent = _scaled(chunk.x, chunk.penalty, alpha, bandwidth)
        return jnp.exp(shift - exponent), monomials_of_points(jnp.clip(u, -_REACH, _REACH), degree)

    def moments(sums: _Moments, chunk: Chunk) -> _Moments:
        k, phi = kernel(chunk)
        squares = jnp.sum(_sum_over_times(k, points.num_times) ** 2)
        products = _product(k[None, :] * phi, jnp.concatenate([phi, chunk.gradient]))
        return _Moments(sums.products + products, sums.squares + squares)

    zero = _Moments(jnp.zeros((n, n + d), dtype), jnp.zeros((), dtype))
    sums = _over_chunks(moments, zero, points)
    fit = _solve(sums.products[:, :n], sums.products[:, n:], sums.squares, shift)
    mean = sums.products[0, 0] / points.observed
    linear = jnp.concatenate([fit.weights[:, None], fit.coefficients], 1)

    def residuals(sums: _Squares, chunk: Chunk) -> _Squares:
        k, phi = kernel(chunk)
        # linear.T @ phi, as a sum that the compiler fuses with φ: three times faster than a product of matrices.
        fitted = linear[0][:, None] * phi[0][None, :]
        for i in range(1, n):
            fitted = fitted + linear[i][:, None] * phi[i][None, :]
        influence = _sum_over_times((k * fitted[0])[None, :] * (chunk.gradient - fitted[1:]), points.num_times)
        excess = _sum_over_times(jnp.where(chunk.penalty == 0, k - mean, 0.0), points.num_times)
        return _Squares(sums.value + jnp.sum(influence**2, -1), sums.density + jnp.sum(excess**2))

    squares = _over_chunks(residuals, _Squares(jnp.zeros((d,), dtype), jnp.zeros((), dtype)), points)
    height = jnp.exp(-shift) / ((2 * math.pi) ** (d / 2) * jnp.prod(bandwidth))
    inside = jnp.all((alpha >= points.low) & (alpha <= points.high))
    trusted = fit.solid & inside & jnp.all(jnp.isfinite(linear))
    return Estimate(
        value=fit.coefficients[0],
        stderr=jnp.where(trusted, jnp.sqrt(squares.value), jnp.inf),
        density=height * mean,
        density_stderr=height * jnp.sqrt(squares.density) / points.observed,
        trusted=trusted,
    )


def values_without(
    points: Points,
    bandwidths: Float[Array, " m"],
    degree: int,
    scale: Scalar,
    alpha: Vector,
    episode: Int[Array, ""],
) -> Float[Array, "m d"]:
    """The values at α for many bandwidths at once, with one episode left out.

    The monomials are those of v = (x − α)/scale for every bandwidth, which changes nothing but the units of
    β, and the sums of all bandwidths are then one product, K (m, points) @ (points, moments).
    """
    d, dtype = alpha.shape[0], alpha.dtype
    size, terms, products = points.x.shape[2], factors_up_to(d, degree), factors_up_to(d, 2 * degree)
    n = len(terms)
    # A_ab = Σ K φ_a φ_b depends on the product of the two monomials only: few entries are distinct.
    table = np.array([[products.index(tuple(sorted(a + b))) for b in terms] for a in terms])
    length = jnp.broadcast_to(scale, (d,))

    def scaled(chunk: Chunk) -> tuple[Array, Array]:
        number = (chunk.number * size + jnp.arange(size)) // points.num_times
        return _scaled(chunk.x, jnp.where(number == episode, jnp.inf, chunk.penalty), alpha, length)

    def least(nearest: Scalar, chunk: Chunk) -> Scalar:
        return jnp.minimum(nearest, jnp.min(scaled(chunk)[1]))

    nearest = _over_chunks(least, jnp.asarray(jnp.inf, dtype), points)
    ratio = (scale / bandwidths) ** 2

    def moments(sums: _Moments, chunk: Chunk) -> _Moments:
        v, exponent = scaled(chunk)
        k = jnp.exp(ratio[:, None] * (nearest - exponent)[None, :])
        phi = monomials_of_points(v, 2 * degree)
        responses = (phi[:n, None, :] * chunk.gradient[None, :, :]).reshape(n * d, size)
        squares = jnp.sum(_sum_over_times(k, points.num_times) ** 2, -1)
        return _Moments(sums.products + _product(k, jnp.concatenate([phi, responses])), sums.squares + squares)

    m, columns = bandwidths.shape[0], len(products) + n * d
    sums = _over_chunks(moments, _Moments(jnp.zeros((m, columns), dtype), jnp.zeros((m,), dtype)), points)
    target = sums.products[:, len(products) :].reshape(m, n, d)
    fits = jax.vmap(_solve)(sums.products[:, table], target, sums.squares, ratio * nearest)
    return fits.coefficients[:, 0]
