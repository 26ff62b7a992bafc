"""How much of the debiased correction a field takes, and the table that results."""

import functools
import math
from typing import TYPE_CHECKING, Any, Literal

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .._base.host import to_device
from .._base.types import Scalar, Vector
from ..estimate.localizers import AbstractLocalizer
from ..estimate.ratio import Estimate, ratio_estimate
from ..estimate.sums import Sums
from ..models.fitted import FittedModel
from ..models.folds import Ratio
from ..models.selection import some_episodes, typical_points
from ..samples.completion import MISSING, Rung
from ..samples.samples import Samples
from ..samples.summary import box, spread
from .assisted import AssistedTable, make_table
from .judge import LEAST_LEVEL, LENGTHS, LEVEL, Kernel, Verdict, judge

if TYPE_CHECKING:
    from .malliavin import MalliavinField

_PLACES = 32  # at which candidates are compared
_JUDGED_POINTS = 200_000  # of how many points at most
_DENSITY_POINTS = 100_000  # from how many the density of a table is estimated, beyond one dimension


class Correction(eqx.Module):
    """What a `MalliavinField` is made of, and why. `print` it.

    Attributes:
        kind: "none" (the fitted model alone), "kernel" (plus a kernel average of its residuals) or "full" (plus their
            debiased average, which is unbiased whatever the model is).
        model: "spline" or "polynomial" where one was fitted and used, "given" for a control of the user's, "none".
        length: of the kernel, in the units of x; 0 for the other kinds.
        p_values: of the tests against the debiased estimate: the model alone, then kernels of lengths 2.5, 1.2, .6,
            .3 and .15 spreads. The first candidate above `level` was taken. NaN where nothing was tested.
        tabulated: whether the correction is read from a table.
        rung: what was observed: "hessians" (all), "diagonals" of Hessians, "gradients" or "positions" alone. What was
            not is taken from the model, and the kernel average of the shortest length, which needs no Hessian, is then
            what candidates are tested against.
        level: of the tests: 0.1, and less the more exact the model is in comparison with the debiased estimate, because
            a rejection by chance then costs more.
        doubt: the root mean square of a bias that the judge suspects but cannot prove, in each component; errors
            include it.

    Example:
        ```python
        import jax
        import malliavin_jax as mj

        loss = mj.potentials.Quartic()
        learner = mj.ForwardLearner(loss, mj.initial.Normal(), step_size=0.01, gradient_noise=0.5)
        samples = mj.observe(jax.random.key(0), learner, num_episodes=2000, times=[0.4, 0.8])
        chosen = mj.MalliavinField(samples).correction
        print(chosen)  # a sentence; chosen.kind, chosen.p_values for programs
        ```
    """

    kind: Literal["none", "kernel", "full"] = eqx.field(static=True)
    model: str = eqx.field(static=True)
    length: Scalar
    p_values: Float[Array, " candidates"]
    tabulated: bool = eqx.field(static=True)
    rung: Rung = eqx.field(static=True)
    level: Scalar
    doubt: Scalar

    def __str__(self) -> str:
        return self._reason() + ("" if self.rung == "hessians" else f"; {MISSING[self.rung]}")

    def _reason(self) -> str:
        if self.model in ("none", "given"):
            reason = "no model was fitted" if self.model == "given" else "no model was asked for, or none was better"
            return f"the debiased estimate: {reason}"
        p_values = np.asarray(self.p_values)
        first = float(p_values[0])
        judged = "" if np.isnan(first) else f"p = {first:.2g} against {self._judge()}"
        if self.kind == "none":
            return f"the fitted {self.model} alone" + (f": {judged}" if judged else ", as asked for")
        if self.kind == "full":
            return f"the fitted {self.model} and its whole correction" + (f": {judged}" if judged else ", as asked for")
        chosen = float(p_values[int(np.argmax(p_values > float(self.level)))])
        return (
            f"the fitted {self.model} and a kernel average of its residuals of length {float(self.length):.3g}: "
            f"the model alone has {judged}, with the kernel p = {chosen:.2g}"
        )

    def _judge(self) -> str:
        return "the debiased estimate" if self.rung == "hessians" else "a narrow kernel average"


