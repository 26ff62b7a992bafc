"""Trajectories of a learner go in, its loss comes out, with error bars."""

from .conditional import Estimate as Estimate
from .fields import TrueField as TrueField
from .observe import Samples as Samples

__version__ = "0.1.0"
