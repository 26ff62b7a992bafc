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

from .._base.checks import check_count, check_key, check_nonnegative, check_shape, float_array, has_numbers, is_concrete
from .._base.long_runs import Checkpoint, as_checkpoint
from .._base.types import Key
from ..estimate.field import check_field
from ..estimate.ratio import Estimate
from .dynamics import Dynamics, Record
from .rule import METHODS, check_rule
from .runner import Schedule, run_at_once, run_in_legs


class Chain(eqx.Module):
    """The kept part of the chains: entry j is the position after burn_in + (j + 1)·thinning steps.

    Attributes:
        positions: α, in the units of x.
        gradients: the field's estimate of ∇L at each of these positions.
        gradient_stderr: its standard error, as in `Estimate`.
        density: the density of the learner's positions there, as in `Estimate`.
        density_stderr: its standard error.
        trusted: whether the field trusts its estimate there, as in `Estimate`.
        diverged: True for a chain that became non-finite; it stays so from there on.

    Example:
        ```python
        import jax
        import jax.numpy as jnp
        import malliavin_jax as mj

        chain = mj.passive_langevin(
            jax.random.key(1), mj.TrueField(mj.potentials.Quartic()), jnp.zeros((8, 1)), num_steps=100, burn_in=20,
            step_size=0.05, inverse_temperature=1.0,
        )
        chain.positions.shape, chain.trusted.mean()  # (8, 80, 1), and the share of trusted steps: 1
        ```
    """

    positions: Float[Array, "chains kept d"]
    gradients: Float[Array, "chains kept d"]
    gradient_stderr: Float[Array, "chains kept d"]
    density: Float[Array, "chains kept"]
    density_stderr: Float[Array, "chains kept"]
    trusted: Bool[Array, "chains kept"]
    diverged: Bool[Array, " chains"]

    def __repr__(self) -> str:
        if not has_numbers(self) or self.positions.ndim != 3:
            return super().__repr__()
        chains, kept, d = self.positions.shape
        fine = np.asarray(self.positions)[~np.asarray(self.diverged)].reshape(-1, d)
        notes = ""
        if fine.size and d <= 4:
            moments = zip(fine.mean(0), fine.std(0), strict=True)
            notes = f"mean {', '.join(f'{mean:.3g} (spread {spread:.2g})' for mean, spread in moments)}, "
        trusted = f"{100 * np.mean(np.asarray(self.trusted)):.3g} % trusted"
        return (
            f"Chain({chains} chains × {kept} kept × d = {d}: {notes}{trusted}, {int(np.sum(self.diverged))} diverged)"
        )


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
    update: str | optax.GradientTransformation = "leimkuhler-matthews",
    progress: bool = False,
    checkpoint: str | os.PathLike | Checkpoint | None = None,
) -> Chain:
    """Chains α ← α − η Ĝ(α) + sqrt(2η/β) n on a gradient field Ĝ ≈ ∇L; their law tends to exp(−βL).

    Without `progress` and `checkpoint` the run is one compiled call, and may itself be under `jit`.
    A chain that becomes non-finite is marked in `Chain.diverged`, with a warning; the others are unharmed.

    Args:
        key: the noise of step k depends on `key` and k alone, so a run cut anywhere gives the same numbers.
        field: `field(alpha, *, key) -> Estimate`. Each step has one key, the same for all chains: a field
            that observes fresh episodes shares each batch among them.
        initial: starting points, shape (chains, d). The chain keeps its dtype.
        num_steps: steps of each chain, burn-in included.
        step_size: η, a number or an optax schedule of the step's number.
        inverse_temperature: β.
        burn_in: the first steps, of which nothing is kept.
        thinning: every so many steps one position is kept, (num_steps − burn_in)//thinning in all, the first of
            them after burn_in + thinning steps; nothing else is stored.
        update: how n is drawn, "leimkuhler-matthews" or "euler" as in `langevin`; or an optax transformation that
            makes the whole move, and takes the place of `step_size` and `inverse_temperature` too. Each chain has
            a state of its own, with the chain's number folded into every random key in it.
        progress: show a bar on stderr. A bar that fails is dropped, and the run goes on.
        checkpoint: a file from which the same call continues when it is interrupted, or a `Checkpoint`, which also
            says after how many steps to write it. A write stores all that is kept so far: chains·kept·(3d + 2)
            numbers.

    Returns:
        The kept positions as a `Chain`.

    Raises:
        ValueError: if an argument is out of its range, `field` does not return an `Estimate` of the right shape,
            `progress` or `checkpoint` is asked for under `jit` or `vmap`, or the checkpoint is damaged or of another
            run.

    Example:
        ```python
        import jax
        import jax.numpy as jnp
        import malliavin_jax as mj

        loss = mj.potentials.Quartic()
        learner = mj.ForwardLearner(loss, mj.initial.Normal(), step_size=0.01, gradient_noise=0.5)
        samples = mj.observe(jax.random.key(0), learner, num_episodes=2000, times=[0.4, 0.8])
        field = mj.MalliavinField(samples)
        chain = mj.passive_langevin(
            jax.random.key(1), field, jnp.zeros((8, 1)), num_steps=100, burn_in=20, step_size=0.05,
            inverse_temperature=1.0,
        )
        chain.positions.shape  # (8, 80, 1)
        ```
    """
    check_key("key", key)
    check_field(field)
    x = _starting_points(initial)
    schedule = _schedule(num_steps, burn_in, thinning)
    saved = as_checkpoint(checkpoint)
    if isinstance(update, optax.GradientTransformation):
        if step_size is not None or inverse_temperature is not None:
            raise ValueError(
                "step_size and inverse_temperature must be left out when update is an optax transformation"
            )
        eta = beta = method = None
        optimizer = update
    elif update not in METHODS:
        raise ValueError(f"update must be one of {', '.join(METHODS)} or an optax transformation, got {update!r}")
    else:
        check_rule(step_size, inverse_temperature)
        eta = _step_sizes(step_size, schedule.num_evaluations, x.dtype)
        beta, method, optimizer = jnp.asarray(inverse_temperature, x.dtype), update, None
    noise_key, field_key = jax.random.split(key)
    dynamics = Dynamics(
        field=field,
        noise_key=noise_key,
        field_key=field_key,
        step_size=eta,
        inverse_temperature=beta,
        method=method,
        optimizer=optimizer,
    )
    state = dynamics.start(x)
    if not progress and saved is None:
        return _chain(run_at_once(dynamics, state, schedule))
    if not is_concrete(dynamics, state):
        raise ValueError("progress and checkpoint need values: leave them out under jit or vmap")
    return _chain(run_in_legs(dynamics, state, schedule, progress=progress, checkpoint=saved))


