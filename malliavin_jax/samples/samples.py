"""The hub between simulation and estimation, and what every estimator asks of it."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from .._base.checks import described, has_numbers, is_traced
from .._base.mesh import array_module
from .completion import Completion, Rung


class Samples(eqx.Module):
    """What is known at each conditioning time of each episode.

    The leading axes are (episodes, times). Points of one episode are dependent, episodes are not.

    Attributes:
        x: position X_s, of shape (episodes, times, d).
        gradient: the gradient the learner used there, g(X_s) (noisy or not), of shape (episodes, times, d).
        hessian: the Hessian it observed there, of shape (episodes, times, d, d); None where only its products with
            vectors were observed. `MalliavinField` and all that is made of it need Hessians; `density`, `score`,
            the kernel fields and `conditional_expectation` do not.
        weight: S(u), the Skorohod integral, of shape (episodes, times, d); E[∂_i φ(X_s)] = E[φ(X_s) S_i] for
            smooth φ.
        observed: False where the episode had stopped before that time, of shape (episodes, times); the other arrays
            hold NaN there.
        completion: what stands in for what was not observed (see `samples_from_paths`), None where nothing was
            missing; `rung` says what was observed.

    Raises:
        ValueError: if the shapes do not go together.

    Example:
        ```python
        import jax
        import malliavin_jax as mj

        loss = mj.potentials.Quartic()
        learner = mj.ForwardLearner(loss, mj.initial.Normal(), step_size=0.01, gradient_noise=0.5)
        samples = mj.observe(jax.random.key(0), learner, num_episodes=2000, times=[0.4, 0.8])
        samples.num_episodes, samples.num_times, samples.dim  # 2000, 2, 1
        first_half = samples[:1000]  # fewer episodes
        ```
    """

    x: Float[Array, "episodes times d"]
    gradient: Float[Array, "episodes times d"]
    hessian: Float[Array, "episodes times d d"] | None
    weight: Float[Array, "episodes times d"]
    observed: Bool[Array, "episodes times"]
    completion: Completion | None = eqx.field(static=True, default=None)

    def __check_init__(self):
        if not hasattr(self.x, "ndim") or self.x.ndim != 3:
            return  # a PyTree of something else (specs, shardings): shapes are not ours to judge
        shape, d = self.x.shape, self.x.shape[-1]
        expected = {"gradient": shape, "weight": shape, "observed": shape[:2]}
        if self.hessian is not None:
            expected["hessian"] = (*shape, d)
        for name, wanted in expected.items():
            got = jnp.shape(getattr(self, name))
            if got != wanted:
                axes = ("episodes, times", "episodes, times, d", "episodes, times, d, d")[len(wanted) - 2]
                raise ValueError(f"{name} must have shape {wanted}, ({axes}), to go with x of {shape}, got {got}")

    def require_hessian(self, who: str) -> Float[Array, "episodes times d d"]:
        """The Hessians, or a clear error where `who` needs them and they were not observed."""
        if self.hessian is None:
            raise ValueError(
                f"{who} needs Hessians, and samples.hessian is None: observe a potential with a Hessian, "
                "or use what needs none (density, score, kernel fields, conditional_expectation)"
            )
        return self.hessian

    def __getitem__(self, episodes: Any) -> "Samples":
        """Some episodes: `samples[:100]`, `samples[[0, 5]]`, `samples[mask]`; `samples[3]` is the fourth alone."""
        if self.completion is not None and self.rung != "hessians":
            raise ValueError(
                f"samples of {self.rung} cannot be split: what was not observed comes from a model of all their "
                "episodes; make samples of the episodes wanted, recording by recording"
            )
        if isinstance(episodes, str):
            raise ValueError(
                f"samples[…] takes episodes, got {episodes!r}: the arrays are samples.x, samples.gradient, …"
            )
        if isinstance(episodes, tuple):
            raise ValueError(f"samples[…] takes episodes alone, got {len(episodes)} indices; index samples.x for times")
        if isinstance(episodes, int | np.integer):
            if not -self.num_episodes <= episodes < self.num_episodes:  # also what ends a loop over samples
                raise IndexError(f"samples hold {self.num_episodes} episodes, got index {episodes}")
            first = int(episodes) % self.num_episodes
            episodes = slice(first, first + 1)
        index = episodes if isinstance(episodes, slice) else jnp.asarray(episodes)
        return jax.tree.map(lambda leaf: leaf[index], self.bare)

    def __repr__(self) -> str:
        if not has_numbers(self) or self.x.ndim != 3:
            return super().__repr__()
        seen = int(np.sum(np.asarray(self.observed)))
        share = "" if seen == self.observed.size else f", {seen} of {self.observed.size} points observed"
        what = {"hessians": "no Hessians" if self.hessian is None else "gradients and Hessians observed"}
        kind = what.get(self.rung, f"from {self.rung} alone")
        shape = f"{self.num_episodes} episodes × {self.num_times} times × d = {self.dim}"
        return f"Samples({shape}{share}, {kind}, {self.x.dtype})"

    @property
    def rung(self) -> Rung:
        """What was observed: "hessians" (all), "diagonals" of Hessians, "gradients" or "positions" alone."""
        return "hessians" if self.completion is None else self.completion.rung

    @property
    def bare(self) -> "Samples":
        """The arrays alone: programs compiled for them serve other samples as well."""
        return Samples(self.x, self.gradient, self.hessian, self.weight, self.observed)

    @property
    def num_episodes(self) -> int:
        """The number of episodes, whether observed to the end or not."""
        return self.x.shape[0]

    @property
    def num_times(self) -> int:
        """The number of conditioning times."""
        return self.x.shape[1]

    @property
    def dim(self) -> int:
        """The dimension d of the learner's state."""
        return self.x.shape[2]


