"""Gradient fields α ↦ ∇L(α): PyTree callables `field(alpha, *, key=None) -> Estimate`."""

import itertools
from collections.abc import Callable
from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from . import _mesh
from ._misc import check_count, check_shape, floats_to_arrays, steps_at
from ._select import Fold, add_sums, choose_localizer, fold_sums, make_fold
from ._sorted import SortedBank, sort_bank
from ._tail import TabulatedTail, Tail, make_tail, tangent_planes
from ._types import Key, Vector
from .conditional import SIGNIFICANT, Estimate, Sums, bounds, localized_sums, ratio_estimate
from .forward import ForwardLearner, initial_shape
from .localize import AbstractLocalizer, Laplace
from .observe import Samples, check_samples, observe_steps
from .potentials import AbstractPotential, Polynomial, num_terms
from .weights import Canonical, Scheme

_DEGREE = {1: 10, 2: 10}  # of the fitted control; beyond the plane _DEGREE_BEYOND, for the sake of its number of terms
_DEGREE_BEYOND = 6
_ROWS_PER_TERM = 20  # fewer observed rows than this per coefficient, and the control's degree is lowered


class TrueField(eqx.Module):
    """The field of a known potential: what a perfect estimator would return.

    Its standard errors are zero and its density, which it has none of, is NaN.

    ```python
    mj.TrueField(loss)(jnp.array([0.5])).value  # loss.gradient there
    ```
    """

    potential: AbstractPotential

    def __call__(self, alpha: Vector, *, key: Key | None = None) -> Estimate:
        value = self.potential.gradient(alpha)
        nan = jnp.full((), jnp.nan, alpha.dtype)
        return Estimate(value, jnp.zeros_like(value), nan, nan, jnp.asarray(True))


class MalliavinField(eqx.Module):
    """The counterfactual gradient E[∇L(X_s) | X_s = α] from a bank of samples, with its standard error.

    - `localizer`: "auto" (the default) takes the length of least estimated standard error and, beyond one dimension,
      the core of least estimated risk; or any of `Laplace`, `Gaussian`, `Heaviside`, `Centered`.
    - `control`: a potential m that assists. The estimator averages the residuals g − ∇m(X_s) and adds ∇m(α) back,
      which is unbiased whatever m is and precise where m is good. "auto" fits a polynomial to gradients and Hessians
      of the *other* half of the episodes (two-fold cross-fitting), and is dropped where its estimated error is
      larger than without; None switches it off.

    In one dimension with a `Laplace` localizer a query costs O(log N); otherwise O(N), in chunks.

    Where the data do not carry an estimate (`trusted` is False: density below three standard errors, or α outside
    the box of observed positions) the value passes, between three and one and a half standard errors, to an average
    of the observed tangent planes g_i + H_i (α − X_i) around α, continued with a positive stiffness outside the box;
    `stderr` is infinite there.

    ```python
    field = mj.MalliavinField(samples)
    estimates = jax.jit(jax.vmap(field))(alphas)
    estimates.value.shape, estimates.trusted.all()
    ```
    """

    folds: tuple[Fold, ...]
    localizer: AbstractLocalizer
    sorted: tuple[SortedBank, ...] | None
    tail: Tail | TabulatedTail
    low: Vector
    high: Vector
    points: Int[Array, ""]

    def __init__(
        self,
        samples: Samples,
        localizer: AbstractLocalizer | Literal["auto"] = "auto",
        control: AbstractPotential | Literal["auto"] | None = "auto",
    ):
        check_samples(samples)
        if isinstance(localizer, str) and localizer != "auto":
            raise ValueError(f"localizer must be 'auto' or a localizer, got {localizer!r}")
        if isinstance(control, str) and control != "auto":
            raise ValueError(f"control must be 'auto', None or a potential, got {control!r}")
        plain = (make_fold(samples, None),)
        if control is None:
            folds, choice = plain, None
        elif isinstance(control, str):
            folds = _cross_fitted(samples)
            choice = choose_localizer(samples, folds)
            without = choose_localizer(samples, plain)
            if not float(choice.risk) <= float(without.risk):  # NaN, from a fit without enough data, loses
                folds, choice = plain, without
        else:
            folds, choice = (make_fold(samples, control),), None
        if isinstance(localizer, str):
            choice = choose_localizer(samples, folds) if choice is None else choice
            localizer = choice.localizer
        self.folds, self.localizer = folds, localizer
        self.sorted = None
        if isinstance(localizer, Laplace) and samples.dim == 1 and not _mesh.is_split(samples):  # no sorting across
            self.sorted = tuple(sort_bank(fold.bank, localizer.length) for fold in folds)
        self.tail = make_tail(samples)
        self.low, self.high = bounds(samples)
        self.points = jnp.sum(samples.observed)

    def __call__(self, alpha: Vector, *, key: Key | None = None) -> Estimate:
        check_shape("alpha", alpha, self.low.shape)
        episodes = sum(fold.bank.episodes for fold in self.folds)
        return _guarded(alpha, self.low, self.high, self._sums, episodes, self.points, self.tail)

    def _sums(self, alpha: Vector) -> Sums:
        if self.sorted is None:
            parts = [localized_sums(fold.bank, alpha, self.localizer) for fold in self.folds]
        else:
            parts = [bank.sums(alpha) for bank in self.sorted]
        return add_sums([fold_sums(f, alpha, part) for f, part in zip(self.folds, parts, strict=True)])


