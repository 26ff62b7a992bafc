"""An estimate with its error bars, as a ratio of localized sums."""

import math
from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import erfinv
from jaxtyping import Array, Bool, Float

from .._base.checks import has_numbers, plus_minus
from .._base.host import module_of
from .._base.types import Flag, Numbers, Scalar
from .sums import Sums

TRUSTED_FROM = 3.0  # a density this many standard errors above zero carries an estimate
EPISODES_FROM = 5.0  # and no fewer episodes of equal weight than this


class Estimate(eqx.Module):
    """An estimate at one point α, with its error bars.

    `jax.vmap(field)(alphas)`, `jax.lax.map(field, alphas)` and an `Accumulator` return estimates at many α in one such
    object: every array then has the axes of the α in front, `value` and `stderr` of shape (α, m), the others (α,).

    Attributes:
        value: the conditional expectation E[ℓ | X_s = α], one entry per component of ℓ.
        stderr: its standard error, in the units of `value`.
        density: the estimated density p̂_s(α), in 1/(units of x)^d, averaged over the conditioning times.
        density_stderr: its standard error.
        trusted: False where the data cannot carry the estimate (α outside the observed region, or a density
            not significantly positive).

    Example:
        ```python
        import jax
        import jax.numpy as jnp
        import malliavin_jax as mj

        field = mj.TrueField(mj.potentials.Quartic())
        estimates = jax.vmap(field)(jnp.linspace(-1.0, 1.0, 9)[:, None])  # at nine α at once
        low, high = estimates.interval(0.95)  # each (9, 1)
        ```
    """

    value: Float[Array, " m"]
    stderr: Float[Array, " m"]
    density: Scalar
    density_stderr: Scalar
    trusted: Flag

    def interval(self, level: float = 0.95) -> tuple[Float[Array, "*alphas m"], Float[Array, "*alphas m"]]:
        """The ends of an interval, value ± z·stderr, that covers the truth with probability `level`.

        Args:
            level: strictly between 0 and 1.

        Returns:
            The lower and the upper ends, each of the shape of `value`; infinite where `stderr` is.

        Raises:
            ValueError: if `level` is not between 0 and 1.
        """
        if not 0 < level < 1:
            raise ValueError(f"level must be between 0 and 1, got {level}")
        reach = math.sqrt(2) * erfinv(jnp.asarray(level, self.stderr.dtype)) * self.stderr
        return self.value - reach, self.value + reach

    def to_pandas(self, alphas: Any = None) -> Any:
        """A `pandas.DataFrame`, one row an α.

        Args:
            alphas: the places of the estimates, (α, d), to stand in front as `alpha`; None leaves them out.

        Returns:
            Columns `value`, `stderr` (`value_0`, `value_1`, … where there are several components), `density`,
            `density_stderr` and `trusted`.

        Raises:
            ImportError: if pandas is not installed.
            ValueError: if the number of `alphas` is not that of the estimates.
        """
        try:
            import pandas  # type: ignore[import-untyped]
        except ImportError as error:
            raise ImportError("to_pandas needs pandas, which is not installed: pip install pandas") from error
        rows = np.size(self.density)
        columns = {"value": self.value, "stderr": self.stderr}
        if alphas is not None:
            columns = {"alpha": alphas, **columns}
        table: dict[str, np.ndarray] = {}
        for name, column in columns.items():
            flat = np.asarray(column)
            if flat.size % rows or flat.size == 0:
                raise ValueError(f"alphas must be {rows}, as many as the estimates, got shape {flat.shape}")
            flat = flat.reshape(rows, -1)
            number = flat.shape[1]
            table |= {name if number == 1 else f"{name}_{i}": flat[:, i] for i in range(number)}
        scalars = {"density": self.density, "density_stderr": self.density_stderr, "trusted": self.trusted}
        return pandas.DataFrame(table | {name: np.asarray(scalar).reshape(rows) for name, scalar in scalars.items()})

    def __repr__(self) -> str:
        if not has_numbers(self):
            return super().__repr__()
        value, stderr, trusted = (np.asarray(leaf) for leaf in (self.value, self.stderr, self.trusted))
        if np.ndim(self.density) == 0 and value.size <= 8:
            entries = [plus_minus(v, e) for v, e in zip(value.reshape(-1), stderr.reshape(-1), strict=True)]
            shown = entries[0] if len(entries) == 1 else f"[{', '.join(entries)}]"
            density = f"density {plus_minus(self.density, self.density_stderr)}"
            return f"Estimate({shown}, {density}, {'trusted' if trusted else 'not trusted'})"
        finite, errors = value[np.isfinite(value)], stderr[np.isfinite(stderr)]
        span = f"value from {finite.min():.4g} to {finite.max():.4g}" if finite.size else "no finite value"
        typical = f", median stderr {np.median(errors):.2g}" if errors.size else ""
        return (
            f"Estimate({' × '.join(map(str, value.shape))}: {span}{typical}, {trusted.sum()} of {trusted.size} trusted)"
        )


def ratio_with_error(sums: Sums, scale: Float[Numbers, ""] | float = 0.0) -> tuple[Numbers, Numbers]:
    """n/w with its standard errors; `scale` is the size of the values averaged, below whose rounding no error is."""
    xp = module_of(sums.w)
    limits = xp.finfo(sums.w.dtype)
    empty = xp.abs(sums.w) <= limits.tiny  # nothing to divide by; a NaN is not empty, and stays one
    safe = xp.where(empty, 1, sums.w)
    value = xp.where(empty, 0, sums.n / safe)
    variance = xp.maximum(sums.shifted(-value).nn, 0)  # Σ (n − ρ w)²
    # Of the values as they were computed: those of a model of many terms are right to some units of rounding.
    rounding = 16 * limits.eps * (xp.abs(value) + scale)
    return value, xp.where(empty, xp.inf, xp.sqrt(variance / safe**2 + rounding**2))


class Ratios(NamedTuple):
    """What an `Estimate` holds, of one place or of many; places come last, behind the entries of value and stderr."""

    value: Float[Numbers, "m *places"]
    stderr: Float[Numbers, "m *places"]
    density: Float[Numbers, "*places"]
    density_stderr: Float[Numbers, "*places"]
    trusted: Bool[Numbers, "*places"]


def ratio_estimate(
    sums: Sums, episodes: Array | int, points: Array | int, inside: Flag, scale: Scalar | float = 0.0
) -> Estimate:
    """The ratio as an estimate, `points` being the number of observed points in all `episodes`."""
    return Estimate(*ratios(sums, episodes, points, inside, scale))


def ratios(sums: Sums, episodes: Any, points: Any, inside: Any, scale: Any = 0.0) -> Ratios:
    """The same at as many places as the sums are for."""
    xp = module_of(sums.w)
    value, stderr = ratio_with_error(sums, scale)
    points = xp.asarray(points, sums.w.dtype)
    density = sums.w / points
    spread = xp.maximum(sums.ww - sums.w**2 / episodes, 0)
    density_stderr = xp.sqrt(spread) / points
    # Of very few episodes the spread may be 0 by chance, and says nothing: so many must carry the estimate.
    enough = sums.w**2 >= EPISODES_FROM * sums.ww
    trusted = inside & enough & (density > TRUSTED_FROM * density_stderr)
    return Ratios(value, stderr, density, density_stderr, trusted)
