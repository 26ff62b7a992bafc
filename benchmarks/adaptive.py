"""How well does an adaptive field follow a loss that jumps, beside the kernel chains of Krishnamurthy and Yin?

Run `python benchmarks/adaptive.py` (minutes; `--fast`: under two).

One stream for all: at each update so many points x ~ N(0, 1), a law that is known, as the single-kernel chain needs it,
with noisy gradients of a double well whose tilt jumps half way. Errors are root mean squares over |α| ≤ 1.2, of the
gradient and of the loss less its mean there, in two stretches where the loss stands still (the last third before the
jump, and before the end). Recovery is the number of updates, from the jump on, until the error of the loss is back at
1.5 times that of the best kernel chain at rest.

Ours: the adaptive field, with exact Hessians and without any; and two that do not adapt, the newest update alone and
all the past. Theirs, none of which uses Hessians: the single-kernel chain, which consumes one point a step; the
multi-kernel chain on the points of the newest update; the loss is −log of the histogram of many chains, which forgets.
And the Nadaraya–Watson average behind the multi-kernel chain as a field, with sums that forget, integrated. Step size,
bandwidth and forgetting of each are the best in hindsight on this very stream, for each column of the table apart.
"""

import itertools
import time

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from common import machine, parser, save
from jax import lax

import malliavin_jax as mj

NOISE, BEFORE, AFTER = 2.0, 0.3, -0.9
GRID = np.linspace(-1.2, 1.2, 25)
EDGES = np.append(GRID - 0.05, GRID[-1] + 0.05)
BANDWIDTHS, FORGETTING = (0.05, 0.1, 0.2, 0.35, 0.5), (0.0, 0.75, 0.9, 0.97, 1.0)
STEPS = {"single": (0.003, 0.01, 0.03, 0.1), "multi": (0.01, 0.03, 0.1)}


def loss_at(update, jump):
    return mj.potentials.DoubleWell(height=0.5, tilt=jnp.where(update < jump, BEFORE, AFTER))


def points(key, update, jump, number):
    """One update of the stream: positions, gradients and Hessians, (number, 1) and (number, 1, 1)."""
    place, noise = jax.random.split(key)
    x, loss = jax.random.normal(place, (number, 1)), loss_at(update, jump)
    gradient = jax.vmap(loss.gradient)(x) + NOISE * jax.random.normal(noise, x.shape)
    return x, gradient, jax.vmap(loss.hessian)(x)


def as_samples(x, gradient, hessian):
    return mj.Samples(
        x[:, None], gradient[:, None], hessian[:, None], jnp.zeros_like(x[:, None]), jnp.ones((len(x), 1), bool)
    )


# --- ours --------------------------------------------------------------------------------------------------


@eqx.filter_jit
def adaptive(key, field, updates, jump, number):
    """The gradient of an adaptive field on the grid, (updates, grid), and the changes that it found."""
    grid = jnp.asarray(GRID, jnp.float32)

    def update(field, t):
        field = field.update(as_samples(*points(jax.random.fold_in(key, t), t, jump, number)))
        return field, (jax.vmap(field)(grid[:, None]).value[:, 0], field.changes)

    return lax.scan(update, field, jnp.arange(updates))[1]


# --- theirs ------------------------------------------------------------------------------------------------


@eqx.filter_jit
def single(key, step_size, bandwidth, updates, jump, number, chains):
    """Histograms (updates, bins) of the single-kernel chains, β = 1, one step a point of the stream."""
    height = 1 / jnp.sqrt(2 * jnp.pi * bandwidth**2)

    def step(alpha, now):
        theta, g, w = now
        pi = jnp.exp(-(alpha**2) / 2) / jnp.sqrt(2 * jnp.pi)
        k = height * jnp.exp(-0.5 * ((theta - alpha) / bandwidth) ** 2)
        moved = alpha + step_size * pi * (-pi * alpha - 0.5 * k * g) + jnp.sqrt(step_size) * pi * w
        return jnp.clip(moved, -4, 4), histogram(moved)

    return walk(key, step, updates, jump, number, chains)


