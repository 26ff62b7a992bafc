"""The recovered loss: against NumPy's histogram, exact integrals, dense least squares and repeated runs."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import gaussian_kde

from malliavin_jax.chain.passive import passive_langevin
from malliavin_jax.estimate.ratio import Estimate
from malliavin_jax.fields.fresh import TrueField
from malliavin_jax.fields.malliavin import MalliavinField
from malliavin_jax.learner.initial import Normal
from malliavin_jax.learner.learner import ForwardLearner
from malliavin_jax.potentials import AbstractPotential
from malliavin_jax.recovery.density import loss_from_samples
from malliavin_jax.recovery.integration import loss_from_estimates, loss_from_field
from malliavin_jax.samples import observe


class Local(AbstractPotential):
    """A potential of this file, its Hessian by automatic differentiation."""

    def hessian(self, x):
        return jax.jacfwd(self.gradient)(x)


class DoubleWell(Local):
    def value(self, x):
        return jnp.sum((x**2 - 1) ** 2)

    def gradient(self, x):
        return 4 * x * (x**2 - 1)


class SingleWell(Local):
    """x⁴/4 + x²/2, whose middle bin is lowest by a wide margin."""

    def value(self, x):
        return jnp.sum(x**4) / 4 + jnp.sum(x**2) / 2

    def gradient(self, x):
        return x**3 + x


class Valley(Local):
    """A curved valley, coupled in its two coordinates."""

    def value(self, x):
        return x[0] ** 2 / 2 + (x[1] - x[0] ** 2 / 2) ** 2

    def gradient(self, x):
        bend = x[1] - x[0] ** 2 / 2
        return jnp.stack([x[0] - 2 * x[0] * bend, 2 * bend])


class Coupled(Local):
    """Three dimensions, each coupled to the next."""

    def value(self, x):
        return jnp.sum(x**4) / 4 + x[0] * x[1] / 2 + x[1] * x[2] ** 2 / 2

    def gradient(self, x):
        return x**3 + jnp.stack([x[1] / 2, x[0] / 2 + x[2] ** 2 / 2, x[1] * x[2]])


class Altered(eqx.Module):
    """The true field plus `offset(α)`, with standard errors `stderr(α)`, trusted where `trust(α)`."""

    potential: eqx.Module
    offset: object = lambda alpha: jnp.zeros_like(alpha)
    stderr: object = lambda alpha: jnp.zeros_like(alpha)
    trust: object = lambda alpha: jnp.asarray(True)

    def __call__(self, alpha, *, key=None):
        trusted, nan = self.trust(alpha), jnp.full((), jnp.nan, alpha.dtype)
        value = jnp.where(trusted, self.potential.gradient(alpha) + self.offset(alpha), 1e6)  # wild, if used
        return Estimate(value, jnp.where(trusted, self.stderr(alpha), jnp.inf), nan, nan, trusted)


def on_grid(potential, axes):
    points = jnp.stack(jnp.meshgrid(*axes, indexing="ij"), -1)
    values = potential.value
    for _ in axes:
        values = jax.vmap(values)
    return np.asarray(values(points))


def bin_averages(potential, axes, beta, nodes=8):
    """−β⁻¹ log of the Gibbs density averaged over each bin, by Gauss–Legendre: what a histogram estimates."""
    t, w = np.polynomial.legendre.leggauss(nodes)
    fine = [(np.asarray(a)[:, None] + (a[1] - a[0]) / 2 * t).ravel() for a in axes]
    density = np.exp(-beta * on_grid(potential, [jnp.asarray(f) for f in fine]))
    for axis, a in enumerate(axes):
        shape = (*density.shape[:axis], len(a), nodes, *density.shape[axis + 1 :])
        density = np.tensordot(density.reshape(shape), w / 2, (axis + 1, 0))
    return -np.log(density) / beta


# --- from samples ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("d", "dtype"), [(1, jnp.float32), (1, jnp.float64), (2, jnp.float64), (3, jnp.float64)])
def test_histogram_is_numpys(d, dtype):
    x = jax.random.normal(jax.random.key(d), (10, 300, d), dtype)
    bins, limits = (7, 5, 6)[:d], [(-2.0, 1.5), (-1.0, 1.0), (-3.0, 3.0)][:d]
    loss = loss_from_samples(x, inverse_temperature=2.0, bins=bins, range=limits)
    counts, edges = np.histogramdd(np.asarray(x, float).reshape(-1, d), bins=bins, range=limits)
    with np.errstate(divide="ignore"):
        expected = -np.log(counts / counts.max()) / 2
    filled = counts > 0
    np.testing.assert_allclose(loss.value[filled], expected[filled], atol=1e-6)
    assert np.isnan(loss.value[~filled]).all()
    assert np.isinf(loss.stderr[~filled]).all()
    assert loss.value.dtype == dtype
    axes = (loss.grid,) if d == 1 else loss.grid
    for axis, edge in zip(axes, edges, strict=True):
        np.testing.assert_allclose(axis, (edge[1:] + edge[:-1]) / 2, atol=1e-6)


@pytest.mark.parametrize("method", ["histogram", "kde"])
def test_minimum_is_zero_and_empty_bins_are_marked(method):
    # Two clusters with nothing between them: the gap is NaN, whatever the kernel would put there.
    x = jnp.concatenate([jnp.linspace(-2, -1.01, 400), jnp.linspace(1, 2, 600)])[:, None]
    x = jax.random.permutation(jax.random.key(0), x)
    loss = loss_from_samples(x, inverse_temperature=1.0, bins=8, range=(-2, 2), method=method)
    gap = np.abs(loss.grid) < 1
    assert np.isnan(loss.value[gap]).all()
    assert np.isinf(loss.stderr[gap]).all()
    assert np.isfinite(loss.value[~gap]).all()
    assert np.nanmin(loss.value) == 0
    assert loss.stderr[np.nanargmin(loss.value)] == 0


def test_range_defaults_to_the_extremes():
    x = jax.random.normal(jax.random.key(0), (500, 1))
    whole = loss_from_samples(x, inverse_temperature=1.0, bins=6)
    given = loss_from_samples(x, inverse_temperature=1.0, bins=6, range=(float(x.min()), float(x.max())))
    np.testing.assert_allclose(whole.value, given.value)
    counts, _ = np.histogram(np.asarray(x), bins=6)
    np.testing.assert_allclose(whole.value, -np.log(counts / counts.max()), atol=1e-12)


@pytest.mark.parametrize(
    ("spread", "limits", "bins", "tolerance"),
    [
        # The range is well inside the data: what lies past its edge must count too.
        ((1.0,), [(-1.5, 1.0)], (30,), 0.005),
        ((1.0, 0.7), [(-1.5, 1.0), (-0.8, 0.7)], (30, 20), 0.02),
        # Bins as wide as the kernel: the kernel must be narrowed for them.
        ((0.25, 0.25, 0.25), [(-0.6, 0.6)] * 3, (5, 5, 5), 0.04),
    ],
    ids=["d=1", "d=2", "d=3"],
)
def test_kde_is_the_sum_of_kernels(spread, limits, bins, tolerance):
    d = len(spread)
    x = np.asarray(jax.random.normal(jax.random.key(1), (20_000, d)) * jnp.asarray(spread)[None])
    loss = loss_from_samples(x, inverse_temperature=1.0, bins=bins, range=limits, method="kde", bandwidth=0.3)
    axes = (loss.grid,) if d == 1 else loss.grid
    points = np.stack(np.meshgrid(*axes, indexing="ij")).reshape(d, -1)
    squares = ((points[:, :, None] - x.T[:, None]) ** 2).sum(0)
    expected = -np.log(np.exp(-squares / (2 * 0.3**2)).sum(1)).reshape(loss.value.shape)
    if d == 1:
        by_scipy = -np.log(gaussian_kde(x.T, bw_method=0.3 / x.std(ddof=1))(points))
        np.testing.assert_allclose(expected - expected.min(), by_scipy - by_scipy.min(), atol=1e-9)
    filled = np.isfinite(loss.value)
    assert filled.mean() > 0.9
    assert np.ptp(np.asarray(loss.value)[filled] - expected[filled]) < tolerance


def test_default_bandwidth_follows_the_effective_number_of_positions():
    # 4000 positions of which 400 are independent: the kernel is that of 400.
    fresh = jax.random.normal(jax.random.key(0), (20, 20, 1))
    repeated = jnp.repeat(fresh, 10, axis=1)
    options = dict(inverse_temperature=1.0, bins=20, range=(-2, 2), method="kde")
    width = float(jnp.std(fresh)) * (4 / (3 * 400)) ** 0.2 / 2
    expected = loss_from_samples(repeated, bandwidth=width, **options).value
    # The number is estimated from 20 means, to a factor 1 ± 4·sqrt(2/19), and enters to the power 1/5.
    loss = loss_from_samples(repeated, **options).value
    scale = loss_from_samples(repeated, bandwidth=width * 1.3, **options).value
    assert np.nanmax(np.abs(loss - expected)) < np.nanmax(np.abs(scale - expected))
    independent = loss_from_samples(repeated, bandwidth=width * 10**-0.2, **options).value
    assert np.nanmax(np.abs(loss - expected)) < np.nanmax(np.abs(independent - expected))


@pytest.mark.parametrize("method", ["histogram", "kde"])
@pytest.mark.parametrize(("chains", "thinning", "num_steps"), [(16, 5, 1000), (1, 2, 6400)])
def test_stderr_is_the_spread_of_repeated_runs(key, method, chains, thinning, num_steps):
    # 200 repetitions in one run. Five bins, so that the lowest one is the same in all of them.
    repeats = 200
    chain = passive_langevin(
        key, TrueField(SingleWell()), jnp.zeros((repeats * chains, 1)), num_steps=num_steps,
        step_size=0.1, inverse_temperature=2.0, burn_in=100, thinning=thinning,
    )  # fmt: skip
    groups = chain.positions.reshape(repeats, chains, -1, 1)
    loss = jax.vmap(
        lambda x: loss_from_samples(x, inverse_temperature=2.0, bins=5, range=(-1.5, 1.5), method=method, bandwidth=0.2)
    )(groups)
    assert (np.argmin(loss.value, axis=1) == 2).all()
    spread, claimed = np.var(loss.value, axis=0, ddof=1), np.mean(loss.stderr**2, axis=0)
    units = chains if chains >= 8 else 32
    tolerance = 4 * np.sqrt(2 / (repeats - 1) + 2 / ((units - 1) * repeats))
    for bin in (0, 1, 3, 4):
        # Batch means see little of the memory across batches; at ~20 correlation times each, within 5 %.
        assert abs(spread[bin] / claimed[bin] - 1) < tolerance + 0.05


@pytest.mark.parametrize(
    ("potential", "beta", "axes"),
    [
        (DoubleWell(), 1.5, (np.linspace(-1.5, 1.5, 25),)),
        (Valley(), 1.0, (np.linspace(-1.5, 1.5, 13), np.linspace(-0.75, 1.75, 11))),
    ],
    ids=["double-well", "valley"],
)
def test_recovery_from_samples(key, potential, beta, axes):
    d = len(axes)
    x = 0.5 * jax.random.normal(jax.random.fold_in(key, 5), (512, d))
    chain = passive_langevin(
        key, TrueField(potential), x, num_steps=3000, step_size=0.02,
        inverse_temperature=beta, burn_in=500, thinning=5,
    )  # fmt: skip
    half = [(a[1] - a[0]) / 2 for a in axes]
    limits = [(a[0] - h, a[-1] + h) for a, h in zip(axes, half, strict=True)]
    loss = loss_from_samples(chain.positions, inverse_temperature=beta, bins=tuple(map(len, axes)), range=limits)
    exact = bin_averages(potential, axes, beta)
    lowest = np.unravel_index(np.nanargmin(loss.value), loss.value.shape)
    error = np.asarray(loss.value) - (exact - exact[lowest])
    z = (error / np.where(loss.stderr > 0, loss.stderr, 1))[np.isfinite(error)]
    # The lowest bin is the luckiest of its neighbours, which shifts all the others up by ~1 stderr at most.
    assert np.abs(z).max() < 4 + 1
    assert np.sqrt(np.mean(z**2)) < 2
    well = exact - exact.min() < 2 / beta
    assert np.sqrt(np.mean(error[well] ** 2)) < 0.05


# --- from the field --------------------------------------------------------------------------------------


class Wavy(Local):
    """Σ cos(x_i + i + 1) + Π x_i / 4: no rule that is exact for polynomials is exact for it."""

    def value(self, x):
        return jnp.sum(jnp.cos(x + 1 + jnp.arange(x.size, dtype=x.dtype))) + jnp.prod(x) / 4

    def gradient(self, x):
        others = jnp.ones_like(x) if x.size == 1 else x[::-1]
        return -jnp.sin(x + 1 + jnp.arange(x.size, dtype=x.dtype)) + others / 4


LIMITS = [(-1.5, 1.5), (-1.0, 2.0), (-0.5, 1.0)]


def errors_of(loss, potential):
    """What it is off by, less that at its lowest point."""
    axes = loss.grid if isinstance(loss.grid, tuple) else (loss.grid,)
    exact = on_grid(potential, axes)
    return np.asarray(loss.value) - (exact - exact.ravel()[np.nanargmin(loss.value)])


@pytest.mark.parametrize("d", [1, 2])
def test_field_is_integrated_to_fourth_order(d):
    errors = []
    for n in (11, 21):
        axes = tuple(jnp.linspace(low, high, n) for low, high in LIMITS[:d])
        loss = loss_from_field(TrueField(Wavy()), axes[0] if d == 1 else axes, pieces=1)
        error = errors_of(loss, Wavy())
        assert float(loss.value.min()) == 0
        assert (np.abs(error) <= 4 * loss.stderr).all()
        errors.append(np.abs(error).max())
        assert loss.stderr.max() < 40 * errors[-1]
        if d > 1:
            assert loss.curl < 4 * errors[-1]  # grid error only
            assert loss.curl_expected == 0
    assert errors[-1] < 0.002
    assert np.log2(errors[0] / errors[1]) > 3.5


@pytest.mark.parametrize(
    ("potential", "d"), [(DoubleWell(), 1), (SingleWell(), 2), (Coupled(), 3)], ids=["1", "2", "3"]
)
@pytest.mark.parametrize("pieces", [1, None])
def test_cubic_gradients_are_integrated_exactly(potential, d, pieces):
    """The paper's quartic among them: five points are enough."""
    axes = tuple(jnp.linspace(low, high, 5) for low, high in LIMITS[:d])
    loss = loss_from_field(TrueField(potential), axes[0] if d == 1 else axes, pieces=pieces)
    assert np.abs(errors_of(loss, potential)).max() < 1e-7
    assert np.max(loss.stderr) < (0.5 if pieces == 1 else 1e-2)


