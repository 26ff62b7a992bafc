"""Gradient fields α ↦ ∇L(α): PyTree callables `field(alpha, *, key=None) -> Estimate`."""

from .correction import Correction as Correction
from .fresh import FreshField as FreshField, TrueField as TrueField
from .judge import GoodnessOfFit as GoodnessOfFit, goodness_of_fit as goodness_of_fit
from .malliavin import MalliavinField as MalliavinField
from .tables import TabulatedField as TabulatedField
