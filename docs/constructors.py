"""Constructors of the package's modules, for the reference: equinox makes them of the fields, and no source shows them.

The reference is read from the source. Here each module without an `__init__` of its own is given one, with the
parameters that it has when the package is imported and the annotations that the source gives its fields.
"""

import dataclasses
import importlib
import inspect
from collections.abc import Iterator
from typing import Any

import griffe


class Constructors(griffe.Extension):
    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        for found in list(_classes(pkg)):
            kind = getattr(importlib.import_module(found.module.path), found.name, None)
            if "__init__" not in found.members and isinstance(kind, type) and dataclasses.is_dataclass(kind):
                found.set_member("__init__", _constructor(pkg, found, kind))


def _classes(inside: griffe.Module) -> Iterator[griffe.Class]:
    for member in inside.members.values():
        if member.is_alias:
            continue
        if member.is_module:
            yield from _classes(member)
        elif member.is_class:
            yield member


def _constructor(pkg: griffe.Module, found: griffe.Class, kind: type) -> griffe.Function:
    itself = griffe.Parameter("self", kind=griffe.ParameterKind.positional_or_keyword)
    parameters = [itself]
    for name, parameter in inspect.signature(kind).parameters.items():
        plain = isinstance(parameter.default, bool | int | float | str | tuple) or parameter.default is None
        given = None if parameter.default is parameter.empty else repr(parameter.default) if plain else "..."
        is_keyword = parameter.kind is parameter.KEYWORD_ONLY
        place = griffe.ParameterKind.keyword_only if is_keyword else griffe.ParameterKind.positional_or_keyword
        annotation = _annotation(pkg, kind, name)
        parameters.append(griffe.Parameter(name, annotation=annotation, kind=place, default=given))
    return griffe.Function("__init__", parameters=griffe.Parameters(*parameters), parent=found, lineno=0, endlineno=0)


def _annotation(pkg: griffe.Module, kind: type, name: str) -> Any:
    """As the source of the class, or of the one it derives from, gives it."""
    for base in kind.__mro__:
        if base.__module__.startswith(pkg.path) and name in vars(base).get("__annotations__", {}):
            path = f"{base.__module__}.{base.__qualname__}".removeprefix(f"{pkg.path}.")
            return pkg[path].members[name].annotation
    return None
