"""The README's example runs, and its commands are the ones that are tested."""

import importlib.util
import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from logs import quartic_log

import malliavin_jax
from malliavin_jax.cli import main

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


@pytest.fixture(scope="module")
def example():
    (block,) = re.findall(r"```python\n(.*?)```", README, re.S)
    names = {}
    exec(compile(block, "README.md", "exec"), names)
    return names


def test_the_example_estimates_the_gradient_within_its_error_bars(example):
    estimate = example["estimate"]
    assert bool(estimate.trusted)
    assert abs(float(estimate.value[0]) - (0.5**3 + 0.5)) < 4 * float(estimate.stderr[0])


def test_the_example_recovers_the_loss(example):
    for name, scale in (("recovered", 1.0), ("smoother", 1.0)):
        loss = example[name]
        grid, value, stderr = (np.asarray(v) for v in (loss.grid, loss.value, loss.stderr))
        centre = (np.abs(grid) < 1) & np.isfinite(value)
        truth = grid**4 / 4 + grid**2 / 2
        # Bins are a tenth of a unit wide and the loss is curved: half a bin of slope, and four standard errors.
        allowed = scale * (0.05 + 4 * stderr[centre])
        assert centre.sum() > 10
        assert np.all(np.abs(value[centre] - truth[centre]) < allowed), name


def test_a_recorded_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    log = quartic_log(0, 600, 40)
    np.savez("run.npz", **log, step_size=0.02, inverse_temperature=2.0)
    (block,) = re.findall(r"```py\n(.*?)```", README, re.S)
    names = {"mj": malliavin_jax}
    exec(compile(block, "README.md", "exec"), names)
    assert "the data fit the learner" in capsys.readouterr().out
    got = names["field"](jnp.asarray([0.5]))
    assert abs(float(got.value[0]) - 0.625) < 4 * float(got.stderr[0])
    commands = re.findall(r"^    malliavin-jax (.*)$", README, re.M)
    assert [words.split()[0] for words in commands] == ["check", "estimate", "recover", "watch"]
    assert main(commands[0].split()) == 0


def test_exactly_two_set_up_commands():
    commands = [line.strip() for line in README.splitlines() if line.startswith("    python3 -m venv")]
    assert len(commands) == 2
    assert commands[0].endswith("malliavin-jax reproduce")
    assert commands[1].endswith("python -m pytest -n 2")
    assert "pytest -n 2" in (ROOT / ".ci" / "run").read_text()


def test_the_table_is_the_one_that_was_measured():
    (printed,) = re.findall(r"<!-- table -->\n(.*?)\n<!-- end of table -->", README, re.S)
    spec = importlib.util.spec_from_file_location("table", ROOT / "benchmarks" / "figures" / "table.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert printed == module.table(), "python benchmarks/figures/table.py --write"
    assert printed.count("\n") > 5


def test_every_file_the_readme_names_is_there():
    named = re.findall(r"\]\(([^)h][^)]*)\)", README) + re.findall(r"`python (benchmarks/[\w/]+\.py)`", README)
    assert len(named) > 10
    assert [name for name in named if not (ROOT / name).is_file()] == []


def test_versions_agree():
    assert f'version = "{malliavin_jax.__version__}"' in (ROOT / "pyproject.toml").read_text()
    assert f"version: {malliavin_jax.__version__}" in (ROOT / "CITATION.cff").read_text()
    assert jnp.asarray(0.0).dtype == jnp.float64  # the strict settings are on
