"""The double of the CUDA driver behaves as CUDA does, in what tests of the product rely on, and tells of misuse."""

from __future__ import annotations

import ctypes
import errno
import io
import os
import pickle
import subprocess
import sys

import pytest
import torch
from support import cuda_fixtures
from support.cuda_calls import (
    BLOCKING,
    INVALID_DEVICE,
    INVALID_HANDLE,
    LEGACY_STREAM,
    NO_DEVICE,
    NON_BLOCKING,
    NOT_FOUND,
    NOT_INITIALIZED,
    NOT_READY,
    PORTABLE,
    SIZE,
    Driver,
    Handle,
    HostMemory,
    Size,
)
from support.cuda_double import (
    BUILD,
    OUT_OF_MEMORY,
    PLAIN_ERROR,
    SONAME,
    STICKY_ERROR,
    CudaDouble,
    DoubleError,
    build_double,
    cuda_storage,
    read_storage,
)
from support.forking import run_in_child
from support.leaks import no_leaks

cuda = cuda_fixtures.cuda
driver = cuda_fixtures.driver
pinned = cuda_fixtures.pinned
device_memory = cuda_fixtures.device_memory


# --- copies and their order


def test_a_copy_lands_in_its_stream_and_not_before(
    cuda: CudaDouble, driver: Driver, pinned: HostMemory, device_memory: int
) -> None:
    cuda.write(device_memory, b"x" * SIZE)
    stream = driver.stream()
    with cuda.blocked(stream):
        assert driver.MemcpyDtoHAsync(pinned.address, device_memory, SIZE, stream) == 0
        event = driver.recorded(stream)
        assert driver.EventQuery(event) == NOT_READY
        assert pinned.read() == bytes(SIZE)
    assert driver.EventSynchronize(event) == 0
    assert driver.EventQuery(event) == 0
    assert pinned.read() == b"x" * SIZE
    assert cuda.pageable_copy_count == 0
    assert cuda.copied_to_host_bytes == SIZE


def test_the_source_is_read_when_the_copy_is_done(
    cuda: CudaDouble, driver: Driver, pinned: HostMemory, device_memory: int
) -> None:
    pinned.write(b"first")
    stream = driver.stream()
    with cuda.held_copies():
        assert driver.MemcpyHtoDAsync(device_memory, pinned.address, SIZE, stream) == 0
        pinned.write(b"later")
    cuda.stream_synchronize(stream)
    assert cuda.read(device_memory, 5) == b"later"


def test_a_delay_is_the_time_that_a_copy_takes(
    cuda: CudaDouble, driver: Driver, pinned: HostMemory, device_memory: int
) -> None:
    cuda.delay_us(30_000)
    stream = driver.stream()
    before = pinned.read()
    assert driver.MemcpyDtoHAsync(pinned.address, device_memory, SIZE, stream) == 0
    event = driver.recorded(stream)
    assert driver.EventQuery(event) == NOT_READY
    assert pinned.read() == before
    assert driver.EventSynchronize(event) == 0
    assert pinned.read() != before


@pytest.mark.parametrize("direction", ["to host", "to device"])
def test_a_copy_with_pageable_memory_returns_when_it_is_done(
    cuda: CudaDouble, driver: Driver, device_memory: int, direction: str
) -> None:
    stream = driver.stream()
    cuda.stream_add_work(stream, 10_000, device_memory, ord("w"), SIZE)  # in stream order: before the copy
    memory = HostMemory()
    memory.write(b"h" * SIZE)
    if direction == "to host":
        assert driver.MemcpyDtoHAsync(memory.address, device_memory, SIZE, stream) == 0
        assert memory.read() == b"w" * SIZE
    else:
        assert driver.MemcpyHtoDAsync(device_memory, memory.address, SIZE, stream) == 0
        assert cuda.read(device_memory, SIZE) == b"h" * SIZE
    assert cuda.pageable_copy_count == 1
    memory.close()


