"""The ladder of what is observed: what a model stands in for, how right it is, and what is refused."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import malliavin_jax as mj
from malliavin_jax.potentials import Potential, Quartic

SIZE, STEPS, NOISE = 0.02, 30, 1.0
SETTINGS = {"step_size": SIZE, "steps": [8, 15, 22, 29]}
ALPHAS = np.linspace(-1, 1, 7)[:, None]
RUNGS = ("hessians", "gradients", "positions")


def coupled(x):
    """Gradient and Hessian of x⁴/4 + |x|²/2, summed, plus .8 x_0 x_1 where there is an x_1."""
    d = x.shape[-1]
    mixed = 0.8 * (np.ones((d, d)) - np.eye(d))
    return x**3 + x + x @ mixed, (3 * x**2 + 1)[..., None] * np.eye(d) + mixed


def log(seed, episodes, d=1, noise=NOISE):
    """Episodes of a learner with noisy gradients: x, gradient and Hessian of each row."""
    rng = np.random.default_rng(seed)
    rows = [rng.normal(size=(episodes, d))]
    used, curved = [], []
    for _ in range(STEPS + 1):
        g, h = coupled(rows[-1])
        used.append(g + noise * rng.normal(size=g.shape))
        curved.append(h)
        rows.append(rows[-1] - SIZE * used[-1] + np.sqrt(2 * SIZE) * rng.normal(size=g.shape))
    return np.stack(rows[:-1], 1), np.stack(used, 1), np.stack(curved, 1)


def on(rung, x, gradient, hessian):
    """What is left of a log on a rung."""
    if rung == "diagonals":
        hessian = np.diagonal(hessian, axis1=-2, axis2=-1)
    parts = {"hessians": (gradient, hessian), "diagonals": (gradient, hessian), "gradients": (gradient,)}
    return (x, *parts.get(rung, ()))


@jax.jit
def at(field, alphas):
    return jax.vmap(field)(alphas)


@pytest.fixture(scope="module")
def sets():
    """For each rung, estimates and truths of several data sets, and one of the samples."""
    found = {}
    for rung in RUNGS:
        made = [mj.samples_from_paths(*on(rung, *log(seed, 1000)), **SETTINGS, model="spline") for seed in range(12)]
        fields = [mj.MalliavinField(samples) for samples in made]
        found[rung] = made, fields, [at(field, jnp.asarray(ALPHAS)) for field in fields]
    return found


@pytest.mark.parametrize("rung", RUNGS)
def test_every_rung_estimates_within_its_error_bars(sets, rung):
    """Errors along the grid are few numbers a data set: of 12 sets, 84 intervals of 95 %, some 75 or more must hold."""
    made, fields, got = sets[rung]
    assert {samples.rung for samples in made} == {field.correction.rung for field in fields} == {rung}
    off = np.asarray([one.value for one in got])[..., 0] - coupled(ALPHAS)[0][:, 0]
    stderr = np.asarray([one.stderr for one in got])[..., 0]
    assert np.all(np.isfinite(stderr))
    assert np.mean(np.abs(off) < 1.96 * stderr) > 0.87
    assert np.all(np.abs(off) < 5 * stderr)
    mean, spread = off.mean(0), off.std(0, ddof=1) / np.sqrt(len(off))
    assert np.all(np.abs(mean) < 4 * np.hypot(spread, 0.2 * stderr.mean(0)))
    assert 0.5 < np.sqrt(np.mean(off**2)) / np.mean(stderr) < 1.6


def test_what_a_rung_costs(sets):
    """The mean of the noise at all 30 000 points, then a fit without Hessians, then one to moves of noise 10."""
    rmse = {rung: np.sqrt(np.mean([np.mean(one.stderr**2) for one in sets[rung][2]])) for rung in RUNGS}
    assert 0.95 * NOISE / np.sqrt(1000 * (STEPS + 1)) < rmse["hessians"] < rmse["gradients"] < rmse["positions"]
    assert rmse["gradients"] < 10 * rmse["hessians"]  # as many numbers are estimated, in place of one
    assert rmse["positions"] < 20 * rmse["gradients"]  # noise is 10 times as large


@pytest.mark.parametrize("rung", ["gradients", "positions"])
def test_weights_of_a_good_model_integrate_by_parts(sets, rung):
    """E[φ'(X)] = E[φ(X) S] for φ = tanh, over all sets; S from the model of the other half of the episodes."""
    gaps = [1 / np.cosh(np.asarray(s.x)) ** 2 - np.tanh(np.asarray(s.x)) * np.asarray(s.weight) for s in sets[rung][0]]
    per_episode = np.concatenate(gaps).mean((1, 2))
    assert abs(per_episode.mean()) < 4 * per_episode.std() / np.sqrt(len(per_episode))


def test_an_episode_has_no_say_in_its_own_hessians():
    x, gradient, _ = log(3, 40)
    one = mj.samples_from_paths(x, gradient, **SETTINGS)
    moved = gradient.copy()
    moved[0] += 5.0
    two = mj.samples_from_paths(x, moved, **SETTINGS)
    change = np.abs(np.asarray(one.hessian - two.hessian)).max((1, 2, 3))
    # Smoothing and noise are estimated from all, which moves every model a little; the odd ones' model saw the change.
    assert np.median(change[1::2]) > 5 * change[::2].max()


def test_moves_are_gradients_of_positions_alone():
    x = log(4, 60, noise=0.0)[0]
    samples = mj.samples_from_paths(x, **SETTINGS)
    rows = SETTINGS["steps"]
    np.testing.assert_allclose(samples.gradient, -(x[:, 1:] - x[:, :-1])[:, rows] / SIZE, rtol=1e-9)
    last = mj.samples_from_paths(x, step_size=SIZE, steps=[STEPS - 1, STEPS])
    assert np.asarray(last.observed).tolist() == [[True, False]] * 60  # the last row has no move


def test_a_model_of_the_users_is_taken_as_it_is():
    x, gradient, hessian = log(5, 300)
    truth = Quartic()
    whole = mj.samples_from_paths(x, gradient, hessian, **SETTINGS)
    given = mj.samples_from_paths(x, gradient, model=truth, **SETTINGS)
    np.testing.assert_allclose(given.hessian, whole.hessian, rtol=1e-12)
    np.testing.assert_allclose(given.weight, whole.weight, rtol=1e-10, atol=1e-12)
    exact = log(5, 300, noise=0.0)  # the model's gradients tell the noise of positions alone
    free, whole = (
        mj.samples_from_paths(*parts, scheme=mj.Adapted(2.0), **SETTINGS, **more)
        for parts, more in ((exact[:1], {"model": truth}), (exact, {}))
    )
    np.testing.assert_allclose(free.weight, whole.weight, rtol=1e-9, atol=1e-9)
    assert free.rung == "positions"
    field = mj.MalliavinField(given)
    assert (field.correction.model, field.correction.rung) == ("given", "gradients")
    got = at(field, jnp.asarray(ALPHAS))
    assert np.all(np.abs(got.value - coupled(ALPHAS)[0]) < 4 * got.stderr)


# Recordings.


def test_a_field_of_a_recording_checks_it_first():
    x, gradient, _ = log(8, 500)
    settings = {"step_size": SIZE, "inverse_temperature": 1.0}
    field = mj.MalliavinField(mj.Recording(x, gradient, **settings))
    got = at(field, jnp.asarray(ALPHAS))
    assert np.all(np.abs(got.value - coupled(ALPHAS)[0]) < 4 * got.stderr)
    flipped = mj.Recording(x, -gradient, **settings)
    with pytest.raises(ValueError, match=r"the recording does not fit its learner: .*wrong sign"):
        mj.MalliavinField(flipped)
    with pytest.warns(RuntimeWarning, match="wrong sign"):
        mj.MalliavinField(flipped, check="warn")


@pytest.mark.usefixtures("no_type_checks")
def test_paths_are_no_samples():
    with pytest.raises(ValueError, match="samples must be Samples or a Recording, got an array of shape"):
        mj.MalliavinField(log(8, 5)[0])


def test_pieces_of_one_chain_are_halved_by_blocks():
    """Blocks of four pieces: their Hessians come from the model of the other blocks, and the field finds them so."""
    x, gradient, _ = log(9, 64)
    recording = mj.Recording(x, gradient, step_size=SIZE, inverse_temperature=1.0, block_size=4)
    samples = recording.samples(steps=[10, 20], scheme=mj.Adapted(2.0))
    assert (samples.num_episodes, samples.num_times) == (16, 8)
    mj.MalliavinField(samples)
    halves = samples.completion.models.halves
    own = jax.vmap(jax.vmap(halves[1].hessian))(jnp.asarray(x[:4, [10, 20]])).reshape(8, 1, 1)
    np.testing.assert_allclose(samples.hessian[0], own, rtol=1e-9)
    parts = list(recording.chunks(24, steps=[10, 20], scheme=mj.Adapted(2.0)))
    np.testing.assert_allclose(np.concatenate([part.hessian for part in parts]), samples.hessian, rtol=1e-9)


# In the plane.


@pytest.fixture(scope="module")
def plane():
    return log(6, 400, d=2)


def test_diagonals_are_completed_and_not_by_zeros(plane):
    samples = {
        rung: mj.samples_from_paths(*on(rung, *plane), **SETTINGS, model="spline") for rung in ("hessians", "diagonals")
    }
    full, completed = samples["hessians"], samples["diagonals"]
    np.testing.assert_array_equal(np.diagonal(completed.hessian, 0, 2, 3), np.diagonal(full.hessian, 0, 2, 3))
    beside = np.asarray(completed.hessian)[..., 0, 1]
    assert np.sqrt(np.mean((beside - 0.8) ** 2)) < 0.1  # of .8
    assert np.sqrt(np.mean(np.square(completed.weight - full.weight))) < 0.1 * np.std(full.weight)
    fields = {rung: mj.MalliavinField(one) for rung, one in samples.items()}
    alphas = jnp.asarray([[0.5, 0.0], [-0.3, 0.6], [0.0, 0.0]])
    for rung, field in fields.items():
        got = at(field, alphas)
        assert field.correction.rung == rung
        assert np.all(np.abs(got.value - coupled(np.asarray(alphas))[0]) < 4 * got.stderr)
    assert "beside the diagonals" in str(fields["diagonals"].correction)


def test_samples_in_another_order_are_refused(plane):
    samples = mj.samples_from_paths(*on("gradients", *plane), **SETTINGS)
    shifted = jax.tree.map(lambda leaf: leaf[1:], samples)
    with pytest.raises(ValueError, match="samples must hold the episodes they were made of, in their order"):
        mj.MalliavinField(shifted)


def test_chunks_hold_the_same_numbers(plane):
    recording = mj.Recording(*on("gradients", *plane), step_size=SIZE, inverse_temperature=1.0)
    scheme = mj.Adapted(2.0)
    whole = recording.samples(steps=[10, 20], scheme=scheme)
    parts = list(recording.chunks(133, steps=[10, 20], scheme=scheme))
    for name in ("hessian", "weight"):
        np.testing.assert_allclose(np.concatenate([getattr(p, name) for p in parts]), getattr(whole, name), rtol=1e-9)


# A model that is wrong.


def test_a_wrong_model_is_found_without_hessians():
    """A mesh of 4 cells cannot hold these ripples; a narrow kernel average of its residuals tells."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2000, STEPS + 1, 1))
    gradient = x + np.cos(6 * x) + 0.5 * rng.normal(size=x.shape)
    samples = mj.samples_from_paths(x, gradient, scheme=mj.Adapted(1.0), **SETTINGS)
    right = mj.MalliavinField(samples)
    assert right.correction.kind == "none"
    guess = Potential(lambda x: 0.5 * jnp.sum(x**2), lambda x: x, lambda x: jnp.eye(1, dtype=x.dtype))
    assert float(mj.goodness_of_fit(samples, guess).p_value) < 0.001
    assert float(mj.goodness_of_fit(samples, samples.completion.models.whole).p_value) > 0.01
    made = samples.completion.models
    bad = eqx.tree_at(lambda m: m.coefficients, made.whole, 0.9 * made.whole.coefficients)
    samples.completion.__dict__["models"] = made._replace(whole=bad)
    corrected = mj.MalliavinField(samples)
    assert corrected.correction.kind == "kernel"
    off = at(corrected, jnp.asarray(ALPHAS)).value - (ALPHAS + np.cos(6 * ALPHAS))
    wrong = jax.vmap(bad.gradient)(jnp.asarray(ALPHAS)) - (ALPHAS + np.cos(6 * ALPHAS))
    assert np.sqrt(np.mean(off**2)) < 0.7 * np.sqrt(np.mean(wrong**2))


# What is refused.


REFUSED = {
    r"model must be 'spline', a potential or None, got 'x'": lambda x: mj.samples_from_paths(
        x, x, model="x", **SETTINGS
    ),
    r"Hessians must be given in 4 dimensions, or a model of the loss": lambda x: mj.samples_from_paths(
        np.concatenate([x] * 4, -1), np.concatenate([x] * 4, -1), **SETTINGS
    ),
    r"gradient must be given where hessian is": lambda x: mj.samples_from_paths(x, None, x[..., None], **SETTINGS),
    r"needs at least two episodes, with positions that differ along each axis, got 1 ": lambda x: mj.samples_from_paths(
        x[:1], x[:1], **SETTINGS
    ),
    r"control='polynomial' needs observed Hessians": lambda x: mj.MalliavinField(
        mj.samples_from_paths(x, x, **SETTINGS), control="polynomial"
    ),
}


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize("message", REFUSED)
def test_refused(message):
    with pytest.raises(ValueError, match=message):
        REFUSED[message](log(7, 20)[0])
