"""Observed points with their Malliavin weights: the hub that the estimators consume."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from ._misc import is_concrete


class Samples(eqx.Module):
    """What is known at each conditioning time of each episode.

    - `x`: position X_s.
    - `gradient`: the gradient the learner used there, g(X_s) (noisy or not).
    - `hessian`: the Hessian it observed there.
    - `weight`: S(u), the Skorohod integral; E[∂_i φ(X_s)] = E[φ(X_s) S_i] for smooth φ.
    - `observed`: False where the episode had stopped before that time; the other arrays hold NaN there.

    The leading axes are (episodes, times). Points of one episode are dependent, episodes are not.
    """

    x: Float[Array, "episodes times d"]
    gradient: Float[Array, "episodes times d"]
    hessian: Float[Array, "episodes times d d"]
    weight: Float[Array, "episodes times d"]
    observed: Bool[Array, "episodes times"]

    def __check_init__(self):
        if not hasattr(self.x, "ndim") or self.x.ndim != 3:
            return  # a PyTree of something else (specs, shardings): shapes are not ours to judge
        shape, d = self.x.shape, self.x.shape[-1]
        for name, expected in (
            ("gradient", shape), ("hessian", (*shape, d)), ("weight", shape), ("observed", shape[:2])
        ):  # fmt: skip
            got = jnp.shape(getattr(self, name))
            if got != expected:
                raise ValueError(f"{name} must have shape {expected} to go with x of {shape}, got {got}")

    @property
    def num_episodes(self) -> int:
        return self.x.shape[0]

    @property
    def num_times(self) -> int:
        return self.x.shape[1]

    @property
    def dim(self) -> int:
        return self.x.shape[2]


def check_samples(samples: Samples, *, at_least: int = 2) -> None:
    """Refuse samples that no estimator can use: too few episodes, or non-finite observed values."""
    if samples.num_episodes < at_least:
        raise ValueError(f"samples must hold at least {at_least} episodes, got {samples.num_episodes}")
    if not is_concrete(samples):
        return
    observed = np.asarray(samples.observed)
    for name in ("x", "gradient", "hessian", "weight"):
        values = np.asarray(getattr(samples, name))
        finite = np.isfinite(values).reshape(*observed.shape, -1).all(-1)
        bad = np.argwhere(observed & ~finite)
        if bad.size:
            episode, time = bad[0]
            raise ValueError(
                f"samples.{name} must be finite where observed; first bad value at episode {episode}, "
                f"time {time} ({len(bad)} in all)"
            )
    if np.count_nonzero(observed.any(1)) < at_least:
        raise ValueError(f"samples must hold at least {at_least} episodes with an observed point")
