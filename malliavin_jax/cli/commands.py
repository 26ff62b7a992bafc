"""What the command line does with recorded data: `check`, `estimate` and `recover`."""

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .. import io, plots
from .._base.types import Key, Vector
from ..estimate.ratio import Estimate
from ..fields.malliavin import MalliavinField
from ..fields.selection import short_localizer
from ..recording.recording import Recording
from ..recording.report import Consistency, consistency
from ..recovery.integration import loss_from_field
from ..recovery.loss import Loss
from ..samples.samples import Samples
from ..streaming.accumulator import Accumulator
from ..streaming.streams import accumulate
from .output import arrows, picture, write_json, write_loss, write_table

_IN_MEMORY = 2**26  # numbers of x, gradient and Hessian at the conditioning steps: more, and they are streamed
_DEFAULT_TIMES = 8
_POINTS = {1: 61, 2: 25, 3: 11}  # of the default grid, on each axis
Say = Callable[[str], None]


class Request(NamedTuple):
    """What `estimate` and `recover` have in common, as the user gave it."""

    step_size: float | None
    inverse_temperature: float | None
    times: Sequence[float] | None
    steps: Sequence[int] | None
    chunk: int | None
    safe: bool
    drop: bool


def run_check(data: Path, out: Path | None, request: Request, say: Say) -> int:
    """Print the consistency report; exit code 1 if the data do not fit the learner."""
    recording = _load(data, request, say)
    report = _quietly(recording)
    say(str(report))
    if out is not None:
        write_json(out / "check.json", {"data": str(data), **report.as_dict()})
        say(f"check.json is in {out}")
    return 0 if report.ok else 1


def run_estimate(data: Path, out: Path, request: Request, alphas: np.ndarray | None, grid: Any, say: Say) -> int:
    """Gradients at the points or on the grid that the user asks for: CSV, JSON and a picture."""
    recording = _ready(data, request, say)
    if alphas is None:
        alphas = _mesh(_axes(grid, recording.dim))
    if alphas.shape[1] != recording.dim:
        raise ValueError(f"--at must give points of {recording.dim} numbers for these data, got {alphas.shape[1]}")
    estimate = _estimates(recording, request, jnp.asarray(alphas.astype(recording.dtype)), say)
    table = write_table(out / "estimate.csv", np.asarray(alphas), estimate)
    write_json(out / "estimate.json", {"data": str(data), "episodes": recording.num_episodes, "points": table})
    written = ["estimate.csv", "estimate.json"]
    if recording.dim == 1:
        order = np.argsort(alphas[:, 0])
        picture(out / "estimate.png", lambda ax: plots.gradient_bands(
            alphas[order], {"estimate": jax.tree.map(lambda leaf: leaf[order], estimate)}, ax=ax))  # fmt: skip
        written.append("estimate.png")
    elif recording.dim == 2:
        picture(out / "estimate.png", lambda ax: arrows(ax, alphas, estimate))
        written.append("estimate.png")
    untrusted = int(np.sum(~np.asarray(estimate.trusted)))
    if untrusted:
        say(f"{untrusted} of {len(alphas)} points are not carried by the data (trusted = false)")
    say(f"{', '.join(written)} are in {out}")
    return 0


def run_recover(data: Path, out: Path, request: Request, grid: Any, say: Say) -> int:
    """The loss on a grid, by integrating the estimated gradient: CSV, pictures and a report."""
    recording = _ready(data, request, say)
    if recording.dim > 2:
        raise ValueError(f"recover serves 1 and 2 dimensions, these data have {recording.dim}; estimate serves any")
    axes = _axes(grid, recording.dim) if grid is not None else _default_axes(recording, request)
    alphas = _mesh(axes)
    estimate = _estimates(recording, request, jnp.asarray(alphas.astype(recording.dtype)), say)
    nodes = tuple(jnp.asarray(axis.astype(recording.dtype)) for axis in axes)
    loss = loss_from_field(Listed(nodes, estimate), nodes if recording.dim > 1 else nodes[0])
    write_table(out / "gradient.csv", alphas, estimate)
    write_loss(out / "loss.csv", alphas, loss)
    if recording.dim == 1:
        picture(out / "loss.png", lambda ax: plots.loss_recovery({"recovered": loss}, ax=ax))
        picture(out / "gradient.png", lambda ax: plots.gradient_bands(alphas, {"estimate": estimate}, ax=ax))
    else:
        picture(out / "loss.png", lambda ax: plots.loss_surface(loss.grid, loss.value, ax=ax))
        picture(out / "gradient.png", lambda ax: arrows(ax, alphas, estimate))
    report = _report(recording, loss, estimate, alphas, _quietly(recording))
    (out / "report.txt").write_text(report + "\n", encoding="utf-8")
    say(report)
    say(f"loss.csv, gradient.csv, loss.png, gradient.png and report.txt are in {out}")
    return 0


