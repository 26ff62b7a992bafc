"""Pictures of errors: how they fall, how methods compare, and what they are made of."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from ..estimate.ratio import Estimate
from .style import ERROR, MARKERS, RMSE, STATE, band, new_axes, styled


def gradient_errors(
    alphas: Any, estimates: Mapping[str, Estimate], truth: Any, *, ylabel: str = ERROR, ax: Axes | None = None
) -> Axes:
    """Estimated gradients less the true one, each with its band of ± 1.96 standard errors.

    Beside `gradient_bands`, whose curves lie on one another where estimates are good. The axis is scaled by the best of
    the estimates: one that is more than ten times worse leaves the picture.

    Args:
        alphas: the grid, of shape (points,) or (points, 1).
        estimates: by name, each with fields of shape (points, 1), as `jax.vmap(field)(alphas)` gives them.
        truth: the true gradient on the grid.
        ylabel: for estimates of something else.
        ax: where to draw; without it, a new figure.

    Returns:
        The axes.

    Example:
        ```python
        import jax
        import jax.numpy as jnp
        import malliavin_jax as mj
        from malliavin_jax import plots

        loss = mj.potentials.Quartic()
        learner = mj.ForwardLearner(loss, mj.initial.Normal(), step_size=0.01, gradient_noise=0.5)
        samples = mj.observe(jax.random.key(0), learner, num_episodes=2000, times=[0.4, 0.8])
        alphas = jnp.linspace(-1.0, 1.0, 9)[:, None]
        estimates = jax.jit(jax.vmap(mj.MalliavinField(samples)))(alphas)
        plots.gradient_errors(alphas, {"estimate": estimates}, jax.vmap(loss.gradient)(alphas))
        ```
    """
    ax, alphas, true = new_axes(ax), np.asarray(alphas).ravel(), np.asarray(truth).ravel()
    reach = []
    for style, (name, estimate) in styled(estimates):
        error, stderr = np.asarray(estimate.value)[:, 0] - true, np.asarray(estimate.stderr)[:, 0]
        trusted = np.asarray(estimate.trusted)
        band(ax, alphas, error, stderr, trusted, style=style, name=name)
        known = trusted & np.isfinite(error) & np.isfinite(stderr)
        reach += [float(np.max(np.abs(error[known]) + 1.96 * stderr[known]))] if known.any() else []
    ax.axhline(0.0, color="black", linestyle="--", linewidth=1.2)
    if reach and max(reach) > 0:
        top = 1.1 * min(max(reach), 10 * min(reach) or max(reach))
        ax.set_ylim(-top, top)
    ax.set(xlabel=STATE, ylabel=ylabel)
    ax.legend(frameon=False)
    return ax


def convergence(
    results: Mapping[str, Any], *, xlabel: str = "episodes N", ylabel: str = RMSE, ax: Axes | None = None
) -> Axes:
    """Errors against a setting on logarithmic axes, each with its fitted line and slope.

    Args:
        results: by name, as `diagnostics.convergence_experiment` returns them.
        xlabel: what the setting is.
        ylabel: what the error is.
        ax: where to draw; without it, a new figure.

    Returns:
        The axes.

    Example:
        ```python
        import jax
        import jax.numpy as jnp
        import malliavin_jax as mj
        from malliavin_jax import plots

        def error_of_a_mean(key, n):
            return abs(jnp.mean(jax.random.normal(key, (n,))))

        rates = mj.diagnostics.convergence_experiment(jax.random.key(0), error_of_a_mean, [100, 1000])
        plots.convergence({"mean of n normals": rates}, xlabel="n", ylabel="RMSE")
        ```
    """
    ax = new_axes(ax)
    for (style, (name, result)), marker in zip(styled(results), MARKERS * len(results), strict=False):
        value, error = np.asarray(result.value, float), np.asarray(result.error)
        label = f"{name}: slope {result.slope:.2f} ± {result.slope_stderr:.2f}"
        look: dict[str, Any] = {"fmt": marker, "markersize": 5, "capsize": 2, "color": style["color"]}
        ax.errorbar(value, error, np.asarray(result.stderr), label=label, **look)
        middle, height = np.log(value).mean(), np.log(error).mean()
        ax.plot(value, np.exp(height + result.slope * (np.log(value) - middle)), linewidth=1.2, **style)
    ax.set(xscale="log", yscale="log", xlabel=xlabel, ylabel=ylabel)
    ax.legend(frameon=False)
    return ax


def error_comparison(errors: Mapping[str, Mapping[str, float]], *, xlabel: str = RMSE, ax: Axes | None = None) -> Axes:
    """Errors of several methods in several cases, as marks on a logarithmic axis.

    The marks of a case stand a little below one another, in the order of the methods, so that equal errors are seen.

    Args:
        errors: `errors[method][case]`. Cases stand below one another in the order of their first mention; a method may
            leave some out.
        xlabel: what the error is.
        ax: where to draw; without it, a new figure.

    Returns:
        The axes.

    Example:
        ```python
        from malliavin_jax import plots

        plots.error_comparison({"ours": {"d = 1": 0.02, "d = 2": 0.03}, "kernel": {"d = 1": 0.05, "d = 2": 0.09}})
        ```
    """
    ax = new_axes(ax)
    cases = list(dict.fromkeys(case for row in errors.values() for case in row))
    for height in range(len(cases)):
        ax.axhline(height, color="0.85", linewidth=0.8, zorder=0)
    shifts = 0.11 * (np.arange(len(errors)) - (len(errors) - 1) / 2) * min(1.0, 6 / len(errors))
    for (style, (name, row)), marker, shift in zip(styled(errors), MARKERS * len(errors), shifts, strict=False):
        heights = [cases.index(case) + shift for case in row]
        ax.plot(list(row.values()), heights, marker, markersize=7, color=style["color"], label=name, alpha=0.9)
    ax.set(xscale="log", xlabel=xlabel, yticks=range(len(cases)), yticklabels=cases)
    ax.set_ylim(len(cases) - 0.5, -0.5)
    ax.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=min(3, len(errors)))
    return ax


def weight_tails(weights: Mapping[str, Any], *, ax: Axes | None = None) -> Axes:
    """How often a weight S(u) exceeds t, with E[S²], on which the variance of the estimates depends, in the legend.

    Args:
        weights: by name, weights of any shape.
        ax: where to draw; without it, a new figure.

    Returns:
        The axes.

    Example:
        ```python
        import jax
        import malliavin_jax as mj
        from malliavin_jax import plots

        loss = mj.potentials.Quartic()
        learner = mj.ForwardLearner(loss, mj.initial.Normal(), step_size=0.01, gradient_noise=0.5)
        samples = mj.observe(jax.random.key(0), learner, num_episodes=2000, times=[0.4, 0.8])
        plots.weight_tails({"canonical": samples.weight})
        ```
    """
    ax, left = new_axes(ax), np.inf
    for style, (name, weight) in styled(weights):
        size = np.sort(np.abs(np.asarray(weight, float).ravel()))
        share = 1 - np.arange(len(size)) / len(size)
        left = min(left, 0.1 * np.median(size))
        ax.plot(size, share, label=f"{name}: E[S²] = {np.mean(size**2):.3g}", **style)
    ax.set(xscale="log", yscale="log", xlabel="t (1/unit of state)", ylabel="share of episodes with |S| ≥ t (1)")
    ax.set_xlim(left=left)
    ax.legend(frameon=False)
    return ax


def bias_and_error(lengths: Any, results: Mapping[str, tuple[Any, Any]], *, ax: Axes | None = None) -> Axes:
    """Bias (dashed) and RMSE (full) of each estimator at each length of its localizer.

    Args:
        lengths: the lengths h, (lengths,).
        results: by name, `(bias, error)`, each of shape (lengths,).
        ax: where to draw; without it, a new figure.

    Returns:
        The axes.

    Example:
        ```python
        from malliavin_jax import plots

        plots.bias_and_error([0.1, 0.3, 1.0], {"kernel": ([0.01, 0.1, 1.0], [0.3, 0.2, 1.0])})
        ```
    """
    ax = new_axes(ax)
    for style, (name, (bias, error)) in styled(results):
        ax.plot(lengths, np.asarray(error), label=f"{name}: error", **style)
        ax.plot(lengths, np.asarray(bias), label=f"{name}: bias", **{**style, "linestyle": "--"})
    ax.set(xscale="log", yscale="log", xlabel="length h (units of the state)", ylabel="of ∇L (loss per unit of state)")
    ax.legend(frameon=False)
    return ax
