"""Accelerators that need not be here: what XLA must know to compile for them, and the numbers of their data sheets."""

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

import malliavin_jax as mj


class Device(NamedTuple):
    """A target: its topology, how many of its chips, and what one of them can do at most."""

    name: str
    platform: str
    options: dict[str, Any]
    chips: int
    memory: float  # bytes
    bandwidth: float  # bytes a second
    operations: float  # float32 operations a second outside the matrix units
    launch: float  # seconds that a kernel costs at least


# An H100 SXM as XLA describes it (xla/backends/gpu/target_config/specs/h100_sxm.txtpb).
_LIMITS = {
    "threads_per_block_limit": 1024, "threads_per_warp": 32, "shared_memory_per_block": 49152,
    "shared_memory_per_core": 233472, "threads_per_core_limit": 2048, "core_count": 132, "fpus_per_core": 128,
    "block_dim_limit_x": 2147483647, "block_dim_limit_y": 65535, "block_dim_limit_z": 65535,
    "memory_bandwidth": 3352320000000, "l2_cache_size": 52428800, "clock_rate_ghz": 1.98,
    "device_memory_size": 84929347584, "shared_memory_per_block_optin": 232448,
    "registers_per_core_limit": 65536, "registers_per_block_limit": 65536,
}  # fmt: skip
_H100 = (
    "gpu_device_info { " + " ".join(f"{name}: {value}" for name, value in _LIMITS.items())
    + ' cuda_compute_capability { major: 9 } } platform_name: "CUDA" dnn_version_info { major: 9 minor: 7 } '
    + 'runtime_version { major: 12 minor: 8 } device_description_str: "NVIDIA H100 80GB HBM3"'
)  # fmt: skip

# The vector unit of a v5e has no figure in its data sheet: 8 × 128 lanes × 4 units × 0.94 GHz is a guess.
_V5E = dict(platform="tpu", options={"topology_name": "v5e:2x2"}, memory=16e9, bandwidth=819e9, operations=3.9e12)
DEVICES = {
    "v5e": Device("TPU v5e, one chip", **_V5E, chips=1, launch=0.0),
    "v5e-2x2": Device("TPU v5e, 2 × 2", **_V5E, chips=4, launch=0.0),
    "h100": Device(
        "H100 SXM", "cuda", {"target_config": _H100, "topology": "1x1x1"}, 1, 80e9, 3.35e12, 67e12, launch=3e-6
    ),
}


class NotInstalled(Exception):
    """The compiler for a platform is not there."""


def topology(device: Device) -> Any:
    """The chips of a device, none of which need exist."""
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"  # ask no metadata server whether this machine is in a data centre
    os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # several processes may compile at once: none has a chip to itself
    from jax.experimental import topologies

    try:
        return topologies.get_topology_desc(platform=device.platform, **device.options)
    except Exception as error:  # whatever a plugin that is missing, or too old, makes of it
        extra = "tpu" if device.platform == "tpu" else "cuda12"
        reason = str(error).strip().splitlines()[0][:120] if str(error) else type(error).__name__
        raise NotInstalled(f"no compiler for {device.name} ({reason}): pip install 'malliavin-jax[{extra}]'") from error


def compiled(function: Callable[..., Any], arguments: tuple[Any, ...], chips: Any) -> Any:
    """`function` compiled for one chip, or for several with episodes split over them."""
    numbers, rest = eqx.partition(arguments, eqx.is_array)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), numbers)

    def run(numbers: Any) -> Any:
        return eqx.filter(function(*eqx.combine(numbers, rest)), eqx.is_array)

    if len(chips) == 1:
        place = SingleDeviceSharding(chips[0])
        return _with_doubles(
            shapes, lambda: jax.jit(run, in_shardings=place, out_shardings=place).lower(shapes).compile()
        )
    mesh = mj.distributed.episode_mesh(chips)
    with jax.set_mesh(mesh):
        place = NamedSharding(mesh, PartitionSpec())
        return jax.jit(run, in_shardings=place).lower(shapes).compile()


def _with_doubles(shapes: Any, compile: Callable[[], Any]) -> Any:
    """Sums of splines are in float64 whatever the data: their shapes must not be cut to float32 at the door."""
    doubles = any(leaf.dtype == "float64" for leaf in jax.tree.leaves(shapes))
    if not doubles:
        return compile()
    with jax.enable_x64(True):
        return compile()
