"""A field that keeps learning: what it remembers, when it forgets, how sure it is, and chains that go on."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from scipy import stats

import malliavin_jax as mj
from malliavin_jax.adaptive.change import tail
from malliavin_jax.adaptive.equations import Mesh, batch_of, episode_scores
from malliavin_jax.adaptive.judge import _parts, _places, no_ring, with_update
from malliavin_jax.fitting import spline_equations, spline_fit
from malliavin_jax.fitting.spline_sums import add_points, no_sums

GRID = jnp.linspace(-1.2, 1.2, 13)
ALPHAS = GRID[:, None]
UPDATES, JUMP = 30, 18


def episodes(key, loss, number=60, times=3, dim=1, noise=1.0, hessian_noise=1.0, dtype=jnp.float64):
    """Points of a normal law with noisy gradients and Hessians; an episode's share a part of their place."""
    keys = jax.random.split(key, 4)
    shape = (number, times, dim)
    x = 0.6 * (jax.random.normal(keys[0], (number, 1, dim), dtype) + jax.random.normal(keys[1], shape, dtype))
    gradient = jax.vmap(jax.vmap(loss.gradient))(x) + noise * jax.random.normal(keys[2], shape, dtype)
    hessian = jax.vmap(jax.vmap(loss.hessian))(x)
    hessian = hessian + hessian_noise * jax.random.normal(keys[3], hessian.shape, dtype)
    return mj.Samples(x, gradient, hessian, jnp.zeros_like(x), jnp.ones(shape[:2], bool))


def well(tilt=0.3):
    return mj.potentials.DoubleWell(tilt=tilt)


def fresh(**settings):
    return mj.AdaptiveField(-2.6, 2.6, intervals=24, **settings)


@eqx.filter_jit
def follow(key, field, tilts):
    """One update for each tilt; the errors and standard errors of the gradient on the way."""

    def update(field, now):
        number, tilt = now
        field = field.update(episodes(jax.random.fold_in(key, number), well(tilt)))
        found = jax.vmap(field)(ALPHAS)
        error = found.value - jax.vmap(well(tilt).gradient)(ALPHAS)
        told = (field.changes, field.changed_at, field.p_values, field.memory, field.fit_p_value)
        return field, (error, found.stderr, *told)

    return lax.scan(update, field, (jnp.arange(len(tilts)), tilts))[1]


@pytest.fixture(scope="module")
def still():
    """Streams of a loss that stands still."""
    tilts = jnp.full(UPDATES, 0.3)
    runs = [follow(jax.random.key(seed), fresh(), tilts) for seed in range(24)]
    return [np.stack(parts) for parts in zip(*runs, strict=True)]


@pytest.fixture(scope="module")
def jumping():
    tilts = jnp.where(jnp.arange(UPDATES) < JUMP, 0.3, -1.2)
    runs = [follow(jax.random.key(100 + seed), fresh(), tilts) for seed in range(6)]
    return [np.stack(parts) for parts in zip(*runs, strict=True)]


@pytest.fixture(scope="module")
def samples():
    return [episodes(jax.random.key(seed), well()) for seed in range(4)]


def together(parts):
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts)


def learned(parts, **settings):
    field = fresh(**settings)
    for part in parts:
        field = field.update(part)
    return field


# --- what is remembered ----------------------------------------------------------------------------------


def test_without_forgetting_updates_are_one_batch_in_any_order(samples):
    fields = [learned(parts, forgetting=1.0) for parts in (samples, samples[::-1], [together(samples)])]
    thetas = [np.asarray(field.reading.theta) for field in fields]
    for theta in thetas[1:]:
        assert np.abs(theta - thetas[0]).max() < 1e-9 * np.abs(thetas[0]).max()
    assert [float(field.effective_episodes) for field in fields] == [240.0] * 3
    auto = learned(samples)  # nothing has changed, so nothing is dropped
    assert np.abs(auto.reading.theta - thetas[0]).max() < 1e-9 * np.abs(thetas[0]).max()