@pytest.mark.parametrize("n", [2, 4, 5])
@pytest.mark.parametrize("d", [1, 2])
def test_coarse_grids_say_how_coarse_they_are(n, d):
    axes = tuple(jnp.linspace(low, high, n) for low, high in LIMITS[:d])
    field = TrueField(Wavy())
    losses = {pieces: loss_from_field(field, axes[0] if d == 1 else axes, pieces=pieces) for pieces in (1, None)}
    for loss in losses.values():
        assert (np.abs(errors_of(loss, Wavy())) <= 4 * loss.stderr + 1e-7).all()
    # Points between those of the grid are what a coarse one needs.
    assert np.abs(errors_of(losses[None], Wavy())).max() < 2e-3
    assert losses[None].stderr.max() < 0.02


def test_few_points_of_a_fitted_field(key):
    potential = SingleWell()
    learner = ForwardLearner(potential, Normal(), step_size=0.02, gradient_noise=0.5)
    field = MalliavinField(observe(key, learner, num_episodes=1000, times=[0.8]))
    fine = loss_from_field(field, jnp.linspace(-1.2, 1.2, 81), pieces=1)
    for pieces in (1, None):
        loss = loss_from_field(field, jnp.linspace(-1.2, 1.2, 5), pieces=pieces)
        error = errors_of(loss, potential)
        assert (np.abs(error) <= 4 * loss.stderr).all()
        # What the grid adds to the noise is little.
        np.testing.assert_allclose(loss.value, (fine.value - fine.value[::20].min())[::20], atol=np.max(loss.stderr))
    np.testing.assert_allclose(loss.stderr.max(), fine.stderr[::20].max(), rtol=0.5)


