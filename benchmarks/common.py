"""What the benchmarks share: the command line, the race and its table, the file of results, learners and kernels."""

import argparse
import json
import os
import platform
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import malliavin_jax as mj
from malliavin_jax._base.checks import floats_to_arrays
from malliavin_jax.learner import random
from malliavin_jax.samples.simulated import observe_steps

RESULTS = Path(__file__).parent / "results"
STEPS, STEP_SIZE = 80, 0.01  # of an episode, wherever speed is measured
DEGREES = {0: "Nadaraya–Watson", 1: "local linear", 2: "local quadratic", 3: "local cubic"}
PER_SECOND = {"s": 1.0, "ms": 1e3, "µs": 1e6, "ns": 1e9}


# --- the command line and the results ----------------------------------------------------------------------


def parser(about: str, fast: str) -> argparse.ArgumentParser:
    """Arguments of a benchmark: `--fast` is a glance that writes nothing, and `fast` says what it leaves out."""
    made = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--fast", action="store_true", help=f"{fast}; nothing is written")
    return made


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    return {
        "device": str(jax.devices()[0]),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "jax": jax.__version__,
    }


def save(name: str, results: dict[str, Any], *, fast: bool = False) -> None:
    """Write the results as JSON beside the benchmarks, unless the run was a fast one."""
    if fast:
        return
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(results, indent=2) + "\n")
    print("written to", path.name)


# --- timing ------------------------------------------------------------------------------------------------


def race(contestants: Mapping[Any, Callable[[], Any]], rounds: int) -> tuple[dict[Any, float], dict[Any, float]]:
    """Seconds of the first call (compilation and all), and the best of `rounds` interleaved later ones."""
    first = {name: _seconds(run) for name, run in contestants.items()}
    best = dict.fromkeys(contestants, float("inf"))
    for _ in range(rounds):
        for name, run in contestants.items():
            best[name] = min(best[name], _seconds(run))
    return first, best


def _seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - start


def show(title: str, first: dict[str, float], each: dict[str, float], *, ours: str, unit: str) -> dict[str, float]:
    """Print the times of a race (`unit` begins with s, ms, µs or ns); return them in units of that of `ours`."""
    ratios = {name: seconds / each[ours] for name, seconds in each.items()}
    print(title)
    for name, seconds in each.items():
        number = PER_SECOND[unit.split()[0]] * seconds
        print(f"  {name:34}{number:12.3f} {unit}  {ratios[name]:9.2f} × ours  (first call {first[name]:.1f} s)")
    return ratios


def exponent(sizes: Any, seconds: Any) -> float:
    """The power of `sizes` with which something grows: the slope of the logarithms, by least squares."""
    return float(np.polyfit(np.log(np.asarray(sizes, float)), np.log(np.asarray(seconds, float)), 1)[0])


# --- learners ----------------------------------------------------------------------------------------------


def quartic(dim: int) -> Any:
    """The loss of the speed tests: neighbours are coupled beyond one dimension."""
    return mj.potentials.Quartic(0.5 if dim > 1 else 0.0)


def weighed(loss: Any, dim: int, scheme: Any, episodes: int, steps: int = STEPS) -> Any:
    """A compiled function of a key: float32 episodes from a normal start, with their weights at the last step."""
    learner = floats_to_arrays(mj.ForwardLearner(loss, mj.initial.Normal(dim=dim), STEP_SIZE), jnp.float32)
    return jax.jit(lambda key: observe_steps(key, learner, scheme, episodes, (steps,)))


def normals(number: int, episodes: int, *, stored: bool = False) -> Any:
    """A compiled function of a key: as many normals an episode, two from each hash, added up as they come or stored.

    The fastest exact way found to draw the normals that the episodes use.
    """

    @jax.jit
    def draw(key):
        words = jax.vmap(random.key_words)(jax.random.split(key, episodes))

        def body(total, block):
            one, other = random.box_muller(*random.threefry(words, (jnp.zeros((), jnp.uint32), block)))
            return (None, lax.complex(one, other)) if stored else (total + one + other, None)

        start = None if stored else jnp.zeros(episodes, jnp.float32)
        return lax.scan(body, start, jnp.arange(-(-number // 2), dtype=jnp.uint32))

    return draw


# --- fields, and kernels with the bandwidth that is best in hindsight --------------------------------------


@eqx.filter_jit
def evaluate(field: Any, alphas: Any) -> Any:
    """The estimates of a field at each of `alphas` (points, d)."""
    return lax.map(field, alphas, batch_size=8)


def kernel_field(samples: Any, degree: int, bandwidth: Any) -> Any:
    """Kernel regression of the gradients, of degree 0 to 3."""
    if degree == 0:
        return mj.kernel.NadarayaWatson(samples, bandwidth)
    return mj.kernel.LocalPolynomial(samples, bandwidth, degree)


def bandwidth_of(field: Any) -> Any:
    return field.bandwidth


@eqx.filter_jit
def sweep(field: Any, alphas: Any, sizes: Any, where: Callable[[Any], Any] = bandwidth_of) -> Any:
    """Values (sizes, points, d) of the field with each of `sizes` in place of `where(field)`, its bandwidth or length.

    `where` is static: one named function for all calls, or every call compiles anew.
    """
    return lax.map(lambda size: evaluate(eqx.tree_at(where, field, size), alphas).value, sizes)


def oracle(squares: Any) -> tuple[float, int]:
    """Root mean square error at the one size that is best on average over the data sets, and the number of that size.

    `squares` are squared errors, one entry a data set: a number, or one for each size.
    """
    curve = np.atleast_1d(np.sqrt(np.mean(squares, 0)))
    best = int(np.argmin(curve))
    return float(curve[best]), best
