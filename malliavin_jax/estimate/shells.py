"""Gauss's law for Gaussian kernels: the mass within a radius r, divided by r^d.

The field of a radial kernel at distance r is its mass within r spread over the sphere of that radius. For a Gaussian of
width a in d dimensions that mass is P(χ²_d ≤ r²/a²), and with t = r²/2a² it is P(χ²_d ≤ 2t).
"""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float
from scipy.special import erf

from .._base.host import module_of
from .._base.types import Numbers, Scalar


class Shell(NamedTuple):
    """`factor` times a Gaussian kernel of width a, at many points at once."""

    factor: float
    rate: Scalar  # 1/2a²
    exponent: Array  # t = rate·r²
    decay: Array  # e^{−t}


def mass_of_shells(shells: Sequence[Shell], square: Numbers, d: int) -> Numbers:
    """Σ_i factor_i P(χ²_d ≤ 2t_i) / r^d for factors that add up to 0.

    With a = d/2, P(χ²_d ≤ 2t) = P_0 − e^{−t} Σ_j t^j/Γ(j+1) over j = a−1, a−2, … ≥ 0 and P_0 = 1 or erf(√t) as d is
    even or odd: the 1 drops out of the sum. Where every t is small these cancel, and the series of the same function
    serves, P = t^a e^{−t} Σ_j t^j/Γ(a+j+1), all of whose terms are positive.
    """
    xp, a = module_of(square), d / 2
    small = max(0.25, a - 1)
    largest = functools.reduce(xp.maximum, (shell.exponent for shell in shells))
    is_near = largest < small
    coefficients = _series(a, small, float(xp.finfo(square.dtype).eps))
    near = far = xp.zeros_like(square)
    for factor, rate, t, decay in shells:
        safe = xp.where(is_near, t, 0)
        series = xp.zeros_like(t)
        for coefficient in reversed(coefficients):
            series = series * safe + coefficient
        near = near + factor * rate**a * decay * series
        beyond = xp.where(is_near, 1, t)  # where it is not used, a value with finite derivatives
        tail, power = xp.zeros_like(t), a - 1
        while power >= 0:
            tail = tail + (beyond**power if power != int(power) else beyond ** int(power)) / math.gamma(power + 1)
            power -= 1
        rest = -decay * tail
        far = far + factor * (rest if d % 2 == 0 else _erf(xp.sqrt(beyond)) + rest)
    away = xp.where(is_near, 1, square)
    return xp.where(is_near, near, far / (away ** (d // 2) * (1 if d % 2 == 0 else xp.sqrt(away))))


def mass_in_the_plane(
    square: Numbers, inner: Float[Numbers, ""], wide: Float[Numbers, ""], decay: Numbers, decay_wide: Numbers
) -> Numbers:
    """`mass_of_shells` in the plane, for the three Gaussians of the localizer `Gaussian`.

    There P(χ²_2 ≤ 2t) = 1 − e^{−t}, and the sum is [e^{−t} + e^{−t_wide} − 2e^{−2t}]/r².
    The three series are one in z = r²·(largest rate), which serves where z is small and the exponentials cancel.
    """
    xp, small = module_of(square), 0.1
    rate = xp.maximum(2 * inner, wide)
    ratios = ((1, inner / rate), (1, wide / rate), (-2, 2 * inner / rate))
    near = xp.minimum(rate * square, small)  # each branch, where it is not used, at a value with finite derivatives
    series = xp.zeros_like(square)
    for j, coefficient in reversed(list(enumerate(_series(1.0, small, float(xp.finfo(square.dtype).eps))))):
        mixed = functools.reduce(xp.add, [factor * ratio ** (j + 1) for factor, ratio in ratios])
        series = series * near + (-1) ** (j + 1) * coefficient * mixed
    far = (decay_wide + decay * (1 - 2 * decay)) / xp.maximum(square, small / rate)
    return xp.where(rate * square < small, rate * series, far)


def _erf(x: Numbers) -> Numbers:
    return erf(x) if module_of(x) is np else jax.lax.erf(x)


def _series(a: float, small: float, tolerance: float) -> list[float]:
    """1/Γ(a+j+1) for j = 0, 1, … until the terms at t = `small` are below rounding."""
    coefficients = []
    while not coefficients or small ** len(coefficients) * coefficients[-1] > tolerance * coefficients[0] / 4:
        coefficients.append(1 / math.gamma(a + len(coefficients) + 1))
    return coefficients
