"""Is the chain there yet? Convergence diagnostics, distances from a Gibbs law, and export to ArviZ."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Shaped

from ._base.checks import check_count, check_positive, check_shape, float_array
from ._base.types import Key, Scalar
from .chain.passive import Chain
from .recovery.density import cell_counts, range_ends


def split_rhat(positions: Shaped[ArrayLike, "..."], *, method: str = "rank") -> Float[Array, " d"]:
    """Split R-hat of each coordinate of (chains, kept, d): 1 when the halves of all chains agree.

    - `method`: "rank", the larger of R-hat on normal scores of the values and of their distances from the
      median [1]; or "split", R-hat on the values as they are. Both as in ArviZ.

    [1] A. Vehtari, A. Gelman, D. Simpson, B. Carpenter, P.-C. Bürkner, "Rank-normalization, folding, and
    localization: an improved R-hat for assessing convergence of MCMC", Bayesian Analysis, 2021.

    ```python
    mj.diagnostics.split_rhat(chain.positions)  # near [1.] if the chains agree
    ```
    """
    if method not in ("rank", "split"):
        raise ValueError(f"method must be one of rank, split, got {method!r}")
    return _per_coordinate(_rank_rhat if method == "rank" else _plain_rhat, positions)


def effective_sample_size(positions: Shaped[ArrayLike, "..."]) -> Float[Array, " d"]:
    """Bulk effective sample size of each coordinate of (chains, kept, d), as in ArviZ.

    The number of independent draws whose mean is as precise as that of all positions, measured on the normal
    scores of split chains: n/τ with τ = −1 + 2 Σ ρ_t, the sum cut by Geyer's initial monotone sequence.

    ```python
    mj.diagnostics.effective_sample_size(chain.positions)
    ```
    """
    return _per_coordinate(_bulk_ess, positions)


def density_significance(chain: Chain) -> Float[Array, "chains kept"]:
    """The density estimate in units of its standard error at each kept position.

    Small values mark where the chain went beyond what the data can carry (the estimate divides by it).

    ```python
    mj.diagnostics.density_significance(chain).min()
    ```
    """
    return chain.density / chain.density_stderr


def total_variation(
    positions: Shaped[ArrayLike, "..."],
    potential: Any,
    *,
    inverse_temperature: Any,
    range: Any,
    bins: int = 50,
) -> Scalar:
    """½ Σ |p̂ − π| over bins: the histogram of (chains, kept, d) positions against exp(−βL), d = 1, 2, 3.

    - `potential`: an object with `value(x)`, or the function L itself, of x with shape (d,).
    - `range`: (low, high), in d > 1 a pair per axis, wide enough to hold the Gibbs law; π is normalised on
      it, and positions outside count in full.

    n independent draws from π itself are not at zero but at about Σ sqrt(p/(6.28 n)), p the bins' masses.

    ```python
    mj.diagnostics.total_variation(chain.positions, loss, inverse_temperature=1.0, range=(-3, 3), bins=12)
    ```
    """
    x, energy, beta, low, high = _against(positions, potential, inverse_temperature, range)
    return _total_variation(x, energy, beta, low, high, check_count("bins", bins))


@eqx.filter_jit
def _total_variation(x: Array, energy: Any, beta: Array, low: Array, high: Array, bins: int) -> Scalar:
    n, d = x.shape
    nodes, weights = (jnp.asarray(a, x.dtype) for a in np.polynomial.legendre.leggauss({1: 8, 2: 4, 3: 2}[d]))
    offsets = (jnp.arange(bins, dtype=x.dtype)[:, None] + (nodes[None] + 1) / 2).ravel() / bins
    axes = [a + (b - a) * offsets for a, b in zip(low, high, strict=True)]
    points = jnp.stack(jnp.meshgrid(*axes, indexing="ij"), -1).reshape(-1, d)
    minus = -beta * jax.lax.map(energy, points, batch_size=4096)
    mass = jnp.exp(minus - minus.max()).reshape((bins, len(nodes)) * d)
    for axis in (5, 3, 1)[3 - d :]:
        mass = jnp.tensordot(mass, weights, (axis, 0))
    share = cell_counts(x, low, high, (bins,) * d) / n
    return (jnp.sum(jnp.abs(share - mass / mass.sum())) + 1 - share.sum()) / 2


def wasserstein(
    positions: Shaped[ArrayLike, "..."],
    potential: Any,
    *,
    inverse_temperature: Any,
    range: Any,
    order: int = 1,
    points: int = 4001,
) -> Scalar:
    """Wasserstein distance of order 1 or 2 between one-dimensional positions and exp(−βL), in the units of x.

    W_p^p = ∫_0^1 |F̂⁻¹(u) − F⁻¹(u)|^p du, by the midpoint rule with a whole number of nodes per position, at
    least `points` in all. F comes from quadrature on `points` points of `range`, wide enough to hold the law.

    ```python
    mj.diagnostics.wasserstein(chain.positions, loss, inverse_temperature=1.0, range=(-3, 3), points=201)
    ```
    """
    x, energy, beta, low, high = _against(positions, potential, inverse_temperature, range)
    if x.shape[1] != 1:
        raise ValueError(f"positions must be one-dimensional for wasserstein, got d = {x.shape[1]}")
    if order not in (1, 2):
        raise ValueError(f"order must be 1 or 2, got {order!r}")
    return _wasserstein(x, energy, beta, low, high, order, check_count("points", points, at_least=2))


@eqx.filter_jit
def _wasserstein(x: Array, energy: Any, beta: Array, low: Array, high: Array, order: int, points: int) -> Scalar:
    grid = jnp.linspace(low[0], high[0], points, dtype=x.dtype)
    minus = -beta * jax.vmap(energy)(grid[:, None])
    density = jnp.exp(minus - minus.max())
    cdf = jnp.append(jnp.zeros(1, x.dtype), jnp.cumsum((density[1:] + density[:-1]) / 2))
    per_position = -(-points // len(x))
    nodes = (jnp.arange(len(x) * per_position, dtype=x.dtype) + 0.5) / (len(x) * per_position)
    gaps = jnp.abs(jnp.repeat(jnp.sort(x[:, 0]), per_position) - jnp.interp(nodes, cdf / cdf[-1], grid))
    return jnp.mean(gaps**order) ** (1 / order)


def convergence_experiment(
    error: Callable[[Key, Any], Any], values: Sequence[Any], key: Key, *, repeats: int = 4
) -> dict[str, np.ndarray]:
    """How an error shrinks with a setting: the sample size N, the step size η, the number of steps k, …

    `error(key, value)` runs the whole thing at one value of the setting and returns a non-negative error; it
    is called `repeats` times for each. Returned: `value`; `error`, root mean square over the repeats, and its
    `stderr`; `slope` of log error against log value, by least squares, and its `slope_stderr`.

    ```python
    rates = mj.diagnostics.convergence_experiment(
        lambda key, n: abs(jnp.mean(jax.random.normal(key, (1000,))[:n])), [100, 1000], jax.random.key(0)
    )
    rates["slope"]  # about -1/2
    ```
    """
    check_count("repeats", repeats, at_least=2)
    if len(values) < 2:
        raise ValueError(f"values must hold at least 2 settings, got {len(values)}")
    check_positive("values", np.asarray(values, float))
    keys = jax.random.split(key, (len(values), repeats))
    runs = np.array([[float(error(k, v)) for k in row] for v, row in zip(values, keys, strict=True)])
    size = np.sqrt(np.mean(runs**2, 1))
    stderr = np.std(runs**2, axis=1, ddof=1) / (2 * size * math.sqrt(repeats))
    x = np.log(np.asarray(values, float))
    lever = (x - x.mean()) / np.sum((x - x.mean()) ** 2)
    return {
        "value": np.asarray(values),
        "error": size,
        "stderr": stderr,
        "slope": lever @ np.log(size),
        "slope_stderr": np.sqrt(np.sum((lever * stderr / size) ** 2)),
    }


def to_arviz(chain: Chain) -> Any:
    """The chain for ArviZ: InferenceData from version 0, DataTree from version 1 on.

    Group `posterior` holds `alpha`; `sample_stats` holds the rest, and `finite`, False once a chain diverged.

    ```python
    data = mj.diagnostics.to_arviz(chain)  # then arviz.plot_trace(data), arviz.summary(data), …
    ```
    """
    try:
        import arviz
    except ImportError as error:
        raise ImportError("to_arviz needs ArviZ, which is not installed: pip install arviz") from error
    positions = np.asarray(chain.positions)
    statistics = {
        "gradient": chain.gradients,
        "gradient_stderr": chain.gradient_stderr,
        "density": chain.density,
        "density_stderr": chain.density_stderr,
        "trusted": chain.trusted,
        "finite": np.isfinite(positions).all(-1),
    }
    groups: dict[str, Any] = {
        "posterior": {"alpha": positions},
        "sample_stats": {name: np.asarray(value) for name, value in statistics.items()},
    }
    dims = {name: ["dimension"] for name in ("alpha", "gradient", "gradient_stderr")}
    if int(arviz.__version__.split(".")[0]) >= 1:
        return arviz.from_dict(groups, dims=dims)
    return arviz.from_dict(**groups, dims=dims)


# --- the pieces ------------------------------------------------------------------------------------------


def _per_coordinate(statistic: Callable[[Array], Array], positions: Any) -> Array:
    x = float_array("positions", positions)
    check_shape("positions", x, (None, None, None))
    if x.shape[1] < 4:
        raise ValueError(f"positions must hold at least 4 per chain, got shape {x.shape}")
    return _apply(statistic, x)


@eqx.filter_jit
def _apply(statistic: Callable[[Array], Array], x: Float[Array, "chains kept d"]) -> Float[Array, " d"]:
    return jnp.where(jnp.isfinite(x).all((0, 1)), jax.vmap(statistic, in_axes=2)(x), jnp.nan)


def _plain_rhat(x: Float[Array, "chains kept"]) -> Scalar:
    return _rhat(_split(x))


def _rank_rhat(x: Float[Array, "chains kept"]) -> Scalar:
    halves = _split(x)
    folded = jnp.abs(halves - jnp.median(halves))
    return jnp.max(jax.vmap(lambda values: _rhat(_normal_scores(values)))(jnp.stack([halves, folded])))


def _bulk_ess(x: Float[Array, "chains kept"]) -> Scalar:
    return _ess(_normal_scores(_split(x)))


def _split(x: Float[Array, "chains kept"]) -> Float[Array, "halves half"]:
    half = x.shape[1] // 2
    return jnp.concatenate([x[:, :half], x[:, -half:]])


def _normal_scores(x: Float[Array, "chains kept"]) -> Float[Array, "chains kept"]:
    """Φ⁻¹((rank − 3/8)/(n + 1/4)), ties sharing their mean rank (Blom's scores)."""
    flat, n = x.ravel(), x.size
    order = jnp.argsort(flat)
    ordered = flat[order]
    place = jnp.arange(n)
    new = jnp.append(jnp.ones(1, bool), ordered[1:] != ordered[:-1])
    first = jax.lax.cummax(jnp.where(new, place, 0))
    last = jax.lax.cummin(jnp.where(jnp.append(new[1:], True), place, n), reverse=True)
    rank = jnp.zeros(n, x.dtype).at[order].set((first + last).astype(x.dtype) / 2 + 1)
    return jax.scipy.special.ndtri((rank - 0.375) / (n + 0.25)).reshape(x.shape)


def _rhat(x: Float[Array, "chains kept"]) -> Scalar:
    n = x.shape[1]
    between, within = n * x.mean(1).var(ddof=1), x.var(1, ddof=1).mean()
    return jnp.where(jnp.ptp(x) > 0, jnp.sqrt((between / within + n - 1) / n), jnp.nan)


def _ess(x: Float[Array, "chains kept"]) -> Scalar:
    chains, n = x.shape
    centred = x - x.mean(1, keepdims=True)
    spectrum = jnp.abs(jnp.fft.rfft(centred, 2 * n, axis=1)) ** 2
    covariance = jnp.fft.irfft(spectrum, 2 * n, axis=1)[:, :n].mean(0) / n
    within = covariance[0] * n / (n - 1)
    total = covariance[0] + (x.mean(1).var(ddof=1) if chains > 1 else 0.0)
    rho = (1 - (within - covariance) / total).at[0].set(1)

    # Pairs of successive correlations are positive and decrease: cut at the first that is not positive.
    even, odd = rho[: n - n % 2].reshape(-1, 2).T
    pairs, number = even + odd, jnp.arange(len(even))
    end = jnp.argmax((pairs <= 0) | (2 * number + 1 >= n - 3))
    monotone = jax.lax.cummin(pairs)
    rest = jnp.where((even[end] > 0) | (pairs[end] >= 0), even[end], 0)
    tau = -1 + 2 * jnp.sum(jnp.where(number < end, monotone, 0)) + rest
    ess = x.size / jnp.maximum(tau, 1 / math.log10(x.size))
    return jnp.where(jnp.ptp(x) < 1e-15, float(x.size), ess)


def _against(positions: Any, potential: Any, inverse_temperature: Any, range: Any) -> tuple[Any, ...]:
    """Positions (n, d), the energy, β, and the ends of the range, checked."""
    x = float_array("positions", positions)
    x = x.reshape(-1, x.shape[-1]) if x.ndim == 3 else x
    check_shape("positions", x, (None, None))
    n, d = x.shape
    if n == 0 or not 1 <= d <= 3:
        raise ValueError(f"positions must be non-empty, of dimension 1, 2 or 3, got shape {x.shape}")
    check_positive("inverse_temperature", inverse_temperature)
    beta, energy = jnp.asarray(inverse_temperature, x.dtype), getattr(potential, "value", potential)
    return x, energy, beta, *range_ends(range, x)
