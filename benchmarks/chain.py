"""How fast is the passive chain, per chain and step?

Run `python benchmarks/chain.py` (a minute and a half). A bank of 5000 episodes drives 256 chains of 2300 steps, against
NumPy evaluating the same ratio over all samples; in two and three dimensions the default field, a fitted model, against
the whole correction, which sums over all samples; fresh episodes at every step (the paper's Algorithm 1), against NumPy
simulating and weighing them; and the chain's own overhead against blackjax's SGLD on the true gradient. Written to
results/chain.json.
"""

import itertools
import time

import blackjax
import jax
import jax.numpy as jnp
import numpy as np
from common import machine, parser, quartic, race, save, show
from observe import in_numpy

import malliavin_jax as mj

EPISODES, ETA, BETA, LENGTH = 5000, 0.05, 1.0, 0.5
MANY_EPISODES = 50_000  # beyond one dimension, where a sum over all of them costs the more
QUARTIC = mj.potentials.Quartic()
LEARNER = mj.ForwardLearner(QUARTIC, mj.initial.Normal(), 0.01)


def walk(field, chains, steps, dim=1):
    start = jnp.zeros((chains, dim))

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


def chain_in_numpy(columns, chains, steps):
    """Euler's chain on that ratio; `columns()` gives the samples of a step: x, gradient, Hessian and weight."""
    rng = np.random.Generator(np.random.SFC64(0))

    def run():
        alpha = np.zeros(chains, np.float32)
        for _ in range(steps):
            gradient = ratio_in_numpy(*columns(), alpha)
            noise = np.float32(np.sqrt(2 * ETA / BETA)) * rng.standard_normal(chains, dtype=np.float32)
            alpha = alpha - np.float32(ETA) * gradient + noise
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


def compare(title, runs, work, rounds):
    """`runs` by name, and `work`, the number of chain-steps that each does in a run."""
    first, best = race(runs, rounds)
    each = {name: seconds / work[name] for name, seconds in best.items()}
    ratios = show(title, first, each, ours="this library", unit="µs a chain-step")
    return {"seconds_a_chain_step": each, "ratio_to_ours": ratios, "first_call_s": first}


def bank(samples, chains, steps, numpy_steps):
    """Chains on the samples of one observation."""
    plain = walk(mj.MalliavinField(samples, mj.Laplace(LENGTH), control=None), chains, steps)
    assisted = walk(mj.MalliavinField(samples), chains, steps)
    arrays = (samples.x, samples.gradient, samples.hessian, samples.weight)
    columns = [np.asarray(a, np.float32).reshape(-1) for a in arrays]
    plain_numpy = chain_in_numpy(lambda: columns, chains, numpy_steps)
    return compare(
        f"bank of {EPISODES} episodes, {chains} chains, {steps} steps",
        {"this library": lambda: plain(0), "the same, with control": lambda: assisted(0), "NumPy": plain_numpy},
        {"this library": chains * steps, "the same, with control": chains * steps, "NumPy": chains * numpy_steps},
        rounds=3,
    )


def beyond_a_line(dim, episodes, chains, steps, dense_steps):
    """Chains in `dim` dimensions: on the default field, and on the one that corrects its model in full."""
    learner = mj.ForwardLearner(quartic(dim), mj.initial.Normal(dim=dim), 0.01, gradient_noise=0.5)
    samples = mj.observe(jax.random.key(0), learner, num_episodes=episodes, times=[0.8])
    chosen = mj.MalliavinField(samples)
    model = walk(chosen, chains, steps, dim)
    dense = walk(mj.MalliavinField(samples, correction="full"), chains, dense_steps, dim)
    found = compare(
        f"d = {dim}, bank of {episodes} episodes, {chains} chains, {steps} steps",
        {"this library": lambda: model(0), "all of the correction": lambda: dense(0)},
        {"this library": chains * steps, "all of the correction": chains * dense_steps},
        rounds=3,
    )
    return found | {"correction": str(chosen.correction)}


def fresh(chains, steps, numpy_steps):
    """Chains on episodes made anew at every step."""
    field = mj.FreshField(LEARNER, mj.Laplace(LENGTH), num_episodes=EPISODES, time=0.8)
    ours = walk(field, chains, steps)
    return compare(
        f"fresh episodes at every step, {EPISODES} of 80 steps, shared by {chains} chains",
        {"this library": lambda: ours(0), "NumPy": chain_in_numpy(lambda: in_numpy(EPISODES), chains, numpy_steps)},
        {"this library": chains * steps, "NumPy": chains * numpy_steps},
        rounds=3,
    )


def overhead(chains, steps):
    """The chain itself, on the true gradient."""
    exact, sgld = walk(mj.TrueField(QUARTIC), chains, steps), in_blackjax(chains, steps)
    return compare(
        f"the chain itself, on the true gradient, {chains} chains, {steps} steps",
        {"this library": lambda: exact(0), "blackjax SGLD": lambda: sgld(0)},
        dict.fromkeys(("this library", "blackjax SGLD"), chains * steps),
        rounds=5,
    )


def main():
    fast = parser(__doc__, "fewer steps").parse_args().fast
    chains, steps, numpy_steps = 256, *((230, 5) if fast else (2300, 20))
    began = time.perf_counter()
    samples = mj.observe(jax.random.key(0), LEARNER, num_episodes=EPISODES, times=[0.8])
    results = {"machine": machine(), "episodes": EPISODES, "chains": chains, "steps": steps}
    print(results["machine"])
    results["bank"] = bank(samples, chains, steps, numpy_steps)
    for dim, episodes in itertools.product((2, 3), (EPISODES,) if fast else (EPISODES, MANY_EPISODES)):
        found = beyond_a_line(dim, episodes, chains, steps, max(5, numpy_steps * EPISODES // episodes))
        results[f"d = {dim}, {episodes} episodes"] = found
    results["fresh"] = fresh(8, 100 if fast else 400, numpy_steps)
    results["overhead"] = overhead(chains, steps)
    results["seconds"] = time.perf_counter() - began
    save("chain", results, fast=fast)


if __name__ == "__main__":
    main()
