"""The gradient field of a bank of samples."""

from typing import Literal

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Int

from .._base import mesh
from .._base.checks import check_shape
from .._base.types import Key, Vector
from ..estimate.localizers import AbstractLocalizer, Laplace
from ..estimate.ratio import Estimate
from ..estimate.sums import Sums, add_up
from ..potentials.base import AbstractPotential
from ..samples.samples import Samples, check_samples
from ..samples.summary import box
from .extrapolation import TabulatedTail, Tail, guarded_estimate, make_tail
from .folds import Fold, cross_fitted, folded_sums, make_fold
from .selection import Choice, choose_localizer
from .sorted import SortedBank, sort_bank


class MalliavinField(eqx.Module):
    """The counterfactual gradient E[∇L(X_s) | X_s = α] from a bank of samples, with its standard error.

    In one dimension with a `Laplace` localizer a query costs O(log N); otherwise O(N), in chunks.

    Where the data do not carry an estimate (`trusted` is False: density below three standard errors, or α outside
    the box of observed positions) the value passes, between three and one and a half standard errors, to an average
    of the observed tangent planes g_i + H_i (α − X_i) around α, continued with a positive stiffness outside the box;
    `stderr` is infinite there.

    Args:
        samples: the bank, with Hessians.
        localizer: "auto" (the default) takes the length of least estimated standard error and, beyond one dimension,
            the core of least estimated risk; or any of `Laplace`, `Gaussian`, `Heaviside`, `Centered`, or your own.
        control: a potential m that assists. The estimator averages the residuals g − ∇m(X_s) and adds ∇m(α) back,
            which is unbiased whatever m is and precise where m is good. "auto" fits a polynomial to gradients and
            Hessians of the *other* half of the episodes (two-fold cross-fitting), and is dropped where its estimated
            error is larger than without; None switches it off.

    Returns:
        Called as `field(alpha)` with α of shape (d,), an `Estimate` with d entries. `jit`, `vmap` and `scan` work.

    Raises:
        ValueError: if `samples` hold no Hessians, fewer than two observed episodes or an observed number that is not
            finite; if `localizer` or `control` is another word than "auto"; if α is not of shape (d,).

    Example:
        ```python
        import jax
        import jax.numpy as jnp
        import malliavin_jax as mj

        loss = mj.potentials.Quartic()
        learner = mj.ForwardLearner(loss, mj.initial.Normal(), step_size=0.01, gradient_noise=0.5)
        samples = mj.observe(jax.random.key(0), learner, num_episodes=2000, times=[0.4, 0.8])
        field = mj.MalliavinField(samples)
        estimates = jax.jit(jax.vmap(field))(jnp.linspace(-1.0, 1.0, 9)[:, None])
        estimates.value.shape, estimates.trusted.all()  # (9, 1), True
        ```
    """

    folds: tuple[Fold, ...]
    localizer: AbstractLocalizer
    sorted: tuple[SortedBank, ...] | None
    tail: Tail | TabulatedTail
    low: Vector
    high: Vector
    points: Int[Array, ""]

    def __init__(
        self,
        samples: Samples,
        localizer: AbstractLocalizer | Literal["auto"] = "auto",
        control: AbstractPotential | Literal["auto"] | None = "auto",
    ):
        check_samples(samples)
        samples.require_hessian("MalliavinField")
        if isinstance(localizer, str) and localizer != "auto":
            raise ValueError(f"localizer must be 'auto' or a localizer, got {localizer!r}")
        if isinstance(control, str) and control != "auto":
            raise ValueError(f"control must be 'auto', None or a potential, got {control!r}")

        if isinstance(control, str):
            self.folds, choice = _fitted_control_or_none(samples)
        else:
            self.folds, choice = (make_fold(samples, control),), None

        if isinstance(localizer, str):
            choice = choose_localizer(samples, self.folds) if choice is None else choice
            localizer = choice.localizer
        self.localizer = localizer

        self.sorted = None
        if isinstance(localizer, Laplace) and samples.dim == 1 and not mesh.is_split(samples):  # no sorting across
            self.sorted = tuple(sort_bank(fold.bank, localizer.length) for fold in self.folds)

        self.tail = make_tail(samples)
        self.low, self.high = box(samples)
        self.points = jnp.sum(samples.observed)

    def __call__(self, alpha: Vector, *, key: Key | None = None) -> Estimate:
        check_shape("alpha", alpha, self.low.shape)
        episodes = sum(fold.bank.episodes for fold in self.folds)
        return guarded_estimate(
            alpha, self._sums, self.tail, low=self.low, high=self.high, episodes=episodes, points=self.points
        )

    def _sums(self, alpha: Vector) -> Sums:
        if self.sorted is None:
            return folded_sums(self.folds, alpha, self.localizer)
        pairs = zip(self.folds, self.sorted, strict=True)
        return add_up([fold.with_model(bank.sums(alpha), alpha) for fold, bank in pairs])


def _fitted_control_or_none(samples: Samples) -> tuple[tuple[Fold, ...], Choice]:
    """Folds with a control fitted to the other half, or one without any if it has the smaller risk; its localizer."""
    assisted, plain = cross_fitted(samples), (make_fold(samples, None),)
    choice, without = choose_localizer(samples, assisted), choose_localizer(samples, plain)
    if float(choice.risk) <= float(without.risk):  # NaN, from a fit without enough data, loses
        return assisted, choice
    return plain, without
