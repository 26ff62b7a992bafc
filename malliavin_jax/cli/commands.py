"""What the command line does with recorded data: `check`, `estimate` and `recover`.

The way is load → check → samples → field → loss. The data are checked once, where they are loaded, and weighed once:
the same samples serve the default grid, the field and the report.
"""

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .. import io
from ..checking.report import Consistency, consistency
from ..estimate.ratio import Estimate
from ..fields.malliavin import MalliavinField
from ..models.selection import short_localizer
from ..recording.recording import Recording
from ..recovery.integration import loss_from_estimates
from ..samples.recorded import stops_of
from ..samples.samples import Samples
from ..streaming.accumulator import Accumulator
from ..streaming.streams import accumulate
from .output import Place, Voice, as_json, gradient_rows, loss_rows, many, point_lines, summary_of

_IN_MEMORY = 2**26  # numbers of x, gradient and Hessian at the conditioning steps: more, and they are streamed
_POINTS = {1: 61, 2: 25, 3: 11}  # of the default grid, on each axis
_GRID_NUMBERS = 2**21  # of the Hessians along the episodes whose positions the default grid is laid over
_FEW = 20  # points whose gradients are printed
_ALPHAS = 64  # points of the grid whose estimates are made at a time
_WEIGHTS = "the weights do not integrate by parts"


class Request(NamedTuple):
    """What the commands have in common, as the user gave it."""

    step_size: float | None
    inverse_temperature: float | None
    times: Sequence[float] | None
    steps: Sequence[int] | None
    chunk_size: int | None
    safe: bool
    drop_bad: bool
    force: bool = False
    piece_steps: int | None = None
    blocks: int | None = None


class Bank(NamedTuple):
    """The weighed episodes: all of them; or those of the first chunk, and functions that weigh each of the others."""

    samples: Samples
    later: tuple[Callable[[], Samples], ...]


def run_check(data: Path, place: Place, request: Request, voice: Voice) -> int:
    """Print the consistency report; exit code 1 if the data do not fit the learner."""
    place.check(["check.json"])
    recording = _load(data, request, voice)
    report = _report_quietly(recording)
    content = as_json({"data": str(data), **report.as_dict()})
    voice.say(str(report))
    place.write("check.json", content)
    _finish(place, content, voice)
    return 0 if report.ok else 1


def run_estimate(
    data: Path,
    place: Place,
    request: Request,
    alphas: np.ndarray | None,
    grid: list[np.ndarray] | None,
    voice: Voice,
) -> int:
    """Gradients at the points or on the grid that the user asks for: CSV, JSON and a picture."""
    from . import pictures  # here, so that matplotlib is imported only where something is drawn

    place.check(["estimate.csv", "estimate.json", "estimate.png"])
    recording = _load_complete(data, request, voice)
    if alphas is None:
        alphas = _mesh(_checked_axes(grid or [], recording.dim))
    if alphas.shape[1] != recording.dim:
        raise ValueError(f"--at must give points of {many(recording.dim, 'number')}, got {alphas.shape[1]}")
    _check_first(recording, place, request, voice)
    bank = _weigh(recording, request, voice)
    voice.note(f"estimating the gradient at {many(len(alphas), 'point')}")
    estimates = _estimates(bank, jnp.asarray(alphas.astype(recording.dtype)), request)

    voice.note("writing" if place.folder is not None else "done")
    rows = gradient_rows(alphas, estimates)
    said = {"data": str(data), "episodes": recording.num_episodes, "observed": bank.samples.rung, "points": rows}
    content = as_json(place.marked(said))
    place.table("estimate.csv", rows)
    place.write("estimate.json", content)
    if recording.dim <= 2:
        place.picture("estimate.png", lambda file: pictures.draw_gradient(file, alphas, estimates, place.title))
    untrusted = int(np.sum(~np.asarray(estimates.trusted)))
    if len(alphas) <= _FEW:
        voice.say(point_lines(alphas, estimates))
    elif untrusted:
        voice.say(f"{untrusted} of {len(alphas)} points are not carried by the data (trusted = false)")
    _finish(place, content, voice)
    return 0


