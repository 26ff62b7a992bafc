"""The command line as a user meets it: what it writes, and what it says when the user is wrong."""

import json

import pytest

from malliavin_jax.cli import main


def test_reproduce_writes_figures_table_and_numbers(tmp_path, capsys):
    assert main(["reproduce", "--fast", "--out", str(tmp_path)]) == 0
    for name in ("gradient.png", "chain.png", "histogram.png", "loss.png"):
        assert (tmp_path / name).read_bytes()[:4] == b"\x89PNG"
    results = json.loads((tmp_path / "results.json").read_text())
    ours, paper = (results["gradient_rmse"][name] for name in ("malliavin_jax", "paper, literally"))
    assert ours < 0.05 * paper
    assert results["bank"]["malliavin_jax"]["loss_rmse"] < 1.1 * results["bank"]["true gradient"]["loss_rmse"]
    assert results["bank"]["malliavin_jax"]["outliers_above_5"] == 0
    assert (tmp_path / "table.txt").read_text().strip() in capsys.readouterr().out


@pytest.mark.parametrize("words", [["reproduce", "--seed", "-1"], ["reproduce", "--seed", "x"], [], ["nonsense"]])
def test_mistakes_exit_with_2_and_a_message(words, capsys):
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 2
    assert "malliavin-jax" in capsys.readouterr().err


def test_an_unwritable_directory_is_named(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["reproduce", "--out", str(tmp_path / "file" / "deeper")]) == 2
    message = capsys.readouterr().err
    assert "--out" in message
    assert "deeper" in message
