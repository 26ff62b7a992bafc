"""How near does making weighed episodes come to what the device can do?

Run `python benchmarks/gpu.py` on a CPU, a GPU or a TPU (`--fast` for a tenth of the episodes). It names the device,
warms up, sweeps the number of episodes and the dimension in float32, prints, and writes to results/gpu-<device>.json,
for each case

- episodes and steps a second;
- bytes a second: what the program must move at least, the carries of its loops (read and written at each turn), what
  its loops read besides, and its results; and their fraction of the bandwidth measured on the same device by adding
  to an array too large for any cache (more than 1 where a cache holds the carries);
- the fraction of the pure-RNG rate: the time to draw the same normals by the same generator, and only add them up,
  over the time of the case;
- the time that the device's own compiled program would take if it did nothing but move its bytes at that bandwidth (its
  roofline), and the measured time beside it (less, where a cache holds what is moved).
  `benchmarks/accelerators.py` tells the same of devices that are not here.

Send us the file that it names at the end: we have no accelerator, and every such file is news.
"""

import re

import jax
import jax.numpy as jnp
from common import STEPS, machine, normals, parser, quartic, race, save, weighed
from compiled.hlo import Program
from jax import lax

import malliavin_jax as mj

TURNS = 10


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


def one_case(dim, episodes, bandwidth, rounds):
    """Episodes with canonical weights up to three dimensions, windowed ones beyond."""
    scheme = mj.Canonical() if dim <= 3 else mj.Windowed(4.0, neumann=4)
    run, draw, key = weighed(quartic(dim), dim, scheme, episodes), normals(STEPS * dim, episodes), jax.random.key(0)
    first, best = race({"weighed": lambda: run(key), "normals": lambda: draw(key)}, rounds)
    seconds, moved = best["weighed"], traffic(jax.make_jaxpr(run)(key))
    work = Program(run.lower(key).compile().as_text()).work()
    row = {
        "dim": dim,
        "episodes": episodes,
        "seconds": seconds,
        "first_call_s": first["weighed"],
        "episodes_per_second": episodes / seconds,
        "steps_per_second": episodes * STEPS / seconds,
        "bytes_per_second": moved / seconds,
        "fraction_of_bandwidth": moved / seconds / bandwidth,
        "fraction_of_rng_rate": best["normals"] / seconds,
        "kernels": int(work.kernels),
        "roofline_s": work.bytes / bandwidth,
        "measured_over_roofline": seconds * bandwidth / work.bytes,
    }
    print(
        f"d = {dim:<3} N = {episodes:<9,}{1e3 * seconds:9.2f} ms  {row['episodes_per_second']:11.3g} episodes/s  "
        f"{row['steps_per_second']:10.3g} steps/s  {row['bytes_per_second'] / 1e9:7.2f} GB/s  "
        f"{row['fraction_of_bandwidth']:6.1%} of bandwidth  {row['fraction_of_rng_rate']:6.1%} of RNG rate  "
        f"roofline {1e3 * row['roofline_s']:8.2f} ms, measured {row['measured_over_roofline']:.1f} × that"
    )
    return row


def main():
    fast = parser(__doc__, "a tenth of the episodes, fewer rounds").parse_args().fast
    shrink, rounds = (10, 2) if fast else (1, 7)
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
    results = {
        "machine": {**machine(), "device": kind},
        "steps": STEPS,
        "bandwidth_bytes_per_second": bandwidth,
        "rows": [one_case(dim, episodes // shrink, bandwidth, rounds) for dim, episodes in sizes],
    }
    name = re.sub(r"[^a-z0-9]+", "-", kind.lower()).strip("-")
    save(f"gpu-{name}", results, fast=fast)
    if not fast and device.platform != "cpu":
        print(f"Please send benchmarks/results/gpu-{name}.json in an issue, with the driver's version.")


if __name__ == "__main__":
    main()
