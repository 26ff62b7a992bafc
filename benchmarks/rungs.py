"""What does it cost to observe less: diagonals of Hessians, gradients alone, positions alone?

Run `python benchmarks/rungs.py` (half an hour on two free cores; `--fast` for a glance). 2000 episodes of 80 steps of
size .01, gradients with noise 2 (a logistic regression: minibatches of 10 of 60 rows), logged whole; a rung sees part
of the same log. Rivals are fitted to all points of the paths, with what their rung has seen, and have the setting that
is best in *hindsight*: splines over meshes, kernel ridge regression, kernels of degree 0 and 1. Errors are root mean
squares over places α and data sets. It prints the table and writes results/rungs.json; `--keep "kernel ridge" Nadaraya`
keeps these rivals' numbers of the last run, which come from the same data.
"""

import functools
import json
import time

import jax
import jax.numpy as jnp
import numpy as np
from common import RESULTS, evaluate, machine, oracle, parser, save
from coverage import logistic
from rivals import kernels, models
from rivals.losses import STEP_SIZE, cases

import malliavin_jax as mj
from malliavin_jax.potentials.spline import fit_parts

CASES = ("quartic, d = 1", "mixture, d = 1", "ripples, d = 1", "curved valley, d = 2", "logistic regression, d = 2")
RUNGS = ("hessians", "diagonals", "gradients", "positions")
STEPS, NOISE = 80, 2.0
CONDITIONED = tuple(range(10, STEPS, 10))
MESHES = {1: (6, 12, 24, 48, 96), 2: (5, 8, 12, 18)}


@functools.cache
def learner_of(name):
    case = logistic() if name.startswith("logistic") else cases()[name]
    noise = 0.0 if name.startswith("logistic") else NOISE
    return case, mj.ForwardLearner(case.loss, case.initial, STEP_SIZE, gradient_noise=noise)


@functools.partial(jax.jit, static_argnums=(1, 2))
def simulate(key, name, episodes):
    return jax.vmap(lambda one: mj.simulate(one, learner_of(name)[1], STEPS))(jax.random.split(key, episodes))


def seen_on(rung, paths):
    """Gradient and Hessian as a rung has them."""
    if rung == "positions":
        return None, None
    diagonal = jnp.diagonal(paths.hessian, axis1=-2, axis2=-1)
    return paths.gradient, {"hessians": paths.hessian, "diagonals": diagonal}.get(rung)


class Points:
    """What the rivals are given: all points of the paths."""

    def __init__(self, rung, paths, alphas):
        gradient, hessian = seen_on(rung, paths)
        x = paths.x
        if gradient is None:
            x, gradient = x[:, :-1], -jnp.diff(x, axis=1) / STEP_SIZE
        nothing = jnp.zeros_like(x)
        self.samples = mj.Samples(x, gradient, None, nothing, jnp.ones(x.shape[:2], bool))
        self.hessian, self.diagonal = hessian, rung == "diagonals"
        self.alphas, self.noise, self.control = alphas, NOISE, None
        self.dim, self.scale = x.shape[-1], float(jnp.std(x))

    @property
    def points(self):
        return *(part.reshape(-1, self.dim) for part in (self.samples.x, self.samples.gradient)), None


def spline(view):
    """Splines of several meshes, fitted to all that the rung has seen."""
    x, gradient, _ = view.points
    hessian = view.hessian
    if hessian is not None:
        hessian = jnp.einsum("...i,ij->...ij", hessian, jnp.eye(view.dim)) if view.diagonal else hessian
        hessian = hessian.reshape(-1, view.dim, view.dim)
    low, high = (np.asarray(end, np.float64) for end in (x.min(0), x.max(0)))
    part = (x, gradient, hessian, jnp.ones(len(x), x.dtype))
    values = []
    for mesh in MESHES[view.dim]:
        fits = fit_parts([part], low, high, intervals=mesh, diagonal=view.diagonal)
        values.append(models.gradients(fits.potential(x.dtype), view.alphas))
    return models.Found(np.stack(values), [f"{mesh} cells" for mesh in MESHES[view.dim]])


RIVALS = {
    "spline, oracle mesh": spline,
    "kernel ridge, oracle": models.kernel_ridge,
    "Nadaraya–Watson, oracle": functools.partial(kernels.kernel, degree=0, help_=""),
    "local linear, oracle": functools.partial(kernels.kernel, degree=1, help_=""),
}


