"""What the scan over an episode carries: point, state of the weights and noise, in the layout that runs fastest.

XLA's CPU backend makes one loop for each array that a scan carries, and computes in it all that the array depends on.
Fewer arrays, less work. So a point and a state of up to three dimensions are carried as scalars (under `vmap`, each a
contiguous array over episodes), and in one dimension, where a step is so little work that its memory traffic counts,
two real scalars travel as one complex number. The layout is settled once, on the first carry.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from .._base.small_tensors import UNROLL_UP_TO, Leaves


class Noise(NamedTuple):
    """The normals of one block of steps: what moves the state, and what is added to the gradient at the new one."""

    xi: Leaves
    gradient: Leaves


class Carry(NamedTuple):
    """The point the episode has reached, the state of what is folded along it, and the noise of the block to come."""

    point: Any
    state: Any
    noise: Noise


class Packed(NamedTuple):
    """The same in the layout that a scan carries; the gradient and Hessian may have been left out."""

    arrays: list[Array]
    noise: Noise


class Layout:
    """The way from a PyTree of arrays to the few arrays that a scan carries, and back.

    `dim` is that of the episode: up to three, small arrays are taken apart into scalars; in one, pairs of real scalars
    become complex numbers.
    """

    def __init__(self, tree: Any, dim: int):
        leaves, self._structure = jax.tree.flatten(tree)
        self._shapes = [leaf.shape if dim <= UNROLL_UP_TO else None for leaf in leaves]
        parts = self._apart(leaves)
        is_real = [part.ndim == 0 and jnp.issubdtype(part.dtype, jnp.floating) for part in parts]
        reals = [number for number, real in enumerate(is_real) if real and dim == 1]
        half = len(reals) // 2
        self._couples = list(zip(reals[:half], reals[half : 2 * half], strict=True))
        paired = set(reals[: 2 * half])
        self._alone = [number for number in range(len(parts)) if number not in paired]

    def pack(self, tree: Any) -> list[Array]:
        parts = self._apart(jax.tree.leaves(tree))
        pairs = [lax.complex(parts[i], parts[j]) for i, j in self._couples]
        return pairs + [parts[i] for i in self._alone]

    def unpack(self, packed: list[Array]) -> Any:
        parts: dict[int, Array] = dict(zip(self._alone, packed[len(self._couples) :], strict=True))
        for (i, j), both in zip(self._couples, packed, strict=False):
            parts[i], parts[j] = lax.real(both), lax.imag(both)
        entries = (parts[number] for number in range(len(parts)))
        leaves = []
        for shape in self._shapes:
            if shape is None or shape == ():
                leaves.append(next(entries))
            else:
                leaves.append(jnp.stack([next(entries) for _ in range(int(np.prod(shape)))]).reshape(shape))
        return jax.tree.unflatten(self._structure, leaves)

    def _apart(self, leaves: list[Array]) -> list[Array]:
        parts: list[Array] = []
        for leaf, shape in zip(leaves, self._shapes, strict=True):
            parts += [leaf] if shape is None or shape == () else [leaf[index] for index in np.ndindex(shape)]
        return parts
