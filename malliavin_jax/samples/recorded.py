"""Samples of recorded episodes: checked, completed by a model where something was not recorded, and weighed."""

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from .._base.checks import (
    check_count,
    check_positive,
    check_shape,
    float_array,
    floats_to_arrays,
    is_concrete,
    steps_at,
)
from ..learner.learner import Path
from ..weights.scheme import Scheme, check_fine_enough, weigh
from .axes import check_axes, check_hessian_axes
from .completion import Completion, Filled, Log, Model, fill, make_completion
from .default_scheme import default_scheme
from .samples import EpisodeSamples, Samples, check_values


def samples_from_paths(
    x: Any,
    gradient: Any = None,
    hessian: Any = None,
    *,
    step_size: Any,
    times: Sequence[float] | Float[Any, " times"] | float | None = None,
    steps: Sequence[int] | Int[Any, " times"] | int | None = None,
    scheme: Scheme | None = None,
    inverse_temperature: Any = 1.0,
    last_steps: Any = None,
    model: Model = None,
) -> Samples:
    """Weigh recorded episodes.

    Row k of an episode is the state after k steps of size `step_size`, with the gradient and Hessian that the learner
    used there; row 0 is the start. What was not recorded comes from a model of the loss, a spline fitted to all points
    of all paths in up to three dimensions, that of the other half of the episodes for each; `samples.rung` says what
    was observed. Each rung costs accuracy (the guide has a table).

    Args:
        x: positions, of shape (episodes, points, d).
        gradient: gradients, of the same shape; None where only positions were recorded: the moves serve, gradients
            with noise of variance 2/(βε).
        hessian: Hessians, of shape (episodes, points, d, d); or their diagonals, of shape (episodes, points, d), which
            the model completes; or None.
        step_size: ε, one number; or one for each episode, where several learners were recorded; or a schedule,
            (points,) for all episodes or (episodes, points), whose entry k is the size of the step from row k (the last
            one is never used). With as many episodes as points, one dimension means episodes: write (1, points) for the
            schedule. A schedule must be settled beforehand, not follow the path.
        times: conditioning times, multiples of every step size, or times that every schedule meets; or `steps` in
            their place.
        steps: conditioning times as numbers of steps, the same for all episodes.
        scheme: the weight scheme. None takes `Adapted`, with which E[∂_i φ(X_s)] = E[φ(X_s) S_i] is exact whatever
            the loss, at the rates that suit the Hessians of the first 256 episodes.
        inverse_temperature: β, one number, or one for each episode.
        last_steps: the number of steps each episode really made, of shape (episodes,), if they differ: later rows are
            ignored, whatever they hold, and conditioning times past an episode's end are marked unobserved. What ends
            an episode must not depend on its path: integration by parts does not hold given an event of the noise
            (see `Recording`).
        model: a potential of yours to take what is missing from, in place of the spline; it should not have been
            fitted to these episodes. "spline" fits one even where nothing is missing: `MalliavinField` then has a model
            that has seen all points of the paths, and not only those at the conditioning times. (Samples with a model
            of their own are no arrays alone: `samples.bare` are, to be joined with others.)

    Returns:
        The `Samples` of all episodes at all times. Of positions alone the last row has no move, and is not observed.

    Raises:
        ValueError: if shapes, times or numbers do not fit; if a value that counts is not finite; if something is
            missing in more than three dimensions, and no model given; if the chain is too coarse for the scheme.

    Example:
        ```python
        import jax
        import malliavin_jax as mj

        loss = mj.potentials.Quartic()
        learner = mj.ForwardLearner(loss, mj.initial.Normal(), step_size=0.01, gradient_noise=0.5)
        paths = jax.jit(jax.vmap(lambda key: mj.simulate(key, learner, 80)))(jax.random.split(jax.random.key(0), 500))
        samples = mj.samples_from_paths(paths.x, paths.gradient, paths.hessian, step_size=0.01, times=[0.4, 0.8])
        samples.weight.shape  # (500, 2, 1)
        ```
    """
    x = float_array("x", x)
    gradient, hessian = (
        None if a is None else float_array(n, a) for n, a in (("gradient", gradient), ("hessian", hessian))
    )
    check_axes("x", x.shape)
    episodes, points, _ = x.shape
    if gradient is not None:
        check_axes("gradient", gradient.shape, x.shape)
    elif hessian is not None:
        raise ValueError("gradient must be given where hessian is")
    if hessian is not None:
        check_hessian_axes(hessian.shape, x.shape)
    beta = per_episode("inverse_temperature", inverse_temperature, episodes, x.dtype)
    last_steps = jnp.full(episodes, points - 1, jnp.int32) if last_steps is None else jnp.asarray(last_steps)
    check_shape("last_steps", last_steps, (episodes,), "episodes")
    if not jnp.issubdtype(last_steps.dtype, jnp.integer):
        raise ValueError(f"last_steps must be whole numbers of steps, got dtype {last_steps.dtype}")
    if is_concrete(last_steps) and not (0 <= np.min(last_steps) <= np.max(last_steps) < points):
        raise ValueError(
            f"last_steps must be between 0 and {points - 1} steps, got {np.min(last_steps)} to {np.max(last_steps)}"
        )
    step_size = per_step(step_size, episodes, points)
    if np.ndim(step_size) < 2:
        epsilon = per_episode("step_size", step_size, episodes, x.dtype)
    else:
        epsilon = jnp.asarray(step_size).astype(x.dtype)
        if is_concrete(step_size, last_steps):
            check_positive("step_size", np.asarray(step_size)[made_steps(last_steps, points)])
    stops = stops_of(times, steps, step_size, episodes, points, last_steps)
    seen = jnp.arange(points, dtype=last_steps.dtype)[None, :] <= last_steps[:, None]
    given = {"x": x, "gradient": gradient, "hessian": hessian}
    check_values({name: array for name, array in given.items() if array is not None}, seen, "step")
    log = Log(x, gradient, hessian, epsilon, last_steps.astype(jnp.int32))
    return weigh_log(log, beta, stops, scheme, make_completion(log, model))


