"""A progress bar that never costs the run it shows."""

from collections.abc import Callable
from typing import Any


class Bar:
    """A progress bar on stderr that turns itself off, rather than raise, when anything in it goes wrong."""

    def __init__(
        self, total: int | None, done: int, *, enabled: bool, unit: str = "step", name: str = "passive Langevin"
    ):
        self._bar: Any = None
        if enabled:
            self._attempt(lambda: self._open(total, done, unit, name))

    def _open(self, total: int | None, done: int, unit: str, name: str) -> None:
        from tqdm import tqdm

        self._bar = tqdm(total=total, initial=done, unit=unit, desc=name)

    def _attempt(self, action: Callable[[], Any]) -> None:
        try:
            action()
        except Exception:  # a closed terminal must not cost the run
            self._bar = None

    def advance(self, steps: int) -> None:
        if self._bar is not None:
            self._attempt(lambda: self._bar.update(steps))

    def __enter__(self) -> "Bar":
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._attempt(lambda: self._bar.close())
