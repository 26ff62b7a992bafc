"""How does the cost grow, and does a second device or process halve it?

Run `python benchmarks/scaling.py` (`--fast` for a hundredth of the work). It prints, and writes to
results/scaling.json,

- the time of a stream of 10⁷ episodes × 80 steps, the time predicted for it from 10⁶, that extrapolated to 10⁸, and
  the peak of memory at 10⁶ and at 10⁷;
- the same work on one device and on two, and in one process and in two, each device having one core;
- the exponents of the cost in the number of episodes, of steps, and of dimensions (weights by Hessian-vector
  products, up to d = 100), fitted to the times.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

STEPS, STEP_SIZE, ALPHAS = 80, 0.01, 32


def stream(episodes, chunk_size=2**17):
    """Seconds of simulating, weighing and adding up `episodes`, everything compiled beforehand, and what came out."""
    import jax
    import jax.numpy as jnp

    import malliavin_jax as mj

    initial = lambda k: jax.random.normal(k, (1,), jnp.float32)  # noqa: E731
    learner = mj.ForwardLearner(mj.potentials.Quartic(), initial, STEP_SIZE, gradient_noise=0.5)
    grid = jnp.linspace(-1.5, 1.5, ALPHAS, dtype=jnp.float32)[:, None]
    empty = mj.Accumulator(grid, mj.Laplace(0.3), mj.potentials.Quadratic(precision=2.0))

    def run(count):
        options = dict(num_episodes=count, times=[STEPS * STEP_SIZE], chunk_size=min(chunk_size, episodes))
        return jax.block_until_ready(mj.observe_and_accumulate(jax.random.key(0), learner, empty, **options))

    run(min(chunk_size, episodes))
    best, result = float("inf"), None
    for _ in range(3 if episodes <= 10**6 else 1):
        start = time.perf_counter()
        result = run(episodes)
        best = min(best, time.perf_counter() - start)
    return best, result.estimate()


def child_stream(episodes):
    """One stream in a process of its own, with its peak of memory."""
    import resource

    seconds, estimate = stream(episodes)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"seconds": seconds, "peak_bytes": peak, "largest_stderr": float(estimate.stderr.max())}


def child_split(episodes, rank, processes, port):
    """The same stream over a mesh of all devices."""
    import jax

    import malliavin_jax as mj

    if processes > 1:
        jax.distributed.initialize(f"localhost:{port}", processes, rank)
    with jax.set_mesh(mj.distributed.episode_mesh()):
        seconds, estimate = stream(episodes, chunk_size=episodes)
    return {"seconds": seconds, "devices": jax.device_count(), "value": estimate.value[:, 0].tolist()}


def children(calls, devices=1, cores=None):
    """Run `calls` side by side, each in its own process, on `cores` if given; their results in order."""
    environment = {**os.environ, "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
    root = str(Path(__file__).parents[1])
    environment["PYTHONPATH"] = os.pathsep.join([root, environment.get("PYTHONPATH", "")])
    running = [
        subprocess.Popen(
            [sys.executable, __file__, "--child", call, "--cores", ",".join(map(str, cores[i])) if cores else ""],
            env=environment, stdout=subprocess.PIPE, text=True,
        )
        for i, call in enumerate(calls)
    ]  # fmt: skip
    outputs = [process.communicate()[0] for process in running]
    if any(process.returncode for process in running):
        raise RuntimeError(f"a child failed: {calls}")
    return [json.loads(output.strip().splitlines()[-1]) for output in outputs]


def splitting(episodes):
    """One device on one core against two devices, and two processes, on two cores."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    [one] = children([f"child_split({episodes}, 0, 1, 0)"], 1, [[0]])
    [both_cores] = children([f"child_split({episodes}, 0, 1, 0)"], 1, [[0, 1]])
    [two] = children([f"child_split({episodes}, 0, 1, 0)"], 2, [[0, 1]])
    pair = children([f"child_split({episodes}, {rank}, 2, {port})" for rank in (0, 1)], 1, [[0], [1]])
    values = [case["value"] for case in (one, two, pair[0])]
    largest = max(abs(a - b) for other in values[1:] for a, b in zip(values[0], other, strict=True))
    seconds = {
        "one device, one core": one["seconds"],
        "one device, two cores": both_cores["seconds"],
        "two devices, two cores": two["seconds"],
        "two processes, two cores": max(p["seconds"] for p in pair),
    }
    return {
        "episodes": episodes,
        "seconds": seconds,
        "efficiency_of_two_devices": seconds["one device, one core"] / (2 * seconds["two devices, two cores"]),
        "efficiency_of_two_processes": seconds["one device, one core"] / (2 * seconds["two processes, two cores"]),
        "largest_difference_of_estimates": largest,
    }


