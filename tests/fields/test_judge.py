"""How much a field corrects its model: level and power of the judge, what is kept and what is mended, and coverage."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import unchecked

import malliavin_jax as mj
from malliavin_jax.estimate.ratio import Estimate
from malliavin_jax.fields.assisted import _Off, make_table
from malliavin_jax.fields.extrapolation import tangent_planes
from malliavin_jax.fields.judge import against_null, compare, influences, shares
from malliavin_jax.models.folds import make_fold
from malliavin_jax.potentials import Potential, Quartic, spline

N, SETS = 1000, 20
ALPHAS = jnp.linspace(-1.2, 1.2, 9)[:, None]


def smooth(x):
    return x + x**3, 1 + 3 * x**2


def ripples(x):
    return x + np.cos(4 * x), 1 - 4 * np.sin(4 * x)


def make(seed, loss=smooth, noise=2.0, hessian_noise=0.0, n=N, dtype=np.float64):
    """Normal positions, for which x, with or without noise of its own, is an exact weight."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 1, 1))
    gradient, hessian = loss(x)
    gradient = gradient + noise * rng.normal(size=x.shape)
    hessian = (hessian + hessian_noise * rng.normal(size=x.shape))[..., None]
    weight = x + rng.normal(size=x.shape)
    return mj.Samples(*(jnp.asarray(a, dtype) for a in (x, gradient, hessian, weight)), jnp.ones((n, 1), bool))


@jax.jit
def at(field, alphas):
    return jax.vmap(field)(alphas)


def errors(field, loss):
    got = at(field, ALPHAS)
    return (np.asarray(got.value) - loss(np.asarray(ALPHAS))[0])[:, 0], got


def bump(x):
    """Quartic plus a bump of .6 whose gradient is about 1 at its steepest."""
    return 0.6 * jnp.exp(-((x[0] - 0.3) ** 2) / 0.32)


BUMPED = Potential(
    lambda x: Quartic().value(x) + bump(x),
    lambda x: Quartic().gradient(x) - bump(x) * (x - 0.3) / 0.16,
    lambda x: Quartic().hessian(x) + (bump(x) * ((x - 0.3) ** 2 / 0.16**2 - 1 / 0.16))[None],
)


# The judge.


@pytest.fixture(scope="module")
def verdicts():
    localizer = mj.Laplace(0.4)
    with unchecked():
        return {
            name: np.array([float(mj.goodness_of_fit(make(s), guess, localizer=localizer).p_value) for s in range(60)])
            for name, guess in (("right", Quartic()), ("wrong", BUMPED))
        }


def test_a_right_guess_is_rejected_no_more_often_than_the_level(verdicts):
    p = verdicts["right"]
    assert np.mean(p < 0.1) < 0.1 + 3 * np.sqrt(0.09 / 60)
    assert abs(np.mean(p) - 0.5) < 4 * np.sqrt(1 / 12 / 60)  # uniform, about
    assert len(np.unique(p)) > 50


def test_a_wrong_guess_is_rejected(verdicts):
    assert np.mean(verdicts["wrong"] < 0.1) >= 0.9


def test_the_null_law_is_that_of_multipliers_for_each_episode():
    samples = make(3)
    fold = make_fold(samples, BUMPED)
    found = influences((fold,), ALPHAS, mj.Laplace(0.4))
    share = shares(found.firm)
    rng = np.random.default_rng(0)
    moved = np.einsum("ade,me->mad", found.of_episodes, rng.normal(size=(4000, found.of_episodes.shape[2])))
    null = np.einsum("a,mad->m", share, moved**2)
    for quantile in (0.2, 0.5, 0.9, 0.97):
        size = np.sqrt(np.quantile(null, quantile))
        test = against_null(compare(jnp.full(ALPHAS.shape, size), found.of_episodes, share))
        np.testing.assert_allclose(test.statistic, size**2, rtol=1e-9)
        assert abs(float(test.p_value) - (1 - quantile)) < 4 * np.sqrt(2 * quantile * (1 - quantile) / 4000)


