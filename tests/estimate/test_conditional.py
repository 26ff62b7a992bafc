"""Conditional expectations against quadrature of the learner's law, Gaussian closed forms, and repeated data sets."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import malliavin_jax as mj
from malliavin_jax.estimate.conditional import conditional_expectation, density, score
from malliavin_jax.estimate.localizers import AbstractLocalizer, Centered, Gaussian, Heaviside, Laplace
from malliavin_jax.estimate.sums import CHUNK, episode_terms, localized_sums, make_bank
from malliavin_jax.potentials import Quadratic, Quartic
from malliavin_jax.samples.samples import Samples

STEP_SIZE, TIMES, NOISE = 0.02, (0.2, 0.4, 0.6, 0.8), 2.0
EPISODES = 100_000
ALPHAS = np.asarray([-1.2, -0.5, 0.0, 0.4, 1.0])


def start(key):
    return jax.random.normal(key, (1,))


# Episodes stop at random, so every test below also sees masked points; the third derivative is exact, so that
# integration by parts is exact on the discrete chain.
QUARTIC = mj.ForwardLearner(Quartic(), start, STEP_SIZE, gradient_noise=NOISE, restart_probability=0.005)
EXACT = mj.Canonical(third=lambda x: 6 * x[:, None, None])


@pytest.fixture(scope="module", params=[0, 1], ids=["seed0", "seed1"])
def quartic(request):
    """Many episodes of the paper's learner, at four times, with noisy gradients."""
    return mj.observe(jax.random.key(request.param), QUARTIC, num_episodes=EPISODES, times=TIMES, scheme=EXACT)


@functools.cache
def euler_law():
    """Grid and density of X_n for the Euler chain itself, by quadrature over its transition density.

    A step of sd √(2ε + ε² noise²) = .2 on a grid of .02: the trapezoidal rule is exact to rounding.
    """
    x = np.round(np.arange(-6, 6.01, 0.02), 10)
    sd = np.sqrt(2 * STEP_SIZE + (STEP_SIZE * NOISE) ** 2)
    transition = stats.norm.pdf(x[:, None], x[None, :] - STEP_SIZE * (x**3 + x)[None, :], sd) * 0.02
    p = stats.norm.pdf(x)
    for _ in range(round(TIMES[-1] / STEP_SIZE)):
        p = transition @ p
    return x, p


def smoothed_by(core, x, f):
    """f on the grid x, averaged by the core's kernel 2K_e − K_{√2 e}: what a `Gaussian` localizer is unbiased for."""
    y = x[:, None] - x[None, :]
    kernel = 2 * stats.norm.pdf(y, scale=core) - stats.norm.pdf(y, scale=np.sqrt(2) * core)
    return kernel @ f * (x[1] - x[0])


def episodes(samples, start=0, stop=None):
    return jax.tree.map(lambda leaf: leaf[start:stop], samples)


def at_last_time(samples):
    return jax.tree.map(lambda leaf: leaf[:, -1:], samples)


def gradient_bank(samples):
    return make_bank(samples, samples.gradient, samples.hessian)


@jax.jit
def sums_at(bank, alphas, localizer):
    return jax.vmap(lambda alpha: localized_sums(bank, alpha, localizer))(alphas)


@jax.jit
def estimates_at(samples, values, jacobians, alphas, localizer):
    return jax.vmap(lambda alpha: conditional_expectation(samples, values, jacobians, alpha, localizer))(alphas)


density_at, score_at = jax.jit(density), jax.jit(score)


def mean_and_error(total, square, count):
    """Mean and its standard error over `count` independent points, from their sum and sum of squares."""
    total, square = np.asarray(total), np.asarray(square)
    return total / count, np.sqrt(square - total**2 / count) / count


# ---------------------------------------------------------------- unbiased at every length


