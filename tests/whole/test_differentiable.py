"""Derivatives taken from outside, through fields and localizers: right where they exist, refused where they do not.

Those through `observe`, in parameters of learner, potential and scheme, are in test_observe.py.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import malliavin_jax as mj
from malliavin_jax.potentials import Quartic

SETS, PER_SET = 40, 1500


def line(key):
    return jax.random.normal(key, (1,))


def plane(key):
    return jax.random.normal(key, (2,))


LEARNERS = {
    1: mj.ForwardLearner(Quartic(), line, 0.02, gradient_noise=0.5),
    2: mj.ForwardLearner(Quartic(0.5), plane, 0.02, gradient_noise=0.5),
}
PLACES = {1: jnp.asarray([[-0.6], [0.0], [0.9]]), 2: jnp.asarray([[0.0, 0.0], [0.5, -0.4]])}


@pytest.mark.parametrize("d", [1, 2])
def test_the_jacobian_of_a_field_is_the_hessian(d):
    """∂Ĝ/∂α estimates ∇²L: its mean over repeated data sets, within four standard errors of that mean.

    A core e leaves a bias (e⁴/4) Δ²(p ∂∇L)/p, below a hundredth here; the ratio's own, of order 1/N, is smaller.
    """
    learner, alphas = LEARNERS[d], PLACES[d]
    localizer = mj.Gaussian(1.0, core=0.25 if d == 1 else 0.4)

    @jax.jit
    def jacobians(key):
        samples = mj.observe(key, learner, num_episodes=PER_SET, times=[0.6])
        field = mj.MalliavinField(samples, localizer, control=Quartic(0.3))
        return jax.vmap(jax.jacfwd(lambda alpha: field(alpha).value))(alphas)

    got = np.asarray([jacobians(key) for key in jax.random.split(jax.random.key(d), SETS)])
    exact = np.asarray(jax.vmap(learner.potential.hessian)(alphas))
    error = np.std(got, 0, ddof=1) / np.sqrt(SETS)
    assert np.all(np.abs(got.mean(0) - exact) < 4 * error + 0.02)
    assert np.all(error < 0.1)  # else the test says nothing


@pytest.fixture(scope="module")
def samples():
    return mj.observe(jax.random.key(0), LEARNERS[1], num_episodes=400, times=[0.2, 0.4])


def check_slope(function, at, h=1e-5):
    """Forward and reverse mode against a central difference, whose own error is of order h²."""
    difference = (function(at + h) - function(at - h)) / (2 * h)
    for slope in (jax.jacfwd(function)(at), jax.jacrev(function)(at)):
        np.testing.assert_allclose(slope, difference, rtol=1e-5, atol=1e-7)
    assert abs(float(difference)) > 1e-4


@pytest.mark.parametrize("place", [0.3, 0.0, 2.6, 9.0], ids=["inside", "centre", "edge", "outside"])
def test_the_derivative_in_alpha_is_that_of_the_value(place, samples):
    """Where the field is trusted, where it passes to its tail, and where it is all tail."""
    field = mj.MalliavinField(samples, mj.Gaussian(0.5, 0.1), control=None)
    check_slope(jax.jit(lambda alpha: field(alpha[None]).value[0]), jnp.asarray(place))


@pytest.mark.parametrize("d", [1, 2])
def test_the_derivative_in_a_length(d):
    samples = mj.observe(jax.random.key(1), LEARNERS[d], num_episodes=300, times=[0.4])

    def value(length):
        field = mj.MalliavinField(samples, mj.Gaussian(length, 0.3 * length), control=None)
        return jnp.sum(jnp.sin(field(PLACES[d][-1]).value))

    check_slope(jax.jit(value), jnp.asarray(0.6))


def test_the_derivative_in_the_data(samples):
    """Of the estimate in the observed gradients: the estimate is linear in them, with weights that sum to one."""

    def value(gradient):
        field = mj.MalliavinField(eqx.tree_at(lambda s: s.gradient, samples, gradient), mj.Gaussian(0.5, 0.1), None)
        return field(jnp.asarray([0.2])).value[0]

    slope = jax.jit(jax.grad(value))(samples.gradient)
    assert float(jnp.sum(slope)) == pytest.approx(1, rel=1e-9)


@pytest.mark.parametrize("localizer", [mj.Laplace(0.3), mj.Heaviside(), mj.Centered()], ids=str)
@pytest.mark.parametrize("mode", [jax.jacfwd, jax.jacrev])
def test_a_localizer_that_jumps_says_that_it_has_no_derivative(localizer, mode, samples):
    field = mj.MalliavinField(samples, localizer, control=None)
    with pytest.raises(ValueError, match=r"no derivative|Gaussian"):
        mode(lambda alpha: field(alpha).value)(jnp.asarray([0.2]))