def test_the_fit_is_that_of_the_host(samples):
    """With the same smoothing to rounding; with its own, within a part of the standard error."""
    field, data = learned(samples, forgetting=1.0), together(samples)
    flat = [leaf.reshape(-1, *leaf.shape[2:]) for leaf in (data.x, data.gradient, data.hessian)]
    sums = add_points(no_sums(np.array([-2.6]), np.array([2.6]), (24,)), *flat, jnp.ones(len(flat[0])))
    parts, tuning = spline_equations.equations(sums), field.reading.tuning
    same = spline_fit.Tuning(float(tuning.log_smoothing), 1.0, 1 / float(tuning.ratio))
    theta = spline_fit.refit((24,), parts, same).coefficients
    assert np.abs(field.reading.theta - theta).max() < 1e-6 * np.abs(theta).max()
    own = spline_fit.solve((24,), parts)
    spline = mj.potentials.Spline(jnp.asarray(own.coefficients), jnp.array([-2.6]), jnp.array([2.6]))
    found = jax.vmap(field)(ALPHAS)
    assert np.max(np.abs(found.value - jax.vmap(spline.gradient)(ALPHAS)) / found.stderr) < 0.25


def test_a_given_factor_forgets_and_knows_it(samples):
    field = learned(samples, forgetting=0.5)
    weights = 0.5 ** np.arange(4)
    assert float(field.memory) == weights.sum()
    assert float(field.effective_episodes) == pytest.approx(60 * weights.sum() ** 2 / (weights**2).sum())
    newest = learned(samples, forgetting=0.0)
    alone = learned(samples[-1:], forgetting=0.0)
    np.testing.assert_allclose(newest.reading.theta, alone.reading.theta, rtol=1e-9, atol=1e-12)
    errors = [jax.vmap(f)(ALPHAS).stderr.mean() for f in (learned(samples, forgetting=1.0), field, newest)]
    assert errors[0] < errors[1] < errors[2]


