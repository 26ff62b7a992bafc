"""Pictures of the plane: a loss, descent directions on it, and the curl of an estimate."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from ..estimate.ratio import Estimate
from .style import COLOURS, new_axes

PLANE = {"xlabel": "α₁ (units of the state)", "ylabel": "α₂ (units of the state)"}


def loss_surface(grid: Any, value: Any, *, ceiling: float | None = None, ax: Axes | None = None) -> Axes:
    """A loss on two axes as filled contours, blank where it is not known (NaN) or too high.

    Args:
        grid: the two axes, each (nodes,).
        value: the loss, of shape (nodes of the first, nodes of the second).
        ceiling: how far above its minimum the loss is drawn; without it, all of it.
        ax: where to draw; without it, a new figure.

    Returns:
        The axes.

    Example:
        ```python
        import numpy as np
        from malliavin_jax import plots

        axes = (np.linspace(-1, 1, 9), np.linspace(-1, 1, 9))
        plots.loss_surface(axes, np.add.outer(axes[0] ** 2, axes[1] ** 2), ceiling=1.0)
        ```
    """
    ax, height = new_axes(ax), np.asarray(value, float)
    height = height - np.nanmin(height)
    top = float(np.nanmax(height)) if ceiling is None else ceiling
    levels = np.linspace(0, top, 13)
    x, y = (np.asarray(axis) for axis in grid)
    filled = ax.contourf(x, y, height.T, levels, cmap="cividis")
    ax.contour(x, y, height.T, levels, colors="white", linewidths=0.4, alpha=0.6)
    ax.figure.colorbar(filled, ax=ax, label="loss, above its minimum", ticks=MaxNLocator(6))
    ax.set(**PLANE)
    return ax


def field_arrows(grid: Any, fields: Mapping[str, Any], *, ax: Axes | None = None) -> Axes:
    """Descent directions −∇L on two axes, one colour a field; draw `loss_surface` beneath for the landscape.

    Arrows keep their direction; their lengths are compressed to |g|/(|g| + m), m the median of |g| over all fields, or
    one steep wall would hide the rest.

    Args:
        grid: the two axes, each (nodes,).
        fields: by name, an `Estimate` with `value` (nodes, nodes, 2), or that array. The first is black and broad.
        ax: where to draw; without it, a new figure.

    Returns:
        The axes.

    Example:
        ```python
        import numpy as np
        from malliavin_jax import plots

        axes = (np.linspace(-1, 1, 9), np.linspace(-1, 1, 9))
        plots.field_arrows(axes, {"∇ of |α|²/2": np.stack(np.meshgrid(*axes, indexing="ij"), -1)})
        ```
    """
    ax = new_axes(ax)
    x, y = (np.asarray(axis) for axis in grid)
    vectors = {name: _known(field) for name, field in fields.items()}
    median = np.nanmedian(np.concatenate([np.linalg.norm(v, axis=-1).ravel() for v in vectors.values()]))
    longest = 1.4 * min(np.diff(x).min(), np.diff(y).min())
    at = np.meshgrid(x, y, indexing="ij")
    for number, (name, vector) in enumerate(vectors.items()):
        size = np.linalg.norm(vector, axis=-1, keepdims=True)
        u, v = np.moveaxis(-longest * vector / (size + median), -1, 0)
        # The first is black and broad, so that the others can lie on it and both be seen.
        colour, width = (COLOURS[number % len(COLOURS)], 0.0035) if number else ("black", 0.007)
        shape: dict[str, Any] = {"angles": "xy", "scale_units": "xy", "scale": 1, "width": width, "pivot": "mid"}
        ax.quiver(*at, u, v, color=colour, label=name, **shape)
    ax.set(**PLANE)
    ax.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=len(vectors), frameon=False)
    return ax


def curl_map(grid: Any, field: Any, *, limit: float | None = None, ax: Axes | None = None) -> Axes:
    """The curl ∂₁G₂ − ∂₂G₁ of a field G on two axes, by central differences: 0 for a gradient, so what shows is error.

    Args:
        grid: the two axes, each (nodes,).
        field: an `Estimate` with `value` (nodes, nodes, 2), or that array.
        limit: the value of the darkest colour; without it, the largest that occurs.
        ax: where to draw; without it, a new figure.

    Returns:
        The axes.

    Example:
        ```python
        import numpy as np
        from malliavin_jax import plots

        axes = (np.linspace(-1, 1, 9), np.linspace(-1, 1, 9))
        plots.curl_map(axes, np.stack(np.meshgrid(*axes, indexing="ij"), -1), limit=1.0)  # a gradient: no colour
        ```
    """
    ax = new_axes(ax)
    x, y = (np.asarray(axis) for axis in grid)
    vector = _known(field)
    curl = np.gradient(vector[..., 1], x, axis=0) - np.gradient(vector[..., 0], y, axis=1)
    top = float(np.nanmax(np.abs(curl))) if limit is None else limit
    drawn = ax.pcolormesh(x, y, curl.T, cmap="PuOr", vmin=-top, vmax=top, shading="nearest", rasterized=True)
    ax.figure.colorbar(drawn, ax=ax, label="curl of the estimate (loss per unit of state²)")
    ax.set(**PLANE)
    return ax


def _known(field: Any) -> np.ndarray:
    """The values of a field on a grid, NaN where it is not trusted."""
    if isinstance(field, Estimate):
        return np.where(np.asarray(field.trusted)[..., None], np.asarray(field.value), np.nan)
    return np.asarray(field, float)
