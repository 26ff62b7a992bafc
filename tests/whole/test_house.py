"""The rules of the house, read off the source: rooms in one order, no autodiff, no pickle, no settings, short files."""

import ast
from pathlib import Path

import pytest

import malliavin_jax

PACKAGE = Path(malliavin_jax.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))

# The way through the house, top to bottom. A file imports from its own room and from rooms above it.
ROOMS = (
    "_base", "fitting", "potentials", "learner", "weights", "samples", "checking", "estimate", "kernel", "models",
    "fields", "chain", "recovery", "adaptive", "recording", "streaming", "diagnostics", "distributed", "io", "plots",
    "wiener", "cli",
)  # fmt: skip
RANK = {room: rank for rank, room in enumerate(ROOMS)}
LAST = {"diagnostics", "distributed", "io", "plots", "wiener", "cli"}  # nothing imports these, except that cli may
MOST_FILES, MOST_LINES, MOST_LINES_OF_A_FUNCTION = 8, 300, 60

# Observe, don't differentiate: only the room whose subject is the derivative on Wiener space may.
AUTODIFF_ALLOWED = {"wiener"}
AUTODIFF = {
    "grad", "value_and_grad", "hessian", "jacobian", "jacfwd", "jacrev", "jvp", "vjp", "linearize",
    "linear_transpose", "fwd_and_bwd", "value_and_grad_from_state", "filter_grad", "filter_value_and_grad",
    "filter_jvp", "filter_vjp", "filter_jacfwd", "filter_jacrev", "filter_hessian",
}  # fmt: skip
AUTODIFF_MODULES = {"jax.experimental.jet", "jax.interpreters.ad", "jax._src.interpreters.ad"}

PRODUCTS = {"matmul", "dot", "einsum", "tensordot", "vdot", "inner", "vecdot", "matvec", "vecmat", "dot_general"}
PICKLERS = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "shelve"}


class Names:
    """What each name of a file stands for: `g` for jax.grad, after `from jax import grad as g`."""

    def __init__(self, source: str, room: str = ""):
        self.tree = ast.parse(source)
        self.meaning: dict[str, str] = {}
        self.imported: list[str] = []  # dotted names; a leading dot marks our own package
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    self.imported.append(own(alias.name))
                    first = alias.name.split(".")[0]
                    self.meaning[alias.asname or first] = own(alias.name if alias.asname else first)
            elif isinstance(node, ast.ImportFrom):
                origin = own(node.module or "") if node.level == 0 else relative(node.level, node.module, room)
                for alias in node.names:
                    full = f"{origin.rstrip('.')}.{alias.name}"
                    self.imported.append(full)
                    self.meaning[alias.asname or alias.name] = full
        # `ad = jax` and `g = jax.grad` are aliases too; twice, so that an alias of an alias is seen
        for node in [n for n in ast.walk(self.tree) if isinstance(n, ast.Assign)] * 2:
            meaning = self.resolve(node.value)
            for target in node.targets:
                if meaning is not None and isinstance(target, ast.Name):
                    self.meaning[target.id] = meaning

    def resolve(self, node: ast.AST) -> str | None:
        """The dotted name that `a.b.c` or `getattr(a.b, "c")` stands for, if `a` was imported."""
        if isinstance(node, ast.Name):
            return self.meaning.get(node.id)
        if isinstance(node, ast.Attribute):
            base = self.resolve(node.value)
            return None if base is None else f"{base}.{node.attr}"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr":
            base, name = self.resolve(node.args[0]), node.args[1]
            return f"{base}.{name.value}" if base is not None and isinstance(name, ast.Constant) else None
        return None

    def used(self) -> set[str]:
        """Every dotted name of another package that is imported or mentioned."""
        mentioned = {self.resolve(node) for node in ast.walk(self.tree)}
        return {name for name in {*mentioned, *self.imported} if name and not name.startswith(".")}


def relative(level: int, module: str | None, room: str) -> str:
    """`.base` in a room, or `..room.base` from another, as `.room.base`, counted from the package."""
    inside = [room] if room and level == 1 else []
    return "." + ".".join([*inside, *filter(None, [module])])


def own(name: str) -> str:
    """Our own modules, imported by their full name, written as relative ones."""
    head, _, tail = name.partition(".")
    return f".{tail}" if head == "malliavin_jax" else name


def autodiff(source: str) -> set[str]:
    """Derivatives taken by machine: `jax.hessian`, not the `hessian` method of a potential."""
    return {
        name
        for name in Names(source).used()
        if name.split(".")[-1] in {*AUTODIFF, "*"} or any(name.startswith(m) for m in AUTODIFF_MODULES)
    }


