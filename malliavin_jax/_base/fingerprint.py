"""A digest that is equal for equal configurations, from one process to the next."""

import functools
import hashlib
import re
import types
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np


def is_key(leaf: Any) -> bool:
    """Whether a leaf is an array of typed random keys."""
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def raw(leaf: Any) -> np.ndarray:
    """The numbers of an array; for a typed key, the words behind it."""
    return np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf)


def fingerprint(thing: Any) -> str:
    """A digest equal for equal configurations, also from one process to the next.

    Arrays count by dtype, shape and bytes; keys by their words and generator; Python functions by name,
    bytecode, constants, defaults and what they close over; other objects by their `repr`, less any memory
    address.
    """
    digest = hashlib.blake2b(digest_size=16)
    _feed(digest, thing, ())
    return digest.hexdigest()


def _feed(digest: Any, thing: Any, above: tuple[int, ...]) -> None:
    if id(thing) in above:  # a function that closes over itself
        return digest.update(b"cycle")
    above = (*above, id(thing))
    if isinstance(thing, jax.Array | np.ndarray | np.generic):
        kind = str(jax.random.key_impl(cast(Any, thing))) if is_key(thing) else ""
        values = raw(thing)
        digest.update(f"array{kind}{values.dtype}{values.shape}".encode() + values.tobytes())
    elif isinstance(thing, types.FunctionType):
        digest.update(f"function{thing.__module__}{thing.__qualname__}".encode())
        _feed(digest, thing.__code__, above)
        cells = [cell.cell_contents for cell in thing.__closure__ or ()]
        _feed(digest, [thing.__defaults__, thing.__kwdefaults__, cells], above)
    elif isinstance(thing, types.CodeType):
        digest.update(thing.co_code + " ".join(thing.co_names).encode())
        _feed(digest, list(thing.co_consts), above)
    elif isinstance(thing, types.MethodType):
        _feed(digest, [thing.__func__, thing.__self__], above)
    elif isinstance(thing, functools.partial):
        _feed(digest, [thing.func, thing.args, thing.keywords], above)
    elif callable(thing) and hasattr(thing, "__wrapped__"):  # jitted and otherwise decorated functions
        _feed(digest, [type(thing).__name__, cast(Any, thing).__wrapped__], above)
    else:
        leaves, structure = jax.tree.flatten(thing)
        if len(leaves) == 1 and leaves[0] is thing:  # not a container: described by its repr
            digest.update(re.sub(r" at 0x[0-9a-f]+", "", f"{type(thing)}{thing!r};").encode())
        else:
            digest.update(re.sub(r" at 0x[0-9a-f]+", "", str(structure)).encode())
            for leaf in leaves:
                _feed(digest, leaf, above)
