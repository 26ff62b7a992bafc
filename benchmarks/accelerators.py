"""What would the main programs cost on a TPU and a GPU that are not here?

Run `python benchmarks/accelerators.py` where `malliavin-jax[tpu]` or `[cuda12]` is installed (no chip is needed;
`--fast` for tiny sizes). It compiles every main program ahead of time for one TPU v5e, for four of them, and for an
H100, and writes to results/accelerators.json what the compiler and the optimised program say: whether it compiles, and
how long making its data and compiling took; its memory against the chip's; the kernels it launches (on a TPU:
instructions), in all and at each turn of its inner loop; the bytes and operations of all turns; and a roofline made of
them. **Nothing here is measured:** the roofline is what the numbers of the data sheet would allow, `benchmarks/gpu.py`
is what a device really does.
A platform whose compiler is missing is skipped, and what was found for it before is kept.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # before jax: nothing runs on an accelerator

import json
import time

import jax
from common import RESULTS, parser, save
from compiled.devices import DEVICES, NotInstalled, compiled, topology
from compiled.hlo import Program
from compiled.programs import REAL, SMALL, programs, split_programs

ABOUT = {
    "about": "compiled ahead of time; nothing was run, rooflines are no measurements",
    "jax": jax.__version__,
    "sizes": REAL._asdict(),
}


def facts(device):
    """What the data sheet says of a device."""
    return {name: value for name, value in device._asdict().items() if name != "options"}


def examine(name, make, device, chips):
    """One program for one device."""
    start = time.perf_counter()
    try:
        program = compiled(*make(), chips)
    except Exception as error:
        print(f"  {name:34} does not compile: {str(error).splitlines()[0][:120]}")
        return {"program": name, "compiles": False, "error": str(error)[:500]}
    seconds = time.perf_counter() - start
    memory, text = program.memory_analysis(), Program(program.as_text())
    work = text.work()
    held = memory.temp_size_in_bytes + memory.argument_size_in_bytes + memory.output_size_in_bytes
    limits = {
        "bytes": work.bytes / device.bandwidth,
        "operations": work.operations / device.operations,
        "launches": work.kernels * device.launch,
    }
    row = {
        "program": name,
        "compiles": True,
        "make_and_compile_s": round(seconds, 2),
        "temporary_bytes": memory.temp_size_in_bytes,
        "share_of_memory": held / device.memory,
        "kernels": int(work.kernels),
        "kernels_of_inner_loop": text.kernels_of_inner_loop(),
        "bytes": work.bytes,
        "operations": work.operations,
        "loops_of_unknown_length": work.unknown_loops,
        "roofline_s_not_measured": max(limits.values()),
        "bound_by": max(limits, key=limits.get),
    }
    print(
        f"  {name:34}{row['temporary_bytes'] / 1e6:9.1f} MB  {row['kernels']:9,} kernels "
        f"({row['kernels_of_inner_loop']:3} a turn)  {work.bytes / 1e9:9.3f} GB  {work.operations / 1e9:9.2f} Gop  "
        f"roofline {1e3 * row['roofline_s_not_measured']:9.3f} ms ({row['bound_by']}), no measurement"
        + (f"; {work.unknown_loops} loops counted once" if work.unknown_loops else ""),
        flush=True,
    )
    return row


def main():
    options = parser(__doc__, "tiny sizes")
    options.add_argument("--only", nargs="*", default=[""], help="programs whose name contains one of these")
    options.add_argument("--devices", nargs="*", choices=list(DEVICES), default=list(DEVICES))
    arguments = options.parse_args()
    sizes = SMALL if arguments.fast else REAL
    path = RESULTS / "accelerators.json"
    before = json.loads(path.read_text()) if path.exists() else {}
    devices = before.get("devices", {})
    for short in arguments.devices:
        device = DEVICES[short]
        try:
            chips = topology(device).devices[: device.chips]
        except NotInstalled as error:
            print(f"{device.name}: skipped, {error}")
            continue
        print(f"{device.name}: compiled, not run")
        asked = programs(sizes) if device.chips == 1 else split_programs(sizes)
        rows = {row["program"]: row for row in devices.get(short, {}).get("rows", [])}
        for name, make in asked.items():
            if any(part in name for part in arguments.only):
                rows[name] = examine(name, make, device, chips)
                devices[short] = {"device": facts(device), "rows": [rows[name] for name in asked if name in rows]}
                save("accelerators", {**ABOUT, "devices": devices}, fast=arguments.fast)
                jax.clear_caches()


if __name__ == "__main__":
    main()
