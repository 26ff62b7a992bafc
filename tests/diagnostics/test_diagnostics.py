"""Diagnostics: against ArviZ, SciPy and closed forms."""

import sys
import types
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from malliavin_jax.chain.passive import Chain, passive_langevin
from malliavin_jax.diagnostics import (
    convergence_experiment,
    density_significance,
    effective_sample_size,
    split_rhat,
    to_arviz,
    total_variation,
    wasserstein,
)
from malliavin_jax.fields.fresh import TrueField
from malliavin_jax.potentials import AbstractPotential

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # ArviZ announces its future at import
    import arviz


class Gaussian(AbstractPotential):
    def value(self, x):
        return jnp.sum(x**2) / 2

    def gradient(self, x):
        return x

    def hessian(self, x):
        return jnp.eye(len(x))


def autoregressive(key, chains, kept, correlation):
    noise = np.asarray(jax.random.normal(key, (chains, kept)))
    x = np.empty_like(noise)
    x[:, 0] = noise[:, 0]
    for t in range(1, kept):
        x[:, t] = correlation * x[:, t - 1] + np.sqrt(1 - correlation**2) * noise[:, t]
    return x


def cases():
    sticky = autoregressive(jax.random.key(0), 4, 333, 0.97)
    quick = autoregressive(jax.random.key(1), 4, 333, 0.2)
    return {
        "sticky": sticky,
        "quick": quick,
        "alternating": autoregressive(jax.random.key(2), 4, 333, -0.7),
        "apart": sticky + np.arange(4)[:, None],
        "ties": np.round(quick, 1),
        "scales": quick * (1 + np.arange(4))[:, None],
        "trend": quick + np.linspace(0, 3, 333),
        "constant": np.ones((4, 333)),
        "not a number": np.where(np.arange(333) == 7, np.nan, quick),
        "one chain": quick[:1],
        "four": quick[:, :4],
        "five": quick[:, :5],
        "eight": quick[:, :8],
    }


# --- R-hat and effective sample size ---------------------------------------------------------------------


@pytest.mark.parametrize("name", cases())
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_effective_sample_size_is_arvizs(name):
    x = cases()[name]
    np.testing.assert_allclose(effective_sample_size(x[..., None])[0], arviz.ess(x), rtol=1e-8)


@pytest.mark.parametrize("name", [name for name in cases() if name != "one chain"])
@pytest.mark.parametrize("method", ["rank", "split"])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_rhat_is_arvizs(name, method):
    x = cases()[name]
    np.testing.assert_allclose(split_rhat(x[..., None], method=method)[0], arviz.rhat(x, method=method), rtol=1e-10)


def test_coordinates_are_separate_and_jit_works():
    x = np.stack([autoregressive(jax.random.key(i), 4, 333, c) for i, c in enumerate((0.9, 0.1))], -1)
    for function in (effective_sample_size, split_rhat):
        both = jax.jit(function)(x)
        assert both.shape == (2,)
        np.testing.assert_allclose(both, [function(x[..., i : i + 1])[0] for i in range(2)], rtol=1e-12)


def test_single_precision():
    x = autoregressive(jax.random.key(0), 4, 333, 0.5)[..., None]
    for function in (effective_sample_size, split_rhat):
        assert function(x.astype(np.float32)).dtype == jnp.float32
        np.testing.assert_allclose(function(x.astype(np.float32)), function(x), rtol=1e-3)


def test_effective_sample_size_of_an_autoregression(key):
    # Known: n (1 − ρ)/(1 + ρ) for the mean of an AR(1), of which the bulk form is a monotone version.
    ess = effective_sample_size(autoregressive(key, 64, 2000, 0.8)[..., None])[0]
    assert abs(ess / (64 * 2000 * 0.2 / 1.8) - 1) < 0.1


# --- distances -------------------------------------------------------------------------------------------


def test_wasserstein_one_is_scipys():
    x = 0.3 + 1.2 * jax.random.normal(jax.random.key(0), (3, 400, 1))
    distance = wasserstein(x, Gaussian(), inverse_temperature=2.0, range=(-6, 6))
    grid = np.linspace(-6, 6, 20_001)
    expected = stats.wasserstein_distance(np.ravel(x), grid, v_weights=np.exp(-(grid**2)))
    np.testing.assert_allclose(distance, expected, rtol=1e-3)


