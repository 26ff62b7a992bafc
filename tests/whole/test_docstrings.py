"""Every public name has a docstring in one convention, an example that runs by itself, and its place in the reference.

The blocks of the guide run too.
"""

import ast
import importlib
import inspect
import re
import textwrap
import traceback
from pathlib import Path

import jax
import matplotlib
import pytest

import malliavin_jax

PACKAGE = Path(malliavin_jax.__file__).parent
PAGES = PACKAGE.parent / "docs" / "pages"
ROOMS = (
    "potentials", "learner", "weights", "samples", "estimate", "kernel", "models", "fields", "chain", "recovery",
    "adaptive", "recording", "streaming", "diagnostics", "distributed", "io", "plots", "wiener",
)  # fmt: skip
FENCE = re.compile(r"```python\n(.*?)```", re.S)


def offered(source):
    """Names that a table of contents imports as themselves (`from .x import f as f`), or that a file defines."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.ImportFrom) and node.level:
            yield from (alias.name for alias in node.names if alias.asname == alias.name)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            yield node.name


def contents(module, prefix):
    """Full name → object; a module in a table of contents (`initial`) stands for what it defines."""
    found = {}
    for name in offered(inspect.getsource(module)):
        thing = getattr(module, name)
        if inspect.ismodule(thing):
            found |= contents(thing, f"{prefix}.{name}")
        else:
            found[f"{prefix}.{name}"] = thing
    return found


def room(name):
    return contents(importlib.import_module(f"malliavin_jax.{name}"), name)


def flat_only():
    """Flat names that no room offers."""
    found = {name: getattr(malliavin_jax, name) for name in offered(inspect.getsource(malliavin_jax))}
    known = [thing for name in ROOMS for thing in room(name).values()]
    return {
        name: thing
        for name, thing in found.items()
        if not inspect.ismodule(thing) and not any(thing is other for other in known)
    }


EVERYTHING = {**{name: room(name) for name in ROOMS}, "flat": flat_only()}


# --- the convention --------------------------------------------------------------------------------------


def sections(thing):
    """The Google sections of a docstring: heading → what is indented under it."""
    text = inspect.cleandoc(thing.__doc__ or "")
    _, *parts = re.split(r"^([A-Z]\w+):\n(?=    )", text, flags=re.M)
    headings, bodies = parts[::2], parts[1::2]
    bodies = [textwrap.dedent(re.split(r"\n(?=\S)", body)[0]) for body in bodies]
    return dict(zip(headings, bodies, strict=True))


def takes_arguments(thing):
    """Whether there is anything to document: parameters of a function, or of a constructor (fields, mostly)."""
    if getattr(thing, "_is_protocol", False):
        return False
    parameters = inspect.signature(thing).parameters.values()
    return any(p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)


def missing(thing):
    """What a docstring lacks of the convention."""
    found, lacking = sections(thing), []
    if not (thing.__doc__ or "").strip():
        return ["docstring"]
    if len(FENCE.findall(found.get("Example", ""))) != 1:
        lacking.append("Example: with one fenced block")
    if takes_arguments(thing) and not {"Args", "Attributes"} & set(found):
        lacking.append("Args: or Attributes:")
    gives = not inspect.isclass(thing) and inspect.signature(thing).return_annotation not in (None, "None")
    if gives and "Returns" not in found:
        lacking.append("Returns:")
    return lacking


@pytest.mark.parametrize("name", EVERYTHING)
def test_docstrings_follow_the_convention(name):
    lacking = {path: missing(thing) for path, thing in EVERYTHING[name].items()}
    assert {path: what for path, what in lacking.items() if what} == {}


def test_a_docstring_out_of_convention_is_seen():
    def bare(x) -> int: ...

    def good(x) -> int:
        """Sum.

        Args:
            x: a number.

        Returns:
            It.

        Example:
            ```python
            1 + 1
            ```
        """

    def without_returns(x) -> int: ...

    without_returns.__doc__ = re.sub(r" +Returns:\n +It\.\n\n", "", good.__doc__)
    assert missing(bare) == ["docstring"]
    assert missing(good) == []
    assert missing(without_returns) == ["Returns:"]


# --- the examples ----------------------------------------------------------------------------------------


@pytest.fixture
def like_a_user(monkeypatch, tmp_path):
    """A user's session is not strict about ranks and types of numbers; its pictures are not shown."""
    matplotlib.use("Agg")
    monkeypatch.chdir(tmp_path)
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"), jax.enable_x64(False):
        yield
    matplotlib.pyplot.close("all")


def test_the_guide_runs(like_a_user):
    guide = {}
    for number, block in enumerate(FENCE.findall((PAGES / "guide.md").read_text())):
        exec(compile(block, f"guide.md, block {number}", "exec"), guide)
    assert abs(float(guide["square"].value[0]) - 0.25) < 4 * float(guide["square"].stderr[0]) + 1e-3
    assert bool(guide["estimate"].trusted)


@pytest.mark.parametrize("name", EVERYTHING)
def test_every_example_runs_by_itself(name, like_a_user):
    """Each in a namespace of its own; in one process, so that what one compiles serves the next."""
    broken = []
    for path, thing in EVERYTHING[name].items():
        for block in FENCE.findall(sections(thing).get("Example", "")):
            try:
                exec(compile(block, f"the docstring of {path}", "exec"), {})
            except Exception:
                broken.append(f"{path}:\n{traceback.format_exc(limit=-2)}")
    assert not broken, "\n".join(broken)


# --- the reference ---------------------------------------------------------------------------------------


def listed(page):
    """The objects on a page of the reference, under the names by which it lists them."""
    for name in re.findall(r"^::: malliavin_jax\.(\S+)$", page.read_text(), re.M):
        thing = malliavin_jax
        for part in name.split("."):
            thing = getattr(thing, part)
        yield name, thing


def test_the_reference_has_a_page_for_every_room():
    pages = {page.stem for page in (PAGES / "reference").glob("*.md")}
    assert pages == {*ROOMS, "index"}
    navigation = (PAGES.parent / "mkdocs.yml").read_text()
    assert re.findall(r"reference/(\w+)\.md", navigation) == ["index", *ROOMS]


@pytest.mark.parametrize("name", ROOMS)
def test_every_public_name_is_on_the_page_of_its_room(name):
    importlib.import_module("malliavin_jax.plots")  # which `import malliavin_jax` leaves out
    here = dict(listed(PAGES / "reference" / f"{name}.md"))
    flat = list(EVERYTHING["flat"].values())
    of_the_room = [thing for thing in here.values() if not any(thing is other for other in flat)]
    assert [path for path, thing in EVERYTHING[name].items() if sum(thing is t for t in of_the_room) != 1] == []
    assert len(of_the_room) == len(EVERYTHING[name])


def test_a_flat_name_that_no_room_offers_is_on_one_page():
    things = [thing for name in ROOMS for _, thing in listed(PAGES / "reference" / f"{name}.md")]
    assert [name for name, thing in EVERYTHING["flat"].items() if sum(thing is t for t in things) != 1] == []
