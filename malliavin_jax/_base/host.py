"""The host: what is small and asked for once is computed there with NumPy, before a compiler would be ready.

Formulas that serve both take their module from their arrays (`module_of`), or say so by a decorator
(`here_or_compiled`). The host's linear algebra has one thread, and what is independent has threads of ours.
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
from threadpoolctl import ThreadpoolController

from .mesh import is_split

T = TypeVar("T")
R = TypeVar("R")
Function = TypeVar("Function", bound=Callable[..., Any])
_MOST_THREADS = 8


def on_host(*trees: Any) -> bool:
    """Whether every leaf has its values in the memory of this process, where NumPy reads them without a copy."""
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
        return jax.tree.map(lambda *leaves: np.stack(leaves), *on_threads(silently(function), items))
    return lax.map(function, items)


def silently(function: Function) -> Function:
    """The function as silent as a compiled one about what divides by zero; in NumPy silence is a thread's own."""

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
    compiled, silent = eqx.filter_jit(function), silently(function)

    @functools.wraps(function)
    def call(here: bool, *args: Any) -> R:
        return jax.tree.map(to_device, silent(*to_host(args))) if here else compiled(*args)

    return call


def to_device(array: Any, dtype: Any = None) -> Any:
    """An array of NumPy's, or a number, as one of JAX's; what is JAX's already stays as it is.

    `jnp.asarray` would compile a program for each shape it meets.
    """
    return array if isinstance(array, jax.Array) else jax.device_put(np.asarray(array, dtype))


_libraries = functools.cache(ThreadpoolController)
_limiting = threading.Lock()


def on_one_thread(function: Function) -> Function:
    """The function with NumPy's and SciPy's linear algebra on one thread.

    The threads of a factorisation wait for each other many times, and spin meanwhile. Where something else runs on one
    of the cores that made it a hundred times slower (1.3 s in place of .014 s for 1000 unknowns on two cores).
    The number is one for all threads of the process: who finds it limited leaves it alone, and who has limited it
    lifts the limit, so begin in the thread that starts the others.
    """

    @functools.wraps(function)
    def alone(*args: Any, **kwargs: Any) -> Any:
        if not _limiting.acquire(blocking=False):
            return function(*args, **kwargs)
        try:
            with _libraries().limit(limits=1, user_api="blas"):
                return function(*args, **kwargs)
        finally:
            _limiting.release()

    return alone  # type: ignore[return-value]


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def on_threads(function: Callable[[T], R], items: Iterable[T], *, most: int | None = None) -> list[R]:
    """`function` of each item, in their order; NumPy and SciPy let go of the interpreter while they compute."""
    items, double = list(items), jax.dtypes.canonicalize_dtype(np.float64) == np.float64
    workers = min(cores(), most or _MOST_THREADS, len(items))
    if workers < 2:
        return [function(item) for item in items]

    def alike(item: T) -> R:
        with jax.enable_x64(double):  # as where it was called: the setting is a thread's own
            return function(item)

    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(alike, items))
