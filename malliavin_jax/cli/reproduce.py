"""The paper's numerical example, in one command: four figures, a table of errors and a JSON file.

A learner runs Langevin dynamics on L(x) = x⁴/4 + x²/2, started at N(0, 1) and observed at s = 0.8, 5000 episodes.
From these the gradient is estimated on a grid and drives a passive chain of 2000 steps after 300, whose histogram
gives the loss back. Three estimators run side by side: this library's default, the paper's own formulas taken as
they stand, and the kernel baseline.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from .. import plots
from .._base.types import Key, Vector
from ..chain.passive import Chain, passive_langevin
from ..estimate.conditional import conditional_expectation
from ..estimate.localizers import Heaviside, Laplace
from ..estimate.ratio import Estimate
from ..fields.fresh import FreshField, TrueField
from ..fields.malliavin import MalliavinField
from ..kernel.fields import NadarayaWatson
from ..learner.learner import ForwardLearner
from ..potentials.analytic import Quartic
from ..recovery.density import loss_from_samples
from ..recovery.loss import Loss
from ..samples.samples import Samples
from ..samples.simulated import observe
from ..weights.canonical import Canonical
from ..weights.scheme import Scheme
from ..weights.windowed import Reciprocal

TIME, STEP_SIZE, BETA, ETA = 0.8, 0.01, 1.0, 0.05
RANGE = (-2.0, 2.0)
LIMIT, EDGE = 20.0, 2.5
OURS, PAPER, KERNEL, EXACT = "malliavin_jax", "paper, literally", "kernel", "true gradient"
PAPER_SCHEME = Reciprocal(third="ito", jacobian="exponential")


class LiteralField(eqx.Module):
    """The paper's ratio with its Heaviside indicator, as printed.

    One favour is done to it: its value is cut to ±20, and outside [−2.5, 2.5] it points back. Without that its
    outliers throw the chain where there are no data at all, and it never returns.
    """

    observed: Samples | None
    learner: ForwardLearner
    num_episodes: int = eqx.field(static=True)

    def __call__(self, alpha: Vector, *, key: Key | None = None) -> Estimate:
        samples = self.observed
        if samples is None:
            assert key is not None
            samples = observe(key, self.learner, num_episodes=self.num_episodes, times=[TIME], scheme=PAPER_SCHEME)
        at = jnp.clip(alpha, -EDGE, EDGE)
        estimate = conditional_expectation(samples, samples.gradient, samples.hessian, at, Heaviside())
        value = jnp.where(alpha == at, jnp.clip(estimate.value, -LIMIT, LIMIT), LIMIT * jnp.sign(alpha))
        return eqx.tree_at(lambda e: e.value, estimate, value)


def reproduce(out: Path, *, seed: int = 0, fast: bool = False, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Run the example, write the figures, `table.txt` and `results.json` to `out`, and return the results."""
    began = time.perf_counter()
    num_episodes, chains, fresh_chains = (1000, 32, 4) if fast else (5000, 256, 8)
    steps, burn_in = (600, 100) if fast else (2300, 300)
    potential = Quartic()
    learner = ForwardLearner(potential, lambda key: jax.random.normal(key, (1,)), STEP_SIZE)
    keys = jax.random.split(jax.random.key(seed), 5)

    say(f"observing {num_episodes} episodes at s = {TIME}")

    def watch(scheme: Scheme) -> Samples:
        return observe(keys[0], learner, num_episodes=num_episodes, times=[TIME], scheme=scheme)

    samples = watch(Canonical())
    say("choosing the length and fitting the control")
    ours = MalliavinField(samples)
    bank = {
        OURS: ours,
        PAPER: LiteralField(watch(PAPER_SCHEME), learner, num_episodes),
        KERNEL: NadarayaWatson(samples),
        EXACT: TrueField(potential),
    }
    length = ours.localizer.length if isinstance(ours.localizer, Laplace) else 0.5
    fresh = {
        OURS: FreshField(learner, Laplace(length), num_episodes=num_episodes, time=TIME),
        PAPER: LiteralField(None, learner, num_episodes),
    }

    say("estimating the gradient on a grid")
    alphas = jnp.linspace(-1, 1, 41)[:, None]
    truth = jax.vmap(potential.gradient)(alphas)
    estimates = {name: jax.jit(jax.vmap(field))(alphas) for name, field in bank.items() if name != EXACT}

    def run(key: Key, name: str, field: Any, number: int) -> Chain:
        say(f"running {number} chains of {steps} steps: {name}")
        start = jnp.zeros((number, 1))
        chain = passive_langevin(
            key, field, start, num_steps=steps, burn_in=burn_in, step_size=ETA, inverse_temperature=BETA
        )
        return jax.block_until_ready(chain)

    def chains_for(field: Any) -> int:  # a field that looks at every sample at every step gets a quarter
        return chains // 4 if isinstance(field, LiteralField | NadarayaWatson) else chains

    bank_chains = {n: run(keys[1], f"bank, {n}", field, chains_for(field)) for n, field in bank.items()}
    fresh_runs = {name: run(keys[2], f"fresh episodes, {name}", f, fresh_chains) for name, f in fresh.items()}

    def recover(chain: Chain) -> Loss:
        return loss_from_samples(chain.positions, inverse_temperature=BETA, bins=40, range=RANGE)

    results = {
        "settings": {
            "seed": seed, "episodes": num_episodes, "time": TIME, "step_size": STEP_SIZE, "chains": chains,
            "fresh_chains": fresh_chains, "steps": steps, "burn_in": burn_in, "outer_step_size": ETA,
            "length": float(length),
        },
        "gradient_rmse": {n: _rms(e.value - truth) for n, e in estimates.items()},
        "gradient_worst": {n: float(jnp.max(jnp.abs(e.value - truth))) for n, e in estimates.items()},
        "bank": {n: _chain_errors(c, recover(c), potential) for n, c in bank_chains.items()},
        "fresh": {n: _chain_errors(c, recover(c), potential) for n, c in fresh_runs.items()},
    }  # fmt: skip
    say("drawing")
    out.mkdir(parents=True, exist_ok=True)
    _figures(out, alphas, estimates, truth, bank_chains, {n: recover(c) for n, c in bank_chains.items()}, potential)
    results["seconds"] = time.perf_counter() - began
    table = _table(results)
    (out / "table.txt").write_text(table + "\n")
    (out / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    say(table)
    say(f"figures, table.txt and results.json are in {out} ({results['seconds']:.0f} s)")
    return results


def _rms(error: Any) -> float:
    return float(np.sqrt(np.mean(np.asarray(error) ** 2)))


def _chain_errors(chain: Chain, loss: Loss, potential: Quartic) -> dict[str, float]:
    """Errors along the chain, and of the loss: RMSE weighted by the Gibbs density over |α| < 1.5, up to a constant."""
    error = chain.gradients - jax.vmap(jax.vmap(potential.gradient))(chain.positions)
    grid = np.asarray(loss.grid)
    true = grid**4 / 4 + grid**2 / 2
    weight = np.where((np.abs(grid) < 1.5) & np.isfinite(np.asarray(loss.value)), np.exp(-BETA * true), 0)
    gap = np.where(weight > 0, np.asarray(loss.value) - true, 0)
    gap = gap - np.sum(weight * gap) / np.sum(weight)
    return {
        "gradient_rmse": _rms(error),
        "outliers_above_5": float(jnp.mean(jnp.abs(error) > 5)),
        "loss_rmse": float(np.sqrt(np.sum(weight * gap**2) / np.sum(weight))),
        "position_sd": float(jnp.std(chain.positions)),
    }


def _figures(
    out: Path,
    alphas: Any,
    estimates: dict[str, Estimate],
    truth: Any,
    chains: dict[str, Chain],
    losses: dict[str, Loss],
    potential: Quartic,
) -> None:
    three = (OURS, PAPER, KERNEL)
    grid = np.linspace(*RANGE, 401)
    loss = grid**4 / 4 + grid**2 / 2
    gibbs = np.exp(-BETA * loss)
    gibbs /= np.sum(gibbs) * (grid[1] - grid[0])
    first = {name: chains[name] for name in three}
    true_gradient = jax.vmap(potential.gradient)
    pictures = {
        "gradient.png": lambda ax: plots.gradient_bands(alphas, estimates, truth, ax=ax),
        "chain.png": lambda ax: plots.chain_trace(
            {n: c.gradients[0] for n, c in first.items()},
            {n: true_gradient(c.positions[0]) for n, c in first.items()},
            ax=ax,
        ),
        "histogram.png": lambda ax: plots.histogram_against_gibbs(
            {n: c.positions for n, c in first.items()}, grid, gibbs, ax=ax
        ),
        "loss.png": lambda ax: plots.loss_recovery({n: losses[n] for n in three}, grid, loss, ax=ax),
    }
    for name, draw in pictures.items():
        figure = Figure(figsize=(6.0, 4.0), layout="constrained")  # no window, no backend to choose
        draw(figure.subplots())
        figure.savefig(out / name, dpi=160)


def _table(results: dict[str, Any]) -> str:
    rows = [f"{'':34}{'gradient RMSE':>15}{'|error| > 5':>13}{'loss RMSE':>11}"]
    for name, rmse in results["gradient_rmse"].items():
        rows.append(f"{'grid [-1, 1], ' + name:34}{rmse:15.4f}")
    for mode in ("bank", "fresh"):
        for name, row in results[mode].items():
            label = f"{mode} chain, {name}"
            rows.append(
                f"{label:34}{row['gradient_rmse']:15.4f}{row['outliers_above_5']:13.2%}{row['loss_rmse']:11.4f}"
            )
    return "\n".join(rows)
