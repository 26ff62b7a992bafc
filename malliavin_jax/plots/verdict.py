"""Where a guess of the loss disagrees with what the learner did."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes

from ..fields.judge import GoodnessOfFit
from .plane import PLANE
from .style import COLOURS, STATE, new_axes

_OFF = "estimate − guess of ∇L (loss per unit of state)"
_Z = "z = |difference| / standard error (1)"


def disagreement(verdict: GoodnessOfFit, ax: Axes | None = None) -> Axes:
    """The difference between the debiased estimate and a guess of the gradient, place by place; p in the title.

    On a line: the differences with bars of ± 1.96 standard errors. In the plane: arrows of the difference, on places
    coloured by z = |difference| / |standard error|. Beyond: z against the distance from the centre of the places. Where
    the data do not carry a comparison the place is left out.

    Args:
        verdict: as `goodness_of_fit` returns it.
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
        plots.disagreement(mj.goodness_of_fit(samples, mj.potentials.Quadratic(precision=2.0)))
        ```
    """
    ax = new_axes(ax)
    trusted = np.asarray(verdict.trusted)
    at, difference, stderr = (np.asarray(a)[trusted] for a in (verdict.alphas, verdict.difference, verdict.stderr))
    z = np.linalg.norm(difference, axis=1) / np.linalg.norm(stderr, axis=1)
    if at.shape[1] == 1:
        look: dict[str, Any] = {"fmt": "o", "markersize": 4, "capsize": 2, "elinewidth": 1.0, "color": COLOURS[0]}
        ax.axhline(0, color="black", linestyle="--", linewidth=1.0)
        ax.errorbar(at[:, 0], difference[:, 0], 1.96 * stderr[:, 0], **look)
        ax.set(xlabel=STATE, ylabel=_OFF)
    elif at.shape[1] == 2:
        places = ax.scatter(*at.T, c=z, cmap="cividis", vmin=0, s=36, zorder=2)
        ax.quiver(*at.T, *difference.T, angles="xy", color=COLOURS[1], width=0.004, zorder=3)
        ax.figure.colorbar(places, ax=ax, label=_Z)
        ax.set(**PLANE)
    else:
        ax.plot(np.linalg.norm(at - at.mean(0), axis=1), z, "o", markersize=4, color=COLOURS[0])
        ax.set(xlabel="distance from the centre of the places (units of the state)", ylabel=_Z)
        ax.set_ylim(bottom=0)
    ax.set_title(f"p = {float(verdict.p_value):.2g}")
    return ax
