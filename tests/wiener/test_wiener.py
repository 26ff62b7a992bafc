"""Theorem 1 for functionals of any diffusion: against autodiff, quadrature, closed forms and brute force."""

import functools
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import malliavin_jax as mj
from malliavin_jax import wiener
from malliavin_jax.wiener.calculus import Probes, canonical_weight, reciprocal_weight
from malliavin_jax.wiener.sensitivities import end_and_weight

STEPS = 6
EPS = 0.1


# Processes and functionals are made once: a second seed then finds them compiled.


@functools.cache
def brownian(num_steps, dtype=jnp.float64):
    """Brownian motion on [0, 1]."""
    return wiener.Diffusion(
        lambda x, t: jnp.zeros_like(x),
        lambda x, t: jnp.ones((1, 1), x.dtype),
        jnp.zeros(1, dtype),
        1 / num_steps,
        num_steps,
    )


@functools.cache
def curved(noises):
    """Two coordinates, drift and noise both depending on state and time; nothing about it is special."""

    def drift(x, t):
        return jnp.stack([jnp.sin(x[1]) - x[0] * t, 0.3 * x[0] - x[1]])

    def diffusion(x, t):
        columns = [jnp.stack([1 + 0.3 * jnp.cos(x[1]), 0.2 * x[0]]), jnp.stack([0.1 + 0.2 * t, 0.8 + 0.1 * x[0] ** 2])]
        return jnp.stack(columns[:noises], 1)

    return wiener.Diffusion(drift, diffusion, jnp.asarray([0.3, -0.5]), EPS, STEPS)


def average(path):
    """The time integral of the first coordinate, by the trapezoidal rule."""
    return jnp.trapezoid(path.x[:, 0], path.t)


def end(path):
    return path.x[-1, 0]


def final_noise(path):
    """W_T, straight from the increments."""
    return jnp.sum(path.dw)


def bent(path):
    """A functional whose derivative never vanishes and whose second derivative does not either."""
    return end(path) + 0.3 * average(path) ** 2 + 0.1 * jnp.sin(path.x[-1, -1]) + 0.2 * jnp.sum(path.dw)


def several(path):
    return jnp.stack([jnp.sin(bent(path)), average(path) ** 2, path.x[-1, 1], jnp.ones(())])


def on(diffusion, functional):
    return lambda w: functional(diffusion.solve(diffusion.initial, w))


def draw(key, diffusion):
    return diffusion.draw(key)[1]


def divergence(integrand, w, step_size):
    """S(u) written out, with the whole Jacobian of u."""
    Du = jax.jacfwd(integrand)(w)
    return jnp.sum(integrand(w) * w) - step_size * jnp.einsum("kaka->", Du)


EXACT = Probes(None, None)
KEYS = [jax.random.key(seed) for seed in (0, 1)]


def check(estimate, truth):
    assert bool(estimate.trusted)
    np.testing.assert_array_less(np.abs(estimate.value - np.asarray(truth)), 4 * estimate.stderr)


# ---------------------------------------------------------------- the calculus, on one path


