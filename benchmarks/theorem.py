"""What does conditioning on a functional of the path cost, and how does its error fall?

Run `python benchmarks/theorem.py` (some ten minutes; `--fast` for a glance). The question has a closed answer: the
expected payoff (S_T − K)⁺ of geometric Brownian motion given its geometric average over [0, T]. The error is the root
mean square over nine levels of the average and several data sets, against the number of paths; kernels see the same
paths and have the bandwidth that is best in hindsight. Then the time a path takes, against the number of increments,
with the exact trace and with random probes, for a nonlinear diffusion. Prints both tables and writes
results/theorem.json.
"""

import math
import time

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from common import exponent, kernel_field, machine, oracle, parser, race, save, sweep
from scipy import stats

import malliavin_jax as mj
from malliavin_jax import wiener

VOL, STRIKE, START = 0.4, 1.1, 1.0
STEPS = 32
LEVELS = 9  # quantiles of the average, from a tenth to nine tenths
SETS = {1_000: 32, 4_000: 32, 16_000: 16, 64_000: 8, 256_000: 8}  # paths: data sets
BANDWIDTHS = np.geomspace(0.02, 2.0, 14)  # in units of the spread of the average


def process(num_steps):
    """log S, for which Euler's chain is exact."""
    return wiener.Diffusion(
        lambda x, t: jnp.full((1,), -(VOL**2) / 2, x.dtype),
        lambda x, t: jnp.full((1, 1), VOL, x.dtype),
        jnp.log(jnp.asarray([START])),
        1 / num_steps,
        num_steps,
    )


def nonlinear(num_steps):
    """A Langevin path in a quartic well with noise that depends on the state: no derivative of it vanishes."""
    return wiener.Diffusion(
        lambda x, t: -(x + x**3),
        lambda x, t: jnp.sqrt(1 + 0.5 * x**2)[:, None],
        jnp.asarray([0.3]),
        1 / num_steps,
        num_steps,
    )


def integral(path):
    return jnp.trapezoid(path.x[:, 0], path.t)


def end(path):
    return path.x[-1, 0]


def average(path):
    return jnp.exp(jnp.trapezoid(path.x[:, 0], path.t))


def payoff(path):
    return jnp.maximum(jnp.exp(path.x[-1, 0]) - STRIKE, 0)


def levels_and_truth():
    """The levels, and the conditional expectation at each: the logarithms are jointly Gaussian."""
    t = np.arange(STEPS + 1) / STEPS
    rule = np.full(STEPS + 1, 1 / STEPS)
    rule[[0, -1]] /= 2
    covariance = VOL**2 * np.minimum.outer(t, t)
    mean = math.log(START) - VOL**2 / 2 * t
    variance, shared = rule @ covariance @ rule, covariance[-1] @ rule
    y = stats.norm(rule @ mean, math.sqrt(variance)).ppf(np.linspace(0.1, 0.9, LEVELS))
    centre = mean[-1] + shared / variance * (y - rule @ mean)
    spread = math.sqrt(covariance[-1, -1] - shared**2 / variance)
    d = (centre - math.log(STRIKE)) / spread
    truth = np.exp(centre + spread**2 / 2) * stats.norm.cdf(d + spread) - STRIKE * stats.norm.cdf(d)
    return jnp.asarray(np.exp(y), jnp.float32), truth


@eqx.filter_jit
def ours(sample, levels, localizer):
    return jax.lax.map(lambda level: wiener.conditional_expectation(sample, level, localizer), levels)


def kernel_gaps(sample, levels, truth):
    """Errors of kernel regression of the payoffs on the average, (bandwidths, levels), by name."""
    x = sample.g[:, None, None]
    nothing, observed = jnp.zeros((*x.shape, 1), x.dtype), jnp.ones(x.shape[:2], bool)
    points = mj.Samples(x, sample.ell[:, None, :], nothing, x, observed)
    widths = jnp.asarray(BANDWIDTHS, x.dtype) * jnp.std(x)
    for degree, name in ((0, "Nadaraya–Watson, oracle"), (1, "local linear, oracle")):
        values = sweep(kernel_field(points, degree, 0.1), levels[:, None], widths)
        yield name, np.asarray(values[..., 0], float) - truth


