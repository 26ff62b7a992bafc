"""What a new user tries first: inputs that just work, and sentences that name the argument and the remedy."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import malliavin_jax as mj

LOSS = mj.potentials.Quartic()
LEARNER = mj.ForwardLearner(LOSS, mj.initial.Normal(), step_size=0.01, gradient_noise=0.5)
KEY = jax.random.key(0)
STEPS = {"num_steps": 10, "step_size": 0.1, "inverse_temperature": 1.0}


@pytest.fixture(scope="module")
def samples():
    return mj.observe(KEY, LEARNER, num_episodes=400, times=[0.4, 0.8])


@pytest.fixture(scope="module")
def paths():
    return jax.jit(jax.vmap(lambda key: mj.simulate(key, LEARNER, 80)))(jax.random.split(KEY, 120))


def recorded(x, gradient, **more):
    return mj.Recording(x, gradient, step_size=0.01, inverse_temperature=1.0, **more)


FIELDS = {
    "malliavin": mj.MalliavinField,
    "full": lambda samples: mj.MalliavinField(samples, mj.Laplace(0.5), correction="full"),
    "kernel": lambda samples: mj.kernel.NadarayaWatson(samples, 0.2),
    "polynomial": lambda samples: mj.kernel.LocalPolynomial(samples, 0.4, degree=1),
    "table": lambda samples: mj.TabulatedField(mj.TrueField(LOSS), (jnp.linspace(-2.0, 2.0, 41),)),
    "true": lambda samples: mj.TrueField(LOSS),
    "adaptive": lambda samples: mj.AdaptiveField(-3.0, 3.0).update(samples),
}


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_takes_what_looks_like_a_point(name, samples):
    field = FIELDS[name](samples)
    expected = field(jnp.array([0.5])).value
    for half in ([0.5], (0.5,), 0.5, np.array([0.5]), np.float64(0.5), jnp.array(0.5)):
        np.testing.assert_array_equal(field(half).value, expected)
    for one in (1, [1], jnp.array([1]), np.array([1], np.int32)):
        np.testing.assert_array_equal(field(one).value, field(jnp.array([1.0])).value)
    np.testing.assert_allclose(jax.jit(field)(jnp.array([0.5])).value, expected, rtol=1e-10)
    assert jax.vmap(field)(jnp.array([0.5, 1.0])).value.shape == (2, 1)
    assert field in {field}
    assert field == field
    assert field != FIELDS[name](samples)


def in_place_of_samples(paths):
    recording = recorded(paths.x, paths.gradient, hessian=paths.hessian)
    localizer, half = mj.Laplace(0.3), jnp.array([0.5])
    made = r"samples must be Samples, got a Recording: recording.samples() makes them"
    weigh = "samples_from_paths(paths.x, paths.gradient, paths.hessian, step_size=…, times=…) makes them"
    return [
        (made, lambda: mj.kernel.NadarayaWatson(recording, 0.1)),
        (made, lambda: mj.goodness_of_fit(recording, LOSS)),
        (made, lambda: mj.density(recording, half, localizer)),
        (made, lambda: mj.score(recording, half, 0.3)),
        (made, lambda: mj.short_localizer(recording)),
        (f"samples must be Samples, got a Path: {weigh}", lambda: mj.kernel.LocalPolynomial(paths, 0.1)),
        (f"samples must be Samples or a Recording, got a Path: {weigh}", lambda: mj.MalliavinField(paths)),
        ("samples must be Samples or a Recording, got an array of shape", lambda: mj.MalliavinField(paths.x)),
    ]


def test_what_are_no_samples_is_told_how_to_become_some(paths, no_type_checks):
    for message, call in in_place_of_samples(paths):
        with pytest.raises(ValueError, match=re.escape(message)):
            call()


MISTAKES = {
    "localizer must be a localizer, got 0.3: give Laplace(0.3), or Gaussian(0.3, core=…) beyond one dimension": (
        lambda samples: mj.MalliavinField(samples, 0.3),
        lambda samples: mj.density(samples, 0.5, 0.3),
        lambda samples: mj.FreshField(LEARNER, 0.3, num_episodes=100, time=0.8),
        lambda samples: mj.Accumulator(jnp.zeros((2, 1)), 0.3),
    ),
    "localizer must be a localizer, got the class Laplace": (lambda samples: mj.MalliavinField(samples, mj.Laplace),),
    "control must be a potential, 'auto', 'spline', 'polynomial' or None, got a function: wrap": (
        lambda samples: mj.MalliavinField(samples, control=lambda x: x),
        lambda samples: mj.MalliavinField(samples, control=LOSS.gradient),
    ),
    "control must be a potential or None, got a function": (
        lambda samples: mj.Accumulator(jnp.zeros((2, 1)), mj.Laplace(0.3), control=lambda x: x),
    ),
    "potential must be a potential, got a function: wrap functions as Potential(value, gradient, hessian)": (
        lambda samples: mj.ForwardLearner(lambda x: x @ x, mj.initial.Normal(), step_size=0.01),
        lambda samples: mj.goodness_of_fit(samples, lambda x: x @ x),
        lambda samples: mj.TrueField(lambda x: x @ x),
    ),
    "potential must be a potential, got the class Quartic": (
        lambda samples: mj.ForwardLearner(mj.potentials.Quartic, mj.initial.Normal(), step_size=0.01),
    ),
    "got an array of shape (1,): initial.Points([x]) starts there, initial.Normal(x, scale) around it": (
        lambda samples: mj.ForwardLearner(LOSS, jnp.zeros(1), step_size=0.01),
    ),
    "initial must be a law, a function key ↦ X_0 of shape (d,), got the class Normal": (
        lambda samples: mj.ForwardLearner(LOSS, mj.initial.Normal, step_size=0.01),
    ),
    "step_size must be a number, got '0.01'": (
        lambda samples: mj.ForwardLearner(LOSS, mj.initial.Normal(), step_size="0.01"),
    ),
    "key must be a random key, got the number 7: give jax.random.key(7)": (
        lambda samples: mj.observe(7, LEARNER, num_episodes=10, times=[0.8]),
        lambda samples: mj.simulate(7, LEARNER, 10),
        lambda samples: mj.passive_langevin(7, mj.TrueField(LOSS), jnp.zeros((2, 1)), **STEPS),
        lambda samples: mj.FreshField(LEARNER, mj.Laplace(0.3), num_episodes=100, time=0.8)(0.5, key=7),
    ),
    "key must be one random key, got keys of shape (3,): map over them with jax.vmap": (
        lambda samples: mj.observe(jax.random.split(KEY, 3), LEARNER, num_episodes=10, times=[0.8]),
    ),
    "learner must be a ForwardLearner, got a Quartic": (
        lambda samples: mj.observe(KEY, LOSS, num_episodes=10, times=[0.8]),
    ),
    "scheme must be a weight scheme, such as Adapted(4.0), got the class Canonical": (
        lambda samples: mj.observe(KEY, LEARNER, num_episodes=10, times=[0.8], scheme=mj.Canonical),
    ),
    "field must be a gradient field, got a Quartic: TrueField(potential) is one": (
        lambda samples: mj.passive_langevin(KEY, LOSS, jnp.zeros((2, 1)), **STEPS),
    ),
    "field must be a gradient field, got a Samples: MalliavinField(samples) is one": (
        lambda samples: mj.loss_from_field(samples, jnp.linspace(-1.0, 1.0, 9)),
    ),
    "initial must have shape (chains, d), got (1,): one row for each chain": (
        lambda samples: mj.passive_langevin(KEY, mj.TrueField(LOSS), jnp.zeros(1), **STEPS),
    ),
    "alpha must have shape (1,) for axes (d,), got (2, 1): for many points at once, jax.vmap(field)(alphas)": (
        lambda samples: mj.kernel.NadarayaWatson(samples, 0.1)(jnp.zeros((2, 1))),
    ),
    "alpha must have shape (1,) for axes (d,), got (2,): for many points at once, jax.vmap(field)(alphas[:, None])": (
        lambda samples: mj.kernel.NadarayaWatson(samples, 0.1)(jnp.zeros(2)),
    ),
    "grid must have an axis for each dimension of the field, got 2: alpha must have shape (1,)": (
        lambda samples: mj.loss_from_field(mj.MalliavinField(samples), (jnp.linspace(-1.0, 1.0, 5),) * 2),
    ),
    "recording must be a Recording, got a Samples: Recording(x, gradient, hessian, step_size=": (
        lambda samples: mj.consistency(samples),
    ),
    "samples[…] takes episodes, got 'x': the arrays are samples.x": (lambda samples: samples["x"],),
    "alpha must be an array of numbers, got str": (lambda samples: mj.kernel.NadarayaWatson(samples, 0.1)("here"),),
}


@pytest.mark.parametrize("message", MISTAKES)
def test_a_mistake_is_named_with_its_remedy(message, samples, no_type_checks):
    for call in MISTAKES[message]:
        with pytest.raises(ValueError, match=re.escape(message)):
            call(samples)


def test_a_chain_in_place_of_its_positions(no_type_checks):
    chain = mj.passive_langevin(KEY, mj.TrueField(LOSS), jnp.zeros((2, 1)), **STEPS)
    with pytest.raises(ValueError, match=r"positions must be an array, got a Chain: pass chain\.positions"):
        mj.loss_from_samples(chain, inverse_temperature=1.0, bins=4)


SHAPES = {
    "x must have shape (episodes, points, d), none of them 0, got (120, 81): in one dimension add the last axis, "
    "x[..., None]": lambda p: recorded(p.x[..., 0], p.gradient[..., 0]),
    "gradient must have shape (episodes, points, d), that of x, (120, 81, 1), got (120, 81): in one dimension add the "
    "last axis, gradient[..., None]": lambda p: recorded(p.x, p.gradient[..., 0]),
    "got (81, 120, 1): its first two axes are swapped, pass gradient.swapaxes(0, 1)": lambda p: recorded(
        p.x, p.gradient.swapaxes(0, 1)
    ),
    "got (1, 120, 81): d stands first, pass np.moveaxis(gradient, 0, -1)": lambda p: recorded(
        p.x, jnp.moveaxis(p.gradient, -1, 0)
    ),
    "got (120, 80, 1): row k must hold the gradient at row k of x; the last position has none, pass x[:, :-1]": (
        lambda p: recorded(p.x, p.gradient[:, :-1])
    ),
    "hessian must have shape (episodes, points, d, d), here (120, 81, 1, 1), or (episodes, points, d), here (120, 81, "
    "1), for its diagonal, got (120, 81): in one dimension add the last axis, hessian[..., None]": lambda p: recorded(
        p.x, p.gradient, hessian=p.hessian[..., 0, 0]
    ),
}


@pytest.mark.parametrize("message", SHAPES)
def test_shapes_name_their_axes(message, paths, no_type_checks):
    with pytest.raises(ValueError, match=re.escape(message)):
        SHAPES[message](paths)


def test_one_long_log_is_told_how_it_is_cut(paths, no_type_checks):
    rows = np.zeros((5000, 2))
    with pytest.raises(ValueError, match=r"one log of 5000 rows is cut .* split_log.* piece_steps=… \(--piece-steps\)"):
        recorded(rows, rows)


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize(
    ("order", "remedy"),
    [
        ((1, 0, 2), "seems to have shape (points, episodes, d), .* pass array.swapaxes(0, 1) of each array"),
        ((2, 0, 1), "seems to have shape (d, episodes, points), .* pass np.moveaxis(array, 0, -1) of each array"),
    ],
)
def test_axes_in_another_order_are_found_by_the_check(order, remedy, gradients, paths):
    x, gradient = (np.transpose(array, order) for array in (paths.x, paths.gradient))
    recording = recorded(x, gradient if gradients else None)
    with pytest.raises(ValueError, match=re.escape(remedy).replace(r"\.\*", ".*")):
        mj.recording.checked(recording)
    mj.recording.checked(recorded(paths.x, paths.gradient if gradients else None))  # and in theirs nothing is