@pytest.mark.parametrize("noises", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_weights_are_the_divergence_on_the_increments(noises):
    diffusion = curved(noises)
    g = on(diffusion, bent)

    @jax.jit
    def witnesses(w):
        D = jax.grad(g)
        integrands = (
            lambda w: D(w) / (EPS * jnp.sum(D(w) ** 2)),
            lambda w: D(w) / (STEPS * EPS * jnp.sum(D(w) ** 2, 1, keepdims=True)),
        )
        ours = [weight(g, w, jnp.asarray(EPS), EXACT) for weight in (canonical_weight, reciprocal_weight)]
        public = [choice(g, w, EPS) for choice in (wiener.canonical, wiener.reciprocal)]
        theirs = [(integrand(w), divergence(integrand, w, EPS)) for integrand in integrands]
        return wiener.derivative(g, w), D(w), ours, public, theirs

    for key in KEYS:
        D, gradient, *rest = witnesses(draw(key, diffusion))
        assert D.shape == (STEPS, noises)
        np.testing.assert_allclose(D, gradient, atol=1e-12)
        for ours, public, (u, S) in zip(*rest, strict=True):
            np.testing.assert_allclose(wiener.inner(D, u, EPS), 1, atol=1e-12)
            np.testing.assert_allclose(public, u, atol=1e-11)
            np.testing.assert_allclose(ours.u, u, atol=1e-11)
            np.testing.assert_allclose(ours.integral, S, atol=1e-10)


def test_skorohod_of_any_process():
    w = draw(KEYS[0], curved(2))

    def ahead(w):  # the first entry knows the last increment
        return jnp.cos(w[::-1]) * jnp.sum(w) + w**2

    def adapted(w):
        return jnp.concatenate([jnp.ones((1, 2)), jnp.sin(jnp.cumsum(w, 0)[:-1])])

    @jax.jit
    def integrals(w, keys):
        rough = jax.vmap(lambda key: wiener.skorohod(ahead, w, EPS, probes=3, key=key))(keys)
        return wiener.skorohod(ahead, w, EPS), divergence(ahead, w, EPS), wiener.skorohod(adapted, w, EPS), rough

    ours, witness, ito, rough = map(np.asarray, integrals(w, jax.random.split(KEYS[1], 1000)))
    np.testing.assert_allclose(ours, witness, atol=1e-12)
    np.testing.assert_allclose(ito, jnp.sum(adapted(w) * w), atol=1e-12)
    assert 0 < abs(rough.mean() - witness) < 4 * rough.std() / math.sqrt(len(rough))


def test_derivative_of_a_vector():
    def F(w):
        return jnp.stack([jnp.sum(w) ** 2, w[0, 1] * w[3, 0], jnp.sin(w[2, 1])])

    w = draw(KEYS[0], curved(2))
    np.testing.assert_allclose(wiener.derivative(F, w), jax.jacrev(F)(w), atol=1e-12)


@pytest.mark.parametrize("choice", [wiener.canonical, wiener.reciprocal])
def test_duality_by_quadrature(choice):
    """E[F S(u)] = E⟨DF, u⟩ on two increments, both sides by Gauss–Hermite: no statistics in it."""
    step_size, nodes = 0.3, 50
    z, p = np.polynomial.hermite_e.hermegauss(nodes)
    grid = np.sqrt(step_size) * np.stack(np.meshgrid(z, z, indexing="ij"), -1).reshape(-1, 2, 1)
    mass = np.outer(p, p).reshape(-1) / (2 * math.pi)

    def g(w):
        return w[0, 0] + w[1, 0] + 0.3 * jnp.sin(w[0, 0] * 0.7 + w[1, 0]) + 0.1 * w[0, 0]

    def F(w):
        return jnp.sin(w[0, 0]) * w[1, 0] ** 2 + jnp.exp(0.5 * w[0, 0])

    @jax.jit
    @jax.vmap
    def sides(w):
        u = functools.partial(choice, g, step_size=step_size)
        S = wiener.skorohod(u, w, step_size)
        return F(w) * S, wiener.inner(wiener.derivative(F, w), u(w), step_size)

    left, right = sides(jnp.asarray(grid))
    np.testing.assert_allclose(mass @ left, mass @ right, rtol=1e-7)
    assert abs(mass @ right) > 0.1


def test_probes_are_unbiased():
    """On one path, over many draws of the probes: the exact integral."""
    diffusion, eps, number = curved(1), jnp.asarray(EPS), 2000
    g = on(diffusion, bent)

    @jax.jit
    def draws(w, keys):
        def both(ways):
            return jnp.stack([weight(g, w, eps, ways).integral for weight in (canonical_weight, reciprocal_weight)])

        return both(EXACT), jax.vmap(lambda key: both(Probes(2, key)))(keys)

    for key in KEYS:
        exact, estimates = map(np.asarray, draws(draw(key, diffusion), jax.random.split(key, number)))
        spread = estimates.std(0) / math.sqrt(number)
        assert np.all(spread > 0)
        assert np.all(np.abs(estimates.mean(0) - exact) < 4 * spread)


def test_remark_one_of_the_paper():
    """g = ∫W: D_t g = T − t and u = 3(T−t)/T³; the reciprocal choice is not in H."""
    horizon, norms = 2.0, []
    for n in (20, 40, 80):
        eps = horizon / n
        middle = eps * (np.arange(n) + 0.5)

        def g(w, eps=eps):
            W = jnp.concatenate([jnp.zeros(1), jnp.cumsum(w[:, 0])])
            return jnp.trapezoid(W, dx=eps)

        w = jnp.zeros((n, 1))
        np.testing.assert_allclose(wiener.derivative(g, w)[:, 0], horizon - middle, atol=1e-12)
        u, reciprocal = wiener.canonical(g, w, eps), wiener.reciprocal(g, w, eps)
        np.testing.assert_allclose(u[:, 0], 3 * (horizon - middle) / horizon**3, rtol=1 / n**2)
        norms.append([float(wiener.inner(v, v, eps)) for v in (u, reciprocal)])
    norms = np.asarray(norms)
    np.testing.assert_allclose(norms[:, 0], 3 / horizon**3, rtol=1e-3)
    assert np.all(norms[1:, 1] > 1.9 * norms[:-1, 1]), "doubles with the number of steps"


def test_reciprocal_is_called_out_where_its_norm_diverges():
    def integral(path, last):
        W = jnp.cumsum(path.dw[:, 0])
        return (jnp.sum(W) - last * W[-1]) * (path.t[1] - path.t[0])

    run = functools.partial(
        wiener.weigh, KEYS[0], brownian(40), final_noise, num_paths=50, integrand="reciprocal"
    )  # fmt: skip
    with pytest.warns(RuntimeWarning, match="81% of ‖u‖²"):
        run(g=functools.partial(integral, last=0.5))
    with pytest.raises(ValueError, match=r"reciprocal one gives (nan|0\.97).*Dg vanishes at some step"):
        run(g=functools.partial(integral, last=1.0))  # the left-point rule: the last increment does not move it


def test_agrees_with_the_recursions_for_the_learner():
    """The same increments through the recursions, with the exact third derivative, and through autodiff."""
    n, eps, beta = 8, 0.05, 2.0
    loss = mj.potentials.Quartic()
    third = lambda x: (6 * x)[:, None, None]  # noqa: E731
    diffusion = wiener.Diffusion(
        lambda x, t: -loss.gradient(x), lambda x, t: jnp.full((1, 1), math.sqrt(2 / beta)), jnp.asarray([0.4]), eps, n
    )

    @jax.jit
    def both(w):
        x = diffusion.solve(diffusion.initial, w).x
        gradient, hessian = jax.vmap(loss.gradient)(x), jax.vmap(loss.hessian)(x)
        path = mj.Path(x, gradient, hessian, jnp.asarray(eps), jnp.asarray(beta), jnp.asarray(n))
        weights = canonical_weight, reciprocal_weight
        ours = [weight(on(diffusion, end), w, jnp.asarray(eps), EXACT).integral for weight in weights]
        return ours, [mj.weigh(path, scheme)[-1, 0] for scheme in (mj.Canonical(third), mj.Reciprocal(third))]

    for key in KEYS:
        ours, theirs = both(draw(key, diffusion))
        np.testing.assert_allclose(ours, theirs, atol=1e-11)


# ---------------------------------------------------------------- many paths


def late(path):
    """A process of the user's: late increments, divided by what they move `bent`."""
    ramp = jnp.linspace(0.0, 1.0, STEPS)[:, None] * jnp.ones_like(path.dw)
    _, unit = jax.jvp(on(curved(1), bent), (path.dw,), (ramp,))
    return ramp / (EPS * unit)


@pytest.mark.parametrize(("integrand", "noises"), [("canonical", 2), (late, 1)])
def test_duality(integrand, noises, key):
    sample = wiener.weigh(key, curved(noises), several, bent, num_paths=20_000, integrand=integrand)
    gap = np.asarray(sample.ell * sample.weight[:, None] - sample.slope)
    assert np.all(np.abs(gap.mean(0)) < 4 * gap.std(0) / math.sqrt(len(gap)))
    assert gap.std() > 0.1
    np.testing.assert_allclose(sample.slope[:, 0], np.cos(sample.g), atol=1e-9)  # ⟨D sin(g), u⟩ = cos(g)
    np.testing.assert_array_equal(sample.slope[:, 3], 0)


def test_probes_only_add_variance(key):
    """Conditioning with a random trace: unbiased, with an honest standard error."""
    run = functools.partial(wiener.weigh, key, curved(2), several, bent, num_paths=20_000)
    exact, rough = run(), run(probes=1)
    np.testing.assert_allclose(exact.g, rough.g, atol=1e-12)
    added = np.asarray(rough.weight - exact.weight)
    assert added.std() > 0.01
    assert abs(added.mean()) < 4 * added.std() / math.sqrt(len(added))
    one, other = (wiener.conditional_expectation(s, 0.2, mj.Centered()) for s in (exact, rough))
    assert np.all(other.stderr[1:3] > one.stderr[1:3])
    assert np.all(np.abs(one.value - other.value)[:3] < 4 * other.stderr[:3])


def test_chunks_are_a_loop_over_paths():
    """Each path on its own, by the functions of one path, gives what the chunks give."""
    diffusion, key, number = curved(2), KEYS[0], 7
    sample = wiener.weigh(key, diffusion, several, bent, num_paths=number, chunk_size=3)

    @jax.jit
    def alone(key):
        w = draw(jax.random.split(key)[0], diffusion)
        S, u = canonical_weight(on(diffusion, bent), w, jnp.asarray(EPS), EXACT)
        ell, slope = jax.jvp(on(diffusion, several), (w,), (u,))
        return on(diffusion, bent)(w), ell, S, EPS * slope

    loop = zip(*(alone(k) for k in jax.random.split(key, number)), strict=True)
    for leaf, expected in zip((sample.g, sample.ell, sample.weight, sample.slope), loop, strict=True):
        np.testing.assert_allclose(leaf, np.stack(expected), rtol=1e-10, atol=1e-10)


@pytest.fixture(scope="module")
def bridge():
    """Brownian motion with ℓ = (∫W, W_T²) conditioned at its end, through a g that is not linear: sinh W_T."""
    ell = lambda path: jnp.stack([average(path), end(path) ** 2])  # noqa: E731
    return wiener.weigh(jax.random.key(7), brownian(16), ell, lambda path: jnp.sinh(end(path)), num_paths=20_000)


@jax.jit
def query(sample, levels, localizer):
    return jax.vmap(lambda level: wiener.conditional_expectation(sample, level, localizer))(levels)


def test_brownian_bridge(bridge):
    """E[∫W | W_T = a] = aT/2, by every localizer."""
    a = np.asarray([-0.8, 0.0, 0.5])
    density = np.exp(-(a**2) / 2) / math.sqrt(2 * math.pi) / np.cosh(a)
    chosen = wiener.best_localizer(bridge)
    assert isinstance(chosen, mj.Laplace)
    for localizer in (chosen, mj.Centered(), mj.Heaviside(), mj.Gaussian(jnp.asarray(0.5), jnp.asarray(0.02))):
        estimate = query(bridge, jnp.asarray(np.sinh(a)), localizer)
        assert np.all(estimate.trusted)
        assert np.all(np.abs(estimate.value - np.stack([a / 2, a * a], 1)) < 4 * estimate.stderr)
        assert np.all(np.abs(estimate.density - density) < 4 * estimate.density_stderr)


def test_automatic_length_is_the_best(bridge):
    def error(localizer):
        return float(jnp.mean(query(bridge, jnp.asarray([-0.8, 0.0, 0.5]), localizer).stderr[:, 0] ** 2)) ** 0.5

    least = min(error(mj.Laplace(jnp.asarray(h))) for h in (0.1, 0.4, 1.5, 6.0))
    assert error(wiener.best_localizer(bridge)) < 1.1 * least


def test_ornstein_uhlenbeck_bridge():
    """E[∫X | X_T = a] = (x_0 + a) tanh(θT/2)/θ; the chain is the exact one, so only the rule for ∫ errs, by 1e-4."""
    theta, sigma, n, start, a = 1.5, 0.7, 32, 0.6, -0.3
    eps = 1.0 / n
    decay = math.exp(-theta * eps)
    spread = sigma * math.sqrt((1 - decay**2) / (2 * theta * eps))
    process = wiener.Diffusion(
        lambda x, t: (decay - 1) / eps * x, lambda x, t: jnp.full((1, 1), spread), jnp.asarray([start]), eps, n
    )
    g = lambda path: end(path) - a  # noqa: E731
    for key in KEYS:
        sample = wiener.weigh(key, process, average, g, num_paths=10_000)
        check(wiener.conditional_expectation(sample), [(start + a) * math.tanh(theta / 2) / theta])


def test_black_scholes():
    """E[(S_T − K)⁺ | S_t = x] for geometric Brownian motion, with several strikes at once."""
    vol, rate, n = 0.3, 0.05, 4
    strikes = np.asarray([80.0, 100.0, 120.0])
    price = wiener.Diffusion(  # in log S, where Euler's chain is exact; t = 1/2, T = 1
        lambda x, t: jnp.full((1,), rate - vol**2 / 2),
        lambda x, t: jnp.full((1, 1), vol),
        jnp.log(jnp.asarray([100.0])),
        1 / n,
        n,
    )
    calls = lambda path: jnp.maximum(jnp.exp(end(path)) - jnp.asarray(strikes), 0)  # noqa: E731
    midway = lambda path: jnp.exp(path.x[n // 2, 0])  # noqa: E731
    for key in KEYS:
        sample = wiener.weigh(key, price, calls, midway, num_paths=20_000)
        for x in (90.0, 100.0, 115.0):
            forward, spread = x * math.exp(rate / 2), vol * math.sqrt(0.5)
            d1 = np.log(forward / strikes) / spread + spread / 2
            call = forward * stats.norm.cdf(d1) - strikes * stats.norm.cdf(d1 - spread)
            check(wiener.conditional_expectation(sample, x), call)
    # where a payoff is always 0 the narrowest kernel has no variance at all, and must not be chosen for that
    far = wiener.WeighedPaths(sample.g, sample.ell[:, 2:], sample.weight, sample.slope[:, 2:])
    assert float(wiener.best_localizer(far).length) > 0.2 * float(jnp.std(sample.g))


def test_conditioning_a_learner_on_its_time_average():
    """E[(X_T, X_T²) | ∫X = a] for Langevin dynamics, against rejection in a window that shrinks."""
    loss, n, a = mj.potentials.Quartic(), 20, 0.4
    process = wiener.Diffusion(
        lambda x, t: -loss.gradient(x),
        lambda x, t: jnp.full((1, 1), math.sqrt(2)),
        lambda key: jax.random.normal(key, (1,)),
        1 / n,
        n,
    )
    ell = lambda path: jnp.stack([end(path), end(path) ** 2])  # noqa: E731

    @jax.jit
    @jax.vmap
    def brute_force(key):
        path = process.solve(*process.draw(key))
        return average(path), ell(path)

    for key in KEYS:
        one, other = jax.random.split(key)
        estimate = wiener.conditional_expectation(wiener.weigh(one, process, ell, average, num_paths=20_000), a)
        g, values = map(np.asarray, brute_force(jax.random.split(other, 300_000)))
        means, errors, densities = [], [], []
        for window in (0.2, 0.1, 0.05):
            kept = values[np.abs(g - a) < window]
            means.append(kept.mean(0))
            errors.append(kept.std(0) / math.sqrt(len(kept)))
            densities.append(len(kept) / len(g) / (2 * window))
        assert bool(estimate.trusted)
        assert np.all(np.abs(estimate.value - means[-1]) < 4 * np.hypot(estimate.stderr, errors[-1]))
        assert np.all(estimate.stderr < 0.6 * math.sqrt(15) * errors[-1]), "as rejection from as many paths has"
        # the window's bias is quadratic: once more halved, and extrapolated, it leaves the same number
        limit = (4 * means[1] - means[0]) / 3
        assert np.all(np.abs(estimate.value - limit) < 4 * np.hypot(estimate.stderr, 5 / 3 * errors[1]))
        noise = math.sqrt(densities[-1] / (0.1 * len(g)))
        assert abs(float(estimate.density) - densities[-1]) < 4 * np.hypot(float(estimate.density_stderr), noise)


def test_float32_and_jit():
    process = brownian(8, jnp.float32)
    traced = eqx.filter_jit(
        functools.partial(wiener.weigh, diffusion=process, ell=average, g=final_noise, num_paths=500)
    )
    sample = traced(jax.random.key(0))
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(sample))
    np.testing.assert_allclose(sample.weight, sample.g, atol=1e-5)  # S = W_T/T
    np.testing.assert_allclose(sample.slope, 0.5, atol=1e-5)  # ⟨D∫W, u⟩ = ½
    at = query(sample, jnp.asarray([0.0, 0.5], jnp.float32), mj.Laplace(0.5))
    assert at.value.dtype == jnp.float32
    assert at.value.shape == (2, 1)


# ---------------------------------------------------------------- derivatives of expectations

VOL, CORRELATION = np.asarray([0.25, 0.20]), 0.2
MIX = np.linalg.cholesky([[1.0, CORRELATION], [CORRELATION, 1.0]])


def digital_put_deltas(strike=100.0):
    """∂/∂S_i of P(S_1 < K, S_2 < K), both at the money, no interest: bivariate normal."""
    d = VOL / 2
    other = stats.norm.cdf((d[::-1] - CORRELATION * d) / math.sqrt(1 - CORRELATION**2))
    return -stats.norm.pdf(d) * other / (strike * VOL)


def below(x):
    """The digital put: one if both assets, in logarithms, end below the strike."""
    return jnp.all(x < math.log(100.0)).astype(x.dtype)


def test_deltas_of_a_digital_put_on_two_assets():
    exact = digital_put_deltas()
    np.testing.assert_allclose(exact, [-0.0083998002, -0.0107707324], atol=5e-11)
    put = stats.multivariate_normal(cov=[[1.0, CORRELATION], [CORRELATION, 1.0]]).cdf(VOL / 2)
    logs = wiener.Diffusion(
        lambda x, t: jnp.asarray(-(VOL**2) / 2),
        lambda x, t: jnp.asarray(VOL[:, None] * MIX),
        jnp.log(jnp.full((2,), 100.0)),
        0.25,
        4,
    )
    for key in KEYS:
        result = wiener.greeks(key, logs, below, num_paths=200_000)
        delta, error = result.delta[0] / 100, result.delta_stderr[0] / 100  # dS = S d(log S)
        assert np.all(np.abs(delta - exact) < 4 * error)
        assert np.all(error < 0.01 * np.abs(exact))
        assert abs(float(result.value[0]) - put) < 4 * float(result.value_stderr[0])


def test_weights_of_the_deltas_are_a_divergence():
    """S against the divergence of u = σ⁻¹ Y_{k+1}/T by autodiff, where σ depends on the state; and ⟨DX_T, u⟩ = Y_T."""
    process = curved(2)
    x0 = process.initial

    @jax.jit
    def witnesses(w):
        def first_variation(w):
            return jax.jacfwd(lambda x: process.solve(x, w).x)(x0)  # (points, d, d)

        def u(w):  # (steps, noises, coordinate of X_0)
            path = process.solve(x0, w)
            sigma = jax.vmap(process.diffusion)(path.x[:-1], path.t[:-1])
            return jnp.linalg.solve(sigma, first_variation(w)[1:]) / path.t[-1]

        S = jnp.einsum("kai,ka->i", u(w), w) - EPS * jnp.einsum("kaika->i", jax.jacfwd(u)(w))
        D = jax.jacfwd(lambda w: process.solve(x0, w).x[-1])(w)
        moved = EPS * jnp.einsum("jka,kai->ji", D, u(w))
        return end_and_weight(process, x0, w), (process.solve(x0, w).x[-1], S), moved, first_variation(w)[-1]

    for key in KEYS:
        ours, theirs, moved, Y = witnesses(draw(key, process))
        jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-11), ours, theirs)
        np.testing.assert_allclose(moved, Y, atol=1e-12)


