"""Gradient fields α ↦ ∇L(α): PyTree callables `field(alpha, *, key=None) -> Estimate`."""

from typing import Literal

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Int

from .._base import mesh
from .._base.checks import check_shape
from .._base.types import Key, Vector
from ..estimate.localizers import AbstractLocalizer, Laplace
from ..estimate.ratio import Estimate
from ..estimate.sums import Sums, localized_sums
from ..potentials.base import AbstractPotential
from ..samples.samples import Samples, check_samples
from ..samples.summary import box
from .extrapolation import TabulatedTail, Tail, _guarded, make_tail
from .folds import Fold, _cross_fitted, add_sums, fold_sums, make_fold
from .selection import choose_localizer
from .sorted import SortedBank, sort_bank


class MalliavinField(eqx.Module):
    """The counterfactual gradient E[∇L(X_s) | X_s = α] from a bank of samples, with its standard error.

    - `localizer`: "auto" (the default) takes the length of least estimated standard error and, beyond one dimension,
      the core of least estimated risk; or any of `Laplace`, `Gaussian`, `Heaviside`, `Centered`.
    - `control`: a potential m that assists. The estimator averages the residuals g − ∇m(X_s) and adds ∇m(α) back,
      which is unbiased whatever m is and precise where m is good. "auto" fits a polynomial to gradients and Hessians
      of the *other* half of the episodes (two-fold cross-fitting), and is dropped where its estimated error is
      larger than without; None switches it off.

    In one dimension with a `Laplace` localizer a query costs O(log N); otherwise O(N), in chunks.

    Where the data do not carry an estimate (`trusted` is False: density below three standard errors, or α outside
    the box of observed positions) the value passes, between three and one and a half standard errors, to an average
    of the observed tangent planes g_i + H_i (α − X_i) around α, continued with a positive stiffness outside the box;
    `stderr` is infinite there.

    ```python
    field = mj.MalliavinField(samples)
    estimates = jax.jit(jax.vmap(field))(alphas)
    estimates.value.shape, estimates.trusted.all()
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
        if isinstance(localizer, str) and localizer != "auto":
            raise ValueError(f"localizer must be 'auto' or a localizer, got {localizer!r}")
        if isinstance(control, str) and control != "auto":
            raise ValueError(f"control must be 'auto', None or a potential, got {control!r}")
        plain = (make_fold(samples, None),)
        if control is None:
            folds, choice = plain, None
        elif isinstance(control, str):
            folds = _cross_fitted(samples)
            choice = choose_localizer(samples, folds)
            without = choose_localizer(samples, plain)
            if not float(choice.risk) <= float(without.risk):  # NaN, from a fit without enough data, loses
                folds, choice = plain, without
        else:
            folds, choice = (make_fold(samples, control),), None
        if isinstance(localizer, str):
            choice = choose_localizer(samples, folds) if choice is None else choice
            localizer = choice.localizer
        self.folds, self.localizer = folds, localizer
        self.sorted = None
        if isinstance(localizer, Laplace) and samples.dim == 1 and not mesh.is_split(samples):  # no sorting across
            self.sorted = tuple(sort_bank(fold.bank, localizer.length) for fold in folds)
        self.tail = make_tail(samples)
        self.low, self.high = box(samples)
        self.points = jnp.sum(samples.observed)

    def __call__(self, alpha: Vector, *, key: Key | None = None) -> Estimate:
        check_shape("alpha", alpha, self.low.shape)
        episodes = sum(fold.bank.episodes for fold in self.folds)
        return _guarded(alpha, self.low, self.high, self._sums, episodes, self.points, self.tail)

    def _sums(self, alpha: Vector) -> Sums:
        if self.sorted is None:
            parts = [localized_sums(fold.bank, alpha, self.localizer) for fold in self.folds]
        else:
            parts = [bank.sums(alpha) for bank in self.sorted]
        return add_sums([fold_sums(f, alpha, part) for f, part in zip(self.folds, parts, strict=True)])
