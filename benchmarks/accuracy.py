"""How much better than a kernel is the counterfactual gradient?

Run `python benchmarks/accuracy.py` (most of an hour on two cores; `--fast` for a glance). Every method sees the same
samples; the error is the root mean square over a grid of α and over several data sets. Kernels have the bandwidth that
is best in hindsight (oracle) and, on the first data set, the cross-validated one; this library has no bandwidth to be
told. It prints the table, and writes results/accuracy.json and results/accuracy.png; `--only` and its like replace some
rows of these, `--ours` measures this library alone and keeps the kernels' numbers, which come from the same data.
"""

import functools
import json
import time
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from common import DEGREES, RESULTS, evaluate, exponent, kernel_field, machine, oracle, parser, save, sweep
from figures.errors import draw

import malliavin_jax as mj

TIME, STEP_SIZE = 0.8, 0.01
MANY = 16  # conditioning times, evenly spaced
NOISES = (0.0, 0.5, 2.0, 10.0)
SIZES = (1_000, 10_000, 100_000)  # episodes
SETS = {1: (32, 16, 16), 2: (8, 4, 3), 3: (8, 4, 2)}  # data sets of each size, by dimension
LENGTHS = np.geomspace(0.02, 6.0, 16)
PAPER = mj.Reciprocal(third="ito", jacobian="exponential")


class Case(NamedTuple):
    """A loss, the law of its learner's starts, and the places where gradients are asked for."""

    loss: Any
    initial: Any
    alphas: Any
    time: float = TIME
    many: tuple[float, float] = (TIME / MANY, TIME)  # the first and the last of the many times


def start(d, center=0.0, spread=1.0, cut=4.0):
    center = jnp.broadcast_to(jnp.asarray(center, jnp.float32), (d,))
    return lambda key: center + spread * jnp.clip(jax.random.normal(key, (d,)), -cut, cut)


def box(d, points, half=0.8, center=0.0):
    axis = jnp.linspace(-half, half, points)
    return jnp.stack(jnp.meshgrid(*[axis] * d, indexing="ij"), -1).reshape(-1, d) + jnp.asarray(center, jnp.float32)


def cases():
    quartic, wells = mj.potentials.Quartic, mj.potentials.DoubleWell
    mixture = functools.partial(mj.potentials.GaussianMixture, weights=[0.4, 0.35, 0.25], covariances=0.35)
    valley = jnp.asarray([-0.2, 0.7])  # among the three minima of Müller and Brown's surface
    return {
        "quartic, d = 1": Case(quartic(), start(1), box(1, 21, 1.0)),
        # Between its wells paths part at the rate 4, and a weight over a long time pays for it: a shorter one, for all.
        "double well, d = 1": Case(wells(), start(1), box(1, 21, 1.2), 0.3),
        "mixture, d = 1": Case(mixture([[-1.2], [0.2], [1.5]]), start(1), box(1, 21, 1.2)),
        "quartic, d = 2": Case(quartic(0.5), start(2), box(2, 6)),
        # Its curvature goes down to −29, along which a path of length .8 loses its start e²³-fold: a shorter time, for
        # all methods; of .05, .1 and .2 the first is best for the kernels as well.
        "Müller–Brown, d = 2": Case(
            mj.potentials.MullerBrown(), start(2, valley, 0.35, 2.0), box(2, 6, 0.4, valley), 0.05, (0.2 / MANY, 0.2)
        ),
        "mixture, d = 2": Case(mixture([[-1.0, 0.5], [0.9, 0.6], [0.0, -1.0]]), start(2), box(2, 6)),
        "quartic, d = 3": Case(quartic(0.5), start(3), box(3, 3)),
        "mixture, d = 3": Case(mixture([[-1.0, 0.5, 0.3], [0.9, 0.6, -0.4], [0.0, -1.0, 0.2]]), start(3), box(3, 3)),
    }


ORDER = [(name, episodes, noise) for name in cases() for episodes in SIZES for noise in NOISES]


def length_of(field):
    return field.localizer.length


@jax.jit
def paper_estimate(samples, alphas):
    arguments = samples, samples.gradient, samples.hessian
    return jax.vmap(lambda alpha: mj.conditional_expectation(*arguments, alpha, mj.Heaviside()).value)(alphas)


def bandwidths(noise):
    """In units of the spread of the positions; without noise a kernel nearly interpolates, at a very short one."""
    return np.geomspace(0.003, 0.6, 12) if noise == 0 else np.geomspace(0.03, 4.0, 12)


