"""The rivals of benchmarks/accuracy.py: each knows a quadratic when it sees one, and they are judged like with like."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.kernel_approximation import Nystroem
from sklearn.linear_model import Ridge

import malliavin_jax as mj

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
from rivals import kernels, losses, models, network, ours, verdict  # noqa: E402

sys.path.remove(str(BENCHMARKS))

LOSS = mj.potentials.Quadratic(precision=2.0, center=0.3)
ALPHAS = jnp.linspace(-1.0, 1.0, 7)[:, None]
TRUTH = np.asarray(jax.vmap(LOSS.gradient)(ALPHAS))


@pytest.fixture(scope="module")
def samples():
    """Exact gradients of a quadratic: what is left of a rival's error is its own."""
    learner = mj.ForwardLearner(LOSS, mj.initial.Normal(), step_size=0.01)
    return mj.observe(jax.random.key(0), learner, num_episodes=400, times=[0.1, 0.2])


@pytest.fixture
def view(samples, monkeypatch):
    monkeypatch.setattr(models, "POLYNOMIAL_DEGREES", {1: (2, 3)})
    monkeypatch.setattr(models, "MESHES", {1: (6, 12)})
    made = models.View(samples, ALPHAS, 0.0, network_seconds=5.0)
    # In place of the fitted models, two that differ by a slope: each must add back what it took away.
    made.control = (mj.potentials.Quadratic(precision=2.0, center=-2.0), LOSS)
    return made


def hindsight(found):
    assert found.values.shape == (len(found.settings), *TRUTH.shape)
    return float(np.sqrt(np.mean((np.asarray(found.values) - TRUTH) ** 2, (1, 2))).min())


@pytest.mark.parametrize(
    ("rival", "most"),
    [(models.polynomial, 1e-6), (models.spline, 1e-4), (models.automatic_spline, 1e-4), (models.kernel_ridge, 1e-3)],
    ids=lambda part: getattr(part, "__name__", ""),
)
def test_a_model_finds_a_quadratic(view, rival, most):
    assert hindsight(rival(view)) < most


@pytest.mark.parametrize(("degree", "help_", "most"), [
    (0, "", 0.1), (1, "", 1e-6), (0, " with Hessians", 1e-9), (0, " with control", 1e-9), (0, " with both", 1e-9),
])  # fmt: skip
def test_a_kernel_finds_a_quadratic(view, degree, help_, most):
    assert hindsight(kernels.kernel(view, degree, help_)) < most


def test_a_kernel_is_that_of_the_library(view):
    found = kernels.kernel(view, 1, "")
    bandwidth = view.scale * kernels.bandwidths(0.0)[-1]
    field = mj.kernel.LocalPolynomial(view.samples, bandwidth, 1)
    np.testing.assert_allclose(found.values[-1], jax.vmap(field)(ALPHAS).value, rtol=1e-8)


def test_kernel_ridge_is_that_of_scikit_learn(view, monkeypatch):
    monkeypatch.setattr(models, "RIDGE_LENGTHS", [0.8])
    monkeypatch.setattr(models, "RIDGES", [0.1])
    monkeypatch.setattr(models, "CHUNK", 300)  # three chunks, the last a short one
    x, g, _ = (np.asarray(part) for part in view.points)
    z, at = (x - x.mean(0)) / x.std(0), (np.asarray(ALPHAS) - x.mean(0)) / x.std(0)
    landmarks = np.random.default_rng(0).permutation(len(z))[: models.LANDMARKS[1]]
    features = Nystroem(gamma=0.5 / 0.8**2, n_components=len(landmarks), random_state=0)
    features.fit(z[landmarks])
    ridge = Ridge(alpha=0.1, fit_intercept=False).fit(features.transform(z), g - g.mean(0))
    expected = g.mean(0) + ridge.predict(features.transform(at)).reshape(TRUTH.shape)
    np.testing.assert_allclose(models.kernel_ridge(view).values[0], expected, atol=1e-6)


