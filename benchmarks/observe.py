"""How fast are weighed episodes made?

Run `python benchmarks/observe.py` (`--fast` for a tenth of the episodes). It prints, and writes to
results/observe.json, the time of 100 000 episodes × 80 steps in float32 with their weights (the default ones,
`Adapted`, and `Canonical` ones), beside NumPy doing the same as the latter, diffrax making the paths only, and drawing
the same number of normals and nothing else.
"""

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from common import STEP_SIZE, STEPS, machine, normals, parser, quartic, race, save, show, weighed
from jax import lax

import malliavin_jax as mj


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


def normals_of_jax(episodes):
    @jax.jit
    def draw(key):
        body = lambda total, k: (total + jax.random.normal(k, (episodes,), jnp.float32), None)  # noqa: E731
        return lax.scan(body, jnp.zeros(episodes, jnp.float32), jax.random.split(key, STEPS))[0]

    return draw


def one_dimension(episodes, rounds):
    """The race of all contestants, d = 1."""
    key = jax.random.key(0)
    runs = {
        "malliavin_jax": weighed(quartic(1), 1, mj.Adapted(3.0), episodes),
        "malliavin_jax, Canonical": weighed(quartic(1), 1, mj.Canonical(), episodes),
        "normals, added up": normals(STEPS, episodes),
        "normals, stored": normals(STEPS, episodes, stored=True),
        "normals, jax.random": normals_of_jax(episodes),
        "numpy": lambda key: in_numpy(episodes),
        "diffrax, path only": in_diffrax(episodes),
    }
    first, best = race({name: (lambda run=run: run(key)) for name, run in runs.items()}, rounds)
    title = f"{episodes} episodes × {STEPS} steps, d = 1, float32"
    ratios = show(title, first, best, ours="malliavin_jax", unit="ms")
    return {"first_call_s": first, "best_s": best, "ratio_to_ours": ratios}


def more_dimensions(episodes):
    """What a weight costs beyond one dimension."""
    key, windowed = jax.random.key(0), mj.Windowed(4.0, neumann=4)
    runs = {
        "d = 2, Adapted": weighed(quartic(2), 2, mj.Adapted(3.0), episodes),
        "d = 3, Adapted": weighed(quartic(3), 3, mj.Adapted(3.0), episodes),
        "d = 10, Adapted": weighed(quartic(10), 10, mj.Adapted(3.0), episodes),
        "d = 2, Canonical": weighed(quartic(2), 2, mj.Canonical(), episodes),
        "d = 3, Canonical": weighed(quartic(3), 3, mj.Canonical(), episodes),
        "d = 10, Windowed": weighed(quartic(10), 10, windowed, episodes),
    }
    first, best = race({name: (lambda run=run: run(key)) for name, run in runs.items()}, 2)
    for name, seconds in best.items():
        print(f"  {name:24}{1e3 * seconds:9.1f} ms   {episodes / seconds:12.0f} episodes/s")
    return {"first_call_s": first, "best_s": best}


def temporary_bytes(episodes, steps):
    """Memory of the compiled program besides its results, for each episode."""
    program = weighed(quartic(1), 1, mj.Canonical(), episodes, steps).lower(jax.random.key(0)).compile()
    bytes_each = program.memory_analysis().temp_size_in_bytes / episodes
    print(f"  {steps} steps: {bytes_each:.0f} temporary bytes an episode")
    return bytes_each


def main():
    fast = parser(__doc__, "a tenth of the episodes, fewer rounds").parse_args().fast
    episodes, rounds = (10_000, 5) if fast else (100_000, 15)
    results = {"machine": machine(), "episodes": episodes, "steps": STEPS}
    print(results["machine"])
    results["one_dimension"] = one_dimension(episodes, rounds)
    results["more_dimensions"] = more_dimensions(episodes)
    results["temporary_bytes_per_episode"] = {steps: temporary_bytes(episodes, steps) for steps in (80, 320)}
    save("observe", results, fast=fast)


if __name__ == "__main__":
    main()
