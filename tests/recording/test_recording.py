"""Recorded runs: every fault by its name, several learners, restarts, missing Hessians, stopping, chunks."""

import functools
import json
import subprocess
import sys
import tracemalloc
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from logs import gradient, quartic_log

import malliavin_jax as mj
from malliavin_jax.potentials import Quartic


def same(samples, other, rtol=1e-12):
    for name in ("x", "gradient", "hessian", "weight"):
        a, b = np.asarray(getattr(samples, name)), np.asarray(getattr(other, name))
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * np.nanmax(np.abs(b)))
    np.testing.assert_array_equal(samples.observed, other.observed)


def joined(chunks):
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *chunks)


@eqx.filter_jit
def at_grid(samples, alphas, localizer):
    return jax.vmap(
        lambda alpha: mj.conditional_expectation(samples, samples.gradient, samples.hessian, alpha, localizer)
    )(alphas)


# A log is what `observe` sees.


def test_a_simulated_log_gives_the_samples_of_observe():
    learner = mj.ForwardLearner(Quartic(), lambda key: jax.random.normal(key, (1,)), 0.02, 2.0, 0.5, 0.05)
    key, times = jax.random.key(7), [0.08, 0.16]
    paths = jax.jit(jax.vmap(lambda k: mj.simulate(k, learner, 8)))(jax.random.split(key, 40))
    recording = mj.Recording(
        paths.x,
        paths.gradient,
        paths.hessian,
        step_size=0.02,
        inverse_temperature=2.0,
        last_steps=np.minimum(paths.last_step, 8),
    )
    scheme = mj.Adapted(3.0)  # the rates of the default come from other pilots
    samples = recording.samples(times=times, scheme=scheme)
    assert 0 < np.asarray(samples.observed)[:, -1].sum() < 40
    same(samples, mj.observe(key, learner, num_episodes=40, times=times, scheme=scheme))


def test_numbers_are_checked_once_at_the_door(monkeypatch):
    """Samples of a recording are those of the same arrays handed in directly, without looking at them again."""
    log = quartic_log(0, 30, 6)
    recording = mj.Recording(**log, step_size=0.02, inverse_temperature=2.0)
    expected = mj.samples_from_paths(**recording.part(), steps=[3, 6])
    for module in ("recorded", "samples"):
        unwanted = f"malliavin_jax.samples.{module}.check_values"
        monkeypatch.setattr(unwanted, lambda *_: pytest.fail("checked again"))
    found = recording.samples(steps=[3, 6])
    for leaf, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(leaf, other)


# Several learners in one data set.


