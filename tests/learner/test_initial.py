"""Ready-made initial laws: their moments, their checks, and one compiled program for all parameters."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import malliavin_jax as mj
from malliavin_jax import initial
from malliavin_jax.potentials import Quartic

N = 20_000


def draws(law, key):
    return np.asarray(jax.vmap(law)(jax.random.split(key, N)))


def test_normal_has_its_mean_and_its_scale(key):
    mean, scale = np.array([0.5, -1.0]), np.array([2.0, 0.25])
    x = draws(initial.Normal(mean, scale), key)
    assert np.all(np.abs(x.mean(0) - mean) < 4 * scale / np.sqrt(N))
    assert np.all(np.abs(x.var(0) / scale**2 - 1) < 4 * np.sqrt(2 / N))
    assert abs(np.corrcoef(x.T)[0, 1]) < 4 / np.sqrt(N)


def test_uniform_fills_its_box(key):
    low, high = np.array([-2.0, 1.0]), np.array([0.0, 5.0])
    x = draws(initial.Uniform(low, high), key)
    assert np.all((x >= low) & (x < high))
    assert np.all(np.abs(x.mean(0) - (low + high) / 2) < 4 * (high - low) / np.sqrt(12 * N))


def test_points_are_equally_likely(key):
    rows = np.array([[0.0], [1.0], [3.0]])
    x = draws(initial.Points(rows), key)
    for row in rows[:, 0]:
        assert abs(np.mean(x == row) - 1 / 3) < 4 * np.sqrt(2 / 9 / N)


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: initial.Normal(scale=-1.0), "scale"),
        (lambda: initial.Normal([0.0, 1.0], dim=3), "mean"),
        (lambda: initial.Normal(np.nan), "mean"),
        (lambda: initial.Normal(np.zeros((2, 2))), "mean"),
        (lambda: initial.Uniform(1.0, 0.0), "low"),
        (lambda: initial.Points(np.zeros((0, 2))), "x"),
        (lambda: initial.Points([1.0, 2.0]), "x"),
    ],
)
def test_mistakes_are_named(make, word):
    with pytest.raises(ValueError, match=word):
        make()


def test_another_mean_is_the_same_program():
    traces = []

    @eqx.filter_jit
    def start(law, key):
        traces.append(1)
        return law(key)

    for mean in (0.0, 1.0, 2.0):
        start(initial.Normal(mean, dim=2), jax.random.key(0))
    assert len(traces) == 1


def test_a_learner_starts_there():
    learner = mj.ForwardLearner(Quartic(), initial.Points([[2.0]]), 0.01)
    assert mj.simulate(jax.random.key(0), learner, 3).x[0] == jnp.array([2.0])
