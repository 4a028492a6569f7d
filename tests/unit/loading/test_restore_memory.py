"""Resuming allocates what no target has room for, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from support.archives import record_places
from support.forking import run_in_child
from support.resumables import load, network, resumable, save, state_of, storages_of
from support.specimens import train

import fastpersist as fp
from fastpersist.loading import restore
from fastpersist.transfer.pipeline import Extents


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state.pt"


@pytest.fixture
def allocated(monkeypatch: pytest.MonkeyPatch) -> list[torch.UntypedStorage]:
    """Every storage with data that a load makes."""
    made: list[torch.UntypedStorage] = []
    original = restore.new_storage

    def spy(size_bytes: int, device: torch.device) -> torch.UntypedStorage:
        storage = original(size_bytes, device)
        if device.type != "meta":
            made.append(storage)
        return storage

    monkeypatch.setattr(restore, "new_storage", spy)
    monkeypatch.setattr("fastpersist.loading.unpickle.new_storage", spy)
    return made


def test_new_optimizer_adopts_the_loaded_memory_and_nothing_else_is_allocated(
    path: Path, allocated: list[torch.UntypedStorage]
) -> None:
    source = network()
    optimizer = torch.optim.AdamW(source.parameters())
    train(source, optimizer, 2)
    save({"model": source.state_dict(), "optimizer": optimizer.state_dict()}, path)
    target = network(9)
    target_optimizer = torch.optim.AdamW(target.parameters())
    load(path, {"model": target, "optimizer": target_optimizer})
    assert {storage.data_ptr() for storage in allocated} == storages_of(target_optimizer)
    allocated.clear()
    load(path, {"model": target, "optimizer": target_optimizer}, verify=True)
    assert allocated == []


@pytest.mark.parametrize("steps", [0, 1], ids=["new optimizer", "optimizer with state"])
def test_every_byte_is_read_once(steps: int, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_bytes: list[int] = []
    original = Extents.read

    def spy(self: Extents, *arguments: Any, **options: Any) -> Any:
        read_bytes.extend(extent.size_bytes for extent in self._wanted)
        return original(self, *arguments, **options)

    save(state_of(resumable()), path)
    target = resumable(9, steps)
    monkeypatch.setattr(Extents, "read", spy)
    load(path, target, keys=["rng"])
    storages = {name: size for name, (_, size) in record_places(path.read_bytes()).items() if name.startswith("data/")}
    assert sum(read_bytes) == sum(storages.values())


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
