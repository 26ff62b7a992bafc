"""How good is the counterfactual gradient beside everything else that one could do with the same observations?

Run `python benchmarks/accuracy.py` (two hours on two free cores, half of it for networks; `--fast` for a glance).
Every method sees the same samples, at one conditioning time and at 16; the error is the root mean square over places α
and over several data sets. Rivals have the setting (bandwidth, degree, mesh, ridge, …) that is best in *hindsight*, one
for all data sets of a cell; this library has nothing to be told. Seconds are for all settings of a method together, the
fastest of the data sets. Networks, and beyond one dimension splines that choose their mesh, see the first data set only
and are compared on it; networks, and such splines in three dimensions, are measured with noise 0.5 and 2 and up to
10 000 episodes (elsewhere if asked for by `--rivals`). Kernels see at most 160 000 points.

It prints the table with a summary, and writes results/accuracy.json and results/accuracy.png. Rows are kept as they
come: `--only` and its like replace some of them, `--ours` measures this library alone, `--rivals spline network` these
rivals alone, and what is not measured keeps its numbers of the last run, which come from the same data.
"""

import functools
import json
import time
import zlib

import jax
import numpy as np
from common import DEGREES, RESULTS, evaluate, exponent, kernel_field, machine, oracle, parser, save
from figures.errors import draw
from rivals import kernels, models, network, ours, verdict
from rivals.losses import MANY, STEP_SIZE, cases

import malliavin_jax as mj

NOISES = (0.0, 0.5, 2.0, 10.0)
SIZES = (1_000, 10_000, 100_000)  # episodes
SETS = {1: (6, 4, 2), 2: (4, 2, 1), 3: (3, 2, 1)}  # data sets of each size, by dimension
SLOW = {"noise": (0.5, 2.0), "episodes": (1_000, 10_000)}  # where slow rivals are measured unless asked for
ORDER = [(name, size, noise, times) for name in cases() for size in SIZES for noise in NOISES for times in (1, MANY)]


def contestants(dim, episodes, times):
    """Rivals that there are for a cell, name ↦ function of a `View`."""
    found = {
        "polynomial, oracle degree": models.polynomial,
        "spline, oracle mesh": models.spline,
        "spline, automatic": models.automatic_spline,
    }
    if episodes * times <= kernels.MOST_POINTS:
        found["kernel ridge, oracle"] = models.kernel_ridge
        for help_ in kernels.HELPS:
            for degree in DEGREES if times == 1 and (not help_ or episodes <= 10_000) else (0, 1):
                found[f"{DEGREES[degree]}{help_}, oracle"] = functools.partial(
                    kernels.kernel, degree=degree, help_=help_
                )
    if dim == 1 and times == 1:
        found["without control, oracle length"] = ours.oracle_length
        found["the paper, literally"] = ours.paper
    found["network, oracle"] = network.network
    return found


def on_first_set_only(name, dim):
    return name == "network, oracle" or name.endswith("cross-validated") or (name == "spline, automatic" and dim > 1)


def is_slow(name, dim):
    """Whether a rival is measured in the cells of `SLOW` only."""
    return name == "network, oracle" or (name == "spline, automatic" and dim == 3)


def cross_validated(view, degree):
    values = evaluate(kernel_field(view.samples, degree, "auto"), view.alphas).value
    return models.Found(np.asarray(values)[None], ["cross-validated"])


