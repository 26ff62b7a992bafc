"""Identities that hold whatever the loss: of the weights, E[S_i] = 0 and E[S_i X_j] = 1{i = j}, and of the Hessians.

By Stein's lemma the noise r of a step and the gradient after it have E[g_i(X_{k+1}) r_j] = (2ε/β) E[H_ij(X_{k+1})],
entry by entry, with any independent noise in the gradients: so Hessians are held against gradients without weights.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from ..samples.recorded import samples_from_paths
from ..samples.samples import Samples
from .residuals import SIGNIFICANT, Block, steps_of

TOLERATED_INTEGRATION_BY_PARTS = 0.05  # of E[S_i X_j], in units of the spreads of the coordinates
TOLERATED_HESSIAN = 0.05  # relative
WEIGHED = 20_000  # episodes whose weights are looked at
_ENOUGH = 100  # episodes observed at a step, for a mean over them to say something


class IntegrationByParts(NamedTuple):
    """The largest |mean S| in standard errors, the worst E[S·X]/d, and the worst entry of E[S_i X_j]."""

    weight_mean_z: float
    value: float
    stderr: float
    entry: tuple[int, int]
    entry_value: float
    entry_stderr: float
    entry_off: bool

    @property
    def entry_z(self) -> float:
        """How far the worst entry is from 1{i = j}, in standard errors."""
        return abs(self.entry_value - (self.entry[0] == self.entry[1])) / self.entry_stderr

    def findings(self, hessian_fits: bool) -> Iterator[str]:
        off = abs(self.value - 1) > max(SIGNIFICANT * self.stderr, TOLERATED_INTEGRATION_BY_PARTS)
        if not (self.weight_mean_z > SIGNIFICANT or off or self.entry_off):
            return
        i, j = self.entry
        where = f", E[S_{i + 1} X_{j + 1}] is {self.entry_value:.3g} ± {self.entry_stderr:.1g} ({int(i == j)} expected)"
        causes = "episodes that end because of where they are" + (
            " (pass localizer=short_localizer(samples), --safe on the command line, or let a clock end them)"
            if hessian_fits
            else ", or Hessians that are not the learner's"
        )
        yield (
            f"the weights do not integrate by parts: E[S·X]/d is {self.value:.3g} ± {self.stderr:.1g} (1 expected)"
            f"{where if self.entry_off else ''}, the largest |mean S| is {self.weight_mean_z:.1f} standard errors (0 "
            f"expected): {causes}"
        )


class HessianFit(NamedTuple):
    """The entry of the mean Hessian that is farthest from what the gradients show, in standard errors."""

    entry: tuple[int, int]
    recorded: float
    shown: float
    stderr: float
    off: bool
    diagonal: bool  # whether only diagonals were recorded

    @property
    def z(self) -> float:
        """How far it is, in standard errors."""
        return abs(self.shown - self.recorded) / self.stderr if self.stderr > 0 else 0.0

    def findings(self) -> Iterator[str]:
        if not self.off:
            return
        i, j = self.entry
        remedy = (
            "only diagonals are recorded, and the loss couples its coordinates: record full Hessians"
            if self.diagonal and i != j
            else "record the second derivatives of the same loss, of the same minibatch and at the same row"
        )
        yield (
            f"the Hessians are not those of the gradients: entry ({i + 1}, {j + 1}) is {self.recorded:.3g} on average, "
            f"the gradients change as if it were {self.shown:.3g} ± {self.stderr:.1g}; {remedy}"
        )


def integration_by_parts(samples: Samples) -> IntegrationByParts | None:
    """Of the first samples; None if too few of them are observed, or if the chain is too coarse for the weights."""
    x, weight = (np.asarray(leaf[:WEIGHED], np.float64) for leaf in (samples.x, samples.weight))
    observed = np.asarray(samples.observed[:WEIGHED])
    if not np.all(np.isfinite(weight[observed])):
        return None
    seen = [
        _at_one_time(weight[observed[:, time], time], x[observed[:, time], time])
        for time in range(samples.num_times)
        if np.sum(observed[:, time]) >= _ENOUGH
    ]
    if not seen:
        return None
    mean = max(seen, key=lambda one: abs(one.value - 1) / one.stderr)
    entry = max(seen, key=lambda one: (one.entry_off, one.entry_z))
    return IntegrationByParts(max(one.weight_mean_z for one in seen), mean.value, mean.stderr, *entry[3:])


def _at_one_time(s: np.ndarray, y: np.ndarray) -> IntegrationByParts:
    root, tiny = math.sqrt(len(s)), 1e-300
    y = y - y.mean(0)  # centred, the products vary less, and E[S] = 0 makes the centre irrelevant
    products = np.mean(s * y, 1)
    means = s.T @ y / len(s)
    stderrs = np.sqrt(np.maximum((s**2).T @ y**2 / len(s) - means**2, 0)) / root + tiny
    gaps, spread = abs(means - np.eye(s.shape[1])), y.std(0) + tiny
    tolerated = TOLERATED_INTEGRATION_BY_PARTS * spread[None, :] / spread[:, None]
    off = gaps > np.maximum(SIGNIFICANT * stderrs, tolerated)
    flat = int(np.argmax(np.where(off, 1e6, 1) * gaps / stderrs))
    i, j = divmod(flat, s.shape[1])
    return IntegrationByParts(
        weight_mean_z=float(np.max(abs(s.mean(0)) / (s.std(0) / root + tiny))),
        value=float(products.mean()),
        stderr=float(products.std() / root) + tiny,
        entry=(i, j),
        entry_value=float(means[i, j]),
        entry_stderr=float(stderrs[i, j]),
        entry_off=bool(off[i, j]),
    )


def hessian_fit(part: Mapping[str, Any]) -> HessianFit | None:
    """The recorded Hessians of some episodes against their gradients; None without any."""
    if part.get("hessian") is None or part.get("gradient") is None or part["x"].shape[1] < 3:
        return None
    x, gradient, hessian = (np.asarray(part[name], np.float64) for name in ("x", "gradient", "hessian"))
    d = x.shape[2]
    diagonal = hessian.ndim == 3
    hessian = hessian[..., None] * np.eye(d) if diagonal else hessian
    steps = steps_of(Block(x, gradient, np.asarray(part["last_steps"]), np.broadcast_to(1.0, x.shape[:2])))
    used = steps.made[:, 1:]  # those whose gradient afterwards made a move too
    number = int(np.sum(used))
    if number < _ENOUGH:
        return None
    step_size, beta = (
        np.broadcast_to(value[:, :-2, None] if value.ndim == 2 else value.reshape(-1, 1, 1), x[:, :-2].shape)[used]
        for value in (np.asarray(part[name]) for name in ("step_size", "inverse_temperature"))
    )
    noise = steps.moves[:, :-1][used] + step_size * steps.gradients[:, :-1][used]
    change = np.diff(gradient[:, :-1], axis=1)[used]
    recorded = hessian[:, 1:-1][used]
    gap = change[:, :, None] * (noise * beta / (2 * step_size))[:, None, :] - recorded
    mean, stderr = gap.mean(0), gap.std(0) / math.sqrt(number) + 1e-300
    shown = recorded.mean(0) + mean
    size = np.maximum(abs(recorded).mean(0).diagonal(), abs(shown.diagonal())) + 1e-300
    off = abs(mean) > np.maximum(SIGNIFICANT * stderr, TOLERATED_HESSIAN * np.sqrt(np.outer(size, size)))
    i, j = divmod(int(np.argmax(np.where(off, 1e6, 1) * abs(mean) / stderr)), d)
    return HessianFit(
        (i, j), float(recorded.mean(0)[i, j]), float(shown[i, j]), float(stderr[i, j]), bool(off[i, j]), diagonal
    )


def weighed(part: Mapping[str, Any]) -> Samples | None:
    """Some episodes, weighed at a quarter, a half and the whole of their median length; None if they cannot be."""
    longest = int(np.median(part["last_steps"]))
    if longest < 1 or not _has_hessians(part):
        return None
    steps = sorted({max(1, round(longest * share)) for share in (0.25, 0.5, 1.0)})
    try:
        return samples_from_paths(**part, steps=steps)
    except ValueError:  # too coarse for the weights: whoever asks for samples is told
        return None


def _has_hessians(part: Mapping[str, Any]) -> bool:
    """Whether whole Hessians are recorded: those of a model would be held against themselves."""
    hessian = part.get("hessian")
    return part.get("gradient") is not None and hessian is not None and (hessian.ndim == 4 or hessian.shape[2] == 1)
