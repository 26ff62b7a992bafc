"""How does the library compare, in a few lines?

Run `python benchmarks/figures/table.py` to print the README's table from results/accuracy.json (which `accuracy.py`
makes) and the guide's from results/rungs.json (which `rungs.py` makes), and with `--write` to put them there;
`--times 16` for many conditioning times.
"""

import argparse
import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
EPISODES, NOISE = 10_000, 2.0
HEADER = ("loss", "malliavin_jax", "best rival", "its error", "oracle kernel", "version 0.1.0", "the paper, literally")
KERNELS = tuple(f"{name}, oracle" for name in ("Nadaraya–Watson", "local linear", "local quadratic", "local cubic"))
RUNGS = ("hessians", "diagonals", "gradients", "positions")
PLACES = {"table": ROOT / "README.md", "rungs": ROOT / "docs" / "pages" / "guide.md"}  # marks, and the pages with them


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


def rungs(rows=None) -> str:
    """One line per loss: the error on each rung, and behind it that of the best rival on the same rung."""
    if rows is None:
        rows = json.loads((ROOT / "benchmarks" / "results" / "rungs.json").read_text())["rows"]
    found = {(row["case"], row["rung"]): row for row in rows}

    def cell(case: str, rung: str) -> str:
        row = found.get((case, rung))
        return "–" if row is None else f"{row['rmse']['this library']:.2g} ({row['rmse'][row['best rival']]:.2g})"

    lines = [[case, *(cell(case, rung) for rung in RUNGS)] for case in dict.fromkeys(row["case"] for row in rows)]
    rows_of_text = ("| " + " | ".join(line) + " |" for line in [["loss", *RUNGS], ["---"] * 5, *lines])
    return "\n" + "\n".join(rows_of_text) + "\n"  # a table after a comment wants an empty line


def put(mark: str, text: str) -> None:
    """The text in place of what stands between the marks of a page."""
    page = PLACES[mark]
    between = re.compile(rf"(<!-- {mark} -->\n).*?(<!-- end of {mark} -->)", re.S)
    page.write_text(between.sub(lambda match: f"{match[1]}{text}\n{match[2]}", page.read_text()))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the table into README.md")
    parser.add_argument("--times", type=int, default=1, help="conditioning times")
    given = parser.parse_args()
    for mark, made in (("table", table(times=given.times)), ("rungs", rungs())):
        if given.write:
            put(mark, made)
        print(made, end="\n\n")


if __name__ == "__main__":
    main()
