"""The gradient field of a bank of samples."""

from typing import Literal, Protocol, runtime_checkable

import equinox as eqx
from jaxtyping import Array, Int

from .._base import mesh
from .._base.checks import has_numbers
from .._base.types import Key, Place, Scalar, Vector
from ..checking.learners import Log
from ..checking.report import checked
from ..estimate.field import AbstractField, place_of
from ..estimate.localizers import AbstractLocalizer, Laplace, check_localizer
from ..estimate.ratio import Estimate
from ..estimate.sums import Sums, add_up
from ..models.fitted import completed_model, fit_models, kinds_for
from ..models.folds import Fold, folded_sums, make_fold
from ..models.selection import choose_localizer
from ..potentials.base import AbstractPotential, check_potential
from ..samples.samples import Samples, check_samples, not_samples
from ..samples.summary import box, points_and_scale
from .assisted import AssistedTable
from .correction import Correction, how_much, tabulate
from .extrapolation import TabulatedTail, Tail, guarded_estimate, make_tail, smoothed
from .sorted import SortedBank, sort_bank

_SORT_FROM = 20_000  # points of a bank that is asked some hundred times only; fewer are summed sooner than sorted


@runtime_checkable
class Recorded(Log, Protocol):
    """What this room knows of a `Recording`: all that the check looks at, and how to weigh it."""

    def samples(self, *, model: Literal["spline"]) -> Samples:
        """All episodes, weighed at steps of its own choice, with a model of all points of their paths."""
        ...


class MalliavinField(AbstractField):
    """The counterfactual gradient E[∇L(X_s) | X_s = α] from a bank of samples, with its standard error.

    A model of the loss is fitted to the samples, and the debiased (Malliavin) estimate, which is unbiased whatever the
    model is, judges it: where it finds no bias the model stands alone, where it does the model is corrected, and
    `field.correction` says what was chosen and why. A model that stands alone, or whose correction is tabulated, makes
    a query cost some 6^d multiplications, however many samples there are. The whole correction costs O(log N) a query
    in one dimension with a `Laplace` localizer, and O(N) otherwise, in chunks.

    Standard errors of a model are those of its sandwich variance, clustered by episode, with the bias of its smoothing
    (see `fitting/errors.py`); those of a correction are clustered by episode too.

    Where the data do not carry an estimate (`trusted` is False: density below three standard errors, or α outside
    the box of observed positions) the value passes, between three and one and a half standard errors, to an average
    of the observed tangent planes g_i + H_i (α − X_i) around α, continued with a positive stiffness outside the box;
    `stderr` is infinite there.

    Args:
        samples: the bank, with Hessians, or with a model that stands in for them (`samples_from_paths`): it is then the
            model that is judged here, by a kernel average of its residuals that needs no Hessian. Or a `Recording`: it
            is held against the law of its learner first, and then weighed at eight steps along its episodes.
        localizer: of the debiased estimate. "auto" (the default) takes the length of least estimated standard error
            and, beyond one dimension, the core of least estimated risk; or any of `Laplace`, `Gaussian`, `Heaviside`,
            `Centered`, or your own.
        control: the model m. "auto" takes the best, on held-out episodes, of a spline (up to three dimensions), a
            polynomial (beyond one) and none; "spline" or "polynomial" one of these, unless none is better. Each half
            of the episodes is corrected with the model of the *other* half (two-fold cross-fitting). A potential of
            yours is taken as it is, and corrected in full; None does without.
        correction: how much of the debiased average of the residuals g − ∇m(X_s) is added to a fitted model. "auto"
            tests, in up to three dimensions, the model alone and then kernel averages of its residuals of shorter and
            shorter lengths against the debiased estimate, and takes the first that it does not reject (at the level
            0.1, or less where the model is much more exact than what judges it; see `field.correction`). "full" is
            unbiased whatever the model is, chooses nothing, and has the larger variance (the paper's way); "none" is
            the fitted model alone.
        check: what to do about a `Recording` that does not fit its learner: "error" (the default), "warn", or "off".

    Returns:
        Called as `field(alpha)` with α of shape (d,), or a number in one dimension, an `Estimate` with d entries.
        `jit`, `vmap` and `scan` work.

    Raises:
        ValueError: if a recording does not fit its learner; if `samples` hold no Hessians, fewer than two observed
            episodes or an observed number that is not finite; if `localizer`, `control` or `correction` is a word that
            it does not take, or if they do not go together; if α is not of shape (d,).

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
        print(field.correction)  # the fitted spline alone: p = … against the debiased estimate
        ```
    """

    folds: tuple[Fold, ...]
    localizer: AbstractLocalizer
    sorted: tuple[SortedBank, ...] | None
    tail: Tail | TabulatedTail
    table: AssistedTable | None
    correction: Correction
    low: Vector
    high: Vector
    points: Int[Array, ""]
    scale: Scalar

    def __init__(
        self,
        samples: Samples | Recorded,
        localizer: AbstractLocalizer | Literal["auto"] = "auto",
        control: AbstractPotential | Literal["auto", "spline", "polynomial"] | None = "auto",
        correction: Literal["auto", "full", "none"] = "auto",
        check: Literal["error", "warn", "off"] = "error",
    ):
        if not isinstance(samples, Samples):
            samples = _samples_of(samples, check)
        check_samples(samples)
        samples.require_hessian("MalliavinField")
        _check_words(localizer, control, correction, samples)
        rung, completion, samples = samples.rung, samples.completion, samples.bare
        if completion is not None and completion.given and isinstance(control, str):
            control = completion.models.whole
        model = None
        if isinstance(control, str) and control != "polynomial" and completion is not None:
            model = completed_model(samples, completion)
        elif isinstance(control, str):
            model = fit_models(samples, kinds_for(samples) if control == "auto" else (control,))
        folds = (make_fold(samples, None if isinstance(control, str) else control),) if model is None else model.folds
        if isinstance(localizer, str):
            localizer = choose_localizer(samples, folds).localizer
        self.folds, self.localizer = folds, localizer
        self.sorted = None
        self.tail = make_tail(samples if completion is None or rung == "hessians" else smoothed(samples, completion))
        self.low, self.high = box(samples)
        self.points, self.scale = points_and_scale(samples)
        self.table = None
        given = not isinstance(control, str) and control is not None
        self.correction = how_much(samples, model, localizer, correction, given, rung)
        often = self.correction.kind == "full" or samples.observed.size > _SORT_FROM  # asked, or asked of many points
        if isinstance(localizer, Laplace) and samples.dim == 1 and often and not mesh.is_split(samples):
            self.sorted = tuple(sort_bank(fold.bank, localizer.length) for fold in folds)  # no sorting across devices
        if model is not None and (self.correction.kind != "full" or self.correction.tabulated):
            self.table = tabulate(samples, model, self)
            self.folds, self.sorted = (), None  # a query reads the table only

    def __call__(self, alpha: Place, *, key: Key | None = None) -> Estimate:
        alpha = place_of(alpha, len(self.low), self.low.dtype)
        return _ask(self if self.table is None else self.table, alpha)

    def ask(self, alpha: Vector) -> Estimate:
        """The estimate from sums over the samples, where there is no table."""
        episodes = sum(fold.bank.episodes for fold in self.folds)
        return guarded_estimate(
            alpha,
            self.sums,
            self.tail,
            low=self.low,
            high=self.high,
            episodes=episodes,
            points=self.points,
            scale=self.scale,
        )

    def __repr__(self) -> str:
        if not has_numbers((self.low, self.high, self.points, self.correction)):
            return super().__repr__()
        box = ", ".join(f"{a:.3g} to {b:.3g}" for a, b in zip(self.low.tolist(), self.high.tolist(), strict=True))
        return f"MalliavinField(d = {len(self.low)}, {int(self.points)} points in {box}; {self.correction})"

    def sums(self, alpha: Vector) -> Sums:
        """The localized sums of all samples at α, the model added back."""
        if self.sorted is None:
            return folded_sums(self.folds, alpha, self.localizer)
        pairs = zip(self.folds, self.sorted, strict=True)
        return add_up([fold.with_model(bank.sums(alpha), alpha) for fold, bank in pairs])


