"""How does the error fall with the number of episodes?

`accuracy.py` ends with this picture; `python benchmarks/figures/errors.py` draws it again from results/accuracy.json,
as results/accuracy.png.
"""

import json
from pathlib import Path

import matplotlib.pyplot as plt

RESULTS = Path(__file__).parents[1] / "results"


def draw(rows):
    """Errors against N at noise 2, one panel a loss, from the rows of results/accuracy.json."""
    names = list(dict.fromkeys(row["case"] for row in rows))
    columns = min(4, len(names))
    figure, axes = plt.subplots(
        -(-len(names) // columns), columns, figsize=(3.6 * columns, 6.4), layout="constrained", squeeze=False
    )
    styles = {
        "this library": ("C0", "o-", 2.4),
        "without control": ("C0", "D--", 1.2),
        "many times": ("C0", "P:", 1.2),
        "Nadaraya–Watson, oracle": ("C1", "s-", 1.2),
        "local linear, oracle": ("C2", "^-", 1.2),
        "local cubic, oracle": ("C3", "v-", 1.2),
        "the paper, literally": ("0.5", "x-", 1.2),
        "limit": ("k", "_-", 0.8),
    }
    for ax, name in zip(axes.flat, names, strict=False):
        mine = [row for row in rows if row["case"] == name and row["noise"] == 2.0]
        for method, (color, marker, width) in styles.items():
            points = [(row["episodes"], row["rmse"][method]) for row in mine if method in row["rmse"]]
            if points:
                label = "noise/√N (every episode at α)" if method == "limit" else method
                ax.loglog(*zip(*points, strict=True), marker, color=color, lw=width, ms=4, label=label)
        ax.set_title(name, fontsize=10)
        ax.set_xlabel("episodes")
        ax.grid(alpha=0.3, which="both", lw=0.4)
    for ax in axes[:, 0]:
        ax.set_ylabel("RMSE of the gradient")
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=9, frameon=False)
    figure.suptitle("Error of the estimated gradient, gradient noise of sd 2, one conditioning time unless said")
    figure.savefig(RESULTS / "accuracy.png", dpi=150)
    print("written to accuracy.png")


if __name__ == "__main__":
    draw(json.loads((RESULTS / "accuracy.json").read_text())["rows"])
