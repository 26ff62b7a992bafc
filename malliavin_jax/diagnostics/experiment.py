"""At what rate does an error shrink? Repeated runs at several settings, and the slope of their errors."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from .._base.checks import check_count, check_positive
from .._base.types import Key


class Convergence(NamedTuple):
    """Errors at several settings and the rate at which they shrink: what `convergence_experiment` returns.

    Attributes:
        value: the settings.
        error: root mean square error over the repeats, one for each setting.
        stderr: standard errors of `error`.
        slope: of log error against log value, by least squares.
        slope_stderr: standard error of `slope`.

    Example:
        ```python
        import jax
        import jax.numpy as jnp
        import malliavin_jax as mj

        def error_of_a_mean(key, n):
            return abs(jnp.mean(jax.random.normal(key, (n,))))

        rates = mj.diagnostics.convergence_experiment(jax.random.key(0), error_of_a_mean, [100, 1000])
        rates.slope, rates.slope_stderr
        ```
    """

    value: np.ndarray
    error: np.ndarray
    stderr: np.ndarray
    slope: float
    slope_stderr: float


def convergence_experiment(
    key: Key, error: Callable[[Key, Any], Any], values: Sequence[Any], *, repeats: int = 4
) -> Convergence:
    """How an error shrinks with a setting: the sample size N, the step size η, the number of steps k, …

    Args:
        key: split into one key for each run.
        error: `error(key, value)` runs the whole thing at one value of the setting and returns a non-negative error.
        values: the settings, at least two, all positive.
        repeats: number of runs at each setting, at least two.

    Returns:
        A `Convergence`: root mean square errors with their standard errors, and the slope in log-log coordinates.

    Raises:
        ValueError: if there are fewer than two values or repeats, or a value is not positive.

    Example:
        ```python
        import jax
        import jax.numpy as jnp
        import malliavin_jax as mj

        def error_of_a_mean(key, n):
            return abs(jnp.mean(jax.random.normal(key, (n,))))

        rates = mj.diagnostics.convergence_experiment(jax.random.key(0), error_of_a_mean, [100, 1000], repeats=16)
        rates.slope  # about -1/2
        ```
    """
    check_count("repeats", repeats, at_least=2)
    if len(values) < 2:
        raise ValueError(f"values must hold at least 2 settings, got {len(values)}")
    check_positive("values", np.asarray(values, float))
    keys = jax.random.split(key, (len(values), repeats))
    runs = np.array([[float(error(k, v)) for k in row] for v, row in zip(values, keys, strict=True)])
    size = np.sqrt(np.mean(runs**2, 1))
    stderr = np.std(runs**2, axis=1, ddof=1) / (2 * size * math.sqrt(repeats))
    x = np.log(np.asarray(values, float))
    lever = (x - x.mean()) / np.sum((x - x.mean()) ** 2)
    return Convergence(
        value=np.asarray(values),
        error=size,
        stderr=stderr,
        slope=float(lever @ np.log(size)),
        slope_stderr=float(np.sqrt(np.sum((lever * stderr / size) ** 2))),
    )
