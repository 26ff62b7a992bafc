"""Why a log does not fit its learner, and what to do: one cause, and not its symptoms."""

from collections.abc import Iterator

import numpy as np

from .readings import Log, Reading, adaptive, as_recorded, cost, instrumented, log_of, other_readings, slopes_by_size
from .residuals import (
    SIGNIFICANT,
    TOLERATED_MOVES,
    TOLERATED_STEP_SIZE,
    TOLERATED_STILL,
    TOLERATED_VARIANCE,
    Block,
    LearnerReport,
    Settings,
    deviations,
    shapes,
)
from .sentences import (
    COORDINATES,
    SAME,
    Measured,
    adaptive_steps,
    another_row_or_momentum,
    beside,
    preconditioned,
    without_noise,
    wrong_scale,
    wrong_step_size,
    wrong_temperature,
)

_BENT = 0.2  # relative difference of the step sizes by small and by large gradients
_CLOSER = 0.2  # of the mean squared move: less than that along another axis, and this one is time
_BETTER = 10.0  # twice the log-likelihood; another cause costs Adam's reading hundreds
_NO_NOISE = 1e-4  # of the variance that the settings promise, or of the moves where they promise none


def findings_of(one: LearnerReport, block: Block, has_gradient: bool) -> list[str]:
    """A sentence for each thing that does not fit, with its numbers and a remedy; `block` is some of the episodes."""
    if one.still > TOLERATED_STILL:
        return [
            f"{100 * one.still:.3g} % of the steps do not move at all, which noise never does: rows are logged twice, "
            "or episodes are padded; log every row once, and say with last_steps where each episode ends"
        ]
    symptoms = list(deviations(one) if has_gradient else _of_moves(one))
    if symptoms and (axes := _other_axes(block, one.settings)) is not None:
        return [axes]
    if not has_gradient:
        return symptoms
    return list(_causes(one, log_of(block), symptoms)) if symptoms else []


def _other_axes(block: Block, settings: Settings) -> str | None:
    """Axes in another order: time is the axis along which positions change least, for episodes are independent."""
    if np.any(block.last_steps != block.x.shape[1] - 1):
        return None
    squares = {axis: float(np.mean(np.diff(block.x, axis=axis) ** 2)) for axis in range(3) if block.x.shape[axis] > 1}
    time = min(squares, key=squares.__getitem__)
    if time == 1 or squares[time] > _CLOSER * squares[1]:
        return None
    epsilon, beta = settings
    if epsilon is not None and beta is not None and not 0.5 < squares[time] * beta / (2 * epsilon) < 2:
        return None
    order, remedy = {
        0: ("(points, episodes, d)", "array.swapaxes(0, 1)"),
        2: ("(d, episodes, points)", "np.moveaxis(array, 0, -1)"),
    }[time]
    return (
        f"the axes are in another order: along axis {time} positions change by {squares[time] ** 0.5:.2g} a step, "
        f"along axis 1, which must be time, by {squares[1] ** 0.5:.2g}; x seems to have shape {order}, and must have "
        f"(episodes, points, d): pass {remedy} of each array"
    )


def _of_moves(one: LearnerReport) -> Iterator[str]:
    """Positions alone: the mean squared move is 2ε/β, up to the drift."""
    if one.variance_ratio is None or one.variance_ratio_stderr is None:
        return
    # At equilibrium the move before takes back what the drift adds, to first order in ε.
    ratio = one.variance_ratio * (1 + one.autocorrelation)
    epsilon, beta = one.step_size or 0.0, one.inverse_temperature or 0.0
    if abs(ratio - 1) > max(SIGNIFICANT * one.variance_ratio_stderr, TOLERATED_MOVES):
        yield (
            f"the mean squared move is {ratio:.3g} times 2ε/β: the step size or the temperature is wrong; pass "
            f"inverse_temperature={beta / ratio:.3g} or step_size={epsilon * ratio:.3g}, whichever is not the learner's"
        )


def _causes(one: LearnerReport, log: Log, symptoms: list[str]) -> Iterator[str]:
    recorded, others, divided = as_recorded(log), list(other_readings(log)), adaptive(log)
    silent = next((reading for reading in (recorded, *others, divided) if _is_silent(reading, one.settings)), None)
    if silent is not None:
        yield without_noise(silent, one.settings)
        return
    if recorded.possible:
        yield from _of_recorded(recorded, divided, log, one, symptoms)
        return
    others = [reading for reading in others if _agrees(reading, one.settings)]
    thinned = _thinned(recorded, one.settings)
    if thinned is not None and all(reading.decay < 0.5 for reading in others):
        yield thinned
    elif others:  # the one that leaves least to chance
        yield another_row_or_momentum(min(others, key=cost), one.settings)
    elif _differ(recorded):
        yield preconditioned(recorded, " and averaged (their noise is not white)")
    elif _is_better(divided, recorded):
        yield adaptive_steps(divided, recorded)
    elif (another := _another_gradient(recorded, log, one.settings)) is not None:
        yield another
    else:
        yield from symptoms