@pytest.mark.parametrize(
    "localizer",
    [
        Heaviside(),
        Centered(),
        Laplace(0.03),
        Laplace(0.2),
        Laplace(1.0),
        Laplace(5.0),
        Gaussian(0.1, 0.05),
        Gaussian(0.7, 0.05),
    ],
    ids=str,
)
def test_numerator_and_density_are_unbiased_at_every_length(localizer, quartic):
    samples = at_last_time(episodes(quartic, stop=5 * CHUNK))
    count = int(np.sum(samples.observed))
    sums = sums_at(gradient_bank(samples), jnp.asarray(ALPHAS)[:, None], localizer)
    x, p = euler_law()
    place = np.searchsorted(x, ALPHAS - 1e-6)
    for got, exact in (
        (mean_and_error(sums.n[:, 0], sums.nn[:, 0], count), p * (x**3 + x)),
        (mean_and_error(sums.w, sums.ww, count), p),
    ):
        mean, error = got
        if isinstance(localizer, Gaussian):  # the core's own bias, of order e⁴, is below the standard error
            assert np.all(np.abs(smoothed_by(localizer.core, x, exact) - exact)[place] < 0.1 * error)
        assert np.all(np.abs(mean - exact[place]) < 4 * error)
        assert np.all(error < 0.1)  # else the test says nothing


@functools.cache
def gaussian_case(d):
    """A learner on a quadratic loss, and the Gaussian law of its last state by the same recursion, in closed form."""
    mix = np.linspace(-0.3, 0.4, d * d).reshape(d, d)
    precision = np.diag(np.linspace(1.0, 2.0, d)) + (mix + mix.T) / 2
    center = np.linspace(0.3, -0.4, d)
    learner = mj.ForwardLearner(
        Quadratic(jnp.asarray(precision), jnp.asarray(center)),
        lambda key: 0.5 + jax.random.normal(key, (d,)),
        STEP_SIZE,
        inverse_temperature=1.5,
    )
    mean, covariance, M = np.full(d, 0.5), np.eye(d), np.eye(d) - STEP_SIZE * precision
    for _ in range(30):
        mean = mean - STEP_SIZE * precision @ (mean - center)
        covariance = M @ covariance @ M + 2 * STEP_SIZE / 1.5 * np.eye(d)
    # Any weight scheme will do; the windowed one compiles fast.
    scheme = mj.Canonical() if d < 3 else mj.Windowed(2.0)
    keys = [jax.random.key(seed) for seed in (0, 1)]
    samples = [mj.observe(key, learner, num_episodes=5 * CHUNK, times=[0.6], scheme=scheme) for key in keys]
    return samples, precision, center, mean, covariance


def smoothed_gaussian(alpha, precision, center, mean, covariance, width):
    """K_width averaged against p and against p ∇L, at α: both Gaussian integrals."""
    wide = covariance + width**2 * np.eye(len(mean))
    p = stats.multivariate_normal.pdf(alpha, mean, wide)
    centroid = mean + covariance @ np.linalg.solve(wide, alpha - mean)
    return p, p * precision @ (centroid - center)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("d", [1, 2, 3])
def test_closed_gaussian_forms(d, seed):
    """The bias of the core is −(e⁴/4) Δ²f + O(e⁶), f = p or p ∇L; here it is known exactly."""
    samples, precision, center, mean, covariance = gaussian_case(d)
    samples = samples[seed]
    core = {1: 0.1, 2: 0.15, 3: 0.16}[d]
    direction = np.linspace(1, -0.5, d)
    bank = gradient_bank(samples)
    for length in (0.3, 1.0, 4.0):
        alphas = np.stack([mean + t * direction for t in (-0.8, 0.0, 0.9)])
        sums = sums_at(bank, jnp.asarray(alphas), Gaussian(length, core))
        p_hat, p_error = mean_and_error(sums.w, sums.ww, 5 * CHUNK)
        n_hat, n_error = mean_and_error(sums.n, sums.nn, 5 * CHUNK)
        for i, alpha in enumerate(alphas):
            case = (alpha, precision, center, mean, covariance)
            exact = smoothed_gaussian(*case, 0.0)
            once, twice = (smoothed_gaussian(*case, e) for e in (core, np.sqrt(2) * core))
            for hat, error, truth, a, b in zip(
                (p_hat[i], n_hat[i]), (p_error[i], n_error[i]), exact, once, twice, strict=True
            ):
                expected = 2 * a - b
                assert np.all(np.abs(hat - expected) < 4 * error)
                assert np.all(np.abs(expected - truth) < error)  # bias below one standard error
                assert np.all(error < 0.1 * np.max(np.abs(exact[0])) * (1 + np.linalg.norm(precision)))


