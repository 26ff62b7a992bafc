"""The learner: its generator against JAX's own bits, its chain against diffrax, its restarts against their law."""

import functools

import diffrax
import equinox as eqx
import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import malliavin_jax as mj
from malliavin_jax.learner import random as _noise
from malliavin_jax.potentials import LogisticRegression, Quadratic, Quartic


def normal(key, d=1):
    return jax.random.normal(key, (d,))


def plane(key):
    return normal(key, 2)


# The generator.


def test_bits_are_those_of_threefry(key):
    """Bit for bit, also at the ends of the counter's range."""
    words = _noise.key_words(key)
    low = jnp.concatenate([jnp.arange(50), 2**32 - 1 - jnp.arange(50)]).astype(jnp.uint32)
    for stream in (0, 3, 6, 2**32 - 1):
        high = jnp.full_like(low, stream)
        # it takes the words of the counters as the two halves of one array, and returns its words so
        expected = jax.extend.random.threefry_2x32(jnp.stack(words), jnp.concatenate([high, low]))
        np.testing.assert_array_equal(jnp.concatenate(_noise.threefry(words, (high, low))), expected)


def test_keys_of_other_generators_serve_too():
    for impl in ("rbg", "unsafe_rbg"):
        one, other = (_noise.key_words(jax.random.key(seed, impl=impl)) for seed in (0, 1))
        assert one[0].dtype == jnp.uint32
        assert np.all(np.stack(one) != np.stack(other))


def test_two_words_make_two_normals_by_the_polar_formula():
    first, second = (jax.random.bits(jax.random.key(i), (100_000,), jnp.uint32) for i in (0, 1))
    first = first.at[:3].set(jnp.asarray([0, 2**32 - 1, 2**31], jnp.uint32))
    second = second.at[:3].set(jnp.asarray([2**31, 2**31 - 1, 0], jnp.uint32))
    got = np.asarray(_noise.box_muller(first, second), np.float64)
    u = (np.asarray(first >> 1, np.float64) + 0.5) * 2.0**-31
    angle = np.pi * np.asarray(second).astype(np.int32) * 2.0**-31
    radius = np.sqrt(-2 * np.log(u))
    # u is rounded to float32, by at most 2^-25; d radius = du / (u radius)
    tolerance = 2.0**-25 / np.maximum(radius, 2.0**-12) + 5e-7 * radius
    assert np.all(np.abs(got - radius * np.stack([np.cos(angle), np.sin(angle)])) < tolerance)
    assert np.all(np.isfinite(got))


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def draw(key, dim, dtype, episodes, blocks):
    """Every stream of normals that a learner draws: (episodes, streams, steps, d)."""
    width = _noise.steps_per_block(dim)

    def one(key, stream, block):
        packed = _noise.draw_block(_noise.key_words(key), stream, block, dim, dtype)
        return jnp.stack([_noise.normals(packed, phase, dim, dtype) for phase in range(width)])

    def streams(key):
        over_steps = [jax.vmap(lambda k, s=s: one(key, s, k))(jnp.arange(blocks)) for s in (3, 4)]
        return jnp.stack(over_steps).reshape(2, blocks * width, dim)

    return jax.vmap(streams)(jax.random.split(key, episodes))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
