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
from typing import Any

import numpy as np

from ..samples.recorded import samples_from_paths
from .recording import Recording
from .residuals import LARGE, SIGNIFICANT, LearnerReport, ResidualSums, findings_of

_BLOCK = 1 << 21  # numbers held at a time
_LEARNERS = 64
_WEIGHED = 20_000  # episodes whose weights are looked at


@dataclasses.dataclass(frozen=True)
class Consistency:
    """What `consistency` found.

    - `learners`: one `LearnerReport` for each pair of step size and temperature that was recorded.
    - `weight_mean_z`: the largest |mean S|, over components and conditioning steps, in standard errors (4 is rare).
    - `integration_by_parts`: the mean over components of E[S_i X_i], worst step; 1 expected; None without settings.
    - `findings`: a sentence for each thing that does not fit, with its numbers; none: the data fit the learner.

    ```python
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


def consistency(recording: Recording) -> Consistency:
    """Hold a recording against the law of its learner, in two passes of bounded memory; warn about each finding.

    A finding is a deviation that is both significant (5 standard errors) and large enough to matter (2 % of the
    variance or of the step size, 0.1 of skewness or kurtosis, 0.02 of correlation, 5 % of integration by parts).

    ```python
    report = mj.consistency(recording)
    report.ok, report.findings  # True, ()
    ```
    """
    kinds, member = _learners(recording)
    if len(kinds) > _LEARNERS:
        raise ValueError(f"recording must hold at most {_LEARNERS} different learners, got {len(kinds)}")
    sums = [ResidualSums() for _ in kinds]
    for start, x, gradient, lengths in _blocks(recording):
        for number, total in enumerate(sums):
            mine = member[start : start + len(x)] == number
            total.add_moves(x[mine], gradient[mine], lengths[mine])
    sizes = [float(kind[0]) or total.slope() for kind, total in zip(kinds, sums, strict=True)]
    for start, x, gradient, lengths in _blocks(recording):
        for number, (size, total) in enumerate(zip(sizes, sums, strict=True)):
            mine = member[start : start + len(x)] == number
            total.add_residuals(x[mine], gradient[mine], lengths[mine], size)
    learners = tuple(
        total.report(int(np.sum(member == number)), float(kind[0]), float(kind[1]), size)
        for number, (kind, size, total) in enumerate(zip(kinds, sizes, sums, strict=True))
    )
    findings = [f"learner {number}: {text}" for number, one in enumerate(learners) for text in findings_of(one)]
    parts = _integration_by_parts(recording)
    findings += _findings_of_weights(*parts)
    report = Consistency(learners, *parts, tuple(findings))
    for finding in findings:
        warnings.warn(finding, RuntimeWarning, stacklevel=2)
    return report


def _integration_by_parts(recording: Recording) -> tuple[float | None, float | None, float | None]:
    """The largest |mean S| in standard errors, and the worst E[S·X]/d with its standard error, over a few steps."""
    settings = recording.step_size is None or recording.inverse_temperature is None
    if settings or (not recording.has_hessian and recording.dim > 1):
        return None, None, None
    part = recording.part(0, max(2, min(_WEIGHED, _BLOCK // (recording.num_steps + 1) // recording.dim**2)))
    longest = int(np.median(part["lengths"]))
    steps = sorted({max(1, round(longest * share)) for share in (0.25, 0.5, 1.0)})
    if longest < 1:
        return None, None, None
    try:
        samples = samples_from_paths(**part, steps=steps)
    except ValueError:  # no Hessians, and gradients too noisy for secants: samples_from_paths says so when asked
        return None, None, None
    x, weight, observed = (np.asarray(leaf, np.float64) for leaf in (samples.x, samples.weight, samples.observed))
    worst_z, worst = 0.0, (1.0, math.inf)
    for time in range(len(steps)):
        seen = observed[:, time] > 0
        s, y = weight[seen, time], x[seen, time]
        if len(s) < 100:
            continue
        scale = math.sqrt(len(s))
        worst_z = max(worst_z, float(np.max(np.abs(s.mean(0)) / (s.std(0) / scale + 1e-300))))
        # Centred, the products vary less, and E[S] = 0 makes the centre irrelevant.
        products = np.mean(s * (y - y.mean(0)), 1)
        mean, stderr = float(products.mean()), float(products.std() / scale)
        if worst[1] == math.inf or abs(mean - 1) / stderr > abs(worst[0] - 1) / worst[1]:
            worst = (mean, stderr)
    return (None, None, None) if worst[1] == math.inf else (worst_z, *worst)


def _findings_of_weights(z: float | None, value: float | None, stderr: float | None) -> Iterator[str]:
    if z is None or value is None or stderr is None:
        return
    if z > SIGNIFICANT or abs(value - 1) > max(SIGNIFICANT * stderr, LARGE["parts"]):
        yield (
            f"the weights do not integrate by parts: E[S·X]/d is {value:.3g} ± {stderr:.1g} (1 expected), the largest "
            f"|mean S| is {z:.1f} standard errors (0 expected): episodes that end because of where they are, Hessians "
            "that are not the learner's, or a wrong step size or temperature; see short_localizer"
        )


def _learners(recording: Recording) -> tuple[np.ndarray, np.ndarray]:
    """The pairs (step size, inverse temperature), 0 where not recorded, and the number of each episode's pair."""
    values = (recording.step_size, recording.inverse_temperature)
    known = [np.asarray(0.0 if value is None else value) for value in values]
    if all(value.ndim == 0 for value in known):
        return np.stack(known)[None], np.broadcast_to(0, recording.num_episodes)
    each = np.stack([np.broadcast_to(value, recording.num_episodes) for value in known], 1)
    kinds, member = np.unique(each, axis=0, return_inverse=True)
    return kinds, member.reshape(-1)


def _blocks(recording: Recording) -> Iterator[tuple[int, np.ndarray, np.ndarray, np.ndarray]]:
    size = max(1, _BLOCK // ((recording.num_steps + 1) * recording.dim))
    for start in range(0, recording.num_episodes, size):
        part = recording.part(start, start + size, hessian=False)
        yield start, part["x"].astype(np.float64), part["gradient"].astype(np.float64), part["lengths"]


def _or(value: float | None) -> str:
    return "nowhere" if value is None else f"{value:.5g}"
