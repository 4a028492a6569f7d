"""TensorFile with tensors of CUDA devices: they copy through pinned staging of bounded size, beside everything else.

Over the double of the driver.
"""

from __future__ import annotations

import gc
import random
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from support.cuda_double import PLAIN_ERROR, STICKY_ERROR
from support.device_states import Stage, device_stage, grace
from support.device_tensors import bytes_on_device, cuda_tensor
from support.forking import Report, run_in_child
from support.leaks import no_leaks
from support.tensor_files import ENGINES, PAGE_BYTES, bytes_of, faults, pattern, skip_without, tensor_of

import fastpersist as fp
from fastpersist import _native
from fastpersist.errors import DeviceError, EndOfFileError, StorageError, UnsupportedError
from fastpersist.transfer import cuda
from fastpersist.transfer.tensor_requests import looked_at

CHUNK = 1 << 16
DEPTH = 8
STAGING_BYTES = DEPTH * CHUNK
SIZE = 12 * CHUNK + 1234
GRACE_S = 0.3
IN_TIME_S = 8  # on a busy machine; what hangs takes for ever

engines = pytest.mark.parametrize("engine", ENGINES)
DTYPES = (
    torch.uint8,
    torch.bool,
    torch.int16,
    torch.bfloat16,
    torch.float32,
    torch.float8_e4m3fn,
    torch.int64,
    torch.complex64,
    torch.complex128,
)


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    with device_stage(monkeypatch) as stage:
        yield stage
        stage.end()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "file"


def opened(path: Path, mode: str = "r", engine: str = "auto", chunk_bytes: int = CHUNK) -> fp.TensorFile:
    return fp.TensorFile(path, mode, engine=engine, chunk_bytes=chunk_bytes, queue_depth=DEPTH)


def kernel(stage: Stage, tensor: torch.Tensor, value: int) -> None:
    """Give the current stream work that sets every byte of a tensor."""
    stage.kernel(tensor.untyped_storage(), value)


# ------------------------------------------------------------------------------------------------------------- bytes


@engines
def test_what_is_written_and_read_is_what_a_model_holds(stage: Stage, path: Path, engine: str) -> None:
    skip_without(engine, path.parent)
    rng = random.Random(7)
    model = bytearray(pattern(200_000))
    path.write_bytes(model)
    stage.cuda.delay_us(10)
    with no_leaks(), opened(path, "r+", engine, 1 << 14) as file:
        for step in range(120):
            dtype = DTYPES[step % len(DTYPES)]
            size = rng.choice([rng.randrange(4), rng.randrange(6000), PAGE_BYTES * rng.randrange(12), 70_000])
            size = max(size - size % dtype.itemsize, dtype.itemsize)  # this torch cannot view an empty one
            offset = rng.choice([PAGE_BYTES * rng.randrange(30), rng.randrange(130_000)])
            shifted_bytes = rng.choice([0, 1, 512, PAGE_BYTES])
            if rng.random() < 0.5:
                data = pattern(size, step)
                written = cuda_tensor(data, step % 2, dtype=dtype, shifted_bytes=shifted_bytes)
                assert file.write(written, offset) == size
                model[offset : offset + size] = data
            else:
                read = cuda_tensor(bytes(size), step % 2, dtype=dtype, shifted_bytes=shifted_bytes)
                version = read._version
                assert file.read(read, offset) == size
                assert read._version > version
                assert bytes_on_device(read) == model[offset : offset + size]
    assert path.read_bytes() == model
    assert stage.cuda.pageable_copy_count == 0


