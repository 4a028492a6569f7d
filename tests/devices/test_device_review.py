"""Where saving and loading over a CUDA device could go wrong without anybody noticing: found by reading, held by tests.

Over the double of the driver.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cuda_double import OUT_OF_MEMORY, PLAIN_ERROR, STICKY_ERROR, cuda_storage
from support.device_states import Stage, bytes_in, device_stage, device_state, grace, packed_state, random_bytes

import fastpersist as fp
from fastpersist import _native
from fastpersist.errors import DeviceError
from fastpersist.transfer import cuda
from fastpersist.transfer.writer import Pieces, Writer

CHUNK = 1 << 16
ARENA_BYTES = 64 << 20
SLOW_COPY_US = 1_000_000
SOON_S = 0.4  # much less than a slow copy takes


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    with device_stage(monkeypatch) as stage:
        stage.allow_loading()
        yield stage


def load(path: Path) -> dict[str, Any]:
    loaded = fp.load(path, map_location="cpu", weights_only=False)
    assert isinstance(loaded, dict)
    return loaded


def ring_is_free() -> bool:
    """Tell whether no transfer has a buffer; a device that failed may hold some in quarantine."""
    return _native.ring_free_count() + _native.ring_quarantined_count() == _native.ring_buffer_count()


def write_sources(snapshot: _native.Snapshot, sizes_bytes: list[int], path: Path) -> bytes:
    """Write whole sources of a snapshot, 0, 1, 2 …, and return what the file holds."""
    with open(path, "w+b") as file:
        with Writer(file.fileno(), str(path), engine="threads-buffered") as writer:
            pieces = Pieces()
            for source, size_bytes in enumerate(sizes_bytes):
                if size_bytes:
                    pieces.add_captured(snapshot, source, size_bytes, source)
            writer.append(pieces)
            writer.finish()
        return file.read()[: sum(sizes_bytes)]


# --- memory that is given back while a copy is on its way


@pytest.mark.parametrize("way", ["narrow", "close"])
def test_who_gives_captured_memory_back_keeps_nobody_else_waiting(stage: Stage, way: str) -> None:
    # In DCP every rank captures first and drops later, in the background, what others write.
    storage = cuda_storage(bytes(2 * CHUNK))
    arena = _native.Arena(ARENA_BYTES)
    snapshot, other = _native.Snapshot(arena), _native.Snapshot(arena)
    snapshot.add([storage.data_ptr()], [2 * CHUNK], [_native.SourceKind.VOLATILE], [0])
    stage.cuda.delay_us(SLOW_COPY_US)
    snapshot.capture(_native.SourceKind.VOLATILE, True)
    giving = threading.Thread(target=(lambda: snapshot.narrow(0, 0, 0)) if way == "narrow" else snapshot.close)
    giving.start()
    longest_s = 0.0
    while giving.is_alive():  # counts() is called with the GIL, by each step at the gate
        started_s = time.monotonic()
        other.counts()
        longest_s = max(longest_s, time.monotonic() - started_s)
        time.sleep(0.001)
    giving.join()
    assert stage.cuda.queued_copy_count == 0
    snapshot.close()
    assert arena.used_bytes == 0
    assert longest_s < SOON_S


def test_memory_that_a_lost_device_does_not_let_go_of_is_nobody_elses(stage: Stage, tmp_path: Path) -> None:
    # Another mapping at that address would be taken for the first one: copies of other devices would go there.
    lost, _ = device_state([2 * CHUNK])
    other, contents = device_state([2 * CHUNK], device=1)
    unknown_bytes = stage.cuda.registered_bytes - _native.pinned_bytes()

    def save(state: dict[str, Any], root: Path) -> Path:
        with fp.Checkpointer(root) as checkpointer:
            path = checkpointer.save(1, state).result() / "state.pt"
            if state is lost:
                stage.cuda.fail("cuEventRecord", 1, STICKY_ERROR)
                with pytest.raises(DeviceError, match="cannot use the device any more"):
                    checkpointer.save(2, state)
        return path

    save(lost, tmp_path / "lost")
    gc.collect()  # the checkpointer's memory goes, and whatever is mapped next could come to its address
    for name in ("a", "b"):
        assert bytes_in(load(save(other, tmp_path / name))) == contents
    assert stage.cuda.registered_bytes - _native.pinned_bytes() == unknown_bytes


def test_a_writer_that_failed_keeps_nobody_waiting_where_ctrl_c_came_before_its_end(
    stage: Stage, tmp_path: Path
) -> None:
    pieces = Pieces()
    pieces.add_storage(cuda_storage(bytes(20 * CHUNK)), None)
    stage.cuda.fail("cuMemcpyDtoHAsync_v2", 5, PLAIN_ERROR)
    with open(tmp_path / "x", "w+b") as file:
        writer = Writer(file.fileno(), "x", engine="threads-buffered")  # as a traceback in a notebook keeps it
        with pytest.raises(DeviceError):
            writer.append(pieces)
        assert ring_is_free()
        writer.close()
    assert ring_is_free()


# A full device gives no more events; what it has begun goes on all the same.
MARKS_FAIL = ["cuEventRecord", "cuEventQuery"]


def nothing_ends_while_copies_are_on_the_way(stage: Stage, call: Callable[[], object]) -> bool:
    """Call what has to fail, with all copies held; tell whether it waited for them."""
    errors: list[BaseException] = []

    def fail() -> None:
        try:
            call()
        except DeviceError as error:
            errors.append(error)

    with stage.cuda.held_copies():
        failing = threading.Thread(target=fail)
        failing.start()
        failing.join(0.3)
        waited = failing.is_alive() or stage.cuda.queued_copy_count == 0
    failing.join()
    stage.cuda.clear()
    return waited and bool(errors) and ring_is_free()


@pytest.mark.parametrize("call", MARKS_FAIL)
def test_a_save_that_fails_keeps_its_buffers_until_the_device_has_let_them_go(
    stage: Stage, tmp_path: Path, call: str
) -> None:
    state, _ = device_state([20 * CHUNK])
    # The first is that which orders the streams.
    for nth in range(2, 40):
        stage.cuda.fail(call, nth, OUT_OF_MEMORY)
    assert nothing_ends_while_copies_are_on_the_way(stage, lambda: fp.save(state, tmp_path / "x.pt"))


@pytest.mark.parametrize("call", MARKS_FAIL)
def test_a_load_that_fails_keeps_its_targets_until_the_device_has_let_them_go(
    stage: Stage, tmp_path: Path, call: str
) -> None:
    state, _ = device_state([20 * CHUNK])
    fp.save(state, tmp_path / "x.pt")
    for nth in range(2, 40):
        stage.cuda.fail(call, nth, OUT_OF_MEMORY)
    assert nothing_ends_while_copies_are_on_the_way(stage, lambda: fp.load(tmp_path / "x.pt", weights_only=False))


@pytest.mark.parametrize("call", [None, *MARKS_FAIL])
def test_the_arena_has_a_block_back_when_the_device_has_let_it_go(stage: Stage, call: str | None) -> None:
    storage = cuda_storage(bytes(2 * CHUNK))
    arena = _native.Arena(ARENA_BYTES)
    snapshot = _native.Snapshot(arena)
    snapshot.add([storage.data_ptr()], [2 * CHUNK], [_native.SourceKind.VOLATILE], [0])
    with stage.cuda.held_copies():
        if call is not None:
            stage.cuda.fail(call, 0, OUT_OF_MEMORY)
        snapshot.capture(_native.SourceKind.VOLATILE, True)
        closing = threading.Thread(target=snapshot.close)
        closing.start()
        closing.join(0.2)
        assert arena.used_bytes
    closing.join()
    assert not arena.used_bytes


def test_whoever_closes_second_waits_as_long_as_the_first(stage: Stage) -> None:
    # The thread that cancels a save and the one that writes it both let the tensors go behind this.
    storage = cuda_storage(bytes(2 * CHUNK))
    snapshot = _native.Snapshot(_native.Arena(ARENA_BYTES))
    snapshot.add([storage.data_ptr()], [2 * CHUNK], [_native.SourceKind.VOLATILE], [0])
    with stage.cuda.held_copies():
        snapshot.capture(_native.SourceKind.VOLATILE, True)
        first, second = (threading.Thread(target=snapshot.close) for _ in range(2))
        for closing in (first, second):
            closing.start()
            closing.join(0.2)
        were_waiting = first.is_alive(), second.is_alive()
    first.join()
    second.join()
    assert were_waiting == (True, True)


# --- which bytes


def test_overlapping_sources_of_which_parts_are_wanted_are_gathered_rightly(stage: Stage, tmp_path: Path) -> None:
    # Two tensors of a state share memory, and of the one that begins first this rank writes the last rows.
    data = random_bytes(4096, 3).numpy().tobytes()
    storage = cuda_storage(data)
    snapshot = _native.Snapshot(_native.Arena(ARENA_BYTES))
    places = [(0, 2048), (512, 600), (3000, 1000)]
    for first, size_bytes in places:
        snapshot.add([storage.data_ptr() + first], [size_bytes], [_native.SourceKind.STABLE], [0])
    snapshot.capture(_native.SourceKind.VOLATILE, False)  # as save() does, before the plan is there
    snapshot.narrow(0, 1500, 2048)
    snapshot.capture(_native.SourceKind.STABLE, True)
    found = write_sources(snapshot, [548, 600, 1000], tmp_path / "x")
    snapshot.close()
    assert found == data[1500:2048] + data[512:1112] + data[3000:4000]


# --- the gate


def test_a_step_that_is_captured_into_a_graph_costs_no_save(stage: Stage, tmp_path: Path) -> None:
    state, contents = device_state([5 * CHUNK])
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    stage.own(state, parameter)
    with stage.cuda.held_copies():
        pending = fp.save_async(state, tmp_path / "x.pt", optimizer=optimizer)
        releasing = threading.Timer(0.1, stage.cuda.hold_copies, (-1,))
        releasing.start()
        with stage.cuda.captured(stage.stream()):
            optimizer.step()
        releasing.join()
        for storage in state.values():  # the graph, replayed at once
            stage.kernel(storage, 1)
    assert pending.captured()
    pending.result()
    assert bytes_in(load(tmp_path / "x.pt")) == contents


class SideStreamSGD(torch.optim.SGD):
    """As optimizers that keep their state on the host: the step's new values come over a stream of its own."""


