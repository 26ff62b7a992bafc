"""E[ℓ | g = a] for functionals ℓ and g of any diffusion: the paper's Theorem 1 in general.

    sample = wiener.weigh(key, diffusion, ell, g, num_paths=10_000)
    estimate = wiener.conditional_expectation(sample, 0.0)

For a real functional g of the noise and any process u with ⟨Dg, u⟩ = 1, every localizer (K, G) gives

    E[ℓ δ(g − a)] = E[ ℓ K(g−a) + G(g−a) (ℓ S(u) − ⟨Dℓ, u⟩) ],

which is the formula of `conditional.py` with g in place of the position and ⟨Dℓ, u⟩ in place of the Jacobian; its
localizers, standard errors and automatic length are used here unchanged. The diffusion is discretised first and
differentiated afterwards (see `_skorohod.py`), so that integration by parts adds no error of its own: what is estimated
is the conditional expectation of the discretised process.

Here the user's functionals are differentiated, in contrast to the rest of the package, where derivatives are observed.
"""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ._diffusion import Diffusion as Diffusion, Trajectory as Trajectory, shapes
from ._greeks import Greeks as Greeks, greeks as greeks
from ._misc import check_count, floats_to_arrays, is_concrete
from ._select import Fold, choose_localizer
from ._skorohod import (
    Probes,
    canonical as canonical,
    canonical_weight,
    check_probes,
    derivative as derivative,
    inner as inner,
    map_in_chunks,
    reciprocal as reciprocal,
    reciprocal_weight,
    skorohod as skorohod,
    supplied_weight,
)
from ._types import Key, Scalar
from .conditional import Estimate, conditional_expectation as from_samples, make_bank
from .localize import AbstractLocalizer
from .observe import Samples

Integrand = str | Callable[[Trajectory], Float[Array, "steps noises"]]

_NUMBERS = 2**21  # numbers that one chunk of paths may hold for each array of a trajectory
_CONCENTRATED = 0.25  # one step with this share of ‖u‖² is suspect: in a process of finite norm every share vanishes
_SURPRISE = 5.0  # standard errors by which integration by parts may fail before ℓ or g is called discontinuous


class Weighed(eqx.Module):
    """What conditioning on g needs to know of each path.

    - `g`: the functional to condition on.
    - `ell`: the m functionals to average.
    - `weight`: S(u), with E[φ(g) S] = E[φ′(g)] for smooth φ.
    - `slope`: ⟨Dℓ, u⟩, the derivative of each ℓ along the direction that moves g at unit rate.

    ```python
    sample.g.shape, sample.ell.shape, sample.weight.mean()  # the last is about 0
    ```
    """

    g: Float[Array, " paths"]
    ell: Float[Array, "paths m"]
    weight: Float[Array, " paths"]
    slope: Float[Array, "paths m"]


