"""Other readings of a log that does not fit: its gradients a row late or early, averaged, or divided by their size.

Each reading is a regression of the moves on what it takes for the gradients used. It is a possible one if what the
regression leaves is what a learner's noise would be: white, and uncorrelated with every gradient before. That a
regression fits well is no sign of it: at equilibrium a chain run backwards is as good a chain, so that gradients logged
a row early look like gradients of the wrong sign, until the gradients before are asked.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from .residuals import LAGS, SIGNIFICANT, TOLERATED_SUM, Block, steps_of

_TOLERATED = 0.01  # of a correlation; half of what starts a search for causes
_DECAYS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.97, 0.98, 0.99)
_LEAST_DECAY = 0.1  # of a momentum that is worth its name
_SQUARES_DECAYS = (0.9, 0.99, 0.999)  # of the running mean squares of Adam and RMSprop: what people use


class Reading(NamedTuple):
    """One reading of the log: coordinate by coordinate, moves ≈ −step_sizes · regressor + noise of `variances`."""

    name: str
    step_sizes: np.ndarray
    stderrs: np.ndarray
    variances: np.ndarray
    number: int  # of steps
    possible: bool  # whether what is left over is like noise
    decay: float = 0.0  # of a momentum
    drift: float = 0.0  # mean square of what the gradients explain
    squares_decay: float = 0.0  # of the running mean square that the gradients are divided by

    @property
    def step_size(self) -> float:
        """Of all coordinates together."""
        weights = 1 / np.maximum(self.stderrs, 1e-300) ** 2
        return float(np.sum(weights * self.step_sizes) / np.sum(weights))

    @property
    def stderr(self) -> float:
        """Of `step_size`."""
        return float(1 / np.sqrt(np.sum(1 / np.maximum(self.stderrs, 1e-300) ** 2)))

    @property
    def variance(self) -> float:
        """Mean square of what is left over, over all coordinates."""
        return float(np.mean(self.variances))

    @property
    def variance_stderr(self) -> float:
        """Relative."""
        return math.sqrt(2 / max(self.number * len(self.variances), 1))

    @property
    def descends(self) -> bool:
        """Whether the moves follow the gradients downhill, beyond chance."""
        return self.step_size > SIGNIFICANT * self.stderr


def read(name: str, moves: np.ndarray, regressor: np.ndarray, before: list[np.ndarray], used: np.ndarray) -> Reading:
    """Regress moves on gradients, (episodes, steps, d) each, where `used`; `before`: what the noise cannot know."""
    at = used[..., None]
    moves, regressor = np.where(at, moves, 0), np.where(at, regressor, 0)
    squares = np.sum(regressor**2, (0, 1))
    known = squares > 0
    slopes = np.where(known, -np.sum(moves * regressor, (0, 1)) / np.where(known, squares, 1), 0)
    residual = moves + slopes * regressor
    number = int(np.sum(used))
    variances = np.sum(residual**2, (0, 1)) / max(number, 1)
    scaled = residual / np.sqrt(np.maximum(variances, 1e-300))
    return Reading(
        name,
        slopes,
        np.where(known, np.sqrt(variances / np.where(known, squares, 1)), np.inf),
        variances,
        number,
        _is_noise(scaled, [np.where(at, array, 0) for array in before], used),
        drift=float(np.mean(slopes**2 * squares)) / max(number, 1),
    )


def _is_noise(scaled: np.ndarray, before: list[np.ndarray], used: np.ndarray) -> bool:
    """Whether residuals of unit variance are white and know nothing of what went before."""
    total, spread = 0.0, 0.0
    for lag in range(1, min(LAGS, scaled.shape[1] - 1) + 1):
        pairs = int(np.sum(used[:, lag:] & used[:, :-lag])) * scaled.shape[2]
        if pairs == 0:
            break
        correlation = float(np.sum(scaled[:, lag:] * scaled[:, :-lag])) / pairs
        if abs(correlation) > max(SIGNIFICANT / math.sqrt(pairs), _TOLERATED):
            return False
        total, spread = total + correlation, spread + 1 / pairs
    if abs(total) > max(SIGNIFICANT * math.sqrt(spread), TOLERATED_SUM):
        return False
    number = int(np.sum(used)) * scaled.shape[2]
    for array in before:
        norm = math.sqrt(float(np.sum(array**2)) * number)
        correlation = float(np.sum(scaled * array)) / norm if norm > 0 else 0.0
        if abs(correlation) > max(SIGNIFICANT / math.sqrt(number), _TOLERATED):
            return False
    return True


class Log(NamedTuple):
    """Episodes in memory, and the steps at which every reading can be compared with every other."""

    moves: np.ndarray
    gradients: np.ndarray
    made: np.ndarray
    inner: np.ndarray

    def shifted(self, by: int) -> np.ndarray:
        """The gradients of row k + by at row k."""
        return _shifted(self.gradients, by)


def log_of(block: Block) -> Log:
    """Where there are two rows before and one after; everywhere, if the episodes are too short for that."""
    steps = steps_of(block)
    inner = steps.made & _shifted(steps.made, 1)
    inner[:, :2] = False
    return Log(*steps, inner if inner.any() else steps.made)


def as_recorded(log: Log) -> Reading:
    """Row k of the gradients is the one used at row k."""
    return read("recorded", log.moves, log.gradients, [log.shifted(-1)], log.inner)


def other_readings(log: Log) -> Iterator[Reading]:
    """Every reading but the recorded one, possible or not."""
    if log.inner is log.made:
        return
    late = read("late", log.moves, log.shifted(1), [log.gradients, log.shifted(-1)], log.inner)
    early = read("early", log.moves, log.shifted(-1), [log.shifted(-2)], log.inner)
    for one in (late, early, _averaged(log), _heavy_ball(log)):
        if one is not None:
            yield one


def _averaged(log: Log) -> Reading | None:
    """Moves on Σ_j decay^j g_{k−j}, the decay being that of the best fit."""

    def fit(decay: float) -> Reading:
        average = np.zeros_like(log.gradients)
        average[:, 0] = log.gradients[:, 0]
        for k in range(1, average.shape[1]):
            average[:, k] = decay * average[:, k - 1] + log.gradients[:, k]
        found = read("averaged", log.moves, average, [log.gradients, log.shifted(-1), log.shifted(-2)], log.inner)
        return found._replace(decay=decay)

    fits = [fit(decay) for decay in (0.0, *_DECAYS)]
    best = min(fits, key=cost)
    width = 0.05
    while width > 0.001 and best.decay >= _LEAST_DECAY:
        tried = [fit(decay) for decay in (best.decay - width, best.decay + width) if 0 < decay < 1]
        best = min([best, *tried], key=cost)
        width /= 2
    # Twice the gain in log-likelihood, of the decay as one more parameter.
    gain = (cost(fits[0]) - cost(best)) * best.number
    return best if best.decay >= _LEAST_DECAY and gain > SIGNIFICANT**2 else None


def _heavy_ball(log: Log) -> Reading | None:
    """Moves on gradients and on the move before, X_{k+1} − X_k = decay (X_k − X_{k−1}) − ε g_k + noise."""
    before = _shifted(log.moves, -1)
    at = log.inner[..., None]
    m, p, g = (np.where(at, array, 0).ravel() for array in (log.moves, before, log.gradients))
    gram = np.array([[p @ p, p @ g], [p @ g, g @ g]])
    if np.linalg.det(gram) <= 0:
        return None
    decay = float(np.linalg.solve(gram, np.array([p @ m, g @ m]))[0])
    if decay < _LEAST_DECAY:
        return None
    found = read("heavy ball", log.moves - decay * before, log.gradients, [before, log.shifted(-1)], log.inner)
    return found._replace(decay=decay)


def instrumented(log: Log) -> tuple[float, float]:
    """ε by Σ ΔX_k·g_{k−1} / Σ g_k·g_{k−1}, with its standard error: noise of its own in each gradient drops out."""
    at = log.inner[..., None]
    m, g, earlier = (np.where(at, array, 0) for array in (log.moves, log.gradients, log.shifted(-1)))
    product = float(np.sum(g * earlier))
    if product == 0:
        return math.nan, math.inf
    estimate = -float(np.sum(m * earlier)) / product
    spread = float(np.sum((m + estimate * g) ** 2)) / max(int(np.sum(log.inner)) * m.shape[2], 1)
    return estimate, math.sqrt(spread * float(np.sum(earlier**2))) / abs(product)


def slopes_by_size(log: Log) -> tuple[float, float, float]:
    """ε by the steps with the smaller half of the gradients, by those with the larger, and the first one's error."""
    size = np.linalg.norm(log.gradients, axis=-1)
    large = log.inner & (size > np.median(size[log.inner]))
    small, big = (read("", log.moves, log.gradients, [], where) for where in (log.inner & ~large, large))
    return small.step_size, big.step_size, math.hypot(small.stderr, big.stderr)


