"""The outer chain: its law, its bookkeeping, its randomness and its refusals."""

import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from malliavin_jax.chain.passive import passive_langevin
from malliavin_jax.chain.rule import langevin
from malliavin_jax.estimate.ratio import Estimate
from malliavin_jax.fields.fresh import TrueField
from malliavin_jax.potentials import AbstractPotential

METHODS = ["leimkuhler-matthews", "euler"]


class Local(AbstractPotential):
    """A potential of this file, its Hessian by automatic differentiation."""

    def hessian(self, x):
        return jax.jacfwd(self.gradient)(x)


class Quartic(Local):
    def value(self, x):
        return jnp.sum(x**4) / 4 + jnp.sum(x**2) / 2

    def gradient(self, x):
        return x**3 + x


class Quadratic(Local):
    stiffness: float | jax.Array

    def value(self, x):
        return jnp.sum(self.stiffness * x**2) / 2

    def gradient(self, x):
        return self.stiffness * x


class Soft(Local):
    """x²/2 + 2 sqrt(1 + x²): far from harmonic, yet stable at the large steps that make a bias visible."""

    def value(self, x):
        return x**2 / 2 + 2 * jnp.sqrt(1 + x**2)

    def gradient(self, x):
        return x + 2 * x / jnp.sqrt(1 + x**2)


class KeyedField(eqx.Module):
    """A noisy field: what it returns depends on the position and on the key of the step."""

    def __call__(self, alpha, *, key=None):
        noise = jax.random.normal(key, (), alpha.dtype)
        value = 2 * alpha + 0.3 * noise
        trusted = alpha[0] > 0
        return Estimate(value, jnp.abs(value), jnp.exp(-alpha @ alpha), noise**2, trusted)


def gibbs_mean(function, potential):
    # The trapezoid rule on a smooth, decaying integrand: exact to machine precision.
    x = np.linspace(-12, 12, 4001)
    density = np.exp(-np.asarray(jax.vmap(potential.value)(jnp.asarray(x))))
    return np.sum(function(x) * density) / np.sum(density)


def mean_and_stderr(per_chain):
    per_chain = np.asarray(per_chain, float)
    return per_chain.mean(), per_chain.std(ddof=1) / np.sqrt(len(per_chain))


# --- the law ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("through_optax", [False, True], ids=["built-in", "optax"])
@pytest.mark.parametrize("method", METHODS)
def test_variance_in_a_quadratic_well_is_the_closed_form(key, method, through_optax):
    # x ← (1 − ηκ) x + noise is linear, so its stationary variance is explicit: 1/(βκ) with
    # Leimkuhler–Matthews, 1/(βκ(1 − ηκ/2)) with Euler. d = 2 and unequal stiffness guard against mixed axes.
    eta, beta, stiffness = 0.2, 2.0, jnp.array([1.5, 4.0])
    rule = dict(step_size=eta, inverse_temperature=beta, update=method)
    if through_optax:
        rule = dict(update=langevin(jax.random.fold_in(key, 1), eta, beta, method=method))
    field = TrueField(Quadratic(stiffness))
    chain = passive_langevin(key, field, jnp.zeros((400, 2)), num_steps=700, burn_in=100, **rule)
    exact = 1 / (beta * stiffness * (1 - eta * stiffness / 2 if method == "euler" else 1.0))
    for axis in range(2):
        mean, stderr = mean_and_stderr(jnp.mean(chain.positions[..., axis] ** 2, 1))
        assert abs(mean - exact[axis]) < 4 * stderr
        assert stderr < 0.02 * exact[axis]  # the other method is off by 15 % and 40 %
    # Chains do not move together: the mean over chains has the variance of a mean.
    over_chains = jnp.mean(jnp.mean(chain.positions, 0)[::20, 0] ** 2) * 400
    assert abs(over_chains / exact[0] - 1) < 4 * np.sqrt(2 / 30) * 1.5


def test_stationary_law_of_the_quartic(key):
    # The step is small enough for the bias, measured at 0.05·η² below, to be far inside the standard error.
    chain = passive_langevin(
        key, TrueField(Quartic()), jnp.zeros((1000, 1)), num_steps=2000, step_size=0.05,
        inverse_temperature=1.0, burn_in=100, thinning=5,
    )  # fmt: skip
    for function in (lambda x: x**2, lambda x: np.cos(2 * x), lambda x: np.exp(-(x**2))):
        mean, stderr = mean_and_stderr(function(np.asarray(chain.positions[..., 0])).mean(1))
        assert abs(mean - gibbs_mean(function, Quartic())) < 4 * stderr
        assert stderr < 0.003


