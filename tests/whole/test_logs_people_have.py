"""The logs people really have: loops of their own, minibatches, no Hessians; and arrays that are anything but right."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from logs import quartic_log

import malliavin_jax as mj

SIZE, STEPS, EPISODES = 0.02, 30, 300
ALPHAS = np.stack(np.meshgrid([-0.5, 0.0, 0.5], [-0.4, 0.4], indexing="ij"), -1).reshape(-1, 2)


def logistic():
    """Gradient of a Bayesian logistic regression on some of 60 rows, as (x, rows) ↦ (d,); its scale is that of all."""
    rng = np.random.default_rng(11)
    features = rng.normal(size=(60, 2))
    labels = (rng.uniform(size=60) < 1 / (1 + np.exp(-features @ [1.0, -0.7]))).astype(float)

    def gradient(x, rows):
        chance = 1 / (1 + np.exp(-features[rows] @ x))
        return 0.2 * (60 / len(rows)) * features[rows].T @ (chance - labels[rows]) + 0.5 * x

    return gradient, 60


def network():
    """The same for the hidden and the output weight, a plane through the loss of a small network, y = b tanh(a u)."""
    rng = np.random.default_rng(12)
    u = rng.normal(size=40)
    y = 0.9 * np.tanh(0.8 * u) + 0.3 * rng.normal(size=40)

    def gradient(x, rows):
        t = np.tanh(x[0] * u[rows])
        off = x[1] * t - y[rows]
        slopes = np.stack([off * x[1] * (1 - t**2) * u[rows], off * t])
        return (40 / len(rows)) * slopes.sum(1) * 0.2 + 0.5 * x

    return gradient, 40


def run(gradient, rows, seed, recorder):
    """Stochastic gradient Langevin dynamics as anybody writes it, with restarts; every step goes to the recorder."""
    rng = np.random.default_rng(seed)
    for _ in range(EPISODES):
        x = rng.normal(size=2)
        for _ in range(STEPS + 1):
            g = gradient(x, rng.choice(rows, size=10, replace=False))
            recorder.step(x, g)
            x = x - SIZE * g + np.sqrt(2 * SIZE) * rng.normal(size=2)
        recorder.restart()


@pytest.mark.parametrize("problem", [logistic, network])
def test_minibatch_loops_without_hessians(tmp_path, problem):
    """Three logs, 36 intervals of 95 %, those of a log sharing much of their error: 30 must hold, and none be far."""
    gradient, rows = problem()
    truth = np.stack([gradient(alpha, np.arange(rows)) for alpha in ALPHAS])
    z = []
    for seed in range(3):
        with mj.io.Recorder(tmp_path / str(seed), step_size=SIZE) as recorder:
            run(gradient, rows, seed, recorder)
        recording = mj.io.load(tmp_path / str(seed))
        assert (recording.num_episodes, recording.num_steps, recording.has_hessian) == (EPISODES, STEPS, False)
        field = mj.MalliavinField(recording)  # which checks the recording first
        got = jax.jit(jax.vmap(field))(jnp.asarray(ALPHAS, recording.dtype))
        assert np.all(np.asarray(got.trusted))
        z.append((np.asarray(got.value) - truth) / np.asarray(got.stderr))
    assert np.mean(np.abs(z) < 1.96) >= 30 / 36
    assert np.max(np.abs(z)) < 5


def attempt(*arrays):
    """The samples of a log, or what is said against it."""
    try:
        return mj.samples_from_paths(*arrays, step_size=SIZE, steps=[1]), ""
    except ValueError as error:
        return None, str(error)


numbers = st.one_of(st.floats(allow_nan=True, allow_infinity=True, width=32), st.just(0.0), st.floats(-1, 1))


@settings(max_examples=40, deadline=None)
@given(
    rung=st.sampled_from(["hessians", "diagonals", "gradients", "positions"]),
    shape=st.tuples(st.integers(0, 3), st.integers(1, 3), st.integers(1, 2)),
    spoiled=st.one_of(st.none(), numbers),
    seed=st.integers(0, 5),
)
def test_any_log_is_used_or_refused(rung, shape, spoiled, seed):
    """Small, empty, constant or spoiled arrays on every rung: samples that are finite where observed, or a sentence."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=shape)
    gradient = rng.normal(size=shape)
    hessian = rng.normal(size=(*shape, shape[-1]))
    hessian = hessian + np.swapaxes(hessian, -1, -2)
    if spoiled is not None and x.size:
        x.reshape(-1)[seed % x.size] = spoiled
    parts = {"hessians": (gradient, hessian), "diagonals": (gradient, hessian[..., 0]), "gradients": (gradient,)}
    samples, said = attempt(x, *parts.get(rung, ()))
    if samples is None:
        assert any(name in said for name in ("x", "gradient", "hessian", "steps", "episodes"))
        return
    seen = np.asarray(samples.observed)
    for array in (samples.x, samples.gradient, samples.hessian, samples.weight):
        assert np.all(np.isfinite(np.asarray(array)[seen]))
    assert samples.rung == rung or (rung == "diagonals" and shape[-1] == 1)


FAULTS = {
    "none": lambda x, g, h: (x, g, h),
    "sign": lambda x, g, h: (x, -g, -h),
    "a row late": lambda x, g, h: (x, np.roll(g, 1, 1), np.roll(h, 1, 1)),
    "three times too large": lambda x, g, h: (x, 3 * g, 3 * h),
    "not a number": lambda x, g, h: (np.where(np.arange(x.size).reshape(x.shape) == 7, np.nan, x), g, h),
}


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    rung=st.sampled_from(["hessians", "gradients", "positions"]),
    fault=st.sampled_from(sorted(FAULTS)),
    episodes=st.sampled_from([200, 300]),
    noise=st.sampled_from([0.0, 0.5, 2.0]),
    seed=st.integers(0, 99),
)
def test_a_recording_gives_an_error_or_a_right_answer(rung, fault, episodes, noise, seed):
    """Logs of a learner that is known, right and wrong ones, on every rung."""
    logged = quartic_log(seed, episodes, STEPS, noise=noise, step_size=SIZE, beta=1.0)
    x, gradient, hessian = FAULTS[fault](*(logged[name] for name in ("x", "gradient", "hessian")))
    parts = {"hessians": (gradient, hessian), "gradients": (gradient,)}.get(rung, ())
    places = np.asarray([[-0.6], [0.0], [0.6]])
    field, said = None, ""
    try:
        field = mj.MalliavinField(mj.Recording(x, *parts, step_size=SIZE, inverse_temperature=1.0))
    except ValueError as error:
        said = str(error)
    if field is None:
        assert fault != "none", said
        assert "does not fit its learner" in said or "finite" in said
        return
    got = jax.jit(jax.vmap(field))(jnp.asarray(places))
    off = np.abs(np.asarray(got.value) - (places**3 + places))
    assert np.all(off[np.asarray(got.trusted)] < 5 * np.asarray(got.stderr)[np.asarray(got.trusted)])
    assert fault in ("none", "not a number") or rung == "positions"
