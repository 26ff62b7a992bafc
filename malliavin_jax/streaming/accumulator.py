"""Streams: estimates on a grid of α from more episodes than fit in memory.

An estimate is a ratio of sums over episodes, so it needs no episode twice. `Accumulator` holds the sums at each α of a
grid, takes samples as they come and forgets them; accumulators filled on different machines are merged. `accumulate`
fills one from chunks of samples, `observe_and_accumulate` from episodes simulated on the spot.

Sums of many terms lose digits, in float32 the more: a running total of 10⁷ terms no longer sees the half of a term's
digits. Each total is therefore kept as two numbers, the rounded sum and what rounding took from it (Knuth's two-sum,
*The Art of Computer Programming* 2, section 4.2.2); counts are exact up to 2⁴⁸ in float32.
"""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from .._base.checks import check_finite, check_shape, float_array, floats_to_arrays, is_concrete
from .._base.fingerprint import fingerprint
from .._base.types import Scalar, Vector
from ..estimate.localizers import AbstractLocalizer, check_localizer
from ..estimate.ratio import Estimate, ratio_estimate
from ..estimate.sums import Sums, localized_sums
from ..models.folds import make_fold
from ..potentials.base import AbstractPotential, check_potential
from ..samples.samples import Samples, check_finite as check_finite_samples
from ..samples.summary import box

_ALPHAS = 64  # places whose sums are taken at once: this many × estimate.sums.CHUNK numbers sit in memory


class Tally(NamedTuple):
    """The sums at each α (leading axis), the number of episodes and that of observed points."""

    sums: Sums
    episodes: Scalar
    points: Scalar


class Contents(NamedTuple):
    """What samples change in an accumulator: the totals, and the box of the observed points."""

    total: Tally
    rest: Tally  # what rounding took from the total
    low: Vector
    high: Vector


