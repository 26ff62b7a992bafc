"""How far a fitted model may be off: its sandwich variance, clustered by episode, and its smoothing bias.

A model that is linear in θ solves (A + Q) θ = b, with Q = λP for a smoothing spline. An episode's score is
s_i = Σ_times Fᵀ W (y − F θ), F the derivatives of the basis that go with its gradients and Hessians y, and W their
precisions; its influence on the gradient f(α)ᵀθ is r_i(α) = f(α)ᵀ (A + Q)⁻¹ s_i. So

    variance(α) = Σ_i r_i(α)² + f(α)ᵀ (A + Q)⁻¹ Q (A + Q)⁻¹ f(α),

the first term true whatever the noise is (dependent within an episode, of unequal size, common to gradient and
Hessian), the second the mean squared bias of the smoothing (Wahba 1983; Nychka 1988). Where the noise is white, the sum
is the posterior variance f(α)ᵀ (A + Q)⁻¹ f(α).

On the host, in float64: scores are sparse, and there is nothing worth compiling.
"""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import ArrayLike, Float, Int
from scipy.interpolate import RegularGridInterpolator
from scipy.sparse import csr_array

from .._base.host import on_one_thread
from .bsplines import DEGREE, SUPPORT, host_basis
from .monomials import Exponents, derivative_table

_EPISODES = {1: 100_000, 2: 10_000, 3: 4_000}  # whose influences are looked at; the variance is scaled to all
_NODES = {1: 65, 2: 17, 3: 5}  # along each axis, at which a table of the variance is computed
_POINTS, _LEAST = 4, 500  # of so many times as many points, and no fewer episodes


@runtime_checkable
class Observations(Protocol):
    """What was fitted to: arrays with axes (episodes, times) in front; `Samples` are such."""

    @property
    def x(self) -> Any: ...
    @property
    def gradient(self) -> Any: ...
    @property
    def hessian(self) -> Any: ...
    @property
    def observed(self) -> Any: ...


class Rows(NamedTuple):
    """Derivatives of the basis functions numbered `basis` at some points; pairs (i, j) have i ≤ j."""

    basis: Int[np.ndarray, "n k"]
    gradient: Float[np.ndarray, "n d k"]
    hessian: Float[np.ndarray, "n pairs k"]


class LinearFit(NamedTuple):
    """A fitted model as its errors see it.

    The precision of a gradient's entry is unit_i²/v_g, that of a Hessian's (unit_i unit_j)²/v_H.
    """

    rows: Callable[[Float[np.ndarray, "n d"]], Rows]
    theta: Float[np.ndarray, " p"]
    solve: Callable[[Float[np.ndarray, "p n"]], Float[np.ndarray, "p n"]]  # (A + Q)⁻¹
    pull: Callable[[Float[np.ndarray, "p n"]], Float[np.ndarray, " n"]] | None  # f ↦ fᵀ (A + Q)⁻¹ Q (A + Q)⁻¹ f
    unit: Float[np.ndarray, " d"]
    gradient_variance: float
    hessian_variance: float
    diagonal: bool = False  # whether only the diagonals of Hessians were fitted to
    misfit: Float[np.ndarray, " d"] | float = 0.0  # mean squared error of the gradient that a finer mesh would mend


class ModelVariance(NamedTuple):
    """The two terms of the variance at the head of this file, at each α and for each component."""

    sampling: Float[np.ndarray, "alphas d"]
    smoothing: Float[np.ndarray, "alphas d"]


def spline_rows(
    low: Float[np.ndarray, " d"], high: Float[np.ndarray, " d"], intervals: tuple[int, ...]
) -> Callable[[Float[np.ndarray, "n d"]], Rows]:
    """x ↦ the derivatives of the tensor-product B-splines that are not zero at x."""
    d, density = len(intervals), np.asarray(intervals) / (high - low)
    offsets = np.indices((SUPPORT,) * d).reshape(d, -1)

    def rows(x: Float[np.ndarray, "n d"]) -> Rows:
        t = (np.clip(x, low, high) - low) * density
        cells, tables = zip(*(host_basis(t[:, i], n, 3) for i, n in enumerate(intervals)), strict=True)
        index = np.asarray(
            np.ravel_multi_index(
                tuple(cells[i][:, None] + offsets[i][None] for i in range(d)), tuple(n + DEGREE for n in intervals)
            )
        )

        def derivative(*axes: int) -> np.ndarray:
            product = np.ones((len(x), 1))
            for i in range(d):
                order = axes.count(i)
                product = (product[:, :, None] * (density[i] ** order * tables[i][order])[:, None, :]).reshape(
                    len(x), -1
                )
            return product

        pairs = itertools.combinations_with_replacement(range(d), 2)
        return Rows(
            index, np.stack([derivative(i) for i in range(d)], 1), np.stack([derivative(*pair) for pair in pairs], 1)
        )

    return rows