class FreshField(eqx.Module):
    """New episodes at every call, as in the paper's Algorithm 1: `field(alpha, key=key)` observes, then estimates at α.

    - `time`: the conditioning time s, a multiple of the learner's step size.
    - `localizer`: must be given, because choosing one at every step would cost more than the step.
    - `control`: a fixed potential that assists, or None.

    ```python
    fresh = mj.FreshField(learner, mj.Laplace(0.5), num_episodes=2000, time=0.8)  # fresh(alpha, key=key) observes anew
    ```
    """

    learner: ForwardLearner
    localizer: AbstractLocalizer
    scheme: Scheme
    control: AbstractPotential | None
    num_episodes: int = eqx.field(static=True)
    stops: tuple[int, ...] = eqx.field(static=True)

    def __init__(
        self,
        learner: ForwardLearner,
        localizer: AbstractLocalizer,
        *,
        num_episodes: int,
        time: float,
        scheme: Scheme | None = None,
        control: AbstractPotential | None = None,
    ):
        _, dtype = initial_shape(learner)
        self.num_episodes = check_count("num_episodes", num_episodes, at_least=2)
        self.stops = steps_at([time], learner.step_size, name="time")
        self.learner, self.localizer = floats_to_arrays(learner, dtype), localizer
        self.scheme = Canonical() if scheme is None else floats_to_arrays(scheme, dtype)
        self.control = control

    def __call__(self, alpha: Vector, *, key: Key | None = None) -> Estimate:
        if key is None:
            raise ValueError("key must be given: FreshField simulates new episodes at every call")
        samples = observe_steps(key, self.learner, self.scheme, self.num_episodes, self.stops)
        fold = make_fold(samples, self.control)
        low, high = bounds(samples)
        points = jnp.sum(samples.observed)

        def sums(at: Vector) -> Sums:
            return fold_sums(fold, at, localized_sums(fold.bank, at, self.localizer))

        return _guarded(alpha, low, high, sums, self.num_episodes, points, tangent_planes(samples))


