"""What small problems do with NumPy is what compiled programs do: step by step, and a whole field."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import malliavin_jax as mj
from malliavin_jax._base import host
from malliavin_jax.estimate import on_host
from malliavin_jax.estimate.sums import localized_sums, make_bank
from malliavin_jax.fields.extrapolation import _table as tabulated_tail, planes_at, tangent_planes
from malliavin_jax.fields.judge import Kernel, _terms
from malliavin_jax.fitting import least_squares
from malliavin_jax.fitting.spline_equations import banded, dense
from malliavin_jax.models import folds as folds_module
from malliavin_jax.models.folds import Ratio, _make_fold, make_fold, variances_at
from malliavin_jax.potentials import on_host as potentials_on_host
from malliavin_jax.samples import simulated

DIMENSIONS = (1, 2, 3)
DTYPES = (jnp.float32, jnp.float64)
PRECISION = {jnp.float32: 2e-5, jnp.float64: 1e-11}


def samples_of(d, dtype=jnp.float64, episodes=300, times=2, seed=0):
    """Normal positions with gradients and Hessians of a quartic, weights x + noise; some points unobserved, as NaN."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(episodes, times, d))
    gradient = x + x**3 + rng.normal(size=x.shape)
    hessian = np.eye(d) * (1 + 3 * x**2)[..., None] + 0.3 * rng.normal(size=(*x.shape, d))
    seen = rng.random((episodes, times)) < 0.9
    arrays = [np.where(seen.reshape(*seen.shape, *(1,) * (a.ndim - 2)), a, np.nan) for a in (x, gradient, hessian)]
    weight = np.where(seen[..., None], x + rng.normal(size=x.shape), 0)
    return mj.Samples(*(jnp.asarray(a, dtype) for a in (*arrays, weight)), jnp.asarray(seen))


def potentials_of(d, dtype):
    """A spline and a polynomial, fitted to other samples, and no potential."""
    others = samples_of(d, dtype, seed=1)
    arrays = others.x, others.gradient, others.hessian, others.observed
    x, gradient, hessian, seen = (array.reshape(-1, *array.shape[2:]) for array in arrays)
    safe = [jnp.where(seen.reshape(-1, *(1,) * (a.ndim - 1)), a, 0) for a in (x, gradient, hessian)]
    weights = seen.astype(dtype)
    spline = mj.potentials.Spline.fit(*safe, weights=weights, intervals=3)
    return spline, mj.potentials.Polynomial.fit(*safe, weights=weights, degree=4), None


def localizers_of(d):
    some = [mj.Gaussian(0.7, 0.4), Kernel(0.5)]
    return [mj.Laplace(0.5), *some] if d == 1 else some


def agree(one, other, dtype, scale=None):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert a.shape == b.shape
        size = scale or max(np.abs(b[np.isfinite(b)]).max(initial=0), 1e-30)
        np.testing.assert_allclose(a, b, atol=PRECISION[dtype] * size, rtol=PRECISION[dtype])


