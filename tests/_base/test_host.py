"""What is computed on the host: its threads, and functions that serve NumPy and JAX."""

from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg  # noqa: F401 (its library is one of those that are limited)
from threadpoolctl import ThreadpoolController

from malliavin_jax._base.host import each, here_or_compiled, module_of, on_host, on_one_thread, on_threads


def threads():
    found = [library["num_threads"] for library in ThreadpoolController().info() if library["user_api"] == "blas"]
    return found


def test_a_function_runs_on_one_thread_and_leaves_the_number_as_it_was():
    @on_one_thread
    def inside(number, *, fail=False):
        if fail:
            raise ArithmeticError
        return number, threads()

    with ThreadpoolController().limit(limits=2, user_api="blas"):
        before = threads()
        if max(before) < 2:
            pytest.skip("no library here has two threads")
        assert inside(3) == (3, [1] * len(before))
        assert threads() == before
        with pytest.raises(ArithmeticError):
            inside(3, fail=True)
        assert threads() == before


def test_the_threads_that_a_limited_function_starts_leave_the_limit_alone():
    """One that lifted it would undo it for the others; one that found it and put it back would leave it for good."""
    inside, left = on_one_thread(threads), []

    @on_one_thread
    def starts_others():
        with ThreadPoolExecutor(2) as pool:
            left.extend(pool.map(lambda _: inside(), range(4)))
        left.append(threads())

    with ThreadpoolController().limit(limits=2, user_api="blas"):
        before = threads()
        starts_others()
        assert left == [[1] * len(before)] * 5
        assert threads() == before


def test_items_keep_their_order_on_threads():
    assert on_threads(lambda k: k**2, range(20)) == [k**2 for k in range(20)]
    assert on_threads(lambda k: k**2, range(3), most=1) == [0, 1, 4]
    with pytest.raises(ArithmeticError):
        on_threads(lambda k: 1 // k, [1, 0])


@pytest.mark.parametrize("double", [True, False])
def test_threads_count_in_the_precision_of_their_caller(double):
    with jax.enable_x64(double):
        found = on_threads(lambda k: jax.device_put(np.ones(k + 1)), range(2))
    assert [array.dtype for array in found] == [np.float64 if double else np.float32] * 2


def test_rows_of_numpy_are_taken_one_by_one_and_of_jax_in_one_loop():
    items = np.arange(6.0).reshape(3, 2)
    here = each(lambda row: (row.sum(), row / 0 * 0), items)  # silent, as a compiled program is
    compiled = each(lambda row: (row.sum(), row / 0 * 0), jnp.asarray(items))
    assert isinstance(here[0], np.ndarray)
    for one, other in zip(here, compiled, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_function_of_both_kinds_is_compiled_only_when_asked(monkeypatch):
    kinds = []

    @here_or_compiled
    def twice(x):
        kinds.append(module_of(x))
        return 2 * x, x / 0

    for here in (True, False):
        double, infinite = twice(here, jnp.asarray([1.0, 2.0]))
        assert isinstance(double, jax.Array)
        np.testing.assert_array_equal(double, [2, 4])
        assert np.isinf(infinite).all()
    assert kinds == [np, jnp]


def test_what_is_traced_is_not_on_the_host():
    found = []
    jax.jit(lambda x: found.append(on_host(x)) or x)(jnp.ones(2))
    assert found == [False]
    assert on_host(jnp.ones(2), np.ones(2), "a word", None)