def test_updates_do_not_grow_the_field(samples):
    before, after = fresh(), learned(samples)
    assert jax.tree.structure(before) == jax.tree.structure(after)
    shapes = [[(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(field)] for field in (before, after)]
    assert shapes[0] == shapes[1]


# --- how sure it is, and when it forgets -----------------------------------------------------------------


def test_intervals_cover_on_a_stream_that_stands_still(still):
    error, stderr = (part[:, 4:] for part in still[:2])
    covered = np.mean(np.abs(error) < 1.96 * stderr, (1, 2, 3))  # of each stream: within one, errors are alike
    slack = 4 * covered.std() / np.sqrt(len(covered))
    assert 0.90 - slack < covered.mean() < 0.98 + slack
    z2 = np.mean((error / stderr) ** 2, (1, 2, 3))
    assert abs(z2.mean() - 1) < 4 * z2.std() / np.sqrt(len(z2))
    assert np.sqrt(np.mean(error[:, -1] ** 2)) < 0.6 * np.sqrt(np.mean(error[:, 2] ** 2)), "it keeps learning"


def test_intervals_know_what_a_given_factor_forgets():
    """A filling that forgets with ρ in place of ρ² would make z² 0.6; one that never forgets, far less."""
    runs = [follow(jax.random.key(200 + s), fresh(forgetting=0.7), jnp.full(UPDATES, 0.3))[:2] for s in range(24)]
    z2 = np.asarray([np.mean(np.square(error[8:] / stderr[8:])) for error, stderr in runs])
    assert abs(z2.mean() - 1) < 4 * z2.std() / np.sqrt(len(z2))
    assert 4 * z2.std() / np.sqrt(len(z2)) < 0.35


def test_no_alarm_beyond_the_stated_rate(still):
    """Of a jump and of a drift together."""
    changes, p_values = still[2][:, -1], still[4]
    tests = p_values.shape[0] * p_values.shape[1]
    expected = 0.005 * tests
    assert changes.sum() <= expected + 4 * np.sqrt(expected)
    for level in (0.02, 0.1):  # the newest update against all before: these tests are nearly independent
        rate = np.mean(p_values[:, 3:, 0] < level)
        count = p_values[:, 3:, 0].size
        assert rate < level + 4 * np.sqrt(level / count)
    assert np.mean(p_values[:, 10:, 0] < 0.5) > 0.3, "and are no formality"


def test_a_jump_is_found_at_once_and_only_what_came_since_is_kept(jumping):
    error, stderr, changes, changed_at, _, memory, _ = jumping
    found = changes - changes[:, JUMP - 1 : JUMP]
    assert np.all(found[:, JUMP + 1] == 1)
    assert np.all(np.abs(changed_at[:, JUMP + 1] - JUMP) <= 1)
    # An alarm at the stated rate, before or after, shortens the memory; it must stay as rare as stated.
    quiet = (changes[:, JUMP - 1] == 0) & (changes[:, -1] == 1)
    expected = 0.005 * changes.size
    assert np.sum(changes[:, -1] - 1) <= expected + 4 * np.sqrt(expected)
    assert np.any(quiet)
    assert np.all(memory[quiet, -1] >= UPDATES - JUMP - 1)
    after = error[:, -1] / stderr[:, -1]
    assert np.sqrt(np.mean(after**2)) < 2
    all_past = follow(jax.random.key(100), fresh(forgetting=1.0), jnp.where(jnp.arange(UPDATES) < JUMP, 0.3, -1.2))
    assert np.sqrt(np.mean(error[0, -1] ** 2)) < 0.3 * np.sqrt(np.mean(np.square(all_past[0][-1])))


# --- the judge of the fit ----------------------------------------------------------------------------------


def test_a_right_fit_passes_at_the_level_stated(still):
    """Eight updates apart the rings share no episode; what is left in common is the fit."""
    p = still[6][:, 7::8]
    for level in (0.05, 0.2, 0.5):
        assert np.mean(p < level) < level + 4 * np.sqrt(level * (1 - level) / p.size)
    assert np.mean(p < 0.5) > 0.5 - 4 * np.sqrt(0.25 / p.size), "and it is no formality"


@pytest.mark.parametrize("hessians", [True, False])
def test_a_mesh_too_coarse_is_found_out(hessians):
    """Ripples of wavelength 1.05: six cells of 0.67 cannot hold them, 24 can; no cut between updates disagrees."""
    ripples = mj.Potential(
        lambda x: jnp.sum(x**2 + 0.3 * jnp.sin(6 * x)),
        lambda x: 2 * x + 1.8 * jnp.cos(6 * x),
        lambda x: jnp.diag(2 - 10.8 * jnp.sin(6 * x)),
    )
    learner = mj.ForwardLearner(ripples, mj.initial.Normal(), step_size=0.02, gradient_noise=1.0)
    for seed in range(3):
        coarse, fine = (mj.AdaptiveField(-2.0, 2.0, intervals=n, hessians=hessians) for n in (6, 24))
        for number in range(4):
            key = jax.random.fold_in(jax.random.key(seed), number)
            new = mj.observe(key, learner, num_episodes=100, times=[0.2, 0.4])
            coarse, fine = coarse.update(new), fine.update(new)
        assert float(coarse.fit_p_value) < 1e-3
        assert float(fine.fit_p_value) > 1e-3
        assert int(coarse.changes) == 0


def test_the_ring_serves_every_fit_that_follows(samples):
    """R is linear in θ: what the ring of a fit says of another θ is what is summed there."""
    field = learned(samples)
    mesh, ring = field.mesh, field.ring
    assert np.asarray(ring.episodes).tolist() == [60.0] * 4 + [0.0] * 4
    batch = batch_of(mesh, samples[-1])
    other = field.reading.theta + 0.1 * jnp.sin(jnp.arange(mesh.size))
    again = with_update(no_ring(mesh), mesh, batch, other, episode_scores(mesh, batch, other), jnp.ones(()))
    scale = float(jnp.max(jnp.abs(ring.right[0])))
    np.testing.assert_allclose(again.right[0], ring.right[0], atol=1e-9 * scale)
    np.testing.assert_allclose(again.slope[0], ring.slope[0], atol=1e-9 * scale)


@pytest.mark.parametrize("weights", [[1.0], [1.0, 1.0, 1.0], [3.0, 1.0, 0.3, 0.1], [1.0] + [0.01] * 20])
def test_the_tail_of_a_sum_of_squares(weights):
    draws = np.random.default_rng(0).normal(size=(200_000, len(weights))) ** 2 @ np.asarray(weights)
    for place in np.quantile(draws, [0.5, 0.95, 0.999]):
        exact = np.mean(draws >= place)
        found = float(tail(jnp.diag(jnp.asarray(weights)), jnp.asarray(place)))
        assert abs(found - exact) < 4 * np.sqrt(exact / len(draws)) + 0.12 * exact  # the law is not quite a χ²
    if len(set(weights)) == 1:
        assert float(tail(jnp.diag(jnp.asarray(weights)), jnp.asarray(7.0))) == pytest.approx(
            stats.chi2.sf(7.0, len(weights)), rel=1e-5
        )


# --- bad input -------------------------------------------------------------------------------------------


def test_a_bad_episode_is_refused_and_nothing_is_lost(samples):
    good = samples[1]
    spoiled = eqx.tree_at(lambda s: s.gradient, good, good.gradient.at[7, 1, 0].set(jnp.nan))
    absent = eqx.tree_at(lambda s: s.observed, good, good.observed.at[7].set(False))
    start = learned(samples[:1])
    first, second = start.update(spoiled), start.update(absent)
    assert (int(first.refused), int(second.refused)) == (1, 0)
    np.testing.assert_array_equal(first.reading.theta, second.reading.theta)
    nothing = jax.tree.map(lambda leaf: leaf if leaf.dtype == bool else jnp.full_like(leaf, jnp.inf), good)
    after = first.update(nothing)
    assert int(after.refused) == 1 + good.num_episodes
    same = eqx.tree_at(lambda f: f.refused, after, first.refused)
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(same), jax.tree.leaves(first), strict=True))


