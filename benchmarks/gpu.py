"""How near does making weighed episodes come to what the device can do?

Run `python benchmarks/gpu.py` on a CPU, a GPU or a TPU (`--fast` for a tenth of the episodes). It names the device,
warms up, sweeps the number of episodes and the dimension in float32, prints, and writes to results/gpu-<device>.json,
for each case

- episodes and steps a second;
- bytes a second: what the program must move at least, the carries of its loops (read and written at each turn), what
  its loops read besides, and its results; and their fraction of the bandwidth measured on the same device by adding
  to an array too large for any cache (more than 1 where a cache holds the carries);
- the fraction of the pure-RNG rate: the time to draw the same normals by the same generator, and only add them up,
  over the time of the case.
"""

import argparse
import re

import jax
import jax.numpy as jnp
from _timing import machine, race, save
from jax import lax

import malliavin_jax as mj
from malliavin_jax._base.checks import floats_to_arrays
from malliavin_jax.learner import random as _noise
from malliavin_jax.samples.simulated import observe_steps

STEPS, STEP_SIZE = 80, 0.01
TURNS = 10


def weighed(dim, episodes):
    """Episodes with canonical weights up to three dimensions, windowed ones beyond."""
    loss = mj.potentials.Quartic(0.5 if dim > 1 else 0.0)
    learner = mj.ForwardLearner(loss, lambda k: jax.random.normal(k, (dim,), jnp.float32), STEP_SIZE)
    learner = floats_to_arrays(learner, jnp.float32)
    scheme = mj.Canonical() if dim <= 3 else mj.Windowed(4.0, neumann=4)
    return jax.jit(lambda key: observe_steps(key, learner, scheme, episodes, (STEPS,)))


def normals_only(dim, episodes):
    """The normals of as many steps, two from each hash, added up as they come."""

    @jax.jit
    def draw(key):
        words = jax.vmap(_noise.key_words)(jax.random.split(key, episodes))

        def body(total, index):
            one, other = _noise.box_muller(*_noise.threefry(words, (jnp.zeros((), jnp.uint32), index)))
            return total + one + other, None

        return lax.scan(body, jnp.zeros(episodes, jnp.float32), jnp.arange(-(-STEPS * dim // 2), dtype=jnp.uint32))[0]

    return draw


def streaming(numbers):
    """Read and write an array of so many float32 numbers, in place, `TURNS` times."""
    add = jax.jit(lambda x: lax.fori_loop(0, TURNS, lambda i, x: x + i.astype(x.dtype), x), donate_argnums=0)
    kept = [jnp.zeros(numbers, jnp.float32)]  # in place: fresh memory would be paid for at its first touch

    def run():
        kept[0] = add(kept[0])
        return kept[0]

    return run


def traffic(jaxpr):
    """Least bytes that the loops of a program move, and what it returns."""

    def size(variables):
        return sum(v.aval.size * v.aval.dtype.itemsize for v in variables if hasattr(v.aval.dtype, "itemsize"))

    def loops(jaxpr):
        total = 0
        for equation in jaxpr.eqns:
            if equation.primitive.name == "scan":
                consts, carry = equation.params["num_consts"], equation.params["num_carry"]
                turn = size(equation.invars[:consts]) + 2 * size(equation.invars[consts : consts + carry])
                total += equation.params["length"] * (turn + loops(equation.params["jaxpr"].jaxpr))
            else:
                inner = [equation.params.get(name) for name in ("jaxpr", "call_jaxpr")]
                total += sum(loops(getattr(one, "jaxpr", one)) for one in inner if one is not None)
        return total

    return loops(jaxpr.jaxpr) + size(jaxpr.jaxpr.outvars)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fast", action="store_true", help="a tenth of the episodes, fewer rounds")
    fast = parser.parse_args().fast
    shrink, rounds, key = (10, 2, jax.random.key(0)) if fast else (1, 7, jax.random.key(0))
    device = jax.devices()[0]
    kind = f"{device.platform} {device.device_kind}"
    print(f"{kind}, {jax.device_count()} device(s); float32, {STEPS} steps")

    numbers = 2**26 // shrink
    _, best = race({"bandwidth": streaming(numbers)}, rounds)
    bandwidth = 8 * numbers * TURNS / best["bandwidth"]
    print(f"bandwidth {bandwidth / 1e9:.1f} GB/s")

    sizes = [(1, n) for n in (10**4, 10**5, 10**6)] + [(d, 10**5) for d in (2, 3, 10)]
    if device.platform != "cpu":
        sizes.insert(3, (1, 10**7))
    rows = []
    for dim, episodes in [(dim, n // shrink) for dim, n in sizes]:
        run, draw = weighed(dim, episodes), normals_only(dim, episodes)
        first, best = race({"weighed": lambda run=run: run(key), "normals": lambda draw=draw: draw(key)}, rounds)
        seconds, moved = best["weighed"], traffic(jax.make_jaxpr(run)(key))
        rows.append(
            {
                "dim": dim,
                "episodes": episodes,
                "seconds": seconds,
                "first_call_s": first["weighed"],
                "episodes_per_second": episodes / seconds,
                "steps_per_second": episodes * STEPS / seconds,
                "bytes_per_second": moved / seconds,
                "fraction_of_bandwidth": moved / seconds / bandwidth,
                "fraction_of_rng_rate": best["normals"] / seconds,
            }
        )
        print(
            f"d = {dim:<3} N = {episodes:<9,}{1e3 * seconds:9.2f} ms  {episodes / seconds:11.3g} episodes/s  "
            f"{episodes * STEPS / seconds:10.3g} steps/s  {moved / seconds / 1e9:7.2f} GB/s  "
            f"{moved / seconds / bandwidth:6.1%} of bandwidth  {best['normals'] / seconds:6.1%} of RNG rate"
        )
    results = {
        "machine": {**machine(), "device": kind},
        "steps": STEPS,
        "bandwidth_bytes_per_second": bandwidth,
        "rows": rows,
    }
    if not fast:
        name = re.sub(r"[^a-z0-9]+", "-", kind.lower()).strip("-")
        print("written to", save(f"gpu-{name}", results).name)


if __name__ == "__main__":
    main()
