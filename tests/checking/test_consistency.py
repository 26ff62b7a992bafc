"""Recorded data against the law of the learner: what fits passes, and every misfit is found, with its numbers."""

import functools
import json
import re
import warnings

import jax
import numpy as np
import pytest
from logs import gradient, quartic_log

import malliavin_jax as mj
from malliavin_jax.checking import report

EPISODES, STEPS = 4000, 20
SETTINGS = {"step_size": 0.02, "inverse_temperature": 2.0}


@functools.cache
def log(seed):
    return quartic_log(seed, EPISODES, STEPS, noise=0.5)


def recording(seed=0, **changes):
    return mj.Recording(**{**log(seed), **SETTINGS, **changes})


@pytest.mark.parametrize("seed", [0, 1])
def test_a_true_log_fits(seed):
    found = mj.consistency(recording(seed))
    assert found.ok
    (one,) = found.learners
    assert (one.episodes, one.steps) == (EPISODES, EPISODES * STEPS)
    for value, expected, stderr in (
        (one.step_size_estimate, 0.02, one.step_size_stderr),
        (one.inverse_temperature_estimate, 2.0, one.inverse_temperature_stderr),
        (one.variance_ratio, 1, one.variance_ratio_stderr),
        (one.skewness, 0, one.skewness_stderr),
        (one.kurtosis, 0, one.kurtosis_stderr),
        (one.autocorrelation, 0, one.autocorrelation_stderr),
        (found.integration_by_parts, 1, found.integration_by_parts_stderr),
    ):
        assert abs(value - expected) < 4 * stderr
    assert one.step_size_stderr < 0.001
    assert one.inverse_temperature_stderr < 0.02
    assert found.weight_mean_z < 4
    assert "the data fit the learner" in str(found)
    assert json.loads(json.dumps(found.as_dict()))["ok"]


def test_samples_that_are_made_already_are_not_weighed_again(monkeypatch):
    log_ = recording()
    whole = mj.consistency(log_)
    samples = log_.samples(steps=[5, 10, 20])  # those that it would weigh itself
    monkeypatch.setattr(report, "weighed", lambda *_: pytest.fail("weighed again"))
    assert mj.consistency(log_, samples) == whole
    few = jax.tree.map(lambda leaf: leaf[:50], samples)
    assert mj.consistency(log_, few).integration_by_parts is None
    with pytest.raises(ValueError, match="samples must have the dimension of the recording, 1, got 2"):
        mj.consistency(log_, mj.Recording(**quartic_log(0, 4, 3, d=2), **SETTINGS).samples(steps=3))


def test_without_weights_there_is_no_word_about_them():
    without = mj.consistency(recording(hessian=None))
    assert without.ok
    assert without.weight_mean_z is without.integration_by_parts is without.integration_by_parts_stderr is None


def test_the_sums_are_those_of_the_residuals():
    """Against NumPy on the residuals themselves, with episodes of unequal length."""
    last_steps = np.random.default_rng(3).integers(0, STEPS + 1, EPISODES)
    (one,) = mj.consistency(recording(last_steps=last_steps)).learners
    x, g = log(0)["x"][..., 0], log(0)["gradient"][..., 0]
    made = np.arange(STEPS)[None, :] < last_steps[:, None]
    residual = np.diff(x, axis=1) + 0.02 * g[:, :-1]
    r = residual[made]
    assert one.steps == len(r) == last_steps.sum()
    assert one.variance_ratio == pytest.approx(np.mean(r**2) / 0.02, rel=1e-9)
    assert one.skewness == pytest.approx(np.mean((r - r.mean()) ** 3) / r.var() ** 1.5, abs=1e-9)
    assert one.kurtosis == pytest.approx(np.mean((r - r.mean()) ** 4) / r.var() ** 2 - 3, abs=1e-9)
    both = made[:, 1:]
    pairs = (residual[:, 1:] * residual[:, :-1])[both]
    assert one.autocorrelation == pytest.approx(np.mean(pairs) / np.mean(r**2), abs=1e-9)
    moves, used = np.diff(x, axis=1)[made], g[:, :-1][made]
    assert one.step_size_estimate == pytest.approx(-np.linalg.lstsq(used[:, None], moves, rcond=None)[0][0], rel=1e-9)


@pytest.mark.parametrize("seed", [0, 1])
def test_estimates_of_what_is_not_recorded(seed):
    (one,) = mj.consistency(recording(seed, step_size=None, inverse_temperature=None)).learners
    assert one.step_size is one.inverse_temperature is one.variance_ratio is None
    assert abs(one.step_size_estimate - 0.02) < 4 * one.step_size_stderr
    assert abs(one.inverse_temperature_estimate - 2.0) < 4 * one.inverse_temperature_stderr
    (one,) = mj.consistency(recording(seed, inverse_temperature=None)).learners
    assert abs(one.inverse_temperature_estimate - 2.0) < 4 * one.inverse_temperature_stderr
    assert one.inverse_temperature_stderr < 0.02


