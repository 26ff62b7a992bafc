"""Eight devices against one, two processes against one, and a process that dies.

Child processes run without fused multiply-add (see test_observe.py), so that equality means equality of bits.
"""

import functools
import os
import platform
import socket
import subprocess
import sys
from pathlib import Path

import compiler
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import malliavin_jax as mj

KEY = jax.random.key(4)
NO_FUSING = "--xla_cpu_max_isa=AVX" if platform.machine() in ("x86_64", "AMD64") else ""
EPISODES = 1600
LEARNER = mj.ForwardLearner(
    mj.potentials.Quartic(),
    lambda key: jax.random.normal(key, (1,)),
    step_size=0.05,
    gradient_noise=0.5,
    restart_probability=0.02,
)
ALPHAS = jnp.asarray([[0.3], [-0.5], [9.0]])
LOCALIZER = mj.Gaussian(0.6, core=0.2)
EMPTY = mj.Accumulator(ALPHAS, LOCALIZER)


def observe():
    return mj.observe(KEY, LEARNER, num_episodes=EPISODES, times=[0.2, 0.4])


def stream():
    run = functools.partial(mj.observe_and_accumulate, KEY, LEARNER, EMPTY, times=[0.2, 0.4])
    return run(num_episodes=EPISODES - 7, chunk_size=500).estimate()  # neither divides anything


def dense(samples):
    evaluate = eqx.filter_jit(lambda field, alphas: jax.vmap(field)(alphas))
    return evaluate(mj.MalliavinField(samples, LOCALIZER, None), ALPHAS)


def chain(field, initial):
    return mj.passive_langevin(
        KEY, field, initial, num_steps=20, step_size=0.05, inverse_temperature=1.0, burn_in=10
    ).positions


def assert_rows(part, whole):
    """Each shard of `part` in this process equals its rows of `whole`, bit for bit."""
    for mine, all_rows in zip(jax.tree.leaves(part), jax.tree.leaves(whole), strict=True):
        for shard in mine.addressable_shards:
            assert shard.data.shape[0] * len(mine.sharding.device_set) == EPISODES
            np.testing.assert_array_equal(shard.data, np.asarray(all_rows)[shard.index])


def assert_close(got, expected):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10)


def child(call, devices, first=""):
    """A process that calls a function of this file, with so many devices; `first` is what it does before importing."""
    here, package = Path(__file__).parent, Path(mj.__file__).parents[1]
    flags = f"{compiler.QUICK} {NO_FUSING} --xla_force_host_platform_device_count={devices}"
    return subprocess.Popen(
        [sys.executable, "-c", f"import jax; {first}\nimport test_distributed; test_distributed.{call}"],
        cwd=here, env={**os.environ, "XLA_FLAGS": flags, "PYTHONPATH": str(package), "JAX_ENABLE_X64": "1"},
        text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def ends(process, seconds=300):
    try:
        return process.communicate(timeout=seconds)
    finally:
        process.kill()


# ---------------------------------------------------------------- eight devices


def eight_devices(directory, auto):
    whole = observe()
    field = mj.MalliavinField(whole, LOCALIZER, None)
    initial = jnp.linspace(-0.5, 0.5, 16)[:, None]
    chosen = [mj.MalliavinField(whole)] if auto else []
    one_device = dense(whole), stream(), chain(field, initial), [jax.vmap(f)(ALPHAS) for f in chosen]
    with jax.set_mesh(mj.distributed.episode_mesh()):
        samples = observe()
        assert len(samples.x.sharding.device_set) == 8
        assert_rows(samples, whole)
        mj.distributed.save(directory, samples)
        assert_rows(mj.distributed.load(directory), whole)
        starts = mj.distributed.split(initial)
        split_field = mj.MalliavinField(samples, LOCALIZER, None)
        assert len(split_field.folds[0].bank.x.sharding.device_set) == 8
        chosen = [mj.MalliavinField(samples)] if auto else []
        got = dense(samples), stream(), chain(split_field, starts), [jax.vmap(f)(ALPHAS) for f in chosen]
        assert_close(got, one_device)
        positions = chain(mj.TrueField(LEARNER.potential), starts)
        assert not positions.sharding.is_fully_replicated  # each device moves its own chains
        # Nothing but sums travels between the devices.
        text = jax.jit(lambda s: EMPTY.add(s).contents.total).lower(samples).compile().as_text()
        assert "all-reduce" in text
        assert not any(word in text for word in ("all-gather", "all-to-all", "collective-permute"))
        for call, match in ((lambda: mj.observe(KEY, LEARNER, num_episodes=9, times=[0.2]), "multiple of the mesh's 8"),
                            (lambda: mj.distributed.split(jnp.zeros((9, 1))), "multiple of the mesh's 8")):  # fmt: skip
            with pytest.raises(ValueError, match=match):
                call()
    assert_close(chain(mj.TrueField(LEARNER.potential), initial), positions)
    for a, b in zip(jax.tree.leaves(mj.distributed.load(directory)), jax.tree.leaves(whole), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("auto", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["given", "auto"])
def test_eight_devices_against_one(auto, tmp_path):
    process = child(f"eight_devices({str(tmp_path)!r}, {auto})", devices=8)
    _, err = ends(process)
    assert process.returncode == 0, err


# ---------------------------------------------------------------- two processes


def one_of_two(rank, directory):
    assert (len(jax.devices()), len(jax.local_devices())) == (4, 2)
    whole = observe()
    one_process = EMPTY.add(whole).estimate()
    with jax.set_mesh(mj.distributed.episode_mesh()):
        samples = observe()
        assert not samples.x.is_fully_addressable
        assert_rows(samples, whole)
        accumulator = mj.accumulate([samples], EMPTY, checkpoint=f"{directory}/sums.npz")
        assert_close(accumulator.estimate(), one_process)
        resumed = mj.accumulate([lambda: None], EMPTY, checkpoint=f"{directory}/sums.npz")  # done: nothing is called
        assert_close(resumed.estimate(), one_process)
        mj.distributed.save(directory, samples)
        assert_rows(mj.distributed.load(directory), whole)
        mine = jax.tree.map(lambda leaf: leaf[rank * EPISODES // 2 : (rank + 1) * EPISODES // 2], whole)
        assert_rows(mj.distributed.join(mine), whole)
        print("both agree", flush=True)
        if rank == 1:
            os._exit(17)
        jax.block_until_ready(accumulator.add(samples))  # with nobody to add the other half


def test_two_processes_against_one_and_then_one_dies(tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    begin = f"jax.distributed.initialize('localhost:{port}', 2, {{}}, heartbeat_timeout_seconds=5)"
    pair = [child(f"one_of_two({rank}, {str(tmp_path)!r})", 2, first=begin.format(rank)) for rank in (0, 1)]
    try:
        (out, err), (other_out, other_err) = map(ends, pair)
    finally:
        for process in pair:
            process.kill()
    assert "both agree" in out, err
    assert "both agree" in other_out, other_err
    assert pair[1].returncode == 17
    # The survivor does not hang, and says why.
    assert pair[0].returncode not in (0, None)
    assert any(word in err for word in ("closed by peer", "Connection reset", "heartbeat", "disconnected")), err
    for a, b in zip(jax.tree.leaves(mj.distributed.load(tmp_path)), jax.tree.leaves(observe()), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)  # two parts read by one process
