"""From a learner's episodes to its loss: the whole way, against the same way with the true gradient and quadrature."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import malliavin_jax as mj
from malliavin_jax import kernel
from malliavin_jax.potentials import DoubleWell, Quartic


def normal(d, scale=1.0):
    return lambda key: scale * jax.random.normal(key, (d,))


def bank(potential, d=1, episodes=5000, seed=0, scale=1.0, **settings):
    learner = mj.ForwardLearner(potential, normal(d, scale), 0.01, **settings)
    return mj.observe(jax.random.key(seed), learner, num_episodes=episodes, times=[0.8])


def run(field, seed=1, chains=256, steps=2300, burn_in=300, step_size=0.05, beta=1.0, d=1):
    start = jnp.zeros((chains, d))
    return mj.passive_langevin(
        jax.random.key(seed),
        field,
        start,
        num_steps=steps,
        step_size=step_size,
        inverse_temperature=beta,
        burn_in=burn_in,
    )


def weighted_rmse(loss, potential, beta=1.0, reach=1.5):
    """RMSE of L̂ − L up to a constant, weighted by the Gibbs density, over |α| < reach on every axis."""
    axes = loss.grid if isinstance(loss.grid, tuple) else (loss.grid,)
    points = np.stack(np.meshgrid(*map(np.asarray, axes), indexing="ij"), -1)
    true = np.asarray(jax.vmap(potential.value)(jnp.asarray(points.reshape(-1, len(axes))))).reshape(points.shape[:-1])
    value = np.asarray(loss.value)
    weight = np.where(np.isfinite(value) & (np.abs(points) < reach).all(-1), np.exp(-beta * (true - true.min())), 0)
    gap = np.where(weight > 0, value - true, 0)
    gap = gap - np.sum(weight * gap) / np.sum(weight)
    return float(np.sqrt(np.sum(weight * gap**2) / np.sum(weight)))


def histogram(chain, limits=(-2.0, 2.0), bins=40, beta=1.0):
    return mj.loss_from_samples(chain.positions, inverse_temperature=beta, bins=bins, range=limits)


@pytest.mark.parametrize("seed", [0, 1])
def test_a_bank_of_episodes_is_as_good_as_the_true_gradient(seed):
    """5000 episodes, 256 chains, the same noise in both: what is left is the Monte Carlo error that both share."""
    potential = Quartic()
    field = mj.MalliavinField(bank(potential, seed=seed))
    ours, exact = (run(f, seed=10 + seed) for f in (field, mj.TrueField(potential)))
    errors = [weighted_rmse(histogram(chain), potential) for chain in (ours, exact)]
    assert errors[0] < 1.1 * errors[1]
    assert errors[1] < 0.03
    # Integrating the field itself is better still.
    integrated = mj.loss_from_field(field, jnp.linspace(-1.5, 1.5, 61))
    assert weighted_rmse(integrated, potential) < 0.02
    assert np.mean(np.asarray(ours.trusted)) > 0.99


@pytest.mark.parametrize(
    ("chains", "steps"), [(250, 4000), pytest.param(10, 100_000, marks=pytest.mark.slow)], ids=["wide", "long"]
)
def test_a_million_steps_without_a_wild_number(chains, steps):
    """Quartic, N = 5000, β = 1: nothing non-finite, nothing that runs away, no gradient off by 5 in one step of 10⁴."""
    chain = run(mj.MalliavinField(bank(Quartic())), chains=chains, steps=steps, burn_in=0)
    positions, gradients = np.asarray(chain.positions), np.asarray(chain.gradients)
    assert positions.size == 1_000_000
    assert np.all(np.isfinite(positions))
    assert np.all(np.isfinite(gradients))
    assert not np.any(np.asarray(chain.diverged))
    assert np.abs(positions).max() < 5  # e^{−L} at 4 is e^{−72}
    assert np.mean(np.abs(gradients - (positions**3 + positions)) > 5) < 1e-4


def test_two_wells():
    """A tilted double well, from one bank: both wells, with their depths."""
    potential = DoubleWell(tilt=0.3)
    field = mj.MalliavinField(bank(potential, episodes=20_000, gradient_noise=0.5))
    chain = run(field, steps=3000, burn_in=500, step_size=0.02)
    assert weighted_rmse(histogram(chain), potential) < 0.1
    right = float(np.mean(np.asarray(chain.positions) > 0))
    grid = np.linspace(-3, 3, 6001)
    gibbs = np.exp(-((grid**2 - 1) ** 2 + 0.3 * grid))
    exact = gibbs[grid > 0].sum() / gibbs.sum()
    # Chains are independent: the standard error is that of the mean over chains. Leimkuhler–Matthews' own bias at
    # η = .02, and the field's, are allowed a hundredth.
    shares = np.mean(np.asarray(chain.positions)[..., 0] > 0, 1)
    assert abs(right - exact) < 4 * np.std(shares, ddof=1) / np.sqrt(len(shares)) + 0.01
    integrated = mj.loss_from_field(field, jnp.linspace(-1.5, 1.5, 61))
    assert weighted_rmse(integrated, potential) < 0.03


def test_two_dimensions():
    """A coupled quartic in the plane, the chain on a table of the field; the curl is no more than noise makes it."""
    potential = Quartic(0.5)
    field = mj.MalliavinField(bank(potential, d=2, episodes=10_000, gradient_noise=0.5))
    axis = jnp.linspace(-2.2, 2.2, 33)
    table = mj.TabulatedField(field, (axis, axis))
    chain = run(table, d=2, chains=512, steps=2000, burn_in=200)
    rough = mj.loss_from_samples(
        chain.positions, inverse_temperature=1.0, bins=20, range=((-2.0, 2.0), (-2.0, 2.0)), method="kde"
    )
    assert weighted_rmse(rough, potential, reach=1.2) < 0.1
    grid = jnp.linspace(-1.2, 1.2, 17)
    loss = mj.loss_from_field(field, (grid, grid))
    assert weighted_rmse(loss, potential, reach=1.2) < 0.03
    assert float(loss.curl) < 0.05


def test_the_multi_kernel_chain_reaches_the_gibbs_law():
    """Krishnamurthy and Yin's multi-kernel rule: the same chain on a Nadaraya–Watson field.

    Its gradient is biased by O(h²), its law therefore too: the second moment is compared with quadrature within the
    standard error over chains and that bias, which for the bandwidth .1 is some h²·6x/2 in the gradient: a percent.
    """
    samples = bank(Quartic(), episodes=2000)
    chain = run(kernel.NadarayaWatson(samples, 0.1), chains=64, steps=1500)
    squares = np.mean(np.asarray(chain.positions)[..., 0] ** 2, 1)
    grid = np.linspace(-4, 4, 8001)
    gibbs = np.exp(-(grid**4) / 4 - grid**2 / 2)
    exact = np.sum(gibbs * grid**2) / np.sum(gibbs)
    assert abs(np.mean(squares) - exact) < 4 * np.std(squares, ddof=1) / np.sqrt(len(squares)) + 0.02 * exact


def test_fresh_episodes_at_every_step():
    """Algorithm 1 as printed, with this library's weights: chains share each batch, and reach the Gibbs law."""
    learner = mj.ForwardLearner(Quartic(), normal(1), 0.02)
    field = mj.FreshField(learner, mj.Laplace(0.6), num_episodes=500, time=0.8)
    chain = run(field, chains=32, steps=1000, burn_in=100)
    assert np.all(np.isfinite(np.asarray(chain.positions)))
    grid = np.linspace(-4, 4, 8001)
    gibbs = np.exp(-(grid**4) / 4 - grid**2 / 2)
    exact = np.sum(gibbs * grid**2) / np.sum(gibbs)
    squares = np.mean(np.asarray(chain.positions)[..., 0] ** 2, 1)
    # The estimate's variance v heats the chain by a share ηv/2 of the temperature: v ≈ .02, so a thousandth.
    assert abs(np.mean(squares) - exact) < 4 * np.std(squares, ddof=1) / np.sqrt(len(squares)) + 0.02 * exact
