"""What is said about a log that does not fit its learner: the cause, its numbers, and what to do."""

from typing import NamedTuple

import numpy as np

from .readings import Reading, cost
from .residuals import SIGNIFICANT, Settings

SAME = 0.03  # relative gap of two factors that are taken for one, unless their errors are larger
COORDINATES = 0.05  # relative gap between coordinates that is taken for a difference


class Measured(NamedTuple):
    """A reading in units of what was recorded: `factor` of the step size, `noise` of the variance 2ε/β."""

    reading: Reading
    factor: float
    stderr: float
    noise: float
    noise_stderr: float
    size: str


def another_row_or_momentum(reading: Reading, settings: Settings) -> str:
    """Gradients of another row, or of several."""
    size = f"with a step size of {reading.step_size:.4g} ± {reading.stderr:.1g}{beside(settings)}"
    if reading.name == "late":
        return (
            f"the gradients are one row late: the move from row k follows the gradient of row k + 1, {size}; row k "
            "must hold the gradient used for the move from row k: pass x[:, :-1], gradient[:, 1:] (and hessian[:, "
            "1:], if it is late too)"
        )
    if reading.name == "early":
        return (
            f"the gradients are one row early: the move from row k follows the gradient of row k − 1, {size}; row k "
            "must hold the gradient used for the move from row k, not the one met after it: pass x[:, 1:], "
            "gradient[:, :-1] (and hessian[:, :-1], if it is early too)"
        )
    memory = 1 / (1 - min(reading.decay, 0.9999))
    law = (
        "X' − X = decay · (the move before) − ε g + noise"
        if reading.name == "heavy ball"
        else "X' − X = −ε Σ_j decay^j g_{k−j} + noise"
    )
    return (
        f"the learner has momentum: its moves follow the gradients of the last {memory:.2g} steps, with a decay of "
        f"{reading.decay:.3g} ({law}); the weights hold for X' = X − ε g + noise alone: record a run with momentum 0 "
        "(Adam: beta1 = 0)"
    )


def wrong_step_size(m: Measured, epsilon: float) -> str:
    if abs(m.factor - 0.5) <= max(SIGNIFICANT * m.stderr, SAME) and abs(m.noise - 0.5) <= SAME:
        return (
            f"your step_size is probably 2× ours, as in Welling and Teh (X' = X − ε/2 g + √ε ξ): by the moves it is "
            f"{m.size}, by the residuals {m.noise * epsilon:.4g}, recorded is {epsilon:.4g}; pass step_size="
            f"{epsilon / 2:.4g}"
        )
    whole = round(m.noise)
    one_in = abs(m.noise - whole) < 0.1 * whole and whole > 1
    thinned = f"; or log every row, if about one in {whole} is logged" if one_in else ""
    return (
        f"the step size is wrong: it is {m.size} by the moves and {m.noise * epsilon:.4g} by the residuals, recorded "
        f"is {epsilon:.4g}; pass step_size={m.noise * epsilon:.4g}{thinned}"
    )


def wrong_scale(m: Measured, settings: Settings, hot: bool, certain: bool) -> str:
    epsilon, beta = settings.step_size or 0.0, settings.inverse_temperature or 0.0
    if hot:
        return (
            f"the step size and the temperature are both wrong, or the recorded gradient is not the one the learner "
            f"used: the moves give a step size of {m.size}, recorded is {epsilon:.4g}, and the residual variance is "
            f"{m.noise:.4g} ± {m.noise_stderr:.1g} times 2ε/β; if the gradients are right, pass step_size="
            f"{m.factor * epsilon:.4g} and inverse_temperature={beta * m.factor / m.noise:.4g}"
        )
    if not certain:
        return (
            f"the recorded gradient is not the one the learner used, or on another scale: the moves give a step size "
            f"of {m.size}, recorded is {epsilon:.4g}, while the noise is as recorded; log the gradient that made the "
            f"move, of the same minibatch, or multiply gradients and Hessians by {m.factor:.4g} if they are "
            f"{1 / m.factor:.3g} times those"
        )
    return (
        f"the gradients are {1 / m.factor:.3g} times those that the learner used: the moves give a step size of "
        f"{m.size}, recorded is {epsilon:.4g}, while the noise is as recorded; multiply gradients and Hessians by "
        f"{m.factor:.4g} (a sum logged for a mean?), or, if they are the learner's own, pass step_size="
        f"{m.factor * epsilon:.4g} and inverse_temperature={m.factor * beta:.4g}"
    )