@pytest.mark.parametrize(("method", "order"), [("euler", 1), ("leimkuhler-matthews", 2)])
def test_order_of_the_bias(key, method, order):
    # bias(η) = c η^p (1 + O(η)): the slope between two steps is p up to that O(η), measured ~0.1 here.
    def function(x):
        return np.exp(-2 * x**2)

    exact = gibbs_mean(function, Soft())
    biases, errors = [], []
    for eta in (0.2, 0.4):
        chain = passive_langevin(
            key, TrueField(Soft()), jnp.zeros((16_384, 1), jnp.float32), num_steps=int(160 / eta) + 50,
            step_size=eta, inverse_temperature=1.0, burn_in=50, thinning=round(0.4 / eta), update=method,
        )  # fmt: skip
        mean, stderr = mean_and_stderr(function(np.asarray(chain.positions[..., 0])).mean(1))
        biases.append(abs(mean - exact))
        errors.append(stderr / abs(mean - exact))
    slope, stderr = np.log2(biases[1] / biases[0]), np.hypot(*errors) / np.log(2)
    assert abs(slope - order) < 4 * stderr + 0.15
    assert 4 * stderr + 0.15 < 1.0  # so that neither order can pass for the other


# --- bookkeeping -----------------------------------------------------------------------------------------