def test_a_network_finds_a_quadratic(view, monkeypatch):
    monkeypatch.setattr(network, "MOST_STEPS", 1500)
    with jax.numpy_dtype_promotion("standard"):  # Adam of optax raises numbers to whole powers
        assert hindsight(network.network(view)) < 0.05 * TRUTH.std()


def test_the_derivatives_of_the_network():
    made = network.Network(jax.random.key(0), 2, jnp.asarray(1.0, jnp.float32))

    def value(z):
        first = jnp.tanh(made.first @ z + made.shift)
        return made.last @ jnp.tanh(made.second @ first + made.other_shift)

    z = jax.random.normal(jax.random.key(1), (5, 2), jnp.float32)
    gradient, hessian = jax.jit(lambda z: made.derivatives(z))(z)
    np.testing.assert_allclose(gradient, jax.jit(jax.vmap(jax.grad(value)))(z), atol=1e-5)
    np.testing.assert_allclose(hessian, jax.jit(jax.vmap(jax.hessian(value)))(z), atol=2e-5)


@pytest.mark.parametrize("name", ["ripples, d = 1", "pits, d = 2", "curved valley, d = 2", "rough, d = 3"])
def test_the_losses_have_the_derivatives_they_say(name):
    case = losses.cases()[name]
    alphas = jnp.asarray(case.alphas, float)
    for own, expected in (
        (case.loss.gradient, jax.grad(case.loss.value)), (case.loss.hessian, jax.hessian(case.loss.value))
    ):  # fmt: skip
        np.testing.assert_allclose(jax.jit(jax.vmap(own))(alphas), jax.jit(jax.vmap(expected))(alphas), atol=1e-10)
    assert len(set(case.times(losses.MANY))) == losses.MANY


@pytest.mark.slow
def test_this_library_stands_in_all_its_forms_and_lends_its_control(samples):
    view = models.View(samples, ALPHAS, 0.0)
    errors = {form: np.abs(ours.estimates(view, form).value - TRUTH).max() for form in ours.FORMS}
    assert max(errors.values()) < 0.1
    assert hindsight(kernels.kernel(view, 0, " with control")) < 1e-4
    assert view.shared_seconds > 0


def row(case="a", times=1, **errors):
    made = {"case": case, "noise": 2.0, "episodes": 10_000, "times": times, "sets": 2, "limit": 0.5, "errors": errors}
    made["rmse"] = {name: verdict.pooled(mine) for name, mine in errors.items()}
    made["best rival"], made["ratios"] = verdict.judge(made)
    return made


def test_a_method_is_compared_on_the_data_sets_it_saw():
    errors = {"this library": [1.0, 7.0], "network, oracle": [2.0], "spline, automatic": [4.0, 4.0]}
    found = row(**errors)
    assert verdict.ratio(found, "network, oracle") == 0.5
    assert found["best rival"] == "spline, automatic"  # 5/4 against 1/2
    assert found["ratios"]["to best rival"] == pytest.approx(1.25)
    assert found["ratios"]["to limit"] == pytest.approx(10.0)


def test_what_is_ours_is_no_rival_and_what_misses_is_named():
    good = row("good", **{"this library": [1.0], "version 0.1.0": [4.0], "no correction": [0.5], "spline": [2.0]})
    bad = row("bad", **{"this library": [1.0], "version 0.1.0": [0.9], "local linear, oracle": [0.5]})
    assert good["best rival"] == "spline"
    found = verdict.summary([good, bad])
    assert found["overall"]["mean to best rival"] == pytest.approx((0.5 + 2) / 2)
    assert found["groups"][0]["most to version 0.1.0"] == pytest.approx(1 / 0.9)
    missed = "\n".join(found["misses"])
    assert "bad, noise 2, N = 10000, 1 time: 2.00 of local linear, oracle" in missed
    assert "bad, noise 2, N = 10000, 1 time: 1.11 of version 0.1.0" in missed
    assert "mean, over all: 1.25 of best rival" in missed
    assert "good, noise" not in missed