def test_a_hole_between_two_points_cuts():
    field = Altered(DoubleWell(), trust=lambda a: jnp.abs(a[0] - 0.37) > 0.05)
    grid = jnp.linspace(-1.5, 1.5, 5)  # none of them in the hole
    loss = loss_from_field(field, grid)
    np.testing.assert_array_equal(np.isfinite(loss.value), grid < 0.3)
    assert np.isfinite(loss_from_field(field, grid, pieces=1).value).all()  # which does not see it


def test_uneven_grid():
    grid = jnp.sort(jax.random.uniform(jax.random.key(0), (71,), minval=-1.5, maxval=1.5))
    loss = loss_from_field(TrueField(DoubleWell()), grid)
    exact = on_grid(DoubleWell(), (grid,))
    np.testing.assert_allclose(loss.value, exact - exact.min(), atol=1e-3)


class Cubic(eqx.Module):
    """Its gradient, and the offset below, are quadratic on each axis: the rule along the edges is exact."""

    def gradient(self, x):
        return jnp.stack([x[0] * x[1] + x[0], (x[0] ** 2 + x[1] ** 2) / 2])


def test_least_squares_against_dense_linear_algebra():
    axes = (np.array([0.0, 0.5, 0.8, 1.6]), np.array([0.0, 1.0, 1.3, 1.9, 2.0]))
    field = Altered(Cubic(), offset=lambda a: jnp.stack([-a[1], a[0] ** 2]))  # the offset has a curl
    loss = loss_from_field(field, axes)
    rows, right = [], []
    for axis, other in ((0, 1), (1, 0)):
        for j, fixed in enumerate(axes[other]):
            for i, (start, stop) in enumerate(zip(axes[axis][:-1], axes[axis][1:], strict=True)):
                row, h = np.zeros((4, 5)), stop - start
                at = [(i, j), (i + 1, j)] if axis == 0 else [(j, i), (j, i + 1)]
                row[at[0]], row[at[1]] = -1 / h, 1 / h
                rows.append(row.ravel())
                t, w = np.polynomial.legendre.leggauss(3)
                points = np.zeros((3, 2))
                points[:, axis], points[:, other] = start + h * (t + 1) / 2, fixed
                right.append(jax.vmap(field)(jnp.asarray(points)).value[:, axis] @ w / 2)
    rows, right = np.array(rows), np.array(right)
    solution = np.linalg.lstsq(rows, right, rcond=None)[0]
    np.testing.assert_allclose(loss.value.ravel(), solution - solution.min(), atol=1e-9)
    curl = np.linalg.norm(right - rows @ solution) / np.linalg.norm(right)
    assert curl > 0.1
    np.testing.assert_allclose(loss.curl, curl, rtol=1e-9)


