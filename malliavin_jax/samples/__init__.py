"""Observed points with their weights: the hub between simulation and estimation."""

from .recorded import samples_from_paths as samples_from_paths
from .samples import Samples as Samples
from .simulated import observe as observe
