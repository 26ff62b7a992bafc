"""The learner's noise: Threefry-2x32 in plain integer operations, two normals from each hash.

Simulating paths costs little more than drawing their normals, so the generator is worth its own room.
It is the counter-based Threefry-2x32 of Salmon, Moraes, Dror & Shaw (2011), the one behind `jax.random`
(the tests compare the bits), written so that XLA fuses the hash with the step that uses it and so that
both output words are used. Every number is a pure function of (episode key, stream, index): it does not
depend on batching, on the number of devices, or on the order in which episodes run.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, UInt32

from ._types import Key, Scalar, Vector

# The high word of the counter says what the numbers are for: (ξ, gradient noise, minibatch) of the first point and of
# the later ones, and the length of the episode.
FIRST, LATER, LENGTH = (0, 1, 2), (3, 4, 5), 6

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


def key_words(key: Key) -> Words:
    """The two words of a Threefry key; two words drawn from it for a key of any other generator."""
    data = jax.random.key_data(key)
    if data.shape != (2,):
        data = jax.random.bits(key, (2,), jnp.uint32)
    return data[0], data[1]


def batch_key(words: Words, stream: int, index: Array) -> Key:
    """A key of its own for each step, for learners that draw minibatches."""
    pair = threefry(words, (_uint32(stream), _uint32(index)))
    return jax.random.wrap_key_data(jnp.stack(pair), impl="threefry2x32")


def uniform(words: Words, stream: int, dtype: Any) -> Scalar:
    """One number uniform on [0, 1)."""
    bits, _ = threefry(words, (_uint32(stream), _uint32(0)))
    return (bits >> _uint32(8)).astype(dtype) * 2.0**-24


def steps_per_block(dim: int) -> int:
    """Steps that share a hash: its two words serve two consecutive steps in one dimension.

    Beyond, XLA would have to fuse two steps of the learner into one expression, which costs more than the second word.
    """
    return 2 if dim == 1 else 1


def normals(words: Words, stream: int, block: Array, phase: int, dim: int, dtype: Any) -> Vector:
    """Standard normals (d,) for step number `steps_per_block(dim)·block + phase`, by the inverse CDF of a hash's words.

    In float64 both words make one normal, so that it has the 52 random bits its mantissa can hold.
    """
    # XLA vectorises a power of two of coordinates; the surplus is cut off.
    lanes = 1 << (dim - 1).bit_length()
    index = _uint32(block) * _uint32(lanes) + jnp.arange(lanes, dtype=jnp.uint32)
    return _normal(words, stream, index, phase, dim, dtype)[:dim]


def _normal(words: Words, stream: int, index: Array, phase: int, dim: int, dtype: Any) -> Array:
    if jnp.dtype(dtype) == jnp.float64:
        index = index * _uint32(steps_per_block(dim)) + _uint32(phase)
        return _normal64(*threefry(words, (_uint32(stream), index)))
    return _normal32(threefry(words, (_uint32(stream), index))[phase]).astype(dtype)


def _normal32(bits: Array) -> Array:
    mantissa = (bits >> _uint32(9)) | _uint32(0x3F800000)
    return _normal_from_unit(lax.bitcast_convert_type(mantissa, jnp.float32), np.float32)


def _normal64(high: Array, low: Array) -> Array:
    bits = (high.astype(jnp.uint64) << jnp.asarray(32, jnp.uint64)) | low.astype(jnp.uint64)
    mantissa = (bits >> jnp.asarray(12, jnp.uint64)) | jnp.asarray(0x3FF0000000000000, jnp.uint64)
    return _normal_from_unit(lax.bitcast_convert_type(mantissa, jnp.float64), np.float64)


def _normal_from_unit(one_to_two: Array, scalar: Any) -> Array:
    """√2 erf⁻¹(u) for u uniform on (−1, 1), made from a float uniform on [1, 2)."""
    low = np.nextafter(scalar(-1), scalar(0))
    u = jnp.maximum(low, (one_to_two - scalar(1)) * (scalar(1) - low) + low)
    return scalar(np.sqrt(2)) * lax.erf_inv(u)
