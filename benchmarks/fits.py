"""How long does it take to fit a spline, and to make a field of it?

Run `python benchmarks/fits.py` (some two minutes; `--fast` for a glance). A spline is fitted to gradients with noise
and to exact Hessians, on a mesh that is given and on the one that it chooses, in one to three dimensions; beside it
`MalliavinField` of as many samples. The first call compiles what there is to compile; the best of two later ones, on
other data of the same size, is what a fit takes. Seconds by the clock; written to results/fits.json.
"""

import functools

import jax
from common import machine, parser, quartic, race, save

import malliavin_jax as mj

NOISE = 2.0
MESHES = {1: 60, 2: 28, 3: 8}  # cells along each axis where they are given
SIZES = {1: (10_000, 1_000_000), 2: (10_000, 1_000_000), 3: (10_000,)}
FIELD_EPISODES = 10_000


@functools.partial(jax.jit, static_argnums=(1, 2))
def data(key, dim, points):
    """Positions of a standard normal, gradients with noise, exact Hessians."""
    places, errors = jax.random.split(key)
    x = jax.random.normal(places, (points, dim))
    gradient = jax.vmap(quartic(dim).gradient)(x) + NOISE * jax.random.normal(errors, x.shape)
    return x, gradient, jax.vmap(quartic(dim).hessian)(x)


def fit(sets, intervals):
    """A fit to the next of some data sets."""
    return mj.potentials.Spline.fit(*next(sets), intervals=intervals).coefficients


def field(sets):
    return jax.tree.leaves(mj.MalliavinField(next(sets)))


def measure(runs, rounds=2):
    first, best = race(runs, rounds)
    for name in runs:
        print(f"  {name:34}{best[name]:10.2f} s  (first call {first[name]:.1f} s)", flush=True)
    return {name: {"seconds": best[name], "first_call_s": first[name]} for name in runs}


def main():
    fast = parser(__doc__, "the smaller sizes").parse_args().fast
    results = {"machine": machine(), "noise": NOISE}
    print(results["machine"])
    for dim, sizes in SIZES.items():
        for points in sizes[:1] if fast else sizes:
            print(f"d = {dim}, {points} points")
            made = [jax.block_until_ready(data(jax.random.key(k), dim, points)) for k in range(3)]
            runs = {
                f"{MESHES[dim]} cells an axis": functools.partial(fit, iter(made), MESHES[dim]),
                "the mesh that it chooses": functools.partial(fit, iter(made), None),
            }
            results[f"d = {dim}, {points} points"] = measure(runs)
        learner = mj.ForwardLearner(quartic(dim), mj.initial.Normal(dim=dim), 0.01, gradient_noise=NOISE)
        observed = functools.partial(mj.observe, learner=learner, num_episodes=FIELD_EPISODES, times=[0.8])
        made = [jax.block_until_ready(observed(jax.random.key(k))) for k in range(3)]
        name = f"d = {dim}, MalliavinField of {FIELD_EPISODES} episodes"
        print(name)
        results[name] = measure({"its fits, its judge, its table": functools.partial(field, iter(made))})
    save("fits", results, fast=fast)


if __name__ == "__main__":
    main()