class Cell:
    """What the methods did on the data sets of one cell."""

    def __init__(self, truth):
        self.truth = np.asarray(truth)
        self.squares, self.settings, self.seconds, self.intervals = {}, {}, {}, {}

    def run(self, name, method, view):
        """Squared errors, averaged over α, for each setting; and the time that it took."""
        began = time.perf_counter()
        before = view.shared_seconds
        found = method(view)
        values = np.asarray(found.values)
        took = time.perf_counter() - began
        if "with control" in name or "with both" in name:
            took += before  # the control was made for another kernel, and is part of this one
        self.squares.setdefault(name, []).append(np.mean((values - self.truth) ** 2, (-2, -1)))
        self.settings[name] = found.settings
        self.seconds.setdefault(name, []).append(took)

    def run_ours(self, form, view):
        def method(view):
            nonlocal result
            result = ours.estimates(view, form)
            return models.Found(np.asarray(result.value)[None], ["automatic"])

        result = None
        self.run(form, method, view)
        stderr, miss = np.asarray(result.stderr), np.abs(np.asarray(result.value) - self.truth)
        trusted = np.isfinite(stderr)
        self.intervals.setdefault(form, []).append((miss[trusted] < 1.96 * stderr[trusted], stderr[trusted]))

    def row(self):
        """The entries of a row, each by method."""
        best = {name: oracle(squares)[1] for name, squares in self.squares.items()}
        errors = {
            name: np.sqrt([one[best[name]] for one in squares]).tolist() for name, squares in self.squares.items()
        }
        rmse = {name: verdict.pooled(mine) for name, mine in errors.items()}
        hits = {form: np.concatenate([hit for hit, _ in both]) for form, both in self.intervals.items()}
        stderr = {form: np.concatenate([se for _, se in both]) for form, both in self.intervals.items()}
        return {
            "rmse": rmse,
            "errors": errors,
            "tuning": {name: self.settings[name][number] for name, number in best.items()},
            "seconds": {name: min(took) for name, took in self.seconds.items()},
            "coverage": {form: float(np.mean(hit)) for form, hit in hits.items() if hit.size},
            "stderr to rmse": {form: float(np.mean(se)) / rmse[form] for form, se in stderr.items() if se.size},
        }


def one_row(place, known, given):
    """The row of the table at `place`; what is not measured is as `known`."""
    name, episodes, noise, times = place
    case = cases()[name]
    learner = mj.ForwardLearner(case.loss, case.initial, STEP_SIZE, gradient_noise=noise)
    usual = 1 if times > 1 and episodes >= 100_000 else SETS[case.dim][SIZES.index(episodes)]
    if known and (given.ours or given.rivals):
        usual = known["sets"]  # what is kept was measured on as many
    sets = given.sets or usual
    there = contestants(case.dim, episodes, times)
    rivals = {rival: method for rival, method in there.items() if wanted(rival, place, case.dim, given)}
    if given.cross_validate and times == 1:
        rivals |= {f"{n}, cross-validated": functools.partial(cross_validated, degree=k) for k, n in DEGREES.items()}
    cell = Cell(jax.vmap(case.loss.gradient)(case.alphas))
    # The same episodes at one time and at many; a number that does not depend on what other cases there are.
    seed = zlib.crc32(f"{name} {episodes} {noise}".encode())
    for k in range(sets):
        key = jax.random.fold_in(jax.random.key(seed), k)
        look = functools.partial(mj.observe, key, learner, num_episodes=episodes, times=case.times(times))
        full = functools.partial(ours.field, form="full correction")
        view = models.View(look(), case.alphas, noise, look=look, network_seconds=given.network, full=full)
        for form in given.forms if given.ours or not given.rivals else ():
            cell.run_ours(form, view)
        for rival, method in rivals.items():
            if k == 0 or not on_first_set_only(rival, case.dim):
                cell.run(rival, method, view)
    if known and known["sets"] != sets:
        print(f"  (numbers of the last run, of {known['sets']} data sets, are not kept beside those of {sets})")
        known = {}
    row = {"case": name, "noise": noise, "episodes": episodes, "times": times, "sets": sets}
    row |= {part: {**known.get(part, {}), **new} for part, new in cell.row().items()}
    row["limit"] = noise / np.sqrt(episodes * times)
    if "this library" in row["errors"]:
        row["best rival"], row["ratios"] = verdict.judge(row)
        return row
    raise SystemExit("there are no numbers of this library to compare with: leave --rivals out, or add --ours")


def wanted(name, place, dim, given):
    """Whether a rival is measured in this run."""
    _, episodes, noise, _ = place
    usual = noise in SLOW["noise"] and episodes in SLOW["episodes"] and not given.fast
    if is_slow(name, dim) and not (usual or given.rivals):
        return False
    if name == "network, oracle" and given.network <= 0:
        return False
    if given.rivals:
        return any(part in name for part in given.rivals)
    return not given.ours


