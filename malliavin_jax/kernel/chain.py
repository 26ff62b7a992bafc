"""The single-kernel passive Langevin chain: one observed gradient per step, weighted by a kernel."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from .._base.checks import check_count, check_key, check_positive, check_shape, float_array
from .._base.types import Key, Scalar, Vector
from ..samples.samples import Samples, check_samples

_BLOCK = 512  # steps whose noise is drawn in one call: inside the scan, drawing would be most of the cost


class KernelChain(eqx.Module):
    """What `single_kernel_langevin` returns.

    Attributes:
        positions: of the chains after burn-in, in the units of x, of shape (chains, kept, d).

    Example:
        ```python
        import jax.numpy as jnp
        import malliavin_jax as mj

        mj.kernel.KernelChain(jnp.zeros((4, 200, 1))).positions.shape  # 4 chains, 200 kept positions, d = 1
        ```
    """

    positions: Float[Array, "chains kept d"]


def single_kernel_langevin(
    key: Key,
    samples: Samples,
    initial: Float[ArrayLike, "chains d"],
    *,
    num_steps: int,
    step_size: ArrayLike,
    inverse_temperature: ArrayLike,
    bandwidth: ArrayLike,
    density: Callable[[Vector], Scalar],
    log_density_gradient: Callable[[Vector], Vector],
    burn_in: int = 0,
) -> KernelChain:
    """Sample exp(−βL) from gradients observed at points θ drawn from a *known* density π.

    One step consumes one observed pair (θ, g) with E[g | θ] = ∇L(θ), and w ~ N(0, I):

        α ← α + ε π(α) [ π(α) ∇log π(α) − (β/2) K_Δ(θ − α) g ] + √ε π(α) w,

    with K_Δ(y) = exp(−|y|²/2Δ²) / (2πΔ²)^{d/2}. Averaged over θ ~ π the kernel term is π(α)∇L(α) + O(Δ²), so
    that for ε → 0 the chain follows dα = b dt + π dW with b = π∇π − (β/2)π²∇L. Its probability flux at density
    p, b p − ½∇(π² p) = −½π²(β p∇L + ∇p), vanishes at p ∝ exp(−βL).

    Bias: the smoothing by the kernel, O(Δ²); Euler's step, O(ε); and the noise of picking one θ, which adds
    ε(β/2)² Var(K_Δ g) ~ ε(β/2)² π |g|² / (2√π Δ)^d to the variance 1 of w: ε must be small against Δ^d.

    Each step of each chain picks its point uniformly, with replacement, among the observed ones: given the
    samples the chains are independent, and a finite set of samples can feed any number of steps. Where π(α) is
    tiny the chain hardly moves and mixes slowly: π should cover the region where exp(−βL) lives.

    Reference: Krishnamurthy & Yin, Langevin dynamics for adaptive inverse reinforcement learning of
    stochastic gradient algorithms, JMLR 22(121), 2021, written there for a reward R = −L.

    Args:
        key: for the noise and the picks.
        samples: pairs (θ, g); every observed point (all episodes and times) must have the law π. Hessians are not used.
        initial: where each chain starts, of shape (chains, d); all chains advance together.
        num_steps: steps of each chain, burn-in included.
        step_size: ε, a positive number.
        inverse_temperature: β, a positive number.
        bandwidth: Δ, a positive number.
        density: α (d,) ↦ π(α).
        log_density_gradient: α (d,) ↦ ∇log π(α).
        burn_in: the first steps, not returned; kept = num_steps − burn_in.

    Returns:
        The positions, a `KernelChain`.

    Raises:
        ValueError: if a number is not positive or not one number, if `burn_in` is not below `num_steps`, if `initial`
            is not of shape (chains, d), if a density is no function, or if `samples` are too few or not finite.

    Example:
        ```python
        import jax
        import jax.numpy as jnp
        import malliavin_jax as mj

        loss = mj.potentials.Quartic()
        learner = mj.ForwardLearner(loss, mj.initial.Normal(), step_size=0.01, gradient_noise=0.5)
        samples = mj.observe(jax.random.key(0), learner, num_episodes=2000, times=[0.4, 0.8])
        walked = mj.kernel.single_kernel_langevin(
            jax.random.key(1),
            samples,
            jnp.zeros((4, 1)),
            num_steps=200,
            step_size=0.01,
            inverse_temperature=1.0,
            bandwidth=0.2,
            density=lambda a: jnp.exp(-(a[0] ** 2) / 2) / jnp.sqrt(2 * jnp.pi),
            log_density_gradient=lambda a: -a,
        )
        walked.positions.shape  # (4, 200, 1)
        ```
    """
    check_samples(samples)
    dtype, d = samples.x.dtype, samples.dim
    start = float_array("initial", initial).astype(dtype)
    check_shape("initial", start, (None, d), "chains d")
    check_key("key", key)
    num_steps = check_count("num_steps", num_steps)
    burn_in = check_count("burn_in", burn_in, 0)
    if burn_in >= num_steps:
        raise ValueError(f"burn_in must be less than num_steps={num_steps}, got {burn_in}")
    numbers = {"step_size": step_size, "inverse_temperature": inverse_temperature, "bandwidth": bandwidth}
    for name, value in numbers.items():
        check_shape(name, value, ())
        check_positive(name, value)
    ε, β, Δ = (jnp.asarray(value, dtype) for value in numbers.values())
    for name, function in (("density", density), ("log_density_gradient", log_density_gradient)):
        if not callable(function):
            raise ValueError(f"{name} must be a function of α, got {type(function).__name__}")
    height = (2 * jnp.pi * Δ**2) ** (-d / 2)

    def step(α: Vector, θ: Vector, g: Vector, w: Vector) -> Vector:
        π, score = density(α), log_density_gradient(α)
        k = height * jnp.exp(-0.5 * jnp.sum(((θ - α) / Δ) ** 2))
        return α + ε * π * (π * score - 0.5 * β * k * g) + jnp.sqrt(ε) * π * w

    path = _walk(key, step, samples, start, num_steps)
    return KernelChain(jnp.swapaxes(path[burn_in:], 0, 1))


def _walk(
    key: Key,
    step: Callable[[Vector, Vector, Vector, Vector], Vector],
    samples: Samples,
    start: Float[Array, "chains d"],
    num_steps: int,
) -> Float[Array, "steps chains d"]:
    """The chains from `start`: at each step α ← step(α, θ, g, w) with a pair (θ, g) picked among the observed ones."""
    x, gradient = (v.reshape(-1, samples.dim) for v in (samples.x, samples.gradient))
    # The observed points first, so that a random number below their count is an observed point.
    seen = samples.observed.reshape(-1)
    order = jnp.argsort(~seen, stable=True)
    count = jnp.sum(seen)

    def advance(α: Array, drawn: tuple[Array, Array]) -> tuple[Array, Array]:
        index, w = drawn
        α = jax.vmap(step)(α, x[index], gradient[index], w)
        return α, α

    def block(α: Array, key: Key) -> tuple[Array, Array]:
        pick, noise = jax.random.split(key)
        index = order[jax.random.randint(pick, (_BLOCK, start.shape[0]), 0, count)]
        return lax.scan(advance, α, (index, jax.random.normal(noise, (_BLOCK, *start.shape), x.dtype)))

    _, path = lax.scan(block, start, jax.random.split(key, -(-num_steps // _BLOCK)))
    return path.reshape(-1, *start.shape)[:num_steps]