def _starting_points(initial: Any) -> Float[Array, "chains d"]:
    x = float_array("initial", initial)
    check_shape("initial", x, (None, None), "chains d", "one row for each chain, as jnp.zeros((chains, d))")
    if 0 in x.shape:
        raise ValueError(f"initial must hold at least one chain in at least one dimension, got {x.shape}")
    if is_concrete(x) and not np.all(np.isfinite(x)):
        bad = int(np.argmin(np.isfinite(x).all(1)))
        raise ValueError(f"initial must be finite, got {np.asarray(x)[bad]} for chain {bad}")
    return x


def _schedule(num_steps: int, burn_in: int, thinning: int) -> Schedule:
    num_steps, burn_in = check_count("num_steps", num_steps), check_count("burn_in", burn_in, 0)
    thinning = check_count("thinning", thinning)
    if burn_in >= num_steps:
        raise ValueError(f"burn_in must be less than num_steps={num_steps}, got {burn_in}")
    if thinning > num_steps - burn_in:
        raise ValueError(f"thinning must be at most num_steps − burn_in = {num_steps - burn_in}, got {thinning}")
    return Schedule(burn_in=burn_in, thinning=thinning, num_kept=(num_steps - burn_in) // thinning)


def _step_sizes(step_size: Any, num_steps: int, dtype: Any) -> Float[Array, "..."]:
    """η as one number, or, of a schedule, one for each step."""
    schedule = jax.vmap(lambda k: jnp.asarray(step_size(k), dtype))
    eta = schedule(jnp.arange(num_steps)) if callable(step_size) else jnp.asarray(step_size, dtype)
    check_nonnegative("step_size", eta)
    return eta


def _chain(records: Record) -> Chain:
    records = jax.tree.map(jnp.asarray, records)
    finite = jnp.isfinite(records.positions).all(-1)
    diverged = ~finite.all(1)
    if is_concrete(diverged) and np.any(diverged):
        first = int(np.argmin(np.asarray(finite).all(0)))
        warnings.warn(
            f"{np.count_nonzero(diverged)} of {len(diverged)} chains became non-finite, the first by kept "
            f"position {first}; Chain.diverged marks them. A smaller step_size is the usual cure",
            RuntimeWarning,
            stacklevel=3,
        )
    return Chain(**records._asdict(), diverged=diverged)
