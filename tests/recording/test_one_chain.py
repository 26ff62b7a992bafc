"""One long chain without restarts: pieces in blocks, and intervals that cover because of them."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import malliavin_jax as mj
from malliavin_jax.recording.long_log import autocorrelation_time

CHAINS, STEPS, PIECE = 48, 12_000, 8
LOSS = mj.potentials.Quartic()
ALPHAS = jnp.asarray([[-0.7], [0.0], [0.5]])
LEARNER = {"step_size": 0.02, "inverse_temperature": 1.0}
cut = functools.partial(mj.split_log, piece_steps=PIECE, **LEARNER)


@pytest.fixture(scope="module")
def chains():
    """Positions, gradients and Hessians of many chains, none of which ever restarts."""
    learner = mj.ForwardLearner(LOSS, mj.initial.Normal(), 0.02, gradient_noise=0.5)
    run = jax.jit(jax.vmap(lambda key: mj.simulate(key, learner, STEPS)))
    paths = run(jax.random.split(jax.random.key(2), CHAINS))
    return [np.asarray(leaf) for leaf in (paths.x, paths.gradient, paths.hessian)]


@pytest.fixture(scope="module")
def recordings(chains):
    return [cut(*(leaf[i] for leaf in chains), blocks=60) for i in range(CHAINS)]


def stacked(samples):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *samples)


@eqx.filter_jit
def estimates(samples):
    """For each chain and point: the debiased gradient, and the density, each with its standard error."""
    localizer = mj.Laplace(0.5)

    def one(samples):
        field = mj.MalliavinField(samples, localizer=localizer, control=None, correction="full")
        gradient = jax.vmap(field)(ALPHAS)
        density = jax.vmap(lambda alpha: mj.density(samples, alpha, localizer))(ALPHAS)
        return (gradient.value[:, 0], gradient.stderr[:, 0]), density

    return jax.lax.map(one, samples)


def test_intervals_of_one_chain_cover(recordings):
    """With blocks as episodes every standard error is right; with pieces as episodes only that of the gradient.

    Given where a piece starts, the weighed residuals ∇L(X) − ∇L(α) have mean zero: those of the pieces are
    uncorrelated, and blocks change nothing. What a piece says about the density depends on where it starts.
    """
    options = {"steps": [PIECE], "scheme": mj.Adapted(3.0)}
    blocks = estimates(stacked([recording.samples(**options) for recording in recordings]))
    pieces = estimates(stacked([mj.samples_from_paths(**recording.part(), **options) for recording in recordings]))
    truth = np.asarray(jax.vmap(LOSS.gradient)(ALPHAS))[:, 0]
    spread = 4 / np.sqrt(2 * CHAINS)  # four standard errors of a standard deviation, relatively
    (gradient, stderr), (density, density_stderr) = blocks
    np.testing.assert_array_less(np.abs(gradient.mean(0) - truth), 4 * gradient.std(0) / np.sqrt(CHAINS))
    z = (np.asarray(gradient) - truth) / np.asarray(stderr)
    assert np.all(np.abs(np.sqrt(np.mean(z**2, 0)) - 1) < spread)
    assert abs(np.mean(np.abs(z) < 1.96) - 0.95) < 4 * np.sqrt(0.05 * 0.95 / CHAINS)
    ratio = np.asarray(density).std(0, ddof=1) / np.asarray(density_stderr).mean(0)
    assert np.all(np.abs(ratio - 1) < spread)
    # The same points, counted as independent episodes.
    np.testing.assert_allclose(pieces[0][0], gradient, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(np.median(pieces[0][1] / stderr, 0), 1, atol=0.1)
    naive = np.asarray(density).std(0, ddof=1) / np.asarray(pieces[1][1]).mean(0)
    assert np.all(naive[[0, 2]] > 1 + spread)  # in the middle, where all pieces pass, they depend less


def test_the_default_field_covers(recordings):
    """The spline, its judge and their standard errors, on blocks of one chain."""
    samples = recordings[0].samples(steps=[PIECE])
    estimate = jax.vmap(mj.MalliavinField(samples))(ALPHAS)
    truth = jax.vmap(LOSS.gradient)(ALPHAS)
    assert np.all(np.abs(estimate.value - truth) < 4 * np.asarray(estimate.stderr))


def test_blocks_in_chunks_add_up_to_the_same_estimates(recordings):
    options = {"steps": [PIECE], "scheme": mj.Adapted(3.0)}
    whole = mj.Accumulator(ALPHAS, mj.Laplace(0.5)).add(recordings[0].samples(**options))
    parts = mj.accumulate(recordings[0].chunks(333, **options), mj.Accumulator(ALPHAS, mj.Laplace(0.5)))
    assert parts.num_episodes == whole.num_episodes == 60
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-9), parts.estimate(), whole.estimate())


def test_pieces_share_the_row_at_a_cut_and_blocks_hold_consecutive_ones(chains):
    x, g, h = (leaf[0, :98] for leaf in chains)  # 97 steps: twelve pieces, and one step left over
    recording = cut(x, g, h, blocks=3)
    assert (recording.num_episodes, recording.num_steps, recording.block_size) == (12, PIECE, 4)
    np.testing.assert_array_equal(recording.part()["x"][:, 0], x[:96:8])
    np.testing.assert_array_equal(recording.part()["x"][:, -1], x[8:97:8])
    options = {"steps": [4, 8], "scheme": mj.Adapted(3.0)}
    samples = recording.samples(**options)
    one_by_one = mj.samples_from_paths(**recording.part(), **options)
    assert samples.x.shape == (3, 8, 1)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a.reshape(b.shape), b), samples, one_by_one)
    # Five to a block: the last one has two pieces, and what fills it up is not observed.
    uneven = mj.Recording(**recording.part(), block_size=5).samples(**options)
    np.testing.assert_array_equal(np.asarray(uneven.observed).sum(1), [10, 10, 4])
    np.testing.assert_array_equal(uneven.x.reshape(-1, 1)[:24], one_by_one.x.reshape(-1, 1))
    # Chunks are whole blocks, however few episodes are asked for.
    chunks = list(mj.Recording(**recording.part(), block_size=5).chunks(3, **options))
    assert [chunk.num_episodes for chunk in chunks] == [1, 1, 1]
    joined = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *chunks)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-12), joined, uneven)


def test_restarts_inside(chains):
    """Episodes are cut each by itself; settings go with them."""
    x, g, h = (leaf[0, :60] for leaf in chains)
    options = {"starts": [0, 20, 25], "piece_steps": 8, "blocks": 2}
    recording = mj.split_log(x, g, h, **options, step_size=[0.1, 0.2, 0.3], inverse_temperature=[1.0, 2.0, 3.0])
    np.testing.assert_array_equal(recording.part()["x"][:, 0], x[[0, 8, 25, 33, 41, 49]])
    np.testing.assert_array_equal(recording.step_size, [0.1, 0.1, 0.3, 0.3, 0.3, 0.3])
    np.testing.assert_array_equal(recording.inverse_temperature, [1, 1, 3, 3, 3, 3])
    sizes = np.linspace(0.01, 0.02, 60)
    recording = mj.split_log(x, g, h, **options, step_size=sizes)
    np.testing.assert_array_equal(recording.step_size[:, 0], sizes[[0, 8, 25, 33, 41, 49]])
    assert recording.step_size.shape == (6, 9)
    # As few numbers as say the same.
    assert mj.split_log(x, g, h, **options, step_size=np.full(60, 0.1)).step_size.shape == ()
    each = np.repeat([0.1, 0.2, 0.3], [20, 5, 35])
    np.testing.assert_array_equal(
        mj.split_log(x, g, h, **options, step_size=each).step_size, [0.1, 0.1, 0.3, 0.3, 0.3, 0.3]
    )


def test_autocorrelation_time():
    """(1 + ρ)/(1 − ρ) for an autoregression; its standard error is that of Sokal's window, τ √(20τ/n)."""
    rng = np.random.default_rng(0)
    for rho in (0.0, 0.5, 0.9):
        series = np.zeros((20_000, 2))
        noise = rng.normal(size=20_000)
        for k in range(1, len(series)):
            series[k, 1] = rho * series[k - 1, 1] + noise[k]
        exact = (1 + rho) / (1 - rho)
        assert abs(autocorrelation_time(series) - exact) < 4 * exact * np.sqrt(20 * exact / 20_000)
    assert autocorrelation_time(np.ones((5, 1))) == 1


