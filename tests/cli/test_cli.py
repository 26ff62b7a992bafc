"""The command line as a user meets it: what it writes, and what it says when the user is wrong."""

import csv
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from logs import gradient, quartic_log

from malliavin_jax.cli import main


def test_reproduce_writes_figures_table_and_numbers(tmp_path, capsys):
    assert main(["reproduce", "--fast", "--out", str(tmp_path)]) == 0
    gradients = ("gradient.png", "gradient_noise_0.5.png", "gradient_noise_2.png")
    for name in ("ladder.png", *gradients, "chain.png", "histogram.png", "loss.png"):
        assert (tmp_path / name).read_bytes()[:4] == b"\x89PNG"
    results = json.loads((tmp_path / "results.json").read_text())
    ours, paper = (results["gradient_rmse"][name] for name in ("malliavin_jax", "paper, literally"))
    assert ours < 0.05 * paper
    assert results["bank"]["malliavin_jax"]["loss_rmse"] < 1.1 * results["bank"]["true gradient"]["loss_rmse"]
    assert results["bank"]["malliavin_jax"]["outliers_above_5"] == 0
    assert [ladder["gradient_noise"] for ladder in results["ladder"]] == [0.0, 0.5, 2.0]
    for ladder in results["ladder"]:
        rmse = {name: errors["rmse"] for name, errors in ladder["rungs"].items()}
        assert list(rmse)[:4] == ["paper, literally", "exact weights", "canonical weights", "adapted weights"]
        steps = [rmse[name] for name in ("paper, literally", "adapted weights", "centred and localized")]
        assert steps == sorted(steps, reverse=True), "each of these is several times better than the one before"
        default = ladder["rungs"]["chosen (the default)"]
        assert default["rmse"] < 3.5 * default["stderr"]  # errors along the grid are nearly one number
        assert default["trusted"] == 1
    # The paper's polynomial is in the span of the control, which without noise finds it up to rounding.
    assert results["ladder"][0]["rungs"]["with a control"]["rmse"] < 1e-4
    assert "7. chosen (the default)" in (tmp_path / "table.txt").read_text()
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


