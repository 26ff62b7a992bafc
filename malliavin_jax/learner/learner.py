"""The learner that is watched, and what is seen of it: a point, a step, a whole episode."""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .._base.checks import check_nonnegative, check_positive, is_concrete
from .._base.types import Key, Matrix, Scalar, Vector
from ..potentials.base import AbstractMinibatchPotential, AbstractPotential
from ..potentials.matrix_free import MatrixFree


class ForwardLearner(eqx.Module):
    """A learner that we watch.

    - `potential`: the loss L it minimises; one with minibatches is sampled anew at every step.
    - `initial`: the law π_0 of an episode's start, as a function key ↦ X_0 of shape (d,). Its dtype is the
      dtype of the whole simulation.
    - `step_size`: ε > 0.
    - `inverse_temperature`: β > 0.
    - `gradient_noise`: standard deviation of independent Gaussian noise added to every gradient; the
      learner moves along the noisy gradient, and the noisy gradient is what is observed.
    - `restart_probability`: chance of a restart before each step. Episode lengths are then geometric and
      independent of the path, as integration by parts needs; 0 means that no episode stops early.

    ```python
    mj.ForwardLearner(
        mj.potentials.Quartic(),
        lambda key: jax.random.normal(key, (2,)),  # where episodes start
        step_size=0.01,
        gradient_noise=0.5,
        restart_probability=0.002,
    )
    ```
    """

    potential: AbstractPotential
    initial: Callable[[Key], Vector]
    step_size: float | Scalar
    inverse_temperature: float | Scalar = 1.0
    gradient_noise: float | Scalar = 0.0
    restart_probability: float | Scalar = 0.0

    def __check_init__(self):
        check_positive("step_size", self.step_size)
        check_positive("inverse_temperature", self.inverse_temperature)
        check_nonnegative("gradient_noise", self.gradient_noise)
        check_nonnegative("restart_probability", self.restart_probability)
        if is_concrete(self.restart_probability) and self.restart_probability >= 1:
            raise ValueError(f"restart_probability must be below 1, got {self.restart_probability}")


class Point(NamedTuple):
    """What is observed at one step.

    ```python
    point = mj.Point(jnp.zeros(1), loss.gradient(jnp.zeros(1)), loss.hessian(jnp.zeros(1)))
    ```
    """

    x: Vector
    gradient: Vector
    hessian: Matrix


class Transition(NamedTuple):
    """One step of the learner, as observed: `before` at k, `after` at k + 1.

    ```python
    rows = [mj.Point(*(leaf[0, k] for leaf in (paths.x, paths.gradient, paths.hessian))) for k in (0, 1)]
    step = mj.Transition(*rows, paths.step_size[0], paths.inverse_temperature[0])
    state = mj.Canonical().step(mj.Canonical().init(1, jnp.float32), step)
    ```
    """

    before: Point
    after: Point
    step_size: Scalar
    inverse_temperature: Scalar


class Path(eqx.Module):
    """One observed episode; rows past `last_step`, after the episode stopped, hold NaN.

    ```python
    path.x.shape, path.num_steps  # (81, 1), 80
    ```
    """

    x: Float[Array, "points d"]
    gradient: Float[Array, "points d"]
    hessian: Float[Array, "points d d"]
    step_size: Scalar
    inverse_temperature: Scalar
    last_step: Int[Array, ""]

    @property
    def num_steps(self) -> int:
        return self.x.shape[0] - 1


def initial_shape(learner: ForwardLearner) -> tuple[int, Any]:
    """Dimension and dtype of the learner's state, from its initial law; a clear error if it has none."""
    spec = jax.eval_shape(learner.initial, jax.random.key(0))
    if not hasattr(spec, "shape") or len(spec.shape) != 1 or spec.shape[0] == 0:
        raise ValueError(f"initial must return an array of shape (d,), got {getattr(spec, 'shape', spec)}")
    if not jnp.issubdtype(spec.dtype, jnp.floating):
        raise ValueError(f"initial must return floating-point numbers, got dtype {spec.dtype}")
    for name, expected in (("gradient", spec.shape), ("hessian", spec.shape * 2)):
        try:
            got = jax.eval_shape(getattr(learner.potential, name), spec).shape
        except (TypeError, ValueError, IndexError) as error:
            raise ValueError(
                f"initial returns a state of shape {spec.shape}, which potential.{name} does not take: {error}"
            ) from error
        if got != expected:
            raise ValueError(
                f"potential.{name} must return shape {expected} at the states of shape {spec.shape} "
                f"that initial returns, got {got}"
            )
    return spec.shape[0], spec.dtype


def check_matrix(learner: ForwardLearner) -> None:
    if isinstance(learner.potential, MatrixFree):
        raise ValueError("potential must offer its Hessian, not products with it, to store it: see observe_weights")


def point_at(learner: ForwardLearner, x: Vector, noise: Vector | None, batch_key: Key | None) -> Point:
    """What the learner sees at x: the potential's derivatives, or a minibatch's, plus its gradient noise."""
    potential = learner.potential
    if batch_key is not None:
        assert isinstance(potential, AbstractMinibatchPotential)
        potential = potential.minibatch(batch_key)
    gradient = potential.gradient(x)
    if noise is not None:
        gradient = gradient + jnp.asarray(learner.gradient_noise, x.dtype) * noise
    return Point(x, gradient, potential.hessian(x))
