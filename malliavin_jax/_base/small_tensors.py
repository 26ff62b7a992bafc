"""Small tensors, unrolled: in three dimensions or fewer a matrix is a NumPy array *of traced scalars*.

Under `vmap` a matrix of shape (d, d) becomes an array (episodes, d, d) whose products XLA cannot vectorise well:
the axis that is long comes first and the axes that are summed are two or three long. As an object array of
d·d scalars, each becomes its own contiguous (episodes,) array and a step of a recursion fuses into one loop.
`+`, `.T`, slicing and `.sum` mean the same for object arrays and for JAX arrays, and so does `matmul`; the recursions
are written once, and beyond three dimensions they run on ordinary arrays.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy.linalg import cho_solve
from jaxtyping import Array

UNROLL_UP_TO = 3
HIGHEST = lax.Precision.HIGHEST

Tensor = Any  # a JAX array, or a NumPy object array of JAX scalars
Leaves = Any  # what a scan carries for it: the array, or the tuple of scalars


def unroll(array: Array) -> Tensor:
    """A JAX array as a tensor to compute with."""
    if array.shape[0] > UNROLL_UP_TO:
        return array
    out = np.empty(array.shape, dtype=object)
    for index in np.ndindex(array.shape):
        out[index] = array[index]
    return out


def roll(tensor: Tensor) -> Array:
    """The way back, to an ordinary JAX array."""
    if not isinstance(tensor, np.ndarray):
        return tensor
    return jnp.stack([jnp.asarray(entry) for entry in tensor.ravel()]).reshape(tensor.shape)


def pack(tensor: Tensor) -> Leaves:
    """A tensor as the leaves that a scan carries."""
    return tuple(tensor.ravel()) if isinstance(tensor, np.ndarray) else tensor


def unpack(leaves: Leaves, rank: int) -> Tensor:
    """The tensor of equal sides and given rank that `pack` made leaves of."""
    if not isinstance(leaves, tuple):
        return leaves
    out = np.empty(len(leaves), dtype=object)
    for index, leaf in enumerate(leaves):
        out[index] = leaf
    side = round(len(leaves) ** (1 / rank))
    return out.reshape((side,) * rank)


def zeros(dim: int, rank: int, dtype: Any) -> Leaves:
    """Leaves of a zero tensor."""
    if dim > UNROLL_UP_TO:
        return jnp.zeros((dim,) * rank, dtype)
    return tuple(jnp.zeros((), dtype) for _ in range(dim**rank))


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """The product a b, in all bits of its numbers: unmarked, a TPU or a GPU would round them to eight or eleven."""
    arrays = [tensor for tensor in (a, b) if isinstance(tensor, np.ndarray)]
    if len(arrays) == 2 or any(array.dtype == object for array in arrays):
        return a @ b
    return jnp.matmul(a, b, precision=HIGHEST)


def einsum(formula: str, *arrays: Any) -> Any:
    """Einstein's sum in all bits of its numbers, with NumPy for arrays that are all its own."""
    if all(isinstance(array, np.ndarray) for array in arrays):
        return np.einsum(formula, *arrays, optimize=len(arrays) > 2)
    return jnp.einsum(formula, *arrays, precision=HIGHEST)


def scale(tensor: Tensor, factor: Any) -> Tensor:
    """`factor · tensor` (an object array times a traced scalar would be refused by NumPy)."""
    if not isinstance(tensor, np.ndarray):
        return tensor * factor
    out = np.empty(tensor.shape, dtype=object)
    for index in np.ndindex(tensor.shape):
        out[index] = tensor[index] * factor
    return out


def eye(like: Tensor) -> Tensor:
    """The identity matrix, of the kind of `like`."""
    if isinstance(like, np.ndarray):
        return np.eye(len(like), dtype=int).astype(object)
    return jnp.eye(like.shape[0], dtype=like.dtype)


