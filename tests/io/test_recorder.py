"""The recorder: what is saved is what was given, whoever reads when, and whatever happens to the writer."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import malliavin_jax as mj

RNG = np.random.default_rng(0)


class Tensor:
    """What a recorder asks of a PyTorch tensor, which shares its memory with what `numpy` returns."""

    def __init__(self, array, requires_grad=True, device="cuda", dtype="torch.float32"):
        self.array, self.requires_grad, self.device, self.dtype = array, requires_grad, device, dtype

    @property
    def shape(self):
        return self.array.shape

    def detach(self):
        return Tensor(self.array, False, self.device, self.dtype)

    def cpu(self):
        return Tensor(self.array, self.requires_grad, "cpu", self.dtype)

    def float(self):
        return Tensor(self.array, self.requires_grad, self.device)

    def numpy(self):
        if self.requires_grad or self.device != "cpu" or self.dtype == "torch.bfloat16":
            raise TypeError("not before detach, cpu and float")
        return self.array

    def __array__(self, *_):
        raise TypeError("not before detach and cpu")


def walk(recorder, starts, rows, d=2, hessian="full"):
    """Record random rows; returns what was given."""
    x, g, h = RNG.normal(size=(rows, d)), RNG.normal(size=(rows, d)), RNG.normal(size=(rows, d, d))
    h = {"full": h + np.swapaxes(h, 1, 2), "diagonal": h[..., 0], None: [None] * rows}[hessian]
    for k in range(rows):
        if k in starts:
            recorder.restart()
        recorder.step(x[k], g[k], h[k])
    return x, g, h


@pytest.mark.parametrize("hessian", ["full", "diagonal", None])
def test_a_folder_is_a_recording_like_any_other(tmp_path, hessian):
    with mj.io.Recorder(tmp_path / "run", step_size=0.1, inverse_temperature=2.0, flush_every=7) as recorder:
        x, g, h = walk(recorder, [0, 5, 21], 30, hessian=hessian)
        assert (recorder.num_rows, recorder.num_saved) == (30, 28)
    names = sorted(path.name for path in (tmp_path / "run").glob("[!.]*"))
    assert names == ["recorder.json", *(f"rows-{first:012d}.npz" for first in (0, 7, 14, 21, 28))]
    recording = mj.io.load(tmp_path / "run")
    expected = mj.split_log(x, g, h if hessian else None, starts=[0, 5, 21], step_size=0.1, inverse_temperature=2.0)
    assert (recording.num_episodes, recording.step_size.shape, float(recording.step_size)) == (3, (), 0.1)
    for name, value in expected.part().items():
        np.testing.assert_array_equal(recording.part()[name], value)
    # The same folder as one chain, in pieces.
    pieces = mj.io.load(tmp_path / "run", piece_steps=4, blocks=2)
    assert (pieces.num_episodes, pieces.block_size) == (1 + 3 + 2, 3)


def test_arrays_of_any_kind_are_copied(tmp_path):
    folder = tmp_path / "run"
    rows = [np.asarray([0.5, 1.5], np.float32) * k for k in range(1, 8)]
    shared = rows[1].copy()
    with mj.io.Recorder(folder, step_size=0.1) as recorder:
        recorder.step(rows[0], rows[0])
        recorder.step(Tensor(shared), Tensor(rows[1]))
        shared += 100  # an optimizer's step, in place
        recorder.step(jnp.asarray(rows[2]), jnp.asarray(rows[2], jnp.bfloat16))
        recorder.step(Tensor(rows[3], dtype="torch.bfloat16"), rows[3].tolist())
        recorder.step([Tensor(rows[4][:1].reshape(1, 1)), Tensor(rows[4][1:])], tuple(rows[4]))
        recorder.step(rows[5].astype(np.float16), (2 * rows[5]).astype(int) / 2)
    rows_read = mj.io.read_blocks(folder)
    np.testing.assert_array_equal(rows_read.x, rows[:6])
    np.testing.assert_array_equal(rows_read.gradient, rows[:6])
    assert rows_read.x.dtype == np.float32
    assert rows_read.gradient.dtype == np.float64  # the last one was: nothing is narrowed


def test_numbers_in_one_dimension(tmp_path):
    with mj.io.Recorder(tmp_path, step_size=0.1) as recorder:
        for k in range(4):
            recorder.step(float(k), jnp.asarray(2.0 * k), hessian=[3.0, [3.0], [[3.0]], np.float64(3.0)][k])
    part = mj.io.load(tmp_path).part()
    np.testing.assert_array_equal(part["x"][0, :, 0], range(4))
    assert part["hessian"].shape == (1, 4, 1, 1)


def test_a_schedule(tmp_path):
    sizes = [0.1, 0.1, 0.05, 0.1, 0.025]
    with mj.io.Recorder(tmp_path / "run", step_size=0.1, flush_every=2) as recorder:
        for k, size in enumerate(sizes):
            recorder.step(k, k, 1.0, step_size=None if size == 0.1 else jnp.asarray(size))
    np.testing.assert_array_equal(mj.io.load(tmp_path / "run").step_size, [sizes])
    kept = [set(np.load(tmp_path / "run" / f"rows-{first:012d}.npz")) for first in (0, 2)]
    assert kept == [{"x", "gradient", "hessian", "starts"}, {"x", "gradient", "hessian", "starts", "step_size"}]
    for name, own_sizes in (("each", [0.1, 0.2, 0.1]), ("none", [None, None]), ("even", [0.1, 0.1])):
        with mj.io.Recorder(tmp_path / name) as recorder:
            for size in own_sizes:
                recorder.step(1.0, 1.0, step_size=size)
        loaded = mj.io.load(tmp_path / name).step_size
        assert (loaded is None) if name == "none" else np.shape(loaded) == {"each": (1, 3), "even": ()}[name]
    with mj.io.Recorder(tmp_path / "each") as recorder, pytest.raises(ValueError, match="at every step or at none"):
        recorder.step(1.0, 1.0)
    with mj.io.Recorder(tmp_path / "none") as recorder, pytest.raises(ValueError, match="at every step or at none"):
        recorder.step(1.0, 1.0, step_size=0.1)


def test_positions_alone_reach_the_arrays(tmp_path):
    with mj.io.Recorder(tmp_path, step_size=0.1) as recorder:
        for k in range(3):
            recorder.step([k, 2.0 * k])
        with pytest.raises(ValueError, match="gradient must not be given: it is not in the rows"):
            recorder.step([1.0, 2.0], [1.0, 2.0])
    rows = mj.io.read_blocks(tmp_path)
    np.testing.assert_array_equal(rows.x, [[0, 0], [1, 2], [2, 4]])
    assert rows.gradient is None
    assert rows.hessian is None
    arrays = mj.io.files._arrays_at(tmp_path, 2**20)
    assert arrays["gradient"] is None
    np.testing.assert_array_equal(arrays["starts"], [True, False, False])


def test_a_follower_reads_what_is_new(tmp_path, monkeypatch):
    recorder = mj.io.Recorder(tmp_path, step_size=0.1, flush_every=4)
    recorder.step(0.0, 0.0)
    rows = mj.io.read_blocks(tmp_path)
    assert (len(rows.x), rows.next, rows.x.shape[1:]) == (0, 0, (1,))
    for k in range(1, 10):
        recorder.step(float(k), float(k))
    rows = mj.io.read_blocks(tmp_path, start=rows.next)
    np.testing.assert_array_equal(rows.x[:, 0], range(8))
    recorder.flush()  # the third file, begun
    newer = mj.io.read_blocks(tmp_path, start=rows.next)
    np.testing.assert_array_equal(newer.x[:, 0], [8, 9])
    recorder.restart()
    recorder.step(10.0, 10.0)
    recorder.flush()  # the same file again, with one row more
    opened = []
    reader = mj.io.blocks.archived_arrays
    monkeypatch.setattr(
        mj.io.blocks, "archived_arrays", lambda path, most: opened.append(path.name) or reader(path, most)
    )
    newest = mj.io.read_blocks(tmp_path, start=newer.next)
    assert opened == ["rows-000000000008.npz"]
    assert (newest.first, newest.next, newest.starts.tolist()) == (10, 11, [True])
    assert len(mj.io.read_blocks(tmp_path, start=11).x) == 0
    whole = mj.io.read_blocks(tmp_path)
    for start, stop in ((0, 3), (2, 9), (4, 4), (5, 100)):
        np.testing.assert_array_equal(mj.io.read_blocks(tmp_path, start=start, stop=stop).x, whole.x[start:stop])
    with pytest.raises(ValueError, match="stop must be a whole number, at least 3"):
        mj.io.read_blocks(tmp_path, start=3, stop=2)
    with pytest.raises(ValueError, match="start must be at most 11, the number of rows"):
        mj.io.read_blocks(tmp_path, start=12)
    recorder.close()
    recorder.close()
    with pytest.raises(ValueError, match="is closed"):
        recorder.step(1.0, 1.0)


def test_seconds(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(mj.io.recorder.time, "monotonic", lambda: now[0])
    with mj.io.Recorder(tmp_path, step_size=0.1, flush_seconds=10.0) as recorder:
        for second in (0.0, 9.0, 11.0, 20.0, 22.0):
            now[0] = second
            recorder.step(second, second)
            assert recorder.num_saved == {0.0: 0, 9.0: 0, 11.0: 3, 20.0: 3, 22.0: 5}[second]


def test_a_recorder_that_is_forgotten_saves_its_rows(tmp_path):
    recorder = mj.io.Recorder(tmp_path, step_size=0.1)
    recorder.step(1.0, 1.0)
    with pytest.raises(ValueError, match="is in use: another recorder is writing to it, or was not closed"):
        mj.io.Recorder(tmp_path, step_size=0.1)
    del recorder
    assert len(mj.io.read_blocks(tmp_path).x) == 1

    def crashes():
        with mj.io.Recorder(tmp_path, step_size=0.1) as recorder:
            recorder.step(2.0, 2.0)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        crashes()
    assert mj.io.read_blocks(tmp_path).starts.tolist() == [True, True]


KILLED = """
import sys
import malliavin_jax as mj
recorder = mj.io.Recorder(sys.argv[1], step_size=0.1, flush_every=50)
for k in range(10**9):
    recorder.step(float(k), -float(k))
    if k == 500:
        print("going", flush=True)
