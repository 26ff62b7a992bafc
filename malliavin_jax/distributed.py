"""From one laptop to a pod: episodes, or chains, split over many devices and many processes.

JAX's own runtime is the engine. A mesh of all devices is set, and everything else is as on one device:

    jax.distributed.initialize()  # several processes, under a cluster's launcher; without one, (address, number, rank)
    with jax.set_mesh(mj.distributed.episode_mesh()):
        samples = mj.observe(key, learner, num_episodes=10**8, times=[0.8])
        field = mj.MalliavinField(samples, mj.Gaussian(0.4, core=0.05))
        estimates = jax.vmap(field)(alphas)

Every process runs the same program. Under the mesh `observe` makes each episode on one device, where it stays;
`MalliavinField` and `Accumulator` add up on each device and then over the devices, and what they return is known to
all. An episode depends on `key` and its number alone: the same episodes come out bit for bit on any number of devices
and processes (but for the rounding of fused multiply-adds, which a compiler may place differently in differently
sized programs), and the same estimates to rounding.

When a process dies, the others' next sum over the devices fails with an error that says so; should it not, the runtime
ends them when the heartbeat (`heartbeat_timeout_seconds` of `jax.distributed.initialize`) stays away.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from ._base import checkpoint as _checkpoint, mesh as _mesh
from .samples.samples import Samples

_FIELDS = ("x", "gradient", "hessian", "weight", "observed")


def episode_mesh(devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh over `devices` (all devices of all processes) that splits episodes: `with jax.set_mesh(mesh): …`.

    ```python
    mesh = mj.distributed.episode_mesh(jax.devices()[:1])  # without an argument, all devices
    with jax.set_mesh(mesh):
        spread = mj.distributed.split(samples)
    ```
    """
    devices = jax.devices() if devices is None else list(devices)
    if not devices:
        raise ValueError("devices must not be empty")
    return jax.make_mesh((len(devices),), (_mesh.AXIS,), axis_types=(AxisType.Auto,), devices=devices)


def split(tree: PyTree) -> PyTree:
    """Arrays that every process holds whole, their leading axis split over the mesh: starting points of chains, say.

    ```python
    with jax.set_mesh(mj.distributed.episode_mesh(jax.devices()[:1])):
        starts = mj.distributed.split(np.zeros((8, 1), np.float32))  # for eight chains
    ```
    """
    sharding = _sharding()

    def place(leaf: Any) -> jax.Array:
        whole = np.asarray(leaf)
        _check_divides(whole.shape[0])
        return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])

    return jax.tree.map(place, tree)


def join(tree: PyTree) -> PyTree:
    """Arrays of which every process holds a part, of equal length, as one: samples recorded on many machines, say.

    The parts follow one another in the order of the processes.

    ```python
    with jax.set_mesh(mj.distributed.episode_mesh(jax.devices()[:1])):
        together = mj.distributed.join(samples)  # each process brings its own
    ```
    """
    sharding = _sharding()

    def place(leaf: Any) -> jax.Array:
        part = np.asarray(leaf)
        _check_divides(part.shape[0] * jax.process_count())
        return jax.make_array_from_process_local_data(sharding, part)

    return jax.tree.map(place, tree)


