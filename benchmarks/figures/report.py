"""What do all benchmarks say, on one page?

Run `python benchmarks/figures/report.py` to render results/report.html, one self-contained page with tables and plots,
from the JSON files in results/. `--run` runs every benchmark first (hours; with `--fast` they only show that they work,
and write nothing). A benchmark that has not been run is named as such; a file that is not known gets a plain table.
"""

import argparse
import base64
import html
import io
import json
import subprocess
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

BENCHMARKS = Path(__file__).parents[1]
RESULTS = BENCHMARKS / "results"
STYLE = """body{font:15px/1.5 sans-serif;max-width:62em;margin:2em auto;padding:0 1em;color:#222}
table{border-collapse:collapse;margin:.6em 0 1.4em}td,th{padding:.15em .8em;border-bottom:1px solid #ddd}
td{text-align:right;font-variant-numeric:tabular-nums}td:first-child,th{text-align:left}
img{max-width:100%}h2{margin-top:2em}.what,.machine{color:#666;margin:.2em 0}"""

SHOWN = ("case", "noise", "episodes", "times", "sets", "limit", "best rival", "ratios", "rmse", "coverage", "seconds")


def show(value):
    """A cell: four digits, or a large whole number with its thousands apart."""
    if isinstance(value, bool) or value is None:
        return str(value)
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, int):
        return f"{value:,}"
    return html.escape(", ".join(map(show, value)) if isinstance(value, list) else str(value))