@pytest.mark.parametrize("direction", ["to host", "to device"])
def test_a_copy_with_pageable_memory_may_return_before(
    cuda: CudaDouble, driver: Driver, device_memory: int, direction: str
) -> None:
    cuda.set_pageable_waits(False)
    stream = driver.stream()
    memory = HostMemory()
    memory.write(b"h" * SIZE)
    cuda.write(device_memory, b"d" * SIZE)
    cuda.stream_block(stream)
    if direction == "to host":
        assert driver.MemcpyDtoHAsync(memory.address, device_memory, SIZE, stream) == 0
        assert memory.read() == b"h" * SIZE
    else:
        assert driver.MemcpyHtoDAsync(device_memory, memory.address, SIZE, stream) == 0
        assert cuda.read(device_memory, SIZE) == b"d" * SIZE
    cuda.stream_unblock(stream)
    cuda.stream_synchronize(stream)
    assert memory.read() == cuda.read(device_memory, SIZE)
    assert cuda.pageable_copy_count == 1
    memory.close()


def test_a_stream_does_its_work_in_order(cuda: CudaDouble, driver: Driver, device_memory: int) -> None:
    other = cuda.alloc(SIZE, device=0)
    stream = driver.stream()
    with cuda.blocked(stream):
        assert driver.MemsetD8Async(device_memory, 1, SIZE, stream) == 0
        assert driver.MemcpyDtoDAsync(other, device_memory, SIZE, stream) == 0
        assert driver.MemsetD8Async(device_memory, 2, SIZE, stream) == 0
        assert driver.StreamQuery(stream) == NOT_READY
    assert driver.StreamSynchronize(stream) == 0
    assert (cuda.read(other, 1), cuda.read(device_memory, 1)) == (b"\1", b"\2")
    cuda.free(other)


def test_streams_do_not_wait_for_each_other(cuda: CudaDouble, driver: Driver) -> None:
    held, free = driver.stream(), driver.stream()
    with cuda.blocked(held):
        slow, fast = driver.recorded(held), driver.recorded(free)
        assert driver.EventSynchronize(fast) == 0
        assert driver.EventQuery(slow) == NOT_READY


def test_so_many_copies_are_let_through_as_a_test_allows(
    cuda: CudaDouble, driver: Driver, pinned: HostMemory, device_memory: int
) -> None:
    stream = driver.stream()
    with cuda.held_copies(allowed_count=2):
        events = []
        for _ in range(4):
            assert driver.MemcpyDtoHAsync(pinned.address, device_memory, SIZE, stream) == 0
            events.append(driver.recorded(stream))
        assert driver.EventSynchronize(events[1]) == 0
        assert driver.EventQuery(events[2]) == NOT_READY
        assert cuda.queued_copy_count == 2
    assert driver.EventSynchronize(events[3]) == 0
    assert cuda.queued_copy_count == 0
    assert 2 <= cuda.peak_queued_copy_count <= 4


def test_streams_leave_no_thread_behind(
    cuda: CudaDouble, driver: Driver, pinned: HostMemory, device_memory: int
) -> None:
    with no_leaks():
        stream = driver.stream()
        assert driver.MemcpyDtoHAsync(pinned.address, device_memory, SIZE, stream) == 0
        assert driver.StreamSynchronize(stream) == 0


# --- events


def test_an_event_that_was_never_recorded_holds_nobody(cuda: CudaDouble, driver: Driver) -> None:
    event, stream = driver.event(), driver.stream()
    assert driver.EventQuery(event) == 0
    assert driver.EventSynchronize(event) == 0
    assert driver.StreamWaitEvent(stream, event, 0) == 0
    assert driver.StreamSynchronize(stream) == 0


def test_an_event_is_at_its_last_record(cuda: CudaDouble, driver: Driver) -> None:
    first, second = driver.stream(), driver.stream()
    event = driver.event()
    with cuda.blocked(first):
        assert driver.EventRecord(event, first) == 0
        assert driver.EventRecord(event, second) == 0
        assert driver.EventSynchronize(event) == 0


