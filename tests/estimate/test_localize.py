"""Localizers against χ² of SciPy, against their divergence by autodiff, and against integrals known in closed form."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats
from scipy.special import exp1, gamma

from malliavin_jax.estimate.localizers import AbstractLocalizer, Centered, Gaussian, Heaviside, Laplace

DIMENSIONS = (1, 2, 3)


class KohatsuHigaYasuda(AbstractLocalizer):
    """G = y / (2π (|y|² + h)), K = 0, in two dimensions: their regularised Malliavin–Thalmaier field."""

    h: float

    def __call__(self, y):
        return jnp.zeros((), y.dtype), y / (2 * jnp.pi * (jnp.sum(y * y) + self.h))


@jax.jit
def many(localizer, y):
    """K and G at many points; a localizer is a PyTree, so that other lengths compile nothing new."""
    return jax.vmap(localizer)(y)


def kernel(y, length):
    """The Gaussian density with standard deviation `length` in every direction."""
    return jnp.exp(-jnp.sum(y * y) / (2 * length**2)) / (2 * jnp.pi * length**2) ** (y.shape[0] / 2)


def quadrature():
    """Nodes and weights of Gauss and Legendre on [0, 12], in panels that resolve lengths of a few hundredths."""
    x, w = np.polynomial.legendre.leggauss(80)
    edges = np.asarray([0.0, 0.2, 1.0, 4.0, 12.0])
    half, middle = np.diff(edges)[:, None] / 2, (edges[1:] + edges[:-1])[:, None] / 2
    return (half * x + middle).reshape(-1), (half * w).reshape(-1)


# ---------------------------------------------------------------- χ²


@pytest.mark.parametrize("d", [1, 2, 3, 4, 5, 6, 10])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_the_gaussian_field_is_gauss_law_with_chi_squared(d, dtype):
    """G = y/(ω_d r^d) [2 C(e) − C(√2 e) − C(h)] with SciPy's χ², from far inside the core to far outside."""
    length, core = 0.7, 0.2
    r = np.concatenate([np.geomspace(1e-5, 8, 400), np.linspace(0.01, 3, 400)]).astype(dtype)
    y = jnp.zeros((len(r), d), dtype).at[:, 0].set(r)
    got = many(Gaussian(length, core), y)[1]
    assert got.dtype == dtype
    r = r.astype(float)
    inner, outer, wide = (stats.chi2.cdf(r**2 / a**2, d) for a in (core, np.sqrt(2) * core, length))
    area = 2 * np.pi ** (d / 2) / gamma(d / 2)
    wanted = (2 * inner - outer - wide) * r / (area * r**d)
    # Rounding is relative to the three terms before they cancel, far out, where the field is their small difference.
    # Near the switch from series to finite sum, t = d/2 − 1, the latter has lost a digit or two itself.
    size = (2 * inner + outer + wide) * r / (area * r**d)
    assert np.all(np.abs(np.asarray(got)[:, 0] - wanted) < 150 * float(jnp.finfo(dtype).eps) * size)
    np.testing.assert_array_equal(got[:, 1:], 0)


@pytest.mark.parametrize("d", [1, 2, 3, 6])
def test_the_gaussian_field_has_a_derivative_everywhere(d):
    localizer = Gaussian(0.7, 0.2)
    r, step = np.linspace(0.0, 2, 301), 1e-6

    def radial(r):
        return localizer(jnp.zeros(d).at[0].set(r))[1][0]

    slope, value = jax.jit(jax.vmap(jax.grad(radial))), jax.jit(jax.vmap(radial))
    difference = (value(jnp.asarray(r + step)) - value(jnp.asarray(r - step))) / (2 * step)
    scale = np.max(np.abs(difference))
    np.testing.assert_allclose(slope(jnp.asarray(r)), difference, atol=1e-8 * scale)


# ---------------------------------------------------------------- K and G


