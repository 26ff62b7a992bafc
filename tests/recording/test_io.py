"""Files: round trips to the bit, and every damaged, foreign or hostile file refused in words."""

import io
import struct
import tempfile
import zipfile
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import malliavin_jax as mj

FAST = settings(max_examples=40, deadline=None, derandomize=True)


def arrays(dtype=np.float64, episodes=4, points=5, d=2, hessian="full"):
    rng = np.random.default_rng(0)
    x, g = (rng.normal(size=(episodes, points, d)).astype(dtype) for _ in range(2))
    root = rng.normal(size=(episodes, points, d, d)).astype(dtype)
    kinds = {"full": root + np.swapaxes(root, -1, -2), "diagonal": root[..., 0], "none": None}
    return {"x": x, "gradient": g, "hessian": kinds[hessian]}


def identical(recording, other):
    a, b = recording.part(), other.part()
    assert a.keys() == b.keys()
    assert recording.dtype == other.dtype
    for name, value in a.items():
        assert (value is None) == (b[name] is None)
        if value is not None:
            assert value.dtype == b[name].dtype
            np.testing.assert_array_equal(value, b[name])


@pytest.mark.parametrize("hessian", ["full", "diagonal", "none"])
@pytest.mark.parametrize("where", ["run.npz", "folder"])
def test_round_trips(tmp_path, where, hessian):
    given = arrays(np.float32 if hessian == "full" else np.float64, hessian=hessian)
    for number, options in enumerate(
        (
            {},
            {"step_size": 0.02, "inverse_temperature": 3.0},
            {"step_size": [0.1, 0.2, 0.3, 0.1], "inverse_temperature": 1.0, "last_steps": [4, 0, 2, 3]},
        )
    ):
        recording = mj.Recording(**given, **options)
        path = tmp_path / str(number) / where
        path.parent.mkdir()
        mj.io.save(path, recording)
        identical(mj.io.load(path), recording)
        if where == "run.npz":
            mj.io.save(path, recording, compress=True)
            identical(mj.io.load(path), recording)


def test_dropped_episodes_are_not_written(tmp_path):
    given = arrays()
    given["x"][1, 2] = np.nan
    np.savez(tmp_path / "bad.npz", **given)
    with pytest.raises(ValueError, match=r"bad\.npz: episode 1, step 2: x must be finite"):
        mj.io.load(tmp_path / "bad.npz")
    with pytest.warns(RuntimeWarning, match="dropped 1 of 4 episodes"):
        recording = mj.io.load(tmp_path / "bad.npz", on_bad="drop")
    for name in ("good.npz", "good"):
        mj.io.save(tmp_path / name, recording)
        good = mj.io.load(tmp_path / name)
        assert good.num_episodes == 3
        identical(good, recording)


def test_any_real_dtype_and_order(tmp_path):
    given = arrays()
    strange = {
        "x": given["x"].astype(">f8"),
        "gradient": np.asfortranarray(given["gradient"]),
        "hessian": np.round(given["hessian"]).astype(np.int16),
    }
    expected = mj.Recording(given["x"], given["gradient"], np.round(given["hessian"]))
    np.savez(tmp_path / "run.npz", **strange)
    for name, array in strange.items():
        (tmp_path / "run").mkdir(exist_ok=True)
        np.save(tmp_path / "run" / f"{name}.npy", array)
    for path in ("run.npz", "run"):
        identical(mj.io.load(tmp_path / path), expected)