def two_learners(episodes=40, steps=8):
    sizes = np.where(np.arange(episodes) % 2 == 0, 0.04, 0.02)
    betas = np.where(np.arange(episodes) // 2 % 2 == 0, 1.0, 3.0)
    log = quartic_log(1, episodes, steps, d=2, step_size=sizes, beta=betas, noise=0.3, coupling=0.5)
    return log, sizes, betas


def test_several_learners_equal_each_by_itself():
    log, sizes, betas = two_learners()
    times = [0.08, 0.16, 0.24]  # the small steps end at 0.16
    scheme = mj.Adapted(3.0)
    together = mj.Recording(**log, step_size=sizes, inverse_temperature=betas).samples(times=times, scheme=scheme)
    for size, beta in ((0.02, 1.0), (0.02, 3.0), (0.04, 1.0), (0.04, 3.0)):
        mine = (sizes == size) & (betas == beta)
        reach = times if size == 0.04 else times[:2]
        mine_alone = {name: array[mine] for name, array in log.items()}
        alone = mj.samples_from_paths(
            **mine_alone, step_size=size, inverse_temperature=beta, times=reach, scheme=scheme
        )
        here = np.flatnonzero(mine)[:, None], np.arange(len(reach))
        part = jax.tree.map(lambda leaf, here=here: leaf[here], together)
        same(part, alone)
        if size == 0.02:
            assert not np.any(np.asarray(together.observed)[mine, 2])
            assert np.all(np.isnan(np.asarray(together.weight)[mine, 2]))
    steps = mj.Recording(**log, step_size=sizes, inverse_temperature=betas).samples(steps=[2, 4])
    assert np.all(steps.observed)
    np.testing.assert_array_equal(steps.x, log["x"][:, [2, 4]])


# Minibatches.


def test_minibatches_whose_gradient_and_hessian_share_their_noise(key):
    """g = (1 + a)x³ + x + c with a and c drawn at every step: the Hessians of the batches actually used serve."""
    rng = np.random.default_rng(int(jax.random.randint(key, (), 0, 1000)))
    episodes, steps, size = 20_000, 40, 0.02
    x, g, h = (np.empty((episodes, steps + 1, 1)) for _ in range(3))
    x[:, 0] = rng.normal(size=(episodes, 1))
    for k in range(steps + 1):
        a, c = 0.5 * rng.normal(size=(episodes, 1)), 2 * rng.normal(size=(episodes, 1))
        g[:, k], h[:, k] = (1 + a) * x[:, k] ** 3 + x[:, k] + c, 3 * (1 + a) * x[:, k] ** 2 + 1
        if k < steps:
            x[:, k + 1] = x[:, k] - size * g[:, k] + np.sqrt(2 * size) * rng.normal(size=(episodes, 1))
    samples = mj.Recording(x, g, h, step_size=size, inverse_temperature=1.0).samples(steps=[10, 25, 40])
    alphas = jnp.linspace(-1, 1, 9)[:, None]
    found = at_grid(samples, alphas, mj.Laplace(0.5))
    z = np.asarray(found.value - gradient(alphas)) / np.asarray(found.stderr)
    assert np.max(np.abs(z)) < 4


# Stopping that depends on the path.


@functools.cache
def stopped(seed):
    """Samples of episodes that stop where they pass 0.8 upwards, and of the same ones with stops at random."""
    log = quartic_log(seed, 40_000, 40, beta=1.0, noise=0.5)
    crossed = log["x"][..., 0] > 0.8
    first = np.where(crossed.any(1), np.argmax(crossed, 1), 40)
    last_steps = {"path": first, "random": np.random.default_rng(seed + 1).permutation(first)}
    return {
        name: mj.Recording(**log, step_size=0.02, inverse_temperature=1.0, last_steps=n).samples(steps=40)
        for name, n in last_steps.items()
    }


@pytest.mark.parametrize("seed", [0, 1])
def test_stopping_by_the_path_biases_long_localizers_and_not_the_short_one(seed):
    alphas = jnp.asarray([[0.4]])

    def error(name, localizer):
        found = at_grid(stopped(seed)[name], alphas, localizer)
        return float(found.value[0, 0]) - (0.4**3 + 0.4), float(found.stderr[0, 0])

    long = mj.Laplace(jnp.asarray(2.0))
    bias, stderr = error("path", long)
    assert abs(bias) > 8 * stderr
    gap, stderr = error("random", long)
    assert abs(gap) < 4 * stderr
    short = mj.short_localizer(stopped(seed)["path"][:15_000])
    assert isinstance(short, mj.Laplace)
    gap, stderr = error("path", short)
    assert abs(gap) < 4 * stderr
    assert abs(gap) < 0.25 * abs(bias)


def test_the_short_localizer_is_as_long_as_a_kernel(monkeypatch):
    home = sys.modules[mj.short_localizer.__module__]
    monkeypatch.setattr(home, "cross_validated_bandwidth", lambda samples, degree: 0.3 if degree == 0 else None)
    for d, expected in ((1, mj.Laplace(0.3)), (2, mj.Gaussian(0.3, 0.075)), (3, mj.Gaussian(0.3, 0.075))):
        x = jnp.zeros((2, 1, d))
        samples = mj.Samples(x, x, jnp.zeros((2, 1, d, d)), x, jnp.ones((2, 1), bool))
        assert eqx.tree_equal(mj.short_localizer(samples), expected)


# One long log.


def test_a_long_log_is_cut_at_its_restarts():
    log = quartic_log(5, 5, 6, d=2, coupling=0.5)
    last_steps = np.asarray([6, 3, 1, 0, 5])
    rows = np.concatenate([np.stack([np.full(n + 1, e), np.arange(n + 1)]) for e, n in enumerate(last_steps)], 1)
    long = {name: array[rows[0], rows[1]] for name, array in log.items()}
    starts = np.flatnonzero(rows[1] == 0)
    settings = {"step_size": 0.02, "inverse_temperature": 2.0}
    expected = mj.Recording(**log, **settings, last_steps=last_steps).samples(steps=[1, 3, 6])
    for given in (starts, rows[1] == 0, starts.tolist()):
        recording = mj.split_log(**long, starts=given, **settings)
        np.testing.assert_array_equal(recording.last_steps, last_steps)
        same(recording.samples(steps=[1, 3, 6]), expected)
    short = mj.split_log(**long, starts=starts, **settings, max_steps=3)
    np.testing.assert_array_equal(short.last_steps, np.minimum(last_steps, 3))
    assert short.num_steps == 3


# Chunks.


def test_chunks_are_one_pass():
    sizes = np.where(np.arange(20) % 2 == 0, 0.04, 0.02)
    log = quartic_log(1, 20, 8, step_size=sizes, noise=0.3)
    recording = mj.Recording(**log, step_size=sizes, inverse_temperature=2.0, last_steps=np.arange(20) % 9)
    whole = recording.samples(steps=[2, 5])
    chunks = recording.chunks(13, steps=[2, 5])
    assert len(chunks) == len(list(chunks)) == 2
    same(joined(list(chunks)), whole)
    with pytest.raises(IndexError, match="there are 2 chunks, got number 2"):
        chunks[2]
    empty = mj.Accumulator(jnp.asarray([[0.1], [-0.5]]), mj.Laplace(0.5))
    at_once = empty.add(whole).estimate()
    in_order = mj.accumulate(chunks, empty)
    backwards = empty.add(chunks[1]).merge(empty.add(chunks[0]))
    for other in (in_order, backwards):
        assert other.num_episodes == 20
        for a, b in zip(jax.tree.leaves(other.estimate()), jax.tree.leaves(at_once), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-11)


@pytest.mark.slow
def test_a_tuned_scheme_is_tuned_once():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(10, 3, 6))
    recording = mj.Recording(x, x, np.broadcast_to(np.eye(6), (10, 3, 6, 6)), step_size=0.1, inverse_temperature=1.0)
    same(joined(list(recording.chunks(5, steps=2))), recording.samples(steps=2))


