"""The main programs of the library, to be compiled for any device: a function, and arguments whose shapes it has."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import malliavin_jax as mj
from malliavin_jax._base.checks import floats_to_arrays
from malliavin_jax.fields.judge import _verdict
from malliavin_jax.fitting.spline_sums import add_points, no_sums
from malliavin_jax.models.folds import make_fold
from malliavin_jax.samples.simulated import observe_steps

KEY = jax.random.key(0)
STEPS = 80


class Sizes(NamedTuple):
    """How large the programs are."""

    episodes: int  # simulated
    bank: int  # samples of a sorted field
    samples: int  # of dense and kernel fields, sums and judges
    queries: int
    chains: int
    moves: int  # of a chain
    fresh: int  # episodes of each fresh estimate


REAL = Sizes(episodes=100_000, bank=1_000_000, samples=100_000, queries=4096, chains=256, moves=2300, fresh=5000)
SMALL = Sizes(episodes=256, bank=512, samples=512, queries=64, chains=16, moves=40, fresh=64)

Made = tuple[Callable[..., Any], tuple[Any, ...]]


def learner(dim: int) -> Any:
    loss = mj.potentials.Quartic(0.5 if dim > 1 else 0.0)
    made = mj.ForwardLearner(loss, mj.initial.Normal(dim=dim), 0.01, gradient_noise=0.5)
    return floats_to_arrays(made, jnp.float32)


@functools.cache
def samples(dim: int, number: int) -> Any:
    """Data of the right shapes: their law does not matter to a compiler."""
    rng = np.random.default_rng(0)
    x, weight = (rng.normal(size=(number, 1, dim)).astype(np.float32) for _ in range(2))
    hessian = (3 * x**2 + 1)[..., None] * np.eye(dim, dtype=np.float32)
    return mj.Samples(*map(jnp.asarray, (x, x**3 + x, hessian, weight, np.ones((number, 1), bool))))


def observed(dim: int, scheme: Any, episodes: int) -> Made:
    one = learner(dim)
    return lambda key: observe_steps(key, one, scheme, episodes, (STEPS,)), (KEY,)


def adapted(dim: int) -> Any:
    """The scheme that `observe` takes by itself, at rates of some pilot."""
    hessians = samples(dim, 64).hessian[:, 0]
    return mj.Adapted.fit(hessians)


def query(field: Any, dim: int, queries: int) -> Made:
    alphas = jnp.zeros((queries, dim), jnp.float32)
    return lambda field, alphas: jax.vmap(lambda alpha: field(alpha, key=KEY))(alphas), (field, alphas)


def chain(field: Any, dim: int, sizes: Sizes) -> Made:
    initial = jnp.zeros((sizes.chains, dim), jnp.float32)
    options = dict(num_steps=sizes.moves, step_size=0.05, inverse_temperature=1.0, burn_in=sizes.moves // 8)
    return lambda key, field, x: mj.passive_langevin(key, field, x, **options), (KEY, field, initial)


@functools.cache
def sorted_field(bank: int) -> Any:
    return mj.MalliavinField(samples(1, bank), mj.Laplace(0.3), None)


@functools.cache
def table(dim: int) -> Any:
    """The default field on data that a spline explains: the size of its table does not depend on theirs."""
    return mj.MalliavinField(samples(dim, 2000))


def dense(dim: int, number: int) -> Any:
    return mj.MalliavinField(samples(dim, number), mj.Gaussian(0.5, 0.1), None)


def fresh(episodes: int) -> Any:
    scheme = mj.Adapted(3.0)
    return mj.FreshField(learner(1), mj.Laplace(0.3), num_episodes=episodes, time=0.1, scheme=scheme)


def spline_sums(dim: int, number: int) -> Made:
    s = samples(dim, number)
    empty = no_sums(-4 * np.ones(dim), 4 * np.ones(dim), (24 if dim == 1 else 12,) * dim)
    points = (s.x[:, 0], s.gradient[:, 0], s.hessian[:, 0], jnp.ones(number, jnp.float32))
    return lambda sums, points: add_points(sums, *points), (empty, points)


def judged(dim: int, number: int) -> Made:
    fold = make_fold(samples(dim, number), mj.potentials.Quartic())
    localizer = mj.Laplace(0.3) if dim == 1 else mj.Gaussian(0.5, 0.1)
    return _verdict, (fold, jnp.zeros((32, dim), jnp.float32), localizer)


def adaptive_update(episodes: int) -> Made:
    field = mj.AdaptiveField(-4.0, 4.0, intervals=16)
    return lambda field, batch: field.update(batch), (field, samples(1, episodes))


def tracked(sizes: Sizes) -> Made:
    options = dict(num_updates=20, episodes_per_update=sizes.fresh, times=[0.1, 0.2], steps_per_update=50)
    options |= dict(grid=jnp.linspace(-1, 1, 41, dtype=jnp.float32), initial=jnp.zeros((sizes.chains, 1), jnp.float32))
    one, field = learner(1), mj.AdaptiveField(-4.0, 4.0, intervals=16)
    rule = dict(step_size=0.05, inverse_temperature=1.0)
    return lambda key, field: mj.track(key, one, field, **options, **rule), (KEY, field)


def programs(n: Sizes) -> dict[str, Callable[[], Made]]:
    """Every main program by its name, made when it is asked for."""
    windowed = mj.Windowed(4.0, neumann=4)
    made: dict[str, Callable[[], Made]] = {}
    for d in (1, 2, 3):
        made[f"observe, Adapted, d = {d}"] = lambda d=d: observed(d, adapted(d), n.episodes)
        made[f"observe, Canonical, d = {d}"] = lambda d=d: observed(d, mj.Canonical(), n.episodes)
    made |= {
        "observe, Windowed, d = 10": lambda: observed(10, windowed, n.episodes // 4),
        "query, table, d = 1": lambda: query(table(1), 1, n.queries),
        "query, table, d = 2": lambda: query(table(2), 2, n.queries),
        "query, sorted": lambda: query(sorted_field(n.bank), 1, n.queries),
        "query, dense, d = 2": lambda: query(dense(2, n.samples), 2, n.queries),
        "query, Nadaraya–Watson, d = 2": lambda: query(
            mj.kernel.NadarayaWatson(samples(2, n.samples), bandwidth=0.3), 2, n.queries
        ),
        "query, local linear, d = 2": lambda: query(
            mj.kernel.LocalPolynomial(samples(2, n.samples), bandwidth=0.5, degree=1), 2, n.queries
        ),
        "chain, true field": lambda: chain(mj.TrueField(mj.potentials.Quartic()), 1, n),
        "chain, table, d = 1": lambda: chain(table(1), 1, n),
        "chain, table, d = 2": lambda: chain(table(2), 2, n),
        "chain, sorted": lambda: chain(sorted_field(n.bank), 1, n),
        "chain, dense, d = 2": lambda: chain(dense(2, n.samples), 2, n),
        "chain, fresh episodes": lambda: chain(fresh(n.fresh), 1, n),
        "spline sums, d = 1": lambda: spline_sums(1, n.samples),
        "spline sums, d = 2": lambda: spline_sums(2, n.samples),
        "judge, d = 1": lambda: judged(1, n.samples),
        "judge, d = 2": lambda: judged(2, n.samples),
        "adaptive update": lambda: adaptive_update(n.fresh),
        "track": lambda: tracked(n),
    }
    return made


def split_programs(n: Sizes) -> dict[str, Callable[[], Made]]:
    """What is split over a mesh of devices: episodes, and the sums over them."""
    return {
        "observe, Adapted, d = 1": lambda: observed(1, adapted(1), n.episodes // 4 * 4),
        "observe, Adapted, d = 2": lambda: observed(2, adapted(2), n.episodes // 4 * 4),
        "query, dense, d = 2": lambda: query(dense(2, n.samples // 4 * 4), 2, n.queries),
    }
