"""Tables that the command line writes."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np

from ..estimate.ratio import Estimate
from ..recovery.loss import Loss


def write_table(path: Path, alphas: np.ndarray, estimates: Estimate) -> list[dict[str, Any]]:
    """One row for each point, to a CSV file; returned for JSON, with null for what is not finite."""
    d = alphas.shape[1]
    names = [f"{what}_{i + 1}" for what in ("alpha", "gradient", "stderr") for i in range(d)]
    numbers = np.column_stack([alphas, estimates.value, estimates.stderr, estimates.density, estimates.density_stderr])
    rows = [
        {**dict(zip([*names, "density", "density_stderr"], row, strict=True)), "trusted": bool(trusted)}
        for row, trusted in zip(numbers.tolist(), np.asarray(estimates.trusted), strict=True)
    ]
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return rows


def write_loss(path: Path, alphas: np.ndarray, loss: Loss) -> None:
    """One row for each point of the grid, to a CSV file."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow([*(f"alpha_{i + 1}" for i in range(alphas.shape[1])), "loss", "stderr"])
        writer.writerows(np.column_stack([alphas, np.ravel(loss.value), np.ravel(loss.stderr)]).tolist())


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Numbers that are not finite, which JSON has no word for, become null."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: plain(item) for name, item in value.items()}
        if isinstance(value, list | tuple):
            return [plain(item) for item in value]
        return None if isinstance(value, float) and not np.isfinite(value) else value

    path.write_text(json.dumps(plain(content), indent=2, allow_nan=False) + "\n", encoding="utf-8")
