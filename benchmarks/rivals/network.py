"""A neural-network potential, trained on gradients and on Hessians.

f(z) = c·t(B t(A z + a) + b) with t = tanh and z the standardised positions. Its two derivatives are written out: as
products of matrices over a batch they are several times faster than differentiating the network twice. Only the
derivatives of the training loss in the parameters come from `jax.grad`. All settings are trained together, by Adam with
a cosine schedule, for as many steps as fit into the time allowed.
"""

import math
import time
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from .models import Found

WIDTH, BATCH, RATE = 64, 256, 4e-3
BLOCK = 100  # steps between two looks at the clock
MOST_STEPS = 6_000
# (what Hessians count against gradients, each in units of its own variance; size of the first layer's weights)
SETTINGS = ((1.0, 1.0), (20.0, 1.0), (1.0, 4.0), (20.0, 4.0))
ADAM = optax.scale_by_adam()


class Network(eqx.Module):
    """f above; `gradient` and `hessian` are those of f in z."""

    first: Any  # A, (width, d)
    shift: Any  # a
    second: Any  # B, (width, width)
    other_shift: Any  # b
    last: Any  # c

    def __init__(self, key, d, size):
        keys = jax.random.split(key, 4)
        self.first = size * jax.random.normal(keys[0], (WIDTH, d), jnp.float32)
        self.shift = size * jax.random.normal(keys[1], (WIDTH,), jnp.float32)
        self.second = jax.random.normal(keys[2], (WIDTH, WIDTH), jnp.float32) / math.sqrt(WIDTH)
        self.other_shift = jnp.zeros((WIDTH,), jnp.float32)
        self.last = jax.random.normal(keys[3], (WIDTH,), jnp.float32) / math.sqrt(WIDTH)

    def _layers(self, z):
        """Of a batch (n, d): the first layer's t' and t'', the second one's, and the second one's derivatives in z."""
        one = jnp.tanh(z @ self.first.T + self.shift[None])
        slope = 1 - one**2
        two = jnp.tanh(one @ self.second.T + self.other_shift[None])
        inner = jnp.einsum("nk,ki->nik", slope, self.first) @ self.second.T  # ∂(B t)/∂z_i, (n, d, width)
        return slope, -2 * one * slope, 1 - two**2, -2 * two * (1 - two**2), inner

    def derivatives(self, z):
        """∇f (n, d) and ∇²f (n, d, d) of a batch (n, d)."""
        _, bend, outer, outer_bend, inner = self._layers(z)
        gradient = jnp.einsum("nik,nk->ni", inner, outer * self.last[None])
        through = (outer * self.last[None]) @ self.second  # what the first layer's t is multiplied with
        hessian = jnp.einsum("nik,njk,nk->nij", inner, inner, outer_bend * self.last[None])
        pairs = (self.first[:, :, None] * self.first[:, None, :]).reshape(WIDTH, -1)
        return gradient, hessian + ((bend * through) @ pairs).reshape(hessian.shape)


class Data(NamedTuple):
    """In standardised units: positions, gradients and Hessians of all points, and the latter two's variances."""

    z: Any
    gradient: Any
    hessian: Any
    gradient_variance: Any
    hessian_variance: Any


def _loss(network, data, rows, hessian_weight):
    gradient, hessian = network.derivatives(data.z[rows])
    of_gradients = jnp.mean((gradient - data.gradient[rows]) ** 2) / data.gradient_variance
    return of_gradients + hessian_weight * jnp.mean((hessian - data.hessian[rows]) ** 2) / data.hessian_variance


@eqx.filter_jit
def _train(networks, states, data, weights, key, done, total):
    """`BLOCK` steps of every network, of which `done` steps of `total` are over."""

    def step(carry, number):
        networks, states = carry
        progress = (done + number.astype(jnp.float32)) / total
        rate = RATE * 0.5 * (1 + jnp.cos(jnp.pi * jnp.clip(progress, 0, 1)))
        rows = jax.random.randint(jax.random.fold_in(key, number), (BATCH,), 0, data.z.shape[0])
        slopes = jax.vmap(jax.grad(_loss), in_axes=(0, None, None, 0))(networks, data, rows, weights)
        updates, states = jax.vmap(ADAM.update)(slopes, states)
        networks = jax.tree.map(lambda leaf, update: leaf - rate * update, networks, updates)
        return (networks, states), None

    return lax.scan(step, (networks, states), jnp.arange(BLOCK))[0]


def network(view):
    """Networks of all `SETTINGS`, trained for at most `view.network_seconds` together."""
    x, gradient, hessian = (np.asarray(part, np.float64) for part in view.points)
    center, spread = x.mean(0), x.std(0)
    of_z = gradient * spread, hessian * np.outer(spread, spread)
    unit = float(np.sqrt(np.mean(of_z[0] ** 2)))
    g, h = (part / unit for part in of_z)
    arrays = ((x - center) / spread, g, h, np.mean(g**2), np.mean(h**2) + 1e-12)
    data = Data(*(jnp.asarray(part, jnp.float32) for part in arrays))
    weights, sizes = (jnp.asarray(part, jnp.float32) for part in zip(*SETTINGS, strict=True))
    keys = jax.random.split(jax.random.key(7), len(SETTINGS))
    networks = jax.vmap(lambda key, size: Network(key, view.dim, size))(keys, sizes)
    states = jax.vmap(ADAM.init)(networks)
    networks = _timed(networks, states, data, weights, view.network_seconds)
    at = jnp.asarray((np.asarray(view.alphas, np.float64) - center) / spread, jnp.float32)
    values = jax.vmap(lambda network: network.derivatives(at)[0])(networks)
    names = [f"Hessians × {weight:g}, first layer × {size:g}" for weight, size in SETTINGS]
    return Found(np.asarray(values, np.float64) * unit / spread, names)


def _timed(networks, states, data, weights, seconds):
    """Networks after `MOST_STEPS` steps, or as many as fit into `seconds`; compilation counts as the user waits for it.

    The schedule has to know its end: it is foreseen from the first block that is compiled, and kept.
    """
    key, total, began = jax.random.key(8), jnp.asarray(MOST_STEPS, jnp.float32), time.perf_counter()
    step = 0
    while step < float(total):
        if step == BLOCK:
            started = time.perf_counter()
        numbers = jnp.asarray(step, jnp.float32), total
        networks, states = jax.block_until_ready(
            _train(networks, states, data, weights, jax.random.fold_in(key, step), *numbers)
        )
        step += BLOCK
        if step == 2 * BLOCK:
            now = time.perf_counter()
            fit = (seconds - (now - began)) / (now - started) * BLOCK + step
            total = jnp.asarray(np.clip(fit, 10 * BLOCK, MOST_STEPS) // BLOCK * BLOCK, jnp.float32)
    return networks
