"""The benchmarks: each asks one question, and whatever is in the directory of results, there is a page."""

import ast
import importlib.util
import json
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SCRIPTS = [path for path in sorted(BENCHMARKS.glob("*.py")) if path.stem != "common"]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_benchmark_asks_one_question_and_says_how_to_run_it(script):
    about = ast.get_docstring(ast.parse(script.read_text())).splitlines()
    assert about[0].endswith("?")
    assert f"Run `python benchmarks/{script.name}`" in about[2]


def test_the_page(tmp_path):
    spec = importlib.util.spec_from_file_location("report", BENCHMARKS / "figures" / "report.py")
    assert spec is not None
    assert spec.loader is not None
    report = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(report)
    assert "Not run yet: accuracy, chain" in report.page(tmp_path)
    row = dict(dim=1, episodes=10, fraction_of_bandwidth=0.125, fraction_of_rng_rate=0.5)
    files = {
        "gpu-tpu-v9": {"machine": {"device": "tpu v9"}, "rows": [row, row]},
        "observe": {"one_dimension": "of another form"},
        "theorem": {"cases": [{"name": "<b>", "errors": {"a": 1e-9}}], "episodes": 1_000_000},
        "client": [1, 2],
    }
    for name, results in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(results))
    (tmp_path / "chain.json").write_text("{cut off")
    page = report.page(tmp_path)
    assert page.count("<h2>") == 5
    assert page.count("<img") == 1
    for text in ("device tpu v9", "0.125", "of another form", "&lt;b&gt;", "errors › a", "1e-09", "1,000,000"):
        assert text in page, text
    assert "cannot be read" in page
