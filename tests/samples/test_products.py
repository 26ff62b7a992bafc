"""Samples by Hessian-vector products alone: against the same with the matrix, and what may be made of them."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import malliavin_jax as mj
from malliavin_jax.samples.default_scheme import choose_scheme
from malliavin_jax.samples.simulated import observe_steps

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
    products = mj.observe(jax.random.key(1), learner(dim, False, **options), **run)
    matrix = mj.observe(jax.random.key(1), learner(dim, True, **options), **run)
    assert products.hessian is None
    for name in ("x", "gradient", "weight", "observed"):
        got, expected = getattr(products, name), getattr(matrix, name)
        np.testing.assert_allclose(got, expected, rtol=1e-10, atol=1e-10)
    assert np.abs(matrix.weight[np.asarray(matrix.observed)]).max() > 0.1


def test_no_matrix_is_made():
    """In the compiled program for 8 episodes in 100 dimensions no array has 100 × 100 entries, or 100 × 128."""
    one = learner(100, False)
    text = jax.jit(lambda key: observe_steps(key, one, SCHEME, 8, (10,))).lower(jax.random.key(0)).as_text()
    assert "8x100x" in text
    assert "100x100" not in text
    dense = learner(100, True)
    text = jax.jit(lambda key: observe_steps(key, dense, SCHEME, 8, (10,))).lower(jax.random.key(0)).as_text()
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
    weighed = mj.observe(key, QUADRATIC, num_episodes=400, times=[0.2], scheme=scheme)
    per_episode = np.mean(np.asarray(weighed.x * weighed.weight)[:, 0], -1)
    assert abs(per_episode.mean() - 1) < 4 * per_episode.std() / np.sqrt(len(per_episode))


def test_the_scheme_where_none_is_given():
    """`Adapted`, a rate a coordinate: the root of the diagonal of E[H²], as the matrices give it."""
    one, run = learner(3, False, restart_probability=0.05), dict(num_episodes=40, times=[0.1, 0.4])
    scheme, dense = (choose_scheme(learner(3, matrix), None, 20) for matrix in (False, True))
    diagonal = np.diag(dense.directions * jnp.square(dense.rate)[None] @ dense.directions.T)
    np.testing.assert_allclose(jnp.square(scheme.rate), diagonal, rtol=0.15)  # 2560 squares of normals
    chosen, given = (mj.observe(jax.random.key(2), one, **run, scheme=s) for s in (None, scheme))
    np.testing.assert_array_equal(chosen.weight, given.weight)


# What may be made of samples without Hessians.


def test_estimators_that_need_no_hessian(key):
    """E[X_0² | X = α] = α_0² from products alone, and a density, a score, a kernel field, as with the Hessians."""
    loss, alpha = mj.potentials.Quartic(0.5), jnp.asarray([0.3, -0.2])
    products = mj.potentials.MatrixFree(loss.value, loss.gradient, product)
    options = dict(step_size=0.02, gradient_noise=0.5)
    bare, full = (
        mj.observe(
            key,
            mj.ForwardLearner(potential, mj.initial.Normal(dim=2), **options),
            num_episodes=4000,
            times=[0.2, 0.4],
            scheme=SCHEME,
        )
        for potential in (products, loss)
    )
    localizer = mj.Gaussian(0.5, core=0.05)

    def estimates(samples):
        square, jacobian = samples.x[..., :1] ** 2, 2 * samples.x[..., :1, None] * jnp.eye(2)[None, None, :1]
        mean = mj.conditional_expectation(samples, square, jacobian, alpha, localizer)
        kernel = mj.kernel.NadarayaWatson(samples, bandwidth=0.3)(alpha)
        return mean, mj.density(samples, alpha, localizer), mj.score(samples, alpha, 0.3), kernel

    assert bare.hessian is None
    got = estimates(bare)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-8), got, estimates(full))
    mean = got[0]
    # the core of the localizer leaves a bias: of the order of its square
    assert abs(float(mean.value[0]) - 0.09) < 4 * float(mean.stderr[0]) + 0.05**2
    assert bool(mean.trusted)
    assert float(mean.stderr[0]) < 0.05


@pytest.mark.usefixtures("no_type_checks")
def test_mistakes_are_named():
    one, run = learner(2, False), dict(num_episodes=4, times=[0.1])
    with pytest.raises(ValueError, match=r"potential must offer its Hessian, not only products.*use observe"):
        mj.simulate(jax.random.key(0), one, 3)
    for scheme in (mj.Canonical(), mj.Windowed(1.0), mj.Windowed(1.0, third="ito", neumann=2), mj.Reciprocal()):
        with pytest.raises(ValueError, match=r"products only: weigh by Windowed\(rate, neumann=m\)"):
            mj.observe(jax.random.key(0), one, scheme=scheme, **run)
    with pytest.raises(ValueError, match="product must be callable, got 3"):
        mj.potentials.MatrixFree(abs, abs, 3)
    samples = mj.observe(jax.random.key(0), one, scheme=SCHEME, **run)
    with pytest.raises(ValueError, match=r"MalliavinField needs Hessians, and samples\.hessian is None: observe a"):
        samples.require_hessian("MalliavinField")
    grid = mj.Accumulator(jnp.zeros((1, 2)), mj.Gaussian(0.5, core=0.1))
    with pytest.raises(ValueError, match="observe_and_accumulate needs Hessians"):
        mj.observe_and_accumulate(jax.random.key(0), one, grid, scheme=SCHEME, **run)
    with pytest.raises(ValueError, match=r"samples\.weight must be finite where observed"):
        mj.density(eqx.tree_at(lambda s: s.weight, samples, samples.weight * jnp.nan), jnp.zeros(2), mj.Heaviside())
