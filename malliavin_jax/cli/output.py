"""Where the command line writes, and the tables it writes: whole files or none, nothing overwritten unasked."""

import csv
import hashlib
import io
import itertools
import json
import os
import platform
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import jax
import numpy as np

from .._base.checks import plus_minus
from .._base.files import write_whole
from ..estimate.ratio import Estimate
from ..recording.recording import Recording
from ..recovery.loss import Loss
from ..samples.completion import MISSING
from ..samples.samples import Samples

_CACHE_BYTES = 2**28  # of compiled programs that are kept


class Voice(NamedTuple):
    """Results go to `say`, what goes on to `note`, JSON to `emit`; with JSON on standard output all else is notes."""

    say: Callable[[str], None]
    note: Callable[[str], None]
    emit: Callable[[str], None] | None = None


_interrupted = threading.Event()


def heed_interrupts() -> None:
    """Remember a Ctrl-C: the exception it raises is lost where a destructor or a callback is running."""

    def handle(number: int, frame: object) -> None:
        _interrupted.set()
        raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # and not ignored, as under nohup
        signal.signal(signal.SIGINT, handle)


def stop_if_interrupted() -> None:
    """For loops that would go on for ever."""
    if _interrupted.is_set():
        raise KeyboardInterrupt


def keep_programs() -> Path | None:
    """Keep compiled programs for the next run, which then starts in seconds; the folder where they are, if any.

    The user's cache directory, or what MALLIAVIN_JAX_CACHE names; "off" is none. A cache of the user's own for JAX
    (JAX_COMPILATION_CACHE_DIR) is left to serve, and a folder that cannot be written is no mistake.
    """
    named = os.environ.get("MALLIAVIN_JAX_CACHE", "")
    theirs = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    if theirs or named.lower() in ("0", "off", "no", "none"):
        return None
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(named or Path(home) / "malliavin-jax") / _processor()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _drop_oldest(folder)
    except OSError:
        return None
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.02)
    return folder


def _processor() -> str:
    """A name for what the programs run on: a home may be that of several machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    able = next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
    return hashlib.sha256(f"{platform.machine()} {platform.processor()} {able}".encode()).hexdigest()[:12]


def _drop_oldest(folder: Path) -> None:
    """Remove the programs written first, where all take more than _CACHE_BYTES."""
    files = sorted(((path.stat().st_mtime, path.stat().st_size, path) for path in folder.iterdir()), reverse=True)
    for total, (_, _, path) in zip(itertools.accumulate(size for _, size, _ in files), files, strict=True):
        if total > _CACHE_BYTES:
            path.unlink(missing_ok=True)


def say(line: str) -> None:
    print(line, flush=True)


def note(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def voice_of(json: bool) -> Voice:
    """With JSON on standard output, whatever else there is to say goes to standard error."""
    return Voice(note, note, lambda text: print(text, end="", flush=True)) if json else Voice(say, note)


class Place:
    """A folder for outputs, made when the first of them is there; None stands for nowhere.

    Args:
        folder: the folder, or None to write nothing.
        overwrite: whether files that are there already may be replaced.
        failed: the findings of a check that failed, with which every output is marked.
    """

    def __init__(self, folder: Path | None, *, overwrite: bool = False, failed: Sequence[str] = ()):
        self.folder, self.overwrite, self.failed = folder, overwrite, tuple(failed)
        self.written: list[str] = []

    def check(self, names: Sequence[str]) -> None:
        """Refuse a folder that cannot be written to, or that holds one of these files; nothing is made yet."""
        if self.folder is None:
            return
        there = [name for name in names if (self.folder / name).exists()]
        if there and not self.overwrite:
            raise ValueError(
                f"--out {self.folder} holds {', '.join(there)} already: give --overwrite, or another --out"
            )
        ancestor = self.folder
        while not ancestor.exists() and ancestor != ancestor.parent:
            ancestor = ancestor.parent
        try:
            with tempfile.TemporaryFile(dir=ancestor):
                pass
        except OSError as error:
            raise ValueError(f"--out {self.folder} cannot be written: {error.strerror} ({ancestor})") from error

    def write(self, name: str, content: str | bytes) -> None:
        """One file, whole or not at all."""
        if self.folder is None:
            return
        data = content.encode("utf-8") if isinstance(content, str) else content

        def write(file: BinaryIO) -> None:
            file.write(data)

        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_whole(self.folder / name, write)
        except OSError as error:
            raise ValueError(f"--out {self.folder} cannot be written: {error.strerror}") from error
        self.written.append(name)

    def table(self, name: str, rows: list[dict[str, Any]]) -> None:
        """Rows with the same columns, as CSV; a failed check is a comment above the header."""
        text = io.StringIO()
        if self.failed:
            text.write(f"# check failed: {'; '.join(self.failed)}\n")
        writer = csv.DictWriter(text, list(rows[0]), lineterminator=os.linesep)
        writer.writeheader()
        writer.writerows(rows)
        self.write(name, text.getvalue())

    def picture(self, name: str, draw: Callable[[Any], None]) -> None:
        """What `draw(file)` draws, as PNG."""
        if self.folder is None:
            return
        drawn = io.BytesIO()
        draw(drawn)
        self.write(name, drawn.getvalue())

    def marked(self, content: dict[str, Any]) -> dict[str, Any]:
        """For JSON: the same, with the findings of a failed check."""
        return {**content, "check_failed": list(self.failed)} if self.failed else content

    @property
    def title(self) -> str | None:
        """For pictures: that the check failed."""
        return f"check failed: {_short(self.failed[0])}" if self.failed else None

    def said(self) -> str:
        """What is where."""
        *first, last = self.written
        return f"{', '.join(first)} and {last} are in {self.folder}" if first else f"{last} is in {self.folder}"


def _short(finding: str, most: int = 70) -> str:
    """The head of a finding, up to its first colon or semicolon."""
    text = finding.split(": ", 1)[1] if finding.startswith("learner ") else finding
    text = text.split(";")[0].split(":")[0]
    return text if len(text) <= most else text[: most - 1] + "…"


def gradient_rows(alphas: np.ndarray, estimates: Estimate) -> list[dict[str, Any]]:
    """One row for each point."""
    d = alphas.shape[1]
    names = [f"{what}_{i + 1}" for what in ("alpha", "gradient", "stderr") for i in range(d)]
    numbers = np.column_stack([alphas, estimates.value, estimates.stderr, estimates.density, estimates.density_stderr])
    return [
        {**dict(zip([*names, "density", "density_stderr"], row, strict=True)), "trusted": bool(trusted)}
        for row, trusted in zip(numbers.tolist(), np.asarray(estimates.trusted), strict=True)
    ]


def point_lines(alphas: np.ndarray, estimates: Estimate) -> str:
    """A few points, a line each: the gradient there with its standard error."""
    lines = []
    for i, alpha in enumerate(alphas):
        pairs = zip(np.asarray(estimates.value)[i], np.asarray(estimates.stderr)[i], strict=True)
        entries = ", ".join(plus_minus(value, stderr) for value, stderr in pairs)
        place, trusted = ", ".join(f"{number:.6g}" for number in alpha), bool(estimates.trusted[i])
        lines.append(f"gradient at {place}: {entries}{'' if trusted else ' (not trusted)'}")
    return "\n".join(lines)


def many(number: int, thing: str) -> str:
    """\"1 step\", \"2 steps\"."""
    return f"{number} {thing}{'' if number == 1 else 's'}"