def test_a_stream_waits_for_the_record_of_the_moment(cuda: CudaDouble, driver: Driver) -> None:
    source, late, waiting = driver.stream(), driver.stream(), driver.stream()
    event = driver.event()
    with cuda.blocked(late):
        with cuda.blocked(source):
            assert driver.EventRecord(event, source) == 0
            assert driver.StreamWaitEvent(waiting, event, 0) == 0
            assert driver.EventRecord(event, late) == 0  # moves the event, not the wait
            end = driver.recorded(waiting)
            assert driver.EventQuery(end) == NOT_READY
        assert driver.EventSynchronize(end) == 0
        assert driver.EventQuery(event) == NOT_READY


def test_a_stream_of_one_device_waits_for_an_event_of_another(cuda: CudaDouble, driver: Driver) -> None:
    mine = driver.stream()
    with driver.current(1):
        other = driver.stream()
        event = driver.event()
        with cuda.blocked(other):
            assert driver.EventRecord(event, other) == 0
            assert driver.StreamWaitEvent(mine, event, 0) == 0
            assert driver.StreamQuery(mine) == NOT_READY
        assert driver.StreamSynchronize(mine) == 0


# --- the legacy default stream


@pytest.mark.parametrize("stream_flags", [BLOCKING, NON_BLOCKING])
def test_only_blocking_streams_wait_for_the_default_stream(cuda: CudaDouble, driver: Driver, stream_flags: int) -> None:
    stream = driver.stream(stream_flags)
    with cuda.blocked(cuda.default_stream(0)):
        first = driver.recorded(LEGACY_STREAM)
        second = driver.recorded(stream)
        if stream_flags == NON_BLOCKING:
            assert driver.EventSynchronize(second) == 0
        assert driver.EventQuery(first) == NOT_READY
        assert driver.EventQuery(second) == (NOT_READY if stream_flags == BLOCKING else 0)
    assert driver.EventSynchronize(second) == 0


@pytest.mark.parametrize("stream_flags", [BLOCKING, NON_BLOCKING])
def test_the_default_stream_waits_for_blocking_streams_only(
    cuda: CudaDouble, driver: Driver, stream_flags: int
) -> None:
    stream = driver.stream(stream_flags)
    with cuda.blocked(stream):
        first = driver.recorded(stream)
        second = driver.recorded(LEGACY_STREAM)
        if stream_flags == NON_BLOCKING:
            assert driver.EventSynchronize(second) == 0
        assert driver.EventQuery(first) == NOT_READY
        assert driver.EventQuery(second) == (NOT_READY if stream_flags == BLOCKING else 0)
    assert driver.EventSynchronize(second) == 0


# --- device memory


def test_the_cpu_has_no_access_to_device_memory(device_memory: int) -> None:
    read_end, write_end = os.pipe()
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        # The kernel finds by itself what a CPU's access would crash on.
        assert libc.write(write_end, ctypes.c_void_p(device_memory), Size(1)) == -1
        assert ctypes.get_errno() == errno.EFAULT
    finally:
        os.close(read_end)
        os.close(write_end)


def test_an_address_is_known_with_its_allocation(cuda: CudaDouble, driver: Driver) -> None:
    address = cuda.alloc(3 * SIZE + 1)
    assert address % (2 << 20) == 0
    base, size_bytes = Handle(), Size()
    inside = address + 3 * SIZE
    assert driver.MemGetAddressRange(ctypes.byref(base), ctypes.byref(size_bytes), inside) == 0
    assert (base.value, size_bytes.value) == (address, 3 * SIZE + 1)
    assert driver.MemGetAddressRange(None, None, inside + 1) == NOT_FOUND
    cuda.free(address)
    assert driver.MemGetAddressRange(None, None, address) == NOT_FOUND