@engines
def test_one_request_has_parts_of_the_host_and_of_two_devices(stage: Stage, path: Path, engine: str) -> None:
    skip_without(engine, path.parent)
    data = pattern(60 * 5000)
    rows = [data[at : at + 5000] for at in range(0, len(data), 5000)]

    def tensors(contents: list[bytes]) -> list[torch.Tensor]:
        return [tensor_of(one) if row % 3 == 2 else cuda_tensor(one, row % 3) for row, one in enumerate(contents)]

    def held(tensor: torch.Tensor) -> bytes:
        return bytes_of(tensor) if tensor.is_cpu else bytes_on_device(tensor)

    with no_leaks(), opened(path, "w", engine) as file:
        places = [5000 * row for row in range(60)]
        assert file.write_list(zip(tensors(rows), places, strict=True)) == len(data)
        assert path.read_bytes() == data
        read = tensors([bytes(5000)] * 60)
        assert file.read_list(zip(read, places, strict=True)) == len(data)
        assert [held(tensor) for tensor in read] == rows


def test_many_copies_are_under_way_at_once_in_bounded_memory(stage: Stage, path: Path) -> None:
    data = pattern(SIZE)
    before_bytes = _native.pinned_bytes()
    with no_leaks(), opened(path, "w") as file:
        for to_host in (True, False):
            tensor = cuda_tensor(data if to_host else bytes(SIZE))
            with stage.cuda.held_copies():
                pending = file.write_async(tensor) if to_host else file.read_async(tensor)
                stage.cuda.wait_for_queued_copies(DEPTH // 2)
                # Beside staging, what the ends of a write need.
                assert _native.pinned_bytes() - before_bytes <= STAGING_BYTES + 64 * PAGE_BYTES
                assert stage.cuda.queued_copy_count <= DEPTH
                assert not pending.done()
            assert pending.result() == SIZE
            assert bytes_on_device(tensor) == data
    assert path.read_bytes() == data
    assert stage.cuda.pageable_copy_count == 0


@pytest.mark.parametrize("chunk_bytes", [PAGE_BYTES, 1 << 18])
def test_a_queue_of_one_request_is_enough(stage: Stage, path: Path, chunk_bytes: int) -> None:
    data = pattern(500_001)
    host = tensor_of(bytes(499_999), shifted_bytes=1)
    with no_leaks(), fp.TensorFile(path, "w", chunk_bytes=chunk_bytes, queue_depth=1) as file:
        read = [cuda_tensor(bytes(500_001), device) for device in (0, 1)]
        assert file.write(cuda_tensor(data), 3) == 500_001
        pending = [file.read_async(tensor, 3) for tensor in read]
        pending.append(file.read_async(host, 5))
        assert [one.result() for one in pending] == [500_001, 500_001, 499_999]
    assert [bytes_on_device(tensor) for tensor in read] == [data] * 2
    assert bytes_of(host) == data[2:]


def test_what_the_driver_cannot_serve_is_left_to_torch(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = cuda_tensor(bytes(100))
    monkeypatch.setattr(cuda, "_told", set())
    monkeypatch.setattr(_native, "cuda_why_not", lambda: "there is no driver")
    found = looked_at([(tensor, 7)], 0)
    assert found.elsewhere == [(tensor, 7)]
    assert not found.on_devices
    monkeypatch.undo()
    assert looked_at([(tensor, 7)], 0).on_devices == {0: [(tensor.data_ptr(), 100, 7)]}


def test_pages_are_pinned_once_for_files_that_follow_each_other(stage: Stage, path: Path) -> None:
    path.write_bytes(pattern(SIZE))
    counts = []
    for _ in range(4):
        with opened(path) as file:
            file.read(cuda_tensor(bytes(SIZE)))
        counts.append(stage.cuda.call_count("cuMemHostRegister_v2"))
    assert len(set(counts[1:])) == 1


def test_a_thousand_rows_are_one_request(stage: Stage, path: Path) -> None:
    data = pattern(3000 * 64)
    path.write_bytes(data)
    places = [64 * row for row in range(3000)]
    with no_leaks(), opened(path, "r+") as file:
        read = [cuda_tensor(bytes(64), row % 2) for row in range(3000)]
        assert file.read_list(zip(read, places, strict=True)) == len(data)
        assert b"".join(map(bytes_on_device, read)) == data
        assert file.write_list(zip(read, reversed(places), strict=True)) == len(data)
    assert path.read_bytes() == b"".join(data[place : place + 64] for place in reversed(places))


def test_what_is_there_is_read_at_the_end_of_the_file(stage: Stage, path: Path) -> None:
    data = pattern(5 * CHUNK + 777)
    path.write_bytes(data)
    stage.cuda.delay_us(500)
    with no_leaks(), opened(path) as file:
        read = cuda_tensor(bytes(8 * CHUNK))
        with pytest.raises(EndOfFileError) as caught:
            file.read(read, 1000)
        assert (caught.value.offset_bytes, caught.value.done_bytes, caught.value.asked_bytes) == (
            1000,
            len(data) - 1000,
            8 * CHUNK,
        )
        there = len(data) - 1000
        assert bytes_on_device(read) == data[1000:] + bytes(8 * CHUNK - there)


# ------------------------------------------------------------------------------------------------------------- order


def test_what_is_written_is_what_the_callers_stream_has_made_of_it(stage: Stage, path: Path) -> None:
    tensor = cuda_tensor(bytes(SIZE))
    with opened(path, "w") as file:
        with stage.cuda.blocked(stage.stream()):
            kernel(stage, tensor, 7)
            pending = file.write_async(tensor)
            stage.cuda.wait_for_queued_copies(1)
        kernel(stage, tensor, 7)
        assert pending.result() == SIZE
    assert path.read_bytes() == b"\x07" * SIZE


def test_memory_that_the_callers_stream_still_uses_is_left_alone(stage: Stage, path: Path) -> None:
    path.write_bytes(data := pattern(SIZE))
    tensor = cuda_tensor(bytes(SIZE))
    with opened(path) as file:
        with stage.cuda.blocked(stage.stream()):
            kernel(stage, tensor, 9)  # of whoever had this memory before
            pending = file.read_async(tensor)
            stage.cuda.wait_for_queued_copies(1)
            assert bytes_on_device(tensor) == bytes(SIZE)
        pending.wait()
    assert bytes_on_device(tensor) == data


def test_tensors_live_until_their_copies_are_made(stage: Stage, path: Path) -> None:
    data = pattern(SIZE)
    with opened(path, "w") as file:
        with stage.cuda.held_copies():
            file.write_async(cuda_tensor(data))
            dropped = cuda_tensor(bytes(SIZE))
            alive = weakref.ref(dropped.untyped_storage())
            file.read_async(dropped)
            del dropped
            gc.collect()
            assert alive() is not None
        file.sync()
        gc.collect()
        assert alive() is None
    assert path.read_bytes() == data


def test_a_stream_that_is_being_captured_is_refused(stage: Stage, path: Path) -> None:
    path.write_bytes(bytes(SIZE))
    tensor = cuda_tensor(bytes(SIZE))
    with no_leaks(), opened(path, "r+") as file:
        with stage.cuda.captured(stage.stream()):
            for call in (file.read, file.write):
                with pytest.raises(UnsupportedError, match="captured"):
                    call(tensor)
        assert file.write(tensor) == SIZE


# ---------------------------------------------------------------------------------------------------------- failures

CALLS = (
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyHtoDAsync_v2",
    "cuEventCreate",
    "cuEventRecord",
    "cuEventQuery",
    "cuStreamWaitEvent",
    "cuCtxPushCurrent_v2",
)


@pytest.mark.parametrize("call", CALLS)
def test_whichever_call_fails_only_its_request_does(stage: Stage, path: Path, call: str) -> None:
    data = pattern(5 * CHUNK + 99)
    host = tensor_of(data, shifted_bytes=1)
    failures = []
    with no_leaks(), grace(GRACE_S), opened(path, "w") as file:
        for nth in range(1, 60):
            stage.cuda.fail(call, nth, PLAIN_ERROR)
            written, read = cuda_tensor(data), cuda_tensor(bytes(len(data)))
            found = []
            for operation, tensor in ((file.write, written), (file.read, read)):
                try:
                    assert operation(tensor, 5) == len(data)
                except DeviceError as error:
                    found.append(str(error))
                file.write(host, 1 << 20)  # of the host: goes on
                file.read(host, 1 << 20)
            stage.cuda.clear()
            failures += found
            if not found:
                assert bytes_on_device(read) == data
                break
        else:
            pytest.fail(f"{call} is made without end")
        assert bytes_of(host) == data
    assert failures or call == "cuEventCreate"  # events of earlier transfers are used again
    assert all("CUDA_ERROR_INVALID_VALUE" in text and "cuda:0" in text for text in failures)
    if call.startswith("cuMemcpy"):
        assert all(str(path) in text and " at offset " in text for text in failures)


def test_a_copy_that_fails_when_it_is_made_fails_its_request(stage: Stage, path: Path) -> None:
    path.write_bytes(data := pattern(SIZE))
    with no_leaks(), grace(GRACE_S), opened(path, "r+") as file:
        stage.cuda.fail_async("cuMemcpyHtoDAsync_v2", 3, STICKY_ERROR)
        with pytest.raises(DeviceError, match=rf"reading {path} at offset \d+: .*cuda:0"):
            file.read(cuda_tensor(bytes(SIZE)))
        read = tensor_of(bytes(SIZE))
        assert file.read(read) == SIZE
        assert bytes_of(read) == data
        other = cuda_tensor(bytes(SIZE), 1)
        assert file.read(other) == SIZE
        assert bytes_on_device(other) == data


def test_a_write_of_a_device_that_nobody_asks_about_is_raised_by_closing(stage: Stage, path: Path) -> None:
    with no_leaks(), grace(GRACE_S):
        file = opened(path, "w")
        stage.cuda.fail("cuMemcpyDtoHAsync_v2", 1, PLAIN_ERROR)
        file.write_async(cuda_tensor(bytes(SIZE)))
        with pytest.raises(DeviceError, match=rf"writing {path} at offset \d+: "):  # the end has a thread of its own
            file.close()


@pytest.mark.parametrize("operation", ["read", "write"])
def test_whichever_request_to_the_kernel_fails_the_next_works(stage: Stage, path: Path, operation: str) -> None:
    path.write_bytes(data := pattern(SIZE))
    with no_leaks(), grace(GRACE_S), opened(path, "r+", "fault:threads-buffered") as file:
        for nth in (1, 3, 9):
            tensor = cuda_tensor(data if operation == "write" else bytes(SIZE))
            with faults(op=operation, nth=nth), pytest.raises(StorageError, match="Input/output error"):
                getattr(file, operation)(tensor)
            assert getattr(file, operation)(tensor) == SIZE
            assert bytes_on_device(tensor) == data
    assert path.read_bytes() == data


def test_memory_that_cannot_be_pinned_is_only_slower(
    stage: Stage, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = pattern(SIZE)
    cuda._told.clear()
    with opened(path, "w") as first, opened(path, "r+") as file:
        first.write(cuda_tensor(data))  # has the pinned mapping, if the process keeps one
        stage.cuda.set_registration_limit(0)
        for _ in range(2):
            read = cuda_tensor(bytes(SIZE))
            assert file.write(cuda_tensor(data), 3) == SIZE
            assert file.read(read, 3) == SIZE
            assert bytes_on_device(read) == data
        assert stage.cuda.pageable_copy_count > 0
    assert sum("not pinned, and are slower" in record.message for record in caplog.records) == 1


# -------------------------------------------------------------------------------------------- streams that never end


@contextmanager
def standing_still(stage: Stage, ordinal: int = 0) -> Iterator[None]:
    """Let the caller's stream stand still inside the block: what follows it then does, too."""
    with stage.cuda.blocked(stage.stream(ordinal)):
        yield
    stage.cuda.synchronize()


def use_others(file: fp.TensorFile, data: bytes) -> None:
    """Read tensors of the host and of another device, in time."""
    started_s = time.monotonic()
    for shifted_bytes in (0, 1):
        host = tensor_of(bytes(len(data) - 1), shifted_bytes=shifted_bytes)
        file.read(host, 1)
        assert bytes_of(host) == data[1:]
    other = cuda_tensor(bytes(len(data)), 1)
    file.read(other)
    assert bytes_on_device(other) == data
    assert time.monotonic() - started_s < IN_TIME_S


@pytest.mark.parametrize("operation", ["read", "write"])
@pytest.mark.parametrize("engine", ["auto", "threads-buffered"])
@pytest.mark.parametrize("is_pinned", [True, False])
def test_a_stream_that_stands_still_holds_up_its_own_requests_only(
    stage: Stage, path: Path, engine: str, operation: str, is_pinned: bool
) -> None:
    path.write_bytes(data := pattern(SIZE))
    with no_leaks(), opened(path) as pinned, opened(path, "r+", engine) as file:
        if not is_pinned:
            pinned.read(cuda_tensor(bytes(SIZE)))  # has the mapping that the process keeps
            stage.cuda.set_registration_limit(0)
        tensors = [cuda_tensor(data) for _ in range(3)]
        with standing_still(stage):
            pending = [getattr(file, operation + "_async")(tensor) for tensor in tensors]
            if is_pinned:
                stage.cuda.wait_for_queued_copies(DEPTH // 2)
            use_others(file, data)
            host = tensor_of(data[:9999], shifted_bytes=3)
            assert file.write(host, 3 * SIZE + 11) == 9999
            with pytest.raises(TimeoutError):
                pending[0].wait(0.1)
        assert [one.result() for one in pending] == [SIZE] * 3


@pytest.mark.parametrize("operation", ["read", "write"])
@pytest.mark.parametrize("is_pinned", [True, False])
def test_closing_on_an_error_gives_up_in_time_on_a_stream_that_stands_still(
    stage: Stage, path: Path, operation: str, is_pinned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    path.write_bytes(data := pattern(3 * SIZE))
    allocation_count = stage.cuda.allocation_count
    with no_leaks(), grace(GRACE_S), opened(path) as pinned:
        file = opened(path, "r+")
        if not is_pinned:
            pinned.read(cuda_tensor(bytes(SIZE)))
            stage.cuda.set_registration_limit(0)
        tensors = [cuda_tensor(bytes(SIZE)) for _ in range(3)]
        with standing_still(stage):
            pending = [getattr(file, operation + "_async")(tensor) for tensor in tensors]
            if is_pinned:
                stage.cuda.wait_for_queued_copies(DEPTH // 2)
            started_s = time.monotonic()
            with pytest.raises(KeyError), file:
                raise KeyError
            assert time.monotonic() - started_s < IN_TIME_S
            assert file.closed
            logged = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
            assert all("stands still" in text for text in logged)
            assert bool(logged) == (operation == "write")  # whoever reads is told by the request
            caplog.clear()
            for one in pending:
                with pytest.raises(DeviceError, match=f"{path} at offset .*stands still"):
                    one.wait()
            del tensors, pending
            gc.collect()
            if is_pinned:  # nobody gets the memory before the device has let go of it
                assert stage.cuda.allocation_count > allocation_count
            with opened(path, "r+") as again:
                use_others(again, data)
                if is_pinned:
                    with pytest.raises(DeviceError, match=r"cuda:0 .*stands still"):
                        getattr(again, operation)(cuda_tensor(bytes(SIZE)))
        with opened(path, "r+") as again:
            tensor = cuda_tensor(data)
            assert getattr(again, operation)(tensor) == len(data)
            del tensor
        gc.collect()
        assert stage.cuda.allocation_count == allocation_count


@pytest.mark.parametrize("operation", ["read", "write"])
def test_closing_waits_as_long_as_a_stream_takes(stage: Stage, path: Path, operation: str) -> None:
    path.write_bytes(data := pattern(SIZE))
    with no_leaks(), grace(GRACE_S):
        file = opened(path, "r+")
        tensor = cuda_tensor(bytes(SIZE) if operation == "read" else data[::-1])
        with standing_still(stage):
            pending = getattr(file, operation + "_async")(tensor)
            closing = threading.Thread(target=file.close)
            closing.start()
            closing.join(3 * GRACE_S)
            assert closing.is_alive()
        closing.join()
        assert pending.result() == SIZE
        assert bytes_on_device(tensor) == path.read_bytes() == (data if operation == "read" else data[::-1])


def test_a_request_that_fails_beside_a_stream_that_stands_still_says_so_in_time(stage: Stage, path: Path) -> None:
    path.write_bytes(data := pattern(SIZE))
    first, second = cuda_tensor(bytes(2 * CHUNK)), cuda_tensor(bytes(SIZE))
    with no_leaks(), grace(GRACE_S), opened(path, "r+", "fault:threads-buffered") as file:
        with standing_still(stage):
            pending = file.read_async(first)
            stage.cuda.wait_for_queued_copies(2)
            started_s = time.monotonic()
            with faults(op="read", nth=3), pytest.raises(StorageError, match="Input/output error"):
                file.read(second)
            assert time.monotonic() - started_s < IN_TIME_S
            assert not pending.done()
            use_others(file, data)
        assert pending.result() == 2 * CHUNK
        assert bytes_on_device(first) == data[: 2 * CHUNK]
        assert file.read(second) == SIZE
        assert bytes_on_device(second) == data


def test_ctrl_c_ends_the_wait_for_a_stream_that_stands_still(stage: Stage, path: Path) -> None:
    path.write_bytes(data := pattern(SIZE))
    tensor = cuda_tensor(bytes(SIZE))
    with no_leaks(), opened(path) as file:
        with standing_still(stage):
            timer = threading.Timer(0.2, signal.raise_signal, [signal.SIGINT])
            timer.start()
            with pytest.raises(KeyboardInterrupt):
                file.read(tensor)
            timer.join()
            use_others(file, data)
        file.sync()
        assert bytes_on_device(tensor) == data


def test_ctrl_c_ends_the_wait_for_what_was_read_before_a_mistake(stage: Stage, path: Path) -> None:
    path.write_bytes(data := pattern(SIZE))
    tensor = cuda_tensor(bytes(SIZE))
    wrong = [(torch.zeros(1), -1)]
    with no_leaks(), opened(path) as file:
        with standing_still(stage):
            timer = threading.Timer(0.2, signal.raise_signal, [signal.SIGINT])
            timer.start()
            with pytest.raises(KeyboardInterrupt):
                file.read_list([(tensor, 0)] + [(torch.zeros(0), 0)] * 1024 + wrong)
            timer.join()
        file.sync()
        assert bytes_on_device(tensor) == data


# -------------------------------------------------------------------------------------------------------------- fork


def test_a_forked_child_uses_the_host_alone(stage: Stage, path: Path) -> None:
    path.write_bytes(data := pattern(SIZE))
    tensor = cuda_tensor(bytes(SIZE))
    with no_leaks(), opened(path, "r+") as file:
        file.read(tensor)
        with stage.cuda.held_copies():
            pending = file.read_async(tensor)
            stage.cuda.wait_for_queued_copies(1)

            def work(report: Report) -> None:
                assert "fork" in cuda.why_not_native()
                read = tensor_of(bytes(SIZE - 1), shifted_bytes=1)
                file.read(read, 1)
                assert bytes_of(read) == data[1:]
                file.write(tensor_of(b"child"), 5)
                file.close()

            run_in_child(work)
        assert pending.result() == SIZE
    assert path.read_bytes() == data[:5] + b"child" + data[10:]
