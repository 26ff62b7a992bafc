"""Portability: every public entry point is lowered for CPU, CUDA and TPU on a machine that has neither."""

import functools
import inspect
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jax import export

import malliavin_jax as mj
from malliavin_jax.streaming.streams import observe_and_add
from malliavin_jax.wiener.conditional import weigh_in_chunks
from malliavin_jax.wiener.sensitivities import _greeks

PLATFORMS = ("cpu", "cuda", "tpu")
KEY = jax.random.key(0)
ALPHAS = {d: jnp.zeros((3, d), jnp.float32) for d in (1, 2)}


def learner(dim, **options):
    initial = lambda key: jax.random.normal(key, (dim,), jnp.float32)  # noqa: E731
    return mj.ForwardLearner(mj.potentials.Quartic(0.5 if dim > 1 else 0.0), initial, step_size=0.05, **options)


@functools.cache
def samples(dim):
    return mj.observe(KEY, learner(dim), num_episodes=64, times=[0.1])


def with_field(make, dim=1):
    """A field built on the machine, then evaluated anywhere: its arrays are arguments of the exported program."""

    def case():
        field = make()
        return lambda field, alphas: jax.vmap(lambda alpha: field(alpha, key=KEY))(alphas), (field, ALPHAS[dim])

    return case


def chain(key, field, initial):
    options = dict(num_steps=6, step_size=0.05, inverse_temperature=1.0, burn_in=2)
    return mj.passive_langevin(key, field, initial, **options).positions


def observe(scheme, dim=1, **options):
    one = learner(dim, **options)
    return lambda: (lambda key: mj.observe(key, one, num_episodes=8, times=[0.1, 0.2], scheme=scheme), (KEY,))


def potentials(x):
    data, labels = jnp.ones((4, 2), jnp.float32), jnp.asarray([0, 1, 1, 0])
    every = (
        mj.potentials.Quadratic(), mj.potentials.Quartic(0.5), mj.potentials.DoubleWell(), mj.potentials.MullerBrown(),
        mj.potentials.GaussianMixture(jnp.eye(2, dtype=jnp.float32)), mj.potentials.LogisticRegression(data, labels),
    )  # fmt: skip
    return [(loss.value(x), loss.gradient(x), loss.hessian(x)) for loss in every]


def polynomial(s):
    fit = mj.potentials.Polynomial.fit(s.x[:, 0], s.gradient[:, 0], s.hessian[:, 0], degree=4)
    return fit.gradient(jnp.zeros(2, jnp.float32))


def paths(key):
    path = mj.simulate(key, learner(1), 6)
    two = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), path)
    recorded = mj.samples_from_paths(two.x, two.gradient, two.hessian, step_size=0.05, times=[0.1])
    return recorded, mj.weigh(path, mj.Reciprocal()), mj.weigh(path, mj.weights.FixedWindow(jnp.ones(6, jnp.float32)))


def conditional(s, alpha):
    expected = mj.conditional_expectation(s, s.gradient, s.hessian, alpha, mj.Gaussian(0.5, 0.1))
    return expected, mj.density(s, alpha, mj.Gaussian(0.5, 0.1)), mj.score(s, alpha, 0.3)


def streaming(accumulator, s):
    return accumulator.add(s).merge(accumulator.add(s)).estimate()


def matrix_free(key):
    dense = mj.potentials.Quadratic()
    loss = mj.potentials.MatrixFree(dense.value, dense.gradient, lambda x, v: v)
    one = eqx.tree_at(lambda l: l.potential, learner(6), loss, is_leaf=lambda leaf: leaf is None)
    scheme = mj.Windowed(1.0, neumann=2)
    return mj.observe(key, one, num_episodes=4, times=[0.1], scheme=scheme)


def pilots(key):
    many = jax.vmap(lambda k: mj.simulate(k, learner(1), 6))(jax.random.split(key, 8))
    return mj.weights.best_rate(many, jnp.asarray([1.0, 2.0], jnp.float32)), mj.weights.minimum_variance_window(many)


