"""A run that is still being recorded, followed by another process: whatever is killed, the result is the same."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import malliavin_jax as mj
from malliavin_jax.cli import main
from malliavin_jax.io.blocks import read_blocks
from malliavin_jax.io.updates import updates_in

ROWS, EPISODES = 10, 60
WORDS = ["--episodes", str(EPISODES), "--grid", "-1.5:1.5:31"]
OUTPUTS = ("loss.csv", "watch.json", "loss.png")


def record(folder, episodes, *, seed, tilt=0.3, rows=ROWS, dim=1, observed="hessians", step_size=0.02):
    """Episodes of a noisy learner in a double well."""
    rng = np.random.default_rng(seed)
    with mj.io.Recorder(folder, step_size=step_size, inverse_temperature=1.0) as recorder:
        for _ in range(episodes):
            recorder.restart()
            x = rng.normal(size=dim)
            for _ in range(rows):
                gradient, hessian = x**3 - x + tilt + 0.5 * rng.normal(size=dim), 3 * x**2 - 1
                known = {"hessians": [gradient, np.diag(hessian)], "diagonals": [gradient, hessian]}
                recorder.step(x, *known.get(observed, {"gradients": [gradient], "positions": []}.get(observed)))
                x = x - 0.02 * gradient + np.sqrt(2 * 0.02) * rng.normal(size=dim)


def watched(folder, out, *words):
    assert main(["watch", str(folder), "--out", str(out), "--once", *words]) == 0
    return json.loads((out / "watch.json").read_text())


def error_of(result, tilt=0.3):
    """The root mean square of the gradient's errors, in standard errors, where it is trusted."""
    rows = [row for row in result["gradient"] if row["trusted"]]
    assert len(rows) > len(result["gradient"]) // 2
    x, g, s = (np.asarray([row[name] for row in rows]) for name in ("alpha_1", "gradient_1", "stderr_1"))
    return np.sqrt(np.mean(((g - (x**3 - x + tilt)) / s) ** 2))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A folder of six updates with a change after the third, and what a watch makes of it."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    record(folder, 3 * EPISODES, seed=0)
    record(folder, 3 * EPISODES, seed=1, tilt=-1.2)
    out = folder.parent / "out"
    return folder, out, watched(folder, out, *WORDS)


def test_the_loss_the_change_and_the_files(run, capsys):
    folder, out, result = run
    assert (result["rows"], result["updates"], result["refused"]) == (6 * EPISODES * ROWS, 6, 0)
    assert (result["changes"], result["changed_at_row"]) == (1, 3 * EPISODES * ROWS)
    assert result["history"]["memory"] == [1, 2, 3, 1, 2, 3]
    assert error_of(result, -1.2) < 2
    assert len(result["loss"]) == 31
    assert (out / "loss.png").read_bytes()[:4] == b"\x89PNG"
    before = {name: (out / name).read_bytes() for name in OUTPUTS}
    again = watched(folder, out, *WORDS)  # nothing new: the same files, from the state alone
    assert again == result
    assert {name: (out / name).read_bytes() for name in OUTPUTS} == before
    assert "going on from row 3600, after update 6" in capsys.readouterr().err


def start(folder, out, *words):
    command = [sys.executable, "-m", "malliavin_jax.cli", "watch", str(folder), "--out", str(out), "--every", "0.05"]
    return subprocess.Popen([*command, *words, *WORDS], stdout=-1, stderr=-1, text=True, env=os.environ)


