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
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from .._base import mesh
from .._base.small_tensors import HIGHEST, matmul
from .._base.types import Scalar, Vector
from ..estimate.length import length_of_least_variance
from ..estimate.localizers import AbstractLocalizer, Gaussian, Laplace
from ..estimate.ratio import TRUSTED_FROM
from ..estimate.sums import Bank, Sums, add_up, episode_terms, sum_over_chunks
from ..kernel.bandwidth import cross_validated_bandwidth
from ..samples.samples import Samples
from ..samples.summary import mean_and_deviation, spread
from .folds import Fold, folded_sums

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
    return _choose(folds, spread(samples), typical_points(samples, _ALPHAS))


@eqx.filter_jit
def _choose(folds: tuple[Fold, ...], scale: Scalar, alphas: Float[Array, "alphas d"]) -> Choice:
    times = folds[0].bank.x.shape[2]
    pilot, shrink = some_episodes(folds, max(1000, _PILOT // times))

    def sums(alpha: Vector, localizer: AbstractLocalizer) -> Sums:
        return folded_sums(pilot, alpha, localizer)

    def average(variances: Float[Array, "lengths alphas"]) -> Float[Array, " lengths"]:
        """The mean of logarithms: every α counts alike, whatever its size."""
        return jnp.mean(jnp.log(shrink * variances + jnp.finfo(variances.dtype).tiny), 1)

    if alphas.shape[1] == 1:
        lengths = scale * jnp.asarray(LENGTHS, scale.dtype)
        best = length_of_least_variance(sums, Laplace, lengths=lengths, alphas=alphas, average=average)
        return Choice(Laplace(best.length), jnp.mean(shrink * best.variance))

    cores, lengths = (scale * jnp.asarray(c, scale.dtype) for c in (_CORES, _LENGTHS_BEYOND))

    def best_length(core: Scalar) -> Scalar:
        return length_of_least_variance(
            sums, lambda length: Gaussian(length, core), lengths=lengths, alphas=alphas, average=average
        ).length

    best_lengths = lax.map(best_length, cores)
    some, fraction = some_episodes(folds, _RISK_POINTS // times)
    risks = _risks(some, fraction, alphas, cores, best_lengths)
    taken = jnp.argmax(risks <= (1 + _TOLERANCE) * jnp.min(risks))  # the first: cores ascend
    return Choice(Gaussian(best_lengths[taken], _SMALLER * cores[taken]), jnp.min(risks))


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


class _Comparison(NamedTuple):
    """All cores at one α."""

    excess: Float[Array, "cores cores"]  # (v_e − v_{e'})² − Var(v_e − v_{e'}), or 0 where either is too noisy
    variance: Float[Array, " cores"]  # se_e²
    carried: Scalar  # effective number of episodes


def _risks(
    folds: tuple[Fold, ...], fraction: float, alphas: Array, cores: Array, lengths: Array
) -> Float[Array, " cores"]:
    """The risk of each core, with its length; `fraction` is the share of the episodes that `folds` hold."""
    found = lax.map(lambda alpha: _compare(folds, alpha, cores, lengths), alphas, batch_size=4)
    share = found.carried / jnp.sum(found.carried)
    smaller = jnp.tril(jnp.einsum("n,nab->ab", share, found.excess, precision=HIGHEST))  # the diagonal is 0
    return jnp.max(smaller, 1) + fraction * matmul(share, found.variance)


def _compare(folds: tuple[Fold, ...], alpha: Vector, cores: Array, lengths: Array) -> _Comparison:
    """The cores at α, all of them from one matrix of inner products of the episodes' terms."""

    def products(fold: Fold) -> tuple[Array, Array]:
        def rows(part: Bank, core: Scalar, length: Scalar) -> Float[Array, "rows size"]:
            n, w = episode_terms(part, alpha, Gaussian(length, core))
            return jnp.stack([w, *(row + w * shift for row, shift in zip(n, fold.model(alpha), strict=True))])

        def of_chunk(part: Bank) -> tuple[Array, Array]:
            terms = jax.vmap(rows, (None, 0, 0))(part, cores, lengths)
            return jnp.sum(terms, -1), jnp.einsum("aie,bje->aibj", terms, terms, precision=HIGHEST)

        return sum_over_chunks(of_chunk, fold.bank)

    sums, gram = add_up([products(fold) for fold in folds])
    total, value = sums[:, 0], sums[:, 1:] / sums[:, :1]
    # The influence of an episode is (n − value·w)/total: a combination of its rows.
    pick = jnp.eye(value.shape[1], 1 + value.shape[1], k=1, dtype=value.dtype)[None]
    combine = (pick - value[:, :, None] * jnp.eye(1, pick.shape[2], dtype=value.dtype)[None]) / total[:, None, None]
    variance = jnp.einsum("aki,aibj,bkj->kab", combine, gram, combine, precision=HIGHEST)
    own = jnp.diagonal(variance, axis1=1, axis2=2)
    difference = own[:, :, None] + own[:, None, :] - 2 * variance
    squares = jnp.diagonal(gram[:, 0, :, 0])
    firm = total > TRUSTED_FROM * jnp.sqrt(squares)  # a ratio whose denominator is noise is no reference
    excess = jnp.sum((value.T[:, :, None] - value.T[:, None, :]) ** 2 - difference, 0)
    return _Comparison(
        excess=jnp.where(firm[:, None] & firm[None, :], excess, 0),
        variance=jnp.sum(own, 0),
        carried=jnp.mean(total**2 / squares),
    )


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
    xp = np if mesh.on_host(samples.x, samples.observed) else jnp
    x, seen, mean, deviation = map(xp.asarray, (samples.x, samples.observed, *mean_and_deviation(samples)))
    x, seen = x.reshape(-1, samples.dim), seen.reshape(-1)
    away = (x - mean[None]) / (deviation + xp.finfo(x.dtype).tiny)[None]
    distance = xp.where(seen, xp.sum(away**2, 1), xp.inf)
    count = xp.maximum(xp.sum(seen), 1).astype(x.dtype)
    rank = (xp.arange(number, dtype=x.dtype) + 0.5) / number * 0.9 * count
    return mesh.to_device(x[xp.argsort(distance)[rank.astype(np.int32)]])
