"""Checkpoints: a run that was cut ends in the same bits as one that was not, and no file is ever harmed."""

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from malliavin_jax._base import long_runs
from malliavin_jax._base.files import write_whole
from malliavin_jax._base.fingerprint import fingerprint
from malliavin_jax._base.long_runs import Checkpoint
from malliavin_jax.chain import runner
from malliavin_jax.chain.passive import passive_langevin
from malliavin_jax.chain.rule import langevin
from malliavin_jax.estimate.ratio import Estimate


class NoisyField(eqx.Module):
    stiffness: jax.Array

    def __call__(self, alpha, *, key=None):
        value = self.stiffness * (alpha + alpha**3) + 0.1 * jax.random.normal(key, alpha.shape)
        return Estimate(value, jnp.abs(value), jnp.sum(alpha), jnp.sum(value), alpha[0] > 0)


FIELD = NoisyField(jnp.asarray(1.0))
SETTINGS = dict(num_steps=230, step_size=0.05, inverse_temperature=1.0, burn_in=20, thinning=3)


def run(path=None, field=FIELD, initial=None, key=0, every=50, **changes):
    start = jnp.ones((3, 2)) if initial is None else initial
    more = {} if path is None else dict(checkpoint=Checkpoint(path, every=every))
    return passive_langevin(jax.random.key(key), field, start, **(SETTINGS | more | changes))


def assert_same_bits(left, right):
    jax.tree.map(np.testing.assert_array_equal, left, right)


class Interrupted(BaseException):
    """Not an Exception: nothing may swallow it, as nothing swallows a KeyboardInterrupt."""


def interrupt_after(monkeypatch, saves):
    """Let `saves` checkpoints be written, then stop the run in the write of the next one."""
    write, count = long_runs.write_archive, iter(range(10**6))

    def counted(*arguments):
        if next(count) >= saves:  # nor is there a write on the way out
            raise Interrupted
        write(*arguments)

    monkeypatch.setattr(long_runs, "write_archive", counted)


# --- resuming --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("saves", [1, 4])
def test_interrupted_and_resumed_equals_uninterrupted(tmp_path, saves):
    path = tmp_path / "chain.npz"
    with pytest.MonkeyPatch.context() as patch:
        interrupt_after(patch, saves)
        with pytest.raises(Interrupted):
            run(path)
    assert path.exists()
    resumed = run(path)
    assert_same_bits(resumed, run(tmp_path / "other.npz"))
    assert_same_bits(resumed, run())  # and as the run that never heard of checkpoints
    assert sorted(os.listdir(tmp_path)) == ["chain.npz", "other.npz"]


def test_optimizer_state_is_resumed(tmp_path):
    def make():  # made anew each time, as a new process would
        return optax.chain(optax.clip(3.0), optax.trace(0.5), langevin(jax.random.key(9), 0.05, 1.0))

    resumable = dict(step_size=None, inverse_temperature=None)
    with pytest.MonkeyPatch.context() as patch:
        interrupt_after(patch, 2)
        with pytest.raises(Interrupted):
            run(tmp_path / "a.npz", update=make(), **resumable)
    resumed = run(tmp_path / "a.npz", update=make(), **resumable)
    assert_same_bits(resumed, run(tmp_path / "b.npz", update=make(), **resumable))
    assert len(np.unique(resumed.positions)) == resumed.positions.size
    with pytest.raises(ValueError, match="differs in update"):
        run(tmp_path / "a.npz", update=langevin(jax.random.key(8), 0.05, 1.0), **resumable)


def test_a_finished_run_is_read_back_without_a_step(tmp_path, monkeypatch):
    path = tmp_path / "chain.npz"
    finished = run(path)
    before = path.read_bytes()
    monkeypatch.setattr(
        "malliavin_jax.chain.runner.advance", lambda *arguments, **sizes: pytest.fail("a step was made")
    )
    assert_same_bits(run(path), finished)
    assert path.read_bytes() == before


def test_interval_may_change_and_the_bar_may_join(tmp_path, capfd):
    with pytest.MonkeyPatch.context() as patch:
        interrupt_after(patch, 2)
        with pytest.raises(Interrupted):
            run(tmp_path / "chain.npz")
    resumed = run(tmp_path / "chain.npz", every=77, progress=True)
    assert_same_bits(resumed, run())
    assert "100%" in capfd.readouterr().err


def test_default_interval_is_a_tenth(tmp_path):
    steps = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(long_runs, "write_archive", lambda path, header, arrays: steps.append(int(arrays["done"])))
        run(tmp_path / "chain.npz", every=None)
    assert steps == [
        *range(24, 231, 24),
        231,
    ]  # 231 evaluations of the field: 230 steps and the last position


