"""How fast is the passive chain, per chain and step?

Run `python benchmarks/chain.py` (some three minutes). A bank of 5000 episodes drives 256 chains of 2300 steps, against
NumPy evaluating the same ratio over all samples; fresh episodes at every step (the paper's Algorithm 1), against NumPy
simulating and weighing them; and the chain's own overhead against blackjax's SGLD on the true gradient. Written to
results/chain.json.
"""

import argparse
import time

import blackjax
import jax
import jax.numpy as jnp
import numpy as np
from _timing import machine, race, save
from observe import in_numpy

import malliavin_jax as mj

EPISODES, ETA, BETA, LENGTH = 5000, 0.05, 1.0, 0.5
QUARTIC = mj.potentials.Quartic()
LEARNER = mj.ForwardLearner(QUARTIC, lambda key: jax.random.normal(key, (1,)), 0.01)


def walk(field, chains, steps):
    start = jnp.zeros((chains, 1))

    def run(seed):
        chain = mj.passive_langevin(
            jax.random.key(seed), field, start, num_steps=steps, step_size=ETA, inverse_temperature=BETA
        )
        return jax.block_until_ready(chain.positions)

    return run


def ratio_in_numpy(x, gradient, hessian, weight, alpha):
    """The debiased kernel's ratio at α (chains,), over all samples at once, float32."""
    y = x[None] - alpha[:, None]
    decay = np.exp(-np.abs(y) / np.float32(LENGTH))
    G = np.sign(y) * decay / 2
    w = decay / np.float32(2 * LENGTH) + G * weight[None]
    return (w @ gradient - G @ hessian) / w.sum(1)


def euler_step(alpha, gradient, noise):
    return alpha - np.float32(ETA) * gradient + np.float32(np.sqrt(2 * ETA / BETA)) * noise


def bank_in_numpy(samples, chains, steps):
    arrays = (samples.x, samples.gradient, samples.hessian, samples.weight)
    columns = [np.asarray(a, np.float32).reshape(-1) for a in arrays]
    rng = np.random.Generator(np.random.SFC64(0))

    def run():
        alpha = np.zeros(chains, np.float32)
        for _ in range(steps):
            noise = rng.standard_normal(chains, dtype=np.float32)
            alpha = euler_step(alpha, ratio_in_numpy(*columns, alpha), noise)
        return alpha

    return run


def fresh_in_numpy(chains, steps):
    rng = np.random.Generator(np.random.SFC64(0))

    def run():
        alpha = np.zeros(chains, np.float32)
        for _ in range(steps):
            columns = in_numpy(EPISODES)
            noise = rng.standard_normal(chains, dtype=np.float32)
            alpha = euler_step(alpha, ratio_in_numpy(*columns, alpha), noise)
        return alpha

    return run


def in_blackjax(chains, steps):
    """SGLD on the true gradient: a chain of 256 positions at once, noise drawn in every step."""
    sgld = blackjax.sgld(lambda position, batch: -jax.vmap(QUARTIC.gradient)(position))

    @jax.jit
    def run(key):
        def step(position, key):
            position = sgld.step(key, position, 0.0, ETA)
            return position, position

        return jax.lax.scan(step, jnp.zeros((chains, 1)), jax.random.split(key, steps))[1]

    return lambda seed: jax.block_until_ready(run(jax.random.key(seed)))


def report(title, runs, work, ours, rounds):
    """`work`: how many chain-steps each contestant does in a run."""
    first, best = race(runs, rounds)
    each = {name: seconds / work[name] for name, seconds in best.items()}
    ratios = {name: seconds / each[ours] for name, seconds in each.items()}
    print(title)
    for name, seconds in each.items():
        times = f"{1e6 * seconds:10.3f} µs a chain-step  {ratios[name]:9.2f} × ours"
        print(f"  {name:34}{times}  (first call {first[name]:.1f} s)")
    return {"seconds_a_chain_step": each, "ratio_to_ours": ratios, "first_call_s": first}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fast", action="store_true", help="fewer steps")
    fast = parser.parse_args().fast
    chains, steps = 256, 230 if fast else 2300
    began = time.perf_counter()
    samples = mj.observe(jax.random.key(0), LEARNER, num_episodes=EPISODES, times=[0.8])
    assisted, plain = mj.MalliavinField(samples), mj.MalliavinField(samples, mj.Laplace(LENGTH), control=None)
    results = {"machine": machine(), "episodes": EPISODES, "chains": chains, "steps": steps}
    print(results["machine"])

    numpy_steps = 5 if fast else 20
    ours, with_control = walk(plain, chains, steps), walk(assisted, chains, steps)
    in_plain_numpy = bank_in_numpy(samples, chains, numpy_steps)
    results["bank"] = report(
        f"bank of {EPISODES} episodes, {chains} chains, {steps} steps",
        {"this library": lambda: ours(0), "the same, with control": lambda: with_control(0), "NumPy": in_plain_numpy},
        {"this library": chains * steps, "the same, with control": chains * steps, "NumPy": chains * numpy_steps},
        "this library", 3,
    )  # fmt: skip

    few, fresh_steps, numpy_steps = 8, 100 if fast else 400, 5 if fast else 20
    field = mj.FreshField(LEARNER, mj.Laplace(LENGTH), num_episodes=EPISODES, time=0.8)
    fresh, fresh_numpy = walk(field, few, fresh_steps), fresh_in_numpy(few, numpy_steps)
    results["fresh"] = report(
        f"fresh episodes at every step, {EPISODES} of 80 steps, shared by {few} chains",
        {"this library": lambda: fresh(0), "NumPy": fresh_numpy},
        {"this library": few * fresh_steps, "NumPy": few * numpy_steps},
        "this library", 3,
    )  # fmt: skip

    exact, sgld = walk(mj.TrueField(QUARTIC), chains, steps), in_blackjax(chains, steps)
    results["overhead"] = report(
        f"the chain itself, on the true gradient, {chains} chains, {steps} steps",
        {"this library": lambda: exact(0), "blackjax SGLD": lambda: sgld(0)},
        dict.fromkeys(("this library", "blackjax SGLD"), chains * steps),
        "this library", 5,
    )  # fmt: skip
    results["seconds"] = time.perf_counter() - began
    if not fast:
        print("written to", save("chain", results).name)


if __name__ == "__main__":
    main()
