"""Fields: coverage over repeated data sets, sorted against dense, controls right and wrong, tables, trust."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import unchecked

import malliavin_jax as mj
from malliavin_jax.estimate.conditional import conditional_expectation
from malliavin_jax.estimate.localizers import Centered, Gaussian, Heaviside, Laplace
from malliavin_jax.estimate.sums import localized_sums, make_bank
from malliavin_jax.fields.extrapolation import tangent_planes
from malliavin_jax.fields.fresh import FreshField, TrueField
from malliavin_jax.fields.malliavin import MalliavinField
from malliavin_jax.fields.sorted import make_places, sort_bank
from malliavin_jax.fields.tables import TabulatedField
from malliavin_jax.models.selection import LENGTHS
from malliavin_jax.potentials import Potential, Quadratic, Quartic
from malliavin_jax.samples.summary import spread

SETS, PER_SET = 100, 1000  # data sets and episodes in each
TIMES = (0.2, 0.4, 0.6, 0.8)
ALPHAS = jnp.asarray([-1.0, -0.5, 0.0, 0.5, 1.0])[:, None]
TRUTH = np.asarray(ALPHAS**3 + ALPHAS)
PLANE = jnp.asarray([[0.0, 0.0], [0.6, -0.4], [-0.5, -0.5], [0.3, 0.8]])
WRONG = Quadratic(precision=-3.0, center=1.0)


def line(key):
    return jax.random.normal(key, (1,))


def plane(key):
    return jax.random.normal(key, (2,))


LINE = mj.ForwardLearner(Quartic(), line, 0.01, gradient_noise=2.0, restart_probability=0.003)
IN_THE_PLANE = mj.ForwardLearner(Quartic(0.5), plane, 0.01, gradient_noise=2.0)


@pytest.fixture(scope="module")
def bank():
    """All episodes of one dimension, at four times; some stop before the last."""
    return mj.observe(jax.random.key(0), LINE, num_episodes=SETS * PER_SET, times=TIMES)


@pytest.fixture(scope="module")
def sets(bank):
    """The same as independent data sets at the last time."""
    return jax.tree.map(lambda leaf: leaf[:, -1:].reshape(SETS, PER_SET, 1, *leaf.shape[2:]), bank)


@pytest.fixture(scope="module")
def first(sets):
    """One of them; most tests below use it, so that its shape is compiled once."""
    return jax.tree.map(lambda leaf: leaf[0], sets)


@pytest.fixture(scope="module")
def plane_bank():
    return mj.observe(jax.random.key(1), IN_THE_PLANE, num_episodes=SETS * PER_SET, times=[0.8])


def take(samples, start, stop=None):
    return jax.tree.map(lambda leaf: leaf[start:stop], samples)


@jax.jit
def at(field, alphas):
    """A field is a PyTree: it goes through jit as an argument, and fields of equal shapes share one compilation."""
    return jax.vmap(field)(alphas)


def dense(field):
    """The same field without its sorted form."""
    return eqx.tree_at(lambda f: f.sorted, field, None)


def single(samples):
    return jax.tree.map(lambda leaf: leaf[:, -1:], samples)


def to_float32(tree):
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32) if eqx.is_inexact_array(leaf) else leaf, tree)


def root_mean_square(array):
    return float(np.sqrt(np.mean(np.asarray(array) ** 2)))


# ---------------------------------------------------------------- repeated data sets


@pytest.fixture(scope="module")
def plain(sets):
    """On every data set: the automatic field without control, one with a wrong control, every length of the grid."""

    @jax.jit
    def estimates(sets):
        def one(samples):
            lengths = spread(samples) * jnp.asarray(LENGTHS)

            def at_length(h):
                bank = (samples, samples.gradient, samples.hessian)
                return jax.vmap(lambda alpha: conditional_expectation(*bank, alpha, Laplace(h)))(ALPHAS).value

            fields = MalliavinField(samples, control=None), MalliavinField(samples, Laplace(0.3), WRONG)
            return *(jax.vmap(field)(ALPHAS) for field in fields), jax.lax.map(at_length, lengths)

        return jax.lax.map(one, sets)

    return estimates(sets)


@pytest.fixture(scope="module")
def assisted(sets):
    """With everything as by default, on every data set."""
    with unchecked():
        fields = [MalliavinField(jax.tree.map(lambda leaf, i=i: leaf[i], sets)) for i in range(SETS)]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *[at(field, ALPHAS) for field in fields])


@pytest.fixture(scope="module")
def in_the_plane(plane_bank):
    """A fixed Gaussian localizer in two dimensions, on every data set."""
    sets = jax.tree.map(lambda leaf: leaf.reshape(SETS, PER_SET, *leaf.shape[1:]), plane_bank)
    one = lambda samples: jax.vmap(MalliavinField(samples, Gaussian(0.7, 0.2), None))(PLANE)  # noqa: E731
    return jax.jit(lambda sets: jax.lax.map(one, sets))(sets)


@pytest.mark.parametrize("which", ["without control", "automatic control", "wrong control", "two dimensions"])
def test_intervals_cover(which, request):
    """95 % intervals, noise 2, N = 1000, automatic length (fixed for the last two).

    Over 100 data sets at 5 (4) places a fraction of 95 % has a binomial standard deviation of 1.0 % (1.1 %) if places
    were independent, and of 2.2 % if they were all the same; 90–98 % leaves room for that and for a finite N. A fitted
    model's errors are all the same (the mean of the noise), and 87 % is 3.6 of these deviations.
    """
    if which == "two dimensions":
        # The core's bias (e⁴/4) |Δ²(p ∇L)|/p is below .005 for e = .2; the standard error is .1.
        estimates = request.getfixturevalue("in_the_plane")
        truth = np.asarray(jax.vmap(Quartic(0.5).gradient)(PLANE))
    else:
        plain = () if which == "automatic control" else request.getfixturevalue("plain")
        estimates = plain[which == "wrong control"] if plain else request.getfixturevalue("assisted")
        truth = TRUTH
    assert np.all(np.asarray(estimates.trusted))
    hits = np.abs(np.asarray(estimates.value) - truth) < 1.96 * np.asarray(estimates.stderr)
    least, most = (0.87, 1.0) if which == "automatic control" else (0.90, 0.98)
    assert least <= np.mean(hits) <= most


def test_a_control_may_be_wrong_but_not_bias(plain, bank):
    wrong = np.asarray(plain[1].value)[..., 0]
    error = np.std(wrong, 0, ddof=1) / np.sqrt(SETS)
    assert np.all(np.abs(np.mean(wrong, 0) - TRUTH[:, 0]) < 4 * error)
    samples = single(take(bank, 0, 20_480))
    right, none, wrong = (at(MalliavinField(samples, Laplace(0.8), c), ALPHAS) for c in (Quartic(), None, WRONG))
    for estimate in (right, none, wrong):
        assert np.all(np.abs(estimate.value - TRUTH) < 4 * np.asarray(estimate.stderr))
    assert np.all(np.abs(jax.vmap(WRONG.gradient)(ALPHAS) - TRUTH) > 15 * np.asarray(wrong.stderr))
    # What a control is for: the better it is, the smaller the error.
    assert root_mean_square(right.stderr) < 0.9 * root_mean_square(none.stderr)
    assert root_mean_square(none.stderr) < 0.9 * root_mean_square(wrong.stderr)


def test_the_automatic_control_is_never_much_worse(plain, assisted, sets):
    without, error = plain[0], root_mean_square(assisted.stderr)
    assert error <= 1.05 * root_mean_square(without.stderr)
    with_control, none = (np.mean((np.asarray(e.value) - TRUTH) ** 2, (1, 2)) for e in (assisted, without))
    # Paired over data sets: the mean of e_a² − 1.05² e_n² is not significantly above zero.
    excess = with_control - 1.05**2 * none
    assert np.mean(excess) < 4 * np.std(excess, ddof=1) / np.sqrt(SETS)


def test_a_control_that_does_not_help_is_dropped(first):
    """Where gradients and Hessians are noise, a fit leaves as much of held-out episodes as nothing does: a coin."""
    dropped = []
    for i in range(8):
        shapes = first.gradient.shape, first.hessian.shape
        noise = [100 * jax.random.normal(jax.random.key(10 * i + k), shape) for k, shape in enumerate(shapes)]
        samples = eqx.tree_at(lambda s: (s.gradient, s.hessian), first, tuple(noise))
        field = MalliavinField(samples, Laplace(0.5))
        dropped.append(field.correction.model == "none")
        if dropped[-1]:
            assert len(field.folds) == 1
            assert field.folds[0].potential is None
            assert field.correction.kind == "full"
    assert any(dropped)
    assert MalliavinField(first, Laplace(0.5)).correction.model == "spline"  # not where it helps


def test_the_automatic_length_is_as_good_as_the_oracle(plain):
    """RMSE over 100 data sets at the length of least estimated error, against each length of the grid."""
    squares = np.mean((np.asarray(plain[2]) - TRUTH) ** 2, (2, 3))  # data sets × lengths
    chosen = np.mean((np.asarray(plain[0].value) - TRUTH) ** 2, (1, 2))
    oracle = squares[:, np.argmin(np.mean(squares, 0))]
    excess = chosen - 1.1**2 * oracle  # at most 10 % above, paired over data sets
    assert np.mean(excess) < 4 * np.std(excess, ddof=1) / np.sqrt(SETS)
    assert np.mean(chosen) < 1.15**2 * np.mean(oracle)
    rmse = np.sqrt(np.mean(squares, 0))
    assert min(rmse[0], rmse[-1]) > 1.8 * np.min(rmse)  # the choice matters


def test_everything_automatic_in_two_dimensions(plane_bank):
    """Length, core and control from the data; the core's remaining bias is, by the risk estimate, below the error."""
    field = MalliavinField(take(plane_bank, 0, 4096))
    got = at(field, PLANE)
    truth = jax.vmap(Quartic(0.5).gradient)(PLANE)
    assert np.all(np.asarray(got.trusted))
    assert np.all(np.abs(got.value - truth) < 5 * np.asarray(got.stderr))
    fixed = at(MalliavinField(take(plane_bank, 0, 4096), Gaussian(0.7, 0.2), None), PLANE)
    assert root_mean_square(got.stderr) < root_mean_square(fixed.stderr)