def test_wasserstein_two_of_a_shift_and_a_stretch():
    # Quantiles against quantiles: W₂² = shift² + (stretch − 1)² between N(shift, stretch²) and N(0, 1).
    u = (np.arange(20_000) + 0.5) / 20_000
    x = 0.4 + 1.3 * stats.norm.ppf(u)[:, None]
    distance = wasserstein(x, Gaussian(), inverse_temperature=1.0, range=(-9, 9), order=2)
    np.testing.assert_allclose(distance, np.hypot(0.4, 0.3), rtol=1e-3)
    itself = wasserstein(stats.norm.ppf(u)[:, None], Gaussian(), inverse_temperature=1.0, range=(-9, 9), order=2)
    assert itself < 0.01


def test_wasserstein_of_one_point():
    # A point mass at 0 against N(0, 1): E|X| and the standard deviation.
    point = jnp.zeros((1, 1))
    for order, expected in ((1, np.sqrt(2 / np.pi)), (2, 1.0)):
        distance = wasserstein(point, Gaussian(), inverse_temperature=1.0, range=(-9, 9), order=order)
        np.testing.assert_allclose(distance, expected, rtol=2e-3)


@pytest.mark.parametrize("d", [1, 2, 3])
def test_total_variation_against_exact_masses(d):
    x = 1.2 * jax.random.normal(jax.random.key(0), (2000, d)) + 0.2
    edges = np.linspace(-4, 4, 11)
    masses = np.diff(stats.norm.cdf(edges, scale=0.5**0.5)) / (2 * stats.norm.cdf(4 * 2**0.5) - 1)
    exact = masses
    for _ in range(d - 1):
        exact = exact[..., None] * masses
    counts, _ = np.histogramdd(np.asarray(x), bins=[edges] * d)
    expected = (np.abs(counts / 2000 - exact).sum() + 1 - counts.sum() / 2000) / 2
    for potential in (Gaussian(), Gaussian().value):
        distance = total_variation(x, potential, inverse_temperature=2.0, range=[(-4, 4)] * d, bins=10)
        np.testing.assert_allclose(distance, expected, rtol=1e-3)


def test_total_variation_is_one_when_nothing_overlaps():
    x = jnp.full((50, 1), 20.0)
    np.testing.assert_allclose(total_variation(x, Gaussian(), inverse_temperature=1.0, range=(-5, 5)), 1.0)


def test_total_variation_of_exact_draws_is_at_its_noise_level(key):
    distance = total_variation(jax.random.normal(key, (10_000, 1)), Gaussian(), inverse_temperature=1.0, range=(-6, 6))
    masses = np.diff(stats.norm.cdf(np.linspace(-6, 6, 51)))
    assert 0.7 < distance / np.sum(np.sqrt(masses / (2 * np.pi * 10_000))) < 1.3


def test_distances_under_jit():
    x = jax.random.normal(jax.random.key(0), (100, 1))
    for function in (wasserstein, total_variation):
        run = lambda x, function=function: function(x, Gaussian(), inverse_temperature=1.0, range=(-5, 5))  # noqa: E731
        np.testing.assert_allclose(jax.jit(run)(x), run(x), rtol=1e-12)


def test_chain_approaches_its_gibbs_law(key):
    # Error against the number of steps k: a chain started far away forgets it, exponentially in k.
    def distance(key, k):
        chain = passive_langevin(
            key, TrueField(Gaussian()), jnp.full((4000, 1), 4.0), num_steps=k, step_size=0.2,
            inverse_temperature=1.0, burn_in=k - 1,
        )  # fmt: skip
        return wasserstein(chain.positions, Gaussian(), inverse_temperature=1.0, range=(-6, 6), order=2)

    # W₂² = mean² + (sd − 1)² for a Gaussian: mean 4·.8^k, variance 1 − .8^2k·(1 − O(η)).
    for k in (1, 4, 8):
        np.testing.assert_allclose(distance(key, k), 4 * 0.8**k, rtol=0.15)


# --- along the chain -------------------------------------------------------------------------------------


def small_chain():
    x = jnp.arange(12.0).reshape(2, 3, 2)
    row = jnp.arange(1.0, 7.0).reshape(2, 3)
    return Chain(x, 2 * x, 3 * x, row, row / 5, row > 2, jnp.array([False, False]))


