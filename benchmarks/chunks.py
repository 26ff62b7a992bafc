"""How much memory do ten million recorded episodes take?

Run `python benchmarks/chunks.py` (about two minutes on two cores, 2 GB of disk; `--fast` for a glance). A NumPy learner
on the quartic loss is logged to a folder of `.npy` files, 16 steps an episode, float32. Another process loads it (which
checks every number), holds it against the law of its learner, and estimates the gradient on a grid of 41 α from
chunks of 100 000 episodes. Its peak resident memory is printed for two sizes of the log, with the error of the
estimate, and written to results/chunks.json.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from common import machine, parser, save

import malliavin_jax as mj

STEP_SIZE, NUM_STEPS, NOISE, BLOCK = 0.05, 16, 0.5, 100_000


def write(folder, episodes):
    """The learner, block by block."""
    rng = np.random.default_rng(0)
    shape = (episodes, NUM_STEPS + 1, 1)
    shapes = {"x": shape, "gradient": shape, "hessian": (*shape, 1)}
    files = {
        name: np.lib.format.open_memmap(folder / f"{name}.npy", "w+", np.float32, shape)
        for name, shape in shapes.items()
    }
    for name, value in (("step_size", STEP_SIZE), ("inverse_temperature", 1.0)):
        np.save(folder / f"{name}.npy", value)
    for start in range(0, episodes, BLOCK):
        size = min(BLOCK, episodes - start)
        x = rng.standard_normal(size, np.float32)
        log = {name: np.empty((size, NUM_STEPS + 1), np.float32) for name in files}
        for k in range(NUM_STEPS + 1):
            gradient = x**3 + x + np.float32(NOISE) * rng.standard_normal(size, np.float32)
            log["x"][:, k], log["gradient"][:, k], log["hessian"][:, k] = x, gradient, 3 * x**2 + 1
            noise = np.float32((2 * STEP_SIZE) ** 0.5) * rng.standard_normal(size, np.float32)
            x = x - np.float32(STEP_SIZE) * gradient + noise
        for name, file in files.items():
            file[start : start + size] = log[name].reshape(size, *file.shape[1:])


def read(folder):
    """The library: what it needs, and what it finds."""
    began = time.perf_counter()
    recording = mj.io.load(folder)
    loaded = time.perf_counter()
    report = mj.consistency(recording)
    checked = time.perf_counter()
    chunks = recording.chunks(BLOCK, steps=[8, 16])
    alphas = jnp.linspace(-1, 1, 41)[:, None]
    # The first chunk chooses the length and the control, and is left out.
    field = mj.MalliavinField(chunks[0], correction="full")
    accumulator = mj.Accumulator(alphas, field.localizer, field.folds[0].potential)
    later = [lambda number=number: chunks[number] for number in range(1, len(chunks))]
    estimate = mj.accumulate(later, accumulator, progress=True).estimate()
    error = np.asarray(estimate.value - (alphas**3 + alphas))
    return {
        "episodes": recording.num_episodes,
        "bytes_on_disk": sum(file.stat().st_size for file in folder.iterdir()),
        "peak_resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "seconds": {
            "load": loaded - began,
            "consistency": checked - loaded,
            "estimate": time.perf_counter() - checked,
        },
        "fits": report.ok,
        "rmse": float(np.sqrt(np.mean(error**2))),
        "median_stderr": float(np.median(np.asarray(estimate.stderr))),
    }


def child(*words):
    """This script in a process of its own; what it prints."""
    run = subprocess.run([sys.executable, __file__, *words], check=True, stdout=subprocess.PIPE, text=True)
    return run.stdout


def main():
    arguments = parser(__doc__, "a tenth of the sizes")
    arguments.add_argument("--write", nargs=2, help=argparse.SUPPRESS)
    arguments.add_argument("--read", help=argparse.SUPPRESS)
    given = arguments.parse_args()
    if given.write:
        return write(Path(given.write[0]), int(given.write[1]))
    if given.read:
        return print(json.dumps(read(Path(given.read))))

    rows = []
    for episodes in (200_000, 1_000_000) if given.fast else (1_000_000, 10_000_000):
        with tempfile.TemporaryDirectory() as folder:
            child("--write", folder, str(episodes))
            rows.append(json.loads(child("--read", folder)))
        print(rows[-1], flush=True)
    save("chunks", {"machine": machine(), "rows": rows}, fast=given.fast)


if __name__ == "__main__":
    main()
