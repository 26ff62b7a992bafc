"""What is kept of each path to condition on g, and whether the theorem covers it."""

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .._base.checks import is_concrete
from .diffusion import Diffusion, Trajectory

Integrand = str | Callable[[Trajectory], Float[Array, "steps noises"]]

_CONCENTRATED = 0.25  # one step with this share of ‖u‖² is suspect: in a process of finite norm every share vanishes
_SURPRISE = 5.0  # standard errors by which integration by parts may fail before ℓ or g is called discontinuous


class WeighedPaths(eqx.Module):
    """What conditioning on g needs to know of each path.

    Attributes:
        g: the functional to condition on, of shape (paths,).
        ell: the m functionals to average, of shape (paths, m).
        weight: S(u), with E[φ(g) S] = E[φ′(g)] for smooth φ, of shape (paths,).
        slope: ⟨Dℓ, u⟩, the derivative of each ℓ along the direction that moves g at unit rate, of shape (paths, m).

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
        sample.g.shape, sample.ell.shape, sample.weight.mean()  # (400,), (400, 1), about 0
        ```
    """

    g: Float[Array, " paths"]
    ell: Float[Array, "paths m"]
    weight: Float[Array, " paths"]
    slope: Float[Array, "paths m"]


class Conditions(NamedTuple):
    """What the theorem asks of u, on each path."""

    unit: Float[Array, " paths"]  # ⟨Dg, u⟩, which must be 1
    share: Float[Array, " paths"]  # the largest share that one step has in ‖u‖²


def check_functional(
    name: str, functional: Callable[[Trajectory], Any], diffusion: Diffusion, expected: tuple[int, ...] | None
) -> None:
    """Refuse a functional that does not return real numbers of shape `expected` (None: a number or a vector)."""
    got = jax.eval_shape(lambda key: functional(diffusion.solve(*diffusion.draw(key))), jax.random.key(0))
    shape = getattr(got, "shape", None)
    fits = shape == expected if expected is not None else shape is not None and len(shape) <= 1
    if not fits:
        wanted = "() or (m,)" if expected is None else expected
        raise ValueError(f"{name} must return an array of shape {wanted}, got {got if shape is None else shape}")
    if not jnp.issubdtype(got.dtype, jnp.floating):
        raise ValueError(f"{name} must return real numbers to be differentiated, got dtype {got.dtype}")


def checked(weighed: WeighedPaths, conditions: Conditions, integrand: Integrand, num_steps: int) -> WeighedPaths:
    """Refuse what the theorem does not cover, and warn of what it covers badly."""
    unit, share = conditions
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
            "supplied": "divide u by this number, as a function of the noise",
        }[name]
        raise ValueError(
            f"integrand must satisfy ⟨Dg, u⟩ = 1; the {name} one gives {unit[worst]} on path {worst} "
            f"({np.count_nonzero(off)} of {len(off)} paths are off): {why}"
        )
    typical = float(np.median(share))
    if integrand != "canonical" and typical > max(_CONCENTRATED, 4 / num_steps):
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
    # Where the gap is 0 but for rounding, rounding may be many of its standard errors: hence the second term.
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