class Waves(eqx.Module):
    """The valley's field plus smooth random errors of known size, independent in the two components."""

    wave: jax.Array
    amplitude: jax.Array
    phase: jax.Array

    def __call__(self, alpha, *, key=None):
        waves = jnp.cos(jnp.einsum("d,idw->iw", alpha, self.wave) + self.phase)
        value = Valley().gradient(alpha) + 0.1 * jnp.sum(self.amplitude * waves, 1)
        # The variance of a·cos(…) with a standard normal and a random phase is 1/2, four times over.
        return Estimate(value, jnp.full(2, 0.1 * 2**0.5), value[0], value[0], jnp.asarray(True))


def test_curl_is_what_the_standard_errors_say():
    axes, seen = (jnp.linspace(-1, 1, 21),) * 2, []
    for number in range(50):
        k = jax.random.split(jax.random.key(number), 3)
        noise = Waves(
            6 * jax.random.normal(k[0], (2, 2, 4)),
            jax.random.normal(k[1], (2, 4)),
            jax.random.uniform(k[2], (2, 4), maxval=2 * np.pi),
        )
        loss = loss_from_field(noise, axes)
        seen.append(float(loss.curl / loss.curl_expected) ** 2)
    mean, stderr = np.mean(seen), np.std(seen, ddof=1) / np.sqrt(50)
    # Near the border, more than half of the noise can pass for a gradient: less than 1, not far from it.
    assert 0.5 < mean < 1 + 4 * stderr
    assert stderr < 0.1


