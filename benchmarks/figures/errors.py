"""How does the error fall with the number of episodes?

`accuracy.py` ends with this picture; `python benchmarks/figures/errors.py` draws it again from results/accuracy.json,
as results/accuracy.png.
"""

import json
from pathlib import Path

import matplotlib.pyplot as plt

RESULTS = Path(__file__).parents[1] / "results"
NOISE = 2.0
KERNELS = tuple(f"{name}, oracle" for name in ("Nadaraya–Watson", "local linear", "local quadratic", "local cubic"))
# What is drawn: one method, or the best of several, each with a colour, a marker and a width. The paper's estimator is
# off by so much that everything else would share one line.
LINES = {
    "this library": (("this library",), "C0", "o-", 2.6),
    "version 0.1.0": (("version 0.1.0",), "C0", "D:", 1.0),
    "spline, best mesh": (("spline, oracle mesh",), "C1", "s-", 1.2),
    "polynomial, best degree": (("polynomial, oracle degree",), "C2", "^-", 1.2),
    "network, best of four": (("network, oracle",), "C4", "p-", 1.2),
    "kernel ridge, best length and ridge": (("kernel ridge, oracle",), "C5", "h-", 1.2),
    "kernel, best degree and bandwidth": (KERNELS, "C3", "v-", 1.2),
}


def panel(ax, rows):
    """Errors against N of the rows of one loss."""
    for label, (methods, color, marker, width) in LINES.items():
        points = [
            (row["episodes"], min(row["rmse"][method] for method in methods if method in row["rmse"]))
            for row in rows
            if any(method in row["rmse"] for method in methods)
        ]
        if points:
            ax.loglog(*zip(*points, strict=True), marker, color=color, lw=width, ms=4, label=label)
    ax.loglog(
        *zip(*[(row["episodes"], row["limit"]) for row in rows], strict=True), "k--", lw=0.8,
        label="noise/√(points): every point at α",
    )  # fmt: skip
    ax.grid(alpha=0.3, which="both", lw=0.4)


def draw(rows):
    """One panel a loss, at one time and, below, at many, from the rows of results/accuracy.json."""
    rows = [row for row in rows if row["noise"] == NOISE]
    if not rows:
        print(f"no rows with noise {NOISE:g}: nothing is drawn")
        return
    panels = list(dict.fromkeys((row["times"] > 1, row["case"]) for row in rows))
    panels.sort(key=lambda place: place[0])  # one time first; the losses stay in their order
    columns = min(6, len(panels))
    lines = -(-len(panels) // columns)
    figure, axes = plt.subplots(
        lines,
        columns,
        figsize=(2.5 * columns + 1.4, 2.4 * lines + 1.2),
        layout="constrained",
        squeeze=False,
        sharex=True,
        sharey=True,
    )
    labels = {}
    for ax, (many, name) in zip(axes.flat, panels, strict=False):
        mine = sorted((r for r in rows if (r["times"] > 1, r["case"]) == (many, name)), key=lambda r: r["episodes"])
        panel(ax, mine)
        ax.set_title(f"{name}, {mine[0]['times']} times" if many else name, fontsize=9)
        labels |= dict(zip(*ax.get_legend_handles_labels()[::-1], strict=True))
    for ax in axes.flat[len(panels) :]:
        ax.set_visible(False)
    for ax in axes[:, 0]:
        ax.set_ylabel("RMSE of the gradient")
    for ax in axes[-1]:
        ax.set_xlabel("episodes")
    style = {"ncols": min(5, columns + 1), "fontsize": 9, "frameon": False}
    figure.legend(labels.values(), labels, loc="outside lower center", **style)
    figure.suptitle(f"Error of the estimated gradient, gradient noise of sd {NOISE:g}; rivals tuned in hindsight")
    figure.savefig(RESULTS / "accuracy.png", dpi=150)
    plt.close(figure)
    print("written to accuracy.png")


if __name__ == "__main__":
    draw(json.loads((RESULTS / "accuracy.json").read_text())["rows"])
