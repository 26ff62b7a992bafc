"""The benchmarks: each asks one question, and whatever is in the directory of results, there is a page."""

import ast
import importlib.util
import json
from pathlib import Path

import jax
import jax.numpy as jnp
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
    assert "Not run yet: accelerators, accuracy, adaptive, chain" in report.page(tmp_path)
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


def loaded(name, folder="figures"):
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / folder / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def accuracy_row(case, episodes, times):
    errors = {"this library": [0.02], "spline, oracle mesh": [0.03], "local cubic, oracle": [0.05]}
    errors |= {"version 0.1.0": [0.04], "the paper, literally": [12.0]}
    return {
        "case": case, "noise": 2.0, "episodes": episodes, "times": times, "sets": 1, "limit": 0.01, "errors": errors,
        "rmse": {name: mine[0] for name, mine in errors.items()}, "best rival": "spline, oracle mesh",
        "ratios": {"to best rival": 2 / 3, "to version 0.1.0": 0.5},
    }  # fmt: skip


def test_the_table_names_the_best_rival_and_marks_what_saw_less():
    table = loaded("table").table([accuracy_row("well", 10_000, 1), accuracy_row("well", 1000, 1)])
    assert "| well | **0.02** | spline, oracle mesh | 0.03 | 0.05 | 0.04 | 12 |" in table
    assert len(table.splitlines()) == 3  # one size only
    fewer = {**accuracy_row("well", 10_000, 1), "sets": 2}
    assert "| 0.03 * |" in loaded("table").table([fewer])


def test_the_picture_and_the_page_of_accuracy(tmp_path, monkeypatch):
    errors, report = loaded("errors"), loaded("report")
    monkeypatch.setattr(errors, "RESULTS", tmp_path)
    rows = [accuracy_row(name, size, times) for name in ("a", "b") for size in (1000, 10_000) for times in (1, 16)]
    errors.draw(rows)
    assert (tmp_path / "accuracy.png").stat().st_size > 10_000
    summary = {"groups": [{"noise": 2.0, "mean to best rival": 0.6}], "overall": {}, "misses": ["a <misses>"]}
    (tmp_path / "accuracy.json").write_text(json.dumps({"rows": rows, "summary": summary}))
    page = report.page(tmp_path)
    assert page.count("<img") == 3  # the picture, and bars for one time and for many
    assert "a &lt;misses&gt;" in page
    assert "rmse › spline, oracle mesh" in page


def test_the_watch_on_the_compiler_counts_programs_and_no_time_twice(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    module = loaded("compile", ".")
    assert module.covered([(0.0, 2.0), (0.5, 1.0), (3.0, 4.0), (3.5, 5.0)]) == 4.0
    watch, doubled = module.Watch(tmp_path), jax.jit(lambda x: 2 * jnp.sin(x))
    jax.config.update("jax_dump_ir_to", str(tmp_path))
    try:
        first, again = (watch.measure(lambda: doubled(3.0)) for _ in range(2))
    finally:
        jax.config.update("jax_dump_ir_to", "")
        jax.monitoring.unregister_event_time_span_listener(watch.heard)
    assert first["programs"] == 1
    assert first["kilobytes"] > 0
    assert min(first["trace"], first["lower"], first["compile"]) > 0
    assert (again["programs"], again["kilobytes"], again["compile"]) == (0, 0, 0)
    assert set(module.FAST) < set(module.CASES)