def owned_save(
    stage: Stage, path: Path, optimizer_class: type[torch.optim.Optimizer] = torch.optim.SGD, **options: Any
) -> tuple[fp.PendingSave, torch.optim.Optimizer, dict[str, Any], dict[str, bytes]]:
    """Save a state that an optimizer owns."""
    state, contents = device_state([5 * CHUNK])
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = optimizer_class([parameter], lr=0.1)  # type: ignore[call-arg]
    stage.own(state, parameter)
    return fp.save_async(state, path, optimizer=optimizer, **options), optimizer, state, contents


def test_a_step_over_a_stream_of_the_optimizers_own_changes_nothing_that_is_being_copied(
    stage: Stage, tmp_path: Path
) -> None:
    with stage.cuda.held_copies():
        pending, optimizer, state, contents = owned_save(stage, tmp_path / "x.pt", SideStreamSGD)
        releasing = threading.Timer(0.1, stage.cuda.hold_copies, (-1,))
        releasing.start()
        optimizer.step()
        stage.switch_stream()  # which nobody has told to wait
        for storage in state.values():
            stage.kernel(storage, 1)
        stage.cuda.stream_synchronize(stage.stream())
        releasing.join()
    pending.result()
    assert bytes_in(load(tmp_path / "x.pt")) == contents