def test_few_noisy_episodes_in_space_take_a_large_core():
    """On a quadratic no core is biased, so the largest are best; a tiny one, which weighs nothing at some α, is no
    reference for them, however far its wild numbers are from theirs."""
    cores = []
    for seed in range(4):
        x, noise, extra = jax.random.normal(jax.random.key(seed), (3, 1000, 1, 3), jnp.float32)
        hessian = jnp.broadcast_to(jnp.eye(3, dtype=x.dtype), (1000, 1, 3, 3))
        samples = mj.Samples(x, x + 10 * noise, hessian, x + extra, jnp.ones((1000, 1), bool))
        cores.append(float(MalliavinField(samples, control=None).localizer.core))
    assert min(cores) > 0.4, cores


# ---------------------------------------------------------------- sorted and dense


@pytest.mark.parametrize(("times", "control"), [(1, WRONG), (4, None)], ids=["one time", "four times"])
def test_sorted_and_dense_agree_to_rounding(times, control, bank):
    samples = take(bank if times == 4 else single(bank), 0, 3001)
    assert 0 < np.mean(~np.asarray(samples.observed)) < 0.5
    own = np.asarray(samples.x)[np.asarray(samples.observed)][:15]  # at a sample itself too
    alphas = jnp.concatenate([jnp.linspace(-2.2, 2.2, 85)[:, None], jnp.asarray(own)])
    field = MalliavinField(samples, Laplace(0.3), control)
    assert field.sorted is not None
    fast, slow = at(field, alphas), at(dense(field), alphas)
    trusted = np.asarray(slow.trusted)
    assert 50 < trusted.sum() < 100
    np.testing.assert_array_equal(fast.trusted, slow.trusted)
    for name in ("value", "stderr", "density", "density_stderr"):
        exact = np.asarray(getattr(slow, name))
        np.testing.assert_allclose(getattr(fast, name), exact, rtol=1e-10, atol=1e-10)

    # A sum over M points has an error of about log₂(M) eps of the sum of sizes: √M log₂(M) eps in units of its standard
    # error, 2e-4 for M = 4·3001. Ten times that, for the coefficients are rounded too.
    low = at(to_float32(field), alphas.astype(jnp.float32))
    assert low.value.dtype == low.stderr.dtype == low.density.dtype == jnp.float32
    low, slow = (jax.tree.map(lambda leaf: np.asarray(leaf)[trusted].astype(float), e) for e in (low, slow))
    assert np.all(np.abs(low.value - slow.value) < 2e-3 * slow.stderr)
    assert np.all(np.abs(low.density - slow.density) < 2e-3 * slow.density_stderr)
    np.testing.assert_allclose(low.stderr, slow.stderr, rtol=2e-3)
    np.testing.assert_allclose(low.density_stderr, slow.density_stderr, rtol=2e-3)


