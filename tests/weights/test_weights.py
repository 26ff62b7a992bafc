"""Weights against the divergence by autodiff, against closed forms, and against what they are for: E[φ S] = E[∇φ]."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import malliavin_jax as mj
from malliavin_jax.potentials import DoubleWell, GaussianMixture, LogisticRegression, Quadratic, Quartic

STEPS, STEP_SIZE = 6, 0.03


def coupled(x):
    """A loss whose derivatives of every order mix the coordinates."""
    pairs = jnp.sum(x[:-1] * x[1:]) + 0.6 * jnp.sum(jnp.sin(x)) * jnp.sum(x)
    return jnp.sum(x**4) / 4 + jnp.sum(x**2) / 2 + 0.5 * pairs


gradient, hessian = jax.grad(coupled), jax.hessian(coupled)
third = jax.jacfwd(hessian)

SCHEMES = {
    "canonical": mj.Canonical(third),
    "windowed": mj.Windowed(3.0, third),
    "reciprocal": mj.Reciprocal(third),
    "fixed": mj.weights.FixedWindow(jnp.asarray([0.1, 0.0, -0.2, 0.4, 0.3, 0.4]), third),
}


def window_of(scheme):
    """The numbers a_k, which sum to one, of a window scheme."""
    if isinstance(scheme, mj.weights.FixedWindow):
        return scheme.window / scheme.window.sum()
    rate = scheme.rate if isinstance(scheme, mj.Windowed) else 0.0
    a = np.exp(-2 * rate * STEP_SIZE * np.arange(STEPS)[::-1])
    return jnp.asarray(a / a.sum())


def states(noise, start, beta):
    """X_0 … X_n as a function of the increments, straight from the definition of the learner."""
    sigma = jnp.sqrt(2 * STEP_SIZE / beta)

    def step(x, xi):
        x = x - STEP_SIZE * gradient(x) + sigma * xi
        return x, x

    return jnp.concatenate([start[None], jax.lax.scan(step, start, noise)[1]])


def integrands(noise, start, beta):
    """u of each scheme, (steps, d, d): column i of u_k is the direction that moves X_n along coordinate i."""
    D = jax.jacfwd(lambda xi: states(xi, start, beta)[-1])(noise)  # (d, steps, d)
    flat = D.reshape(D.shape[0], -1)
    inverses = jnp.linalg.inv(D.transpose(1, 0, 2))

    def u(scheme):
        if isinstance(scheme, mj.Canonical):
            return (flat.T @ jnp.linalg.inv(flat @ flat.T)).reshape(*noise.shape, -1)
        return window_of(scheme)[:, None, None] * inverses

    return D, {name: u(scheme) for name, scheme in SCHEMES.items()}


@jax.jit
def witnesses(noise, start, beta):
    """For every scheme: S and u of the package, S and u by autodiff on the increments, and Σ_k (∂X_n/∂ξ_k) u_k."""
    x = states(noise, start, beta)
    D, u = integrands(noise, start, beta)
    du = jax.jacfwd(lambda xi: integrands(xi, start, beta)[1])(noise)
    path = mj.Path(x, jax.vmap(gradient)(x), jax.vmap(hessian)(x), jnp.asarray(STEP_SIZE), beta, jnp.asarray(STEPS))

    # The package never forms u; but S is affine in the recorded gradients, through which alone it knows the
    # noise, σξ = ΔX + εg, so that its derivative in them is u.
    def weights(recorded):
        seen = eqx.tree_at(lambda p: p.gradient, path, recorded)
        return {name: mj.weigh(seen, scheme)[-1] for name, scheme in SCHEMES.items()}

    S, slopes = weights(path.gradient), jax.jacfwd(weights)(path.gradient)

    def compare(S, slope, u, du):
        divergence = jnp.einsum("kai,ka->i", u, noise) - jnp.einsum("kaika->i", du)
        own_u = slope[:, :-1].transpose(1, 2, 0) * jnp.sqrt(2 / (beta * STEP_SIZE))
        return S, divergence, own_u, u, jnp.einsum("jka,kai->ji", D, own_u)

    return {name: compare(S[name], slopes[name], u[name], du[name]) for name in SCHEMES}


@pytest.mark.parametrize("d", [1, 2, 3, 4])
def test_weight_is_the_divergence_on_the_increments(d, key):
    noise = jax.random.normal(key, (STEPS, d))
    start = jnp.linspace(-0.5, 0.7, d) + 0.1
    for beta in (0.5, 1.0, 3.0):
        for name, (S, divergence, own_u, u, unit) in witnesses(noise, start, jnp.asarray(beta)).items():
            for got, expected in ((S, divergence), (own_u, u), (unit, np.eye(d))):
                np.testing.assert_allclose(got, expected, rtol=0, atol=1e-10, err_msg=f"{name}, beta={beta}")


# The recursions once more, in NumPy, step by step from the formulas.


def as_numpy(path):
    x, g, H = (np.asarray(leaf) for leaf in (path.x, path.gradient, path.hessian))
    eps, beta = float(path.step_size), float(path.inverse_temperature)
    dx, dH = np.diff(x, axis=0), np.diff(H, axis=0)
    noise = dx + eps * g[:-1]  # σξ
    return eps, beta, dx, dH, g, H[:-1], noise


def third_tensor(path, third):
    """ε ∂³L at each step, as each option has it: (steps, d, d, d); but for the covariation, in one dimension."""
    eps, beta, dx, dH, _, _, noise = as_numpy(path)
    if third == "covariation":
        return beta / 2 * np.einsum("kab,kp->kabp", dH, noise)
    line = eps * dH[:, 0, 0] / dx[:, 0] if third == "divided" else trace_term(path, "ito")[:, 0]
    return line.reshape(-1, 1, 1, 1)


def trace_term(path, third):
    """ε ∇ΔL at each step: (steps, d)."""
    _, beta, dx, _, g, H, _ = as_numpy(path)
    if third == "ito":
        return beta * (np.diff(g, axis=0) - np.einsum("kab,kb->ka", H, dx))
    return np.einsum("kaab->kb", third_tensor(path, third).transpose(0, 1, 3, 2))


def canonical(path, third):
    eps, beta, *_, H, noise = as_numpy(path)
    d = H.shape[-1]
    B, J, A, E = np.zeros(d), np.zeros(d), np.zeros((d, d)), np.zeros((d, d, d))
    for h, T, z in zip(H, third_tensor(path, third), noise * beta / (2 * eps), strict=True):
        M = np.eye(d) - eps * h
        B = M @ B + np.einsum("abp,ap->b", T, A)
        Q = np.einsum("qp,rcp,sc->qrs", M @ A, T, M @ A)
        Q = (Q + Q.transpose(2, 1, 0)) / 2  # ∂³L is symmetric, its estimate is made so
        E = np.einsum("qa,rb,sc,abc->qrs", M, M, M, E) + Q
        J = M @ J + z
        A = M @ A @ M + np.eye(d)
    inverse = np.linalg.inv(A)
    return inverse @ (J + B - np.einsum("qr,qrs->s", inverse, E) - np.einsum("qs,qrs->r", inverse, E))


def window(path, third, rho, exponential=False, neumann=None):
    eps, beta, *_, H, noise = as_numpy(path)
    V, c = np.zeros(H.shape[-1]), 0.0
    for h, b, z in zip(H, trace_term(path, third), noise * beta / (2 * eps), strict=True):
        M = np.exp(-eps * h) if exponential else np.eye(len(h)) - eps * h
        inverse = np.linalg.inv(M)
        if neumann is not None:
            inverse = sum(np.linalg.matrix_power(eps * h, j) for j in range(neumann + 1))
        V, c = inverse @ (rho * (V - c * b)) + z, rho * c + 1
    return V / c


def noisy_paths(d):
    """Four paths: two temperatures, two seeds."""

    def path(key, beta):
        initial = functools.partial(jax.random.normal, shape=(d,))
        learner = mj.ForwardLearner(Quartic(0.5), initial, 0.02, beta, 0.7)
        return mj.simulate(key, learner, 20)

    keys, betas = jax.random.split(jax.random.key(3), 4), jnp.asarray([0.5, 0.5, 3.0, 3.0])
    paths = jax.jit(jax.vmap(path))(keys, betas)
    return paths, [jax.tree.map(lambda leaf, i=i: leaf[i], paths) for i in range(4)]


def last_weights(paths, schemes):
    return jax.jit(jax.vmap(lambda path: [mj.weigh(path, scheme)[-1] for scheme in schemes]))(paths)


@pytest.mark.parametrize("d", [1, 2, 4])
def test_observed_third_derivatives(d):
    """Gradients are noisy: what was observed at both ends of a step must be used, not the true gradient."""
    paths, each = noisy_paths(d)
    rho = np.exp(-2 * 4.0 * 0.02)
    cases = []
    for third in {1: ("covariation", "divided", "ito"), 2: ("covariation", "ito"), 4: ("covariation",)}[d]:
        cases.append((mj.Windowed(4.0, third), functools.partial(window, third=third, rho=rho)))
        cases.append((mj.Reciprocal(third), functools.partial(window, third=third, rho=1.0)))
        if d == 1:
            paper = mj.Reciprocal(third, jacobian="exponential")
            cases.append((paper, functools.partial(window, third=third, rho=1.0, exponential=True)))
        else:
            series = mj.Windowed(4.0, third, neumann=3)
            cases.append((series, functools.partial(window, third=third, rho=rho, neumann=3)))
        if d == 1 or third == "covariation":
            cases.append((mj.Canonical(third), functools.partial(canonical, third=third)))
    schemes, references = zip(*cases, strict=True)
    for got, reference in zip(last_weights(paths, schemes), references, strict=True):
        expected = np.stack([reference(path) for path in each])
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-11 * (1 + np.abs(expected).max()))


def test_exponential_jacobian_misses_the_unit_direction():
    """For L = κx²/2 the exact Jacobian is (1 − εκ)^j; e^{εκj} is its inverse only to order ε."""
    kappa, eps, steps = 2.0, 0.05, 10
    learner = mj.ForwardLearner(Quadratic(kappa), functools.partial(jax.random.normal, shape=(1,)), eps)

    @jax.jit
    def units(key):
        path = mj.simulate(key, learner, steps)

        def weights(recorded):
            seen = eqx.tree_at(lambda p: p.gradient, path, recorded)
            return [mj.weigh(seen, mj.Reciprocal(jacobian=j))[-1, 0] for j in ("exact", "exponential")]

        D = np.sqrt(2 * eps) * (1 - eps * kappa) ** np.arange(steps)[::-1]
        return [D @ (slope[:-1, 0] * np.sqrt(2 / eps)) for slope in jax.jacrev(weights)(path.gradient)]

    expected = np.mean(((1 - eps * kappa) * np.exp(eps * kappa)) ** np.arange(steps))
    assert expected < 0.99
    np.testing.assert_allclose(units(jax.random.key(0)), [1.0, expected], rtol=0, atol=1e-12)


# Statistics: what is zero in the mean must be so within four standard errors of independent episodes.


def line(key):
    return jax.random.normal(key, (1,))


def plane(key):
    return jax.random.normal(key, (2,))


def z_scores(values):
    values = np.asarray(values)
    return values.mean(0) / (values.std(0) / np.sqrt(len(values)))


def within_four(values):
    z = z_scores(values)
    assert np.abs(z).max() < 4, f"mean {np.asarray(values).mean(0)} is {z} standard errors from zero"


def smooth_functions(d):
    """Neither odd nor even, bounded or not, mixing the coordinates; the first says E S = 0."""
    direction = jnp.linspace(1.0, 2.0, d)
    return (
        lambda x: jnp.ones(()),
        lambda x: x @ direction,
        lambda x: jnp.sin(2 * x @ direction + 0.3),
        lambda x: jnp.exp(-jnp.sum((x - 0.4) ** 2)),
    )


@jax.jit
@jax.vmap
def excess(x, S):
    """φ(X_s) S − ∇φ(X_s) for each test function, coordinate by coordinate."""
    return jnp.concatenate([phi(x) * S - jax.grad(phi)(x) for phi in smooth_functions(x.shape[0])])


MIXTURE = GaussianMixture([[-1.0, 0.0], [1.0, 0.5]], [1.0, 2.0], 0.4)
LEARNERS = {
    "quartic": mj.ForwardLearner(Quartic(), line, 0.01),
    "hot quartic": mj.ForwardLearner(Quartic(), line, 0.01, 0.5),
    "cold quartic": mj.ForwardLearner(Quartic(), line, 0.01, 3.0),
    "quartic-2": mj.ForwardLearner(Quartic(0.5), plane, 0.01),
    "double well": mj.ForwardLearner(DoubleWell(), line, 0.01, 2.0),
    "hot double well": mj.ForwardLearner(DoubleWell(), line, 0.01, 0.5),
    "cold double well": mj.ForwardLearner(DoubleWell(), line, 0.01, 3.0),
    "mixture": mj.ForwardLearner(MIXTURE, plane, 0.01),
}


@pytest.mark.parametrize("name", LEARNERS)
def test_integration_by_parts_from_observed_hessians(name, key):
    samples = mj.observe(key, LEARNERS[name], num_episodes=20_000, times=[0.1, 0.4])
    for time in range(2):  # one by one: points of one episode are dependent
        within_four(excess(samples.x[:, time], samples.weight[:, time]))


def quartic_third(x):
    return 6 * x.reshape(1, 1, 1)


# The paper's example: X_0 ~ N(0, 1), 80 steps of .01, L = x⁴/4 + x²/2.
PAPER_SCHEMES = {
    "exact": mj.Canonical(quartic_third),
    "canonical": mj.Canonical(),
    "windowed": mj.Windowed(4.0),
    "exact windowed": mj.Windowed(4.0, quartic_third),
    "reciprocal": mj.Reciprocal(),
}


@jax.jit
@jax.vmap
def paper_episode(key):
    path = mj.simulate(key, LEARNERS["quartic"], 80)
    return path.x[-1, 0], {name: mj.weigh(path, scheme)[-1, 0] for name, scheme in PAPER_SCHEMES.items()}


@functools.cache
def paper_weights(seed):
    return jax.tree.map(np.asarray, paper_episode(jax.random.split(jax.random.key(seed), 40_000)))


@functools.cache
def density():
    """The law of the paper's X_s, by quadrature of the chain's own transitions, on a fine grid."""
    grid = np.linspace(-6, 6, 1201)
    mean, var, width = grid - 0.01 * (grid**3 + grid), 2 * 0.01, grid[1] - grid[0]
    kernel = np.exp(-((grid[:, None] - mean[None, :]) ** 2) / (2 * var)) / np.sqrt(2 * np.pi * var)
    p = np.exp(-(grid**2) / 2) / np.sqrt(2 * np.pi)
    for _ in range(80):
        p = width * kernel @ p
    return grid, p


@pytest.mark.parametrize("seed", [0, 1])
def test_score_of_the_quartic_by_quadrature(seed):
    """−E[S | X] is the score, so that E[S; a < X < b] = p(a) − p(b), p from the discrete chain itself."""
    x, weights = paper_weights(seed)
    grid, p = density()
    edges = np.arange(-1.5, 1.51, 0.25)
    inside = (x[:, None] > edges[:-1]) & (x[:, None] < edges[1:])
    fall = -np.diff(np.interp(edges, grid, p))
    for name in ("exact", "canonical", "windowed", "exact windowed"):
        within_four(weights[name][:, None] * inside - fall)


@pytest.mark.parametrize("seed", [0, 1])
def test_second_moments_on_the_example_of_the_paper(seed):
    _, weights = paper_weights(seed)
    grid, p = density()
    fisher = np.sum(np.gradient(p, grid) ** 2 / p) * (grid[1] - grid[0])  # no weight has less
    squares = {name: S**2 for name, S in weights.items()}
    error = {name: 4 * v.std() / np.sqrt(len(v)) for name, v in squares.items()}
    mean = {name: v.mean() for name, v in squares.items()}
    print(fisher, mean, error)
    for name in ("exact", "canonical"):
        assert fisher - error[name] < mean[name]
        assert abs(mean[name] - 2.64) < error[name] + 0.005  # the last digit of 2.64
    assert abs(mean["windowed"] - 3.4) < error["windowed"] + 0.05
    assert mean["reciprocal"] > 100


def test_gaussian_closed_form():
    """L = ½ xᵀPx from a fixed start: C ← MCM + (2ε/β) I and the canonical S is C⁻¹(X_n − E X_n), path by path."""
    P, eps, beta = np.asarray([[2.0, 0.7], [0.7, 1.0]]), 0.05, 3.0
    start = jnp.asarray([0.5, -1.0])
    learner = mj.ForwardLearner(Quadratic(P), lambda key: start, eps, beta)
    samples = mj.observe(jax.random.key(0), learner, num_episodes=500, times=[0.05, 0.6], scheme=mj.Canonical())
    M, mean, C, n = np.eye(2) - eps * P, np.asarray(start), np.zeros((2, 2)), 0
    for time, stop in enumerate((1, 12)):
        for _ in range(n, stop):
            mean, C = M @ mean, M @ C @ M + 2 * eps / beta * np.eye(2)
        n = stop
        expected = np.linalg.solve(C, (np.asarray(samples.x[:, time]) - mean).T).T
        np.testing.assert_allclose(samples.weight[:, time], expected, rtol=0, atol=1e-10)


PRECISION = np.asarray([[2.0, 0.7], [0.7, 1.0]])


@jax.jit
@jax.vmap
def gaussian_episode(key):
    path = mj.simulate(key, mj.ForwardLearner(Quadratic(PRECISION), plane, 0.05, 3.0), 12)
    return path.x[-1], [mj.weigh(path, scheme)[-1] for scheme in (mj.Canonical(), mj.Windowed(1.0))]


def test_score_of_a_gaussian(key):
    """With X_0 ~ N(0, I) and any scheme, E[S | X_n] = C⁻¹ X_n with C ← MCM + (2ε/β) I from C = I."""
    M, C = np.eye(2) - 0.05 * PRECISION, np.eye(2)
    for _ in range(12):
        C = M @ C @ M + 2 * 0.05 / 3.0 * np.eye(2)
    x, weights = jax.tree.map(np.asarray, gaussian_episode(jax.random.split(key, 20_000)))
    score = -np.linalg.solve(C, x.T).T
    tests = np.stack([np.ones(len(x)), x[:, 0], x[:, 1], np.sin(2 * x[:, 0] + x[:, 1]), x[:, 0] > 0.5], axis=1)
    for S in weights:
        within_four(((S + score)[:, None, :] * tests[:, :, None]).reshape(len(x), -1))


NOISY_SCHEMES = (mj.Canonical(), mj.Windowed(4.0), mj.Canonical("ito"), mj.Windowed(4.0, "ito"))


@jax.jit
@jax.vmap
def noisy_episode(key):
    path = mj.simulate(key, mj.ForwardLearner(Quartic(), line, 0.005, gradient_noise=10.0), 80)
    weights = [mj.weigh(path, scheme)[-1] for scheme in NOISY_SCHEMES]
    return path.x[-1], path.gradient[-1], path.hessian[-1], weights


def test_gradient_noise_does_not_bias_the_weights(key):
    """Noise of sd 10, seen in the very gradient that S multiplies: E[g S] = E[H] as E[φ S] = E[φ'].

    A covariation with ΔX in place of σξ would be off by a quarter here (ε²·10² beside 2ε in the variance of a
    step), and the paper's Itô form puts the noise of the last gradient into S.
    """
    x, g, H, weights = noisy_episode(jax.random.split(key, 20_000))
    for scheme, S in zip(NOISY_SCHEMES, weights, strict=True):
        observed = g * S - H[:, 0]
        if scheme.third == "ito":
            assert np.abs(z_scores(observed)) > 10
        else:
            within_four(observed)
            within_four(excess(x, S))


FEATURES = np.random.default_rng(5).normal(size=(40, 2))
LABELS = FEATURES @ [1.0, -1.0] + np.random.default_rng(6).logistic(size=40) > 0
BATCHES = LogisticRegression(FEATURES, LABELS.astype(float), batch_size=4)


def test_minibatch_learner(key):
    """Conditionally on the batches, which are independent of ξ, integration by parts holds as it stands."""
    learner = mj.ForwardLearner(BATCHES, plane, 0.005)
    samples = mj.observe(key, learner, num_episodes=20_000, times=[0.1, 0.3])
    assert float(jnp.std(samples.hessian[:, 0, 0, 0])) > 1  # each episode saw its own batch
    for time in range(2):
        within_four(excess(samples.x[:, time], samples.weight[:, time]))


# Windows tuned on a pilot.


RATES = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)


@functools.cache
def pilot():
    learner = mj.ForwardLearner(Quartic(0.5), plane, 0.02)
    return jax.jit(jax.vmap(lambda key: mj.simulate(key, learner, 20)))(jax.random.split(jax.random.key(4), 2000))


@jax.jit
def second_moments(paths, schemes):
    """E|S|² at each step, for each scheme."""
    weights = [jax.vmap(lambda path, scheme=scheme: mj.weigh(path, scheme))(paths) for scheme in schemes]
    return jnp.stack([jnp.mean(jnp.sum(S**2, -1), 0) for S in weights])


def test_minimum_variance_window():
    """No `Windowed` rate does better on the pilot; the promised second moment is the one it reaches."""
    best = mj.weights.minimum_variance_window(pilot())
    assert best.weights.sum() == pytest.approx(1, abs=1e-12)
    # the optimum: no direction that keeps the sum improves it either
    nudges = np.random.default_rng(0).normal(size=(3, 20)) / 100
    nudged = [mj.weights.FixedWindow(best.weights + (nudge - nudge.mean())) for nudge in nudges]
    rates = [mj.Windowed(jnp.asarray(rate)) for rate in RATES]
    reached, *others = second_moments(pilot(), [mj.weights.FixedWindow(best.weights), *nudged, *rates])[:, -1]
    assert float(reached) == pytest.approx(float(best.second_moment), rel=1e-9)
    assert reached < min(others)


def test_best_rate_is_the_least_on_the_pilot():
    """Over the second half of the steps, as documented."""
    moments = second_moments(pilot(), [mj.Windowed(jnp.asarray(rate)) for rate in RATES])[:, 10:].mean(1)
    best = int(jnp.argmin(moments))
    assert 0 < best < len(RATES) - 1  # else it would be no choice
    assert float(mj.weights.best_rate(pilot(), jnp.asarray(RATES))) == RATES[best]


def test_window_that_begins_late():
    """It has no weight before it begins, which is no error; from there on it is the shorter window."""
    path = jax.tree.map(lambda leaf: leaf[0], pilot())
    late = mj.weigh(path, mj.weights.FixedWindow(jnp.asarray([0.0] * 5 + [1.0] * 15)))
    assert np.all(late[:6] == 0)
    x, g, H = (leaf[5:] for leaf in (path.x, path.gradient, path.hessian))
    short = mj.Path(x, g, H, path.step_size, path.inverse_temperature, path.last_step)
    np.testing.assert_allclose(late[6:], mj.weigh(short, mj.Reciprocal())[1:], rtol=1e-12)


# Coarse chains: hot, and with steps so long that εH passes 1 here and there all along the path.


def wide(key, d):
    return jax.random.uniform(key, (d,), minval=-4.0, maxval=4.0)


def coarse_learner(d):
    return mj.ForwardLearner(Quartic(), functools.partial(wide, d=d), 0.05, 0.1)


@pytest.mark.parametrize("d", [1, 2, 4])
def test_canonical_is_exact_where_the_chain_is_coarse(d):
    exact = mj.Canonical(lambda x: 6 * jnp.einsum("a,ab,ac->abc", x, jnp.eye(len(x)), jnp.eye(len(x))))
    samples = mj.observe(jax.random.key(0), coarse_learner(d), num_episodes=20_000, times=[0.1, 0.2], scheme=exact)
    assert np.all(np.isfinite(samples.weight))
    for time in range(2):
        within_four(excess(samples.x[:, time], samples.weight[:, time]))


WINDOWS = (mj.Canonical(), mj.Windowed(1.0), mj.Reciprocal(), mj.Windowed(1.0, neumann=3))


@pytest.mark.parametrize("d", [1, 2, 4])
def test_windows_are_nan_where_the_chain_is_coarse(d):
    """While tracing nothing can be raised: the weight is NaN, if an eigenvalue of εH reaches 1 after X_0."""

    @jax.jit
    @jax.vmap
    def episode(key):
        path = mj.simulate(key, coarse_learner(d), 4)
        return path, [mj.weigh(path, scheme)[-1] for scheme in WINDOWS]

    paths, (canonical, *windows, series) = episode(jax.random.split(jax.random.key(0), 200))
    largest = 0.05 * np.linalg.eigvalsh(paths.hessian[:, :-1])[..., -1]
    coarse = (largest[:, 1:] >= 1).any(1)  # X_0 may lie as far out as it likes: nothing is carried from before it
    assert 0 < coarse.sum() < 200
    assert np.any(largest[~coarse, 0] >= 1)
    assert np.all(np.isfinite(canonical))
    for S in windows:
        np.testing.assert_array_equal(np.isnan(S), np.stack([coarse] * d, axis=1))
    # The series notices that its terms grow, which along other directions they need not.
    assert np.all(coarse[np.isnan(series).any(1)])
    if d == 1:
        np.testing.assert_array_equal(np.isnan(series[:, 0]), coarse)


@pytest.mark.parametrize("scheme", WINDOWS[1:])
def test_windows_say_that_the_chain_is_too_coarse(scheme):
    message = f"too coarse for {type(scheme).__name__}.*Canonical.*step_size"
    with pytest.raises(ValueError, match=message):
        mj.observe(jax.random.key(0), coarse_learner(1), num_episodes=200, times=[0.2], scheme=scheme)
    x, g = jnp.asarray([[3.0], [2.7], [2.0]]), jnp.zeros((3, 1))
    path = mj.Path(x, g, 3 * x[:, :, None] ** 2 + 1, jnp.asarray(0.05), jnp.asarray(1.0), jnp.asarray(2))
    with pytest.raises(ValueError, match=message):
        mj.weigh(path, scheme)


def test_pilot_that_is_too_coarse():
    simulate = jax.vmap(lambda key: mj.simulate(key, coarse_learner(1), 4))
    with pytest.raises(ValueError, match="paths are too coarse"):
        mj.weights.minimum_variance_window(jax.jit(simulate)(jax.random.split(jax.random.key(0), 50)))


@pytest.mark.usefixtures("no_type_checks")
def test_arguments_of_schemes():
    with pytest.raises(ValueError, match="rate must be non-negative and finite, got -1"):
        mj.Windowed(-1.0)
    with pytest.raises(ValueError, match="neumann must be a whole number, at least 1, got 0"):
        mj.Windowed(1.0, neumann=0)
    with pytest.raises(ValueError, match="jacobian must be 'exact' or 'exponential', got 'euler'"):
        mj.Reciprocal(jacobian="euler")
    for scheme in (mj.Canonical, mj.Reciprocal, functools.partial(mj.Windowed, 1.0)):
        with pytest.raises(ValueError, match=r"third must be .* got 'exact'"):
            scheme(third="exact")
    for scheme in (mj.Canonical("ito"), mj.Canonical("divided"), mj.Windowed(1.0, "divided")):
        with pytest.raises(ValueError, match=f"third='{scheme.third}'.*one dimension.*got d = 2"):
            scheme.init(2, jnp.float32)
    with pytest.raises(ValueError, match=r"jacobian='exponential'.*one dimension, got d = 2"):
        mj.Reciprocal(jacobian="exponential").init(2, jnp.float32)
