"""Compiled programs kept from one command to the next: where, when, and when not."""

import os
import subprocess
import sys

import jax
import numpy as np
import pytest
from logs import quartic_log

from malliavin_jax.cli import output


@pytest.fixture
def no_cache_of_jax(monkeypatch):
    """As for a user: nothing set for JAX."""
    names = "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"
    before = {name: getattr(jax.config, name) for name in names}
    for name in ("JAX_COMPILATION_CACHE_DIR", "MALLIAVIN_JAX_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def test_where_programs_are_kept(no_cache_of_jax, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert output.keep_programs().parent == tmp_path / "home" / ".cache" / "malliavin-jax"
    assert jax.config.jax_compilation_cache_dir.startswith(str(tmp_path))
    assert output.keep_programs() is None  # there is one now, and it stays
    for name, value, parent in (
        ("XDG_CACHE_HOME", tmp_path / "xdg", tmp_path / "xdg" / "malliavin-jax"),
        ("MALLIAVIN_JAX_CACHE", tmp_path / "mine", tmp_path / "mine"),
    ):
        jax.config.update("jax_compilation_cache_dir", None)
        monkeypatch.setenv(name, str(value))
        assert output.keep_programs().parent == parent


@pytest.mark.parametrize("word", ["off", "0", "None"])
def test_off(no_cache_of_jax, monkeypatch, tmp_path, word):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("MALLIAVIN_JAX_CACHE", word)
    assert output.keep_programs() is None
    assert jax.config.jax_compilation_cache_dir is None
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_made_is_no_mistake(no_cache_of_jax, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert output.keep_programs() is None


def test_the_oldest_go_first(no_cache_of_jax, monkeypatch, tmp_path):
    monkeypatch.setattr(output, "_CACHE_BYTES", 250)
    monkeypatch.setenv("MALLIAVIN_JAX_CACHE", str(tmp_path))
    folder = output.keep_programs()
    for age, name in enumerate("abc"):
        (folder / name).write_bytes(bytes(100))
        os.utime(folder / name, (1000 - age, 1000 - age))
    jax.config.update("jax_compilation_cache_dir", None)
    output.keep_programs()
    assert sorted(path.name for path in folder.iterdir()) == ["a", "b"]


def test_a_command_leaves_programs_and_an_import_does_not(tmp_path):
    log = quartic_log(0, 200, 12, step_size=0.05, beta=1.0, noise=0.5)
    arrays = {name: log[name] for name in ("x", "gradient", "hessian")}
    np.savez(tmp_path / "run.npz", **arrays, step_size=0.05, inverse_temperature=1.0)
    bare = {name: value for name, value in os.environ.items() if "COMPILATION_CACHE" not in name}
    bare |= {"XDG_CACHE_HOME": str(tmp_path / "cache")}

    def run(*words):
        subprocess.run([sys.executable, *words], check=True, env=bare, capture_output=True)

    run("-c", "import malliavin_jax, jax.numpy as jnp; jnp.linspace(0, 1, 1001).sum()")
    check = ("-m", "malliavin_jax.cli", "check", str(tmp_path / "run.npz"))
    run(*check, "--no-cache")
    assert not (tmp_path / "cache").exists()
    run(*check)
    assert list((tmp_path / "cache" / "malliavin-jax").glob("*/*-cache"))
