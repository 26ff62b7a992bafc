"""Weights by Hessian-vector products alone, against the same with the matrix."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import malliavin_jax as mj
from malliavin_jax.samples.bare import weights_at_steps

SCHEME = mj.Windowed(2.0, neumann=3)


def product(x, v):
    """∇²L(x) v for L = Quartic(coupling=0.5)."""
    return (3 * x**2 + 1) * v + 0.5 * (jnp.pad(v[1:], (0, 1)) + jnp.pad(v[:-1], (1, 0)))


def learner(dim, matrix, **options):
    dense = mj.potentials.Quartic(0.5)
    loss = dense if matrix else mj.potentials.MatrixFree(dense.value, dense.gradient, product)
    return mj.ForwardLearner(loss, lambda key: jax.random.normal(key, (dim,)), step_size=0.02, **options)


@pytest.mark.parametrize(
    ("dim", "times", "options"),
    [(6, [0.04, 0.2, 0.36], {}), (2, [0.2], dict(gradient_noise=0.5, restart_probability=0.02))],
)
def test_the_weights_of_the_matrix(dim, times, options):
    run = dict(num_episodes=40, times=times, scheme=SCHEME)
    products = mj.observe_weights(jax.random.key(1), learner(dim, False, **options), **run)
    matrix = mj.observe(jax.random.key(1), learner(dim, True, **options), **run)
    for name in ("x", "gradient", "weight", "observed"):
        got, expected = getattr(products, name), getattr(matrix, name)
        np.testing.assert_allclose(got, expected, rtol=1e-10, atol=1e-10)
    assert np.abs(matrix.weight[np.asarray(matrix.observed)]).max() > 0.1


def test_no_matrix_is_made():
    """In the compiled program for 8 episodes in 100 dimensions no array has 100 × 100 entries, or 100 × 128."""
    one = learner(100, False)
    text = jax.jit(lambda key: weights_at_steps(key, one, SCHEME, 8, (10,))).lower(jax.random.key(0)).as_text()
    assert "8x100x" in text
    assert "100x100" not in text
    dense = learner(100, True)
    text = jax.jit(lambda key: weights_at_steps(key, dense, SCHEME, 8, (10,))).lower(jax.random.key(0)).as_text()
    assert "100x100" in text


def stiffness(x, v):
    return 2 * v + 0.5 * (jnp.pad(v[1:], (0, 1)) + jnp.pad(v[:-1], (1, 0)))


QUADRATIC = mj.ForwardLearner(
    mj.potentials.MatrixFree(lambda x: x @ stiffness(x, x) / 2, lambda x: stiffness(x, x), stiffness),
    lambda key: jax.random.normal(key, (100,)),
    step_size=0.02,
)


def test_integration_by_parts_in_a_hundred_dimensions(key):
    """E[∂_i φ_i] = E[φ_i S_i] for φ_i(x) = x_i, averaged over the coordinates; without third derivative it is exact."""
    scheme = mj.Windowed(2.0, neumann=8)  # (ε|H|)⁹ < 1e-11
    weighed = mj.observe_weights(key, QUADRATIC, num_episodes=400, times=[0.2], scheme=scheme)
    per_episode = np.mean(np.asarray(weighed.x * weighed.weight)[:, 0], -1)
    assert abs(per_episode.mean() - 1) < 4 * per_episode.std() / np.sqrt(len(per_episode))


@pytest.mark.usefixtures("no_type_checks")
def test_mistakes_are_named():
    one, run = learner(2, False), dict(num_episodes=4, times=[0.1])
    with pytest.raises(ValueError, match=r"see observe_weights"):
        mj.observe(jax.random.key(0), one, **run)
    with pytest.raises(ValueError, match=r"see observe_weights"):
        mj.simulate(jax.random.key(0), one, 3)
    for scheme in (mj.Canonical(), mj.Windowed(1.0), mj.Windowed(1.0, third="ito", neumann=2), mj.Reciprocal()):
        with pytest.raises(ValueError, match=r"products only: weigh by Windowed\(rate, neumann=m\)"):
            mj.observe_weights(jax.random.key(0), one, scheme=scheme, **run)
    with pytest.raises(ValueError, match="product must be callable, got 3"):
        mj.potentials.MatrixFree(abs, abs, 3)
