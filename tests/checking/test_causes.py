"""Logs of other learners than Langevin's, and logs that are wrong: the cause is named, with numbers and a remedy."""

import re
import warnings

import numpy as np
import pytest
from logs import gradient, quartic_log

import malliavin_jax as mj
from malliavin_jax.checking.report import checked

EPSILON, BETA = 0.02, 2.0
SETTINGS = {"step_size": EPSILON, "inverse_temperature": BETA}
STIFF = np.array([1.0, 16.0])  # what Adam evens out


def adam(x, g, v, k, xi):
    first, second = v if k else (0 * g, 0 * g)
    first, second = 0.9 * first + 0.1 * g, 0.99 * second + 0.01 * g**2
    scaled = first / (1 - 0.9 ** (k + 1)) / (np.sqrt(second / (1 - 0.99 ** (k + 1))) + 1e-8)
    return x - EPSILON * scaled + xi, (first, second)


def average(x, g, v, k, xi):
    v = 0.9 * v + 0.1 * g
    return x - EPSILON * v + xi, v


def torch(x, g, v, k, xi):
    v = 0.8 * v + g
    return x - 0.2 * EPSILON * v + xi, v


def heavy_ball(x, g, v, k, xi):
    v = 0.7 * v - EPSILON * g + xi
    return x + v, v


def descent(x, g, v, k, xi):
    return x - EPSILON * g, v


def momentum_descent(x, g, v, k, xi):
    v = 0.5 * v + g
    return x - EPSILON * v, v


def welling_teh(x, g, v, k, xi):
    return x - EPSILON / 2 * g + xi / np.sqrt(2), v  # with the noise of β, √(ε/β)


def clipped(x, g, v, k, xi):
    return x - EPSILON * np.clip(g, -0.5, 0.5) + xi, v


def rms(x, g, v, k, xi):
    p = np.array([1.0, 0.25])
    return x - EPSILON * p * g + np.sqrt(p) * xi, v


LEARNERS = {
    "average": (average, r"has momentum: .* last (9\.\d|1[01])\d* steps, with a decay of 0\.(89|9)\d* .*record a run"),
    "torch": (torch, r"has momentum: .* of the last (4|5|6)\.?\d* steps, with a decay of 0\.(7[789]|8[0123]?)"),
    "heavy ball": (heavy_ball, r"has momentum: .* with a decay of 0\.(69|7)\d* \(X' − X = decay · \(the move before\)"),
    "descent": (descent, r"no noise was injected: the moves are −0\.02 times the gradients to within .*e-1.* descent"),
    "descent with momentum": (momentum_descent, r"no noise was injected: .* averaged with a decay of 0\.(5|49)"),
    "Welling and Teh": (welling_teh, r"step_size is probably 2× ours, as in Welling and Teh.*pass step_size=0\.01$"),
    "clipped": (clipped, r"moves do not grow with the gradients: .* clips or normalises"),
}  # fmt: skip


