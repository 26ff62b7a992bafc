"""Every public name has a docstring with an example, and every example runs; so do the blocks of the guide."""

import ast
import importlib
import inspect
import re
import traceback
from pathlib import Path

import jax
import matplotlib
import pytest

import malliavin_jax

ROOT = Path(malliavin_jax.__file__).parent.parent
PAGES = ROOT / "docs" / "pages"
MODULES = ("", "potentials", "estimate", "fields", "kernel", "diagnostics", "plots", "io", "distributed", "wiener")
FENCE = re.compile(r"```python\n(.*?)```", re.S)


def module_of(name):
    return importlib.import_module(f"malliavin_jax.{name}" if name else "malliavin_jax")


def public_names(module):
    """What a module offers: its own names, and those it imports as themselves (`from .x import f as f`)."""
    found = []
    for node in ast.parse(inspect.getsource(module)).body:
        if isinstance(node, ast.ImportFrom) and node.level:
            found += [a.name for a in node.names if a.asname == a.name and not inspect.ismodule(vars(module)[a.name])]
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.append(node.name)
    return [name for name in found if not name.startswith("_")]


def everything():
    """Full name → object; an object that is found twice goes by its first, shortest name."""
    found = {}
    for prefix in MODULES:
        module = module_of(prefix)
        for name in public_names(module):
            if not any(thing is vars(module)[name] for thing in found.values()):
                found[f"{prefix}.{name}".lstrip(".")] = vars(module)[name]
    return found


def examples(thing):
    """The fenced blocks of a docstring."""
    return FENCE.findall(inspect.cleandoc(thing.__doc__ or ""))


def test_every_public_name_has_a_docstring_with_an_example():
    assert len(everything()) > 60
    assert [name for name, thing in everything().items() if not examples(thing)] == []


def test_every_public_name_is_in_the_reference():
    listed = re.findall(r"^::: malliavin_jax\.(\S+)$", (PAGES / "reference.md").read_text(), re.M)
    assert sorted(listed) == sorted(everything())


@pytest.fixture
def like_a_user():
    """A user's session is not strict about ranks and types of numbers; its pictures are not shown."""
    matplotlib.use("Agg")
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"), jax.enable_x64(False):
        yield
    matplotlib.pyplot.close("all")


@pytest.mark.filterwarnings("ignore:More than 20 figures")
def test_the_guide_and_every_example_run(like_a_user, tmp_path):
    """In one process: the two use samples of one shape, and what the first compiles serves the second."""
    guide = {}
    for number, block in enumerate(FENCE.findall((PAGES / "guide.md").read_text())):
        exec(compile(block, f"guide.md, block {number}", "exec"), guide)
    assert abs(float(guide["square"].value[0]) - 0.25) < 4 * float(guide["square"].stderr[0]) + 1e-3
    assert bool(guide["estimate"].trusted)

    (preamble,) = FENCE.findall((PAGES / "reference.md").read_text())
    scope, broken = {"folder": tmp_path}, []
    exec(preamble, scope)
    for name, thing in everything().items():
        for block in examples(thing):
            try:
                exec(compile(block, f"the docstring of {name}", "exec"), scope)
            except Exception:
                broken.append(f"{name}:\n{traceback.format_exc(limit=-2)}")
    assert not broken, "\n".join(broken)
