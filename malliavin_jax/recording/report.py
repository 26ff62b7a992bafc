"""Do recorded episodes look like the learner they are said to come from?

The learner moves by X_{k+1} − X_k = −ε g_k + σ ξ_{k+1} with σ² = 2ε/β, so that every recorded step shows its noise,
the residual r_k = X_{k+1} − X_k + ε g_k. Whatever the loss, the residuals must be white, Gaussian, of variance 2ε/β and
uncorrelated with the gradient used; and the weights that are built of them must integrate by parts: E[S] = 0 and
E[S_i X_j] = 1{i = j} (means over the episodes that are observed at a step).
"""

import dataclasses
import math
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from ..samples.default_scheme import default_scheme
from ..samples.hessians import secant_slopes
from ..samples.recorded import stops_of, weigh_at
from ..samples.samples import Samples
from .recording import Recording
from .residuals import (
    SIGNIFICANT,
    TOLERATED_INTEGRATION_BY_PARTS,
    Block,
    LearnerReport,
    ResidualSums,
    Settings,
    findings_of,
)
from .weighing import Part, paths_of

_BLOCK = 1 << 21  # numbers held at a time
_LEARNERS = 64
_WEIGHED = 20_000  # episodes whose weights are looked at
_ENOUGH = 100  # episodes observed at a step, for a mean over them to say something


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
        findings: a sentence for each thing that does not fit, with its numbers; none: the data fit the learner.

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
                f"  step size            recorded {_or(one.step_size)}, from the moves "
                f"{one.step_size_estimate:.5g} ± {one.step_size_stderr:.2g}",
                f"  inverse temperature  recorded {_or(one.inverse_temperature)}, from the residuals "
                f"{one.inverse_temperature_estimate:.5g} ± {one.inverse_temperature_stderr:.2g}",
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
                f"(1 expected), largest |mean S| at {self.weight_mean_z:.1f} standard errors"
            )
        lines += [f"! {finding}" for finding in self.findings] or ["the data fit the learner"]
        return "\n".join(lines)


def consistency(recording: Recording, samples: Samples | None = None) -> Consistency:
    """Hold a recording against the law of its learner, in two passes of bounded memory; warn about each finding.

    A finding is a deviation that is both significant (5 standard errors) and large enough to matter (2 % of the
    variance or of the step size, 0.1 of skewness or kurtosis, 0.02 of correlation, 5 % of integration by parts).

    Args:
        recording: the episodes.
        samples: of the same recording, if they are made already: their weights are then looked at, at their
            conditioning times. Without them the first episodes, up to 20 000, are weighed at a quarter, a half and the
            whole of the median number of steps.

    Returns:
        The report: what was recorded beside what the steps show, and the findings.

    Raises:
        ValueError: if the recording holds more than 64 different learners, or if `samples` are of another dimension.

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
    if samples is not None and samples.dim != recording.dim:
        raise ValueError(f"samples must have the dimension of the recording, {recording.dim}, got {samples.dim}")
    learners = _learner_reports(recording)
    findings = [f"learner {number}: {text}" for number, one in enumerate(learners) for text in findings_of(one)]
    samples = _weighed(recording) if samples is None else samples
    parts = None if samples is None else _integration_by_parts(samples)
    if parts is not None:
        findings += parts.findings()
    for finding in findings:
        warnings.warn(finding, RuntimeWarning, stacklevel=2)
    return Consistency(
        learners=learners,
        weight_mean_z=None if parts is None else parts.weight_mean_z,
        integration_by_parts=None if parts is None else parts.value,
        integration_by_parts_stderr=None if parts is None else parts.stderr,
        findings=tuple(findings),
    )


class Learners(NamedTuple):
    """The different settings in a recording, and the number of each episode's among them."""

    settings: tuple[Settings, ...]
    member: np.ndarray


class IntegrationByParts(NamedTuple):
    """The largest |mean S| in standard errors, and the worst E[S·X]/d with its standard error."""

    weight_mean_z: float
    value: float
    stderr: float

    def findings(self) -> Iterator[str]:
        gap = abs(self.value - 1)
        if self.weight_mean_z > SIGNIFICANT or gap > max(SIGNIFICANT * self.stderr, TOLERATED_INTEGRATION_BY_PARTS):
            yield (
                f"the weights do not integrate by parts: E[S·X]/d is {self.value:.3g} ± {self.stderr:.1g} (1 "
                f"expected), the largest |mean S| is {self.weight_mean_z:.1f} standard errors (0 expected): episodes "
                "that end because of where they are, Hessians that are not the learner's, or a wrong step size or "
                "temperature; see short_localizer"
            )


