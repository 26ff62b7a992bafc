"""One function per picture; each draws on an Axes and returns it.

Colours are those of Okabe & Ito, told apart by colour-blind readers and in grey print.
"""

from collections.abc import Mapping
from typing import Any

import matplotlib

matplotlib.use("Agg", force=False)

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

from .conditional import Estimate
from .recovery import Loss

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
TRUTH = {"color": "black", "linestyle": "--", "linewidth": 1.2, "label": "truth"}


def _axes(ax: Axes | None) -> Axes:
    return plt.subplots(figsize=(6.0, 4.0), layout="constrained")[1] if ax is None else ax


def _limits(ax: Axes, truth: Any) -> None:
    """Scale by the truth: a wild estimate must not flatten everything else."""
    low, high = float(np.nanmin(truth)), float(np.nanmax(truth))
    ax.set_ylim(low - 0.35 * (high - low), high + 0.35 * (high - low))


def gradient_bands(
    alphas: Any, estimates: Mapping[str, Estimate], truth: Any = None, *, ax: Axes | None = None
) -> Axes:
    """Estimated gradients on a one-dimensional grid, each with its band of ± 1.96 standard errors."""
    ax, alphas = _axes(ax), np.asarray(alphas).ravel()
    for colour, (name, estimate) in zip(COLOURS, estimates.items(), strict=False):
        value, error = np.asarray(estimate.value)[:, 0], 1.96 * np.asarray(estimate.stderr)[:, 0]
        ax.plot(alphas, value, color=colour, label=name)
        ax.fill_between(alphas, value - error, value + error, color=colour, alpha=0.2, linewidth=0)
    if truth is not None:
        ax.plot(alphas, np.asarray(truth).ravel(), **TRUTH)
        _limits(ax, truth)
    ax.set(xlabel="α (units of the state)", ylabel="∇L(α) (loss per unit of state)")
    ax.legend(frameon=False)
    return ax


def chain_trace(gradients: Mapping[str, Any], truths: Mapping[str, Any], *, ax: Axes | None = None) -> Axes:
    """Gradient estimates along one chain against the true gradient at the same positions, step by step."""
    ax = _axes(ax)
    for colour, name in zip(COLOURS, gradients, strict=False):
        error = np.asarray(gradients[name]).ravel() - np.asarray(truths[name]).ravel()
        size = np.maximum(np.abs(error), 1e-8)
        ax.plot(size, ".", markersize=2.5, color=colour, label=name, alpha=0.7)
    ax.set_yscale("log")
    ax.set(xlabel="step of the outer chain", ylabel="|estimate − ∇L(α_k)| (loss per unit of state)")
    ax.set_ylim(top=1e4 if np.max([np.max(np.abs(np.asarray(g))) for g in gradients.values()]) > 1 else None)
    ax.legend(loc="upper center", ncols=len(gradients), frameon=False, markerscale=4)
    return ax


def histogram_against_gibbs(
    positions: Mapping[str, Any], grid: Any, density: Any, *, bins: int = 40, ax: Axes | None = None
) -> Axes:
    """Histograms of chains, with the Gibbs density they should have."""
    ax, grid = _axes(ax), np.asarray(grid)
    edges = np.linspace(grid[0], grid[-1], bins + 1)
    for colour, (name, x) in zip(COLOURS, positions.items(), strict=False):
        ax.hist(np.asarray(x).ravel(), edges, density=True, histtype="step", linewidth=1.5, color=colour, label=name)
    ax.plot(grid, np.asarray(density), **{**TRUTH, "label": "Gibbs density"})
    ax.set(xlabel="α (units of the state)", ylabel="density (1/unit of state)")
    ax.legend(frameon=False)
    return ax


def loss_recovery(losses: Mapping[str, Loss], grid: Any = None, truth: Any = None, *, ax: Axes | None = None) -> Axes:
    """Recovered losses in one dimension with ± 1.96 standard errors, and the true one; all have minimum 0."""
    ax = _axes(ax)
    for colour, (name, loss) in zip(COLOURS, losses.items(), strict=False):
        value, error = np.asarray(loss.value), 1.96 * np.asarray(loss.stderr)
        ax.plot(np.asarray(loss.grid), value, color=colour, label=name)
        ax.fill_between(np.asarray(loss.grid), value - error, value + error, color=colour, alpha=0.2, linewidth=0)
    if truth is not None:
        ax.plot(np.asarray(grid), np.asarray(truth), **TRUTH)
        _limits(ax, truth)
    ax.set(xlabel="α (units of the state)", ylabel="loss, up to a constant")
    ax.legend(frameon=False)
    return ax