def rooms_imported(source: str, room: str = "") -> set[str]:
    """The rooms that a file of `room` imports from; "" stands for the package as a whole (its flat names)."""
    found = set()
    is_file = (PACKAGE / f"{room}.py").is_file()  # a room of one file, directly in the package
    for name in Names(source, "" if is_file else room).imported:
        if name.startswith("."):
            first = name.lstrip(".").split(".")[0]
            found.add(first if first in RANK else "")
    return found


def misplaced(source: str, room: str) -> set[str]:
    """What a file of `room` imports from below it, or from the package as a whole."""
    return {
        target
        for target in rooms_imported(source, room) - {room}
        if target == "" or RANK[target] > RANK[room] or (target in LAST and room != "cli")
    }


def exported(room: Path) -> set[str]:
    """The names in the table of contents of a room."""
    body = ast.parse((room / "__init__.py").read_text(encoding="utf-8")).body
    imports = [node for node in body if isinstance(node, ast.ImportFrom) and node.module is not None]
    return {alias.asname or alias.name for node in imports for alias in node.names}


def lines_of(function: ast.FunctionDef) -> int:
    """Lines of a function without its docstring."""
    total = function.end_lineno - function.lineno + 1
    if ast.get_docstring(function) is not None:
        total -= function.body[0].end_lineno - function.body[0].lineno + 1
    return total


def pickling(source: str) -> set[str]:
    """Pickle by any of its names, and NumPy asked to allow it."""
    names = Names(source)
    found = {name for name in names.used() if name.split(".")[0] in PICKLERS}
    for node in ast.walk(names.tree):
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            refused = isinstance(node.value, ast.Constant) and node.value.value is False
            found |= set() if refused else {"allow_pickle"}
    return found


def settings(source: str) -> set[str]:
    """Changes of JAX's global settings: `jax.config.update`, or an assignment to an attribute of it."""
    names = Names(source)
    found = {name for name in names.used() if name.startswith("jax.") and name.endswith("config.update")}
    for node in ast.walk(names.tree):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets:
            name = names.resolve(target) if isinstance(target, ast.Attribute) else None
            if name is not None and name.startswith("jax.config."):
                found.add(name)
    return found


def unmarked_products(source: str) -> set[str]:
    """Products of arrays by name of a JAX function, without a precision: accelerators would round what they multiply.

    Those written as `@` cannot be told from products of NumPy arrays here; `test_export` finds them."""
    names = Names(source)
    calls = [node for node in ast.walk(names.tree) if isinstance(node, ast.Call)]
    unmarked = {names.resolve(call.func) for call in calls if "precision" not in {word.arg for word in call.keywords}}
    return {name for name in unmarked if name and name.startswith("jax.") and name.split(".")[-1] in PRODUCTS}


def name_of(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_the_package_does_not_differentiate(path):
    if room_of(path) not in AUTODIFF_ALLOWED:
        assert autodiff(path.read_text(encoding="utf-8")) == set()


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_nothing_is_pickled(path):
    assert pickling(path.read_text(encoding="utf-8")) == set()


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_no_global_settings(path):
    # One exception: the cache of compiled programs, which the command line sets up in a process that is its own.
    allowed = {"jax.config.update"} if name_of(path) == "cli/output.py" else set()
    assert settings(path.read_text(encoding="utf-8")) == allowed


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_products_are_taken_in_all_bits(path):
    assert unmarked_products(path.read_text(encoding="utf-8")) == set()


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_every_module_says_what_it_is(path):
    assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))


INSIDE = [path for path in FILES if path != PACKAGE / "__init__.py"]


@pytest.mark.parametrize("path", INSIDE, ids=name_of)
def test_one_way_through(path):
    room = room_of(path)
    assert room in RANK, "give the room its place in ROOMS"
    source = path.read_text(encoding="utf-8")
    if name_of(path) == "cli/entry.py":
        source = source.replace("from .. import __version__", "")  # the one thing that only the package knows
    assert misplaced(source, room) == set()


@pytest.mark.parametrize("room", [room for room in ROOMS if (PACKAGE / room).is_dir()])
def test_a_room_has_a_table_of_contents_and_few_files(room):
    files = {path.stem for path in (PACKAGE / room).glob("*.py")} - {"__init__"}
    assert len(files) <= MOST_FILES
    assert not [path for path in (PACKAGE / room).iterdir() if path.is_dir() and path.name != "__pycache__"]
    body = ast.parse((PACKAGE / room / "__init__.py").read_text(encoding="utf-8")).body
    assert all(isinstance(node, ast.ImportFrom | ast.Import) for node in body[1:]), "a table of contents only"
    assert exported(PACKAGE / room) & files == set(), "a name that hides the file it comes from"


