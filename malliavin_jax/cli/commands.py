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
from ..recovery.loss import Loss
from ..samples.samples import Samples
from ..streaming.accumulator import Accumulator
from ..streaming.streams import accumulate
from .output import write_json, write_loss, write_table

_IN_MEMORY = 2**26  # numbers of x, gradient and Hessian at the conditioning steps: more, and they are streamed
_DEFAULT_TIMES = 8
_POINTS = {1: 61, 2: 25, 3: 11}  # of the default grid, on each axis
_GRID_NUMBERS = 2**21  # of the Hessians along the episodes whose positions the default grid is laid over
_ALPHAS = 64  # points of the grid whose estimates are made at a time
Say = Callable[[str], None]


class Request(NamedTuple):
    """What the commands have in common, as the user gave it."""

    step_size: float | None
    inverse_temperature: float | None
    times: Sequence[float] | None
    steps: Sequence[int] | None
    chunk_size: int | None
    safe: bool
    drop_bad: bool


class Bank(NamedTuple):
    """The weighed episodes: all of them; or those of the first chunk, and functions that weigh each of the others."""

    samples: Samples
    later: tuple[Callable[[], Samples], ...]


def run_check(data: Path, out: Path | None, request: Request, say: Say) -> int:
    """Print the consistency report; exit code 1 if the data do not fit the learner."""
    recording = _load(data, request, say)
    report = _report_quietly(recording)
    say(str(report))
    if out is not None:
        write_json(out / "check.json", {"data": str(data), **report.as_dict()})
        say(f"check.json is in {out}")
    return 0 if report.ok else 1


def run_estimate(
    data: Path, out: Path, request: Request, alphas: np.ndarray | None, grid: list[np.ndarray] | None, say: Say
) -> int:
    """Gradients at the points or on the grid that the user asks for: CSV, JSON and a picture."""
    from . import pictures  # here, so that matplotlib is imported only where something is drawn

    recording = _load_complete(data, request, say)
    if alphas is None:
        alphas = _mesh(_checked_axes(grid or [], recording.dim))
    if alphas.shape[1] != recording.dim:
        raise ValueError(f"--at must give points of {recording.dim} numbers for these data, got {alphas.shape[1]}")
    bank = _weigh(recording, request, say)
    estimates = _estimates(bank, jnp.asarray(alphas.astype(recording.dtype)), request)

    table = write_table(out / "estimate.csv", alphas, estimates)
    write_json(out / "estimate.json", {"data": str(data), "episodes": recording.num_episodes, "points": table})
    written = ["estimate.csv", "estimate.json"]
    if recording.dim <= 2:
        pictures.draw_gradient(out / "estimate.png", alphas, estimates)
        written.append("estimate.png")
    untrusted = int(np.sum(~np.asarray(estimates.trusted)))
    if untrusted:
        say(f"{untrusted} of {len(alphas)} points are not carried by the data (trusted = false)")
    say(f"{', '.join(written)} are in {out}")
    return 0


def run_recover(data: Path, out: Path, request: Request, grid: list[np.ndarray] | None, say: Say) -> int:
    """The loss on a grid, by integrating the estimated gradient: CSV, pictures and a report."""
    from . import pictures  # here, so that matplotlib is imported only where something is drawn

    recording = _load_complete(data, request, say)
    if recording.dim > 2:
        raise ValueError(f"recover serves 1 and 2 dimensions, these data have {recording.dim}; estimate serves any")
    chosen = None if grid is None else _checked_axes(grid, recording.dim)
    bank = _weigh(recording, request, say)
    axes = _default_axes(recording, bank.samples) if chosen is None else chosen
    alphas = _mesh(axes)
    estimates = _estimates(bank, jnp.asarray(alphas.astype(recording.dtype)), request)
    loss = loss_from_estimates(estimates, tuple(axis.astype(recording.dtype) for axis in axes))
    check = _report_quietly(recording, bank.samples)

    write_table(out / "gradient.csv", alphas, estimates)
    write_loss(out / "loss.csv", alphas, loss)
    pictures.draw_loss(out / "loss.png", loss)
    pictures.draw_gradient(out / "gradient.png", alphas, estimates)
    report = f"{_summary(recording, loss, estimates, alphas)}\n\n{check}"
    (out / "report.txt").write_text(report + "\n", encoding="utf-8")
    say(report)
    say(f"loss.csv, gradient.csv, loss.png, gradient.png and report.txt are in {out}")
    return 0


