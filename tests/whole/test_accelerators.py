"""Programs compiled for a TPU that is not here, and what the benchmark reads from an optimised program."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

TEXT = """
HloModule example, is_scheduled=true

%fused_write (a: f32[100,6,256], b: f32[6,256], i: s32[]) -> f32[100,6,256] {
  %a = f32[100,6,256]{2,1,0} parameter(0)
  %b = f32[6,256]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %doubled = f32[6,256]{1,0} add(%b, %b)
  %row = f32[1,6,256]{2,1,0} bitcast(%doubled)
  ROOT %write = f32[100,6,256]{2,1,0} dynamic-update-slice(%a, %row, %i, %i, %i)
}

%body (state: (s32[], f32[100,6,256], f32[6,256])) -> (s32[], f32[100,6,256], f32[6,256]) {
  %state = (s32[], f32[100,6,256]{2,1,0}, f32[6,256]{1,0}) parameter(0)
  %k = s32[] get-tuple-element(%state), index=0
  %store = f32[100,6,256]{2,1,0} get-tuple-element(%state), index=1
  %x = f32[6,256]{1,0} get-tuple-element(%state), index=2
  %written = f32[100,6,256]{2,1,0} fusion(%store, %x, %k), kind=kLoop, calls=%fused_write
  %one = s32[] constant(1)
  %next = s32[] add(%k, %one)
  ROOT %out = (s32[], f32[100,6,256]{2,1,0}, f32[6,256]{1,0}) tuple(%next, %written, %x)
}

%condition (state.1: (s32[], f32[100,6,256], f32[6,256])) -> pred[] {
  %state.1 = (s32[], f32[100,6,256]{2,1,0}, f32[6,256]{1,0}) parameter(0)
  %k.1 = s32[] get-tuple-element(%state.1), index=0
  %most = s32[] constant(50)
  ROOT %go = pred[] compare(%k.1, %most), direction=LT
}

ENTRY %main (p: (s32[], f32[100,6,256], f32[6,256])) -> (s32[], f32[100,6,256], f32[6,256]) {
  %p = (s32[], f32[100,6,256]{2,1,0}, f32[6,256]{1,0}) parameter(0)
  ROOT %loop = (s32[], f32[100,6,256]{2,1,0}, f32[6,256]{1,0}) while(%p), condition=%condition, body=%bodyKNOWN
}
"""


@pytest.fixture
def hlo(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from compiled import hlo

    return hlo


@pytest.mark.parametrize(("known", "turns"), [(', backend_config={"known_trip_count":{"n":"20"}}', 20), ("", 50)])
def test_work_is_counted_at_every_turn(hlo, known, turns):
    program = hlo.Program(TEXT.replace("KNOWN", known))
    work = program.work()
    row = 4 * 6 * 256
    assert work.kernels == 2 * turns  # the update and the counter
    assert program.kernels_of_inner_loop() == 2
    assert work.operations == turns * (6 * 256 + 1)
    assert work.bytes == turns * (row + row + 4 + 12)  # a row is read, a row is written: not the whole store
    assert work.unknown_loops == 0


def test_a_store_in_another_shape_is_still_written_in_place(hlo):
    shaped = TEXT.replace("KNOWN", "").replace("dynamic-update-slice(%a,", "dynamic-update-slice(%seen,")
    line = "  %doubled ="
    text = shaped.replace(line, f"  %seen = f32[100,6,256]{{2,1,0}} bitcast(%a)\n{line}", 1)
    assert hlo.Program(text).work() == hlo.Program(TEXT.replace("KNOWN", "")).work()


def test_a_loop_of_unknown_length_is_named(hlo):
    text = TEXT.replace("KNOWN", "").replace("constant(50)", "get-tuple-element(%state.1), index=0")
    work = hlo.Program(text).work()
    assert (work.kernels, work.unknown_loops) == (2, 1)


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ("f32[1000,10]{1,0}", 40_000),
        ("f32[1000,10]{1,0:T(8,128)}", 4 * 1000 * 128),  # ten columns fill 128 lanes
        ("f32[10,1000]{1,0:T(8,128)}", 4 * 16 * 1024),
        ("(f32[2]{0}, pred[3]{0})", 11),
    ],
)
def test_sizes_know_the_tiles(hlo, shape, size):
    assert hlo.size_of(shape) == size


@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed: pip install -e '.[tpu]'"
)
def test_main_programs_compile_for_a_tpu():
    wanted = ["observe, Adapted, d = 1", "observe, Canonical, d = 2", "query, sorted", "Nadaraya", "chain, true field"]
    command = [sys.executable, str(BENCHMARKS / "accelerators.py"), "--fast", "--devices", "v5e", "v5e-2x2"]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    run = subprocess.run([*command, "--only", *wanted], capture_output=True, text=True, timeout=600, env=environment)
    assert run.returncode == 0, run.stderr[-2000:]
    assert "does not compile" not in run.stdout
    assert "skipped" not in run.stdout
    for name in wanted:
        assert name in run.stdout
    assert run.stdout.count("no measurement") == len(wanted) + 1  # episodes are split over four chips, too