def weigh_log(
    log: Log,
    inverse_temperature: Float[Array, " episodes"],
    stops: Int[Any, "episodes times"],
    scheme: Scheme | None,
    completion: Completion | None,
    first: int = 0,
) -> Samples:
    """The samples of a log that was checked, at the rows `stops`; its first episode is number `first` of a recording.

    With the default scheme for None; an error if the chain is too coarse for the scheme.
    """
    filled = fill(log, completion, first)
    paths = paths_of(log, filled, inverse_temperature)
    scheme = default_scheme(paths) if scheme is None else scheme
    samples = weigh_at(paths, scheme, stops, filled.gradient)
    check_fine_enough(samples.weight, samples.observed, scheme)
    return Samples(samples.x, samples.gradient, samples.hessian, samples.weight, samples.observed, completion)


def paths_of(log: Log, filled: Filled, inverse_temperature: Float[Array, " episodes"]) -> Path:
    """A log with nothing missing as a batch of paths."""
    return jax.vmap(Path)(
        log.x, filled.drift, filled.hessian, log.step_size, inverse_temperature, filled.last_steps.astype(jnp.int32)
    )


def weigh_at(
    paths: Path,
    scheme: Scheme,
    stops: Int[Any, "episodes times"],
    gradient: Float[Array, "episodes points d"] | None = None,
) -> Samples:
    """Weigh a batch of paths at the rows `stops` of each; neither the paths nor the weights are checked.

    `gradient` is what was observed, where it is not what the paths' noise is told by.
    """
    values = paths.gradient if gradient is None else gradient
    return _weigh_at(paths, values, floats_to_arrays(scheme, paths.x.dtype), jnp.asarray(stops))


@eqx.filter_jit
def _weigh_at(
    paths: Path, gradient: Float[Array, "episodes points d"], scheme: Scheme, stops: Int[Array, "episodes times"]
) -> Samples:
    """`weigh_at`, compiled."""

    def episode(path: Path, gradient: Float[Array, "points d"], at: Int[Array, " times"]) -> EpisodeSamples:
        row = jnp.minimum(at, path.num_steps)
        weight, observed = weigh(path, scheme)[row], at <= path.last_step
        return EpisodeSamples(path.x[row], gradient[row], path.hessian[row], weight, observed).masked()

    return Samples(*jax.vmap(episode)(paths, gradient, stops))


def per_episode(name: str, value: Any, episodes: int, dtype: Any) -> Float[Array, " episodes"]:
    """A positive number for each episode, from one number for all or from one each."""
    check_positive(name, value)
    if np.ndim(value) > 0:
        check_shape(name, value, (episodes,), "episodes")
    return jnp.broadcast_to(jnp.asarray(value, jax.dtypes.canonicalize_dtype(dtype)), (episodes,))


