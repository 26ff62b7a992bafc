"""The learner that is watched, and what is seen of it: a point, a step, a whole episode."""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from .._base.checks import check_nonnegative, check_positive, described, is_concrete
from .._base.types import Key, Scalar, Vector
from ..potentials.base import AbstractMinibatchPotential, AbstractPotential, check_potential
from ..potentials.products import Curvature, MatrixFree, matrix_of


class ForwardLearner(eqx.Module):
    """A learner that we watch: stochastic gradient Langevin dynamics with restarts.

        X_{k+1} = X_k − ε g_k + sqrt(2ε/β) ξ_{k+1},   ξ ~ N(0, I),   X_0 ~ π_0 at each episode start

    with ε the step size, β the inverse temperature and g_k the gradient the learner used at X_k.

    Args:
        potential: the loss L it minimises; one with minibatches is sampled anew at every step.
        initial: the law π_0 of an episode's start, as a function key ↦ X_0 of shape (d,), such as `initial.Normal()`.
            Its dtype is the dtype of the whole simulation.
        step_size: ε > 0.
        inverse_temperature: β > 0.
        gradient_noise: standard deviation of independent Gaussian noise added to every gradient; the learner moves
            along the noisy gradient, and the noisy gradient is what is observed.
        restart_probability: chance of a restart before each step. The number of steps of an episode is then geometric
            and independent of the path, as integration by parts needs; 0 means that no episode stops early.

    Raises:
        ValueError: if a number is out of its range.

    Example:
        ```python
        import malliavin_jax as mj

        learner = mj.ForwardLearner(
            mj.potentials.Quartic(),
            mj.initial.Normal(dim=2),  # where episodes start
            step_size=0.01,
            gradient_noise=0.5,
            restart_probability=0.002,
        )
        ```
    """

    potential: AbstractPotential | MatrixFree
    initial: Callable[[Key], Vector]
    step_size: float | Scalar
    inverse_temperature: float | Scalar = 1.0
    gradient_noise: float | Scalar = 0.0
    restart_probability: float | Scalar = 0.0

    def __check_init__(self):
        check_potential("potential", self.potential)
        _check_initial(self.initial)
        check_positive("step_size", self.step_size)
        check_positive("inverse_temperature", self.inverse_temperature)
        check_nonnegative("gradient_noise", self.gradient_noise)
        check_nonnegative("restart_probability", self.restart_probability)
        if is_concrete(self.restart_probability) and self.restart_probability >= 1:
            raise ValueError(f"restart_probability must be below 1, got {self.restart_probability}")


def _check_initial(initial: Any) -> None:
    """Refuse a point, or a class, in place of a law."""
    if callable(initial) and not isinstance(initial, type):
        return
    numbers = isinstance(initial, int | float | list | tuple | np.ndarray | jax.Array)
    remedy = (
        "initial.Points([x]) starts there, initial.Normal(x, scale) around it" if numbers else "give initial.Normal()"
    )
    raise ValueError(f"initial must be a law, a function key ↦ X_0 of shape (d,), got {described(initial)}: {remedy}")


class Point(NamedTuple):
    """What is observed at one step.

    Attributes:
        x: position X_k, of shape (d,).
        gradient: the gradient g_k that the learner used there, of shape (d,).
        hessian: the Hessian H_k observed there, of shape (d, d); for a `potentials.MatrixFree` loss an object that
            only knows the products H_k @ v.

    Example:
        ```python
        import jax.numpy as jnp
        import malliavin_jax as mj

        loss, x = mj.potentials.Quartic(), jnp.ones(1)
        point = mj.learner.Point(x, loss.gradient(x), loss.hessian(x))
        ```
    """

    x: Vector
    gradient: Vector
    hessian: Curvature


