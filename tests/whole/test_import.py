"""Importing the package is cheap: what only some functions need is imported by them."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
LATE = ("matplotlib", "tqdm", "arviz", "scipy.stats", "sklearn", "blackjax", "diffrax")


def imported_after(line):
    code = f"import json, sys; {line}; print(json.dumps([name for name in {LATE!r} if name in sys.modules]))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return json.loads(run.stdout)


def test_the_package_imports_no_pictures():
    assert imported_after("import malliavin_jax") == []


def test_the_pictures_do():
    assert "matplotlib" in imported_after("from malliavin_jax import plots")
