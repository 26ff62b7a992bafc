"""The paper's numerical example, in one command: figures, a table of errors and a JSON file.

A learner runs Langevin dynamics on L(x) = x⁴/4 + x²/2, started at N(0, 1) and observed at s = 0.8, 5000 episodes.
From these the gradient is estimated on a grid, rung by rung from the paper's formulas to this library's default,
without gradient noise as in the paper's example and with it as in its model (`ladder.py`). Without noise it then drives
a passive chain of 2000 steps after 300, whose histogram gives the loss back. Three estimators run side by side: this
library's default, the paper's own formulas taken as they stand, and the kernel baseline.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .._base.types import Key, Vector
from ..chain.passive import Chain, passive_langevin
from ..estimate.conditional import conditional_expectation
from ..estimate.localizers import Heaviside, Laplace
from ..estimate.ratio import Estimate
from ..fields.fresh import FreshField, TrueField
from ..kernel.fields import NadarayaWatson
from ..learner.initial import Normal
from ..learner.learner import ForwardLearner
from ..potentials.analytic import Quartic
from ..recovery.density import loss_from_samples
from ..recovery.loss import Loss
from ..samples.samples import Samples
from ..samples.simulated import observe
from . import pictures
from .ladder import ADAPTED, NOISES, PAPER, PAPER_SCHEME, Ladder, climb, ladder_results, ladder_table, on_grid
from .output import Place, as_json

TIME, STEP_SIZE, BETA, ETA = 0.8, 0.01, 1.0, 0.05
RANGE = (-2.0, 2.0)
LIMIT, EDGE = 20.0, 2.5  # of the paper's estimate, and of the positions at which it is asked
OURS, KERNEL, EXACT = "malliavin_jax", "kernel", "true gradient"


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
        estimate = conditional_expectation(
            samples, samples.gradient, samples.require_hessian("LiteralField"), at, Heaviside()
        )
        value = jnp.where(alpha == at, jnp.clip(estimate.value, -LIMIT, LIMIT), LIMIT * jnp.sign(alpha))
        return eqx.tree_at(lambda e: e.value, estimate, value)


class Extent(NamedTuple):
    """How much is simulated."""

    episodes: int
    sets: int  # of the ladder; all else is of the first
    chains: int
    fresh_chains: int
    steps: int
    burn_in: int


FULL = Extent(episodes=5000, sets=5, chains=256, fresh_chains=2, steps=2300, burn_in=300)
FAST = Extent(episodes=1000, sets=1, chains=32, fresh_chains=2, steps=600, burn_in=100)


class Fields(NamedTuple):
    """The estimators by name: on a bank of samples, and on fresh episodes at every step."""

    bank: dict[str, Any]
    fresh: dict[str, Any]
    length: float


class Chains(NamedTuple):
    """The chains that these fields drive, by name."""

    bank: dict[str, Chain]
    fresh: dict[str, Chain]


class Grid(NamedTuple):
    """Estimates of the gradient on a grid, by name, and the truth."""

    alphas: Any
    estimates: dict[str, Estimate]
    truth: Any


def reproduce(out: Path, *, seed: int = 0, fast: bool = False, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Run the example, write the figures, `table.txt` and `results.json` to `out`, and return the results."""
    began = time.perf_counter()
    extent = FAST if fast else FULL
    potential = Quartic()
    observing, on_bank, on_fresh = jax.random.split(jax.random.key(seed), 3)
    ladders = [_climb(observing, potential, noise, extent, say) for noise in NOISES]

    say("estimating the gradient on a grid")
    fields = _fields(ladders[0], potential, extent)
    grid = _estimate_on_grid(fields, potential)
    chains = _run_all(on_bank, on_fresh, fields, extent, say)
    losses = {name: _recover(chain) for name, chain in chains.bank.items()}
    results: dict[str, Any] = {
        "settings": _settings(seed, extent, fields.length),
        "ladder": ladder_results(ladders),
        "gradient_rmse": {n: _rms(e.value - grid.truth) for n, e in grid.estimates.items()},
        "gradient_worst": {n: float(jnp.max(jnp.abs(e.value - grid.truth))) for n, e in grid.estimates.items()},
        "bank": {n: _chain_errors(chain, losses[n], potential) for n, chain in chains.bank.items()},
        "fresh": {n: _chain_errors(chain, _recover(chain), potential) for n, chain in chains.fresh.items()},
    }
    say("drawing")
    out.mkdir(parents=True, exist_ok=True)
    _draw(out, ladders, chains.bank, losses, potential)
    results["seconds"] = time.perf_counter() - began
    table = f"{ladder_table(ladders, extent.episodes, extent.sets)}\n\n{_table(results)}"
    place = Place(out, overwrite=True)
    place.write("table.txt", table + "\n")
    place.write("results.json", as_json(results))
    say(table)
    say(f"figures, table.txt and results.json are in {out} ({results['seconds']:.0f} s)")
    return results


def _alphas() -> Float[Array, "alphas 1"]:
    """Where the gradient is asked for."""
    return jnp.linspace(-1, 1, 41)[:, None]