def one_row(name, rung, episodes, sets, known=None, keep=()):
    """Errors of ours and of each rival, and what our intervals say; rivals in `keep` are as `known`."""
    if known is None or (known["episodes"], known["sets"]) != (episodes, sets):
        keep = ()
    unchanged = [rival for rival in RIVALS if any(word in rival for word in keep)]
    case, _ = learner_of(name)
    truth = np.asarray(jax.vmap(case.loss.gradient)(case.alphas))
    squares, settings, chosen, hits, stderrs = {}, {}, [], [], []
    for number in range(sets):
        paths = simulate(jax.random.fold_in(jax.random.key(20), number), name, episodes)
        gradient, hessian = seen_on(rung, paths)
        how = {"step_size": STEP_SIZE, "steps": CONDITIONED, "model": "spline"}  # as for a recording
        samples = mj.samples_from_paths(paths.x, gradient, hessian, **how)
        field = mj.MalliavinField(samples)
        got = evaluate(field, case.alphas)
        off, stderr = np.asarray(got.value) - truth, np.asarray(got.stderr)
        kept = np.isfinite(stderr)
        squares.setdefault("this library", []).append(np.mean(off**2)[None])
        hits.append(np.mean(np.abs(off[kept]) < 1.96 * stderr[kept]))
        stderrs.append(np.mean(stderr[kept]))
        chosen.append(field.correction.kind)
        view = Points(rung, paths, case.alphas)
        for rival, method in RIVALS.items():
            if rival in unchanged:
                continue
            found = method(view)
            squares.setdefault(rival, []).append(np.mean((found.values - truth) ** 2, (-2, -1)))
            settings[rival] = found.settings
    best = {method: oracle(np.asarray(each)) for method, each in squares.items()}
    rmse = {method: error for method, (error, _) in best.items()} | {rival: known["rmse"][rival] for rival in unchanged}
    tuning = {method: settings[method][best[method][1]] for method in settings}
    rival = min((method for method in rmse if method in RIVALS), key=rmse.__getitem__)
    return {
        "case": name, "rung": rung, "episodes": episodes, "sets": sets, "rmse": rmse,
        "tuning": tuning | {rival: known["tuning"][rival] for rival in unchanged}, "best rival": rival,
        "to best rival": rmse["this library"] / rmse[rival],
        "to best kernel": rmse["this library"] / min(rmse["Nadaraya–Watson, oracle"], rmse["local linear, oracle"]),
        "coverage": float(np.mean(hits)), "stderr": float(np.mean(stderrs)), "correction": chosen,
    }  # fmt: skip


def summary(rows):
    """By rung: mean and largest ratios, mean and least coverage."""
    found = {}
    for rung in dict.fromkeys(row["rung"] for row in rows):
        mine = [row for row in rows if row["rung"] == rung]
        found[rung] = {
            f"{of} {what}": float(take([row[what] for row in mine]))
            for what in ("to best rival", "to best kernel", "coverage")
            for of, take in (("mean", np.mean), ("worst", np.min if what == "coverage" else np.max))
        }
    return found


def main():
    arguments = parser(__doc__, "one loss, 200 episodes, one data set")
    arguments.add_argument("--only", default="", help="only cases whose name contains this")
    arguments.add_argument("--rungs", nargs="*", default=RUNGS, choices=RUNGS)
    arguments.add_argument("--episodes", type=int, default=2000)
    arguments.add_argument("--sets", type=int, default=4)
    arguments.add_argument("--keep", nargs="+", default=(), help="rivals whose numbers of the last run are kept")
    given = arguments.parse_args()
    if given.fast:
        given.only, given.episodes, given.sets = "quartic, d = 1", 200, 1
    path = RESULTS / "rungs.json"
    earlier = json.loads(path.read_text())["rows"] if path.exists() else []
    rows = {(row["case"], row["rung"]): row for row in earlier}
    began = time.perf_counter()
    for name in (name for name in CASES if given.only in name):
        for rung in given.rungs:
            if rung == "diagonals" and name.endswith("d = 1"):
                continue  # a diagonal is all there is
            known = rows.get((name, rung))
            row = rows[(name, rung)] = one_row(name, rung, given.episodes, given.sets, known, given.keep)
            errors = "; ".join(f"{method} {error:.4g}" for method, error in row["rmse"].items())
            print(f"{name}, {rung}: {errors}; coverage {row['coverage']:.2f} [{time.perf_counter() - began:.0f} s]")
            listed = [rows[place] for name in CASES for rung in RUNGS if (place := (name, rung)) in rows]
            save("rungs", {"machine": machine(), "summary": summary(listed), "rows": listed}, fast=given.fast)
    for rung, numbers in summary(list(rows.values())).items():
        print(f"{rung}: " + "; ".join(f"{what} {number:.2f}" for what, number in numbers.items()))


if __name__ == "__main__":
    main()
