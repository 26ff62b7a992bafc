"""Spline potentials: derivatives against autodiff, sums that merge, the fit against dense equations and the truth."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from malliavin_jax.fitting import spline_equations
from malliavin_jax.fitting.bsplines import DEGREE, derivative_pieces, in_legendre, pieces, products_in_legendre
from malliavin_jax.fitting.spline_sums import add_points, no_sums
from malliavin_jax.potentials import Spline


def random_spline(d, seed=0, intervals=(4, 3, 5)):
    rng = np.random.default_rng(seed)
    shape = tuple(n + DEGREE for n in intervals[:d])
    low, high = np.array([-1.0, 0.5, -2.0])[:d], np.array([1.0, 2.0, 3.0])[:d]
    return Spline(rng.normal(size=shape), low, high)


def places(spline, number=40, seed=1, margin=0.5):
    """Points inside the box and around it."""
    rng = np.random.default_rng(seed)
    low, high = np.asarray(spline.low), np.asarray(spline.high)
    return jnp.asarray(rng.uniform(low - margin, high + margin, (number, len(low))))


# The basis.


def test_pieces_add_up_to_one_and_join_smoothly():
    table = pieces()
    np.testing.assert_allclose(table.sum(0), [1, 0, 0, 0, 0, 0], atol=1e-14)
    for order in range(DEGREE):  # the j-th piece at u = 1 goes on as the (j − 1)-th at u = 0
        taken = derivative_pieces(order)
        np.testing.assert_allclose(taken.sum(1)[1:], taken[:-1, 0], atol=1e-12)
        np.testing.assert_allclose(taken.sum(1)[0], 0, atol=1e-12)


@pytest.mark.parametrize("order", [0, 1, 2])
def test_legendre_tables_are_the_pieces(order):
    u = np.linspace(0, 1, 7)
    powers = u[:, None] ** np.arange(6)
    values = powers @ derivative_pieces(order).T
    legendre = np.polynomial.legendre.legvander(2 * u - 1, 10)
    np.testing.assert_allclose(legendre[:, :6] @ in_legendre(order).T, values, atol=1e-11)
    products = np.einsum("abk,uk->uab", products_in_legendre(order), legendre)
    np.testing.assert_allclose(products, values[:, :, None] * values[:, None, :], atol=1e-9)


@pytest.mark.parametrize("d", [1, 2, 3])
def test_derivatives_are_those_of_the_value(d):
    spline = random_spline(d)
    for x in places(spline, 12):
        np.testing.assert_allclose(spline.gradient(x), jax.grad(spline.value)(x), rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(spline.hessian(x), jax.hessian(spline.value)(x), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("d", [1, 2, 3])
def test_third_derivative_inside_the_box(d):
    spline = random_spline(d)
    for x in places(spline, 6, margin=-0.05):
        np.testing.assert_allclose(spline.third_derivative(x), jax.jacfwd(spline.hessian)(x), rtol=1e-8, atol=1e-8)


def test_scipy_knows_the_same_spline():
    scipy_interpolate = pytest.importorskip("scipy.interpolate")
    spline = random_spline(1)
    width = 2.0 / spline.intervals[0]
    knots = -1.0 + width * np.arange(-DEGREE, spline.intervals[0] + DEGREE + 1)
    other = scipy_interpolate.BSpline(knots, np.asarray(spline.coefficients), DEGREE)
    x = np.linspace(-1, 1, 23)[:, None]
    np.testing.assert_allclose(jax.vmap(spline.value)(jnp.asarray(x)), other(x[:, 0]), rtol=1e-12, atol=1e-12)


# The sums.


def data(d, n=300, seed=3, hessians=True):
    rng = np.random.default_rng(seed)
    x = rng.uniform(-1, 1, (n, d))
    H = rng.normal(size=(n, d, d))
    arrays = (x, rng.normal(size=(n, d)), H + H.transpose(0, 2, 1) if hessians else None, rng.uniform(0.5, 2, n))
    return tuple(None if a is None else jnp.asarray(a) for a in arrays)


def empty(d, intervals=3):
    return no_sums(-np.ones(d), np.ones(d), (intervals,) * d)


@pytest.mark.parametrize("d", [1, 2])
def test_merged_sums_equal_one_sum_in_any_order(d):
    points = data(d)
    cut = [tuple(array[part] for array in points) for part in (slice(0, 100), slice(100, 300))]
    whole = add_points(empty(d), *points, chunk_size=64)
    for first, second in (cut, cut[::-1]):
        merged = add_points(empty(d), *first) + add_points(empty(d), *second)
        streamed = add_points(add_points(empty(d), *first), *second)
        for other in (merged, streamed):
            for a, b in zip(other.totals, whole.totals, strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-11)
    for a, b in zip(whole.scaled(0.5).totals, whole.totals, strict=True):
        np.testing.assert_allclose(a, 0.5 * b)


@pytest.mark.parametrize("d", [1, 2, 3])
def test_normal_equations_are_those_of_the_design_matrix(d):
    """Gram matrix and right-hand side from local moments against the dense design matrix, row by row."""
    x, g, H, w = data(d, n=60)
    intervals = 2
    sums = add_points(empty(d, intervals), x, g, H, w)
    parts = spline_equations.equations(sums)
    shape = (intervals + DEGREE,) * d
    unit = 0.5  # the box is 2 wide, and 4 units wide

    def rows(theta):
        spline = Spline(theta.reshape(shape), -jnp.ones(d), jnp.ones(d))
        slopes = jax.vmap(spline.gradient)(x) * unit
        bends = jax.vmap(spline.hessian)(x) * unit**2
        return slopes.reshape(-1), bends.reshape(-1)

    design_g, design_h = jax.jacfwd(rows)(jnp.zeros(np.prod(shape)))
    for design, y, gram, right, squares in (
        (design_g, g.reshape(-1) * unit, parts.gradient_gram, parts.gradient_right, parts.gradient_squares),
        (design_h, H.reshape(-1) * unit**2, parts.hessian_gram, parts.hessian_right, parts.hessian_squares),
    ):
        design, y = np.asarray(design), np.asarray(y)
        weights = np.repeat(np.asarray(w), len(y) // len(w))
        dense = spline_equations.banded((design.T * weights) @ design, (intervals,) * d)
        np.testing.assert_allclose(gram, dense, rtol=1e-8, atol=1e-8 * np.abs(gram).max())
        np.testing.assert_allclose(right, (design.T * weights) @ y, rtol=1e-8, atol=1e-8 * np.abs(right).max())
        np.testing.assert_allclose(squares, np.sum(weights * y**2), rtol=1e-10)


def test_points_without_weight_and_outside_the_box_do_not_count():
    x, g, H, w = data(1)
    spoilt = jnp.concatenate([x, jnp.full((2, 1), jnp.nan), jnp.full((1, 1), 7.0)])
    rest = [jnp.concatenate([a, jnp.full((3, *a.shape[1:]), jnp.nan)]) for a in (g, H)]
    weights = jnp.concatenate([w, jnp.array([0.0, 0.0, 1.0])])
    one, other = add_points(empty(1), x, g, H, w), add_points(empty(1), spoilt, *rest, weights)
    for a, b in zip(one.totals, other.totals, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)


# The fit.


def ripples(x):
    """Gradient and Hessian of x² + .3 sin 6x."""
    return 2 * x + 1.8 * np.cos(6 * x), 2 - 10.8 * np.sin(6 * x)


def observed(seed, n=8000, hessian_noise=None, dtype=np.float64):
    rng = np.random.default_rng(seed)
    x = 0.6 * rng.normal(size=(n, 1))
    g, H = ripples(x)
    H = None if hessian_noise is None else (H + hessian_noise * rng.normal(size=H.shape))[..., None].astype(dtype)
    return x.astype(dtype), (g + 2 * rng.normal(size=g.shape)).astype(dtype), H


def rmse(spline):
    a = np.linspace(-1, 1, 41)[:, None]
    return float(np.sqrt(np.mean((np.asarray(jax.vmap(spline.gradient)(jnp.asarray(a))) - ripples(a)[0]) ** 2)))


@pytest.mark.parametrize(("hessian_noise", "bound"), [(None, 0.2), (0.0, 0.045), (3.0, 0.06)])
def test_fit_of_ripples(hessian_noise, bound):
    """The limit is noise/√n = .022, with exact Hessians: twice that over three data sets; more without Hessians."""
    errors = [rmse(Spline.fit(*observed(seed, hessian_noise=hessian_noise))) for seed in range(3)]
    assert np.sqrt(np.mean(np.square(errors))) < bound


def test_float32_data_are_fitted_as_float64_ones():
    for noise in (None, 0.0):
        double = Spline.fit(*observed(0, hessian_noise=noise), intervals=40)
        single = Spline.fit(*observed(0, hessian_noise=noise, dtype=np.float32), intervals=40)
        assert single.coefficients.dtype == np.float32
        np.testing.assert_allclose(rmse(jax.tree.map(lambda a: a.astype(np.float64), single)), rmse(double), rtol=0.02)


def test_a_spline_is_found_again_from_its_own_derivatives():
    for d in (1, 2):
        spline = random_spline(d, intervals=(6, 6))
        x = places(spline, 3000, margin=-1e-3)
        found = Spline.fit(x, jax.vmap(spline.gradient)(x), jax.vmap(spline.hessian)(x), intervals=spline.intervals)
        at = places(spline, 50, seed=5, margin=-0.1)
        scale = float(jnp.std(jax.vmap(spline.gradient)(at)))
        np.testing.assert_allclose(jax.vmap(found.gradient)(at), jax.vmap(spline.gradient)(at), atol=0.02 * scale)


def test_the_mesh_is_refined_for_a_rough_loss_and_not_for_a_smooth_one():
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, (4000, 1))
    noise = 0.5 * rng.normal(size=x.shape)
    rough = Spline.fit(x, 5 * np.cos(120 * x) + noise)
    smooth = Spline.fit(x, x + noise)
    assert rough.intervals[0] > smooth.intervals[0] == 96


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (dict(x=np.zeros((10, 4))), "x"),
        (dict(x=np.zeros((10, 1))), "x"),
        (dict(gradient=np.zeros((9, 1))), "gradient"),
        (dict(hessian=np.zeros((10, 1))), "hessian"),
        (dict(gradient=np.full((10, 1), np.nan)), "gradient"),
        (dict(weights=-np.ones(10)), "weights"),
        (dict(intervals=0), "intervals"),
    ],
)
def test_mistakes_are_named(change, word, no_type_checks):
    arguments = dict(x=np.linspace(0, 1, 10)[:, None], gradient=np.zeros((10, 1))) | change
    with pytest.raises(ValueError, match=word):
        Spline.fit(**arguments)


def test_a_spline_must_have_a_box_and_enough_coefficients(no_type_checks):
    with pytest.raises(ValueError, match="coefficients"):
        Spline(np.zeros(5), [0.0], [1.0])
    with pytest.raises(ValueError, match="low"):
        Spline(np.zeros(9), [1.0], [0.0])
    with pytest.raises(ValueError, match="high"):
        Spline(np.zeros((9, 9)), [0.0, 0.0], [1.0])
