"""Tables and pictures that the command line writes."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from ..estimate.ratio import Estimate
from ..plots.plane import COLOURS, PLANE
from ..recovery.loss import Loss


def write_table(path: Path, alphas: np.ndarray, estimate: Estimate) -> list[dict[str, Any]]:
    """One row for each point, to a CSV file; returned for JSON, with null for what is not finite."""
    d = alphas.shape[1]
    names = [f"{what}_{i + 1}" for what in ("alpha", "gradient", "stderr") for i in range(d)]
    numbers = np.column_stack([alphas, estimate.value, estimate.stderr, estimate.density, estimate.density_stderr])
    rows = [
        {**dict(zip([*names, "density", "density_stderr"], row, strict=True)), "trusted": bool(trusted)}
        for row, trusted in zip(numbers.tolist(), np.asarray(estimate.trusted), strict=True)
    ]
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return rows


def write_json(path: Path, content: dict[str, Any]) -> None:
    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: plain(item) for name, item in value.items()}
        if isinstance(value, list | tuple):
            return [plain(item) for item in value]
        return None if isinstance(value, float) and not np.isfinite(value) else value

    path.write_text(json.dumps(plain(content), indent=2, allow_nan=False) + "\n", encoding="utf-8")


def picture(path: Path, draw: Callable[[Any], Any]) -> None:
    figure = Figure(figsize=(6.0, 4.0), layout="constrained")
    draw(figure.subplots())
    figure.savefig(path, dpi=160)


def arrows(ax: Any, alphas: np.ndarray, estimate: Estimate) -> None:
    trusted = np.asarray(estimate.trusted)
    at, value = alphas[trusted], -np.asarray(estimate.value)[trusted]
    ax.quiver(*at.T, *value.T, color=COLOURS[0], width=0.003)
    ax.plot(*alphas[~trusted].T, ".", color="0.8", markersize=3)
    ax.set(**PLANE, title="−∇L(α); grey: not trusted")


def write_loss(path: Path, alphas: np.ndarray, loss: Loss) -> None:
    """One row for each point of the grid, to a CSV file."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow([*(f"alpha_{i + 1}" for i in range(alphas.shape[1])), "loss", "stderr"])
        writer.writerows(np.column_stack([alphas, np.ravel(loss.value), np.ravel(loss.stderr)]).tolist())
