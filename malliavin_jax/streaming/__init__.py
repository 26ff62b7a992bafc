"""Streams: estimates on a grid of α from more episodes than fit in memory."""

from .accumulator import Accumulator as Accumulator
from .streams import accumulate as accumulate, observe_and_accumulate as observe_and_accumulate
