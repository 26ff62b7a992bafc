"""Trajectories of a learner go in, its loss comes out, with error bars."""

from . import potentials as potentials
from ._pilot import (
    Window as Window,
    best_rate as best_rate,
    minimum_variance_window as minimum_variance_window,
)
from .conditional import Estimate as Estimate
from .fields import TrueField as TrueField
from .forward import (
    ForwardLearner as ForwardLearner,
    Path as Path,
    Point as Point,
    Transition as Transition,
    simulate as simulate,
)
from .observe import Samples as Samples, observe as observe, samples_from_paths as samples_from_paths
from .potentials import Potential as Potential
from .weights import (
    Canonical as Canonical,
    FixedWindow as FixedWindow,
    Reciprocal as Reciprocal,
    Windowed as Windowed,
    weigh as weigh,
)

__version__ = "0.1.0"