def _of_recorded(
    recorded: Reading, divided: Reading, log: Log, one: LearnerReport, symptoms: list[str]
) -> Iterator[str]:
    """Every row has its own gradient: sign, scale, temperature and shape are left."""
    if _differ(recorded):
        yield preconditioned(recorded, "")
        return
    if recorded.step_size < -SIGNIFICANT * recorded.stderr:
        yield (
            f"the gradients have the wrong sign: the moves climb them, with a step size of {recorded.step_size:.4g} ± "
            f"{recorded.stderr:.1g}{beside(one.settings)}; log the gradient of the loss that is minimised, not of its "
            "negative (a log-likelihood, say): pass gradient=-gradient, and the Hessians with the other sign too"
        )
        recorded = recorded._replace(step_sizes=-recorded.step_sizes)
        if one.step_size is not None:
            yield from _of_scales(recorded, log, one.settings)
        return
    small, large, stderr = slopes_by_size(log)
    if small - large > max(SIGNIFICANT * stderr, _BENT * small):
        yield (
            f"the moves do not grow with the gradients: by the larger half of these the step size is {large:.3g}, by "
            f"the smaller half {small:.3g} ± {stderr:.1g}{beside(one.settings)}: the learner clips or normalises its "
            "gradients (Adam, RMSprop); log the gradients after clipping, with their Hessians, or record a run without"
        )
        return
    if _is_better(divided, recorded):
        yield adaptive_steps(divided, recorded)
        return
    found = list(_of_scales(recorded, log, one.settings))
    found += list(shapes(one)) if not found else []
    yield from found or symptoms


def _agrees(reading: Reading, settings: Settings) -> bool:
    """Whether another reading explains the moves: downhill, in every coordinate, at about the recorded step size."""
    if not (reading.possible and reading.descends):
        return False
    if reading.decay:
        return not _differ(reading)
    about = settings.step_size is None or 0.5 < reading.step_size / settings.step_size < 2
    return about and not _differ(reading)


def _is_better(reading: Reading, recorded: Reading) -> bool:
    """Whether another reading is a possible one, and explains the moves better than the recorded one."""
    return reading.possible and reading.descends and (cost(recorded) - cost(reading)) * recorded.number > _BETTER


def _thinned(recorded: Reading, settings: Settings) -> str | None:
    """Steps left out of the log: their noise adds up, and their gradients are those of one step and unseen ones."""
    epsilon, beta = settings
    if epsilon is None or beta is None:
        return None
    noise, factor = recorded.variance * beta / (2 * epsilon), recorded.step_size / epsilon
    whole = round(noise)
    if whole < 2 or abs(noise - whole) > 0.1 * whole or not 0.9 < factor < 1.1 * whole:
        return None
    return (
        f"the log seems to hold about one row in {whole}: the residual variance is {noise:.4g} ± "
        f"{noise * recorded.variance_stderr:.1g} times 2ε/β, the step size by the moves is {recorded.step_size:.4g} ± "
        f"{recorded.stderr:.1g}, recorded is {epsilon:.4g}; log every row"
    )


def _of_scales(reading: Reading, log: Log, settings: Settings) -> Iterator[str]:
    """Step size and temperature as recorded, against the regression and what it leaves over."""
    epsilon, beta = settings
    if epsilon is None:
        return
    factor, stderr = reading.step_size / epsilon, reading.stderr / epsilon
    off = abs(factor - 1) > max(SIGNIFICANT * stderr, TOLERATED_STEP_SIZE)
    size = f"{reading.step_size:.4g} ± {reading.stderr:.1g}"
    if beta is None:
        if off:
            yield f"the step size is {size} by the moves, recorded is {epsilon:.4g}: pass step_size={size.split()[0]}"
        return
    noise = reading.variance * beta / (2 * epsilon)
    noise_stderr = noise * reading.variance_stderr
    hot = abs(noise - 1) > max(SIGNIFICANT * noise_stderr, TOLERATED_VARIANCE)
    same = bool(abs(noise - factor) <= max(SIGNIFICANT * np.hypot(stderr, noise_stderr), SAME * noise))
    measured = Measured(reading, factor, stderr, noise, noise_stderr, size)
    if off:
        another = _another_gradient(reading, log, settings)
        if same:
            yield wrong_step_size(measured, epsilon)
        elif another is not None:
            yield another
        else:
            estimate, error = instrumented(log)
            certain = abs(estimate - epsilon) > 3 * error
            yield wrong_scale(measured, settings, hot, certain)
    elif hot:
        yield wrong_temperature(measured, settings, same)


def _another_gradient(reading: Reading, log: Log, settings: Settings) -> str | None:
    """Gradients with a noise that the learner did not use: the plain regression falls short, the instrumented not."""
    estimate, stderr = instrumented(log)
    epsilon = settings.step_size
    if epsilon is None or not stderr < 0.2 * epsilon:
        return None
    right = abs(estimate - epsilon) <= max(SIGNIFICANT * stderr, COORDINATES * epsilon)
    short = estimate - reading.step_size > max(SIGNIFICANT * np.hypot(stderr, reading.stderr), 0.02 * epsilon)
    if not (right and short):
        return None
    return (
        "the recorded gradient is not the one the learner used: it has a noise of its own, so that regressing the "
        f"moves on it gives a step size of {reading.step_size:.4g} ± {reading.stderr:.1g}, recorded is {epsilon:.4g}, "
        f"while through the gradient of the row before they give {estimate:.4g} ± {stderr:.1g}; log the gradient that "
        "made the move, of the same minibatch"
    )


def _is_silent(reading: Reading, settings: Settings) -> bool:
    epsilon, beta = settings
    promised = 2 * epsilon / beta if epsilon is not None and beta is not None else reading.drift
    return reading.variance < _NO_NOISE * promised and reading.variance < _NO_NOISE * reading.drift


def _differ(reading: Reading) -> bool:
    """Whether step sizes or variances differ between coordinates."""
    if len(reading.variances) == 1:
        return False
    sizes, variances = reading.step_sizes, reading.variances
    gaps = abs(sizes - reading.step_size) > np.maximum(SIGNIFICANT * reading.stderrs, COORDINATES * abs(sizes))
    error = SIGNIFICANT * (2 / max(reading.number, 1)) ** 0.5
    return bool(np.any(gaps) or np.any(abs(variances / reading.variance - 1) > max(error, COORDINATES)))