def test_density_significance():
    np.testing.assert_allclose(density_significance(small_chain()), 5)


def test_convergence_experiment_fits_the_slope(key):
    # The error of a mean of N draws: slope −1/2.
    seen = []

    def error(key, number):
        seen.append(int(jax.random.bits(key)))
        return abs(float(jnp.mean(jax.random.normal(key, (number,)))))

    result = convergence_experiment(key, error, [16, 64, 256, 1024], repeats=64)
    assert len(set(seen)) == 256  # a key of its own for each run
    assert abs(result.slope + 0.5) < 4 * result.slope_stderr
    assert result.slope_stderr < 0.05
    exact = 1 / np.sqrt(result.value)
    assert (np.abs(result.error - exact) < 4 * result.stderr).all()
    np.testing.assert_allclose(result.stderr / result.error, np.sqrt(2 / 64) / 2, rtol=0.6)


# --- ArviZ -----------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
def test_export_to_the_installed_arviz():
    chain = small_chain()
    data = to_arviz(chain)
    np.testing.assert_array_equal(data["posterior"]["alpha"].values, chain.positions)
    assert data["posterior"]["alpha"].dims == ("chain", "draw", "dimension")
    np.testing.assert_array_equal(data["sample_stats"]["gradient"].values, chain.gradients)
    np.testing.assert_array_equal(data["sample_stats"]["trusted"].values, chain.trusted)
    assert data["sample_stats"]["finite"].values.all()
    long = Chain(
        *[jnp.tile(leaf, (1, 5) + (1,) * (leaf.ndim - 2)) if leaf.ndim > 1 else leaf for leaf in jax.tree.leaves(chain)]
    )
    np.testing.assert_allclose(
        arviz.ess(to_arviz(long))["alpha"].values, effective_sample_size(long.positions), rtol=1e-8
    )


@pytest.mark.parametrize("version", ["0.23.4", "1.0.0", "1.3.0"])
def test_export_takes_the_form_of_the_version(monkeypatch, version):
    calls = []
    stub = types.SimpleNamespace(__version__=version, from_dict=lambda *a, **k: calls.append((a, k)))
    monkeypatch.setitem(sys.modules, "arviz", stub)
    to_arviz(small_chain())
    ((positional, named),) = calls
    groups = positional[0] if version.startswith("1") else named
    assert set(groups["posterior"]) == {"alpha"}
    assert "gradient" in groups["sample_stats"]
    assert bool(positional) == version.startswith("1")
    assert named["dims"]["alpha"] == ["dimension"]


def test_missing_arviz_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "arviz", None)
    with pytest.raises(ImportError, match="pip install arviz"):
        to_arviz(small_chain())


# --- refusals --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: split_rhat(jnp.zeros((3, 4))), "positions must have shape"),
        (lambda: effective_sample_size(jnp.zeros((3, 3, 1))), "positions must hold at least 4 per chain"),
        (lambda: split_rhat(jnp.zeros((3, 4, 1)), method="folded"), "method must be one of rank, split"),
        (
            lambda: wasserstein(jnp.zeros((5, 2)), Gaussian(), inverse_temperature=1.0, range=[(-1, 1)] * 2),
            "positions must be one-dimensional",
        ),
        (
            lambda: wasserstein(jnp.zeros((5, 1)), Gaussian(), inverse_temperature=1.0, range=(-1, 1), order=3),
            "order must be 1 or 2",
        ),
        (
            lambda: total_variation(jnp.zeros((5, 1)), Gaussian(), inverse_temperature=-1.0, range=(-1, 1)),
            "inverse_temperature must be positive",
        ),
        (
            lambda: total_variation(jnp.zeros((5, 1)), Gaussian(), inverse_temperature=1.0, range=(1, -1)),
            "range must run from low to high",
        ),
        (
            lambda: total_variation(jnp.zeros((5, 4)), Gaussian(), inverse_temperature=1.0, range=(1, -1)),
            "of dimension 1, 2 or 3",
        ),
        (
            lambda: convergence_experiment(jax.random.key(0), lambda k, v: 1.0, [1]),
            "values must hold at least 2",
        ),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()