@pytest.mark.parametrize("d", DIMENSIONS)
def test_divergence_of_the_gaussian_field_is_core_minus_kernel(d, key):
    length, core = 0.7, 0.2
    localizer = Gaussian(length, core)
    # Points at the scale of the core and of the length; the field must be smooth at 0 too.
    y = jax.random.normal(key, (200, d)) * jnp.repeat(jnp.asarray([0.1, 0.3, 1.0, 3.0]), 50)[:, None]
    y = y.at[0].set(0.0)

    @jax.jit
    @jax.vmap
    def both(y):
        divergence = jnp.trace(jax.jacfwd(lambda y: localizer(y)[1])(y))
        K = localizer(y)[0]
        return divergence, K, kernel(y, length), 2 * kernel(y, core) - kernel(y, core * np.sqrt(2))

    divergence, K, wanted, core_kernel = both(y)
    np.testing.assert_allclose(K, wanted, rtol=1e-12)
    scale = float(core_kernel[0])  # the largest of all
    np.testing.assert_allclose(divergence, core_kernel - K, atol=1e-12 * scale)


@pytest.mark.parametrize("d", DIMENSIONS)
def test_kernels_integrate_to_one(d):
    r, w = quadrature()
    area = 2 * np.pi ** (d / 2) / gamma(d / 2)
    y = jnp.zeros((len(r), d)).at[:, 0].set(r)
    K, G = many(Gaussian(0.8, 0.3), y)
    assert np.isclose(np.sum(w * np.asarray(K) * area * r ** (d - 1)), 1, rtol=1e-12)
    # Gauss's law: the flux of G through a large sphere is 1 − 1, core against kernel.
    assert np.all(np.abs(np.asarray(G)[r > 9, 0]) * area * r[r > 9] ** (d - 1) < 1e-12)
    if d == 1:
        assert np.isclose(2 * np.sum(w * np.asarray(many(Laplace(0.4), y)[0])), 1, rtol=1e-12)


def test_the_fields_of_one_dimension(key):
    """δ = K + G′: away from 0 the slope of G is −K, and at 0 it jumps by one."""
    y = jax.random.normal(key, (100, 1)) * 2
    for localizer in (Heaviside(), Centered(), Laplace(0.6)):
        K, G = many(localizer, y)
        step = 1e-6
        slope = (many(localizer, y + step)[1] - many(localizer, y - step)[1]) / (2 * step)
        np.testing.assert_allclose(slope[:, 0], -K, atol=1e-8)
        at = many(localizer, jnp.asarray([[1e-12], [0.0], [-1e-12], [jnp.nan]]))[1]
        np.testing.assert_allclose(at[0] - at[2], 1, rtol=1e-9)
        # On a sample itself: left of it, as 1{y > 0} says and as the sorted form does.
        np.testing.assert_allclose(at[1], at[2], atol=1e-9)
        assert np.isnan(at[3, 0])
    np.testing.assert_array_equal(many(Heaviside(), y)[1], (y > 0).astype(y.dtype))
    np.testing.assert_array_equal(many(Centered(), y)[1], jnp.sign(y) / 2)
    h = 0.6
    K, G = many(Laplace(h), y)
    np.testing.assert_allclose(K, jnp.exp(-jnp.abs(y[:, 0]) / h) / (2 * h), rtol=1e-13)
    np.testing.assert_allclose(G, jnp.sign(y) * jnp.exp(-jnp.abs(y) / h) / 2, rtol=1e-13)


def test_long_lengths_are_the_centred_field(key):
    """|1 − e^{−u}| ≤ u, and P(χ²_1 ≤ r²/h²) ≤ r/h: both localizers differ from ½ sign(y) by at most |y|/h."""
    y = jnp.where((x := jax.random.normal(key, (50, 1))) < 0, x - 0.5, x + 0.5)
    for h in (1e2, 1e4):
        for localizer in (Laplace(h), Gaussian(h, 0.05)):  # |y| ≥ 10 cores: the core is over
            K, G = many(localizer, y)
            assert np.all(np.abs(G - jnp.sign(y) / 2) <= jnp.abs(y) / h + 1e-15)
            assert np.all(np.asarray(K) <= 1 / (2 * h) + 1e-15)