WORKER = """
import os, signal, sys
import jax
import numpy as np
jax.config.update("jax_enable_x64", True)
sys.path.insert(0, {tests!r})
from test_long_runs import LONG, run

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def savez(file, save=np.savez, left=[5], **arrays):
    left[0] -= 1
    save(file, **arrays)
    if left[0] == 0:  # half of the bytes are on disk
        file.flush()
        file.truncate(file.tell() // 2)
        die()

def fsync(descriptor, sync=os.fsync, left=[10]):
    left[0] -= 1
    if left[0] == 1:  # written, not yet moved into place (a save calls this twice: file, then directory)
        die()
    sync(descriptor)

if {where!r} == "write":
    np.savez = savez
elif {where!r} == "move":
    os.fsync = fsync
run({path!r}, every=10, **LONG)
"""
LONG = dict(num_steps=3000, burn_in=0, thinning=1)


def test_a_process_killed_while_it_writes(tmp_path):
    """SIGKILL in the middle of a write, before the move, and at random moments of 300 writes in a row."""
    path = tmp_path / "chain.npz"
    rng, environment = np.random.default_rng(0), os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    reached = 0
    for where in ("write", "move", "anywhere", "anywhere"):
        code = WORKER.format(tests=str(Path(__file__).parent), path=str(path), where=where)
        process = subprocess.Popen([sys.executable, "-c", code], env=environment)
        before = path.stat().st_mtime_ns if path.exists() else 0
        while process.poll() is None and where == "anywhere":
            if path.exists() and path.stat().st_mtime_ns != before:
                time.sleep(rng.uniform(0, 0.05))
                process.send_signal(signal.SIGKILL)
                break
            time.sleep(0.001)
        assert process.wait() == -signal.SIGKILL
        if where != "anywhere":
            assert (tmp_path / ".chain.npz.tmp").exists()  # it did die in the middle
        with np.load(path, allow_pickle=False) as stored:  # and yet the checkpoint is whole
            assert reached < int(stored["done"]) < 3001
            reached = int(stored["done"])
            assert stored["state.records.positions"].shape == (3, reached - 1, 2)
    assert_same_bits(run(path, every=10_000, **LONG), run(**LONG))
    assert os.listdir(tmp_path) == ["chain.npz"]


def test_an_exception_in_the_run_loses_only_the_leg_it_is_in(tmp_path, monkeypatch):
    """Also between two writes: each leg is noted, and what is noted is written on the way out."""
    advance, stops = runner.advance, []

    def breaks(*arguments, stop, **sizes):
        if len(stops) == 30:
            raise Interrupted
        stops.append(int(stop))
        return advance(*arguments, stop=stop, **sizes)

    path = tmp_path / "chain.npz"
    with monkeypatch.context() as patch:
        patch.setattr(runner, "advance", breaks)
        with pytest.raises(Interrupted):
            run(path, progress=True)
    with np.load(path, allow_pickle=False) as stored:
        assert int(stored["done"]) == stops[-1]
    assert stops[-1] % 50 != 0  # no write was due there
    assert_same_bits(run(path), run())


def test_a_file_is_whole_or_the_old_one(tmp_path):
    path = tmp_path / "file"
    write_whole(path, lambda file: file.write(b"old"))

    def broken(file):
        file.write(b"half of the n")
        raise Interrupted

    with pytest.raises(Interrupted):
        write_whole(path, broken)
    assert path.read_bytes() == b"old"
    write_whole(str(path), lambda file: file.write(b"new"))
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["file"]


# --- refusals --------------------------------------------------------------------------------------------


@pytest.fixture
def partial_run(tmp_path):
    path = tmp_path / "chain.npz"
    with pytest.MonkeyPatch.context() as patch:
        interrupt_after(patch, 2)
        with pytest.raises(Interrupted):
            run(path)
    return path


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"step_size": 0.04}, "step_size"),
        ({"step_size": optax.exponential_decay(0.05, 10, 0.9)}, "step_size"),
        ({"inverse_temperature": 2.0}, "inverse_temperature"),
        ({"num_steps": 231}, None),  # 231 − 20 = 3·70 + 1: the same steps and the same kept positions
        ({"num_steps": 240}, "num_steps"),
        ({"burn_in": 17}, "burn_in"),
        ({"update": "euler"}, "update"),
        ({"key": 1}, "key"),
        ({"initial": jnp.ones((3, 2)).at[1, 1].set(0.5)}, "initial"),
        ({"initial": jnp.ones((3, 2), jnp.float32), "field": FIELD}, "initial, step_size"),
        ({"field": NoisyField(jnp.asarray(1.0 + 1e-15))}, "field"),
    ],
)
def test_another_configuration_is_refused(partial_run, changes, names):
    before = partial_run.read_bytes()
    if names is None:
        run(partial_run, **changes)
        return
    with pytest.raises(ValueError, match=f"belongs to another configuration: it differs in {names}"):
        run(partial_run, **changes)
    assert partial_run.read_bytes() == before


