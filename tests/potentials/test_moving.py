"""Losses that move: each a potential at every time, with derivatives that fit together."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from malliavin_jax.potentials import DriftingTilt, SwitchingWell, TurningBowl

CASES = [
    (DriftingTilt(0.2, 0.1), 1),
    (SwitchingWell([0, 1, 1], [[-1.0, 0.0], [1.0, 2.0]], 3.0), 2),
    (TurningBowl(4.0, 0.5, 0.3), 2),
]


@pytest.mark.parametrize(("loss", "dim"), CASES, ids=lambda case: type(case).__name__)
def test_derivatives_at_every_time(loss, dim):
    x = jnp.asarray([0.3, -0.7][:dim])
    for time in (0, 1, 2.0, jnp.asarray(5)):
        now = loss.at(time)
        np.testing.assert_allclose(now.gradient(x), jax.grad(now.value)(x), rtol=1e-10)
        np.testing.assert_allclose(now.hessian(x), jax.jacfwd(now.gradient)(x), rtol=1e-10, atol=1e-12)
    np.testing.assert_array_equal(loss.gradient(x), loss.at(0).gradient(x))
    np.testing.assert_allclose(jax.jit(lambda t: loss.at(t).gradient(x))(7), loss.at(7).gradient(x), rtol=1e-12)


def test_how_they_move():
    assert float(CASES[0][0].at(3).tilt) == pytest.approx(0.5)
    assert CASES[1][0].at(100).center.tolist() == [1.0, 2.0]
    quarter = TurningBowl(4.0, 0.5, np.pi / 2).at(1)
    np.testing.assert_allclose(quarter.hessian(jnp.zeros(2)), np.diag([0.5, 4.0]), atol=1e-12)
    states = np.asarray(SwitchingWell.sample(0, 4000, [[0.0], [1.0], [2.0]], stay=0.9).states)
    moved = np.mean(np.diff(states) != 0)
    assert abs(moved - 0.1) < 4 * np.sqrt(0.1 * 0.9 / 3999)
    assert set(states) == {0, 1, 2}


def test_mistakes_are_named(no_type_checks):
    for states in ([], [2], [-1]):
        with pytest.raises(ValueError, match="states"):
            SwitchingWell(states, [[0.0], [1.0]])
    with pytest.raises(ValueError, match="stay"):
        SwitchingWell.sample(0, 5, [[0.0], [1.0]], stay=1.5)
    with pytest.raises(ValueError, match="stiff"):
        TurningBowl(stiff=-1.0)
    with pytest.raises(ValueError, match="rate"):
        DriftingTilt(rate=float("nan"))
