"""Weights under a schedule of step sizes: every scheme against the divergence by autodiff, and even schedules."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import malliavin_jax as mj

SIZES = jnp.asarray([0.05, 0.01, 0.03, 0.002, 0.04, 0.02])
TIMES = np.concatenate([[0.0], np.cumsum(SIZES)])
BETA = 2.0


def coupled(x):
    """A loss whose derivatives of every order mix the coordinates."""
    return jnp.sum(x**4) / 4 + jnp.sum(x**2) / 2 + 0.3 * jnp.sum(jnp.sin(2 * x)) * jnp.sum(x)


gradient, hessian = jax.grad(coupled), jax.hessian(coupled)
third = jax.jacfwd(hessian)


def schemes(d):
    turned = jnp.asarray(np.linalg.qr(np.random.default_rng(d).normal(size=(d, d)))[0])
    return {
        "even": mj.Adapted(0.0),
        "adapted": mj.Adapted(4.0),
        "turned": mj.Adapted(jnp.linspace(1.0, 9.0, d), turned),
        "canonical": mj.Canonical(third),
        "windowed": mj.Windowed(3.0, third),
        "reciprocal": mj.Reciprocal(third),
        "fixed": mj.weights.FixedWindow(jnp.asarray([0.1, 0.0, -0.2, 0.4, 0.3, 0.4]), third),
    }


SCHEMES = {d: schemes(d) for d in (1, 2, 4)}


def states(noise, start):
    def step(x, now):
        xi, size = now
        x = x - size * gradient(x) + jnp.sqrt(2 * size / BETA) * xi
        return x, x

    return jnp.concatenate([start[None], jax.lax.scan(step, start, (noise, SIZES))[1]])


def integrand(scheme, noise, start):
    """u, (steps, d, d): column i of u_k moves X_n along coordinate i."""
    d = len(start)
    if isinstance(scheme, mj.Adapted):
        rates, Q = np.broadcast_to(np.asarray(scheme.rate), (d,)), np.eye(d)
        Q = Q if scheme.directions is None else np.asarray(scheme.directions)
        shares = TIMES[:, None] * np.ones(d) / TIMES[-1]
        if np.all(rates > 0):
            shares = np.sinh(rates * TIMES[:, None]) / np.sinh(rates * TIMES[-1])
        h = np.einsum("ab,kb,cb->kac", Q, shares, Q)
        M = jnp.eye(d)[None] - SIZES[:, None, None] * jax.vmap(hessian)(states(noise, start)[:-1])
        return (h[1:] - M @ h[:-1]) * jnp.sqrt(BETA / (2 * SIZES))[:, None, None]
    D = jax.jacfwd(lambda xi: states(xi, start)[-1])(noise)  # (d, steps, d)
    if isinstance(scheme, mj.Canonical):
        flat = D.reshape(d, -1)
        return (flat.T @ jnp.linalg.inv(flat @ flat.T)).reshape(*noise.shape, -1)
    if isinstance(scheme, mj.weights.FixedWindow):
        a = scheme.window
    else:
        rate = scheme.rate if isinstance(scheme, mj.Windowed) else 0.0
        a = SIZES * np.exp(-2 * rate * (TIMES[-1] - TIMES[1:]))
    return (a / a.sum())[:, None, None] * jnp.linalg.inv(D.transpose(1, 0, 2))


def path_of(noise, start):
    x = states(noise, start)
    derivatives = jax.vmap(gradient)(x), jax.vmap(hessian)(x)
    return mj.Path(x, *derivatives, jnp.append(SIZES, jnp.nan), jnp.asarray(BETA), jnp.asarray(len(SIZES)))


@jax.jit
def witnesses(noise, start):
    """For every scheme: S of the package, S by autodiff on the increments, and Σ_k (∂X_n/∂ξ_k) u_k."""
    path, found = path_of(noise, start), {}
    D = jax.jacfwd(lambda xi: states(xi, start)[-1])(noise)
    for name, scheme in SCHEMES[len(start)].items():
        of_noise = functools.partial(integrand, scheme, start=start)
        u, du = of_noise(noise), jax.jacfwd(of_noise)(noise)
        S = jnp.einsum("kai,ka->i", u, noise) - jnp.einsum("kaika->i", du)
        found[name] = mj.weigh(path, scheme)[-1], S, jnp.einsum("jka,kai->ji", D, u)
    return found


@pytest.mark.parametrize("d", [1, 2, 4])
def test_weight_is_the_divergence_on_the_increments(d, key):
    noise, start = jax.random.normal(key, (len(SIZES), d)), jnp.linspace(-0.5, 0.7, d) + 0.1
    for name, (got, expected, unit) in witnesses(noise, start).items():
        np.testing.assert_allclose(unit, np.eye(d), rtol=0, atol=1e-9, err_msg=name)
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-9, err_msg=name)


@pytest.mark.parametrize("d", [1, 3])
def test_a_schedule_that_never_varies_is_one_step_size(d, key):
    """Observed third derivatives too, and the series in place of the solve."""
    learner = mj.ForwardLearner(mj.potentials.Quartic(0.5), mj.initial.Normal(jnp.zeros(d), jnp.ones(d)), 0.02, 2.0)
    path = jax.jit(lambda key: mj.simulate(key, learner, 12))(key)
    even = mj.Path(path.x, path.gradient, path.hessian, jnp.full(13, 0.02), jnp.asarray(2.0), path.last_step)
    for scheme in (mj.Adapted(3.0), mj.Canonical(), mj.Windowed(4.0), mj.Windowed(4.0, neumann=4), mj.Reciprocal()):
        expected = np.asarray(mj.weigh(path, scheme))
        np.testing.assert_allclose(mj.weigh(even, scheme), expected, rtol=0, atol=1e-11 * (1 + np.abs(expected).max()))
