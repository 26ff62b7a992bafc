"""Every notebook runs from its first cell to its last, in its fast form, and shows what it is there to show."""

import json
from pathlib import Path

import jax
import matplotlib
import numpy as np
import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))


def quickstart(scope):
    """The gradient within its error bars, and a loss where the data reach."""
    inside = np.asarray(scope["inner"])
    z = np.asarray((scope["estimate"].value - scope["truth"]) / scope["estimate"].stderr)[inside]
    assert np.all(np.asarray(scope["estimate"].trusted)[inside])
    assert np.max(np.abs(z)) < 5
    assert not np.all(np.asarray(scope["estimate"].trusted)), "the picture is to show where the data end"
    assert np.all(np.isfinite(scope["integrated"].value[np.abs(np.asarray(scope["integrated"].grid)) < 1]))


def paper(scope):
    """The ladder goes down, from useless to good; the printed weight has the heavier tail."""
    for row in scope["errors"].values():
        rungs = list(row.values())
        assert rungs[-1] < 0.1 * rungs[0]
        assert row["localized"] < row["covariation for L‴"]
    noisy = scope["errors"]["gradient noise 2"]
    assert noisy["covariation for L‴"] < 0.5 * noisy["canonical weight"], "the noise that Itô's form lets in"
    moment = {name: float(np.mean(np.square(weight))) for name, weight in scope["weights"].items()}
    assert moment["reciprocal (the paper)"] > 10 * moment["canonical"]


def kernel(scope):
    """Better than the kernel on the same samples, and no bias at a length where the kernel's is large."""
    assert scope["first_errors"]["malliavin_jax"] < scope["first_errors"]["Nadaraya–Watson"]
    wide = int(np.argmin(np.abs(np.asarray(scope["lengths"]) - 1.0)))
    ours, alone = (scope["results"][name][1][wide] for name in ("kernel with Malliavin term", "kernel alone"))
    assert ours < 0.5 * alone
    for errors in (*scope["by_dimension"].values(), *scope["by_noise"].values()):  # one data set each: no contest here
        assert all(np.isfinite(list(errors.values())))


def two_dimensions(scope):
    """The curl is what the error bars say, and the field is better than the kernel's."""
    assert 0.3 < scope["curl"] / scope["expected"] < 3
    assert scope["rmse"]["malliavin_jax"] < scope["rmse"]["Nadaraya–Watson"]
    assert scope["loss_error"] < 0.3


def own_trajectories(scope):
    """A log that fits its learner, a wrong step size found out, and a loss near the one descended."""
    assert scope["report"].ok
    assert not scope["wrong"].ok
    assert scope["loss_error"] < 0.1
    estimate = scope["estimates"]["malliavin_jax"]
    z = (np.asarray(estimate.value) - scope["true_slope"])[:, 0] / np.asarray(estimate.stderr)[:, 0]
    assert np.sqrt(np.mean(z[np.asarray(estimate.trusted)] ** 2)) < 3


def conditional_expectations(scope):
    """Closed forms within the error bars, a derivative too; and the singular u has the heavier tail."""
    for estimate, truth in (
        (scope["estimate"], scope["slope"] * scope["levels"]),
        (scope["value"], scope["black_scholes"]),
    ):
        z = (np.asarray(estimate.value)[:, 0] - np.asarray(truth)) / np.asarray(estimate.stderr)[:, 0]
        assert np.max(np.abs(z)) < 5
    assert abs(scope["delta"] - scope["true_delta"]) < 4 * scope["delta_stderr"] + 0.02  # Euler's steps are few
    assert np.mean(np.square(scope["singular"].weight)) > np.mean(np.square(scope["sample"].weight))
    assert scope["caught"]


def adaptive(scope):
    """The change is found when it happens, and what came before it does not spoil what comes after."""
    assert np.flatnonzero(scope["tracked"].changed).tolist() == [scope["HALF"]]
    assert scope["errors"]["adaptive"][-1] < 0.3 * scope["errors"]["all the past"][-1]
    assert np.all(np.isfinite(scope["tracked"].positions))


SHOWS = {
    "01_quickstart": quickstart,
    "02_paper": paper,
    "03_kernel_vs_malliavin": kernel,
    "04_two_dimensions": two_dimensions,
    "05_your_own_trajectories": own_trajectories,
    "06_conditional_expectations": conditional_expectations,
    "07_adaptive": adaptive,
}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_notebook_runs(path, monkeypatch):
    matplotlib.use("Agg")
    monkeypatch.setenv("MALLIAVIN_JAX_FAST", "1")
    scope = {}
    # A user's session is not strict about ranks and types of numbers.
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"), matplotlib.rc_context():
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            if cell["cell_type"] == "code":
                exec("".join(cell["source"]), scope)
    matplotlib.pyplot.close("all")
    SHOWS[path.stem](scope)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_notebook_is_kept_small_and_whole(path):
    assert path.stat().st_size < 300_000
    cells = [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1)), "run it from top to bottom"
    pictures = [out for cell in cells for out in cell["outputs"] if "image/png" in out.get("data", {})]
    assert pictures
    text = path.read_text(encoding="utf-8")
    assert "/home/" not in text
    assert "/tmp/" not in text


def test_no_notebook_is_missing():
    assert [path.stem for path in NOTEBOOKS] == sorted(SHOWS)
