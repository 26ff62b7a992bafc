"""From the paper's formulas to this library's default, one change at a time, each with its error.

All rungs see the same episodes and are asked for the same gradients. Every rung down to the control is the paper's
estimator with one more thing put right: the weights made exact, then of less variance; the indicator, which lets every
episode speak at every α, exchanged for a localizer of the length of least standard error, with the gradients centred;
a fitted model of the loss assisting it. The last rung is the default, which takes of that correction what its test
finds necessary. Beside them stands the kernel whose degree and bandwidth are best in hindsight: no user can have it.
"""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from .._base.types import Key
from ..estimate.conditional import conditional_expectation
from ..estimate.localizers import Heaviside
from ..estimate.ratio import Estimate
from ..fields.malliavin import MalliavinField
from ..kernel.fields import LocalPolynomial, NadarayaWatson
from ..learner.initial import Normal
from ..learner.learner import ForwardLearner
from ..potentials.base import AbstractPotential
from ..samples.samples import Samples
from ..samples.simulated import observe
from ..weights.canonical import Canonical
from ..weights.scheme import Scheme
from ..weights.windowed import Reciprocal

PAPER, EXACT, CANONICAL, ADAPTED = "paper, literally", "exact weights", "canonical weights", "adapted weights"
LOCALIZED, CONTROLLED, CHOSEN = "centred and localized", "with a control", "chosen (the default)"
HINDSIGHT = "best kernel in hindsight"
RUNGS = (PAPER, EXACT, CANONICAL, ADAPTED, LOCALIZED, CONTROLLED, CHOSEN, HINDSIGHT)
NOISES = (0.0, 0.5, 2.0)  # standard deviations of the gradient noise: the paper's example has none, its model has some
PAPER_SCHEME = Reciprocal(third="ito", jacobian="exponential")
# Those of the rungs with an indicator; None is the default, `Adapted`.
SCHEMES: dict[str, Scheme | None] = {PAPER: PAPER_SCHEME, EXACT: Reciprocal(), CANONICAL: Canonical(), ADAPTED: None}
_DEGREES = (0, 3)  # Nadaraya–Watson and local cubic: 1 and 2 were never best here, and compiling takes its time
_BANDWIDTHS = np.geomspace(0.02, 2.0, 16)

Alphas = Float[Array, "alphas d"]


class Ladder(NamedTuple):
    """The rungs at one gradient noise.

    `estimates`, `samples` (by scheme) and `field` (the default) are those of the first data set; `errors` of all.
    """

    noise: float
    estimates: dict[str, Estimate]
    errors: dict[str, dict[str, float]]
    samples: dict[str, Samples]
    field: MalliavinField
    kernel: str


class _Climbed(NamedTuple):
    """One data set: its estimates by rung, and by degree those of the kernel with every bandwidth."""

    samples: dict[str, Samples]
    field: MalliavinField
    estimates: dict[str, Estimate]
    kernels: dict[int, Estimate]


@eqx.filter_jit
def on_grid(field: Any, alphas: Alphas) -> Estimate:
    """The estimates of a field; one program for all fields of the same shapes."""
    return jax.vmap(field)(alphas)


def climb(
    key: Key,
    potential: AbstractPotential,
    alphas: Alphas,
    *,
    noise: float,
    step_size: float,
    time: float,
    num_episodes: int,
    num_sets: int,
) -> Ladder:
    """Every rung on `num_sets` data sets of `num_episodes` episodes, at the same keys for every noise."""
    # The noise is an array also where it is 0, so that all noises share their compiled programs.
    learner = ForwardLearner(potential, Normal(), step_size, gradient_noise=jnp.asarray(noise))
    sets = [_climb_once(k, learner, alphas, time, num_episodes) for k in jax.random.split(key, num_sets)]
    truth = jax.vmap(potential.gradient)(alphas)
    best, where = _best_kernel([one.kernels for one in sets], truth)
    estimates = [{**one.estimates, HINDSIGHT: kernel} for one, kernel in zip(sets, best, strict=True)]
    errors = {name: _errors([one[name] for one in estimates], truth) for name in RUNGS}
    return Ladder(noise, estimates[0], errors, sets[0].samples, sets[0].field, where)


