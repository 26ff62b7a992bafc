"""Pictures show the numbers they were given: data in the artists, labels with units, and what is left out."""

from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from malliavin_jax import Estimate, Loss, plots
from malliavin_jax.diagnostics import Convergence
from malliavin_jax.fields import GoodnessOfFit


@pytest.fixture
def ax():
    return Figure(figsize=(6, 4), layout="constrained").subplots()


def estimate(value, stderr, trusted):
    """Estimates along leading axes, made as a user makes them: one at a time, under `vmap`."""
    one = lambda v, s, t: Estimate(v, s, jnp.asarray(1.0), jnp.asarray(0.1), t)  # noqa: E731
    for _ in range(np.ndim(trusted)):
        one = jax.vmap(one)
    return one(*map(jnp.asarray, (value, stderr, trusted)))


def curves(ax):
    return {line.get_label(): line for line in ax.lines}


def edges_at(ax, x):
    """The lower and upper edge, at x, of the first band."""
    corners = np.concatenate([path.vertices for path in ax.collections[0].get_paths()])
    there = corners[corners[:, 0] == x, 1]
    return (there.min(), there.max()) if len(there) else None


def check_units(ax):
    """Every axis says what it measures and, in brackets or words, in what."""
    for label in (ax.get_xlabel(), ax.get_ylabel()):
        assert any(word in label for word in ("(", "step", "episodes", "up to a constant")), label


def test_gradient_bands_draw_value_band_and_truth(ax):
    alphas, value, stderr = np.array([0.0, 1.0, 2.0]), np.array([[1.0], [2.0], [4.0]]), np.array([[0.1], [0.2], [0.3]])
    ours = estimate(value, stderr, np.ones(3, bool))
    other = estimate(value + 5, stderr, np.ones(3, bool))
    assert plots.gradient_bands(alphas[:, None], {"a": ours, "b": other}, value, ax=ax) is ax
    drawn = curves(ax)
    np.testing.assert_allclose(drawn["a"].get_xydata(), np.c_[alphas, value])
    np.testing.assert_allclose(drawn["truth"].get_ydata(), value[:, 0])
    for x, v, s in zip(alphas, value[:, 0], stderr[:, 0], strict=True):
        np.testing.assert_allclose(edges_at(ax, x), (v - 1.96 * s, v + 1.96 * s))
    assert to_hex(drawn["a"].get_color()) != to_hex(drawn["b"].get_color())
    assert [t.get_text() for t in ax.get_legend().get_texts()] == ["a", "b", "truth"]
    assert ax.get_ylim()[1] < 6, "scaled by the truth, not by what is far off"
    assert "∇L" in ax.get_ylabel()
    check_units(ax)


def test_what_is_not_trusted_is_dotted_and_has_no_band(ax):
    alphas = np.arange(4.0)
    trusted = np.array([True, True, False, False])
    wild = estimate(alphas[:, None], np.where(trusted, 0.1, np.inf)[:, None], trusted)
    plots.gradient_bands(alphas, {"a": wild}, ax=ax)
    full, dotted = ax.lines
    np.testing.assert_array_equal(np.isfinite(full.get_ydata()), trusted)
    assert dotted.get_linestyle() == ":"
    np.testing.assert_array_equal(np.isfinite(dotted.get_ydata()), [False, True, True, True])
    assert edges_at(ax, 1.0) is not None
    assert edges_at(ax, 2.0) is None
    assert len(ax.get_legend().get_texts()) == 1


def test_gradient_errors_are_less_the_truth_and_scaled_by_the_best(ax):
    alphas, truth = np.array([0.0, 1.0, 2.0]), np.array([1.0, 2.0, 4.0])
    stderr, sure = np.full((3, 1), 0.1), np.ones(3, bool)
    good = estimate(truth[:, None] + [[0.1], [0.0], [-0.1]], stderr, sure)
    wild = estimate(truth[:, None] + 100.0, stderr, sure)
    assert plots.gradient_errors(alphas[:, None], {"good": good, "wild": wild}, truth, ax=ax) is ax
    np.testing.assert_allclose(curves(ax)["good"].get_ydata(), [0.1, 0.0, -0.1], atol=1e-12)
    np.testing.assert_allclose(edges_at(ax, 0.0), (0.1 - 0.196, 0.1 + 0.196))
    low, high = ax.get_ylim()
    assert low == -high
    assert high == pytest.approx(1.1 * 10 * (0.1 + 0.196)), "ten times the reach of the best"
    check_units(ax)


def test_every_curve_is_drawn_even_past_the_last_colour(ax):
    many = {str(i): estimate(np.ones((2, 1)) * i, np.ones((2, 1)), np.ones(2, bool)) for i in range(8)}
    plots.gradient_bands([0.0, 1.0], many, ax=ax)
    styles = {(to_hex(line.get_color()), line.get_linestyle()) for line in ax.lines}
    assert len(styles) == 8


