"""Where the command `malliavin-jax` begins: an interrupt while the package is still being imported is one line too."""

import os
import signal
import sys


def main() -> int:
    """Import the package, which takes seconds, and hand over; nothing is written before that."""
    ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # and not ignored, as under nohup
    if ours:
        signal.signal(signal.SIGINT, _leave)
    from malliavin_jax.cli import main as run

    if ours:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return run()


def _leave(number: int, frame: object) -> None:
    """At once: an exception would be lost, or dressed up as another one, inside an import."""
    os.write(sys.stderr.fileno(), b"\nmalliavin-jax: interrupted; nothing was written\n")
    os._exit(130)