def test_mistakes_are_named(samples, no_type_checks):
    for settings, name in (
        (dict(forgetting=1.5), "forgetting"),
        (dict(forgetting="slow"), "forgetting"),
        (dict(false_alarm=0.0), "false_alarm"),
        (dict(intervals=2), "intervals"),
    ):
        with pytest.raises(ValueError, match=name):
            mj.AdaptiveField(-1.0, 1.0, **settings)
    for low, high in ((1.0, -1.0), ([0.0] * 3, [1.0] * 3), (0.0, float("nan"))):
        with pytest.raises(ValueError, match="low"):
            mj.AdaptiveField(low, high)
    bare = eqx.tree_at(lambda s: s.hessian, samples[0], None, is_leaf=lambda leaf: leaf is None)
    with pytest.raises(ValueError, match="hessians=False"):
        fresh().update(bare)
    with pytest.raises(ValueError, match="dimension 1"):
        fresh().update(episodes(jax.random.key(0), well(), dim=2))
    with pytest.raises(ValueError, match="grid"):
        fresh().loss((GRID, GRID))


# --- a field like any other ------------------------------------------------------------------------------


def test_chains_recovery_and_places_without_data(samples):
    field = learned(samples)
    outside = field(jnp.array([9.0]))
    assert not bool(outside.trusted)
    assert np.isinf(outside.stderr[0])
    assert float(outside.value[0]) > 0, "back to the data"
    assert not bool(fresh()(jnp.zeros(1)).trusted)
    chain = mj.passive_langevin(
        jax.random.key(0), field, jnp.zeros((4, 1)), num_steps=50, step_size=0.02, inverse_temperature=1.0
    )
    assert not np.any(chain.diverged)
    own, integrated = field.loss(GRID), mj.loss_from_field(field, GRID)
    truth = np.asarray(jax.vmap(well().value)(ALPHAS))
    lowest = int(np.argmin(own.value))
    assert np.all(np.abs(own.value - integrated.value) < 5e-3)
    assert np.all(own.stderr <= integrated.stderr + 1e-12)
    z = (np.asarray(own.value) - truth + truth[lowest])[np.arange(13) != lowest] / np.asarray(own.stderr)[
        np.arange(13) != lowest
    ]
    assert np.sqrt(np.mean(z**2)) < 2.5
    density = np.asarray(jax.vmap(field)(ALPHAS).density)
    assert np.all(np.abs(density - stats.norm.pdf(np.asarray(GRID), 0, 0.6 * np.sqrt(2))) < 0.25)


def test_a_derivative_of_the_field_is_the_fitted_hessian(samples):
    field, place, step = learned(samples), jnp.array([0.37]), 1e-5
    slope = jax.jacfwd(lambda alpha: field(alpha).value)(place)
    difference = (field(place + step).value - field(place - step).value) / (2 * step)
    np.testing.assert_allclose(slope[0], difference, rtol=1e-6)
    assert abs(float(slope[0, 0]) - float(well().hessian(place)[0, 0])) < 1
    fitted = field.potential()
    np.testing.assert_allclose(fitted.gradient(place), field(place).value, rtol=1e-9)
    np.testing.assert_allclose(fitted.hessian(place), slope, rtol=1e-9)


