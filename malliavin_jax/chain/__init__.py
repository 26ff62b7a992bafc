"""The outer chain: Langevin dynamics driven by a gradient field, many chains at once, on device."""

from .passive import Chain as Chain, passive_langevin as passive_langevin
from .rule import langevin as langevin
