"""The losses that methods are compared on: each with the law of its learner's starts and the places that are asked for.

Eight are the library's own, smooth at one scale; four are made here, with structure at several scales, and no method
was tuned on them.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import malliavin_jax as mj

TIME, STEP_SIZE = 0.8, 0.01
MANY = 16  # conditioning times, evenly spaced


class Case(NamedTuple):
    """A loss, the law of its learner's starts, and the places where gradients are asked for."""

    loss: Any
    initial: Any
    alphas: Any
    time: float = TIME
    many: tuple[float, float] = (TIME / MANY, TIME)  # the first and the last of the many times

    @property
    def dim(self):
        return self.alphas.shape[1]

    def times(self, number):
        """One conditioning time, or as many as `MANY`, on the grid of the steps."""
        return [self.time] if number == 1 else np.round(np.linspace(*self.many, number) / STEP_SIZE) * STEP_SIZE


def start(d, center=0.0, spread=1.0, cut=4.0):
    center = jnp.broadcast_to(jnp.asarray(center, jnp.float32), (d,))
    return lambda key: center + spread * jnp.clip(jax.random.normal(key, (d,)), -cut, cut)


def box(d, points, half=0.8, center=0.0):
    axis = jnp.linspace(-half, half, points, dtype=jnp.float32)
    places = jnp.stack(jnp.meshgrid(*[axis] * d, indexing="ij"), -1).reshape(-1, d)
    return places + jnp.broadcast_to(jnp.asarray(center, jnp.float32), places.shape)


# --- losses of this file: a bowl, and on it waves or pits, or a valley that bends ---------------------------


class Waves(mj.potentials.AbstractPotential):
    """L(x) = ½ b |x|² + Σ_j a_j cos(k_j·x + p_j)."""

    bowl: float
    heights: Any  # a, (waves,)
    vectors: Any  # k, (waves, d)
    phases: Any  # p, (waves,)

    def _terms(self, x):
        a, k, p = (jnp.asarray(part, x.dtype) for part in (self.heights, self.vectors, self.phases))
        return a, k, jnp.sum(k * x[None], 1) + p

    def value(self, x):
        a, _, angle = self._terms(x)
        return 0.5 * self.bowl * jnp.sum(x**2) + jnp.sum(a * jnp.cos(angle))

    def gradient(self, x):
        a, k, angle = self._terms(x)
        return self.bowl * x - jnp.sum((a * jnp.sin(angle))[:, None] * k, 0)

    def hessian(self, x):
        a, k, angle = self._terms(x)
        waves = (a * jnp.cos(angle))[:, None, None] * k[:, :, None] * k[:, None, :]
        return self.bowl * jnp.eye(x.shape[0], dtype=x.dtype) - jnp.sum(waves, 0)


class Pits(mj.potentials.AbstractPotential):
    """L(x) = ½ b |x|² − Σ_j D_j exp(−|x − c_j|²/2w²)."""

    bowl: float
    depths: Any  # D, (pits,)
    places: Any  # c, (pits, d)
    width: float  # w

    def _terms(self, x):
        away = (x[None] - jnp.asarray(self.places, x.dtype)) / self.width
        return jnp.asarray(self.depths, x.dtype) * jnp.exp(-0.5 * jnp.sum(away**2, 1)), away

    def value(self, x):
        return 0.5 * self.bowl * jnp.sum(x**2) - jnp.sum(self._terms(x)[0])

    def gradient(self, x):
        depth, away = self._terms(x)
        return self.bowl * x + jnp.sum(depth[:, None] * away, 0) / self.width

    def hessian(self, x):
        depth, away = self._terms(x)
        eye = jnp.eye(x.shape[0], dtype=x.dtype)
        curve = eye[None] - away[:, :, None] * away[:, None, :]
        return self.bowl * eye + jnp.sum(depth[:, None, None] * curve, 0) / self.width**2


class Valley(mj.potentials.AbstractPotential):
    """L(x) = ½ b x_0² + ½ k (x_1 − v(x_0))², with the floor v(s) = r sin(f s), in d = 2."""

    bowl: float
    stiffness: float  # k: along the slope the learner keeps within 1/√k of the floor
    reach: float  # r
    frequency: float  # f

    def floor(self, s):
        """v, v' and v''."""
        angle = self.frequency * s
        wave, slope = self.reach * jnp.sin(angle), self.reach * self.frequency * jnp.cos(angle)
        return wave, slope, -(self.frequency**2) * wave

    def value(self, x):
        return 0.5 * self.bowl * x[0] ** 2 + 0.5 * self.stiffness * (x[1] - self.floor(x[0])[0]) ** 2

    def gradient(self, x):
        v, slope, _ = self.floor(x[0])
        pull = self.stiffness * (x[1] - v)
        return jnp.stack([self.bowl * x[0] - pull * slope, pull])

    def hessian(self, x):
        v, slope, bend = self.floor(x[0])
        k = self.stiffness
        first, mixed = self.bowl + k * slope**2 - k * (x[1] - v) * bend, -k * slope
        return jnp.stack([first, mixed, mixed, jnp.full_like(mixed, k)]).reshape(2, 2)