class Transition(NamedTuple):
    """One step of the learner, as observed: all that a weight scheme sees at a time.

    Attributes:
        before: the point at step k.
        after: the point at step k + 1.
        step_size: ε, the size of this step.
        inverse_temperature: β.
        time: the time elapsed at step k, where step sizes vary; None where all steps are alike.
        first_step_size: the size of the first step of the episode, likewise.

    Example:
        ```python
        import jax.numpy as jnp
        import malliavin_jax as mj

        loss, scheme = mj.potentials.Quartic(), mj.Canonical()
        points = [mj.learner.Point(x, loss.gradient(x), loss.hessian(x)) for x in (jnp.ones(1), 1.1 * jnp.ones(1))]
        step = mj.learner.Transition(*points, step_size=jnp.array(0.01), inverse_temperature=jnp.array(1.0))
        state = scheme.step(scheme.init(1, jnp.float32), step)
        scheme.weight(state)  # S(u) after one step
        ```
    """

    before: Point
    after: Point
    step_size: Scalar
    inverse_temperature: Scalar
    time: Scalar | None = None
    first_step_size: Scalar | None = None


class Path(eqx.Module):
    """One observed episode; row k is what was seen after k steps, row 0 the start.

    Attributes:
        x: positions, of shape (points, d).
        gradient: the gradients that the learner used, of shape (points, d).
        hessian: the Hessians observed, of shape (points, d, d).
        step_size: ε, one number; or a schedule, of shape (points,): entry k is the size of the step from row k.
        inverse_temperature: β.
        last_step: the number of steps after which the episode stopped; later rows hold NaN.

    Example:
        ```python
        import jax
        import malliavin_jax as mj

        learner = mj.ForwardLearner(mj.potentials.Quartic(), mj.initial.Normal(), step_size=0.01, gradient_noise=0.5)
        path = jax.jit(lambda key: mj.simulate(key, learner, 80))(jax.random.key(0))
        path.x.shape, path.num_steps  # (81, 1), 80
        ```
    """

    x: Float[Array, "points d"]
    gradient: Float[Array, "points d"]
    hessian: Float[Array, "points d d"]
    step_size: Scalar | Float[Array, " points"]
    inverse_temperature: Scalar
    last_step: Int[Array, ""]

    @property
    def num_steps(self) -> int:
        """The number of rows after the start, those past `last_step` included."""
        return self.x.shape[0] - 1


def initial_shape(learner: ForwardLearner) -> tuple[int, Any]:
    """Dimension and dtype of the learner's state, from its initial law; a clear error if it has none."""
    if not isinstance(learner, ForwardLearner):
        remedy = "ForwardLearner(potential, initial, step_size=…) is one"
        raise ValueError(f"learner must be a ForwardLearner, got {described(learner)}: {remedy}")
    spec = jax.eval_shape(learner.initial, jax.random.key(0))
    if not hasattr(spec, "shape") or len(spec.shape) != 1 or spec.shape[0] == 0:
        raise ValueError(f"initial must return an array of shape (d,), got {getattr(spec, 'shape', spec)}")
    if not jnp.issubdtype(spec.dtype, jnp.floating):
        raise ValueError(f"initial must return floating-point numbers, got dtype {spec.dtype}")
    potential = learner.potential
    for name, function, expected in (
        ("gradient", potential.gradient, spec.shape), ("hessian", potential.curvature, spec.shape * 2)
    ):  # fmt: skip
        try:
            got = jax.eval_shape(function, spec).shape
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


def offers_matrix(learner: ForwardLearner) -> bool:
    """Whether the learner shows whole Hessians, and not only their products with vectors."""
    spec = jax.eval_shape(learner.initial, jax.random.key(0))
    return jax.eval_shape(lambda x: matrix_of(learner.potential.curvature(x)), spec) is not None


def check_matrix(learner: ForwardLearner) -> None:
    """Refuse a learner without Hessians where they are to be stored."""
    if not offers_matrix(learner):
        raise ValueError(
            "potential must offer its Hessian, not only products with it, for a path that stores it: "
            "use observe, which needs no more than products, or a Potential with a hessian"
        )


def point_at(learner: ForwardLearner, x: Vector, noise: Vector | None, batch_key: Key | None) -> Point:
    """What the learner sees at x: the potential's derivatives, or a minibatch's, plus its gradient noise."""
    potential = learner.potential
    if batch_key is not None:
        assert isinstance(potential, AbstractMinibatchPotential)
        potential = potential.minibatch(batch_key)
    gradient = potential.gradient(x)
    if noise is not None:
        gradient = gradient + jnp.asarray(learner.gradient_noise, x.dtype) * noise
    return Point(x, gradient, potential.curvature(x))
