"""How long does one wait for the compiler?

Run `python benchmarks/compile.py` (a minute and a half; `--fast` for two of the cases). Every case is a process of its
own, with nothing compiled before and no cache on disk, and goes through what a user does first: observe, make a field,
ask it, and then the same again with other numbers. Printed for each stage, and written to results/compile.json: seconds
by the clock and of the processor, of which tracing, lowering and compiling, and how many programs of what size (bytes
of StableHLO) were compiled.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from common import machine, parser, save

import malliavin_jax as mj

PHASES = {
    "/jax/core/compile/jaxpr_trace_duration": "trace",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lower",
    "/jax/core/compile/backend_compile_duration": "compile",
}
TIMES = {"one time": [0.8], "16 even times": [0.05 * k for k in range(1, 17)], "5 uneven": [0.06, 0.13, 0.3, 0.47, 0.8]}
COLUMNS = ("wall", "cpu", "trace", "lower", "compile", "programs", "kilobytes")

Stage = tuple[str, Callable[[], Any]]


class Watch:
    """What the compiler does from one reading to the next."""

    def __init__(self, dumps: Path):
        self.dumps, self.spans, self.sizes = dumps, {phase: [] for phase in PHASES.values()}, set()
        jax.monitoring.register_event_time_span_listener(self.heard)

    def heard(self, event: str, start: float, end: float, **_: Any) -> None:
        if event in PHASES:
            self.spans[PHASES[event]].append((start, end))

    def measure(self, run: Callable[[], Any]) -> dict[str, float]:
        """Seconds, programs and their size of one call."""
        for spans in self.spans.values():
            spans.clear()
        wall, cpu = time.perf_counter(), time.process_time()
        jax.block_until_ready(run())
        found = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
        found |= {phase: covered(spans) for phase, spans in self.spans.items()}
        modules = set(self.dumps.glob("*.mlir")) - self.sizes
        self.sizes |= modules
        size = sum(path.stat().st_size for path in modules) / 1e3
        return found | {"programs": len(self.spans["compile"]), "kilobytes": size}


def covered(spans: list[tuple[float, float]]) -> float:
    """The length of the union of some spans of time: traces are nested in each other."""
    total, reached = 0.0, -float("inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


# --- the cases: generators of stages, so that one stage may use what those before have made ----------------------


def learner_of(dim: int, initial: Any = None, **parameters: Any) -> mj.ForwardLearner:
    settings = {"step_size": 0.01, "gradient_noise": 0.5} | parameters
    initial = mj.initial.Normal(dim=dim) if initial is None else initial
    return mj.ForwardLearner(mj.potentials.Quartic(0.5 if dim > 1 else 0.0), initial, **settings)


def observed(dim: int = 1, times: Any = (0.8,), episodes: int = 5000, **parameters: Any) -> mj.Samples:
    return mj.observe(jax.random.key(0), learner_of(dim, **parameters), num_episodes=episodes, times=list(times))


def observing(dim: int, times: Any) -> Iterator[Stage]:
    yield "observe", lambda: observed(dim, times)
    yield "another learner", lambda: observed(dim, times, inverse_temperature=2.0, gradient_noise=0.7)
    yield "a lambda as its start", lambda: observed(dim, times, initial=lambda key: jax.random.normal(key, (dim,)))
    yield "another lambda", lambda: observed(dim, times, initial=lambda key: 2 * jax.random.normal(key, (dim,)))
    yield "another N", lambda: observed(dim, times, episodes=8000)


def asking(dim: int, **options: Any) -> Iterator[Stage]:
    some, more = observed(dim), observed(dim, episodes=8000, gradient_noise=1.0)
    made = []

    def field(samples: mj.Samples) -> Any:
        made.append(mj.MalliavinField(samples, **options))
        return jax.tree.leaves(made[-1])

    def ask(points: int) -> Any:
        return jax.vmap(made[0])(jnp.linspace(-0.5, 0.5, points * dim).reshape(points, dim))

    yield "MalliavinField", lambda: field(some)
    yield "first query", lambda: made[0](jnp.full(dim, 0.5))
    yield "41 queries", lambda: ask(41)
    yield "43 queries", lambda: ask(43)
    yield "another N", lambda: field(more)
    yield "its first query", lambda: made[1](jnp.full(dim, 0.5))


def ten_lines() -> Iterator[Stage]:
    text = (Path(__file__).parents[1] / "README.md").read_text().split("```python\n")[1].split("```")[0]
    lines = compile(text, "README", "exec")

    def run() -> Any:
        names: dict[str, Any] = {}
        exec(lines, names)
        return names["recovered"].value, names["smoother"].value

    yield "cold", run
    yield "warm", run


CASES: dict[str, Callable[[], Iterator[Stage]]] = {
    **{f"observe, d = 1, {name}": (lambda times=times: observing(1, times)) for name, times in TIMES.items()},
    "observe, d = 2, one time": lambda: observing(2, [0.8]),
    "observe, d = 2, 5 uneven": lambda: observing(2, TIMES["5 uneven"]),
    "observe, d = 3, one time": lambda: observing(3, [0.8]),
    **{f"field, d = {dim}": (lambda dim=dim: asking(dim)) for dim in (1, 2, 3)},
    "README, ten lines": ten_lines,
}
FAST = ("observe, d = 1, 5 uneven", "README, ten lines")


# --- the processes -----------------------------------------------------------------------------------------------


def child(case: str, dumps: Path) -> None:
    """One case in this process; a line of JSON for each stage."""
    watch = Watch(dumps)
    for name, run in CASES[case]():
        print(json.dumps({"stage": name, **watch.measure(run)}), flush=True)


def cold(case: str) -> list[dict[str, Any]]:
    """One case in a process with nothing compiled."""
    with tempfile.TemporaryDirectory() as dumps:
        bare = {name: value for name, value in os.environ.items() if "COMPILATION_CACHE" not in name}
        command = [sys.executable, __file__, "--case", case, "--dumps", dumps]
        done = subprocess.run(
            command, env=bare | {"JAX_DUMP_IR_TO": dumps}, check=True, stdout=subprocess.PIPE, text=True
        )
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def recovering() -> list[dict[str, Any]]:
    """`malliavin-jax recover` on one file and then on another, with a cache directory that is empty at first."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for number, episodes in enumerate((1000, 1300)):
            keys = jax.random.split(jax.random.key(number), episodes)
            path = jax.jit(jax.vmap(lambda key: mj.simulate(key, learner_of(1), 40)))(keys)
            arrays = {name: np.asarray(getattr(path, name)) for name in ("x", "gradient", "hessian")}
            np.savez(f"{folder}/{number}.npz", **arrays, step_size=0.01, inverse_temperature=1.0)
        for number, stage in enumerate(("first file", "second file")):
            command = [sys.executable, "-m", "malliavin_jax.cli", "recover", f"{folder}/{number}.npz"]
            command += ["--out", f"{folder}/{number}"]
            before, start = os.times(), time.perf_counter()
            settings = {"env": os.environ | {"XDG_CACHE_HOME": f"{folder}/cache"}, "stdout": subprocess.DEVNULL}
            subprocess.run(command, check=True, **settings)
            after = os.times()
            cpu = after.children_user + after.children_system - before.children_user - before.children_system
            rows.append({"stage": stage, "wall": time.perf_counter() - start, "cpu": cpu})
    return rows