class EpisodeSamples(NamedTuple):
    """What `Samples` holds of one episode, in the same order."""

    x: Float[Array, "times d"]
    gradient: Float[Array, "times d"]
    hessian: Float[Array, "times d d"] | None
    weight: Float[Array, "times d"]
    observed: Bool[Array, " times"]

    def masked(self) -> "EpisodeSamples":
        """The same with NaN where the episode had stopped."""

        def mask(leaf: Array) -> Array:
            return jnp.where(self.observed.reshape(-1, *(1,) * (leaf.ndim - 1)), leaf, jnp.nan)

        hessian = None if self.hessian is None else mask(self.hessian)
        return EpisodeSamples(mask(self.x), mask(self.gradient), hessian, mask(self.weight), self.observed)


def in_blocks(samples: Samples, size: int) -> Samples:
    """The same points, with `size` consecutive episodes, which may depend on each other, as one; the last is filled up.

    Standard errors are made of the sums of episodes: of those of blocks, they take all dependence within into account.
    """
    if size == 1:
        return samples

    def block(leaf: Array) -> Array:
        filling = [(0, -leaf.shape[0] % size)] + [(0, 0)] * (leaf.ndim - 1)
        full = jnp.pad(leaf, filling, constant_values=False if leaf.dtype == bool else jnp.nan)
        return full.reshape(-1, size * leaf.shape[1], *leaf.shape[2:])

    return jax.tree.map(block, samples)


def check_values(arrays: dict[str, Array], where: Array, axis: str) -> None:
    """Name the first value that is not finite among those that count."""
    if is_traced(arrays, where):
        return
    xp = array_module(arrays, where)
    counts = xp.asarray(where)
    for name, array in arrays.items():
        bad = counts & ~xp.isfinite(xp.asarray(array)).reshape(*counts.shape, -1).all(-1)
        number = int(xp.count_nonzero(bad))
        if number:
            first = xp.unravel_index(xp.argmax(bad), bad.shape)
            raise ValueError(
                f"{name} must be finite where observed; first bad value at episode {first[0]}, {axis} {first[1]} "
                f"({number} in all)"
            )


def not_samples(samples: Any, also: str = "") -> ValueError:
    """The error about a recording, a path or an array in place of samples: how to make samples of it."""
    remedy = "make them with observe, Recording(…).samples() or samples_from_paths"
    if callable(getattr(samples, "samples", None)):  # a recording, which stands below this room
        remedy = "recording.samples() makes them"
    elif hasattr(samples, "last_step"):  # a path, or a batch of paths
        remedy = "samples_from_paths(paths.x, paths.gradient, paths.hessian, step_size=…, times=…) makes them"
    return ValueError(f"samples must be Samples{also}, got {described(samples)}: {remedy}")


def check_samples(samples: Samples, *, at_least: int = 2) -> None:
    """Refuse what are no samples, and those no estimator can use: too few episodes, or non-finite observed values."""
    if not isinstance(samples, Samples):
        raise not_samples(samples)
    if samples.num_episodes < at_least:
        raise ValueError(f"samples must hold at least {at_least} episodes, got {samples.num_episodes}")
    check_finite(samples)
    if not is_traced(samples.observed):
        xp = array_module(samples.observed)
        seen = int(xp.count_nonzero(xp.asarray(samples.observed).any(1)))
        if seen < at_least:
            raise ValueError(f"samples must hold at least {at_least} episodes with an observed point, got {seen}")


def check_finite(samples: Samples) -> None:
    """Refuse samples with an observed value that is not finite."""
    arrays = {n: getattr(samples, n) for n in ("x", "gradient", "hessian", "weight")}
    check_values({f"samples.{n}": a for n, a in arrays.items() if a is not None}, samples.observed, "time")
