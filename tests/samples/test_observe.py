"""Samples: what `observe` fuses against what it fuses, one device against two, and every mistake by its name."""

import functools
import itertools
import os
import platform
import subprocess
import sys
from pathlib import Path

import compiler
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import malliavin_jax as mj
from malliavin_jax._base.checks import floats_to_arrays
from malliavin_jax.potentials import LogisticRegression, Quadratic, Quartic
from malliavin_jax.samples.default_scheme import choose_scheme

STEP = 0.01


def normal(key, d=1, dtype=jnp.float64):
    return jax.random.normal(key, (d,), dtype)


def plane(key):
    return normal(key, 2)


def ulps(samples, other):
    """The largest difference of two `Samples`, field by field, in ulps of the largest entry of the field."""
    np.testing.assert_array_equal(samples.observed, other.observed)
    worst = 0.0
    for field in ("x", "gradient", "hessian", "weight"):
        a, b = np.asarray(getattr(samples, field)), np.asarray(getattr(other, field))
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.isnan(a), np.isnan(b))
        unit = np.finfo(a.dtype).eps * max(1, np.nanmax(np.abs(b)))
        worst = max(worst, float(np.nanmax(np.abs(a - b)) / unit))
    return worst


# observe is simulate, then weigh.

LAST = 12
PATTERNS = {
    "one": [7],
    "even": [2, 4, 6, 8],
    "odd gaps": [3, 6, 9, 12],
    "irregular": [1, 4, 11],
    "every step": list(range(1, 8)),
}


def learner_of(d, dtype):
    noise = 0.5 if d == 2 else 0.0
    return mj.ForwardLearner(Quartic(0.5), functools.partial(normal, d=d, dtype=dtype), STEP, 2.0, noise, 0.05)


def fused(d, dtype, stops, scheme, episodes=50):
    times = [STEP * k for k in stops]
    return mj.observe(jax.random.key(3), learner_of(d, dtype), num_episodes=episodes, times=times, scheme=scheme)


@functools.cache
def stored(d, dtype, scheme, episodes=50):
    """Every step of the same episodes, from stored paths.

    The numbers of the learner are traced here as they are in `observe`: a learner that is closed over has a constant σ,
    which XLA folds into the constant √2 of the generator.
    """

    @eqx.filter_jit
    def paths_and_weights(learner, scheme):
        keys = jax.random.split(jax.random.key(3), episodes)
        paths = jax.vmap(lambda key: mj.simulate(key, learner, LAST))(keys)
        return paths, jax.vmap(lambda path: mj.weigh(path, scheme))(paths)

    paths, weights = paths_and_weights(*floats_to_arrays((learner_of(d, dtype), scheme), dtype))
    observed = jnp.asarray(np.arange(LAST + 1) <= np.asarray(paths.last_step)[:, None])
    assert 0 < observed[:, -1].sum() < episodes
    weights = jnp.where(observed[:, :, None], weights, jnp.nan)
    return mj.Samples(paths.x, paths.gradient, paths.hessian, weights, observed)


def fused_against_stored(d, dtype, stops, scheme):
    at = jax.tree.map(lambda leaf: leaf[:, np.asarray(stops)], stored(d, dtype, scheme))
    return ulps(fused(d, dtype, stops, scheme), at)


@pytest.mark.parametrize(
    ("d", "dtype", "pattern"),
    [(1, jnp.float32, "odd gaps"), (1, jnp.float32, "even"), (2, jnp.float64, "irregular"), (4, jnp.float64, "one")],
)
def test_observe_is_simulate_then_weigh(d, dtype, pattern):
    """To a few roundings: XLA contracts a·b + c to one rounding in some fusions and not in others."""
    assert fused_against_stored(d, dtype, PATTERNS[pattern], mj.Canonical()) < 8


# One device, or two, or none that matters.


