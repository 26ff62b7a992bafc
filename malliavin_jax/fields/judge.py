"""How much correction a fitted model needs, with the debiased estimate as the judge.

Candidates, from least to most variance: the model alone; the model plus a kernel average of its residuals, at shorter
and shorter lengths; the model plus the debiased average of its residuals, v_u, which is unbiased whatever the model is.
Under "candidate j is unbiased" the statistic

    T_j = mean_α |v_j(α) − v_u(α)|²

has, by the central limit theorem for episodes, the law of Σ_k λ_k z_k²/J with z standard normal and λ the eigenvalues
of Σ_i ρ_i ρ_iᵀ, ρ_i the difference of the two influences of episode i at all J places α. (Multipliers drawn for each
episode would have the same law; their covariance is this matrix.) The errors of v_u at different α share a large common
part, and the matrix knows it. The model is fitted to other episodes than the residuals that correct it, and its own
influence is left out, which makes the test a little cautious.

The first candidate with P(T ≥ T_j) > level is taken. To reject a right model by chance costs the variance of v_u, which
may be many times the model's: the level is 0.1 times the ratio of the model's variance to that of v_u (at most 0.1, at
least 0.002), so that such chances add a tenth to the model's variance, on average. What is not rejected may still be
off. Its suspected squared bias, by how much T_j exceeds the 70 % point of its null law times the same ratio (a noisy
judge suspects much without reason), is added to the squared standard errors.
"""

import functools
from typing import ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float

from .._base.checks import has_numbers
from .._base.host import each, here_or_compiled, module_of, on_one_thread, to_device
from .._base.small_tensors import matmul
from .._base.types import Numbers, Scalar, Vector
from ..estimate.localizers import AbstractLocalizer, AbstractRadial, check_localizer
from ..estimate.on_host import terms_at
from ..estimate.ratio import TRUSTED_FROM
from ..estimate.sums import Bank, episode_terms
from ..models.folds import Fold, gradients, make_fold, on_hand
from ..models.selection import choose_localizer, typical_points
from ..potentials.base import AbstractPotential, check_potential
from ..potentials.on_host import is_known
from ..samples.samples import Samples, check_samples
from ..samples.summary import spread

LEVEL = 0.1  # of the test of each candidate, where a rejection by chance costs nothing
LEAST_LEVEL = 0.002
_EXPECTED = 0.7  # the part of the null law within which a difference raises no doubt
LENGTHS = (2.5, 1.2, 0.6, 0.3, 0.15)  # of the kernels, in units of the spread of the positions
_PLACES = 64  # at which a guess of the loss is judged
_DRAWS = 16384  # of the null law: p-values are known to ±.002 near .1, to ±.0004 near the least level


class Kernel(AbstractRadial):
    """The fourth-order Gaussian kernel 2K_h − K_{√2 h} with no field G: a plain average, not debiased."""

    length: float | Float[Numbers, ""]
    takes_numpy: ClassVar[bool] = True

    def radial(self, square: Numbers, d: int) -> tuple[Numbers, Numbers]:
        xp = module_of(square)
        h2 = xp.asarray(self.length, square.dtype) ** 2
        narrow, wide = (xp.exp(-square / (2 * k * h2)) / (2 * xp.pi * k * h2) ** (d / 2) for k in (1, 2))
        return 2 * narrow - wide, xp.zeros_like(square)


class Influence(NamedTuple):
    """An estimate at some places, and by how much each episode moves it."""

    value: Float[Array, "alphas d"]
    of_episodes: Float[Array, "alphas d episodes"]
    firm: Float[Array, " alphas"]  # 1 where the density is significantly positive


class Test(NamedTuple):
    """T, the probability of at least this under the null law, and by how much T exceeds what is to be expected."""

    statistic: Scalar
    p_value: Scalar
    excess: Scalar


class Verdict(NamedTuple):
    """The tests of all candidates, and for each place its share in them and the variance of the judge there."""

    tests: Test
    share: Float[Array, " alphas"]
    variance: Float[Array, "alphas d"]


def influences(folds: tuple[Fold, ...], alphas: Float[Numbers, "alphas d"], localizer: AbstractLocalizer) -> Influence:
    """The localized estimate of several folds, each with its own model added back."""
    xp = module_of(alphas)
    terms = terms_at if xp is np else _terms

    def with_model(fold: Fold) -> Float[Numbers, "alphas rows episodes"]:
        rows = terms(fold.bank, alphas, localizer)
        n, w = rows[:, :-1], rows[:, -1:]
        return xp.concatenate([n + fold.model_at(alphas)[:, :, None] * w, w], 1)

    rows = xp.concatenate([with_model(fold) for fold in folds], -1)
    n, w = rows[:, :-1], rows[:, -1:]
    total = xp.sum(w, -1)
    firm = total[:, 0] > TRUSTED_FROM * xp.sqrt(xp.sum(w[:, 0] ** 2, -1))
    safe = xp.where(total == 0, 1, total)
    value = xp.sum(n, -1) / safe
    return Influence(value, (n - value[:, :, None] * w) / safe[:, :, None], firm.astype(value.dtype))