def test_several_learners_are_told_apart():
    sizes = np.where(np.arange(EPISODES) % 2 == 0, 0.02, 0.05)
    betas = np.where(np.arange(EPISODES) < EPISODES // 2, 2.0, 1.0)
    data = quartic_log(5, EPISODES, STEPS, step_size=sizes, beta=betas)
    found = mj.consistency(mj.Recording(**data, step_size=sizes, inverse_temperature=betas))
    assert found.ok
    assert [(one.step_size, one.inverse_temperature) for one in found.learners] == [
        (0.02, 1.0), (0.02, 2.0), (0.05, 1.0), (0.05, 2.0)
    ]  # fmt: skip
    assert all(one.episodes == EPISODES // 4 for one in found.learners)
    for one in found.learners:
        assert abs(one.step_size_estimate - one.step_size) < 4 * one.step_size_stderr
        assert abs(one.inverse_temperature_estimate - one.inverse_temperature) < 4 * one.inverse_temperature_stderr
    wrong = np.where(sizes == 0.05, 0.03, sizes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = mj.consistency(mj.Recording(data["x"], data["gradient"], step_size=wrong, inverse_temperature=betas))
    assert {finding.split(":")[0] for finding in found.findings if "learner" in finding} == {"learner 2", "learner 3"}
    with pytest.raises(ValueError, match="recording must hold at most 64 different learners, got 4000"):
        mj.consistency(recording(step_size=np.linspace(0.01, 0.02, EPISODES)))


def noisy(x, g, rng):
    return {"gradient": g + rng.normal(size=g.shape)}


def clean(x, g, rng):
    return {"gradient": gradient(x) + 3 * rng.normal(size=g.shape)}


def steps_with(x, g, noise):
    """The recorded starts and gradients, with moves that have another noise than the learner's."""
    residual = np.concatenate([np.zeros_like(x[:, :1]), -0.02 * g[:, :-1] + noise[:, 1:]], 1)
    return {"x": x[:, :1] + np.cumsum(residual, 1)}


def heavy(x, g, rng):
    return steps_with(x, g, 0.02**0.5 * rng.standard_t(6, g.shape) / 1.5**0.5)


def skew(x, g, rng):
    return steps_with(x, g, 0.02**0.5 * (rng.gamma(16, 1, g.shape) - 16) / 4)


def coloured(x, g, rng):
    white = rng.normal(size=g.shape)
    return steps_with(x, g, 0.02**0.5 * (white + 0.2 * np.roll(white, 1, 1)) / 1.04**0.5)


NOT_USED = "recorded gradient is not the one the learner used"
MISFITS = {
    "noise that the learner did not use": (noisy, NOT_USED + r": .* of 0\.01\d* ± 0\.000\d, recorded is 0\.02"),
    "twice the gradient": (lambda x, g, rng: {"gradient": 2 * g}, r"gradients are (1\.9|2)\d* times .* by 0\.(5|49)"),
    "temperature": (lambda x, g, rng: {"inverse_temperature": 2.2}, r"variance is 1\.\d+ ± 0\.00\d times 2ε/β"),
    "step size": (lambda x, g, rng: {"step_size": 0.025}, r"step size is wrong: .* 0\.025; pass step_size=0\.0(2|19)"),
    "another noise in the gradient": (clean, NOT_USED),
    "heavy tails": (heavy, r"residuals are not Gaussian: their kurtosis is [2345]\.?\d* "),
    "skewed noise": (skew, r"residuals are not Gaussian: their skewness is 0\.[45]\d* "),
    "coloured noise": (coloured, r"residuals are not white: their autocorrelation is 0\.[12]\d* ± 0\.00\d, expected 0"),
    "Hessian": (
        lambda x, g, rng: {"hessian": np.full((*x.shape, 1), -20.0)},
        r"Hessians are not those of the gradients: entry \(1, 1\) is -20 on average, .* as if it were 2\.\d+ ± 0\.0",
    ),
}  # fmt: skip


@pytest.mark.parametrize("misfit", MISFITS)
def test_every_misfit_is_found(misfit):
    spoil, message = MISFITS[misfit]
    changed = spoil(log(1)["x"], log(1)["gradient"], np.random.default_rng(9))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = mj.consistency(recording(1, **changed))
    assert not found.ok
    assert tuple(str(warning.message) for warning in caught) == found.findings
    (finding,) = found.findings  # the cause, and not its symptoms
    assert re.search(message, finding), finding
    assert all(finding in str(found) for finding in found.findings)


def test_stopping_by_the_path_is_found():
    crossed = log(0)["x"][..., 0] > 0.8
    first = np.where(crossed.any(1), np.argmax(crossed, 1), STEPS)
    with pytest.warns(
        RuntimeWarning, match="weights do not integrate by parts.*episodes that end because of where.*short_localizer"
    ):
        found = mj.consistency(recording(last_steps=first))
    assert len(found.findings) == 1  # the residuals themselves are as they should be