def flip(content):
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


@pytest.mark.parametrize(
    "damage",
    [lambda c: c[: len(c) // 2], lambda c: c[:-7], lambda c: b"", lambda c: b"not a zip file", flip],
    ids=["half", "tail", "empty", "foreign", "flipped-bit"],
)
def test_damaged_file_is_refused_and_kept(partial_run, damage):
    damaged = damage(partial_run.read_bytes())
    partial_run.write_bytes(damaged)
    with pytest.raises(ValueError, match=r"chain.npz cannot be read: truncated, damaged or not a checkpoint"):
        run(partial_run)
    assert partial_run.read_bytes() == damaged


@pytest.mark.parametrize("content", [{"x": np.zeros(3)}, {"header": np.asarray("[1]")}, None])
def test_foreign_archives_are_refused(tmp_path, content):
    path = tmp_path / "chain.npz"
    with open(path, "wb") as file:
        np.save(file, np.zeros(3)) if content is None else np.savez(file, **content)
    with pytest.raises(ValueError, match="cannot be read"):
        run(path)


def test_pickles_are_never_loaded(tmp_path):
    path = tmp_path / "chain.npz"
    with open(path, "wb") as file:
        np.savez(file, header=np.asarray([{"a": 1}], dtype=object))
    with pytest.raises(ValueError, match="cannot be read"):
        run(path)


def test_a_failed_write_leaves_the_old_file(partial_run, monkeypatch):
    before = partial_run.read_bytes()

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        run(partial_run)
    assert partial_run.read_bytes() == before
    assert os.listdir(partial_run.parent) == [partial_run.name]


@pytest.mark.parametrize(
    ("path", "changes", "message"),
    [
        ("missing/chain.npz", {}, "checkpoint must be a file in a directory that exists"),
        (".", {}, "checkpoint must be a file"),
        ("chain.npz", {"every": 0}, "every must be a whole number, at least 1, got 0"),
    ],
)
def test_bad_arguments(tmp_path, path, changes, message):
    with pytest.raises(ValueError, match=message):
        run(tmp_path / path, **changes)


# --- fingerprints ----------------------------------------------------------------------------------------


def scale(factor):
    return lambda x: factor * x


@pytest.mark.parametrize(
    ("left", "right", "equal"),
    [
        (jnp.arange(3), jnp.arange(3), True),
        (jnp.arange(3), jnp.arange(3.0), False),
        (jnp.zeros((2, 3)), jnp.zeros((3, 2)), False),
        (jax.random.key(1), jax.random.key(1), True),
        (jax.random.key(1), jax.random.key(1, impl="rbg"), False),
        (scale(2.0), scale(2.0), True),
        (scale(2.0), scale(3.0), False),
        (lambda x: x + 1, lambda x: x - 1, False),
        (lambda x: x + 1, lambda x: x + 2, False),
        (partial(scale, 2.0), partial(scale, 2.0), True),
        (partial(scale, 2.0), partial(scale, 4.0), False),
        (jax.jit(scale(2.0)), jax.jit(scale(2.0)), True),
        (jax.jit(scale(2.0)), jax.jit(scale(3.0)), False),
        (optax.adam(0.1), optax.adam(0.1), True),
        (optax.adam(0.1), optax.adam(0.2), False),
        (langevin(jax.random.key(0), 0.1, 1.0), langevin(jax.random.key(0), 0.1, 1.0), True),
        (langevin(jax.random.key(0), 0.1, 1.0), langevin(jax.random.key(0), 0.1, 1.1), False),
        (FIELD, eqx.tree_at(lambda f: f.stiffness, FIELD, jnp.asarray(2.0)), False),
        (FIELD.__call__, FIELD.__call__, True),
        ({"a": 1, "b": None}, {"a": 1, "b": None}, True),
        ({"a": 1, "b": 1}, {"a": 1, "c": 1}, False),
        ("x", "y", False),
    ],
)
def test_fingerprint(left, right, equal):
    assert (fingerprint(left) == fingerprint(right)) is equal


def test_fingerprint_of_a_function_that_calls_itself():
    def factorial(n):
        return 1 if n == 0 else n * factorial(n - 1)

    assert fingerprint(factorial) == fingerprint(factorial)
