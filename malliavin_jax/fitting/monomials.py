"""Monomials and their derivatives: arrays in, arrays out.

A derivative of a monomial is a multiple of a lower one, ∂^δ z^e = (e!/(e−δ)!) z^{e−δ}. So the derivatives of
Σ_t θ_t z^{e_t} are all linear in one short vector φ(z) of monomials, and the normal equations of a fit to
them are linear in the one matrix Σ_n φ(z_n) φ(z_n)ᵀ: no design matrix is ever formed.
"""

import functools
import itertools
import math
import operator
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .._base.checks import check_count
from .._base.host import module_of
from .._base.small_tensors import HIGHEST
from .._base.types import Numbers

Exponents = tuple[tuple[int, ...], ...]

# Accelerators multiply float32 matrices in fewer bits unless told otherwise; the normal equations need all.


def num_terms(d: int, degree: int) -> int:
    """Number of monomials in d variables of degree 1 to `degree`: (d + degree choose d) − 1.

    Args:
        d: number of variables.
        degree: largest total degree.

    Returns:
        How many coefficients a `Polynomial` of this degree has.

    Example:
        ```python
        import malliavin_jax as mj

        mj.potentials.num_terms(2, 2)  # 5: x, y, x², xy, y²
        ```
    """
    return math.comb(d + degree, d) - 1


def factors_up_to(d: int, degree: int) -> list[tuple[int, ...]]:
    """The monomials in d variables up to `degree`, by increasing degree, each as the sorted axes of its factors.

    () is the constant, (0, 0, 1) is x_0² x_1.
    """
    return [t for n in range(degree + 1) for t in itertools.combinations_with_replacement(range(d), n)]


def all_exponents(d: int, degree: int) -> Exponents:
    """Exponents of the same monomials, in the same order; the constant is left out."""
    return tuple(tuple(map(factors.count, range(d))) for factors in factors_up_to(d, degree)[1:])


def check_exponents(exponents: Any) -> Exponents:
    """Exponents as tuples: one tuple per term, of one length, all different."""
    checked = tuple(tuple(check_count("each exponent", e, at_least=0) for e in term) for term in exponents)
    lengths = {len(term) for term in checked}
    if len(lengths) != 1 or 0 in lengths:
        raise ValueError(f"exponents must be tuples of one length, at least 1, got lengths {sorted(lengths)}")
    if len(set(checked)) != len(checked):
        raise ValueError(f"exponents must all be different, got {checked}")
    return checked


class DerivativeTable(NamedTuple):
    """How the derivatives ∂^δ, one row per δ, of Σ_t θ_t z^{e_t} come out of φ(z) (all arrays are constants).

    - `monomials` (u, d): the exponents of φ.
    - `source`, `factor` (rows, u): row r of the derivatives is Σ_u factor[r, u] θ[source[r, u]] φ_u.
    - `target`, `multiple` (rows, terms): the same from the side of the terms, ∂^{δ_r} z^{e_t} =
      multiple[r, t] φ[target[r, t]].
    - `order` (rows,): |δ|.
    """

    monomials: np.ndarray
    source: np.ndarray
    factor: np.ndarray
    target: np.ndarray
    multiple: np.ndarray
    order: np.ndarray


@functools.lru_cache(maxsize=64)
def derivative_table(exponents: Exponents, orders: tuple[int, ...]) -> DerivativeTable:
    """The table for all derivatives of the given orders: 1 row for order 0, d for order 1, d² for order 2."""
    d = len(exponents[0])
    axes = [c for order in orders for c in itertools.product(range(d), repeat=order)]
    shifts = [tuple(chosen.count(i) for i in range(d)) for chosen in axes]
    lowered = [[tuple(map(operator.sub, e, shift)) for e in exponents] for shift in shifts]
    # The constant is kept in φ even if unused, so that φ is never empty.
    kept = sorted({(0,) * d, *(e for row in lowered for e in row if min(e) >= 0)}, key=lambda e: (sum(e), e))
    place = {e: u for u, e in enumerate(kept)}
    rows, terms = len(shifts), len(exponents)
    source, factor = np.zeros((rows, len(kept)), np.int32), np.zeros((rows, len(kept)))
    target, multiple = np.zeros((rows, terms), np.int32), np.zeros((rows, terms))
    for r, t in itertools.product(range(rows), range(terms)):
        if min(lowered[r][t]) >= 0:
            u = place[lowered[r][t]]
            size = float(math.prod(map(math.perm, exponents[t], shifts[r])))
            source[r, u], factor[r, u], target[r, t], multiple[r, t] = t, size, u, size
    return DerivativeTable(
        np.asarray(kept), source, factor, target, multiple, np.asarray([len(chosen) for chosen in axes])
    )


# Monomials are evaluated in two ways. Of one point, from a table of powers: the program has as many operations as there
# are powers, not monomials (461 of degree 6 in d = 5). Of many points at once, one array per monomial, each a lower one
# times a coordinate: what sums over points fuses into one loop. The two round differently (x·(y·y) and (x·y)·y).


def monomials(z: Float[Numbers, "d *points"], exponents: np.ndarray) -> Float[Numbers, "u *points"]:
    """z^e for each row e of `exponents`, from a table of powers: right at z = 0, as are its derivatives."""
    xp = module_of(z)
    powers = [xp.ones_like(z)]
    for _ in range(int(exponents.max())):
        powers.append(powers[-1] * z)
    table = xp.stack(powers)
    return functools.reduce(operator.mul, (table[exponents[:, i], i] for i in range(z.shape[0])))


def monomials_of_points(z: Float[Array, "d points"], degree: int) -> Float[Array, "terms points"]:
    """The monomials of `factors_up_to` at many points, coordinates first."""
    known: dict[tuple[int, ...], Array] = {(): jnp.ones_like(z[0])}
    for factors in factors_up_to(z.shape[0], degree)[1:]:
        known[factors] = known[factors[:-1]] * z[factors[-1]]
    return jnp.stack(list(known.values()))


def combine(theta: Float[Numbers, " terms"], table: DerivativeTable) -> Float[Numbers, "rows u"]:
    """The matrix that takes φ(z) to the derivatives of Σ_t θ_t z^{e_t}; it does not depend on z."""
    return table.factor.astype(theta.dtype) * theta[table.source]


def derivatives(
    theta: Float[Array, " terms"], z: Float[Array, " d"], exponents: Exponents, order: int
) -> Float[Array, " rows"]:
    """All derivatives of one order, in z, of Σ_t θ_t z^{e_t}."""
    table = derivative_table(exponents, (order,))
    return jnp.matmul(combine(theta, table), monomials(z, table.monomials), precision=HIGHEST)