@pytest.mark.parametrize("d", DIMENSIONS)
def test_the_gaussian_field_follows_the_dtype_and_stays_finite(d):
    r = jnp.concatenate([jnp.zeros(1), jnp.geomspace(1e-20, 1e4, 200)])
    y = jnp.stack([r / np.sqrt(d)] * d, -1)
    K, G = many(Gaussian(0.5, 0.02), y)
    K32, G32 = many(Gaussian(0.5, 0.02), y.astype(jnp.float32))
    assert K32.dtype == G32.dtype == jnp.float32
    assert all(np.all(np.isfinite(part)) for part in (K, G, K32, G32))
    # 2C(e) − C(√2 e) − C(h) cancels where all three are one: a relative error of a few eps, of the largest G.
    eps = float(jnp.finfo(jnp.float32).eps)
    np.testing.assert_allclose(G32, G, atol=100 * eps * float(jnp.max(jnp.abs(G))))
    np.testing.assert_allclose(K32, K, atol=100 * eps * float(K[0]))


# ---------------------------------------------------------------- Kohatsu-Higa and Yasuda


@pytest.mark.parametrize(("h", "published"), [(0.1, 0.138509), (0.01, 0.155375), (0.001, 0.158596)])
def test_kohatsu_higa_and_yasuda_in_two_dimensions(h, published):
    """p^h(0) of a standard normal X, whose weight is S = X: E[G·S] by quadrature over the radius."""
    r, w = quadrature()
    y = jnp.stack([jnp.asarray(r), jnp.zeros(len(r))], -1)
    G = np.asarray(many(KohatsuHigaYasuda(h), y)[1])
    got = np.sum(w * G[:, 0] * r * r * np.exp(-(r**2) / 2))
    closed = (1 - h / 2 * np.exp(h / 2) * exp1(h / 2)) / (2 * np.pi)
    assert np.isclose(got, closed, rtol=1e-8)
    assert np.isclose(got, published, atol=5e-7)


@pytest.mark.parametrize("core", [0.1, 0.3])
def test_our_core_has_the_fourth_order(core):
    """The same density with `Gaussian`, at any length: 2 N(0; 1 + e²) − N(0; 1 + 2e²) = p(0) (1 − 2e⁴ + O(e⁶))."""
    r, w = quadrature()
    y = jnp.stack([jnp.asarray(r), jnp.zeros(len(r))], -1)
    law = 2 * np.pi * r * np.exp(-(r**2) / 2) / (2 * np.pi)
    closed = (2 / (1 + core**2) - 1 / (1 + 2 * core**2)) / (2 * np.pi)
    for length in (0.4, 1.0, 5.0):
        K, G = (np.asarray(part) for part in many(Gaussian(length, core), y))
        assert np.isclose(np.sum(w * law * (K + G[:, 0] * r)), closed, rtol=1e-9)
    assert abs(2 * np.pi * closed - (1 - 2 * core**4)) < 6 * core**6


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize("length", [0.0, -0.3, np.inf, np.nan, jnp.asarray(-1.0)])
def test_lengths_must_be_positive(length):
    for make in (Laplace, lambda a: Gaussian(a, 0.1), lambda a: Gaussian(0.1, a)):
        with pytest.raises(ValueError, match=r"(length|core) must be positive and finite, got"):
            make(length)


@pytest.mark.parametrize("localizer", [Heaviside(), Centered(), Laplace(0.3)])
def test_one_dimensional_localizers_say_so(localizer):
    with pytest.raises(ValueError, match=r"is for one dimension, got d = 2: use Gaussian"):
        localizer(jnp.zeros(2))