# Load, and check.


def _load(data: Path, request: Request, say: Say) -> Recording:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        recording = io.load(
            data,
            step_size=request.step_size,
            inverse_temperature=request.inverse_temperature,
            on_bad="drop" if request.drop_bad else "refuse",
        )
    for warning in caught:
        say(str(warning.message))
    return recording


def _load_complete(data: Path, request: Request, say: Say) -> Recording:
    """The data, with a step size and a temperature, and in numbers that JAX will keep."""
    recording = _load(data, request, say)
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


def _report_quietly(recording: Recording, samples: Samples | None = None) -> Consistency:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what it warns of is in the report
        return consistency(recording, samples)


# Samples.


def _weigh(recording: Recording, request: Request, say: Say) -> Bank:
    """All episodes if their samples fit into memory, or if the user wants no chunks; else a chunk at a time."""
    times, steps = request.times, request.steps
    if times is None and steps is None:
        steps = _default_steps(recording)
    at_stops = len(times or steps or ()) * (2 * recording.dim + recording.dim**2)
    each = at_stops + (recording.num_steps + 1) * recording.dim**2  # numbers an episode takes, with all its Hessians
    if request.chunk_size is None and recording.num_episodes * each <= _IN_MEMORY:
        return Bank(recording.samples(times=times, steps=steps), ())
    chunk_size = request.chunk_size or max(1000, _IN_MEMORY // (4 * each))
    chunks = recording.chunks(chunk_size, times=times, steps=steps)
    if len(chunks) < 2:
        raise ValueError(
            f"--chunk-size must leave at least two chunks of these {recording.num_episodes} episodes, got {chunk_size}"
        )
    say(f"{recording.num_episodes} episodes in {len(chunks)} chunks; the first chooses the length and the control")
    return Bank(chunks[0], tuple(eqx.Partial(chunks.__getitem__, number) for number in range(1, len(chunks))))


def _default_steps(recording: Recording) -> list[int]:
    """Eight, from a quarter to the whole of the median number of steps."""
    longest = max(1, int(np.median(recording.last_steps)))
    return sorted({max(1, round(longest * share)) for share in np.linspace(0.25, 1, _DEFAULT_TIMES)})


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


# The grid, and what is said about the loss on it.


def _checked_axes(grid: list[np.ndarray], dim: int) -> list[np.ndarray]:
    if len(grid) != dim:
        raise ValueError(f"--grid must have {dim} axes for these data, got {len(grid)}")
    return grid


def _default_axes(recording: Recording, samples: Samples) -> list[np.ndarray]:
    """Between the 2nd and the 98th percentile of the first positions at the conditioning steps."""
    episodes = max(100, _GRID_NUMBERS // (recording.num_steps * recording.dim**2))
    positions = np.concatenate(np.asarray(samples.x[:episodes]))
    ends = np.nanpercentile(positions, [2, 98], axis=0)
    return [np.linspace(low, high, _POINTS[recording.dim]) for low, high in ends.T]


def _mesh(axes: list[np.ndarray]) -> np.ndarray:
    return np.stack(np.meshgrid(*axes, indexing="ij"), -1).reshape(-1, len(axes))


def _summary(recording: Recording, loss: Loss, estimates: Estimate, alphas: np.ndarray) -> str:
    value = np.ravel(np.asarray(loss.value))
    lowest, carried = int(np.nanargmin(value)), np.asarray(estimates.trusted)
    lines = [
        f"{recording.num_episodes} episodes of up to {recording.num_steps} steps in {recording.dim} dimensions"
        + (f" ({recording.dropped} dropped)" if recording.dropped else ""),
        f"loss on {len(alphas)} grid points, {carried.sum()} of them trusted; lowest at "
        f"({', '.join(f'{a:.4g}' for a in alphas[lowest])}), highest {np.nanmax(value):.4g} above",
        f"median standard error of the gradient {np.median(np.asarray(estimates.stderr)[carried]):.3g}",
    ]
    if loss.curl is not None and loss.curl_expected is not None:
        curl, noise = float(loss.curl), float(loss.curl_expected)
        lines.append(f"part of the field that is no gradient {curl:.3g} (noise alone: {noise:.3g})")
    return "\n".join(lines)
