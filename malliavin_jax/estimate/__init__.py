"""Conditional expectations on events of probability zero: localizers, sums and their ratio."""

from .conditional import conditional_expectation as conditional_expectation, density as density, score as score
from .localizers import (
    AbstractLocalizer as AbstractLocalizer,
    AbstractRadial as AbstractRadial,
    Centered as Centered,
    Gaussian as Gaussian,
    Heaviside as Heaviside,
    Laplace as Laplace,
)
from .ratio import Estimate as Estimate
