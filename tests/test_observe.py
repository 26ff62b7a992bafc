"""`observe` is `simulate` and `weigh` without the storage, and recorded arrays give the same samples."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import malliavin_jax as mj

EPISODES = 12


def make(dim=1, dtype=jnp.float64, **settings):
    def initial(key):
        return jax.random.normal(key, (dim,), dtype)

    return mj.ForwardLearner(mj.potentials.Quartic(0.5 if dim > 1 else 0.0), initial, step_size=0.01, **settings)


def paths_of(key, learner, steps):
    keys = jax.random.split(key, EPISODES)
    return jax.jit(jax.vmap(lambda k: mj.simulate(k, learner, steps)))(keys)


def check_same(samples, paths, scheme, steps):
    weights = jax.jit(jax.vmap(lambda path: mj.weigh(path, scheme)))(paths)
    at = np.asarray(steps)
    # XLA contracts a·b + c differently in the two programs: equal up to the rounding of some hundred operations.
    rounding = 500 * float(jnp.finfo(samples.x.dtype).eps)
    for got, want in (
        (samples.x, paths.x[:, at]),
        (samples.gradient, paths.gradient[:, at]),
        (samples.hessian, paths.hessian[:, at]),
        (samples.weight, weights[:, at]),
    ):
        np.testing.assert_allclose(got, want, rtol=rounding, atol=rounding * 10)


@pytest.mark.parametrize(
    ("dim", "steps"),
    [(1, (20,)), (1, (3, 6, 9, 20)), (1, (1, 2, 5, 19)), (1, (1, 2, 3))],
    ids=str,
)
def test_observe_is_simulate_and_weigh_key_for_key(dim, steps):
    key, learner = jax.random.key(7), make(dim, gradient_noise=0.7)
    scheme = mj.Canonical() if dim < 6 else mj.Windowed(3.0)
    times = [0.01 * k for k in steps]
    samples = mj.observe(key, learner, num_episodes=EPISODES, times=times, scheme=scheme)
    check_same(samples, paths_of(key, learner, 20), scheme, steps)


def test_a_learner_without_noise_takes_another_road_to_the_same_samples(key):
    learner = make(1)
    samples = mj.observe(key, learner, num_episodes=EPISODES, times=[0.07, 0.14, 0.2])
    check_same(samples, paths_of(key, learner, 20), mj.Canonical(), (7, 14, 20))


def test_the_default_beyond_five_dimensions_is_a_tuned_window(key):
    samples = mj.observe(key, make(6), num_episodes=400, times=[0.3])
    moments = []
    for rate in (0.25, 16.0):
        other = mj.observe(key, make(6), num_episodes=400, times=[0.3], scheme=mj.Windowed(rate))
        moments.append(float(jnp.mean(jnp.sum(other.weight**2, -1))))
    assert float(jnp.mean(jnp.sum(samples.weight**2, -1))) <= 1.05 * min(moments)


def test_a_sweep_over_parameters_compiles_once(key):
    traces = []

    def gradient(x):
        traces.append(1)
        return x

    potential = mj.Potential(lambda x: jnp.sum(x**2) / 2, gradient, lambda x: jnp.eye(1, dtype=x.dtype))
    initial = lambda k: jax.random.normal(k, (1,))  # noqa: E731
    counts = []
    for step_size, beta in ((0.01, 1.0), (0.02, 1.5), (0.005, 0.7)):
        before = len(traces)
        learner = mj.ForwardLearner(potential, initial, step_size=step_size, inverse_temperature=beta)
        mj.observe(key, learner, num_episodes=4, times=[10 * step_size])
        counts.append(len(traces) - before)
    # Later calls only look at shapes (one abstract evaluation); the simulation itself is traced in the first.
    assert counts[1:] == [1, 1]
    assert counts[0] > 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"times": [0.205]}, "times must be positive multiples of step_size=0.01, got 0.205"),
        ({"times": [-0.1]}, "times .* got -0.1"),
        ({"times": [0.0]}, "times .* got 0.0"),
        ({"times": [0.2, 0.1]}, "times must be strictly increasing"),
        ({"times": []}, "times must be a non-empty list"),
        ({"num_episodes": 0}, "num_episodes must be a whole number, at least 1, got 0"),
        ({"num_episodes": 2.5}, "num_episodes"),
    ],
)
def test_bad_calls_name_the_argument(key, change, message):
    call = {"num_episodes": 4, "times": [0.2], **change}
    with pytest.raises((ValueError, TypeError), match=None if "num_episodes" in change else message):
        mj.observe(key, make(1), **call)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": np.zeros((3, 5))}, "x must have shape"),
        ({"gradient": np.zeros((3, 5, 2))}, "gradient must have shape"),
        ({"hessian": np.zeros((3, 5, 1))}, "hessian must have shape"),
        ({"step_size": 0.0}, "step_size must be positive and finite, got 0.0"),
        ({"step_size": -0.1}, "step_size must be positive and finite, got -0.1"),
        ({"inverse_temperature": 0.0}, "inverse_temperature must be positive"),
        ({"times": [0.09]}, "times must lie inside the recorded paths"),
        ({"lengths": np.array([4, 4])}, "lengths must have shape"),
        ({"lengths": np.array([4, 4, 9])}, "lengths must be between 0 and 4"),
        ({"lengths": np.array([4.0, 4.0, 4.0])}, "lengths must be whole numbers"),
        ({"x": np.array(["a"])}, "x must"),
    ],
)
def test_bad_arrays_name_the_argument(change, message):
    arrays = {"x": np.zeros((3, 5, 1)), "gradient": np.zeros((3, 5, 1)), "hessian": np.ones((3, 5, 1, 1))}
    call = {**arrays, "step_size": 0.01, "times": [0.02], **change}
    with pytest.raises(ValueError, match=message):
        mj.samples_from_paths(**call)


@pytest.mark.parametrize("name", ["x", "gradient", "hessian"])
def test_nan_in_recorded_arrays_is_found(name):
    arrays = {"x": np.zeros((3, 5, 1)), "gradient": np.zeros((3, 5, 1)), "hessian": np.ones((3, 5, 1, 1))}
    arrays[name][1, 3] = np.nan
    with pytest.raises(ValueError, match=rf"{name} must be finite.*episode 1, step 3"):
        mj.samples_from_paths(**arrays, step_size=0.01, times=[0.02])
