"""What the pictures share: colours, words on the axes, bands, limits."""

from collections.abc import Iterator, Mapping
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
TRUTH: dict[str, Any] = {"color": "black", "linestyle": "--", "linewidth": 1.2, "label": "truth"}
STATE, SLOPE = "α (units of the state)", "∇L(α) (loss per unit of state)"
ERROR = "estimate − ∇L(α) (loss per unit of state)"
RMSE = "RMSE of ∇L (loss per unit of state)"
MARKERS = "osD^v<>ph"


def new_axes(ax: Axes | None) -> Axes:
    """The axes that were given, or those of a new figure."""
    return plt.subplots(figsize=(6.0, 4.0), layout="constrained")[1] if ax is None else ax


def styled(curves: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], tuple[str, Any]]]:
    """Each item with its colour; past the last colour they begin again, with another line."""
    for number, item in enumerate(curves.items()):
        around, colour = divmod(number, len(COLOURS))
        yield {"color": COLOURS[colour], "linestyle": ("-", "-.", ":")[around % 3]}, item


def band(ax: Axes, x: Any, value: Any, stderr: Any, trusted: Any, *, style: dict[str, Any], name: str) -> None:
    """A curve with ± 1.96 standard errors where it is trusted, dotted on and beside the rest."""
    doubtful = ~trusted & np.isfinite(value)
    ax.plot(x, np.where(trusted, value, np.nan), label=name, **style)
    if doubtful.any():
        reach = doubtful | np.append(doubtful[1:], False) | np.append(False, doubtful[:-1])
        ax.plot(x, np.where(reach, value, np.nan), color=style["color"], linestyle=":", linewidth=1.0)
    error = 1.96 * np.where(trusted & np.isfinite(stderr), stderr, np.nan)
    ax.fill_between(x, value - error, value + error, color=style["color"], alpha=0.2, linewidth=0)


def limits(ax: Axes, truth: Any) -> None:
    """Scale by the truth: a wild estimate must not flatten everything else."""
    low, high = float(np.nanmin(truth)), float(np.nanmax(truth))
    margin = 0.35 * (high - low) or 1.0
    ax.set_ylim(low - margin, high + margin)
