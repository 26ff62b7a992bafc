"""The kernel baselines against statsmodels, direct least squares, repeated data and closed forms."""

import functools
import itertools
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from statsmodels.nonparametric.kernel_regression import KernelReg

from malliavin_jax import Samples
from malliavin_jax.kernel import (
    LocalPolynomial,
    NadarayaWatson,
    bandwidth as search,
    cross_validated_bandwidth,
    single_kernel_langevin,
)


def make(x, gradient, observed=None):
    """Samples of the given positions and gradients, without Hessians; these baselines use nothing else."""
    x, gradient = jnp.asarray(x), jnp.asarray(gradient)
    observed = jnp.ones(x.shape[:2], bool) if observed is None else jnp.asarray(observed)
    return Samples(x, gradient, None, jnp.zeros_like(x), observed)


def truth(x):
    """A gradient that no polynomial equals; coupled in d > 1."""
    return 2.0 * np.sin(2.0 * x) + x**3 + 0.5 * np.roll(x, 1, -1)


def draw(seed, episodes, d, times=1, noise=0.5, dtype=float):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(episodes, times, d))
    gradient = truth(x) + noise * rng.normal(size=x.shape)
    return make(x.astype(dtype), gradient.astype(dtype))


def build(samples, bandwidth, degree, **options):
    if degree == 0:
        return NadarayaWatson(samples, bandwidth, **options)
    return LocalPolynomial(samples, bandwidth, degree, **options)


def monomials(u, degree):
    """Columns of the design matrix, from all exponents (a different route from the package's)."""
    exponents = [e for e in itertools.product(range(degree + 1), repeat=u.shape[1]) if sum(e) <= degree]
    return np.stack([np.prod(u ** np.array(e), 1) for e in exponents], 1), exponents.index((0,) * u.shape[1])


def reference(x, gradient, episode, bandwidth, degree, alpha):
    """Weighted least squares by QR, its clustered sandwich, and the rule for falling back on the average."""
    u = (x - alpha) / bandwidth
    k = np.exp(-0.5 * np.sum(u * u, 1))
    phi, first = monomials(u, degree)
    root = np.sqrt(k)[:, None]
    beta = np.linalg.lstsq(root * phi, root * gradient, rcond=None)[0]
    inverse = np.linalg.pinv(root * phi)  # row `first` is w / √K
    weight = inverse[first] * root[:, 0]
    influence = weight[:, None] * (gradient - phi @ beta)
    clustered = np.stack([influence[episode == e].sum(0) for e in np.unique(episode)])
    mass = np.array([k[episode == e].sum() for e in np.unique(episode)])
    enough = mass.sum() ** 2 / np.sum(mass**2) >= max(10, phi.shape[1] + 1)
    solid = enough and np.sum(inverse[first] ** 2) <= 1.0
    value = beta[first] if solid else k @ gradient / k.sum()
    return value, np.sqrt(np.sum(clustered**2, 0)), solid


def flat(samples):
    keep = np.asarray(samples.observed).reshape(-1)
    episode = np.repeat(np.arange(samples.num_episodes), samples.num_times)[keep]
    d = samples.dim
    return np.asarray(samples.x).reshape(-1, d)[keep], np.asarray(samples.gradient).reshape(-1, d)[keep], episode


@pytest.mark.filterwarnings("ignore:After 0.17:FutureWarning")  # about a generator that a given bw never uses
@pytest.mark.parametrize(("d", "bandwidth"), [(1, [0.25]), (2, [0.3, 0.5])])
@pytest.mark.parametrize("degree", [0, 1])
def test_equals_statsmodels(d, bandwidth, degree):
    samples = draw(0, 300, d)
    alphas = np.random.default_rng(1).uniform(-1, 1, (7, d))
    got = jax.vmap(build(samples, jnp.array(bandwidth), degree))(jnp.asarray(alphas))
    x, gradient, _ = flat(samples)
    for i in range(d):
        peer = KernelReg(gradient[:, i], x, "c" * d, ["lc", "ll"][degree], bw=bandwidth)
        np.testing.assert_allclose(got.value[:, i], peer.fit(alphas)[0], rtol=1e-8, atol=1e-8)
    assert bool(jnp.all(got.trusted))


