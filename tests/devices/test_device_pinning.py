"""What is pinned, how often, and until when: to pin memory takes longer than to fill it.

Over the double of the driver.
"""

from __future__ import annotations

import gc
import itertools
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.device_states import Stage, bytes_in, device_stage, device_state, use_new_ring

import fastpersist as fp
from fastpersist import _native
from fastpersist.dcp.storage_writer import FastPersistWriter
from fastpersist.saving.capture import Capture
from fastpersist.saving.containers import container_for
from fastpersist.saving.ownership import Owners
from fastpersist.transfer import arena
from fastpersist.transfer.arena import Arena

MIB = 1 << 20
STATE_BYTES = 70 * MIB  # more than a mapping of the arena

Save = Callable[[], Callable[[], object]]
"""Begins a save, and returns what ends it."""


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Stage]:
    with device_stage(monkeypatch) as stage:
        fp.save(device_state([1])[0], tmp_path / "first.pt")  # pins the ring
        stage.cuda.clear()
        yield stage


def pins_of(stage: Stage, save: Save) -> int:
    """Return how often memory is pinned for a save that captures everything, of which the arena is gone afterwards."""
    before = stage.cuda.call_count("cuMemHostRegister_v2")
    with stage.cuda.held_copies():
        end = save()
    end()
    wait_until_prepared()
    del end
    gc.collect()
    return stage.cuda.call_count("cuMemHostRegister_v2") - before


def wait_until_prepared() -> None:
    for thread in threading.enumerate():
        if thread.name == "fastpersist-arena":
            thread.join()


def captured(state: dict[str, Any], memory: Arena) -> Capture:
    """Return a capture of everything, as saves do it."""
    taken = Capture(Owners(), memory)
    taken.add(container_for(state, "state", checksum=True))
    assert taken.copy_volatile(wait=False)
    return taken


def saves_of(state: dict[str, Any], directory: Path) -> dict[str, Save]:
    """Return a save with each of what makes arenas, each time as if it were the only one."""
    numbers = itertools.count()
    kept = []  # a program that does not let go of it

    def file() -> Callable[[], object]:
        return fp.save_async(state, directory / f"{next(numbers)}.pt").result

    def files() -> Callable[[], object]:
        save = fp.DirectorySave(directory / f"{next(numbers)}")
        save.save(state, "a.pt")
        return save.publish().result

    def step() -> Callable[[], object]:
        checkpoints = fp.Checkpointer(directory / f"{next(numbers)}")
        checkpoints.save(1, state)
        kept.append(checkpoints)

        def end() -> None:
            checkpoints.close()
            for _ in range(2000):  # the thread that wrote comes to its end
                if _native.pinned_cache_bytes():
                    break
                time.sleep(0.01)

        return end

    def shards() -> Callable[[], object]:
        # Without a torch for CUDA, dcp.async_save has no tensors to give to stage().
        return captured(state, FastPersistWriter(directory / "dcp")._arena).release

    return {"save_async": file, "DirectorySave": files, "Checkpointer": step, "DCP": shards}


@pytest.mark.parametrize("kind", ["save_async", "DirectorySave", "Checkpointer", "DCP"])
def test_the_second_save_of_a_state_pins_nothing(stage: Stage, tmp_path: Path, kind: str) -> None:
    state, _ = device_state([STATE_BYTES])
    save = saves_of(state, tmp_path)[kind]
    pins_of(stage, save)
    assert stage.cuda.call_count("cuMemHostUnregister") == 0  # what is prepared and needed at once is pinned once
    pinned_bytes = _native.pinned_bytes()
    assert [pins_of(stage, save) for _ in range(3)] == [0, 0, 0]
    assert _native.pinned_bytes() == pinned_bytes
    assert stage.cuda.call_count("cuMemHostUnregister") == 0
    assert stage.cuda.pageable_copy_count == 0