def run(update, seed, d, noise, *, stiffness=1.0, episodes=4000, steps=20):
    """A learner in NumPy: x and gradient of every episode and step."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(episodes, d))
    xs, gs, v = [], [], np.zeros_like(x)
    for k in range(steps + 1):
        g = stiffness * gradient(x) + noise * rng.normal(size=x.shape)
        xs, gs = [*xs, x], [*gs, g]
        x, v = update(x, g, v, k, np.sqrt(2 * EPSILON / BETA) * rng.normal(size=x.shape))
    return np.stack(xs, 1), np.stack(gs, 1)


def found(*arrays, **settings):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return mj.consistency(mj.Recording(*arrays, **{**SETTINGS, **settings}))


def cause(*arrays, **settings):
    (finding,) = found(*arrays, **settings).findings
    return finding


@pytest.mark.parametrize(("d", "noise"), [(1, 0.0), (1, 2.0), (2, 0.5)])
@pytest.mark.parametrize("learner", LEARNERS)
def test_other_learners_are_told_by_their_moves(learner, d, noise):
    update, message = LEARNERS[learner]
    if learner == "clipped" and noise > 1:
        pytest.skip("gradients that are mostly noise, clipped, are another gradient")
    assert re.search(message, text := cause(*run(update, 7 + d, d, noise))), text


@pytest.mark.parametrize("noise", [0.0, 0.5, 2.0])
def test_preconditioning_is_told_by_the_coordinates(noise):
    text = cause(*run(adam, 3, 2, noise, stiffness=STIFF))
    assert re.search(
        r"preconditioned.*as by Adam.*step sizes from (9\.\d*e-05|0\.0001\d*) to 0\.001\d* .*record a run without", text
    ), text
    x, g = run(rms, 3, 2, noise)
    text = cause(x, g)
    assert re.search(
        r"preconditioned, as.*step sizes from 0\.00(4[789]|5)\d* to 0\.0(2|19)\d* .*pass x/√p, √p·gradient", text
    )
    p = np.array([1.0, 0.25])
    assert found(x / np.sqrt(p), np.sqrt(p) * g).ok  # the remedy is one


def adam_descent(x, g, v, k, xi):
    return adam(x, g, v, k, 0 * xi)


def scaled_langevin(x, g, v, k, xi):
    """Preconditioned by the running mean square, and its noise too (Li et al., 2016)."""
    v = (0.99 * v if k else 0) + 0.01 * g**2
    p = 1 / np.sqrt(v / (1 - 0.99 ** (k + 1)))
    return x - EPSILON * p * g + np.sqrt(p) * xi, v


@pytest.mark.parametrize(("d", "noise"), [(1, 2.0), (2, 0.5), (2, 2.0)])
def test_adam_is_told_where_all_coordinates_are_alike(d, noise):
    """Few episodes, and no scale of the gradients for its cause: no number would mend such a log."""
    few = {"episodes": 400, "steps": 30}
    text = cause(*run(adam_descent, 5, d, noise, **few))
    assert re.search(r"no noise was injected: the moves are −0\.02 times .* \(decay 0\.99\) to within .*: Adam;", text)
    said = r"running root mean square, as {} does \(decays near {} and 0\.9\d*\).*record a run without"
    clips = "|moves do not grow with the gradients: .*RMSprop"
    text = cause(*run(adam, 5, d, noise, **few))
    assert re.search(said.format("Adam", r"0\.9") + clips, text), text
    text = cause(*run(scaled_langevin, 5, d, noise, **few))
    assert re.search(said.format("RMSprop", "0") + clips, text), text


@pytest.mark.parametrize("noise", [0.0, 0.5, 2.0])
@pytest.mark.parametrize("d", [1, 2])
def test_signs_and_rows(d, noise):
    log = quartic_log(11 * d, 4000, 20, d=d, noise=noise)
    x, g = log["x"], log["gradient"]
    assert re.search(
        r"wrong sign: .* of -0\.0(2|19)\d* ± 0\.000\d \(recorded: 0\.02\).*pass gradient=-gradient", cause(x, -g)
    )
    assert "wrong sign" in cause(x, -g, step_size=None)  # nothing needs to be recorded for that
    late, early = (x[:, 1:], g[:, :-1]), (x[:, :-1], g[:, 1:])
    text = cause(*late)
    assert re.search(
        r"one row late: .* of row k \+ 1, with a step size of 0\.0(2|19)\d* .*x\[:, :-1\], gradient\[:, 1:\]", text
    )
    assert found(late[0][:, :-1], late[1][:, 1:]).ok
    text = cause(*early)
    assert re.search(
        r"one row early: .* of row k − 1, with a step size of 0\.0(2|19)\d* .*x\[:, 1:\], gradient\[:, :-1\]", text
    )
    assert found(early[0][:, 1:], early[1][:, :-1]).ok


@pytest.mark.parametrize("noise", [0.0, 2.0])
def test_rows_left_out_and_rows_twice(noise):
    log = quartic_log(5, 4000, 20, noise=noise)
    x, g = log["x"], log["gradient"]
    assert "about one row in 2" in (text := cause(x[:, ::2], g[:, ::2])) or "about one in 2" in text
    assert "51.2 % of the steps do not move" in cause(np.repeat(x, 2, 1), np.repeat(g, 2, 1))


def test_entries_of_the_hessian():
    log = quartic_log(0, 4000, 12, d=2, noise=0.5, coupling=0.5)
    x, g, h = log["x"], log["gradient"], log["hessian"]
    whole = found(x, g, h)
    assert whole.ok
    assert whole.entry_z < 4
    assert whole.hessian_z < 4
    text = cause(x, g, np.stack([h[..., 0, 0], h[..., 1, 1]], -1))
    assert re.search(
        r"entry \((1, 2|2, 1)\) is 0 on average, .* it were 0\.\d+ ± 0\.0\d; only diagonals are recorded", text
    ), text
    assert "entry (1, 1)" in cause(x, g, h * np.array([[1.5, 1], [1, 1]]))
    # The weights show it as well, beside the diagonal alone.
    log = quartic_log(0, 4000, 50, d=2, coupling=0.9)
    wrong = mj.Recording(log["x"], log["gradient"], log["hessian"] * np.eye(2), **SETTINGS).samples(steps=[50])
    parts = mj.checking.identities.integration_by_parts(wrong)
    assert parts.entry_off
    assert parts.entry[0] != parts.entry[1]
    (text,) = parts.findings(hessian_fits=False)
    assert re.search(
        r"E\[S_\d X_\d\] is -?0\.\d+ ± 0\.0\d+ \(0 expected\).*Hessians that are not the learner's", text
    ), text


class Positions:
    """A recording of positions alone."""

    has_gradient = False

    def __init__(self, x, step_size=EPSILON, inverse_temperature=BETA):
        self.x, self.step_size, self.inverse_temperature = x, np.asarray(step_size), np.asarray(inverse_temperature)
        self.last_steps = np.full(len(x), x.shape[1] - 1)
        self.num_episodes, self.num_steps, self.dim = len(x), x.shape[1] - 1, x.shape[2]

    def part(self, start=0, stop=None, *, hessian=True):
        rows = slice(start, stop)
        settings = {"step_size": self.step_size, "inverse_temperature": self.inverse_temperature}
        return {"x": self.x[rows], "last_steps": self.last_steps[rows], **settings}


@pytest.mark.parametrize("noise", [0.0, 2.0])
def test_positions_alone(noise):
    x = quartic_log(3, 1000, 20, d=2, noise=noise)["x"]
    report = checked(Positions(x))
    assert report.ok
    assert "and not in the moves" in str(report)
    for wrong, numbers in (
        ({"step_size": 0.04}, r"is 0\.5\d* times 2ε/β: .*inverse_temperature=3\.[3-9]\d* or step_size=0\.02"),
        ({"inverse_temperature": 1.0}, r"is 0\.5\d* times 2ε/β: .*inverse_temperature=1\.[6-9]"),
    ):
        with pytest.raises(ValueError, match=r"mean squared move " + numbers):
            checked(Positions(x, **wrong))
    with pytest.raises(ValueError, match="do not move at all"):
        checked(Positions(np.repeat(x, 2, 1)))


def test_a_schedule_of_step_sizes():
    rng = np.random.default_rng(0)
    sizes = np.broadcast_to(0.03 / (1 + 0.2 * np.arange(21)), (3000, 21))
    x, g = np.empty((2, 3000, 21, 1))
    x[:, 0] = rng.normal(size=(3000, 1))
    for k in range(21):
        g[:, k] = gradient(x[:, k]) + 0.5 * rng.normal(size=(3000, 1))
        if k < 20:
            epsilon = sizes[:, k, None]
            x[:, k + 1] = x[:, k] - epsilon * g[:, k] + np.sqrt(2 * epsilon / BETA) * rng.normal(size=(3000, 1))

    def log(step_size, gradients):
        recording = Positions(x, step_size)
        recording.has_gradient = True
        read = recording.part
        recording.part = lambda start=0, stop=None, **_: {
            **read(start, stop), "gradient": gradients[start:stop],
            "step_size": recording.step_size[start:stop] if recording.step_size.ndim else recording.step_size,
        }  # fmt: skip
        return recording

    from malliavin_jax.checking.learners import learner_reports

    ((one, findings),) = learner_reports(log(sizes, g))
    assert findings == []
    assert abs(one.variance_ratio - 1) < 4 * one.variance_ratio_stderr
    assert "wrong sign" in learner_reports(log(sizes, -g))[0].findings[0]
    assert learner_reports(log(np.mean(sizes), g))[0].findings  # the mean of them is not the schedule


@pytest.mark.parametrize("seed", range(10))
def test_true_logs_raise_nothing(seed):
    """40 logs: one and two dimensions, with and without noise in the gradients; no finding in any of them."""
    for d in (1, 2):
        for noise in (0.0, 2.0):
            log = quartic_log(100 + seed, 600, 15, d=d, noise=noise, coupling=0.4)
            assert found(*log.values()).findings == ()
            assert found(log["x"], log["gradient"]).findings == ()


@pytest.mark.parametrize("seed", [0, 1])
def test_true_minibatches_raise_nothing(seed):
    """Logistic regression in the plane, gradients and Hessians of a minibatch at every step."""
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(200, 2))
    labels = rng.random(200) < 1 / (1 + np.exp(-features @ np.array([1.0, -0.5])))
    x, g, h = np.empty((600, 13, 2)), np.empty((600, 13, 2)), np.empty((600, 13, 2, 2))
    x[:, 0] = rng.normal(size=(600, 2))
    for k in range(13):
        batch = rng.integers(0, 200, (600, 8))
        a, y = features[batch], labels[batch]
        p = 1 / (1 + np.exp(-np.einsum("ebd,ed->eb", a, x[:, k])))
        g[:, k] = 5 * np.einsum("ebd,eb->ed", a, p - y) / 8 + x[:, k]
        h[:, k] = 5 * np.einsum("ebi,ebj,eb->eij", a, a, p * (1 - p)) / 8 + np.eye(2)
        if k < 12:
            x[:, k + 1] = x[:, k] - EPSILON * g[:, k] + np.sqrt(2 * EPSILON / BETA) * rng.normal(size=(600, 2))
    report = found(x, g, h)
    assert report.findings == ()
    assert report.hessian_z < 5


def test_checked_raises_warns_or_looks_away(no_type_checks):
    log = quartic_log(0, 1000, 12)
    good = mj.Recording(log["x"], log["gradient"], **SETTINGS)
    bad = mj.Recording(log["x"], -log["gradient"], **SETTINGS)
    assert mj.recording.checked(good).ok
    with pytest.raises(
        ValueError, match=r"does not fit its learner: learner 0: the gradients have the wrong sign.*'warn'"
    ):
        mj.recording.checked(bad)
    with pytest.warns(RuntimeWarning, match="wrong sign"):
        assert not mj.recording.checked(bad, "warn").ok
    assert mj.recording.checked(bad, "off") is None
    with pytest.raises(ValueError, match="check must be 'error', 'warn' or 'off', got 'maybe'"):
        mj.recording.checked(good, "maybe")