def test_stderr_is_reached_by_correlated_errors():
    # An error that is the same everywhere, of standard deviation .3: L̂ is off by it times the distance.
    field = Altered(DoubleWell(), stderr=lambda a: jnp.full(1, 0.3))
    loss = loss_from_field(field, jnp.linspace(-0.9, 1.5, 71))
    np.testing.assert_allclose(loss.stderr, 0.3 * np.abs(loss.grid - loss.grid[np.argmin(loss.value)]), atol=1e-12)
    axes = (jnp.linspace(-1, 1, 21), jnp.linspace(0, 1, 21))
    field = Altered(Valley(), stderr=lambda a: jnp.array([0.3, 0.1]))
    loss = loss_from_field(field, axes)
    i, j = np.unravel_index(np.argmin(loss.value), loss.value.shape)
    dx, dy = np.abs(axes[0] - axes[0][i]), np.abs(axes[1] - axes[1][j])
    np.testing.assert_allclose(loss.stderr, 0.3 * dx[:, None] + 0.1 * dy[None], atol=1e-12)


@pytest.mark.parametrize("d", [1, 2])
def test_stderr_bounds_independent_errors(key, d):
    axes = (jnp.linspace(-1, 1, 21),) * d
    potential = DoubleWell() if d == 1 else Valley()

    class Noisy(eqx.Module):
        key: jax.Array

        def __call__(self, alpha, *, key=None):
            number = jnp.sum(jnp.round(alpha * 10 + 10).astype(int) * 21 ** jnp.arange(d))
            own = jax.random.fold_in(self.key, number)
            value = potential.gradient(alpha) + 0.2 * jax.random.normal(own, (d,))
            return Estimate(value, jnp.full(d, 0.2), value[0], value[0], jnp.asarray(True))

    exact = on_grid(potential, axes)
    squares = []
    for k in jax.random.split(key, 20):
        loss = loss_from_field(Noisy(k), axes if d > 1 else axes[0])
        lowest = np.unravel_index(np.argmin(loss.value), loss.value.shape)
        error = loss.value - (exact - exact[lowest])
        squares.append((error / np.where(loss.stderr > 0, loss.stderr, 1)) ** 2)
    assert 0 < np.mean(squares) < 1