def wait_for(condition, process, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end, "too slow"
        time.sleep(0.02)


def updates(out):
    try:
        return json.loads((out / "watch.json").read_text())["updates"]
    except FileNotFoundError:
        return 0


def test_killed_resumed_and_interrupted_it_ends_as_if_nothing_had_been(run, tmp_path):
    """SIGKILL in the middle of the run, rows that come in between, SIGINT in the end."""
    _, uninterrupted, result = run
    folder, out = tmp_path / "run", tmp_path / "out"
    watcher = start(folder, out)  # before there is anything to watch
    try:
        record(folder, 2 * EPISODES + 7, seed=0)
        wait_for(lambda: updates(out) >= 2, watcher)
        watcher.kill()
        watcher.communicate()
        assert watcher.returncode == -signal.SIGKILL
        (out / ".state.npz.tmp").write_bytes(b"half a draft")
        folder_again = tmp_path / "whole"  # the same rows as those of `run`, in one go each
        record(folder_again, 3 * EPISODES, seed=0)
        record(folder_again, 3 * EPISODES, seed=1, tilt=-1.2)
        for file in folder_again.iterdir():
            if not file.name.startswith("."):
                (folder / file.name).write_bytes(file.read_bytes())
        watcher = start(folder, out)
        wait_for(lambda: updates(out) >= 5, watcher)
        watcher.send_signal(signal.SIGINT)
        _, error = watcher.communicate(timeout=60)
    finally:
        watcher.kill()
        watcher.communicate()
    assert watcher.returncode == 130
    assert error.splitlines()[-1] == "malliavin-jax: interrupted; files that were written are whole"
    assert "Traceback" not in error
    assert "going on from row" in error
    final = watched(folder, out, *WORDS)
    assert {**final, "data": ""} == {**result, "data": ""}
    assert (out / "loss.csv").read_bytes() == (uninterrupted / "loss.csv").read_bytes()


@pytest.mark.parametrize("observed", ["hessians", "diagonals", "gradients", "positions"])
def test_every_rung(observed, tmp_path, capsys):
    record(tmp_path / "run", 4 * EPISODES, seed=3, observed=observed)
    result = watched(tmp_path / "run", tmp_path / "out", *WORDS)
    assert result["observed"] == ("hessians" if observed == "diagonals" else observed)  # one dimension: the same
    assert error_of(result) < 2.5
    said = "positions alone" in capsys.readouterr().err
    assert said == (observed == "positions")


def test_the_plane_and_a_run_that_never_restarts(tmp_path, capsys):
    record(tmp_path / "run", 1, rows=1201, dim=2, seed=4, observed="diagonals")
    words = ["--episodes", "20", "--piece-steps", "30"]
    result = watched(tmp_path / "run", tmp_path / "out", *words)
    assert (result["updates"], result["rows"], result["observed"]) == (2, 1200, "gradients")
    assert len(result["loss"]) == 25**2
    said = capsys.readouterr().err
    assert "diagonals of Hessians, which are left out" in said
    assert "1 episodes are left, and an update takes 20" in said


def spoil(folder, row, name="gradient", value=np.nan):
    """Put a number into the file of rows, as no recorder would."""
    (file,) = folder.glob("rows-*.npz")
    arrays = dict(np.load(file))
    arrays[name][row] = value
    np.savez(file, **arrays)


def test_bad_episodes_are_refused_by_name_and_nothing_is_lost(tmp_path, capsys):
    folder = tmp_path / "run"
    record(folder, 3 * EPISODES, seed=5)
    good = watched(folder, tmp_path / "good", *WORDS)
    spoil(folder, ROWS * EPISODES + 3)
    spoil(folder, ROWS * EPISODES + 3 * ROWS, "hessian", 1e200)  # finite, and its square is not
    result = watched(folder, tmp_path / "out", *WORDS)
    assert result["refused"] == 2
    assert result["updates"] == 3
    assert "rows 600 to 1199: 2 of 60 episodes refused" in capsys.readouterr().err
    assert result["effective_episodes"] == good["effective_episodes"] - 2
    assert error_of(result) < 2
    spoil(folder, slice(ROWS * EPISODES * 2, None), "x")  # a whole update
    result = watched(folder, tmp_path / "third", *WORDS)
    assert (result["refused"], result["updates"], result["rows"]) == (2 + EPISODES, 2, 3 * ROWS * EPISODES)
    assert error_of(result) < 2


def test_mistakes_are_one_line_and_cost_nothing(run, tmp_path, capsys):
    folder, out, _ = run
    state = (out / "state.npz").read_bytes()

    def refused(*words):
        assert main(["watch", *map(str, words), "--once"]) == 2
        return capsys.readouterr().err.splitlines()[-1]

    assert "there is none" in refused(tmp_path / "typo", "--out", tmp_path / "o")
    assert "differs in episodes" in refused(folder, "--out", out, "--episodes", 30, "--grid", "-1.5:1.5:31")
    (tmp_path / "loss.csv").write_text("mine")
    assert "holds loss.csv already" in refused(folder, "--out", tmp_path)
    assert "loss.csv is a file, and watch follows" in refused(tmp_path / "loss.csv", "--out", tmp_path / "o")
    assert "6 episodes" not in refused(folder, "--out", tmp_path / "o", "--episodes", 1000)
    assert "--grid must have 1 axes" in refused(folder, "--out", tmp_path / "o", "--grid", "0:1:5,0:1:5")
    record(tmp_path / "space", 3, seed=0, dim=3)
    assert "watch serves 1 and 2 dimensions" in refused(tmp_path / "space", "--out", tmp_path / "o")
    record(tmp_path / "still", 3, seed=0, observed="positions", step_size=None)
    assert "no step_size" in refused(tmp_path / "still", "--out", tmp_path / "o")
    assert "forgetting must be" in refused(folder, "--out", tmp_path / "o", "--forgetting", 2)
    assert (out / "state.npz").read_bytes() == state
    record(tmp_path / "other", 2 * EPISODES, seed=9)
    assert "differs in run" in refused(tmp_path / "other", "--out", out, *WORDS)
    assert main(["watch", str(tmp_path / "other"), "--out", str(out), "--once", "--overwrite", *WORDS]) == 0
    assert json.loads((out / "watch.json").read_text())["updates"] == 2


def test_json_lines_are_alone_on_standard_output_and_idle_ends_it(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    record("run", 2 * EPISODES, seed=6)
    assert main(["watch", "run", "--json", "--idle", "0.3", "--every", "0.1", *WORDS]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert json.loads(lines[-1])["updates"] == 2
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_updates_do_not_depend_on_when_the_rows_were_read(tmp_path):
    record(tmp_path / "run", 9, seed=7, rows=13)
    record(tmp_path / "run", 5, seed=8, rows=30)
    settings = dict(episodes=4, piece_steps=8)
    everything = list(updates_in(read_blocks(tmp_path / "run"), **settings, ended=False))
    assert everything[0].next - everything[0].first == 13 * 2  # pieces of 8 and 5 rows
    start = 0
    for update in everything:
        for stop in range(update.next + 1, update.next + 40, 13):
            rows = read_blocks(tmp_path / "run", start=start, stop=stop)
            (again, *_) = updates_in(rows, **settings, ended=False)
            assert (again.first, again.next) == (update.first, update.next)
            for mine, theirs in zip(again.samples.bare.x, update.samples.bare.x, strict=True):
                np.testing.assert_array_equal(mine, theirs)
        assert not list(
            updates_in(read_blocks(tmp_path / "run", start=start, stop=update.next), **settings, ended=False)
        )
        start = update.next