def errors(sets):
    """Root mean square errors by method and number of paths, and the coverage of our intervals."""
    levels, truth = levels_and_truth()
    rows, coverage = {}, {}
    for paths, data_sets in sets.items():
        squares: dict[str, list] = {}
        hits = []
        for number in range(data_sets):
            key = jax.random.fold_in(jax.random.key(paths), number)
            sample = wiener.weigh(key, process(STEPS), payoff, average, num_paths=paths)
            for name, localizer in (("this library", wiener.best_localizer(sample)), ("the paper's", mj.Heaviside())):
                estimate = ours(sample, levels, localizer)
                gap = np.asarray(estimate.value[:, 0], float) - truth
                squares.setdefault(name, []).append(np.mean(gap**2))
                if name == "this library":
                    hits.append(np.mean(np.abs(gap) < 1.96 * np.asarray(estimate.stderr[:, 0])))
            for name, gaps in kernel_gaps(sample, levels, truth):
                squares.setdefault(name, []).append(np.mean(gaps**2, 1))
        rows[paths] = {name: oracle(rows_of_sets)[0] for name, rows_of_sets in squares.items()}
        coverage[paths] = float(np.mean(hits))
        print(
            f"  {paths:8} paths  " + "  ".join(f"{name} {value:.5f}" for name, value in rows[paths].items()), flush=True
        )
    return rows, coverage


def costs(all_steps, rounds):
    """Microseconds a path, and E S², by the number of increments; conditioning X_T on ∫X."""
    table = {}
    for steps in all_steps:
        # Enough paths that the fixed cost of a call, some milliseconds of tracing, does not show.
        many, few = 2**20 // steps, 2**17 // steps
        diffusion = nonlinear(steps)

        @jax.jit
        def simulate(key, diffusion=diffusion, paths=many):
            def one(key):
                path = diffusion.solve(*diffusion.draw(key))
                return end(path), integral(path)

            return jax.vmap(one)(jax.random.split(key, paths))

        def weigh(paths, probes, diffusion=diffusion):
            return wiener.weigh(jax.random.key(0), diffusion, end, integral, num_paths=paths, probes=probes)

        runs = {
            "paths alone": (many, lambda simulate=simulate: simulate(jax.random.key(0))),
            "exact trace": (few, lambda few=few, weigh=weigh: weigh(few, None)),
            "4 probes": (many, lambda many=many, weigh=weigh: weigh(many, 4)),
        }
        _, best = race({name: run for name, (_, run) in runs.items()}, rounds)
        micro = {name: 1e6 * best[name] / paths for name, (paths, _) in runs.items()}
        second_moment = {
            name: float(jnp.mean(weigh(few, probes).weight ** 2)) for name, probes in (("exact", None), ("probes", 4))
        }
        table[steps] = {"microseconds_a_path": micro, "mean_square_of_S": second_moment}
        print(
            f"  {steps:5} increments  "
            + "  ".join(f"{name} {value:9.2f} µs" for name, value in micro.items())
            + f"  E S² {second_moment['exact']:.3f} exact, {second_moment['probes']:.3f} with probes",
            flush=True,
        )
    return table


def main():
    fast = parser(__doc__, "fewer paths, data sets and increments").parse_args().fast
    began = time.perf_counter()
    results = {"machine": machine(), "steps": STEPS}
    print(results["machine"])
    print(f"E[(S_T − K)⁺ | geometric average], {STEPS} increments: root mean square error")
    sets = dict.fromkeys((1_000, 4_000, 16_000), 2) if fast else SETS
    sizes = tuple(sets)
    rows, coverage = errors(sets)
    slopes = {name: exponent(sizes, [rows[n][name] for n in sizes]) for name in rows[sizes[0]]}
    print("  slope in the number of paths: " + ", ".join(f"{name} {s:.2f}" for name, s in slopes.items()))
    print("  coverage of our 95 % intervals: " + ", ".join(f"{n}: {c:.0%}" for n, c in coverage.items()))
    results |= {"data_sets": sets, "rmse": rows, "slope": slopes, "coverage": coverage}

    print("time a path takes")
    steps = (16, 128) if fast else (16, 32, 64, 128, 256, 512)
    table = costs(steps, 2 if fast else 5)
    powers = {
        name: exponent(steps, [table[n]["microseconds_a_path"][name] for n in steps])
        for name in ("paths alone", "exact trace", "4 probes")
    }
    print("  power of the number of increments: " + ", ".join(f"{name} {p:.2f}" for name, p in powers.items()))
    results |= {"cost": table, "power_of_increments": powers, "seconds": time.perf_counter() - began}
    save("theorem", results, fast=fast)


if __name__ == "__main__":
    main()