def many_ways(episodes=64):
    """The same episodes by a plain call, in a jit, in a vmap over keys, and split over two devices."""
    learner = learner_of(2, jnp.float64)
    key = jax.random.key(3)
    mesh = jax.make_mesh((2,), ("episodes",), devices=jax.devices()[:2])

    def run(key):
        return mj.observe(key, learner, num_episodes=episodes, times=[0.03, 0.1])

    batched = jax.jit(jax.vmap(run))(jnp.stack([jax.random.key(4), key]))
    split = jax.jit(run, out_shardings=NamedSharding(mesh, PartitionSpec("episodes"))).lower(key).compile()
    ways = [jax.jit(run)(key), jax.tree.map(lambda leaf: leaf[1], batched), split(key)]
    return run(key), ways, split


def test_jit_vmap_and_two_devices_change_nothing():
    """To a few roundings, for the reason above; the child process below asks for equality."""
    plain, ways, split = many_ways()
    for way in ways:
        assert ulps(way, plain) < 8
    assert ways[-1].x.sharding.num_devices == 2
    text = split.as_text()  # and no device works on more than its own half
    assert "[32," in text
    assert "[64," not in text


def bit_for_bit(cases):
    """What the child process asserts: equality, where no contraction is possible."""
    for d, dtype, pattern in cases:
        dtype = jnp.dtype(dtype)
        assert fused_against_stored(d, dtype, PATTERNS[pattern], mj.Canonical()) == 0, (d, dtype, pattern)
    plain, ways, _ = many_ways()
    assert [ulps(way, plain) for way in ways] == [0, 0, 0]


