"""Can the log of a plain optimiser, written without this library, give back its loss?

Run `python benchmarks/client.py` (a few minutes on two cores; `--fast` for a glance). The client is SGLD in NumPy on a
Bayesian logistic regression over scikit-learn's breast-cancer data (one standardised feature and an intercept; episodes
start from the prior), with minibatch gradients and Hessians. It logs all it uses to a `.npz` file. The
library sees that file alone: it loads and checks it, estimates the gradient on a grid and recovers the loss. The
errors are measured against the exact posterior, beside kernel regression of the same samples with the bandwidth that is
best in hindsight (oracle). It prints a table, and writes results/client.json and results/client.png.
"""

import argparse
import tempfile
import time
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from _timing import RESULTS, machine, save
from sklearn.datasets import load_breast_cancer

import malliavin_jax as mj
from malliavin_jax import kernel

FEATURE = "mean texture"
STEP_SIZE, NUM_STEPS, BATCH = 0.003, 12, 32
STEPS = (4, 6, 8, 10, 12)  # where the episodes are conditioned, the same for all methods
HALF_WIDTH, POINTS = 0.4, 9  # of the grid, around the most probable parameters
WIDTHS = np.geomspace(0.03, 3.0, 14)  # of the kernels, in units of the spread of the positions
DEGREES = {0: "Nadaraya–Watson", 1: "local linear", 2: "local quadratic", 3: "local cubic"}


# --- the client: NumPy only --------------------------------------------------------------------------------


class Posterior:
    """Minus the log posterior of a logistic regression with a standard normal prior, and its derivatives."""

    def __init__(self):
        data = load_breast_cancer()
        feature = data.data[:, list(data.feature_names).index(FEATURE)]
        standardised = (feature - feature.mean()) / feature.std()
        self.rows = np.stack([np.ones_like(feature), standardised], 1)
        self.signs = 2.0 * data.target - 1

    def value(self, theta):
        margins = self.signs * (theta @ self.rows.T)
        return np.logaddexp(0, -margins).sum(-1) + (theta**2).sum(-1) / 2

    def derivatives(self, theta, batch):
        """Gradient and Hessian of the loss that the rows `batch` (…, size) stand for, at theta (…, 2)."""
        rows, signs = self.rows[batch], self.signs[batch]
        chance = 1 / (1 + np.exp(signs * np.einsum("...bi,...i->...b", rows, theta)))
        scale = len(self.rows) / batch.shape[-1]
        gradient = theta - scale * np.einsum("...b,...bi->...i", chance * signs, rows)
        curvature = np.einsum("...b,...bi,...bj->...ij", chance * (1 - chance), rows, rows)
        return gradient, np.eye(2) + scale * curvature

    def full(self, theta):
        return self.derivatives(theta, np.broadcast_to(np.arange(len(self.rows)), (*theta.shape[:-1], len(self.rows))))

    def mode(self):
        theta = np.zeros(2)
        for _ in range(20):
            gradient, hessian = self.full(theta)
            theta = theta - np.linalg.solve(hessian, gradient)
        return theta


def run_client(posterior, episodes, seed, path):
    """SGLD, as anyone would write it: many short runs from the prior, everything it uses written down."""
    rng = np.random.default_rng(seed)
    log = {"x": [], "gradient": [], "hessian": []}
    theta = rng.normal(size=(episodes, 2))
    for _ in range(NUM_STEPS + 1):
        batch = rng.integers(0, len(posterior.rows), (episodes, BATCH))
        gradient, hessian = posterior.derivatives(theta, batch)
        for name, value in (("x", theta), ("gradient", gradient), ("hessian", hessian)):
            log[name].append(value)
        theta = theta - STEP_SIZE * gradient + np.sqrt(2 * STEP_SIZE) * rng.normal(size=theta.shape)
    arrays = {name: np.stack(values, 1) for name, values in log.items()}
    np.savez(path, **arrays, step_size=STEP_SIZE, inverse_temperature=1.0)


# --- the library, which sees the file ----------------------------------------------------------------------


@eqx.filter_jit
def evaluate(field, alphas):
    return jax.lax.map(field, alphas, batch_size=16)


def sweep(field, alphas, widths):
    """The values of a kernel field at each of `widths`."""
    at = eqx.filter_jit(lambda width: evaluate(eqx.tree_at(lambda f: f.bandwidth, field, width), alphas).value)
    return np.stack([np.asarray(at(jnp.asarray(width, alphas.dtype))) for width in widths])


def kernel_field(samples, degree, bandwidth):
    if degree == 0:
        return kernel.NadarayaWatson(samples, bandwidth)
    return kernel.LocalPolynomial(samples, bandwidth, degree)


def loss_error(loss, truth):
    """Root mean square over the grid, up to a constant."""
    gap = np.asarray(loss.value) - truth
    return float(np.sqrt(np.nanmean((gap - np.nanmean(gap)) ** 2)))


