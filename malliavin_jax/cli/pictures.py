"""Pictures that the command line draws. Whoever imports this file imports matplotlib."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from matplotlib.figure import Figure

from .. import plots
from .._base.checks import plus_minus
from .._base.files import write_whole
from ..estimate.ratio import Estimate
from ..plots.plane import PLANE
from ..plots.style import COLOURS, MARKERS, RMSE, STATE, TRUTH
from ..recovery.loss import Loss
from .ladder import HINDSIGHT, RUNGS, Ladder

_FEW = 15  # points that are drawn one by one, with error bars or numbers
_ARROWS = 30  # on an axis, at most


def picture(file: Any, draw: Callable[[Any], Any], title: str | None = None) -> None:
    """Have `draw` fill an Axes, and write it to `file`: no window, no backend to choose."""
    figure = Figure(figsize=(6.0, 4.0), layout="constrained")
    draw(figure.subplots())
    if title is not None:
        figure.suptitle(title, fontsize=9, color="firebrick", wrap=True)
    save(figure, file)


def save(figure: Figure, file: Any) -> None:
    """To an open file, or to a path, whole or not at all."""
    if isinstance(file, Path):
        write_whole(file, lambda opened: figure.savefig(opened, format="png", dpi=160))
    else:
        figure.savefig(file, format="png", dpi=160)


def draw_gradient(file: Any, alphas: np.ndarray, estimates: Estimate, title: str | None = None) -> None:
    """Estimates of the gradient at points on a line, or in the plane."""
    if alphas.shape[1] == 2:
        picture(file, lambda ax: _plane(ax, alphas, estimates), title)
        return
    order = np.argsort(alphas[:, 0])
    ordered = jax.tree.map(lambda leaf: leaf[order], estimates)
    if len(alphas) <= _FEW:
        picture(file, lambda ax: _bars(ax, alphas[order, 0], ordered), title)
    else:
        picture(file, lambda ax: plots.gradient_bands(alphas[order], {"estimate": ordered}, ax=ax), title)


def draw_loss(file: Any, loss: Loss, title: str | None = None) -> None:
    """A recovered loss on a line, or in the plane."""
    if isinstance(loss.grid, tuple):
        picture(file, lambda ax: plots.loss_surface(loss.grid, loss.value, ax=ax), title)
    else:
        picture(file, lambda ax: plots.loss_recovery({"recovered": loss}, ax=ax), title)


def _bars(ax: Any, x: np.ndarray, estimates: Estimate) -> None:
    """A few points on a line, ± 2 standard errors; hollow where not trusted."""
    value, stderr = np.asarray(estimates.value)[:, 0], np.asarray(estimates.stderr)[:, 0]
    trusted = np.asarray(estimates.trusted) & np.isfinite(stderr)
    ax.errorbar(
        x[trusted], value[trusted], 2 * stderr[trusted],
        fmt="o", color=COLOURS[0], capsize=4, label="estimate ± 2 standard errors",
    )  # fmt: skip
    if not trusted.all():
        ax.plot(x[~trusted], value[~trusted], "o", color="0.6", markerfacecolor="none", label="not trusted")
    if len(x) == 1:
        ax.set_xlim(x[0] - 1, x[0] + 1)
        if trusted[0]:
            note = plus_minus(value[0], stderr[0])
            ax.annotate(note, (x[0], value[0]), xytext=(10, 0), textcoords="offset points", va="center")
    ax.margins(0.1, 0.25)
    ax.grid(axis="y", color="0.9")
    ax.set(xlabel=STATE, ylabel="∇L(α) (loss per unit of state)")
    ax.legend(frameon=False, fontsize=9)


def _plane(ax: Any, alphas: np.ndarray, estimates: Estimate) -> None:
    """Descent directions; on a fine grid some of them, over an image of their size."""
    trusted, value = np.asarray(estimates.trusted), np.asarray(estimates.value)
    x, y = (np.unique(column) for column in alphas.T)
    shown = trusted.copy()
    if len(x) * len(y) == len(alphas) and max(len(x), len(y)) > _ARROWS:
        size = np.where(trusted, np.linalg.norm(value, axis=1), np.nan).reshape(len(x), len(y))
        image = ax.pcolormesh(x, y, size.T, cmap="cividis", shading="nearest", rasterized=True)
        ax.figure.colorbar(image, ax=ax, label="|∇L(α)| (loss per unit of state)")
        every = [np.arange(n) % -(-n // _ARROWS) == -(-n // _ARROWS) // 2 for n in (len(x), len(y))]
        shown &= np.outer(*every).ravel()
        ax.set_title("−∇L(α), over an image of its size; blank: not trusted", fontsize=10)
        colour = "white"
    else:
        ax.plot(*alphas[~trusted].T, ".", color="0.8", markersize=3)
        ax.set_title("−∇L(α); grey: not trusted", fontsize=10)
        colour = COLOURS[0]
    ax.quiver(*alphas[shown].T, *-value[shown].T, color=colour, width=0.003)
    if len(alphas) <= _FEW:
        _numbers(ax, alphas, estimates)
    ax.set(**PLANE)


def _numbers(ax: Any, alphas: np.ndarray, estimates: Estimate) -> None:
    """A few points in the plane, with the gradients and their standard errors beside them."""
    ax.plot(*alphas.T, ".", color="black", markersize=4)
    for alpha, value, stderr in zip(alphas, np.asarray(estimates.value), np.asarray(estimates.stderr), strict=True):
        text = ", ".join(f"{v:.3g} ± {s:.1g}" for v, s in zip(value, stderr, strict=True))
        ax.annotate(f"∇L = ({text})", alpha, xytext=(0, 8), textcoords="offset points", ha="center", fontsize=7)
    ax.margins(0.6, 0.4)


def draw_watch(file: Any, loss: Loss, history: Any, axis: np.ndarray) -> None:
    """The loss now; beside it, over the rows, how it came to be (on a line), and how much is remembered."""
    figure = Figure(figsize=(10.0, 4.0), layout="constrained")
    now, past = figure.subplots(1, 2)
    known = bool(np.isfinite(np.asarray(loss.value)).any())
    if not known:
        now.set_title("too few episodes to trust any point yet", fontsize=10)
    if isinstance(loss.grid, tuple):
        if known:
            plots.loss_surface(loss.grid, loss.value, ax=now)
        past.plot(history.row, history.memory, ".-", color=COLOURS[0])
        past.set(ylabel="updates remembered", ylim=(0, None))
    else:
        if known:
            plots.loss_recovery({"recovered": loss}, ax=now)
        if len(history.row) > 1:
            top = float(np.nanpercentile(history.loss, 90)) if np.isfinite(history.loss).any() else 1.0
            image = past.pcolormesh(
                history.row, axis, history.loss.T, cmap="cividis", shading="nearest", vmin=0, vmax=top, rasterized=True
            )
            figure.colorbar(image, ax=past, label="recovered loss")
        past.set(ylabel=STATE)
    for row in history.row[np.diff(history.changes, prepend=0) > 0]:
        past.axvline(row, color=COLOURS[1], linewidth=1.2)
    found = int(history.changes[-1]) if len(history.changes) else 0
    past.set_title(f"{found} change{'' if found == 1 else 's'} found", fontsize=10)
    past.set_xlabel("rows learned")
    save(figure, file)


# --- the figures of `reproduce`: one panel an estimator, because curves that are right lie on one another -----------


def draw_ladder(path: Path, ladders: list[Ladder]) -> None:
    """The error of every rung, top to bottom, on a logarithmic axis; hollow marks are the estimated standard errors."""
    figure = Figure(figsize=(7.2, 4.4), layout="constrained")
    ax = figure.subplots()
    for number, ladder in enumerate(ladders):
        heights = np.arange(len(RUNGS)) + 0.22 * (number - (len(ladders) - 1) / 2)
        colour, marker = COLOURS[number], MARKERS[number]
        rmse, stderr = ([ladder.errors[name][which] for name in RUNGS] for which in ("rmse", "stderr"))
        ax.plot(rmse[:-1], heights[:-1], "-", color=colour, linewidth=0.8, alpha=0.5)
        ax.plot(rmse, heights, marker, color=colour, label=f"gradient noise {ladder.noise:g}")
        ax.plot(stderr, heights, marker, color=colour, markerfacecolor="none", markersize=9, alpha=0.7)
    ax.plot([], [], "o", color="0.4", markerfacecolor="none", markersize=9, label="estimated standard error")
    ax.axhline(len(RUNGS) - 1.5, color="0.6", linewidth=0.8, linestyle="--")
    labels = [name if name == HINDSIGHT else f"{place + 1}. {name}" for place, name in enumerate(RUNGS)]
    ax.set(xscale="log", xlabel=RMSE, yticks=range(len(RUNGS)), yticklabels=labels, ylim=(len(RUNGS) - 0.5, -0.5))
    ax.grid(axis="x", color="0.9")
    ax.set_axisbelow(True)
    figure.legend(loc="outside upper center", ncols=2, frameon=False)
    save(figure, path)


def draw_rungs(path: Path, alphas: Any, ladder: Ladder, truth: Any) -> None:
    """Estimate minus truth, ± 2 standard errors, a panel for each rung; neighbours share a scale."""
    figure = Figure(figsize=(10.5, 5.4), layout="constrained")
    x, true = np.asarray(alphas)[:, 0], np.asarray(truth)[:, 0]
    axes, tops = figure.subplots(2, 4, sharex=True).ravel(), []
    for number, (ax, name) in enumerate(zip(axes, RUNGS, strict=True)):
        estimate = ladder.estimates[name]
        error, stderr = np.asarray(estimate.value)[:, 0] - true, np.asarray(estimate.stderr)[:, 0]
        trusted = np.asarray(estimate.trusted)
        _error_band(ax, x, error, 2 * stderr, trusted, COLOURS[number % len(COLOURS)])
        place = "" if name == HINDSIGHT else f"{number + 1}. "
        ax.set_title(f"{place}{name}\nRMSE {np.sqrt(np.mean(error**2)):.2g}", fontsize=10)
        # Not the very largest: near a zero of the estimated density the paper's ratio knows no bounds.
        tops.append(float(np.quantile(np.abs(error) + 2 * np.where(trusted, stderr, 0), 0.9)))
    for together in (slice(0, 2), slice(2, 4), slice(4, 8)):
        for number, ax in enumerate(axes[together]):
            top = 1.2 * max(tops[together])
            ax.set_ylim(-top, top)
            ax.tick_params(labelleft=number == 0)
    for ax in axes[::4]:
        ax.set_ylabel("estimate − ∇L(α)\n(loss per unit of state)")
    figure.supxlabel(STATE, fontsize=10)
    title = "errors with ± 2 standard errors; 1 and 2, 3 and 4, and the lower row share a scale each"
    figure.suptitle(f"gradient noise {ladder.noise:g}: {title}", fontsize=11)
    save(figure, path)


def _error_band(ax: Any, x: Any, error: Any, reach: Any, trusted: Any, colour: str) -> None:
    """A band around a line about 0; dotted where there is no standard error."""
    known = np.where(trusted & np.isfinite(reach), reach, np.nan)
    ax.axhline(0, color="black", linewidth=0.8, linestyle="--")
    ax.fill_between(x, error - known, error + known, color=colour, alpha=0.25, linewidth=0)
    ax.plot(x, error, ":", color=colour, linewidth=1.0)
    ax.plot(x, np.where(trusted, error, np.nan), "-", color=colour, linewidth=1.5)


def draw_traces(path: Path, errors: Mapping[str, Any]) -> None:
    """|error| of the gradient at each step of one chain, a panel for each estimator."""
    figure = Figure(figsize=(9.0, 3.6), layout="constrained")
    axes = figure.subplots(1, len(errors), sharex=True, sharey=True)
    for ax, colour, (name, error) in zip(axes, COLOURS, errors.items(), strict=False):
        size = np.maximum(np.abs(np.asarray(error)).ravel(), 1e-7)
        ax.plot(size, ".", markersize=2, color=colour)
        ax.axhline(np.median(size), color="black", linewidth=0.8, linestyle="--")
        ax.set_title(f"{name}\nmedian {np.median(size):.2g}, largest {np.max(size):.2g}", fontsize=10)
        ax.grid(axis="y", color="0.9")
    axes[0].set(yscale="log", ylabel="|estimate − ∇L(α_k)| (loss per unit of state)")
    figure.supxlabel("step k of the outer chain", fontsize=10)
    save(figure, path)


def draw_histograms(path: Path, positions: Mapping[str, Any], grid: Any, gibbs: Any, *, bins: int = 40) -> None:
    """Where the chains have been, and the Gibbs density (of any height), a panel for each estimator."""
    figure = Figure(figsize=(10.0, 3.2), layout="constrained")
    axes = figure.subplots(1, len(positions), sharex=True, sharey=True)
    density = gibbs / np.trapezoid(gibbs, grid)
    edges = np.linspace(grid[0], grid[-1], bins + 1)
    for ax, colour, (name, x) in zip(axes, COLOURS, positions.items(), strict=False):
        ax.hist(np.asarray(x).ravel(), edges, density=True, color=colour, alpha=0.4)
        ax.plot(grid, density, **{**TRUTH, "label": "Gibbs density"})
        ax.set_title(name, fontsize=10)
    axes[0].set_ylabel("density (1/unit of state)")
    axes[0].set_ylim(top=1.25 * float(np.max(density)))
    axes[0].legend(frameon=False, loc="upper left", fontsize=8)
    figure.supxlabel(STATE, fontsize=10)
    save(figure, path)


def draw_losses(path: Path, losses: Mapping[str, Loss], truth: Callable[[Any], Any], *, apart: str) -> None:
    """Above, the recovered losses; below, what they are off by, ± 2 standard errors; that of `apart` at its own scale.

    A loss is known up to a constant: here, the one that brings it closest to the truth under the Gibbs density.
    """
    figure = Figure(figsize=(10.5, 5.0), layout="constrained")
    above, below = figure.subplots(2, len(losses), sharex=True)
    tops = {}
    for top, ax, colour, (name, loss) in zip(above, below, COLOURS, losses.items(), strict=False):
        x, stderr = np.asarray(loss.grid), np.asarray(loss.stderr)
        true, known = truth(x), np.isfinite(np.asarray(loss.value))
        error = np.where(known, np.asarray(loss.value) - true, np.nan)
        error -= np.average(error[known], weights=np.exp(-true[known]))
        top.plot(x, true, **TRUTH)
        top.fill_between(x, true + error - 2 * stderr, true + error + 2 * stderr, color=colour, alpha=0.25, linewidth=0)
        top.plot(x, true + error, ".", color=colour, markersize=5)
        top.set_title(name, fontsize=10)
        top.set_ylim(-0.5, 6.5)
        _error_band(ax, x, error, 2 * stderr, known, colour)
        middle = known & (np.abs(x) < 1.5)
        tops[name] = float(np.max(np.abs(error[middle]) + 2 * stderr[middle]))
    common = 1.3 * max(size for name, size in tops.items() if name != apart)
    for ax, name in zip(below, losses, strict=True):
        reach = 1.3 * tops[name] if name == apart else common
        ax.set_ylim(-reach, reach)
        if name == apart:
            ax.annotate("own scale", (0.04, 0.93), xycoords="axes fraction", va="top", fontsize=9)
    above[0].set_ylabel("loss, up to a constant")
    below[0].set_ylabel("recovered − true loss\n(± 2 standard errors)")
    above[0].legend(frameon=False, loc="upper center", fontsize=8)
    figure.supxlabel(STATE, fontsize=10)
    save(figure, path)
