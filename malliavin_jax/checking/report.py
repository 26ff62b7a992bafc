"""Do recorded episodes look like the learner they are said to come from?

The learner moves by X_{k+1} − X_k = −ε g_k + σ ξ_{k+1} with σ² = 2ε/β, so that every recorded step shows its noise,
the residual r_k = X_{k+1} − X_k + ε g_k. Whatever the loss, the residuals must be white, Gaussian, of variance 2ε/β and
uncorrelated with the gradient used and with those before; the Hessians must be those of the gradients; and the weights
that are built of them must integrate by parts: E[S] = 0 and E[S_i X_j] = 1{i = j} (means over the episodes that are
observed at a step).
"""

import dataclasses
import math
import warnings
from typing import Any, Literal

from .._base.checks import described
from ..samples.samples import Samples
from .identities import hessian_fit, integration_by_parts, weighed
from .learners import Log, first_episodes, learner_reports
from .residuals import LearnerReport

Check = Literal["error", "warn", "off"]


@dataclasses.dataclass(frozen=True)
class Consistency:
    """What `consistency` found.

    Attributes:
        learners: one `LearnerReport` for each pair of step size and temperature that was recorded.
        weight_mean_z: the largest |mean S|, over components and conditioning steps, in standard errors (4 is rare);
            None where no weights can be had.
        integration_by_parts: the mean over components of E[S_i X_i], at the conditioning step where it is worst; 1
            expected; None where no weights can be had.
        integration_by_parts_stderr: its standard error.
        entry_z: how far the worst entry of E[S_i X_j] is from 1{i = j}, in standard errors; None likewise.
        hessian_z: how far the worst entry of the mean Hessian is from what the gradients show, in standard errors; None
            without recorded Hessians.
        findings: a sentence for each thing that does not fit, with its numbers and what to do; none: the data fit the
            learner. A cause is reported in place of its symptoms.

    Example:
        ```python
        import jax
        import malliavin_jax as mj

        loss = mj.potentials.Quartic()
        learner = mj.ForwardLearner(loss, mj.initial.Normal(), step_size=0.01, gradient_noise=0.5)
        paths = jax.jit(jax.vmap(lambda key: mj.simulate(key, learner, 80)))(jax.random.split(jax.random.key(0), 500))
        recording = mj.Recording(paths.x, paths.gradient, paths.hessian, step_size=0.01, inverse_temperature=1.0)
        print(mj.consistency(recording))  # what was recorded beside what the steps show
        ```
    """

    learners: tuple[LearnerReport, ...]
    weight_mean_z: float | None
    integration_by_parts: float | None
    integration_by_parts_stderr: float | None
    entry_z: float | None
    hessian_z: float | None
    findings: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether the data fit the learner."""
        return not self.findings

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**dataclasses.asdict(self), "ok": self.ok}

    def __str__(self) -> str:
        lines = []
        for number, one in enumerate(self.learners):
            lines += [
                f"learner {number}: {one.episodes} episodes, {one.steps} steps",
                f"  step size            recorded {_or(one.step_size)}"
                + _by("moves", one.step_size_estimate, one.step_size_stderr),
                f"  inverse temperature  recorded {_or(one.inverse_temperature)}"
                + _by("residuals", one.inverse_temperature_estimate, one.inverse_temperature_stderr),
            ]
            if one.variance_ratio is not None:
                lines.append(
                    f"  residual variance    {one.variance_ratio:.4f} ± {one.variance_ratio_stderr:.2g} of 2ε/β"
                )
            lines.append(
                f"  residual shape       skewness {one.skewness:.3g} ± {one.skewness_stderr:.2g}, kurtosis "
                f"{one.kurtosis:.3g} ± {one.kurtosis_stderr:.2g}, autocorrelation {one.autocorrelation:.3g} ± "
                f"{one.autocorrelation_stderr:.2g}"
            )
        if self.integration_by_parts is not None:
            lines.append(
                f"weights: E[S·X]/d = {self.integration_by_parts:.3f} ± {self.integration_by_parts_stderr:.2g} "
                f"(1 expected), largest |mean S| at {self.weight_mean_z:.1f} standard errors, "
                f"worst entry of E[S_i X_j] at {self.entry_z:.1f}"
            )
        if self.hessian_z is not None:
            lines.append(f"Hessians: worst entry at {self.hessian_z:.1f} standard errors from what the gradients show")
        lines += [f"! {finding}" for finding in self.findings] or ["the data fit the learner"]
        return "\n".join(lines)


def consistency(recording: Log, samples: Samples | None = None) -> Consistency:
    """Hold a recording against the law of its learner, in two passes of bounded memory; warn about each finding.

    A finding is a deviation that is both significant (5 standard errors) and large enough to matter (2 % of the
    variance or of the step size, 0.1 of skewness or kurtosis, 0.02 of correlation, 5 % of a Hessian or of integration
    by parts). A cause is looked for and named in place of its symptoms: gradients of the wrong sign, a row late or
    early, on another scale or with a noise of their own; momentum; preconditioning; no noise at all; a step size in
    another convention; a wrong temperature; Hessians of something else; episodes that end because of where they are.
    Without Hessians all but the last two is checked; without gradients, that the mean squared move is 2ε/β, roughly.

    Args:
        recording: the episodes.
        samples: of the same recording, if they are made already: their weights are then looked at, at their
            conditioning times. Without them the first episodes, up to 20 000, are weighed at a quarter, a half and the
            whole of the median number of steps.

    Returns:
        The report: what was recorded beside what the steps show, and the findings.

    Raises:
        ValueError: if `recording` is none, if it holds more than 64 different learners, or if `samples` are of another
            dimension.

    Example:
        ```python
        import jax
        import malliavin_jax as mj

        loss = mj.potentials.Quartic()
        learner = mj.ForwardLearner(loss, mj.initial.Normal(), step_size=0.01, gradient_noise=0.5)
        paths = jax.jit(jax.vmap(lambda key: mj.simulate(key, learner, 80)))(jax.random.split(jax.random.key(0), 500))
        recording = mj.Recording(paths.x, paths.gradient, paths.hessian, step_size=0.01, inverse_temperature=1.0)
        report = mj.consistency(recording)
        report.ok, report.findings  # True, ()
        ```
    """
    if not callable(getattr(recording, "part", None)):
        remedy = "Recording(x, gradient, hessian, step_size=…, inverse_temperature=…) makes one"
        raise ValueError(f"recording must be a Recording, got {described(recording)}: {remedy}")
    if samples is not None and samples.dim != recording.dim:
        raise ValueError(f"samples must have the dimension of the recording, {recording.dim}, got {samples.dim}")
    checked_learners = learner_reports(recording)
    findings = [f"learner {number}: {text}" for number, (_, texts) in enumerate(checked_learners) for text in texts]
    known = recording.step_size is not None and recording.inverse_temperature is not None
    part = first_episodes(recording) if known else None
    hessian = None if part is None else hessian_fit(part)
    if samples is None and part is not None:
        samples = weighed(part)
    parts = None if samples is None else integration_by_parts(samples)
    if not findings:  # else these are symptoms
        findings = list(hessian.findings()) if hessian is not None else []
        findings = findings or (list(parts.findings(hessian is not None)) if parts is not None else [])
    for finding in findings:
        warnings.warn(finding, RuntimeWarning, stacklevel=2)
    return Consistency(
        learners=tuple(one for one, _ in checked_learners),
        weight_mean_z=None if parts is None else parts.weight_mean_z,
        integration_by_parts=None if parts is None else parts.value,
        integration_by_parts_stderr=None if parts is None else parts.stderr,
        entry_z=None if parts is None else parts.entry_z,
        hessian_z=None if hessian is None else hessian.z,
        findings=tuple(findings),
    )


def checked(recording: Log, check: Check = "error", *, samples: Samples | None = None) -> Consistency | None:
    """Hold a recording against the law of its learner before it is used.

    Args:
        recording: the episodes.
        check: "error" raises at findings, "warn" warns of each, "off" does not look.
        samples: as in `consistency`.

    Returns:
        The report of `consistency`; None if `check` is "off".

    Raises:
        ValueError: if `check` is none of these, or if it is "error" and the data do not fit the learner: the message
            holds the findings, each with what to do.

    Example:
        ```python
        import jax
        import malliavin_jax as mj

        loss = mj.potentials.Quartic()
        learner = mj.ForwardLearner(loss, mj.initial.Normal(), step_size=0.01, gradient_noise=0.5)
        paths = jax.jit(jax.vmap(lambda key: mj.simulate(key, learner, 80)))(jax.random.split(jax.random.key(0), 500))
        recording = mj.Recording(paths.x, paths.gradient, paths.hessian, step_size=0.01, inverse_temperature=1.0)
        mj.recording.checked(recording).ok  # True; an error, had the gradients the wrong sign
        ```
    """
    if check not in ("error", "warn", "off"):
        raise ValueError(f"check must be 'error', 'warn' or 'off', got {check!r}")
    if check == "off":
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what it warns of is raised or warned of here
        report = consistency(recording, samples)
    if check == "error" and not report.ok:
        raise ValueError(
            "the recording does not fit its learner: " + "; ".join(report.findings) + " (check='warn' goes on anyway)"
        )
    for finding in report.findings:
        warnings.warn(finding, RuntimeWarning, stacklevel=2)
    return report


def _or(value: float | None) -> str:
    return "nowhere" if value is None else f"{value:.5g}"


def _by(what: str, value: float, stderr: float) -> str:
    return f", from the {what} {value:.5g} ± {stderr:.2g}" if math.isfinite(value) else ", and not in the moves"