def test_the_core_has_the_fourth_order_in_two_dimensions():
    """The exact expectation above, at e and e/2: biases in the ratio 16 to leading order."""
    _, *case = gaussian_case(2)
    alpha = case[2] + 0.5

    def bias(core):
        once, twice = (smoothed_gaussian(alpha, *case, e)[1] for e in (core, np.sqrt(2) * core))
        return 2 * once - twice - smoothed_gaussian(alpha, *case, 0.0)[1]

    np.testing.assert_allclose(bias(0.02) / bias(0.01), 16, rtol=0.02)


# ---------------------------------------------------------------- limits


def test_short_lengths_are_the_kernel_estimator(quartic):
    """G = h sign(y) K, so with NW the Laplace kernel's average of ℓ, the estimate differs from it by at most

    h max|(ℓ − NW) S − ∇ℓ| / (1 − h max|S|).
    """
    samples = at_last_time(episodes(quartic, stop=5 * CHUNK))
    values, jacobians = samples.gradient, samples.hessian
    keep = np.asarray(samples.observed)
    x, g, H, S = (np.asarray(a)[keep].reshape(-1) for a in (samples.x, values, jacobians, samples.weight))
    distances = []
    for h in (1e-2, 1e-3, 1e-4):
        got = estimates_at(samples, values, jacobians, jnp.asarray(ALPHAS)[:, None], Laplace(h))
        K = np.exp(-np.abs(x[None] - ALPHAS[:, None]) / h)
        kernel_average = K @ g / K.sum(1)
        bound = h * np.max(np.abs((g[None] - kernel_average[:, None]) * S - H), 1) / (1 - h * np.max(np.abs(S)))
        distances.append(np.abs(got.value[:, 0] - kernel_average))
        assert np.all(distances[-1] < bound)
        np.testing.assert_allclose(got.density, K.mean(1) / (2 * h), rtol=h * np.max(np.abs(S)))
    assert np.max(distances[2]) < 0.05 * np.max(distances[0])


def test_long_lengths_are_the_centred_formula(quartic):
    """|1 − e^{−u}| ≤ u: sums at length h differ from the centred ones by at most 1/2h Σ |ℓ| + |y| |ℓS − ∇ℓ|."""
    samples = at_last_time(episodes(quartic, stop=5 * CHUNK))
    bank, alphas = gradient_bank(samples), jnp.asarray(ALPHAS)[:, None]
    centred = sums_at(bank, alphas, Centered())
    keep = np.asarray(samples.observed)
    x, g, H, S = (
        np.asarray(a)[keep].reshape(-1) for a in (samples.x, samples.gradient, samples.hessian, samples.weight)
    )
    far = np.abs(x[None] - ALPHAS[:, None])
    for h in (1e1, 1e3, 1e5):
        sums = sums_at(bank, alphas, Laplace(h))
        assert np.all(np.abs(sums.n - centred.n)[:, 0] <= (np.sum(np.abs(g)) + far @ np.abs(g * S - H)) / (2 * h))
        assert np.all(np.abs(sums.w - centred.w) <= (len(x) + far @ np.abs(S)) / (2 * h))
    np.testing.assert_allclose(sums.n / sums.w[:, None], centred.n / centred.w[:, None], atol=1e-3)
    # The paper's form is the centred one plus ½ E[ℓS − ∇ℓ], which vanishes only on average.
    paper = sums_at(bank, alphas, Heaviside())
    np.testing.assert_allclose(paper.n[:, 0] - centred.n[:, 0], np.sum(g * S - H) / 2, rtol=1e-8)
    np.testing.assert_allclose(paper.w - centred.w, np.sum(S) / 2, rtol=1e-8)


# ---------------------------------------------------------------- the sums themselves


class KohatsuHigaYasuda(AbstractLocalizer):
    """G = y / (2π (|y|² + h)), K = 0, in two dimensions."""

    h: float

    def __call__(self, y):
        return jnp.zeros((), y.dtype), y / (2 * jnp.pi * (jnp.sum(y * y) + self.h))