def python_loop(key, field, x, num_steps, eta, beta, burn_in, thinning, method):
    """The definition, step by step."""
    noise_key, field_key = jax.random.split(key)

    @jax.jit
    def step(x, k, eta):
        def w(k):
            return jax.random.normal(jax.random.fold_in(noise_key, k), x.shape, x.dtype)

        estimate = jax.vmap(lambda alpha: field(alpha, key=jax.random.fold_in(field_key, k)))(x)
        noise = w(k) if method == "euler" else (w(k) + w(k + 1)) / 2
        return x - eta * estimate.value + jnp.sqrt(2 * eta / beta) * noise, estimate

    visited, estimates = [x], []
    for k in range(num_steps + 1):
        x, estimate = step(x, jnp.asarray(k), eta(k))
        visited.append(x)
        estimates.append(estimate)
    kept = range(burn_in + thinning, num_steps + 1, thinning)
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves, 1), *[estimates[k] for k in kept])
    return np.stack([visited[k] for k in kept], 1), stacked


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("num_steps", "burn_in", "thinning"),
    [(1, 0, 1), (13, 3, 4), (300, 20, 7)],
)
def test_kept_positions_are_those_of_a_plain_loop(method, num_steps, burn_in, thinning):
    key, x = jax.random.key(7), jax.random.normal(jax.random.key(8), (3, 2))
    chain = passive_langevin(
        key, KeyedField(), x, num_steps=num_steps, step_size=0.1, inverse_temperature=3.0,
        burn_in=burn_in, thinning=thinning, update=method,
    )  # fmt: skip
    positions, estimates = python_loop(key, KeyedField(), x, num_steps, lambda k: 0.1, 3.0, burn_in, thinning, method)
    assert chain.positions.shape == (3, (num_steps - burn_in) // thinning, 2)
    np.testing.assert_allclose(chain.positions, positions, rtol=0, atol=1e-12)
    np.testing.assert_allclose(chain.gradients, estimates.value, rtol=0, atol=1e-12)
    np.testing.assert_allclose(chain.gradient_stderr, estimates.stderr, rtol=0, atol=1e-12)
    np.testing.assert_allclose(chain.density, estimates.density, rtol=0, atol=1e-12)
    np.testing.assert_allclose(chain.density_stderr, estimates.density_stderr, rtol=0, atol=1e-12)
    np.testing.assert_array_equal(chain.trusted, estimates.trusted)
    assert not chain.diverged.any()


def test_schedule_of_step_sizes():
    schedule = optax.exponential_decay(0.2, 10, 0.5)
    key, x = jax.random.key(3), jnp.ones((2, 1))
    chain = passive_langevin(key, KeyedField(), x, num_steps=40, step_size=schedule, inverse_temperature=1.0)
    positions, _ = python_loop(key, KeyedField(), x, 40, lambda k: 0.2 * 0.5 ** (k / 10), 1.0, 0, 1, METHODS[0])
    np.testing.assert_allclose(chain.positions, positions, rtol=0, atol=1e-12)


def test_all_chains_share_the_key_of_a_step():
    class Fresh(eqx.Module):
        def __call__(self, alpha, *, key=None):
            drawn = jax.random.normal(key, alpha.shape)
            return Estimate(drawn, drawn, drawn[0], drawn[0], jnp.asarray(True))

    chain = passive_langevin(
        jax.random.key(0), Fresh(), jnp.zeros((5, 2)), num_steps=200, step_size=0.1, inverse_temperature=1.0
    )
    np.testing.assert_array_equal(chain.gradients, jnp.broadcast_to(chain.gradients[:1], (5, 200, 2)))
    assert len(np.unique(chain.gradients[0, :, 0])) == 200
    assert len(np.unique(chain.positions[:, -1, 0])) == 5  # their own noise still tells the chains apart


# --- the optax update ------------------------------------------------------------------------------------


def moves(transformation, gradients, params):
    state, out = transformation.init(params), []
    for g in gradients:
        move, state = transformation.update(g, state, params)
        out.append(move)
    return out


def test_update_is_the_formula():
    params = {"a": jnp.ones(3), "b": (jnp.zeros((2, 2)), jnp.zeros((), jnp.float32))}
    zeros = [jax.tree.map(jnp.zeros_like, params)] * 4
    ones = [jax.tree.map(jnp.ones_like, params)] * 4
    key, scale = jax.random.key(5), (2 * 0.3 / 1.7) ** 0.5
    w = [
        jax.tree.map(lambda m: m / scale, move)
        for move in moves(langevin(key, 0.3, 1.7, method="euler"), zeros, params)
    ]
    drawn = np.concatenate([np.ravel(leaf) for move in w for leaf in jax.tree.leaves(move)])
    assert len(np.unique(drawn)) == drawn.size  # every leaf, entry and step has its own number
    for k, move in enumerate(moves(langevin(key, 0.3, 1.7), ones, params)[:3]):
        expected = jax.tree.map(lambda a, b: -0.3 + scale * (a + b) / 2, w[k], w[k + 1])
        jax.tree.map(lambda m, e: np.testing.assert_allclose(m, e, rtol=1e-6), move, expected)
        assert jax.tree.map(lambda m: m.dtype, move) == jax.tree.map(lambda p: p.dtype, params)


def test_update_noise_is_standard_normal(key):
    (move,) = moves(langevin(key, 0.5, 4.0, method="euler"), [jnp.zeros(20_000)], jnp.zeros(20_000))
    variance = float(jnp.mean(move**2))
    assert abs(variance - 0.25) < 4 * 0.25 * np.sqrt(2 / 20_000)


def test_update_takes_a_schedule_and_works_under_jit():
    def schedule(k):
        return jnp.where(k < 2, 1.0, 0.01)

    transformation = langevin(jax.random.key(0), schedule, 1e30)  # cold: the noise vanishes
    update, state = jax.jit(transformation.update), transformation.init(jnp.zeros(2))
    sizes = []
    for _ in range(4):
        move, state = update(jnp.ones(2), state)
        sizes.append(-float(move[0]))
    np.testing.assert_allclose(sizes, [1, 1, 0.01, 0.01], atol=1e-9)


def test_composes_with_clipping():
    params, key = jnp.zeros(2), jax.random.key(2)
    gradients = [jnp.array([3.0, -40.0]), jnp.array([0.3, 0.4])]
    clipped = moves(optax.chain(optax.clip_by_global_norm(1.0), langevin(key, 0.1, 1.0)), gradients, params)
    plain = moves(langevin(key, 0.1, 1.0), [g / max(1.0, float(jnp.linalg.norm(g))) for g in gradients], params)
    np.testing.assert_allclose(jnp.stack(clipped), jnp.stack(plain), atol=1e-14)


def test_clipping_saves_a_chain_that_would_run_away():
    x = jnp.full((4, 1), 30.0)
    rule = optax.chain(optax.clip(5.0), langevin(jax.random.key(1), 0.05, 1.0))
    chain = passive_langevin(jax.random.key(0), TrueField(Quartic()), x, num_steps=400, update=rule)
    assert not chain.diverged.any()
    assert float(jnp.abs(chain.positions[:, -1]).max()) < 5
    with pytest.warns(RuntimeWarning, match="4 of 4 chains"):
        passive_langevin(
            jax.random.key(0), TrueField(Quartic()), x, num_steps=400, step_size=0.05, inverse_temperature=1.0
        )


def test_optimizer_has_a_state_per_chain():
    # Momentum and per-chain clipping: what happens in one chain does not depend on its neighbours.
    rule = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1, momentum=0.9))
    x = jnp.array([[1.0, 2.0], [50.0, -3.0], [0.1, 0.1]])

    def run(x):
        return passive_langevin(jax.random.key(0), TrueField(Quadratic(1.0)), x, num_steps=30, update=rule)

    together = run(x).positions
    alone = jnp.concatenate([run(x[i : i + 1]).positions for i in range(3)])
    np.testing.assert_allclose(together, alone, atol=1e-13)
    position, velocity = np.array([1.0, 2.0]), 0.0
    for k in range(3):
        velocity = 0.9 * velocity + position / max(1.0, np.linalg.norm(position))
        position = position - 0.1 * velocity
        np.testing.assert_allclose(together[0, k], position, atol=1e-13)


