"""Checks that name the argument, and the few helpers that every room needs."""

import functools
import math
import types
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array


def is_concrete(*values: Any) -> bool:
    """Whether every leaf has a value now and here.

    What `jit`, `vmap` or `grad` trace has none now; what is split over the devices of several processes, none here.
    """
    return not is_traced(*values) and not any(map(_is_elsewhere, jax.tree.leaves(values)))


def _is_elsewhere(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and not (leaf.is_fully_addressable or leaf.is_fully_replicated)


def is_traced(*values: Any) -> bool:
    """Whether a leaf is traced, and so has no value yet."""
    return any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(values))


def check_positive(name: str, value: Any) -> None:
    """Refuse a number that is not finite and positive (a traced value passes: it has no value yet)."""
    _check_number(name, value)
    if is_concrete(value) and not (np.all(np.isfinite(value)) and np.all(np.asarray(value) > 0)):
        raise ValueError(f"{name} must be positive and finite, got {value}")


def check_finite(name: str, value: Any) -> None:
    """Refuse an array with an entry that is not finite (a traced value passes)."""
    if is_concrete(value) and not np.all(np.isfinite(value)):
        raise ValueError(f"{name} must be finite, got {value}")


def check_nonnegative(name: str, value: Any) -> None:
    """Refuse a number that is negative or not finite (a traced value passes)."""
    _check_number(name, value)
    if is_concrete(value) and not (np.all(np.isfinite(value)) and np.all(np.asarray(value) >= 0)):
        raise ValueError(f"{name} must be non-negative and finite, got {value}")


def _check_number(name: str, value: Any) -> None:
    if isinstance(value, str) or value is None or callable(value):
        raise ValueError(f"{name} must be a number, got {described(value)}")


def check_count(name: str, value: Any, at_least: int = 1) -> int:
    """A whole number, at least `at_least`."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < at_least:
        raise ValueError(f"{name} must be a whole number, at least {at_least}, got {value!r}")
    return int(value)


def check_shape(name: str, array: Any, expected: Sequence[int | None], axes: str = "", remedy: str = "") -> None:
    """Refuse an array whose shape differs from `expected`, where None stands for any size.

    `axes` names the axes ("episodes points d") and `remedy` says what to do.
    """
    shape = np.shape(array)
    if len(shape) != len(expected) or any(e is not None and s != e for s, e in zip(shape, expected, strict=True)):
        names = axes.split() or ["any"] * len(expected)
        wanted = _tuple(name if size is None else str(size) for size, name in zip(expected, names, strict=True))
        legend = f" for axes {_tuple(names)}" if axes and _tuple(names) != wanted else ""
        raise ValueError(f"{name} must have shape {wanted}{legend}, got {tuple(shape)}{remedy and ': ' + remedy}")


def _tuple(entries: Iterable[str]) -> str:
    """As Python writes a tuple."""
    listed = list(entries)
    return f"({', '.join(listed)}{',' if len(listed) == 1 else ''})"


def check_key(name: str, key: Any) -> None:
    """Refuse what is no random key, or more than one."""
    kind = getattr(key, "dtype", None)
    typed = kind is not None and jnp.issubdtype(kind, jax.dtypes.prng_key)
    raw = kind == np.uint32 and np.ndim(key) > 0  # the words of an old key
    if not typed and not raw:
        got = f"the number {key}" if isinstance(key, int | np.integer) else described(key)
        seed = key if isinstance(key, int | np.integer) else 0
        raise ValueError(f"{name} must be a random key, got {got}: give jax.random.key({seed})")
    if np.ndim(key) != (0 if typed else 1):
        raise ValueError(
            f"{name} must be one random key, got keys of shape {np.shape(key)}: map over them with jax.vmap"
        )


def has_numbers(tree: Any) -> bool:
    """Whether every leaf is an array whose numbers are known here and now: then a repr shows them."""
    leaves = jax.tree.leaves(tree)
    return bool(leaves) and all(isinstance(leaf, jax.Array | np.ndarray) for leaf in leaves) and is_concrete(tree)


def plus_minus(value: Any, stderr: Any) -> str:
    """A number with its standard error: "0.633 ± 0.011"."""
    number, error = float(value), float(stderr)
    if not (math.isfinite(number) and math.isfinite(error) and error > 0):
        return f"{number:.4g} ± {error:.2g}"
    digits = max(0, 1 - math.floor(math.log10(error)))  # two digits of the error, and as many places of the value
    return f"{number:.{digits}f} ± {error:.{digits}f}" if digits <= 8 else f"{number:.6g} ± {error:.2g}"


def described(thing: Any) -> str:
    """What a thing of the wrong kind is, in an error message: "the class Laplace", "an array of shape (3,)"."""
    if isinstance(thing, type):
        return f"the class {thing.__name__} (an instance is wanted: {thing.__name__}(…))"
    if isinstance(thing, bool | int | float | str | np.number) or thing is None:
        return repr(thing)
    if isinstance(thing, jax.Array | np.ndarray):
        return f"an array of shape {thing.shape}"
    name = type(thing).__name__
    if isinstance(thing, types.FunctionType | types.MethodType | functools.partial) or "Method" in name:
        return "a function"
    return f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"


def steps_at(times: Any, step_size: Any, *, name: str = "times") -> tuple[int, ...]:
    """Conditioning times as step numbers: increasing, positive multiples of `step_size`.

    A time may be off its multiple by a thousandth of a step, which float32 times need.
    """
    if not is_concrete(step_size):
        raise ValueError(
            "step_size must have a value (not be traced) to turn times into steps; "
            "to differentiate in step_size, use simulate, which counts in steps"
        )
    listed = np.atleast_1d(np.asarray(times, dtype=float))
    if listed.ndim != 1 or listed.size == 0:
        raise ValueError(f"{name} must be a non-empty list of times, got {times!r}")
    ratio = listed / float(step_size)
    steps = np.round(ratio)
    for time, exact, step in zip(listed, ratio, steps, strict=True):
        if not math.isfinite(time) or abs(exact - step) > 1e-3 or step < 1:
            raise ValueError(f"{name} must be positive multiples of step_size={float(step_size)}, got {time}")
    if np.any(np.diff(steps) <= 0):
        raise ValueError(f"{name} must be strictly increasing, got {listed.tolist()}")
    return tuple(int(s) for s in steps)


def floats_to_arrays(tree: Any, dtype: Any) -> Any:
    """Python floats as arrays of `dtype`, so that a sweep over a parameter compiles once.

    An exact zero stays a static Python number: the work it would cause is skipped at trace time.
    """

    def convert(leaf: Any) -> Any:
        is_number = isinstance(leaf, float) and not isinstance(leaf, bool)
        return jnp.asarray(leaf, dtype) if is_number and leaf != 0.0 else leaf

    return jax.tree.map(convert, tree)


def is_static_zero(value: Any) -> bool:
    """Whether `value` is the Python number 0, known when tracing."""
    return isinstance(value, int | float) and value == 0


def float_array(name: str, value: Any) -> Array:
    """`value` as a floating JAX array (integers become the default float)."""
    try:
        array = jnp.asarray(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} must be an array of numbers, got {type(value).__name__}") from error
    if not jnp.issubdtype(array.dtype, jnp.floating):
        if not jnp.issubdtype(array.dtype, jnp.integer):
            raise ValueError(f"{name} must hold real numbers, got dtype {array.dtype}")
        array = array.astype(jnp.result_type(float))
    return array
