"""Curves on a line: paths, estimates, chains and losses."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from ..estimate.ratio import Estimate
from ..recovery.loss import Loss
from .style import COLOURS, SLOPE, STATE, TRUTH, band, limits, new_axes, styled


def observed_paths(x: Any, *, step_size: float, ax: Axes | None = None) -> Axes:
    """Episodes as they were observed, one line each: position against time.

    Args:
        x: positions, of shape (episodes, points, 1).
        step_size: the learner's, which turns steps into time.
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
        paths = jax.jit(jax.vmap(lambda key: mj.simulate(key, learner, 80)))(jax.random.split(jax.random.key(0), 500))
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

    Args:
        alphas: the grid, of shape (points,) or (points, 1).
        estimates: by name, each with fields of shape (points, 1), as `jax.vmap(field)(alphas)` gives them.
        truth: the true gradient on the grid, dashed; the limits of the axis follow it.
        ylabel: for estimates of something else, such as another conditional expectation.
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
        plots.gradient_bands(alphas, {"estimate": estimates}, jax.vmap(loss.gradient)(alphas))
        ```
    """
    ax, alphas = new_axes(ax), np.asarray(alphas).ravel()
    for style, (name, estimate) in styled(estimates):
        value, stderr = np.asarray(estimate.value)[:, 0], np.asarray(estimate.stderr)[:, 0]
        band(ax, alphas, value, stderr, np.asarray(estimate.trusted), style=style, name=name)
    if truth is not None:
        ax.plot(alphas, np.asarray(truth).ravel(), **TRUTH)
        limits(ax, truth)
    ax.set(xlabel=STATE, ylabel=ylabel)
    ax.legend(frameon=False)
    return ax


def chain_trace(gradients: Mapping[str, Any], truths: Mapping[str, Any], *, ax: Axes | None = None) -> Axes:
    """The error of the gradient at each step of a chain: estimates against the truth at the same positions.

    Args:
        gradients: by name, the estimates along one chain, of shape (kept,) or (kept, 1).
        truths: by the same names, the true gradients at the positions of that chain.
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
        chain = mj.passive_langevin(
            jax.random.key(1), mj.MalliavinField(samples), jnp.zeros((8, 1)),
            num_steps=100, burn_in=20, step_size=0.05, inverse_temperature=1.0,
        )
        true = jax.vmap(loss.gradient)(chain.positions[0])
        plots.chain_trace({"malliavin_jax": chain.gradients[0]}, {"malliavin_jax": true})
        ```
    """
    ax, top = new_axes(ax), 0.0
    for style, (name, gradient) in styled(gradients):
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
    """Histograms of chains with the Gibbs density they should have.

    Args:
        positions: by name, the positions of one-dimensional chains, of any shape.
        grid: increasing points (points,); the bins are spread over its span.
        density: the Gibbs density on the grid.
        bins: their number.
        ax: where to draw; without it, a new figure.

    Returns:
        The axes.

    Example:
        ```python
        import jax
        import numpy as np
        from malliavin_jax import plots

        positions = jax.random.normal(jax.random.key(0), (8, 80, 1))
        grid = np.linspace(-3, 3, 101)
        gibbs = np.exp(-(grid**2) / 2) / np.sqrt(2 * np.pi)
        plots.histogram_against_gibbs({"chains": positions}, grid, gibbs, bins=20)
        ```
    """
    ax, grid = new_axes(ax), np.asarray(grid)
    edges = np.linspace(grid[0], grid[-1], bins + 1)
    for style, (name, x) in styled(positions):
        ax.hist(np.asarray(x).ravel(), edges, density=True, histtype="step", linewidth=1.5, label=name, **style)
    ax.plot(grid, np.asarray(density), **{**TRUTH, "label": "Gibbs density"})
    ax.set(xlabel=STATE, ylabel="density (1/unit of state)")
    ax.legend(frameon=False)
    return ax


def loss_recovery(losses: Mapping[str, Loss], grid: Any = None, truth: Any = None, *, ax: Axes | None = None) -> Axes:
    """Recovered losses in one dimension with ± 1.96 standard errors, and the true one; all have minimum 0.

    Args:
        losses: by name, as `loss_from_field` or `loss_from_samples` return them.
        grid: points at which the true loss is given, (points,).
        truth: the true loss there, with minimum 0, dashed; the limits of the axis follow it.
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
        grid = jnp.linspace(-1.0, 1.0, 21)
        recovered = mj.loss_from_field(mj.MalliavinField(samples), grid)
        plots.loss_recovery({"integrated": recovered}, grid, jax.vmap(loss.value)(grid[:, None]))
        ```
    """
    ax = new_axes(ax)
    for style, (name, loss) in styled(losses):
        value, stderr = np.asarray(loss.value), np.asarray(loss.stderr)
        band(ax, np.asarray(loss.grid), value, stderr, np.isfinite(value), style=style, name=name)
    if truth is not None:
        ax.plot(np.asarray(grid), np.asarray(truth), **TRUTH)
        limits(ax, truth)
    ax.set(xlabel=STATE, ylabel="loss, up to a constant")
    ax.legend(frameon=False)
    return ax