def run_recover(data: Path, place: Place, request: Request, grid: list[np.ndarray] | None, voice: Voice) -> int:
    """The loss on a grid, by integrating the estimated gradient: CSV, pictures and a report."""
    from . import pictures  # here, so that matplotlib is imported only where something is drawn

    place.check(["loss.csv", "gradient.csv", "loss.png", "gradient.png", "report.txt"])
    recording = _load_complete(data, request, voice)
    if recording.dim > 2:
        raise ValueError(f"recover serves 1 and 2 dimensions, these data have {recording.dim}; estimate serves any")
    chosen = None if grid is None else _checked_axes(grid, recording.dim)
    check = _check_first(recording, place, request, voice)
    bank = _weigh(recording, request, voice)
    axes = _default_axes(recording, bank.samples) if chosen is None else chosen
    alphas = _mesh(axes)
    voice.note(f"estimating the gradient at {len(alphas)} points, and integrating it")
    estimates = _estimates(bank, jnp.asarray(alphas.astype(recording.dtype)), request)
    loss = loss_from_estimates(estimates, tuple(axis.astype(recording.dtype) for axis in axes))

    voice.note("writing" if place.folder is not None else "done")
    gradients, losses = gradient_rows(alphas, estimates), loss_rows(alphas, loss)
    place.table("gradient.csv", gradients)
    place.table("loss.csv", losses)
    place.picture("loss.png", lambda file: pictures.draw_loss(file, loss, place.title))
    place.picture("gradient.png", lambda file: pictures.draw_gradient(file, alphas, estimates, place.title))
    report = f"{summary_of(recording, bank.samples, loss, estimates, alphas)}\n\n{check}"
    report = f"check failed: {'; '.join(place.failed)}\n\n{report}" if place.failed else report
    place.write("report.txt", report + "\n")
    voice.say(report)
    content = {"data": str(data), "episodes": recording.num_episodes, "observed": bank.samples.rung}
    content |= {"check": check.as_dict(), "loss": losses, "gradient": gradients}
    _finish(place, as_json(place.marked(content)), voice)
    return 0


def _finish(place: Place, content: str, voice: Voice) -> None:
    if voice.emit is not None:
        voice.emit(content)
    if place.written:
        voice.say(place.said())


# Load, and check.


def _load(data: Path, request: Request, voice: Voice) -> Recording:
    voice.note(f"reading {data}")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        recording = io.load(
            data,
            step_size=request.step_size,
            inverse_temperature=request.inverse_temperature,
            piece_steps=request.piece_steps,
            blocks=request.blocks,
            on_bad="drop" if request.drop_bad else "refuse",
        )
    for warning in caught:
        voice.say(str(warning.message))
    return recording


def _load_complete(data: Path, request: Request, voice: Voice) -> Recording:
    """The data, with a step size and a temperature, and in numbers that JAX will keep."""
    recording = _load(data, request, voice)
    if recording.step_size is None or recording.inverse_temperature is None:
        one = _report_quietly(recording).learners[0]
        raise ValueError(
            f"{data} does not hold both step_size and inverse_temperature: give --step-size and --inverse-temperature "
            f"(the data suggest {one.step_size_estimate:.4g} ± {one.step_size_stderr:.1g} and "
            f"{one.inverse_temperature_estimate:.4g} ± {one.inverse_temperature_stderr:.1g})"
        )
    kept = jax.dtypes.canonicalize_dtype(recording.dtype)  # float32 unless JAX is told otherwise
    noise = float(np.sqrt(2 * np.min(recording.step_size) / np.max(recording.inverse_temperature)))
    largest = float(np.max(np.abs(recording.part(0, 1000, hessian=False)["x"][:, 0])))
    if largest * float(jnp.finfo(kept).eps) > 0.01 * noise:
        raise ValueError(
            f"positions of {largest:.3g} with steps of {noise:.3g} need more digits than {kept} has: "
            "set the environment variable JAX_ENABLE_X64=1, or shift the positions"
        )
    return recording


def _check_first(recording: Recording, place: Place, request: Request, voice: Voice) -> Consistency:
    """Hold the data against their learner; an error if they do not fit, or marks on the outputs if the user insists."""
    _check_stops(recording, request)
    voice.note(f"checking {many(recording.num_episodes, 'episode')} against the law of the learner")
    report = _report_quietly(recording)
    # What --safe is there for is no reason to refuse it.
    findings = [text for text in report.findings if not (request.safe and text.startswith(_WEIGHTS))]
    if findings and not request.force:
        raise ValueError(
            f"the data do not fit the learner: {'; '.join(findings)} (--force goes on, and marks the outputs)"
        )
    place.failed = tuple(findings)
    for text in findings:
        voice.note(f"check failed: {text}")
    return report


