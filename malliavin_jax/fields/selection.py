"""Choosing the localizer from the data.

The length needs no trade-off: every length is unbiased, so the one with the smallest *estimated standard error* is
taken. The core of the Gaussian localizer is the one true choice between bias and variance:

    risk(e) = max_{e' ≤ e} mean_α[(v_e − v_{e'})² − Var(v_e − v_{e'})] + mean_α se_e²,

each core with its best length, and the variance of the difference from the difference of the two influence functions.
The first term estimates the squared bias, which grows like e⁸. Every smaller core serves as a reference (as in Lepski's
method), not the smallest alone: that one is the least biased and the noisiest, and with noisy gradients sees nothing.

An α counts by the number of episodes that carry it, so that the noisy outskirts of the data do not decide for their
middle. At the least risk the bias is still a good part of the error, and no standard error knows of it; where noise
hides it, the risk is flat and its least place is luck. The core taken is therefore the smallest whose risk exceeds the
least by no more than a fifth, and a tenth smaller still: it costs little error, and the intervals cover better.
"""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from .._base.types import Scalar, Vector
from ..estimate.localizers import AbstractLocalizer, Gaussian, Laplace
from ..estimate.ratio import SIGNIFICANT, ratio_estimate
from ..estimate.sums import Bank, episode_terms, localized_sums, sum_over_chunks
from ..kernel.bandwidth import cross_validated_bandwidth
from ..samples.samples import Samples
from ..samples.summary import spread
from .folds import Fold, add_sums, fold_sums

_ALPHAS = 32  # places at which candidates are compared: samples themselves, so that they follow the density
_PILOT = 20_000  # points on which lengths are compared: which is best does not depend on the number
_RISK_POINTS = 400_000  # points from which the bias of a core is estimated
_LENGTHS = (0.013, 0.02, 0.03, 0.05, 0.08, 0.12, 0.18, 0.26, 0.38, 0.55, 0.8, 1.15, 1.7, 2.5, 4.0, 8.0)
_LENGTHS_BEYOND = (0.12, 0.2, 0.35, 0.6, 1.0, 1.7, 3.0, 6.0)
_TOLERANCE = 0.2  # by how much the risk of the core taken may exceed the least
_SMALLER = 0.9  # and the core taken in units of that one
_CORES = (0.06, 0.1, 0.15, 0.22, 0.32, 0.47, 0.7, 1.0)


class Choice(NamedTuple):
    """A localizer and its estimated mean squared error, to compare with that of another choice."""

    localizer: AbstractLocalizer
    risk: Scalar


