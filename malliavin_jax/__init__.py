"""Trajectories of a learner go in, its loss comes out, with error bars."""

from typing import Any as _Any

from . import (
    adaptive as adaptive,
    diagnostics as diagnostics,
    distributed as distributed,
    estimate as estimate,
    fields as fields,
    io as io,
    kernel as kernel,
    learner as learner,
    models as models,
    potentials as potentials,
    recording as recording,
    recovery as recovery,
    samples as samples,
    weights as weights,
    wiener as wiener,
)
from ._base.long_runs import Checkpoint as Checkpoint
from .adaptive import AdaptiveField as AdaptiveField, Tracking as Tracking, track as track
from .chain import Chain as Chain, langevin as langevin, passive_langevin as passive_langevin
from .estimate import (
    Centered as Centered,
    Estimate as Estimate,
    Gaussian as Gaussian,
    Heaviside as Heaviside,
    Laplace as Laplace,
    conditional_expectation as conditional_expectation,
    density as density,
    score as score,
)
from .fields import (
    FreshField as FreshField,
    MalliavinField as MalliavinField,
    TabulatedField as TabulatedField,
    TrueField as TrueField,
    goodness_of_fit as goodness_of_fit,
)
from .learner import (
    ForwardLearner as ForwardLearner,
    Path as Path,
    initial as initial,
    simulate as simulate,
)
from .models import short_localizer as short_localizer
from .potentials import Potential as Potential
from .recording import (
    Recording as Recording,
    consistency as consistency,
    split_log as split_log,
)
from .recovery import (
    Loss as Loss,
    loss_from_estimates as loss_from_estimates,
    loss_from_field as loss_from_field,
    loss_from_samples as loss_from_samples,
)
from .samples import (
    Samples as Samples,
    observe as observe,
    samples_from_paths as samples_from_paths,
)
from .streaming import (
    Accumulator as Accumulator,
    accumulate as accumulate,
    observe_and_accumulate as observe_and_accumulate,
)
from .weights import (
    Adapted as Adapted,
    Canonical as Canonical,
    Reciprocal as Reciprocal,
    Windowed as Windowed,
    weigh as weigh,
)

__version__ = "0.2.0"


def __getattr__(name: str) -> _Any:
    """`plots` when it is first asked for: it brings matplotlib, which nothing else needs."""
    if name == "plots":
        import importlib

        return importlib.import_module(".plots", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