def show(row):
    order = sorted(row["rmse"].items(), key=lambda entry: entry[1])
    print("  " + "; ".join(f"{method} {error:.4g} ({row['seconds'][method]:.1f} s)" for method, error in order))
    print(f"  limit {row['limit']:.4g}; best rival {row['best rival']}", end="; ")
    print("; ".join(f"{what} {ratio:.2f}" for what, ratio in row["ratios"].items()), end="; ")
    print(f"coverage {row['coverage'].get('this library', np.nan):.2f}", end="; ")
    print(f"stderr/RMSE {row['stderr to rmse'].get('this library', np.nan):.2f}", flush=True)


def slopes(rows):
    """The slope of log RMSE in log N in one dimension, for each noise that hides the roughness, and their mean."""
    found = {}
    for name in dict.fromkeys(row["case"] for row in rows if row["case"].endswith("d = 1")):
        for noise in (n for n in NOISES if n > 0):
            mine = [row for row in rows if (row["case"], row["noise"], row["times"]) == (name, noise, 1)]
            if len(mine) == len(SIZES):
                sizes, errors = zip(*[(row["episodes"], row["rmse"]["this library"]) for row in mine], strict=True)
                found[f"{name}, noise {noise:g}"] = exponent(sizes, errors)
    if found:
        found["mean"] = float(np.mean(list(found.values())))
    return found


def asked():
    arguments = parser(__doc__, "one small cell a loss, without networks")
    arguments.add_argument("--only", default="", help="only cases whose name contains this")
    arguments.add_argument("--noise", type=float, nargs="*", default=NOISES, choices=NOISES)
    arguments.add_argument("--episodes", type=int, nargs="*", default=SIZES, choices=SIZES)
    arguments.add_argument("--times", type=int, nargs="*", default=(1, MANY), choices=(1, MANY))
    arguments.add_argument("--sets", type=int, default=0, help="data sets a cell; 0: as many as the size allows")
    arguments.add_argument("--ours", action="store_true", help="measure this library, and of the rivals only --rivals")
    arguments.add_argument("--forms", nargs="+", default=tuple(ours.FORMS), choices=ours.FORMS, help="of this library")
    arguments.add_argument("--rivals", nargs="+", default=(), help="of the rivals, only those whose name contains one")
    arguments.add_argument("--network", type=float, default=60.0, help="seconds for the networks of a row; 0: none")
    arguments.add_argument("--cross-validate", action="store_true", help="kernels with their own bandwidth as well")
    given = arguments.parse_args()
    if given.fast:
        given.episodes, given.noise, given.sets, given.network = (1000,), (2.0,), 2, 0.0
    return given


def main():
    given = asked()
    began = time.perf_counter()
    path = RESULTS / "accuracy.json"
    earlier = json.loads(path.read_text())["rows"] if path.exists() else []
    # Rows of version 0.1.0 do not say how many times they are for: they are of another form, and not kept.
    rows = {tuple(row[k] for k in ("case", "episodes", "noise", "times")): row for row in earlier if "times" in row}
    for place in ORDER:
        name, episodes, noise, times = place
        if given.only not in name or episodes not in given.episodes or noise not in given.noise:
            continue
        if times not in given.times:
            continue
        print(f"\n{name}, noise {noise}, N = {episodes}, {times} times   [{time.perf_counter() - began:.0f} s]")
        rows[place] = one_row(place, rows.get(place, {}), given)
        show(rows[place])
        listed = [rows[key] for key in ORDER if key in rows]
        # After every row: a long run may be cut, and what is done is kept.
        results = {"machine": machine(), "slopes": slopes(listed), "summary": verdict.summary(listed), "rows": listed}
        save("accuracy", results, fast=given.fast)
    listed = [rows[key] for key in ORDER if key in rows]
    verdict.show(verdict.summary(listed))
    if not given.fast:
        draw(listed)


if __name__ == "__main__":
    main()