def test_untrusted_points_are_marked_and_not_used():
    grid = jnp.linspace(-1.5, 1.5, 71)
    field = Altered(DoubleWell(), trust=lambda a: jnp.abs(a[0]) < 1.21)
    loss = loss_from_field(field, grid)
    outside = np.abs(grid) > 1.21
    assert np.isnan(loss.value[outside]).all()
    assert np.isinf(loss.stderr[outside]).all()
    exact = on_grid(DoubleWell(), (grid,))
    np.testing.assert_allclose(loss.value[~outside], exact[~outside] - exact[~outside].min(), atol=1e-4)


def test_a_region_cut_off_is_marked():
    # No data on the ridge: the wells' relative height is unknown, and the smaller region is not invented.
    grid = jnp.linspace(-1.5, 2.0, 71)
    field = Altered(DoubleWell(), trust=lambda a: jnp.abs(a[0]) > 0.3)
    loss = loss_from_field(field, grid)
    np.testing.assert_array_equal(np.isfinite(loss.value), grid > 0.3)
    exact = on_grid(DoubleWell(), (grid,))
    np.testing.assert_allclose(loss.value[grid > 0.3], exact[grid > 0.3], atol=1e-3)


def test_untrusted_hole_in_the_plane():
    axes = (jnp.linspace(-1, 1, 21),) * 2
    field = Altered(Valley(), trust=lambda a: (a @ a > 0.1) & ((a[0] < 0.65) | (a[0] > 0.85)))
    loss = loss_from_field(field, axes)
    x, y = np.meshgrid(*axes, indexing="ij")
    inside = (x**2 + y**2 > 0.1) & (x < 0.65)
    np.testing.assert_array_equal(np.isfinite(loss.value), inside)
    exact = on_grid(Valley(), axes)
    np.testing.assert_allclose(loss.value[inside], (exact - exact[inside].min())[inside], atol=1e-4)


