"""The float32 leg: the dtype of the initial law is the dtype of everything, and rounding stays rounding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import malliavin_jax as mj


def initial(key):
    return jax.random.normal(key, (2,), jnp.float32)


@pytest.mark.parametrize("scheme", [mj.Canonical(), mj.Windowed(3.0), mj.Reciprocal()], ids=lambda s: type(s).__name__)
def test_weights_of_a_float32_path_are_those_of_float64_up_to_rounding(key, scheme):
    learner = mj.ForwardLearner(mj.potentials.Quartic(0.5), initial, step_size=0.01, gradient_noise=0.5)
    paths = jax.vmap(lambda k: mj.simulate(k, learner, 40))(jax.random.split(key, 50))
    assert {leaf.dtype for leaf in jax.tree.leaves(paths)} == {jnp.dtype("float32"), jnp.dtype("int32")}
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float64) if leaf.dtype == jnp.float32 else leaf, paths)
    weigh = jax.jit(jax.vmap(lambda path: mj.weigh(path, scheme)))
    narrow_weights, wide_weights = np.asarray(weigh(paths)), np.asarray(weigh(wide))
    assert narrow_weights.dtype == np.float32
    # Each step reads its noise off positions of size ~ 2 rounded at 2⁻²⁴ and divides by σ² = 0.02: an error of ~ 1e-5 a
    # step, random over 40 steps, and as large as the inverse Jacobian makes it.
    size = 1 + np.abs(wide_weights).max()
    assert np.abs(narrow_weights - wide_weights).max() < 3e-4 * size


def test_everything_downstream_stays_float32(key):
    def one(key):
        return jax.random.normal(key, (1,), jnp.float32)

    learner = mj.ForwardLearner(mj.potentials.Quartic(), one, step_size=0.01, gradient_noise=0.5)
    samples = mj.observe(key, learner, num_episodes=500, times=[0.4, 0.8])
    assert {leaf.dtype for leaf in jax.tree.leaves(samples)} == {jnp.dtype("float32"), jnp.dtype("bool")}
    field = mj.MalliavinField(samples, mj.Laplace(0.4), control=None)
    estimate = jax.vmap(field)(jnp.array([[0.3]], jnp.float32))
    floats = {leaf.dtype for leaf in jax.tree.leaves(estimate) if leaf.dtype != bool}
    assert floats == {jnp.dtype("float32")}
    assert abs(float(estimate.value[0, 0]) - (0.3**3 + 0.3)) < 5 * float(estimate.stderr[0, 0])


def test_float64_logs_are_taken_without_a_warning_where_jax_counts_in_float32():
    """As on a user's machine; warnings are errors here."""
    rng = np.random.default_rng(0)
    x = np.cumsum(rng.normal(size=(60, 11, 1)) * 0.1, 1)
    with jax.enable_x64(False):
        recording = mj.Recording(x, x, np.ones((60, 11, 1, 1)), step_size=0.01, inverse_temperature=np.full(60, 2.0))
        assert recording.samples(steps=[5, 10]).x.dtype == np.float32


def test_a_direction_that_spreads_does_not_spoil_the_others():
    """Müller and Brown's surface has curvatures down to −29: paths spread e²³-fold along one direction, not the other.

    In plain coordinates the worst of these weights is wrong altogether in float32.
    """
    center = jnp.asarray([-0.2, 0.7])
    learner = mj.ForwardLearner(
        mj.potentials.MullerBrown(),
        lambda key: center + 0.5 * jnp.clip(jax.random.normal(key, (2,)), -2, 2),
        step_size=0.01,
    )
    paths = jax.jit(jax.vmap(lambda k: mj.simulate(k, learner, 80)))(jax.random.split(jax.random.key(1), 2000))
    narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.float32) if leaf.dtype == jnp.float64 else leaf, paths)
    weigh = jax.jit(jax.vmap(lambda path: mj.weigh(path, mj.Canonical())[-1]))
    exact, got = np.asarray(weigh(paths)), np.asarray(weigh(narrow), np.float64)
    error = np.abs(got - exact).max(1) / (1 + np.abs(exact).max(1))
    assert error.max() < 1e-2
    assert np.quantile(error, 0.99) < 1e-4