def test_goodness_of_fit_says_where():
    samples = make(4, n=4000)
    found = mj.goodness_of_fit(samples, BUMPED)
    assert found.difference.shape == found.stderr.shape == found.alphas.shape == (64, 1)
    assert found.trusted.dtype == bool
    off = jax.vmap(Quartic().gradient)(found.alphas) - jax.vmap(BUMPED.gradient)(found.alphas)
    assert np.all((np.abs(found.difference - off) < 5 * np.asarray(found.stderr))[np.asarray(found.trusted)])
    few = mj.goodness_of_fit(samples, BUMPED, alphas=jnp.asarray([[0.0], [9.0]]))
    np.testing.assert_array_equal(few.trusted, [True, False])
    with pytest.raises(ValueError, match="goodness_of_fit needs Hessians"):
        mj.goodness_of_fit(eqx.tree_at(lambda s: s.hessian, samples, None), BUMPED)


# Models that are kept, and models that are mended.

CASES = {
    "smooth, .5": (smooth, 0.5, 0.0),
    "smooth, 10": (smooth, 10.0, 0.0),
    "ripples, .5": (ripples, 0.5, 0.0),
    "ripples, 2": (ripples, 2.0, 0.0),
    "ripples, 10": (ripples, 10.0, 0.0),
    "ripples, 2, noisy Hessians": (ripples, 2.0, 3.0),
}


@pytest.fixture(scope="module")
def runs():
    """For each case and data set: whether the model stands alone, and the share of places that are covered."""
    found = {}
    for number, (name, (loss, noise, hessian_noise)) in enumerate(CASES.items()):
        found[name] = []
        for seed in range(SETS):
            with unchecked():
                field = mj.MalliavinField(make(1000 * number + seed, loss, noise, hessian_noise))
            off, got = errors(field, loss)
            assert np.all(np.asarray(got.trusted))
            covered = np.mean(np.abs(off) < 1.96 * np.asarray(got.stderr)[:, 0])
            found[name].append((field.correction.kind == "none", covered))
    return {name: np.array(rows) for name, rows in found.items()}


def test_a_right_model_is_kept(runs):
    assert np.mean([runs[name][:, 0] for name in runs if name.startswith("smooth")]) >= 0.8


@pytest.mark.parametrize("name", CASES)
def test_intervals_cover(name, runs):
    """Errors within a data set are nearly all or none: 20 data sets know a share of .95 to ±.049. Three of these."""
    assert np.mean(runs[name][:, 1]) > 0.95 - 3 * 0.049


def test_intervals_cover_on_the_whole(runs):
    assert np.mean([rows[:, 1] for rows in runs.values()]) >= 0.88  # 120 data sets: ±.02


@pytest.fixture
def coarse(monkeypatch):
    """Splines of one or two cells, which cannot follow ripples."""
    monkeypatch.setattr(spline, "_MESHES", {1: (2,), 2: (2,), 3: (2,)})


def test_a_model_too_coarse_is_mended(coarse):
    own, mended, full = [], [], []
    for seed in range(SETS):
        samples = make(7000 + seed, ripples, 0.5)
        with unchecked():
            field, *others = (mj.MalliavinField(samples, correction=kind) for kind in ("auto", "none", "full"))
        assert field.correction.kind != "none"
        for other, into in zip(others, (own, full), strict=True):
            into.append(errors(other, ripples)[0])
        mended.append(errors(field, ripples)[0])
    own, mended, full = (np.asarray(e) for e in (own, mended, full))
    assert np.sqrt(np.mean(mended**2)) < 0.4 * np.sqrt(np.mean(own**2))
    assert np.all(np.abs(np.mean(full, 0)) < 4 * np.std(full, 0, ddof=1) / np.sqrt(SETS))
    assert np.any(np.abs(np.mean(own, 0)) > 4 * np.std(own, 0, ddof=1) / np.sqrt(SETS))


def test_a_given_control_is_corrected_in_full():
    field = mj.MalliavinField(make(5), mj.Laplace(0.4), BUMPED)
    assert (field.correction.kind, field.correction.model, field.table) == ("full", "given", None)
    off, got = errors(field, smooth)
    assert np.all(np.abs(off) < 4 * np.asarray(got.stderr)[:, 0])


# Error bars that are never nothing.