def test_noisy_edges_weigh_less():
    axes = (jnp.linspace(-1, 1, 21),) * 2

    def bad(a):
        return jnp.where(a[0] > 0.7, 1.0, 0.01)

    def offset(a):
        return jnp.where(a[0] > 0.7, 1.0, 0.0) * jnp.sin(40 * jnp.array([a[1], a[0] + 2 * a[1]]))

    exact = on_grid(Valley(), axes)

    def error(stderr):
        value = np.asarray(loss_from_field(Altered(Valley(), offset, stderr), axes).value) - exact
        good = value[np.asarray(axes[0]) < 0.65]
        return np.std(good)

    assert error(lambda a: jnp.full(2, bad(a))) < 0.2 * error(lambda a: jnp.full(2, 0.01))


def test_key_reaches_the_field():
    class Keyed(eqx.Module):
        def __call__(self, alpha, *, key=None):
            slope = jax.random.normal(key, (1,))
            return Estimate(slope, slope * 0, slope[0], slope[0], jnp.asarray(True))

    loss = loss_from_field(Keyed(), jnp.array([0.0, 1.0, 2.0]), key=jax.random.key(4))
    np.testing.assert_allclose(loss.value.max(), 2 * abs(float(jax.random.normal(jax.random.key(4), (1,))[0])))


def test_batches_do_not_matter_and_jit_works():
    grid = jnp.linspace(-1.5, 1.5, 71)
    whole = loss_from_field(TrueField(DoubleWell()), grid)
    for other in (
        loss_from_field(TrueField(DoubleWell()), grid, chunk_size=9),
        eqx.filter_jit(loss_from_field)(TrueField(DoubleWell()), grid),
    ):
        np.testing.assert_allclose(other.value, whole.value, atol=1e-12)


@pytest.mark.parametrize("d", [1, 2, 3])
def test_estimates_on_a_grid_are_integrated_as_the_field_is(d):
    potential = (DoubleWell(), Valley(), Coupled())[d - 1]
    field = Altered(potential, trust=lambda a: a[0] > -0.4)
    axes = tuple(jnp.linspace(-0.5, 0.7 + i, 4 + i) for i in range(d))
    points = jnp.stack(jnp.meshgrid(*axes, indexing="ij"), -1).reshape(-1, d)
    estimates = jax.vmap(field)(points)
    loss = loss_from_field(field, axes, pieces=1)
    for grid in (axes, axes[0]) if d == 1 else (axes, list(axes)):
        found = loss_from_estimates(estimates, grid)
        assert found.value.shape == tuple(len(axis) for axis in axes)
        assert np.isnan(found.value[0]).all()
        for leaf, expected in zip(jax.tree.leaves(found), jax.tree.leaves(loss), strict=True):
            np.testing.assert_allclose(leaf, expected, rtol=1e-9, atol=1e-12)