@eqx.filter_jit
def multi(key, step_size, bandwidth, updates, jump, number, chains):
    """The same of the multi-kernel chains on the points of the newest update."""

    def run(alpha, x, gradient, noise):
        def step(alpha, w):
            squares = ((x[None, :] - alpha[:, None]) / bandwidth) ** 2
            share = jax.nn.softmax(-0.5 * squares, 1)
            moved = alpha - step_size * (share @ gradient) + jnp.sqrt(2 * step_size) * w
            return jnp.clip(moved, -4, 4), histogram(moved)

        return lax.scan(step, alpha, noise)

    def update(alpha, t):
        x, gradient, _ = points(jax.random.fold_in(key, t), t, jump, number)
        noise = jax.random.normal(jax.random.fold_in(key, t + 10**6), (40, chains))
        alpha, counts = run(alpha, x[:, 0], gradient[:, 0], noise)
        return alpha, jnp.sum(counts, 0)

    return lax.scan(update, jnp.zeros(chains), jnp.arange(updates))[1]


def walk(key, step, updates, jump, number, chains):
    def update(alpha, t):
        x, gradient, _ = points(jax.random.fold_in(key, t), t, jump, number)
        noise = jax.random.normal(jax.random.fold_in(key, t + 10**6), (number, chains))
        alpha, counts = lax.scan(step, alpha, (x[:, 0], gradient[:, 0], noise))
        return alpha, jnp.sum(counts, 0)

    return lax.scan(update, jnp.zeros(chains), jnp.arange(updates))[1]


def histogram(alpha):
    place = jnp.floor((alpha - EDGES[0]) / (EDGES[1] - EDGES[0])).astype(jnp.int32)
    return jnp.sum(place[:, None] == jnp.arange(len(GRID))[None, :], 0)


@eqx.filter_jit
def averages(key, bandwidth, updates, jump, number):
    """Numerators and denominators (updates, grid) of Nadaraya–Watson on each update."""

    def update(_, t):
        x, gradient, _ = points(jax.random.fold_in(key, t), t, jump, number)
        k = jnp.exp(-0.5 * ((x[:, 0][None, :] - jnp.asarray(GRID, x.dtype)[:, None]) / bandwidth) ** 2)
        return None, (k @ gradient[:, 0], jnp.sum(k, 1))

    return lax.scan(update, None, jnp.arange(updates))[1]


def remembered(sums, forgetting):
    """Sums over updates that forget."""
    out, total = np.empty(sums.shape), np.zeros(sums.shape[1:])
    for t, new in enumerate(np.asarray(sums, float)):
        total = forgetting * total + new
        out[t] = total
    return out


# --- errors ------------------------------------------------------------------------------------------------


def integrated(gradient):
    steps = (gradient[:, 1:] + gradient[:, :-1]) / 2 * np.diff(GRID)
    return np.concatenate([np.zeros((len(gradient), 1)), np.cumsum(steps, 1)], 1)


def error(found, truth, *, centred):
    gap = found - truth
    gap = gap - gap.mean(1, keepdims=True) if centred else gap
    return np.sqrt(np.mean(gap**2, 1))


def runs(seed, updates, jump, number, chains):
    """Errors (updates,) of gradient and loss on one stream: method → setting → two curves; and the changes found."""
    key = jax.random.key(seed)
    wells = [loss_at(t, jump) for t in (0, updates)]
    at = jnp.asarray(GRID)[:, None]
    slopes, values = (
        np.stack([np.asarray(jax.vmap(getattr(w, what))(at)).ravel() for w in wells]) for what in ("gradient", "value")
    )
    which = (np.arange(updates) >= jump).astype(int)
    slope, value = slopes[which], values[which]

    def both(gradient):
        return error(gradient, slope, centred=False), error(integrated(gradient), value, centred=True)

    found, changes = {}, {}
    box = (-4.0, 4.0)
    for name, field in (
        ("adaptive", mj.AdaptiveField(*box)),
        ("adaptive, no Hessians", mj.AdaptiveField(*box, hessians=False)),
        ("newest update alone", mj.AdaptiveField(*box, forgetting=0.0)),
        ("all the past", mj.AdaptiveField(*box, forgetting=1.0)),
    ):
        gradient, count = adaptive(key, field, updates, jump, number)
        found[name] = {"": both(np.asarray(gradient, float))}
        changes[name] = int(count[-1])
    for name, method in (("single", single), ("multi", multi)):
        found[f"{name}-kernel chain"] = {}
        for eta, h in itertools.product(STEPS[name], BANDWIDTHS):
            counts = method(key, jnp.float32(eta), jnp.float32(h), updates, jump, number, chains)
            for rho in FORGETTING:
                density = remembered(np.asarray(counts), rho) + 0.5
                curve = error(-np.log(density), value, centred=True)
                found[f"{name}-kernel chain"][eta, h, rho] = (np.full(updates, np.nan), curve)
    found["kernel average"] = {}
    for h in BANDWIDTHS:
        n, w = averages(key, jnp.float32(h), updates, jump, number)
        for rho in FORGETTING:
            gradient = remembered(n, rho) / np.maximum(remembered(w, rho), 1e-6)
            found["kernel average"][h, rho] = both(gradient)
    return found, changes


