"""Trajectories of a learner go in, its loss comes out, with error bars."""

from . import (
    diagnostics as diagnostics,
    distributed as distributed,
    io as io,
    kernel as kernel,
    potentials as potentials,
    recording as recording,
    recovery as recovery,
    wiener as wiener,
)
from .chain import Chain as Chain, langevin as langevin, passive_langevin as passive_langevin
from .estimate import (
    AbstractLocalizer as AbstractLocalizer,
    AbstractRadial as AbstractRadial,
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
    short_localizer as short_localizer,
)
from .learner import (
    ForwardLearner as ForwardLearner,
    Path as Path,
    Point as Point,
    Transition as Transition,
    initial as initial,
    simulate as simulate,
)
from .potentials import Polynomial as Polynomial, Potential as Potential
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
    Weighed as Weighed,
    observe as observe,
    observe_weights as observe_weights,
    samples_from_paths as samples_from_paths,
)
from .streaming import (
    Accumulator as Accumulator,
    accumulate as accumulate,
    observe_and_accumulate as observe_and_accumulate,
)
from .weights import (
    Canonical as Canonical,
    FixedWindow as FixedWindow,
    Reciprocal as Reciprocal,
    Scheme as Scheme,
    Window as Window,
    Windowed as Windowed,
    best_rate as best_rate,
    minimum_variance_window as minimum_variance_window,
    weigh as weigh,
)

__version__ = "0.1.0"