def test_a_long_log_and_what_the_file_lacks(tmp_path):
    given = arrays(d=1, episodes=1, points=9)
    rows = {name: array[0] for name, array in given.items()}
    for starts in ([0, 4], np.arange(9) % 4 == 0):
        np.savez(tmp_path / "log.npz", **rows, starts=starts, step_size=0.1)
        recording = mj.io.load(tmp_path / "log.npz", inverse_temperature=2.0, step_size=0.1)
        assert recording.num_episodes in (2, 3)
        np.testing.assert_array_equal(recording.part()["x"][1, :4], rows["x"][4:8])
        assert float(recording.inverse_temperature) == 2.0
    with pytest.raises(ValueError, match=r"step_size is in .*log\.npz already, and is not 0\.2"):
        mj.io.load(tmp_path / "log.npz", step_size=0.2)
    np.savez(tmp_path / "log.npz", **rows, starts=[0, 4], last_steps=[3, 4])
    with pytest.raises(ValueError, match="last_steps do not go with starts"):
        mj.io.load(tmp_path / "log.npz")


def test_a_file_of_the_first_version_says_what_has_changed(tmp_path):
    np.savez(tmp_path / "run.npz", **arrays(), lengths=[3, 4, 1, 2])
    with pytest.raises(ValueError, match=r"run\.npz holds lengths, .* the array is now called last_steps"):
        mj.io.load(tmp_path / "run.npz")


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    mj.io.save(tmp_path / "run.npz", mj.Recording(**arrays()))
    before = (tmp_path / "run.npz").read_bytes()
    monkeypatch.setattr(np, "savez", lambda file, **_: file.write(b"half of it") and 1 / 0)
    with pytest.raises(ZeroDivisionError):
        mj.io.save(tmp_path / "run.npz", mj.Recording(**arrays(episodes=2)))
    assert [file.name for file in tmp_path.iterdir()] == ["run.npz"]
    assert (tmp_path / "run.npz").read_bytes() == before


def test_a_file_is_replaced_whole_and_a_folder_not_at_all(tmp_path):
    recording = mj.Recording(**arrays())
    mj.io.save(tmp_path / "run.npz", recording)
    assert [file.name for file in tmp_path.iterdir()] == ["run.npz"]
    mj.io.save(tmp_path / "run", recording)
    with pytest.raises(ValueError, match=r"must be a new or an empty folder, it holds gradient\.npy"):
        mj.io.save(tmp_path / "run", recording)
    with pytest.raises(ValueError, match=r"compress needs a \.npz file"):
        mj.io.save(tmp_path / "other", recording, compress=True)


# Foreign and hostile files.


def npy(array, **changes):
    """The bytes of a .npy file, with some words of its header replaced by others."""
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=True)
    data = buffer.getvalue()
    for old, new in changes.get("header", {}).items():
        assert old in data
        data = data.replace(old, new.ljust(len(old)) if len(new) <= len(old) else new)
    return data


def archive(path, members, compression=zipfile.ZIP_DEFLATED):
    with zipfile.ZipFile(path, "w", compression) as file:
        for name, data in members.items():
            file.writestr(name, data)
    return path


def good_members():
    return {f"{name}.npy": npy(array) for name, array in arrays().items()}


HOSTILE = {
    r"must hold real numbers, got dtype object \(Python objects are never loaded\)": {
        "x.npy": npy(np.asarray([{"a": 1}], object))
    },
    r"x of .* must hold real numbers, got dtype <U3": {"x.npy": npy(np.asarray(["abc"]))},
    r"x of .* must hold real numbers, got dtype complex128": {"x.npy": npy(np.zeros((4, 5, 2), complex))},
    r"x of .* must hold real numbers, got dtype \[\('a'": {"x.npy": npy(np.zeros(3, [("a", "f8")]))},
    r"shape \(9999999, 5, 2\) of float64 takes 799999920 bytes, the file has 320": {
        "x.npy": npy(np.zeros((4, 5, 2)), header={b"(4, 5, 2), }      ": b"(9999999, 5, 2), }"})
    },
    r"cannot be read: truncated, damaged or not a \.npy file": {"x.npy": b"PK\x03\x04 not an array"},
    r"truncated, damaged or not a \.npy file \(shape \(-4, 5, 2\)\)": {
        "x.npy": npy(np.zeros((4, 5, 2)), header={b"(4, 5, 2), } ": b"(-4, 5, 2), }"})
    },
    r"must hold \.npy arrays only, got 'readme\.txt'": {"readme.txt": b"hello"},
    r"holds unknown arrays hessians; the names are x, gradient": {"hessians.npy": npy(np.zeros(3))},
    r"gradient must have shape .*, that of x": {"gradient.npy": npy(np.zeros((4, 5, 3)))},
    r"x must have shape \(episodes, points, d\)": {"x.npy": npy(np.zeros(7))},
    r"last_steps must be whole numbers of steps": {"last_steps.npy": npy(np.zeros(4))},
    r"step_size must hold real numbers, got dtype bool": {"step_size.npy": npy(np.asarray(True))},
    r"step_size must be one number or have shape \(4,\)": {"step_size.npy": npy(np.ones((4, 1)))},
}  # fmt: skip