@pytest.mark.parametrize(("h", "published"), [(0.1, 0.138509), (0.01, 0.155375), (0.001, 0.158596)])
def test_kohatsu_higa_and_yasuda(h, published, key):
    """p^h(0) of a two-dimensional standard normal, whose weight is X itself: the sample mean, and its expectation."""
    x = np.asarray(jax.random.normal(key, (50_000, 1, 2)))
    zeros = jnp.zeros((50_000, 1, 2))
    samples = Samples(jnp.asarray(x), zeros, jnp.zeros((50_000, 1, 2, 2)), jnp.asarray(x), jnp.ones((50_000, 1), bool))
    sums = sums_at(gradient_bank(samples), jnp.zeros((1, 2)), KohatsuHigaYasuda(h))
    square = np.sum(x**2, (1, 2))
    terms = square / (2 * np.pi * (square + h))
    np.testing.assert_allclose(sums.w[0], terms.sum(), rtol=1e-12)
    np.testing.assert_allclose(sums.ww[0], (terms**2).sum(), rtol=1e-12)
    p, error = mean_and_error(sums.w[0], sums.ww[0], 50_000)
    assert abs(p - published) < 4 * error + 5e-7
    got, got_error = density_at(samples, jnp.zeros(2), KohatsuHigaYasuda(h))
    np.testing.assert_allclose([got, got_error], [p, error], rtol=1e-9)


def reference_terms(samples, alpha, length, core):
    """n and w of every episode straight from the formulas, with SciPy's χ², and their sizes before anything cancels."""
    x, g, H, S = (np.asarray(a, float) for a in (samples.x, samples.gradient, samples.hessian, samples.weight))
    d = x.shape[-1]
    y = x - alpha
    r = np.linalg.norm(y, axis=-1)
    if core is None:
        K, bare, share = np.exp(-r / length) / (2 * length), np.sign(y) / 2, np.exp(-r / length)
        whole = share
    else:
        inner, outer, all_of_it = (stats.chi2.cdf(r**2 / a**2, d) for a in (core, np.sqrt(2) * core, length))
        K = np.exp(-(r**2) / (2 * length**2)) / (2 * np.pi * length**2) ** (d / 2)
        bare = y / ({1: 2, 2: 2 * np.pi, 3: 4 * np.pi}[d] * r**d)[..., None]
        share, whole = 2 * inner - outer - all_of_it, 2 * inner + outer + all_of_it
    seen = np.asarray(samples.observed)

    def terms(K, G, g, H, S):
        w = K + np.sum(G * S, -1)
        n = w[..., None] * g - np.einsum("etij,etj->eti", H, G)
        return np.where(seen[..., None], n, 0).sum(1), np.where(seen, w, 0).sum(1)

    sizes = terms(K, np.abs(bare) * whole[..., None], np.abs(g), -np.abs(H), np.abs(S))
    return *terms(K, bare * share[..., None], g, H, S), *sizes


@jax.jit
def sums_at_one(bank, alpha, localizer):
    return localized_sums(bank, alpha, localizer)


@jax.jit
def sums_at_pairs(bank, alphas, localizers):
    """Every α with every localizer, as the choice of a length does; and the terms of each episode."""

    def one_pair(alpha, localizer):
        n, w = jax.vmap(lambda part: episode_terms(part, alpha, localizer))(bank)
        flat = (jnp.stack([row.reshape(-1) for row in n], -1), w.reshape(-1))
        return localized_sums(bank, alpha, localizer), jax.tree.map(lambda leaf: leaf[: bank.episodes], flat)

    return jax.vmap(lambda alpha: jax.vmap(lambda one: one_pair(alpha, one))(localizers))(alphas)


