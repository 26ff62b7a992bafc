"""Weights tuned on pilot paths: the best deterministic window, and the best rate of a `Windowed` scheme."""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from .._base.checks import is_concrete
from .._base.small_tensors import HIGHEST, matmul
from .._base.types import Scalar
from ..learner.learner import Path
from .scheme import weigh
from .third_derivative import Third
from .windowed import FixedWindow, Windowed


class Window(NamedTuple):
    """A window, and the E|S|² it reached on the pilot paths.

    Attributes:
        weights: the window a_1 … a_n, which sums to 1.
        second_moment: E|S|² over the pilot paths.

    Example:
        ```python
        import jax
        import jax.numpy as jnp
        import malliavin_jax as mj

        loss = mj.potentials.Quartic()
        learner = mj.ForwardLearner(loss, mj.initial.Normal(), step_size=0.01, gradient_noise=0.5)
        paths = jax.jit(jax.vmap(lambda key: mj.simulate(key, learner, 80)))(jax.random.split(jax.random.key(0), 500))
        window = mj.weights.minimum_variance_window(paths)
        jnp.sum(window.weights), window.second_moment  # 1, and the E|S|² that was reached
        ```
    """

    weights: Float[Array, " steps"]
    second_moment: Scalar


def minimum_variance_window(paths: Path, *, third: Third = "covariation") -> Window:
    """The deterministic window of least E|S|² at the last step of pilot `paths` (leading axis: episodes).

    S = Σ_k a_k s_k is linear in the window, so min E|S|² subject to Σ a_k = 1 is a* = G⁻¹1 / (1ᵀG⁻¹1) with
    G_kl = E[s_k·s_l]. `FixedWindow(window.weights)` uses it; `best_rate` comes within some 5 % with one parameter.

    Args:
        paths: pilot paths of n steps, as `jax.vmap` of `simulate` returns them.
        third: where ∂³L comes from, as in `Windowed`.

    Returns:
        The `Window`, of n numbers.

    Raises:
        ValueError: if a path is too coarse for a window: I − εH must be positive definite all along.

    Example:
        ```python
        import jax
        import malliavin_jax as mj

        loss = mj.potentials.Quartic()
        learner = mj.ForwardLearner(loss, mj.initial.Normal(), step_size=0.01, gradient_noise=0.5)
        paths = jax.jit(jax.vmap(lambda key: mj.simulate(key, learner, 80)))(jax.random.split(jax.random.key(0), 500))
        window = mj.weights.minimum_variance_window(paths)
        scheme = mj.weights.FixedWindow(window.weights)
        ```
    """
    window = _minimum_variance_window(paths, third)
    if is_concrete(window) and not np.isfinite(window.second_moment):
        raise ValueError("paths are too coarse for a window: I − εH must be positive definite all along them")
    return window


@eqx.filter_jit
def _minimum_variance_window(paths: Path, third: Third) -> Window:
    """The window and what it reached, NaN where a path is too coarse."""
    steps = paths.x.shape[1] - 1
    one_hot = jnp.eye(steps, dtype=paths.x.dtype)

    def contributions(path: Path) -> Float[Array, "steps d"]:
        return jax.vmap(lambda a: weigh(path, FixedWindow(a, third))[-1])(one_hot)

    s = jax.vmap(contributions)(paths)
    gram = jnp.einsum("ekd,eld->kl", s, s, precision=HIGHEST) / s.shape[0]
    # The ridge only keeps the solve defined when there are fewer pilot paths than steps.
    ridge = jnp.finfo(gram.dtype).eps * jnp.trace(gram) * one_hot
    a = jnp.linalg.solve(gram + ridge, jnp.ones(steps, gram.dtype))
    a = a / jnp.sum(a)
    return Window(a, matmul(matmul(a, gram), a))


@eqx.filter_jit
def best_rate(paths: Path, rates: Float[Array, " rates"], *, neumann: int | None = None) -> Scalar:
    """The rate of `Windowed` with the least E|S|² over pilot `paths`, averaged over the second half of their steps.

    Args:
        paths: pilot paths, as `jax.vmap` of `simulate` returns them.
        rates: the rates to choose from.
        neumann: as in `Windowed`.

    Returns:
        One of `rates`, as an array of shape ().

    Example:
        ```python
        import jax
        import jax.numpy as jnp
        import malliavin_jax as mj

        loss = mj.potentials.Quartic()
        learner = mj.ForwardLearner(loss, mj.initial.Normal(), step_size=0.01, gradient_noise=0.5)
        paths = jax.jit(jax.vmap(lambda key: mj.simulate(key, learner, 80)))(jax.random.split(jax.random.key(0), 500))
        rate = mj.weights.best_rate(paths, jnp.array([1.0, 4.0]))
        scheme = mj.Windowed(rate)
        ```
    """

    def second_moment(rate: Scalar) -> Scalar:
        weights = jax.vmap(lambda path: weigh(path, Windowed(rate, neumann=neumann)))(paths)
        late = weights[:, weights.shape[1] // 2 :]
        moment = jnp.nanmean(jnp.sum(late**2, -1))
        return jnp.where(jnp.isfinite(moment), moment, jnp.inf)

    return rates[jnp.argmin(lax.map(second_moment, rates))]