def save(directory: str | Path, samples: Samples) -> None:
    """Write `samples` into `directory`, each process those of its own devices (`.npz`, no pickle).

    Returns when all processes have written.

    ```python
    mj.distributed.save(folder / "parts", samples)
    mj.distributed.load(folder / "parts").num_episodes  # 2000
    ```
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    number, rank = jax.process_count(), jax.process_index()
    path = directory / f"part-{rank:05d}-of-{number:05d}.npz"
    strangers = [part.name for part in _parts(directory) if _number_of(part) != number]
    if strangers:
        raise ValueError(f"directory {directory} holds samples of another number of processes: {strangers[0]}")
    columns = {name: _own_shards(getattr(samples, name)) for name in _FIELDS}
    starts = np.asarray([start for start, _ in columns["x"]], np.int64)
    trees: dict[str, Any] = {name: [rows for _, rows in shards] for name, shards in columns.items()}
    _checkpoint.save(path, {"episodes": str(samples.num_episodes)}, {"starts": starts, **trees})
    if number > 1:
        multihost_utils.sync_global_devices("samples saved")


def load(directory: str | Path) -> Samples:
    """The samples that `save` wrote, on any number of processes and devices: split over the mesh, if one is set.

    ```python
    mj.distributed.save(folder / "other_parts", samples)
    again = mj.distributed.load(folder / "other_parts")
    ```
    """
    directory = Path(directory)
    paths = _parts(directory)
    if not paths or {_number_of(path) for path in paths} != {len(paths)}:
        found = ", ".join(path.name for path in paths) or "nothing"
        raise ValueError(f"directory {directory} must hold every part of one set of samples, got {found}")
    pieces: list[tuple[int, int, Path, int]] = []  # first episode, last + 1, file, number of the shard in it
    episodes = set()
    for path in paths:
        written, trees = _checkpoint.read(path, ("starts", "observed"))
        episodes.add(int(written["episodes"]))
        spans = zip(trees["starts"][0].tolist(), map(len, trees["observed"]), strict=True)
        pieces += [(start, start + length, path, shard) for shard, (start, length) in enumerate(spans)]
    pieces.sort()
    ends = [0, *(stop for _, stop, _, _ in pieces)]
    if [start for start, *_ in pieces] != ends[:-1] or episodes != {ends[-1]}:
        raise ValueError(
            f"directory {directory} must hold every episode once, got parts of {sorted(episodes)} episodes"
        )
    return Samples(*(_assemble(name, pieces) for name in _FIELDS))


def _assemble(name: str, pieces: list[tuple[int, int, Path, int]]) -> jax.Array:
    """One array of the samples; a process reads the files that hold rows of its own devices."""
    read: dict[Path, list[np.ndarray]] = {}

    def shard(path: Path, number: int) -> np.ndarray:
        if path not in read:
            read[path] = _checkpoint.read(path, (name,))[1][name]
        return read[path][number]

    def rows(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None
        first, last, _ = index[0].indices(pieces[-1][1])
        parts = [
            shard(path, number)[max(first - start, 0) : last - start]
            for start, stop, path, number in pieces
            if start < last and first < stop
        ]
        return np.concatenate(parts)

    example = shard(*pieces[0][2:])
    shape = (pieces[-1][1], *example.shape[1:])
    if _mesh.parts() == 1:
        return jnp.asarray(rows((slice(None),)))
    _check_divides(shape[0])
    return jax.make_array_from_callback(shape, _sharding(), rows)


def _own_shards(array: jax.Array) -> list[tuple[int, np.ndarray]]:
    """First row and rows of each part of `array` that this process is to write, no row twice."""
    shards = [(shard.index[0].start or 0, shard) for shard in array.addressable_shards if shard.replica_id == 0]
    return [(start, np.asarray(shard.data)) for start, shard in sorted(shards, key=lambda pair: pair[0])]


def _parts(directory: Path) -> list[Path]:
    return sorted(path for path in directory.glob("part-*.npz") if re.fullmatch(r"part-\d+-of-\d+", path.stem))


def _number_of(path: Path) -> int:
    return int(path.stem.rsplit("-", 1)[1])


def _sharding() -> NamedSharding:
    mesh = jax.sharding.get_mesh()
    if mesh.empty or _mesh.AXIS not in mesh.shape:
        raise ValueError("a mesh must be set: `with jax.set_mesh(mj.distributed.episode_mesh()): …`")
    return NamedSharding(mesh, PartitionSpec(_mesh.AXIS))


def _check_divides(length: int) -> None:
    if length % _mesh.parts():
        raise ValueError(f"the leading axis must be a multiple of the mesh's {_mesh.parts()} devices, got {length}")