def one_log(posterior, episodes, seed, axes):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.npz"
        run_client(posterior, episodes, seed, path)
        recording = mj.io.load(path)
    report = mj.consistency(recording)
    began = time.perf_counter()
    samples = recording.samples(steps=STEPS)
    field = mj.MalliavinField(samples)
    seconds = time.perf_counter() - began
    mesh = np.stack(np.meshgrid(*axes, indexing="ij"), -1).reshape(-1, 2)
    alphas = jnp.asarray(mesh, samples.x.dtype)
    truth = posterior.full(mesh)[0]
    result = evaluate(field, alphas)
    errors = {"this library": np.asarray(result.value) - truth}
    plain = evaluate(mj.MalliavinField(samples, control=None), alphas)
    errors["this library, no control"] = np.asarray(plain.value) - truth
    covered = float(np.mean(np.abs(errors["this library"]) < 1.96 * np.asarray(result.stderr)))
    spread = float(jnp.std(samples.x))
    kernels = {}
    for degree, name in DEGREES.items():
        gaps = sweep(kernel_field(samples, degree, 1.0), alphas, spread * WIDTHS) - truth[None]
        kernels[name] = np.mean(gaps**2, (1, 2))
    squares = {name: float(np.mean(error**2)) for name, error in errors.items()}
    return {
        "squares": squares, "kernels": kernels, "coverage": covered, "report": report, "field": field,
        "samples": samples, "spread": spread, "seconds": seconds,
        "gradient noise": float(np.std(np.asarray(samples.gradient) - posterior.full(np.asarray(samples.x))[0])),
    }  # fmt: skip


def plot(axes, recovered, truth):
    """The exact loss, and the error of each recovered one on a common scale."""
    figure, panels = plt.subplots(1, 3, figsize=(12, 3.8), layout="constrained", sharey=True)
    drawn = panels[0].contourf(*axes, truth.T, levels=20, cmap="viridis")
    panels[0].set(title="exact", ylabel=f"coefficient of {FEATURE}")
    figure.colorbar(drawn, ax=panels[0], label="−log posterior, less its minimum")
    gaps = {name: value - truth - np.mean(value - truth) for name, value in recovered.items()}
    reach = max(np.abs(gap).max() for gap in gaps.values())
    for ax, (name, gap) in zip(panels[1:], gaps.items(), strict=True):
        drawn = ax.contourf(*axes, gap.T, levels=np.linspace(-reach, reach, 22), cmap="RdBu")
        ax.set_title(f"{name}: error")
    figure.colorbar(drawn, ax=panels[1:], label="recovered less exact, up to a constant")
    for ax in panels:
        ax.set_xlabel("intercept")
    figure.suptitle("The loss that the log of a plain SGLD run gives back")
    figure.savefig(RESULTS / "client.png", dpi=150)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fast", action="store_true", help="one small log, nothing written")
    parser.add_argument("--episodes", type=int, default=20_000)
    parser.add_argument("--logs", type=int, default=8)
    arguments = parser.parse_args()
    episodes, logs = (2000, 1) if arguments.fast else (arguments.episodes, arguments.logs)
    posterior = Posterior()
    mode = posterior.mode()
    axes = [np.linspace(centre - HALF_WIDTH, centre + HALF_WIDTH, POINTS) for centre in mode]
    runs = [one_log(posterior, episodes, seed, axes) for seed in range(logs)]
    print(runs[0]["report"])

    rmse = {name: float(np.sqrt(np.mean([run["squares"][name] for run in runs]))) for name in runs[0]["squares"]}
    best = {}
    for name in DEGREES.values():
        curve = np.sqrt(np.mean([run["kernels"][name] for run in runs], 0))
        rmse[f"{name}, oracle"] = float(curve.min())
        best[name] = float(WIDTHS[int(np.argmin(curve))] * np.mean([run["spread"] for run in runs]))
    low = min(rmse[f"{DEGREES[k]}, oracle"] for k in (0, 1))
    every = min(rmse[f"{name}, oracle"] for name in DEGREES.values())

    fine = [np.linspace(axis[0], axis[-1], 25) for axis in axes]
    grid = tuple(jnp.asarray(axis, runs[0]["samples"].x.dtype) for axis in fine)
    truth = posterior.value(np.stack(np.meshgrid(*fine, indexing="ij"), -1))
    truth = truth - truth.min()
    degree = min((0, 1), key=lambda k: rmse[f"{DEGREES[k]}, oracle"])
    ours = mj.loss_from_field(runs[0]["field"], grid)
    theirs = mj.loss_from_field(kernel_field(runs[0]["samples"], degree, best[DEGREES[degree]]), grid)
    results = {
        "machine": machine(),
        "settings": {"feature": FEATURE, "step_size": STEP_SIZE, "steps": NUM_STEPS, "conditioning_steps": STEPS,
                     "batch": BATCH, "episodes": episodes, "logs": logs, "half_width": HALF_WIDTH},
        "gradient_noise_sd": float(np.mean([run["gradient noise"] for run in runs])),
        "gradient_rmse": rmse,
        "oracle_bandwidths": best,
        "ratio to best oracle, degree 0 or 1": rmse["this library"] / low,
        "ratio to best oracle, degree up to 3": rmse["this library"] / every,
        "coverage of 95 % intervals": float(np.mean([run["coverage"] for run in runs])),
        "loss_rmse": {"this library": loss_error(ours, truth), f"{DEGREES[degree]}, oracle": loss_error(theirs, truth)},
        "loss_range": float(truth.max()),
        "curl": float(ours.curl), "curl_expected": float(ours.curl_expected),
        "seconds_to_weigh_and_choose": [run["seconds"] for run in runs],
    }  # fmt: skip
    for name, value in results.items():
        print(name, value)
    if not arguments.fast:
        save("client", results)
        name = f"{DEGREES[degree]}, oracle"
        plot(fine, {"this library": np.asarray(ours.value), name: np.asarray(theirs.value)}, truth)
        print("written to client.json and client.png")


if __name__ == "__main__":
    main()