EVERY_CASE = list(itertools.product([1, 2, 3, 4], ["float32", "float64"], PATTERNS))


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(
            [(1, "float32", "irregular"), (1, "float32", "every step"), (2, "float64", "odd gaps")], id="some"
        ),
        pytest.param(EVERY_CASE, id="all", marks=pytest.mark.slow),
    ],
)
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="the flag is for x86")
def test_bit_for_bit_without_fused_multiply_add(cases):
    """AVX without AVX2 has no fused multiply-add: then all is equal, key for key and bit for bit."""
    flags = f"{compiler.QUICK} --xla_cpu_max_isa=AVX --xla_force_host_platform_device_count=2"
    child = subprocess.run(
        [sys.executable, "-c", f"import conftest, test_observe; test_observe.bit_for_bit({cases})"],
        cwd=Path(__file__).parent, env={**os.environ, "XLA_FLAGS": flags, "PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True, text=True,
    )  # fmt: skip
    assert child.returncode == 0, child.stderr


# The rest of what `observe` promises.


def test_stopped_episodes_are_masked(key):
    """Unobserved entries are NaN; the rest is what the learner without restarts shows."""
    times = [0.01, 0.05, 0.2]
    learner = mj.ForwardLearner(Quartic(), normal, STEP, 2.0)
    stopping = mj.ForwardLearner(Quartic(), normal, STEP, 2.0, restart_probability=0.1)
    whole, part = (mj.observe(key, one, num_episodes=4000, times=times) for one in (learner, stopping))
    assert np.all(whole.observed)
    seen = np.asarray(part.observed)
    expected = 0.9 ** np.asarray([1, 5, 20])
    assert np.all(np.abs(seen.mean(0) - expected) < 4 * np.sqrt(expected * (1 - expected) / 4000))
    for field in ("x", "gradient", "hessian", "weight"):
        got, full = np.asarray(getattr(part, field)), np.asarray(getattr(whole, field))
        assert np.all(np.isnan(got[~seen]))
        np.testing.assert_allclose(got[seen], full[seen], rtol=0, atol=1e-13 * np.abs(full).max())


@pytest.mark.parametrize("d", [1, 2, 6])
def test_default_scheme(d):
    """`Adapted`, at rates that are a function of the learner and the last time: those of the Hessians met there."""
    learner = mj.ForwardLearner(Quartic(0.1), functools.partial(normal, d=d), 0.02, gradient_noise=0.5)
    scheme = choose_scheme(floats_to_arrays(learner, jnp.float64), None, 20)  # as `observe` calls it, to the last bit
    options = {"num_episodes": 40, "times": [0.08, 0.4]}
    for key in jax.random.split(jax.random.key(0), 2):
        chosen = mj.observe(key, learner, **options)
        assert chosen.weight.shape == (40, 2, d)
        assert ulps(chosen, mj.observe(key, learner, **options, scheme=scheme)) == 0
    paths = jax.jit(jax.vmap(lambda key: mj.simulate(key, learner, 20)))(jax.random.split(jax.random.key(1), 2000))
    squares = np.asarray(paths.hessian[:, 10:20] @ paths.hessian[:, 10:20]).trace(axis1=-2, axis2=-1).mean(1)
    error = squares.std() / np.sqrt(256)  # of the pilot, by far the larger
    assert abs(np.sum(np.asarray(scheme.rate) ** 2) - squares.mean()) < 4.2 * error


def test_default_scheme_of_minibatches():
    """The Hessians are those of the batches."""
    rng = np.random.default_rng(0)
    features, labels = rng.normal(size=(40, 2)), np.arange(40) % 2.0
    rates = []
    for batch_size in (1, 40):
        loss = LogisticRegression(features, labels, batch_size=batch_size)
        rates.append(choose_scheme(mj.ForwardLearner(loss, plane, 0.005), None, 20).rate)
    assert np.all(rates[0] > 1.2 * rates[1])


def test_samples_know_their_sizes():
    x = jnp.zeros((7, 3, 2))
    samples = mj.Samples(x, x, jnp.zeros((7, 3, 2, 2)), x, jnp.ones((7, 3), bool))
    assert (samples.num_episodes, samples.num_times, samples.dim) == (7, 3, 2)


def test_times_may_be_a_number_or_an_array():
    learner = mj.ForwardLearner(Quartic(), normal, STEP)
    run = functools.partial(mj.observe, jax.random.key(0), learner, num_episodes=5)
    expected = run(times=[0.03])
    for times in (0.03, (0.03,), np.asarray([0.03]), jnp.asarray([0.03], jnp.float32)):
        assert ulps(run(times=times), expected) == 0


def test_memory_does_not_grow_with_the_number_of_steps():
    """In one dimension and float32 at most 100 bytes an episode, however long it is."""
    learner = mj.ForwardLearner(Quartic(), functools.partial(normal, dtype=jnp.float32), STEP)
    temporary = []
    for num_steps in (40, 160):
        run = jax.jit(lambda key, n=num_steps: mj.observe(key, learner, num_episodes=10_000, times=n * STEP))
        analysis = run.lower(jax.random.key(0)).compile().memory_analysis()
        temporary.append(analysis.temp_size_in_bytes)
    assert temporary[1] <= temporary[0] + 8 * (160 - 40)  # the numbers of the steps, once for all episodes
    assert temporary[0] <= 100 * 10_000


# Derivatives from outside.


def outcome(coupling, beta, noise, rate):
    learner = mj.ForwardLearner(Quartic(coupling), plane, 0.03, beta, noise)
    options = {"num_episodes": 10, "times": [0.24]}
    canonical = mj.observe(jax.random.key(5), learner, **options, scheme=mj.Canonical())
    window = mj.observe(jax.random.key(6), learner, **options, scheme=mj.Windowed(rate))
    smooth = jnp.mean(jnp.sin(canonical.x) * canonical.weight + jnp.cos(canonical.gradient))
    return smooth + jnp.mean(jnp.sin(window.x) * window.weight)


def check_derivatives(function, point):
    """Central differences on the same key, the noise of the reparameterised paths held: their error is of order h²."""
    function, h = jax.jit(function), 1e-5
    slopes = jax.jit(jax.jacrev(function, argnums=tuple(range(len(point)))))(*point)
    for i, slope in enumerate(slopes):
        ahead, behind = (function(*(p + s * h * (i == j) for j, p in enumerate(point))) for s in (1, -1))
        assert float(slope) == pytest.approx(float(ahead - behind) / (2 * h), rel=1e-6, abs=1e-8)
        assert abs(float(slope)) > 1e-4  # a derivative that is lost would be zero


def test_derivatives_in_learner_potential_and_scheme():
    check_derivatives(outcome, (0.5, 2.0, 0.7, 3.0))


def test_derivative_in_a_matrix_of_the_potential():
    def mean(a, b):
        loss = Quadratic(jnp.stack([jnp.stack([a, b]), jnp.stack([b, jnp.ones(())])]))
        learner, scheme = mj.ForwardLearner(loss, plane, 0.05), mj.Canonical()
        samples = mj.observe(jax.random.key(1), learner, num_episodes=10, times=[0.25], scheme=scheme)
        return jnp.mean(jnp.sin(samples.x) * samples.weight)

    check_derivatives(mean, (jnp.asarray(2.0), jnp.asarray(0.4)))


def test_derivatives_leave_the_default_rates_alone():
    """They are tuned and not part of the model; where the rates of two directions are equal nothing breaks."""
    scheme = choose_scheme(mj.ForwardLearner(Quadratic(2 * jnp.eye(2)), plane, 0.05), None, 5)
    np.testing.assert_allclose(scheme.rate, 2.0)

    def mean(a, scheme):
        learner = mj.ForwardLearner(Quadratic(a * jnp.eye(2)), plane, 0.05)
        samples = mj.observe(jax.random.key(1), learner, num_episodes=10, times=[0.25], scheme=scheme)
        return jnp.mean(jnp.sin(samples.x) * samples.weight)

    by_default, held = (jax.jit(jax.grad(functools.partial(mean, scheme=s)))(2.0) for s in (None, scheme))
    assert float(by_default) == pytest.approx(float(held), rel=1e-9)
    assert abs(float(held)) > 1e-4


def test_a_traced_step_size_is_refused():
    def mean(step_size):
        learner = mj.ForwardLearner(Quartic(), normal, step_size)
        return jnp.mean(mj.observe(jax.random.key(0), learner, num_episodes=3, times=[0.1]).x)

    with pytest.raises(ValueError, match=r"step_size must have a value \(not be traced\).*use simulate"):
        jax.grad(mean)(0.05)


# Compilation.


def test_a_sweep_compiles_once():
    calls = []

    def gradient(x):
        calls.append(x.shape)
        return x

    loss = mj.Potential(lambda x: x @ x / 2, gradient, lambda x: jnp.eye(1))

    def traces(step_size, beta, noise, rate):
        calls.clear()
        learner = mj.ForwardLearner(loss, normal, step_size, beta, noise)
        scheme = mj.Windowed(rate)
        mj.observe(jax.random.key(0), learner, num_episodes=3, times=[5 * step_size], scheme=scheme)
        return len(calls)

    assert traces(0.01, 1.0, 0.5, 1.0) > 1
    # at most one look at the shapes that the potential returns, and nothing compiled
    assert traces(0.02, 1.0, 0.5, 1.0) <= 1
    assert traces(0.03, 2.0, 0.1, 4.0) <= 1


# Recorded paths.


@functools.cache
def recorded():
    learner = mj.ForwardLearner(Quartic(0.5), plane, 0.02, 3.0, 0.5)
    return jax.jit(jax.vmap(lambda key: mj.simulate(key, learner, 8)))(jax.random.split(jax.random.key(2), 6))


def weigh_recorded(**changes):
    paths = recorded()
    arguments = {
        "x": paths.x, "gradient": paths.gradient, "hessian": paths.hessian,
        "step_size": 0.02, "inverse_temperature": 3.0, "times": (0.06, 0.16),
    }  # fmt: skip
    return mj.samples_from_paths(**{**arguments, **changes})


def test_samples_from_paths():
    at = np.asarray([3, 8])
    default = mj.Adapted.fit(recorded().hessian[:, 4:].reshape(-1, 2, 2))  # of the second half of the steps
    for scheme in (default, mj.Canonical(), mj.Windowed(2.0)):
        samples = weigh_recorded(scheme=None if scheme is default else scheme)
        weights = jax.jit(jax.vmap(lambda path, scheme=scheme: mj.weigh(path, scheme)))(recorded())
        x, g, H, weights = (leaf[:, at] for leaf in (recorded().x, recorded().gradient, recorded().hessian, weights))
        assert ulps(samples, mj.Samples(x, g, H, weights, jnp.ones((6, 2), bool))) < 8


def test_recorded_last_steps():
    """What lies past the end of an episode is neither read nor invented."""
    last_steps = np.asarray([8, 2, 3, 7, 8, 0])
    junk = np.arange(9)[None, :] > last_steps[:, None]
    spoilt = {
        name: jnp.where(junk.reshape(6, 9, *(1,) * (leaf.ndim - 2)), jnp.nan, leaf)
        for name in ("x", "gradient", "hessian")
        for leaf in [getattr(recorded(), name)]
    }
    scheme = mj.Adapted(3.0)
    samples = weigh_recorded(last_steps=last_steps, scheme=scheme, **spoilt)
    whole, by_default = weigh_recorded(scheme=scheme), weigh_recorded(last_steps=last_steps, **spoilt)
    np.testing.assert_array_equal(jnp.isfinite(by_default.weight).all(-1), samples.observed)
    observed = np.asarray([3, 8]) <= last_steps[:, None]
    np.testing.assert_array_equal(samples.observed, observed)
    for field in ("x", "gradient", "hessian", "weight"):
        got = np.asarray(getattr(samples, field))
        assert np.all(np.isnan(got[~observed]))
        np.testing.assert_allclose(got[observed], np.asarray(getattr(whole, field))[observed], rtol=1e-12)


def test_recorded_integers():
    x = np.asarray([[[1], [2], [0]]])
    samples = mj.samples_from_paths(x, x, np.ones((1, 3, 1, 1), int), step_size=0.1, times=0.2)
    assert samples.x.dtype == samples.weight.dtype == jnp.float64
    assert np.all(np.isfinite(samples.weight))


# Bad input.


def observing(**changes):
    learner = mj.ForwardLearner(Quartic(), normal, STEP)
    return mj.observe(**{"key": jax.random.key(0), "learner": learner, "num_episodes": 3, "times": [0.1], **changes})


def spoiled(name, episode, step):
    return {name: getattr(recorded(), name).at[episode, step].set(jnp.nan)}


BAD = {
    r"num_episodes must be a whole number, at least 1, got 0": lambda: observing(num_episodes=0),
    r"num_episodes must be a whole number, at least 1, got 2\.5": lambda: observing(num_episodes=2.5),
    r"times must be positive multiples of step_size=0\.01, got 0\.105": lambda: observing(times=[0.1, 0.105]),
    r"times must be positive multiples of step_size=0\.01, got -0\.1": lambda: observing(times=-0.1),
    r"times must be positive multiples of step_size=0\.01, got 0\.0": lambda: observing(times=0.0),
    r"times must be positive multiples of step_size=0\.01, got nan": lambda: observing(times=[float("nan")]),
    r"times must be strictly increasing, got \[0\.2, 0\.1\]": lambda: observing(times=[0.2, 0.1]),
    r"times must be strictly increasing, got \[0\.1, 0\.1\]": lambda: observing(times=[0.1, 0.1]),
    r"times must be a non-empty list of times, got \[\]": lambda: observing(times=[]),
    r"times must be a non-empty list of times, got \[\[0\.1\]\]": lambda: observing(times=[[0.1]]),
    r"x must have shape \(episodes, points, d\), .* got \(6, 9\)": lambda: weigh_recorded(x=recorded().x[..., 0]),
    r"gradient must have shape .*, that of x, \(6, 9, 2\), got \(6, 8, 2\)": lambda: weigh_recorded(
        gradient=recorded().gradient[:, 1:]
    ),
    r"hessian must have shape .* here \(6, 9, 2, 2\), .* got \(6, 9, 1, 2\)": lambda: weigh_recorded(
        hessian=recorded().hessian[..., :1, :]
    ),
    r"hessian must have shape .* here \(6, 9, 2\), for its diagonal, got \(6, 9, 1\)": lambda: weigh_recorded(
        hessian=recorded().hessian[..., 0, :1]
    ),
    r"step_size must be one number or have shape \(6,\), .*, got shape \(2,\)": lambda: weigh_recorded(
        step_size=[0.02, 0.02]
    ),
    r"give either times or steps, got times=None and steps=None": lambda: weigh_recorded(times=None),
    r"give either times or steps, got times=\(0\.06, 0\.16\) and steps=3": lambda: weigh_recorded(steps=3),
    r"steps must lie inside the recorded paths, of 8 steps, got 9": lambda: weigh_recorded(times=None, steps=[1, 9]),
    r"steps must be strictly increasing, got \[3, 3\]": lambda: weigh_recorded(times=None, steps=[3, 3]),
    r"steps must be a whole number, at least 1, got 0": lambda: weigh_recorded(times=None, steps=0),
    r"steps must be a whole number, at least 1, got 1\.5": lambda: weigh_recorded(times=None, steps=[1.5]),
    r"x must hold real numbers, got dtype complex": lambda: weigh_recorded(x=recorded().x.astype(complex)),
    r"x must be an array of numbers, got str": lambda: weigh_recorded(x="path"),
    r"step_size must be positive and finite, got -0\.02": lambda: weigh_recorded(step_size=-0.02),
    r"step_size must be positive and finite, got 0": lambda: weigh_recorded(step_size=0.0),
    r"inverse_temperature must be positive and finite, got 0": lambda: weigh_recorded(inverse_temperature=0.0),
    r"times must be positive multiples of step_size=0\.02, got 0\.05": lambda: weigh_recorded(times=0.05),
    r"times must lie inside the recorded paths, which end at 0\.16, got 0\.18": lambda: weigh_recorded(
        times=[0.02, 0.18]
    ),
    r"last_steps must have shape \(6,\) for axes \(episodes,\), got \(2,\)": lambda: weigh_recorded(last_steps=[1, 2]),
    r"last_steps must be between 0 and 8 steps, got 0 to 9": lambda: weigh_recorded(last_steps=[8, 9, 0, 1, 1, 1]),
    r"last_steps must be whole numbers of steps, got dtype float": lambda: weigh_recorded(last_steps=np.ones(6)),
    r"x must be finite where observed; first bad value at episode 4, step 2 \(1 in all\)": lambda: weigh_recorded(
        **spoiled("x", 4, 2)
    ),
    r"gradient must be finite where observed; first bad value at episode 0, step 8": lambda: weigh_recorded(
        **spoiled("gradient", 0, 8)
    ),
    r"hessian must be finite where observed; first bad value at episode 1, step 0": lambda: weigh_recorded(
        **spoiled("hessian", 1, 0)
    ),
    r"weight must have shape \(7, 3, 2\), .* to go with x of \(7, 3, 2\), got \(7, 3\)": lambda: mj.Samples(
        *(jnp.zeros((7, 3, *s)) for s in ((2,), (2,), (2, 2), ())), jnp.ones((7, 3), bool)
    ),
}


@pytest.mark.parametrize("message", BAD)
@pytest.mark.usefixtures("no_type_checks")
def test_mistakes_are_named(message):
    with pytest.raises(ValueError, match=message):
        BAD[message]()
