"""The learner that is watched: stochastic gradient Langevin dynamics with restarts."""

from . import initial as initial
from .episodes import simulate as simulate
from .learner import ForwardLearner as ForwardLearner, Path as Path, Point as Point, Transition as Transition
