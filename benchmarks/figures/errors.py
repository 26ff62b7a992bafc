"""How large is the error of each method, loss by loss?

`accuracy.py` ends with this picture; `python benchmarks/figures/errors.py` draws it again from results/accuracy.json,
as results/accuracy.png.
"""

import json
from pathlib import Path

import matplotlib.pyplot as plt

RESULTS = Path(__file__).parents[1] / "results"
NOISE = 2.0
KERNELS = tuple(f"{name}, oracle" for name in ("Nadaraya–Watson", "local linear", "local quadratic", "local cubic"))
ASSISTED = tuple(
    f"{kernel.removesuffix(', oracle')} with {help_}, oracle" for kernel in KERNELS for help_ in ("control", "both")
)
# What is drawn: one method, or the best of several, each with a marker. The paper's estimator is off by so much that
# everything else would share one column; and a method that saw fewer data sets is not comparable: the error of a good
# fit is mostly one number a data set. Ours is a ring, which hides nothing.
MARKS = {
    "kernel, best degree and bandwidth": (KERNELS, "v", "C3"),
    "kernel ridge, best length and ridge": (("kernel ridge, oracle",), "h", "C5"),
    "version 0.1.0": (("version 0.1.0",), "D", "0.5"),
    "polynomial, best degree": (("polynomial, oracle degree",), "^", "C2"),
    "spline, best mesh": (("spline, oracle mesh",), "s", "C1"),
    "kernel with our control, best of eight": (ASSISTED, "x", "C4"),
    "this library": (("this library",), "o", "C0"),
}


def errors_of(row, methods):
    """Of those methods that saw as many data sets as this library."""
    sets = len(row["errors"]["this library"])
    return [row["rmse"][method] for method in methods if len(row["errors"].get(method, ())) == sets]


def name_of(row):
    times = "" if row["times"] == 1 else f", {row['times']} times"
    return f"{row['case']}, N = {row['episodes']:,}{times}"


def draw(rows):
    """One line a loss, number of episodes and of times, from the rows of results/accuracy.json."""
    rows = sorted((row for row in rows if row["noise"] == NOISE), key=lambda row: row["times"])
    if not rows:
        print(f"no rows with noise {NOISE:g}: nothing is drawn")
        return
    figure, ax = plt.subplots(figsize=(9, 0.34 * len(rows) + 2.2), layout="constrained")
    places = range(len(rows))
    for label, (methods, marker, color) in MARKS.items():
        points = [
            (min(found), place) for place, row in zip(places, rows, strict=True) if (found := errors_of(row, methods))
        ]
        if not points:
            continue
        ring = {"ms": 11, "mfc": "none", "mew": 2} if label == "this library" else {"ms": 6}
        ax.plot(*zip(*points, strict=True), marker, color=color, ls="", label=label, **ring)
    ax.plot([row["limit"] for row in rows], places, "k|", ms=12, label="noise/√(points): every point at α")
    ax.set(xscale="log", xlabel="RMSE of the gradient", yticks=places, yticklabels=map(name_of, rows))
    ax.invert_yaxis()
    ax.grid(alpha=0.3, lw=0.5)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    ax.set_title(
        f"Gradients with noise of sd {NOISE:g}; rivals with the setting that is best in hindsight", fontsize=11
    )
    figure.savefig(RESULTS / "accuracy.png", dpi=130)
    plt.close(figure)
    print("written to accuracy.png")


if __name__ == "__main__":
    draw(json.loads((RESULTS / "accuracy.json").read_text())["rows"])
