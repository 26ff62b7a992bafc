"""Episodes over many devices: what a mesh that is set with `jax.set_mesh` means for the rest of the house.

A mesh with an axis named "episodes" (see `distributed.py`) splits every leading axis of episodes evenly over its
devices. Each device simulates and sums its own episodes; only sums travel. Without such a mesh nothing changes.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.sharding import PartitionSpec

AXIS = "episodes"


def parts() -> int:
    """Over how many devices the mesh in force splits episodes; 1 without a mesh, and within the part of a device."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty or AXIS in mesh.manual_axes else mesh.shape.get(AXIS, 1)


def by_device(function: Callable[..., Any], *trees: Any) -> Any:
    """`function` of each device's part of the leading axis of `trees`, the results joined along theirs."""
    split = PartitionSpec(AXIS)
    # Scans whose carry starts from a constant are right without the check of what varies over the mesh.
    return jax.shard_map(function, in_specs=split, out_specs=split, check_vma=False)(*trees)


def total_over_devices(function: Callable[..., Any], *trees: Any) -> Any:
    """`function` of each device's part of the leading axis of `trees`, added up over the devices."""

    def total(*trees: Any) -> Any:
        return lax.psum(function(*trees), AXIS)

    split, whole = PartitionSpec(AXIS), PartitionSpec()
    return jax.shard_map(total, in_specs=split, out_specs=whole, check_vma=False)(*trees)


def is_split(*trees: Any) -> bool:
    """Whether an array among the leaves lives on several devices."""
    arrays = [leaf for leaf in jax.tree.leaves(trees) if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer)]
    return any(len(array.sharding.device_set) > 1 for array in arrays)


def array_module(*trees: Any) -> Any:
    """What checks compute with: NumPy, but `jax.numpy` for arrays that no process may gather."""
    return jnp if is_split(*trees) else np


def count(array: Any) -> int:
    """How many entries are not zero."""
    xp = array_module(array)
    return int(xp.count_nonzero(xp.asarray(array)))