@pytest.mark.parametrize("dim", [1, 2, 3, 5])
def test_normals_are_normal(dim, dtype, key):
    z = draw(key, dim, dtype, 500, 60)
    assert z.dtype == dtype
    z = np.asarray(z, np.float64)
    n = z.size
    moments = [np.mean(z), np.mean(z**2) - 1, np.mean(z**3), np.mean(z**4) - 3]
    variances = [1, 2, 15, 96]  # of z, z², z³, z⁴
    assert np.all(np.abs(moments) < 4 * np.sqrt(np.asarray(variances) / n)), moments
    assert stats.kstest(z.ravel(), "norm").pvalue > 1e-4
    assert np.abs(z).max() < 7
    # no correlation between neighbours along any axis: episodes, streams, steps, coordinates
    for axis in range(4 if dim > 1 else 3):
        a, b = np.take(z, range(z.shape[axis] - 1), axis), np.take(z, range(1, z.shape[axis]), axis)
        for f in (lambda v: v, lambda v: (v**2 - 1) / np.sqrt(2)):
            assert abs(np.mean(f(a) * f(b))) < 4 / np.sqrt(a.size)


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_no_number_is_used_twice(dim):
    """52 random bits: any tie among some ten thousand is a reused counter (chance 1e-8 else)."""
    z = np.asarray(draw(jax.random.key(0), dim, jnp.float64, 20, 40 // dim)).ravel()
    assert len(np.unique(z)) == len(z)
    # In float32 some ties are left to chance: fewer than if each number had 23 bits, Poisson with mean n²/2^24.
    z = np.asarray(draw(jax.random.key(0), dim, jnp.float32, 20, 40 // dim)).ravel()
    ties = len(z) - len(np.unique(z))
    assert stats.poisson.sf(ties - 1, len(z) ** 2 / 2**24) > 1e-6


# The chain.


def increments(path):
    """ξ, read off a path as an observer must."""
    noise = jnp.diff(path.x, axis=0) + path.step_size * path.gradient[:-1]
    return noise / jnp.sqrt(2 * path.step_size / path.inverse_temperature)


@pytest.mark.parametrize(("d", "num_steps"), [(1, 7), (2, 5)])
def test_path_is_the_chain_on_the_documented_numbers(d, num_steps):
    """X_{k+1} = X_k − ε g_k + σ ξ_{k+1}, g_k = ∇L(X_k) + noise; every number a function of key, stream and step."""
    key = jax.random.key(9)
    learner = mj.ForwardLearner(Quartic(0.5), functools.partial(normal, d=d), 0.03, 2.0, 1.5)
    path = jax.jit(lambda key: mj.simulate(key, learner, num_steps))(key)
    assert path.num_steps == num_steps
    words, width = _noise.key_words(key), _noise.steps_per_block(d)
    initial_key = _noise.derived_key(words, _noise.INITIAL, jnp.asarray(0))
    np.testing.assert_array_equal(path.x[0], normal(initial_key, d))

    def numbers(stream, step):
        packed = _noise.draw_block(words, stream, jnp.asarray(step // width), d, jnp.float64)
        return _noise.normals(packed, step % width, d, jnp.float64)

    xi = np.stack([numbers(_noise.LATER[0], k) for k in range(num_steps)])
    eta = np.stack([numbers(_noise.FIRST[1], 0), *(numbers(_noise.LATER[1], k) for k in range(num_steps))])
    np.testing.assert_allclose(increments(path), xi, rtol=0, atol=1e-13)
    true = jax.vmap(learner.potential.gradient)(path.x)
    np.testing.assert_allclose(path.gradient, true + 1.5 * eta, rtol=0, atol=1e-13)
    np.testing.assert_allclose(path.hessian, jax.vmap(learner.potential.hessian)(path.x), rtol=0, atol=1e-13)


def test_path_equals_diffrax_euler_on_the_same_increments():
    learner = mj.ForwardLearner(Quartic(0.5), plane, 0.01, 3.0)
    num_steps, d = 80, 2

    @jax.jit
    def both(key):
        path = mj.simulate(key, learner, num_steps)
        xi = increments(path)
        ts = 0.01 * jnp.arange(num_steps + 1, dtype=jnp.float64)
        brownian = jnp.concatenate([jnp.zeros((1, d)), jnp.cumsum(jnp.sqrt(0.01) * xi, axis=0)])
        control = diffrax.LinearInterpolation(ts, brownian)
        terms = diffrax.MultiTerm(
            diffrax.ODETerm(lambda t, x, args: -learner.potential.gradient(x)),
            diffrax.ControlTerm(lambda t, x, args: jnp.sqrt(2 / 3.0) * jnp.eye(d), control),
        )
        solution = diffrax.diffeqsolve(
            terms, diffrax.Euler(), 0.0, ts[-1], None, path.x[0],
            saveat=diffrax.SaveAt(ts=ts), stepsize_controller=diffrax.StepTo(ts),
        )  # fmt: skip
        return path.x, solution.ys

    ours, theirs = both(jax.random.key(7))
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-13)


def test_jit_vmap_and_number_of_steps_change_nothing():
    learner = mj.ForwardLearner(Quartic(0.5), plane, 0.02, gradient_noise=0.5)
    keys = jax.random.split(jax.random.key(0), 3)
    long = jax.jit(jax.vmap(lambda key: mj.simulate(key, learner, 9)))(keys)
    short = mj.simulate(keys[1], learner, 6)
    for field in ("x", "gradient", "hessian"):
        # XLA contracts a·b + c into one rounding or two, depending on what it fuses: a few ulps after six steps
        np.testing.assert_allclose(getattr(long, field)[1, :7], getattr(short, field), rtol=0, atol=1e-14)


FEATURES = np.random.default_rng(5).normal(size=(40, 2))


def test_minibatches_are_drawn_anew_and_shared_by_gradient_and_hessian():
    loss = LogisticRegression(FEATURES, (FEATURES[:, 0] > 0).astype(float), batch_size=3)
    learner = mj.ForwardLearner(loss, plane, 0.02, gradient_noise=0.0)
    key = jax.random.key(3)
    path = jax.jit(lambda key: mj.simulate(key, learner, 5))(key)
    words = _noise.key_words(key)
    streams = [(_noise.FIRST[2], 0), *((_noise.LATER[2], k) for k in range(5))]
    for k, (stream, index) in enumerate(streams):
        batch = loss.minibatch(_noise.derived_key(words, stream, jnp.asarray(index)))
        np.testing.assert_allclose(path.gradient[k], batch.gradient(path.x[k]), rtol=1e-12)
        np.testing.assert_allclose(path.hessian[k], batch.hessian(path.x[k]), rtol=1e-12)
    batches = {tuple(map(int, jax.random.key_data(_noise.derived_key(words, s, jnp.asarray(k))))) for s, k in streams}
    assert len(batches) == 6


# Restarts.

RESTART = 0.15


@jax.jit
@jax.vmap
def with_and_without_restarts(key):
    learner = mj.ForwardLearner(Quadratic(), normal, 0.05)
    stopping = eqx.tree_at(lambda learner: learner.restart_probability, learner, RESTART)
    return mj.simulate(key, learner, 10), mj.simulate(key, stopping, 10)


def test_last_steps_are_geometric_and_independent_of_the_path(key):
    p, num_steps, episodes = RESTART, 10, 20_000
    whole, part = with_and_without_restarts(jax.random.split(key, episodes))
    assert np.all(np.asarray(whole.last_step) >= num_steps)

    last_steps = np.asarray(part.last_step)
    cells = np.minimum(last_steps, 20)
    expected = episodes * np.append(p * (1 - p) ** np.arange(20), (1 - p) ** 20)
    assert stats.chisquare(np.bincount(cells, minlength=21), expected).pvalue > 1e-4
    steps = jax.vmap(increments)(whole)[:, :, 0]
    for value in (whole.x[:, 0, 0], whole.x[:, -1, 0], whole.x[:, -1, 0] ** 2, steps[:, 0], steps[:, 0] ** 2):
        assert abs(np.corrcoef(cells, value)[0, 1]) < 4 / np.sqrt(episodes)

    # masked past the end, and otherwise the very path of the learner that does not stop
    seen = np.arange(num_steps + 1) <= last_steps[:, None]
    for field in ("x", "gradient", "hessian"):
        got, expected = np.asarray(getattr(part, field)), np.asarray(getattr(whole, field))
        np.testing.assert_array_equal(got[seen], expected[seen])
        assert np.all(np.isnan(got[~seen]))


# Derivatives from outside.


def test_derivative_in_the_step_size():
    """`simulate` counts in steps, so that ε may be traced."""

    def end(step_size):
        learner = mj.ForwardLearner(Quartic(0.5), plane, step_size, 2.0, 0.5)
        return jnp.sum(jnp.sin(mj.simulate(jax.random.key(1), learner, 10).x[-1]))

    end = jax.jit(end)
    slope, h = jax.jit(jax.grad(end))(0.03), 1e-5
    # central differences: an error of h² f'''/6 beside rounding of 1e-16/h
    assert float(slope) == pytest.approx(float(end(0.03 + h) - end(0.03 - h)) / (2 * h), rel=1e-6)


# Bad input.


@pytest.mark.parametrize("bad", [0.0, -0.1, float("nan"), float("inf")])
def test_numbers_of_the_learner(bad):
    with pytest.raises(ValueError, match=f"step_size must be positive and finite, got {bad}"):
        mj.ForwardLearner(Quartic(), normal, bad)
    with pytest.raises(ValueError, match=f"inverse_temperature must be positive and finite, got {bad}"):
        mj.ForwardLearner(Quartic(), normal, 0.1, bad)
    if bad != 0:
        with pytest.raises(ValueError, match=f"gradient_noise must be non-negative and finite, got {bad}"):
            mj.ForwardLearner(Quartic(), normal, 0.1, gradient_noise=bad)
        with pytest.raises(ValueError, match=f"restart_probability must be non-negative and finite, got {bad}"):
            mj.ForwardLearner(Quartic(), normal, 0.1, restart_probability=bad)


def test_a_certain_restart_is_refused():
    with pytest.raises(ValueError, match=r"restart_probability must be below 1, got 1\.0"):
        mj.ForwardLearner(Quartic(), normal, 0.1, restart_probability=1.0)


BAD_INITIAL = {
    r"initial must return an array of shape \(d,\), got \(\)": (Quartic(), lambda key: jnp.zeros(())),
    r"initial must return an array of shape \(d,\), got \(2, 1\)": (Quartic(), lambda key: jnp.zeros((2, 1))),
    r"initial must return an array of shape \(d,\), got \(0,\)": (Quartic(), lambda key: jnp.zeros((0,))),
    "initial must return floating-point numbers, got dtype int": (Quartic(), lambda key: jnp.zeros(2, int)),
    r"initial returns a state of shape \(3,\), which potential.gradient does not take": (
        Quadratic(np.eye(2)), functools.partial(normal, d=3)
    ),
    r"potential.gradient must return shape \(2,\).*got \(\)": (
        mj.Potential(jnp.sum, jnp.sum, lambda x: jnp.eye(2)), plane
    ),
    r"potential.hessian must return shape \(2, 2\).*got \(3, 3\)": (
        mj.Potential(jnp.sum, lambda x: x, lambda x: jnp.eye(3)), plane
    ),
}  # fmt: skip


@pytest.mark.parametrize("message", BAD_INITIAL)
@pytest.mark.usefixtures("no_type_checks")
def test_initial_law_of_the_wrong_shape(message):
    potential, initial = BAD_INITIAL[message]
    learner = mj.ForwardLearner(potential, initial, 0.1)
    with pytest.raises(ValueError, match=message):
        mj.simulate(jax.random.key(0), learner, 3)
    with pytest.raises(ValueError, match=message):
        mj.observe(jax.random.key(0), learner, num_episodes=3, times=[0.1])


@pytest.mark.parametrize("bad", [0, -1, 2.5, True])
@pytest.mark.usefixtures("no_type_checks")
def test_number_of_steps(bad):
    learner = mj.ForwardLearner(Quartic(), normal, 0.1)
    with pytest.raises(ValueError, match=f"num_steps must be a whole number, at least 1, got {bad}"):
        mj.simulate(jax.random.key(0), learner, bad)