def test_nor_does_such_a_step_if_the_save_does_not_know_the_optimizer(stage: Stage, tmp_path: Path) -> None:
    state, contents = device_state([5 * CHUNK])
    optimizer = SideStreamSGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    with stage.cuda.held_copies():
        pending = fp.save_async(state, tmp_path / "x.pt")  # all of it is volatile, and a device still copies it
        releasing = threading.Timer(0.1, stage.cuda.hold_copies, (-1,))
        releasing.start()
        optimizer.step()
        stage.switch_stream()  # which nobody has told to wait
        for storage in state.values():
            stage.kernel(storage, 1)
        stage.cuda.stream_synchronize(stage.stream())
        releasing.join()
    pending.result()
    assert bytes_in(load(tmp_path / "x.pt")) == contents


def test_after_wait_captured_everything_may_be_changed_by_anybody(stage: Stage, tmp_path: Path) -> None:
    with stage.cuda.held_copies():
        pending, _, state, contents = owned_save(stage, tmp_path / "x.pt", gate="manual")
        releasing = threading.Timer(0.1, stage.cuda.hold_copies, (-1,))
        releasing.start()
        pending.wait_captured()
        for storage in state.values():  # by another process, say, with which it is shared
            stage.cuda.write(storage.data_ptr(), bytes(storage.nbytes()))
        releasing.join()
    pending.result()
    assert bytes_in(load(tmp_path / "x.pt")) == contents


