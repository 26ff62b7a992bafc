"""Fitted fields in files: arrays, and the names of the classes that they go into; never a pickle, never code."""

import dataclasses
import functools
import importlib
import inspect
import json
import os
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from .._base.checks import described
from .._base.files import read_archive, write_archive
from .._base.fingerprint import is_key
from ..adaptive.field import AdaptiveField
from ..estimate.field import AbstractField
from ..estimate.ratio import Estimate

_FORMAT, _VERSION = "malliavin_jax field", "1"
# Where the classes are that a field may be made of. A file names them as room.Class, and can name no others.
_HOMES = (
    *("estimate.localizers", "estimate.ratio", "estimate.sums", "models.folds", "kernel.fields", "kernel.local_fit"),
    *("fields.malliavin", "fields.fresh", "fields.tables", "fields.sorted", "fields.assisted", "fields.extrapolation"),
    *("fields.correction", "fields.judge", "potentials.analytic", "potentials.polynomial", "potentials.spline"),
    *("potentials.statistical", "adaptive.field", "adaptive.equations", "adaptive.fit", "adaptive.groups"),
    *("adaptive.change", "adaptive.judge", "adaptive.reading"),
)


def save_field(path: str | os.PathLike, field: AbstractField) -> None:
    """Write a field to a `.npz` file, to be queried elsewhere or later without the data and the fit.

    Arrays are written as they are, so that the field read back gives the same bits. The file is replaced whole or not
    at all, and holds numbers and names alone. A field that rests on its samples (`correction="full"`, kernels) takes
    them along.

    Args:
        path: a file that ends in `.npz`.
        field: a field of this package; what it is made of must be arrays and classes of this package.

    Raises:
        ValueError: if `path` ends otherwise, or `field` is no field of ours, or holds a function (a control made with
            `Potential(value, gradient, hessian)`) or a class of yours, which no file can hold.

    Example:
        ```python
        import tempfile
        from pathlib import Path

        import jax
        import malliavin_jax as mj

        loss = mj.potentials.Quartic()
        learner = mj.ForwardLearner(loss, mj.initial.Normal(), step_size=0.01, gradient_noise=0.5)
        samples = mj.observe(jax.random.key(0), learner, num_episodes=2000, times=[0.4, 0.8])
        path = Path(tempfile.mkdtemp()) / "field.npz"
        mj.io.save_field(path, mj.MalliavinField(samples))
        mj.io.load_field(path)(0.5)  # the same estimate, to the bit
        ```
    """
    path = Path(path)
    if path.suffix != ".npz":
        raise ValueError(f"path must end in .npz, got {str(path)!r}")
    if not isinstance(field, AbstractField):
        raise ValueError(f"field must be a field of malliavin_jax, got {described(field)}")
    arrays: dict[str, np.ndarray] = {}
    tree = _taken_apart(field, "field", arrays)
    write_archive(path, {"format": _FORMAT, "version": _VERSION, "tree": json.dumps(tree)}, arrays)