def test_deltas_of_smooth_functions_are_pathwise():
    """Where f has a derivative, E[∇f(X_T) Y_T] is another unbiased estimate: multiplicative noise, random start."""
    process = eqx.tree_at(lambda p: p.initial, curved(2), lambda key: 0.3 * jax.random.normal(key, (2,)))
    payoff = lambda x: jnp.stack([jnp.sin(x[0]) + x[1] ** 2, x[0] * x[1]])  # noqa: E731

    @jax.jit
    @jax.vmap
    def pathwise(key):
        start, w = process.draw(key)
        return jax.jacfwd(lambda x: payoff(process.solve(x, w).x[-1]))(start)

    for key in KEYS:
        one, other = jax.random.split(key)
        result = wiener.greeks(one, process, payoff, num_paths=40_000, chunk_size=9_000)
        assert result.delta.shape == (2, 2)
        slopes = np.asarray(pathwise(jax.random.split(other, 20_000)))
        error = np.hypot(slopes.std(0) / math.sqrt(len(slopes)), result.delta_stderr)
        assert np.all(np.abs(slopes.mean(0) - result.delta) < 4 * error)


# ---------------------------------------------------------------- clear failure


def halves(path):
    """⟨D W_T, u⟩ = ½, which the theorem does not allow."""
    return 0.5 * jnp.ones_like(path.dw)


