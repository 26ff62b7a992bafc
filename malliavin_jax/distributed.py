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

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from ._base import mesh as _mesh
from ._base.files import read_archive, write_archive
from .samples.samples import Samples

_KIND = "file of samples"  # what errors call a file that cannot be read


def episode_mesh(devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh that splits episodes over devices, to be set: `with jax.set_mesh(mesh): …`.

    Args:
        devices: which devices; None for all devices of all processes.

    Returns:
        A mesh of one axis, "episodes".

    Raises:
        ValueError: if `devices` is empty.

    Example:
        ```python
        import jax
        import jax.numpy as jnp
        import malliavin_jax as mj

        mesh = mj.distributed.episode_mesh(jax.devices()[:1])  # without an argument, all devices
        with jax.set_mesh(mesh):
            starts = mj.distributed.split(jnp.zeros((8, 1)))
        ```
    """
    devices = jax.devices() if devices is None else list(devices)
    if not devices:
        raise ValueError("devices must not be empty")
    return jax.make_mesh((len(devices),), (_mesh.AXIS,), axis_types=(AxisType.Auto,), devices=devices)


def split(tree: PyTree) -> PyTree:
    """Arrays that every process holds whole, their leading axis split over the mesh: starting points of chains, say.

    Args:
        tree: an array, or a PyTree of them such as `Samples`.

    Returns:
        The same tree; each device holds its own part of every array.

    Raises:
        ValueError: if no mesh is set, or a leading axis is not a multiple of the number of devices.

    Example:
        ```python
        import jax
        import jax.numpy as jnp
        import malliavin_jax as mj

        with jax.set_mesh(mj.distributed.episode_mesh(jax.devices()[:1])):
            starts = mj.distributed.split(jnp.zeros((8, 1)))  # for eight chains
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

    Args:
        tree: this process's part, an array or a PyTree of them such as `Samples`.

    Returns:
        The same tree, split over the mesh; the parts follow one another in the order of the processes.

    Raises:
        ValueError: if no mesh is set, or the whole leading axis is not a multiple of the number of devices.

    Example:
        ```python
        import jax
        import malliavin_jax as mj

        loss = mj.potentials.Quartic()
        learner = mj.ForwardLearner(loss, mj.initial.Normal(), step_size=0.01, gradient_noise=0.5)
        samples = mj.observe(jax.random.key(0), learner, num_episodes=2000, times=[0.4, 0.8])
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
    """Write `samples` into a directory, each process those of its own devices; return when all have written.

    The files are `.npz` archives without pickles, each replaced whole or not at all.

    Args:
        directory: made if it is not there. It may hold an older set of samples, of as many processes.
        samples: on one device, or split over the mesh.

    Raises:
        ValueError: if the directory holds samples that another number of processes wrote.

    Example:
        ```python
        import tempfile

        import jax
        import malliavin_jax as mj

        loss = mj.potentials.Quartic()
        learner = mj.ForwardLearner(loss, mj.initial.Normal(), step_size=0.01, gradient_noise=0.5)
        samples = mj.observe(jax.random.key(0), learner, num_episodes=2000, times=[0.4, 0.8])
        folder = tempfile.mkdtemp()
        mj.distributed.save(folder, samples)
        mj.distributed.load(folder).num_episodes  # 2000
        ```
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    number, rank = jax.process_count(), jax.process_index()
    path = directory / f"part-{rank:05d}-of-{number:05d}.npz"
    strangers = [part.name for part in _files(directory) if _number_of_files(part) != number]
    if strangers:
        raise ValueError(f"directory {directory} holds samples of another number of processes: {strangers[0]}")
    spans = [(rows.start, rows.start + len(rows.values)) for rows in _own_rows(samples.observed)]
    arrays: dict[str, np.ndarray] = {"spans": np.asarray(spans, np.int64).reshape(-1, 2)}
    columns = {field.name: getattr(samples, field.name) for field in dataclasses.fields(samples)}
    known = {name: column for name, column in columns.items() if column is not None}
    for name, column in known.items():
        arrays |= {_member(name, shard): rows.values for shard, rows in enumerate(_own_rows(column))}
    write_archive(path, {"episodes": str(samples.num_episodes), "columns": " ".join(known)}, arrays)
    if number > 1:
        multihost_utils.sync_global_devices("samples saved")


def load(directory: str | Path) -> Samples:
    """The samples that `save` wrote, on any number of processes and devices: split over the mesh, if one is set.

    Args:
        directory: where `save` wrote them.

    Returns:
        The samples; every process reads only the files that hold rows of its own devices.

    Raises:
        ValueError: if a file is missing or damaged, the files are not of one set of samples, or a mesh is set whose
            number of devices does not divide the number of episodes.

    Example:
        ```python
        import tempfile

        import jax
        import malliavin_jax as mj

        loss = mj.potentials.Quartic()
        learner = mj.ForwardLearner(loss, mj.initial.Normal(), step_size=0.01, gradient_noise=0.5)
        samples = mj.observe(jax.random.key(0), learner, num_episodes=2000, times=[0.4, 0.8])
        folder = tempfile.mkdtemp()
        mj.distributed.save(folder, samples)
        bool((mj.distributed.load(folder).x == samples.x).all())  # True
        ```
    """
    directory = Path(directory)
    paths = _files(directory)
    if not paths or {_number_of_files(path) for path in paths} != {len(paths)}:
        found = ", ".join(path.name for path in paths) or "nothing"
        raise ValueError(f"directory {directory} must hold every part of one set of samples, got {found}")
    pieces: list[_Piece] = []
    episodes, known = set(), set()
    for path in paths:
        header, arrays = read_archive(path, ["spans"], kind=_KIND)
        episodes.add(int(header["episodes"]))
        known |= set(header["columns"].split())
        pieces += [_Piece(start, stop, path, shard) for shard, (start, stop) in enumerate(arrays["spans"].tolist())]
    pieces.sort()
    ends = [0, *(piece.stop for piece in pieces)]
    if [piece.start for piece in pieces] != ends[:-1] or episodes != {ends[-1]}:
        raise ValueError(
            f"directory {directory} must hold every episode once, got parts of {sorted(episodes)} episodes"
        )
    names = [field.name for field in dataclasses.fields(Samples)]
    columns: dict[str, Any] = {name: _assemble(name, pieces) if name in known else None for name in names}
    return Samples(**columns)


class _Piece(NamedTuple):
    """Where the episodes start … stop − 1 are on disk."""

    start: int
    stop: int
    path: Path
    shard: int  # the number of the piece in its file


def _member(name: str, shard: int) -> str:
    """What the rows of a piece are called in its file."""
    return f"{name}.{shard}"


def _assemble(name: str, pieces: list[_Piece]) -> jax.Array:
    """One array of the samples; a process reads the files that hold rows of its own devices."""
    known: dict[_Piece, np.ndarray] = {}

    def read(piece: _Piece) -> np.ndarray:
        if piece not in known:
            member = _member(name, piece.shard)
            known[piece] = read_archive(piece.path, [member], kind=_KIND).arrays[member]
        return known[piece]

    def rows(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None
        first, last, _ = index[0].indices(pieces[-1].stop)
        overlapping = [piece for piece in pieces if piece.start < last and first < piece.stop]
        return np.concatenate([read(p)[max(first - p.start, 0) : last - p.start] for p in overlapping])

    if _mesh.parts() == 1:
        return jnp.asarray(rows((slice(None),)))
    shape = (pieces[-1].stop, *read(pieces[0]).shape[1:])
    _check_divides(shape[0])
    return jax.make_array_from_callback(shape, _sharding(), rows)


class _Rows(NamedTuple):
    """Some rows of an array, and the number of the first."""

    start: int
    values: np.ndarray


def _own_rows(array: jax.Array) -> list[_Rows]:
    """The parts of `array` that this process is to write, in order, no row twice."""
    own = [shard for shard in array.addressable_shards if shard.replica_id == 0]
    return sorted((_Rows(s.index[0].start or 0, np.asarray(s.data)) for s in own), key=lambda rows: rows.start)


def _files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.glob("part-*.npz") if re.fullmatch(r"part-\d+-of-\d+", path.stem))


def _number_of_files(path: Path) -> int:
    """How many files the set has, by the name of one of them."""
    return int(path.stem.rsplit("-", 1)[1])


def _sharding() -> NamedSharding:
    mesh = jax.sharding.get_mesh()
    if mesh.empty or _mesh.AXIS not in mesh.shape:
        raise ValueError("a mesh must be set: `with jax.set_mesh(mj.distributed.episode_mesh()): …`")
    return NamedSharding(mesh, PartitionSpec(_mesh.AXIS))


def _check_divides(length: int) -> None:
    if length % _mesh.parts():
        raise ValueError(f"the leading axis must be a multiple of the mesh's {_mesh.parts()} devices, got {length}")