@eqx.filter_jit
def _ask(field: MalliavinField | AssistedTable, alpha: Vector) -> Estimate:
    """One program a query, not one for each of its operations."""
    return field.ask(alpha)


def _samples_of(recording: object, check: Literal["error", "warn", "off"]) -> Samples:
    """The samples of a recording, once it was held against the law of its learner."""
    if not isinstance(recording, Recorded):
        raise not_samples(recording, " or a Recording")
    checked(recording, check)
    return recording.samples(model="spline")


def _check_words(localizer: object, control: object, correction: object, samples: Samples) -> None:
    """Refuse words that are none of those the arguments take, and what does not go together."""
    d = samples.dim
    if control == "polynomial" and samples.rung != "hessians":
        raise ValueError("control='polynomial' needs observed Hessians: leave it at 'auto', or give a potential")
    if isinstance(localizer, str) and localizer != "auto":
        raise ValueError(f"localizer must be 'auto' or a localizer, got {localizer!r}")
    if not isinstance(localizer, str):
        check_localizer(localizer)
    if isinstance(control, str) and control not in ("auto", "spline", "polynomial"):
        raise ValueError(f"control must be 'auto', 'spline', 'polynomial', None or a potential, got {control!r}")
    if not isinstance(control, str) and control is not None:
        check_potential("control", control, ", 'auto', 'spline', 'polynomial' or None")
    if control == "spline" and d > 3:
        raise ValueError(f"control='spline' is for up to three dimensions, got samples with d = {d}")
    if correction not in ("auto", "full", "none"):
        raise ValueError(f"correction must be 'auto', 'full' or 'none', got {correction!r}")
    if correction == "none" and (not isinstance(control, str) or d > 3):
        raise ValueError(
            "correction='none' needs a control that is fitted here, in up to three dimensions: "
            f"got control={control!r} and d = {d}"
        )
