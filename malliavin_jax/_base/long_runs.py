"""Long runs: checkpoints (how much is done and the state then, in a file never half written), and a progress bar."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from .checks import check_count
from .files import read_archive, write_archive
from .fingerprint import fingerprint, is_key, raw

_SECONDS = 30.0  # between two writes, where they are not counted in units of work


class Checkpoint(eqx.Module):
    """A file from which an interrupted run goes on: pass it, or just its path, as `checkpoint` to a long run.

    When the file is there, the same call continues from it, and ends in the same bits as one never interrupted; a file
    of another run (another key, field, step size, …) is refused and left as it is. The file is written every so often,
    when the run ends and when it is interrupted. It is an `.npz` archive without pickles, and is replaced whole or not
    at all, so that a process killed in the middle of a write loses nothing but what came after the write before. Of
    several processes the first one writes, and all must be able to read.

    Args:
        path: the file, in a directory that exists.
        every: after how much work to write: so many steps of `passive_langevin`, chunks of `accumulate` or episodes of
            `observe_and_accumulate`. None: ten times in a run of `passive_langevin`, twice a minute in the others.

    Raises:
        ValueError: if `path` is a directory, or its directory does not exist, or `every` is not at least 1.

    Example:
        ```python
        import tempfile
        from pathlib import Path

        import jax
        import jax.numpy as jnp
        import malliavin_jax as mj

        field = mj.TrueField(mj.potentials.Quartic())
        file = Path(tempfile.mkdtemp()) / "chain.npz"
        settings = dict(num_steps=100, step_size=0.05, inverse_temperature=1.0)
        chain = mj.passive_langevin(
            jax.random.key(1), field, jnp.zeros((8, 1)), **settings, checkpoint=mj.Checkpoint(file, every=20)
        )
        again = mj.passive_langevin(jax.random.key(1), field, jnp.zeros((8, 1)), **settings, checkpoint=file)
        bool((again.positions == chain.positions).all())  # True: read back from the file, without a step
        ```
    """

    path: Path = eqx.field(static=True)
    every: int | None = eqx.field(static=True)

    def __init__(self, path: str | os.PathLike, every: int | None = None):
        self.path = Path(path)
        if self.path.is_dir() or not self.path.parent.is_dir():
            raise ValueError(f"checkpoint must be a file in a directory that exists, got {str(path)!r}")
        self.every = None if every is None else check_count("every", every)


def as_checkpoint(checkpoint: str | os.PathLike | Checkpoint | None) -> Checkpoint | None:
    """A path stands for the checkpoint there."""
    return checkpoint if checkpoint is None or isinstance(checkpoint, Checkpoint) else Checkpoint(checkpoint)


class Stage(NamedTuple):
    """How much of a run is done, and its state then."""

    done: int
    state: Any


class Journal:
    """The checkpoint of one run while it runs; without a `checkpoint` it does nothing.

    As a context it writes what is not yet written when the run ends, also when it ends in an exception.

    Args:
        checkpoint: where to write, and how often.
        run: what makes the run what it is, by name; a file in which one of these differs is refused.
    """

    def __init__(self, checkpoint: Checkpoint | None, **run: Any):
        self._checkpoint = checkpoint
        # Fingerprints read all the data of a field: none are made where nothing is saved.
        self._configuration = {} if checkpoint is None else {name: fingerprint(thing) for name, thing in run.items()}
        self._found = self._read()  # first of all: a file of another run is refused before anything is computed
        self._noted: Stage | None = None  # what is not yet written
        self._written = 0
        self._written_at = time.monotonic()

    def resume(self, state: Any) -> Stage:
        """Where to go on from: the stage in the file if there was one, else nothing done and `state`."""
        found, self._found = self._found, None
        self._written = 0 if found is None else int(found["done"])
        if self._checkpoint is not None and jax.process_count() > 1:
            complaint = f"checkpoint {self._checkpoint.path} must be seen by every process"
            multihost_utils.assert_equal(np.asarray(self._written), complaint)
        return Stage(self._written, state if found is None else _restore(found, state))

    def note(self, done: int, state: Any) -> None:
        """Take note of a stage, and write it if it is time."""
        if self._checkpoint is None:
            return
        self._noted = Stage(done, state)
        every = self._checkpoint.every
        if every is None:
            is_time = time.monotonic() - self._written_at > _SECONDS
        else:
            is_time = done // every > self._written // every
        if is_time:
            self._write()

    def _read(self) -> dict[str, np.ndarray] | None:
        """The arrays in the file, if there is one; it must be of this run."""
        if self._checkpoint is None or not self._checkpoint.path.exists():
            return None
        path = self._checkpoint.path
        header, arrays = read_archive(path, kind="checkpoint", remedy="; move it away to start again")
        if header != self._configuration:
            names = {**self._configuration, **header}
            differs = [name for name in names if header.get(name) != self._configuration.get(name)]
            raise ValueError(
                f"checkpoint {path} belongs to another configuration: it differs in {', '.join(differs)}. "
                "It was left as it is; give another path, or the arguments it was made with"
            )
        return arrays

    def _write(self) -> None:
        """Write the stage noted last, if it is not yet written."""
        if self._checkpoint is None or self._noted is None:
            return
        done, state = self._noted
        if jax.process_index() == 0:  # all processes hold the same state
            arrays = {"done": np.asarray(done, np.int64), **_named_leaves(state)}
            write_archive(self._checkpoint.path, self._configuration, arrays)
        self._noted, self._written, self._written_at = None, done, time.monotonic()

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, kind: Any, *exception: object) -> None:
        self._write()
        if kind is None and self._checkpoint is not None and jax.process_count() > 1:
            multihost_utils.sync_global_devices("checkpoint saved")


def _name(path: Any) -> str:
    """The name of a leaf, by its place in the state: "state.records.density"."""
    return ".".join(["state", *(jax.tree_util.keystr((entry,), simple=True) for entry in path)])


def _named_leaves(state: Any) -> dict[str, np.ndarray]:
    """The arrays of a state by name, keys as the words behind them."""
    return {_name(path): raw(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(state)}


def _restore(arrays: dict[str, np.ndarray], like: Any) -> Any:
    """A state as `like` from its arrays: NumPy's stay NumPy's, the words of random keys become keys again."""

    def rebuild(path: Any, model: Any) -> Any:
        array = arrays[_name(path)]
        if isinstance(model, np.ndarray):
            return array
        if is_key(model):
            return jax.random.wrap_key_data(jnp.asarray(array), impl=jax.random.key_impl(model))
        return jnp.asarray(array)

    return jax.tree_util.tree_map_with_path(rebuild, like)


class Bar:
    """A progress bar on stderr that turns itself off, rather than raise, when anything in it goes wrong."""

    def __init__(
        self, total: int | None, done: int, *, enabled: bool, unit: str = "step", name: str = "passive Langevin"
    ):
        self._bar: Any = None
        if enabled:
            self._attempt(lambda: self._open(total, done, unit, name))

    def _open(self, total: int | None, done: int, unit: str, name: str) -> None:
        from tqdm import tqdm

        self._bar = tqdm(total=total, initial=done, unit=unit, desc=name)

    def _attempt(self, action: Callable[[], Any]) -> None:
        try:
            action()
        except Exception:  # a closed terminal must not cost the run
            self._bar = None

    def advance(self, steps: int) -> None:
        if self._bar is not None:
            self._attempt(lambda: self._bar.update(steps))

    def __enter__(self) -> "Bar":
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._attempt(lambda: self._bar.close())