@pytest.mark.parametrize("message", HOSTILE)
def test_hostile_arrays_are_refused_in_words(tmp_path, message):
    members = {**good_members(), **HOSTILE[message]}
    with pytest.raises(ValueError, match=message):
        mj.io.load(archive(tmp_path / "run.npz", members))
    if "arrays only" not in message:  # a folder may hold other files
        (tmp_path / "run").mkdir()
        for name, data in members.items():
            (tmp_path / "run" / name).write_bytes(data)
        with pytest.raises(ValueError, match=message.replace("x of .*", ".*")):
            mj.io.load(tmp_path / "run")


def test_bombs_are_not_unpacked(tmp_path, monkeypatch):
    """A file of a few kilobytes that unpacks to 64 MiB; the stated limit is 8 GiB unless told."""
    members = {**good_members(), "hessian.npy": npy(np.zeros((4, 5, 2, 2, 100_000)))}
    path = archive(tmp_path / "bomb.npz", members)
    assert path.stat().st_size < 2**20
    monkeypatch.setattr(zipfile.ZipFile, "read", lambda *_: pytest.fail("unpacked"))
    with pytest.raises(ValueError, match=r"unpacks to 6\d{7} bytes, more than max_bytes=1048576; a folder"):
        mj.io.load(path, max_bytes=2**20)
    assert mj.io.MAX_BYTES == 8 * 2**30


def test_a_directory_that_lies_about_sizes(tmp_path):
    """The entry says 448 bytes for what unpacks to 8 MB: no more than that is read, and the checksum tells."""
    members = {**good_members(), "x.npy": npy(np.zeros((4, 5, 50_000)))}
    path = archive(tmp_path / "liar.npz", members)
    data, honest = path.read_bytes(), struct.pack("<I", len(members["x.npy"]))
    assert data.count(honest) >= 2
    path.write_bytes(data.replace(honest, struct.pack("<I", len(good_members()["x.npy"]))))
    with pytest.raises(ValueError, match=r"liar\.npz cannot be read|cannot be read: shape"):
        mj.io.load(path)


def test_two_arrays_of_one_name(tmp_path):
    path = archive(tmp_path / "run.npz", good_members())
    with pytest.warns(UserWarning, match="Duplicate name"), zipfile.ZipFile(path, "a") as file:
        file.writestr("x.npy", npy(np.ones((4, 5, 2))))
    with pytest.raises(ValueError, match="holds two arrays of one name"):
        mj.io.load(path)


def test_what_is_not_there(tmp_path):
    with pytest.raises(ValueError, match=r"nothing\.npz must be a \.npz file or a folder"):
        mj.io.load(tmp_path / "nothing.npz")
    with pytest.raises(ValueError, match="must hold x; it holds no array"):
        mj.io.load(tmp_path)
    (tmp_path / "text.npz").write_text("hello")
    with pytest.raises(ValueError, match=r"text\.npz cannot be read: truncated, damaged or not a \.npz file"):
        mj.io.load(tmp_path / "text.npz")


def loads_or_explains(path):
    """A recording that holds, or a ValueError that names the file: nothing else may come out."""
    try:
        return mj.io.load(path, max_bytes=2**20)
    except ValueError as error:
        message = str(error)
    assert str(path) in message
    return None


