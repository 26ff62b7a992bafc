"""The weight scheme taken where none is given: `Adapted`, exact whatever the loss, at rates fitted to pilot episodes.

The rates come from the Hessians that pilot episodes meet over the second half of their steps. They decide the variance
of the weights and nothing else, and it is flat around its least, so a small pilot will do.

- Simulated learners: up to 256 episodes of their own, from noise that is always the same and that no key gives. The
  rates are a function of the learner and of the last conditioning time alone, independent of the episodes weighed. For
  a loss that offers only products of its Hessian with vectors there is one rate a coordinate.
- Recorded paths: the first 256 of them. That the rates have seen these leaves a dependence of order 1/episodes.
"""

import contextlib
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, UInt32

from .._base.checks import is_concrete, is_static_zero
from .._base.small_tensors import matmul
from .._base.types import Key, Matrix, Vector
from ..learner.learner import ForwardLearner, Path, Point, initial_shape, point_at
from ..potentials.base import AbstractMinibatchPotential
from ..potentials.products import matrix_of
from ..weights.adapted import Adapted, adapted_to
from ..weights.scheme import Scheme, check_scheme

_PILOT_EPISODES = 256
_PILOT_NORMALS = 2**22  # at most, however long the episodes and large the dimension
_PILOT_SEED = 577215664


def choose_scheme(learner: ForwardLearner, scheme: Scheme | None, num_steps: int) -> Scheme:
    """The scheme given; for None, the one for episodes of `learner`, conditioned at step `num_steps` at the latest."""
    if scheme is not None:
        check_scheme(scheme)
        return scheme
    dim, dtype = initial_shape(learner)
    noisy = not is_static_zero(learner.gradient_noise)
    # From NumPy, because compiling a generator for so few normals would take longer than all the rest.
    kinds = 2 if noisy else 1
    episodes = int(np.clip(_PILOT_NORMALS // (num_steps * kinds * dim), 2, _PILOT_EPISODES))
    generator = np.random.default_rng(_PILOT_SEED)
    words = generator.integers(2**32, size=(episodes, 2), dtype=np.uint32)
    draws = generator.standard_normal((num_steps, kinds, episodes, dim), np.float32).astype(dtype)
    # Where nothing of the learner is traced the pilot runs now, and not once more in what is being compiled.
    with jax.ensure_compile_time_eval() if is_concrete(learner) else contextlib.nullcontext():
        return _pilot(learner, words, draws)


def default_scheme(paths: Path) -> Scheme:
    """The scheme for recorded `paths`, which hold whole Hessians."""
    hessian, last_step = paths.hessian[:_PILOT_EPISODES], paths.last_step[:_PILOT_EPISODES, None]
    rows = jnp.arange(hessian.shape[1], dtype=last_step.dtype)[None, :]
    counts = (rows >= last_step // 2) & (rows <= last_step)
    return _fitted(hessian.reshape(-1, *hessian.shape[2:]), counts.reshape(-1))


_fitted = eqx.filter_jit(Adapted.fit)


@eqx.filter_jit
def _pilot(learner: ForwardLearner, words: Any, draws: Any) -> Adapted:
    """The scheme that suits the episodes of `learner` on these keys and normals."""
    moment = lax.stop_gradient(_second_moment(learner, jnp.asarray(words), jnp.asarray(draws)))
    return adapted_to(moment) if moment.ndim == 2 else Adapted(jnp.sqrt(moment))


def _second_moment(
    learner: ForwardLearner, words: UInt32[Array, "episodes 2"], draws: Float[Array, "steps kinds episodes d"]
) -> Array:
    """E[H²] over the second half of pilot episodes; its diagonal, (d,), where only products with H are known."""
    num_steps, kinds, episodes, _ = draws.shape
    keys = jax.random.wrap_key_data(words, impl="threefry2x32")
    x = jax.vmap(learner.initial)(keys)
    step_size = jnp.asarray(learner.step_size, x.dtype)
    sigma = jnp.sqrt(2 * step_size / jnp.asarray(learner.inverse_temperature, x.dtype))

    def one(x: Vector, normals: Float[Array, "kinds d"], batch_key: Key | None) -> tuple[Vector, Array]:
        point = point_at(learner, x, normals[1] if kinds == 2 else None, batch_key)
        return x - step_size * point.gradient + sigma * normals[0], _square(point, normals[0])

    def body(carry: tuple[Array, Any], now: tuple[Array, Array]) -> tuple[tuple[Array, Any], None]:
        x, (total, number) = carry
        normals, k = now
        batch_keys = jax.vmap(jax.random.fold_in, (0, None))(keys, k) if _batches(learner) else None
        x, squares = jax.vmap(one, (0, 1, 0))(x, normals, batch_keys)
        counts = jnp.isfinite(squares).reshape(episodes, -1).all(1) & (k >= num_steps // 2)
        total += jnp.where(counts.reshape(-1, *(1,) * (squares.ndim - 1)), squares, 0).sum(0)
        return (x, (total, number + counts.sum(dtype=jnp.int32))), None

    square = jax.eval_shape(one, x[0], draws[0, :, 0], keys[0] if _batches(learner) else None)[1]
    start = (x, (jnp.zeros(square.shape, square.dtype), jnp.zeros((), jnp.int32)))
    (_, (total, number)), _ = lax.scan(body, start, (draws, jnp.arange(num_steps)))
    return total / jnp.maximum(number, 1).astype(total.dtype)


def _batches(learner: ForwardLearner) -> bool:
    return isinstance(learner.potential, AbstractMinibatchPotential)


def _square(point: Point, normals: Vector) -> Matrix | Vector:
    """H²; where only products are known (Hξ)², whose mean over normals ξ is the diagonal of H²."""
    hessian = matrix_of(point.hessian)
    if hessian is None:
        return (point.hessian @ normals) ** 2
    return matmul(hessian, hessian)
