"""`Adapted` weights: against the divergence by autodiff, and on a rough loss, where the covariation is biased."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import malliavin_jax as mj
from malliavin_jax.potentials import AbstractPotential, Quartic

STEPS, STEP_SIZE, BETA = 6, 0.03, 2.0


def coupled(x):
    """A loss whose derivatives of every order mix the coordinates."""
    return jnp.sum(x**4) / 4 + jnp.sum(x**2) / 2 + 0.3 * jnp.sum(jnp.sin(2 * x)) * jnp.sum(x)


gradient, hessian = jax.grad(coupled), jax.hessian(coupled)


def states(noise, start):
    def step(x, xi):
        x = x - STEP_SIZE * gradient(x) + np.sqrt(2 * STEP_SIZE / BETA) * xi
        return x, x

    return jnp.concatenate([start[None], jax.lax.scan(step, start, noise)[1]])


def shifts(scheme, d):
    """h_0 … h_n from the formula with sinh, (n + 1, d, d)."""
    rates = np.broadcast_to(np.asarray(scheme.rate), (d,))
    Q = np.eye(d) if scheme.directions is None else np.asarray(scheme.directions)
    k = np.arange(STEPS + 1)[:, None]
    if np.all(rates == 0):
        return k[:, :, None] / STEPS * np.eye(d)
    h = np.sinh(rates * STEP_SIZE * k) / np.sinh(rates * STEP_SIZE * STEPS)
    return np.einsum("ab,kb,cb->kac", Q, h, Q)


def integrand(noise, start, h):
    """u, (steps, d, d): column i of u_k moves X_n along coordinate i."""
    M = jax.vmap(lambda x: jnp.eye(len(x)) - STEP_SIZE * hessian(x))(states(noise, start)[:-1])
    return (h[1:] - M @ h[:-1]) * np.sqrt(BETA / (2 * STEP_SIZE))


def path_of(noise, start):
    x = states(noise, start)
    derivatives = jax.vmap(gradient)(x), jax.vmap(hessian)(x)
    return mj.Path(x, *derivatives, jnp.asarray(STEP_SIZE), jnp.asarray(BETA), jnp.asarray(STEPS))


@jax.jit
def witnesses(noise, start, h):
    u, du = integrand(noise, start, h), jax.jacfwd(integrand)(noise, start, h)
    divergence = jnp.einsum("kaika->i", du)
    D = jax.jacfwd(lambda xi: states(xi, start)[-1])(noise)
    return jnp.einsum("kai,ka->i", u, noise) - divergence, jnp.einsum("jka,kai->ji", D, u), path_of(noise, start)


def schemes(d):
    turned = np.linalg.qr(np.random.default_rng(d).normal(size=(d, d)))[0]
    rates = jnp.linspace(1.0, 9.0, d)
    return mj.Adapted(0.0), mj.Adapted(4.0), mj.Adapted(rates), mj.Adapted(rates, jnp.asarray(turned))


@pytest.mark.parametrize("d", [1, 2, 3, 4])
def test_weight_is_the_divergence_on_the_increments(d, key):
    noise, start = jax.random.normal(key, (STEPS, d)), jnp.linspace(-0.5, 0.7, d) + 0.1
    for scheme in schemes(d):
        S, unit, path = witnesses(noise, start, shifts(scheme, d))
        np.testing.assert_allclose(unit, np.eye(d), rtol=0, atol=1e-10)
        np.testing.assert_allclose(mj.weigh(path, scheme)[-1], S, rtol=0, atol=1e-10, err_msg=str(scheme))


@pytest.mark.parametrize("d", [1, 3, 4])
def test_float32_is_float64_up_to_rounding(d, key):
    path = path_of(jax.random.normal(key, (STEPS, d)), jnp.linspace(-0.5, 0.7, d))
    single = jax.tree.map(lambda leaf: leaf.astype(jnp.float32) if leaf.dtype == jnp.float64 else leaf, path)
    for scheme in schemes(d):
        got, expected = mj.weigh(single, scheme), mj.weigh(path, scheme)
        assert got.dtype == jnp.float32
        # σξ is the difference of positions of size one, read to 2⁻²⁴ and divided by σ² = .03
        np.testing.assert_allclose(got, expected, rtol=0, atol=40 * 2.0**-24 * STEPS / 0.03)


class Rough(AbstractPotential):
    """L = x²/2 + .3 sin 6x + .08 sin(12x + 1): third derivatives up to 196."""

    def value(self, x):
        return jnp.sum(x**2 / 2 + 0.3 * jnp.sin(6 * x) + 0.08 * jnp.sin(12 * x + 1))

    def gradient(self, x):
        return x + 1.8 * jnp.cos(6 * x) + 0.96 * jnp.cos(12 * x + 1)

    def hessian(self, x):
        return jnp.diag(1 - 10.8 * jnp.sin(6 * x) - 11.52 * jnp.sin(12 * x + 1))

    def third(self, x):
        return (-64.8 * jnp.cos(6 * x) - 138.24 * jnp.cos(12 * x + 1)).reshape(1, 1, 1)


def rough_learner(noise):
    return mj.ForwardLearner(
        Rough(), mj.initial.Normal(jnp.zeros(1, jnp.float32), jnp.ones(1, jnp.float32)), 0.01, gradient_noise=noise
    )


def slopes_apart(samples):
    """φ(X) S − φ'(X) in float64, for φ = tanh 2x, sin x, x, and sin(6x + 1.2), which follows the ripples."""
    x, S = (np.asarray(leaf, np.float64)[:, 0, 0] for leaf in (samples.x, samples.weight))
    values = np.stack([np.tanh(2 * x), np.sin(x), x, np.sin(6 * x + 1.2)], axis=1)
    slopes = np.stack([2 / np.cosh(2 * x) ** 2, np.cos(x), np.ones_like(x), 6 * np.cos(6 * x + 1.2)], axis=1)
    return values * S[:, None] - slopes


