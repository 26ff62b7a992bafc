"""A gradient field that keeps learning: sums that forget, a test that chooses how much, a fit that is always there."""

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, Float, Int

from .._base.checks import check_count, check_shape, has_numbers, is_concrete
from .._base.types import Key, Place, Scalar
from ..estimate.field import AbstractField, place_of
from ..estimate.ratio import Estimate
from ..potentials.spline import Spline
from ..recovery.integration import axes_of
from ..recovery.loss import Loss
from ..samples.samples import Samples
from .change import OF_DRIFTS, Drift, followed, keep, levels, no_drift, p_value, smooth, within
from .equations import Batch, Mesh, batch_of, episode_scores, equations, squared_scores, totals_of
from .fit import Tuning, covariance, inflation, restricted_fit, sandwich
from .groups import CAPACITY, Sums, newest_of, no_groups, parted, with_newest
from .judge import SLOTS, Ring, no_ring, verdict, with_update
from .reading import Reading, estimate_at, loss_on, no_reading, read

_INTERVALS = {1: 48, 2: 10}


class AdaptiveField(AbstractField):
    """The gradient of a loss that may change, from episodes that keep coming, in constant time and memory an update.

    Sums over the points seen (the normal equations of a penalised spline L_θ of degree 5) are kept in five groups: the
    newest update, up to 4 before it, up to 16 before these, up to 64, and all the rest. A full group is poured into the
    next. At each update, every cut between groups is tested: do the older data agree with the newer? Where they do
    not, what is older than the clearest cut is dropped, and a change is reported. Where successive updates show a slow
    drift, as many are kept as lag and noise call for (see `adaptive/change.py`). So while the loss stands still
    everything is remembered; after a jump, what came since; while it drifts, as much as serves.

    The spline is fitted to all that is remembered, its smoothing chosen by restricted likelihood. Standard errors are
    those of a sandwich (see `adaptive/fit.py`): they know the dependence within episodes, noise of unequal size, the
    smoothing, what has been forgotten, and the lag behind a drift that shows; not one too new or too small to show.

    Whether the fit itself holds is judged at each update, on the latest eight: `fit_p_value` tells how likely so large
    a misfit is if it does. The judge is the debiased estimate of what the fit leaves (`adaptive/judge.py`), which with
    the weights of the episodes sees structure finer than the mesh. It changes nothing: where p is small again and
    again, take more `intervals`.

    Sums and fits are in float64 on the device, whatever the dtype of the samples. Nothing is changed in place: an
    update returns a new field, inside `jit`, `vmap` and `lax.scan` too.

    Args:
        low: the lower end of the box on which the loss is wanted, one number or (d,), d = 1 or 2.
        high: its upper end. Points outside the box are left out.
        intervals: cells of the spline along each axis, one number or one per axis; None takes 48 in d = 1 and 10 in
            d = 2. Structure of the loss finer than three or so cells is not resolved.
        forgetting: "auto", as above; or a number ρ in [0, 1], the factor by which an update discounts what was
            before: 1 never forgets, 0 keeps the newest update alone. Then nothing is dropped, and no change reported.
        false_alarm: the chance that an update finds a change while the loss stands still. It rests on the central limit
            theorem for the newest update, which wants some fifty episodes.
        hessians: whether Hessians are fitted too. Without them the gradients alone are enough.

    Attributes:
        updates: how many updates were made.
        refused: episodes left out because they held a number that is not finite.
        changes: how many changes were found; a drift that goes on is one, as long as it keeps the memory short.
        changed_at: the number of the first update that was remembered after the latest change; 0 before any.
        p_values: of the latest test at each cut, from the newest on; 1 where there is nothing on one side.
        fit_p_value: that of the fit on the latest eight updates, of those that are remembered.

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
    p_values: Float[Array, " cuts"]
    drift: Drift
    ring: Ring
    fit_p_value: Scalar
    forgetting: Scalar | None  # ρ; None where the data choose
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
        factor = _factor(forgetting)
        self.false_alarm = float(false_alarm)
        if not 0 < self.false_alarm < 1:
            raise ValueError(f"false_alarm must be between 0 and 1, got {false_alarm}")
        with jax.enable_x64(True):
            self.mesh = _mesh(low, high, intervals, hessians)
            self.forgetting = None if factor is None else jnp.asarray(factor, jnp.float64)
            groups = len(CAPACITY) + 1 if factor is None else 1
            self.sums = no_groups(self.mesh, groups)
            self.reading = no_reading(self.mesh)
            self.p_values = jnp.ones(groups - 1, jnp.float64)
            self.drift = no_drift(self.mesh)
            self.ring, self.fit_p_value = no_ring(self.mesh), jnp.ones((), jnp.float64)
        self.updates, self.refused, self.changes, self.changed_at = (jnp.zeros((), jnp.int32) for _ in range(4))

    def __repr__(self) -> str:
        if not has_numbers((self.mesh.low, self.updates, self.reading.episodes)) or np.ndim(self.updates) > 0:
            return super().__repr__()
        ends = zip(self.mesh.low.tolist(), self.mesh.high.tolist(), strict=True)
        known = f"memory of {float(self.memory):.3g} updates, {float(self.effective_episodes):.4g} episodes"
        found = f"{int(self.changes)} changes found, {int(self.refused)} episodes refused"
        fit = f"fit p = {float(self.fit_p_value):.2g}"
        box = ", ".join(f"{low:.3g} to {high:.3g}" for low, high in ends)
        return f"AdaptiveField({box}; {int(self.updates)} updates: {known}, {found}, {fit})"

    @property
    def memory(self) -> Scalar:
        """How many updates the fit stands on: the sum of their weights."""
        return self.reading.updates

    @property
    def drift_p_value(self) -> Scalar:
        """How likely so much of a drift is if the loss stands still."""
        return self.drift.p_value

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
            samples: new episodes; their weights serve the judge alone, and may be zero.

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
        mesh, before = self.mesh, self.reading
        totals = totals_of(mesh, batch)
        # Scores at the fit so far: an own fit of so few points would leave too little of them.
        scores = squared_scores(episode_scores(mesh, batch, before.theta))
        episodes = jnp.sum(batch.sound).astype(jnp.float64)
        newest = newest_of(equations(mesh, totals), totals.moments[:, 0], scores, episodes)
        sums = with_newest(self.sums, self.forgetting, newest)
        kept, p_values = self._kept(sums, before.tuning)
        older, level = jax.tree.map(lambda leaf: jnp.sum(leaf, 0), self.sums), OF_DRIFTS * self.false_alarm
        fit = (before.theta, before.covariance)
        drift, found = followed(self.drift, mesh, before.tuning, newest, older, *fit, level)
        changed = (found | (kept < len(sums.updates))) & (self.forgetting is None)
        if self.forgetting is None:
            kept = jnp.minimum(kept, within(sums.updates, drift.longest))
        sums = parted(sums, kept)[0]
        whole = jax.tree.map(lambda leaf: jnp.sum(leaf, 0), sums)
        tuning, solved = restricted_fit(mesh, whole.equations)
        # And again at the fit that is reported, which, after a change, is far from the one before.
        by_episode, inflated = episode_scores(mesh, batch, solved.theta), inflation(whole.equations, tuning, solved)
        final = inflated * squared_scores(by_episode)
        V = covariance(mesh, tuning, solved, whole.scores - scores + final)
        drift = drift._replace(allowed=(whole.ages / whole.updates) ** 2 * drift.allowed)
        spread = V + sandwich(smooth(mesh), drift.allowed)
        ring = with_update(self.ring, mesh, batch, solved.theta, by_episode, inflated)
        age = jnp.arange(SLOTS, dtype=jnp.float64)
        remembered = (age < whole.updates).astype(jnp.float64)
        weight = remembered if self.forgetting is None else self.forgetting**age
        sums = sums._replace(scores=sums.scores.at[0].add(final - scores))
        since = self.updates + 1 - jnp.round(whole.updates).astype(jnp.int32)
        return eqx.tree_at(
            lambda f: (
                f.sums, f.reading, f.updates, f.changes, f.changed_at, f.p_values, f.drift, f.ring, f.fit_p_value
            ),
            self,
            (
                sums, read(mesh, tuning, solved.theta, spread, whole), self.updates + 1,
                self.changes + changed.astype(jnp.int32), jnp.where(changed, since, self.changed_at), p_values,
                drift, ring, verdict(ring, tuning, solved, V, weight),
            ),
        )  # fmt: skip

    def _kept(self, sums: Sums, tuning: Tuning) -> tuple[Int[Array, ""], Float[Array, " cuts"]]:
        """How many groups still agree, from the newest on, and the p-value at each cut."""
        cuts = len(sums.updates) - 1
        if cuts == 0:
            return jnp.ones((), jnp.int32), self.p_values

        def at(cut: Array) -> Scalar:
            newer, older = (jax.tree.map(lambda leaf: jnp.sum(leaf, 0), side) for side in parted(sums, cut + 1))
            return p_value(self.mesh, tuning, newer.equations, older.equations, newer.scores, older.scores)

        p_values = lax.map(at, jnp.arange(cuts, dtype=jnp.int32))
        return keep(p_values, levels((1 - OF_DRIFTS) * self.false_alarm, cuts)), p_values

    def __call__(self, alpha: Place, *, key: Key | None = None) -> Estimate:
        alpha = place_of(alpha, self.mesh.dim)
        with jax.enable_x64(True):
            return estimate_at(self.mesh, self.reading, alpha)

    def potential(self) -> Spline:
        """The fitted loss as a potential, of the default dtype: a control, a start of another fit, a guess to judge.

        `goodness_of_fit(samples, field.potential())`, on samples that the field has not seen yet, holds it against
        the debiased estimate, which finds what no comparison of old and new fits can: structure finer than the mesh.

        Returns:
            A `potentials.Spline`, with mean coefficient 0.
        """
        dtype = jnp.result_type(float)
        theta, low, high = (leaf.astype(dtype) for leaf in (self.reading.theta, self.mesh.low, self.mesh.high))
        return Spline(theta.reshape(self.mesh.shape), low, high)

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


def _factor(forgetting: Any) -> float | None:
    """ρ, or None where the data choose."""
    if isinstance(forgetting, str) and forgetting == "auto":
        return None
    if isinstance(forgetting, str) or not is_concrete(forgetting) or not 0 <= float(forgetting) <= 1:
        raise ValueError(f'forgetting must be "auto" or a number from 0 to 1, got {forgetting!r}')
    return float(forgetting)


def _mesh(low: Any, high: Any, intervals: Any, hessians: bool) -> Mesh:
    ends = [np.atleast_1d(np.asarray(end, np.float64)) for end in (low, high)]
    if ends[0].shape != ends[1].shape or ends[0].shape not in ((1,), (2,)):
        raise ValueError(
            f"low and high must be numbers or of shape (1,) or (2,), got {np.shape(low)}, {np.shape(high)}"
        )
    if not np.all(np.isfinite(ends)) or not np.all(ends[1] > ends[0]):
        raise ValueError(f"low must be below high along each axis, and both finite, got {low} and {high}")
    d = len(ends[0])
    given = _INTERVALS[d] if intervals is None else intervals
    cells = (given,) * d if isinstance(given, int | np.integer) else tuple(given)
    check_shape("intervals", cells, (d,), "d")
    cells = tuple(check_count("intervals", n, 4) for n in cells)
    return Mesh(jnp.asarray(ends[0]), jnp.asarray(ends[1]), cells, bool(hessians))