def test_no_flat_name_hides_a_room():
    flat = {
        alias.asname
        for node in ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8")).body
        if isinstance(node, ast.ImportFrom) and node.module is not None
        for alias in node.names
    }
    assert flat & set(RANK) == set()


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_files_and_functions_are_short(path):
    source = path.read_text(encoding="utf-8")
    assert len(source.splitlines()) <= MOST_LINES
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    assert [f.name for f in functions if lines_of(f) > MOST_LINES_OF_A_FUNCTION] == []


def test_rooms_of_the_tests_follow_the_house():
    here = Path(__file__).parents[1]
    rooms = {path.name for path in here.iterdir() if path.is_dir() and list(path.glob("test_*.py"))}
    assert rooms <= {*RANK, "whole"}
    assert {room for room in ROOMS if (PACKAGE / room).is_dir()} <= rooms


# ---------------------------------------------------------------- the rules can be broken


@pytest.mark.parametrize(
    "source",
    [
        "import jax\njax.grad(f)",
        "import jax as j\ndef f():\n    return j.value_and_grad(f)",
        "from jax import hessian",
        "from jax import jacfwd as forward",
        "from jax import *",
        "import equinox as eqx\neqx.filter_grad(f)",
        "from equinox import filter_vjp as v",
        "import jax\nad = jax\nother = ad\nother.jvp(f)",
        "import jax\ngetattr(jax, 'linearize')(f)",
        "def f():\n    import jax.numpy\n    return jax.jacrev",
        "from jax.experimental import jet",
        "import jax\n@jax.grad\ndef f(x): return x",
    ],
)
def test_autodiff_is_seen(source):
    assert autodiff(source)


@pytest.mark.parametrize(
    "source",
    [
        "potential.hessian(x)\nself.gradient(x)\nfield.grad",
        "from .potentials import Quartic\nQuartic().hessian(x)\nQuartic.hessian",
        "import jax\n@jax.custom_jvp\ndef f(x): return x\nf.defjvp(g)",
        "import jax.numpy as jnp\njnp.gradient(x)",
        "grad = 3\nhessian = grad",
    ],
)
def test_innocent_names_pass(source):
    assert autodiff(source) == set()


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("potentials", "from ..learner import simulate"),
        ("learner", "from ..samples.samples import Samples"),
        ("estimate", "from malliavin_jax.fields import TrueField"),
        ("estimate", "import malliavin_jax.recovery as r"),
        ("samples", "from .. import chain"),
        ("weights", "def f():\n    from ..estimate import conditional"),
        ("kernel", "from ..fields.malliavin import MalliavinField"),
        ("recovery", "from ..diagnostics import ess"),
        ("plots", "from ..io import load"),
        ("diagnostics", "from ..cli import main"),
        ("learner", "from malliavin_jax import Samples"),
        ("learner", "from .. import Samples"),
        ("learner", "import malliavin_jax as mj"),
    ],
)
def test_a_wrong_way_is_seen(room, source):
    assert misplaced(source, room)


def test_right_ways_pass():
    for room, rank in RANK.items():
        above = [other for other in ROOMS[:rank] if other not in LAST or room == "cli"]
        up = "." if (PACKAGE / f"{room}.py").is_file() else ".."
        source = "\n".join(f"from {up}{other}.file import x" for other in above)
        inside = "" if up == "." else "\nfrom .file import y\nfrom . import z"
        assert misplaced(source + inside, room) == set()
    assert len(RANK) == len(ROOMS)


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import dumps as d",
        "import cloudpickle as c",
        "import numpy as np\nnp.load(f, allow_pickle=True)",
        "np.load(f, allow_pickle=flag)",
    ],
)
def test_pickle_is_seen(source):
    assert pickling(source)
    assert not pickling("import numpy as np\nnp.load(f, allow_pickle=False)")


@pytest.mark.parametrize(
    "source",
    [
        "import jax\njax.config.update('jax_enable_x64', True)",
        "from jax import config\nconfig.update('jax_enable_x64', True)",
        "from jax.config import config as c\nc.update('a', 1)",
        "import jax\njax.config.jax_enable_x64 = True",
        "import jax\nupdate = jax.config.update",
    ],
)
def test_settings_are_seen(source):
    assert settings(source)
    assert not settings("import jax\nx = jax.config.jax_enable_x64\nstate.config.update(a=1)")


def test_unmarked_products_are_seen():
    numpy, jnp = "import numpy as np\n", "import jax.numpy as jnp\n"
    assert unmarked_products(jnp + "jnp.einsum('ij,j', a, b)")
    assert unmarked_products("from jax import lax\nlax.dot_general(a, b, n)\nlax.dot_general(a, b, n, precision=p)")
    assert not unmarked_products(jnp + "jnp.dot(a, b, precision=HIGHEST)")
    assert not unmarked_products(numpy + "np.einsum('ij,j', a, b)")
