"""E[ℓ | g = a] from weighed paths of a diffusion."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .._base.checks import check_count, check_key, floats_to_arrays
from .._base.types import Key, Scalar
from ..estimate.conditional import conditional_expectation as from_samples
from ..estimate.length import length_of_least_variance
from ..estimate.localizers import AbstractLocalizer, Laplace
from ..estimate.ratio import Estimate, ratio_with_error
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
from .diffusion import Diffusion, Trajectory, sizes_of
from .weighed import Conditions, Integrand, WeighedPaths, check_functional, checked

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
) -> WeighedPaths:
    """Simulate `num_paths` paths, evaluate ℓ and g on each, and weigh it by S(u).

    Args:
        key: for the paths, and for the probes.
        diffusion: whose paths are simulated.
        ell: ℓ, a functional of a `Trajectory`, real or of shape (m,).
        g: a real functional. Both must be continuous and almost everywhere differentiable in the noise (a payoff with
            a kink is, an indicator is not). A jump breaks integration by parts; where E[ℓS] = E⟨Dℓ, u⟩ or E[gS] = 1
            fails beyond five standard errors, a warning says so.
        num_paths: at least 2.
        integrand: u. "canonical" is Dg/‖Dg‖²; "reciprocal" is 1/(T D_t g), refused where Dg vanishes and called out
            where one step carries so much of ‖u‖² that the norm seems to diverge as the steps are refined; a function
            of the trajectory is any other u, of the shape (steps, noises) of the increments, refused unless
            ⟨Dg, u⟩ = 1.
        probes: None takes the divergence in S(u) exactly, at a cost of steps × noises passes over the path; a number
            estimates the second derivatives from as many passes, without bias, and the added noise appears in the
            standard errors; Dg still takes a pass for each increment, of half the cost.
        chunk_size: how many paths are in memory at once; None chooses. The numbers do not depend on it.

    Returns:
        ℓ, g and the weight of each path.

    Raises:
        ValueError: if a functional or a part of the diffusion has a wrong shape, if g or ℓ is not finite on a path, or
            if ⟨Dg, u⟩ = 1 fails on one.

    Example:
        ```python
        import jax
        import jax.numpy as jnp
        from malliavin_jax import wiener

        brownian = wiener.Diffusion(
            lambda x, t: jnp.zeros(1), lambda x, t: jnp.ones((1, 1)), jnp.zeros(1), step_size=0.25, num_steps=4
        )
        sample = wiener.weigh(
            jax.random.key(0), brownian, ell=lambda path: path.x[2, 0], g=lambda path: path.x[-1, 0], num_paths=400
        )
        wiener.conditional_expectation(sample, 1.0)  # E[W_½ | W_1 = 1] = ½
        ```
    """
    check_key("key", key)
    num_paths = check_count("num_paths", num_paths, 2)
    if isinstance(integrand, str) and integrand not in ("canonical", "reciprocal"):
        raise ValueError(f"integrand must be 'canonical', 'reciprocal' or a function, got {integrand!r}")
    check_probes(Probes(probes, key))
    sizes = sizes_of(diffusion)
    check_functional("g", g, diffusion, ())
    check_functional("ell", ell, diffusion, None)
    if callable(integrand):
        check_functional("integrand", integrand, diffusion, (diffusion.num_steps, sizes.noises))
    if chunk_size is None:
        passes = min(diffusion.num_steps * sizes.noises, DIRECTIONS)
        chunk_size = max(1, min(num_paths, _NUMBERS // (passes * (diffusion.num_steps + 1) * sizes.dim)))
    weighed, conditions = weigh_in_chunks(
        key,
        floats_to_arrays(diffusion, sizes.dtype),
        ell=ell,
        g=g,
        num_paths=num_paths,
        integrand=integrand,
        probes=probes,
        chunk_size=check_count("chunk_size", chunk_size),
    )
    return checked(weighed, conditions, integrand, diffusion.num_steps)


def conditional_expectation(
    weighed: WeighedPaths, level: Any = 0.0, localizer: AbstractLocalizer | Literal["auto"] = "auto"
) -> Estimate:
    """E[ℓ | g = level] with its standard error.

    Args:
        weighed: the paths, from `weigh`.
        level: the value of g, one number (vmap over several).
        localizer: any one-dimensional one (`Laplace`, `Heaviside`, `Centered`, `Gaussian`); "auto" is
            `best_localizer(weighed)`.

    Returns:
        An `Estimate` with one entry a component of ℓ; its `density` is that of g at `level`.

    Raises:
        ValueError: if `level` is not one number, or `localizer` another word than "auto".

    Example:
        ```python
        import jax
        import jax.numpy as jnp
        from malliavin_jax import wiener

        brownian = wiener.Diffusion(
            lambda x, t: jnp.zeros(1), lambda x, t: jnp.ones((1, 1)), jnp.zeros(1), step_size=0.25, num_steps=4
        )
        sample = wiener.weigh(
            jax.random.key(0), brownian, ell=lambda path: path.x[2, 0], g=lambda path: path.x[-1, 0], num_paths=400
        )
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


def best_localizer(weighed: WeighedPaths) -> AbstractLocalizer:
    """The `Laplace` localizer whose length has the least estimated variance, averaged over the bulk of g's law.

    Every length is unbiased, so nothing is traded. Components of ℓ count equally, each in units of its spread. (It is
    the mean of the variances, not of their logarithms as for a gradient field: a functional may be constant where g is
    small, as a payoff is, and a length without any variance there must not decide for all levels.)

    Args:
        weighed: the paths, from `weigh`; the first 20 000 are used.

    Returns:
        `Laplace(length)`, to be given to `conditional_expectation` for every level.

    Example:
        ```python
        import jax
        import jax.numpy as jnp
        from malliavin_jax import wiener

        brownian = wiener.Diffusion(
            lambda x, t: jnp.zeros(1), lambda x, t: jnp.ones((1, 1)), jnp.zeros(1), step_size=0.25, num_steps=4
        )
        sample = wiener.weigh(
            jax.random.key(0), brownian, ell=lambda path: path.x[2, 0], g=lambda path: path.x[-1, 0], num_paths=400
        )
        localizer = wiener.best_localizer(sample)
        wiener.conditional_expectation(sample, 1.0, localizer)
        ```
    """
    return Laplace(_best_length(weighed))


@eqx.filter_jit
def _estimate(weighed: WeighedPaths, level: Scalar, localizer: AbstractLocalizer) -> Estimate:
    values, jacobians = weighed.ell[:, None, :], weighed.slope[:, None, :, None]
    return from_samples(_samples(weighed), values, jacobians, level[None], localizer)


@eqx.filter_jit
def _best_length(weighed: WeighedPaths) -> Scalar:
    pilot = jax.tree.map(lambda leaf: leaf[:_PILOT], weighed)
    spread = jnp.std(pilot.ell, 0)
    scale = jnp.where(spread > 0, spread, 1)[None]
    values = ((pilot.ell - jnp.mean(pilot.ell, 0)[None]) / scale)[:, None, :]
    bank = make_bank(_samples(pilot), values, (pilot.slope / scale)[:, None, :, None])
    ranks = jnp.linspace(0.05, 0.95, _LEVELS, dtype=pilot.g.dtype) * (pilot.g.shape[0] - 1)
    levels = jnp.sort(pilot.g)[ranks.astype(jnp.int32)]

    def variances(length: Scalar) -> Float[Array, " levels"]:
        sums = jax.vmap(lambda level: localized_sums(bank, level[None], Laplace(length)))(levels)
        return jnp.sum(jax.vmap(ratio_with_error)(sums)[1] ** 2, 1)

    return length_of_least_variance(
        variances,
        lengths=jnp.std(pilot.g) * jnp.geomspace(*_LENGTHS, dtype=pilot.g.dtype),
        average=lambda variances: jnp.mean(variances, 1),
    ).length


def _samples(weighed: WeighedPaths) -> Samples:
    """The hub of the package with g for the position; there is no gradient, and it is not used."""
    x, weight = weighed.g[:, None, None], weighed.weight[:, None, None]
    return Samples(x, jnp.zeros_like(x), None, weight, jnp.ones(x.shape[:2], bool))


class _OnePath(NamedTuple):
    """The entries of `WeighedPaths` and `Conditions` for one path."""

    g: Scalar
    ell: Float[Array, " m"]
    weight: Scalar
    slope: Float[Array, " m"]
    unit: Scalar
    share: Scalar


@eqx.filter_jit
def weigh_in_chunks(
    key: Key,
    diffusion: Diffusion,
    *,
    ell: Callable[[Trajectory], Array],
    g: Callable[[Trajectory], Array],
    num_paths: int,
    integrand: Integrand,
    probes: int | None,
    chunk_size: int,
) -> tuple[WeighedPaths, Conditions]:
    """The weighed paths, and what must hold on each."""

    def one_path(key: Key) -> _OnePath:
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
        return _OnePath(
            g=level,
            ell=values,
            weight=S,
            slope=step_size * slope,
            unit=step_size * unit,
            share=jnp.max(squares) / jnp.sum(squares),
        )

    paths: _OnePath = map_in_chunks(one_path, jax.random.split(key, num_paths), chunk_size)
    return WeighedPaths(paths.g, paths.ell, paths.weight, paths.slope), Conditions(paths.unit, paths.share)