def z_scores(values):
    return values.mean(0) / (values.std(0) / np.sqrt(len(values)))


def test_the_rough_loss_is_rough():
    x = jnp.linspace(-3.0, 3.0, 2001)[:, None]
    np.testing.assert_allclose(jax.vmap(jax.jacfwd(Rough().hessian))(x), jax.vmap(Rough().third)(x), atol=1e-9)
    assert 190 < np.abs(jax.vmap(Rough().third)(x)).max() < 205


@pytest.mark.parametrize("noise", [0.0, 5.0])
def test_a_rough_loss(noise, key):
    """The default is exact there; the covariation, on as many episodes, is seen not to be."""
    run = functools.partial(mj.observe, key, rough_learner(noise), num_episodes=100_000, times=[0.8])
    default, covariation = (slopes_apart(run(scheme=scheme)) for scheme in (None, mj.Canonical()))
    assert np.abs(z_scores(default)).max() < 4
    assert z_scores(covariation)[-1] > 4
    assert np.all(default.std(0)[:3] < 0.6 * covariation.std(0)[:3])


@pytest.mark.slow
@pytest.mark.parametrize("noise", [0.0, 5.0])
def test_a_rough_loss_at_two_million_episodes(noise):
    learner, schemes = rough_learner(noise), {"default": None, "covariation": mj.Canonical()}
    sums = {name: np.zeros((2, 4)) for name in schemes}
    chunks, size = 20, 100_000
    for key in jax.random.split(jax.random.key(11), chunks):
        for name, scheme in schemes.items():
            values = slopes_apart(mj.observe(key, learner, num_episodes=size, times=[0.8], scheme=scheme))
            sums[name] += values.sum(0), (values**2).sum(0)
    z = {}
    for name, (first, second) in sums.items():
        mean = first / (chunks * size)
        error = np.sqrt((second / (chunks * size) - mean**2) / (chunks * size))
        z[name] = mean / error
        print(name, "noise", noise, "bias", mean, "standard error", error)
    assert np.abs(z["default"]).max() < 4
    assert z["covariation"].min() > 4


def test_fitted_rate_is_the_root_mean_square_and_near_the_least():
    learner = mj.ForwardLearner(Quartic(), mj.initial.Normal(), 0.01)
    paths = jax.jit(jax.vmap(lambda key: mj.simulate(key, learner, 80)))(jax.random.split(jax.random.key(4), 4000))
    H = paths.hessian[:, 40:].reshape(-1, 1, 1)
    fitted = mj.Adapted.fit(H)
    assert float(fitted.rate) == pytest.approx(float(jnp.sqrt(jnp.mean(H**2))), rel=1e-12)
    second_moment = jax.jit(lambda s: jnp.mean(jax.vmap(lambda p: mj.weigh(p, s)[-1, 0] ** 2)(paths)))
    rates = [mj.Adapted(fitted.rate * factor) for factor in (0.25, 0.5, 0.8, 1.25, 2.0, 4.0)]
    moments = [float(second_moment(rate)) for rate in rates]
    assert float(second_moment(fitted)) < 1.01 * min(moments)
    assert max(moments) > 1.1 * min(moments)
    # Bad rows and rows that do not count are left out.
    spoiled, where = jnp.concatenate([H, jnp.full((2, 1, 1), jnp.nan), 99 * H]), jnp.arange(2 * len(H) + 2) < len(H) + 2
    assert float(mj.Adapted.fit(spoiled, where).rate) == pytest.approx(float(fitted.rate), rel=1e-12)


def test_fitted_directions_are_those_of_the_loss():
    """Of a quadratic loss: its own eigenvectors and eigenvalues."""
    P = jnp.asarray([[30.0, 9.0], [9.0, 6.0]])
    fitted = mj.Adapted.fit(P[None])
    Q = np.asarray(fitted.directions)
    np.testing.assert_allclose(Q * np.asarray(fitted.rate) @ Q.T, P, rtol=1e-12)


@pytest.mark.usefixtures("no_type_checks")
def test_arguments():
    with pytest.raises(ValueError, match="rate must be non-negative and finite, got -1"):
        mj.Adapted(-1.0)
    with pytest.raises(ValueError, match=r"rate must be one number or one for each direction, got shape \(2, 2\)"):
        mj.Adapted(jnp.ones((2, 2)))
    with pytest.raises(ValueError, match=r"rate must hold one number for each of the directions, got 1\.0"):
        mj.Adapted(1.0, jnp.eye(2))
    with pytest.raises(ValueError, match="directions"):
        mj.Adapted(jnp.ones(2), jnp.eye(3))
    with pytest.raises(ValueError, match="rate"):
        mj.Adapted(jnp.ones(2)).init(3, jnp.float32)
    with pytest.raises(ValueError, match="hessian"):
        mj.Adapted.fit(jnp.ones((3, 3)))
