"""A loss that drifts slowly: the drift is found, the memory is short while it lasts, and error bars know the lag."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_adaptive import episodes, follow, fresh, well

import malliavin_jax as mj
from malliavin_jax.adaptive.change import smooth, within

UPDATES, STILL, RATE = 30, 8, 0.03  # a tilt that moves by a third of the standard error of one update
TILTS = jnp.asarray(0.3 + RATE * np.maximum(np.arange(UPDATES) - STILL, 0))


def rms(array):
    return float(np.sqrt(np.mean(np.square(array))))


@pytest.fixture(scope="module")
def drifting():
    runs = [follow(jax.random.key(300 + seed), fresh(), TILTS) for seed in range(8)]
    return [np.stack(parts) for parts in zip(*runs, strict=True)]


def test_a_slow_drift_is_found_and_followed(drifting):
    error, _, changes, _, _, memory, _ = (part[:, STILL + 10 :] for part in drifting)
    assert np.all(changes[:, -1] >= 1)
    assert np.mean(memory) < 10
    newest, past = (
        rms([follow(jax.random.key(300 + s), fresh(forgetting=rho), TILTS)[0][STILL + 10 :] for s in range(4)])
        for rho in (0.0, 1.0)
    )
    assert rms(error) < newest < past


def test_error_bars_know_the_lag(drifting):
    """Of all the past too, where nothing may be dropped: without the lag its errors are 15 times those stated."""
    error, stderr = (part[:, STILL + 10 :] for part in drifting[:2])
    assert rms(error / stderr) < 2
    runs = [follow(jax.random.key(300 + s), fresh(forgetting=1.0), TILTS)[:2] for s in range(4)]
    assert rms([error[-8:] / stderr[-8:] for error, stderr in runs]) < 3
    assert rms([error[-8:] for error, _ in runs]) > 8 * 0.015, "there is a lag to be known"


def test_the_drift_is_estimated():
    """v̂ of a fit to all the past, against the tilt's own rate, by its standard error; the curvature does not drift."""
    z = []
    for seed in range(6):
        field = fresh(forgetting=1.0)
        for number in range(12):
            loss = well(0.3 + RATE * number)
            field = field.update(
                episodes(jax.random.fold_in(jax.random.key(400 + seed), number), loss, hessian_noise=9.0)
            )
        score, information, spread = (np.asarray(part) for part in field.drift[:3])
        bread = np.linalg.inv(information)
        found, error = bread @ score, np.sqrt(np.diag(bread @ spread @ bread))
        truth = RATE * float(field.mesh.unit[0]), 0.0  # a tilt in units of the wide box
        z.append((found - truth) / error)
        assert error[0] < 0.5 * truth[0]
    assert np.all(np.abs(np.mean(z, 0)) < 4 / np.sqrt(len(z)))
    assert np.all(np.abs(z) < 4)


def test_smooth_functions_are_in_the_spline():
    """Coefficients Φv are those of a straight line and of a parabola, constants aside."""
    mesh = fresh().mesh
    Phi = smooth(mesh)
    unit = float(mesh.unit[0])
    for column, slope in ((0, lambda x: 1 / unit), (1, lambda x: 2 * x / unit**2)):
        spline = mj.potentials.Spline(Phi[:, column], mesh.low, mesh.high)
        for x in (-2.3, 0.1, 1.7):
            assert float(spline.gradient(jnp.array([x]))[0]) == pytest.approx(slope(x), abs=1e-9)


def test_as_many_groups_as_come_near():
    updates = jnp.array([1.0, 3.0, 8.0, 0.0, 0.0])
    for longest, kept in ((jnp.inf, 5), (12.0, 5), (11.0, 3), (5.0, 2), (3.0, 2), (1.4, 1), (0.2, 1)):
        assert int(within(updates, jnp.asarray(longest))) == kept