def test_many_points_in_float32_do_not_drift(bank):
    """A running product of 10⁵ decays would be off by as many roundings; a running distance is not."""
    bank = jax.tree.map(lambda leaf: leaf[:, 0:1], bank)
    bank = make_bank(bank, bank.gradient, bank.hessian)
    alphas = jnp.asarray([-0.5, 0.0, 1.0])[:, None]
    exact = jax.jit(lambda bank: jax.vmap(lambda alpha: localized_sums(bank, alpha, Laplace(1.0)))(alphas))(bank)
    low = jax.vmap(sort_bank(to_float32(bank), 1.0).sums)(alphas.astype(jnp.float32))
    for total, square in (("n", "nn"), ("w", "ww")):
        # √M log₂(M) eps = 6e-4 standard errors, as above.
        scale = np.sqrt(np.asarray(getattr(exact, square)))
        assert np.all(np.abs(np.asarray(getattr(low, total), float) - getattr(exact, total)) < 6e-4 * scale)
        np.testing.assert_allclose(getattr(low, square).astype(float), getattr(exact, square), rtol=1e-5)


def test_only_laplace_in_one_dimension_is_sorted(first, plane_bank):
    for localizer in (Heaviside(), Centered(), Gaussian(0.3, 0.1)):
        assert MalliavinField(first, localizer, None).sorted is None
    assert MalliavinField(take(plane_bank, 0, PER_SET), Gaussian(0.3, 0.1), None).sorted is None


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("kind", ["normal", "outliers", "ties", "one value", "one sample"])
def test_places_among_the_samples(kind, dtype):
    """As many samples left of α as NumPy finds, at the samples themselves, next to them and beyond them."""
    normal = np.random.default_rng(0).normal(50, 1, 3000)
    x = {
        "normal": normal,
        "outliers": np.concatenate([normal, [-1e7, 1e7]]),
        "ties": np.round(normal, 1),
        "one value": np.full(100, 0.3),
        "one sample": np.array([0.3]),
    }[kind]
    x = np.sort(x.astype(dtype))
    beyond = np.array([-np.inf, x[0] - 1, x[-1] + 1, np.inf], dtype)
    alphas = np.concatenate([x, np.nextafter(x, -np.inf), np.nextafter(x, np.inf), beyond]).astype(dtype)
    places = make_places(jnp.asarray(x))
    np.testing.assert_array_equal(jax.jit(jax.vmap(places))(jnp.asarray(alphas)), np.searchsorted(x, alphas, "right"))
    assert places.steps <= np.log2(len(x)) + 4  # known when tracing, and a multiple of four
    if kind == "normal":
        assert places.steps == 4


