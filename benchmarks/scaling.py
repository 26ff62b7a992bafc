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
import contextlib
import json
import os
import resource
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
from common import STEP_SIZE, STEPS, exponent, machine, parser, quartic, race, save, weighed

import malliavin_jax as mj

ALPHAS = 32


def stream(episodes, chunk_size=2**17):
    """Seconds of simulating, weighing and adding up `episodes`, everything compiled beforehand, and what came out."""
    learner = mj.ForwardLearner(mj.potentials.Quartic(), mj.initial.Normal(), STEP_SIZE, gradient_noise=0.5)
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


# --- what a process of its own does ------------------------------------------------------------------------


def alone(episodes):
    """One stream, with the peak of memory of its process."""
    seconds, estimate = stream(episodes)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"seconds": seconds, "peak_bytes": peak, "largest_stderr": float(estimate.stderr.max())}


def split(episodes, rank=0, processes=1, port=0):
    """The same stream over a mesh of all devices."""
    if processes > 1:
        jax.distributed.initialize(f"localhost:{port}", processes, rank)
    with jax.set_mesh(mj.distributed.episode_mesh()):
        seconds, estimate = stream(episodes, chunk_size=episodes)
    return {"seconds": seconds, "devices": jax.device_count(), "value": estimate.value[:, 0].tolist()}


TASKS = {"alone": alone, "split": split}


@contextlib.contextmanager
def on_cores(cores):
    """Processes that are started here run on these cores alone, where the system knows such a thing."""
    if cores is None or not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, set(cores) & before or before)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def start(task, *arguments, devices=1, cores=None):
    """Begin a task in a process of its own, with so many devices, on `cores` if given."""
    environment = {**os.environ, "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
    root = str(Path(__file__).parents[1])
    environment["PYTHONPATH"] = os.pathsep.join([root, environment.get("PYTHONPATH", "")])
    with on_cores(cores):
        return subprocess.Popen(
            [sys.executable, __file__, "--task", json.dumps([task, *arguments])],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )


def result(process):
    """What a task returned."""
    output = process.communicate()[0]
    if process.returncode:
        raise RuntimeError(f"a process failed: {process.args}")
    return json.loads(output.strip().splitlines()[-1])


# --- the three questions -----------------------------------------------------------------------------------


def streams(few, many):
    """The time of many episodes beside that predicted from few, and the peaks of memory."""
    small, large = result(start("alone", few)), result(start("alone", many))
    return {
        "steps": STEPS,
        "alphas": ALPHAS,
        "episodes": [few, many],
        "seconds": [small["seconds"], large["seconds"]],
        "measured_to_predicted": large["seconds"] / (10 * small["seconds"]),
        "seconds_extrapolated_to_ten_times_more": 10 * large["seconds"],
        "peak_bytes": [small["peak_bytes"], large["peak_bytes"]],
        "largest_stderr": [small["largest_stderr"], large["largest_stderr"]],
    }


def splitting(episodes):
    """One device on one core against two devices, and two processes, on two cores."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    one = result(start("split", episodes, cores=[0]))
    both_cores = result(start("split", episodes, cores=[0, 1]))
    two = result(start("split", episodes, devices=2, cores=[0, 1]))
    pair = [start("split", episodes, rank, 2, port, cores=[rank]) for rank in (0, 1)]
    pair = [result(process) for process in pair]
    values = [case["value"] for case in (one, two, pair[0])]
    largest = max(abs(a - b) for other in values[1:] for a, b in zip(values[0], other, strict=True))
    seconds = {
        "one device, one core": one["seconds"],
        "one device, two cores": both_cores["seconds"],
        "two devices, two cores": two["seconds"],
        "two processes, two cores": max(case["seconds"] for case in pair),
    }
    return {
        "episodes": episodes,
        "seconds": seconds,
        "efficiency_of_two_devices": seconds["one device, one core"] / (2 * seconds["two devices, two cores"]),
        "efficiency_of_two_processes": seconds["one device, one core"] / (2 * seconds["two processes, two cores"]),
        "largest_difference_of_estimates": largest,
    }


def plain(episodes, steps=STEPS):
    """One dimension, canonical weights."""
    run = weighed(quartic(1), 1, mj.Canonical(), episodes, steps)
    return lambda: run(jax.random.key(0))


def by_products(dim, episodes):
    """Weights by Hessian-vector products alone."""
    dense = mj.potentials.Quartic(0.5)

    def product(x, v):
        return (3 * x * x + 1) * v + 0.5 * (jnp.pad(v[1:], (0, 1)) + jnp.pad(v[:-1], (1, 0)))

    loss = mj.potentials.MatrixFree(dense.value, dense.gradient, product)
    run = weighed(loss, dim, mj.Windowed(4.0, neumann=2), episodes)
    return lambda: run(jax.random.key(0))


def growth(shrink, rounds):
    """Times against N, steps and d with the fitted exponents."""
    sweeps = {
        "episodes": {n // shrink: plain(n // shrink) for n in (10**5, 3 * 10**5, 10**6, 3 * 10**6)},
        "steps": {steps: plain(10**6 // shrink, steps) for steps in (40, 80, 160, 320)},
        "dimensions": {d: by_products(d, 10**5 // shrink) for d in (1, 2, 3, 10, 30, 100)},
    }
    found = {}
    for name, contestants in sweeps.items():
        _, best = race(contestants, rounds)
        found[name] = {"seconds": best, "exponent": exponent(list(best), list(best.values()))}
    # The small dimensions are unrolled, four steps at a time in d = 1: another program.
    large = {d: seconds for d, seconds in found["dimensions"]["seconds"].items() if d >= 10}
    found["dimensions"]["exponent_from_10_on"] = exponent(list(large), list(large.values()))
    return found


def main():
    arguments = parser(__doc__, "a hundredth of the work")
    arguments.add_argument("--task", help=argparse.SUPPRESS)
    given = arguments.parse_args()
    if given.task:
        name, *numbers = json.loads(given.task)
        return print(json.dumps(TASKS[name](*numbers)))
    shrink = 100 if given.fast else 1
    results = {
        "machine": machine(),
        "stream": streams(10**6 // shrink, 10**7 // shrink),
        "splitting": splitting(2**20 // shrink),
        "growth": growth(shrink, rounds=2 if given.fast else 5),
    }
    print(json.dumps(results, indent=2))
    save("scaling", results, fast=given.fast)


if __name__ == "__main__":
    main()
