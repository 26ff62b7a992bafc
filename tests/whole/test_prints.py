"""What results print: numbers where there are some, the structure where they are traced."""

import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import malliavin_jax as mj

LOSS = mj.potentials.Quartic()
LEARNER = mj.ForwardLearner(LOSS, mj.initial.Normal(dim=2), step_size=0.01, gradient_noise=0.5)
ONE = mj.Estimate(jnp.array([0.63299]), jnp.array([0.0152]), jnp.array(0.43), jnp.array(0.0086), jnp.array(True))
TWO = mj.Estimate(jnp.array([1.5, -2.0]), jnp.array([0.25, jnp.inf]), jnp.array(0.0), jnp.array(0.1), jnp.array(False))


@pytest.fixture(scope="module")
def samples():
    return mj.observe(jax.random.key(0), LEARNER, num_episodes=300, times=[0.4, 0.8])


def test_an_estimate():
    assert repr(ONE) == "Estimate(0.633 ± 0.015, density 0.4300 ± 0.0086, trusted)"
    assert repr(TWO) == "Estimate([1.50 ± 0.25, -2 ± inf], density 0.00 ± 0.10, not trusted)"
    many = jax.tree.map(lambda a: jnp.stack([a, a + 1 if a.dtype != bool else ~a]), ONE)
    assert repr(many) == "Estimate(2 × 1: value from 0.633 to 1.633, median stderr 0.52, 1 of 2 trusted)"


def test_samples_recordings_fields_losses_and_chains(samples):
    assert repr(samples) == "Samples(300 episodes × 2 times × d = 2, gradients and Hessians observed, float64)"
    some = mj.Samples(
        samples.x, samples.gradient, None, samples.weight, samples.observed.at[:3, 1].set(False)
    )  # fmt: skip
    assert repr(some) == "Samples(300 episodes × 2 times × d = 2, 597 of 600 points observed, no Hessians, float64)"
    field = mj.MalliavinField(samples)
    low, high = (np.asarray(end) for end in (field.low, field.high))
    text = f"MalliavinField(d = 2, 600 points in {low[0]:.3g} to {high[0]:.3g}, {low[1]:.3g} to {high[1]:.3g}; "
    assert repr(field) == f"{text}{field.correction})"
    axis = jnp.linspace(-1.0, 1.0, 5)
    loss = mj.loss_from_field(mj.TrueField(LOSS), (axis, axis))
    assert re.fullmatch(
        r"Loss\(5 × 5 points, -1 to 1, -1 to 1: lowest at 0, 0, highest 1\.\d+, median .*, curl .* expected\)\)",
        repr(loss),
    )
    assert "nothing known" in repr(mj.Loss(axis, jnp.full(5, jnp.nan), jnp.full(5, jnp.inf)))
    settings = {"num_steps": 10, "step_size": 0.05, "inverse_temperature": 1.0}
    chain = mj.passive_langevin(jax.random.key(1), mj.TrueField(LOSS), jnp.zeros((4, 2)), **settings)
    mean, spread = np.asarray(chain.positions).mean((0, 1)), np.asarray(chain.positions).std((0, 1))
    moments = ", ".join(f"{m:.3g} (spread {s:.2g})" for m, s in zip(mean, spread, strict=True))
    assert repr(chain) == f"Chain(4 chains × 10 kept × d = 2: mean {moments}, 100 % trusted, 0 diverged)"
    gone = mj.Chain(
        *(jnp.full_like(leaf, jnp.nan) for leaf in jax.tree.leaves(chain)[:5]), chain.trusted, ~chain.diverged
    )
    assert repr(gone) == "Chain(4 chains × 10 kept × d = 2: 100 % trusted, 4 diverged)"


def test_verdicts_and_fields_that_keep_learning():
    one = mj.ForwardLearner(LOSS, mj.initial.Normal(), step_size=0.01, gradient_noise=0.5)
    seen = mj.observe(jax.random.key(1), one, num_episodes=300, times=[0.8])
    verdict = mj.goodness_of_fit(seen, LOSS)
    trusted = np.asarray(verdict.trusted)
    worst = np.abs(np.asarray(verdict.difference / verdict.stderr))[trusted].max()
    assert repr(verdict) == (
        f"GoodnessOfFit(p = {float(verdict.p_value):.2g}, largest difference {worst:.2g} standard errors; "
        f"{trusted.sum()} of {trusted.size} places trusted)"
    )
    field = mj.AdaptiveField(-3.0, 3.0)
    assert repr(field).startswith("AdaptiveField(-3 to 3; 0 updates: memory of 0 updates, 0 episodes, 0 changes found")
    later = repr(field.update(seen))
    assert later.startswith("AdaptiveField(-3 to 3; 1 updates: memory of 1 updates, 300 episodes, 0 changes found")


