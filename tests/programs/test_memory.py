"""Peaks of memory, each in a program of its own: saving, loading, filling and saving during training."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from support.forking import run_in_child
from support.process_groups import run_ranks
from support.resumables import save

import fastpersist as fp
from fastpersist import _native
from fastpersist.cli.bench.stream.memory_limit import MemoryLimit
from fastpersist.transfer.arena import Arena

MEMORY = """
import re, sys
import torch
import fastpersist as fp

path = sys.argv[1]
mib = 1 << 20

def status(field):
    return int(re.search(field + r":\\s*(\\d+) kB", open("/proc/self/status").read())[1]) << 10

def peak_above_start(call):
    before = status("VmRSS")
    open("/proc/self/clear_refs", "w").write("5")  # VmHWM starts again at VmRSS
    result = call()
    return result, (status("VmHWM") - before) / mib

state = {"a": torch.ones(150 << 18), "b": torch.ones(150 << 18)}
_, save = peak_above_start(lambda: fp.save(state, path))
del state
state, load = peak_above_start(lambda: fp.load(path, verify=True))
_, verify = peak_above_start(lambda: fp.verify(path))
state["b"] = torch.zeros(150 << 18, dtype=torch.float64)
_, load_into = peak_above_start(lambda: fp.load_into(path, state, verify=True))
assert state["b"][-1] == 1
print(f"save {save} load {load - 300} verify {verify} load_into {load_into}")
"""


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_memory_above_a_state_of_300_mib_is_bounded(suffix: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", MEMORY, str(tmp_path / f"model.{suffix}")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    found = re.findall(r"(\w+) (-?[\d.]+)", result.stdout)
    assert [name for name, _ in found] == ["save", "load", "verify", "load_into"]
    assert {name: above for name, above in found if float(above) >= 100} == {}, result.stdout


MEASURE = """
    import sys, torch, fastpersist as fp
    from fastpersist.loading.restore import load_state

    def made():
        model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(16)])  # 67 MB
        return {"model": model, "optimizer": torch.optim.Adam(model.parameters(), foreach=False)}

    def load(parts):
        return load_state(path, into=parts, map_location=None, verify=False, weights_only=True, engine="threads")

    def kib(field):
        lines = open("/proc/self/status").read().splitlines()
        return int(next(line for line in lines if line.startswith(field)).split()[1])

    path = sys.argv[1]
    torch.set_num_threads(1)
    parts = made()
    for parameter in parts["model"].parameters():
        parameter.grad = torch.ones_like(parameter)
    parts["optimizer"].step()
    for parameter in parts["model"].parameters():
        parameter.grad = None
    if sys.argv[2] == "new":
        parts["optimizer"].state.clear()
    fp.load(sys.argv[3])  # the ring, and whatever torch makes once
    open("/proc/self/clear_refs", "w").write("5")  # the peak begins anew
    before = kib("VmRSS")
    load(parts)
    print((kib("VmHWM") - before) // 1024, (kib("VmRSS") - before) // 1024)
"""


def save_what_is_measured(path: Path) -> None:
    model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(16)])
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    fp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path, durable=False)


def test_nothing_is_in_memory_twice(tmp_path: Path) -> None:
    """201 MB: 67 of the model, 134 of the optimizer, whose state is there already, or is loaded once."""
    script = tmp_path / "measure.py"
    script.write_text(textwrap.dedent(MEASURE))
    small = {"FASTPERSIST_RING_BYTES": str(8 << 20), "FASTPERSIST_CHUNK_BYTES": str(1 << 20), "MALLOC_ARENA_MAX": "1"}

    def run_script(*arguments: str) -> list[int]:
        command = [sys.executable, str(script), str(tmp_path / "state.pt"), *arguments]
        result = subprocess.run(command, env={**os.environ, **small}, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
        return [int(word) for word in result.stdout.split()]

    run_in_child(lambda _report: save_what_is_measured(tmp_path / "state.pt"))  # its memory goes with it
    save({"w": torch.ones(1000)}, tmp_path / "small.pt")
    peak_mib, _ = run_script("filled", str(tmp_path / "small.pt"))
    assert peak_mib <= 16
    peak_mib, kept_mib = run_script("new", str(tmp_path / "small.pt"))
    # The state that was cleared may or may not have gone back to the kernel before.
    assert peak_mib <= 128 + 16
    assert kept_mib <= 128 + 16


TRAINING = """
import gc, sys
import torch
import fastpersist as fp

def status_bytes(name):
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith(name))

torch.set_num_threads(1)
parameters = [torch.nn.Parameter(torch.ones(1_000_000)) for _ in range(24)]
optimizer = torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)
for parameter in parameters:
    parameter.grad = torch.ones_like(parameter)
optimizer.step()
gc.collect()
before_bytes = status_bytes("VmRSS:")
with fp.Checkpointer(sys.argv[1], optimizer=optimizer, keep=1, max_host_bytes=int(sys.argv[2])) as checkpointer:
    for step in range(3):
        checkpointer.save(step, {"optimizer": optimizer.state_dict(), "parameters": parameters})
        optimizer.step()
    checkpointer.wait()
    copied_bytes = max(stats.bytes_at_gate for stats in checkpointer.stats())
print(status_bytes("VmHWM:") - before_bytes, copied_bytes)
"""


@pytest.mark.parametrize("limit_mib", [0, 64])
def test_peak_is_the_limit_and_a_ring(limit_mib: int, tmp_path: Path) -> None:
    # Steps follow at once, so each gate copies all that it may of a state of 192 MB.
    limit_bytes = limit_mib << 20
    done = subprocess.run(
        [sys.executable, "-c", TRAINING, str(tmp_path / "run"), str(limit_bytes)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    peak_bytes, copied_bytes = map(int, done.stdout.split())
    assert peak_bytes <= limit_bytes + (50 << 20)
    assert (copied_bytes > 0) == (limit_bytes > 0)


def test_ranks_in_one_cgroup_leave_half_of_it() -> None:
    limit_bytes = 384 << 20
    state = torch.ones(256 << 20, dtype=torch.uint8)  # made once, outside of the cgroup

    def take_all_that_may_be(rank: int, count: int) -> int:
        dist = torch.distributed
        limit.add(os.getpid())
        dist.barrier()
        if rank == 0:
            limit.hold_down(limit_bytes)
        dist.barrier()
        native = Arena().for_state(state.nbytes)
        dist.barrier()
        snapshot = _native.Snapshot(native)
        snapshot.add([state.data_ptr()], [state.nbytes], [_native.SourceKind.STABLE], [None])
        snapshot.capture(_native.SourceKind.STABLE, False)  # without a writer that would make room
        dist.barrier()
        return native.used_bytes

    try:
        with MemoryLimit(f"fastpersist-test-{os.getpid()}") as limit:
            taken = run_ranks(3, take_all_that_may_be)
    except fp.UnsupportedError as error:
        pytest.skip(str(error))
    assert min(taken) > 0
    assert sum(taken) <= limit_bytes // 2
