"""The calls of the CUDA driver from Python, in the way of C, for tests of its double and of what follows it.

    driver = Driver(cuda_double().library)
    with driver.current(0):                       # a context of device 0
        event = driver.event()
        assert driver.EventQuery(event) == NOT_READY

Names are those of cuda.h without "cu" and "_v2". A call returns its result; one that makes a handle is had by `made`.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from support.cuda_double import cuda_double

SIZE = 64 << 10
NOT_INITIALIZED = 3
NO_DEVICE = 100
INVALID_DEVICE = 101
INVALID_CONTEXT = 201
INVALID_HANDLE = 400
NOT_FOUND = 500
NOT_READY = 600
ALREADY_REGISTERED = 712
NOT_REGISTERED = 713
CAPTURE_UNSUPPORTED = 900
CAPTURE_IMPLICIT = 906

LEGACY_STREAM = 0
BLOCKING, NON_BLOCKING = 0, 1
PORTABLE = 1
DISABLE_TIMING = 2
GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2  # capture modes

Handle = ctypes.c_uint64
Size = ctypes.c_size_t

ARGUMENTS: dict[str, list[Any]] = {
    "cuInit": [ctypes.c_uint],
    "cuDriverGetVersion": [ctypes.POINTER(ctypes.c_int)],
    "cuGetErrorName": [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)],
    "cuGetErrorString": [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)],
    "cuDeviceGetCount": [ctypes.POINTER(ctypes.c_int)],
    "cuDeviceGet": [ctypes.POINTER(ctypes.c_int), ctypes.c_int],
    "cuDeviceGetPCIBusId": [ctypes.c_char_p, ctypes.c_int, ctypes.c_int],
    "cuDeviceGetAttribute": [ctypes.POINTER(ctypes.c_int), ctypes.c_int, ctypes.c_int],
    "cuDevicePrimaryCtxRetain": [ctypes.POINTER(Handle), ctypes.c_int],
    "cuCtxPushCurrent_v2": [Handle],
    "cuCtxPopCurrent_v2": [ctypes.POINTER(Handle)],
    "cuCtxGetCurrent": [ctypes.POINTER(Handle)],
    "cuStreamCreate": [ctypes.POINTER(Handle), ctypes.c_uint],
    "cuStreamDestroy_v2": [Handle],
    "cuStreamQuery": [Handle],
    "cuStreamSynchronize": [Handle],
    "cuStreamWaitEvent": [Handle, Handle, ctypes.c_uint],
    "cuStreamIsCapturing": [Handle, ctypes.POINTER(ctypes.c_int)],
    "cuThreadExchangeStreamCaptureMode": [ctypes.POINTER(ctypes.c_int)],
    "cuEventCreate": [ctypes.POINTER(Handle), ctypes.c_uint],
    "cuEventDestroy_v2": [Handle],
    "cuEventRecord": [Handle, Handle],
    "cuEventQuery": [Handle],
    "cuEventSynchronize": [Handle],
    "cuMemcpyDtoHAsync_v2": [ctypes.c_void_p, Handle, Size, Handle],
    "cuMemcpyHtoDAsync_v2": [Handle, ctypes.c_void_p, Size, Handle],
    "cuMemcpyDtoDAsync_v2": [Handle, Handle, Size, Handle],
    "cuMemsetD8Async": [Handle, ctypes.c_uint8, Size, Handle],
    "cuModuleLoadData": [ctypes.POINTER(Handle), ctypes.c_char_p],
    "cuModuleGetFunction": [ctypes.POINTER(Handle), Handle, ctypes.c_char_p],
    "cuLaunchKernel": [
        Handle,
        *[ctypes.c_uint] * 7,
        Handle,
        ctypes.POINTER(ctypes.c_void_p),
        ctypes.POINTER(ctypes.c_void_p),
    ],
    "cuMemHostRegister_v2": [ctypes.c_void_p, Size, ctypes.c_uint],
    "cuMemHostUnregister": [ctypes.c_void_p],
    "cuMemGetAddressRange_v2": [ctypes.POINTER(Handle), ctypes.POINTER(Size), Handle],
    "cuMemAlloc_v2": [ctypes.POINTER(Handle), Size],
    "cuMemFree_v2": [Handle],
}


class HostMemory:
    """Host memory on page boundaries, zeroed; unmapped by close()."""

    def __init__(self, size_bytes: int = SIZE) -> None:
        self._map = mmap.mmap(-1, size_bytes)
        self._anchor: Any = ctypes.c_char.from_buffer(self._map)
        self.address = ctypes.addressof(self._anchor)
        self.size_bytes = size_bytes

    def close(self) -> None:
        self._anchor = None
        self._map.close()

    def read(self) -> bytes:
        return self._map[:]

    def write(self, data: bytes) -> None:
        self._map[: len(data)] = data


class Driver:
    """The driver's calls, in the way of C: each returns its result."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        for name, arguments in ARGUMENTS.items():
            getattr(library, name).argtypes = arguments

    def __getattr__(self, name: str) -> Callable[..., int]:
        call: Callable[..., int] = getattr(self.library, f"cu{name}_v2", None) or getattr(self.library, f"cu{name}")
        return call

    def made(self, name: str, *arguments: Any) -> int:
        """Return the handle that a call makes."""
        handle = Handle()
        assert getattr(self, name)(ctypes.byref(handle), *arguments) == 0
        return handle.value

    def context(self, device: int = 0) -> int:
        return self.made("DevicePrimaryCtxRetain", device)

    def stream(self, flags: int = NON_BLOCKING) -> int:
        return self.made("StreamCreate", flags)

    def event(self) -> int:
        return self.made("EventCreate", DISABLE_TIMING)

    @contextmanager
    def current(self, device: int = 0) -> Iterator[None]:
        assert self.CtxPushCurrent(self.context(device)) == 0
        try:
            yield
        finally:
            self.CtxPopCurrent(None)

    def exchange_capture_mode(self, mode: int) -> int:
        """Set this thread's mode and return the one that it had."""
        exchanged = ctypes.c_int(mode)
        assert self.ThreadExchangeStreamCaptureMode(ctypes.byref(exchanged)) == 0
        return exchanged.value

    def capture_status(self, stream: int) -> int:
        status = ctypes.c_int()
        assert self.StreamIsCapturing(stream, ctypes.byref(status)) == 0
        return status.value

    def recorded(self, stream: int) -> int:
        """Return an event at the stream's end."""
        event = self.event()
        assert self.EventRecord(event, stream) == 0
        return event


@contextmanager
def pinned_memory(driver: Driver) -> Iterator[HostMemory]:
    """Give host memory that is registered; at the end, work that is queued is let end."""
    memory = HostMemory()
    assert driver.MemHostRegister(memory.address, memory.size_bytes, PORTABLE) == 0
    yield memory
    cuda_double().clear()
    assert driver.MemHostUnregister(memory.address) == 0
    memory.close()