def test_memory_is_that_of_a_chunk(tmp_path):
    """10⁵ episodes in a folder; benchmarks/chunks.py does it with 10⁷, and measures the memory of the process."""
    log = quartic_log(6, 100_000, 4, dtype=np.float32)
    mj.io.save(tmp_path, mj.Recording(**log, step_size=0.02, inverse_temperature=2.0))
    total = sum(file.stat().st_size for file in tmp_path.iterdir())
    chunks = mj.io.load(tmp_path).chunks(5000, steps=4)
    accumulator = mj.Accumulator(jnp.linspace(-1, 1, 3, dtype=jnp.float32)[:, None], mj.Laplace(0.3))
    accumulator.add(chunks[0])  # compiled here, and not counted
    tracemalloc.start()
    accumulator = mj.accumulate(chunks, accumulator)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert accumulator.num_episodes == 100_000
    assert np.all(accumulator.estimate().trusted)
    assert peak < 0.25 * total, (peak, total)


@pytest.mark.slow
def test_ten_million_episodes_in_less_than_two_gibibytes(tmp_path):
    script = Path(__file__).parents[2] / "benchmarks" / "chunks.py"
    subprocess.run([sys.executable, script, "--write", tmp_path, "10000000"], check=True)
    found = subprocess.run([sys.executable, script, "--read", tmp_path], check=True, capture_output=True, text=True)
    row = json.loads(found.stdout)
    assert row["peak_resident_bytes"] < 2 * 2**30
    assert row["bytes_on_disk"] > 2e9
    assert row["rmse"] < 4 * row["median_stderr"]


# Faults.


def recorded(**changes):
    log = quartic_log(8, 5, 6, d=2, coupling=0.5)
    return mj.Recording(**{**log, "step_size": 0.02, "inverse_temperature": 2.0, **changes})


def spoilt(name, place, value):
    array = quartic_log(8, 5, 6, d=2, coupling=0.5)[name]
    array[place] = value
    return {name: array}


