"""Recordings whose step size follows a schedule: its shapes, its times, and what is made of it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from logs import gradient, hessian

import malliavin_jax as mj

SIZES = 0.04 * 0.9 ** np.arange(12)


def scheduled_log(seed, episodes, sizes=SIZES, beta=2.0):
    """A learner in NumPy on x⁴/4 + x²/2 that cools its step size down."""
    rng = np.random.default_rng(seed)
    x = [rng.normal(size=(episodes, 1))]
    for size in sizes:
        x.append(x[-1] - size * gradient(x[-1]) + np.sqrt(2 * size / beta) * rng.normal(size=(episodes, 1)))
    x = np.stack(x, axis=1)
    return {"x": x, "gradient": gradient(x), "hessian": hessian(x)}


def padded(sizes, last=np.nan):
    return np.append(sizes, last)


def equal(samples, other):
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-12), samples, other)


def test_shapes_and_what_they_mean():
    log, sizes = scheduled_log(0, 5), padded(SIZES)
    make = functools.partial(mj.samples_from_paths, **log, inverse_temperature=2.0, scheme=mj.Adapted(3.0))
    one = make(step_size=sizes, steps=[4, 12])
    equal(make(step_size=sizes[None], steps=[4, 12]), one)
    equal(make(step_size=jnp.tile(sizes, (5, 1)), times=[SIZES[:4].sum(), SIZES.sum()]), one)
    for shape in (sizes, sizes[None], np.tile(sizes, (5, 1))):
        recording = mj.Recording(**log, inverse_temperature=2.0, step_size=shape)
        assert recording.step_size.shape == (5, 13)
        equal(recording.samples(steps=[4, 12], scheme=mj.Adapted(3.0)), one)
        chunks = list(recording.chunks(2, steps=[4, 12], scheme=mj.Adapted(3.0)))
        equal(jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *chunks), one)
    even = make(step_size=np.full(13, 0.02), times=[0.04])
    equal(even, make(step_size=0.02, times=[0.04]))


def test_under_jit():
    log, sizes = scheduled_log(0, 5), np.append(SIZES, 1.0)
    make = functools.partial(mj.samples_from_paths, scheme=mj.Adapted(3.0), steps=[4], **log)
    traced = jax.jit(lambda sizes, last: make(step_size=sizes, last_steps=last))(sizes, jnp.full(5, 12))
    equal(traced, make(step_size=sizes))


def test_as_many_episodes_as_points():
    """One dimension means episodes; (1, points) is the schedule."""
    log, sizes = scheduled_log(1, 13), padded(SIZES, 0.01)
    assert mj.Recording(**log, step_size=sizes).step_size.shape == (13,)
    assert mj.Recording(**log, step_size=sizes[None]).step_size.shape == (13, 13)
    make = functools.partial(mj.samples_from_paths, **log, inverse_temperature=2.0, scheme=mj.Adapted(3.0), steps=[3])
    first = jax.tree.map(lambda leaf: leaf[:1], make(step_size=sizes))
    alone = {name: array[:1] for name, array in log.items()}
    options = {"inverse_temperature": 2.0, "scheme": mj.Adapted(3.0), "steps": [3]}
    equal(first, mj.samples_from_paths(**alone, **options, step_size=float(sizes[0])))
    assert not np.allclose(make(step_size=sizes[None]).weight, make(step_size=sizes).weight)


def test_episodes_of_several_schedules_meet_a_time_at_their_own_rows():
    slow, fast = np.full(12, 0.01), np.tile([0.03, 0.01], 6)
    logs = [scheduled_log(2, 3, slow), scheduled_log(3, 3, fast)]
    log = {name: np.concatenate([each[name] for each in logs]) for name in logs[0]}
    sizes = np.repeat([padded(slow), padded(fast)], 3, axis=0)
    sizes[5, 2:] = np.nan  # an episode of two steps: what follows them is not looked at
    last_steps = [12, 12, 12, 12, 12, 2]
    recording = mj.Recording(**log, step_size=sizes, inverse_temperature=2.0, last_steps=last_steps)
    samples = recording.samples(times=[0.04, 0.12, 0.2])
    x = log["x"]
    expected = np.stack([np.stack([x[0, 4], x[0, 12]]), np.stack([x[3, 2], x[3, 6]]), np.stack([x[5, 2], x[5, 2]])])
    np.testing.assert_array_equal(samples.x[[0, 3], :2], expected[:2])
    np.testing.assert_array_equal(samples.observed, [[1, 1, 0]] * 3 + [[1, 1, 1]] * 2 + [[1, 0, 0]])


@pytest.mark.parametrize("seed", [0, 1])
def test_integration_by_parts(seed):
    """E[φ'(X)] = E[φ(X) S], with the default scheme, along a schedule that falls by two thirds."""
    log = scheduled_log(seed, 20_000)
    recording = mj.Recording(**log, step_size=padded(SIZES), inverse_temperature=2.0)
    samples = recording.samples(steps=[12])
    x, S = np.asarray(samples.x)[:, 0, 0], np.asarray(samples.weight)[:, 0, 0]
    gaps = np.stack([np.sin(x) * S - np.cos(x), x * S - 1, np.tanh(2 * x) * S - 2 / np.cosh(2 * x) ** 2])
    z = gaps.mean(1) / (gaps.std(1) / np.sqrt(len(x)))
    assert np.abs(z).max() < 4


def test_a_file_keeps_the_schedule(tmp_path):
    recording = mj.Recording(**scheduled_log(0, 3), step_size=padded(SIZES, 1.0), inverse_temperature=2.0)
    for name in ("run.npz", "run"):
        mj.io.save(tmp_path / name, recording)
        np.testing.assert_array_equal(mj.io.load(tmp_path / name).step_size, recording.step_size)


@pytest.mark.usefixtures("no_type_checks")
def test_mistakes_are_named():
    log, sizes = scheduled_log(0, 5), np.tile(padded(SIZES), (5, 1))
    bad = sizes.copy()
    bad[3, 7] = -0.1
    with pytest.raises(ValueError, match=r"episode 3, step 7: step_size must be positive and finite, got \[-0.1\]"):
        mj.Recording(**log, step_size=bad)
    with pytest.warns(RuntimeWarning, match="dropped 1 of 5 episodes"):
        assert mj.Recording(**log, step_size=bad, on_bad="drop").step_size.shape == (4, 13)
    with pytest.raises(ValueError, match="step_size must be positive and finite"):
        mj.samples_from_paths(**log, step_size=bad, steps=[3])
    for make in (mj.Recording, functools.partial(mj.samples_from_paths, steps=[3])):
        with pytest.raises(
            ValueError, match=r"or \(13,\), \(1, 13\) or \(5, 13\), one for each step, got shape \(12,\)"
        ):
            make(**log, step_size=SIZES)
    recording = mj.Recording(**log, step_size=sizes, inverse_temperature=2.0)
    with pytest.raises(ValueError, match=r"episode 0 goes from 0\.04 to 0\.076 in one step, past 0\.05; .* steps="):
        recording.samples(times=[0.05])
    with pytest.raises(ValueError, match=r"inside the recorded paths, which end at 0\.287\d+, got 9"):
        recording.samples(times=[9.0])
    with pytest.raises(ValueError, match="strictly increasing, positive times"):
        recording.samples(times=[0.04, 0.04])