def test_a_gate_gives_the_device_one_command_for_a_tensor_and_few_for_all_of_them(stage: Stage) -> None:
    # The driver takes about a thousand commands ahead of the device: behind that the training thread would wait.
    tensor_bytes, count = 6 << 20, 40
    storage = cuda_storage(bytes(tensor_bytes))
    snapshot = _native.Snapshot(_native.Arena(count * tensor_bytes))
    for _ in range(count):
        snapshot.add([storage.data_ptr()], [tensor_bytes], [_native.SourceKind.STABLE], [0])
    calls = ("cuMemcpyDtoHAsync_v2", "cuEventRecord", "cuCtxPushCurrent_v2")
    with stage.cuda.held_copies():
        before = {call: stage.cuda.call_count(call) for call in calls}
        snapshot.capture(_native.SourceKind.STABLE, False)
        copies, marks, contexts = (stage.cuda.call_count(call) - before[call] for call in calls)
    assert count <= copies <= 1.5 * count  # a mapping of the arena may end in the midst of one
    assert marks <= 5
    assert contexts <= 10
    snapshot.close()


def test_a_gate_does_not_wait_while_another_save_lets_a_device_know_the_arena(stage: Stage) -> None:
    # The arena was of host tensors so far, and theirs is the gate.
    on_host, storage = torch.zeros(3 << 20, dtype=torch.uint8), cuda_storage(bytes(3 << 20))
    arena = _native.Arena(ARENA_BYTES)
    earlier, gated, of_device = (_native.Snapshot(arena) for _ in range(3))
    for snapshot in (earlier, gated):
        snapshot.add([on_host.data_ptr()], [on_host.nbytes], [_native.SourceKind.STABLE], [None])
    earlier.capture(_native.SourceKind.STABLE, True)  # maps
    source = ([storage.data_ptr()], [storage.nbytes()], [_native.SourceKind.STABLE], [0])
    with stage.cuda.held_registrations():
        adding = threading.Thread(target=of_device.add, args=source)
        adding.start()
        stage.cuda.wait_for_calls("cuMemHostRegister_v2", 1)
        gate = threading.Thread(target=gated.capture, args=(_native.SourceKind.STABLE, True))
        gate.start()
        gate.join(SOON_S)
        was_waiting = gate.is_alive()
    gate.join()
    adding.join()
    assert not was_waiting
    of_device.capture(_native.SourceKind.STABLE, True)
    for snapshot in (earlier, gated, of_device):
        snapshot.close()
    assert stage.cuda.pageable_copy_count == 0


@pytest.mark.parametrize("call", ["cuCtxPushCurrent_v2", "cuEventRecord", "cuStreamWaitEvent"])
def test_a_driver_that_fails_at_the_gate_does_not_fail_the_step(stage: Stage, tmp_path: Path, call: str) -> None:
    with stage.cuda.held_copies():
        pending, optimizer, _, _ = owned_save(stage, tmp_path / "x.pt")
        stage.cuda.wait_for_queued_copies(1)
        stage.cuda.fail(call, 0, PLAIN_ERROR)
        optimizer.step()
        assert pending.captured()
    stage.cuda.hold_copies(-1)
    with grace(0.3), pytest.raises(DeviceError):
        pending.result()
    assert ring_is_free()


def test_memory_that_cannot_be_prepared_costs_no_save(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "fastpersist-arena":
            raise RuntimeError("can't start new thread")  # at the interpreter's end, or at the limit of the user
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    state, contents = device_state([5 * CHUNK])
    with fp.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state)
    assert bytes_in(load(tmp_path / "step-00000001" / "state.pt")) == contents


def test_what_the_writer_gathers_is_not_counted_as_copied_at_the_gate(stage: Stage, tmp_path: Path) -> None:
    state, _ = packed_state(stage, [5000] * 100)
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    stage.own(state, parameter)
    pending = fp.save_async(state, tmp_path / "x.pt", optimizer=optimizer)
    pending.result()  # and no step came
    assert pending.stats.bytes_at_gate == 0
    assert pending.stats.bytes_by_writer == 500_000


def test_paranoid_says_that_it_does_not_look_at_devices(
    stage: Stage, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "_told", set())
    state, _ = device_state([CHUNK])
    parameter = torch.nn.Parameter(torch.zeros(1))
    stage.own(state, parameter)
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    with fp.Checkpointer(tmp_path, optimizer=optimizer, paranoid=True) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state)
    assert [record.message for record in caplog.records if "paranoid" in record.message] != []