"""


@pytest.mark.skipif(os.name != "posix", reason="needs SIGKILL")
def test_a_killed_process_leaves_whole_rows(tmp_path):
    writer = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE)
    assert writer.stdout.readline() == b"going\n"
    rows = mj.io.read_blocks(tmp_path)  # while it writes
    for _ in range(20):
        rows = mj.io.read_blocks(tmp_path, start=rows.next)
    os.kill(writer.pid, signal.SIGKILL)
    writer.wait()
    writer.stdout.close()
    rows = mj.io.read_blocks(tmp_path)
    assert rows.next >= 500
    assert rows.next % 50 == 0
    np.testing.assert_array_equal(rows.x[:, 0], np.arange(rows.next))
    np.testing.assert_array_equal(rows.gradient[:, 0], -np.arange(rows.next))
    with mj.io.Recorder(tmp_path, step_size=0.1) as recorder:
        recorder.step(-1.0, 1.0)
        assert not list(tmp_path.glob(".*.tmp"))
    again = mj.io.read_blocks(tmp_path)
    np.testing.assert_array_equal(np.flatnonzero(again.starts), [0, rows.next])


def test_a_full_disk_loses_nothing(tmp_path, monkeypatch):
    """The rows stay in memory, the next one is refused until there is room, and then all are saved."""
    recorder = mj.io.Recorder(tmp_path, step_size=0.1, flush_every=3)
    recorder.step(0.0, 0.0)
    recorder.step(1.0, 1.0)
    with monkeypatch.context() as patch:

        def refuse(*_):
            raise OSError("no space left on device")

        patch.setattr(mj.io.recorder, "write_whole", refuse)
        for _ in range(2):
            with pytest.raises(OSError, match="no space left"):
                recorder.step(2.0, 2.0)
        assert (recorder.num_rows, recorder.num_saved) == (3, 0)
    recorder.step(3.0, 3.0)
    recorder.close()
    np.testing.assert_array_equal(mj.io.read_blocks(tmp_path).x[:, 0], range(4))


def test_a_fork_writes_nothing(tmp_path, monkeypatch):
    recorder = mj.io.Recorder(tmp_path, step_size=0.1)
    recorder.step(1.0, 1.0)
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: -1)
        recorder.flush()
    assert recorder.num_saved == 0
    recorder.close()
    assert len(mj.io.read_blocks(tmp_path).x) == 1


def test_reopening(tmp_path):
    folder = tmp_path / "run"
    for _ in range(2):
        with mj.io.Recorder(folder, step_size=0.1, inverse_temperature=2.0) as recorder:
            walk(recorder, [], 3)
    recording = mj.io.load(folder)
    assert (recording.num_episodes, recording.num_steps) == (2, 2)
    for message, options in {
        r"step_size must be 0\.1, as in the rows that .*, got 0\.2: record to another": {"step_size": 0.2},
        "step_size must be 0.1, .* got None": {},
        r"inverse_temperature must be 2\.0, .* overwrite=True": {"step_size": 0.1},
    }.items():
        with pytest.raises(ValueError, match=message):
            mj.io.Recorder(folder, **options)
    with mj.io.Recorder(folder, step_size=0.1, inverse_temperature=2.0) as recorder:
        with pytest.raises(ValueError, match=r"x must have shape \(2,\), got \(3,\)"):
            walk(recorder, [], 1, d=3)
        with pytest.raises(ValueError, match="hessian must be given at every step"):
            recorder.step([1.0, 2.0], [1.0, 2.0])
    with mj.io.Recorder(folder, step_size=0.3, overwrite=True) as recorder:
        walk(recorder, [], 4, d=3)
    assert mj.io.load(folder).dim == 3
    mj.io.save(tmp_path / "saved", mj.io.load(folder))
    with pytest.raises(ValueError, match=r"must be a recorder's folder or an empty one, it holds gradient\.npy"):
        mj.io.Recorder(tmp_path / "saved", overwrite=True)


@pytest.mark.usefixtures("no_type_checks")
def test_bad_rows_are_named_and_not_recorded(tmp_path):
    bad = {
        r"x must be finite, got \[nan +1\.\]": lambda r: r.step([np.nan, 1.0], [1.0, 1.0]),
        r"gradient must be finite, got \[inf +1\.\]": lambda r: r.step([1.0, 1.0], [np.inf, 1.0]),
        r"gradient must have shape \(2,\), got \(1,\)": lambda r: r.step([1.0, 1.0], 1.0),
        "gradient must be given at every step": lambda r: r.step([1.0, 1.0]),
        "hessian must not be given": lambda r: r.step([1.0, 1.0], [1.0, 1.0], np.eye(2)),
        r"x must be a number or have shape \(d,\), got shape \(1, 2\)": lambda r: r.step([[1.0, 1.0]], [1.0, 1.0]),
        "x must hold real numbers, got dtype": lambda r: r.step(["a", "b"], [1.0, 1.0]),
        "x must be an array of numbers, got list": lambda r: r.step([[1.0], [1.0, 2.0]], [1.0, 1.0]),
        "step_size must be positive and finite, got -1": lambda r: r.step([1.0, 1.0], [1.0, 1.0], step_size=-1.0),
        r"step_size must be one number, got shape \(2,\)": lambda r: r.step(
            [1.0, 1.0], [1.0, 1.0], step_size=[1.0, 1.0]
        ),
    }
    with mj.io.Recorder(tmp_path / "run", step_size=0.1) as recorder:
        with pytest.raises(ValueError, match=r"hessian must have shape \(2,\), got \(3,\)"):
            recorder.step([1.0, 1.0], [1.0, 1.0], [1.0, 1.0, 1.0])
        assert not (tmp_path / "run" / "recorder.json").exists()  # a bad first row settles nothing
        recorder.step([1.0, 1.0], [1.0, 1.0])
        for message, call in bad.items():
            with pytest.raises(ValueError, match=message):
                call(recorder)
        assert recorder.num_rows == 1
    for message, options in {
        "step_size must be positive": {"step_size": 0.0},
        "inverse_temperature must be positive": {"inverse_temperature": -1.0},
        "flush_every must be a whole number": {"flush_every": 0},
        "flush_seconds must be positive": {"flush_seconds": 0.0},
    }.items():
        with pytest.raises(ValueError, match=message):
            mj.io.Recorder(tmp_path / "other", **options)


def test_damaged_folders_are_refused_in_words(tmp_path):
    def fresh(name):
        with mj.io.Recorder(tmp_path / name, step_size=0.1, flush_every=2) as recorder:
            walk(recorder, [], 6)
        return tmp_path / name

    folder = fresh("hole")
    (folder / "rows-000000000002.npz").unlink()
    with pytest.raises(ValueError, match="lacks its rows from 2 to 3"):
        mj.io.load(folder)
    (folder / "rows-000000000000.npz").unlink()
    with pytest.raises(ValueError, match="lacks its rows from 0 to 3"):
        mj.io.load(folder)
    folder = fresh("other")
    np.savez(folder / "rows-000000000004.npz", x=np.ones((2, 3)))
    with pytest.raises(ValueError, match=r"rows-000000000004\.npz must hold x of shape .*, got \(2, 3\); move it away"):
        mj.io.load(folder)
    folder = fresh("settings")
    good = json.loads((folder / "recorder.json").read_text())
    for change in ({"version": 2}, {"dim": 0}, {"dim": "2"}, {"hessian": 3}, {"step_size": -1.0}, {"extra": 1}):
        (folder / "recorder.json").write_text(json.dumps({**good, **change}))
        with pytest.raises(ValueError, match=r"recorder\.json is damaged or not of this version"):
            mj.io.load(folder)
    (folder / "recorder.json").write_text("{")
    with pytest.raises(ValueError, match=r"recorder\.json is damaged"):
        mj.io.Recorder(folder, step_size=0.1)
    with pytest.raises(ValueError, match=r"there is no recorder\.json"):
        mj.io.read_blocks(tmp_path)
    with mj.io.Recorder(tmp_path / "short", step_size=0.1) as recorder:
        recorder.step(1.0, 1.0)
    with pytest.raises(ValueError, match="must hold at least two rows, a start and a step, it holds 1"):
        mj.io.load(tmp_path / "short")


def guide_block(word):
    """The block of the guide, run by the tests or not, in which a word stands."""
    guide = (Path(mj.__file__).parents[1] / "docs" / "pages" / "guide.md").read_text(encoding="utf-8")
    (block,) = [block for block in re.findall(r"```py(?:thon)?\n(.*?)```", guide, re.S) if word in block]
    return compile(block, f"guide.md, {word}", "exec")


def test_the_loop_of_the_guide_in_pytorch(tmp_path, monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    exec(guide_block("import torch"), {"mj": mj})
    recording = mj.io.load("torch-run")
    assert (recording.num_episodes, recording.num_steps, recording.dim) == (1, 499, 3)
    part = recording.part()
    residual = np.diff(part["x"], axis=1) + 1e-3 * part["gradient"][:, :-1]
    assert abs(np.mean(residual**2) / (2e-3 / 200) - 1) < 4 * np.sqrt(2 / residual.size)


def test_the_loop_of_the_guide_in_optax(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"mj": mj, "jax": jax, "jnp": jnp}
    exec(guide_block("import optax"), names)
    rows = mj.io.read_blocks("run")
    residual = np.diff(rows.x, axis=0) + 0.02 * rows.gradient[:-1]
    assert abs(np.mean(residual**2) / 0.04 - 1) < 4 * np.sqrt(2 / residual.size)
    np.testing.assert_allclose(rows.gradient, rows.x**3 + rows.x, rtol=1e-6)
    np.testing.assert_allclose(rows.hessian[:, 0], 3 * rows.x**2 + 1, rtol=1e-6)


OPERATIONS = st.lists(
    st.one_of(
        st.just("step"), st.just("step"), st.just("step"),
        st.sampled_from(["restart", "flush", "reopen", "kill", "bad"]),
    ),
    max_size=40,
)  # fmt: skip


class Model:
    """What a folder should hold, beside a recorder that writes it."""

    def __init__(self, folder, every):
        self.folder, self.every, self.saved, self.unsaved, self.in_file, self.number = folder, every, [], [], 0, 0
        self.open()

    def open(self):
        self.recorder = mj.io.Recorder(self.folder, step_size=0.1, flush_every=self.every)
        self.fresh, self.in_file = True, 0

    def flush(self):
        self.saved, self.unsaved = self.saved + self.unsaved, []

    def do(self, operation):
        if operation == "step":
            self.recorder.step(float(self.number), -float(self.number))
            self.unsaved.append((self.number, self.fresh))
            self.number, self.fresh, self.in_file = self.number + 1, False, self.in_file + 1
            if self.in_file == self.every:
                self.flush()
                self.in_file = 0
        elif operation == "bad":
            with pytest.raises(ValueError, match="finite"):
                self.recorder.step(np.nan, 1.0)
        elif operation == "restart":
            self.recorder.restart()
            self.fresh = True
        elif operation == "flush":
            self.recorder.flush()
            self.flush()
        elif operation == "reopen":
            self.recorder.close()
            self.flush()
            self.open()
        else:  # the process is gone, in the middle of writing a draft
            self.recorder._file.count = self.recorder._file.saved
            self.recorder.close()
            self.unsaved = []
            (self.folder / f".rows-{len(self.saved):012d}.npz.tmp").write_bytes(b"PK half of it")
            self.open()
        self.check()

    def check(self):
        if (self.folder / "recorder.json").exists():
            rows = mj.io.read_blocks(self.folder)
            assert list(zip(rows.x[:, 0], rows.starts, strict=True)) == self.saved
            np.testing.assert_array_equal(rows.gradient, -rows.x)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(operations=OPERATIONS, every=st.integers(1, 5), cut=st.floats(0, 1))
def test_any_history_loads_to_the_rows_that_were_saved(operations, every, cut):
    with tempfile.TemporaryDirectory() as path:
        model = Model(Path(path), every)
        for operation in operations:
            model.do(operation)
        model.do("reopen")
        model.recorder.close()
        files = sorted(Path(path).glob("rows-*.npz"))
        if not files:
            return
        # A disk that lost the end of the newest file: a clear error, and all rows before it once it is moved away.
        data = files[-1].read_bytes()
        files[-1].write_bytes(data[: int(cut * (len(data) - 1))])
        for read in (mj.io.read_blocks, lambda folder: mj.io.Recorder(folder, step_size=0.1)):
            with pytest.raises(ValueError, match=rf"{files[-1].name} .*move it away to read the rows before it"):
                read(path)
        files[-1].unlink()
        rows = mj.io.read_blocks(path)
        assert list(zip(rows.x[:, 0], rows.starts, strict=True)) == model.saved[: len(rows.x)]
        assert len(rows.x) == int(files[-1].stem[5:])