@pytest.mark.parametrize(
    ("d", "times", "count", "core", "dtype"),
    [
        (1, 1, CHUNK + 1, None, jnp.float32),
        (1, 3, 2 * (CHUNK // 3) + 7, None, jnp.float64),
        (2, 1, 300, 0.2, jnp.float32),
        (2, 4, CHUNK // 4, 0.2, jnp.float64),
        (3, 2, 300, 0.3, jnp.float64),
    ],
)
def test_sums_equal_the_formulas_however_they_are_batched(d, times, count, core, dtype):
    """One α at a time, or many α and lengths by vmap; with masks; in one chunk, in several, with a rest."""
    keys = jax.random.split(jax.random.key(d), 5)
    observed = jax.random.uniform(keys[4], (count, times)) < 0.8

    def draw(key, *shape):
        array = 1 + jax.random.normal(key, (count, times, *shape), dtype)
        return jnp.where(observed.reshape(count, times, *(1,) * len(shape)), array, jnp.nan)

    samples = Samples(draw(keys[0], d), draw(keys[1], d), draw(keys[2], d, d), draw(keys[3], d), observed)
    bank = gradient_bank(samples)
    alphas = jnp.asarray(np.linspace(-1, 1, 3 * d).reshape(3, d), dtype)
    lengths = jnp.asarray([0.3, 0.9], dtype)
    localizers = jax.vmap(Laplace if core is None else lambda h: Gaussian(h, jnp.asarray(core, dtype)))(lengths)
    together, terms = sums_at_pairs(bank, alphas, localizers)
    eps = 50 * float(jnp.finfo(dtype).eps)  # of each term's size, from the functions and from long sums
    for i in range(3):
        for j in range(2):
            localizer = jax.tree.map(lambda leaf, j=j: leaf[j], localizers)
            n, w, size_n, size_w = reference_terms(samples, np.asarray(alphas[i], float), float(lengths[j]), core)
            assert np.all(np.abs(np.asarray(terms[0][i, j]) - n) <= eps * size_n)
            assert np.all(np.abs(np.asarray(terms[1][i, j]) - w) <= eps * size_w)
            batched = jax.tree.map(lambda leaf, i=i, j=j: leaf[i, j], together)
            for sums in (batched, sums_at_one(bank, alphas[i], localizer)):
                for got, wanted, size in (
                    (sums.n, n.sum(0), size_n.sum(0)),
                    (sums.w, w.sum(), size_w.sum()),
                    (sums.nn, (n * n).sum(0), (size_n**2).sum(0)),
                    (sums.nw, w @ n, size_w @ size_n),
                    (sums.ww, w @ w, size_w @ size_w),
                ):
                    assert got.dtype == dtype
                    assert np.all(np.abs(np.asarray(got) - wanted) < eps * size)


# ---------------------------------------------------------------- other ℓ, density, score


class Cauchy(mj.estimate.AbstractRadial):
    """K = 1/(π (1 + r²)²) in the plane, and its field with a small core."""

    core: float

    def radial(self, square, d):
        return 1 / (jnp.pi * (1 + square) ** 2), 1 / (2 * jnp.pi * (1 + square) * (square + self.core))


@pytest.mark.parametrize("localizer", [Cauchy(0.01), Gaussian(0.6, 0.2)], ids=["Cauchy", "Gaussian"])
def test_a_radial_localizer_is_the_function_it_is(localizer, key):
    """Sums by r² alone against the same localizer as a plain function of y; one point in five is unobserved."""
    x, gradient = jax.random.normal(key, (2, 400, 2, 2))
    hessian = jnp.broadcast_to(jnp.eye(2), (400, 2, 2, 2))
    samples = Samples(x, gradient, hessian, x, jax.random.bernoulli(jax.random.fold_in(key, 1), 0.8, (400, 2)))
    alphas = jnp.asarray([[0.0, 0.0], [0.7, -0.4], [-1.1, 0.3]])
    bank = gradient_bank(samples)
    by_square, by_vector = (
        jax.vmap(lambda alpha, f=f: localized_sums(bank, alpha, f))(alphas) for f in (localizer, lambda y: localizer(y))
    )
    for got, wanted in zip(by_square, by_vector, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("localizer", [Laplace(0.15), Laplace(0.6), Gaussian(0.5, 0.05)], ids=str)
def test_any_function_can_be_conditioned(localizer, quartic):
    """ℓ = (x², cos x, 7): E[ℓ(X) | X = α] = ℓ(α). The core's bias, (e⁴/4) (pℓ)''''/p, is of order 1e-5."""
    samples = episodes(quartic, stop=5 * CHUNK)
    x = samples.x
    values = jnp.concatenate([x**2, jnp.cos(x), jnp.full_like(x, 7)], -1)
    jacobians = jnp.concatenate([2 * x, -jnp.sin(x), jnp.zeros_like(x)], -1)[..., None]
    got = estimates_at(samples, values, jacobians, jnp.asarray(ALPHAS)[:, None], localizer)
    exact = np.stack([ALPHAS**2, np.cos(ALPHAS), np.full_like(ALPHAS, 7)], -1)
    assert np.all(np.asarray(got.trusted))
    assert np.all(np.abs(got.value - exact)[:, :2] < 4 * np.asarray(got.stderr)[:, :2])
    assert np.all(np.asarray(got.stderr)[:, :2] < 0.05)
    np.testing.assert_allclose(got.value[:, 2], 7, rtol=1e-12)
    np.testing.assert_allclose(got.stderr[:, 2], 0, atol=1e-8)


def test_the_jacobian_term_is_needed(quartic):
    """Without ∇ℓ·G the same estimate is wrong by many standard errors: the test above can fail."""
    samples = episodes(quartic, stop=5 * CHUNK)
    got = estimates_at(
        samples, samples.x**2, jnp.zeros((*samples.x.shape, 1)), jnp.asarray(ALPHAS)[:, None], Laplace(0.6)
    )
    assert np.max(np.abs(got.value[:, 0] - ALPHAS**2) / got.stderr[:, 0]) > 8


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("d", [1, 2, 3])
def test_density_and_score_of_a_gaussian(d, seed):
    """E[S | X = x] = C⁻¹(x − m), so a kernel of length h gives −(C + h²I)⁻¹(α − m) in place of −C⁻¹(α − m)."""
    samples, _, _, mean, covariance = gaussian_case(d)
    samples = samples[seed]
    core, length = {1: 0.1, 2: 0.15, 3: 0.16}[d], 0.2
    direction = np.linspace(1, -0.5, d)
    alphas = np.stack([mean + t * direction for t in (-0.8, 0.0, 0.9)])
    p, p_error = jax.vmap(lambda a: density_at(samples, a, Gaussian(1.0, core)))(jnp.asarray(alphas))
    exact = stats.multivariate_normal.pdf(alphas, mean, covariance)
    assert np.all(np.abs(p - exact) < 4 * np.asarray(p_error) + 0.02 * exact)  # the core's bias is below a hundredth
    slope, error = jax.vmap(lambda a: score_at(samples, a, length))(jnp.asarray([*alphas, np.full(d, 23.0)]))
    (far, slope), (far_error, error) = ((part[-1], part[:-1]) for part in (slope, error))
    smoothed = -np.linalg.solve(covariance + length**2 * np.eye(d), (alphas - mean).T).T
    truth = -np.linalg.solve(covariance, (alphas - mean).T).T
    assert np.all(np.abs(slope - smoothed) < 4 * np.asarray(error))
    bias = length**2 * np.linalg.norm(np.linalg.inv(covariance), 2) * np.linalg.norm(truth, axis=1)
    assert np.all(np.abs(slope - truth) < 4 * np.asarray(error) + bias[:, None])
    assert np.all(np.isfinite(far))
    assert np.all(np.isinf(far_error))


# ---------------------------------------------------------------- standard errors


def test_points_of_one_episode_are_added_before_they_are_squared(quartic):
    """The same times twice carry no new information: nothing changes, the standard errors least of all."""
    samples = episodes(quartic, stop=CHUNK // 4)
    twice = jax.tree.map(lambda leaf: jnp.concatenate([leaf, leaf], 1), samples)
    alphas = jnp.asarray(ALPHAS)[:, None]
    one = estimates_at(samples, samples.gradient, samples.hessian, alphas, Laplace(0.3))
    two = estimates_at(twice, twice.gradient, twice.hessian, alphas, Laplace(0.3))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9), one, two)


def root_mean_square(array):
    return float(np.sqrt(np.mean(np.asarray(array) ** 2)))


def test_standard_errors_match_repeated_data_sets(quartic):
    """200 data sets of 500 episodes at four times. A standard deviation over R sets is good to 1/√(2R), of one α."""
    sets = jax.tree.map(lambda leaf: leaf.reshape(200, -1, *leaf.shape[1:]), quartic)
    alphas = jnp.asarray(ALPHAS)[:, None]

    @jax.jit
    def estimates(sets):
        def one(samples):
            x = samples.x
            values, jacobians = (
                jnp.concatenate([samples.gradient, x**2], -1),
                jnp.concatenate([samples.hessian, 2 * x[..., None]], -2),
            )
            return jax.vmap(lambda a: conditional_expectation(samples, values, jacobians, a, Laplace(0.4)))(alphas)

        return jax.lax.map(one, sets)

    got = estimates(sets)
    as_if_independent = jax.tree.map(lambda leaf: leaf.reshape(200, -1, 1, *leaf.shape[3:]), sets)
    naive = estimates(as_if_independent).density_stderr
    tolerance = 4 / np.sqrt(2 * 200)
    for value, error in (
        (got.value[..., 0], got.stderr[..., 0]),
        (got.value[..., 1], got.stderr[..., 1]),
        (got.density, got.density_stderr),
    ):
        deviation = np.sqrt(np.mean(np.var(value, 0, ddof=1)))
        assert abs(deviation / root_mean_square(error) - 1) < tolerance
    # The density's terms at neighbouring times are alike: taking them for independent is plainly wrong.
    assert root_mean_square(naive) < 0.85 * root_mean_square(error)


# ---------------------------------------------------------------- trust and bad input


def test_neither_gradients_nor_hessians_of_the_samples_are_used(quartic):
    samples = episodes(quartic, 0, 200)
    without = eqx.tree_at(lambda s: (s.gradient, s.hessian), samples, (jnp.zeros_like(samples.x), None))
    half, values, jacobians = jnp.asarray([0.5]), samples.x**2, 2 * samples.x[..., None]
    for function in (
        lambda s: density(s, half, Laplace(0.5)),
        lambda s: score(s, half, 0.3),
        lambda s: conditional_expectation(s, values, jacobians, half, Laplace(0.5)),
    ):
        assert eqx.tree_equal(function(samples), function(without))


def test_far_away_nothing_is_trusted_and_no_nan_spreads(quartic):
    samples = episodes(quartic, stop=CHUNK // 4)
    alphas = jnp.asarray([0.3, 23.0, jnp.nan, -0.2, -1e3])[:, None]
    near = jnp.asarray([0.3, 0.0, 0.1, -0.2, 0.5])[:, None]
    for localizer in (Centered(), Laplace(0.2), Gaussian(0.4, 0.1)):
        got, alone = (estimates_at(samples, samples.gradient, samples.hessian, a, localizer) for a in (alphas, near))
        np.testing.assert_array_equal(got.trusted[1:], [False, False, True, False])
        assert np.isnan(got.value[2, 0])
        for i in (0, 3):
            jax.tree.map(lambda a, b, i=i: np.testing.assert_allclose(a[i], b[i], rtol=1e-10), got, alone)
        if isinstance(localizer, Laplace):  # it underflows: nothing to divide by, and an infinite error bar
            assert np.isinf(got.stderr[4, 0])


@pytest.mark.usefixtures("no_type_checks")
def test_bad_input(quartic):
    samples = at_last_time(episodes(quartic, stop=50))
    samples = jax.tree.map(lambda leaf: leaf[np.asarray(samples.observed)[:, 0]][:20], samples)

    def estimate(samples, alpha=None, v=None, j=None):
        alpha = jnp.zeros(1) if alpha is None else alpha
        v, j = samples.gradient if v is None else v, samples.hessian if j is None else j
        return conditional_expectation(samples, v, j, alpha, Laplace(0.3))

    with pytest.raises(ValueError, match=r"at least 2 episodes, got 1"):
        estimate(episodes(samples, stop=1))
    with pytest.raises(ValueError, match=r"alpha must have shape \(1,\) for axes \(d,\), got \(2,\)"):
        estimate(samples, jnp.zeros(2))
    with pytest.raises(ValueError, match=r"values must have shape \(20, 1, m\) for axes .*, got \(19, 1, 1\)"):
        estimate(samples, v=samples.gradient[1:])
    with pytest.raises(
        ValueError,
        match=r"jacobians must have shape \(20, 1, 1, 1\) for axes .*m, d\), got \(20, 1, 2, 1\)",
    ):
        estimate(samples, j=jnp.zeros((20, 1, 2, 1)))
    for name in ("x", "gradient", "hessian", "weight"):
        broken = eqx.tree_at(lambda s, name=name: getattr(s, name), samples, getattr(samples, name).at[3].set(jnp.inf))
        with pytest.raises(
            ValueError, match=rf"samples.{name} must be finite where observed; first bad value at episode 3"
        ):
            estimate(broken)
    hidden = eqx.tree_at(lambda s: s.observed, samples, jnp.zeros((20, 1), bool).at[3].set(True))
    with pytest.raises(ValueError, match=r"at least 2 episodes with an observed point, got 1"):
        estimate(hidden)
    for length in (0.0, -1.0):
        with pytest.raises(ValueError, match=r"length must be positive"):
            score(samples, jnp.zeros(1), length)
    with pytest.raises(ValueError, match=r"alpha must have shape"):
        score(samples, jnp.zeros(3), 0.2)
    with pytest.raises(ValueError, match=r"alpha must have shape"):
        density(samples, jnp.zeros(3), Laplace(0.2))
