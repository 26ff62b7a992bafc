"""The residuals of a recorded learner, X_{k+1} − X_k + ε g_k, and what is odd about them (see `consistency`)."""

import dataclasses
import math
from collections.abc import Iterator

import numpy as np

SIGNIFICANT = 5.0  # standard errors beyond which chance is no explanation
LARGE = {"variance": 0.02, "step size": 0.02, "shape": 0.1, "correlation": 0.02, "parts": 0.05}  # less, nobody minds


@dataclasses.dataclass(frozen=True)
class LearnerReport:
    """The residuals of the episodes that share a step size and a temperature; every `_stderr` is a standard error.

    - `step_size`, `inverse_temperature`: as recorded, or None.
    - `step_size_estimate`: −Σ ΔX·g / Σ|g|², the regression of the moves on the recorded gradients.
    - `inverse_temperature_estimate`: 2ε / (mean squared residual), with ε as recorded, or else estimated.
    - `variance_ratio`: mean squared residual over 2ε/β; 1 expected. None unless both were recorded.
    - `skewness`, `kurtosis` (less 3): 0 expected.
    - `autocorrelation`: of successive residuals of an episode; 0 expected.
    - `next_gradient_gain`: by how much the mean squared residual shrinks when row k + 1 of the gradient takes the
      place of row k, relatively: positive where the gradients are logged one row late.

    ```python
    (one,) = mj.consistency(recording).learners
    one.step_size_estimate  # near 0.01, which was recorded
    ```
    """

    episodes: int
    steps: int
    step_size: float | None
    inverse_temperature: float | None
    step_size_estimate: float
    step_size_stderr: float
    inverse_temperature_estimate: float
    inverse_temperature_stderr: float
    variance_ratio: float | None
    variance_ratio_stderr: float | None
    skewness: float
    skewness_stderr: float
    kurtosis: float
    kurtosis_stderr: float
    autocorrelation: float
    autocorrelation_stderr: float
    next_gradient_gain: float
    next_gradient_gain_stderr: float


class ResidualSums:
    """Sums over the steps of one learner; all coordinates count alike."""

    def __init__(self):
        self.steps = self.pairs = 0
        self.gg = self.xg = self.lagged = self.gain = self.gain_squares = 0.0
        self.powers = np.zeros(5)

    def add_moves(self, x: np.ndarray, g: np.ndarray, lengths: np.ndarray) -> None:
        moves, used, seen = _steps(x, g, lengths)
        self.steps += int(np.sum(seen))
        self.gg += float(np.sum(used[seen] ** 2))
        self.xg += float(np.sum(used[seen] * moves[seen]))

    def slope(self) -> float:
        return -self.xg / self.gg if self.gg > 0 else math.nan

    def add_residuals(self, x: np.ndarray, g: np.ndarray, lengths: np.ndarray, size: float) -> None:
        moves, used, seen = _steps(x, g, lengths)
        residual = np.where(seen[..., None], moves + size * used, 0)
        flat = residual[seen]
        square = flat * flat  # not **: NumPy's powers above 2 are slow
        sums = (flat.size, np.sum(flat), np.sum(square), np.sum(square * flat), np.sum(square * square))
        self.powers += np.asarray(sums, np.float64)
        both = seen[:, 1:]
        self.pairs += int(np.sum(both)) * x.shape[2]
        self.lagged += float(np.sum((residual[:, 1:] * residual[:, :-1])[both]))
        # The gradient of the last row is compared only where the step after it is recorded as well.
        late = moves[:, :-1] + size * np.where(both[..., None], used[:, 1:], 0)
        gain = residual[:, :-1][both] ** 2 - late[both] ** 2
        self.gain += float(np.sum(gain))
        self.gain_squares += float(np.sum(gain**2))

    def report(self, episodes: int, step_size: float, beta: float, used: float) -> LearnerReport:
        """`step_size` and `beta` as recorded, 0 where they are not; `used` is the step size behind the residuals."""
        n = max(self.powers[0], 1)
        mean, second, third, fourth = self.powers[1:] / n
        variance = max(second - mean**2, np.finfo(float).tiny)
        skewness = (third - 3 * mean * second + 2 * mean**3) / variance**1.5
        kurtosis = (fourth - 4 * mean * third + 6 * mean**2 * second - 3 * mean**4) / variance**2 - 3
        slope_stderr = math.sqrt(second / self.gg) if self.gg > 0 else math.inf
        beta_hat = 2 * used / max(second, np.finfo(float).tiny)
        relative = math.hypot(math.sqrt(2 / n), 0 if step_size == used else slope_stderr / abs(used))
        known = step_size > 0 and beta > 0
        pairs = max(self.pairs, 1)
        return LearnerReport(
            episodes, self.steps, step_size or None, beta or None, self.slope(), slope_stderr,
            beta_hat, abs(beta_hat) * relative,
            second * beta / (2 * step_size) if known else None, math.sqrt(2 / n) if known else None,
            float(skewness), math.sqrt(6 / n), float(kurtosis), math.sqrt(24 / n),
            self.lagged / (pairs * second) if second > 0 else 0.0, 1 / math.sqrt(pairs),
            self.gain / (pairs * second) if second > 0 else 0.0,
            math.sqrt(self.gain_squares) / (pairs * second) if second > 0 else 0.0,
        )  # fmt: skip


def findings_of(one: LearnerReport) -> Iterator[str]:
    if one.step_size is not None:
        gap = one.step_size_estimate - one.step_size
        if abs(gap) > max(SIGNIFICANT * one.step_size_stderr, LARGE["step size"] * one.step_size):
            yield (
                f"the recorded gradient is not the one the learner used, or the step size is wrong: regressing the "
                f"moves on it gives a step size of {one.step_size_estimate:.4g} ± {one.step_size_stderr:.1g}, "
                f"recorded is {one.step_size:.4g}"
            )
    if one.variance_ratio is not None and one.variance_ratio_stderr is not None:
        gap = one.variance_ratio - 1
        if abs(gap) > max(SIGNIFICANT * one.variance_ratio_stderr, LARGE["variance"]):
            yield (
                f"the residual variance is {one.variance_ratio:.4g} ± {one.variance_ratio_stderr:.1g} times 2ε/β: the "
                "temperature or the step size is wrong, or the learner used another gradient than the recorded one "
                "(a minibatch's, say)"
            )
    if one.next_gradient_gain > max(SIGNIFICANT * one.next_gradient_gain_stderr, LARGE["variance"]):
        yield (
            f"the gradient of row k + 1 explains the move from row k better than that of row k (mean squared residual "
            f"{100 * one.next_gradient_gain:.3g} % smaller): are the gradients one row late?"
        )
    for name, what, least in (("skewness", "Gaussian", LARGE["shape"]), ("kurtosis", "Gaussian", LARGE["shape"]),
                              ("autocorrelation", "white", LARGE["correlation"])):  # fmt: skip
        value, stderr = getattr(one, name), getattr(one, f"{name}_stderr")
        if abs(value) > max(SIGNIFICANT * stderr, least):
            yield f"the residuals are not {what}: their {name} is {value:.3g} ± {stderr:.1g}, expected 0"


def _steps(x: np.ndarray, g: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Moves, the gradients used for them, and which of them the episodes made; zero where they did not."""
    seen = np.arange(1, x.shape[1])[None, :] <= lengths[:, None]
    moves, used = (np.where(seen[..., None], array, 0) for array in (np.diff(x, axis=1), g[:, :-1]))
    return moves, used, seen