def test_foreign_random_optimizers_draw_apart():
    rule = optax.noisy_sgd(0.1, eta=1.0, gamma=0.0, key=jax.random.key(3))
    field, x = TrueField(Quadratic(1.0)), jnp.zeros((6, 1))
    with jax.numpy_dtype_promotion("standard"):  # optax's own noise mixes integers and floats
        chain = passive_langevin(jax.random.key(0), field, x, num_steps=3, update=rule)
    assert len(np.unique(chain.positions)) == 18


# --- compiled once, under every transformation -----------------------------------------------------------


def test_numbers_do_not_compile_anew():
    traces = []

    class Counting(eqx.Module):
        def __call__(self, alpha, *, key=None):
            traces.append(0)
            return TrueField(Quartic())(alpha)

    def run(**settings):
        settings = dict(step_size=0.05, inverse_temperature=1.0, burn_in=3, thinning=2) | settings
        return passive_langevin(jax.random.key(0), Counting(), jnp.zeros((2, 1)), num_steps=23, **settings)

    first = run()
    before = len(traces)
    for settings in ({"step_size": 0.01}, {"inverse_temperature": 7}, {"step_size": jnp.asarray(0.02)}):
        assert not np.array_equal(run(**settings).positions, first.positions)
    assert len(traces) == before


def test_under_jit_and_vmap():
    def run(key, eta, x):
        return passive_langevin(key, TrueField(Quartic()), x, num_steps=20, step_size=eta, inverse_temperature=1.0)

    keys, x = jax.random.split(jax.random.key(0), 2), jnp.ones((2, 1))
    direct = [run(k, 0.1, x).positions for k in keys]
    np.testing.assert_allclose(jax.jit(run)(keys[0], 0.1, x).positions, direct[0], atol=1e-13)
    batched = jax.vmap(run, (0, None, None))(keys, 0.1, x)
    np.testing.assert_allclose(batched.positions, jnp.stack(direct), atol=1e-13)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_dtype_follows_initial(dtype, key):
    chain = passive_langevin(
        key, TrueField(Quadratic(jnp.ones((), dtype))), jnp.zeros((400, 1), dtype), num_steps=400,
        step_size=jnp.asarray(0.2), inverse_temperature=np.float64(1.0), burn_in=50,
    )  # fmt: skip
    assert chain.positions.dtype == chain.gradients.dtype == dtype
    mean, stderr = mean_and_stderr(jnp.mean(chain.positions[..., 0] ** 2, 1))
    assert abs(mean - 1) < 4 * stderr


def test_plain_numbers_as_input():
    def run(x):
        return passive_langevin(
            jax.random.key(0), TrueField(Quartic()), x, num_steps=4, step_size=0.1, inverse_temperature=1
        )

    np.testing.assert_array_equal(run(np.zeros((2, 1), int)).positions, run(jnp.zeros((2, 1))).positions)


# --- progress --------------------------------------------------------------------------------------------


def test_progress_changes_nothing_and_goes_to_stderr(capfd):
    def run(**more):
        return passive_langevin(
            jax.random.key(0), KeyedField(), jnp.ones((3, 2)), num_steps=250, step_size=0.1,
            inverse_temperature=1.0, burn_in=17, thinning=3, **more,
        )  # fmt: skip

    quiet = run()
    assert capfd.readouterr() == ("", "")
    shown = run(progress=True)
    out, err = capfd.readouterr()
    assert out == ""
    assert "100%" in err
    jax.tree.map(np.testing.assert_array_equal, quiet, shown)


@pytest.mark.parametrize("broken", ["__init__", "update", "close"])
def test_a_broken_bar_does_not_stop_the_run(monkeypatch, broken):
    def fail(*args, **kwargs):
        raise OSError("no terminal")

    monkeypatch.setattr(f"tqdm.tqdm.{broken}", fail)
    monkeypatch.setattr("tqdm.tqdm.__del__", lambda self: None)
    chain = passive_langevin(
        jax.random.key(0), KeyedField(), jnp.ones((1, 1)), num_steps=5, step_size=0.1,
        inverse_temperature=1.0, progress=True,
    )  # fmt: skip
    assert chain.positions.shape == (1, 5, 1)