def inverse(matrix: Tensor) -> Tensor:
    """Inverse of a matrix; by cofactors where it is unrolled."""
    if not isinstance(matrix, np.ndarray):
        return jnp.linalg.inv(matrix)
    return scale(_adjugate(matrix), 1 / _determinant(matrix))


def factor_with_identity(B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """R, W and V with R lower triangular, R Rᵀ = B Bᵀ + I, W = R⁻¹B and V = R⁻¹.

    [W V] are the rows of [B I] made orthonormal one after another; each is cleared of the earlier ones twice, after
    which rounding has left nothing to clear.
    """
    side = len(B)
    identity = eye(B)
    rows, coefficients = [], []
    for i in range(side):
        row = _join(B[i], identity[i])
        found: list[Any] = [0] * side
        for _ in range(2):
            for j, earlier in enumerate(rows):
                along = (row * earlier).sum()
                found[j] = found[j] + along
                row = row - scale(earlier, along)
        found[i] = jnp.sqrt((row * row).sum())
        rows.append(scale(row, 1 / found[i]))
        coefficients.append(found)
    stacked = _stack(rows)
    return _matrix(coefficients, B), stacked[:, :side], stacked[:, side:]


def inverse_of_lower(R: Tensor) -> Tensor:
    """The inverse of a lower triangular matrix, by forward substitution."""
    side = len(R)
    rows: list[Any] = []
    identity = eye(R)
    for i in range(side):
        rest = identity[i]
        for j, earlier in enumerate(rows):
            rest = rest - scale(earlier, R[i, j])
        rows.append(scale(rest, 1 / R[i, i]))
    return _stack(rows)


def _join(a: Tensor, b: Tensor) -> Tensor:
    return np.concatenate([a, b]) if isinstance(a, np.ndarray) else jnp.concatenate([a, b])


def _stack(rows: list[Tensor]) -> Tensor:
    return np.stack(rows) if isinstance(rows[0], np.ndarray) else jnp.stack(rows)


def _matrix(entries: list[list[Any]], like: Tensor) -> Tensor:
    """A matrix of scalars, of the kind of `like`."""
    dtype = entries[0][0].dtype
    typed = [[jnp.asarray(entry, dtype) for entry in row] for row in entries]
    if not isinstance(like, np.ndarray):
        return jnp.stack([jnp.stack(row) for row in typed])
    out = np.empty((len(typed), len(typed)), dtype=object)
    for i, j in np.ndindex(out.shape):
        out[i, j] = typed[i][j]
    return out


def solve_positive(matrix: Tensor, vector: Tensor) -> Tensor:
    """`matrix⁻¹ vector`, NaN where the symmetric matrix is not positive definite."""
    if not isinstance(matrix, np.ndarray):
        factor = jnp.linalg.cholesky(matrix)  # NaN by itself where it does not exist
        return cho_solve((factor, True), vector)
    dim = len(matrix)
    minors = [_determinant(matrix[:k, :k]) for k in range(1, dim + 1)]
    positive = minors[0] > 0
    for minor in minors[1:]:
        positive = positive & (minor > 0)
    return scale(matmul(_adjugate(matrix), vector), jnp.where(positive, 1 / minors[-1], jnp.nan))


def _determinant(m: Tensor) -> Any:
    if len(m) == 1:
        return m[0, 0]
    if len(m) == 2:
        return m[0, 0] * m[1, 1] - m[0, 1] * m[1, 0]
    return sum(m[0, j] * _cofactor(m, 0, j) for j in range(len(m)))


def _cofactor(m: Tensor, i: int, j: int) -> Any:
    if len(m) == 1:
        return 1
    rest = np.delete(np.delete(m, i, 0), j, 1)
    return _determinant(rest) * (-1) ** (i + j)


def _adjugate(m: Tensor) -> Tensor:
    out = np.empty(m.shape, dtype=object)
    for i, j in np.ndindex(m.shape):
        out[i, j] = _cofactor(m, j, i)
    return out