def _learner_reports(recording: Recording) -> tuple[LearnerReport, ...]:
    """The residuals of each learner, in two passes: the step size that the moves show, then the residuals."""
    settings, member = _learners(recording)
    sums = [ResidualSums() for _ in settings]
    for start, block in _blocks(recording):
        for number, total in enumerate(sums):
            total.add_moves(block.of(member[start : start + len(block.x)] == number))
    step_sizes = [
        total.slope() if one.step_size is None else one.step_size for one, total in zip(settings, sums, strict=True)
    ]
    for start, block in _blocks(recording):
        for number, (step_size, total) in enumerate(zip(step_sizes, sums, strict=True)):
            total.add_residuals(block.of(member[start : start + len(block.x)] == number), step_size)
    return tuple(
        total.report(int(np.sum(member == number)), one, step_size)
        for number, (one, step_size, total) in enumerate(zip(settings, step_sizes, sums, strict=True))
    )


def _learners(recording: Recording) -> Learners:
    values = {"step_size": recording.step_size, "inverse_temperature": recording.inverse_temperature}
    recorded = {name: value for name, value in values.items() if value is not None}
    if recording.step_size is not None and recording.step_size.ndim == 2:
        raise ValueError(
            "recording must have one step_size for each episode for consistency, and has a schedule of them, "
            f"of shape {recording.step_size.shape}: hold the parts of even step size against it one by one"
        )
    if all(value.ndim == 0 for value in recorded.values()):
        one = Settings(**{name: float(value) for name, value in recorded.items()})
        return Learners((one,), np.broadcast_to(0, recording.num_episodes))
    each = np.stack([np.broadcast_to(value, recording.num_episodes) for value in recorded.values()], 1)
    kinds, member = np.unique(each, axis=0, return_inverse=True)
    if len(kinds) > _LEARNERS:
        raise ValueError(f"recording must hold at most {_LEARNERS} different learners, got {len(kinds)}")
    settings = (Settings(**dict(zip(recorded, kind.tolist(), strict=True))) for kind in kinds)
    return Learners(tuple(settings), member.reshape(-1))


def _blocks(recording: Recording) -> Iterator[tuple[int, Block]]:
    """All episodes in blocks of bounded memory, each with the number of its first episode."""
    block = max(1, _BLOCK // ((recording.num_steps + 1) * recording.dim))
    for start in range(0, recording.num_episodes, block):
        part = recording.part(start, start + block, hessian=False)
        x, gradient = part["x"].astype(np.float64), part["gradient"].astype(np.float64)
        yield start, Block(x, gradient, part["last_steps"])


def _weighed(recording: Recording) -> Samples | None:
    """The first episodes, weighed at a few steps; None if they cannot be."""
    if recording.step_size is None or recording.inverse_temperature is None:
        return None
    episodes = max(2, min(_WEIGHED, _BLOCK // (recording.num_steps + 1) // recording.dim**2))
    part = recording.part(0, episodes)
    longest = int(np.median(part["last_steps"]))
    if longest < 1 or not _has_hessians(part):
        return None
    steps = sorted({max(1, round(longest * share)) for share in (0.25, 0.5, 1.0)})
    paths = paths_of(part)
    episodes, points, _ = part["x"].shape
    stops = stops_of(times=None, steps=steps, step_size=part["step_size"], episodes=episodes, points=points)
    return weigh_at(paths, default_scheme(paths), stops)


def _has_hessians(part: Part) -> bool:
    """Whether Hessians are recorded, or secants would serve: in one dimension, if the gradients are not too noisy."""
    if "hessian" in part:
        return True
    if part["x"].shape[2] > 1:
        return False
    slopes = secant_slopes(part["x"], part["gradient"], part["last_steps"])
    return slopes is None or not slopes.noisy


def _integration_by_parts(samples: Samples) -> IntegrationByParts | None:
    """Of the first samples; None if too few of them are observed, or if the chain is too coarse for the weights."""
    x, weight = (np.asarray(leaf[:_WEIGHED], np.float64) for leaf in (samples.x, samples.weight))
    observed = np.asarray(samples.observed[:_WEIGHED])
    if not np.all(np.isfinite(weight[observed])):
        return None
    worst_z, worst = 0.0, None
    for time in range(samples.num_times):
        s, y = weight[observed[:, time], time], x[observed[:, time], time]
        if len(s) < _ENOUGH:
            continue
        scale = math.sqrt(len(s))
        worst_z = max(worst_z, float(np.max(np.abs(s.mean(0)) / (s.std(0) / scale + 1e-300))))
        # Centred, the products vary less, and E[S] = 0 makes the centre irrelevant.
        products = np.mean(s * (y - y.mean(0)), 1)
        mean, stderr = float(products.mean()), float(products.std() / scale)
        if worst is None or abs(mean - 1) / stderr > abs(worst.value - 1) / worst.stderr:
            worst = IntegrationByParts(worst_z, mean, stderr)
    return None if worst is None else worst._replace(weight_mean_z=worst_z)


def _or(value: float | None) -> str:
    return "nowhere" if value is None else f"{value:.5g}"
