"""Losses with closed-form derivatives: what a learner descends, and what we try to recover from it."""

from ..fitting.monomials import num_terms as num_terms
from .analytic import DoubleWell as DoubleWell, MullerBrown as MullerBrown, Quadratic as Quadratic, Quartic as Quartic
from .base import (
    AbstractMinibatchPotential as AbstractMinibatchPotential,
    AbstractPotential as AbstractPotential,
    Potential as Potential,
)
from .moving import (
    AbstractMoving as AbstractMoving,
    DriftingTilt as DriftingTilt,
    SwitchingWell as SwitchingWell,
    TurningBowl as TurningBowl,
)
from .polynomial import Polynomial as Polynomial
from .products import MatrixFree as MatrixFree
from .spline import Spline as Spline
from .statistical import GaussianMixture as GaussianMixture, LogisticRegression as LogisticRegression
