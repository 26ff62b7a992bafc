"""Files that are replaced whole or not at all."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO


def write_whole(path: Path, write: Callable[[BinaryIO], None]) -> None:
    """Have `write` fill the file at `path`, atomically.

    The file is written beside its final place, flushed to disk and moved over the old one, so that `path` holds the
    old file or the new one, whole, whenever the process dies. A leftover of a killed write has a fixed name and is
    overwritten by the next one.
    """
    draft = path.with_name(f".{path.name}.tmp")
    try:
        with open(draft, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    if os.name == "posix":  # the move itself is only durable once the directory is
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
