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

Then two losses that move slowly: the tilt of the double well drifts (`DriftingTilt`), and in the plane a bowl turns
(`TurningBowl`); each stands still, moves for a third of the time, and stands still again. Errors of the gradient in
each of the three stretches (their last two thirds), with the mean ratio of error to standard error, for the adaptive
field; and, in hindsight, for the best constant forgetting of the same sums and of the kernel average.

Last, updates a second of processor time and the bytes of the field after 1e3 to 1e7 episodes.
"""

import itertools
import time

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from common import RESULTS, machine, parser, save
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
    rows, best = {}, {}
    for name, settings in curves.items():
        at_rest = {s: np.sqrt(np.mean(pair[:, rest] ** 2, 1)) for s, pair in settings.items()}
        rows[name] = {
            "gradient at rest": float(np.min([e[0] for e in at_rest.values()])),
            "loss at rest": float(np.min([e[1] for e in at_rest.values()])),
        }
        best[name] = settings[min(at_rest, key=lambda s: at_rest[s][1])][1]
    chain = min(rows[name]["loss at rest"] for name in rows if "chain" in name)
    for name, settings in curves.items():
        back = []
        for pair in settings.values():
            good = np.flatnonzero(pair[1, jump:] <= 1.5 * chain)
            back.append(int(good[0]) + 1 if len(good) else updates)
        rows[name]["updates to recover"] = min(back)
        rows[name]["loss at rest, of the best chain"] = rows[name]["loss at rest"] / chain
    return rows, best


# --- slow motion -------------------------------------------------------------------------------------------


def slow_legs(dim, updates):
    """The loss at each update, a box, and where its gradient is compared."""
    third = updates // 3
    if dim == 1:
        moving, box, axis = mj.potentials.DriftingTilt(tilt=0.3, rate=1.2 / third), 4.0, jnp.linspace(-1.2, 1.2, 13)
        at = axis[:, None]
    else:
        moving, box, axis = mj.potentials.TurningBowl(rate=0.8 / third), 3.5, jnp.linspace(-1.0, 1.0, 5)
        at = jnp.stack(jnp.meshgrid(axis, axis, indexing="ij"), -1).reshape(-1, 2)
    return (lambda t: moving.at(jnp.clip(t - third, 0, third))), np.full(dim, box), at


@eqx.filter_jit
def slow_ours(key, field, loss_at_time, at, updates, number):
    """Errors and standard errors of the gradient, (updates, points, d)."""

    def update(field, t):
        x, gradient, hessian = slow_points(key, loss_at_time(t), t, number, at.shape[1])
        field = field.update(as_samples(x, gradient, hessian))
        found = jax.vmap(field)(at)
        return field, (found.value - jax.vmap(loss_at_time(t).gradient)(at), found.stderr)

    return lax.scan(update, field, jnp.arange(updates))[1]


def slow_points(key, loss, t, number, dim):
    place, noise = jax.random.split(jax.random.fold_in(key, t))
    x = jax.random.normal(place, (number, dim))
    gradient = jax.vmap(loss.gradient)(x) + NOISE * jax.random.normal(noise, x.shape)
    return x, gradient, jax.vmap(loss.hessian)(x)


@eqx.filter_jit
def slow_theirs(key, loss_at_time, at, bandwidth, updates, number):
    """The sums of Nadaraya–Watson, and the truth."""

    def update(_, t):
        x, gradient, _ = slow_points(key, loss_at_time(t), t, number, at.shape[1])
        squares = jnp.sum((x[None] - at[:, None]) ** 2, -1) / bandwidth**2
        k = jnp.exp(-0.5 * squares)
        return None, (k @ gradient, jnp.sum(k, 1), jax.vmap(loss_at_time(t).gradient)(at))

    return lax.scan(update, None, jnp.arange(updates))[1]


def slow(dim, updates, number, seeds, settings):
    """Root mean square errors in the three stretches, by method; z is the error over the standard error."""
    loss_at_time, box, at = slow_legs(dim, updates)
    third = updates // 3
    parts = {
        name: np.arange(start + third // 3, start + third)
        for name, start in (("still before", 0), ("moving", third), ("still after", 2 * third))
    }

    def by_part(errors):  # (seeds, updates, ...)
        return {name: float(np.sqrt(np.mean(np.square(errors[:, part])))) for name, part in parts.items()}

    keys = [jax.random.key(50 + seed) for seed in range(seeds)]
    rows, curves = {}, {}
    for name, chosen in settings.items():
        field = mj.AdaptiveField(-box, box, **chosen)
        runs = [slow_ours(key, field, loss_at_time, at, updates, number) for key in keys]
        error, stderr = (np.stack([np.asarray(run[k], float) for run in runs]) for k in (0, 1))
        rows[name] = by_part(error)
        rows[name]["z"] = by_part(np.where(np.isfinite(stderr), error / stderr, 0))
        curves[name] = np.sqrt(np.mean(error**2, (0, 2, 3))).tolist()
    for h in BANDWIDTHS:
        sums = [slow_theirs(key, loss_at_time, at, h, updates, number) for key in keys]
        for rho in FORGETTING:
            error = np.stack(
                [
                    remembered(n, rho) / np.maximum(remembered(w, rho), 1e-6)[..., None] - np.asarray(g)
                    for n, w, g in sums
                ]
            )
            rows[f"kernel average, {h}, {rho}"] = by_part(error)
    best = {part: min(row[part] for name, row in rows.items() if "kernel" in name) for part in parts}
    constant = {part: min(row[part] for name, row in rows.items() if "forgetting" in name) for part in parts}
    rows = {name: row for name, row in rows.items() if "kernel" not in name and "forgetting" not in name}
    rows |= {"best constant forgetting": constant, "best kernel average": best}
    for name, row in rows.items():
        print(f"  d = {dim}, {name:26}", row)
    return {"updates": updates, "points": number, "streams": seeds, "rows": rows, "curves": curves}


# --- speed -------------------------------------------------------------------------------------------------


def speed(legs, number):
    """Updates a CPU second, of so many episodes each, and bytes of the field, as the episodes seen grow."""
    field, rows, seen = mj.AdaptiveField(-4.0, 4.0), [], 0
    update = eqx.filter_jit(lambda f, batch, length: lax.scan(lambda g, _: (g.update(batch), None), f, None, length)[0])
    small, large = (as_samples(*points(jax.random.key(0), 0, 1, size)) for size in (number, 20_000))
    jax.block_until_ready(update(field, small, 20).updates)
    for leg in legs:
        size = number if leg - seen < 20_000 else 20_000
        for _ in range(max(1, (leg - seen) // (20 * size))):
            field = update(field, small if size == number else large, 20)
            seen += 20 * size
        times = []
        for _ in range(5):
            start = time.process_time()  # what others do on the machine is not our speed
            jax.block_until_ready(update(field, small, 20).updates)
            times.append((time.process_time() - start) / 20)
        bytes_of = sum(leaf.nbytes for leaf in jax.tree.leaves(field))
        rows.append({"episodes": seen, "updates a CPU second": 1 / min(times), "bytes": bytes_of})
        print(f"  {seen:>10,} episodes: {1 / min(times):8.0f} updates a CPU second, field of {bytes_of:,} bytes")
    return rows


def draw(curves, updates, jump, studies):
    """The error of the loss over time on the stream that jumps, each method at its best; and the slow ones."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12.0, 4.0), layout="constrained")
    axes = figure.subplots(1, 1 + len(studies))
    for name, curve in curves.items():
        axes[0].semilogy(np.arange(updates), curve, label=name, linewidth=2.5 if name == "adaptive" else 1.2)
    axes[0].axvline(jump, color="0.6", linestyle="--", linewidth=1)
    axes[0].set(title="the tilt jumps", ylabel="RMSE of the loss")
    for ax, (title, study) in zip(axes[1:], studies.items(), strict=True):
        for name, curve in study["curves"].items():
            if "forgetting" not in name:
                ax.semilogy(curve, label=name, linewidth=2.5 if name == "adaptive" else 1.2)
        for edge in (1, 2):
            ax.axvline(edge * study["updates"] // 3, color="0.6", linestyle="--", linewidth=1)
        ax.set(title=title, ylabel="RMSE of the gradient")
    for ax in axes:
        ax.set_xlabel("updates")
        ax.legend(frameon=False, fontsize=7)
    RESULTS.mkdir(exist_ok=True)
    figure.savefig(RESULTS / "adaptive.png", dpi=120)


def main():
    fast = parser(__doc__ or "", "one short stream, fewer chains").parse_args().fast
    updates, number, chains, seeds = (60, 200, 64, 1) if fast else (240, 200, 256, 2)
    jump = updates // 2
    results = {"machine": machine(), "updates": updates, "points": number, "chains": chains, "streams": seeds}
    print(results["machine"])
    found = [runs(seed, updates, jump, number, chains) for seed in range(seeds)]
    results["rows"], curves = summary([run for run, _ in found], updates, jump)
    results["changes found"] = [changes for _, changes in found]
    for name, row in results["rows"].items():
        print(f"  {name:24}", "  ".join(f"{what} {value:.4g}" for what, value in row.items()))
    print("  changes found:", results["changes found"])
    save("adaptive", results, fast=fast)  # at each stage: the whole takes a while
    settings = {"adaptive": {}, "newest update alone": {"forgetting": 0.0}, "all the past": {"forgetting": 1.0}}
    constant = {f"forgetting {rho}": {"forgetting": rho} for rho in (0.5, 0.75, 0.9, 0.97)}
    results["slow"] = studies = {}
    studies["the tilt drifts"] = slow(1, 60 if fast else 90, number, 1 if fast else 2, {**settings, **constant})
    plane = {name: {**chosen, "intervals": 6} for name, chosen in {**settings, **constant}.items()}
    studies["d = 2: the bowl turns"] = slow(2, 12 if fast else 60, 2 * number, 1, plane)
    save("adaptive", results, fast=fast)
    if not fast:
        draw(curves, updates, jump, studies)
    legs = (10**3, 10**4, 10**5) if fast else (10**3, 10**4, 10**5, 10**6, 10**7)
    results["speed"] = speed(legs, 50)
    save("adaptive", results, fast=fast)


if __name__ == "__main__":
    main()
