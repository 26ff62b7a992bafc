"""Every notebook runs from its first cell to its last."""

import json
from pathlib import Path

import jax
import matplotlib
import pytest

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_notebook_runs(path, capsys):
    matplotlib.use("Agg")
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    scope: dict = {}
    # A user's session is not strict about ranks and types of numbers.
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        for cell in cells:
            exec("".join(cell["source"]), scope)
    matplotlib.pyplot.close("all")
    printed = capsys.readouterr().out
    rows = [line.split(" RMSE ") for line in printed.splitlines() if " RMSE " in line]
    errors = {name.strip(): float(rest.split(",")[0]) for name, rest in rows}
    # What the notebook is there to show.
    assert errors["malliavin_jax"] < min(errors["Nadaraya–Watson"], errors["local linear"])


def test_there_is_a_notebook():
    assert NOTEBOOKS