def single_kernel(key, s, initial):
    return mj.kernel.single_kernel_langevin(
        key, s, initial, num_steps=4, step_size=0.05, inverse_temperature=1.0, bandwidth=0.3,
        density=lambda x: jnp.exp(-x[0] ** 2), log_density_gradient=lambda x: -2 * x,
    )  # fmt: skip


def diagnostics(positions):
    limits = dict(inverse_temperature=1.0, range=(-1.0, 1.0))
    loss, d = mj.potentials.Quartic(), mj.diagnostics
    distances = d.total_variation(positions, loss, **limits), d.wasserstein(positions, loss, **limits)
    return d.split_rhat(positions), d.effective_sample_size(positions), distances


def simulated_stream(key, accumulator):
    first, count = jnp.asarray(0, jnp.uint32), jnp.asarray(7, jnp.int32)
    sizes = dict(first=first, count=count, chunk_size=8, stops=(2,))
    return observe_and_add(accumulator, key=key, learner=learner(1), scheme=mj.Canonical(), **sizes)


def functionals(key):
    """`malliavin_jax.wiener` in one program."""
    one = functools.partial(jnp.ones, dtype=jnp.float32)
    noise = mj.wiener.Diffusion(
        lambda x, t: -x, lambda x, t: one((1, 1)), jnp.zeros(1, jnp.float32), step_size=0.25, num_steps=4
    )
    middle, end = (lambda path: path.x[2, 0]), (lambda path: path.x[4, 0])
    # What `weigh` and `greeks` compile: their checks at run time call back to the host, which is not portable.
    sizes = dict(num_paths=8, integrand="canonical", probes=None, chunk_size=8)
    sample, _ = weigh_in_chunks(key, noise, ell=middle, g=end, **sizes)
    greeks = _greeks(key, noise, lambda x: (x[0] > 0).astype(x.dtype), 8, 8)
    return mj.wiener.conditional_expectation(sample, 0.1, mj.wiener.best_localizer(sample)), greeks


def adaptive(key, samples):
    """The field, updated, and the whole of `track`."""
    field = mj.AdaptiveField(-3.0, 3.0, intervals=8)
    options = dict(num_updates=2, episodes_per_update=8, times=[0.1, 0.2], steps_per_update=2)
    options |= dict(grid=jnp.linspace(-1, 1, 5, dtype=jnp.float32), initial=ALPHAS[1])
    run = mj.track(key, learner(1), field, step_size=0.05, inverse_temperature=1.0, **options)
    return field.update(samples)(ALPHAS[1][0]), run