def near_floor(valley, spread, height):
    """Starts along the valley, at normal heights above its floor."""

    def draw(key):
        along, above = jnp.clip(jax.random.normal(key, (2,)), -3, 3)
        return jnp.stack([spread * along, valley.floor(spread * along)[0] + height * above])

    return draw


def along_floor(valley, points, half, heights):
    """Places along the valley, at some heights above its floor."""
    along = jnp.linspace(-half, half, points, dtype=jnp.float32)
    s, h = (part.ravel() for part in jnp.meshgrid(along, jnp.asarray(heights, jnp.float32)))
    return jnp.stack([s, valley.floor(s)[0] + h], 1)


# --- the cases --------------------------------------------------------------------------------------------


@functools.cache  # one start function a case: another would be compiled anew
def cases():
    quartic, wells = mj.potentials.Quartic, mj.potentials.DoubleWell
    mixture = functools.partial(mj.potentials.GaussianMixture, weights=[0.4, 0.35, 0.25], covariances=0.35)
    saddle = jnp.asarray([-0.2, 0.7])  # among the three minima of Müller and Brown's surface
    # Waves of length .83 and .31. Their curvature goes down to −12: a shorter time, for all methods.
    ripples = Waves(0.7, [0.11, 0.012], [[2 * np.pi / 0.83], [2 * np.pi / 0.31]], [0.4, 1.9])
    pits = Pits(0.9, [0.35, 0.22, 0.28, 0.3], [[0.45, 0.2], [-0.3, 0.55], [-0.5, -0.4], [0.25, -0.55]], 0.25)
    bend = Valley(0.6, 18.0, 0.7, 1.7)
    vectors = [[4.1, 1.2, -0.8], [-1.1, 3.6, 2.0], [0.7, -2.3, 4.4], [-3.0, -2.6, 1.5]]
    rough = Waves(0.8, [0.08, 0.07, 0.06, 0.05], vectors, [0.3, 1.1, 2.6, 4.0])
    return {
        "quartic, d = 1": Case(quartic(), start(1), box(1, 21, 1.0)),
        # Between its wells paths part at the rate 4, and a weight over a long time pays for it: a shorter one, for all.
        "double well, d = 1": Case(wells(), start(1), box(1, 21, 1.2), 0.3),
        "mixture, d = 1": Case(mixture([[-1.2], [0.2], [1.5]]), start(1), box(1, 21, 1.2)),
        "ripples, d = 1": Case(ripples, start(1), box(1, 31, 1.1), 0.2, (0.02, 0.32)),
        "quartic, d = 2": Case(quartic(0.5), start(2), box(2, 6)),
        # Its curvature goes down to −29, along which a path of length .8 loses its start e²³-fold: a shorter time, for
        # all methods; of .05, .1 and .2 the first is best for the kernels as well.
        "Müller–Brown, d = 2": Case(
            mj.potentials.MullerBrown(), start(2, saddle, 0.35, 2.0), box(2, 6, 0.4, saddle), 0.05, (0.2 / MANY, 0.2)
        ),
        "mixture, d = 2": Case(mixture([[-1.0, 0.5], [0.9, 0.6], [0.0, -1.0]]), start(2), box(2, 6)),
        "pits, d = 2": Case(pits, start(2), box(2, 7), 0.4),
        "curved valley, d = 2": Case(
            bend, near_floor(bend, 0.9, 0.3), along_floor(bend, 9, 0.9, (-0.3, -0.15, 0, 0.15, 0.3)), 0.2, (0.02, 0.32)
        ),
        "quartic, d = 3": Case(quartic(0.5), start(3), box(3, 3)),
        "mixture, d = 3": Case(mixture([[-1.0, 0.5, 0.3], [0.9, 0.6, -0.4], [0.0, -1.0, 0.2]]), start(3), box(3, 3)),
        "rough, d = 3": Case(rough, start(3), box(3, 4), 0.4),
    }  # fmt: skip
