"""Kernel regressions with the bandwidth that is best in hindsight: as they are, and helped like this library.

At α the kernel averages, or fits a polynomial of degree 1 to 3 to,

    plain           g_i
    with Hessians   g_i + H_i (α − X_i)
    with control    g_i − ∇m(X_i) + ∇m(α)
    with both       the same with H_i − ∇²m(X_i) in place of H_i

with m the model that this library fits to the other half of the episodes. `values_without` of the package, with no
episode left out, gives all bandwidths from one pass over the points.
"""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax import lax

from malliavin_jax.kernel.local_fit import cut_points, values_without

from .models import Found, gradients, hessians

HELPS = ("", " with Hessians", " with control", " with both")
CHUNK = 1024  # points of one pass at a time
MOST_POINTS = 160_000  # beyond, a row would take minutes; of kernel ridge too


def bandwidths(noise):
    """In units of the spread of the positions; without noise a kernel nearly interpolates, at a very short one."""
    return np.geomspace(0.003, 1.0, 14) if noise == 0 else np.geomspace(0.006, 6.0, 17)


@eqx.filter_jit
def _values(samples, columns, even, model, alphas, sizes, scale, degree):
    """Values (points, sizes, d) at each α; `columns` are Hessians by column, `model` (points, 2, d) what is added back.

    What is averaged depends on α, so that each α has points of its own.
    """

    def cut(values):
        part = eqx.tree_at(lambda s: (s.gradient, s.hessian), samples, (values, None), is_leaf=lambda v: v is None)
        return cut_points(part, degree, CHUNK)

    base, is_even = cut(samples.gradient), cut(even).gradient
    slopes = [cut(column).gradient for column in columns]

    def one(place):
        alpha, at = place
        response = base.gradient + jnp.where(is_even > 0, at[0][None, :, None], at[1][None, :, None])
        for j, slope in enumerate(slopes):
            response = response + slope * (alpha[j] - base.x[:, j])[:, None, :]
        points = eqx.tree_at(lambda p: p.gradient, base, response)
        return values_without(points, sizes, degree, scale, alpha, jnp.asarray(-1))

    return lax.map(one, (alphas, model))


def _residuals(samples, control):
    """The samples with gradients and Hessians less those of the model that was fitted to the other half."""

    def less(part, derivative):
        left = np.array(part)
        for first, potential in enumerate(control):
            half = np.asarray(derivative(potential, samples.x[first::2].reshape(-1, samples.dim)))
            left[first::2] -= half.reshape(left[first::2].shape)
        return jnp.asarray(left)

    parts = less(samples.gradient, gradients), less(samples.hessian, hessians)
    return eqx.tree_at(lambda s: (s.gradient, s.hessian), samples, parts)


def kernel(view, degree, help_):
    """The kernel of this degree with one of `HELPS`, for every bandwidth."""
    samples, alphas = view.samples, view.alphas
    model = jnp.zeros((len(alphas), 2, view.dim), samples.x.dtype)
    if help_ in (" with control", " with both") and view.control is not None:
        samples, model = _residuals(samples, view.control), jnp.stack([gradients(m, alphas) for m in view.control], 1)
    helped = help_ in (" with Hessians", " with both")
    columns = [samples.hessian[..., j] for j in range(view.dim)] if helped else []
    even = jnp.broadcast_to((jnp.arange(samples.num_episodes) % 2 == 0)[:, None, None], samples.x.shape)
    sizes = jnp.asarray(view.scale * bandwidths(view.noise), samples.x.dtype)
    scale = jnp.asarray(view.scale, samples.x.dtype)
    values = _values(samples, columns, even.astype(samples.x.dtype), model, alphas, sizes, scale, degree)
    return Found(np.swapaxes(values, 0, 1), [f"h = {h:.2g} sd" for h in bandwidths(view.noise)])
