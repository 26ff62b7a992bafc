"""The command line: `malliavin-jax reproduce`."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from . import __version__


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code (2 for a mistake of the user's, with a message and no traceback)."""
    parser = argparse.ArgumentParser(
        prog="malliavin-jax",
        description="Recover a learner's loss from its trajectories, with error bars.",
    )
    parser.add_argument("--version", action="version", version=f"malliavin-jax {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    reproduce = commands.add_parser(
        "reproduce",
        help="the paper's numerical example: four figures, a table of errors, a JSON file",
        description="Run the paper's numerical example (quartic loss, s = 0.8, 5000 episodes, 2000 steps after 300) "
        "with this library's default estimator, the paper's own and the kernel baseline.",
    )
    reproduce.add_argument("--out", type=Path, default=Path("out"), metavar="DIR", help="where to write (default: out)")
    reproduce.add_argument("--seed", type=int, default=0, help="random seed (default: 0)")
    reproduce.add_argument("--fast", action="store_true", help="a smaller run, for a first look")
    arguments = parser.parse_args(argv)
    if arguments.seed < 0:
        parser.error(f"--seed must not be negative, got {arguments.seed}")
    try:
        arguments.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        print(f"malliavin-jax: --out {arguments.out} cannot be written: {error.strerror}", file=sys.stderr)
        return 2

    from ._reproduce import reproduce as run

    run(arguments.out, seed=arguments.seed, fast=arguments.fast, say=lambda line: print(line, flush=True))
    return 0


if __name__ == "__main__":
    sys.exit(main())
