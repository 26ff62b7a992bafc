"""Gradient fields α ↦ ∇L(α): PyTree callables `field(alpha, *, key=None) -> Estimate`."""

from .fresh import FreshField as FreshField, TrueField as TrueField
from .malliavin import MalliavinField as MalliavinField
from .selection import short_localizer as short_localizer
from .tables import TabulatedField as TabulatedField