def test_the_default_number_of_blocks(chains):
    x, g, h = (leaf[1] for leaf in chains)
    recording = cut(x, g, h)
    time = autocorrelation_time(x[: -PIECE + 1 : PIECE][:1500])
    assert 3 < time < 20
    assert recording.block_size == min(2 ** np.ceil(np.log2(10 * time)), 30)
    with pytest.warns(RuntimeWarning, match=r"the chain is short: 250 pieces, .* standard errors may be too small"):
        cut(x[:2001], g[:2001], h[:2001])


def test_a_file_keeps_the_blocks(chains, tmp_path):
    recording = cut(*(leaf[0, :98] for leaf in chains), blocks=3)
    for name in ("run.npz", "run"):
        mj.io.save(tmp_path / name, recording)
        assert mj.io.load(tmp_path / name).block_size == 4
    x, g, h = (leaf[0, :98] for leaf in chains)
    np.savez(tmp_path / "log.npz", x=x, gradient=g, hessian=h)
    log = mj.io.load(tmp_path / "log.npz", **LEARNER, piece_steps=8, blocks=3)
    assert (log.num_episodes, log.block_size) == (12, 4)


@pytest.mark.usefixtures("no_type_checks")
def test_mistakes_are_named(chains):
    x, g = (leaf[0, :50] for leaf in chains[:2])
    for message, call in {
        "starts must be the rows at which episodes start, or piece_steps": lambda: mj.split_log(x, g),
        "piece_steps must be at most 49, the longest episode, got 50": lambda: mj.split_log(x, g, piece_steps=50),
        "piece_steps must be a whole number": lambda: mj.split_log(x, g, piece_steps=0),
        "blocks must be a whole number, at least 2, got 1": lambda: mj.split_log(x, g, piece_steps=5, blocks=1),
        "blocks are made of pieces: give piece_steps too": lambda: mj.split_log(x, g, starts=[0], blocks=4),
        r"step_size must be one number or have shape \(1,\), got shape \(3,\)": lambda: mj.split_log(
            x, g, starts=[0], step_size=[1.0, 2.0, 3.0]
        ),
        "block_size must be a whole number": lambda: mj.Recording(x[None], g[None], block_size=0),
    }.items():
        with pytest.raises(ValueError, match=message):
            call()
