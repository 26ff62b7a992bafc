"""Fields without a bank: the true gradient, and fresh episodes at every call."""

import equinox as eqx
import jax.numpy as jnp

from .._base.checks import check_count, floats_to_arrays, steps_at
from .._base.types import Key, Vector
from ..estimate.localizers import AbstractLocalizer
from ..estimate.ratio import Estimate
from ..estimate.sums import Sums, localized_sums
from ..learner.learner import ForwardLearner, initial_shape
from ..potentials.base import AbstractPotential
from ..samples.simulated import observe_steps
from ..samples.summary import box
from ..weights.canonical import Canonical
from ..weights.scheme import Scheme
from .extrapolation import _guarded, tangent_planes
from .folds import fold_sums, make_fold


class TrueField(eqx.Module):
    """The field of a known potential: what a perfect estimator would return.

    Its standard errors are zero and its density, which it has none of, is NaN.

    ```python
    mj.TrueField(loss)(jnp.array([0.5])).value  # loss.gradient there
    ```
    """

    potential: AbstractPotential

    def __call__(self, alpha: Vector, *, key: Key | None = None) -> Estimate:
        value = self.potential.gradient(alpha)
        nan = jnp.full((), jnp.nan, alpha.dtype)
        return Estimate(value, jnp.zeros_like(value), nan, nan, jnp.asarray(True))


class FreshField(eqx.Module):
    """New episodes at every call, as in the paper's Algorithm 1: `field(alpha, key=key)` observes, then estimates at α.

    - `time`: the conditioning time s, a multiple of the learner's step size.
    - `localizer`: must be given, because choosing one at every step would cost more than the step.
    - `control`: a fixed potential that assists, or None.

    ```python
    fresh = mj.FreshField(learner, mj.Laplace(0.5), num_episodes=2000, time=0.8)  # fresh(alpha, key=key) observes anew
    ```
    """

    learner: ForwardLearner
    localizer: AbstractLocalizer
    scheme: Scheme
    control: AbstractPotential | None
    num_episodes: int = eqx.field(static=True)
    stops: tuple[int, ...] = eqx.field(static=True)

    def __init__(
        self,
        learner: ForwardLearner,
        localizer: AbstractLocalizer,
        *,
        num_episodes: int,
        time: float,
        scheme: Scheme | None = None,
        control: AbstractPotential | None = None,
    ):
        _, dtype = initial_shape(learner)
        self.num_episodes = check_count("num_episodes", num_episodes, at_least=2)
        self.stops = steps_at([time], learner.step_size, name="time")
        self.learner, self.localizer = floats_to_arrays(learner, dtype), localizer
        self.scheme = Canonical() if scheme is None else floats_to_arrays(scheme, dtype)
        self.control = control

    def __call__(self, alpha: Vector, *, key: Key | None = None) -> Estimate:
        if key is None:
            raise ValueError("key must be given: FreshField simulates new episodes at every call")
        samples = observe_steps(key, self.learner, self.scheme, self.num_episodes, self.stops)
        fold = make_fold(samples, self.control)
        low, high = box(samples)
        points = jnp.sum(samples.observed)

        def sums(at: Vector) -> Sums:
            return fold_sums(fold, at, localized_sums(fold.bank, at, self.localizer))

        return _guarded(alpha, low, high, sums, self.num_episodes, points, tangent_planes(samples))
