"""The outer chain: Langevin dynamics driven by a gradient field, many chains at once, on device."""

import os
import warnings
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, ArrayLike, Bool, Float, Shaped

from .._base.checks import check_count, check_nonnegative, check_shape, float_array, is_concrete
from .._base.types import Key
from ..estimate.ratio import Estimate
from .rule import _check_rule
from .runner import Walk, advance, block_size, run_in_legs, whole


class Chain(eqx.Module):
    """The kept part of the chains: entry j is the position after burn_in + (j + 1)·thinning steps.

    - `positions`: α, in the units of x.
    - `gradients`: the field's estimate of ∇L at each of these positions.
    - `gradient_stderr`, `density`, `density_stderr`, `trusted`: as in `Estimate`, at these positions.
    - `diverged`: True for a chain that became non-finite; it stays so from there on.

    ```python
    chain.positions.shape, chain.trusted.mean()  # (8, 80, 1), and the share of trusted steps
    ```
    """

    positions: Float[Array, "chains kept d"]
    gradients: Float[Array, "chains kept d"]
    gradient_stderr: Float[Array, "chains kept d"]
    density: Float[Array, "chains kept"]
    density_stderr: Float[Array, "chains kept"]
    trusted: Bool[Array, "chains kept"]
    diverged: Bool[Array, " chains"]


def passive_langevin(
    key: Key,
    field: Callable[..., Estimate],
    initial: Shaped[ArrayLike, "..."],
    *,
    num_steps: int,
    step_size: Any = None,
    inverse_temperature: Any = None,
    burn_in: int = 0,
    thinning: int = 1,
    method: str = "leimkuhler-matthews",
    optimizer: optax.GradientTransformation | None = None,
    progress: bool = False,
    checkpoint: str | os.PathLike | None = None,
    checkpoint_every: int | None = None,
) -> Chain:
    """Chains α ← α − η Ĝ(α) + sqrt(2η/β) n on a gradient field Ĝ ≈ ∇L; their law tends to exp(−βL).

    - `key`: the noise of step k depends on `key` and k alone, so a run cut anywhere gives the same numbers.
    - `field`: `field(alpha, *, key) -> Estimate`. Each step has one key, the same for all chains: a field
      that observes fresh episodes shares each batch among them.
    - `initial`: starting points, shape (chains, d). The chain keeps its dtype.
    - `num_steps`, `burn_in`, `thinning`: (num_steps − burn_in)//thinning positions are kept, the first of
      them after burn_in + thinning steps; nothing else is stored.
    - `step_size` (η), `inverse_temperature` (β), `method`: as in `langevin`.
    - `optimizer`: an optax transformation to take the place of those three. Each chain has a state of its
      own, with the chain's number folded into every random key it holds.
    - `progress`: show a bar on stderr. A bar that fails is dropped, and the run goes on.
    - `checkpoint`, `checkpoint_every`: a file, and after how many steps to write it (a tenth of the run if
      not given). When the file is there, the same call continues from it and ends in the same bits as one
      never interrupted. A write stores all that is kept so far: chains·kept·(3d + 2) numbers.

    Without `progress` and `checkpoint` the run is one compiled call, and may itself be under `jit`.
    A chain that becomes non-finite is marked in `Chain.diverged`, with a warning; the others are unharmed.

    ```python
    start = jnp.zeros((8, 1))
    chain = mj.passive_langevin(
        jax.random.key(1), field, start, num_steps=100, burn_in=20, step_size=0.05, inverse_temperature=1.0
    )
    ```
    """
    x = float_array("initial", initial)
    check_shape("initial", x, (None, None))
    if 0 in x.shape:
        raise ValueError(f"initial must hold at least one chain in at least one dimension, got {x.shape}")
    if is_concrete(x) and not np.all(np.isfinite(x)):
        bad = int(np.argmin(np.isfinite(x).all(1)))
        raise ValueError(f"initial must be finite, got {np.asarray(x)[bad]} for chain {bad}")
    num_steps, burn_in = check_count("num_steps", num_steps), check_count("burn_in", burn_in, 0)
    thinning = check_count("thinning", thinning)
    if burn_in >= num_steps:
        raise ValueError(f"burn_in must be less than num_steps={num_steps}, got {burn_in}")
    if thinning > num_steps - burn_in:
        raise ValueError(f"thinning must be at most num_steps − burn_in = {num_steps - burn_in}, got {thinning}")
    if checkpoint is None and checkpoint_every is not None:
        raise ValueError(f"checkpoint_every={checkpoint_every} needs checkpoint, the file to write")
    kept = (num_steps - burn_in) // thinning
    total = burn_in + kept * thinning + 1  # the field is evaluated at the last position too

    if optimizer is None:
        _check_rule(step_size, inverse_temperature, method)
        schedule = jax.vmap(lambda k: jnp.asarray(step_size(k), x.dtype))
        eta = schedule(jnp.arange(total)) if callable(step_size) else jnp.asarray(step_size, x.dtype)
        check_nonnegative("step_size", eta)
        beta = jnp.asarray(inverse_temperature, x.dtype)
    elif step_size is not None or inverse_temperature is not None:
        raise ValueError("step_size and inverse_temperature must be left out when optimizer is given")
    else:
        eta = beta = None
    noise_key, field_key = jax.random.split(key)
    walk = Walk(field, noise_key, field_key, eta, beta, whole(burn_in), whole(thinning), method, optimizer)
    state = walk.init(x)

    if not progress and checkpoint is None:
        size = block_size(total, x.size)
        _, records = advance(walk, state, whole(0), whole(total), -(-total // size), size, kept)
    elif is_concrete(walk, state):
        records = run_in_legs(walk, state, total, progress, checkpoint, checkpoint_every)
    else:
        raise ValueError("progress and checkpoint need values: leave them out under jit or vmap")
    return _chain(*map(jnp.asarray, records))


def _chain(x: Array, value: Array, stderr: Array, density: Array, density_stderr: Array, trusted: Array) -> Chain:
    finite = jnp.isfinite(x).all(-1)
    diverged = ~finite.all(1)
    if is_concrete(diverged) and np.any(diverged):
        first = int(np.argmin(np.asarray(finite).all(0)))
        warnings.warn(
            f"{np.count_nonzero(diverged)} of {len(diverged)} chains became non-finite, the first by kept "
            f"position {first}; Chain.diverged marks them. A smaller step_size is the usual cure",
            RuntimeWarning,
            stacklevel=3,
        )
    return Chain(x, value, stderr, density, density_stderr, trusted, diverged)