def test_what_one_kind_of_save_has_pinned_is_the_next_ones(stage: Stage, tmp_path: Path) -> None:
    state, _ = device_state([STATE_BYTES])
    saves = saves_of(state, tmp_path)
    pins_of(stage, saves["DCP"])
    assert [pins_of(stage, saves[kind]) for kind in ("Checkpointer", "DCP", "Checkpointer")] == [0, 0, 0]


def test_saves_of_which_two_are_always_under_way_pin_as_much_as_two(stage: Stage, tmp_path: Path) -> None:
    state, _ = device_state([STATE_BYTES])
    earlier: Capture | None = None
    pinned_bytes, pin_counts = [], []
    for _ in range(5):
        later = captured(state, FastPersistWriter(tmp_path)._arena)
        wait_until_prepared()
        stage.cuda.synchronize()
        if earlier is not None:
            earlier.release()
        earlier = later
        del later
        gc.collect()
        pinned_bytes.append(_native.pinned_bytes())
        pin_counts.append(stage.cuda.call_count("cuMemHostRegister_v2"))
    assert pinned_bytes[1:] == [pinned_bytes[1]] * 4
    assert pin_counts[1:] == [pin_counts[1]] * 4
    earlier.release()


def test_a_limit_holds_where_earlier_saves_had_more(stage: Stage) -> None:
    state, _ = device_state([STATE_BYTES])
    captured(state, Arena()).release()
    wait_until_prepared()
    gc.collect()
    assert _native.pinned_cache_bytes() > STATE_BYTES
    limited = Arena(10 * MIB)
    taken = Capture(Owners(), limited)
    taken.add(container_for(state, "state", checksum=True))
    assert not taken.copy_volatile(wait=False)
    assert limited.for_state(0).used_bytes == 10 * MIB
    taken.release()


def test_what_is_spare_is_available_to_the_next_arena(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena, "available_host_bytes", lambda: 20 * MIB)
    monkeypatch.setattr(_native, "pinned_cache_bytes", lambda: 80 * MIB)
    assert room_in(Arena()) == 50 * MIB


def room_in(memory: Arena) -> int:
    """Return how much an arena takes of a state that is larger than that."""
    on_host = torch.zeros(200 * MIB, dtype=torch.uint8)
    taken = Capture(Owners(), memory)
    taken.add(container_for({"w": on_host}, "state", checksum=True))
    taken.copy_volatile(wait=False)
    used_bytes = memory.for_state(0).used_bytes
    taken.release()
    return used_bytes


def test_spare_memory_goes_where_a_device_pins_no_more(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, contents = device_state([STATE_BYTES])
    captured(state, Arena()).release()
    wait_until_prepared()
    gc.collect()
    use_new_ring(monkeypatch)
    stage.cuda.set_registration_limit(stage.cuda.registered_bytes)
    fp.save(state, tmp_path / "x.pt")
    assert stage.cuda.pageable_copy_count == 0
    assert _native.pinned_cache_bytes() == 0
    assert bytes_in(fp.load(tmp_path / "x.pt", map_location="cpu", weights_only=False)) == contents


PROGRAM = """
import sys
import time
sys.path.insert(0, sys.argv[2])
from support.cuda_double import cuda_double
from support.device_states import device_state
cuda = cuda_double()
import fastpersist as fp
from fastpersist import _native
from fastpersist.transfer import cuda as devices
stream = cuda.stream_new(0)
devices.caller_stream = lambda ordinal: stream
with fp.Checkpointer(sys.argv[1]) as checkpoints:
    checkpoints.save(1, device_state([1 << 20])[0])
for _ in range(2000):  # the threads that prepared and wrote come to their ends
    if _native.pinned_cache_bytes():
        break
    time.sleep(0.01)
print(_native.pinned_cache_bytes() > 0, cuda.violations)
"""


def test_a_process_may_end_with_spare_memory(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "run"), str(Path(__file__).parents[1])]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (0, "True []\n"), ended.stderr
