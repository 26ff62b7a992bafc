"""The manners of the command line: what it writes where, what it says where, and how it stops."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from logs import quartic_log
from matplotlib.figure import Figure

from malliavin_jax.cli import commands, entry, main, pictures
from malliavin_jax.cli.output import Place
from malliavin_jax.estimate.ratio import Estimate


@pytest.fixture(scope="module")
def flipped(tmp_path_factory):
    """A log whose gradients have the wrong sign."""
    log = quartic_log(0, 600, 12, step_size=0.05, beta=1.0, noise=0.5)
    path = tmp_path_factory.mktemp("logs") / "flipped.npz"
    np.savez(
        path, x=log["x"], gradient=-log["gradient"], hessian=-log["hessian"], step_size=0.05, inverse_temperature=1.0
    )
    return path


def test_forced_outputs_are_marked_and_json_is_alone_on_standard_output(flipped, tmp_path, capsys):
    words = ["estimate", str(flipped), "--at", "-1e-3", ".5", "--steps", "12", "--force", "--json", "-"]
    assert main([*words, "--out", str(tmp_path / "new" / "out")]) == 0
    printed = capsys.readouterr()
    result = json.loads(printed.out)
    assert [point["alpha_1"] for point in result["points"]] == [-0.001, 0.5]
    assert "the gradients have the wrong sign" in result["check_failed"][0]
    out = tmp_path / "new" / "out"
    assert (out / "estimate.json").read_text() == printed.out
    assert (out / "estimate.csv").read_text().startswith("# check failed: learner 0: the gradients have the wrong sign")
    assert sorted(path.name for path in out.iterdir()) == ["estimate.csv", "estimate.json", "estimate.png"]
    for line in (
        "reading ",
        "checking 600 episodes",
        "weighing them at 1 step\n",
        "estimating the gradient at 2 points",
    ):
        assert line in printed.err


def test_check_as_json_writes_nothing(flipped, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["check", str(flipped), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["ok"] is False
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", [["estimate", "--at", "0"], ["recover"], ["check"]])
def test_nothing_is_read_before_the_place_is_known_to_serve(command, flipped, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(commands.io, "load", lambda *_, **__: pytest.fail("read"))
    name, *rest = command
    (tmp_path / "file").write_text("")
    assert main([name, str(flipped), *rest, "--out", str(tmp_path / "file" / "deeper")]) == 2
    assert "file/deeper cannot be written: Not a directory" in capsys.readouterr().err
    there = {"estimate": "estimate.csv", "recover": "loss.csv", "check": "check.json"}[name]
    (tmp_path / there).write_text("mine")
    assert main([name, str(flipped), *rest, "--out", str(tmp_path)]) == 2
    assert f"holds {there} already: give --overwrite" in capsys.readouterr().err
    assert (tmp_path / there).read_text() == "mine"


def test_a_mistyped_path_makes_no_folder(tmp_path, capsys):
    assert main(["recover", str(tmp_path / "typo.npz"), "--out", str(tmp_path / "out")]) == 2
    assert "is not there" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_files_are_whole_or_not_there(tmp_path):
    place = Place(tmp_path / "out")

    def draw(file):
        file.write(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        place.picture("picture.png", draw)
    assert not (tmp_path / "out").exists()
    place.write("table.txt", "whole")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["table.txt"]
    assert place.said() == f"table.txt is in {tmp_path / 'out'}"


def test_an_interrupt_is_one_line_and_130(flipped, tmp_path):
    """As a shell sends it, while the data are read."""
    script = (
        "import sys, time\n"
        "from malliavin_jax.cli import commands, main\n"
        "def load(*_, **__):\n    print('reading', flush=True)\n    time.sleep(60)\n"
        "commands.io.load = load\n"
        f"sys.exit(main(['recover', {str(flipped)!r}, '--out', {str(tmp_path / 'out')!r}]))\n"
    )
    run = subprocess.Popen([sys.executable, "-c", script], stdout=-1, stderr=-1, text=True, env=os.environ)
    assert run.stdout.readline() == "reading\n"
    run.send_signal(signal.SIGINT)
    _, error = run.communicate(timeout=60)
    assert run.returncode == 130
    assert error.splitlines()[-1] == "malliavin-jax: interrupted; files that were written are whole"
    assert "Traceback" not in error
    assert not (tmp_path / "out").exists()


def test_an_interrupt_during_the_imports_is_one_line_and_130():
    """The package takes seconds to import; here an import of its own waits for the signal."""
    script = (
        "import sys, time, types\n"
        "class Slow:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'malliavin_jax.cli':\n"
        "            print('importing', flush=True)\n            time.sleep(60)\n"
        "sys.meta_path.insert(0, Slow())\n"
        "import malliavin_jax_command\n"
        "sys.exit(malliavin_jax_command.main())\n"
    )
    root = Path(__file__).parents[2]
    run = subprocess.Popen([sys.executable, "-c", script], stdout=-1, stderr=-1, text=True, cwd=root)
    assert run.stdout.readline() == "importing\n"
    run.send_signal(signal.SIGINT)
    _, error = run.communicate(timeout=60)
    assert run.returncode == 130
    assert error.split() == ["malliavin-jax:", "interrupted;", "nothing", "was", "written"]


def some_estimates(alphas, trusted=True):
    def estimate(alpha):
        return Estimate(alpha, 0 * alpha + 0.1, alpha[0], alpha[0], jnp.asarray(trusted))

    return jax.vmap(estimate)(jnp.asarray(alphas))


def axes_of(draw, *arguments):
    ax = Figure().subplots()
    draw(ax, *arguments)
    return ax


def test_one_point_is_an_error_bar():
    ax = axes_of(pictures._bars, np.zeros(1), some_estimates(np.zeros((1, 1))))
    assert len(ax.containers) == 1
    low, high = ax.get_ylim()
    assert low < -0.2 < 0.2 < high
    assert ax.get_xlim() == (-1, 1)
    assert [text.get_text() for text in ax.texts] == ["0.00 ± 0.10"]
    ax = axes_of(pictures._bars, np.zeros(1), some_estimates(np.zeros((1, 1)), trusted=False))
    assert "not trusted" in [text.get_text() for text in ax.get_legend().get_texts()]


def test_a_fine_grid_in_the_plane_is_an_image():
    x, y = np.linspace(-1, 1, 300), np.linspace(-1, 1, 200)
    alphas = np.stack(np.meshgrid(x, y, indexing="ij"), -1).reshape(-1, 2)
    ax = axes_of(pictures._plane, alphas, some_estimates(alphas))
    image, arrows = ax.collections
    np.testing.assert_allclose(image.get_array().reshape(200, 300), np.linalg.norm(alphas, axis=1).reshape(300, 200).T)
    assert 400 < arrows.N <= 900
    few = alphas[:3]
    assert len(axes_of(pictures._plane, few, some_estimates(few)).texts) == 3


def test_an_interrupted_process_leaves_at_once(monkeypatch, capsys):
    """Threads of the compiler may crash while Python tears itself down, and the exit code with them."""

    def interrupted(arguments, *, own_process):
        raise KeyboardInterrupt

    def leave(code):
        raise SystemExit(code)

    monkeypatch.setattr(entry, "_run", interrupted)
    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(sys, "argv", ["malliavin-jax", "check", "run.npz"])
    with pytest.raises(SystemExit, match="130"):
        entry.main()
    assert entry.main(["check", "run.npz"]) == 130  # called by a program, it only returns
    assert capsys.readouterr().err.count("interrupted") == 2