def polynomial_rows(
    center: Float[np.ndarray, " d"], scale: Float[np.ndarray, " d"], exponents: Exponents
) -> Callable[[Float[np.ndarray, "n d"]], Rows]:
    """x ↦ the derivatives of the monomials in (x − center)/scale."""
    d = len(center)
    table = derivative_table(exponents, (1, 2))
    wanted = [*range(d), *(d + i * d + j for i, j in itertools.combinations_with_replacement(range(d), 2))]
    units = np.concatenate(
        [scale, [scale[i] * scale[j] for i, j in itertools.combinations_with_replacement(range(d), 2)]]
    )

    def rows(x: Float[np.ndarray, "n d"]) -> Rows:
        z = (x - center) / scale
        phi = np.prod(z[:, None, :] ** table.monomials[None], -1)
        design = table.multiple[wanted][None] * phi[:, table.target[wanted]] / units[None, :, None]
        index = np.broadcast_to(np.arange(design.shape[2]), (len(x), design.shape[2]))
        return Rows(index, design[:, :d], design[:, d:])

    return rows


@on_one_thread
def model_variance(fit: LinearFit, samples: Observations, alphas: Float[np.ndarray, "alphas d"]) -> ModelVariance:
    """The variance of ∇m(α), from the episodes that the model was fitted to."""
    (episodes, times, d), p = samples.x.shape, len(fit.theta)
    at = fit.rows(np.asarray(alphas, np.float64))
    functionals = np.zeros((len(alphas), d, p))
    np.put_along_axis(functionals, np.broadcast_to(at.basis[:, None, :], at.gradient.shape), at.gradient, 2)
    functionals = functionals.reshape(-1, p).T
    reach = fit.solve(functionals)  # (A + Q)⁻¹ f(α)
    most = _EPISODES.get(d, _EPISODES[3])
    some = min(episodes, most, max(_LEAST, _POINTS * most // times))
    influence = scores(fit, samples, some) @ reach
    influence = influence - influence.mean(0)
    sampling = np.sum(influence**2, 0) * (episodes / max(some - 1, 1))
    smoothing = np.zeros_like(sampling) if fit.pull is None else fit.pull(functionals)
    return ModelVariance(sampling.reshape(-1, d), smoothing.reshape(-1, d))


class VarianceTable:
    """The sum of both terms at any places: interpolated inside a box, and as at its nearest point outside.

    Logarithms are interpolated: where there are no data a variance is powers of ten larger, and must not reach far.
    """

    def __init__(self, axes: list[Float[np.ndarray, " nodes"]], values: Float[np.ndarray, "*nodes d"]):
        self._read = RegularGridInterpolator(axes, np.log(np.maximum(values, np.finfo(np.float64).tiny)))
        self._low, self._high = (np.asarray([axis[end] for axis in axes]) for end in (0, -1))

    def __call__(self, points: Float[np.ndarray, "n d"]) -> Float[np.ndarray, "n d"]:
        return np.exp(self._read(np.clip(points, self._low, self._high)))


def variance_table(
    fit: LinearFit, samples: Observations, low: Float[np.ndarray, " d"], high: Float[np.ndarray, " d"]
) -> VarianceTable:
    """The variance at the nodes of a grid over the box from `low` to `high`."""
    d = len(low)
    axes = [np.linspace(low[i], high[i], _NODES[d]) for i in range(d)]
    nodes = np.stack(np.meshgrid(*axes, indexing="ij"), -1)
    found = model_variance(fit, samples, nodes.reshape(-1, d))
    return VarianceTable(axes, (found.sampling + found.smoothing + fit.misfit).reshape(nodes.shape))


def scores(fit: LinearFit, samples: Observations, episodes: int) -> csr_array:
    """The scores of the first episodes, one a row."""
    times, d = samples.x.shape[1:]
    hessian = None if samples.hessian is None else _host(samples.hessian[:episodes]).reshape(-1, d, d)
    seen = np.asarray(samples.observed[:episodes]).reshape(-1)
    x = np.where(seen[:, None], _host(samples.x[:episodes]).reshape(-1, d), 0)
    rows = fit.rows(x)
    theta = fit.theta[rows.basis]
    left = _host(samples.gradient[:episodes]).reshape(-1, d) - np.einsum("nik,nk->ni", rows.gradient, theta)
    score = np.einsum("nik,ni->nk", rows.gradient, left * fit.unit**2 / fit.gradient_variance)
    if hessian is not None:
        fitted = np.einsum("nik,nk->ni", rows.hessian, theta)
        for number, (i, j) in enumerate(itertools.combinations_with_replacement(range(d), 2)):
            if fit.diagonal and i != j:
                continue
            entry = (hessian[:, i, j] + hessian[:, j, i]) / 2
            precision = (1 if i == j else 2) * (fit.unit[i] * fit.unit[j]) ** 2 / fit.hessian_variance
            score += rows.hessian[:, number] * ((entry - fitted[:, number]) * precision)[:, None]
    score = np.where(seen[:, None], score, 0)
    width = score.shape[1]
    starts = np.arange(0, len(score) * width + 1, times * width)
    return csr_array((score.ravel(), rows.basis.ravel(), starts), shape=(episodes, len(fit.theta)))


def _host(array: ArrayLike) -> Float[np.ndarray, "..."]:
    return np.asarray(array, np.float64)
