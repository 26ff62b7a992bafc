"""Priors of spline coefficients: their modes, what each is right for, and which the likelihood takes."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from malliavin_jax.fitting.smoothing import Prior, Problem, attempt, least, modes_of
from malliavin_jax.fitting.spline_equations import equations, penalty_of
from malliavin_jax.fitting.spline_fit import FAMILIES, refit, solve_families
from malliavin_jax.fitting.spline_sums import add_points, no_sums


def wave(x):
    """The slope of an analytic loss, of more waves than a polynomial follows."""
    return x + np.sin(9 * x) + 0.7 * np.sin(17 * x + 1)


def corner(x):
    """The slope of a loss whose third derivative jumps."""
    return np.abs(x) * x + 2 * np.abs(x - 0.3)


def parts_of(slope, seed, n=20_000, noise=1.0, mesh=48):
    """The normal equations of noisy slopes at points between −1 and 1."""
    rng = np.random.default_rng(seed)
    x = rng.uniform(-1, 1, (n, 1))
    gradient = slope(x) + noise * rng.normal(size=x.shape)
    points = jnp.asarray(x), jnp.asarray(gradient), None, jnp.ones(n)
    return equations(add_points(no_sums(-np.ones(1), np.ones(1), (mesh,)), *points))


@pytest.mark.parametrize("shape", [(12,), (5, 7)])
@pytest.mark.parametrize("order", [3, 5])
def test_differences_are_diagonal_in_their_modes(shape, order):
    modes = modes_of(shape, Prior(order))
    form = modes.of_matrix(penalty_of(shape, order).toarray())
    scale = modes.roughness.max()
    np.testing.assert_allclose(form, np.diag(modes.roughness), atol=1e-10 * scale)
    assert np.sum(~modes.seen) == order ** len(shape) - 1  # polynomials, but for the constant


def test_modes_are_waves_of_their_frequency():
    """On a fine mesh the mode of number m has m half waves or so on the box that is four wide: ω ≈ π m/4."""
    n = 200
    modes = modes_of((n,), Prior(3))
    box = 4 * (n + 5) / n  # that of all coefficients is a little wider
    m = np.arange(1, n + 5)  # the constant is left out
    inner = slice(10, 60)
    np.testing.assert_allclose(np.sqrt(modes.frequency)[inner], (np.pi * m / box)[inner], rtol=0.12)


def test_the_gaussian_prior_has_the_spectrum_of_its_covariance():
    base, narrow, wide = (modes_of((40,), Prior(3, length)) for length in (None, 0.2, 0.4))
    assert not narrow.roughness[~base.seen].any()
    seen = base.seen & (base.frequency < 400)
    ratio = np.log(wide.roughness[seen] / narrow.roughness[seen])
    np.testing.assert_allclose(ratio, (0.4**2 - 0.2**2) * base.frequency[seen] / 2, rtol=1e-9)
    np.testing.assert_allclose(narrow.log_prior_volume, np.log(narrow.roughness[narrow.seen]).sum(), rtol=1e-12)
    assert np.isfinite(modes_of((384,), Prior(3, 2.8)).roughness).all()


def test_the_criterion_is_the_restricted_likelihood():
    """Against the density of the data itself, in one direction of θ: y ~ N(0, a²/(λΛ) + 1), the rest independent."""
    roughness, smoothing = np.array([2.0, 0.5]), 0.3
    rows = np.array([3.0, 1.5])  # one row for each unknown, y_i = rows_i θ_i + noise
    y = np.array([0.7, -1.1])
    problem = Problem(np.diag(rows**2), rows * y, float(y @ y), roughness, float(np.log(roughness).sum()), [])
    variance = rows**2 / (math.exp(smoothing) * roughness) + 1
    exact = np.sum(np.log(variance) + y**2 / variance)
    np.testing.assert_allclose(attempt(problem, smoothing).criterion, exact, rtol=1e-10)


def test_the_search_for_the_smoothing_finds_the_least():
    roughness, rows = np.array([1.0, 4.0, 9.0]), np.array([2.0, 2.0, 2.0])
    y = np.array([1.5, 0.4, 0.1])
    problem = Problem(np.diag(rows**2), rows * y, float(y @ y), roughness, float(np.log(roughness).sum()), [])
    grid = np.linspace(-6, 10, 401)
    best = min(attempt(problem, place).criterion for place in grid)
    assert least(problem, None).criterion < best + 0.02


@pytest.mark.parametrize(("slope", "gaussian"), [(wave, True), (corner, False)])
def test_an_analytic_loss_takes_the_gaussian_prior_and_a_rough_one_does_not(slope, gaussian):
    for seed in range(3):
        found = solve_families((48,), parts_of(slope, seed), {})
        assert set(found) == set(FAMILIES)
        taken = min(found, key=lambda family: found[family].criterion)
        assert (taken == "Gaussian") == gaussian


def test_the_same_data_with_the_same_tuning_are_fitted_the_same():
    parts = parts_of(wave, 1)
    for solution in solve_families((48,), parts, {}).values():
        again = refit((48,), parts, solution.tuning)
        # The variances of a solution are those after its last step: as near as these have settled.
        scale = np.abs(solution.coefficients).max()
        np.testing.assert_allclose(again.coefficients, solution.coefficients, atol=2e-3 * scale)


def test_a_length_is_found_again_on_a_finer_mesh():
    coarse = solve_families((24,), parts_of(wave, 2, mesh=24), {})
    starts = {family: solution.tuning for family, solution in coarse.items()}
    fine = solve_families((96,), parts_of(wave, 2, mesh=96), starts)
    short, long = sorted(one["Gaussian"].tuning.prior.length for one in (coarse, fine))
    assert long / short < 2.1
