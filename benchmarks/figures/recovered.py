"""How far is each recovered loss from the exact one? The picture of `client.py`."""

import matplotlib.pyplot as plt
import numpy as np


def draw(axes, recovered, truth, feature):
    """The exact loss, and the error of each of two recovered ones on a common scale; all on the plane of `axes`."""
    figure, panels = plt.subplots(1, 3, figsize=(12, 3.8), layout="constrained", sharey=True)
    drawn = panels[0].contourf(*axes, truth.T, levels=20, cmap="viridis")
    panels[0].set(title="exact", ylabel=f"coefficient of {feature}")
    figure.colorbar(drawn, ax=panels[0], label="−log posterior, less its minimum")
    gaps = {name: value - truth - np.mean(value - truth) for name, value in recovered.items()}
    reach = max(np.abs(gap).max() for gap in gaps.values())
    for ax, (name, gap) in zip(panels[1:], gaps.items(), strict=True):
        drawn = ax.contourf(*axes, gap.T, levels=np.linspace(-reach, reach, 22), cmap="RdBu")
        ax.set_title(f"{name}: error")
    figure.colorbar(drawn, ax=panels[1:], label="recovered less exact, up to a constant")
    for ax in panels:
        ax.set_xlabel("intercept")
    figure.suptitle("The loss that the log of a plain SGLD run gives back")
    return figure
