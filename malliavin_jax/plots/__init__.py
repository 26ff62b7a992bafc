"""One function per picture; each draws on an Axes (a new one if none is given) and returns it.

Colours are those of Okabe & Ito, told apart by colour-blind readers and in grey print; maps are "cividis" for a loss
and "PuOr" for what has a sign. Several curves are handed in as a mapping from their names, which become the legend.
Where an estimate is not trusted its curve is dotted and has no band, and its arrow is left out.
"""

from .curves import (
    chain_trace as chain_trace,
    gradient_bands as gradient_bands,
    histogram_against_gibbs as histogram_against_gibbs,
    loss_recovery as loss_recovery,
    observed_paths as observed_paths,
)
from .errors import (
    bias_and_error as bias_and_error,
    convergence as convergence,
    error_comparison as error_comparison,
    gradient_errors as gradient_errors,
    weight_tails as weight_tails,
)
from .plane import curl_map as curl_map, field_arrows as field_arrows, loss_surface as loss_surface
from .verdict import disagreement as disagreement