def _terms(
    bank: Bank, alphas: Float[Array, "alphas d"], localizer: AbstractLocalizer
) -> Float[Array, "alphas rows episodes"]:
    """n and w of each episode at each α: `terms_at`, compiled."""

    def at(part: Bank, alpha: Vector) -> Float[Array, "rows size"]:
        n, w = episode_terms(part, alpha, localizer)
        return jnp.stack([*n, w])

    rows = lax.map(lambda part: jax.vmap(lambda alpha: at(part, alpha))(alphas), bank)
    return jnp.moveaxis(rows, 0, 2).reshape(len(alphas), rows.shape[2], -1)


class Moments(NamedTuple):
    """T, and the covariance of the differences that it is made of."""

    statistic: Scalar
    covariance: Float[Array, "n n"]


def compare(
    difference: Float[Numbers, "alphas d"], influence: Float[Numbers, "alphas d episodes"], share: Numbers
) -> Moments:
    """What the test of difference = 0 is made of, given the influences of the episodes on it.

    Places count by their `share`."""
    xp = module_of(share)
    root = xp.sqrt(share)[:, None]
    rows = (root[:, :, None] * influence).reshape(difference.size, -1)
    return Moments(xp.sum((root * difference) ** 2), matmul(rows, rows.T))


@functools.lru_cache(maxsize=2)
def _squared_normals(number: int) -> Float[np.ndarray, "draws n"]:  # of a fixed seed: the same data, the same p-value
    return np.random.default_rng(0).standard_normal((_DRAWS, number), np.float32) ** 2


@on_one_thread
def against_null(found: Moments) -> Test:
    """The test itself; on the host, where it takes milliseconds and nothing is compiled."""
    covariance = np.asarray(found.covariance)
    eigenvalues = np.maximum(np.linalg.eigvalsh(covariance), 0)
    unit = eigenvalues.max() or 1.0  # whatever units the loss has, float32 holds the null law
    null = _squared_normals(len(eigenvalues)) @ (eigenvalues / unit).astype(np.float32)
    statistic = np.asarray(found.statistic)
    p_value = (1 + np.count_nonzero(null >= statistic / unit)) / (1 + _DRAWS)
    excess = np.maximum(statistic - unit * np.quantile(null, _EXPECTED), 0)
    return Test(*(to_device(number, covariance.dtype) for number in (statistic, p_value, excess)))


def shares(firm: Float[Numbers, " alphas"]) -> Float[Numbers, " alphas"]:
    """Equal shares of the places where the judge has something to say."""
    return firm / module_of(firm).maximum(firm.sum(), 1)


def judge(
    folds: tuple[Fold, ...],
    model: AbstractPotential,
    alphas: Float[Array, "alphas d"],
    lengths: Float[Array, " lengths"],
    unbiased: AbstractLocalizer,
) -> Verdict:
    """The tests of the model alone, and of it with each kernel, in this order."""
    here = is_known(model) and on_hand(folds, unbiased, len(alphas) * (1 + len(lengths)))
    alone, rest, share, variance = _candidates(here, folds, model, alphas, lengths, unbiased)
    tests = [against_null(alone), *(against_null(Moments(*one)) for one in zip(*map(np.asarray, rest), strict=True))]
    columns = (to_device(np.stack(column)) for column in zip(*tests, strict=True))
    return Verdict(Test(*columns), share, variance)


@here_or_compiled
def _candidates(
    folds: tuple[Fold, ...], model: AbstractPotential, alphas: Numbers, lengths: Numbers, unbiased: AbstractLocalizer
) -> tuple[Moments, Moments, Numbers, Numbers]:
    """What the tests are made of: of the model alone, and of each kernel."""
    u = influences(folds, alphas, unbiased)
    share = shares(u.firm)

    def candidate(length: Float[Numbers, ""]) -> Moments:
        kernel = influences(folds, alphas, Kernel(length))
        return compare(kernel.value - u.value, kernel.of_episodes - u.of_episodes, share)

    alone = compare(gradients(model, alphas) - u.value, u.of_episodes, share)
    return alone, each(candidate, lengths), share, (u.of_episodes**2).sum(-1)


