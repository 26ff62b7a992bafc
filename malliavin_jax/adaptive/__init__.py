"""Fields that keep learning while the loss may drift, and chains on them that never restart."""

from .field import AdaptiveField as AdaptiveField
from .tracking import Tracking as Tracking, track as track
