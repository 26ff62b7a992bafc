"""The command line: `malliavin-jax check | estimate | recover | watch | reproduce`."""

import argparse
import math
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from .. import __version__

_DATA = """DATA is a .npz file or a folder of .npy files with the arrays
  x           (episodes, points, d)      row k: the position after k steps
  gradient    (episodes, points, d)      row k: the gradient used there; may be absent
  hessian     (episodes, points, d, d)   or (episodes, points, d), its diagonal
  step_size, inverse_temperature         numbers, or one for each episode
  last_steps  (episodes,)                steps that each episode made, if they differ
or one long log, x and gradient (rows, d), with starts, the rows at which episodes start.
"""
_AXIS = 100_000  # points of a grid on one axis
_POINTS = 250_000  # of a grid in all
_CODES = "exit codes: 0 done, 2 a mistake in the data or in the command, named in one line, 130 interrupted"


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code (2 for a mistake of the user's, with a message and no traceback)."""
    parser = _parser()
    arguments = parser.parse_args(_shielded(sys.argv[1:] if argv is None else argv))
    if arguments.command == "reproduce" and arguments.seed < 0:
        parser.error(f"--seed must not be negative, got {arguments.seed}")
    try:
        return _run(arguments, own_process=argv is None)
    except KeyboardInterrupt:
        print("\nmalliavin-jax: interrupted; files that were written are whole", file=sys.stderr)
        if argv is None:  # a process of our own: the compiler's threads, left in the middle, may crash on the way out
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(130)
        return 130
    except BrokenPipeError:  # whoever read our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (ValueError, OSError) as error:
        return _failed(str(error))
    except MemoryError:
        return _failed("not enough memory; a folder of .npy files and --chunk-size need less")


def _failed(message: str) -> int:
    print(f"malliavin-jax: {' '.join(message.split())}", file=sys.stderr)
    return 2


def _run(arguments: argparse.Namespace, *, own_process: bool) -> int:
    from .output import Place, heed_interrupts, keep_programs, say, voice_of

    if own_process:
        heed_interrupts()
    if own_process and not arguments.no_cache:  # called from Python, the settings are those of the caller
        keep_programs()
    if arguments.command == "reproduce":
        Place(arguments.out, overwrite=arguments.overwrite).check(["results.json", "table.txt"])
        from .reproduce import reproduce

        reproduce(arguments.out, seed=arguments.seed, fast=arguments.fast, say=say)
        return 0
    if arguments.command == "watch":
        from .watch import Watch, run_watch

        place = Place(arguments.out or (None if arguments.json else Path("out")), overwrite=arguments.overwrite)
        settings = {name: getattr(arguments, name) for name in Watch._fields}
        return run_watch(arguments.data, place, Watch(**settings), voice_of(arguments.json))

    from . import commands

    request = commands.Request(**{name: getattr(arguments, name) for name in commands.Request._fields})
    default = None if arguments.command == "check" or arguments.json else Path("out")
    place = Place(default if arguments.out is None else arguments.out, overwrite=arguments.overwrite)
    voice = voice_of(arguments.json)
    if arguments.command == "check":
        return commands.run_check(arguments.data, place, request, voice)
    if arguments.command == "estimate":
        points = None if arguments.at is None else commands.points_of(arguments.at)
        return commands.run_estimate(arguments.data, place, request, points, arguments.grid, voice)
    return commands.run_recover(arguments.data, place, request, arguments.grid, voice)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """In one line, as every other mistake."""
        plain = message.removeprefix("argument ").replace(": must", " must").replace(": has", " has")
        self.exit(2, f"{self.prog.split()[0]}: {plain} ({self.prog} --help explains)\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="malliavin-jax",
        description="Recover a learner's loss from its trajectories, with error bars.",
        epilog="malliavin-jax COMMAND --help explains a command and gives an example",
    )
    parser.add_argument("--version", action="version", version=f"malliavin-jax {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_check(commands)
    _add_estimate(commands)
    _add_recover(commands)
    _add_watch(commands)
    _add_reproduce(commands)
    for command in commands.choices.values():
        command.add_argument(
            "--no-cache",
            action="store_true",
            help="keep no compiled programs (MALLIAVIN_JAX_CACHE: another folder, or off)",
        )
    return parser


def _add_check(commands: Any) -> None:
    check = _data_command(
        commands,
        "check",
        help="does the recorded run look like the learner it is said to come from?",
        description="Hold recorded data against the law of the learner: residual variance, Gaussianity, whiteness, "
        "step size and temperature, integration by parts.",
        examples="malliavin-jax check run.npz\n  malliavin-jax check run.npz --step-size 0.01 --inverse-temperature 1",
        codes=_CODES + ",\n1 the data do not fit the learner",
    )
    check.add_argument("--out", type=Path, metavar="DIR", help="write check.json there")
    check.set_defaults(times=None, steps=None, chunk_size=None, safe=False, force=False)


def _add_estimate(commands: Any) -> None:
    estimate = _data_command(
        commands,
        "estimate",
        help="the gradient of the loss at points or on a grid, with error bars",
        description="Estimate the gradient of the learner's loss at points it need not have visited: estimate.csv, "
        "estimate.json and, in one and two dimensions, estimate.png.",
        examples="malliavin-jax estimate run.npz --grid -1:1:41\n"
        "  malliavin-jax estimate run.npz --at 0.1,0.5 -0.3,0.2 --steps 20 40 80",
        codes=_CODES,
    )
    where = estimate.add_mutually_exclusive_group(required=True)
    where.add_argument("--at", nargs="+", metavar="POINT", help="points, as numbers separated by commas: 0.1,0.5")
    where.add_argument("--grid", type=_grid, metavar="GRID", help="low:high:count for each axis, separated by commas")
    _add_estimation_options(estimate)


def _add_recover(commands: Any) -> None:
    recover = _data_command(
        commands,
        "recover",
        help="the loss itself on a grid, in one and two dimensions",
        description="Recover the learner's loss by integrating the estimated gradient: loss.csv, loss.png, "
        "gradient.csv, gradient.png, report.txt.",
        examples="malliavin-jax recover run.npz --out recovered\n"
        "  malliavin-jax recover run.npz --grid -1:1:41,-2:2:41 --safe",
        codes=_CODES,
    )
    recover.add_argument(
        "--grid",
        type=_grid,
        metavar="GRID",
        help="low:high:count for each axis, with commas (default: where the data are)",
    )
    _add_estimation_options(recover)


def _add_estimation_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--out", type=Path, metavar="DIR", help="where to write (default: out; with --json, nowhere)")
    command.add_argument(
        "--force", action="store_true", help="go on with data that do not fit the learner, and mark the outputs"
    )
    stops = command.add_mutually_exclusive_group()
    stops.add_argument("--times", type=float, nargs="+", metavar="S", help="conditioning times")
    stops.add_argument(
        "--steps",
        type=int,
        nargs="+",
        metavar="K",
        help="conditioning steps (default: eight, up to the median number of steps)",
    )
    command.add_argument("--safe", action="store_true", help="for episodes that end because of where they are")
    command.add_argument(
        "--chunk-size",
        type=_count,
        metavar="N",
        help="read N episodes at a time (default: all at once if they fit)",
    )


def _add_watch(commands: Any) -> None:
    watch = commands.add_parser(
        "watch",
        help="the loss of a run that is still being recorded, update by update",
        description="Follow a folder that a Recorder is writing: every so many episodes the loss is fitted again, "
        "and what no longer agrees with the newest is forgotten. Writes loss.csv, loss.png, watch.json and state.npz, "
        "from which the same command goes on, as if it had never ended, after an interrupt or a kill.",
        epilog=f"examples:\n  malliavin-jax watch run\n  malliavin-jax watch run --once --grid -2:2:81\n\n{_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    watch.add_argument("data", type=Path, metavar="RUN", help="the folder of a recorder")
    watch.add_argument("--out", type=Path, metavar="DIR", help="where to write (default: out; with --json, nowhere)")
    watch.add_argument("--overwrite", action="store_true", help="begin anew, and replace what is there")
    watch.add_argument("--json", action="store_true", help="a line of JSON on standard output at each refreshing")
    watch.add_argument("--grid", type=_grid, help="low:high:count for each axis (default: around the first update)")
    watch.add_argument("--episodes", type=_count, default=50, metavar="N", help="that make an update (default: 50)")
    watch.add_argument("--piece-steps", type=_count, metavar="N", help="cut long episodes into pieces of so many steps")
    watch.add_argument("--forgetting", type=float, metavar="R", help="factor of an update (default: from the data)")
    watch.add_argument("--every", type=_seconds, default=5.0, metavar="S", help="seconds between looks (default: 5)")
    watch.add_argument("--once", action="store_true", help="learn what is there, and end")
    watch.add_argument("--idle", type=_seconds, metavar="S", help="end when nothing new has come for so many seconds")


def _add_reproduce(commands: Any) -> None:
    reproduce = commands.add_parser(
        "reproduce",
        help="the paper's numerical example: figures, a table of errors, a JSON file",
        description="Run the paper's numerical example (quartic loss, s = 0.8, 5000 episodes, 2000 steps after 300): "
        "the error of the gradient rung by rung, from the paper's estimator to this library's default, without "
        "gradient noise and with it; then chains driven by both and by a kernel, and the loss recovered from them.",
    )
    reproduce.add_argument("--out", type=Path, default=Path("out"), metavar="DIR", help="where to write (default: out)")
    reproduce.add_argument("--overwrite", action="store_true", help="replace what is there")
    reproduce.add_argument("--seed", type=int, default=0, help="random seed (default: 0)")
    reproduce.add_argument("--fast", action="store_true", help="a smaller run, for a first look")


def _data_command(
    commands: Any, name: str, *, help: str, description: str, examples: str, codes: str
) -> argparse.ArgumentParser:
    """A command that reads recorded data."""
    parser = commands.add_parser(
        name,
        help=help,
        description=description,
        epilog=f"{_DATA}\nexamples:\n  {examples}\n\n{codes}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "data", type=Path, metavar="DATA", help="a .npz file, a folder of .npy files, or that of a recorder"
    )
    parser.add_argument("--step-size", type=float, metavar="E", help="if the data do not hold it")
    parser.add_argument("--inverse-temperature", type=float, metavar="B", help="if the data do not hold it")
    parser.add_argument("--piece-steps", type=_count, metavar="N", help="cut one long log into pieces of so many steps")
    parser.add_argument("--blocks", type=_count, metavar="N", help="independent blocks that these make, about")
    parser.add_argument(
        "--json", action="store_true", help="results as JSON on standard output, and nothing else there"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace outputs that are there already")
    parser.add_argument("--drop-bad", action="store_true", help="leave bad episodes out instead of refusing the data")
    return parser


def _shielded(words: Sequence[str]) -> list[str]:
    """Words such as -1e-3, -1:1:41 or -0.3,0.2 as values: argparse takes one that begins with a space for no option.

    `--json -` is `--json`: standard output either way.
    """
    plain = [word for before, word in zip(["", *words], words, strict=False) if (before, word) != ("--json", "-")]
    return [f" {word}" if re.match(r"-(\d|\.\d|inf|nan)", word) else word for word in plain]


def _count(text: str) -> int:
    """A whole number, at least 2."""
    if not text.strip().isdigit() or int(text) < 2:
        raise argparse.ArgumentTypeError(f"must be a whole number, at least 2, got {text!r}")
    return int(text)


def _seconds(text: str) -> float:
    """A positive number."""
    if re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)(e-?\d+)?", text) and 0 < float(text) < math.inf:
        return float(text)
    raise argparse.ArgumentTypeError(f"must be a positive number, got {text!r}")


def _grid(text: str) -> list[np.ndarray]:
    """The axes in low:high:count, one or several separated by commas."""
    axes = []
    for part in text.strip().split(","):
        try:
            low, high, count = part.split(":")
            axis = np.linspace(float(low), float(high), int(count) if int(count) <= _AXIS else 0)
        except ValueError:
            axis = np.zeros(0)
        if len(axis) < 2 or not np.all(np.isfinite(axis)) or not axis[0] < axis[-1]:
            raise argparse.ArgumentTypeError(
                f"must be low:high:count with low < high and a count from 2 to {_AXIS}, got {part!r}"
            )
        axes.append(axis)
    points = math.prod(len(axis) for axis in axes)
    if points > _POINTS:
        most = int(_POINTS ** (1 / len(axes)) + 1e-9)
        ways = ",".join(f"{axis[0]:g}:{axis[-1]:g}:{min(len(axis), most)}" for axis in axes)
        raise argparse.ArgumentTypeError(f"has {points} points, and at most {_POINTS} are served: try --grid {ways}")
    return axes
