"""A gradient field that keeps learning: sums that forget, a test that chooses how much, a fit that is always there."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, Bool, Float, Int

from .._base.checks import check_count, check_shape, is_concrete
from .._base.types import Key, Scalar, Vector
from ..estimate.ratio import TRUSTED_FROM, Estimate
from ..fitting.spline_sums import Totals
from ..recovery.integration import axes_of
from ..recovery.loss import Loss
from ..samples.samples import Samples
from .equations import Batch, Equations, Mesh, batch_of, empty_totals, equations, squared_scores, totals_of
from .fit import Tuning, covariance, inflation, no_tuning, restricted_fit, solve
from .reading import Reading, estimate_at, loss_on, no_reading, read
from .change import levels, longest_agreeing, p_value

MEMORIES = (1, 4, 16, 64, math.inf)  # updates that each set of sums remembers
_INTERVALS = {1: 48, 2: 10}


class Sums(NamedTuple):
    """What is remembered, once for each memory: sums over points, squared scores, and the sums of weights."""

    totals: Totals
    scores: Float[Array, "memories powers p p"]  # Σ w² s sᵀ
    episodes: Float[Array, " memories"]  # Σ w over episodes
    squares: Float[Array, " memories"]  # Σ w² over episodes
    updates: Float[Array, " memories"]  # Σ w over updates


class AdaptiveField(eqx.Module):
    """The gradient of a loss that may change, from episodes that keep coming, in constant time and memory an update.

    Each memory m is a set of sums over all points so far, S_m ← ρ_m S_m + S_new with ρ_m = 1 − 1/m: the newest update
    alone, the latest 4, 16, 64, and everything. A penalised spline L_θ (degree 5, smoothing by restricted likelihood)
    is fitted to the longest memory whose older part still agrees with its newer part. Where a memory does not agree, it
    and all longer ones start again from the next shorter one, and a change is reported: after a jump the field
    knows what came since, and while the loss drifts it remembers as much as the drift permits.

    Standard errors are those of a sandwich whose filling forgets with ρ² (see `adaptive/fit.py`), so they know the
    dependence within episodes, noise of unequal size, the smoothing, and how much has been forgotten. They do not know a
    drift that is still too small to be seen.

    Sums and fits are in float64 on the device, whatever the dtype of the samples. Nothing is changed in place: an
    update returns a new field, inside `jit`, `vmap` and `lax.scan` too.

    Args:
        low: the lower end of the box on which the loss is wanted, one number or (d,), d = 1 or 2.
        high: its upper end. Points outside the box are left out.
        intervals: cells of the spline along each axis, one number or one per axis; None takes 48 in d = 1 and 10 in
            d = 2. Structure of the loss finer than three or so cells is not resolved.
        forgetting: "auto", as above; or a number ρ in [0, 1], the factor by which an update discounts what was
            before: 1 never forgets, 0 keeps the newest update alone. Then nothing is tested.
        false_alarm: the chance that an update finds a change while the loss stands still, at most.
        hessians: whether Hessians are fitted too. Without them the gradients alone are enough.

    Attributes:
        updates: how many updates were made.
        refused: episodes left out because they held a number that is not finite.
        changes: how many changes were found.
        changed_at: the number of the update from which on the data are remembered; 0 before any change.
        p_values: of the tests of the memories of 4, 16, 64 and all updates, each against the next shorter one.

    Raises:
        ValueError: if the box is empty or not of one or two dimensions, or a number is out of its range; on an update,
            if the samples are of another dimension, or hold no Hessians and `hessians` is True.

    Example:
        ```python
        import jax
        import jax.numpy as jnp
        import malliavin_jax as mj

        field = mj.AdaptiveField(-2.5, 2.5)
        for number, tilt in enumerate([0.0, 0.0, 1.0]):  # the goal changes at the third update
            learner = mj.ForwardLearner(mj.potentials.DoubleWell(tilt=tilt), mj.initial.Normal(), step_size=0.01)
            key = jax.random.fold_in(jax.random.key(0), number)
            field = field.update(mj.observe(key, learner, num_episodes=200, times=[0.4, 0.8]))
        field(jnp.array([0.5])).value, field.changes, field.changed_at  # …, 1, 2
        ```
    """

    mesh: Mesh
    sums: Sums
    reading: Reading
    updates: Int[Array, ""]
    refused: Int[Array, ""]
    changes: Int[Array, ""]
    changed_at: Int[Array, ""]
    p_values: Float[Array, " pairs"]
    forgetting: tuple[float, ...] = eqx.field(static=True)
    false_alarm: float = eqx.field(static=True)

    def __init__(
        self,
        low: Float[ArrayLike, "..."],
        high: Float[ArrayLike, "..."],
        *,
        intervals: int | Sequence[int] | None = None,
        forgetting: str | float = "auto",
        false_alarm: float = 0.005,
        hessians: bool = True,
    ):
        self.forgetting = _factors(forgetting)
        self.false_alarm = float(false_alarm)
        if not 0 < self.false_alarm < 1:
            raise ValueError(f"false_alarm must be between 0 and 1, got {false_alarm}")
        with jax.enable_x64(True):
            self.mesh = _mesh(low, high, intervals, hessians)
            self.sums = _no_sums(self.mesh, len(self.forgetting))
            self.reading = no_reading(self.mesh)
            self.p_values = jnp.ones(len(self.forgetting) - 1, jnp.float64)
        self.updates, self.refused, self.changes, self.changed_at = (jnp.zeros((), jnp.int32) for _ in range(4))

    @property
    def memory(self) -> Scalar:
        """How many updates the fit stands on: the sum of their weights."""
        return self.reading.updates

    @property
    def effective_episodes(self) -> Scalar:
        """How many episodes of equal weight the fit is worth, (Σw)²/Σw²."""
        return self.reading.episodes

    @eqx.filter_jit
    def update(self, samples: Samples) -> "AdaptiveField":
        """The field that has seen `samples` too.

        An episode with an observed number that is not finite is left out and counted; an update with no sound
        episode in it changes nothing else. Without forgetting the order of updates does not matter.

        Args:
            samples: new episodes; their weights are not used.

        Returns:
            A new field; this one stays as it is.

        Raises:
            ValueError: if the samples are of another dimension, or hold no Hessians and `hessians` is True.
        """
        if samples.dim != self.mesh.dim:
            raise ValueError(f"samples must be of dimension {self.mesh.dim}, that of the field, got {samples.dim}")
        if self.mesh.hessians and samples.hessian is None:
            raise ValueError("samples.hessian is None: build the field with hessians=False to fit gradients alone")
        with jax.enable_x64(True):
            batch = batch_of(self.mesh, samples)
            learned = self._learned(batch)
            is_empty = ~jnp.any(batch.counts)
            kept = jax.tree.map(lambda new, old: jnp.where(is_empty, old, new), learned, self)
            return eqx.tree_at(lambda f: f.refused, kept, self.refused + batch.refused.astype(jnp.int32))

    def _learned(self, batch: Batch) -> "AdaptiveField":
        mesh, old = self.mesh, self.reading.tuning
        totals = totals_of(mesh, batch)
        newest = equations(mesh, totals)
        tuning = lax.cond(self.updates == 0, lambda: restricted_fit(mesh, newest)[0], lambda: old)
        own = solve(mesh, newest, tuning)
        # At its own fit the scores of an update are noise alone, even when the loss has just changed.
        scores = inflation(newest, tuning, own) * squared_scores(mesh, batch, own.theta)
        sums = _added(self.sums, self.forgetting, totals, scores, jnp.sum(batch.sound).astype(jnp.float64))
        sums, p_values, changed = self._tested(sums, tuning)
        kept_since = self.updates + 1 - jnp.round(sums.updates[-1]).astype(jnp.int32)
        # Memories from the chosen one on are now the same: the last is the chosen one.
        last = jax.tree.map(lambda leaf: leaf[-1], sums)
        tuning, solved = restricted_fit(mesh, equations(mesh, last.totals))
        V = covariance(mesh, tuning, solved, last.scores)
        return eqx.tree_at(
            lambda f: (f.sums, f.reading, f.updates, f.changes, f.changed_at, f.p_values),
            self,
            (
                sums, read(mesh, tuning, solved.theta, V, last), self.updates + 1,
                self.changes + changed.astype(jnp.int32), jnp.where(changed, kept_since, self.changed_at), p_values,
            ),
        )  # fmt: skip

    def _tested(self, sums: Sums, tuning: Tuning) -> tuple[Sums, Float[Array, " pairs"], Bool[Array, ""]]:
        """The sums with every memory that no longer holds started again; the tests; whether there was one."""
        count = len(self.forgetting)
        if count == 1:
            return sums, self.p_values, jnp.asarray(False)
        found = jax.vmap(lambda totals: equations(self.mesh, totals))(sums.totals)

        def of_pair(k: Array) -> Scalar:
            newer, longer = (Equations(*(leaf[k + step] for leaf in found)) for step in (0, 1))
            return p_value(self.mesh, tuning, newer, longer, sums.scores[k], sums.scores[k + 1])

        p_values = lax.map(of_pair, jnp.arange(count - 1))
        chosen = longest_agreeing(p_values, levels(self.false_alarm, count - 1))
        source = jnp.minimum(jnp.arange(count), chosen)
        return jax.tree.map(lambda leaf: leaf[source], sums), p_values, chosen < count - 1

    def __call__(self, alpha: Vector, *, key: Key | None = None) -> Estimate:
        check_shape("alpha", alpha, (self.mesh.dim,))
        with jax.enable_x64(True):
            return estimate_at(self.mesh, self.reading, alpha)

    @eqx.filter_jit
    def loss(self, grid: Any) -> Loss:
        """The fitted loss on a grid, above its lowest trusted point there.

        Args:
            grid: increasing points in d = 1, shape (points,); in d = 2 a tuple of axes.

        Returns:
            A `Loss`. Its standard errors are those of differences from the lowest point, with all correlations, and
            so narrower than the bound that `loss_from_field` has to give.

        Raises:
            ValueError: if an axis of `grid` is not increasing, or `grid` is of another dimension than the field.
        """
        axes = axes_of(grid)
        if len(axes) != self.mesh.dim:
            raise ValueError(f"grid must have {self.mesh.dim} axes, as many as the field, got {len(axes)}")
        with jax.enable_x64(True):
            value, stderr = loss_on(self.mesh, self.reading, axes)
        return Loss(axes[0] if len(axes) == 1 else axes, value, stderr)


def _factors(forgetting: Any) -> tuple[float, ...]:
    """ρ of each memory."""
    if isinstance(forgetting, str):
        if forgetting != "auto":
            raise ValueError(f'forgetting must be "auto" or a number from 0 to 1, got {forgetting!r}')
        return tuple(1 - 1 / m for m in MEMORIES)
    if not is_concrete(forgetting) or not 0 <= float(forgetting) <= 1:
        raise ValueError(f'forgetting must be "auto" or a number from 0 to 1, got {forgetting}')
    return (float(forgetting),)


def _mesh(low: Any, high: Any, intervals: Any, hessians: bool) -> Mesh:
    ends = [np.atleast_1d(np.asarray(end, np.float64)) for end in (low, high)]
    if ends[0].shape != ends[1].shape or ends[0].shape not in ((1,), (2,)):
        raise ValueError(f"low and high must be numbers or of shape (1,) or (2,), got {np.shape(low)}, {np.shape(high)}")
    if not np.all(np.isfinite(ends)) or not np.all(ends[1] > ends[0]):
        raise ValueError(f"low must be below high along each axis, and both finite, got {low} and {high}")
    d = len(ends[0])
    given = _INTERVALS[d] if intervals is None else intervals
    cells = (given,) * d if isinstance(given, int | np.integer) else tuple(given)
    check_shape("intervals", cells, (d,))
    cells = tuple(check_count("intervals", n, 4) for n in cells)
    return Mesh(jnp.asarray(ends[0]), jnp.asarray(ends[1]), cells, bool(hessians))


def _no_sums(mesh: Mesh, memories: int) -> Sums:
    totals = empty_totals(mesh).totals
    one = Sums(
        totals, jnp.zeros((3 if mesh.hessians else 1, mesh.size, mesh.size), jnp.float64),
        *(jnp.zeros((), jnp.float64) for _ in range(3)),
    )  # fmt: skip
    return jax.tree.map(lambda leaf: jnp.stack([leaf] * memories), one)


def _added(old: Sums, forgetting: tuple[float, ...], totals: Totals, scores: Array, episodes: Scalar) -> Sums:
    """Every memory with the newest update in it, and the rest discounted."""
    rho = jnp.asarray(forgetting, jnp.float64)

    def discounted(before: Array, new: Array, factor: Array) -> Array:
        return factor.reshape(-1, *(1,) * new.ndim) * before + new[None]

    return Sums(
        jax.tree.map(lambda before, new: discounted(before, new, rho), old.totals, totals),
        discounted(old.scores, scores, rho**2),
        discounted(old.episodes, episodes, rho),
        discounted(old.squares, episodes, rho**2),
        discounted(old.updates, jnp.ones((), jnp.float64), rho),
    )
