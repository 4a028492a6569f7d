"""The double of the CUDA driver refuses misuse and says what it was, and fails where a test wants it to."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import pytest
from support import cuda_fixtures
from support.cuda_calls import (
    ALREADY_REGISTERED,
    BLOCKING,
    CAPTURE_IMPLICIT,
    CAPTURE_UNSUPPORTED,
    GLOBAL,
    INVALID_CONTEXT,
    INVALID_HANDLE,
    LEGACY_STREAM,
    NON_BLOCKING,
    NOT_READY,
    NOT_REGISTERED,
    PORTABLE,
    RELAXED,
    SIZE,
    THREAD_LOCAL,
    Driver,
    Handle,
    HostMemory,
)
from support.cuda_double import OUT_OF_MEMORY, PLAIN_ERROR, STICKY_ERROR, CudaDouble, DoubleError

cuda = cuda_fixtures.cuda
driver = cuda_fixtures.driver
pinned = cuda_fixtures.pinned
device_memory = cuda_fixtures.device_memory


def forgive(cuda: CudaDouble, part: str) -> None:
    """Check that there is one violation, which says so, and forget it."""
    assert [part in text for text in cuda.violations] == [True], cuda.violations
    cuda.clear()


# --- misuse


def test_freed_memory_is_poisoned_for_a_copy_that_is_queued(
    cuda: CudaDouble, driver: Driver, pinned: HostMemory
) -> None:
    address = cuda.alloc(SIZE)
    stream = driver.stream()
    with cuda.held_copies():
        assert driver.MemcpyDtoHAsync(pinned.address, address, SIZE, stream) == 0
        cuda.free(address)
    cuda.stream_synchronize(stream)
    assert pinned.read() == b"\xdd" * SIZE
    forgive(cuda, "is used by work that is queued")


def unknown_stream(driver: Driver, cuda: CudaDouble) -> int:
    return driver.StreamSynchronize(0x1234)


def destroyed_stream(driver: Driver, cuda: CudaDouble) -> int:
    stream = driver.stream()
    assert driver.StreamDestroy(stream) == 0
    return driver.EventRecord(driver.event(), stream)


def destroyed_event(driver: Driver, cuda: CudaDouble) -> int:
    event = driver.event()
    assert driver.EventDestroy(event) == 0
    return driver.EventQuery(event)


def event_of_another_device(driver: Driver, cuda: CudaDouble) -> int:
    with driver.current(1):
        event = driver.event()
    return driver.EventRecord(event, driver.stream())


def copy_beyond_the_allocation(driver: Driver, cuda: CudaDouble) -> int:
    address = cuda.alloc(SIZE)
    try:
        return driver.MemcpyDtoHAsync(HostMemory().address, address + 1, SIZE, driver.stream())
    finally:
        cuda.free(address)


def copy_of_freed_memory(driver: Driver, cuda: CudaDouble) -> int:
    address = cuda.alloc(SIZE)
    cuda.free(address)
    return driver.MemcpyHtoDAsync(address, HostMemory().address, SIZE, driver.stream())


def copy_to_null(driver: Driver, cuda: CudaDouble) -> int:
    address = cuda.alloc(SIZE)
    try:
        return driver.MemcpyDtoHAsync(None, address, SIZE, driver.stream())
    finally:
        cuda.free(address)


def copy_beyond_the_registration(driver: Driver, cuda: CudaDouble) -> int:
    address, memory = cuda.alloc(SIZE), HostMemory()
    assert driver.MemHostRegister(memory.address, SIZE // 2, PORTABLE) == 0
    try:
        return driver.MemcpyDtoHAsync(memory.address, address, SIZE // 2 + 1, driver.stream())
    finally:
        assert driver.MemHostUnregister(memory.address) == 0
        cuda.free(address)


def register_twice(driver: Driver, cuda: CudaDouble) -> int:
    memory = HostMemory()
    assert driver.MemHostRegister(memory.address + 100, 100, PORTABLE) == 0
    try:
        return driver.MemHostRegister(memory.address + 4000, 5000, PORTABLE)  # another byte range of the same page
    finally:
        assert driver.MemHostUnregister(memory.address + 100) == 0


def register_what_is_not_mapped(driver: Driver, cuda: CudaDouble) -> int:
    memory = HostMemory()
    memory.close()
    return driver.MemHostRegister(memory.address, SIZE, PORTABLE)


def unregister_what_is_not_registered(driver: Driver, cuda: CudaDouble) -> int:
    return driver.MemHostUnregister(HostMemory().address)


def pop_without_push(driver: Driver, cuda: CudaDouble) -> int:
    assert driver.CtxPopCurrent(None) == 0
    result = driver.CtxPopCurrent(None)
    assert driver.CtxPushCurrent(driver.context()) == 0
    return result


@pytest.mark.parametrize(
    ("misuse", "result", "violation"),
    [
        (unknown_stream, INVALID_HANDLE, "cuStreamSynchronize: the stream 0x1234"),
        (destroyed_stream, INVALID_HANDLE, "was destroyed or never made"),
        (destroyed_event, INVALID_HANDLE, "was destroyed or never made"),
        (event_of_another_device, INVALID_HANDLE, "of two contexts"),
        (copy_beyond_the_allocation, PLAIN_ERROR, "not inside one allocation"),
        (copy_of_freed_memory, PLAIN_ERROR, "not inside one allocation"),
        (copy_to_null, PLAIN_ERROR, "null"),
        (copy_beyond_the_registration, PLAIN_ERROR, "registered in part only"),
        (register_twice, ALREADY_REGISTERED, "registered already"),
        (register_what_is_not_mapped, PLAIN_ERROR, "not mapped"),
        (unregister_what_is_not_registered, NOT_REGISTERED, "is not registered"),
        (pop_without_push, INVALID_CONTEXT, "no context is current"),
    ],
)
def test_misuse_is_refused_and_written_down(
    cuda: CudaDouble,
    driver: Driver,
    misuse: Callable[[Driver, CudaDouble], int],
    result: int,
    violation: str,
) -> None:
    assert misuse(driver, cuda) == result
    forgive(cuda, violation)


@pytest.mark.parametrize("call", ["StreamCreate", "EventQuery", "MemcpyDtoHAsync", "MemHostRegister"])
def test_a_call_wants_a_current_context(
    cuda: CudaDouble, driver: Driver, pinned: HostMemory, device_memory: int, call: str
) -> None:
    event, stream, memory = driver.event(), driver.stream(), HostMemory()
    arguments: dict[str, tuple[Any, ...]] = {
        "StreamCreate": (ctypes.byref(Handle()), NON_BLOCKING),
        "EventQuery": (event,),
        "MemcpyDtoHAsync": (pinned.address, device_memory, SIZE, stream),
        "MemHostRegister": (memory.address, SIZE, PORTABLE),
    }
    results = []

    def without_context() -> None:
        results.append((cuda.context_depth, getattr(driver, call)(*arguments[call])))

    thread = threading.Thread(target=without_context)
    thread.start()
    thread.join()
    assert results == [(0, INVALID_CONTEXT)]
    assert cuda.context_depth == 1
    forgive(cuda, "no context is current")


def test_memory_of_a_device_is_copied_in_its_own_streams(
    cuda: CudaDouble, driver: Driver, pinned: HostMemory, device_memory: int
) -> None:
    with driver.current(1):
        stream = driver.stream()
        assert driver.MemcpyDtoHAsync(pinned.address, device_memory, SIZE, stream) == 0
        assert driver.StreamSynchronize(stream) == 0
    forgive(cuda, "memory of device 0 is copied in a stream of device 1")


@pytest.mark.parametrize("end", ["unregistered", "unmapped"])
def test_host_memory_stays_until_its_copies_are_done(
    cuda: CudaDouble, driver: Driver, device_memory: int, end: str
) -> None:
    memory = HostMemory()
    assert driver.MemHostRegister(memory.address, SIZE, PORTABLE) == 0
    stream = driver.stream()
    with cuda.held_copies():
        assert driver.MemcpyDtoHAsync(memory.address, device_memory, SIZE, stream) == 0
        if end == "unregistered":
            assert driver.MemHostUnregister(memory.address) == 0
        else:
            memory.close()
    cuda.stream_synchronize(stream)
    if end == "unregistered":
        assert cuda.violations == [f"cuMemHostUnregister: 1 queued copies use the memory at {memory.address:#x}"]
    else:
        assert "was unmapped before the copy was done" in cuda.violations[0]
        assert driver.MemHostUnregister(memory.address) == 0
        assert "was unmapped before" in cuda.violations[1]
    cuda.clear()


# --- captures of graphs


def test_a_capture_is_broken_by_calls_that_are_not_relaxed(cuda: CudaDouble, driver: Driver) -> None:
    captured, event = driver.stream(), driver.event()
    with cuda.captured(captured):
        assert driver.exchange_capture_mode(RELAXED) == GLOBAL
        assert driver.EventQuery(event) == 0
        assert driver.capture_status(captured) == 1
        assert driver.exchange_capture_mode(GLOBAL) == RELAXED
        assert driver.EventQuery(event) == CAPTURE_UNSUPPORTED
        assert driver.capture_status(captured) == 2
    assert driver.capture_status(captured) == 0
    assert driver.EventQuery(event) == 0
    forgive(cuda, "cuEventQuery: called while the stream")


def test_a_thread_local_mode_ignores_captures_of_other_threads_only(cuda: CudaDouble, driver: Driver) -> None:
    captured, event, results = driver.stream(), driver.event(), []

    def query() -> None:
        with driver.current():
            driver.exchange_capture_mode(THREAD_LOCAL)
            results.append(driver.EventQuery(event))

    with cuda.captured(captured):
        thread = threading.Thread(target=query)
        thread.start()
        thread.join()
        assert results == [0]
        before = driver.exchange_capture_mode(THREAD_LOCAL)
        assert driver.EventQuery(event) == CAPTURE_UNSUPPORTED
        driver.exchange_capture_mode(before)
    forgive(cuda, "cuEventQuery: called while the stream")


def test_a_captured_stream_takes_nothing_from_outside(cuda: CudaDouble, driver: Driver) -> None:
    captured, event = driver.stream(), driver.event()
    driver.exchange_capture_mode(RELAXED)
    with cuda.captured(captured):
        assert driver.EventRecord(event, captured) == CAPTURE_UNSUPPORTED
    driver.exchange_capture_mode(GLOBAL)
    forgive(cuda, "is captured")


def test_the_default_stream_cannot_be_used_beside_a_captured_blocking_stream(cuda: CudaDouble, driver: Driver) -> None:
    captured, status = driver.stream(BLOCKING), ctypes.c_int()
    driver.exchange_capture_mode(RELAXED)
    with cuda.captured(captured):
        assert driver.StreamIsCapturing(LEGACY_STREAM, ctypes.byref(status)) == CAPTURE_IMPLICIT
        assert cuda.violations == []
        assert driver.EventRecord(driver.event(), LEGACY_STREAM) == CAPTURE_IMPLICIT
    driver.exchange_capture_mode(GLOBAL)
    forgive(cuda, "the default stream")


# --- failures


def test_the_nth_call_from_now_on_fails_and_does_nothing(cuda: CudaDouble, driver: Driver) -> None:
    driver.event()
    cuda.fail("EventCreate", 2, PLAIN_ERROR)
    driver.event()
    before = cuda.event_count
    assert driver.EventCreate(ctypes.byref(Handle()), 0) == PLAIN_ERROR
    assert cuda.event_count == before
    driver.event()
    assert cuda.call_count("cuEventCreate") == 4


def test_a_call_may_fail_each_time(cuda: CudaDouble, driver: Driver) -> None:
    cuda.fail("cuStreamCreate", 0, OUT_OF_MEMORY)
    assert [driver.StreamCreate(ctypes.byref(Handle()), 1) for _ in range(3)] == [OUT_OF_MEMORY] * 3
    cuda.clear()
    driver.stream()


def test_a_sticky_error_spoils_its_context_and_no_other(cuda: CudaDouble, driver: Driver) -> None:
    event = driver.event()
    cuda.fail("EventRecord", 1, STICKY_ERROR)
    assert driver.EventRecord(event, LEGACY_STREAM) == STICKY_ERROR
    assert driver.EventQuery(event) == STICKY_ERROR
    assert driver.StreamCreate(ctypes.byref(Handle()), 1) == STICKY_ERROR
    with driver.current(1):
        driver.stream()
    cuda.clear()
    assert driver.EventQuery(event) == 0


@pytest.mark.parametrize("error", [PLAIN_ERROR, STICKY_ERROR])
def test_a_copy_that_fails_in_its_stream_is_reported_later(
    cuda: CudaDouble, driver: Driver, pinned: HostMemory, device_memory: int, error: int
) -> None:
    stream, other, unrelated = driver.stream(), driver.stream(), driver.event()
    cuda.fail_async("MemcpyDtoHAsync", 2, error)
    with cuda.blocked(stream):
        assert driver.MemcpyDtoHAsync(pinned.address, device_memory, 1, stream) == 0
        before = driver.recorded(stream)
        assert driver.MemcpyDtoHAsync(pinned.address + 1, device_memory, 1, stream) == 0
        after = driver.recorded(stream)
        assert driver.MemcpyDtoHAsync(pinned.address + 2, device_memory, 1, stream) == 0
        assert driver.EventQuery(after) == NOT_READY
    assert driver.EventSynchronize(after) == error
    assert driver.EventQuery(after) == error
    assert driver.MemcpyDtoHAsync(pinned.address, device_memory, 1, stream) == error
    assert driver.EventQuery(before) == (error if error == STICKY_ERROR else 0)
    assert driver.EventRecord(unrelated, other) == (error if error == STICKY_ERROR else 0)
    cuda.synchronize()
    assert pinned.read()[:3] == b"\xab\0\0"


def test_a_pageable_copy_reports_its_own_failure(cuda: CudaDouble, driver: Driver, device_memory: int) -> None:
    cuda.fail_async("MemcpyHtoDAsync", 1, STICKY_ERROR)
    memory = HostMemory()
    assert driver.MemcpyHtoDAsync(device_memory, memory.address, SIZE, driver.stream()) == STICKY_ERROR
    assert cuda.read(device_memory, 1) == b"\xab"


def test_a_wait_ends_when_the_context_is_spoiled(
    cuda: CudaDouble, driver: Driver, pinned: HostMemory, device_memory: int
) -> None:
    held, failing = driver.stream(), driver.stream()
    cuda.fail_async("MemcpyDtoHAsync", 1, STICKY_ERROR)
    with cuda.blocked(held):
        event = driver.recorded(held)
        assert driver.MemcpyDtoHAsync(pinned.address, device_memory, 1, failing) == 0
        assert driver.EventSynchronize(event) == STICKY_ERROR


def test_a_name_that_is_no_call_is_a_mistake_of_the_test(cuda: CudaDouble) -> None:
    for misspelt in (
        lambda: cuda.fail("EventRecorded", 1, PLAIN_ERROR),
        lambda: cuda.call_count("cuEvent"),
        lambda: cuda.wait_for_calls("Memcpy", 1),
    ):
        with pytest.raises(DoubleError, match="no call named"):
            misspelt()