# Recorded data.


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Logs as users have them: whole, without settings, with a bad episode, with a gradient that was not used."""
    path = tmp_path_factory.mktemp("logs")
    log = quartic_log(0, 600, 12, step_size=0.05, beta=1.0, noise=0.5)
    settings = {"step_size": 0.05, "inverse_temperature": 1.0}
    np.savez(path / "run.npz", **log, **settings)
    np.savez(path / "twice.npz", **quartic_log(1, 1200, 12, step_size=0.05, beta=1.0, noise=0.5), **settings)
    np.savez(path / "bare.npz", x=log["x"], gradient=log["gradient"])
    bad = {**log, "x": log["x"].copy()}
    bad["x"][7, 3] = np.nan
    np.savez(path / "bad.npz", **bad, **settings)
    np.savez(path / "wrong.npz", **{**log, "gradient": 3 * log["gradient"]}, **settings)
    np.savez(path / "flipped.npz", **{**log, "gradient": -log["gradient"]}, **settings)
    np.savez(path / "far.npz", **{**log, "x": log["x"] + 1e15}, **settings)
    np.savez(path / "space.npz", **quartic_log(0, 20, 4, d=3), **settings)
    (path / "text.npz").write_text("hello")
    return path


def table(path):
    with open(path, newline="") as file:
        return [{name: float(v) if name != "trusted" else v for name, v in row.items()} for row in csv.DictReader(file)]


def test_check_tells_a_good_log_from_a_wrong_one(folder, tmp_path, capsys):
    assert main(["check", str(folder / "run.npz"), "--out", str(tmp_path)]) == 0
    assert "the data fit the learner" in capsys.readouterr().out
    assert json.loads((tmp_path / "check.json").read_text())["ok"] is True
    assert main(["check", str(folder / "wrong.npz")]) == 1
    assert "! learner 0: the gradients are 3" in capsys.readouterr().out
    assert main(["check", str(folder / "bare.npz")]) == 0
    assert "recorded nowhere, from the moves 0.0" in capsys.readouterr().out


def test_estimate_writes_a_table_that_holds_the_gradient(folder, tmp_path, capsys):
    words = ["estimate", str(folder / "run.npz"), "--grid", "-0.8:0.8:9", "--steps", "6", "12", "--out", str(tmp_path)]
    assert main(words) == 0
    rows = table(tmp_path / "estimate.csv")
    assert [round(row["alpha_1"], 6) for row in rows] == [round(a, 6) for a in np.linspace(-0.8, 0.8, 9).tolist()]
    for row in rows:
        truth = float(gradient(np.asarray([row["alpha_1"]]))[0])
        assert abs(row["gradient_1"] - truth) < 4.5 * row["stderr_1"]
        assert row["density"] > 0
        assert row["trusted"] == "True"
    assert json.loads((tmp_path / "estimate.json").read_text())["points"][3]["alpha_1"] == pytest.approx(-0.2)
    assert (tmp_path / "estimate.png").read_bytes()[:4] == b"\x89PNG"
    # A point far from the data is said not to be carried by them, and is null in JSON where it is infinite.
    words[2:4] = ["--at", "-0.5", "40"]
    assert main(words) == 2
    assert "holds estimate.csv, estimate.json, estimate.png already: give --overwrite" in capsys.readouterr().err
    assert main([*words, "--overwrite"]) == 0
    near, far, _ = capsys.readouterr().out.splitlines()  # few points are printed, each with its standard error
    row = table(tmp_path / "estimate.csv")[0]
    value, error = map(float, near.removeprefix("gradient at -0.5: ").split(" ± "))
    assert value == pytest.approx(row["gradient_1"], abs=row["stderr_1"])
    assert error == pytest.approx(row["stderr_1"], rel=0.1)
    assert far.startswith("gradient at 40: ")
    assert far.endswith("(not trusted)")
    assert json.loads((tmp_path / "estimate.json").read_text())["points"][1]["stderr_1"] is None


def test_recover_in_chunks(folder, tmp_path, capsys):
    words = ["recover", str(folder / "twice.npz"), "--grid", "-0.8:0.8:33", "--steps", "6", "12", "--chunk-size", "600"]
    assert main([*words, "--out", str(tmp_path)]) == 0
    rows = table(tmp_path / "loss.csv")
    alphas = np.asarray([row["alpha_1"] for row in rows])
    gap = np.asarray([row["loss"] for row in rows]) - (alphas**4 / 4 + alphas**2 / 2)
    assert np.std(gap) < 0.1
    for name in ("loss.png", "gradient.png"):
        assert (tmp_path / name).read_bytes()[:4] == b"\x89PNG"
    report = (tmp_path / "report.txt").read_text()
    assert "1200 episodes of up to 12 steps in 1 dimension\n" in report
    assert "the data fit the learner" in report
    assert report.strip() in capsys.readouterr().out


def test_one_long_chain_without_hessians(tmp_path, capsys):
    """One chain of 6000 steps that never restarts, positions and gradients alone: cut, checked, and estimated."""
    log = quartic_log(3, 1, 6000, step_size=0.05, beta=1.0, noise=0.5)
    np.savez(
        tmp_path / "chain.npz", x=log["x"][0], gradient=log["gradient"][0], step_size=0.05, inverse_temperature=1.0
    )
    words = ["estimate", str(tmp_path / "chain.npz"), "--piece-steps", "20", "--at", "-0.5", "0.5", "--json"]
    assert main(words) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["observed"] == "gradients"
    for point in said["points"]:
        alpha, value, stderr = (float(point[name]) for name in ("alpha_1", "gradient_1", "stderr_1"))
        assert abs(value - (alpha**3 + alpha)) < 4 * stderr
        assert 0 < stderr < 0.3


@pytest.mark.slow
def test_recover_in_the_plane(tmp_path):
    np.savez(tmp_path / "run.npz", **quartic_log(0, 2000, 12, d=2, noise=0.5), step_size=0.02, inverse_temperature=2.0)
    for extra in ([], ["--safe"]):
        assert (
            main(
                [
                    "recover",
                    str(tmp_path / "run.npz"),
                    "--out",
                    str(tmp_path),
                    "--steps",
                    "6",
                    "12",
                    "--overwrite",
                    *extra,
                ]
            )
            == 0
        )
        rows = table(tmp_path / "loss.csv")
        at = np.asarray([[row["alpha_1"], row["alpha_2"]] for row in rows])
        gap = np.asarray([row["loss"] for row in rows]) - np.sum(at**4 / 4 + at**2 / 2, 1)
        assert np.nanstd(gap) < 0.1
        assert "part of the field that is no gradient" in (tmp_path / "report.txt").read_text()


WRONG = {
    r"bare.npz does not hold both step_size and inverse_temperature: give --step-size": ["recover", "bare.npz"],
    r"the data suggest 0.0": ["estimate", "bare.npz", "--at", "0.1", "--step-size", "0.05"],
    r"bad.npz: episode 7, step 3: x must be finite": ["check", "bad.npz"],
    r"nothing.npz must be a .npz file or a folder of .npy files, and is not there": ["check", "nothing.npz"],
    r"text.npz cannot be read": ["recover", "text.npz"],
    r"step_size is in": ["check", "run.npz", "--step-size", "0.2"],
    r"--at must give points of 1 number, got 2": ["estimate", "run.npz", "--at", "-0.1,0.2"],
    r"--at must be points with equally many numbers": ["estimate", "run.npz", "--at", "0.1", "0.1,0.2"],
    r"--grid must have 1 axis for these data, got 2": ["estimate", "run.npz", "--grid", "0:1:3,0:1:3"],
    r"steps must lie inside the recorded paths, of 12 steps, got 13": [
        "estimate", "run.npz", "--at", "0", "--steps", "13",
    ],
    r"times must be positive multiples of step_size=0.05, got 0.12": ["recover", "run.npz", "--times", "0.12"],
    r"--chunk-size must leave at least two chunks": ["recover", "run.npz", "--chunk-size", "600"],
    r"recover serves 1 and 2 dimensions, these data have 3": ["recover", "space.npz"],
    r"need more digits than float64 has": ["recover", "far.npz"],
    r"the gradients have the wrong sign": ["recover", "flipped.npz"],
    r"and the Hessians with the other sign too (--force goes on, and marks": ["estimate", "flipped.npz", "--at", "0"],
}  # fmt: skip


@pytest.mark.parametrize("message", WRONG)
def test_every_mistake_is_one_line_and_2(folder, tmp_path, capsys, message):
    command, data, *rest = WRONG[message]
    assert main([command, str(folder / data), *rest, "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert message in error
    notes = ("reading ", "checking ", "weighing ", "estimating ")
    (line,) = [line for line in error.splitlines() if not line.startswith(notes)]
    assert line.startswith("malliavin-jax: ")
    assert list(tmp_path.iterdir()) == []  # nothing was written


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["estimate", "run.npz", "--grid", "1:0:5"], "low:high:count with low < high"),
        (["estimate", "run.npz", "--grid", "0:1:1000000000"], "count from 2 to 100000"),
        (["estimate", "run.npz", "--grid", "-1:1"], "low:high:count with low < high"),
        (
            ["estimate", "run.npz", "--grid", "-1:1:100000,-1:1:100000"],
            "has 10000000000 points, and at most 250000 are served: try --grid -1:1:500,-1:1:500",
        ),
        (["estimate", "run.npz"], "one of the arguments --at --grid is required"),
        (["estimate", "run.npz", "--at", "0", "--chunk-size", "-3"], "--chunk-size"),
        (["recover", "run.npz", "--times", "0.1", "--steps", "2"], "not allowed with"),
        (["recover"], "DATA"),
    ],
)
def test_mistakes_in_the_words(words, message, capsys):
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert line.endswith("--help explains)")


def test_bad_episodes_may_be_dropped(folder, capsys):
    assert main(["check", str(folder / "bad.npz"), "--drop-bad"]) == 0
    printed = capsys.readouterr().out
    assert "dropped 1 of 600 episodes; the first: episode 7, step 3" in printed
    assert "599 episodes" in printed


@pytest.mark.parametrize("command", ["check", "estimate", "recover"])
def test_help_has_the_layout_and_an_example(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    for words in ("(episodes, points, d)", "examples:", f"malliavin-jax {command} run.npz", "exit codes: 0 done, 2"):
        assert words in text


def test_as_a_process(folder):
    """No traceback, and the exit code, as a shell sees them; and no matplotlib where nothing is drawn."""
    words = [sys.executable, "-X", "importtime", "-m", "malliavin_jax.cli", "check", str(folder / "text.npz")]
    run = subprocess.run(words, capture_output=True, text=True, env=os.environ)
    assert (run.returncode, run.stdout) == (2, "")
    assert "Traceback" not in run.stderr
    assert "text.npz cannot be read" in run.stderr
    assert "malliavin_jax.cli.commands" in run.stderr
    assert "matplotlib" not in run.stderr