def adaptive(log: Log) -> Reading:
    """Moves on gradients divided by their running root mean square, averaged (Adam) or not (RMSprop); the best fit.

    The noise is plain, or preconditioned likewise (Li et al., 2016): moves are then taken over √p, p = 1/√v scaled so
    that log p has mean zero, and variances compare with those of the other readings.
    """
    fits = []
    for squares_decay in _SQUARES_DECAYS:
        p = 1 / (np.sqrt(_running(log.gradients**2, squares_decay)) + 1e-8)
        root = np.sqrt(p / np.exp(np.mean(np.log(p[log.inner]))))
        for decay, scale in ((0.0, 1.0), (0.9, 1.0), (0.0, root)):
            regressor, before = p * _running(log.gradients, decay), [log.gradients, log.shifted(-1)]
            fit = read("divided", log.moves / scale, regressor / scale, before, log.inner)
            fits.append(fit._replace(decay=decay, squares_decay=squares_decay))
    return min(fits, key=cost)


def cost(reading: Reading) -> float:
    """Twice the negative log-likelihood, a step."""
    return float(np.sum(np.log(np.maximum(reading.variances, 1e-300))))


def _running(array: np.ndarray, decay: float) -> np.ndarray:
    """Running means over the rows of an episode, with Adam's correction for their short past."""
    mean, found = np.zeros_like(array[:, 0]), np.empty_like(array)
    for k in range(array.shape[1]):
        mean = decay * mean + (1 - decay) * array[:, k]
        found[:, k] = mean / (1 - decay ** (k + 1))
    return found


def _shifted(array: np.ndarray, by: int) -> np.ndarray:
    """Row k + by of each episode at row k, zero (False) where there is none."""
    moved = np.zeros_like(array)
    if by > 0:
        moved[:, :-by] = array[:, by:]
    else:
        moved[:, -by:] = array[:, :by]
    return moved