def loss_rows(alphas: np.ndarray, loss: Loss) -> list[dict[str, Any]]:
    """One row for each point of the grid."""
    names = [*(f"alpha_{i + 1}" for i in range(alphas.shape[1])), "loss", "stderr"]
    numbers = np.column_stack([alphas, np.ravel(loss.value), np.ravel(loss.stderr)]).tolist()
    return [dict(zip(names, row, strict=True)) for row in numbers]


def summary_of(recording: Recording, samples: Samples, loss: Loss, estimates: Estimate, alphas: np.ndarray) -> str:
    """What a recovery found, in a few lines."""
    value = np.ravel(np.asarray(loss.value))
    lowest, carried = int(np.nanargmin(value)), np.asarray(estimates.trusted)
    lines = [
        f"{many(recording.num_episodes, 'episode')} of up to {many(recording.num_steps, 'step')} in "
        f"{many(recording.dim, 'dimension')}" + (f" ({recording.dropped} dropped)" if recording.dropped else ""),
        f"loss on {len(alphas)} grid points, {carried.sum()} of them trusted; lowest at "
        f"({', '.join(f'{a:.4g}' for a in alphas[lowest])}), highest {np.nanmax(value):.4g} above",
        f"median standard error of the gradient {np.median(np.asarray(estimates.stderr)[carried]):.3g}",
    ]
    if samples.rung != "hessians":
        lines.append(MISSING[samples.rung])
    if loss.curl is not None and loss.curl_expected is not None:
        curl, noise = float(loss.curl), float(loss.curl_expected)
        lines.append(f"part of the field that is no gradient {curl:.3g} (noise alone: {noise:.3g})")
    return "\n".join(lines)


def as_json(content: dict[str, Any]) -> str:
    """Numbers that are not finite, which JSON has no word for, become null."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: plain(item) for name, item in value.items()}
        if isinstance(value, list | tuple):
            return [plain(item) for item in value]
        return None if isinstance(value, float) and not np.isfinite(value) else value

    return json.dumps(plain(content), indent=2, allow_nan=False) + "\n"
