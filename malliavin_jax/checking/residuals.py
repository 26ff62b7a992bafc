"""The residuals of a recorded learner, X_{k+1} − X_k + ε g_k: sums over any number of episodes, and what they say."""

import dataclasses
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

SIGNIFICANT = 5.0  # standard errors beyond which chance is no explanation
LAGS = 8  # over which the autocorrelations are added up

# A deviation of less than this does no harm to an estimate, however significant it is.
TOLERATED_STEP_SIZE = 0.02  # relative
TOLERATED_VARIANCE = 0.02  # relative
TOLERATED_MOVES = 0.25  # relative, of the mean squared move, where there are no gradients to take away
TOLERATED_SHAPE = 0.1  # skewness, kurtosis
TOLERATED_CORRELATION = 0.02
TOLERATED_SUM = 0.05  # of the autocorrelations
TOLERATED_STILL = 0.01  # of the steps

_TINY = np.finfo(float).tiny


class Settings(NamedTuple):
    """Step size and inverse temperature of a learner as recorded, None where they are not."""

    step_size: float | None = None
    inverse_temperature: float | None = None


@dataclasses.dataclass(frozen=True)
class LearnerReport:
    """The residuals of the episodes that share a step size and a temperature; every `_stderr` is a standard error.

    Without recorded gradients the moves take the place of the residuals, and what needs gradients is NaN.

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
        autocorrelation_sum: of the autocorrelations at lags 1 to 8; 0 expected, more under momentum.
        autocorrelation_sum_stderr: its standard error.
        earlier_gradient: the correlation of a residual with the gradient of the row before; 0 expected.
        earlier_gradient_stderr: its standard error.
        coordinate_gap: of all coordinates, the largest relative deviation, in standard errors, of one's mean squared
            residual or step size from that of all; 4 is rare. 0 in one dimension.
        still: the share of steps that do not move at all.

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
    autocorrelation_sum: float
    autocorrelation_sum_stderr: float
    earlier_gradient: float
    earlier_gradient_stderr: float
    coordinate_gap: float
    still: float

    @property
    def settings(self) -> Settings:
        """What was recorded."""
        return Settings(self.step_size, self.inverse_temperature)


class Block(NamedTuple):
    """Some episodes in float64, and the number of steps that each made; `gradient` is zero where none is recorded.

    Under a schedule, `scale` (episodes, points) is each step size over that of the settings; else it is all ones.
    """

    x: np.ndarray
    gradient: np.ndarray
    last_steps: np.ndarray
    scale: np.ndarray

    def of(self, mine: np.ndarray) -> "Block":
        """Those episodes that are flagged."""
        return self if mine.all() else Block(*(array[mine] for array in self))


class Steps(NamedTuple):
    """Moves, the gradients used for them, and which of them the episodes made; zero where they did not."""

    moves: np.ndarray
    gradients: np.ndarray
    made: np.ndarray


class ResidualSums:
    """Sums over the steps of one learner, coordinate by coordinate."""

    def __init__(self, dim: int):
        self.steps = self.still = 0
        self.gradient_squares, self.moves_with_gradients, self.squares = np.zeros((3, dim))
        self.powers = np.zeros(4)  # sums of the first four powers of the residuals
        self.pairs, self.pair_products = np.zeros((2, LAGS))
        self.earlier, self.earlier_squares = 0.0, 0.0

    def add_moves(self, block: Block) -> None:
        """First pass: what the regression of the moves on the gradients needs."""
        steps = steps_of(block)
        moves, gradients = steps.moves[steps.made], steps.gradients[steps.made]
        self.steps += int(np.sum(steps.made))
        self.still += int(np.sum(np.all(moves == 0, -1)))
        self.gradient_squares += np.sum(gradients**2, 0)
        self.moves_with_gradients += np.sum(gradients * moves, 0)

    def slope(self) -> float:
        """The step size that the moves show; NaN without gradients."""
        total = float(np.sum(self.gradient_squares))
        return -float(np.sum(self.moves_with_gradients)) / total if total > 0 else math.nan

    def add_residuals(self, block: Block, step_size: float) -> None:
        """Second pass: the residuals at this step size."""
        steps = steps_of(block)
        gradients = steps.gradients if math.isfinite(step_size) else 0 * steps.gradients
        residual = np.where(steps.made[..., None], steps.moves + np.nan_to_num(step_size) * gradients, 0)
        squares = residual * residual  # not **: NumPy's powers above 2 are slow
        self.squares += np.sum(squares, (0, 1))
        self.powers += [np.sum(residual), np.sum(squares), np.sum(squares * residual), np.sum(squares * squares)]
        for lag in range(1, min(LAGS, residual.shape[1] - 1) + 1):
            self.pairs[lag - 1] += np.sum(steps.made[:, lag:]) * block.x.shape[2]
            self.pair_products[lag - 1] += np.sum(residual[:, lag:] * residual[:, :-lag])
        before = gradients[:, :-1][steps.made[:, 1:]]
        self.earlier += float(np.sum(residual[:, 1:][steps.made[:, 1:]] * before))
        self.earlier_squares += float(np.sum(before**2))

    def report(self, episodes: int, recorded: Settings, step_size: float) -> LearnerReport:
        """What the sums say; `step_size` is the one behind the residuals, recorded or estimated."""
        n = max(self.steps * len(self.squares), 1)
        mean, second, third, fourth = (self.powers / n).tolist()
        variance, total = max(second - mean**2, _TINY), float(np.sum(self.gradient_squares))
        slope_stderr = math.sqrt(second / total) if total > 0 else math.inf
        beta = 2 * step_size / max(second, _TINY)
        from_slope = 0 if recorded.step_size is not None else slope_stderr / abs(step_size)
        ratio = ratio_stderr = None
        if recorded.step_size is not None and recorded.inverse_temperature is not None:
            ratio = second * recorded.inverse_temperature / (2 * recorded.step_size)
            ratio_stderr = math.sqrt(2 / n)
        pairs = np.maximum(self.pairs, 1)
        correlations = self.pair_products / pairs / max(second, _TINY)
        earlier = math.sqrt(max(self.earlier_squares * second, _TINY))
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
            autocorrelation=float(correlations[0]),
            autocorrelation_stderr=float(1 / np.sqrt(pairs[0])),
            autocorrelation_sum=float(np.sum(correlations)),
            autocorrelation_sum_stderr=float(np.sqrt(np.sum((self.pairs > 0) / pairs))),
            # In units of the residuals' spread; each term has the variance second · g².
            earlier_gradient=self.earlier / earlier / math.sqrt(pairs[0]),
            earlier_gradient_stderr=float(1 / np.sqrt(pairs[0])),
            coordinate_gap=self._coordinate_gap(second),
            still=self.still / max(self.steps, 1),
        )

    def _coordinate_gap(self, second: float) -> float:
        """In standard errors, of what exceeds the tolerance."""
        if len(self.squares) == 1 or self.steps == 0 or second == 0:
            return 0.0
        ratio = self.squares / self.steps / second
        gaps = np.where(abs(ratio - 1) > TOLERATED_VARIANCE, abs(ratio - 1) / math.sqrt(2 / self.steps), 0)
        known = self.gradient_squares > 0
        if known.any():
            slopes = -self.moves_with_gradients[known] / self.gradient_squares[known]
            gap = abs(slopes - self.slope())
            stderr = np.sqrt(second / self.gradient_squares[known])
            gaps = np.append(gaps, np.where(gap > TOLERATED_STEP_SIZE * abs(self.slope()), gap / stderr, 0))
        return float(np.max(gaps))


def deviations(one: LearnerReport) -> Iterator[str]:
    """A sentence for each number that is not as the law of the learner has it, whatever the cause."""
    if one.step_size is not None:
        gap = one.step_size_estimate - one.step_size
        if abs(gap) > max(SIGNIFICANT * one.step_size_stderr, TOLERATED_STEP_SIZE * one.step_size):
            yield (
                "the recorded gradient is not the one the learner used, or the step size is wrong: regressing the "
                f"moves on it gives a step size of {one.step_size_estimate:.4g} ± {one.step_size_stderr:.1g}, "
                f"recorded is {one.step_size:.4g}"
            )
    ratio, stderr = one.variance_ratio, one.variance_ratio_stderr
    if ratio is not None and stderr is not None and abs(ratio - 1) > max(SIGNIFICANT * stderr, TOLERATED_VARIANCE):
        yield (
            f"the residual variance is {ratio:.4g} ± {stderr:.1g} times 2ε/β: the temperature or the step size is "
            "wrong, or the learner used another gradient than the recorded one (a minibatch's, say)"
        )
    if one.step_size is None and one.step_size_estimate < -SIGNIFICANT * one.step_size_stderr:
        yield f"the moves climb the recorded gradients: their step size is {one.step_size_estimate:.4g}"
    yield from shapes(one)
    for what, value, stderr, tolerated in (
        ("autocorrelation", one.autocorrelation, one.autocorrelation_stderr, TOLERATED_CORRELATION),
        ("autocorrelations at lags 1 to 8 add up: it", one.autocorrelation_sum, one.autocorrelation_sum_stderr,
         TOLERATED_SUM),
        ("correlation with the gradient before", one.earlier_gradient, one.earlier_gradient_stderr,
         TOLERATED_CORRELATION),
    ):  # fmt: skip
        if abs(value) > max(SIGNIFICANT * stderr, tolerated):
            yield f"the residuals are not white: their {what} is {value:.3g} ± {stderr:.1g}, expected 0"
            break  # the others say the same
    if one.coordinate_gap > SIGNIFICANT:
        yield f"the coordinates move by different laws, at {one.coordinate_gap:.0f} standard errors"


def shapes(one: LearnerReport) -> Iterator[str]:
    """Whether the residuals are Gaussian."""
    numbers = (
        ("skewness", one.skewness, one.skewness_stderr),
        ("kurtosis", one.kurtosis, one.kurtosis_stderr),
    )
    off = [
        f"their {name} is {value:.3g} ± {stderr:.1g}"
        for name, value, stderr in numbers
        if abs(value) > max(SIGNIFICANT * stderr, TOLERATED_SHAPE)
    ]
    if off:
        yield (
            f"the residuals are not Gaussian: {', '.join(off)}, expected 0; the weights hold for Gaussian noise alone: "
            "log the step size of every step if it changes, or record a run with Gaussian noise"
        )


def steps_of(block: Block) -> Steps:
    """The steps of some episodes; those of a schedule ε_k as of one step size, ΔX/√s and √s g with s = ε_k/ε."""
    made = np.arange(1, block.x.shape[1])[None, :] <= block.last_steps[:, None]
    root = np.sqrt(np.where(made, block.scale[:, :-1], 1))[..., None]
    moves, gradients = (
        np.where(made[..., None], array, 0)
        for array in (np.diff(block.x, axis=1) / root, block.gradient[:, :-1] * root)
    )
    return Steps(moves, gradients, made)