def test_memory_comes_by_the_drivers_own_call(cuda: CudaDouble, driver: Driver) -> None:
    address = driver.made("MemAlloc", SIZE)
    cuda.write(address, b"there")
    assert cuda.read(address, 5) == b"there"
    assert driver.MemFree(address) == 0
    with pytest.raises(DoubleError, match="not inside an allocation"):
        cuda.read(address, 5)
    assert [text.split(":")[0] for text in cuda.violations] == ["double_read"]
    cuda.clear()


# --- registration


def test_registered_memory_is_counted_in_pages_and_limited(cuda: CudaDouble, driver: Driver) -> None:
    cuda.set_registration_limit(cuda.registered_bytes + 8192)
    before, memory = cuda.registered_bytes, HostMemory()
    assert driver.MemHostRegister(memory.address, 4097, PORTABLE) == 0
    assert cuda.registered_bytes - before == 8192
    assert driver.MemHostRegister(memory.address + 8192, 1, PORTABLE) == OUT_OF_MEMORY
    assert driver.MemHostUnregister(memory.address) == 0
    assert driver.MemHostRegister(memory.address + 8192, 1, PORTABLE) == 0
    assert driver.MemHostUnregister(memory.address + 8192) == 0
    assert cuda.registered_bytes == before


@pytest.mark.parametrize(("flags", "pageable_count"), [(PORTABLE, 0), (0, 1)])
def test_memory_is_pinned_for_other_devices_when_it_is_portable(
    cuda: CudaDouble, driver: Driver, flags: int, pageable_count: int
) -> None:
    memory, address = HostMemory(), cuda.alloc(SIZE, device=1)
    assert driver.MemHostRegister(memory.address, SIZE, flags) == 0
    with driver.current(1):
        stream = driver.stream()
        assert driver.MemcpyDtoHAsync(memory.address, address, SIZE, stream) == 0
        assert driver.StreamSynchronize(stream) == 0
    assert cuda.pageable_copy_count == pageable_count
    assert driver.MemHostUnregister(memory.address) == 0
    cuda.free(address)


# --- the driver and its devices


def test_errors_have_names_and_texts(driver: Driver) -> None:
    text = ctypes.c_char_p()
    assert driver.GetErrorName(STICKY_ERROR, ctypes.byref(text)) == 0
    assert text.value == b"CUDA_ERROR_LAUNCH_FAILED"
    assert driver.GetErrorString(OUT_OF_MEMORY, ctypes.byref(text)) == 0
    assert text.value == b"out of memory"
    assert driver.GetErrorName(12345, ctypes.byref(text)) == PLAIN_ERROR
    assert text.value is None


def test_devices_are_counted_and_have_bus_ids(cuda: CudaDouble, driver: Driver) -> None:
    number, text = ctypes.c_int(), ctypes.create_string_buffer(16)
    assert driver.DeviceGetCount(ctypes.byref(number)) == 0
    assert number.value == 2
    assert driver.DeviceGet(ctypes.byref(number), 2) == INVALID_DEVICE
    assert driver.DeviceGetPCIBusId(text, 16, 1) == 0
    assert text.value == b"0000:3C:00.0"
    assert driver.DriverGetVersion(ctypes.byref(number)) == 0
    assert number.value == 12040
    assert driver.context(0) == driver.context(0) != driver.context(1)