def how_much(
    samples: Samples,
    model: FittedModel | None,
    localizer: AbstractLocalizer,
    wanted: Literal["auto", "full", "none"],
    given: bool = False,
    rung: Rung = "hessians",
) -> Correction:
    """The correction of a fitted model: what was asked for, or what the judge finds necessary.

    The judge is the debiased estimate. Where its Hessians are the model's own it would share the model's errors, and
    the kernel average of the shortest length, which needs none, takes its place.
    """
    number = functools.partial(to_device, dtype=samples.x.dtype)

    def chosen(kind: Literal["none", "kernel", "full"], **found: Any) -> Correction:
        untold = {"length": 0.0, "p_values": np.full(1 + len(LENGTHS), np.nan), "level": LEVEL, "doubt": 0.0}
        numbers = {name: number(value) for name, value in (untold | found).items() if name != "tabulated"}
        fitted = ("given" if given else "none") if model is None else model.kind
        return Correction(kind=kind, model=fitted, rung=rung, tabulated=found.get("tabulated", False), **numbers)

    if model is None:
        return chosen("full")
    if wanted != "auto" or samples.dim > 3:
        return chosen("none" if wanted == "none" else "full")
    alphas = typical_points(samples, _PLACES)
    lengths = to_device(np.asarray(spread(samples)) * np.asarray(LENGTHS), samples.x.dtype)
    folds, fraction = some_episodes(model.folds, max(1000, _JUDGED_POINTS // samples.num_times))
    reference = localizer if rung == "hessians" else Kernel(to_device(np.asarray(lengths)[-1]))
    verdict = judge(folds, model.whole, alphas, lengths, reference)
    p_values = verdict.tests.p_value
    if rung != "hessians":
        p_values = to_device(np.append(np.asarray(p_values)[:-1], 1), p_values.dtype)  # the reference itself
    ratio = _ratio(verdict, fraction, model.variance(np.asarray(alphas, np.float64)))
    level = max(LEAST_LEVEL, LEVEL * ratio)
    accepted = np.flatnonzero(np.asarray(p_values) > level)
    if accepted.size == 0:
        return chosen("full", p_values=p_values, level=level, tabulated=samples.dim > 1)
    first = int(accepted[0])
    doubt = math.sqrt(ratio * float(np.asarray(verdict.tests.excess)[first]) / samples.dim)
    told = {"p_values": p_values, "level": level, "doubt": doubt}
    if first == 0:
        return chosen("none", **told)
    return chosen("kernel", length=np.asarray(lengths)[first - 1], tabulated=True, **told)


def _ratio(verdict: Verdict, fraction: float, model: Float[np.ndarray, "alphas d"]) -> float:
    """The variance of the model in units of the judge's, 1 at most."""
    share, judged = (np.asarray(part, np.float64) for part in (verdict.share, verdict.variance))
    of_judge, of_model = fraction * float(share @ judged.sum(1)), float(share @ model.sum(1))
    return 1.0 if of_judge <= of_model else of_model / of_judge


class _Sorted(eqx.Module):
    """α ↦ the ratio of the sums of a field in one dimension that is sorted."""

    field: "MalliavinField"

    def __call__(self, alpha: Vector) -> Estimate:
        field = self.field
        sums: Sums = field.sums(alpha)
        episodes = sum(fold.bank.episodes for fold in field.folds)
        return ratio_estimate(sums, episodes, field.points, jnp.asarray(True), field.scale)


def tabulate(samples: Samples, model: FittedModel, field: "MalliavinField") -> AssistedTable:
    """The table of a field whose correction has been decided."""
    chosen = field.correction
    low, high = box(samples)
    if chosen.kind == "kernel":
        estimate = Ratio(model.folds, Kernel(chosen.length), field.points, field.scale)
    elif chosen.kind == "full":
        estimate = Ratio(model.folds, field.localizer, field.points, field.scale)
    elif field.sorted is not None:
        estimate = _Sorted(field)
    else:  # the density alone is asked for
        folds, fraction = some_episodes(model.folds, max(1000, _DENSITY_POINTS // samples.num_times))
        estimate = Ratio(
            folds, field.localizer, to_device(fraction * float(field.points), samples.x.dtype), field.scale
        )

    # Under a kernel the model's variance is added in full to that of the kernel average: a kernel is taken where the
    # two estimates differ by more than expected, once in ten times by chance, and what was selected so is less certain
    # than it looks. The whole correction does not depend on the model.
    def variance(points: Float[np.ndarray, "n d"]) -> Float[np.ndarray, "n d"]:
        return np.zeros_like(points) if chosen.kind == "full" else model.variance(points) + float(chosen.doubt) ** 2

    return make_table(model.whole, estimate, field.tail, low, high, variance=variance, corrects=chosen.kind != "none")