# --- what is refused, and what is reported ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"initial": jnp.zeros(3)}, r"initial must have shape \(chains, d\), got \(3,\)"),
        ({"initial": jnp.zeros((0, 1))}, "initial must hold at least one chain"),
        ({"initial": jnp.array([[0.0], [jnp.nan]])}, "initial must be finite, got .* for chain 1"),
        ({"num_steps": 0}, "num_steps must be a whole number, at least 1, got 0"),
        ({"burn_in": 10}, "burn_in must be less than num_steps=10, got 10"),
        ({"burn_in": -1}, "burn_in must be a whole number"),
        ({"thinning": 0}, "thinning must be a whole number"),
        ({"burn_in": 5, "thinning": 6}, "thinning must be at most num_steps − burn_in = 5, got 6"),
        ({"step_size": 0.0}, "step_size must be positive"),
        ({"step_size": -0.1}, "step_size must be positive"),
        ({"step_size": None}, "step_size must be given"),
        ({"step_size": jnp.ones(2)}, r"step_size must have shape \(\)"),
        ({"step_size": lambda k: -0.1}, "step_size must be non-negative"),
        ({"inverse_temperature": [1.0, 2.0]}, r"inverse_temperature must have shape \(\)"),
        ({"inverse_temperature": 0}, "inverse_temperature must be positive"),
        ({"inverse_temperature": jnp.inf}, "inverse_temperature must be positive and finite"),
        ({"inverse_temperature": None}, "inverse_temperature must be given"),
        ({"update": "heun"}, "update must be one of leimkuhler-matthews, euler or an optax .*, got 'heun'"),
        ({"update": optax.sgd(0.1)}, "must be left out when update is an optax transformation"),
        ({"field": lambda alpha, *, key: alpha}, "field must return an Estimate"),
    ],
)
def test_bad_input(change, message):
    settings = dict(
        field=TrueField(Quartic()),
        initial=jnp.zeros((2, 1)),
        num_steps=10,
        step_size=0.1,
        inverse_temperature=1.0,
    )
    with pytest.raises(ValueError, match=message):
        passive_langevin(jax.random.key(0), **(settings | change))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((0.0, 1.0), "step_size"), ((0.1, -1.0), "inverse_temperature"), ((jnp.nan, 1.0), "step_size")],
)
def test_bad_update(arguments, message):
    with pytest.raises(ValueError, match=f"{message} must be positive"):
        langevin(jax.random.key(0), *arguments)


def test_bad_method():
    with pytest.raises(ValueError, match="method must be one of leimkuhler-matthews, euler, got 'heun'"):
        langevin(jax.random.key(0), 0.1, 1.0, method="heun")


def test_field_of_the_wrong_dimension():
    class Flat(eqx.Module):
        def __call__(self, alpha, *, key=None):
            return TrueField(Quartic())(alpha[:1])

    with pytest.raises(ValueError, match=r"value of shape \(2,\)"):
        passive_langevin(
            jax.random.key(0), Flat(), jnp.zeros((3, 2)), num_steps=3, step_size=0.1, inverse_temperature=1.0
        )


def test_progress_is_refused_under_jit():
    def run(x):
        return passive_langevin(
            jax.random.key(0),
            TrueField(Quartic()),
            x,
            num_steps=3,
            step_size=0.1,
            inverse_temperature=1.0,
            progress=True,
        )

    with pytest.raises(ValueError, match="leave them out under jit"):
        jax.jit(run)(jnp.zeros((1, 1)))


def test_runaway_chains_are_reported_and_leave_the_others_alone():
    settings = dict(num_steps=50, step_size=0.1, inverse_temperature=1.0, burn_in=1)
    field, x = TrueField(Quartic()), jnp.array([[0.0], [40.0], [0.5]])
    with pytest.warns(RuntimeWarning, match="1 of 3 chains became non-finite, the first by kept position [0-9]"):
        chain = passive_langevin(jax.random.key(0), field, x, **settings)
    np.testing.assert_array_equal(chain.diverged, [False, True, False])
    assert not np.isfinite(chain.positions[1, -1, 0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        calm = passive_langevin(jax.random.key(0), field, x.at[1].set(0.0), **settings)
    np.testing.assert_array_equal(chain.positions[::2], calm.positions[::2])