def table(rows, header):
    head = "".join(f"<th>{show(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{show(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def flat(tree, above=""):
    """Nested dictionaries as rows of a name and a number; lists of dictionaries by their number in the list."""
    if isinstance(tree, list) and any(isinstance(entry, dict | list) for entry in tree):
        tree = dict(enumerate(tree))
    if not isinstance(tree, dict):
        return [(above, tree)]
    return [row for name, part in tree.items() for row in flat(part, f"{above} › {name}" if above else str(name))]


def records(rows):
    """A list of dictionaries as one table, its nested ones with joined names."""
    flattened = [dict(flat(row)) for row in rows]
    header = list(dict.fromkeys(name for row in flattened for name in row))
    return table([[row.get(name, "") for name in header] for row in flattened], header)


def embedded(png):
    return f'<img alt="plot" src="data:image/png;base64,{base64.b64encode(png).decode()}">'


def picture(draw, **size):
    """What `draw(axes)` draws, inside the page."""
    figure, axes = plt.subplots(figsize=size.get("figsize", (7, 3.2)), layout="constrained")
    draw(axes)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    plt.close(figure)
    return embedded(buffer.getvalue())


def bars(values, label):
    def draw(axes):
        names = list(values)[::-1]
        axes.barh(names, [values[name] for name in names], color="#4477aa")
        axes.set(xscale="log", xlabel=label)

    return picture(draw, figsize=(7, 0.9 + 0.32 * len(values)))


def generic(results):
    """Any file: lists of records as tables of their own, the rest as names and numbers."""
    lists = {name: part for name, part in results.items() if _is_records(part)}
    rest = {name: part for name, part in results.items() if name not in lists and name != "machine"}
    parts = [table(flat(rest), ["", ""])] if rest else []
    return "".join(parts + [f"<h3>{html.escape(name)}</h3>{records(part)}" for name, part in lists.items()])


def _is_records(part):
    return isinstance(part, list) and bool(part) and all(isinstance(row, dict) for row in part)


def observe(results):
    return bars(results["one_dimension"]["best_s"], "seconds") + generic(results)


def fields(results):
    return bars(results["two_dimensions"]["seconds"], "seconds, two dimensions") + generic(results)


def chain(results):
    return bars(results["bank"]["seconds_a_chain_step"], "seconds a chain and step") + generic(results)


def accuracy(results):
    """Bars of the ratios at noise 2, the summary, and one table of the errors; the rest of a row is in the file."""
    parts = []
    for times in sorted({row["times"] for row in results["rows"]}):
        cells = {
            f"{row['case']}, N = {row['episodes']:,}": row["ratios"]["to best rival"]
            for row in results["rows"]
            if (row["noise"], row["times"]) == (2, times) and "to best rival" in row["ratios"]
        }
        if cells:
            parts.append(bars(cells, f"error / that of the best rival in hindsight, noise 2, {times} time(s)"))
    missed = "".join(f"<li>{html.escape(line)}</li>" for line in results["summary"]["misses"])
    shown = [{name: row[name] for name in SHOWN if name in row} for row in results["rows"]]
    return (
        "".join(parts)
        + f"<h3>ratios of errors</h3>{records([*results['summary']['groups'], results['summary']['overall']])}"
        + (f"<h3>cells that miss what is asked</h3><ul>{missed}</ul>" if missed else "")
        + f"<h3>errors</h3>{records(shown)}"
    )


def scaling(results):
    def draw(axes):
        for name, sweep in results["growth"].items():
            sizes = [float(size) for size in sweep["seconds"]]
            axes.loglog(sizes, list(sweep["seconds"].values()), "o-", label=f"{name}: exponent {sweep['exponent']:.2f}")
        axes.set(xlabel="episodes, steps or dimensions", ylabel="seconds")
        axes.legend()

    return picture(draw) + bars(results["splitting"]["seconds"], "seconds of one stream") + generic(results)


def devices(results):
    def draw(axes):
        names = [f"d = {row['dim']}, N = {row['episodes']:,}" for row in results["rows"]]
        for key, label in (("fraction_of_bandwidth", "of bandwidth"), ("fraction_of_rng_rate", "of pure RNG")):
            axes.plot(names, [row[key] for row in results["rows"]], "o-", label=label)
        axes.set(ylabel="fraction")
        axes.tick_params("x", rotation=30)
        axes.legend()

    return picture(draw) + generic(results)


RENDER = {
    "accuracy": accuracy, "observe": observe, "fields": fields, "chain": chain, "scaling": scaling, "gpu": devices
}  # fmt: skip


def section(path):
    """One file of results; where the special rendering does not fit it, the plain one."""
    name = path.stem.split("-")[0]
    heading, about = f"<h2>{html.escape(path.stem)}</h2>", question(BENCHMARKS / f"{name}.py")
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return f"{heading}{about}<p>cannot be read: {html.escape(str(error))}</p>"
    if not isinstance(results, dict):
        results = {"rows": results}
    where = ", ".join(f"{key} {show(value)}" for key, value in results.get("machine", {}).items())
    try:
        body = RENDER.get(name, generic)(results)
    except (KeyError, TypeError, ValueError, AttributeError):  # an older or newer form of the file
        body = generic(results)
    own = path.with_suffix(".png")  # the figure that a benchmark draws itself
    figure = embedded(own.read_bytes()) if own.exists() else ""
    return f'{heading}{about}<p class="machine">{where}</p>{figure}{body}'


def question(script):
    """The first line of a benchmark's docstring: the question it answers."""
    if not script.exists():
        return ""
    return f'<p class="what">{html.escape(script.read_text(encoding="utf-8").lstrip(chr(34)).splitlines()[0])}</p>'


def page(directory):
    files = sorted(directory.glob("*.json"))
    have = {path.stem.split("-")[0] for path in files}
    missing = [name for name in benchmarks() if name not in have]
    note = f"<p>Not run yet: {', '.join(missing)}.</p>" if missing else ""
    body = "".join(map(section, files))
    return f"<!doctype html><meta charset='utf-8'><title>Benchmarks</title><style>{STYLE}</style>" + (
        f"<h1>Benchmarks</h1>{note}{body}"
    )


def benchmarks():
    return sorted(path.stem for path in BENCHMARKS.glob("*.py") if path.stem != "common")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", action="store_true", help="run every benchmark first")
    parser.add_argument("--fast", action="store_true", help="with --run: the fast form of each")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the JSON files are, and the page goes")
    arguments = parser.parse_args()
    failed = []
    for name in benchmarks() if arguments.run else []:
        print(f"--- {name}", flush=True)
        command = [sys.executable, str(BENCHMARKS / f"{name}.py"), *(["--fast"] if arguments.fast else [])]
        if subprocess.run(command).returncode:
            failed.append(name)
    target = arguments.results / "report.html"
    target.write_text(page(arguments.results), encoding="utf-8")
    print("written to", target.name)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
