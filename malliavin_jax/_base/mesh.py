"""Episodes over many devices: what a mesh that is set with `jax.set_mesh` means for the rest of the house.

A mesh with an axis named "episodes" (see `distributed.py`) splits every leading axis of episodes evenly over its
devices. Each device simulates and sums its own episodes; only sums travel. Without such a mesh nothing changes.

And the threads of the host, for what is computed there.
"""

import functools
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.sharding import PartitionSpec
from threadpoolctl import ThreadpoolController

AXIS = "episodes"
T = TypeVar("T")
R = TypeVar("R")
Function = TypeVar("Function", bound=Callable[..., Any])
_MOST_THREADS = 8


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


def on_host(*trees: Any) -> bool:
    """Whether every leaf has its values in the memory of this process, where NumPy reads them without a copy.

    What is small and asked for once is computed there: a compiler takes longer than all of it.
    """
    leaves = jax.tree.leaves(trees)
    if any(isinstance(leaf, Tracer) for leaf in leaves) or is_split(leaves):
        return False
    arrays = [leaf for leaf in leaves if isinstance(leaf, jax.Array)]
    return all(device.platform == "cpu" for array in arrays for device in array.devices())


def module_of(array: Any) -> Any:
    """What formulas that serve both compute with: NumPy for its own arrays, `jax.numpy` for all others."""
    return np if isinstance(array, np.ndarray | np.generic) else jnp


def to_host(tree: Any) -> Any:
    """A PyTree with NumPy's arrays in place of JAX's, without a copy where `on_host`."""
    return jax.tree.map(lambda leaf: np.asarray(leaf) if isinstance(leaf, jax.Array) else leaf, tree)


def each(function: Callable[..., Any], items: Any) -> Any:
    """`function` of each row of `items`: one compiled loop, or with NumPy a call for each."""
    if isinstance(items, np.ndarray):
        return jax.tree.map(lambda *leaves: np.stack(leaves), *on_threads(_silently(function), items))
    return lax.map(function, items)


def _silently(function: Function) -> Function:
    """NumPy's silence about what divides by zero is a thread's own."""

    @functools.wraps(function)
    def silent(*args: Any) -> Any:
        with np.errstate(all="ignore"):
            return function(*args)

    return silent  # type: ignore[return-value]


def here_or_compiled(function: Callable[..., R]) -> Callable[..., R]:
    """`call(here, *args)`: with NumPy's arrays where `here`, and as a compiled program where not.

    What is small and asked for once is done before a compiler is. `function` must take either kind of arrays; its
    result has JAX's in both cases. NumPy is as silent as a compiled program: what divides by zero is looked at later.
    """
    compiled, silent = eqx.filter_jit(function), _silently(function)

    @functools.wraps(function)
    def call(here: bool, *args: Any) -> R:
        return jax.tree.map(to_device, silent(*to_host(args))) if here else compiled(*args)

    return call


def to_device(array: Any, dtype: Any = None) -> Any:
    """An array of NumPy's, or a number, as one of JAX's; what is JAX's already stays as it is.

    `jnp.asarray` would compile a program for each shape it meets.
    """
    return array if isinstance(array, jax.Array) else jax.device_put(np.asarray(array, dtype))


def count(array: Any) -> int:
    """How many entries are not zero."""
    xp = array_module(array)
    return int(xp.count_nonzero(xp.asarray(array)))


class _OneThread:
    """The limit that is in force while any thread is inside: the last to leave lifts what the first has set."""

    def __init__(self) -> None:
        self._guard, self._inside = threading.Lock(), 0
        self._limit: Any = None
        self._libraries = functools.cache(ThreadpoolController)

    def __enter__(self) -> None:
        with self._guard:
            if self._inside == 0:
                self._limit = self._libraries().limit(limits=1, user_api="blas")
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._guard:
            self._inside -= 1
            if self._inside == 0:
                self._limit.restore_original_limits()


_one_thread = _OneThread()


def on_one_thread(function: Function) -> Function:
    """The function with NumPy's and SciPy's linear algebra on one thread.

    The threads of a factorisation wait for each other many times, and spin meanwhile. Where something else runs on one
    of the cores that made it a hundred times slower (1.3 s in place of .014 s for 1000 unknowns on two cores).
    """

    @functools.wraps(function)
    def alone(*args: Any, **kwargs: Any) -> Any:
        with _one_thread:
            return function(*args, **kwargs)

    return alone  # type: ignore[return-value]


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def on_threads(function: Callable[[T], R], items: Iterable[T], *, most: int | None = None) -> list[R]:
    """`function` of each item, in their order; NumPy and SciPy let go of the interpreter while they compute."""
    items = list(items)
    workers = min(cores(), most or _MOST_THREADS, len(items))
    if workers < 2:
        return [function(item) for item in items]
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(function, items))
