"""Curves: estimates, losses and errors on a line."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from ..estimate.ratio import Estimate
from ..recovery.loss import Loss
from .plane import COLOURS, new_axes

TRUTH: dict[str, Any] = {"color": "black", "linestyle": "--", "linewidth": 1.2, "label": "truth"}
STATE, SLOPE = "α (units of the state)", "∇L(α) (loss per unit of state)"


def observed_paths(x: Any, *, step_size: float, ax: Axes | None = None) -> Axes:
    """Episodes as they were observed, one line each: positions `x` (episodes, points, 1) against time.

    ```python
    plots.observed_paths(paths.x[:5], step_size=0.01)
    ```
    """
    ax, rows = new_axes(ax), np.asarray(x)[..., 0]
    time = step_size * np.arange(rows.shape[1])
    for number, row in enumerate(rows):
        ax.plot(time, row, color=COLOURS[number % len(COLOURS)], linewidth=0.8, alpha=0.8)
    ax.set(xlabel="time within the episode (steps × step size)", ylabel="X (units of the state)")
    return ax


def gradient_bands(
    alphas: Any, estimates: Mapping[str, Estimate], truth: Any = None, *, ylabel: str = SLOPE, ax: Axes | None = None
) -> Axes:
    """Estimated gradients on a one-dimensional grid, each with its band of ± 1.96 standard errors.

    `ylabel` serves estimates of something else, such as another conditional expectation.

    ```python
    plots.gradient_bands(alphas, {"estimate": estimates}, jax.vmap(loss.gradient)(alphas))
    ```
    """
    ax, alphas = new_axes(ax), np.asarray(alphas).ravel()
    for style, (name, estimate) in _styled(estimates):
        value, stderr = np.asarray(estimate.value)[:, 0], np.asarray(estimate.stderr)[:, 0]
        _band(ax, alphas, value, stderr, np.asarray(estimate.trusted), style, name)
    if truth is not None:
        ax.plot(alphas, np.asarray(truth).ravel(), **TRUTH)
        _limits(ax, truth)
    ax.set(xlabel=STATE, ylabel=ylabel)
    ax.legend(frameon=False)
    return ax


def chain_trace(gradients: Mapping[str, Any], truths: Mapping[str, Any], *, ax: Axes | None = None) -> Axes:
    """The error of the gradient at each step of a chain: estimates against the truth at the same positions.

    ```python
    true = jax.vmap(loss.gradient)(chain.positions[0])
    plots.chain_trace({"malliavin_jax": chain.gradients[0]}, {"malliavin_jax": true})
    ```
    """
    ax, top = new_axes(ax), 0.0
    for style, (name, gradient) in _styled(gradients):
        error = np.abs(np.asarray(gradient).ravel() - np.asarray(truths[name]).ravel())
        top = max(top, float(np.max(error)))
        ax.plot(np.maximum(error, 1e-8), ".", markersize=2.5, color=style["color"], label=name, alpha=0.7)
    ax.set_yscale("log")
    ax.set(xlabel="step of the outer chain", ylabel="|estimate − ∇L(α_k)| (loss per unit of state)")
    ax.set_ylim(top=max(top, 1e-8) * 30)  # room for the legend
    ax.legend(loc="upper center", ncols=len(gradients), frameon=False, markerscale=4)
    return ax


def histogram_against_gibbs(
    positions: Mapping[str, Any], grid: Any, density: Any, *, bins: int = 40, ax: Axes | None = None
) -> Axes:
    """Histograms of chains over the span of `grid`, with the Gibbs `density` they should have on it.

    ```python
    grid = np.linspace(-2, 2, 101)
    gibbs = np.exp(-jax.vmap(loss.value)(grid[:, None]))
    plots.histogram_against_gibbs({"chains": chain.positions}, grid, gibbs / np.trapezoid(gibbs, grid), bins=20)
    ```
    """
    ax, grid = new_axes(ax), np.asarray(grid)
    edges = np.linspace(grid[0], grid[-1], bins + 1)
    for style, (name, x) in _styled(positions):
        ax.hist(np.asarray(x).ravel(), edges, density=True, histtype="step", linewidth=1.5, label=name, **style)
    ax.plot(grid, np.asarray(density), **{**TRUTH, "label": "Gibbs density"})
    ax.set(xlabel=STATE, ylabel="density (1/unit of state)")
    ax.legend(frameon=False)
    return ax


def loss_recovery(losses: Mapping[str, Loss], grid: Any = None, truth: Any = None, *, ax: Axes | None = None) -> Axes:
    """Recovered losses in one dimension with ± 1.96 standard errors, and the true one; all have minimum 0.

    ```python
    plots.loss_recovery({"integrated": mj.loss_from_field(field, jnp.linspace(-1.0, 1.0, 21))})
    ```
    """
    ax = new_axes(ax)
    for style, (name, loss) in _styled(losses):
        value, stderr = np.asarray(loss.value), np.asarray(loss.stderr)
        _band(ax, np.asarray(loss.grid), value, stderr, np.isfinite(value), style, name)
    if truth is not None:
        ax.plot(np.asarray(grid), np.asarray(truth), **TRUTH)
        _limits(ax, truth)
    ax.set(xlabel=STATE, ylabel="loss, up to a constant")
    ax.legend(frameon=False)
    return ax


def convergence(
    results: Mapping[str, Mapping[str, Any]],
    *,
    xlabel: str = "episodes N",
    ylabel: str = "RMSE of ∇L (loss per unit of state)",
    ax: Axes | None = None,
) -> Axes:
    """Errors of `diagnostics.convergence_experiment` on logarithmic axes, each with its fitted line and slope.

    ```python
    means = mj.diagnostics.convergence_experiment(
        lambda key, n: abs(jnp.mean(jax.random.normal(key, (1000,))[:n])), [100, 1000], jax.random.key(0)
    )
    plots.convergence({"mean of n normals": means}, xlabel="n", ylabel="RMSE")
    ```
    """
    ax = new_axes(ax)
    for (style, (name, result)), marker in zip(_styled(results), "osD^v<>ph" * len(results), strict=False):
        value, error = np.asarray(result["value"], float), np.asarray(result["error"])
        slope, spread = float(result["slope"]), float(result["slope_stderr"])
        label = f"{name}: slope {slope:.2f} ± {spread:.2f}"
        ax.errorbar(
            value,
            error,
            np.asarray(result["stderr"]),
            fmt=marker,
            markersize=5,
            capsize=2,
            label=label,
            color=style["color"],
        )
        middle, height = np.log(value).mean(), np.log(error).mean()
        ax.plot(value, np.exp(height + slope * (np.log(value) - middle)), linewidth=1.2, **style)
    ax.set(xscale="log", yscale="log", xlabel=xlabel, ylabel=ylabel)
    ax.legend(frameon=False)
    return ax


def error_comparison(
    errors: Mapping[str, Mapping[str, float]],
    *,
    xlabel: str = "RMSE of ∇L (loss per unit of state)",
    ax: Axes | None = None,
) -> Axes:
    """Errors of several methods in several cases, `errors[method][case]`, as marks on a logarithmic axis.

    Cases stand below one another in the order of their first mention; a method may leave some out.

    ```python
    plots.error_comparison({"ours": {"d = 1": 0.02, "d = 2": 0.03}, "kernel": {"d = 1": 0.05, "d = 2": 0.09}})
    ```
    """
    ax = new_axes(ax)
    cases = list(dict.fromkeys(case for row in errors.values() for case in row))
    for height in range(len(cases)):
        ax.axhline(height, color="0.85", linewidth=0.8, zorder=0)
    for (style, (name, row)), marker in zip(_styled(errors), "osD^v<>ph" * len(errors), strict=False):
        heights = [cases.index(case) for case in row]
        ax.plot(list(row.values()), heights, marker, markersize=7, color=style["color"], label=name, alpha=0.9)
    ax.set(xscale="log", xlabel=xlabel, yticks=range(len(cases)), yticklabels=cases)
    ax.set_ylim(len(cases) - 0.5, -0.5)
    ax.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=min(3, len(errors)))
    return ax


def weight_tails(weights: Mapping[str, Any], *, ax: Axes | None = None) -> Axes:
    """How often a weight S(u) exceeds t, with E[S²] in the legend: the stuff that variance is made of.

    ```python
    plots.weight_tails({"canonical": samples.weight})
    ```
    """
    ax, left = new_axes(ax), np.inf
    for style, (name, weight) in _styled(weights):
        size = np.sort(np.abs(np.asarray(weight, float).ravel()))
        share = 1 - np.arange(len(size)) / len(size)
        left = min(left, 0.1 * np.median(size))
        ax.plot(size, share, label=f"{name}: E[S²] = {np.mean(size**2):.3g}", **style)
    ax.set(xscale="log", yscale="log", xlabel="t (1/unit of state)", ylabel="share of episodes with |S| ≥ t (1)")
    ax.set_xlim(left=left)
    ax.legend(frameon=False)
    return ax


def bias_and_error(lengths: Any, results: Mapping[str, tuple[Any, Any]], *, ax: Axes | None = None) -> Axes:
    """Bias (dashed) and RMSE (full) of each estimator at each length: `results[name] = bias, error`.

    ```python
    plots.bias_and_error([0.1, 0.3, 1.0], {"kernel": ([0.01, 0.1, 1.0], [0.3, 0.2, 1.0])})
    ```
    """
    ax = new_axes(ax)
    for style, (name, (bias, error)) in _styled(results):
        ax.plot(lengths, np.asarray(error), label=f"{name}: error", **style)
        ax.plot(lengths, np.asarray(bias), label=f"{name}: bias", **{**style, "linestyle": "--"})
    ax.set(xscale="log", yscale="log", xlabel="length h (units of the state)", ylabel="of ∇L (loss per unit of state)")
    ax.legend(frameon=False)
    return ax


# --- the pieces ------------------------------------------------------------------------------------------


def _styled(curves: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], tuple[str, Any]]]:
    """Each item with its colour; past the last colour they begin again, with another line."""
    for number, item in enumerate(curves.items()):
        around, colour = divmod(number, len(COLOURS))
        yield {"color": COLOURS[colour], "linestyle": ("-", "-.", ":")[around % 3]}, item


def _band(ax: Axes, x: Any, value: Any, stderr: Any, trusted: Any, style: dict[str, Any], name: str) -> None:
    """A curve with ± 1.96 standard errors where it is trusted, dotted on and beside the rest."""
    doubtful = ~trusted & np.isfinite(value)
    ax.plot(x, np.where(trusted, value, np.nan), label=name, **style)
    if doubtful.any():
        reach = doubtful | np.append(doubtful[1:], False) | np.append(False, doubtful[:-1])
        ax.plot(x, np.where(reach, value, np.nan), color=style["color"], linestyle=":", linewidth=1.0)
    error = 1.96 * np.where(trusted & np.isfinite(stderr), stderr, np.nan)
    ax.fill_between(x, value - error, value + error, color=style["color"], alpha=0.2, linewidth=0)


def _limits(ax: Axes, truth: Any) -> None:
    """Scale by the truth: a wild estimate must not flatten everything else."""
    low, high = float(np.nanmin(truth)), float(np.nanmax(truth))
    margin = 0.35 * (high - low) or 1.0
    ax.set_ylim(low - margin, high + margin)
