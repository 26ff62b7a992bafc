"""Rivals that are a model of the whole loss, or of its gradient: polynomial, spline, kernel ridge.

Each is a function of a `View` and returns a `Found`: the gradients at α for each of its settings, of which the one that
is best in hindsight is taken.
"""

import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from sklearn.kernel_approximation import Nystroem

import malliavin_jax as mj

POLYNOMIAL_DEGREES = {1: range(2, 13), 2: range(2, 11), 3: range(2, 7)}
# Cells along each axis; finer meshes are slow beyond one dimension, and left to the automatic choice (to 28, and to 8).
MESHES = {1: (6, 12, 24, 48, 96, 192), 2: (5, 8, 12, 18), 3: (2, 4)}
RIDGE_LENGTHS = np.geomspace(0.06, 4.0, 7)  # in units of the spread of the positions
RIDGES = np.geomspace(1e-6, 1e4, 11)  # variance of the noise in units of that of the gradients
LANDMARKS = {1: 100, 2: 250, 3: 250}  # of the Nyström approximation
CHUNK = 20_000  # points whose features are held at a time


class Found(NamedTuple):
    """Gradients at each α (settings, points, d), and what each setting is called."""

    values: Any
    settings: list[str]


class View:
    """What every method is given: the observations, and the places α.

    Args:
        samples: observed, at one time or at many.
        alphas: where gradients are asked for, (points, d).
        noise: of the gradients; only the ranges of the hindsight depend on it.
        look: `look(scheme=…)` gives the same samples under another weight scheme.
        network_seconds: what the network may take.
        full: makes the field of this library whose cross-fitted control the kernels share.
    """

    def __init__(
        self,
        samples: mj.Samples,
        alphas: Any,
        noise: float,
        *,
        look: Callable[..., mj.Samples] | None = None,
        network_seconds: float = 60.0,
        full: Callable[[mj.Samples], Any] = mj.MalliavinField,
    ):
        self.samples, self.alphas, self.noise = samples, alphas, noise
        self.look, self.network_seconds, self._full = look, network_seconds, full
        self.dim, self.scale = samples.dim, float(jnp.std(samples.x))
        self.shared_seconds = 0.0  # of the control, once made

    @property
    def points(self):
        """x (n, d), gradient (n, d) and Hessian (n, d, d) of all points."""
        s = self.samples
        return tuple(part.reshape(-1, *part.shape[2:]) for part in (s.x, s.gradient, s.hessian))

    @functools.cached_property
    def control(self):
        """The potentials fitted to odd and to even episodes, which assist the even and the odd ones; None without."""
        began = time.perf_counter()
        potentials = [fold.potential for fold in self._full(self.samples).folds]
        self.shared_seconds = time.perf_counter() - began
        return tuple(potentials) if len(potentials) == 2 and None not in potentials else None


@eqx.filter_jit
def gradients(potential, x):
    return jax.vmap(potential.gradient)(x)


@eqx.filter_jit
def hessians(potential, x):
    return jax.vmap(potential.hessian)(x)


def polynomial(view):
    """The library's polynomial alone, fitted to gradients and Hessians; hindsight over its degree."""
    degrees = POLYNOMIAL_DEGREES[view.dim]
    fits = [mj.potentials.Polynomial.fit(*view.points, degree=degree) for degree in degrees]
    return Found(np.stack([gradients(fit, view.alphas) for fit in fits]), [f"degree {degree}" for degree in degrees])


def spline(view):
    """The library's spline alone, fitted to gradients and Hessians; hindsight over its mesh."""
    meshes = MESHES[view.dim]
    fits = [mj.potentials.Spline.fit(*view.points, intervals=mesh) for mesh in meshes]
    return Found(np.stack([gradients(fit, view.alphas) for fit in fits]), [f"{mesh} cells" for mesh in meshes])


def automatic_spline(view):
    """The same with the mesh that it chooses itself."""
    fit = mj.potentials.Spline.fit(*view.points)
    return Found(np.asarray(gradients(fit, view.alphas))[None], ["automatic"])


def kernel_ridge(view):
    """Kernel ridge regression of the gradients (Gaussian-process regression, by Nyström's landmarks).

    scikit-learn takes no derivatives, so Hessians are not used. Hindsight over the length and the ridge: from the
    eigenvectors of the features' Gram matrix all ridges come at once, and equal `sklearn.linear_model.Ridge`.
    """
    x, g = (np.asarray(part, np.float64) for part in view.points[:2])
    center, spread, mean = x.mean(0), x.std(0), g.mean(0)
    z, at, y = (x - center) / spread, (np.asarray(view.alphas, np.float64) - center) / spread, g - mean
    landmarks = np.random.default_rng(0).permutation(len(z))[: LANDMARKS[view.dim]]
    values, names = [], []
    for length in RIDGE_LENGTHS:
        kernel = Nystroem(gamma=0.5 / length**2, n_components=len(landmarks), random_state=0).fit(z[landmarks])
        gram, right = 0.0, 0.0
        for first in range(0, len(z), CHUNK):
            features = kernel.transform(z[first : first + CHUNK])
            gram, right = gram + features.T @ features, right + features.T @ y[first : first + CHUNK]
        eigenvalues, vectors = np.linalg.eigh(gram)
        left, turned = kernel.transform(at) @ vectors, vectors.T @ right
        for ridge in RIDGES:
            values.append(mean + left @ (turned / (np.maximum(eigenvalues, 0.0) + ridge)[:, None]))
            names.append(f"length {length:.2g}, ridge {ridge:.0e}")
    return Found(np.stack(values), names)
