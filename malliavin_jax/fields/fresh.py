"""Fields without a bank: the true gradient, and fresh episodes at every call."""

import equinox as eqx
import jax.numpy as jnp

from .._base.checks import check_count, check_key, floats_to_arrays, steps_at
from .._base.types import Key, Place
from ..estimate.field import AbstractField, place_of
from ..estimate.localizers import AbstractLocalizer, check_localizer
from ..estimate.ratio import Estimate
from ..learner.learner import ForwardLearner, initial_shape
from ..models.folds import folded_sums, make_fold
from ..potentials.base import AbstractPotential, check_potential
from ..potentials.products import MatrixFree
from ..samples.default_scheme import choose_scheme
from ..samples.simulated import observe_steps
from ..samples.summary import box, masked_mean
from ..weights.scheme import Scheme
from .extrapolation import guarded_estimate, tangent_planes


class TrueField(AbstractField):
    """The field of a known potential: what a perfect estimator would return.

    Args:
        potential: L, whose gradient is the value.

    Returns:
        Called as `field(alpha)`, an `Estimate` whose standard error is 0; it knows of no density, which is NaN.

    Example:
        ```python
        import jax.numpy as jnp
        import malliavin_jax as mj

        loss = mj.potentials.Quartic()
        mj.TrueField(loss)(jnp.array([0.5])).value  # loss.gradient there
        ```
    """

    potential: AbstractPotential | MatrixFree

    def __check_init__(self):
        check_potential("potential", self.potential)

    def __call__(self, alpha: Place, *, key: Key | None = None) -> Estimate:
        alpha = place_of(alpha)
        value = self.potential.gradient(alpha)
        nan = jnp.full((), jnp.nan, alpha.dtype)
        return Estimate(value, jnp.zeros_like(value), nan, nan, jnp.asarray(True))


class FreshField(AbstractField):
    """New episodes at every call, as in the paper's Algorithm 1: `field(alpha, key=key)` observes, then estimates at α.

    Args:
        learner: whose episodes are simulated.
        localizer: must be given, because choosing one at every step would cost more than the step.
        num_episodes: how many are simulated at each call, at least 2.
        time: the conditioning time s, a multiple of the learner's step size.
        scheme: the weight scheme; None as in `observe`.
        control: a fixed potential that assists, or None.

    Returns:
        Called as `field(alpha, key=key)`, an `Estimate` like that of `MalliavinField`; another key, other episodes.

    Raises:
        ValueError: if `num_episodes` or `time` is out of range; when called without a key, or if the learner's
            potential has no Hessian.

    Example:
        ```python
        import jax
        import jax.numpy as jnp
        import malliavin_jax as mj

        loss = mj.potentials.Quartic()
        learner = mj.ForwardLearner(loss, mj.initial.Normal(), step_size=0.01, gradient_noise=0.5)
        fresh = mj.FreshField(learner, mj.Laplace(0.5), num_episodes=2000, time=0.8)
        fresh(jnp.array([0.5]), key=jax.random.key(1)).value
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
        check_localizer(localizer)
        if control is not None:
            check_potential("control", control, " or None")
        self.num_episodes = check_count("num_episodes", num_episodes, at_least=2)
        self.stops = steps_at([time], learner.step_size, name="time")
        self.learner, self.localizer = floats_to_arrays(learner, dtype), localizer
        self.scheme = floats_to_arrays(choose_scheme(self.learner, scheme, self.stops[-1]), dtype)
        self.control = control

    def __call__(self, alpha: Place, *, key: Key | None = None) -> Estimate:
        if key is None:
            raise ValueError("key must be given: FreshField simulates new episodes at every call")
        check_key("key", key)
        alpha = place_of(alpha, *initial_shape(self.learner))
        samples = observe_steps(key, self.learner, self.scheme, self.num_episodes, self.stops)
        samples.require_hessian("FreshField")
        folds = (make_fold(samples, self.control),)
        low, high = box(samples)
        return guarded_estimate(
            alpha,
            lambda at: folded_sums(folds, at, self.localizer),
            tangent_planes(samples),
            low=low,
            high=high,
            episodes=self.num_episodes,
            points=jnp.sum(samples.observed),
            scale=jnp.sqrt(jnp.sum(masked_mean(samples.gradient**2, samples.observed))),
        )
