"""Episodes arrive, the field learns, the chains go on: one scan."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import malliavin_jax as mj

GRID = jnp.linspace(-1.0, 1.0, 9)
SETTINGS = dict(grid=GRID, step_size=0.05, inverse_temperature=4.0, steps_per_update=20)
LOSS = mj.potentials.SwitchingWell([0] * 8 + [1], [[-0.6], [0.6]], precision=2.0)
LEARNER = mj.ForwardLearner(LOSS, mj.initial.Normal(), step_size=0.02, gradient_noise=0.5)


def field():
    return mj.AdaptiveField(-3.0, 3.0, intervals=16)


@pytest.fixture(scope="module")
def tracked():
    return mj.track(
        jax.random.key(0), LEARNER, field(), num_updates=16, episodes_per_update=60, times=[0.2, 0.4],
        initial=jnp.zeros((64, 1)), **SETTINGS,
    )  # fmt: skip


def test_the_goal_changes_half_way(tracked):
    assert np.flatnonzero(tracked.changed).tolist() == [8]
    assert int(tracked.changed_at[-1]) == 8
    assert np.array_equal(tracked.memory, [*range(1, 9), *range(1, 9)])
    for update, center in ((7, -0.6), (15, 0.6)):
        truth = np.asarray((GRID - center) ** 2)
        lowest = int(np.argmin(tracked.loss[update]))
        gap = np.asarray(tracked.loss[update]) - (truth - truth[lowest])
        others = np.arange(len(GRID)) != lowest
        assert np.sqrt(np.mean((gap[others] / np.asarray(tracked.loss_stderr[update])[others]) ** 2)) < 2.5
        # exp(−βL) is normal around the centre, of variance 1/8, and the chains have forgotten where they were
        where = np.asarray(tracked.positions[update, :, 0])
        assert abs(where.mean() - center) < 4 * np.sqrt(1 / 8 / 64) + 0.05
    assert tracked.gradients.value.shape == (16, 9, 1)
    assert tracked.fit_p_values.shape == (16,)
    assert np.all((tracked.fit_p_values > 1e-4) & (tracked.fit_p_values <= 1))
    assert int(tracked.refused[-1]) == 0


def test_a_run_in_two_parts_is_not_a_restart(tracked):
    """The field that comes out goes in again, with all that it knows."""
    again = mj.track(
        jax.random.key(1), LEARNER, tracked.field, num_updates=16, episodes_per_update=60, times=[0.2, 0.4],
        initial=tracked.positions[-1], **SETTINGS,
    )  # fmt: skip
    # time starts anew at 0, so the goal is the old one again: a change
    assert np.flatnonzero(again.changed).tolist() == [0, 8]
    assert int(again.field.updates) == 32
    assert np.asarray(again.changed_at)[[0, -1]].tolist() == [16, 24]


def test_a_stream_of_ones_own_with_a_bad_update():
    def stream(key, time):
        x = jax.random.normal(key, (50, 2, 1))
        gradient = jnp.where(time == 2, jnp.nan, x)
        return mj.Samples(x, gradient, jnp.ones((50, 2, 1, 1)), x, jnp.ones((50, 2), bool))

    found = mj.track(jax.random.key(0), stream, field(), num_updates=4, initial=jnp.zeros((2, 1)), **SETTINGS)
    assert found.refused.tolist() == [0, 0, 50, 50]
    assert found.memory.tolist() == [1, 2, 2, 3]
    assert np.abs(found.gradients.value[-1] - GRID[:, None]).max() < 0.01
    assert np.all(np.isfinite(found.positions))


def test_mistakes_are_named(no_type_checks):
    good = dict(num_updates=2, initial=jnp.zeros((2, 1)), episodes_per_update=5, times=[0.2], **SETTINGS)
    for change, name in (
        (dict(times=None), "times"),
        (dict(num_updates=0), "num_updates"),
        (dict(initial=jnp.zeros((2, 3))), "initial"),
        (dict(grid=(GRID, GRID)), "grid"),
        (dict(step_size=-1.0), "step_size"),
        (dict(method="milstein"), "method"),
    ):
        with pytest.raises(ValueError, match=name):
            mj.track(jax.random.key(0), LEARNER, field(), **{**good, **change})
    with pytest.raises(ValueError, match="left out"):
        mj.track(jax.random.key(0), lambda key, time: None, field(), **good)
    with pytest.raises(ValueError, match="source"):
        mj.track(jax.random.key(0), 3, field(), **good)
