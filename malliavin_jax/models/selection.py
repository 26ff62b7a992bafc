"""Choosing the localizer from the data.

The length needs no trade-off: every length is unbiased, so the one with the smallest *estimated standard error* is
taken. The core of the Gaussian localizer is the one true choice between bias and variance:

    risk(e) = max_{e' ≤ e} mean_α[(v_e − v_{e'})² − Var(v_e − v_{e'})] + mean_α se_e²,

each core with its best length, and the variance of the difference from the difference of the two influence functions.
The first term estimates the squared bias, which grows like e⁸. Every smaller core serves as a reference (as in Lepski's
method), not the smallest alone: that one is the least biased and the noisiest, and with noisy gradients it would show
no bias at all.

An α counts by the number of episodes that carry it, so that the noisy outskirts of the data do not decide for their
middle. At the core of least risk the bias is still a good part of the error, and no standard error includes it; where
the noise is much larger than the bias, the estimated risk hardly depends on the core, and where its minimum lies is
chance. The core taken is therefore the smallest whose risk exceeds the least by no more than a fifth, and a tenth
smaller still: it costs little error, and the intervals cover better.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from .._base import host
from .._base.small_tensors import einsum, matmul
from .._base.types import Numbers, Scalar, Vector
from ..estimate.length import BestLength, length_of_least_variance
from ..estimate.localizers import AbstractLocalizer, Gaussian, Laplace
from ..estimate.on_host import for_each_part
from ..estimate.ratio import TRUSTED_FROM
from ..estimate.sums import Bank, add_up, episode_terms, sum_over_chunks
from ..kernel.bandwidth import cross_validated_bandwidth
from ..samples.samples import Samples
from ..samples.summary import CENTRAL, distance_from_mean, spread
from .folds import Fold, on_hand, variances_at

_ALPHAS = 32  # places at which candidates are compared: samples themselves, so that they follow the density
_PILOT = 20_000  # points on which lengths are compared: which is best does not depend on the number
_RISK_POINTS = 400_000  # points from which the bias of a core is estimated
_TOLERANCE = 0.2  # by how much the risk of the core taken may exceed the least
_SMALLER = 0.9  # and the core taken in units of that one

# Candidates, in units of the spread of the positions.
LENGTHS = (0.013, 0.02, 0.03, 0.05, 0.08, 0.12, 0.18, 0.26, 0.38, 0.55, 0.8, 1.15, 1.7, 2.5, 4.0, 8.0)
_LENGTHS_BEYOND = (0.12, 0.2, 0.35, 0.6, 1.0, 1.7, 3.0, 6.0)  # beyond one dimension
_CORES = (0.06, 0.1, 0.15, 0.22, 0.32, 0.47, 0.7, 1.0)


class Choice(NamedTuple):
    """A localizer and its estimated mean squared error, to compare with that of another choice."""

    localizer: AbstractLocalizer
    risk: Scalar


def choose_localizer(samples: Samples, folds: tuple[Fold, ...]) -> Choice:
    """The best localizer: `Laplace` in one dimension, `Gaussian` beyond."""
    scale, alphas = spread(samples), typical_points(samples, _ALPHAS)
    some, _ = some_episodes(folds, _RISK_POINTS // samples.num_times)
    lengths = len(LENGTHS) if samples.dim == 1 else len(_LENGTHS_BEYOND)
    here = on_hand(some, Gaussian(1.0, 1.0), len(alphas) * lengths)
    return _choose(here, folds, scale, alphas)


@host.here_or_compiled
def _choose(folds: tuple[Fold, ...], scale: Float[Numbers, ""], alphas: Float[Numbers, "alphas d"]) -> Choice:
    xp, times = host.module_of(alphas), folds[0].bank.x.shape[2]
    pilot, shrink = some_episodes(folds, max(1000, _PILOT // times))

    def average(variances: Float[Numbers, "lengths alphas"]) -> Float[Numbers, " lengths"]:
        """The mean of logarithms: every α counts alike, whatever its size."""
        return xp.mean(xp.log(shrink * variances + xp.finfo(variances.dtype).tiny), 1)

    def best_of(lengths: Numbers, localizer: Callable[[Float[Numbers, ""]], AbstractLocalizer]) -> BestLength:
        def variances(length: Float[Numbers, ""]) -> Float[Numbers, " alphas"]:
            return variances_at(pilot, alphas, localizer(length))

        return length_of_least_variance(variances, lengths=lengths, average=average)

    if alphas.shape[1] == 1:
        best = best_of(scale * xp.asarray(LENGTHS, scale.dtype), Laplace)
        return Choice(Laplace(best.length), xp.mean(shrink * best.variance))

    cores, lengths = (scale * xp.asarray(c, scale.dtype) for c in (_CORES, _LENGTHS_BEYOND))
    best_lengths = host.each(lambda core: best_of(lengths, lambda length: Gaussian(length, core)).length, cores)
    some, fraction = some_episodes(folds, _RISK_POINTS // times)
    risks = _risks(some, fraction, alphas, cores, best_lengths)
    taken = xp.argmax(risks <= (1 + _TOLERANCE) * xp.min(risks))  # the first: cores ascend
    return Choice(Gaussian(best_lengths[taken], _SMALLER * cores[taken]), xp.min(risks))


def short_localizer(samples: Samples) -> AbstractLocalizer:
    """The debiased kernel at the length of a kernel: the safe choice where integration by parts is in doubt.

    Where episodes end because of where they are, where Hessians are rough, or where a step size is uncertain, the
    Malliavin term is off by a factor, and the error of the estimate is of the order of that factor times the length
    squared. At the cross-validated bandwidth of Nadaraya–Watson it is at worst comparable to that kernel's bias, and a
    control (`MalliavinField(samples, short_localizer(samples))` fits one) takes most of it away.

    Args:
        samples: positions and gradients, from which the bandwidth is cross-validated.

    Returns:
        `Laplace(h)` in one dimension, `Gaussian(h, h/4)` beyond, h being `kernel.cross_validated_bandwidth(samples)`.

    Raises:
        ValueError: if an observed number is not finite, with fewer than two episodes, or if no position differs.

    Example:
        ```python
        import jax
        import malliavin_jax as mj

        loss = mj.potentials.Quartic()
        learner = mj.ForwardLearner(loss, mj.initial.Normal(), step_size=0.01, gradient_noise=0.5)
        samples = mj.observe(jax.random.key(0), learner, num_episodes=2000, times=[0.4, 0.8])
        careful = mj.MalliavinField(samples, mj.short_localizer(samples))
        ```
    """
    length = cross_validated_bandwidth(samples, 0)
    return Laplace(length) if samples.dim == 1 else Gaussian(length, length / 4)


def _risks(
    folds: tuple[Fold, ...], fraction: float, alphas: Float[Numbers, "n d"], cores: Numbers, lengths: Numbers
) -> Float[Numbers, " cores"]:
    """The risk of each core, with its length; `fraction` is the share of the episodes that `folds` hold."""
    xp = host.module_of(alphas)
    if xp is np:
        found = add_up([_products_on_host(fold, alphas, cores, lengths) for fold in folds])
    else:
        found = lax.map(
            lambda alpha: add_up([_products(fold, alpha, cores, lengths) for fold in folds]), alphas, batch_size=4
        )
    sums, gram = found.sums, found.gram
    total, value = sums[:, :, 0], sums[:, :, 1:] / sums[:, :, :1]
    # The influence of an episode is (n − value·w)/total: a combination of its rows.
    m = value.shape[2]
    pick, first = xp.eye(m, 1 + m, k=1, dtype=value.dtype), xp.eye(1, 1 + m, dtype=value.dtype)[0]
    combine = (pick[None, None] - value[..., None] * first[None, None, None]) / total[:, :, None, None]
    variance = einsum("naki,naibj,nbkj->nkab", combine, gram, combine)
    own = xp.diagonal(variance, axis1=2, axis2=3)
    difference = own[:, :, :, None] + own[:, :, None, :] - 2 * variance
    squares = xp.diagonal(gram[:, :, 0, :, 0], axis1=1, axis2=2)
    firm = total > TRUSTED_FROM * xp.sqrt(squares)  # a ratio whose denominator is noise is no reference
    apart = value[:, :, None, :] - value[:, None, :, :]
    excess = xp.sum(apart**2, 3) - xp.sum(difference, 1)  # (v_e − v_{e'})² − Var(v_e − v_{e'})
    excess = xp.where(firm[:, :, None] & firm[:, None, :], excess, 0)
    carried = xp.mean(total**2 / squares, 1)  # effective number of episodes at each α
    share = carried / xp.sum(carried)
    smaller = xp.tril(einsum("n,nab->ab", share, excess))  # the diagonal is 0
    return xp.max(smaller, 1) + fraction * matmul(share, xp.sum(own, 1))


class _Products(NamedTuple):
    """Of the terms w, n_1, …, n_d of each episode, for each core: their sums, and those of their products."""

    sums: Float[Numbers, "*alphas cores rows"]
    gram: Float[Numbers, "*alphas cores rows cores rows"]


def _products(fold: Fold, alpha: Vector, cores: Array, lengths: Array) -> _Products:
    """Those at α, all cores from one matrix."""

    def rows(part: Bank, core: Scalar, length: Scalar) -> Float[Array, "rows size"]:
        n, w = episode_terms(part, alpha, Gaussian(length, core))
        return jnp.stack([w, *(row + w * shift for row, shift in zip(n, fold.model(alpha), strict=True))])

    def of_chunk(part: Bank) -> _Products:
        terms = jax.vmap(rows, (None, 0, 0))(part, cores, lengths)
        return _Products(jnp.sum(terms, -1), einsum("aie,bje->aibj", terms, terms))

    return sum_over_chunks(of_chunk, fold.bank)


def _products_on_host(
    fold: Fold, alphas: Float[np.ndarray, "n d"], cores: np.ndarray, lengths: np.ndarray
) -> _Products:
    """The same at all α."""
    models = dict(zip(map(bytes, alphas), fold.model_at(alphas), strict=True))

    def of_part(part: Bank, alpha: np.ndarray) -> _Products:
        shifts = np.stack([models[bytes(place)] for place in alpha[:, :, 0, 0].T.copy()], 1)[:, :, None]
        terms = []
        for core, length in zip(cores, lengths, strict=True):
            n, w = episode_terms(part, alpha, Gaussian(length, core))
            terms.append(np.stack([w, *(row + w * shift for row, shift in zip(n, shifts, strict=True))], 1))
        rows = np.stack(terms, 1)  # (some, cores, rows, size)
        flat = rows.reshape(len(rows), -1, rows.shape[-1])
        return _Products(rows.sum(-1), (flat @ flat.mT).reshape(*rows.shape[:3], *rows.shape[1:3]))

    found = [add_up(group) for group in for_each_part(of_part, fold.bank, alphas)]
    return _Products(*(np.concatenate(leaves) for leaves in zip(*found, strict=True)))


def some_episodes(folds: tuple[Fold, ...], episodes: int) -> tuple[tuple[Fold, ...], float]:
    """The first `episodes` episodes, in whole chunks of each fold, and what fraction of all they are."""

    def head(fold: Fold) -> Fold:
        bank = fold.bank
        size = bank.x.shape[-1]
        chunks = -(-(episodes // len(folds)) // size)
        first = jax.tree.map(lambda leaf: leaf[:chunks], bank)
        return Fold(dataclasses.replace(first, episodes=min(bank.episodes, chunks * size)), fold.potential)

    heads = tuple(map(head, folds))
    return heads, sum(f.bank.episodes for f in heads) / sum(f.bank.episodes for f in folds)


def typical_points(samples: Samples, number: int) -> Float[Array, "alphas d"]:
    """`number` samples, spread evenly over the central nine tenths of the data."""
    xp = np if host.on_host(samples.x, samples.observed) else jnp
    x, seen = xp.asarray(samples.x).reshape(-1, samples.dim), xp.asarray(samples.observed).reshape(-1)
    distance = xp.where(seen, distance_from_mean(samples, x), xp.inf)
    count = xp.maximum(xp.sum(seen), 1).astype(x.dtype)
    rank = (xp.arange(number, dtype=x.dtype) + 0.5) / number * CENTRAL * count
    return host.to_device(x[xp.argsort(distance)[rank.astype(np.int32)]])
