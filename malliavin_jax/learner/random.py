"""The learner's noise: Threefry-2x32 in plain integer operations, two normals from each hash.

Simulating paths costs little more than drawing their normals, so the generator is worth its own room.
It is the counter-based Threefry-2x32 of Salmon, Moraes, Dror & Shaw (2011), the one behind `jax.random`
(the tests compare the bits), written so that XLA fuses the hash with what uses it. The two words of a hash make two
normals by the polar formula of Box & Muller (1958), sqrt(−2 log u) (cos πv, sin πv): half the work of two inverse
CDFs. Every number is a pure function of (episode key, stream, index): it does not depend on batching, on the number of
devices, or on the order in which episodes run.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, UInt32

from .._base.small_tensors import UNROLL_UP_TO, Leaves
from .._base.types import Key, Scalar, Vector

# The high word of the counter says what the numbers are for: (ξ, gradient noise, minibatch) of the first point and of
# the later ones, the last step of the episode, and the key of its initial law.
FIRST, LATER, LAST_STEP, INITIAL = (0, 1, 2), (3, 4, 5), 6, 7

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA

Words = tuple[UInt32[Array, "*#shape"], UInt32[Array, "*#shape"]]


def _uint32(value: Any) -> Array:
    return jnp.asarray(value, jnp.uint32)


def threefry(key: Words, counter: Words) -> Words:
    """Threefry-2x32 with 20 rounds: two words from a two-word key and a two-word counter."""
    k0, k1 = key
    schedule = (k0, k1, k0 ^ k1 ^ _uint32(_PARITY))
    x0, x1 = counter[0] + k0, counter[1] + k1
    for group in range(5):
        for r in _ROTATIONS[group % 2]:
            x0 = x0 + x1
            x1 = ((x1 << _uint32(r)) | (x1 >> _uint32(32 - r))) ^ x0
        x0 = x0 + schedule[(group + 1) % 3]
        x1 = x1 + schedule[(group + 2) % 3] + _uint32(group + 1)
    return x0, x1


def episode_keys(key: Key, first: Array | int, count: int) -> Array:
    """The keys of `count` episodes from number `first` on.

    Key i is a function of `key` and i alone, so that episodes may be made in chunks, on any device or process. It is
    `jax.random.split(key, n)[i]` for every n, as long as JAX's Threefry is the partitionable one (its default).
    """
    index = jnp.asarray(first, jnp.uint32) + jnp.arange(count, dtype=jnp.uint32)
    return jax.vmap(jax.random.fold_in, (None, 0))(key, index)


def key_words(key: Key) -> Words:
    """The two words of a Threefry key; two words drawn from it for a key of any other generator."""
    data = jax.random.key_data(key)
    if data.shape != (2,):
        data = jax.random.bits(key, (2,), jnp.uint32)
    return data[0], data[1]


def derived_key(words: Words, stream: int, index: Array) -> Key:
    """A key for what is drawn by others: the initial law, and the minibatch of each step."""
    pair = threefry(words, (_uint32(stream), _uint32(index)))
    return jax.random.wrap_key_data(jnp.stack(pair), impl="threefry2x32")


def uniform(words: Words, stream: int, dtype: Any) -> Scalar:
    """One number uniform on [0, 1)."""
    bits, _ = threefry(words, (_uint32(stream), _uint32(0)))
    return (bits >> _uint32(8)).astype(dtype) * 2.0**-24


def steps_per_block(dim: int) -> int:
    """Steps that are drawn, and computed, together: in one dimension four, on the four words of two hashes.

    A step of one dimension is so little work that passing over the episodes once for four of them pays.
    """
    return 4 if dim == 1 else 1


def draw_block(words: Words, stream: int, block: Array, dim: int, dtype: Any) -> Leaves:
    """The standard normals of the steps of a block, packed for the carry of a scan; `normals` unpacks them.

    The two normals of a hash travel as one complex number: XLA's CPU backend computes one array at a time, and would
    hash once for each of two real ones. In float64 the two words make one normal, by the inverse CDF, so that it has
    the 52 random bits its mantissa can hold.
    """
    double = jnp.dtype(dtype) == jnp.float64
    number = steps_per_block(dim) * dim
    hashes = number if double else -(-number // 2)

    def packed(index: Array) -> Array:
        pair = threefry(words, (_uint32(stream), _uint32(block) * _uint32(hashes) + index))
        return _inverse_cdf(*pair) if double else lax.complex(*box_muller(*pair))

    if dim <= UNROLL_UP_TO:
        return tuple(packed(_uint32(j)) for j in range(hashes))
    # XLA vectorises a power of two of lanes; the surplus is cut off.
    return packed(jnp.arange(1 << (hashes - 1).bit_length(), dtype=jnp.uint32))


def normals(packed: Leaves, phase: int, dim: int, dtype: Any) -> Vector:
    """The normals (d,) of step number `phase` in a block that `draw_block` made."""
    if isinstance(packed, tuple):
        parts = [part for leaf in packed for part in _parts(leaf)]
        return jnp.stack(parts[phase * dim : (phase + 1) * dim]).astype(dtype)
    return jnp.concatenate(_parts(packed))[:dim].astype(dtype)


def _parts(packed: Array) -> tuple[Array, ...]:
    return (lax.real(packed), lax.imag(packed)) if jnp.iscomplexobj(packed) else (packed,)


# sin(πv)/(v(1 − v²)) and cos(πv)/(1 − 4v²) as polynomials in v² on [0, 1], by interpolation at Chebyshev points: off by
# at most 1e-8, below float32 rounding, and with no range to reduce.
_SINE = (3.1415927410, -2.0261194706, 0.5240361094, -0.0751871690, 0.0068600797, -0.0003858948)
_COSINE = (1.0, -0.9348013997, 0.3194939196, -0.0572090372, 0.0062538218, -0.0004039618)


def box_muller(first: UInt32[Array, "*shape"], second: UInt32[Array, "*shape"]) -> tuple[Array, Array]:
    """Two independent standard normals in float32, at most 6.6 in size, from two uniform words."""
    scale = np.float32(2.0**-31)
    u = (_signed(first >> _uint32(1)) + np.float32(0.5)) * scale  # in (0, 1]
    radius = jnp.sqrt(np.float32(-2) * jnp.log(u))
    v = _signed(second) * scale  # in [−1, 1]
    square = v * v
    sine = v * (1 - square) * _polynomial(_SINE, square)
    cosine = (1 - 4 * square) * _polynomial(_COSINE, square)
    return radius * cosine, radius * sine


def _signed(bits: Array) -> Array:
    """As a signed whole number, in float32: processors convert these faster than unsigned ones."""
    return lax.bitcast_convert_type(bits, jnp.int32).astype(jnp.float32)


def _polynomial(coefficients: tuple[float, ...], x: Array) -> Array:
    total = jnp.full_like(x, coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        total = total * x + np.float32(coefficient)
    return total


def _inverse_cdf(high: Array, low: Array) -> Array:
    """√2 erf⁻¹(u) in float64 for u uniform on (−1, 1), made of the 52 upper bits."""
    bits = (high.astype(jnp.uint64) << jnp.asarray(32, jnp.uint64)) | low.astype(jnp.uint64)
    mantissa = (bits >> jnp.asarray(12, jnp.uint64)) | jnp.asarray(0x3FF0000000000000, jnp.uint64)
    least = np.nextafter(-1.0, 0.0)
    u = (lax.bitcast_convert_type(mantissa, jnp.float64) - 1) * (1 - least) + least
    return np.sqrt(2) * lax.erf_inv(jnp.maximum(least, u))