@pytest.mark.parametrize("correction", ["auto", "full"])
@pytest.mark.parametrize("n", [2, 3, 4])
def test_few_episodes_are_not_trusted(n, correction):
    got = at(mj.MalliavinField(make(0, n=n), correction=correction), ALPHAS)
    assert not np.any(np.asarray(got.trusted))
    assert np.all(np.isinf(got.stderr))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("control", ["auto", "polynomial"])
def test_exact_gradients_have_an_error(dtype, control):
    field = mj.MalliavinField(make(6, noise=0.0, dtype=dtype), control=control)
    got = at(field, ALPHAS.astype(dtype))
    trusted = np.asarray(got.trusted)
    assert trusted.any()
    assert np.all(np.asarray(got.stderr)[trusted] > 0)
    off = np.asarray(got.value) - smooth(np.asarray(ALPHAS))[0]
    assert np.all(np.abs(off)[trusted] < 5 * np.asarray(got.stderr)[trusted])


def test_float32_says_what_float64_says():
    double, single = (mj.MalliavinField(make(8, dtype=dtype)) for dtype in (np.float64, np.float32))
    assert double.correction.kind == single.correction.kind
    a, b = at(double, ALPHAS), at(single, ALPHAS.astype(jnp.float32))
    assert b.value.dtype == jnp.float32
    assert np.all(np.abs(np.asarray(a.value) - np.asarray(b.value, float)) < 0.1 * np.asarray(a.stderr))


# The table.


def test_a_model_alone_keeps_no_samples():
    field = mj.MalliavinField(make(9))
    assert (field.correction.kind, field.folds, field.sorted) == ("none", (), None)
    assert all(
        N not in leaf.shape and N // 2 not in leaf.shape for leaf in jax.tree.leaves(eqx.filter(field, eqx.is_array))
    )
    inside = jnp.linspace(-1, 1, 7)[:, None]
    np.testing.assert_allclose(
        at(field, inside).value, jax.vmap(field.table.model.gradient)(inside), rtol=1e-9, atol=1e-9
    )
    walked = jax.jit(lambda field: jax.lax.scan(lambda _, a: (None, field(a).value), None, inside)[1])(field)
    np.testing.assert_allclose(walked, at(field, inside).value, rtol=1e-9, atol=1e-12)
    outside = at(field, jnp.asarray([[23.0], [-23.0]]))
    assert not np.any(np.asarray(outside.trusted))
    np.testing.assert_array_equal(np.sign(outside.value[:, 0]), [1, -1])


