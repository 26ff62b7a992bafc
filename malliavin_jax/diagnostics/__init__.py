"""Is the chain there yet? Mixing, distances from a Gibbs law, rates of convergence, export to ArviZ."""

from .distances import total_variation as total_variation, wasserstein as wasserstein
from .experiment import Convergence as Convergence, convergence_experiment as convergence_experiment
from .export import to_arviz as to_arviz
from .mixing import (
    density_significance as density_significance,
    effective_sample_size as effective_sample_size,
    split_rhat as split_rhat,
)