def test_a_supplied_process_is_checked():
    run = functools.partial(wiener.weigh, KEYS[0], brownian(8), final_noise, final_noise, num_paths=20)
    with pytest.raises(ValueError, match=r"⟨Dg, u⟩ = 1; the supplied one gives 0\.5"):
        run(integrand=halves)
    with pytest.raises(ValueError, match=r"integrand must return an array of shape \(8, 1\), got \(8,\)"):
        run(integrand=lambda path: path.dw[:, 0])
    with pytest.raises(Exception, match="must satisfy ⟨Dg, u⟩ = 1"):
        jax.block_until_ready(eqx.filter_jit(run)(integrand=halves))


def test_jumps_are_called_out():
    jump = lambda path: (jnp.sum(path.dw[:8]) > 0).astype(path.x.dtype)  # noqa: E731
    stairs = lambda path: final_noise(path) + 2 * jump(path)  # noqa: E731
    with pytest.warns(RuntimeWarning, match="integration by parts fails") as caught:
        wiener.weigh(KEYS[0], brownian(16), jump, stairs, num_paths=2000)
    assert [str(w.message).split(":")[0].split()[-1] for w in caught] == ["g", "ell[0]"]


def test_g_must_move_and_be_finite():
    run = functools.partial(wiener.weigh, KEYS[0], brownian(8), num_paths=20)
    with pytest.raises(ValueError, match="Dg vanishes"):
        run(final_noise, lambda path: 0 * final_noise(path))
    with pytest.raises(ValueError, match=r"finite, got g = .* on path \d+"):
        run(lambda path: jnp.log(final_noise(path)), final_noise)


