"""Can the log of a plain optimiser, written without this library, give back its loss?

Run `python benchmarks/client.py` (a few minutes on two cores; `--fast` for a glance). The client is SGLD in NumPy on a
Bayesian logistic regression over scikit-learn's breast-cancer data (one standardised feature and an intercept; episodes
start from the prior), with minibatch gradients and Hessians. It logs all it uses to a `.npz` file. The
library sees that file alone: it loads and checks it, estimates the gradient on a grid and recovers the loss. The
errors are measured against the exact posterior, beside kernel regression of the same samples with the bandwidth that is
best in hindsight (oracle). It prints a table, and writes results/client.json and results/client.png.
"""

import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from common import DEGREES, RESULTS, evaluate, kernel_field, machine, oracle, parser, save, sweep
from figures.recovered import draw
from sklearn.datasets import load_breast_cancer

import malliavin_jax as mj

FEATURE = "mean texture"
STEP_SIZE, NUM_STEPS, BATCH = 0.003, 12, 32
STEPS = (4, 6, 8, 10, 12)  # where the episodes are conditioned, the same for all methods
HALF_WIDTH, POINTS = 0.4, 9  # of the grid, around the most probable parameters
WIDTHS = np.geomspace(0.03, 3.0, 14)  # of the kernels, in units of the spread of the positions


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


def loss_error(loss, truth):
    """Root mean square over the grid, up to a constant."""
    gap = np.asarray(loss.value) - truth
    return float(np.sqrt(np.nanmean((gap - np.nanmean(gap)) ** 2)))


class Log(NamedTuple):
    """What one log gave: squared errors averaged over the grid, those of the kernels by bandwidth, and the rest."""

    report: Any
    samples: Any
    field: Any
    squares: dict[str, float]
    kernels: dict[str, np.ndarray]
    coverage: float
    spread: float
    gradient_noise: float
    seconds: float


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
    widths, kernels = jnp.asarray(spread * WIDTHS, alphas.dtype), {}
    for degree, name in DEGREES.items():
        gaps = np.asarray(sweep(kernel_field(samples, degree, 1.0), alphas, widths)) - truth[None]
        kernels[name] = np.mean(gaps**2, (1, 2))
    return Log(
        report=report,
        samples=samples,
        field=field,
        squares={name: float(np.mean(error**2)) for name, error in errors.items()},
        kernels=kernels,
        coverage=covered,
        spread=spread,
        gradient_noise=float(np.std(np.asarray(samples.gradient) - posterior.full(np.asarray(samples.x))[0])),
        seconds=seconds,
    )


def gradient_errors(logs):
    """Root mean square errors over all logs by method, and the bandwidth with which each kernel has its own."""
    rmse = {name: oracle([log.squares[name] for log in logs])[0] for name in logs[0].squares}
    best = {}
    for name in DEGREES.values():
        rmse[f"{name}, oracle"], place = oracle([log.kernels[name] for log in logs])
        best[name] = float(WIDTHS[place] * np.mean([log.spread for log in logs]))
    return rmse, best


def main():
    arguments = parser(__doc__, "one small log")
    arguments.add_argument("--episodes", type=int, default=20_000)
    arguments.add_argument("--logs", type=int, default=8)
    given = arguments.parse_args()
    episodes, number = (2000, 1) if given.fast else (given.episodes, given.logs)
    posterior = Posterior()
    axes = [np.linspace(centre - HALF_WIDTH, centre + HALF_WIDTH, POINTS) for centre in posterior.mode()]
    logs = [one_log(posterior, episodes, seed, axes) for seed in range(number)]
    print(logs[0].report)

    rmse, best = gradient_errors(logs)
    low = min((0, 1), key=lambda degree: rmse[f"{DEGREES[degree]}, oracle"])
    theirs = f"{DEGREES[low]}, oracle"
    fields = {"this library": logs[0].field, theirs: kernel_field(logs[0].samples, low, best[DEGREES[low]])}
    fine = [np.linspace(axis[0], axis[-1], 25) for axis in axes]
    grid = tuple(jnp.asarray(axis, logs[0].samples.x.dtype) for axis in fine)
    recovered = {name: mj.loss_from_field(field, grid) for name, field in fields.items()}
    truth = posterior.value(np.stack(np.meshgrid(*fine, indexing="ij"), -1))
    truth = truth - truth.min()
    ours = recovered["this library"]
    results = {
        "machine": machine(),
        "settings": {"feature": FEATURE, "step_size": STEP_SIZE, "steps": NUM_STEPS, "conditioning_steps": STEPS,
                     "batch": BATCH, "episodes": episodes, "logs": number, "half_width": HALF_WIDTH},
        "gradient_noise_sd": float(np.mean([log.gradient_noise for log in logs])),
        "gradient_rmse": rmse,
        "oracle_bandwidths": best,
        "ratio to best oracle, degree 0 or 1": rmse["this library"] / rmse[theirs],
        "ratio to best oracle, degree up to 3": rmse["this library"] / min(rmse[f"{k}, oracle"] for k in best),
        "coverage of 95 % intervals": float(np.mean([log.coverage for log in logs])),
        "loss_rmse": {name: loss_error(loss, truth) for name, loss in recovered.items()},
        "loss_range": float(truth.max()),
        "curl": float(ours.curl), "curl_expected": float(ours.curl_expected),
        "seconds_to_weigh_and_choose": [log.seconds for log in logs],
    }  # fmt: skip
    for name, value in results.items():
        print(name, value)
    save("client", results, fast=given.fast)
    figure = draw(fine, {name: np.asarray(loss.value) for name, loss in recovered.items()}, truth, FEATURE)
    if not given.fast:
        figure.savefig(RESULTS / "client.png", dpi=150)


if __name__ == "__main__":
    main()
