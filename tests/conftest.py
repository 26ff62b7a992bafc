"""Strict settings for every test: float64, no silent promotion of rank or dtype, shapes checked."""

import atexit
import contextlib
import os
import shutil
import tempfile

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # workers share the cores: threads of one would wait for another's
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    # Most of the time goes to the compiler: what one worker compiles serves the others, and the processes they start.
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="malliavin_jax_compiled_")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)

import jax
import jaxtyping
import pytest

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")

with jaxtyping.install_import_hook("malliavin_jax", "beartype.beartype"):
    import malliavin_jax  # noqa: F401


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="also run the long form of the tests")


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--slow"):
        skip = pytest.mark.skip(reason="long form: pass --slow")
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(skip)


@pytest.fixture(autouse=True)
def few_programs():
    """A compiled program holds mappings of memory, of which Linux allows a process 65 530; then the compiler dies.

    What is dropped here comes back from the cache on disk."""
    yield
    with contextlib.suppress(OSError), open("/proc/self/maps") as maps:
        if sum(1 for _ in maps) > 20_000:
            jax.clear_caches()


@pytest.fixture(params=[0, 1], ids=["seed0", "seed1"])
def key(request):
    """Two seeds: a statistical test must not hang on one of them."""
    return jax.random.key(request.param)


@pytest.fixture
def no_type_checks():
    """The tests check shapes and types on entry; users do not, and must meet our own messages."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)