def test_bad_arguments_are_named(key, no_type_checks):
    process, flat = brownian(4), functools.partial(eqx.tree_at, lambda p: p.initial)
    weigh = functools.partial(wiener.weigh, key, num_paths=10)
    cases = {
        "num_paths must be a whole number, at least 2, got 1": lambda: weigh(process, end, end, num_paths=1),
        "integrand must be 'canonical'": lambda: weigh(process, end, end, integrand="best"),
        "probes must be a whole number": lambda: weigh(process, end, end, probes=0),
        "chunk_size must be a whole number": lambda: weigh(process, end, end, chunk_size=0),
        r"g must return an array of shape \(\), got \(5,\)": lambda: weigh(process, end, lambda path: path.x[:, 0]),
        r"ell must return an array of shape \(\) or \(m,\)": lambda: weigh(process, lambda path: path.x, end),
        "ell must return real numbers": lambda: weigh(process, lambda path: end(path) > 0, end),
        "step_size must be positive": lambda: wiener.Diffusion(end, end, jnp.zeros(1), -0.1, 4),
        "num_steps must be a whole number": lambda: wiener.Diffusion(end, end, jnp.zeros(1), 0.1, 0),
        r"initial must have shape \(d,\)": lambda: weigh(flat(process, jnp.zeros(())), end, end),
        "initial must be finite": lambda: weigh(flat(process, jnp.asarray([jnp.nan])), end, end),
        r"diffusion\(x, t\) must have shape \(2, any\)": lambda: weigh(flat(process, jnp.zeros(2)), end, end),
        r"diffusion\(x, t\) must be square": lambda: wiener.greeks(key, curved(1), lambda x: x, num_paths=10),
        "payoff must return": lambda: wiener.greeks(key, process, lambda x: x[None], num_paths=10),
        "key must be given with probes": lambda: wiener.skorohod(lambda w: w, jnp.ones((2, 1)), 0.1, probes=3),
    }
    for message, run in cases.items():
        with pytest.raises(ValueError, match=message):
            run()
    still = eqx.tree_at(lambda p: p.diffusion, process, lambda x, t: jnp.zeros((1, 1)))
    with pytest.raises(ValueError, match=r"diffusion\(x, t\) is singular"):
        wiener.greeks(key, still, lambda x: x, num_paths=10)


def test_bad_queries_are_named(bridge, no_type_checks):
    with pytest.raises(ValueError, match="localizer must be 'auto'"):
        wiener.conditional_expectation(bridge, 0.0, "best")
    with pytest.raises(ValueError, match=r"level must be one number .* got shape \(2,\)"):
        wiener.conditional_expectation(bridge, jnp.zeros(2))
    assert not bool(wiener.conditional_expectation(bridge, 1e3, mj.Laplace(0.5)).trusted)