def test_estimates_of_another_grid_are_refused():
    points = jnp.arange(12.0)[:, None]
    estimates = jax.vmap(TrueField(DoubleWell()))(points)
    with pytest.raises(ValueError, match=r"value must have shape \(6, 1\), .* a grid of 6 points.*got \(12, 1\)"):
        loss_from_estimates(estimates, jnp.arange(6.0))
    with pytest.raises(ValueError, match=r"value must have shape \(12, 2\), .* grid of 3 × 4 points.*got \(12, 1\)"):
        loss_from_estimates(estimates, (jnp.arange(3.0), jnp.arange(4.0)))
    spoilt = eqx.tree_at(lambda e: e.trusted, estimates, estimates.trusted[:5])
    with pytest.raises(ValueError, match=r"estimates\.trusted must have shape \(12,\), .* got \(5,\)"):
        loss_from_estimates(spoilt, points[:, 0])


@pytest.mark.parametrize("d", [1, 2])
def test_field_in_single_precision(d):
    axes = (jnp.linspace(-1.2, 1.2, 21, dtype=jnp.float32),) * d
    potential = DoubleWell() if d == 1 else Valley()
    loss = loss_from_field(TrueField(potential), axes if d > 1 else axes[0])
    assert loss.value.dtype == jnp.float32
    exact = on_grid(potential, axes)
    np.testing.assert_allclose(loss.value, exact - exact.min(), atol=2e-3)


# --- refusals --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"positions": jnp.zeros(5)}, r"positions must have shape \(chains, kept, d\)"),
        ({"positions": jnp.zeros((9, 4, 4))}, "positions must have 1, 2 or 3 dimensions .*, got 4"),
        ({"positions": jnp.zeros((2, 1, 1))}, "positions must hold at least 4 positions or 8 chains"),
        (
            {"positions": jnp.array([[0.0], [1.0], [jnp.nan], [2.0], [3.0]])},
            "positions must be finite, got 1",
        ),
        ({"positions": jnp.zeros((20, 1))}, "range must run from low to high"),
        ({"inverse_temperature": 0.0}, "inverse_temperature must be positive"),
        ({"method": "spline"}, "method must be one of histogram, kde, got 'spline'"),
        ({"bins": 1}, "bins must be a whole number, at least 2, got 1"),
        ({"bins": (4, 4)}, r"bins must have shape \(1,\)"),
        ({"range": (1.0, 0.0)}, "range must run from low to high"),
        ({"range": [(0.0, 1.0), (0.0, 1.0)]}, r"range must have shape \(1, 2\)"),
        ({"method": "kde", "bandwidth": 0.0}, "bandwidth must be positive"),
    ],
)
def test_bad_samples(change, message):
    settings = dict(positions=jnp.linspace(0, 1, 20)[:, None], inverse_temperature=1.0)
    with pytest.raises(ValueError, match=message):
        loss_from_samples(**(settings | change))


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        (jnp.array([0.0]), "grid must hold at least 2 increasing"),
        (jnp.array([0.0, 0.0, 1.0]), "grid must hold at least 2 increasing"),
        (jnp.array([0.0, jnp.nan, 1.0]), "grid must hold at least 2 increasing"),
        (jnp.zeros((2, 2)), r"grid must have shape \(points,\)"),
        ((jnp.arange(3.0),) * 4, "grid must have 1, 2 or 3 axes, got 4"),
    ],
)
def test_bad_grid(grid, message):
    with pytest.raises(ValueError, match=message):
        loss_from_field(TrueField(DoubleWell()), grid)


def test_bad_field():
    with pytest.raises(ValueError, match="got none"):
        loss_from_field(Altered(DoubleWell(), trust=lambda a: jnp.asarray(False)), jnp.arange(4.0))

    class Flat(eqx.Module):
        def __call__(self, alpha, *, key=None):
            return TrueField(DoubleWell())(alpha[:1])

    with pytest.raises(ValueError, match="field must be of dimension 2"):
        loss_from_field(Flat(), (jnp.arange(4.0), jnp.arange(3.0)))
