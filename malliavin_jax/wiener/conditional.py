"""E[ℓ | g = a] from weighed paths of a diffusion."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from .._base.checks import check_count, floats_to_arrays
from .._base.types import Key, Scalar
from ..estimate.conditional import conditional_expectation as from_samples
from ..estimate.localizers import AbstractLocalizer, Laplace
from ..estimate.ratio import Estimate, ratio_estimate
from ..estimate.sums import localized_sums, make_bank
from ..samples.samples import Samples
from .calculus import (
    DIRECTIONS,
    Probes,
    canonical_weight,
    check_probes,
    map_in_chunks,
    reciprocal_weight,
    supplied_weight,
)
from .diffusion import Diffusion, Trajectory, shapes
from .weighed import Integrand, Weighed, check_functional, checked

_NUMBERS = 2**22  # numbers that one chunk of paths may hold for each array of a trajectory
_PILOT = 20_000  # paths on which lengths are compared: which is best does not depend on the number
_LEVELS = 32  # quantiles of g at which they are compared, from 5 % to 95 %
_LENGTHS = (0.03, 8.0, 15)  # least and greatest length, in units of the spread of g, and how many in equal ratios


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
      estimates the second derivatives from as many passes, without bias, and the added noise appears in the standard
      errors; Dg still takes a pass for each increment, of half the cost.
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
    check_functional("g", g, diffusion, ())
    check_functional("ell", ell, diffusion, None)
    if callable(integrand):
        check_functional("integrand", integrand, diffusion, (diffusion.num_steps, noises))
    if chunk_size is None:
        passes = min(diffusion.num_steps * noises, DIRECTIONS)
        chunk_size = max(1, min(num_paths, _NUMBERS // (passes * (diffusion.num_steps + 1) * size)))
    chunk_size = check_count("chunk_size", chunk_size)
    weighed, unit, share = _weigh(
        key, floats_to_arrays(diffusion, dtype), ell, g, num_paths, integrand, probes, chunk_size
    )
    return checked(weighed, unit, share, integrand, diffusion.num_steps)


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
    """The `Laplace` localizer whose length has the least estimated variance, averaged over the bulk of g's law.

    Every length is unbiased, so nothing is traded. Components of ℓ count equally, each in units of its spread. (It is
    the mean of the variances, not of their logarithms as for a gradient field: a functional may be constant where g is
    small, as a payoff is, and a length without any variance there must not decide for all levels.)

    ```python
    localizer = wiener.best_localizer(sample)
    wiener.conditional_expectation(sample, 1.0, localizer)
    ```
    """
    return Laplace(_best_length(weighed))


@eqx.filter_jit
def _best_length(weighed: Weighed) -> Scalar:
    pilot = jax.tree.map(lambda leaf: leaf[:_PILOT], weighed)
    samples = _samples(pilot)
    spread = jnp.std(pilot.ell, 0)
    scale = jnp.where(spread > 0, spread, 1)[None]
    values = ((pilot.ell - jnp.mean(pilot.ell, 0)[None]) / scale)[:, None, :]
    bank = make_bank(samples, values, (pilot.slope / scale)[:, None, :, None])
    ranks = jnp.linspace(0.05, 0.95, _LEVELS, dtype=pilot.g.dtype) * (pilot.g.shape[0] - 1)
    levels = jnp.sort(pilot.g)[ranks.astype(jnp.int32)]

    def variance(length: Scalar) -> Scalar:
        def at(level: Scalar) -> Scalar:
            sums = localized_sums(bank, level[None], Laplace(length))
            return jnp.sum(ratio_estimate(sums, 1, 1, jnp.asarray(True)).stderr ** 2)

        return jnp.mean(jax.vmap(at)(levels))

    lengths = jnp.std(pilot.g) * jnp.geomspace(*_LENGTHS, dtype=pilot.g.dtype)
    return lengths[jnp.argmin(lax.map(variance, lengths))]


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