def one_cell(case, noise, episodes, sets, seed, *, kernels=True, cross_validate):
    """Root mean square errors of every method on the same data, by name."""
    learner = mj.ForwardLearner(case.loss, case.initial, STEP_SIZE, gradient_noise=noise)
    truth = jax.vmap(case.loss.gradient)(case.alphas)
    d = case.alphas.shape[1]
    squares: dict[str, list] = {}
    hits = []

    def note(name, values):
        """Squared errors, averaged over α; the last axes of `values` are (α, component)."""
        squares.setdefault(name, []).append(np.mean((np.asarray(values) - np.asarray(truth)) ** 2, (-2, -1)))

    for k in range(sets):
        key = jax.random.fold_in(jax.random.key(seed), k)
        look = functools.partial(mj.observe, key, learner, num_episodes=episodes)
        samples = look(times=[case.time])
        scale = float(jnp.std(samples.x))
        ours = mj.MalliavinField(samples)
        plain = mj.MalliavinField(samples, control=None)
        result = evaluate(ours, case.alphas)
        note("this library", result.value)
        hits.append(np.mean(np.abs(np.asarray(result.value - truth)) < 1.96 * np.asarray(result.stderr)))
        note("without control", evaluate(plain, case.alphas).value)
        if episodes < 100_000:
            times = np.round(np.linspace(*case.many, MANY) / STEP_SIZE) * STEP_SIZE
            note("many times", evaluate(mj.MalliavinField(look(times=times)), case.alphas).value)
        if d == 1 and kernels:
            with_length = mj.MalliavinField(samples, mj.Laplace(1.0), control=None)
            # The sorted form is made for one length: the dense one serves a sweep.
            dense = eqx.tree_at(lambda f: f.sorted, with_length, None, is_leaf=lambda leaf: leaf is None)
            lengths = jnp.asarray(scale * LENGTHS, samples.x.dtype)
            note("without control, oracle length", sweep(dense, case.alphas, lengths, length_of))
            note("the paper, literally", paper_estimate(look(times=[case.time], scheme=PAPER), case.alphas))
        for degree, name in DEGREES.items() if kernels else ():
            widths = jnp.asarray(scale * bandwidths(noise), samples.x.dtype)
            note(f"{name}, oracle", sweep(kernel_field(samples, degree, 1.0), case.alphas, widths))
            if cross_validate and k == 0:
                note(f"{name}, cross-validated", evaluate(kernel_field(samples, degree, "auto"), case.alphas).value)
    return {name: oracle(sets)[0] for name, sets in squares.items()}, float(np.mean(hits))


def best(row, names):
    return min(value for name, value in row.items() if name in names)


def judge(row):
    """The comparisons that the table ends with: errors relative to ours."""
    ours = row["this library"]
    low = [f"{DEGREES[k]}, oracle" for k in (0, 1)]
    any_degree = [f"{label}, oracle" for label in DEGREES.values()]
    verdict = {
        "to best oracle, degree 0 or 1": ours / best(row, low),
        "to best oracle, any degree": ours / best(row, any_degree),
        "to no control": ours / row["without control"],
    }
    if "many times" in row:
        verdict["many times to one"] = row["many times"] / ours
    if row["limit"] > 0:
        verdict["to physical limit"] = ours / row["limit"]
    if "the paper, literally" in row:
        verdict["to the paper"] = ours / row["the paper, literally"]
        verdict["no control, to its oracle length"] = row["without control"] / row["without control, oracle length"]
    return verdict


def slopes(rows):
    """The slope of log RMSE in log N in one dimension, for each noise that hides the roughness, and their mean."""
    found = {}
    for name in dict.fromkeys(row["case"] for row in rows if row["case"].endswith("d = 1")):
        for noise in (n for n in NOISES if n > 0):
            mine = [row for row in rows if row["case"] == name and row["noise"] == noise]
            if len(mine) == len(SIZES):
                sizes, errors = zip(*[(row["episodes"], row["rmse"]["this library"]) for row in mine], strict=True)
                found[f"{name}, noise {noise:g}"] = exponent(sizes, errors)
    if found:
        found["mean"] = float(np.mean(list(found.values())))
    return found


def one_row(place, known, *, ours, cross_validate):
    """The row of the table at `place`, (case, episodes, noise); `known` are errors of an earlier run to keep."""
    name, episodes, noise = place
    case = cases()[name]
    sets = SETS[case.alphas.shape[1]][SIZES.index(episodes)]
    seed = ORDER.index(place)
    found, coverage = one_cell(case, noise, episodes, sets, seed, kernels=not ours, cross_validate=cross_validate)
    errors = {**known, **found, "limit": noise / np.sqrt(episodes)}
    ratios = {**judge(errors), "coverage of 95 % intervals": coverage}
    print("  " + "; ".join(f"{method} {value:.4g}" for method, value in errors.items()))
    print("  " + "; ".join(f"{what} {ratio:.2f}" for what, ratio in ratios.items()), flush=True)
    return {"case": name, "noise": noise, "episodes": episodes, "sets": sets, "rmse": errors, "ratios": ratios}


def main():
    arguments = parser(__doc__, "N = 1000 and 10 000 only, no cross-validation")
    arguments.add_argument("--only", default="", help="only cases whose name contains this")
    arguments.add_argument("--noise", type=float, nargs="*", default=NOISES, choices=NOISES)
    arguments.add_argument("--episodes", type=int, nargs="*", default=SIZES, choices=SIZES)
    arguments.add_argument("--ours", action="store_true", help="keep the kernels' numbers of the last run")
    arguments.add_argument("--no-cv", action="store_true", help="leave cross-validation out")
    given = arguments.parse_args()
    began = time.perf_counter()
    path = RESULTS / "accuracy.json"
    earlier = json.loads(path.read_text())["rows"] if path.exists() else []
    rows = {(row["case"], row["episodes"], row["noise"]): row for row in earlier}
    listed = earlier
    for place in ORDER:
        name, episodes, noise = place
        wanted = given.only in name and episodes in given.episodes and noise in given.noise
        if not wanted or (given.fast and episodes >= 100_000):
            continue
        print(f"\n{name}, noise {noise}, N = {episodes}   [{time.perf_counter() - began:.0f} s]")
        cross = not (given.fast or given.no_cv) and noise in (0.5, 2.0) and episodes > 1000
        known = rows[place]["rmse"] if given.ours else {}
        rows[place] = one_row(place, known, ours=given.ours, cross_validate=cross)
        listed = [rows[key] for key in ORDER if key in rows]
        # After every row: a long run may be cut, and what is done is kept.
        save("accuracy", {"machine": machine(), "slopes": slopes(listed), "rows": listed}, fast=given.fast)
    if not given.fast:
        for name, slope in slopes(listed).items():
            print(f"slope of log RMSE in log N, {name}: {slope:.3f}")
        draw(listed)


if __name__ == "__main__":
    main()