# ---------------------------------------------------------------- tables


def saddle(d):
    """L = x_0³/3 − x_0 x_1²: at the centres of cells linear interpolation of x_0² − x_1² happens to be exact."""
    return Potential(
        lambda x: x[0] ** 3 / 3 - x[0] * x[1] ** 2,
        lambda x: jnp.zeros(d).at[0].set(x[0] ** 2 - x[1] ** 2).at[1].set(-2 * x[0] * x[1]),
        lambda x: jnp.zeros((d, d)),
    )


def tabulated(case, first, plane_bank):
    """A field and a grid of it, finer than its smallest length."""
    axis = jnp.linspace(-1, 1, 21 if case != "space" else 9)
    if case == "line":
        return MalliavinField(first, Gaussian(0.5, 0.2), None), (jnp.linspace(-1.2, 1.2, 61),)
    if case == "plane":
        return MalliavinField(take(plane_bank, 0, PER_SET), Gaussian(0.7, 0.4), None), (axis, 0.1 + 0.8 * axis)
    d = 2 if case == "saddle" else 3
    return TrueField(saddle(2) if case == "saddle" else Quartic(0.4)), (axis,) * d


@pytest.mark.parametrize("case", ["line", "plane", "saddle", "space"])
def test_tables_keep_their_stated_error(case, first, plane_bank):
    """To leading order the error is Σ_i ½ f_ii t_i (h_i − t_i), largest halfway in some of the coordinates.

    The curvature of the field changes by less than a quarter within a cell, which is allowed for.
    """
    field, axes = tabulated(case, first, plane_bank)
    table = TabulatedField(field, axes, chunk_size=4096)
    low, high = (jnp.stack([axis[i] for axis in axes]) for i in (0, -1))
    points = jax.random.uniform(jax.random.key(3), (400, len(axes)), minval=low[None], maxval=high[None])
    got, exact = at(table, points), at(field, points)
    error = np.max(np.abs(got.value - exact.value), 0)
    stated = np.asarray(table.interpolation_error)
    assert np.all(error <= 1.25 * stated + 1e-12)
    assert np.all(error >= 0.5 * stated - 1e-12)  # and it is no exaggeration
    if case == "saddle":
        np.testing.assert_allclose(stated, [0.1**2 / 4, 0], atol=1e-12)
    if case in ("line", "plane"):
        assert np.all(np.asarray(got.trusted))
        assert np.all(stated < 0.5 * np.min(np.asarray(exact.stderr), 0))
        np.testing.assert_allclose(got.stderr, exact.stderr, rtol=0.2)
        np.testing.assert_allclose(got.density, exact.density, rtol=0.05)
    nodes = jnp.stack([axis[:5] for axis in axes], -1)
    np.testing.assert_allclose(at(table, nodes).value, at(field, nodes).value, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("d", [1, 2, 3])
def test_tables_come_back_from_outside(d):
    table = TabulatedField(TrueField(Quartic(0.4)), (jnp.linspace(-1, 1, 9),) * d)
    outside = jnp.asarray([[3.0] * d, [-40.0] * d, [jnp.nan] * d, [0.5] * d])
    got = at(table, outside)
    np.testing.assert_array_equal(got.trusted, [False, False, False, True])
    np.testing.assert_array_equal(np.sign(got.value[:2]), np.sign(outside[:2]))
    assert np.all(np.isinf(got.stderr[:2]))
    assert np.all(np.isnan(got.value[2]))
    edge = at(table, jnp.ones((1, d))).value
    np.testing.assert_allclose(got.value[0] - edge[0], 2.0 * np.ones(d))  # stiffness 1/(half-width)² = 1


def test_a_table_is_untrusted_where_its_nodes_are(first):
    field = MalliavinField(first, Gaussian(0.5, 0.2), None)
    table = TabulatedField(field, (jnp.linspace(-5, 5, 41),))
    got = at(table, jnp.linspace(-6, 6, 49)[:, None])
    assert np.all(np.isfinite(got.value))
    untrusted = ~np.asarray(got.trusted)
    assert 0 < untrusted.sum() < 49
    assert np.all(np.isinf(got.stderr[untrusted]))
    assert np.all(np.isfinite(got.stderr[~untrusted]))


def test_the_derivative_of_a_table_is_that_of_the_cell_at_a_node_too():
    axis = jnp.linspace(-1, 1, 9)
    table = TabulatedField(TrueField(Quartic()), (axis,))
    slopes = jnp.diff(table.estimates.value[:, 0]) / jnp.diff(axis)
    for alpha, cell in ((axis[3], 3), (axis[3] + 0.1, 3), (axis[3] - 0.1, 2)):
        slope = jax.jacfwd(lambda a: table(a).value)(alpha[None])
        np.testing.assert_allclose(slope[0, 0], slopes[cell], rtol=1e-9)


@pytest.mark.parametrize("axis", [[0.0], [0.0, 1.0, 1.5], [1.0, 0.5, 0.0]])
def test_tables_need_regular_axes(axis):
    with pytest.raises(ValueError, match=r"axes\[0\] must be an increasing regular grid of at least 2 nodes"):
        TabulatedField(TrueField(Quartic()), (jnp.asarray(axis),))


# ---------------------------------------------------------------- trust


@pytest.mark.parametrize("case", ["automatic", "Heaviside", "plane"])
def test_no_wild_numbers_anywhere(case, first, plane_bank):
    """Outside the data a value is an average of tangent planes, continued with a stiffness: bounded by the largest."""
    samples = take(plane_bank, 0, PER_SET) if case == "plane" else first
    localizer = {"automatic": "auto", "Heaviside": Heaviside(), "plane": Gaussian(0.7, 0.2)}[case]
    field = MalliavinField(samples, localizer, None)
    d = samples.dim
    line = jnp.linspace(-30, 30, 241)
    alphas = jnp.stack([line] * d, -1) if d == 1 else jnp.stack([line, 0.3 * line[::-1]], -1)
    got = at(field, alphas)
    trusted, value = np.asarray(got.trusted), np.asarray(got.value)
    assert 3 < trusted.sum() < 30
    assert np.all(np.isfinite(value))
    assert np.all(np.isfinite(got.stderr[trusted]))
    assert np.all(np.isinf(got.stderr[~trusted]))
    assert np.all(np.isfinite(got.density))
    seen = np.asarray(samples.observed)
    x, g, H = (np.abs(np.asarray(a)[seen]) for a in (samples.x, samples.gradient, samples.hessian))
    stiffness = max(d * H.max(), 1 / float(spread(samples)) ** 2)
    bound = g.max() + stiffness * (np.abs(np.asarray(alphas)).sum(1) + d * x.max())
    assert np.all(np.abs(value).max(1) <= bound)
    far = np.max(np.abs(np.asarray(alphas)), 1) > 4
    assert not np.any(trusted[far])
    assert np.all(np.sum(value * np.asarray(alphas), 1)[far] > 0)  # it pushes back


def test_far_outside_is_flagged_and_pushes_back(first):
    """α = 23, where the ratio itself is off by thousands."""
    field = MalliavinField(first)
    for alpha in (23.0, -23.0):
        got = at(field, jnp.asarray([[alpha]]))
        assert not bool(got.trusted[0])
        assert np.isinf(got.stderr[0, 0])
        assert np.isfinite(got.value[0, 0])
        assert np.sign(got.value[0, 0]) == np.sign(alpha)
        assert float(got.density[0]) == 0
    # A chain started there walks home.
    step = lambda x, _: (x - 0.005 * field(x).value, None)  # noqa: E731
    assert abs(float(jax.jit(lambda x: jax.lax.scan(step, x, None, length=400)[0])(jnp.asarray([23.0]))[0])) < 1.5


@pytest.mark.parametrize("localizer", ["auto", Gaussian(0.4, 0.1)], ids=["sorted", "dense"])
def test_nan_does_not_spread(localizer, first):
    field = MalliavinField(first, localizer, None)
    broken, whole = (at(field, jnp.asarray([0.3, a, 7.0])[:, None]) for a in (jnp.nan, 0.1))
    assert np.isnan(broken.value[1, 0])
    assert not bool(broken.trusted[1])
    for i in (0, 2):
        jax.tree.map(lambda a, b, i=i: np.testing.assert_array_equal(a[i], b[i]), broken, whole)


@pytest.mark.parametrize("d", [1, 2, 3])
def test_the_tail_is_the_weighted_mean_of_tangent_planes(d, key):
    """Against the formula, far from the origin too; outside the box it goes on with the mean curvature or its floor."""
    keys = jax.random.split(key, 4)
    x = 50 + jax.random.normal(keys[0], (300, 2, d))
    gradient, hessian = jax.random.normal(keys[1], (300, 2, d)), jax.random.normal(keys[2], (300, 2, d, d))
    samples = mj.Samples(x, gradient, hessian, x, jax.random.bernoulli(keys[3], 0.7, (300, 2)))
    tail = tangent_planes(samples)
    seen = np.asarray(samples.observed)
    X, g, H = (np.asarray(a)[seen] for a in (x, gradient, hessian))
    width = float(spread(samples))
    for inside, out in (((X[0] + X[1]) / 2, 0.0), (X.max(0), 3.0)):
        kernel = (1 + np.sum((X - inside) ** 2, 1) / (0.2 * width) ** 2) ** -float((d + 6) // 2)
        planes = g + np.einsum("pij,pj->pi", H, inside - X)
        curvature = np.average(np.trace(H, axis1=1, axis2=2) / d, weights=kernel)
        wanted = np.average(planes, axis=0, weights=kernel) + max(curvature, 1 / width**2) * out
        np.testing.assert_allclose(tail(jnp.asarray(inside + out)), wanted, rtol=1e-9, atol=1e-9)


# ---------------------------------------------------------------- jit, vmap, scan, other fields


@pytest.mark.parametrize(
    ("localizer", "control"), [(Laplace(0.3), None), (Gaussian(0.4, 0.1), Quadratic())], ids=["sorted", "dense"]
)
def test_a_field_goes_through_jit_vmap_and_scan(localizer, control, sets):
    """Other data, lengths and models of equal shapes compile nothing new."""

    @jax.jit
    @eqx.debug.assert_max_traces(max_traces=1)
    def evaluate(field, alphas):
        together = jax.vmap(field)(alphas)
        _, walked = jax.lax.scan(lambda _, alpha: (None, field(alpha)), None, alphas)
        return together, walked

    for i in range(3):
        field = MalliavinField(jax.tree.map(lambda leaf, i=i: leaf[i], sets), localizer, control)
        together, walked = evaluate(field, ALPHAS)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12), together, walked)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12), together, at(field, ALPHAS))
        localizer = eqx.tree_at(lambda l: l.length, localizer, localizer.length + 0.1)