class Accumulator(eqx.Module):
    """Sums of residuals on a grid of `alphas`, to which samples are added and which are merged.

    `accumulator.add(samples)` and `a.merge(b)` return new accumulators; both are pure. Episodes may be added in any
    order and in chunks of any size, but each episode whole: its points are dependent, and must meet in one chunk.
    `estimate()` is an `Estimate` with the leading axis q, the numbers of
    `jax.vmap(MalliavinField(all_samples, localizer, control))(alphas)` wherever they are trusted. Elsewhere there
    is no tail to fall back on: the value is NaN and its standard error infinite.

    Args:
        alphas: the places α to estimate at, of shape (q, d) and of the dtype of the samples to come.
        localizer: as in `MalliavinField`, but given: choosing one would need the samples again. That of a
            `MalliavinField` made from a first part of the stream serves well.
        control: a fixed potential m that assists, or None; it must not have been fitted to the episodes added.

    Raises:
        ValueError: if `alphas` is not a finite array (q, d), or `localizer` or `control` is of another kind; from
            `add` if the samples do not go with `alphas` or are not finite, from `merge` if the two differ in
            `alphas`, `localizer` or `control`, from `estimate` with fewer than two episodes.

    Example:
        ```python
        import jax
        import jax.numpy as jnp
        import malliavin_jax as mj

        loss = mj.potentials.Quartic()
        learner = mj.ForwardLearner(loss, mj.initial.Normal(), step_size=0.01, gradient_noise=0.5)
        samples = mj.observe(jax.random.key(0), learner, num_episodes=2000, times=[0.4, 0.8])
        sums = mj.Accumulator(jnp.linspace(-1.0, 1.0, 9)[:, None], mj.Laplace(0.5)).add(samples)
        sums.estimate().value.shape, sums.num_episodes  # (9, 1), 2000
        ```
    """

    alphas: Float[Array, "q d"]
    localizer: AbstractLocalizer
    control: AbstractPotential | None
    contents: Contents

    def __init__(
        self,
        alphas: Float[Any, "q d"],
        localizer: AbstractLocalizer,
        control: AbstractPotential | None = None,
    ):
        self.alphas = float_array("alphas", alphas)
        check_shape("alphas", self.alphas, (None, None), "places d", "one row for each α")
        check_finite("alphas", self.alphas)
        check_localizer(localizer)
        if control is not None:
            check_potential("control", control, " or None")
        (q, d), dtype = self.alphas.shape, self.alphas.dtype
        self.localizer, self.control = floats_to_arrays((localizer, control), dtype)
        zero, each, vectors = jnp.zeros((), dtype), jnp.zeros((q,), dtype), jnp.zeros((q, d), dtype)
        nothing = Tally(Sums(n=vectors, w=each, nn=vectors, nw=vectors, ww=each), episodes=zero, points=zero)
        empty_box = dict(low=jnp.full((d,), jnp.inf, dtype), high=jnp.full((d,), -jnp.inf, dtype))
        self.contents = Contents(total=nothing, rest=nothing, **empty_box)

    @property
    def num_episodes(self) -> int:
        """Episodes added so far."""
        return int(self.contents.total.episodes) + int(self.contents.rest.episodes)

    @property
    def num_points(self) -> int:
        """Observed points added so far."""
        return int(self.contents.total.points) + int(self.contents.rest.points)

    def add(self, samples: Samples) -> "Accumulator":
        """This accumulator with `samples` added. Chunks of one size share one compiled program."""
        if samples.dim != self.alphas.shape[1] or samples.x.dtype != self.alphas.dtype:
            raise ValueError(
                f"samples must be {self.alphas.dtype} in {self.alphas.shape[1]} dimensions, as alphas are, "
                f"got {samples.x.dtype} in {samples.dim}"
            )
        check_finite_samples(samples)
        return add_samples(self, samples, jnp.asarray(samples.num_episodes, jnp.int32))

    def merge(self, other: "Accumulator") -> "Accumulator":
        """The two together: as if the samples of `other` had been added to this one, up to rounding."""
        for name in ("alphas", "localizer", "control"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if is_concrete(mine, theirs) and fingerprint(mine) != fingerprint(theirs):
                raise ValueError(f"{name} must be equal to merge two accumulators, got {mine} and {theirs}")
        return _merge(self, other)

    def estimate(self) -> Estimate:
        """The estimates at every α, with the leading axis q."""
        if is_concrete(self.contents.total.episodes) and self.num_episodes < 2:
            raise ValueError(f"an estimate needs at least 2 episodes, got {self.num_episodes}: add samples first")
        return _estimate(self)


def with_contents(accumulator: Accumulator, contents: Contents) -> Accumulator:
    return eqx.tree_at(lambda a: a.contents, accumulator, contents)


def _plus(contents: Contents, tally: Tally, low: Vector, high: Vector) -> Contents:
    """Add the sums of points that lie in the box from `low` to `high`."""
    total, rest = two_sum(contents.total, contents.rest, tally)
    return Contents(total, rest, low=jnp.minimum(contents.low, low), high=jnp.maximum(contents.high, high))


def two_sum(total: Any, rest: Any, term: Any) -> tuple[Any, Any]:
    """`total + rest + term`, leaf by leaf, again as a rounded sum and what rounding took from it."""

    def pair(total: Array, rest: Array, term: Array) -> tuple[Array, Array]:
        # Barriers: a compiler that reassociates would find the rounding error to be 0, as for real numbers it is.
        rough = lax.optimization_barrier(total + term)
        back = rough - total
        low = rest + ((total - (rough - back)) + (term - back))
        high = lax.optimization_barrier(rough + low)
        return high, low - (high - rough)

    leaves = [pair(*three) for three in zip(*map(jax.tree.leaves, (total, rest, term)), strict=True)]
    structure = jax.tree.structure(total)
    return structure.unflatten([high for high, _ in leaves]), structure.unflatten([low for _, low in leaves])


@eqx.filter_jit
def add_samples(accumulator: Accumulator, samples: Samples, episodes: Int[Array, ""]) -> Accumulator:
    """Add `samples`, in which `episodes` count (a simulated chunk may be filled up with unobserved ones)."""
    bank = make_fold(samples, accumulator.control).bank

    def at(alpha: Vector) -> Sums:
        return localized_sums(bank, alpha, accumulator.localizer)

    few = accumulator.alphas.shape[0] <= _ALPHAS
    sums = jax.vmap(at)(accumulator.alphas) if few else lax.map(at, accumulator.alphas, batch_size=_ALPHAS)
    points = jnp.sum(samples.observed, dtype=jnp.int32)
    dtype, no_sums = accumulator.alphas.dtype, jax.tree.map(jnp.zeros_like, sums)
    # A whole number of more than 24 bits does not fit in a float32: its upper and its lower bits are added apart.
    lower = Tally(no_sums, (episodes % 4096).astype(dtype), (points % 4096).astype(dtype))
    upper = Tally(sums, (episodes - episodes % 4096).astype(dtype), (points - points % 4096).astype(dtype))
    low, high = box(samples)
    contents = _plus(accumulator.contents, upper, low, high)
    return with_contents(accumulator, _plus(contents, lower, low, high))


@eqx.filter_jit
def _merge(accumulator: Accumulator, other: Accumulator) -> Accumulator:
    a, b = accumulator.contents, other.contents
    total, rest = two_sum(a.total, jax.tree.map(jnp.add, a.rest, b.rest), b.total)
    joined = Contents(total, rest, low=jnp.minimum(a.low, b.low), high=jnp.maximum(a.high, b.high))
    return with_contents(accumulator, joined)


@eqx.filter_jit
def _estimate(accumulator: Accumulator) -> Estimate:
    contents, control = accumulator.contents, accumulator.control
    tally: Tally = jax.tree.map(jnp.add, contents.total, contents.rest)

    def at(alpha: Vector, sums: Sums) -> Estimate:
        inside = jnp.all((alpha >= contents.low) & (alpha <= contents.high))
        # The model is added back to the ratio, not to the sums: their squares would lose digits to it.
        ratio = ratio_estimate(sums, tally.episodes, tally.points, inside)
        value = ratio.value if control is None else ratio.value + control.gradient(alpha)
        return Estimate(
            value=jnp.where(ratio.trusted, value, jnp.nan),
            stderr=jnp.where(ratio.trusted, ratio.stderr, jnp.inf),
            density=jnp.where(inside, ratio.density, 0),
            density_stderr=ratio.density_stderr,
            trusted=ratio.trusted,
        )

    return jax.vmap(at)(accumulator.alphas, tally.sums)
