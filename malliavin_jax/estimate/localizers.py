"""Localizers: a kernel K_h and the field G_h that removes its bias, at a displacement y = X − α.

Any kernel that integrates to 1 differs from the Dirac mass by a divergence, δ = K_h + div G_h, so integration by
parts gives for every length h

    E[ℓ δ(X−α)] = E[ ℓ K_h(X−α) + G_h(X−α)·(ℓ S − ∇ℓ(X)) ].

The first term is the ordinary kernel estimator, the second the Malliavin term that removes exactly its bias. A
localizer is a function y ↦ (K, G), with y and G of shape (d,). h → 0 is the pure kernel, h → ∞ the pure Malliavin
formula.
"""

import abc
import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NoReturn

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .._base.checks import check_positive, described
from .._base.host import module_of
from .._base.types import Numbers, Scalar, Vector
from .shells import Shell, mass_in_the_plane, mass_of_shells

Localizer = Callable[[Vector], tuple[Scalar, Vector]]


class AbstractLocalizer(eqx.Module):
    """A function y ↦ (K, G) with K of shape () and G of shape (d,): write `__call__` to make one of your own.

    K must integrate to 1 and G satisfy div G = δ − K; the estimate is then unbiased whatever K is. A class whose
    formulas take NumPy's arrays too may say so by `takes_numpy = True`: small problems need no compiler then.

    Example:
        ```python
        import jax
        import jax.numpy as jnp
        import malliavin_jax as mj


        class Box(mj.estimate.AbstractLocalizer):  # the kernel ½·1{|y| < 1}, and the field that removes its bias
            def __call__(self, y):
                inside = jnp.abs(y) < 1
                return 0.5 * inside[0], jnp.where(inside, (jnp.sign(y) - y) / 2, 0)


        loss = mj.potentials.Quartic()
        learner = mj.ForwardLearner(loss, mj.initial.Normal(), step_size=0.01, gradient_noise=0.5)
        samples = mj.observe(jax.random.key(0), learner, num_episodes=2000, times=[0.4, 0.8])
        mj.density(samples, jnp.array([0.5]), Box())
        ```
    """

    takes_numpy: ClassVar[bool] = False

    @abc.abstractmethod
    def __call__(self, y: Vector) -> tuple[Scalar, Vector]:
        """K(y) and G(y)."""


def at_points(localizer: Localizer, y: Sequence[Numbers]) -> tuple[Numbers, list[Numbers]]:
    """K and the coordinates of G at many displacements, of which each coordinate is an array."""
    if isinstance(localizer, AbstractRadial):
        K, B = localizer.radial(functools.reduce(operator.add, [c * c for c in y]), len(y))
        return K, [c * B for c in y]
    if isinstance(localizer, Laplace) and isinstance(y[0], np.ndarray):
        K, G = _two_sided(y[0], np.where(y[0] == 0, -1, np.sign(y[0])), localizer.length)
        return K, [G]

    def at(*coordinates: Scalar) -> tuple[Scalar, Vector]:
        return localizer(jnp.stack(coordinates))

    for _ in range(y[0].ndim):
        at = jax.vmap(at, out_axes=(0, 1))
    K, G = at(*y)
    return K, list(G)


def check_localizer(localizer: Any) -> None:
    """Refuse a length, a class or a word in place of a localizer; any function y ↦ (K, G) is one."""
    if isinstance(localizer, type) or not callable(localizer):
        is_length = isinstance(localizer, int | float) and not isinstance(localizer, bool)
        remedy = (
            f"give Laplace({localizer}), or Gaussian({localizer}, core=…) beyond one dimension"
            if is_length
            else ("give Laplace(length) or Gaussian(length, core=…)")
        )
        raise ValueError(f"localizer must be a localizer, got {described(localizer)}: {remedy}")


class AbstractRadial(AbstractLocalizer):
    """A localizer with a radial kernel: by Gauss's law its field is radial too, G(y) = y·B(r²). Write `radial`.

    Sums over many points need r² and the two numbers K, B of each, never its vectors y and G, and are faster.

    Example:
        ```python
        import jax.numpy as jnp
        import malliavin_jax as mj


        class Cauchy(mj.estimate.AbstractRadial):  # the heavy-tailed kernel 1/(π(1 + r²)²) of the plane
            def radial(self, square, d):
                return 1 / (jnp.pi * (1 + square) ** 2), 1 / (2 * jnp.pi * (1 + square) * (square + 1e-4))


        K, G = Cauchy()(jnp.array([0.3, -0.1]))
        ```
    """

    @abc.abstractmethod
    def radial(self, square: Numbers, d: int) -> tuple[Numbers, Numbers]:
        """K and B, of the shape of `square` = r², for points of d dimensions."""

    def __call__(self, y: Vector) -> tuple[Scalar, Vector]:
        d = y.shape[0]
        K, B = self.radial(functools.reduce(jnp.add, [y[j] * y[j] for j in range(d)]), d)
        return K, y * B


class Heaviside(AbstractLocalizer):
    """The paper's: K = 0, G = 1{y > 0}, in one dimension.

    Raises:
        ValueError: when called with y of more than one dimension, or differentiated in α: it jumps there.

    Example:
        ```python
        import jax.numpy as jnp
        import malliavin_jax as mj

        mj.Heaviside()(jnp.array([0.3]))  # K = 0, G = [1.]
        ```
    """

    def __call__(self, y: Vector) -> tuple[Scalar, Vector]:
        _one_dimension(self, y)
        return jnp.zeros((), y.dtype), (_sign(y) + 1) / 2


