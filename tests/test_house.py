"""The rules of the house, read off the source: no autodiff, one way through, no pickle, no settings."""

import ast
import itertools
from pathlib import Path

import pytest

import malliavin_jax

PACKAGE = Path(malliavin_jax.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))

# Observe, don't differentiate: only the module whose subject is the derivative on Wiener space may, with its rooms.
AUTODIFF_ALLOWED = {"wiener.py", "_skorohod.py", "_greeks.py"}
AUTODIFF = {
    "grad", "value_and_grad", "hessian", "jacobian", "jacfwd", "jacrev", "jvp", "vjp", "linearize",
    "linear_transpose", "fwd_and_bwd", "value_and_grad_from_state", "filter_grad", "filter_value_and_grad",
    "filter_jvp", "filter_vjp", "filter_jacfwd", "filter_jacrev", "filter_hessian",
}  # fmt: skip
AUTODIFF_MODULES = {"jax.experimental.jet", "jax.interpreters.ad", "jax._src.interpreters.ad"}

# A module imports only modules of an earlier row; those of one row stand side by side.
ORDER = (
    ("potentials",), ("forward",), ("weights",), ("observe",), ("recording",), ("localize", "consistency"),
    ("conditional",), ("fields", "kernel"), ("langevin", "accumulate"), ("recovery",),
    ("diagnostics", "plots", "io", "distributed", "wiener"),
    ("cli",),
)  # fmt: skip
RANK = {name: rank for rank, row in enumerate(ORDER) for name in row}
LAST = {*ORDER[-2], *ORDER[-1]}  # nothing imports these, except that cli may

PICKLERS = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "shelve"}


class Names:
    """What each name of a file stands for: `g` for jax.grad, after `from jax import grad as g`."""

    def __init__(self, source: str):
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
                origin = own(node.module or "") if node.level == 0 else "." + (node.module or "")
                for alias in node.names:
                    full = f"{origin}.{alias.name}" if origin != "." else f".{alias.name}"
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


def own_imports(source: str) -> set[str]:
    """Our modules that a file imports; "" stands for the package as a whole (its flat names)."""
    found = set()
    for name in Names(source).imported:
        if name.startswith("."):
            module = name.lstrip(".").split(".")[0]
            found.add(module if module in RANK or module.startswith("_") else "")
    return found


def misplaced(sources: dict[str, str]) -> set[tuple[str, str]]:
    """Pairs (module, what it imports from its right or from beside it), through underscore modules too."""
    direct = {module: own_imports(source) for module, source in sources.items()}

    def reach(module: str, seen: frozenset[str] = frozenset()) -> set[str]:
        found = set(direct.get(module, ()))
        for private in {m for m in found if m.startswith("_")} - seen:
            found |= reach(private, seen | {module, private})
        return {m for m in found if not m.startswith("_")}

    wrong = set()
    for module in (m for m in sources if not m.startswith("_")):
        for target in reach(module) - {module}:
            if target == "" or RANK[target] >= RANK[module] or (target in LAST and module != "cli"):
                wrong.add((module, target))
    return wrong


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


def name_of(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_the_package_does_not_differentiate(path):
    if name_of(path) not in AUTODIFF_ALLOWED:
        assert autodiff(path.read_text(encoding="utf-8")) == set()


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_nothing_is_pickled(path):
    assert pickling(path.read_text(encoding="utf-8")) == set()


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_no_global_settings(path):
    assert settings(path.read_text(encoding="utf-8")) == set()


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_every_module_says_what_it_is(path):
    assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))


def test_one_way_through():
    sources = {path.stem: path.read_text(encoding="utf-8") for path in FILES if path.parent == PACKAGE}
    unknown = {module for module in sources if not module.startswith("_")} - set(RANK)
    assert not unknown, "give the module its place in ORDER"
    assert all(path.parent == PACKAGE for path in FILES), "the house is flat"
    assert misplaced(sources) == set()


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
    ("module", "source"),
    [
        ("potentials", "from .forward import simulate"),
        ("forward", "from .observe import Samples"),
        ("conditional", "from malliavin_jax.fields import TrueField"),
        ("localize", "import malliavin_jax.recovery as r"),
        ("observe", "from . import langevin"),
        ("weights", "def f():\n    from . import conditional"),
        ("kernel", "from .fields import MalliavinField"),
        ("fields", "from .kernel import NadarayaWatson"),
        ("recovery", "from .diagnostics import ess"),
        ("plots", "from .io import load"),
        ("diagnostics", "from .cli import main"),
        ("forward", "from malliavin_jax import Samples"),
        ("forward", "from . import Samples"),
        ("forward", "import malliavin_jax as mj"),
        ("forward", "from ._back import door"),
    ],
)
def test_a_wrong_way_is_seen(module, source):
    back = {"_back": "from ._door import x", "_door": "from .langevin import y\nfrom ._back import z"}
    assert misplaced({module: source, **back})


def test_right_ways_pass():
    private = {
        "_side": "from .observe import Samples",
        "_misc": "import numpy",
        "_fields": "from .fields import F",
    }
    sources = {
        module: "\n".join(f"from .{left} import x" for row in ORDER[:rank] for left in row if left not in LAST)
        for module, rank in RANK.items()
    }
    for module in ("localize", "fields", "recovery"):
        sources[module] += "\nfrom ._side import a\nfrom ._misc import b"
    sources["fields"] += "\nfrom ._fields import G"
    sources["cli"] += "\nfrom . import " + ", ".join(ORDER[-2])
    assert misplaced({**sources, **private}) == set()
    assert len(set(itertools.chain(*ORDER))) == len(list(itertools.chain(*ORDER)))


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