def _climb(key: Key, potential: Quartic, noise: float, extent: Extent, say: Callable[[str], None]) -> Ladder:
    say(f"gradient noise {noise:g}: {extent.sets} x {extent.episodes} episodes observed at s = {TIME}, rung by rung")
    return climb(
        key,
        potential,
        _alphas(),
        noise=noise,
        step_size=STEP_SIZE,
        time=TIME,
        num_episodes=extent.episodes,
        num_sets=extent.sets,
    )


def _fields(ladder: Ladder, potential: Quartic, extent: Extent) -> Fields:
    """The estimators; on fresh episodes, which are too few to choose a length from, with the length of the bank."""
    learner = ForwardLearner(potential, Normal(), STEP_SIZE)
    chosen = ladder.field.localizer
    length = chosen.length if isinstance(chosen, Laplace) else 0.5
    return Fields(
        bank={
            OURS: ladder.field,
            PAPER: LiteralField(ladder.samples[PAPER], learner, extent.episodes),
            KERNEL: NadarayaWatson(ladder.samples[ADAPTED]),
            EXACT: TrueField(potential),
        },
        fresh={
            OURS: FreshField(learner, Laplace(length), num_episodes=extent.episodes, time=TIME),
            PAPER: LiteralField(None, learner, extent.episodes),
        },
        length=float(length),
    )


def _estimate_on_grid(fields: Fields, potential: Quartic) -> Grid:
    alphas = _alphas()
    estimates = {name: on_grid(field, alphas) for name, field in fields.bank.items() if name != EXACT}
    return Grid(alphas, estimates, jax.vmap(potential.gradient)(alphas))


def _run_all(on_bank: Key, on_fresh: Key, fields: Fields, extent: Extent, say: Callable[[str], None]) -> Chains:
    """The passive chains; fewer of them where a step costs more."""

    def run(key: Key, name: str, field: Any, chains: int) -> Chain:
        say(f"running {chains} chains of {extent.steps} steps: {name}")
        chain = passive_langevin(
            key,
            field,
            jnp.zeros((chains, 1)),
            num_steps=extent.steps,
            burn_in=extent.burn_in,
            step_size=ETA,
            inverse_temperature=BETA,
        )
        return jax.block_until_ready(chain)

    def chains_for(field: Any) -> int:  # a field that looks at every sample at every step gets a quarter
        return extent.chains // 4 if isinstance(field, LiteralField | NadarayaWatson) else extent.chains

    return Chains(
        bank={n: run(on_bank, f"bank, {n}", field, chains_for(field)) for n, field in fields.bank.items()},
        fresh={
            n: run(on_fresh, f"fresh episodes, {n}", field, extent.fresh_chains) for n, field in fields.fresh.items()
        },
    )


def _recover(chain: Chain) -> Loss:
    return loss_from_samples(chain.positions, inverse_temperature=BETA, bins=40, range=RANGE)


def _settings(seed: int, extent: Extent, length: float) -> dict[str, Any]:
    """What the results depend on, for the JSON file."""
    return {
        "seed": seed,
        "episodes": extent.episodes,
        "data_sets": extent.sets,
        "time": TIME,
        "step_size": STEP_SIZE,
        "chains": extent.chains,
        "fresh_chains": extent.fresh_chains,
        "steps": extent.steps,
        "burn_in": extent.burn_in,
        "outer_step_size": ETA,
        "length": length,
    }


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


def _draw(
    out: Path, ladders: list[Ladder], chains: dict[str, Chain], losses: dict[str, Loss], potential: Quartic
) -> None:
    """The figures."""
    true_gradient = jax.vmap(potential.gradient)
    alphas = _alphas()
    grid = np.linspace(*RANGE, 401)
    loss = grid**4 / 4 + grid**2 / 2
    pictures.draw_ladder(out / "ladder.png", ladders)
    for ladder in ladders:
        name = f"gradient_noise_{ladder.noise:g}.png" if ladder.noise else "gradient.png"
        pictures.draw_rungs(out / name, alphas, ladder, true_gradient(alphas))
    estimated = {name: chain for name, chain in chains.items() if name != EXACT}
    errors = {n: c.gradients[0] - true_gradient(c.positions[0]) for n, c in estimated.items()}
    pictures.draw_traces(out / "chain.png", errors)
    label = {name: f"{name}, {len(chain.positions)} chains" for name, chain in chains.items()}
    positions = {label[n]: c.positions for n, c in chains.items()}
    pictures.draw_histograms(out / "histogram.png", positions, grid, np.exp(-BETA * loss))
    recovered = {label[n]: loss for n, loss in losses.items()}
    pictures.draw_losses(out / "loss.png", recovered, lambda x: x**4 / 4 + x**2 / 2, apart=label[PAPER])


def _table(results: dict[str, Any]) -> str:
    rows = [f"{'':34}{'gradient RMSE':>15}{'|error| > 5':>13}{'loss RMSE':>11}"]
    for name, rmse in results["gradient_rmse"].items():
        rows.append(f"{'grid [-1, 1], ' + name:34}{rmse:15.2g}")
    for mode in ("bank", "fresh"):
        for name, row in results[mode].items():
            label = f"{mode} chain, {name}"
            rows.append(
                f"{label:34}{row['gradient_rmse']:15.2g}{row['outliers_above_5']:13.2%}{row['loss_rmse']:11.2g}"
            )
    return "\n".join(rows)
