"""Do the 95 % intervals hold the truth 95 % of the time?

Run `python benchmarks/coverage.py` (an hour on two cores; `--fast` for a glance). For each loss, number of
episodes and noise of the gradients, 20 data sets are observed, and intervals of ± 1.96 standard errors are held against
the true gradient at places where the estimate is trusted; also with symmetric Gaussian noise of sd 3 on every entry of
the observed Hessians, and for a logistic regression whose learner sees minibatches. It prints the table, with means and
least, and writes results/coverage.json. `--episodes 100000` measures large data sets, `--times 16` many times; cells
not asked for keep their numbers of the last run. Twenty data sets leave a standard error of 1 to 3 % on each number.
"""

import functools
import itertools
import json
import time
import zlib

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from common import RESULTS, evaluate, machine, parser, save
from rivals import ours
from rivals.losses import MANY, STEP_SIZE, Case, box, cases, start

import malliavin_jax as mj

LOSSES = ("quartic, d = 1", "mixture, d = 1", "ripples, d = 1", "mixture, d = 2", "pits, d = 2")
NOISES = (0.5, 2.0, 10.0)
SIZES = (1_000, 10_000, 100_000)
SETS = 20
HESSIAN_NOISE = 3.0
KEYS = ("form", "case", "hessian_noise", "episodes", "times", "noise")


@functools.cache
def logistic():
    """Sixty rows, of which the learner sees ten at each step: noise of sd 1.5 or so in gradients, and in Hessians."""
    rows, labels = jax.random.split(jax.random.key(11))
    features = jax.random.normal(rows, (60, 2))
    chance = jax.nn.sigmoid(features @ jnp.asarray([1.0, -0.7]))
    drawn = (jax.random.uniform(labels, (60,)) < chance).astype(jnp.float32)
    loss = mj.potentials.LogisticRegression(features, drawn, batch_size=10, data_scale=0.2)
    return Case(loss, start(2), box(2, 6), 0.4)


def case_of(name):
    return logistic() if name == "logistic regression, d = 2" else cases()[name]


@jax.jit
def noisy_hessians(key, samples, noise):
    """The samples with symmetric Gaussian noise on their Hessians, of the same sd in every entry."""
    upper = jnp.triu(jax.random.normal(key, samples.hessian.shape, samples.x.dtype))
    diagonal = upper * jnp.eye(samples.dim, dtype=upper.dtype)
    symmetric = upper + jnp.swapaxes(upper, -1, -2) - diagonal
    return eqx.tree_at(lambda s: s.hessian, samples, samples.hessian + noise * symmetric)


def one_cell(place, sets):
    """Coverage, with its standard error over the data sets, and what else the intervals say."""
    form, name, hessian_noise, episodes, times, noise = place
    case = case_of(name)
    learner = mj.ForwardLearner(case.loss, case.initial, STEP_SIZE, gradient_noise=noise)
    truth = np.asarray(jax.vmap(case.loss.gradient)(case.alphas))
    seed = zlib.crc32(f"coverage {name} {episodes} {noise}".encode())
    shares, squares, stderrs, trusted = [], [], [], []
    for k in range(sets):
        key, other = jax.random.split(jax.random.fold_in(jax.random.key(seed), k))
        samples = mj.observe(key, learner, num_episodes=episodes, times=case.times(times))
        if hessian_noise > 0:
            samples = noisy_hessians(other, samples, jnp.asarray(hessian_noise, samples.x.dtype))
        estimate = evaluate(ours.field(samples, form), case.alphas)
        stderr, error = np.asarray(estimate.stderr), np.asarray(estimate.value) - truth
        finite = np.isfinite(stderr)
        trusted.append(np.mean(finite))
        if finite.any():
            shares.append(np.mean(np.abs(error[finite]) < 1.96 * stderr[finite]))
            squares.append(np.mean(error[finite] ** 2))
            stderrs.append(np.mean(stderr[finite]))
    found = {"sets": sets, "trusted": float(np.mean(trusted))}
    if shares:
        rmse = float(np.sqrt(np.mean(squares)))
        found |= {"coverage": float(np.mean(shares)), "coverage_stderr": float(np.std(shares) / np.sqrt(len(shares)))}
        found |= {"rmse": rmse, "stderr_to_rmse": float(np.mean(stderrs)) / rmse}
    return found


def summary(rows):
    """Mean and least coverage, by form and kind of Hessians, by noise and by size."""
    found = {}
    for key in ("form", "hessian_noise", "noise", "episodes", "times"):
        for value in sorted({row[key] for row in rows}):
            numbers = [row["coverage"] for row in rows if row[key] == value and "coverage" in row]
            if numbers:
                found[f"{key} {value}"] = {
                    "mean": float(np.mean(numbers)),
                    "least": min(numbers),
                    "cells": len(numbers),
                }
    return found


def show(rows):
    """One line for each loss and size, one column for each noise."""
    lines = dict.fromkeys(tuple(row[key] for key in KEYS[:-1]) for row in rows)
    width = 74
    print("\ncoverage of 95 % intervals".ljust(width + 1) + "".join(f"noise {noise:g}".rjust(12) for noise in NOISES))
    for line in lines:
        mine = {row["noise"]: row for row in rows if tuple(row[key] for key in KEYS[:-1]) == line}
        form, name, hessian_noise, episodes, times = line
        label = f"{form}: {name}, N = {episodes}, times {times}" + (", noisy Hessians" if hessian_noise else "")
        cells = [mine.get(noise, {}).get("coverage") for noise in NOISES]
        print(label.ljust(width) + "".join(("–" if c is None else f"{c:.3f}").rjust(12) for c in cells))
    for what, numbers in summary(rows).items():
        print(f"{what}: mean {numbers['mean']:.3f}, least {numbers['least']:.3f} of {numbers['cells']} cells")


def asked():
    arguments = parser(__doc__, "one loss, N = 1000, three data sets")
    arguments.add_argument("--only", default="", help="only losses whose name contains this")
    arguments.add_argument("--noise", type=float, nargs="*", default=NOISES, choices=NOISES)
    arguments.add_argument("--episodes", type=int, nargs="*", default=SIZES[:2], choices=SIZES)
    arguments.add_argument("--times", type=int, nargs="*", default=(1,), choices=(1, MANY))
    arguments.add_argument("--hessian-noise", type=float, nargs="*", default=(0.0, HESSIAN_NOISE))
    arguments.add_argument("--form", nargs="*", default=("this library",), choices=tuple(ours.FORMS))
    arguments.add_argument("--sets", type=int, default=SETS, help="data sets a cell")
    given = arguments.parse_args()
    if given.fast:
        given.episodes, given.only, given.sets = (1000,), "quartic", 3
    return given


def main():
    given = asked()
    path = RESULTS / "coverage.json"
    earlier = json.loads(path.read_text())["rows"] if path.exists() and not given.fast else []
    rows = {tuple(row[key] for key in KEYS): row for row in earlier}
    names = [name for name in (*LOSSES, "logistic regression, d = 2") if given.only in name]
    began = time.perf_counter()
    for place in itertools.product(given.form, names, given.hessian_noise, given.episodes, given.times, given.noise):
        rows[place] = dict(zip(KEYS, place, strict=True)) | one_cell(place, given.sets)
        print(f"[{time.perf_counter() - began:.0f} s]", *rows[place].values(), flush=True)
        # After every cell: a long run may be cut, and what is done is kept.
        listed = list(rows.values())
        save("coverage", {"machine": machine(), "summary": summary(listed), "rows": listed}, fast=given.fast)
    show(list(rows.values()))


if __name__ == "__main__":
    main()