FAULTS = {
    r"episode 3, step 2: x must be finite, got \[ *nan, ": spoilt("x", (3, 2, 0), np.nan),
    r"episode 1, step 6: gradient must be finite": spoilt("gradient", (1, 6), np.inf),
    r"episode 0, step 4: hessian must be finite": spoilt("hessian", (0, 4, 1, 1), np.nan),
    r"episode 2, step 1: hessian must be symmetric, got \[\[": spoilt("hessian", (2, 1, 0, 1), 0.6),
    r"episode 4: last_steps must be between 0 and 6 steps, got 7": {"last_steps": [6, 6, 0, 1, 7]},
    r"episode 2: last_steps must be between 0 and 6 steps, got -1": {"last_steps": [6, 6, -1, 1, 7]},
    r"episode 1: step_size must be positive and finite, got 0\.0": {"step_size": [0.02, 0.0, 0.02, 0.02, -1]},
    r"episode 4: inverse_temperature must be positive and finite, got inf": {
        "inverse_temperature": [1, 1, 1, 1, np.inf]
    },
}  # fmt: skip
MISTAKES = {
    r"x must have shape \(episodes, points, d\), none of them 0, got \(5, 7\)": lambda: recorded(x=np.zeros((5, 7))),
    r"x must have shape .* none of them 0, got \(5, 0, 2\)": lambda: recorded(x=np.zeros((5, 0, 2))),
    r"x must hold at least 2 points an episode, .* got 1": lambda: recorded(x=np.zeros((5, 1, 2))),
    r"gradient must have shape .* of x, \(5, 7, 2\), got \(5, 6, 2\)": lambda: recorded(gradient=np.zeros((5, 6, 2))),
    r"hessian must have shape .*\(5, 7, 2, 2\), or .*\(5, 7, 2\), for its diagonal, got \(5, 7\)": lambda: recorded(
        hessian=np.zeros((5, 7))
    ),
    r"x must hold real numbers, got dtype complex128": lambda: recorded(x=np.zeros((5, 7, 2), complex)),
    r"x must hold real numbers, got dtype object": lambda: recorded(x=np.asarray([None])),
    r"gradient must be an array of numbers, got list": lambda: recorded(gradient=[[1.0], [1.0, 2.0]]),
    r"step_size must be positive and finite, got -0\.1": lambda: recorded(step_size=-0.1),
    r"step_size must be one number or have shape \(5,\), one for each episode, .*, got shape \(2,\)": lambda: recorded(
        step_size=[0.1, 0.2]
    ),
    r"last_steps must have shape \(5,\), got \(1,\)": lambda: recorded(last_steps=[3]),
    r"last_steps must be whole numbers of steps, got dtype float64": lambda: recorded(last_steps=np.ones(5)),
    r"on_bad must be 'refuse' or 'drop', got 'ignore'": lambda: recorded(on_bad="ignore"),
    r"every one of the 5 episodes is bad; episode 0, step 0: x": lambda: recorded(
        x=np.full((5, 7, 2), np.nan), on_bad="drop"
    ),
    r"step_size is not recorded and must be given; consistency": lambda: recorded(step_size=None).samples(steps=1),
    r"inverse_temperature is not recorded": lambda: recorded(inverse_temperature=None).chunks(2, steps=1),
    r"starts must begin with row 0, got \[1\]": lambda: cut(starts=[1, 3]),
    r"starts must increase and stay below 8: episode 1 starts at row 5, then comes 5": lambda: cut(starts=[0, 5, 5]),
    r"episode 2 starts at row 8, then comes the end of the log, row 8": lambda: cut(starts=[0, 5, 8]),
    r"starts must hold one flag for each of the 8 rows, got 2": lambda: cut(starts=[True, False]),
    r"starts must be a list of rows or of flags, got float64": lambda: cut(starts=[0.0, 2.0]),
    r"gradient must have as many rows as x, 8, got 7": lambda: cut(gradient=np.zeros((7, 1))),
    r"x must have shape \(rows, d\) for one long log, got \(8,\)": lambda: cut(x=np.zeros(8)),
    r"max_steps must be a whole number, at least 1, got 0": lambda: cut(max_steps=0),
}


def cut(**changes):
    return mj.split_log(**{"x": np.zeros((8, 1)), "gradient": np.zeros((8, 1)), "starts": [0, 4], **changes})


@pytest.mark.parametrize("message", FAULTS)
def test_the_first_fault_is_named_or_its_episode_dropped(message):
    with pytest.raises(ValueError, match=message):
        recorded(**FAULTS[message])
    with pytest.warns(RuntimeWarning, match=rf"dropped \d of 5 episodes; the first: {message}"):
        recording = recorded(**FAULTS[message], on_bad="drop")
    assert recording.num_episodes == 5 - recording.dropped
    assert np.all(np.isfinite(recording.part()["x"]))
    whole, kept = recorded().part(), recording.part()
    rows = [i for i in range(5) if np.any(np.all(whole["x"][i] == kept["x"], (1, 2)))]
    assert len(rows) == recording.num_episodes
    for name in ("gradient", "hessian"):
        np.testing.assert_array_equal(kept[name], whole[name][rows])
    for name in ("last_steps", "step_size", "inverse_temperature"):
        if np.ndim(FAULTS[message].get(name, 0)) == 1:
            np.testing.assert_array_equal(kept[name], np.asarray(FAULTS[message][name])[rows])


def test_what_is_past_the_end_is_not_looked_at():
    last_steps = [6, 2, 6, 6, 6]
    broken = spoilt("x", (1, slice(3, None)), np.nan)
    same(
        recorded(**broken, last_steps=last_steps).samples(steps=[1, 6]),
        recorded(last_steps=last_steps).samples(steps=[1, 6]),
    )


@pytest.mark.parametrize("message", MISTAKES)
@pytest.mark.usefixtures("no_type_checks")
def test_mistakes_are_named(message):
    with pytest.raises(ValueError, match=message):
        MISTAKES[message]()
