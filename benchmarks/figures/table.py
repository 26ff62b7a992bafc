"""How does the library compare, in a few lines?

Run `python benchmarks/figures/table.py` to print the README's table from results/accuracy.json (which `accuracy.py`
makes), and `python benchmarks/figures/table.py --write` to put it there.
"""

import argparse
import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
EPISODES, NOISE = 10_000, 2.0
COLUMNS = {
    "this library": "malliavin_jax",
    "many times": "malliavin_jax, 16 times",
    "Nadaraya–Watson, oracle": "Nadaraya–Watson",
    "local linear, oracle": "local linear",
    "local cubic, oracle": "local cubic",
    "the paper, literally": "the paper, literally",
}
BETWEEN = re.compile(r"(<!-- table -->\n).*?(\n<!-- end of table -->)", re.S)


def table() -> str:
    """One line per loss; the best of the methods that see one time is in bold, a dash is what was not measured."""
    rows = json.loads((ROOT / "benchmarks" / "results" / "accuracy.json").read_text())["rows"]
    lines = ["| loss | " + " | ".join(COLUMNS.values()) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    for row in rows:
        if (row["episodes"], row["noise"]) == (EPISODES, NOISE):
            errors = {name: row["rmse"].get(name) for name in COLUMNS}
            best = min(e for name, e in errors.items() if e is not None and name != "many times")
            cells = ["–" if e is None else f"**{e:.3f}**" if e == best else f"{e:.3f}" for e in errors.values()]
            lines.append(f"| {row['case']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the table into README.md")
    if parser.parse_args().write:
        readme = ROOT / "README.md"
        readme.write_text(BETWEEN.sub(lambda match: match[1] + table() + match[2], readme.read_text()))
    print(table())


if __name__ == "__main__":
    main()