@FAST
@given(cut=st.floats(0, 1), start=st.floats(0, 1), noise=st.binary(max_size=8), compressed=st.booleans())
def test_fuzzed_archives(cut, start, noise, compressed):
    """Truncated and overwritten: the checksums of the archive let nothing pass but the original arrays."""
    with tempfile.TemporaryDirectory() as folder:
        kind = zipfile.ZIP_DEFLATED if compressed else zipfile.ZIP_STORED
        path = archive(Path(folder) / "run.npz", good_members(), kind)
        data = path.read_bytes()
        place = int(start * len(data))
        damaged = data[:place] + noise + data[place + len(noise) :]
        path.write_bytes(damaged[: max(place, int(cut * len(damaged))) if cut < 0.5 else len(damaged)])
        recording = loads_or_explains(path)
        if recording is not None and recording.has_hessian:
            identical(recording, mj.Recording(**arrays()))


@FAST
@given(cut=st.floats(0, 1), start=st.integers(0, 127), noise=st.binary(max_size=6), truncate=st.booleans())
def test_fuzzed_headers(cut, start, noise, truncate):
    """A folder has no checksums; whatever its headers claim must still fit the files and each other."""
    with tempfile.TemporaryDirectory() as folder:
        for name, data in good_members().items():
            if name == "x.npy":
                data = data[: int(cut * len(data))] if truncate else data[:start] + noise + data[start + len(noise) :]
            (Path(folder) / name).write_bytes(data)
        recording = loads_or_explains(Path(folder))
        if recording is not None:
            assert recording.part()["x"].shape == (4, 5, 2)
            assert np.all(np.isfinite(recording.part()["x"]))


@FAST
@given(
    shape=st.lists(st.integers(0, 5), max_size=4),
    dtype=st.sampled_from(["f2", "f4", "f8", "i1", "u4", "b1", "c8", "U2", "M8[s]", "O", "g"]),
    name=st.sampled_from(["x", "gradient", "hessian", "step_size", "inverse_temperature", "last_steps", "starts"]),
)
def test_wrong_shapes_and_dtypes(shape, dtype, name):
    with tempfile.TemporaryDirectory() as folder:
        wrong = np.zeros(shape, dtype) if dtype != "O" else np.full(shape, None)
        if np.dtype(dtype).kind in "fiu" and dtype != "O":
            wrong = wrong + np.ones((), dtype)
        path = archive(Path(folder) / "run.npz", {**good_members(), f"{name}.npy": npy(wrong)})
        recording = loads_or_explains(path)
        if recording is not None:
            assert np.dtype(dtype).kind in "fiu"
            good = {"step_size": ((), (4,)), "inverse_temperature": ((), (4,)), "last_steps": ((4,),),
                    "hessian": ((4, 5, 2), (4, 5, 2, 2))}.get(name, ((4, 5, 2),))  # fmt: skip
            assert tuple(shape) in good


def test_samples_of_a_file_are_those_of_the_arrays(tmp_path):
    given = arrays(d=1)
    recording = mj.Recording(**given, step_size=0.02, inverse_temperature=2.0)
    mj.io.save(tmp_path / "run", recording)
    loaded = mj.io.load(tmp_path / "run").samples(times=[0.04])
    expected = mj.samples_from_paths(**given, step_size=0.02, inverse_temperature=2.0, times=[0.04])
    for name in ("x", "gradient", "hessian", "weight"):
        assert jnp.array_equal(getattr(loaded, name), getattr(expected, name))


@pytest.mark.parametrize("folder", [True, False])
def test_positions_alone_are_a_recording(folder, tmp_path):
    x = np.random.default_rng(0).normal(size=(6, 5, 2))
    path = tmp_path / ("run" if folder else "run.npz")
    mj.io.save(path, mj.Recording(x, step_size=0.01, inverse_temperature=1.0))
    again = mj.io.load(path)
    assert not again.has_gradient
    np.testing.assert_array_equal(again.part()["x"], x)