def test_gradients_alone_are_enough(samples):
    bare = [eqx.tree_at(lambda s: s.hessian, part, None, is_leaf=lambda leaf: leaf is None) for part in samples]
    found = jax.vmap(learned(bare, hessians=False))(ALPHAS)
    z = (found.value - jax.vmap(well().gradient)(ALPHAS)) / found.stderr
    assert np.sqrt(np.mean(np.square(z))) < 2
    assert np.all(found.stderr > jax.vmap(learned(samples))(ALPHAS).stderr), "and Hessians help"


def test_many_fields_at_once(samples):
    both = jax.vmap(lambda part: fresh().update(part))(jax.tree.map(lambda *leaves: jnp.stack(leaves), *samples[:2]))
    alone = learned(samples[1:2])
    np.testing.assert_allclose(both.reading.theta[1], alone.reading.theta, rtol=1e-7, atol=1e-9)


def test_in_a_program_of_float32(samples):
    """Sums and fits are in float64 there too, inside `jit` and `scan`: only the data are rounded."""
    narrow = [jax.tree.map(lambda leaf: leaf if leaf.dtype == bool else leaf.astype(jnp.float32), s) for s in samples]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *narrow)
    alphas = ALPHAS.astype(jnp.float32)
    with jax.enable_x64(False):
        run = jax.jit(lambda field, parts: lax.scan(lambda f, part: (f.update(part), f.memory), field, parts)[0])
        field = run(fresh(), stacked)
        found = jax.jit(jax.vmap(field))(alphas)
    assert found.value.dtype == jnp.float32
    assert field.reading.theta.dtype == jnp.float64
    exact = jax.vmap(learned(samples))(ALPHAS)
    assert np.max(np.abs(np.asarray(found.value) - np.asarray(exact.value)) / np.asarray(exact.stderr)) < 1e-3
    np.testing.assert_allclose(found.stderr, exact.stderr, rtol=1e-3)


def test_two_dimensions():
    loss, low = mj.potentials.Quartic(0.5), np.full(2, -2.6)
    field = mj.AdaptiveField(low, -low, intervals=6)
    for seed in range(2):
        field = field.update(episodes(jax.random.key(seed), loss, number=150, dim=2))
    axis = jnp.linspace(-0.8, 0.8, 5)
    points = jnp.stack(jnp.meshgrid(axis, axis, indexing="ij"), -1).reshape(-1, 2)
    found = jax.vmap(field)(points)
    assert np.all(found.trusted)
    z = (found.value - jax.vmap(loss.gradient)(points)) / found.stderr
    assert np.sqrt(np.mean(np.square(z))) < 2
    assert field.loss((axis, axis)).value.shape == (5, 5)
    assert int(field.changes) == 0
    assert not bool(field(jnp.array([0.0, 2.7])).trusted)


def test_the_judge_estimates_density_times_what_the_fit_leaves():
    """At x ~ N(0, 1), for which x is an exact weight, and with nothing fitted: p(α) ∇L(α), the core's bias aside."""
    rng = np.random.default_rng(5)
    x = jnp.asarray(rng.normal(size=(20_000, 1, 1)))
    seen = jnp.ones(x.shape[:2], bool)
    samples = mj.Samples(x, x + x**3, (1 + 3 * x**2)[..., None], x, seen)
    mesh = Mesh(jnp.array([-6.0]), jnp.array([6.0]), (12,), True)
    unit = 3.0  # the box is 12 wide, and 4 units wide
    _, _, part = _parts(mesh, batch_of(mesh, samples), jnp.zeros(mesh.size))
    places = -6.0 + unit * _places(mesh)[:, 0]
    exact = unit**2 * stats.norm.pdf(places) * (places + places**3)
    found, error = np.mean(part, 0), np.std(part, 0) / np.sqrt(len(part))
    bias = 0.2**4 / 4 * unit**2 * 6  # e⁴/4 times the fourth derivative of p ∇L, e = 1/15 units, which is below 6
    assert np.all(np.abs(found - exact) < 4 * error + bias)
    assert np.max(4 * error + bias) < 0.2 * np.max(np.abs(exact)), "and says something"