def summary(all_runs, updates, jump):
    """At rest and after the jump: the best setting of each method for each question."""
    rest = np.r_[2 * jump // 3 : jump, updates - (updates - jump) // 3 : updates]
    curves = {
        name: {s: np.sqrt(np.mean([np.square(run[name][s]) for run in all_runs], 0)) for s in all_runs[0][name]}
        for name in all_runs[0]
    }
    rows = {}
    for name, settings in curves.items():
        at_rest = {s: np.sqrt(np.mean(pair[:, rest] ** 2, 1)) for s, pair in settings.items()}
        rows[name] = {
            "gradient at rest": float(np.min([e[0] for e in at_rest.values()])),
            "loss at rest": float(np.min([e[1] for e in at_rest.values()])),
        }
    chain = min(rows[name]["loss at rest"] for name in rows if "chain" in name)
    for name, settings in curves.items():
        back = []
        for pair in settings.values():
            good = np.flatnonzero(pair[1, jump:] <= 1.5 * chain)
            back.append(int(good[0]) + 1 if len(good) else updates)
        rows[name]["updates to recover"] = min(back)
        rows[name]["loss at rest, of the best chain"] = rows[name]["loss at rest"] / chain
    return rows


def speed(legs, number):
    """Updates a second, and bytes of the field, as the episodes seen grow."""
    field, rows, seen = mj.AdaptiveField(-4.0, 4.0), [], 0
    batch = as_samples(*points(jax.random.key(0), 0, 1, number))
    jax.block_until_ready(field.update(batch).reading.theta)
    many = eqx.filter_jit(lambda f, length: lax.scan(lambda g, _: (g.update(batch), None), f, None, length)[0])
    for leg in legs:
        jax.block_until_ready(many(field, 20).updates)
        start = time.perf_counter()
        jax.block_until_ready(many(field, 20).updates)
        each = (time.perf_counter() - start) / 20
        field = many(field, max(1, (leg - seen) // number))
        seen = leg
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(field))
        rows.append({"episodes": leg, "updates a second": 1 / each, "bytes": size})
        print(f"  {leg:>10,} episodes: {1 / each:8.0f} updates a second before them, field of {size:,} bytes")
    return rows


def main():
    fast = parser(__doc__ or "", "one short stream, fewer chains").parse_args().fast
    updates, number, chains, seeds = (60, 200, 64, 1) if fast else (240, 200, 256, 4)
    jump = updates // 2
    results = {"machine": machine(), "updates": updates, "points": number, "chains": chains, "streams": seeds}
    print(results["machine"])
    found = [runs(seed, updates, jump, number, chains) for seed in range(seeds)]
    results["rows"] = summary([run for run, _ in found], updates, jump)
    results["changes found"] = [changes for _, changes in found]
    for name, row in results["rows"].items():
        print(f"  {name:24}", "  ".join(f"{what} {value:.4g}" for what, value in row.items()))
    print("  changes found:", results["changes found"])
    results["speed"] = speed(
        (10**3, 10**4, 10**5) if fast else (10**3, 10**4, 10**5, 10**6, 10**7), number if fast else 2000
    )
    save("adaptive", results, fast=fast)


if __name__ == "__main__":
    main()
