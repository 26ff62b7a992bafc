"""Kernel regression of the observed gradients on the observed positions: the baselines, as gradient fields.

With the Gaussian product kernel K_i = exp(−½ Σ_j ((x_ij − α_j)/h_j)²) over all observed points i, and φ_i the
monomials of u_i = (x_i − α)/h up to the degree of the fit (degree 0, Nadaraya–Watson, is φ = 1), both fields
solve the weighted least squares

    β = argmin Σ_i K_i |g_i − φ_iᵀβ|²,    A β = Σ_i K_i φ_i g_iᵀ,    A = Σ_i K_i φ_i φ_iᵀ,

whose value at α is the intercept, β₀ = Σ_i w_i g_i with w_i = K_i cᵀφ_i and c = A⁻¹e₀. Points of one episode
are dependent, so the sandwich variance sums the residuals within each episode before squaring:

    stderr² = Σ_e ( Σ_{t∈e} w_i (g_i − φ_iᵀβ) )²,

which for degree 0 is the delta method for a ratio. It knows the noise and not the bias, which is of order h²
(degrees 0 and 1) or h⁴ (degrees 2 and 3). With noise-free gradients in one dimension a narrow kernel nearly
interpolates, and is hard to beat.

Reference: Fan & Gijbels, Local Polynomial Modelling and Its Applications (1996), chapters 3 and 4.
"""

from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from .._base.checks import check_positive, check_shape, float_array
from .._base.types import Key, Place, Vector
from ..estimate.field import AbstractField, place_of
from ..estimate.ratio import Estimate
from ..samples.samples import Samples, check_samples
from .bandwidth import cross_validated_bandwidth
from .local_fit import Points, check_degree, cut_points, local_estimate


class NadarayaWatson(AbstractField):
    """The local average of the gradients: Σ_i K_i g_i / Σ_i K_i, K_i = exp(−|x_i − α|²/(2h²)), h one an axis.

    Where the average cannot be trusted its value is the same ratio, free of underflow (far away it is the gradient of
    the nearest sample), and its standard error is infinite.

    Args:
        samples: positions and gradients; Hessians are not used.
        bandwidth: h in the units of x, one number or one per axis; "auto": `cross_validated_bandwidth`. It is an
            array leaf, so a sweep `eqx.tree_at(lambda f: f.bandwidth, field, h)` compiles once.
        chunk_size: how many points are held at a time for each α; None chooses.

    Returns:
        Called as `field(alpha)`, an `Estimate`. `density` is the kernel density estimate. `trusted` asks for ten
        effective episodes, (Σ_e K_e)²/Σ_e K_e² ≥ 10, for ΣK ≥ 1 (one sample standing at α weighs 1), and for α in the
        box of the observed points.

    Raises:
        ValueError: if `bandwidth` is not positive or of another shape, or if `samples` are too few or not finite.

    Example:
        ```python
        import jax
        import jax.numpy as jnp
        import malliavin_jax as mj

        loss = mj.potentials.Quartic()
        learner = mj.ForwardLearner(loss, mj.initial.Normal(), step_size=0.01, gradient_noise=0.5)
        samples = mj.observe(jax.random.key(0), learner, num_episodes=2000, times=[0.4, 0.8])
        mj.kernel.NadarayaWatson(samples, bandwidth=0.1)(jnp.array([0.5])).value
        ```
    """

    points: Points
    bandwidth: Float[Array, "..."]

    def __init__(self, samples: Samples, bandwidth: ArrayLike | str = "auto", *, chunk_size: int | None = None):
        check_samples(samples)
        self.points = cut_points(samples, 0, chunk_size)
        self.bandwidth = _checked_bandwidth(bandwidth, samples, 0)

    def __call__(self, alpha: Place, *, key: Key | None = None) -> Estimate:
        return _evaluate(self.points, self.bandwidth, 0, alpha)


class LocalPolynomial(AbstractField):
    """The local polynomial fit of the gradients, of degree 1, 2 or 3: β₀ of argmin Σ_i K_i |g_i − φ_iᵀβ|².

    K_i is the kernel of `NadarayaWatson`, and φ_i holds the monomials of (x_i − α)/h up to the degree.

    Args:
        samples: positions and gradients; Hessians are not used.
        bandwidth: as in `NadarayaWatson`.
        degree: of the polynomial, 1, 2 or 3.
        chunk_size: as in `NadarayaWatson`.

    Returns:
        Called as `field(alpha)`, an `Estimate`. `density` is that of `NadarayaWatson`. `trusted` asks for more
        effective episodes than the polynomial has terms (and for 10), for a value no noisier than one observed
        gradient (e₀ᵀA⁻¹e₀ ≤ 1), and for α in the box of the observed points. Where only the last fails, the value is
        the polynomial's extrapolation; elsewhere it is that of `NadarayaWatson`. Its standard error is then infinite.

    Raises:
        ValueError: if `degree` is not 1, 2 or 3, if `bandwidth` is not positive or of another shape, or if `samples`
            are too few or not finite.

    Example:
        ```python
        import jax
        import jax.numpy as jnp
        import malliavin_jax as mj

        loss = mj.potentials.Quartic()
        learner = mj.ForwardLearner(loss, mj.initial.Normal(), step_size=0.01, gradient_noise=0.5)
        samples = mj.observe(jax.random.key(0), learner, num_episodes=2000, times=[0.4, 0.8])
        mj.kernel.LocalPolynomial(samples, bandwidth=0.4, degree=2)(jnp.array([0.5])).value
        ```
    """

    points: Points
    bandwidth: Float[Array, "..."]
    degree: int = eqx.field(static=True)

    def __init__(
        self,
        samples: Samples,
        bandwidth: ArrayLike | str = "auto",
        degree: int = 1,
        *,
        chunk_size: int | None = None,
    ):
        check_samples(samples)
        self.degree = check_degree(degree, (1, 2, 3))
        self.points = cut_points(samples, self.degree, chunk_size)
        self.bandwidth = _checked_bandwidth(bandwidth, samples, self.degree)

    def __call__(self, alpha: Place, *, key: Key | None = None) -> Estimate:
        return _evaluate(self.points, self.bandwidth, self.degree, alpha)


def _checked_bandwidth(bandwidth: Any, samples: Samples, degree: int) -> Array:
    """One number or one per axis, in the dtype of the samples."""
    if isinstance(bandwidth, str):
        if bandwidth != "auto":
            raise ValueError(f'bandwidth must be "auto", a number or one number per axis, got {bandwidth!r}')
        return cross_validated_bandwidth(samples, degree)
    array = float_array("bandwidth", bandwidth).astype(samples.x.dtype)
    if array.ndim > 0:
        check_shape("bandwidth", array, (samples.dim,), "d")
    check_positive("bandwidth", array)
    return array


def _evaluate(points: Points, bandwidth: Array, degree: int, alpha: Any) -> Estimate:
    """The estimate at α, whose type and shape are checked here."""
    return _estimate(points, bandwidth, degree, place_of(alpha, points.x.shape[1], points.x.dtype))


@partial(jax.jit, static_argnames="degree")
def _estimate(points: Points, bandwidth: Array, degree: int, alpha: Vector) -> Estimate:
    # Compiled here so that a call outside `jit` does not compile its scans anew each time.
    return local_estimate(points, jnp.broadcast_to(bandwidth, alpha.shape), degree, alpha)
