"""Polynomial losses, with their least-squares fit to observed gradients and Hessians."""

from collections.abc import Sequence

import equinox as eqx
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float, Int

from .._base.checks import check_finite, check_positive, check_shape, float_array
from .._base.types import Matrix, Scalar, Vector
from ..fitting.least_squares import fit_derivatives
from ..fitting.monomials import all_exponents, check_exponents, derivatives
from .base import AbstractPotential, like, number


class Polynomial(AbstractPotential):
    """L(x) = Σ_t θ_t Π_i z_i^{e_ti}, with z = (x − center) / scale.

    `Polynomial.fit` makes one from observed gradients and Hessians.

    Args:
        coefficients: θ, (terms,).
        exponents: e, `terms` tuples of d whole numbers, all different.
        center: subtracted from x, (d,) or a number.
        scale: what x is then divided by, (d,) or a number, positive.

    Raises:
        ValueError: if the exponents are of different lengths or not all different, there are not as many coefficients,
            `center` or `scale` is of another dimension or not finite, or `scale` is not positive.

    Example:
        ```python
        import jax.numpy as jnp
        import malliavin_jax as mj

        cubic = mj.potentials.Polynomial([1.0, 2.0], [[3], [1]])  # x³ + 2x
        cubic.gradient(jnp.array([1.0]))  # [5.]
        ```
    """

    coefficients: Float[Array, " terms"]
    exponents: tuple[tuple[int, ...], ...] = eqx.field(static=True)
    center: Float[Array, "..."] | float
    scale: Float[Array, "..."] | float

    def __init__(
        self,
        coefficients: Float[ArrayLike, " terms"] | Sequence,
        exponents: Sequence | Int[ArrayLike, "terms d"],
        center: Float[ArrayLike, "..."] | Sequence | float = 0.0,
        scale: Float[ArrayLike, "..."] | Sequence | float = 1.0,
    ):
        self.coefficients = float_array("coefficients", coefficients)
        self.exponents = check_exponents(exponents)
        self.center, self.scale = number("center", center), number("scale", scale)
        check_shape("coefficients", self.coefficients, (len(self.exponents),))
        for name in ("center", "scale"):
            if np.shape(getattr(self, name)) != ():
                check_shape(name, getattr(self, name), (len(self.exponents[0]),))
        check_finite("center", self.center)
        check_positive("scale", self.scale)

    def _derivatives(self, x: Vector, order: int) -> Array:
        check_shape("x", x, (len(self.exponents[0]),))
        z = (x - like(x, self.center)) / like(x, self.scale)
        return derivatives(self.coefficients.astype(x.dtype), z, self.exponents, order)

    def value(self, x: Vector) -> Scalar:
        return self._derivatives(x, 0)[0]

    def gradient(self, x: Vector) -> Vector:
        return self._derivatives(x, 1) / like(x, self.scale)

    def hessian(self, x: Vector) -> Matrix:
        scale = like(x, self.scale)
        return self._derivatives(x, 2).reshape(x.shape * 2) / (scale[:, None] * scale[None, :])

    @staticmethod
    def fit(
        x: Float[ArrayLike, "n d"],
        gradient: Float[ArrayLike, "n d"],
        hessian: Float[ArrayLike, "n d d"] | None = None,
        *,
        degree: int = 6,
        weights: Float[ArrayLike, " n"] | Int[ArrayLike, " n"] | Bool[ArrayLike, " n"] | None = None,
        passes: int = 2,
        chunk_size: int = 4096,
    ) -> "Polynomial":
        """The polynomial of the given degree whose gradients, and Hessians if given, are nearest to the observed ones.

        In standardised units z = (x − mean)/sd, in which gradients and Hessians both have the unit of L, it
        minimises Σ_n w_n [ p |∇_z L(x_n) − g_n|² + q |∇²_z L(x_n) − H_n|² ], |·| the Frobenius norm. The
        first pass takes p = q = 1; each later one takes for 1/p and 1/q the mean squared residuals per entry
        of the fit before, so that exact Hessians are not spoilt by noisy gradients, nor the reverse. The
        constant term, which no derivative sees, is 0.

        Args:
            x: points, (n, d).
            gradient: observed there, (n, d).
            hessian: observed there, (n, d, d); None fits gradients alone.
            degree: of the polynomial.
            weights: w, (n,), non-negative, often a 0/1 mask; where it is 0 the data may hold NaN.
            passes: how often to fit.
            chunk_size: points processed at a time.

        Returns:
            The polynomial in z; with no usable point, the zero polynomial.

        Raises:
            ValueError: if the shapes do not go together, a weight is negative, or a count is not at least 1.

        Example:
            ```python
            import jax.numpy as jnp
            import malliavin_jax as mj

            loss = mj.potentials.Quartic()
            x = jnp.linspace(-2.0, 2.0, 50)[:, None]
            gradient, hessian = x**3 + x, (3 * x**2 + 1)[:, :, None]
            fitted = mj.potentials.Polynomial.fit(x, gradient, hessian, degree=4)
            fitted.gradient(jnp.array([1.0])), loss.gradient(jnp.array([1.0]))  # both 2, up to rounding
            ```
        """
        fit = fit_derivatives(x, gradient, hessian, weights, degree=degree, passes=passes, chunk_size=chunk_size)
        return Polynomial(fit.theta, all_exponents(fit.center.shape[0], degree), fit.center, fit.scale)