def weigh(
    key: Key,
    diffusion: Diffusion,
    ell: Callable[[Trajectory], Array],
    g: Callable[[Trajectory], Array],
    *,
    num_paths: int,
    integrand: Integrand = "canonical",
    probes: int | None = None,
    chunk_size: int | None = None,
) -> Weighed:
    """Simulate `num_paths` paths, evaluate ℓ and g on each, and weigh it by S(u).

    - `ell`, `g`: functionals of a `Trajectory`; g is real, ℓ real or of shape (m,). Both must be continuous and almost
      everywhere differentiable in the noise (a payoff with a kink is, an indicator is not). A jump breaks integration
      by parts; where E[ℓS] = E⟨Dℓ, u⟩ or E[gS] = 1 fails beyond five standard errors, a warning says so.
    - `integrand`: u. "canonical" is Dg/‖Dg‖²; "reciprocal" is 1/(T D_t g), refused where Dg vanishes and called out
      where one step carries so much of ‖u‖² that the norm seems to diverge as the steps are refined; a function of the
      trajectory is any other u, of the shape (steps, noises) of the increments, refused unless ⟨Dg, u⟩ = 1.
    - `probes`: None takes the divergence in S(u) exactly, at a cost of steps × noises passes over the path; a number
      estimates it from as many passes, without bias, and the added noise appears in the standard errors.
    - `chunk_size`: how many paths are in memory at once; None chooses. The numbers do not depend on it.

    ```python
    sample = wiener.weigh(
        jax.random.key(0), brownian, half_way, end, num_paths=400
    )
    ```
    """
    num_paths = check_count("num_paths", num_paths, 2)
    if isinstance(integrand, str) and integrand not in ("canonical", "reciprocal"):
        raise ValueError(f"integrand must be 'canonical', 'reciprocal' or a function, got {integrand!r}")
    check_probes(Probes(probes, key))
    size, noises, dtype = shapes(diffusion)
    _check_functional("g", g, diffusion, ())
    _check_functional("ell", ell, diffusion, None)
    if callable(integrand):
        _check_functional("integrand", integrand, diffusion, (diffusion.num_steps, noises))
    if chunk_size is None:
        passes = diffusion.num_steps * noises if probes is None else 1
        chunk_size = max(1, min(num_paths, _NUMBERS // (passes * (diffusion.num_steps + 1) * size)))
    chunk_size = check_count("chunk_size", chunk_size)
    weighed, unit, share = _weigh(
        key, floats_to_arrays(diffusion, dtype), ell, g, num_paths, integrand, probes, chunk_size
    )
    return _checked(weighed, unit, share, integrand, max(_CONCENTRATED, 4 / diffusion.num_steps))


def conditional_expectation(
    weighed: Weighed, level: Any = 0.0, localizer: AbstractLocalizer | Literal["auto"] = "auto"
) -> Estimate:
    """E[ℓ | g = level] with its standard error; `density` is that of g at `level`.

    `localizer` is any one-dimensional one (`Laplace`, `Heaviside`, `Centered`, `Gaussian`); "auto" is
    `best_localizer(weighed)`.

    ```python
    middle = wiener.conditional_expectation(sample, 1.0)  # E[W_½ | W_1 = 1] = ½
    middle.value, middle.stderr
    ```
    """
    if isinstance(localizer, str):
        if localizer != "auto":
            raise ValueError(f"localizer must be 'auto' or a localizer, got {localizer!r}")
        localizer = best_localizer(weighed)
    alpha = jnp.asarray(level, weighed.g.dtype)
    if alpha.ndim != 0:
        raise ValueError(f"level must be one number (vmap over several), got shape {alpha.shape}")
    return _estimate(weighed, alpha, localizer)


@eqx.filter_jit
def _estimate(weighed: Weighed, level: Scalar, localizer: AbstractLocalizer) -> Estimate:
    values, jacobians = weighed.ell[:, None, :], weighed.slope[:, None, :, None]
    return from_samples(_samples(weighed), values, jacobians, level[None], localizer)


def best_localizer(weighed: Weighed) -> AbstractLocalizer:
    """The `Laplace` localizer whose length has the least estimated standard error, over the bulk of g's law.

    Every length is unbiased, so nothing is traded. Components of ℓ count equally, each in units of its spread.

    ```python
    localizer = wiener.best_localizer(sample)
    wiener.conditional_expectation(sample, 1.0, localizer)
    ```
    """
    return _best_localizer(weighed)


@eqx.filter_jit
def _best_localizer(weighed: Weighed) -> AbstractLocalizer:
    samples = _samples(weighed)
    mean, deviation = jnp.mean(weighed.ell, 0), jnp.std(weighed.ell, 0)
    scale = jnp.where(deviation > 0, deviation, 1)
    values = ((weighed.ell - mean[None]) / scale[None])[:, None, :]
    jacobians = (weighed.slope / scale[None])[:, None, :, None]
    return choose_localizer(samples, (Fold(make_bank(samples, values, jacobians), None),)).localizer


def _samples(weighed: Weighed) -> Samples:
    """The hub of the package with g for the position; its own gradient and Hessian are not used."""
    x, weight = weighed.g[:, None, None], weighed.weight[:, None, None]
    return Samples(x, jnp.zeros_like(x), jnp.zeros_like(x)[..., None], weight, jnp.ones(x.shape[:2], bool))


@eqx.filter_jit
def _weigh(
    key: Key,
    diffusion: Diffusion,
    ell: Callable[[Trajectory], Array],
    g: Callable[[Trajectory], Array],
    num_paths: int,
    integrand: Integrand,
    probes: int | None,
    chunk_size: int,
) -> tuple[Weighed, Float[Array, " paths"], Float[Array, " paths"]]:
    """The weighed paths, ⟨Dg, u⟩ of each, and the largest share that one step has in its ‖u‖²."""

    def one_path(key: Key) -> tuple[Array, ...]:
        path_key, probe_key = jax.random.split(key)
        initial, increments = diffusion.draw(path_key)
        step_size = jnp.asarray(diffusion.step_size, increments.dtype)

        def on_increments(functional: Callable[[Trajectory], Array], w: Array) -> Array:
            return functional(diffusion.solve(initial, w))

        if callable(integrand):
            weigh_path, functional = supplied_weight, integrand
        else:
            weigh_path, functional = canonical_weight if integrand == "canonical" else reciprocal_weight, g
        S, u = weigh_path(partial(on_increments, functional), increments, step_size, Probes(probes, probe_key))

        def both(w: Array) -> tuple[Array, Array]:
            path = diffusion.solve(initial, w)
            return g(path), jnp.atleast_1d(ell(path))

        (level, values), (unit, slope) = jax.jvp(both, (increments,), (u,))
        squares = jnp.sum(u * u, 1)
        return level, values, S, step_size * slope, step_size * unit, jnp.max(squares) / jnp.sum(squares)

    *parts, unit, share = map_in_chunks(one_path, jax.random.split(key, num_paths), chunk_size)
    return Weighed(*parts), unit, share


def _check_functional(
    name: str, functional: Callable[[Trajectory], Any], diffusion: Diffusion, expected: tuple[int, ...] | None
) -> None:
    got = jax.eval_shape(lambda key: functional(diffusion.solve(*diffusion.draw(key))), jax.random.key(0))
    shape = getattr(got, "shape", None)
    fits = shape == expected if expected is not None else shape is not None and len(shape) <= 1
    if not fits:
        wanted = "() or (m,)" if expected is None else expected
        raise ValueError(f"{name} must return an array of shape {wanted}, got {got if shape is None else shape}")
    if not jnp.issubdtype(got.dtype, jnp.floating):
        raise ValueError(f"{name} must return real numbers to be differentiated, got dtype {got.dtype}")


def _checked(weighed: Weighed, unit: Array, share: Array, integrand: Integrand, largest_share: float) -> Weighed:
    """Refuse what the theorem does not cover, and warn of what it covers badly."""
    tolerance = float(jnp.finfo(unit.dtype).eps) ** 0.4  # 5e-7 in float64, 2e-3 in float32
    xp: Any = np if is_concrete(weighed, unit, share) else jnp  # NumPy has nothing to compile
    g, ell, weight = (xp.asarray(leaf) for leaf in (weighed.g, weighed.ell, weighed.weight))
    finite = xp.isfinite(g) & xp.isfinite(ell).all(1)
    off = ~((xp.abs(xp.asarray(unit) - 1) <= tolerance) & xp.isfinite(weight))  # NaN is off too
    if xp is jnp:
        weighed = eqx.error_if(weighed, jnp.any(~finite), "g and ell must be finite on every path")
        return eqx.error_if(weighed, jnp.any(off), "the integrand u must satisfy ⟨Dg, u⟩ = 1 on every path")
    if not np.all(finite):
        worst = int(np.argmin(finite))
        raise ValueError(
            f"g and ell must be finite, got g = {g[worst]}, ell = {ell[worst]} on path {worst} "
            f"({np.count_nonzero(~finite)} of {len(finite)} paths)"
        )
    if np.any(off):
        worst = int(np.argmax(np.where(np.isfinite(unit), np.abs(unit - 1), np.inf)))
        name = integrand if isinstance(integrand, str) else "supplied"
        why = {
            "canonical": "g must depend on the noise: Dg vanishes",
            "reciprocal": "Dg vanishes at some step, where 1/(T D_t g) does not exist; take integrand='canonical'",
            "supplied": "divide u by this number, as a function of the noise, to mend it",
        }[name]
        raise ValueError(
            f"integrand must satisfy ⟨Dg, u⟩ = 1; the {name} one gives {unit[worst]} on path {worst} "
            f"({np.count_nonzero(off)} of {len(off)} paths are off): {why}"
        )
    typical = float(np.median(share))
    if integrand != "canonical" and typical > largest_share:
        warnings.warn(
            f"one step holds {typical:.0%} of ‖u‖² on the typical path, which no process of finite norm allows as the "
            "steps are refined: the variance of S(u) will grow without bound; integrand='canonical' has the least norm",
            RuntimeWarning,
            stacklevel=3,
        )
    _check_duality(g, ell, weight, np.asarray(weighed.slope))
    return weighed


def _check_duality(g: np.ndarray, ell: np.ndarray, weight: np.ndarray, slope: np.ndarray) -> None:
    """Warn where E[FS] = E⟨DF, u⟩ fails for F = ℓ or g: a jump that the derivative does not see."""
    values = np.concatenate([g[:, None], ell], 1)
    values = values - values.mean(0)  # E[S] = 0: centring only takes noise away
    gap = values * weight[:, None] - np.concatenate([np.ones_like(g)[:, None], slope], 1)
    # Rounding alone may be many standard errors of nothing: hence the tolerance.
    error = gap.std(0) / np.sqrt(len(g)) + np.finfo(gap.dtype).eps * np.abs(gap).max(0)
    surprise = gap.mean(0) / np.where(error > 0, error, np.inf)
    for index in np.flatnonzero(np.abs(surprise) > _SURPRISE):
        name, right = ("g", "1") if index == 0 else (f"ell[{index - 1}]", "E⟨Dℓ, u⟩")
        warnings.warn(
            f"integration by parts fails for {name}: E[{name} S] differs from {right} by {surprise[index]:.1f} "
            "standard errors. It has a jump that its derivative does not see, or its tails need more paths",
            RuntimeWarning,
            stacklevel=4,
        )