@eqx.filter_jit
def choose_localizer(samples: Samples, folds: tuple[Fold, ...]) -> Choice:
    """The best localizer: `Laplace` in one dimension, `Gaussian` beyond."""
    scale = spread(samples)
    alphas = _typical_points(samples)
    pilot, shrink = _pilot(folds, max(1000, _PILOT // samples.num_times))

    def errors(localizer: AbstractLocalizer) -> Float[Array, " alphas"]:
        def at(alpha: Vector) -> Scalar:
            total = add_sums([fold_sums(f, alpha, localized_sums(f.bank, alpha, localizer)) for f in pilot])
            return shrink * jnp.sum(ratio_estimate(total, 1, 1, jnp.asarray(True)).stderr ** 2)

        return jax.vmap(at)(alphas)

    if samples.dim == 1:
        lengths = scale * jnp.asarray(_LENGTHS, scale.dtype)
        squares = lax.map(lambda h: errors(Laplace(h)), lengths)
        best = jnp.argmin(_mean_log(squares))
        return Choice(Laplace(lengths[best]), jnp.mean(squares[best]))

    cores, lengths = (scale * jnp.asarray(c, scale.dtype) for c in (_CORES, _LENGTHS_BEYOND))
    grid = jnp.stack(jnp.meshgrid(cores, lengths, indexing="ij"), -1).reshape(-1, 2)
    squares = lax.map(lambda pair: errors(Gaussian(pair[1], pair[0])), grid)
    best_length = lengths[jnp.argmin(_mean_log(squares).reshape(len(_CORES), -1), 1)]
    some, fraction = _pilot(folds, _RISK_POINTS // samples.num_times)
    risks = _risks(some, fraction, alphas, cores, best_length)
    taken = jnp.argmax(risks <= (1 + _TOLERANCE) * jnp.min(risks))  # the first: cores ascend
    return Choice(Gaussian(best_length[taken], _SMALLER * cores[taken]), jnp.min(risks))


def _mean_log(squares: Float[Array, "candidates alphas"]) -> Float[Array, " candidates"]:
    """Every α counts alike, whatever its size."""
    return jnp.mean(jnp.log(squares + jnp.finfo(squares.dtype).tiny), 1)


def _risks(
    folds: tuple[Fold, ...], fraction: float, alphas: Array, cores: Array, lengths: Array
) -> Float[Array, " cores"]:
    """The risk of each core, all of them from one matrix of inner products of the episodes' terms.

    `fraction` is the share of the episodes that `folds` hold.
    """

    def at(alpha: Vector) -> tuple[Array, Array, Array]:
        def products(fold: Fold) -> tuple[Array, Array]:
            def rows(part: Bank, core: Scalar, length: Scalar) -> Float[Array, "rows size"]:
                n, w = episode_terms(part, alpha, Gaussian(length, core))
                return jnp.stack([w, *(row + w * shift for row, shift in zip(n, fold.model(alpha), strict=True))])

            def of_chunk(part: Bank) -> tuple[Array, Array]:
                terms = jax.vmap(rows, (None, 0, 0))(part, cores, lengths)
                return jnp.sum(terms, -1), jnp.einsum("aie,bje->aibj", terms, terms, precision=lax.Precision.HIGHEST)

            return sum_over_chunks(of_chunk, fold.bank)

        sums, gram = jax.tree.map(lambda *leaves: sum(leaves[1:], leaves[0]), *map(products, folds))
        total, value = sums[:, 0], sums[:, 1:] / sums[:, :1]
        # The influence of an episode is (n − value·w)/total: a combination of its rows.
        pick = jnp.eye(value.shape[1], 1 + value.shape[1], k=1, dtype=value.dtype)[None]
        combine = (pick - value[:, :, None] * jnp.eye(1, pick.shape[2], dtype=value.dtype)[None]) / total[:, None, None]
        variance = jnp.einsum("aki,aibj,bkj->kab", combine, gram, combine, precision=lax.Precision.HIGHEST)
        own = jnp.diagonal(variance, axis1=1, axis2=2)
        difference = own[:, :, None] + own[:, None, :] - 2 * variance
        squares = jnp.diagonal(gram[:, 0, :, 0])
        firm = total > SIGNIFICANT * jnp.sqrt(squares)  # a ratio with nothing below is no reference
        excess = jnp.sum((value.T[:, :, None] - value.T[:, None, :]) ** 2 - difference, 0)
        return jnp.where(firm[:, None] & firm[None, :], excess, 0), jnp.sum(own, 0), jnp.mean(total**2 / squares)

    excess, variance, carried = lax.map(at, alphas, batch_size=4)
    share = carried / jnp.sum(carried)
    smaller = jnp.tril(jnp.einsum("n,nab->ab", share, excess))  # the diagonal is 0
    return jnp.max(smaller, 1) + fraction * share @ variance


def _pilot(folds: tuple[Fold, ...], episodes: int) -> tuple[tuple[Fold, ...], float]:
    """The first `episodes` episodes, in whole chunks of each fold, and what fraction of all they are."""

    def head(fold: Fold) -> Fold:
        bank = fold.bank
        size = bank.x.shape[-1]
        chunks = -(-(episodes // len(folds)) // size)
        parts = [leaf[:chunks] for leaf in (bank.x, bank.weight, bank.values, bank.jacobians, bank.observed)]
        return Fold(Bank(*parts, episodes=min(bank.episodes, chunks * size)), fold.potential)

    heads = tuple(map(head, folds))
    return heads, sum(f.bank.episodes for f in heads) / sum(f.bank.episodes for f in folds)


def _typical_points(samples: Samples) -> Float[Array, "alphas d"]:
    """Samples spread evenly over the central nine tenths of the data."""
    x = samples.x.reshape(-1, samples.dim)
    seen = samples.observed.reshape(-1)
    count = jnp.maximum(jnp.sum(seen), 1).astype(x.dtype)
    clean = jnp.where(seen[:, None], x, 0)
    mean = jnp.sum(clean, 0) / count
    centred = jnp.where(seen[:, None], x - mean[None], 0)
    deviation = jnp.sqrt(jnp.sum(centred**2, 0) / count) + jnp.finfo(x.dtype).tiny
    distance = jnp.where(seen, jnp.sum((centred / deviation[None]) ** 2, 1), jnp.inf)
    rank = (jnp.arange(_ALPHAS, dtype=x.dtype) + 0.5) / _ALPHAS * 0.9 * count
    return x[jnp.argsort(distance)[rank.astype(jnp.int32)]]


def short_localizer(samples: Samples) -> AbstractLocalizer:
    """The debiased kernel at the length of a kernel: the safe choice where integration by parts is in doubt.

    Where episodes end because of where they are, where Hessians are rough, or where a step size is uncertain, the
    Malliavin term is off by a factor, and the error of the estimate is of the order of that factor times the length
    squared. At the cross-validated bandwidth of Nadaraya–Watson it is at worst comparable to that kernel's bias, and a
    control (`MalliavinField(samples, short_localizer(samples))` fits one) takes most of it away.

    ```python
    mj.kernel.short_localizer(samples)  # Laplace, at the length of a kernel
    ```
    """
    length = cross_validated_bandwidth(samples, 0)
    return Laplace(length) if samples.dim == 1 else Gaussian(length, length / 4)