@pytest.mark.parametrize(("d", "degree"), [(2, 0), (1, 2), (2, 2), (3, 2), (1, 3), (2, 3), (3, 3)])
def test_equals_direct_least_squares(d, degree):
    """Over the observed points of several times, clustered by episode; what is not observed is NaN."""
    full = draw(2, 500, d, times=3)
    observed = np.random.default_rng(9).random((500, 3)) < 0.8
    hidden = [np.where(observed[:, :, None], values, np.nan) for values in (full.x, full.gradient)]
    samples = make(*hidden, observed)
    field = build(samples, 0.6, degree)
    for alpha in np.random.default_rng(3).uniform(-0.7, 0.7, (3, d)):
        got = field(jnp.asarray(alpha))
        value, stderr, solid = reference(*flat(samples), 0.6, degree, alpha)
        assert solid
        assert bool(got.trusted)
        np.testing.assert_allclose(got.value, value, rtol=1e-8, atol=1e-8)
        np.testing.assert_allclose(got.stderr, stderr, rtol=1e-8, atol=1e-8)
        k = np.exp(-0.5 * np.sum(((flat(samples)[0] - alpha) / 0.6) ** 2, 1)) / (0.6 * math.sqrt(2 * math.pi)) ** d
        np.testing.assert_allclose(got.density, k.mean(), rtol=1e-8)


def test_local_cubic_reproduces_a_cubic():
    x = np.random.default_rng(4).normal(size=(500, 1, 2))
    field = LocalPolynomial(make(x, x**3 - 2 * x + np.roll(x, 1, -1) ** 2), 0.5, 3)
    alpha = np.array([0.4, -0.1])
    got = field(jnp.asarray(alpha))
    np.testing.assert_allclose(got.value, alpha**3 - 2 * alpha + alpha[::-1] ** 2, rtol=1e-9)
    np.testing.assert_allclose(got.stderr, 0.0, atol=1e-9)


def test_density_of_a_gaussian():
    """E of the kernel density estimate is the law smoothed by the kernel: N(0, 1 + h²)."""
    samples = draw(5, 20_000, 2)
    alpha = jnp.array([0.3, -0.5])
    got = NadarayaWatson(samples, 0.3)(alpha)
    exact = math.exp(-0.5 * 0.34 / 1.09) / (2 * math.pi * 1.09)
    assert abs(float(got.density) - exact) < 4 * float(got.density_stderr)
    assert float(got.density_stderr) < 0.05 * exact


@pytest.mark.parametrize("degree", [0, 3])
def test_standard_errors_are_the_spread_over_repetitions(key, degree):
    """Two times share their episode's noise, so an error bar that takes points as independent fails here."""
    repetitions, episodes = 600, 500

    def repeat(key):
        start, move, shared = jax.random.split(key, 3)
        x = jax.random.normal(start, (episodes, 1, 1)) + jnp.concatenate(
            [jnp.zeros((episodes, 1, 1)), 0.05 * jax.random.normal(move, (episodes, 1, 1))], 1
        )
        noise = jnp.broadcast_to(jax.random.normal(shared, (episodes, 1, 1)), x.shape)
        return build(make(x, jnp.sin(x) + noise), 0.4, degree)(jnp.array([0.3]))

    got = jax.vmap(repeat)(jax.random.split(key, repetitions))
    # A variance over R repetitions has relative error sqrt(2/R). The sandwich uses fitted residuals, short by
    # about (terms / effective episodes) of the variance: 4 terms of 200 at most.
    tolerance = 4 * math.sqrt(2 / repetitions) + 0.02
    assert bool(jnp.all(got.trusted))
    assert abs(float(jnp.mean(got.stderr**2) / jnp.var(got.value)) - 1) < tolerance
    assert abs(float(jnp.mean(got.density_stderr**2) / jnp.var(got.density)) - 1) < tolerance