class GoodnessOfFit(eqx.Module):
    """The verdict on a guess of the loss.

    Attributes:
        p_value: the probability of a difference at least this large if the guess were right; small means wrong.
        statistic: the mean over α of |difference|².
        alphas: the places where they were compared, samples spread over the central nine tenths of the data.
        difference: the debiased estimate minus the guess's gradient, (alphas, d): where, and how far, the guess is off.
        stderr: standard errors of the differences.
        trusted: False where the density is not significantly positive; such places do not count.

    Example:
        ```python
        import jax
        import malliavin_jax as mj

        loss = mj.potentials.Quartic()
        learner = mj.ForwardLearner(loss, mj.initial.Normal(), step_size=0.01, gradient_noise=0.5)
        samples = mj.observe(jax.random.key(0), learner, num_episodes=2000, times=[0.4, 0.8])
        verdict = mj.goodness_of_fit(samples, mj.potentials.Quadratic())
        worst = abs(verdict.difference / verdict.stderr).max()  # in standard errors
        ```
    """

    p_value: Scalar
    statistic: Scalar
    alphas: Float[Array, "alphas d"]
    difference: Float[Array, "alphas d"]
    stderr: Float[Array, "alphas d"]
    trusted: Bool[Array, " alphas"]

    def __repr__(self) -> str:
        if not has_numbers(self) or np.ndim(self.p_value) > 0:
            return super().__repr__()
        trusted = np.asarray(self.trusted)
        off = np.abs(np.asarray(self.difference) / np.asarray(self.stderr))[trusted]
        worst = f", largest difference {off.max():.2g} standard errors" if off.size else ""
        return f"GoodnessOfFit(p = {float(self.p_value):.2g}{worst}; {trusted.sum()} of {trusted.size} places trusted)"


def goodness_of_fit(
    samples: Samples,
    potential: AbstractPotential,
    *,
    localizer: AbstractLocalizer | None = None,
    alphas: Float[Array, "alphas d"] | None = None,
) -> GoodnessOfFit:
    """Does this guess of the loss agree with what the learner did?

    The debiased average of the residuals g − ∇m(X) given X = α is an unbiased estimate of how far ∇m(α) is off,
    whatever m is; its law if m is right is known from the episodes (see `fields/judge.py`). A guess that was fitted to
    the same samples is judged leniently: fit it to others.

    Args:
        samples: observed episodes, with Hessians.
        potential: the guess m, with gradient and Hessian; its constant does not matter.
        localizer: for the debiased average; None chooses one as `MalliavinField` does. Where Hessians were not observed
            None takes a kernel average of .15 spreads, which needs none.
        alphas: where to compare, (alphas, d); None takes 64 samples spread over the data.

    Returns:
        A `GoodnessOfFit`; `plots.disagreement` draws it.

    Raises:
        ValueError: if the samples hold no Hessians, fewer than two observed episodes, or a number that is not finite.

    Example:
        ```python
        import jax
        import malliavin_jax as mj

        loss = mj.potentials.Quartic()
        learner = mj.ForwardLearner(loss, mj.initial.Normal(), step_size=0.01, gradient_noise=0.5)
        samples = mj.observe(jax.random.key(0), learner, num_episodes=2000, times=[0.4, 0.8])
        mj.goodness_of_fit(samples, loss).p_value  # large: this is the loss
        mj.goodness_of_fit(samples, mj.potentials.Quadratic(precision=2.0)).p_value  # small: this is not
        ```
    """
    check_samples(samples)
    samples.require_hessian("goodness_of_fit")
    check_potential("potential", potential)
    if localizer is not None:
        check_localizer(localizer)
    rung, samples = samples.rung, samples.bare
    fold = make_fold(samples, potential)
    if localizer is None:
        narrow = Kernel(LENGTHS[-1] * spread(samples))
        localizer = choose_localizer(samples, (fold,)).localizer if rung == "hessians" else narrow
    if alphas is None:
        alphas = typical_points(samples, _PLACES)
    here = on_hand((fold,), localizer, len(alphas))
    moments, difference, stderr, trusted = _verdict(here, fold, to_device(alphas), localizer)
    test = against_null(moments)
    return GoodnessOfFit(test.p_value, test.statistic, alphas, difference, stderr, trusted)


@here_or_compiled
def _verdict(
    fold: Fold, alphas: Float[Numbers, "alphas d"], localizer: AbstractLocalizer
) -> tuple[Moments, Numbers, Numbers, Numbers]:
    found = influences((fold,), alphas, localizer)
    difference = found.value - fold.model_at(alphas)
    stderr = (found.of_episodes**2).sum(-1) ** 0.5
    return compare(difference, found.of_episodes, shares(found.firm)), difference, stderr, found.firm > 0