def test_a_corrected_table_is_the_model_and_the_correction(coarse):
    field = mj.MalliavinField(make(7000, ripples, 0.5))
    if field.table is None:
        pytest.fail(f"wanted a kernel, got {field.correction}")
    table, nodes = field.table, field.table.columns.shape[0]
    axis = table.low + (table.high - table.low) * jnp.linspace(0, 1, nodes)
    some = axis[nodes // 3 : 2 * nodes // 3 : 9][:, None]
    expected = jax.vmap(table.model.gradient)(some)[:, 0] + table.columns[nodes // 3 : 2 * nodes // 3 : 9, 0]
    np.testing.assert_allclose(at(field, some).value[:, 0], expected, rtol=1e-6, atol=1e-8)
    # The stated error is part of the standard error.
    assert 0 < float(table.interpolation_error[0]) < float(np.min(at(field, some).stderr))


@pytest.mark.parametrize("d", [1, 2])
def test_a_table_of_a_linear_correction_is_exact_and_adds_the_variance_of_the_model(d):
    model, slope = Quartic(), jnp.arange(1.0, d + 1)
    x = jax.random.normal(jax.random.key(0), (50, 1, d))
    samples = mj.Samples(x, x, jnp.ones((50, 1, d, d)), x, jnp.ones((50, 1), bool))
    low, high = -jnp.ones(d), 2 * jnp.ones(d)

    def estimate(alpha):
        value = model.gradient(alpha) + 3 + slope * jnp.sum(alpha)
        density = jnp.exp(-jnp.sum(alpha**2))
        return Estimate(value, jnp.full(d, 0.3), density, 0.01 * density, jnp.asarray(True))

    made = {"variance": lambda points: np.full(points.shape, 0.16), "corrects": True}
    table = make_table(model, estimate, tangent_planes(samples), low, high, **made)
    alphas = jnp.linspace(-0.9, 1.9, 7)[:, None] * jnp.ones(d)[None]
    found, expected = (jax.vmap(one)(alphas) for one in (table.ask, estimate))
    np.testing.assert_allclose(found.value, expected.value, rtol=1e-9)
    np.testing.assert_allclose(table.interpolation_error, 0, atol=1e-9)
    np.testing.assert_allclose(found.stderr, 0.5, rtol=1e-6)  # the root of .09 + .16

    def bent(alpha):
        return eqx.tree_at(lambda e: e.value, estimate(alpha), model.gradient(alpha) + 7 * alpha**2)

    step = 3 / (table.columns.shape[0] - 1)  # a parabola is furthest from its chord half way: by 7 (step/2)²
    table = make_table(model, bent, tangent_planes(samples), low, high, **made)
    np.testing.assert_allclose(table.interpolation_error, 7 * (step / 2) ** 2, rtol=1e-6)


def test_positions_all_alike_are_no_warning():
    """Nothing is known of any place, which is said; NumPy divides by zero as silently as a compiled program."""
    one = jnp.ones((50, 1, 1))
    samples = mj.Samples(one, one, one[..., None], one, jnp.ones((50, 1), bool))
    for place in (1.0, 1.5):
        estimate = mj.MalliavinField(samples)(place)
        assert not estimate.trusted
        assert np.isinf(estimate.stderr)


def test_errors_between_nodes_go_by_the_density():
    rng = np.random.default_rng(0)
    density = np.exp(rng.uniform(-6, 0, 200))
    squares = np.stack([1 / density, 4 / density], 1) * rng.uniform(0.5, 1.5, (200, 1))
    off = _Off(squares, density)
    at_some = off.at(np.exp([-9.0, -5.0, -3.0, -1.0, 2.0]))
    np.testing.assert_allclose(at_some[:, 1], 4 * at_some[:, 0])
    assert np.all(np.diff(at_some[:, 0]) <= 0)
    np.testing.assert_allclose(
        at_some[[0, -1], 0], [at_some[:, 0].max(), at_some[:, 0].min()]
    )  # beyond: the last group
    assert 0.5 < at_some[2, 0] / np.exp(3.0) < 2
    np.testing.assert_allclose(off.typical**2, (density @ squares) / density.sum())
    nowhere = _Off(np.zeros((0, 2)), np.zeros(0))
    np.testing.assert_array_equal(nowhere.at(density), 0)
    np.testing.assert_array_equal(nowhere.typical, 0)


# Words.


def test_the_reason_reads_as_a_sentence():
    samples = make(9)
    assert str(mj.MalliavinField(samples).correction).startswith("the fitted spline alone: p = ")
    asked = {c: str(mj.MalliavinField(samples, correction=c).correction) for c in ("none", "full")}
    assert asked["none"] == "the fitted spline alone, as asked for"
    assert asked["full"] == "the fitted spline and its whole correction, as asked for"
    assert "no model was fitted" in str(mj.MalliavinField(samples, mj.Laplace(0.4), BUMPED).correction)
    assert "debiased estimate" in str(mj.MalliavinField(samples, mj.Laplace(0.4), None).correction)


@pytest.mark.usefixtures("no_type_checks")
def test_wrong_words_are_named():
    samples = make(9)
    with pytest.raises(ValueError, match="correction must be 'auto', 'full' or 'none', got 'x'"):
        mj.MalliavinField(samples, correction="x")
    with pytest.raises(ValueError, match="correction='none' needs a control that is fitted here"):
        mj.MalliavinField(samples, control=None, correction="none")
    x = jnp.zeros((10, 1, 4))
    four = mj.Samples(x, x, jnp.zeros((10, 1, 4, 4)), x, jnp.ones((10, 1), bool))
    with pytest.raises(ValueError, match="control='spline' is for up to three dimensions, got samples with d = 4"):
        mj.MalliavinField(four, control="spline")