def wrong_temperature(m: Measured, settings: Settings, same: bool) -> str:
    epsilon, beta = settings.step_size or 0.0, settings.inverse_temperature or 0.0
    ways = [f"pass inverse_temperature={beta / m.noise:.4g}"]
    if same:  # the gradients are too small to tell
        ways.append(f"or step_size={m.noise * epsilon:.4g}, if that is what is wrong")
    if m.noise > 1:
        ways.append("or log the gradient that the learner used, its minibatch's, if a cleaner one is logged")
    elif m.noise < 0.5:
        ways.append("or none was injected, and what is left is another minibatch's noise: such a log does not serve")
    return (
        f"the temperature is wrong: the residual variance is {m.noise:.4g} ± {m.noise_stderr:.1g} times 2ε/β; "
        + "; ".join(ways)
    )


def without_noise(reading: Reading, settings: Settings) -> str:
    how = {"late": ", of the row after", "early": ", of the row before"}.get(
        reading.name, f", averaged with a decay of {reading.decay:.3g}" if reading.decay else ""
    )
    kind = "plain (stochastic) gradient descent"
    if reading.squares_decay:
        how += f", over their running root mean square (decay {reading.squares_decay:g})"
        kind = "Adam" if reading.decay else "RMSprop"
    return (
        f"no noise was injected: the moves are −{abs(reading.step_size):.4g} times the gradients{how} to within "
        f"{reading.variance**0.5:.2g}{_promised(settings)}: {kind}; the method lives on "
        "Gaussian noise in the moves: record a Langevin run, X' = X − ε g + √(2ε/β) ξ"
    )


def preconditioned(reading: Reading, also: str) -> str:
    sizes, variances = reading.step_sizes, reading.variances
    ratio = variances / np.where(sizes > 0, sizes, np.inf)
    error = SIGNIFICANT * np.max(np.hypot(reading.stderrs / abs(sizes), (2 / max(reading.number, 1)) ** 0.5))
    whole = np.all(abs(ratio / ratio.mean() - 1) < max(error, COORDINATES)) and not also
    remedy = (
        "with p = (step sizes by coordinate) / step_size, pass x/√p, √p·gradient and √p·hessian·√p, in which the "
        "learner is a plain one"
        if whole
        else "record a run without preconditioning"
    )
    return (
        f"the steps are preconditioned{also}, as by Adam or RMSprop: by coordinate, the moves give step sizes from "
        f"{sizes.min():.3g} to {sizes.max():.3g} and residual variances from {variances.min():.3g} to "
        f"{variances.max():.3g}; {remedy}"
    )


def adaptive_steps(reading: Reading, recorded: Reading) -> str:
    gain = (cost(recorded) - cost(reading)) * recorded.number
    name = "Adam" if reading.decay else "RMSprop"
    return (
        f"the steps are preconditioned: the learner divides its gradients by their running root mean square, as {name} "
        f"does (decays near {reading.decay:g} and {reading.squares_decay:g}); that explains the moves better than the "
        f"gradients themselves, by {gain:.3g} in twice the log-likelihood; the weights hold for X' = X − ε g + noise "
        "alone: record a run without preconditioning"
    )


def beside(settings: Settings) -> str:
    return "" if settings.step_size is None else f" (recorded: {settings.step_size:.4g})"


def _promised(settings: Settings) -> str:
    epsilon, beta = settings
    return "" if epsilon is None or beta is None else f" (√(2ε/β) is {(2 * epsilon / beta) ** 0.5:.2g})"