def _climb_once(key: Key, learner: ForwardLearner, alphas: Alphas, time: float, num_episodes: int) -> _Climbed:
    samples = {
        name: observe(key, learner, num_episodes=num_episodes, times=[time], scheme=scheme)
        for name, scheme in SCHEMES.items()
    }
    ours = samples[ADAPTED]
    fields = {
        LOCALIZED: MalliavinField(ours, control=None),
        CONTROLLED: MalliavinField(ours, correction="full"),
        CHOSEN: MalliavinField(ours),
    }
    estimates = {name: _with_indicator(of_scheme, alphas) for name, of_scheme in samples.items()}
    estimates |= {name: on_grid(field, alphas) for name, field in fields.items()}
    bandwidths = jnp.asarray(_BANDWIDTHS, ours.x.dtype)
    kernels = {
        degree: _sweep(LocalPolynomial(ours, 1.0, degree) if degree else NadarayaWatson(ours, 1.0), bandwidths, alphas)
        for degree in _DEGREES
    }
    return _Climbed(samples, fields[CHOSEN], estimates, kernels)


@eqx.filter_jit
def _with_indicator(samples: Samples, alphas: Alphas) -> Estimate:
    """The paper's ratio, for the weights that `samples` hold."""
    hessian = samples.require_hessian("reproduce")
    at = lambda alpha: conditional_expectation(samples, samples.gradient, hessian, alpha, Heaviside())  # noqa: E731
    return jax.vmap(at)(alphas)


@eqx.filter_jit
def _sweep(field: Any, bandwidths: Array, alphas: Alphas) -> Estimate:
    """The estimates of a kernel with each of `bandwidths`, along the first axis."""
    return lax.map(lambda h: jax.vmap(eqx.tree_at(lambda f: f.bandwidth, field, h))(alphas), bandwidths)


def _best_kernel(sets: list[dict[int, Estimate]], truth: Array) -> tuple[list[Estimate], str]:
    """The estimates, one for each data set, of the degree and bandwidth of least error over all sets."""
    curves = np.stack([
        np.mean([np.mean((np.asarray(one[degree].value) - np.asarray(truth)) ** 2, (1, 2)) for one in sets], 0)
        for degree in _DEGREES
    ])  # fmt: skip
    row, place = np.unravel_index(int(np.argmin(curves)), curves.shape)
    degree = _DEGREES[int(row)]
    best = [jax.tree.map(lambda leaf: leaf[place], one[degree]) for one in sets]
    return best, f"degree {degree}, bandwidth {_BANDWIDTHS[place]:.2g}"


def _errors(estimates: list[Estimate], truth: Array) -> dict[str, float]:
    """The RMSE of a typical data set (the median) and of the worst; the standard error, where it is trusted.

    Not the mean over data sets: where the estimated density passes through 0 the ratio has no finite variance.
    """
    rmse = [float(np.sqrt(np.mean((np.asarray(e.value) - np.asarray(truth)) ** 2))) for e in estimates]
    trusted = np.stack([np.asarray(e.trusted) for e in estimates])
    stderr = np.stack([np.asarray(e.stderr) for e in estimates])[trusted]
    return {
        "rmse": float(np.median(rmse)),
        "worst_rmse": float(np.max(rmse)),
        "stderr": float(np.sqrt(np.mean(stderr**2))) if stderr.size else float("nan"),
        "trusted": float(np.mean(trusted)),
    }


def ladder_table(ladders: list[Ladder], num_episodes: int, num_sets: int) -> str:
    """One line a rung, one column a noise."""
    rows = [
        f"gradient on [-1, 1], {num_episodes} episodes: RMSE (standard error), the median of {num_sets} data sets",
        f"{'':28}" + "".join(f"{f'gradient noise {ladder.noise:g} ':>22}" for ladder in ladders),
    ]
    for number, name in enumerate(RUNGS):
        label = name if name == HINDSIGHT else f"{number + 1}. {name}"
        rows.append(f"{label:28}" + "".join(_cell(ladder.errors[name]) for ladder in ladders))
    if any(row["trusted"] < 1 for ladder in ladders for row in ladder.errors.values()):
        rows.append("* the density is not significantly positive at some points; they have no standard error")
    rows += [f"noise {ladder.noise:g}, chosen: {ladder.field.correction}" for ladder in ladders]
    rows += [f"noise {ladder.noise:g}, best kernel: {ladder.kernel}" for ladder in ladders]
    return "\n".join(rows)


def _cell(errors: dict[str, float]) -> str:
    mark = "*" if errors["trusted"] < 1 else " "
    numbers = "{rmse:.2g} ({stderr:.2g})".format(**errors)
    return f"{numbers + mark:>22}"


def ladder_results(ladders: list[Ladder]) -> list[dict[str, Any]]:
    """The same for the JSON file, with why the default chose what it did."""
    return [
        {
            "gradient_noise": ladder.noise,
            "rungs": ladder.errors,
            "chosen": str(ladder.field.correction),
            "best_kernel": ladder.kernel,
        }
        for ladder in ladders
    ]