@pytest.mark.parametrize("degree", [0, 2])
def test_a_duplicated_time_adds_nothing(degree):
    once = draw(6, 200, 1)
    twice = jax.tree.map(lambda leaf: jnp.concatenate([leaf, leaf], 1), once)
    alpha = jnp.array([0.2])
    one, two = (build(s, 0.4, degree)(alpha) for s in (once, twice))
    for name in ("value", "stderr", "density", "density_stderr"):
        np.testing.assert_allclose(getattr(two, name), getattr(one, name), rtol=1e-10)


@pytest.mark.parametrize("degree", [0, 2])
def test_chunks_do_not_matter(degree):
    samples = draw(7, 301, 1, times=2)
    alpha = jnp.array([0.1])
    whole = build(samples, 0.5, degree, chunk_size=10_000)
    for size in (1, 14):
        got = build(samples, 0.5, degree, chunk_size=size)
        for a, b in zip(jax.tree.leaves(got(alpha)), jax.tree.leaves(whole(alpha)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-10)
    assert whole.points.x.shape == (1, 1, 602)
    assert build(samples, 0.5, degree, chunk_size=14).points.x.shape == (43, 1, 14)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("degree", [0, 3])
def test_no_data_no_trust(degree, dtype):
    samples = draw(10, 400, 2, dtype=dtype)
    field = build(samples, 0.3, degree)
    x, gradient, _ = flat(samples)
    for far in (6.0, 60.0, 1e4, 1e12, -1e30):
        got = field(jnp.full((2,), far, dtype))
        assert not bool(got.trusted)
        assert bool(jnp.all(jnp.isinf(got.stderr)))
        assert bool(jnp.all(jnp.isfinite(got.value)))
        assert float(jnp.max(jnp.abs(got.value))) <= np.abs(gradient).max() * (1 + 1e-5)
        assert bool(jnp.all(jnp.isfinite(got.density) & jnp.isfinite(got.density_stderr)))
    nearest = np.argmin(np.sum((x - 60.0) ** 2, 1))
    np.testing.assert_allclose(build(samples, 0.05, degree)(jnp.full((2,), 60.0, dtype)).value, gradient[nearest])


def test_a_noisy_extrapolation_falls_back_on_the_average():
    """Moving out of the data: trusted, then an extrapolation, then the average once that is the less noisy."""
    samples = draw(10, 500, 1)
    x, gradient, episode = flat(samples)
    field = LocalPolynomial(samples, 0.8, 3)
    kinds = []
    for alpha in np.linspace(0.0, 2.0, 11) * np.abs(x).max():
        got = field(jnp.array([alpha]))
        value, _, solid = reference(x, gradient, episode, 0.8, 3, np.array([alpha]))
        np.testing.assert_allclose(got.value, value, rtol=1e-6)
        assert bool(got.trusted) == (solid and x.min() <= alpha <= x.max())
        kinds.append((bool(got.trusted), bool(solid)))
    assert sorted(kinds, reverse=True) == kinds
    assert set(kinds) == {(True, True), (False, True), (False, False)}


def test_no_trust_in_a_gap_nor_where_the_fit_is_singular():
    """Between two clusters the nearest points weigh alike and are many, but none of them is near."""
    side = np.where(np.arange(4000) % 2 == 0, -3.0, 3.0)[:, None, None]
    x = side + 0.02 * np.random.default_rng(11).normal(size=(4000, 1, 1))
    for degree in (0, 3):
        field = build(make(x, x), 0.3, degree)
        assert not bool(field(jnp.zeros(1)).trusted)
        assert bool(field(jnp.array([3.0])).trusted)
    # All points on a line of the plane: the slope across it is undetermined.
    line = np.random.default_rng(12).normal(size=(500, 1, 1)) * np.ones((1, 1, 2))
    got = LocalPolynomial(make(line, line), 0.5, 1)(jnp.array([0.5, -0.5]))
    assert bool(jnp.all(jnp.isfinite(got.value)))
    assert float(jnp.max(jnp.abs(got.value))) < np.abs(line).max()


@pytest.mark.parametrize("degree", [0, 3])
def test_float32_follows_float64(degree):
    double = draw(13, 2000, 2)
    single = jax.tree.map(lambda v: v.astype("float32") if v.dtype == jnp.float64 else v, double)
    alpha = np.array([0.3, 0.2])
    got = build(single, 0.5, degree)(jnp.asarray(alpha, "float32"))
    want = build(double, 0.5, degree)(jnp.asarray(alpha))
    for name in ("value", "stderr", "density", "density_stderr"):
        assert getattr(got, name).dtype == jnp.float32
        np.testing.assert_allclose(getattr(got, name), getattr(want, name), rtol=1e-4)


def test_cross_validation_in_float32():
    double = draw(13, 300, 1)
    single = jax.tree.map(lambda v: v.astype("float32") if v.dtype == jnp.float64 else v, double)
    chosen = cross_validated_bandwidth(single, 1)
    assert chosen.dtype == jnp.float32
    np.testing.assert_allclose(chosen, cross_validated_bandwidth(double, 1), rtol=1e-2)


def test_one_compilation_for_all_bandwidths_and_any_transformation():
    samples = draw(14, 300, 2)
    field = LocalPolynomial(samples, 0.5, 2)
    alphas = jnp.asarray(np.random.default_rng(15).uniform(-0.5, 0.5, (6, 2)))

    @eqx.filter_jit
    @eqx.debug.assert_max_traces(max_traces=1)
    def values(field, alphas):
        return jax.vmap(field)(alphas).value

    for bandwidth in (0.3, 0.5, 0.8):
        swept = eqx.tree_at(lambda f: f.bandwidth, field, jnp.asarray(bandwidth))
        single = np.stack([LocalPolynomial(samples, bandwidth, 2)(a).value for a in alphas])
        np.testing.assert_allclose(values(swept, alphas), single, rtol=1e-10)
    traced = jax.jit(lambda s, h: LocalPolynomial(s, h, 2)(alphas[0]).value)(samples, jnp.asarray(0.8))
    np.testing.assert_allclose(traced, single[0], rtol=1e-10)


def test_automatic_bandwidth_is_cross_validated():
    samples = draw(19, 300, 1)
    chosen = cross_validated_bandwidth(samples, 1)
    assert LocalPolynomial(samples).bandwidth == chosen
    traced = jax.jit(lambda s: LocalPolynomial(s).bandwidth)(samples)
    np.testing.assert_allclose(traced, chosen, rtol=1e-10)


def test_derivatives_in_alpha():
    field = LocalPolynomial(draw(16, 300, 2), 0.5, 2, chunk_size=64)
    alpha, step = jnp.array([0.2, -0.1]), 1e-5

    @jax.jit
    def outputs(alpha):
        got = field(alpha)
        return jnp.concatenate([got.value, got.density[None]])

    shifted = [outputs(alpha + step * e) - outputs(alpha - step * e) for e in jnp.eye(2)]
    want = jnp.stack(shifted, 1) / (2 * step)
    np.testing.assert_allclose(jax.jacfwd(outputs)(alpha), want, rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(jax.jacrev(outputs)(alpha), want, rtol=1e-6, atol=1e-8)
    assert bool(jnp.all(jnp.isfinite(jax.jacfwd(outputs)(jnp.array([40.0, 0.0])))))


def brute_force(samples, candidates, degree):
    """Errors of leaving one episode out, over the points within two standard deviations."""
    x, gradient, episode = flat(samples)
    scored = np.all(np.abs(x - x.mean(0)) <= 2 * x.std(0), 1)
    errors = np.zeros(len(candidates))
    for i in np.flatnonzero(scored):
        others = episode != episode[i]
        for c, h in enumerate(candidates):
            value = reference(x[others], gradient[others], episode[others], h, degree, x[i])[0]
            errors[c] += np.sum((value - gradient[i]) ** 2)
    return errors / scored.sum()


def prediction_errors(samples, candidates, degree):
    x = flat(samples)[0]
    given = (jnp.asarray(x.mean(0)), jnp.asarray(x.std(0)), jnp.asarray(candidates), degree)
    return search.prediction_errors(samples, *given)


@pytest.mark.parametrize(("d", "degree", "times"), [(1, 0, 1), (1, 3, 1), (2, 1, 3)])
def test_cross_validation_is_leaving_one_episode_out(d, degree, times):
    samples = draw(17, 40, d, times=times)
    samples = eqx.tree_at(lambda s: s.observed, samples, samples.observed.at[3, -1].set(times == 1))
    candidates = np.array([0.1, 0.3, 0.5, 0.8, 1.3])
    want = brute_force(samples, candidates, degree)
    np.testing.assert_allclose(prediction_errors(samples, candidates, degree), want, rtol=1e-8)
    assert float(cross_validated_bandwidth(samples, degree, candidates)) == candidates[np.argmin(want)]


@pytest.mark.parametrize(("degree", "power"), [(0, 1 / 5), (2, 1 / 9)])
def test_cross_validation_of_many_samples_is_bagged(monkeypatch, degree, power):
    """251 episodes in subsamples of 100: the even ones and the odd ones, h widened by the rate's factor."""
    monkeypatch.setattr(search, "SUBSAMPLE", 100)
    samples = draw(18, 251, 1)
    candidates = np.array([0.2, 0.5])
    x, gradient, _ = flat(samples)
    scored = np.abs(x[:, 0] - x.mean()) <= 2 * x.std()
    total, count = np.zeros(2), 0
    for index in (np.arange(0, 200, 2), np.arange(1, 200, 2)):
        for i in index[scored[index]]:
            rest = index[index != i]
            for c, h in enumerate(candidates * 2.51**power):
                value = reference(x[rest], gradient[rest], rest, h, degree, x[i])[0]
                total[c] += float((value[0] - gradient[i, 0]) ** 2)
            count += 1
    np.testing.assert_allclose(prediction_errors(samples, candidates, degree), total / count, rtol=1e-8)


@pytest.mark.parametrize(
    ("degree", "episodes"), [(1, 1000), *(pytest.param(p, 20_000, marks=pytest.mark.slow) for p in (0, 1))]
)
def test_cross_validation_is_near_the_oracle(degree, episodes):
    """For bias² ∝ h⁴ and variance ∝ 1/h the risk at ρ times the best h is (ρ⁴ + 4/ρ)/5 of the least.

    That is 1.55 at ρ = 1.5 and 1.24 at 1/1.5: cross-validation must come as close on average over data sets.
    """
    alphas = jnp.linspace(-1.2, 1.2, 13)[:, None]
    grid = jnp.geomspace(0.05, 1.0, 9)

    @jax.jit
    def risks(samples, bandwidths):
        values = jax.vmap(lambda h: jax.vmap(build(samples, h, degree))(alphas).value)(bandwidths)
        return jnp.mean((values - truth(np.asarray(alphas))[None]) ** 2, (1, 2))

    chosen, fixed = [], []
    for seed in range(6):
        samples = draw(20 + seed, episodes, 1, noise=2.0)
        chosen.append(risks(samples, cross_validated_bandwidth(samples, degree)[None])[0])
        fixed.append(risks(samples, grid))
    assert float(np.mean(chosen)) < 1.55 * float(np.min(np.mean(np.stack(fixed), 0)))


def test_cross_validation_leaves_its_grid():
    """A cubic gradient wants a global cubic; a fine oscillation without noise wants less than the least h."""
    x = np.random.default_rng(30).normal(size=(400, 1, 1))
    noise = np.random.default_rng(31).normal(size=x.shape)
    assert float(cross_validated_bandwidth(make(x, x**3 + noise), 3)) > 1.5
    fine = np.random.default_rng(32).uniform(-1, 1, size=(300, 1, 1))
    assert float(cross_validated_bandwidth(make(fine, np.sin(100 * fine)), 1)) < 0.02 * fine.std()


def single_kernel_law(force, grid, *, step_size, beta, width, spread, noise):
    """Stationary density of the chain's diffusion with the averaged kernel term and its sampling noise.

    Drift b = π² (log π)′ − (β/2) π m and variance a = π² (1 + ε (β/2)² v), with m and v the mean and variance of
    K_Δ(θ − α) g over θ ~ π: p ∝ exp(∫ 2b/a) / a.
    """
    nodes, weights = np.polynomial.hermite_e.hermegauss(80)

    def average(function, scale):
        """∫ N(y; 0, scale²) function(α + y) dy."""
        return (function(grid[:, None] + scale * nodes) @ weights) / math.sqrt(2 * math.pi)

    def density(x):
        return np.exp(-0.5 * (x / spread) ** 2) / (spread * math.sqrt(2 * math.pi))

    m = average(lambda y: density(y) * force(y), width)
    square = average(lambda y: density(y) * (force(y) ** 2 + noise**2), width / math.sqrt(2))
    v = square / (2 * math.sqrt(math.pi) * width) - m**2
    p = density(grid)
    drift = p**2 * (-grid / spread**2) - 0.5 * beta * p * m
    a = p**2 * (1 + step_size * (0.5 * beta) ** 2 * v)
    slope = 2 * drift / a
    logarithm = np.concatenate([[0.0], np.cumsum(0.5 * (slope[1:] + slope[:-1]) * np.diff(grid))]) - np.log(a)
    law = np.exp(logarithm - logarithm.max())
    return law / law.sum()


SINGLE = {"beta": 4.0, "spread": 1.5, "width": 0.15, "step_size": 0.02, "noise": 0.3}
LOSSES = {
    "quadratic": (lambda x: 0.5 * x**2, lambda x: x),
    "quartic": (lambda x: 0.25 * x**4 + 0.25 * x**2, lambda x: x**3 + 0.5 * x),
}


@functools.cache
def single_kernel_run(loss):
    """Compiled once for both seeds."""
    force, spread = LOSSES[loss][1], SINGLE["spread"]

    @jax.jit
    def run(key):
        place, error, start, chain = jax.random.split(key, 4)
        x = spread * jax.random.normal(place, (500_000, 1, 1))
        return single_kernel_langevin(
            chain,
            make(x, force(x) + SINGLE["noise"] * jax.random.normal(error, x.shape)),
            0.2 * jax.random.normal(start, (512, 1)),
            num_steps=14_000,
            step_size=SINGLE["step_size"],
            inverse_temperature=SINGLE["beta"],
            bandwidth=SINGLE["width"],
            density=lambda a: jnp.exp(-0.5 * (a[0] / spread) ** 2) / (spread * math.sqrt(2 * math.pi)),
            log_density_gradient=lambda a: -a / spread**2,
            burn_in=4000,
        ).positions

    return run


@pytest.mark.parametrize("loss", ["quadratic", "quartic"])
def test_single_kernel_chain_reaches_the_gibbs_law(key, loss):
    """Its second moment is that of the law with the documented biases, which is near that of exp(−βL)."""
    positions = single_kernel_run(loss)(key)
    assert positions.shape == (512, 10_000, 1)
    grid = np.linspace(-3, 3, 4001)
    value, force = LOSSES[loss]
    gibbs = np.exp(-SINGLE["beta"] * value(grid))
    exact = float(gibbs @ grid**2 / gibbs.sum())
    biased = float(single_kernel_law(force, grid, **SINGLE) @ grid**2)
    squares = jnp.mean(positions[:, :, 0] ** 2, 1)
    stderr = float(jnp.std(squares)) / math.sqrt(512)
    assert stderr < 0.02 * exact
    assert abs(float(jnp.mean(squares)) - biased) < 4 * stderr
    assert abs(biased - exact) < 0.05 * exact


def test_single_kernel_chain_is_its_formula():
    """One step in two dimensions; both observed points are the same, so that the draw has no choice."""
    theta, gradient = np.array([0.2, 0.1]), np.array([1.5, -0.7])
    x = np.stack([theta, theta, np.full(2, np.nan)])[:, None, :]
    g = np.stack([gradient, gradient, np.full(2, np.nan)])[:, None, :]
    samples = make(x, g, np.array([[True], [True], [False]]))
    eps, beta, width = 0.1, 2.0, 0.7

    def density(a):
        return jnp.exp(-0.5 * jnp.sum(a**2)) / (2 * math.pi)

    @jax.jit
    def run(inverse_temperature):
        return single_kernel_langevin(
            jax.random.key(3),
            samples,
            jnp.array([[0.4, -0.2]]),
            num_steps=1,
            step_size=eps,
            inverse_temperature=inverse_temperature,
            bandwidth=width,
            density=density,
            log_density_gradient=lambda a: -a,
        ).positions[0, 0]

    alpha = np.array([0.4, -0.2])
    pi = float(density(jnp.asarray(alpha)))
    k = math.exp(-0.5 * np.sum((theta - alpha) ** 2) / width**2) / (2 * math.pi * width**2)
    kernel_term = -eps * pi * 0.5 * beta * k * gradient
    # The same key gives the same w: the difference of two temperatures is the kernel term alone, and what
    # stays at temperature infinity is the drift of the density and the noise.
    np.testing.assert_allclose(run(2 * beta) - run(beta), kernel_term, rtol=1e-9)
    w = (run(beta) - kernel_term - alpha + eps * pi * pi * alpha) / (math.sqrt(eps) * pi)
    assert float(jnp.sum(w**2)) < 18.4  # χ² with two degrees of freedom exceeds it once in 10⁴


def chain_with(samples, chains=(4, 2), **changes):
    given = {
        "num_steps": 10,
        "step_size": 0.1,
        "inverse_temperature": 1.0,
        "bandwidth": 0.3,
        "density": lambda a: jnp.exp(-0.5 * jnp.sum(a**2)),
        "log_density_gradient": lambda a: -a,
    }
    return single_kernel_langevin(jax.random.key(0), samples, jnp.zeros(chains), **(given | changes))


@pytest.mark.parametrize(
    ("name", "make_it"),
    [
        ("bandwidth", lambda s: NadarayaWatson(s, -0.1)),
        ("bandwidth", lambda s: NadarayaWatson(s, 0.0)),
        ("bandwidth", lambda s: LocalPolynomial(s, jnp.array([0.1, -0.1]))),
        ("bandwidth", lambda s: LocalPolynomial(s, jnp.array([0.1, 0.1, 0.1]))),
        ("bandwidth", lambda s: NadarayaWatson(s, "silverman")),
        ("degree", lambda s: LocalPolynomial(s, 0.3, 0)),
        ("degree", lambda s: LocalPolynomial(s, 0.3, 4)),
        ("degree", lambda s: cross_validated_bandwidth(s, 5)),
        ("candidates", lambda s: cross_validated_bandwidth(s, 0, jnp.array([0.1, -1.0]))),
        ("candidates", lambda s: cross_validated_bandwidth(s, 0, jnp.zeros((0,)))),
        ("chunk_size", lambda s: NadarayaWatson(s, 0.3, chunk_size=0)),
        ("alpha", lambda s: NadarayaWatson(s, 0.3)(jnp.zeros(3))),
        ("alpha", lambda s: LocalPolynomial(s, 0.3, 2)(jnp.zeros(1))),
        ("samples", lambda s: NadarayaWatson(jax.tree.map(lambda v: v[:1], s), 0.3)),
        ("samples.x", lambda s: NadarayaWatson(eqx.tree_at(lambda s: s.x, s, jnp.zeros_like(s.x)))),
        ("initial", lambda s: chain_with(s, (4, 3))),
        ("burn_in", lambda s: chain_with(s, burn_in=10)),
        ("num_steps", lambda s: chain_with(s, num_steps=0)),
        ("step_size", lambda s: chain_with(s, step_size=0.0)),
        ("inverse_temperature", lambda s: chain_with(s, inverse_temperature=jnp.ones(2))),
        ("bandwidth", lambda s: chain_with(s, bandwidth=-1.0)),
    ],
)
def test_mistakes_name_the_argument(name, make_it):
    with pytest.raises(ValueError, match=name):
        make_it(draw(40, 50, 2))