def _check_stops(recording: Recording, request: Request) -> None:
    """What is wrong with --times, --steps or --chunk-size is said before the work."""
    if request.times is not None or request.steps is not None:
        first = recording.part(0, 1, hessian=False)  # of the others later: learners may differ
        stops_of(request.times, request.steps, first["step_size"], 1, recording.num_steps + 1, first["last_steps"])
    if request.chunk_size is not None and request.chunk_size >= recording.num_episodes:
        raise ValueError(
            f"--chunk-size must leave at least two chunks of these {recording.num_episodes} episodes, "
            f"got {request.chunk_size}"
        )


def _report_quietly(recording: Recording, samples: Samples | None = None) -> Consistency:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what it warns of is in the report
        return consistency(recording, samples)


# Samples.


def _weigh(recording: Recording, request: Request, voice: Voice) -> Bank:
    """All episodes if their samples fit into memory, or if the user wants no chunks; else a chunk at a time."""
    times, steps = request.times, request.steps
    if times is None and steps is None:
        steps = recording.usual_steps()
    at_stops = len(times or steps or ()) * (2 * recording.dim + recording.dim**2)
    each = at_stops + (recording.num_steps + 1) * recording.dim**2  # numbers an episode takes, with all its Hessians
    voice.note(f"weighing them at {many(len(times or steps or ()), 'time' if times is not None else 'step')}")
    if request.chunk_size is None and recording.num_episodes * each <= _IN_MEMORY:
        return Bank(recording.samples(times=times, steps=steps, model="spline"), ())
    chunk_size = request.chunk_size or max(1000, _IN_MEMORY // (4 * each))
    chunks = recording.chunks(chunk_size, times=times, steps=steps)
    voice.note(f"{recording.num_episodes} episodes in {len(chunks)} chunks; the first chooses length and control")
    return Bank(chunks[0], tuple(eqx.Partial(chunks.__getitem__, number) for number in range(1, len(chunks))))


# Field.


def _estimates(bank: Bank, alphas: Float[Array, "q d"], request: Request) -> Estimate:
    """From the field of all samples; or, in chunks, with the length and the control that the first one suggests."""
    localizer = short_localizer(bank.samples) if request.safe else "auto"
    if not bank.later:
        field = MalliavinField(bank.samples, localizer)
        return eqx.filter_jit(lambda field, at: jax.lax.map(field, at, batch_size=_ALPHAS))(field, alphas)
    field = MalliavinField(bank.samples, localizer, correction="full")  # one with folds
    # The control must not have seen the episodes it corrects: those of the first chunk are left out of the sums.
    accumulator = Accumulator(alphas, field.localizer, field.folds[0].potential)
    return accumulate(bank.later, accumulator, progress=True).estimate()


# The grid.


def _checked_axes(grid: list[np.ndarray], dim: int) -> list[np.ndarray]:
    if len(grid) != dim:
        axes = f"{dim} axis" if dim == 1 else f"{dim} axes"
        raise ValueError(f"--grid must have {axes} for these data, got {len(grid)}")
    return grid


def _default_axes(recording: Recording, samples: Samples) -> list[np.ndarray]:
    """Between the 2nd and the 98th percentile of the first positions at the conditioning steps."""
    episodes = max(100, _GRID_NUMBERS // (recording.num_steps * recording.dim**2))
    positions = np.concatenate(np.asarray(samples.x[:episodes]))
    ends = np.nanpercentile(positions, [2, 98], axis=0)
    return [np.linspace(low, high, _POINTS[recording.dim]) for low, high in ends.T]


def points_of(words: Sequence[str]) -> np.ndarray:
    """Points as rows, from words such as 0.1,0.5."""
    try:
        points = np.asarray([[float(number) for number in word.split(",")] for word in words])
    except ValueError:
        points = np.full((1, 1), np.nan)
    if not np.all(np.isfinite(points)):
        raise ValueError(f"--at must be points with equally many numbers, separated by commas, got {' '.join(words)}")
    return points


def _mesh(axes: list[np.ndarray]) -> np.ndarray:
    return np.stack(np.meshgrid(*axes, indexing="ij"), -1).reshape(-1, len(axes))