POSITIONS = jnp.sin(jnp.arange(40, dtype=jnp.float32)).reshape(2, 20, 1)
CASES = {
    "potentials": lambda: (potentials, (jnp.zeros(2, jnp.float32),)),
    "Polynomial.fit": lambda: (polynomial, (samples(2),)),
    "simulate, weigh, samples_from_paths": lambda: (paths, (KEY,)),
    "observe, Canonical": observe(mj.Canonical(), restart_probability=0.1, gradient_noise=0.5),
    "observe, Canonical, d = 2": observe(mj.Canonical(), dim=2),
    "observe, Adapted": observe(mj.Adapted(3.0)),
    "observe, Windowed, d = 6": observe(mj.Windowed(1.0), dim=6),
    "observe, MatrixFree": lambda: (matrix_free, (KEY,)),
    "conditional_expectation, density, score": lambda: (conditional, (samples(2), ALPHAS[2][0])),
    "MalliavinField, sorted": with_field(lambda: mj.MalliavinField(samples(1), mj.Laplace(0.3), None)),
    "MalliavinField, dense": with_field(lambda: mj.MalliavinField(samples(2), mj.Gaussian(0.5, 0.1), None), 2),
    "MalliavinField, default": with_field(lambda: mj.MalliavinField(samples(1))),
    "FreshField": with_field(lambda: mj.FreshField(learner(1), mj.Laplace(0.3), num_episodes=8, time=0.1)),
    "NadarayaWatson": with_field(lambda: mj.kernel.NadarayaWatson(samples(1), bandwidth=0.3)),
    "LocalPolynomial": with_field(lambda: mj.kernel.LocalPolynomial(samples(1), bandwidth=0.5, degree=1)),
    "Accumulator": lambda: (streaming, (mj.Accumulator(ALPHAS[1], mj.Laplace(0.3)), samples(1))),
    "AdaptiveField, track": lambda: (adaptive, (KEY, samples(1))),
    "observe_and_accumulate": lambda: (simulated_stream, (KEY, mj.Accumulator(ALPHAS[1], mj.Laplace(0.3)))),
    "best_rate, minimum_variance_window": lambda: (pilots, (KEY,)),
    "TabulatedField": with_field(
        lambda: mj.TabulatedField(mj.TrueField(mj.potentials.Quartic()), (jnp.linspace(-1, 1, 9, dtype=jnp.float32),))
    ),
    "wiener": lambda: (functionals, (KEY,)),
    "single_kernel_langevin": lambda: (single_kernel, (KEY, samples(1), ALPHAS[1])),
    "diagnostics": lambda: (diagnostics, (POSITIONS,)),
    "passive_langevin": lambda: (chain, (KEY, mj.TrueField(mj.potentials.Quartic()), ALPHAS[1])),
    "loss_from_samples": lambda: (
        lambda x: mj.loss_from_samples(x, inverse_temperature=1.0, bins=8, range=(-1.0, 1.0)),
        (POSITIONS,),
    ),
    "loss_from_estimates": lambda: (
        lambda grid: mj.loss_from_estimates(jax.vmap(mj.TrueField(mj.potentials.Quartic()))(grid[:, None]), grid),
        (jnp.linspace(-1, 1, 9, dtype=jnp.float32),),
    ),
    "loss_from_field": lambda: (
        lambda grid: mj.loss_from_field(mj.TrueField(mj.potentials.Quartic()), grid),
        (jnp.linspace(-1, 1, 9, dtype=jnp.float32),),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_lowers_for_every_platform(name):
    function, arguments = CASES[name]()
    numbers, rest = eqx.partition(arguments, eqx.is_array)
    lower = export.export(jax.jit(lambda numbers: function(*eqx.combine(numbers, rest))), platforms=PLATFORMS)
    exported = lower(numbers)
    assert exported.platforms == PLATFORMS
    lines = exported.mlir_module().splitlines()
    products = [line for line in lines if "stablehlo.dot_general" in line or "stablehlo.convolution" in line]
    rounded = [line.strip() for line in products if "precision = [HIGHEST, HIGHEST]" not in line]
    assert rounded == [], "products that a TPU would take in bfloat16 and a GPU in tf32: use small_tensors.matmul"


# What is no program of the device: results, protocols, what runs on the host, and an optax rule that holds its key.
HOST = {
    "Chain", "Checkpoint", "Estimate", "Loss", "Path", "Samples", "Tracking",
    "Potential", "Recording", "accumulate", "consistency",
    "goodness_of_fit", "langevin", "short_localizer", "split_log",
}  # fmt: skip
SIMPLE = {"Heaviside", "Centered"}  # Laplace without its exponential


def test_every_public_name_is_lowered_or_runs_on_the_host():
    public = {name for name in dir(mj) if not name.startswith("_") and not inspect.ismodule(getattr(mj, name))}
    source = inspect.getsource(sys.modules[__name__])
    lowered = {name for name in public if f"mj.{name}(" in source or f"mj.{name}.fit(" in source}
    assert public - lowered - {"observe_and_accumulate"} == HOST | SIMPLE
