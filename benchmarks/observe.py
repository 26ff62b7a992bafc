"""How fast are weighed episodes made?

Run `python benchmarks/observe.py` (`--fast` for a tenth of the episodes). It prints, and writes to
results/observe.json, the time of 100 000 episodes × 80 steps in float32 with their weights, beside NumPy doing the
same, diffrax making the paths only, and drawing the same number of normals and nothing else.
"""

import argparse

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from _timing import machine, race, save
from jax import lax

import malliavin_jax as mj
from malliavin_jax._base.checks import floats_to_arrays
from malliavin_jax.learner import random as _noise
from malliavin_jax.samples.simulated import observe_steps

STEPS, STEP_SIZE = 80, 0.01


def ours(key, dim, scheme, episodes, steps=STEPS):
    potential = mj.potentials.Quartic(0.5 if dim > 1 else 0.0)
    learner = mj.ForwardLearner(potential, lambda k: jax.random.normal(k, (dim,), jnp.float32), STEP_SIZE)
    learner = floats_to_arrays(learner, jnp.float32)
    return jax.jit(lambda k: observe_steps(k, learner, scheme, episodes, (steps,)))


def in_numpy(episodes):
    """The same chain and the same canonical recursion, vectorised over episodes, float32, in place where it can be."""
    rng = np.random.Generator(np.random.SFC64(0))
    eps, sigma = np.float32(STEP_SIZE), np.float32(np.sqrt(2 * STEP_SIZE))
    x = rng.standard_normal(episodes, dtype=np.float32)
    g, h = x**3 + x, 3 * x * x + 1
    F, A, E = np.zeros_like(x), np.zeros_like(x), np.zeros_like(x)
    noise = np.empty_like(x)
    for _ in range(STEPS):
        rng.standard_normal(out=noise, dtype=np.float32)
        noise *= sigma
        new = x - eps * g
        new += noise
        square = new * new
        g_new, h_new = (square + 1) * new, 3 * square + 1
        m = 1 - eps * h
        b = (h_new - h) * (new - x)
        b *= np.float32(0.5)
        noise *= np.float32(1 / (2 * STEP_SIZE))
        F *= m
        F += noise
        F += b * A
        mA = m * A
        E *= m * m * m
        E += mA * b * mA
        A = m * mA
        A += 1
        x, g, h = new, g_new, h_new
    return x, g, h, (F - 2 * E / A) / A


def in_diffrax(episodes):
    """The paths only, with diffrax's fast Brownian motion."""
    terms = lambda path: diffrax.MultiTerm(  # noqa: E731
        diffrax.ODETerm(lambda t, y, args: -(y**3 + y)),
        diffrax.ControlTerm(lambda t, y, args: jnp.sqrt(jnp.float32(2.0)), path),
    )

    def episode(key):
        start, noise = jax.random.split(key)
        brownian = diffrax.UnsafeBrownianPath(shape=(), key=noise)
        solution = diffrax.diffeqsolve(
            terms(brownian), diffrax.Euler(), 0.0, STEPS * STEP_SIZE, STEP_SIZE, jax.random.normal(start, ()),
            stepsize_controller=diffrax.ConstantStepSize(), saveat=diffrax.SaveAt(t1=True),
            adjoint=diffrax.DirectAdjoint(), max_steps=STEPS + 2,
        )  # fmt: skip
        return solution.ys

    return eqx.filter_jit(lambda key: jax.vmap(episode)(jax.random.split(key, episodes)))


def normals_only(episodes):
    """The fastest exact way found to draw the same normals: both words of each hash, added up as they come."""

    @jax.jit
    def draw(key):
        words = jax.vmap(_noise.key_words)(jax.random.split(key, episodes))

        def body(total, block):
            one, other = _noise.box_muller(*_noise.threefry(words, (jnp.zeros((), jnp.uint32), block)))
            return total + one + other, None

        blocks = jnp.arange(STEPS // 2, dtype=jnp.uint32)
        return lax.scan(body, jnp.zeros(episodes, jnp.float32), blocks)[0]

    return draw


def normals_stored(episodes):
    """The same numbers, kept: 80 arrays of normals."""

    @jax.jit
    def draw(key):
        words = jax.vmap(_noise.key_words)(jax.random.split(key, episodes))

        def body(_, block):
            pair = _noise.box_muller(*_noise.threefry(words, (jnp.zeros((), jnp.uint32), block)))
            return None, lax.complex(*pair)

        return lax.scan(body, None, jnp.arange(STEPS // 2, dtype=jnp.uint32))[1]

    return draw


def normals_of_jax(episodes):
    @jax.jit
    def draw(key):
        body = lambda total, k: (total + jax.random.normal(k, (episodes,), jnp.float32), None)  # noqa: E731
        return lax.scan(body, jnp.zeros(episodes, jnp.float32), jax.random.split(key, STEPS))[0]

    return draw


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fast", action="store_true", help="a tenth of the episodes, fewer rounds")
    fast = parser.parse_args().fast
    episodes, rounds = (10_000, 5) if fast else (100_000, 15)
    key = jax.random.key(0)
    results = {"machine": machine(), "episodes": episodes, "steps": STEPS}
    print(results["machine"])

    line = ours(key, 1, mj.Canonical(), episodes)
    diffrax_run, draw, jax_draw = in_diffrax(episodes), normals_only(episodes), normals_of_jax(episodes)
    stored = normals_stored(episodes)
    first, best = race(
        {
            "malliavin_jax": lambda: line(key),
            "normals, added up": lambda: draw(key),
            "normals, stored": lambda: stored(key),
            "normals, jax.random": lambda: jax_draw(key),
            "numpy": lambda: in_numpy(episodes),
            "diffrax, path only": lambda: diffrax_run(key),
        },
        rounds,
    )
    ratios = {name: seconds / best["malliavin_jax"] for name, seconds in best.items()}
    results["one_dimension"] = {"first_call_s": first, "best_s": best, "ratio_to_ours": ratios}
    print(f"{episodes} episodes × {STEPS} steps, d = 1, canonical weights, float32")
    for name, seconds in best.items():
        print(f"  {name:24}{1e3 * seconds:9.1f} ms   {ratios[name]:6.2f} × ours   (first call {first[name]:.1f} s)")

    wide = {
        "d = 2, Canonical": ours(key, 2, mj.Canonical(), episodes),
        "d = 3, Canonical": ours(key, 3, mj.Canonical(), episodes),
        "d = 10, Windowed": ours(key, 10, mj.Windowed(4.0, neumann=4), episodes),
    }
    first, best = race({name: (lambda run=run: run(key)) for name, run in wide.items()}, 2)
    results["more_dimensions"] = {"first_call_s": first, "best_s": best}
    for name, seconds in best.items():
        print(f"  {name:24}{1e3 * seconds:9.1f} ms   {episodes / seconds:12.0f} episodes/s")

    results["temporary_bytes_per_episode"] = {}
    for steps in (80, 320):
        memory = ours(key, 1, mj.Canonical(), episodes, steps).lower(key).compile().memory_analysis()
        results["temporary_bytes_per_episode"][steps] = memory.temp_size_in_bytes / episodes
        print(f"  {steps} steps: {memory.temp_size_in_bytes / episodes:.0f} temporary bytes an episode")
    if not fast:
        print("written to", save("observe", results).name)


if __name__ == "__main__":
    main()
