"""Strict settings for every test: float64, no silent promotion of rank or dtype, shapes checked."""

import atexit
import contextlib
import ctypes
import gc
import os
import shutil
import signal
import tempfile

import compiler

os.environ.setdefault("XLA_FLAGS", f"--xla_force_host_platform_device_count=2 {compiler.QUICK}")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # workers share the cores: threads of one would wait for another's
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    # Most of the time goes to the compiler: what one worker compiles serves the others, and the processes they start.
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="malliavin_jax_compiled_")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"  # even a sum takes longer to compile than to read
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)

import jax
import jaxtyping
import pytest

# A shell starts what runs in its background deaf to Ctrl-C, and so would be the processes that the tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")

gc.set_threshold(100_000, 50, 100)  # looking through millions of objects for cycles is not what is tested

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


def resident() -> float:
    """Bytes of memory that this process holds; none where the system does not say."""
    with contextlib.suppress(OSError), open("/proc/self/statm") as pages:
        return int(pages.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0.0


ceiling = 1.2e9


@pytest.fixture(autouse=True)
def few_programs():
    """A compiled program holds two megabytes and thirty mappings of memory, of which Linux allows a process 65 530.

    What is dropped here comes back from the cache on disk."""
    global ceiling
    yield
    if resident() > ceiling:
        jax.clear_caches()
        gc.collect()
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)  # freed memory goes back to the system only when told to
        ceiling = max(1.2e9, resident() + 0.4e9)


@pytest.fixture(params=[0, 1], ids=["seed0", "seed1"])
def key(request):
    """Two seeds: a statistical test must not hang on one of them."""
    return jax.random.key(request.param)


@contextlib.contextmanager
def unchecked():
    """Without checks of shapes and types: for a loop over data sets, once they were checked on one."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", before)


@pytest.fixture
def no_type_checks():
    """The tests check shapes and types on entry; users do not, and must meet our own messages."""
    with unchecked():
        yield
