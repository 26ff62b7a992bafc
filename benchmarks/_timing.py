"""Timing that compares: all contestants warm, in one run, taking turns; the best of several rounds each."""

import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    return {
        "device": str(jax.devices()[0]),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "jax": jax.__version__,
    }


def race(contestants: dict[str, Callable[[], Any]], rounds: int) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds of the first call (compilation and all), and the best of `rounds` interleaved later ones."""
    first, best = {}, {}
    for name, run in contestants.items():
        first[name] = _seconds(run)
        best[name] = float("inf")
    for _ in range(rounds):
        for name, run in contestants.items():
            best[name] = min(best[name], _seconds(run))
    return first, best


def _seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - start


def save(name: str, results: dict[str, Any]) -> Path:
    """Write the results as JSON beside the benchmarks."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(results, indent=2) + "\n")
    return path