def test_fresh_episodes_at_every_call():
    field = FreshField(LINE, Laplace(0.5), num_episodes=4000, time=0.4, control=Quartic())
    evaluate = eqx.filter_jit(lambda field, alpha, key: field(alpha, key=key))
    alpha = jnp.asarray([0.4])
    runs = [evaluate(field, alpha, jax.random.key(seed)) for seed in range(8)]
    values, errors = (np.asarray([getattr(run, name)[0] for run in runs]) for name in ("value", "stderr"))
    assert np.all(np.abs(values - 0.464) < 4 * errors)
    assert abs(np.mean(values) - 0.464) < 4 * np.mean(errors) / np.sqrt(8)
    assert len(np.unique(values)) == 8
    again = evaluate(field, alpha, jax.random.key(0))
    np.testing.assert_array_equal(again.value, runs[0].value)
    outside = evaluate(field, jnp.asarray([23.0]), jax.random.key(0))
    assert not bool(outside.trusted)
    assert 0 < float(outside.value[0]) < 1e4
    with pytest.raises(ValueError, match=r"key must be given"):
        field(alpha)
    with pytest.raises(ValueError, match=r"num_episodes must be a whole number, at least 2, got 1"):
        FreshField(LINE, Laplace(0.5), num_episodes=1, time=0.4)


