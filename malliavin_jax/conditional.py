"""Conditional expectations on events of probability zero, with standard errors."""

import equinox as eqx

from ._types import Flag, Scalar, Vector


class Estimate(eqx.Module):
    """An estimate at one point α, with its error bars.

    - `value`: the conditional expectation E[ℓ | X_s = α], one entry per component of ℓ.
    - `stderr`: its standard error, in the units of `value`.
    - `density`: the estimated density p̂_s(α), in 1/(units of x)^d.
    - `density_stderr`: its standard error.
    - `trusted`: False where the data cannot carry the estimate (α outside the observed region, or a density
      not significantly positive); `value` is then an extrapolation and `stderr` is infinite.
    """

    value: Vector
    stderr: Vector
    density: Scalar
    density_stderr: Scalar
    trusted: Flag