class TabulatedField(eqx.Module):
    """A field evaluated once on a regular grid, then interpolated linearly: for chains that query millions of times.

    `interpolation_error` is the largest difference between the table and the field halfway between nodes: at (up to
    4096 of) the centres of the cells and of their faces and edges, one of which is worst for linear interpolation of a
    smooth field, whatever the signs of its second derivatives. Outside the grid the value at the nearest point is
    continued with the stiffness 1/(half-width)².

    ```python
    table = mj.TabulatedField(mj.TrueField(loss), (jnp.linspace(-1.5, 1.5, 33),))
    table.interpolation_error  # small; `field` in place of the true one makes chains fast
    ```
    """

    estimates: Estimate
    low: Vector
    step: Vector
    interpolation_error: Vector

    def __init__(self, field, axes: tuple[Float[Array, " nodes"], ...], *, batch_size: int = 256):
        axes = tuple(jnp.asarray(axis) for axis in axes)
        for i, axis in enumerate(axes):
            check_shape(f"axes[{i}]", axis, (None,))
            steps = jnp.diff(axis)
            if axis.shape[0] < 2 or not bool(jnp.all(steps > 0)) or not bool(jnp.allclose(steps, steps[0], rtol=1e-3)):
                raise ValueError(f"axes[{i}] must be an increasing regular grid of at least 2 nodes")
        self.low = jnp.stack([axis[0] for axis in axes])
        self.step = jnp.stack([(axis[-1] - axis[0]) / (axis.shape[0] - 1) for axis in axes])
        nodes = jnp.stack(jnp.meshgrid(*axes, indexing="ij"), -1)
        evaluate = eqx.filter_jit(lambda field, points: jax.lax.map(field, points, batch_size=batch_size))
        flat = evaluate(field, nodes.reshape(-1, len(axes)))
        self.estimates = jax.tree.map(lambda leaf: leaf.reshape(*nodes.shape[:-1], *leaf.shape[1:]), flat)
        self.interpolation_error = jnp.zeros_like(self.low)
        halfway = _halfway_points(axes)
        halfway = halfway[:: -(-len(halfway) // 4096)]
        difference = jax.vmap(lambda point: self(point).value)(halfway) - evaluate(field, halfway).value
        self.interpolation_error = jnp.max(jnp.abs(difference), 0)

    def __call__(self, alpha: Vector, *, key: Key | None = None) -> Estimate:
        check_shape("alpha", alpha, self.low.shape)
        d = self.low.shape[0]
        cells = jnp.asarray(self.estimates.density.shape) - 1
        high = self.low + self.step * cells.astype(alpha.dtype)
        nearest = jnp.clip(alpha, self.low, high)
        place = (nearest - self.low) / self.step
        index = jnp.clip(jnp.floor(place).astype(jnp.int32), 0, cells.astype(jnp.int32) - 1)
        part = place - index.astype(place.dtype)
        leaves = (self.estimates.value, self.estimates.stderr, self.estimates.density, self.estimates.density_stderr)
        total, trusted = [jnp.zeros_like(leaf[(0,) * d]) for leaf in leaves], jnp.asarray(True)
        for corner in range(2**d):
            bits = [(corner >> i) & 1 for i in range(d)]
            share = jnp.asarray(1, alpha.dtype)
            for i, bit in enumerate(bits):
                share = share * (part[i] if bit else 1 - part[i])
            at = tuple(index[i] + bit for i, bit in enumerate(bits))
            used = share > 0  # an infinite standard error at a corner that does not count must not make a NaN
            terms = [jnp.where(used, share * leaf[at], 0) for leaf in leaves]
            total = [a + b for a, b in zip(total, terms, strict=True)]
            trusted = trusted & (self.estimates.trusted[at] | ~used)
        value, stderr, density, density_stderr = total
        outside = jnp.any(alpha != nearest)
        spring = 4 / (high - self.low) ** 2
        return Estimate(
            value + spring * (alpha - nearest),
            jnp.where(outside, jnp.inf, stderr),
            density,
            density_stderr,
            trusted & ~outside,
        )


def _halfway_points(axes: tuple[Float[Array, " nodes"], ...]) -> Float[Array, "points d"]:
    """The centres of the cells of a grid, and of their faces and edges."""
    halves = [(axis[1:] + axis[:-1]) / 2 for axis in axes]
    choices = itertools.product((False, True), repeat=len(axes))
    grids = [
        jnp.meshgrid(*(half if between else axis for between, half, axis in zip(choice, halves, axes, strict=True)))
        for choice in choices
        if any(choice)
    ]
    return jnp.concatenate([jnp.stack(grid, -1).reshape(-1, len(axes)) for grid in grids])


def _guarded(
    alpha: Vector,
    low: Vector,
    high: Vector,
    sums: Callable[[Vector], Sums],
    episodes: int,
    points: Int[Array, ""],
    tail: Callable[[Vector], Vector],
) -> Estimate:
    """The ratio where the data carry it, the tail where they do not, and a continuous passage between."""
    inside = jnp.all((alpha >= low) & (alpha <= high))
    # Outside the box the sums are taken at its nearest point: they are finite there, and not used.
    ratio = ratio_estimate(sums(jnp.clip(alpha, low, high)), episodes, points, inside)
    z = ratio.density / jnp.maximum(ratio.density_stderr, jnp.finfo(alpha.dtype).tiny)
    confidence = jnp.where(inside, jnp.clip(2 * z / SIGNIFICANT - 1, 0, 1), 0)
    planes = tail(alpha)
    value = jnp.where(confidence > 0, planes + confidence * (ratio.value - planes), planes)
    stderr = jnp.where(ratio.trusted, ratio.stderr, jnp.inf)
    return Estimate(value, stderr, jnp.where(inside, ratio.density, 0), ratio.density_stderr, ratio.trusted)


def _cross_fitted(samples: Samples) -> tuple[Fold, ...]:
    """Even and odd episodes, each with the polynomial fitted to the other: θ never sees the points it corrects."""
    halves = [_every_other(samples, i) for i in (0, 1)]
    rows = halves[1].x.shape[0] * samples.num_times * samples.dim
    degree = _DEGREE.get(samples.dim, _DEGREE_BEYOND)
    while degree > 2 and num_terms(samples.dim, degree) * _ROWS_PER_TERM > rows:
        degree -= 2
    return tuple(make_fold(half, _fit(other, degree)) for half, other in zip(halves, halves[::-1], strict=True))


@eqx.filter_jit
def _every_other(samples: Samples, first: int) -> Samples:
    def half(samples: Samples) -> Samples:
        return jax.tree.map(lambda leaf: leaf[first::2], samples)

    devices = _mesh.parts()
    if devices > 1 and samples.num_episodes % (2 * devices) == 0:
        return _mesh.by_device(half, samples)
    return half(samples)


@eqx.filter_jit
def _fit(samples: Samples, degree: int) -> Polynomial:
    def flat(array: Array) -> Array:
        return array.reshape(-1, *array.shape[2:])

    return Polynomial.fit(
        flat(samples.x),
        flat(samples.gradient),
        flat(samples.hessian),
        degree=degree,
        weights=flat(samples.observed).astype(samples.x.dtype),
    )