def per_step(step_size: Any, episodes: int, points: int) -> Any:
    """Step sizes as one number, (episodes,) or (episodes, points), from these or from one schedule for all episodes."""
    shape = np.shape(step_size)
    if shape in ((), (episodes,)):
        return step_size
    array = step_size if isinstance(step_size, jax.Array | np.ndarray) else np.asarray(step_size)
    array = array[None] if shape == (points,) else array
    if array.shape not in ((1, points), (episodes, points)):
        raise ValueError(
            f"step_size must be one number or have shape ({episodes},), one for each episode, or ({points},), "
            f"(1, {points}) or ({episodes}, {points}), one for each step, got shape {shape}"
        )
    return (jnp if isinstance(array, jax.Array) else np).broadcast_to(array, (episodes, points))


def made_steps(last_steps: Any, points: int) -> np.ndarray:
    """Whether row k of each episode was followed by a step, (episodes, points)."""
    return np.arange(points)[None, :] < np.asarray(last_steps)[:, None]


def stops_of(
    times: Any, steps: Any, step_size: Any, episodes: int, points: int, last_steps: Any = None
) -> Int[np.ndarray, "episodes times"]:
    """The rows at which each episode is conditioned, from `times` (multiples of every step size) or from `steps`.

    A schedule of step sizes is looked at up to `last_steps`, and must meet each time that it reaches. Learners with
    large steps reach a time in fewer of them. Rows past the recorded ones are left as they are, to be marked
    unobserved; a last time that no learner reaches is an error.
    """
    if (times is None) == (steps is None):
        raise ValueError(f"give either times or steps, got times={times!r} and steps={steps!r}")
    if times is None:
        listed = np.atleast_1d(np.asarray(steps))
        if listed.ndim != 1 or listed.size == 0:
            raise ValueError(f"steps must be a non-empty list of step numbers, got {steps!r}")
        rows = [check_count("steps", step) for step in listed.tolist()]
        if np.any(np.diff(rows) <= 0):
            raise ValueError(f"steps must be strictly increasing, got {rows}")
        if rows[-1] >= points:
            raise ValueError(f"steps must lie inside the recorded paths, of {points - 1} steps, got {rows[-1]}")
        return np.broadcast_to(np.asarray(rows, np.int32), (episodes, len(rows)))
    if not is_concrete(step_size):
        steps_at(times, step_size)  # says why not
    if np.ndim(step_size) == 2:
        ends = points - 1 if last_steps is None or not is_concrete(last_steps) else last_steps
        return _stops_on(np.asarray(step_size, float), times, ends)
    sizes, learner = np.unique(np.asarray(step_size), return_inverse=True)
    table = np.asarray([steps_at(times, size) for size in sizes], np.int32)
    if np.all(table[:, -1] >= points):
        first = int(np.argmin(table[:, -1]))
        ends, last = ((points - 1) * float(sizes[first]), table[first, -1] * float(sizes[first]))
        raise ValueError(f"times must lie inside the recorded paths, which end at {ends}, got {last}")
    return np.broadcast_to(table[learner.reshape(-1)], (episodes, table.shape[1]))


def _stops_on(sizes: np.ndarray, times: Any, last_steps: Any) -> Int[np.ndarray, "episodes times"]:
    """The rows at which schedules (episodes, points) meet `times`; one row too many where an episode ends before."""
    listed = np.atleast_1d(np.asarray(times, float))
    if (
        listed.ndim != 1
        or listed.size == 0
        or not np.all(np.isfinite(listed))
        or np.any(np.diff(listed, prepend=0) <= 0)
    ):
        raise ValueError(f"times must be a list of strictly increasing, positive times, got {times!r}")
    episodes, points = sizes.shape
    made = made_steps(np.broadcast_to(last_steps, (episodes,)), points)
    off = np.where(made, 1e-3 * sizes, 0)  # a time may be off by a thousandth of a step, as in `steps_at`
    elapsed = np.cumsum(np.where(made, sizes, np.inf), axis=1)  # after the step from each row; no time is past the end
    stops = np.full((episodes, len(listed)), points, np.int32)
    for column, time in enumerate(listed):
        row = np.argmax(elapsed > time - off, axis=1)
        reached = elapsed[np.arange(episodes), row]
        there = np.isfinite(reached)
        wrong = there & (reached > time + off[np.arange(episodes), row])
        if np.any(wrong):
            first = int(np.argmax(wrong))
            raise ValueError(
                f"times must be met by every schedule of step sizes: episode {first} goes from "
                f"{reached[first] - sizes[first, row[first]]:.6g} to {reached[first]:.6g} in one step, past {time}; "
                "condition at steps= in place of times="
            )
        stops[there, column] = row[there] + 1
    if np.all(stops[:, -1] == points):
        ends = np.max(np.where(made, elapsed, 0))
        raise ValueError(f"times must lie inside the recorded paths, which end at {ends:.6g}, got {listed[-1]}")
    return stops
