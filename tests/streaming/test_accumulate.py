"""Streams: sums in any order and any chunks against the field of all samples at once; float32; interruptions."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import malliavin_jax as mj
from malliavin_jax.learner.random import episode_keys
from malliavin_jax.streaming.accumulator import add_samples, two_sum


def normal(key, dim=1, dtype=jnp.float64):
    return jax.random.normal(key, (dim,), dtype)


LEARNER = mj.ForwardLearner(
    mj.potentials.Quartic(), normal, step_size=0.05, gradient_noise=0.5, restart_probability=0.02
)
PLANE = mj.ForwardLearner(mj.potentials.Quartic(0.5), functools.partial(normal, dim=2), step_size=0.05)
LINE = dict(times=[0.2, 0.4], num_episodes=600)
ALPHAS = jnp.asarray([[-3.0], [-0.7], [0.0], [0.3], [5.0]])


@functools.cache
def line():
    return mj.observe(jax.random.key(0), LEARNER, **LINE)


def rows(samples, start, stop):
    return jax.tree.map(lambda leaf: leaf[start:stop], samples)


def assert_close(a, b, rtol=1e-11):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=rtol, atol=rtol)


def assert_same_where_trusted(estimate, reference):
    trusted = np.asarray(reference.trusted)
    np.testing.assert_array_equal(estimate.trusted, trusted)
    assert trusted.any()
    for name in ("value", "stderr", "density", "density_stderr"):
        np.testing.assert_allclose(
            np.asarray(getattr(estimate, name))[trusted], np.asarray(getattr(reference, name))[trusted], rtol=1e-9
        )
    assert np.isnan(np.asarray(estimate.value)[~trusted]).all()
    assert np.isposinf(np.asarray(estimate.stderr)[~trusted]).all()
    np.testing.assert_allclose(estimate.density, reference.density, rtol=1e-9)


@pytest.mark.parametrize(
    ("localizer", "control"),
    [(mj.Laplace(0.3), mj.potentials.Quadratic(precision=1.5)), (mj.Gaussian(0.4, core=0.05), None)],
    ids=["laplace", "gaussian"],
)
def test_the_numbers_of_the_field(localizer, control):
    """In chunks of unequal size, with episodes that stopped early and α that no data carry."""
    samples = line()
    assert not samples.observed.all()
    chunks = [rows(samples, 0, 250), lambda: rows(samples, 250, 500), rows(samples, 500, 600)]
    accumulator = mj.accumulate(chunks, mj.Accumulator(ALPHAS, localizer, control))
    field = mj.MalliavinField(samples, localizer, control)
    assert_same_where_trusted(accumulator.estimate(), jax.vmap(field)(ALPHAS))
    assert accumulator.num_episodes == 600
    assert accumulator.num_points == int(samples.observed.sum())


def test_the_numbers_of_the_field_in_the_plane(key):
    samples = mj.observe(key, PLANE, num_episodes=4500, times=[0.4])  # more than one chunk of points
    alphas = jax.random.normal(key, (70, 2)) / 2  # more than are taken at once
    localizer = mj.Gaussian(0.6, core=0.2)
    estimate = mj.Accumulator(alphas, localizer).add(samples).estimate()
    reference = lax.map(mj.MalliavinField(samples, localizer, None), alphas)  # a loop: no batched reduction
    assert_same_where_trusted(estimate, reference)


def test_merging():
    samples, empty = line(), mj.Accumulator(ALPHAS, mj.Laplace(0.3))
    a, b, c = (empty.add(rows(samples, i, i + 200)) for i in (0, 200, 400))
    for x, y in zip(jax.tree.leaves(a.merge(b)), jax.tree.leaves(b.merge(a)), strict=True):
        np.testing.assert_array_equal(x, y)
    whole = empty.add(samples)
    for joined in (a.merge(b).merge(c), a.merge(b.merge(c)), empty.merge(c.merge(a)).merge(b)):
        assert_close(joined.estimate(), whole.estimate())
        assert joined.num_episodes == 600
        assert joined.num_points == whole.num_points
    assert_close(jax.jit(lambda a, b: a.merge(b))(a, b).estimate(), a.merge(b).estimate())


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("alphas", mj.Accumulator(ALPHAS + 1e-9, mj.Laplace(0.3))),
        ("localizer", mj.Accumulator(ALPHAS, mj.Laplace(0.31))),
        ("localizer", mj.Accumulator(ALPHAS, mj.Centered())),
        ("control", mj.Accumulator(ALPHAS, mj.Laplace(0.3), mj.potentials.Quartic())),
    ],
)
def test_what_differs_does_not_merge(name, other):
    with pytest.raises(ValueError, match=f"^{name} must be equal"):
        mj.Accumulator(ALPHAS, mj.Laplace(jnp.asarray(0.3))).merge(other)


@pytest.mark.parametrize("chunk_size", [256, pytest.param(7000, marks=pytest.mark.slow)])
def test_the_episodes_of_observe_in_any_chunks(chunk_size, capsys):
    empty = mj.Accumulator(ALPHAS, mj.Laplace(0.3))
    streamed = mj.observe_and_accumulate(
        jax.random.key(0), LEARNER, empty, **LINE, chunk_size=chunk_size, progress=chunk_size == 256
    )
    stored = empty.add(line())
    assert_close(streamed.estimate(), stored.estimate())
    np.testing.assert_array_equal(streamed.contents.low, stored.contents.low)  # of the very same points
    np.testing.assert_array_equal(streamed.contents.high, stored.contents.high)
    assert streamed.num_episodes == 600
    assert streamed.num_points == stored.num_points
    assert ("600/600" in capsys.readouterr().err) == (chunk_size == 256)


def test_the_keys_of_episodes_do_not_depend_on_their_number():
    key = jax.random.key(5)
    split = jax.random.key_data(jax.random.split(key, 1000))
    np.testing.assert_array_equal(split[300:400], jax.random.key_data(episode_keys(key, 300, 100)))


# ---------------------------------------------------------------- long sums


def test_long_sums_in_float32():
    """10⁷ times 0.1 in float32: a plain running sum is 9 % off, the two-sum is not off in the last digit."""
    tenth = jnp.asarray(0.1, jnp.float32)

    def step(carry, _):
        (total, rest), plain = carry
        return (two_sum(total, rest, tenth), plain + tenth), None

    zero = jnp.zeros((), jnp.float32)
    ((total, rest), plain), _ = jax.jit(lambda: lax.scan(step, ((zero, zero), zero), length=10**7))()
    exact = float(np.float64(np.float32(0.1)) * 10**7)
    assert abs(float(plain) - exact) > 0.05 * exact
    assert abs(float(total) + float(rest) - exact) < 1e-9 * exact


def test_counts_beyond_float32():
    samples = jax.tree.map(lambda leaf: leaf.astype(bool if leaf.dtype == bool else jnp.float32), rows(line(), 0, 3))
    accumulator = mj.Accumulator(jnp.zeros((1, 1), jnp.float32), mj.Laplace(0.3))
    for _ in range(5):
        accumulator = add_samples(accumulator, samples, jnp.asarray(2**30 + 1, jnp.int32))
    assert accumulator.num_episodes == 5 * (2**30 + 1)
    assert accumulator.merge(accumulator).num_episodes == 10 * (2**30 + 1)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_float32_sums_over_ten_million_samples(seed):
    """The same float32 samples in sums of float32 and of float64: far closer than their standard error."""
    learner = mj.ForwardLearner(
        mj.potentials.Quartic(), functools.partial(normal, dtype=jnp.float32), step_size=0.1, gradient_noise=0.5
    )
    alphas, localizer = jnp.asarray([[-0.5], [1.0]]), mj.Laplace(0.3)
    single, double = (mj.Accumulator(alphas.astype(t), localizer) for t in (jnp.float32, jnp.float64))
    for number in range(10):
        chunk_key = jax.random.fold_in(jax.random.key(seed), number)
        samples = mj.observe(chunk_key, learner, num_episodes=10**6, times=[0.2])
        single = single.add(samples)
        wide = jax.tree.map(lambda leaf: leaf if leaf.dtype == bool else leaf.astype(jnp.float64), samples)
        double = double.add(wide)
    assert single.num_episodes == 10**7
    a, b = (jax.tree.map(np.asarray, accumulator.estimate()) for accumulator in (single, double))
    assert a.value.dtype == np.float32
    assert np.all(np.abs(a.value - b.value) < 0.05 * b.stderr)
    assert np.all(np.abs(a.density - b.density) < 0.05 * b.density_stderr)
    np.testing.assert_allclose(a.stderr, b.stderr, rtol=1e-3)
    np.testing.assert_allclose(a.density_stderr, b.density_stderr, rtol=1e-3)


# ---------------------------------------------------------------- interruptions


def test_a_stream_that_breaks_goes_on(tmp_path):
    samples, empty, path = line(), mj.Accumulator(ALPHAS, mj.Laplace(0.3)), tmp_path / "sums.npz"
    made = []

    def chunk(number):
        made.append(number)
        if len(made) == 3:
            raise RuntimeError("power cut")
        return rows(samples, 200 * number, 200 * number + 200)

    chunks = [functools.partial(chunk, number) for number in range(3)]
    with pytest.raises(RuntimeError, match="power cut"):
        mj.accumulate(chunks, empty, checkpoint=path)
    result = mj.accumulate(chunks, empty, checkpoint=str(path))
    assert made == [0, 1, 2, 2]  # what was added is not made again
    uninterrupted = mj.accumulate((rows(samples, i, i + 200) for i in (0, 200, 400)), empty)
    for a, b in zip(jax.tree.leaves(result), jax.tree.leaves(uninterrupted), strict=True):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(ValueError, match=r"sums.npz belongs to another configuration: it differs in accumulator"):
        mj.accumulate(chunks, mj.Accumulator(ALPHAS, mj.Laplace(0.4)), checkpoint=path)
    with pytest.raises(ValueError, match="holds 3 chunks, more than the 1 given"):
        mj.accumulate(chunks[:1], empty, checkpoint=path)


def test_a_simulation_goes_on_and_on(tmp_path):
    key, empty, path = jax.random.key(0), mj.Accumulator(ALPHAS, mj.Laplace(0.3)), tmp_path / "sums.npz"
    run = functools.partial(mj.observe_and_accumulate, key, LEARNER, empty, times=LINE["times"])
    run(num_episodes=300, chunk_size=256, checkpoint=path)
    resumed = run(num_episodes=600, chunk_size=256, checkpoint=path)
    assert_close(resumed.estimate(), empty.add(line()).estimate())
    assert resumed.num_episodes == 600
    with pytest.raises(ValueError, match="holds 600 episodes, more than num_episodes = 300"):
        run(num_episodes=300, checkpoint=path)
    with pytest.raises(ValueError, match="it differs in scheme, times"):
        mj.observe_and_accumulate(key, LEARNER, empty, num_episodes=600, times=[0.2], checkpoint=path)
    with pytest.raises(ValueError, match="checkpoint must be a file in a directory that exists"):
        run(num_episodes=300, checkpoint=tmp_path / "nowhere" / "sums.npz")


# ---------------------------------------------------------------- mistakes


@pytest.mark.usefixtures("no_type_checks")
def test_mistakes_are_named():
    samples, localizer = line(), mj.Laplace(0.3)
    with pytest.raises(ValueError, match=r"alphas must have shape \(places, d\), got \(3,\)"):
        mj.Accumulator(jnp.zeros(3), localizer)
    with pytest.raises(ValueError, match="alphas must be finite"):
        mj.Accumulator(jnp.asarray([[jnp.nan]]), localizer)
    with pytest.raises(ValueError, match="localizer must be a localizer"):
        mj.Accumulator(ALPHAS, "auto")
    with pytest.raises(ValueError, match="control must be a potential or None, got 'auto'"):
        mj.Accumulator(ALPHAS, localizer, "auto")
    empty = mj.Accumulator(ALPHAS, localizer)
    with pytest.raises(ValueError, match="an estimate needs at least 2 episodes, got 0"):
        empty.estimate()
    with pytest.raises(ValueError, match="samples must be float64 in 2 dimensions, as alphas are, got float64 in 1"):
        mj.Accumulator(jnp.zeros((3, 2)), mj.Gaussian(0.3, 0.1)).add(samples)
    with pytest.raises(ValueError, match=r"samples.weight must be finite where observed; .* episode 7, time 0"):
        empty.add(eqx.tree_at(lambda s: s.weight, samples, samples.weight.at[7, 0, 0].set(jnp.inf)))
    with pytest.raises(ValueError, match="alphas must be float64 in 2 dimensions, as the learner's states are"):
        mj.observe_and_accumulate(jax.random.key(0), PLANE, empty, num_episodes=10, times=[0.1])
    with pytest.raises(ValueError, match="num_episodes must be at most"):
        mj.observe_and_accumulate(jax.random.key(0), LEARNER, empty, num_episodes=2**33, times=[0.1])
    with pytest.raises(ValueError, match="chunk_size must be a whole number"):
        mj.observe_and_accumulate(jax.random.key(0), LEARNER, empty, num_episodes=9, times=[0.1], chunk_size=0)
    wild = mj.ForwardLearner(mj.potentials.Quartic(), lambda key: 30 * normal(key), step_size=0.1)
    with pytest.raises(ValueError, match=r"observed points among episodes 0 to 49 are not finite"):
        mj.observe_and_accumulate(jax.random.key(0), wild, empty, num_episodes=50, times=[2.0])