def show(case: str, rows: list[dict[str, Any]]) -> None:
    print(f"{case:32}" + "".join(f"{column:>10}" for column in COLUMNS))
    for row in rows:
        numbers = (row.get(column) for column in COLUMNS)
        cells = ("" if n is None else f"{n:.0f}" if isinstance(n, int) or n > 99 else f"{n:.2f}" for n in numbers)
        print(f"  {row['stage']:30}" + "".join(f"{cell:>10}" for cell in cells), flush=True)


def main() -> None:
    made = parser(__doc__, "two of the cases")
    made.add_argument("--case", choices=CASES, help="one case, in this process")
    made.add_argument("--dumps", type=Path, help="where this process writes its programs")
    made.add_argument("--only", help="cases whose names hold this; nothing is written")
    arguments = made.parse_args()
    if arguments.case:
        child(arguments.case, arguments.dumps)
        return
    wanted = [name for name in (FAST if arguments.fast else CASES) if (arguments.only or "") in name]
    results: dict[str, Any] = {"machine": machine(), "cases": {}}
    print(results["machine"])
    for name in wanted:
        results["cases"][name] = cold(name)
        show(name, results["cases"][name])
    if not arguments.fast and (arguments.only or "") in "malliavin-jax recover":
        results["cases"]["malliavin-jax recover"] = recovering()
        show("malliavin-jax recover", results["cases"]["malliavin-jax recover"])
    save("compile", results, fast=arguments.fast or arguments.only is not None)


if __name__ == "__main__":
    main()
