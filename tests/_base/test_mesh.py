"""Linear algebra of the host on one thread."""

import pytest
import scipy.linalg  # noqa: F401 (its library is one of those that are limited)
from threadpoolctl import ThreadpoolController

from malliavin_jax._base.mesh import on_one_thread


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