def compiled_only(monkeypatch):
    """Nothing is on the host, or so everyone is told."""
    for module in (host, potentials_on_host):
        monkeypatch.setattr(module, "on_host", lambda *trees: False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", DIMENSIONS)
def test_sums_and_terms_are_those_of_compiled_programs(d, dtype):
    samples = samples_of(d, dtype)
    bank = make_bank(samples, samples.gradient, samples.hessian)
    alphas = np.random.default_rng(2).normal(size=(7, d)).astype(dtype)
    for localizer in localizers_of(d):
        assert on_host.serves(localizer, len(alphas), bank)
        sums = jax.vmap(functools.partial(localized_sums, bank, localizer=localizer))(jnp.asarray(alphas))
        here = on_host.sums_at(bank, alphas, localizer)
        for name in ("n", "nn", "nw"):
            agree(getattr(here, name).T, getattr(sums, name), dtype)
        for name in ("w", "ww"):
            agree(getattr(here, name), getattr(sums, name), dtype)
        agree(on_host.terms_at(bank, alphas, localizer), _terms(bank, jnp.asarray(alphas), localizer), dtype)


def test_groups_of_places_and_chunks_of_points_do_not_matter(monkeypatch):
    samples = samples_of(2)
    bank = make_bank(samples, samples.gradient, samples.hessian)
    alphas = np.random.default_rng(2).normal(size=(7, 2))
    whole = on_host.sums_at(bank, alphas, mj.Gaussian(0.7, 0.4))
    monkeypatch.setattr(on_host, "_AT_ONCE", 1300)  # two places at a time
    monkeypatch.setattr("malliavin_jax.estimate.sums.CHUNK", 100)
    parts = make_bank(samples, samples.gradient, samples.hessian)
    assert len(parts.x) > 3
    agree(on_host.sums_at(parts, alphas, mj.Gaussian(0.7, 0.4)), whole, jnp.float64)


def test_what_numpy_serves():
    samples = samples_of(1)
    bank = make_bank(samples, samples.gradient, samples.hessian)
    assert not on_host.serves(lambda y: (y[0] * 0, y), 1, bank)  # a function of a user's may know JAX alone
    assert not on_host.serves(mj.Laplace(0.5), 10**6, bank)
    assert not jax.jit(lambda bank: on_host.serves(mj.Laplace(0.5), 1, bank))(bank)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", DIMENSIONS)
def test_fitted_potentials_and_their_residuals(d, dtype):
    samples, x = samples_of(d, dtype), np.random.default_rng(3).uniform(-1.5, 1.5, (40, d)).astype(dtype)
    for potential in potentials_of(d, dtype):
        if potential is not None:
            gradient, hessian = potentials_on_host.derivatives_on_host(potential, x)
            agree(gradient, jax.vmap(potential.gradient)(jnp.asarray(x)), dtype)
            agree(hessian, jax.vmap(potential.hessian)(jnp.asarray(x)), dtype)
        inside = eqx.tree_at(lambda s: s.x, samples, jnp.clip(samples.x, -1.5, 1.5))  # splines end at their box
        agree(make_fold(inside, potential).bank, _make_fold(inside, potential).bank, dtype)


@pytest.mark.parametrize("d", DIMENSIONS)
def test_ratios_and_their_variances(d):
    samples = samples_of(d)
    spline, polynomial, _ = potentials_of(d, jnp.float64)
    folds = tuple(make_fold(part, model) for part, model in ((samples, spline), (samples_of(d, seed=4), polynomial)))
    alphas = np.random.default_rng(5).uniform(-1, 1, (6, d))
    localizer = mj.Gaussian(0.7, 0.4)
    ratio = Ratio(folds, localizer, jnp.asarray(1000), jnp.asarray(2.0))
    here, compiled = ratio.on_host(alphas), jax.vmap(ratio)(jnp.asarray(alphas))
    for name in here._fields:
        agree(getattr(here, name).T, getattr(compiled, name), jnp.float64)
    agree(variances_at(folds, alphas, localizer), variances_at(folds, jnp.asarray(alphas), localizer), jnp.float64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", DIMENSIONS)
def test_tails(d, dtype, monkeypatch):
    samples = samples_of(d, dtype)
    here = tangent_planes(samples)
    with monkeypatch.context() as patched:
        compiled_only(patched)
        agree(here, tangent_planes(samples), dtype)
    places = np.random.default_rng(6).uniform(here.low, here.high, (300, d)).astype(dtype)  # more than one group
    for tail in (here, tabulated_tail(True, here), tabulated_tail(False, here)) if d == 1 else (here,):
        agree(planes_at(tail, places), jax.vmap(tail.at)(jnp.asarray(places)), dtype)


@pytest.mark.parametrize("with_hessians", [True, False])
@pytest.mark.parametrize("d", DIMENSIONS)
def test_polynomial_fits(d, with_hessians):
    rng = np.random.default_rng(7)
    x = rng.normal(size=(500, d))
    data = [x, x**3 + rng.normal(size=x.shape), np.eye(d) * (3 * x**2)[..., None] if with_hessians else None]
    weights = rng.random(500) < 0.8
    data = least_squares.Data(*data, weights.astype(float))
    settings = {"degree": 4, "passes": 3, "chunk_size": 128, "ridge": 1e-13}
    compiled = least_squares._compiled_fit(jax.tree.map(jnp.asarray, data), **settings)
    agree(least_squares._fit(data, **settings), compiled, jnp.float64, scale=1e3)


@pytest.mark.parametrize("d", DIMENSIONS)
def test_whole_fields(d, monkeypatch):
    """Every choice, the table and the error bars: with NumPy, and compiled."""
    loss = mj.potentials.Quartic(0.5 if d > 1 else 0.0)
    learner = mj.ForwardLearner(loss, mj.initial.Normal(dim=d), step_size=0.01, gradient_noise=0.5)
    samples = mj.observe(jax.random.key(0), learner, num_episodes=600, times=[0.4])
    alphas = jnp.asarray(np.random.default_rng(8).uniform(-1, 1, (9, d)))
    guess = mj.potentials.Quadratic(2.0)

    def found():
        field = mj.MalliavinField(samples)
        verdict = mj.goodness_of_fit(samples, guess, localizer=mj.Gaussian(0.6, 0.4), alphas=alphas)
        chosen = [np.asarray(leaf) for leaf in jax.tree.leaves((field.localizer, field.correction))]
        return chosen, jax.vmap(field)(alphas), verdict

    here = found()
    with monkeypatch.context() as patched:
        compiled_only(patched)
        compiled = found()
    # Both begin with the same data and round differently; a search stops where it is told to.
    for one, other in zip(jax.tree.leaves(here), jax.tree.leaves(compiled), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("width", [1, 3, 16, 30])
def test_a_band_is_a_matrix(width):
    rng, p = np.random.default_rng(9), 30
    matrix = rng.normal(size=(p, p))
    matrix = matrix + matrix.T
    apart = np.abs(np.subtract.outer(np.arange(p), np.arange(p)))
    matrix[apart >= width] = 0
    band = np.zeros((width, p))
    for k in range(width):
        band[k, : p - k] = np.diagonal(matrix, -k)
    np.testing.assert_array_equal(dense(band), matrix)
    full = dense(banded(np.where(apart >= 6, 0, matrix), (25,)))
    np.testing.assert_array_equal(full, np.where(apart >= 6, 0, matrix))


def test_episodes_in_blocks_are_the_same_episodes():
    learner = mj.ForwardLearner(mj.potentials.Quartic(), mj.initial.Normal(), step_size=0.01, restart_probability=0.02)
    many = {"num_episodes": 2500, "times": [0.06, 0.13]}
    assert simulated._is_small(2500, learner)
    assert not simulated._is_small(1100, learner)  # two blocks would be nearly twice as much
    assert not simulated._is_small(10**5, learner)
    blocks = mj.observe(jax.random.key(3), learner, **many)
    whole = jax.jit(lambda key: mj.observe(key, learner, **many))(jax.random.key(3))
    assert blocks.num_episodes == 2500
    for one, other in zip(jax.tree.leaves(blocks), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)


def test_many_points_are_compiled(monkeypatch):
    """Left in the middle, where the compiled program would begin."""
    samples = samples_of(1)

    def compiled(*arguments):
        raise ArithmeticError

    monkeypatch.setattr(folds_module, "_make_fold", compiled)
    make_fold(samples, None)
    monkeypatch.setattr(folds_module, "_ON_HOST", 100)
    with pytest.raises(ArithmeticError):
        make_fold(samples, None)
