"""Malliavin weights S(u): pure functions of one observed path."""

from .adapted import Adapted as Adapted
from .canonical import Canonical as Canonical
from .scheme import Scheme as Scheme, weigh as weigh
from .tuning import Window as Window, best_rate as best_rate, minimum_variance_window as minimum_variance_window
from .windowed import FixedWindow as FixedWindow, Reciprocal as Reciprocal, Windowed as Windowed
