"""Closed-form derivatives against autodiff, batches against the whole, fits against plain least squares."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special, stats

from malliavin_jax.potentials import (
    AbstractMinibatchPotential,
    AbstractPotential,
    DoubleWell,
    GaussianMixture,
    LogisticRegression,
    MullerBrown,
    Polynomial,
    Potential,
    Quadratic,
    Quartic,
    num_terms,
)

DIMENSIONS = (1, 2, 3)


def covariance_stack(rng, k, d):
    root = rng.normal(size=(k, d, d))
    return root @ root.mT + 0.3 * np.eye(d)


def logistic(d, *, n=40, batch_size=None, prior_precision=0.7):
    rng = np.random.default_rng(5)
    features = rng.normal(size=(n, d))
    return LogisticRegression(features, rng.integers(0, 2, n), prior_precision, batch_size)


@functools.cache
def examples(d):
    rng = np.random.default_rng(d)
    matrix = covariance_stack(rng, 1, d)[0]
    exponents = tuple(map(tuple, np.unique(rng.integers(0, 5, (12, d)), axis=0)))
    listed = {
        "quadratic number": Quadratic(2.0, 0.3),
        "quadratic matrix": Quadratic(matrix, rng.normal(size=d)),
        "quartic": Quartic(0.5),
        "double well": DoubleWell(1.3, -0.4, 2.0),
        "mixture": GaussianMixture(rng.normal(size=(3, d))),
        "mixture, one variance": GaussianMixture(rng.normal(size=(2, d)), [1.0, 3.0], 0.4),
        "mixture, covariances": GaussianMixture(
            rng.normal(size=(4, d)), rng.uniform(0.5, 2, 4), covariance_stack(rng, 4, d)
        ),
        "logistic": logistic(d),
        "polynomial": Polynomial(
            rng.normal(size=len(exponents)), exponents, rng.normal(size=d), rng.uniform(0.5, 2, d)
        ),
        "callables": Potential(Quartic(0.2).value, lambda x: Quartic(0.2).gradient(x), Quartic(0.2).hessian),
    }
    if d == 2:
        listed["Müller–Brown"] = MullerBrown()
    return listed


CASES = [pytest.param(d, name, id=f"{name}-{d}") for d in DIMENSIONS for name in examples(d)]


def points(key, d, n=64):
    """Spread points, with the origin and a coordinate at zero among them."""
    x = jax.random.normal(key, (n, d))
    return x.at[0].set(0.0).at[1, 0].set(0.0)


def agree(functions, x):
    """Each pair of functions of one point agrees to 1e-10, relative where the values are large."""
    for got, expected in jax.jit(jax.vmap(lambda x: [(f(x), g(x)) for f, g in functions]))(x):
        assert got.shape == expected.shape
        assert np.all(np.abs(got - expected) <= 1e-10 * (1 + np.abs(expected)))


@pytest.mark.parametrize(("d", "name"), CASES)
def test_derivatives_match_autodiff(d, name):
    potential = examples(d)[name]
    pairs = [
        (potential.gradient, jax.grad(potential.value)),
        (potential.hessian, jax.hessian(potential.value)),
    ]
    agree(pairs, points(jax.random.key(0), d, 200))


@pytest.mark.parametrize("name", examples(2))
def test_closed_forms_can_be_differentiated(name):
    """From outside: the derivative of the closed Hessian is the third derivative, at zero too."""
    potential = examples(2)[name]
    agree(
        [(jax.jacfwd(potential.hessian), jax.jacfwd(jax.hessian(potential.value)))],
        points(jax.random.key(1), 2),
    )


@pytest.mark.parametrize(("d", "name"), CASES)
def test_dtype_follows_x(d, name):
    """Parameters are float64 here; a float32 point still gives float32 results."""
    potential = examples(d)[name]
    for dtype in (jnp.float32, jnp.float64):
        x = jax.ShapeDtypeStruct((d,), dtype)
        for method, shape in (("value", ()), ("gradient", (d,)), ("hessian", (d, d))):
            assert jax.eval_shape(getattr(potential, method), x) == jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.parametrize("name", examples(2))
def test_compiles_once_as_an_argument_and_is_right_in_float32(name):
    potential = examples(2)[name]
    x = points(jax.random.key(3), 2, 16)

    @jax.jit
    @eqx.debug.assert_max_traces(max_traces=1)
    def both(potential, x):
        def all_three(x):
            return potential.value(x), potential.gradient(x), potential.hessian(x)

        return jax.vmap(all_three)(x), jax.vmap(all_three)(x.astype(jnp.float32))

    both(potential, x + 1)
    exact, single = both(potential, x)
    np.testing.assert_allclose(exact[1][2], potential.gradient(x[2]), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(exact[2], exact[2].mT, rtol=1e-12, atol=1e-12)
    for got, expected in zip(single, exact, strict=True):
        # some hundred roundings of terms no larger than a hundred times the results
        bound = 1e4 * np.finfo(np.float32).eps * (1 + np.abs(expected).max())
        assert np.all(np.abs(np.asarray(got) - np.asarray(expected)) <= bound)


def test_the_quartic_is_the_papers():
    x = jnp.asarray([1.7])
    assert float(Quartic().value(x)) == pytest.approx(1.7**4 / 4 + 1.7**2 / 2, rel=1e-14)
    y = jnp.asarray([1.0, 2.0, -3.0])
    assert float(Quartic(0.5).value(y)) == pytest.approx((1 + 16 + 81) / 4 + 14 / 2 + 0.5 * (2 - 6), rel=1e-14)


def test_muller_brown_has_its_published_minima():
    """Positions and energies of the three minima, to the digits they are usually quoted with."""
    surface = MullerBrown(1.0)
    for x, energy in (((-0.558, 1.442), -146.70), ((0.623, 0.028), -108.17), ((-0.050, 0.467), -80.77)):
        point = jnp.asarray(x)
        assert float(surface.value(point)) == pytest.approx(energy, abs=0.01)
        step = jnp.linalg.solve(surface.hessian(point), surface.gradient(point))
        assert np.abs(step).max() < 5.1e-4  # half of the last digit quoted
        assert np.all(np.linalg.eigvalsh(surface.hessian(point)) > 0)


def test_muller_brown_default_is_stable_at_a_step_of_a_hundredth():
    surface = MullerBrown()
    axes = np.meshgrid(np.linspace(-1.5, 1.3, 141), np.linspace(-0.6, 2.1, 136), indexing="ij")
    x = jnp.asarray(np.stack(axes, axis=-1).reshape(-1, 2))
    inside = np.asarray(jax.vmap(surface.value)(x)) < 100 * surface.scale
    largest = np.linalg.eigvalsh(jax.vmap(surface.hessian)(x))[inside].max()
    assert 0.55 < 0.01 * largest < 0.6


@pytest.mark.parametrize("d", DIMENSIONS)
def test_mixture_is_the_density_of_scipy(d):
    rng = np.random.default_rng(1)
    means, weights, spread = rng.normal(size=(3, d)), np.asarray([0.2, 0.5, 0.3]), covariance_stack(rng, 3, d)
    x = rng.normal(size=(20, d))
    density = sum(w * stats.multivariate_normal(m, s).pdf(x) for w, m, s in zip(weights, means, spread, strict=True))
    potential = GaussianMixture(means, 7 * weights, spread)  # weights need not sum to one
    np.testing.assert_allclose(jax.jit(jax.vmap(potential.value))(x), -np.log(density), rtol=1e-12)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_mixture_far_away_is_its_nearest_component(dtype):
    """At 10⁴ every density underflows; the component with the longest reach alone is left."""
    wide = 4.0 * np.eye(2)
    potential = GaussianMixture([[0.0, 0.0], [1.0, -1.0]], None, np.stack([np.eye(2), wide]))
    x = jnp.asarray([1e4, -2e4], dtype)
    value, gradient, hessian = jax.jit(lambda x: (potential.value(x), potential.gradient(x), potential.hessian(x)))(x)
    np.testing.assert_allclose(gradient, (np.asarray(x) - np.asarray([1.0, -1.0])) / 4, rtol=1e-6)
    np.testing.assert_allclose(hessian, np.eye(2) / 4, rtol=1e-6)
    assert np.isfinite(value)


def test_logistic_value_is_the_sum_of_log_losses():
    potential = logistic(2)
    x = np.asarray([0.8, -1.1])
    signs = 2 * np.asarray(potential.labels) - 1
    losses = np.log1p(np.exp(-signs * (np.asarray(potential.features) @ x)))
    expected = losses.sum() + 0.5 * 0.7 * x @ x
    assert float(potential.value(jnp.asarray(x))) == pytest.approx(expected, rel=1e-13)


def test_logistic_hessian_keeps_small_curvatures():
    """At a logit of ±60, σ(1 − σ) would round to 0; the curvature is e^−60."""
    potential = LogisticRegression([[1.0]], [1], 0.0)
    for x in (60.0, -60.0):
        assert float(potential.hessian(jnp.asarray([x]))[0, 0]) == pytest.approx(np.exp(-60), rel=1e-12, abs=0)


def test_minibatches_are_unbiased(key):
    potential = logistic(2, batch_size=8)
    assert isinstance(potential, AbstractMinibatchPotential)
    x = jnp.asarray([1.0, -0.5])

    def three(potential):
        parts = potential.value(x)[None], potential.gradient(x), potential.hessian(x)[jnp.triu_indices(2)]
        return jnp.concatenate(parts)

    drawn = jax.jit(jax.vmap(lambda k: three(potential.minibatch(k))))(jax.random.split(key, 4000))
    stderr = np.std(drawn, axis=0, ddof=1) / np.sqrt(4000)
    assert np.all(np.abs(np.mean(drawn, axis=0) - three(potential)) < 4 * stderr)
    assert np.all(stderr > 0)


def test_a_batch_is_a_potential_and_no_batch_size_means_all():
    potential = logistic(2, batch_size=8)
    batch = potential.minibatch(jax.random.key(0))
    assert isinstance(batch, AbstractPotential)
    assert batch.features.shape == (8, 2)
    assert float(batch.data_scale) == 40 / 8
    whole = logistic(2)
    assert whole.minibatch(jax.random.key(0)) is whole


class Stretched(eqx.Module):
    rate: jax.Array

    def value(self, x):
        return 0.5 * self.rate * jnp.sum(x**2)

    def gradient(self, x):
        return self.rate * x

    def hessian(self, x):
        return self.rate * jnp.eye(x.shape[0], dtype=x.dtype)


def test_potential_keeps_the_parameters_of_its_callables():
    x = jnp.asarray([1.0, 2.0])
    inner = Stretched(jnp.asarray(3.0))
    potential = Potential(inner.value, inner.gradient, inner.hessian)
    np.testing.assert_array_equal(potential.gradient(x), 3.0 * x)

    def total(rate):
        inner = Stretched(rate)
        return Potential(inner.value, inner.gradient, inner.hessian).gradient(x).sum()

    assert float(jax.grad(total)(3.0)) == pytest.approx(3.0)
    leaves = jax.tree.leaves(eqx.filter_grad(lambda p: p.gradient(x).sum())(potential))
    assert sum(float(leaf) for leaf in leaves) == pytest.approx(3.0)


def test_derivatives_flow_into_parameters():
    x = jnp.asarray([0.5, -1.5])
    assert float(jax.grad(lambda c: Quartic(c).value(x))(0.1)) == pytest.approx(-0.75)
    assert float(jax.grad(lambda h: DoubleWell(h).value(x))(1.0)) == pytest.approx((0.25 - 1) ** 2)
    slope = jax.jit(jax.grad(lambda c: Quadratic(2.0, c).value(x)))(jnp.zeros(2))
    np.testing.assert_allclose(slope, -2.0 * x)

    def mixture(spread):
        return GaussianMixture([[0.0, 0.0]], None, spread[None]).value(x)

    # d/dΣ of ½ xᵀΣ⁻¹x + ½ log det Σ at Σ = I, which the Cholesky factorisation must carry
    expected = 0.5 * (np.eye(2) - np.outer(x, x))
    symmetric = jax.jit(jax.grad(lambda s: mixture(0.5 * (s + s.mT))))(jnp.eye(2))
    np.testing.assert_allclose(symmetric, expected, atol=1e-12)


# ---------------------------------------------------------------- Polynomial.fit


@eqx.filter_jit
def observations(key, d, n=500, *, noise=0.0, potential=None, dtype=jnp.float64):
    """Points with gradients (noisy) and Hessians (exact) of a potential."""
    potential = Quartic(0.5) if potential is None else potential
    key_x, key_g = jax.random.split(key)
    x = 0.3 + 0.8 * jax.random.normal(key_x, (n, d), dtype)
    gradient = jax.vmap(potential.gradient)(x) + noise * jax.random.normal(key_g, (n, d), dtype)
    return x, gradient, jax.vmap(potential.hessian)(x)


def design(fitted, x):
    """Rows of ∇_z and of ∇²_z of the monomials, written out, and the units that take data there."""
    z = (np.asarray(x) - np.asarray(fitted.center)) / np.asarray(fitted.scale)
    exponents, shifts = np.asarray(fitted.exponents), np.eye(z.shape[1], dtype=int)

    def rows(shift):
        """Π_j e_j!/(e_j − δ_j)! z_j^(e_j − δ_j) for every point and term."""
        left = exponents - shift
        falling = np.prod(special.poch(left + 1.0, shift), axis=1) * np.all(left >= 0, axis=1)
        return falling * np.prod(z[:, None, :] ** np.maximum(left, 0), axis=2)

    gradients = np.stack([rows(i) for i in shifts], axis=1).reshape(-1, len(exponents))
    hessians = np.stack([rows(i + j) for i in shifts for j in shifts], axis=1).reshape(-1, len(exponents))
    scale = np.asarray(fitted.scale)
    return gradients, hessians, scale, np.outer(scale, scale)


def lstsq(rows, targets):
    return np.linalg.lstsq(np.concatenate(rows), np.concatenate(targets), rcond=None)[0]


@pytest.mark.parametrize("d", DIMENSIONS)
def test_one_pass_is_plain_least_squares(d):
    """On a loss that is no polynomial, with noise, and a last chunk that is not full."""
    loss = GaussianMixture(np.linspace(-1, 1, 2 * d).reshape(2, d), None, 0.3)
    x, gradient, hessian = observations(jax.random.key(0), d, noise=1.0, potential=loss)
    fitted = Polynomial.fit(x, gradient, hessian, degree=5, passes=1, chunk_size=200)
    assert fitted.coefficients.shape == (num_terms(d, 5),)
    rows_g, rows_h, scale, scales = design(fitted, x)
    expected = lstsq((rows_g, rows_h), ((gradient * scale[None]).ravel(), (hessian * scales[None]).ravel()))
    np.testing.assert_allclose(fitted.coefficients, expected, rtol=0, atol=1e-9 * np.abs(expected).max())
    np.testing.assert_allclose(fitted.center, np.mean(x, axis=0), rtol=1e-12)
    np.testing.assert_allclose(fitted.scale, np.std(x, axis=0), rtol=1e-12)


@pytest.mark.parametrize("d", [1, 3])
def test_fit_recovers_a_polynomial_from_noisy_gradients_and_exact_hessians(d, key):
    """The second pass is least squares weighted by residual variances, and errs as its covariance says."""
    noise = 10.0
    x, gradient, hessian = observations(key, d, noise=noise)
    fitted = Polynomial.fit(x, gradient, hessian)
    rows_g, rows_h, scale, scales = design(fitted, x)
    data_g, data_h = (gradient * scale[None]).ravel(), (hessian * scales[None]).ravel()
    first = lstsq((rows_g, rows_h), (data_g, data_h))
    left_g, left_h = data_g - rows_g @ first, data_h - rows_h @ first
    sd_g, sd_h = np.sqrt(np.mean(left_g**2)), np.sqrt(np.mean(left_h**2))
    expected = lstsq((rows_g / sd_g, rows_h / sd_h), (data_g / sd_g, data_h / sd_h))
    np.testing.assert_allclose(fitted.coefficients, expected, rtol=0, atol=1e-7 * np.abs(expected).max())

    # θ̂ − θ = N⁻¹ A_gᵀ (noise)/sd_g², with N the weighted normal matrix
    clean = (jax.vmap(Quartic(0.5).gradient)(x) * scale[None]).ravel()
    truth = lstsq((rows_g, rows_h), (clean, data_h))
    normal = rows_g.T @ rows_g / sd_g**2 + rows_h.T @ rows_h / sd_h**2
    spread = np.linalg.solve(normal, rows_g.T * np.tile(noise * scale, len(x)) / sd_g**2)
    stderr = np.sqrt(np.sum(spread**2, axis=1))
    assert np.all(np.abs(fitted.coefficients - truth) < 4 * stderr + 1e-10)

    # and the exact Hessians are not spoilt, as they are in one pass
    once = Polynomial.fit(x, gradient, hessian, passes=1)
    miss, miss_once = (np.abs(rows_h @ np.asarray(f.coefficients) - data_h).max() for f in (fitted, once))
    assert miss < 0.01 * miss_once


def test_fit_is_exact_on_exact_data():
    fitted, truth = Polynomial.fit(*observations(jax.random.key(0), 2)), Quartic(0.5)
    assert [num_terms(d, 6) for d in DIMENSIONS] == [6, 27, 83]
    assert len(fitted.exponents) == 27
    away = 2.0 * jax.random.normal(jax.random.key(1), (20, 2))
    agree([(fitted.gradient, truth.gradient), (fitted.hessian, truth.hessian)], away)


def test_fit_in_float32():
    """Exact data again: rounding of size eps, times degree², times the powers of z up to |z| = 3."""
    x, gradient, hessian = observations(jax.random.key(0), 3, 5000, dtype=jnp.float32)
    fitted = Polynomial.fit(x, gradient, hessian)
    assert {leaf.dtype for leaf in jax.tree.leaves(fitted)} == {np.dtype(np.float32)}
    error = np.abs(jax.jit(jax.vmap(fitted.hessian))(x) - hessian).max()
    assert error < 36 * 3**4 * np.finfo(np.float32).eps


def test_fit_ignores_masked_points():
    x, gradient, hessian = observations(jax.random.key(0), 2, noise=2.0)
    mask = jax.random.bernoulli(jax.random.key(1), 0.7, (500,))
    holes = [jnp.where(mask.reshape(-1, *[1] * (a.ndim - 1)), a, jnp.nan) for a in (x, gradient, hessian)]
    picked = Polynomial.fit(x[mask], gradient[mask], hessian[mask], degree=3)
    for weights in (mask, mask.astype(int), mask.astype(float)):
        masked = Polynomial.fit(*holes, weights=weights, degree=3, chunk_size=300)
        for got, expected in zip(jax.tree.leaves(masked), jax.tree.leaves(picked), strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-9)


def test_fit_can_be_differentiated_past_masked_points():
    """θ̂ of one pass is linear in the data; a derivative past the NaN must say so."""
    x, gradient, hessian = observations(jax.random.key(0), 1, 200, noise=2.0)
    mask = jnp.arange(200) >= 10
    x, gradient, hessian = (a.at[:10].set(jnp.nan) for a in (x, gradient, hessian))

    def at_one(gradient, hessian):
        fitted = Polynomial.fit(x, gradient, hessian, weights=mask, degree=2, passes=1)
        return fitted.gradient(jnp.ones(1))[0]

    slopes = jax.grad(at_one, argnums=(0, 1))(gradient, hessian)
    assert all(np.all(slope[:10] == 0) for slope in slopes)
    total = sum(np.sum(slope[10:] * data[10:]) for slope, data in zip(slopes, (gradient, hessian), strict=True))
    assert float(total) == pytest.approx(float(at_one(gradient, hessian)), rel=1e-9)


def test_fit_weights_count_as_repetitions():
    data = observations(jax.random.key(0), 1, noise=2.0)
    times = np.arange(500) % 4
    weighted = Polynomial.fit(*data, weights=times, degree=3)
    repeated = Polynomial.fit(*(np.repeat(a, times, axis=0) for a in data), degree=3)
    np.testing.assert_allclose(weighted.coefficients, repeated.coefficients, rtol=1e-9, atol=1e-10)


def test_fit_does_not_depend_on_the_units_of_x(key):
    """Metres or millimetres, each coordinate its own: the same loss."""
    x, gradient, hessian = observations(key, 2, noise=3.0)
    unit = jnp.asarray([1e-3, 50.0])
    first = Polynomial.fit(x, gradient, hessian)
    other = Polynomial.fit(x * unit[None], gradient / unit[None], hessian / jnp.outer(unit, unit)[None])
    np.testing.assert_allclose(first.coefficients, other.coefficients, rtol=1e-7, atol=1e-8)


def test_fit_compiles_once_and_maps_over_masks():
    x, gradient, hessian = observations(jax.random.key(0), 2, noise=1.0)
    half = jnp.arange(500) < 250

    @jax.jit
    @eqx.debug.assert_max_traces(max_traces=1)
    def folds(masks):
        return jax.vmap(lambda mask: Polynomial.fit(x, gradient, hessian, weights=mask, degree=4))(masks)

    both = folds(jnp.stack([half, ~half]))
    folds(jnp.stack([~half, half]))
    for i, mask in enumerate((half, ~half)):
        alone = Polynomial.fit(x, gradient, hessian, weights=mask, degree=4)
        np.testing.assert_allclose(both.coefficients[i], alone.coefficients, rtol=1e-9, atol=1e-10)


def test_fit_of_too_little_data_stays_finite():
    x, gradient, hessian = observations(jax.random.key(0), 2)
    nothing = Polynomial.fit(jnp.full_like(x, jnp.nan), gradient, hessian, weights=np.zeros(500))
    np.testing.assert_array_equal(nothing.coefficients, 0.0)
    single = Polynomial.fit(x, gradient, hessian, weights=np.arange(500) == 7)  # no spread to divide by
    np.testing.assert_array_equal(single.scale, 1.0)
    np.testing.assert_allclose(single.gradient(x[7]), gradient[7], rtol=1e-6)
    np.testing.assert_allclose(single.hessian(x[7]), hessian[7], rtol=1e-6)


# ---------------------------------------------------------------- mistakes

EYE = np.eye(2)
BAD = {
    "precision must be a number or a square": lambda: Quadratic(np.ones((2, 3))),
    "precision must be symmetric": lambda: Quadratic([[1.0, 2.0], [0.0, 1.0]]),
    "precision must be finite": lambda: Quadratic(np.nan),
    "precision must be an array of numbers": lambda: Quadratic("stiff"),
    "center must have shape": lambda: Quadratic(EYE, np.zeros(3)),
    "x must have shape .2.*got .3": lambda: Quadratic(EYE).hessian(jnp.zeros(3)),
    "coupling must have shape": lambda: Quartic(np.zeros(2)),
    "coupling must be finite": lambda: Quartic(np.inf),
    "height must be positive": lambda: DoubleWell(0.0),
    "stiffness must be positive": lambda: DoubleWell(stiffness=-1),
    "tilt must be finite": lambda: DoubleWell(tilt=np.nan),
    "scale must be positive": lambda: MullerBrown(-1.0),
    "x must have shape .2.*got .1": lambda: MullerBrown().value(jnp.zeros(1)),
    "means must have shape": lambda: GaussianMixture(np.zeros(2)),
    "weights must have shape": lambda: GaussianMixture(EYE, np.ones(3)),
    "weights must be positive": lambda: GaussianMixture(EYE, [1.0, -1.0]),
    "covariances must be positive and": lambda: GaussianMixture(EYE, None, -1.0),
    "covariances must have shape": lambda: GaussianMixture(EYE, None, EYE),
    "covariances must be symmetric": lambda: GaussianMixture(EYE, None, [[[1, 0.5], [0, 1]]] * 2),
    "covariances must be positive definite": lambda: GaussianMixture(EYE, None, np.stack([EYE, -EYE])),
    "features must have shape": lambda: LogisticRegression(np.ones(3), [0, 1, 1]),
    "the number of rows of features": lambda: LogisticRegression(np.ones((0, 2)), np.ones(0)),
    "labels must have shape": lambda: LogisticRegression(EYE, [0, 1, 1]),
    "labels must be 0 or 1": lambda: LogisticRegression(EYE, [-1, 1]),
    "prior_precision must be non-negative": lambda: LogisticRegression(EYE, [0, 1], -1.0),
    "batch_size must be a whole number": lambda: LogisticRegression(EYE, [0, 1], 1.0, 0),
    "gradient must be callable": lambda: Potential(jnp.sum, 3.0, jnp.sum),
    "coefficients must have shape": lambda: Polynomial([1.0], ((1, 0), (0, 1))),
    "exponents must all be different": lambda: Polynomial([1.0, 2.0], ((1, 0), (1, 0))),
    "exponents must be tuples of one length": lambda: Polynomial([1.0, 2.0], ((1, 0), (1,))),
    "each exponent must be a whole number": lambda: Polynomial([1.0], ((-1,),)),
    "scale must be positive and finite, got 0": lambda: Polynomial([1.0], ((1,),), 0.0, 0.0),
    "gradient must have shape": lambda: Polynomial.fit(EYE, np.ones((2, 1)), np.ones((2, 2, 2))),
    "hessian must have shape": lambda: Polynomial.fit(EYE, EYE, EYE),
    "weights must have shape .2": lambda: Polynomial.fit(EYE, EYE, np.ones((2, 2, 2)), weights=np.ones(3)),
    "weights must be non-negative": lambda: Polynomial.fit(EYE, EYE, np.ones((2, 2, 2)), weights=-np.ones(2)),
    "degree must be a whole number": lambda: Polynomial.fit(EYE, EYE, np.ones((2, 2, 2)), degree=0),
    "passes must be a whole number": lambda: Polynomial.fit(EYE, EYE, np.ones((2, 2, 2)), passes=0),
    "the number of points in x": lambda: Polynomial.fit(EYE[:0], EYE[:0], np.ones((0, 2, 2))),
}


@pytest.mark.parametrize("message", BAD)
@pytest.mark.usefixtures("no_type_checks")
def test_mistakes_are_named(message):
    with pytest.raises(ValueError, match=message):
        BAD[message]()