def load_field(path: str | os.PathLike) -> AbstractField:
    """The field that `save_field` wrote.

    Args:
        path: the file.

    Returns:
        The field, which gives the same bits as the one that was saved.

    Raises:
        ValueError: if the file is not there, damaged, no field or one of another version, if it does not fit together,
            or if it is in float64 and JAX is not (`jax.config.update("jax_enable_x64", True)`).

    Example:
        ```python
        import tempfile
        from pathlib import Path

        import malliavin_jax as mj

        path = Path(tempfile.mkdtemp()) / "field.npz"
        mj.io.save_field(path, mj.TrueField(mj.potentials.Quartic()))
        mj.io.load_field(path)(0.5).value  # 0.625
        ```
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"path must be a file that save_field wrote, and {path} is not there")
    header, arrays = read_archive(path, kind="field", remedy="; load reads recordings")
    if header.get("format") != _FORMAT or header.get("version") != _VERSION:
        got = f"{header.get('format')!r}, version {header.get('version')!r}"
        raise ValueError(f"{path} must hold a {_FORMAT!r}, version {_VERSION!r}, it holds {got}")
    try:
        field = _put_together(json.loads(header["tree"]), arrays)
        if not isinstance(field, AbstractField):
            raise ValueError(f"it holds {described(field)}, which is no field")
        _check_queries(field)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError, AssertionError) as error:
        raise ValueError(f"{path} does not hold a whole field: {error}") from error
    wide = any(leaf.dtype == np.float64 for leaf in jax.tree.leaves(field) if eqx.is_array(leaf))
    if wide and not isinstance(field, AdaptiveField) and not jax.config.read("jax_enable_x64"):
        raise ValueError(f"{path} is in float64, and JAX is not: jax.config.update('jax_enable_x64', True) first")
    return field


@functools.cache
def _classes() -> dict[str, type]:
    """The classes that a file may name."""
    found: dict[str, type] = {}
    for home in _HOMES:
        module = importlib.import_module(f"..{home}", __package__)
        for name, thing in inspect.getmembers(module, inspect.isclass):
            if thing.__module__ == module.__name__ and (issubclass(thing, eqx.Module) or hasattr(thing, "_fields")):
                found[f"{home.split('.')[0]}.{name}"] = thing
    return found


def _taken_apart(thing: Any, place: str, arrays: dict[str, np.ndarray]) -> Any:
    """A thing in JSON, its arrays moved to `arrays`; `place` names it in errors."""
    if thing is None or isinstance(thing, bool | int | float | str):
        return thing
    if isinstance(thing, jax.Array | np.ndarray) and not is_key(thing):
        name = f"array{len(arrays)}"
        arrays[name] = np.asarray(thing)
        return {"array": name}
    kind = type(thing)
    if kind is tuple:
        return {"tuple": [_taken_apart(part, f"{place}[{i}]", arrays) for i, part in enumerate(thing)]}
    name = next((name for name, known in _classes().items() if known is kind), None)
    if name is None:
        raise ValueError(
            f"{place} cannot be written, it is {described(thing)}: a file holds arrays and classes of malliavin_jax"
        )
    parts = {key: _taken_apart(getattr(thing, key), f"{place}.{key}", arrays) for key in _names(kind)}
    return {"class": name, "fields": parts}


def _put_together(tree: Any, arrays: dict[str, np.ndarray]) -> Any:
    """The thing that was taken apart."""
    if tree is None or isinstance(tree, bool | int | float | str):
        return tree
    if not isinstance(tree, dict):
        raise ValueError(f"{type(tree).__name__} is no part of a field")
    if set(tree) == {"array"}:
        with jax.enable_x64(True):  # no number is rounded on the way in
            return jnp.asarray(arrays[tree["array"]])
    if set(tree) == {"tuple"}:
        return tuple(_put_together(part, arrays) for part in tree["tuple"])
    kind = _classes().get(str(tree.get("class")))
    if set(tree) != {"class", "fields"} or kind is None:
        raise ValueError(f"{tree.get('class', sorted(tree))!r} is no class that a field is made of")
    if set(tree["fields"]) != set(_names(kind)):
        raise ValueError(f"{tree['class']} must have the fields {', '.join(_names(kind))}")
    parts = {key: _put_together(part, arrays) for key, part in tree["fields"].items()}
    if not issubclass(kind, eqx.Module):
        return kind(**parts)
    made = object.__new__(kind)  # as JAX rebuilds a module: what it was made of is not made again
    for key, part in parts.items():
        object.__setattr__(made, key, part)
    return made


def _names(kind: type) -> tuple[str, ...]:
    """The fields of a module or of a named tuple."""
    if issubclass(kind, eqx.Module):
        return tuple(field.name for field in dataclasses.fields(kind))  # type: ignore[arg-type]
    return kind._fields  # type: ignore[attr-defined]


def _check_queries(field: AbstractField) -> None:
    """Trace a query: arrays whose shapes do not go together are found now."""
    mesh, points = getattr(field, "mesh", None), getattr(field, "points", None)
    low = getattr(field, "low", None if mesh is None else mesh.low)
    if low is None and hasattr(points, "low"):
        low = points.low  # type: ignore[union-attr]
    if low is None:
        return  # a potential, which may take any dimension
    with jax.enable_x64(True):
        found = jax.eval_shape(field, jax.ShapeDtypeStruct(low.shape, low.dtype))
    if not isinstance(found, Estimate) or found.value.shape != low.shape:
        raise ValueError(f"a query at a place of shape {low.shape} gives no estimate")
