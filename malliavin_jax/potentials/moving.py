"""Losses that move while the learner learns: functions of time, each a potential at every time."""

import abc
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from .._base.checks import check_finite, check_shape, float_array
from .._base.types import Matrix, Scalar, Vector
from .analytic import DoubleWell, Quadratic
from .base import AbstractPotential, check_parameter, parameter


class AbstractMoving(AbstractPotential):
    """A loss that depends on time, in units of updates; its value, gradient and Hessian are those at time 0.

    A subclass has the method `at(time)`, which returns the potential of that time, a number that may be traced.

    Example:
        ```python
        import jax.numpy as jnp
        import malliavin_jax as mj


        class Sliding(mj.potentials.AbstractMoving):
            def at(self, time):
                return mj.potentials.Quadratic(center=0.1 * jnp.asarray(time, float))


        Sliding().at(10).gradient(jnp.zeros(1))  # [-1.]
        ```
    """

    @abc.abstractmethod
    def at(self, time: Any) -> AbstractPotential:
        """The loss at that time."""

    def value(self, x: Vector) -> Scalar:
        return self.at(0).value(x)

    def gradient(self, x: Vector) -> Vector:
        return self.at(0).gradient(x)

    def hessian(self, x: Vector) -> Matrix:
        return self.at(0).hessian(x)


def _moment(time: Any, *parameters: Any) -> Scalar:
    """The time, in the dtype of the parameters that it is to meet."""
    return jnp.asarray(time).astype(jnp.result_type(*parameters))


class DriftingTilt(AbstractMoving):
    """A double well whose tilt drifts: `DoubleWell(tilt=tilt + rate·time)`.

    Args:
        tilt: at time 0.
        rate: its change in a unit of time.

    Raises:
        ValueError: if one of them is not one finite number.

    Example:
        ```python
        import jax.numpy as jnp
        import malliavin_jax as mj

        loss = mj.potentials.DriftingTilt(tilt=0.3, rate=0.01)
        loss.at(50).gradient(jnp.zeros(1))  # the tilt of 0.8
        ```
    """

    tilt: Float[Array, ""] | float = parameter("tilt", 0.0)
    rate: Float[Array, ""] | float = parameter("rate", 0.01)

    def __check_init__(self):
        check_parameter("tilt", self.tilt)
        check_parameter("rate", self.rate)

    def at(self, time: Any) -> DoubleWell:
        return DoubleWell(tilt=self.tilt + self.rate * _moment(time, self.tilt, self.rate))


class SwitchingWell(AbstractMoving):
    """A bowl ½p|x − c|² whose centre c jumps: it is `centers[states[time]]`, the last state lasting for ever.

    `SwitchingWell.sample` draws the states from a Markov chain, the slow hidden chain of Krishnamurthy & Yin (2021).

    Args:
        states: the number of the centre at each time, (times,).
        centers: (number, d).
        precision: p > 0.

    Raises:
        ValueError: if a state is no row of `centers`, a shape is wrong, or a number is not finite.

    Example:
        ```python
        import jax.numpy as jnp
        import malliavin_jax as mj

        loss = mj.potentials.SwitchingWell([0, 0, 1], [[-1.0], [1.0]])
        loss.at(2).gradient(jnp.zeros(1))  # [-1.]
        random = mj.potentials.SwitchingWell.sample(0, 100, [[-1.0], [1.0]], stay=0.98)
        ```
    """

    states: Int[Array, " times"]
    centers: Float[Array, "number d"]
    precision: Float[Array, ""] | float = parameter("precision", 1.0)

    def __init__(self, states: Any, centers: Any, precision: Any = 1.0):
        numbers, self.centers = np.asarray(states, np.int32), float_array("centers", centers)
        check_shape("states", numbers, (None,))
        check_shape("centers", self.centers, (None, None))
        check_finite("centers", self.centers)
        check_parameter("precision", precision, positive=True)
        if len(numbers) == 0 or numbers.min() < 0 or numbers.max() >= len(self.centers):
            raise ValueError(f"states must be numbers from 0 to {len(self.centers) - 1}, got {states}")
        self.states, self.precision = jnp.asarray(numbers), precision

    @staticmethod
    def sample(seed: int, times: int, centers: Any, *, stay: float, precision: Any = 1.0) -> "SwitchingWell":
        """States of a Markov chain from state 0, which stays with probability `stay` and else moves to any other."""
        if not 0 < stay < 1:
            raise ValueError(f"stay must be between 0 and 1, got {stay}")
        generator, number = np.random.default_rng(seed), len(centers)
        leaps = np.where(generator.random(times) < stay, 0, generator.integers(1, max(number, 2), times))
        leaps[0] = 0
        return SwitchingWell(np.cumsum(leaps) % number, centers, precision)

    def at(self, time: Any) -> Quadratic:
        index = jnp.clip(jnp.asarray(time).astype(jnp.int32), 0, len(self.states) - 1)
        return Quadratic(self.precision, self.centers[self.states[index]])


class TurningBowl(AbstractMoving):
    """An anisotropic bowl in the plane that turns: ½ (Rx)ᵀ diag(stiff, soft) (Rx), R the turn by rate·time radians.

    Args:
        stiff: the curvature along one axis.
        soft: along the other.
        rate: radians in a unit of time.

    Raises:
        ValueError: if one of them is not one finite number, or a curvature is not positive.

    Example:
        ```python
        import jax.numpy as jnp
        import malliavin_jax as mj

        bowl = mj.potentials.TurningBowl(stiff=4.0, soft=0.5, rate=0.1)
        bowl.at(5).hessian(jnp.zeros(2))
        ```
    """

    stiff: Float[Array, ""] | float = parameter("stiff", 4.0)
    soft: Float[Array, ""] | float = parameter("soft", 0.5)
    rate: Float[Array, ""] | float = parameter("rate", 0.01)

    def __check_init__(self):
        check_parameter("stiff", self.stiff, positive=True)
        check_parameter("soft", self.soft, positive=True)
        check_parameter("rate", self.rate)

    def at(self, time: Any) -> Quadratic:
        angle = self.rate * _moment(time, self.stiff, self.soft, self.rate)
        cos, sin = jnp.cos(angle), jnp.sin(angle)
        first, second = jnp.stack([cos, sin]), jnp.stack([-sin, cos])
        precision = self.stiff * jnp.outer(first, first) + self.soft * jnp.outer(second, second)
        return Quadratic((precision + precision.T) / 2)
