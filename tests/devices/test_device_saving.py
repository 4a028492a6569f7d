"""Saving what lies on a CUDA device: the right bytes at the right time, and no thread waits for the device.

A device that fails costs a save, not the process. Over the double of the driver.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cuda_double import PLAIN_ERROR, STICKY_ERROR, cuda_storage
from support.device_states import (
    Stage,
    bytes_in,
    device_stage,
    device_state,
    grace,
    packed_state,
    random_bytes,
    use_new_ring,
)

import fastpersist as fp
from fastpersist import _native
from fastpersist.errors import DeviceError
from fastpersist.saving import capture
from fastpersist.transfer import cuda
from fastpersist.transfer.arena import Arena
from fastpersist.transfer.writer import Pieces, Writer

CHUNK = 1 << 16
# Less than a chunk, several in one, one of many chunks, nothing, a byte, more than the ring.
SIZES = [5_000, 100, 20_000, 300_000, 0, 1, 11 * CHUNK, 4096]


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    with device_stage(monkeypatch) as stage:
        yield stage


def load(path: Path) -> dict[str, Any]:
    loaded = fp.load(path, map_location="cpu", weights_only=False)
    assert isinstance(loaded, dict)
    return loaded


def nothing_is_left(directory: Path) -> bool:
    """Tell whether no transfer has a buffer, where a failed device may hold some in quarantine, and no file is left."""
    ring_is_free = _native.ring_free_count() + _native.ring_quarantined_count() == _native.ring_buffer_count()
    return ring_is_free and not [name for name in os.listdir(directory) if name.startswith(".")]


# --- save


@pytest.mark.parametrize("checksum", [True, False])
def test_a_file_holds_what_is_on_two_devices_and_the_host(stage: Stage, tmp_path: Path, checksum: bool) -> None:
    first, first_bytes = device_state(SIZES)
    second, second_bytes = device_state(SIZES, device=1)
    on_host = torch.arange(100_000)
    state = {
        name: value
        for pair in zip(first, second, strict=True)
        for name, value in zip((f"a{pair[0]}", f"b{pair[1]}"), (first[pair[0]], second[pair[1]]), strict=True)
    }
    fp.save({**state, "host": on_host}, tmp_path / "x.pt", checksum=checksum)
    loaded = load(tmp_path / "x.pt")
    assert torch.equal(loaded.pop("host"), on_host)
    assert bytes_in(loaded) == {f"a{k}": v for k, v in first_bytes.items()} | {
        f"b{k}": v for k, v in second_bytes.items()
    }
    assert bytes_in(torch.load(tmp_path / "x.pt", map_location="cpu", weights_only=False)).keys() == loaded.keys()
    if checksum:
        assert fp.verify(tmp_path / "x.pt").ok
    assert nothing_is_left(tmp_path)


def test_copies_are_in_flight_beside_each_other(stage: Stage, tmp_path: Path) -> None:
    state, contents = device_state([20 * CHUNK])
    with stage.cuda.held_copies():
        saving = threading.Thread(target=fp.save, args=(state, tmp_path / "x.pt"))
        saving.start()
        stage.cuda.wait_for_queued_copies(8)  # as many as the ring has chunks
    saving.join()
    assert bytes_in(load(tmp_path / "x.pt")) == contents
    assert stage.cuda.pageable_copy_count == 0


def test_what_is_saved_is_what_the_callers_stream_has_made_of_it(stage: Stage, tmp_path: Path) -> None:
    state, _ = device_state([3 * CHUNK])
    with stage.cuda.blocked(stage.stream()):
        stage.kernel(state["s0"], 7)
        saving = threading.Thread(target=fp.save, args=(state, tmp_path / "x.pt"))
        saving.start()
        stage.cuda.wait_for_queued_copies(1)
    saving.join()
    assert bytes_in(load(tmp_path / "x.pt")) == {"s0": b"\x07" * (3 * CHUNK)}


def test_each_piece_is_what_the_stream_has_made_of_it_when_it_is_written(stage: Stage, tmp_path: Path) -> None:
    first, second = cuda_storage(bytes(200_000)), cuda_storage(bytes(200_000))
    pieces = Pieces()
    pieces.add_storage(first, None)
    stage.kernel(second, 7)  # as .contiguous() between two tensors of a batch
    pieces.add_storage(second, None)
    with open(tmp_path / "x", "w+b") as file:
        with Writer(file.fileno(), "x", engine="threads-buffered") as writer:
            writer.append(pieces)
            writer.finish()
        stage.cuda.synchronize()
        assert os.pread(file.fileno(), 400_000, 0) == bytes(200_000) + b"\x07" * 200_000


# --- capture and gate


class Training:
    """A state on a device that an optimizer owns, whose step sets every byte."""

    def __init__(self, stage: Stage, sizes_bytes: list[int]) -> None:
        self.stage = stage
        self.state, self.contents = device_state(sizes_bytes)
        self.parameter = torch.nn.Parameter(torch.zeros(1))
        self.optimizer = torch.optim.SGD([self.parameter], lr=0.1)
        stage.own(self.state, self.parameter)

    def step(self, value: int) -> None:
        """Take a step: the pre-hooks run, then the stream gets what the step does."""
        self.optimizer.step()
        for storage in self.state.values():
            self.stage.kernel(storage, value)


@pytest.mark.parametrize("is_gated", [True, False])
def test_a_step_waits_in_its_stream_and_not_in_its_thread(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_gated: bool
) -> None:
    training = Training(stage, SIZES)
    if not is_gated:  # the test can fail
        monkeypatch.setattr(capture.Capture, "_hold_caller", lambda _capture: None)
    with stage.cuda.held_copies():
        pending = fp.save_async(training.state, tmp_path / "x.pt", optimizer=training.optimizer)
        training.step(9)  # returns although no copy has been made
        assert not pending.captured()
        if not is_gated:
            stage.cuda.stream_synchronize(stage.stream())
    pending.result()
    assert pending.captured()
    assert (bytes_in(load(tmp_path / "x.pt")) == training.contents) == is_gated
    assert nothing_is_left(tmp_path)


def test_volatile_bytes_are_those_of_the_call_although_it_does_not_wait(stage: Stage, tmp_path: Path) -> None:
    state, contents = device_state(SIZES)
    with stage.cuda.held_copies():
        pending = fp.save_async(state, tmp_path / "x.pt")
        for storage in state.values():
            stage.kernel(storage, 3)
    pending.result()
    stage.cuda.stream_synchronize(stage.stream())
    assert bytes_in(load(tmp_path / "x.pt")) == contents


def test_tensors_that_nobody_else_has_live_as_long_as_they_are_copied(stage: Stage, tmp_path: Path) -> None:
    state, contents = device_state(SIZES)
    with stage.cuda.held_copies():
        pending = fp.save_async(state, tmp_path / "x.pt")
        del state
    pending.result()
    assert bytes_in(load(tmp_path / "x.pt")) == contents


def test_a_later_step_on_another_stream_is_held_too(stage: Stage, tmp_path: Path) -> None:
    training = Training(stage, [5 * CHUNK])
    with stage.cuda.held_copies():
        pending = fp.save_async(training.state, tmp_path / "x.pt", optimizer=training.optimizer)
        training.optimizer.step()
        stage.switch_stream()
        training.step(9)
    pending.result()
    assert bytes_in(load(tmp_path / "x.pt")) == training.contents


def test_a_step_waits_for_the_writer_where_there_is_no_room(stage: Stage, tmp_path: Path) -> None:
    training = Training(stage, [30 * CHUNK])
    with fp.Checkpointer(tmp_path, optimizer=training.optimizer, max_host_bytes=0) as checkpointer:
        with stage.cuda.held_copies():
            pending = checkpointer.save(1, training.state)
            stepping = threading.Thread(target=training.step, args=(9,))
            stepping.start()
            stage.cuda.wait_for_queued_copies(8)
            stepping.join(0.2)
            assert stepping.is_alive()  # the ring has 8 chunks, the state 30
        stepping.join()
        pending.result()
    assert bytes_in(load(tmp_path / "step-00000001" / "state.pt")) == training.contents


def test_every_step_of_a_training_is_saved(stage: Stage, tmp_path: Path) -> None:
    training = Training(stage, SIZES)
    stage.cuda.delay_us(100)
    with fp.Checkpointer(tmp_path, optimizer=training.optimizer) as checkpointer:
        for step in range(1, 13):
            training.step(step)
            checkpointer.save(step, training.state)
    for step in range(1, 13):
        loaded = load(tmp_path / f"step-{step:08d}" / "state.pt")
        assert {name: set(data) for name, data in bytes_in(loaded).items()} == {
            name: {step} if data else set() for name, data in training.contents.items()
        }, step


def test_captured_memory_is_pinned_and_used_again(stage: Stage, tmp_path: Path) -> None:
    training = Training(stage, [64 * CHUNK])
    with fp.Checkpointer(tmp_path, optimizer=training.optimizer) as checkpointer:
        for step in range(1, 4):
            with stage.cuda.held_copies():
                pending = checkpointer.save(step, training.state)
                training.step(step)
            pending.result()
        pinned_bytes = _native.pinned_bytes()
        assert pinned_bytes <= (8 * CHUNK) + (64 << 20) + (1 << 30)
    assert stage.cuda.pageable_copy_count == 0


def test_the_arena_knows_the_device_before_it_prepares_memory(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It prepares on a thread of its own. Without the device it would not pin, and a copy into such memory waits for the
    # device: the gate, too.
    done: list[str] = []
    add, prepare = _native.Snapshot.add, Arena.prepare

    def noted_add(self: _native.Snapshot, *arguments: Any) -> None:
        done.append("add")
        add(self, *arguments)

    def noted_prepare(self: Arena, state_bytes: int) -> None:
        done.append("prepare")
        prepare(self, state_bytes)

    monkeypatch.setattr(_native.Snapshot, "add", noted_add)
    monkeypatch.setattr(Arena, "prepare", noted_prepare)
    training = Training(stage, [64 * CHUNK])
    with fp.Checkpointer(tmp_path, optimizer=training.optimizer) as checkpointer:
        checkpointer.save(1, training.state).result()
    assert done == ["add", "prepare"]


# --- small tensors


SMALL = [1 + (index * 7919) % 9000 for index in range(700)]


@pytest.mark.parametrize("way", ["save", "volatile", "gate", "behind the gate", "no room"])
def test_small_storages_are_copied_in_few_pieces(stage: Stage, tmp_path: Path, way: str) -> None:
    state, contents = packed_state(stage, [*SMALL, 300_000, 70_000])
    path = tmp_path / "x.pt"
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    stage.own(state if way != "volatile" else {}, parameter)
    if way == "save":
        fp.save(state, path)
    elif way == "no room":
        with fp.Checkpointer(tmp_path, optimizer=optimizer, max_host_bytes=0) as checkpointer:
            path = checkpointer.save(1, state).result() / "state.pt"
    elif way == "behind the gate":
        fp.save_async(state, path, optimizer=optimizer).result()
    else:
        with stage.cuda.held_copies():
            pending = fp.save_async(state, path, optimizer=optimizer)
            optimizer.step()
            for storage in state.values():
                stage.kernel(storage, 1)
        pending.result()
    assert bytes_in(load(path)) == contents
    copy_count = stage.cuda.call_count("cuMemcpyDtoHAsync_v2")
    if way == "no room":  # straight into the ring
        assert copy_count >= len(state)
    else:
        assert copy_count < 40


@pytest.mark.parametrize("seed", range(8))
def test_any_mixture_of_owners_sizes_and_places_is_saved_as_it_was(stage: Stage, tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    sizes = [chance.choice([0, 3, 600, 5000, 40_000, 300_000]) + chance.randrange(500) for _ in range(150)]
    packed, contents = packed_state(stage, sizes, gap_bytes=chance.choice([512, 4096, 100_000]))
    apart, more = device_state([size + 1 for size in sizes[:10]], device=1)
    state: dict[str, Any] = {**packed, **{f"t{name}": storage for name, storage in apart.items()}}
    contents |= {f"t{name}": data for name, data in more.items()}
    names = list(state)
    chance.shuffle(names)
    state = {name: state[name] for name in names}
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    stage.own({name: state[name] for name in names if chance.random() < 0.7}, parameter)
    stage.cuda.delay_us(chance.choice([0, 20, 200]))
    room = chance.choice([None, 1 << 21, 1 << 23])
    with fp.Checkpointer(tmp_path, optimizer=optimizer, max_host_bytes=room) as checkpointer:
        for step in (1, 2):
            pending = checkpointer.save(step, state)
            optimizer.step()
            for storage in state.values():
                stage.kernel(storage, step)
            loaded = bytes_in(load(pending.result() / "state.pt"))
            assert loaded == contents
            contents = {name: bytes([step]) * len(data) for name, data in contents.items()}


# --- faults


def test_whichever_copy_fails_nothing_is_published_and_the_next_save_works(stage: Stage, tmp_path: Path) -> None:
    state, contents = device_state(SIZES)
    fp.save(state, tmp_path / "x.pt")
    failures = []
    for nth in range(1, 100):
        stage.cuda.fail("cuMemcpyDtoHAsync_v2", nth, PLAIN_ERROR)
        try:
            fp.save({"other": state["s6"], **state}, tmp_path / "x.pt")
        except DeviceError as error:
            failures.append(str(error))
        else:
            break
        assert bytes_in(load(tmp_path / "x.pt")) == contents
        assert nothing_is_left(tmp_path)
    assert len(failures) > 10
    assert all("CUDA_ERROR_INVALID_VALUE" in failure for failure in failures)
    stage.cuda.clear()
    assert bytes_in(load(tmp_path / "x.pt")) == {"other": contents["s6"], **contents}


@pytest.mark.parametrize("call", ["cuEventCreate", "cuEventRecord", "cuEventQuery", "cuStreamWaitEvent"])
def test_whichever_call_fails_the_next_save_works(stage: Stage, tmp_path: Path, call: str) -> None:
    state, contents = device_state(SIZES)
    for nth in range(1, 200):
        stage.cuda.fail(call, nth, PLAIN_ERROR)
        try:
            fp.save(state, tmp_path / f"{nth}.pt")
        except DeviceError:
            assert os.listdir(tmp_path) == []
            continue
        finally:
            stage.cuda.clear()
        break
    assert nothing_is_left(tmp_path)
    assert bytes_in(load(tmp_path / f"{nth}.pt")) == contents


def test_a_copy_that_fails_when_it_is_made_fails_the_save(stage: Stage, tmp_path: Path) -> None:
    state, _ = device_state([20 * CHUNK])
    stage.cuda.fail_async("cuMemcpyDtoHAsync_v2", 5, PLAIN_ERROR)
    with grace(0.3), pytest.raises(DeviceError, match="CUDA_ERROR_INVALID_VALUE"):
        fp.save(state, tmp_path / "x.pt")
    assert os.listdir(tmp_path) == []
    assert nothing_is_left(tmp_path)


def test_a_device_that_fails_at_the_gate_fails_the_save_and_not_the_step(stage: Stage, tmp_path: Path) -> None:
    training = Training(stage, [40 * CHUNK])
    with stage.cuda.held_copies():
        pending = fp.save_async(training.state, tmp_path / "x.pt", optimizer=training.optimizer)
        stage.cuda.wait_for_queued_copies(4)
        stage.cuda.fail("cuMemcpyDtoHAsync_v2", 0, PLAIN_ERROR)
        training.step(1)
    with pytest.raises(DeviceError):
        pending.result()
    assert os.listdir(tmp_path) == []


def test_a_lost_device_does_not_keep_tensors_of_the_host_from_being_saved(stage: Stage, tmp_path: Path) -> None:
    state, _ = device_state([5 * CHUNK])
    stage.cuda.fail("cuMemcpyDtoHAsync_v2", 2, STICKY_ERROR)
    for _ in range(2):  # the error sticks
        with pytest.raises(DeviceError, match="CUDA_ERROR_LAUNCH_FAILED"):
            fp.save(state, tmp_path / "x.pt")
    fp.save({"w": torch.ones(3)}, tmp_path / "y.pt")
    assert os.listdir(tmp_path) == ["y.pt"]
    assert nothing_is_left(tmp_path)


@pytest.mark.parametrize("waits", [True, False])
def test_without_pinned_memory_the_bytes_are_right_and_the_log_says_so(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, waits: bool
) -> None:
    use_new_ring(monkeypatch)
    monkeypatch.setattr(cuda, "_told", set())
    stage.cuda.set_registration_limit(0)
    stage.cuda.set_pageable_waits(waits)
    stage.cuda.delay_us(0 if waits else 2_000)
    state, contents = device_state(SIZES)
    fp.save(state, tmp_path / "x.pt")
    assert bytes_in(load(tmp_path / "x.pt")) == contents
    assert stage.cuda.pageable_copy_count > 0
    assert [record.levelname for record in caplog.records if "not pinned" in record.message] == ["WARNING"]


def test_a_forked_child_saves_tensors_of_the_host(stage: Stage, tmp_path: Path) -> None:
    state, contents = device_state(SIZES)
    fp.save(state, tmp_path / "x.pt")
    child = os.fork()
    if child == 0:
        try:
            fp.save({"w": torch.ones(3)}, tmp_path / "child.pt")
            os._exit(0 if "fork" in cuda.why_not_native() else 2)
        except BaseException:  # noqa: BLE001
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    fp.save(state, tmp_path / "x.pt")
    assert bytes_in(load(tmp_path / "x.pt")) == contents
    assert torch.equal(fp.load(tmp_path / "child.pt")["w"], torch.ones(3))


def test_without_a_usable_driver_torch_copies(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    storage = cuda_storage(random_bytes(10, 0))
    monkeypatch.setattr(cuda, "_told", set())
    monkeypatch.setattr(_native, "cuda_why_not", lambda: "there is no driver")
    assert cuda.ordinal_of(storage) is None
    assert cuda.ordinal_of(storage) is None
    assert [record.message for record in caplog.records if "there is no driver" in record.message] != []
    monkeypatch.undo()
    assert cuda.ordinal_of(storage) == 0
    assert cuda.ordinal_of(torch.UntypedStorage(3)) is None