def growth(fast):
    """Times against N, steps and d with the fitted exponents."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from _timing import race

    import malliavin_jax as mj
    from malliavin_jax._base.checks import floats_to_arrays
    from malliavin_jax.samples.bare import weights_at_steps
    from malliavin_jax.samples.simulated import observe_steps

    def plain(episodes, steps):
        initial = lambda k: jax.random.normal(k, (1,), jnp.float32)  # noqa: E731
        learner = floats_to_arrays(mj.ForwardLearner(mj.potentials.Quartic(), initial, STEP_SIZE), jnp.float32)
        run = jax.jit(lambda k: observe_steps(k, learner, mj.Canonical(), episodes, (steps,)))
        return lambda: run(jax.random.key(0))

    def by_products(dim, episodes):
        dense = mj.potentials.Quartic(0.5)

        def product(x, v):
            return (3 * x * x + 1) * v + 0.5 * (jnp.pad(v[1:], (0, 1)) + jnp.pad(v[:-1], (1, 0)))

        loss = mj.potentials.MatrixFree(dense.value, dense.gradient, product)
        initial = lambda k: jax.random.normal(k, (dim,), jnp.float32)  # noqa: E731
        learner = floats_to_arrays(mj.ForwardLearner(loss, initial, STEP_SIZE), jnp.float32)
        run = jax.jit(lambda k: weights_at_steps(k, learner, mj.Windowed(4.0, neumann=2), episodes, (STEPS,)))
        return lambda: run(jax.random.key(0))

    shrink = 100 if fast else 1
    sweeps = {
        "episodes": {n // shrink: plain(n // shrink, STEPS) for n in (10**5, 3 * 10**5, 10**6, 3 * 10**6)},
        "steps": {steps: plain(10**6 // shrink, steps) for steps in (40, 80, 160, 320)},
        "dimensions": {d: by_products(d, 10**5 // shrink) for d in (1, 2, 3, 10, 30, 100)},
    }
    found = {}
    for name, contestants in sweeps.items():
        _, best = race(contestants, 2 if fast else 5)
        sizes = np.asarray(list(best), float)
        slope = np.polyfit(np.log(sizes), np.log(list(best.values())), 1)[0]
        found[name] = {"seconds": best, "exponent": float(slope)}
        if name == "dimensions":  # the small ones are unrolled, four steps at a time in d = 1: another program
            large = sizes >= 10
            slope = np.polyfit(np.log(sizes[large]), np.log(np.asarray(list(best.values()))[large]), 1)[0]
            found[name]["exponent_from_10_on"] = float(slope)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fast", action="store_true")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--cores", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {int(core) for core in arguments.cores.split(",")} & os.sched_getaffinity(0))
    if arguments.child:
        name, _, inside = arguments.child.rstrip(")").partition("(")
        numbers = [int(number) for number in inside.split(",")]
        print(json.dumps({"child_stream": child_stream, "child_split": child_split}[name](*numbers)))
        return
    from _timing import machine, save

    shrink = 100 if arguments.fast else 1
    few, many = 10**6 // shrink, 10**7 // shrink
    [small] = children([f"child_stream({few})"])
    [large] = children([f"child_stream({many})"])
    results = {
        "machine": machine(),
        "stream": {
            "steps": STEPS, "alphas": ALPHAS, "episodes": [few, many],
            "seconds": [small["seconds"], large["seconds"]],
            "measured_to_predicted": large["seconds"] / (10 * small["seconds"]),
            "seconds_extrapolated_to_ten_times_more": 10 * large["seconds"],
            "peak_bytes": [small["peak_bytes"], large["peak_bytes"]],
            "largest_stderr": [small["largest_stderr"], large["largest_stderr"]],
        },
        "splitting": splitting(2**20 // shrink),
        "growth": growth(arguments.fast),
    }  # fmt: skip
    print(json.dumps(results, indent=2))
    if not arguments.fast:
        save("scaling", results)


if __name__ == "__main__":
    main()