def run_python(code: str) -> str:
    """Run code in a process that has used no driver yet, with `library` the double, and return what it prints."""
    preamble = f"import ctypes\nlibrary = ctypes.CDLL({str(build_double())!r}, mode=ctypes.RTLD_GLOBAL)\n"
    result = subprocess.run([sys.executable, "-c", preamble + code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_the_driver_wants_to_be_initialized_and_is_not_without_a_device() -> None:
    code = """
count = ctypes.c_int()
print(library.cuDeviceGetCount(ctypes.byref(count)), end=" ")
library.double_reset(0)
print(library.cuInit(0), end=" ")
library.double_reset(1)
print(library.cuInit(0), library.cuDeviceGetCount(ctypes.byref(count)), count.value)
"""
    assert run_python(code) == f"{NOT_INITIALIZED} {NO_DEVICE} 0 0 1"


def test_a_later_dlopen_by_name_finds_the_double() -> None:
    code = f"print(ctypes.CDLL({SONAME!r})._handle == library._handle)"
    assert run_python(code) == "True"


def test_a_call_can_be_hidden(cuda: CudaDouble) -> None:
    library = ctypes.CDLL(str(build_double(hidden_calls=("cuEventQuery",))), mode=ctypes.RTLD_LOCAL)
    assert not hasattr(library, "cuEventQuery")
    assert hasattr(library, "cuEventRecord")
    assert hasattr(library, "double_reset")


def test_the_library_lies_where_programs_look_for_it() -> None:
    library = build_double()
    assert build_double() == library
    assert (BUILD / SONAME).resolve() == library.resolve()


def test_a_reset_drops_work_and_wakes_who_waits() -> None:
    code = """
import threading
H = ctypes.c_uint64
library.cuInit(0)
results = []
was_reset = threading.Event()
def wait():
    context, stream, event = H(), H(), H()
    library.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
    library.cuCtxPushCurrent_v2(context)
    library.cuStreamCreate(ctypes.byref(stream), 1)
    library.cuEventCreate(ctypes.byref(event), 2)
    library.double_stream_block(stream)
    library.cuEventRecord(event, stream)
    results.append(library.cuEventSynchronize(event))
    was_reset.wait()
    results.append(library.double_context_depth())
    results.append(library.double_stream_count())
thread = threading.Thread(target=wait)
thread.start()
library.double_wait_for_calls(b"EventSynchronize", H(1), 20000)
library.double_reset(1)
was_reset.set()
thread.join()
print(*results)
"""
    assert run_python(code) == f"{INVALID_HANDLE} 0 0"


# --- forks


def test_a_forked_child_cannot_use_what_its_parent_has(cuda: CudaDouble, driver: Driver) -> None:
    stream = driver.stream()

    def use(report: object) -> None:
        assert driver.StreamQuery(stream) == NOT_INITIALIZED
        assert driver.Init(0) == NOT_INITIALIZED
        cuda.clear()
        assert [text.split(":")[0] for text in cuda.violations] == ["cuStreamQuery", "cuInit"]

    with cuda.blocked(stream):
        driver.recorded(stream)
        run_in_child(use)
    assert cuda.violations == []
    assert driver.StreamSynchronize(stream) == 0


def test_a_child_forked_before_cuda_is_used_may_use_it() -> None:
    code = """
import os
child = os.fork()
if child == 0:
    library.double_reset(1)
    os._exit(library.cuInit(0))
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), library.cuInit(0))
"""
    assert run_python(code) == "0 0"


# --- torch's storages


@pytest.mark.parametrize("source", [b"some bytes", torch.arange(10, dtype=torch.int16), b""])
def test_a_storage_holds_the_bytes_on_its_device(cuda: CudaDouble, source: bytes | torch.Tensor) -> None:
    before = cuda.allocation_count  # of other tests of this process
    storage = cuda_storage(source, device=1)
    expected = source if isinstance(source, bytes) else source.numpy().tobytes()
    assert storage.device == torch.device("cuda:1")
    assert read_storage(storage) == expected
    assert cuda.allocation_count == before + 1
    del storage
    assert cuda.allocation_count == before


def test_a_storage_is_pickled_with_its_location() -> None:
    class Pickler(pickle.Pickler):
        def persistent_id(self, value: object) -> object:
            if isinstance(value, torch.UntypedStorage):
                return ("storage", torch.serialization.location_tag(value), value.nbytes())
            return None

    storage, file = cuda_storage(b"1234"), io.BytesIO()
    Pickler(file).dump({"weights": storage})
    assert b"cuda:0" in file.getvalue()
