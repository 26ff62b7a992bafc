"""The residuals of a recorded learner, X_{k+1} − X_k + ε g_k, and what is odd about them (see `consistency`)."""

import dataclasses
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

SIGNIFICANT = 5.0  # standard errors beyond which chance is no explanation

# A deviation of less than this does no harm to an estimate, however significant it is.
TOLERATED_STEP_SIZE = 0.02  # relative
TOLERATED_VARIANCE = 0.02  # relative
TOLERATED_SHAPE = 0.1  # skewness, kurtosis
TOLERATED_CORRELATION = 0.02
TOLERATED_INTEGRATION_BY_PARTS = 0.05  # of E[S·X]/d, which is 1

_TINY = np.finfo(float).tiny


class Settings(NamedTuple):
    """Step size and inverse temperature of a learner as recorded, None where they are not."""

    step_size: float | None = None
    inverse_temperature: float | None = None


@dataclasses.dataclass(frozen=True)
class LearnerReport:
    """The residuals of the episodes that share a step size and a temperature; every `_stderr` is a standard error.

    Attributes:
        episodes: how many episodes.
        steps: how many steps in all.
        step_size: as recorded, or None.
        inverse_temperature: as recorded, or None.
        step_size_estimate: −Σ ΔX·g / Σ|g|², the regression of the moves on the recorded gradients.
        step_size_stderr: its standard error.
        inverse_temperature_estimate: 2ε / (mean squared residual), with ε as recorded, or else estimated.
        inverse_temperature_stderr: its standard error.
        variance_ratio: mean squared residual over 2ε/β; 1 expected. None unless both were recorded.
        variance_ratio_stderr: its standard error.
        skewness: of the residuals; 0 expected.
        skewness_stderr: its standard error.
        kurtosis: of the residuals, less 3; 0 expected.
        kurtosis_stderr: its standard error.
        autocorrelation: of successive residuals of an episode; 0 expected.
        autocorrelation_stderr: its standard error.
        next_gradient_gain: by how much the mean squared residual shrinks when row k + 1 of the gradient takes the
            place of row k, relatively: positive where the gradients are logged one row late.
        next_gradient_gain_stderr: its standard error.

    Example:
        ```python
        import jax
        import malliavin_jax as mj

        loss = mj.potentials.Quartic()
        learner = mj.ForwardLearner(loss, mj.initial.Normal(), step_size=0.01, gradient_noise=0.5)
        paths = jax.jit(jax.vmap(lambda key: mj.simulate(key, learner, 80)))(jax.random.split(jax.random.key(0), 500))
        recording = mj.Recording(paths.x, paths.gradient, paths.hessian, step_size=0.01, inverse_temperature=1.0)
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


class Block(NamedTuple):
    """Some episodes in float64, and the number of steps that each made."""

    x: np.ndarray
    gradient: np.ndarray
    last_steps: np.ndarray

    def of(self, mine: np.ndarray) -> "Block":
        """Those episodes that are flagged."""
        return Block(self.x[mine], self.gradient[mine], self.last_steps[mine])


class Steps(NamedTuple):
    """Moves, the gradients used for them, and which of them the episodes made; zero where they did not."""

    moves: np.ndarray
    gradients: np.ndarray
    made: np.ndarray


@dataclasses.dataclass
class PowerSums:
    """Sums of the powers of the residuals, over all steps and coordinates."""

    number: float = 0.0
    first: float = 0.0
    second: float = 0.0
    third: float = 0.0
    fourth: float = 0.0

    def add(self, residuals: np.ndarray) -> None:
        square = residuals * residuals  # not **: NumPy's powers above 2 are slow
        self.number += residuals.size
        self.first += float(np.sum(residuals))
        self.second += float(np.sum(square))
        self.third += float(np.sum(square * residuals))
        self.fourth += float(np.sum(square * square))


class ResidualSums:
    """Sums over the steps of one learner; all coordinates count alike."""

    def __init__(self):
        self.steps = 0
        self.gradient_squares = 0.0
        self.moves_with_gradients = 0.0
        self.powers = PowerSums()
        self.pairs = 0  # of successive residuals
        self.pair_products = 0.0
        self.gain = 0.0
        self.gain_squares = 0.0

    def add_moves(self, block: Block) -> None:
        """First pass: what the regression of the moves on the gradients needs."""
        steps = _steps(block)
        moves, gradients = steps.moves[steps.made], steps.gradients[steps.made]
        self.steps += int(np.sum(steps.made))
        self.gradient_squares += float(np.sum(gradients**2))
        self.moves_with_gradients += float(np.sum(gradients * moves))

    def slope(self) -> float:
        """The step size that the moves show; NaN without gradients."""
        return -self.moves_with_gradients / self.gradient_squares if self.gradient_squares > 0 else math.nan

    def add_residuals(self, block: Block, step_size: float) -> None:
        """Second pass: the residuals at this step size."""
        steps = _steps(block)
        residual = np.where(steps.made[..., None], steps.moves + step_size * steps.gradients, 0)
        self.powers.add(residual[steps.made])
        both = steps.made[:, 1:]
        self.pairs += int(np.sum(both)) * block.x.shape[2]
        self.pair_products += float(np.sum((residual[:, 1:] * residual[:, :-1])[both]))
        # The gradient of the last row is compared only where the step after it is recorded as well.
        late = steps.moves[:, :-1] + step_size * np.where(both[..., None], steps.gradients[:, 1:], 0)
        gain = residual[:, :-1][both] ** 2 - late[both] ** 2
        self.gain += float(np.sum(gain))
        self.gain_squares += float(np.sum(gain**2))

    def report(self, episodes: int, recorded: Settings, step_size: float) -> LearnerReport:
        """What the sums say; `step_size` is the one behind the residuals, recorded or estimated."""
        n = max(self.powers.number, 1)
        mean, second = self.powers.first / n, self.powers.second / n
        third, fourth = self.powers.third / n, self.powers.fourth / n
        variance = max(second - mean**2, _TINY)
        slope_stderr = math.sqrt(second / self.gradient_squares) if self.gradient_squares > 0 else math.inf
        beta = 2 * step_size / max(second, _TINY)
        from_slope = 0 if recorded.step_size is not None else slope_stderr / abs(step_size)
        ratio = ratio_stderr = None
        if recorded.step_size is not None and recorded.inverse_temperature is not None:
            ratio = second * recorded.inverse_temperature / (2 * recorded.step_size)
            ratio_stderr = math.sqrt(2 / n)
        pairs = max(self.pairs, 1)
        scale = pairs * second
        return LearnerReport(
            episodes=episodes,
            steps=self.steps,
            step_size=recorded.step_size,
            inverse_temperature=recorded.inverse_temperature,
            step_size_estimate=self.slope(),
            step_size_stderr=slope_stderr,
            inverse_temperature_estimate=beta,
            inverse_temperature_stderr=abs(beta) * math.hypot(math.sqrt(2 / n), from_slope),
            variance_ratio=ratio,
            variance_ratio_stderr=ratio_stderr,
            skewness=float((third - 3 * mean * second + 2 * mean**3) / variance**1.5),
            skewness_stderr=math.sqrt(6 / n),
            kurtosis=float((fourth - 4 * mean * third + 6 * mean**2 * second - 3 * mean**4) / variance**2 - 3),
            kurtosis_stderr=math.sqrt(24 / n),
            autocorrelation=self.pair_products / scale if second > 0 else 0.0,
            autocorrelation_stderr=1 / math.sqrt(pairs),
            next_gradient_gain=self.gain / scale if second > 0 else 0.0,
            next_gradient_gain_stderr=math.sqrt(self.gain_squares) / scale if second > 0 else 0.0,
        )


def findings_of(one: LearnerReport) -> Iterator[str]:
    """A sentence for each thing about the residuals that does not fit the learner."""
    if one.step_size is not None:
        gap = one.step_size_estimate - one.step_size
        if abs(gap) > max(SIGNIFICANT * one.step_size_stderr, TOLERATED_STEP_SIZE * one.step_size):
            yield (
                f"the recorded gradient is not the one the learner used, or the step size is wrong: regressing the "
                f"moves on it gives a step size of {one.step_size_estimate:.4g} ± {one.step_size_stderr:.1g}, "
                f"recorded is {one.step_size:.4g}"
            )
    if one.variance_ratio is not None and one.variance_ratio_stderr is not None:
        gap = one.variance_ratio - 1
        if abs(gap) > max(SIGNIFICANT * one.variance_ratio_stderr, TOLERATED_VARIANCE):
            yield (
                f"the residual variance is {one.variance_ratio:.4g} ± {one.variance_ratio_stderr:.1g} times 2ε/β: the "
                "temperature or the step size is wrong, or the learner used another gradient than the recorded one "
                "(a minibatch's, say)"
            )
    if one.next_gradient_gain > max(SIGNIFICANT * one.next_gradient_gain_stderr, TOLERATED_VARIANCE):
        yield (
            f"the gradient of row k + 1 explains the move from row k better than that of row k (mean squared residual "
            f"{100 * one.next_gradient_gain:.3g} % smaller): are the gradients one row late?"
        )
    for name, what, value, stderr, tolerated in (
        ("skewness", "Gaussian", one.skewness, one.skewness_stderr, TOLERATED_SHAPE),
        ("kurtosis", "Gaussian", one.kurtosis, one.kurtosis_stderr, TOLERATED_SHAPE),
        ("autocorrelation", "white", one.autocorrelation, one.autocorrelation_stderr, TOLERATED_CORRELATION),
    ):
        if abs(value) > max(SIGNIFICANT * stderr, tolerated):
            yield f"the residuals are not {what}: their {name} is {value:.3g} ± {stderr:.1g}, expected 0"


def _steps(block: Block) -> Steps:
    made = np.arange(1, block.x.shape[1])[None, :] <= block.last_steps[:, None]
    moves, gradients = (
        np.where(made[..., None], array, 0) for array in (np.diff(block.x, axis=1), block.gradient[:, :-1])
    )
    return Steps(moves, gradients, made)
