"""Trajectories of a learner go in, its loss comes out, with error bars."""

from . import (
    diagnostics as diagnostics,
    distributed as distributed,
    io as io,
    kernel as kernel,
    potentials as potentials,
    wiener as wiener,
)
from ._bare import Weighed as Weighed, observe_weights as observe_weights
from ._pilot import (
    Window as Window,
    best_rate as best_rate,
    minimum_variance_window as minimum_variance_window,
)
from .accumulate import (
    Accumulator as Accumulator,
    accumulate as accumulate,
    observe_and_accumulate as observe_and_accumulate,
)
from .conditional import (
    Estimate as Estimate,
    conditional_expectation as conditional_expectation,
    density as density,
    score as score,
)
from .consistency import Consistency as Consistency, LearnerReport as LearnerReport, consistency as consistency
from .fields import (
    FreshField as FreshField,
    MalliavinField as MalliavinField,
    TabulatedField as TabulatedField,
    TrueField as TrueField,
)
from .forward import (
    ForwardLearner as ForwardLearner,
    Path as Path,
    Point as Point,
    Transition as Transition,
    simulate as simulate,
)
from .langevin import Chain as Chain, langevin as langevin, passive_langevin as passive_langevin
from .localize import (
    AbstractLocalizer as AbstractLocalizer,
    AbstractRadial as AbstractRadial,
    Centered as Centered,
    Gaussian as Gaussian,
    Heaviside as Heaviside,
    Laplace as Laplace,
)
from .observe import (
    Samples as Samples,
    observe as observe,
    samples_from_paths as samples_from_paths,
)
from .potentials import Polynomial as Polynomial, Potential as Potential
from .recording import Recording as Recording, split_log as split_log
from .recovery import (
    Loss as Loss,
    loss_from_field as loss_from_field,
    loss_from_samples as loss_from_samples,
)
from .weights import (
    Canonical as Canonical,
    FixedWindow as FixedWindow,
    Reciprocal as Reciprocal,
    Scheme as Scheme,
    Windowed as Windowed,
    weigh as weigh,
)

__version__ = "0.1.0"
