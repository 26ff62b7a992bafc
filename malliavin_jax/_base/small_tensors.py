"""Small tensors, unrolled: in three dimensions or fewer a matrix is a NumPy array *of traced scalars*.

Under `vmap` a matrix of shape (d, d) becomes an array (episodes, d, d) whose products XLA cannot vectorise well:
the axis that is long comes first and the axes that are summed are two or three long. As an object array of
d·d scalars, each becomes its own contiguous (episodes,) array and a step of a recursion fuses into one loop.
`+`, `.T`, slicing and `.sum` mean the same for object arrays and for JAX arrays, and so does `matmul`; the recursions
are written once, and beyond three dimensions they run on ordinary arrays.
"""

import functools
import operator
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
    side = round(len(leaves) ** (1 / rank))
    return _as_objects(leaves).reshape((side,) * rank)


def _as_objects(leaves: tuple[Any, ...]) -> np.ndarray:
    out = np.empty(len(leaves), dtype=object)
    for index, leaf in enumerate(leaves):  # NumPy would try to read a whole tuple of traced scalars as numbers
        out[index] = leaf
    return out


def pack_lower(tensor: Tensor) -> Leaves:
    """`pack` of the lower triangles of the last two axes: what is zero, or stands there twice, is not carried."""
    return tuple(tensor[(..., *np.tril_indices(len(tensor)))].ravel()) if isinstance(tensor, np.ndarray) else tensor


def unpack_lower(leaves: Leaves, dim: int, *, mirror: bool = False) -> Tensor:
    """The tensor that `pack_lower` made leaves of; above the diagonal are zeros, or, with `mirror`, what is below."""
    if not isinstance(leaves, tuple):
        return leaves
    rows, columns = np.tril_indices(dim)
    triangles = _as_objects(leaves).reshape(-1, len(rows))
    out = np.zeros((len(triangles), dim, dim), dtype=int).astype(object)
    if mirror:
        out[:, columns, rows] = triangles
    out[:, rows, columns] = triangles
    return out[0] if len(out) == 1 else out


def zeros(dim: int, rank: int, dtype: Any) -> Leaves:
    """Leaves of a zero tensor with all its entries."""
    if dim > UNROLL_UP_TO:
        return jnp.zeros((dim,) * rank, dtype)
    return tuple(jnp.zeros((), dtype) for _ in range(dim**rank))


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """The product a b, in all bits of its numbers: unmarked, a TPU or a GPU would round them to eight or eleven."""
    arrays = [tensor for tensor in (a, b) if isinstance(tensor, np.ndarray)]
    if any(array.dtype == object for array in arrays):
        return _dot(a, b)
    if len(arrays) == 2:
        return a @ b
    return jnp.matmul(a, b, precision=HIGHEST)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b` of object arrays, without the products and sums of which it is known now that they change nothing."""
    if b.ndim > 2:
        return np.stack([_dot(a, matrix) for matrix in b])
    out = np.empty((*a.shape[:-1], *b.shape[1:]), dtype=object)
    for index in np.ndindex(out.shape):
        row, column = a[index[: a.ndim - 1]], b[(slice(None), *index[a.ndim - 1 :])]
        terms = [x if _is(1, y) else y if _is(1, x) else x * y for x, y in zip(row, column, strict=True) if _both(x, y)]
        out[index] = functools.reduce(operator.add, terms) if terms else 0
    return out if out.ndim else out[()]


def _is(number: int, entry: Any) -> bool:
    """Whether an entry is this number already now, as in an identity or beside a diagonal."""
    return isinstance(entry, int) and entry == number


def _both(x: Any, y: Any) -> bool:
    return not (_is(0, x) or _is(0, y))


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
        out[index] = 0 if _is(0, tensor[index]) else tensor[index] * factor
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


def factor_with_identity(B: Tensor) -> tuple[Tensor, Tensor]:
    """R and V = R⁻¹ with R lower triangular and R Rᵀ = B Bᵀ + I.

    The rows of [B I] are made orthonormal one after another, each cleared of the earlier ones twice, after which
    rounding has left nothing to clear; they are then those of [VB V].
    """
    side = len(B)
    identity = eye(B)
    rows, coefficients = [], []
    for i in range(side):
        row = _join(B[i], identity[i])
        found: list[Any] = [0] * side
        for _ in range(2):
            for j, earlier in enumerate(rows):
                along = matmul(row, earlier)
                found[j] = found[j] + along
                row = row - scale(earlier, along)
        found[i] = jnp.sqrt(matmul(row, row))
        rows.append(scale(row, 1 / found[i]))
        coefficients.append(found)
    return _matrix(coefficients, B), _stack(rows)[:, side:]


def _join(a: Tensor, b: Tensor) -> Tensor:
    return np.concatenate([a, b]) if isinstance(a, np.ndarray) else jnp.concatenate([a, b])


def _stack(rows: list[Tensor]) -> Tensor:
    return np.stack(rows) if isinstance(rows[0], np.ndarray) else jnp.stack(rows)


def _matrix(entries: list[list[Any]], like: Tensor) -> Tensor:
    """A matrix of scalars, of the kind of `like`."""
    if not isinstance(like, np.ndarray):
        dtype = entries[0][0].dtype
        return jnp.stack([jnp.stack([jnp.asarray(entry, dtype) for entry in row]) for row in entries])
    out = np.empty((len(entries), len(entries)), dtype=object)
    for i, j in np.ndindex(out.shape):
        out[i, j] = entries[i][j]
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
