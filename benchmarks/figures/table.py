"""How does the library compare, in a few lines?

Run `python benchmarks/figures/table.py` to print the README's table from results/accuracy.json (which `accuracy.py`
makes), and `python benchmarks/figures/table.py --write` to put it there; `--times 16` for many conditioning times.
"""

import argparse
import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
EPISODES, NOISE = 10_000, 2.0
HEADER = ("loss", "malliavin_jax", "best rival", "its error", "oracle kernel", "version 0.1.0", "the paper, literally")
KERNELS = tuple(f"{name}, oracle" for name in ("Nadaraya–Watson", "local linear", "local quadratic", "local cubic"))
BETWEEN = re.compile(r"(<!-- table -->\n).*?(\n<!-- end of table -->)", re.S)


def line(row) -> str:
    """One loss; the least error is in bold, a dash is what was not measured, a star what saw fewer data sets."""
    rmse, rival = row["rmse"], row.get("best rival")
    errors = {
        "ours": rmse["this library"],
        "rival": rmse.get(rival),
        "kernel": min((rmse[name] for name in KERNELS if name in rmse), default=None),
        "old": rmse.get("version 0.1.0"),
        "paper": rmse.get("the paper, literally"),
    }
    least = min(error for error in errors.values() if error is not None)
    shown = {
        name: "–" if error is None else f"**{error:.2g}**" if error == least else f"{error:.2g}"
        for name, error in errors.items()
    }
    if rival is not None and len(row["errors"][rival]) < row["sets"]:
        shown["rival"] += " *"
    ours, theirs, *others = shown.values()
    return "| " + " | ".join([row["case"], ours, rival or "–", theirs, *others]) + " |"


def table(rows=None, times: int = 1) -> str:
    """One line per loss, from the rows given or those of results/accuracy.json."""
    if rows is None:
        rows = json.loads((ROOT / "benchmarks" / "results" / "accuracy.json").read_text())["rows"]
    mine = [row for row in rows if (row["episodes"], row["noise"], row.get("times")) == (EPISODES, NOISE, times)]
    return "\n".join(["| " + " | ".join(HEADER) + " |", "|---" * len(HEADER) + "|", *map(line, mine)])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the table into README.md")
    parser.add_argument("--times", type=int, default=1, help="conditioning times")
    given = parser.parse_args()
    made = table(times=given.times)
    if given.write:
        readme = ROOT / "README.md"
        readme.write_text(BETWEEN.sub(lambda match: match[1] + made + match[2], readme.read_text()))
    print(made)


if __name__ == "__main__":
    main()
