"""One simulated episode, weighed as it runs: nothing is kept but what is seen at the stops."""

from typing import Any

import jax.numpy as jnp

from .._base.types import Key, Matrix, Vector
from ..learner.episodes import Fold, march
from ..learner.learner import ForwardLearner, Point
from ..potentials.products import matrix_of
from ..weights.scheme import Scheme
from .samples import EpisodeSamples


def weighed_episode(key: Key, learner: ForwardLearner, scheme: Scheme, stops: tuple[int, ...]) -> EpisodeSamples:
    """The episode of `key`, as seen at the step numbers `stops`."""

    def read(point: Point, state: Any) -> tuple[Vector, Vector, Matrix | None, Vector]:
        # Products are not kept: no estimator asks for them, and their parameters would be stored at every stop.
        return point.x, point.gradient, matrix_of(point.hessian), scheme.weight(state)

    fold = Fold(init=lambda point: scheme.init(point.x.shape[0], point.x.dtype), step=scheme.step, read=read)
    (x, gradient, hessian, weight), last_step = march(key, learner, stops, fold)
    observed = jnp.asarray(stops, last_step.dtype) <= last_step
    return EpisodeSamples(x, gradient, hessian, weight, observed).masked()
