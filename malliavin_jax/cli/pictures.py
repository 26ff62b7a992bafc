"""Pictures that the command line draws. Whoever imports this file imports matplotlib."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from matplotlib.figure import Figure

from .. import plots
from ..estimate.ratio import Estimate
from ..plots.plane import COLOURS, PLANE
from ..recovery.loss import Loss


def picture(path: Path, draw: Callable[[Any], Any]) -> None:
    """Have `draw` fill an Axes, and write it to `path`: no window, no backend to choose."""
    figure = Figure(figsize=(6.0, 4.0), layout="constrained")
    draw(figure.subplots())
    figure.savefig(path, dpi=160)


def draw_gradient(path: Path, alphas: np.ndarray, estimates: Estimate) -> None:
    """Estimates of the gradient at points on a line, or in the plane."""
    if alphas.shape[1] == 2:
        picture(path, lambda ax: _arrows(ax, alphas, estimates))
        return
    order = np.argsort(alphas[:, 0])
    sorted_estimates = jax.tree.map(lambda leaf: leaf[order], estimates)
    picture(path, lambda ax: plots.gradient_bands(alphas[order], {"estimate": sorted_estimates}, ax=ax))


def draw_loss(path: Path, loss: Loss) -> None:
    """A recovered loss on a line, or in the plane."""
    if isinstance(loss.grid, tuple):
        picture(path, lambda ax: plots.loss_surface(loss.grid, loss.value, ax=ax))
    else:
        picture(path, lambda ax: plots.loss_recovery({"recovered": loss}, ax=ax))


def _arrows(ax: Any, alphas: np.ndarray, estimates: Estimate) -> None:
    trusted = np.asarray(estimates.trusted)
    at, value = alphas[trusted], -np.asarray(estimates.value)[trusted]
    ax.quiver(*at.T, *value.T, color=COLOURS[0], width=0.003)
    ax.plot(*alphas[~trusted].T, ".", color="0.8", markersize=3)
    ax.set(**PLANE, title="−∇L(α); grey: not trusted")