class Listed(eqx.Module):
    """A field that is known at the nodes of a grid and asked there only."""

    axes: tuple[Float[Array, " _"], ...]
    estimates: Estimate

    def __call__(self, alpha: Vector, *, key: Key | None = None) -> Estimate:
        index = jnp.zeros((), jnp.int32)
        for axis, value in zip(self.axes, alpha, strict=True):
            index = index * len(axis) + jnp.argmin(jnp.abs(axis - value)).astype(jnp.int32)
        return jax.tree.map(lambda leaf: leaf[index], self.estimates)


def _load(data: Path, request: Request, say: Say) -> Recording:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        recording = io.load(
            data,
            step_size=request.step_size,
            inverse_temperature=request.inverse_temperature,
            on_bad="drop" if request.drop else "refuse",
        )
    for warning in caught:
        say(str(warning.message))
    return recording


def _ready(data: Path, request: Request, say: Say) -> Recording:
    """The data, with a step size and a temperature, and in numbers that JAX will keep."""
    recording = _load(data, request, say)
    if recording.step_size is None or recording.inverse_temperature is None:
        one = _quietly(recording).learners[0]
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


def _quietly(recording: Recording) -> Consistency:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what it warns of is in the report
        return consistency(recording)


def _stops(recording: Recording, request: Request) -> dict[str, Any]:
    if request.times is not None or request.steps is not None:
        return {"times": request.times, "steps": request.steps}
    longest = max(1, int(np.median(recording.lengths)))
    return {"steps": sorted({max(1, round(longest * share)) for share in np.linspace(0.25, 1, _DEFAULT_TIMES)})}


def _estimates(recording: Recording, request: Request, alphas: Float[Array, "q d"], say: Say) -> Estimate:
    """In memory if all samples fit; else in chunks, with the length and the control that the first chunk suggests."""
    stops = _stops(recording, request)
    count = len(np.atleast_1d(next(value for value in stops.values() if value is not None)))
    each = count * (2 * recording.dim + recording.dim**2) + (recording.num_steps + 1) * recording.dim**2
    if request.chunk is None and recording.num_episodes * each <= _IN_MEMORY:
        field = _field(recording.samples(**stops), request.safe)
        return eqx.filter_jit(lambda field, at: jax.lax.map(field, at, batch_size=64))(field, alphas)
    size = request.chunk or max(1000, _IN_MEMORY // (4 * each))
    chunks = recording.chunks(size, **stops)
    if len(chunks) < 2:
        raise ValueError(
            f"--chunk must leave at least two chunks of these {recording.num_episodes} episodes, got {size}"
        )
    say(f"{recording.num_episodes} episodes in {len(chunks)} chunks; the first chooses the length and the control")
    field = _field(chunks[0], request.safe)
    # The control must not have seen the episodes it corrects: those of the first chunk are left out of the sums.
    accumulator = Accumulator(alphas, field.localizer, field.folds[0].potential)
    rest = [eqx.Partial(chunks.__getitem__, number) for number in range(1, len(chunks))]
    return accumulate(rest, accumulator, progress=True).estimate()


def _field(samples: Samples, safe: bool) -> MalliavinField:
    return MalliavinField(samples, short_localizer(samples) if safe else "auto")


def _axes(grid: list[np.ndarray], dim: int) -> list[np.ndarray]:
    if len(grid) != dim:
        raise ValueError(f"--grid must have {dim} axes for these data, got {len(grid)}")
    return grid


def _default_axes(recording: Recording, request: Request) -> list[np.ndarray]:
    """Between the 2nd and the 98th percentile of the first positions at the conditioning steps."""
    size = max(100, 2**21 // (recording.num_steps * recording.dim**2))
    x = np.concatenate(np.asarray(recording.chunks(size, **_stops(recording, request))[0].x))
    ends = np.nanpercentile(x, [2, 98], axis=0)
    return [np.linspace(low, high, _POINTS[recording.dim]) for low, high in ends.T]


def _mesh(axes: list[np.ndarray]) -> np.ndarray:
    return np.stack(np.meshgrid(*axes, indexing="ij"), -1).reshape(-1, len(axes))


def _report(recording: Recording, loss: Loss, estimate: Estimate, alphas: np.ndarray, check: Consistency) -> str:
    value = np.ravel(np.asarray(loss.value))
    lowest, carried = int(np.nanargmin(value)), np.asarray(estimate.trusted)
    lines = [
        f"{recording.num_episodes} episodes of up to {recording.num_steps} steps in {recording.dim} dimensions"
        + (f" ({recording.dropped} dropped)" if recording.dropped else ""),
        f"loss on {len(alphas)} grid points, {carried.sum()} of them trusted; lowest at "
        f"({', '.join(f'{a:.4g}' for a in alphas[lowest])}), highest {np.nanmax(value):.4g} above",
        f"median standard error of the gradient {np.median(np.asarray(estimate.stderr)[carried]):.3g}",
    ]
    if loss.curl is not None and loss.curl_expected is not None:
        curl, noise = float(loss.curl), float(loss.curl_expected)
        lines.append(f"part of the field that is no gradient {curl:.3g} (noise alone: {noise:.3g})")
    return "\n".join([*lines, "", str(check)])