def test_chain_trace_is_the_error_at_each_step(ax):
    plots.chain_trace({"a": [[1.0], [3.0]]}, {"a": [[0.5], [3.0]]}, ax=ax)
    np.testing.assert_allclose(ax.lines[0].get_ydata(), [0.5, 1e-8])  # nothing at all has no logarithm
    assert ax.get_yscale() == "log"
    check_units(ax)


def test_histogram_is_a_density(ax):
    grid = np.linspace(0, 1, 5)
    plots.histogram_against_gibbs({"a": [[[0.1], [0.2], [0.9]]]}, grid, np.ones(5), bins=2, ax=ax)
    heights = ax.patches[0].get_xy()[:, 1]
    assert sorted(set(np.round(heights, 6))) == [0, round(2 / 3, 6), round(4 / 3, 6)]
    np.testing.assert_array_equal(curves(ax)["Gibbs density"].get_ydata(), 1)
    check_units(ax)


def test_loss_recovery_leaves_out_empty_bins(ax):
    grid = np.arange(3.0)
    loss = Loss(jnp.asarray(grid), jnp.asarray([0.0, jnp.nan, 2.0]), jnp.asarray([0.0, jnp.inf, 0.5]))
    plots.loss_recovery({"a": loss}, grid, grid, ax=ax)
    np.testing.assert_array_equal(curves(ax)["a"].get_ydata(), [0, np.nan, 2])
    np.testing.assert_allclose(edges_at(ax, 2.0), (2 - 0.98, 2 + 0.98))
    check_units(ax)


def test_convergence_draws_the_fitted_power(ax):
    sizes = np.array([100.0, 1000.0, 10000.0])
    result = Convergence(
        value=sizes, error=3 / np.sqrt(sizes), stderr=0.1 / np.sqrt(sizes), slope=-0.5, slope_stderr=0.01
    )
    plots.convergence({"a": result}, ax=ax)
    points, fit = ax.lines[0], ax.lines[-1]
    np.testing.assert_allclose(points.get_ydata(), result.error)
    np.testing.assert_allclose(fit.get_ydata(), result.error)
    assert ax.get_legend().get_texts()[0].get_text() == "a: slope -0.50 ± 0.01"
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    check_units(ax)


def test_error_comparison_puts_each_case_on_its_line_and_hides_no_mark(ax):
    plots.error_comparison({"a": {"one": 1.0, "two": 2.0}, "b": {"two": 4.0}}, ax=ax)
    drawn = curves(ax)
    np.testing.assert_allclose(drawn["a"].get_xydata(), [[1, -0.055], [2, 0.945]])  # a little above those of b
    np.testing.assert_allclose(drawn["b"].get_xydata(), [[4, 1.055]])
    assert [t.get_text() for t in ax.get_yticklabels()] == ["one", "two"]
    assert drawn["a"].get_marker() != drawn["b"].get_marker()


def test_observed_paths_have_the_time_of_the_learner(ax):
    plots.observed_paths(np.arange(6.0).reshape(2, 3, 1), step_size=0.1, ax=ax)
    np.testing.assert_allclose(ax.lines[1].get_xydata(), [[0, 3], [0.1, 4], [0.2, 5]])
    check_units(ax)


def test_tails_count_the_weights_beyond(ax):
    plots.weight_tails({"a": np.array([[[-3.0]], [[1.0]]])}, ax=ax)
    np.testing.assert_allclose(ax.lines[0].get_xydata(), [[1, 1], [3, 0.5]])
    assert ax.get_legend().get_texts()[0].get_text() == "a: E[S²] = 5"
    check_units(ax)


def test_bias_is_dashed_and_error_full(ax):
    plots.bias_and_error([0.1, 0.2], {"a": ([1.0, 2.0], [3.0, 4.0])}, ax=ax)
    drawn = curves(ax)
    np.testing.assert_allclose(drawn["a: bias"].get_xydata(), [[0.1, 1], [0.2, 2]])
    np.testing.assert_allclose(drawn["a: error"].get_ydata(), [3, 4])
    assert (drawn["a: bias"].get_linestyle(), drawn["a: error"].get_linestyle()) == ("--", "-")
    check_units(ax)


GRID = (np.linspace(-1, 1, 5), np.linspace(0, 1, 3))


def plane(function):
    return np.stack(function(*np.meshgrid(*GRID, indexing="ij")), -1)


def test_the_surface_stands_on_its_minimum_and_is_not_transposed(ax):
    height = np.add.outer(GRID[0] ** 2, np.zeros(3)) - 7.0  # varies along the first axis only
    plots.loss_surface(GRID, height, ceiling=0.5, ax=ax)
    filled = ax.collections[0]
    assert filled.levels[0] == 0
    assert filled.levels[-1] == 0.5
    inside = np.concatenate([p.vertices for p in filled.get_paths() if len(p.vertices)])
    assert np.abs(inside[:, 0]).max() < 0.8, "blank above the ceiling"
    assert inside[:, 1].max() == 1.0
    assert ax.figure.axes[1].get_ylabel() == "loss, above its minimum"
    check_units(ax)