def test_the_true_field_is_exact():
    got = at(TrueField(Quartic(0.5)), PLANE)
    np.testing.assert_allclose(got.value, jax.vmap(Quartic(0.5).gradient)(PLANE))
    np.testing.assert_array_equal(got.stderr, 0)
    assert np.all(np.asarray(got.trusted))
    assert np.all(np.isnan(got.density))


# ---------------------------------------------------------------- bad input


def test_a_field_asks_for_hessians(first):
    without = eqx.tree_at(lambda s: s.hessian, first, None)
    for build in (MalliavinField, lambda samples: MalliavinField(samples, Laplace(0.5), Quadratic())):
        with pytest.raises(ValueError, match=r"MalliavinField needs Hessians, and samples.hessian is None"):
            build(without)
    assert isinstance(mj.short_localizer(take(without, 0, 200)), Laplace)


@pytest.mark.usefixtures("no_type_checks")
def test_bad_input(first, plane_bank):
    samples = first
    for word in ("automatic", "Laplace"):
        with pytest.raises(ValueError, match=rf"localizer must be 'auto' or a localizer, got '{word}'"):
            MalliavinField(samples, word)
    with pytest.raises(
        ValueError, match=r"control must be 'auto', 'spline', 'polynomial', None or a potential, got 'none'"
    ):
        MalliavinField(samples, Laplace(0.3), "none")
    with pytest.raises(ValueError, match=r"at least 2 episodes, got 1"):
        MalliavinField(take(samples, 0, 1))
    for name in ("weight", "gradient"):
        where = int(np.argmax(np.asarray(samples.observed)[:, 0]))
        broken = eqx.tree_at(
            lambda s, name=name: getattr(s, name), samples, getattr(samples, name).at[where].set(jnp.nan)
        )
        with pytest.raises(
            ValueError, match=rf"samples.{name} must be finite where observed; first bad value at episode {where}"
        ):
            MalliavinField(broken)
    field = MalliavinField(samples, Laplace(0.3), None)
    for alpha in (jnp.zeros(2), jnp.zeros((3, 1))):
        with pytest.raises(ValueError, match=r"alpha must have shape \(1,\) for axes \(d,\), got"):
            field(alpha)
    with pytest.raises(ValueError, match=r"is for one dimension, got d = 2"):
        MalliavinField(take(plane_bank, 0, PER_SET), Laplace(0.3), None)(jnp.zeros(2))
    table = TabulatedField(TrueField(Quartic()), (jnp.linspace(0, 1, 3),))
    with pytest.raises(ValueError, match=r"alpha must have shape \(1,\) for axes \(d,\), got \(2,\)"):
        table(jnp.zeros(2))