class Centered(AbstractLocalizer):
    """The centred limit h → ∞ of every localizer: K = 0, G = ½ sign(y), in one dimension.

    Raises:
        ValueError: when called with y of more than one dimension, or differentiated in α: it jumps there.

    Example:
        ```python
        import jax.numpy as jnp
        import malliavin_jax as mj

        mj.Centered()(jnp.array([-0.3]))  # K = 0, G = [-0.5]
        ```
    """

    def __call__(self, y: Vector) -> tuple[Scalar, Vector]:
        _one_dimension(self, y)
        return jnp.zeros((), y.dtype), _sign(y) / 2


class Laplace(AbstractLocalizer):
    """K = e^{−|y|/h}/(2h), G = ½ sign(y) e^{−|y|/h} with h = `length`, in one dimension.

    The two-sided form of the exponential localizer that Bouchard, Ekeland & Touzi (2004) show to be optimal. G jumps at
    y = 0, so the estimate jumps at every sample and has no derivative in α: `Gaussian` has one.

    Args:
        length: h, positive, in the units of x.

    Raises:
        ValueError: if `length` is not positive; when called with y of more than one dimension, or differentiated in α.

    Example:
        ```python
        import jax.numpy as jnp
        import malliavin_jax as mj

        K, G = mj.Laplace(0.5)(jnp.array([0.3]))  # K = e^{-0.6}, G = [e^{-0.6}/2]
        ```
    """

    length: float | Float[Numbers, ""]
    takes_numpy: ClassVar[bool] = True

    def __check_init__(self):
        check_positive("length", self.length)

    def __call__(self, y: Vector) -> tuple[Scalar, Vector]:
        _one_dimension(self, y)
        K, G = _two_sided(y, _sign(y), self.length)
        return K[0], G


def _two_sided(y: Numbers, sign: Numbers, length: float | Float[Numbers, ""]) -> tuple[Numbers, Numbers]:
    """K and G of `Laplace` at each of y."""
    xp = module_of(y)
    h = xp.asarray(length, y.dtype)
    decay = xp.exp(-sign * y / h)
    return decay / (2 * h), sign * decay / 2


class Gaussian(AbstractRadial):
    """A Gaussian kernel of length h, with a smooth core of size e, in any dimension (Malliavin–Thalmaier).

    With ω_d the area of the unit sphere, r = |y| and C(a) = P(χ²_d ≤ r²/a²), Gauss's law for a radial kernel gives

        K(y) = exp(−r²/2h²) / (2πh²)^{d/2},     G(y) = y/(ω_d r^d) · [2 C(e) − C(√2 e) − C(h)].

    With C(e) replaced by 1 this would be exact, but singular at 0 with infinite variance for d ≥ 2; the core puts the
    fourth-order kernel 2K_e − K_{√2 e} in place of the Dirac mass, a bias of order e⁴. Smooth: its derivative in α
    estimates the Hessian. See Kohatsu-Higa & Yasuda (2009) for the formula with a core.

    Args:
        length: h, positive, in the units of x.
        core: e, positive, in the units of x.

    Raises:
        ValueError: if `length` or `core` is not positive.

    Example:
        ```python
        import jax.numpy as jnp
        import malliavin_jax as mj

        K, G = mj.Gaussian(0.5, core=0.05)(jnp.array([0.3, -0.1]))
        G.shape  # (2,)
        ```
    """

    length: float | Float[Numbers, ""]
    core: float | Float[Numbers, ""]
    takes_numpy: ClassVar[bool] = True

    def __check_init__(self):
        check_positive("length", self.length)
        check_positive("core", self.core)

    def radial(self, square: Numbers, d: int) -> tuple[Numbers, Numbers]:
        xp = module_of(square)
        h, e = xp.asarray(self.length, square.dtype), xp.asarray(self.core, square.dtype)
        wide, inner = 1 / (2 * h * h), 1 / (4 * e * e)
        t, t_wide = inner * square, wide * square
        decay, decay_wide = xp.exp(-t), xp.exp(-t_wide)
        if d == 2:  # the plane is where dense sums are largest
            bracket = mass_in_the_plane(square, inner, wide, decay, decay_wide)
        else:
            # C(e), C(√2 e), C(h) are P(2t), P(t), P(t_wide) with P(t) = P(χ²_d ≤ 2t); e^{−2t} is the square of e^{−t}.
            shells = (
                Shell(2.0, 2 * inner, 2 * t, decay * decay),
                Shell(-1.0, inner, t, decay),
                Shell(-1.0, wide, t_wide, decay_wide),
            )
            bracket = mass_of_shells(shells, square, d)
        area = 2 * math.pi ** (d / 2) / math.gamma(d / 2)
        return decay_wide * (wide / math.pi) ** (d / 2), bracket * (1 / area)


def _sign(y: Vector) -> Vector:
    """1 for y > 0, else −1 (NaN stays NaN): a sample at α itself counts as left of it, as in the sorted form."""
    y = refuse_derivative(y)
    return jnp.where(y == 0, -1, jnp.sign(y))


@jax.custom_jvp
def refuse_derivative(x: Array) -> Array:
    """x itself. What depends on it jumps, so its derivative, which would miss the jumps, is an error."""
    return x


@refuse_derivative.defjvp
def _no_derivative(primals: tuple, tangents: tuple) -> NoReturn:
    raise ValueError(
        "Heaviside, Centered and Laplace jump at y = 0, so the estimate has no derivative in α; "
        "differentiate a field made with localizer=Gaussian(length, core), which is smooth"
    )


def _one_dimension(localizer: AbstractLocalizer, y: Vector) -> None:
    if y.shape != (1,):
        raise ValueError(
            f"localizer {type(localizer).__name__} is for one dimension, got d = {y.shape[-1]}: "
            "use Gaussian(length, core)"
        )