def test_arrows_point_downhill_and_leave_out_what_is_not_trusted(ax):
    gradient = plane(lambda x, y: (x, 2 * y))
    trusted = np.ones((5, 3), bool)
    trusted[0, 0] = False
    field = estimate(gradient, np.zeros_like(gradient), trusted)
    plots.field_arrows(GRID, {"true": gradient, "estimate": field}, ax=ax)
    true, ours = ax.collections
    np.testing.assert_allclose(true.XY[4], [-0.5, 0.5])  # indexed (i, j) = (1, 1)
    at = gradient[1, 1]
    arrow = np.array([true.U[4], true.V[4]])
    assert arrow @ at < 0
    np.testing.assert_allclose(arrow[0] * at[1], arrow[1] * at[0])
    size = np.linalg.norm(gradient, axis=-1)
    everywhere = np.concatenate([size.ravel(), size[trusted]])
    np.testing.assert_allclose(np.linalg.norm(arrow), 0.7 * size[1, 1] / (size[1, 1] + np.median(everywhere)))
    assert np.asarray(ours.Umask)[0]
    assert not np.asarray(ours.Umask)[1:].any()
    check_units(ax)


def test_the_curl_of_a_rotation_is_two_and_of_a_gradient_nothing(ax):
    plots.curl_map(GRID, plane(lambda x, y: (x - y, y + x)), ax=ax)
    np.testing.assert_allclose(np.asarray(ax.collections[0].get_array()), 2.0)
    assert ax.collections[0].get_clim() == (-2.0, 2.0)
    check_units(ax)
    other = Figure().subplots()
    plots.curl_map(GRID, plane(lambda x, y: (x + y, y + x)), limit=1.0, ax=other)
    np.testing.assert_allclose(np.asarray(other.collections[0].get_array()), 0.0, atol=1e-12)


def verdict(alphas, difference, stderr, trusted):
    numbers = (jnp.asarray(a) for a in (0.012, 1.0, alphas, difference, stderr))
    return GoodnessOfFit(*numbers, jnp.asarray(trusted))


def test_disagreement_on_a_line_has_bars_and_leaves_out_what_is_not_trusted(ax):
    found = verdict([[0.0], [1.0], [2.0]], [[0.5], [-0.2], [9.0]], [[0.1], [0.3], [1.0]], [True, True, False])
    assert plots.disagreement(found, ax) is ax
    zero, marks = ax.lines[0], ax.containers[0][0]
    np.testing.assert_allclose(zero.get_ydata(), 0)
    np.testing.assert_allclose(marks.get_xydata(), [[0, 0.5], [1, -0.2]], rtol=1e-6)
    bars = np.array(ax.collections[0].get_segments())[..., 1]
    np.testing.assert_allclose(bars[:, 1] - bars[:, 0], 2 * 1.96 * np.array([0.1, 0.3]), rtol=1e-6)
    assert ax.get_title() == "p = 0.012"
    check_units(ax)


def test_disagreement_in_the_plane_has_colours_and_arrows(ax):
    alphas, difference = np.array([[0.0, 0.0], [1.0, 2.0]]), np.array([[3.0, 4.0], [0.0, 1.0]])
    plots.disagreement(verdict(alphas, difference, np.array([[0.6, 0.8], [0.0, 2.0]]), [True, True]), ax)
    places, arrows = ax.collections
    np.testing.assert_allclose(places.get_offsets(), alphas)
    np.testing.assert_allclose(np.asarray(places.get_array()), [5.0, 0.5], rtol=1e-6)
    np.testing.assert_allclose(np.c_[arrows.U, arrows.V], difference)
    check_units(ax)


def test_disagreement_in_space_is_drawn_against_the_distance(ax):
    alphas, difference = np.array([[1.0, 0, 0], [-1.0, 0, 0], [7, 7, 7]]), np.array([[0.0, 2, 0], [1, 0, 0], [9, 9, 9]])
    plots.disagreement(verdict(alphas, difference, np.eye(3), [True, True, False]), ax)
    np.testing.assert_allclose(ax.lines[0].get_xydata(), [[1, 2], [1, 1]], rtol=1e-6)
    check_units(ax)


def test_importing_the_pictures_leaves_the_backend_alone():
    assert "matplotlib.use" not in Path(plots.__file__).read_text()
    before = matplotlib.get_backend()
    made = plots.observed_paths(np.zeros((1, 2, 1)), step_size=0.1)  # an Axes of its own
    assert matplotlib.get_backend() == before
    assert made.figure is not None
    matplotlib.pyplot.close(made.figure)