def test_a_recording():
    x = np.random.default_rng(0).normal(size=(6, 4, 2))
    whole = mj.Recording(x, x, x, step_size=0.01, inverse_temperature=[1.0] * 6, last_steps=[3, 3, 2, 3, 3, 3])
    assert repr(whole) == (
        "Recording(6 episodes × 4 points × d = 2, gradients and diagonals of Hessians, step_size 0.01, "
        "inverse_temperature (6,), 1 episodes end early)"
    )
    assert "positions alone, step_size not known" in repr(mj.Recording(x))


def test_tracers_print_their_shapes(samples):
    seen = []

    @jax.jit
    def traced(estimate, samples, loss, chain):
        seen.extend(map(repr, (estimate, samples, loss, chain)))
        return 0

    loss = mj.Loss(jnp.zeros(3), jnp.zeros(3), jnp.zeros(3))
    chain = mj.Chain(*(jnp.zeros((1, 2, 1)),) * 3, *(jnp.zeros((1, 2)),) * 2, jnp.ones((1, 2), bool), jnp.ones(1, bool))
    traced(ONE, samples, loss, chain)
    assert all("f64[" in text for text in seen)
    field = mj.MalliavinField(samples)
    jax.jit(lambda at: seen.append(repr(field)) or field(at))(jnp.zeros(2))  # concrete, under a trace
    assert seen[-1] == repr(field)


def test_intervals():
    low, high = ONE.interval(0.95)
    np.testing.assert_allclose([low, high], [[0.63299 - 1.959964 * 0.0152], [0.63299 + 1.959964 * 0.0152]], rtol=1e-6)
    narrow = ONE.interval(0.5)
    assert low < narrow[0] < narrow[1] < high
    for level in (0.0, 1.0, 95.0):
        with pytest.raises(ValueError, match=f"level must be between 0 and 1, got {level}"):
            ONE.interval(level)


def test_tables(monkeypatch):
    table = TWO.to_pandas(alphas=jnp.array([0.1, 0.2]))
    assert list(table.columns) == [
        "alpha_0", "alpha_1", "value_0", "value_1", "stderr_0", "stderr_1", "density", "density_stderr", "trusted"
    ]  # fmt: skip
    field, alphas = mj.TrueField(LOSS), jnp.linspace(-1.0, 1.0, 5)[:, None]
    table = jax.vmap(field)(alphas).to_pandas(alphas)
    assert list(table.columns) == ["alpha", "value", "stderr", "density", "density_stderr", "trusted"]
    np.testing.assert_allclose(table["value"], jax.vmap(LOSS.gradient)(alphas)[:, 0])
    with pytest.raises(ValueError, match=r"alphas must be 5, as many as the estimates, got shape \(4, 1\)"):
        jax.vmap(field)(alphas).to_pandas(alphas[1:])
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="to_pandas needs pandas, which is not installed: pip install pandas"):
        ONE.to_pandas()


def test_some_episodes(samples):
    np.testing.assert_array_equal(samples[10:20].x, samples.x[10:20])
    np.testing.assert_array_equal(samples[[3, 1]].weight, samples.weight[jnp.array([3, 1])])
    np.testing.assert_array_equal(samples[-1].hessian, samples.hessian[-1:])
    mask = np.arange(300) < 7
    assert samples[mask].num_episodes == 7
    assert len(list(samples[:4])) == 4
    with pytest.raises(ValueError, match="takes episodes alone, got 2 indices"):
        samples[:, 0]
    with pytest.raises(IndexError, match="hold 300 episodes, got index 300"):
        samples[300]
    x = np.cumsum(np.random.default_rng(0).normal(size=(40, 6, 1)) * 0.14, 1)
    moves = mj.samples_from_paths(x, None, None, step_size=0.01, steps=[2])
    assert repr(moves) == "Samples(40 episodes × 1 times × d = 1, from positions alone, float64)"
    with pytest.raises(ValueError, match="samples of positions cannot be split"):
        moves[:10]


def test_plots_need_no_import():
    assert mj.plots.__name__ == "malliavin_jax.plots"
    with pytest.raises(AttributeError, match="module 'malliavin_jax' has no attribute 'plot'"):
        mj.plot  # noqa: B018
