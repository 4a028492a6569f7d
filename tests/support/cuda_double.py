"""Builds and steers the double of the CUDA driver: streams, events and device memory on a machine without a GPU.

    cuda = cuda_double()               # once loaded, the product finds it by the name libcuda.so.1
    storage = cuda_storage(b"bytes")   # a storage on "cuda:0", of which torch here knows the address only
    with cuda.held_copies():
        ...                            # every copy waits in its stream

The library is of the process, and so are the product's devices over it: what a test sets, `CudaDouble.clear` takes
back. `interface.h` in cuda_double/ says what each function does.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
SOURCE = Path(__file__).parent / "cuda_double"
BUILD = ROOT / "build" / "cuda-double"

SONAME = "libcuda.so.1"
# Without cuFile's double, which is a library of its own.
SOURCES = tuple(sorted(path for path in SOURCE.glob("*.cc") if not path.name.startswith("cufile")))
HEADERS = tuple(sorted(path for path in SOURCE.glob("*.h") if not path.name.startswith("cufile")))
FLAGS = ("-std=c++20", "-O1", "-Wall", "-Wextra", "-Wconversion", "-fPIC", "-fvisibility=hidden", "-pthread")
DEVICE_COUNT = 2

ANY_DEVICE = -1
WAIT_MS = 20_000

STICKY_ERROR = 719  # CUDA_ERROR_LAUNCH_FAILED
PLAIN_ERROR = 1  # CUDA_ERROR_INVALID_VALUE
OUT_OF_MEMORY = 2


class DoubleError(AssertionError):
    """The double cannot be built, or a test asks of it what makes no sense."""


# --- the library ---


def build_double(hidden_calls: Sequence[str] = ()) -> Path:
    """Return the path of the double's library, built unless it is there: any number of processes may build at once.

    Args:
        hidden_calls: The exported names of calls that the library shall not have, as a driver that is too old.
    """
    digest = hashlib.sha256(repr(FLAGS).encode())
    for path in (*SOURCES, *HEADERS):
        digest.update(path.name.encode() + path.read_bytes())
    folder = BUILD / digest.hexdigest()[:12]
    if not folder.exists():
        with _one_at_a_time():
            if not folder.exists():
                _compile(folder)
    if not hidden_calls:
        _offer(folder / SONAME)
        return folder / SONAME
    variant = folder / "-".join(("without", *hidden_calls)) / SONAME
    if not variant.exists():
        variant.parent.mkdir(exist_ok=True)
        with _one_at_a_time(), _scratch() as scratch:
            _link(folder, hidden_calls, scratch / SONAME)
            (scratch / SONAME).replace(variant)
    return variant


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Keep the workers of a test run from compiling the same at once. The lock goes with its process."""
    BUILD.mkdir(parents=True, exist_ok=True)
    with (BUILD / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _scratch() -> Iterator[Path]:
    """Give a folder to build in, from where what is complete is renamed: others find all of a library, or none."""
    folder = Path(tempfile.mkdtemp(prefix=".build-", dir=BUILD))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _compile(folder: Path) -> None:
    """Make a folder with the objects and the library."""
    with _scratch() as scratch:
        _run_compiler([*FLAGS, "-c", *map(str, SOURCES)], scratch)
        _link(scratch, (), scratch / SONAME)
        scratch.chmod(0o755)
        scratch.rename(folder)


def _link(objects: Path, hidden_calls: Sequence[str], library: Path) -> None:
    exports = library.with_name("exports")
    # A name that stands alone is not taken for one of the pattern.
    exports.write_text(f"{{ global: cu*; double_*; local: {''.join(f'{name}; ' for name in hidden_calls)}*; }};\n")
    links = ("-shared", f"-Wl,-soname,{SONAME}", "-Wl,-z,nodelete", f"-Wl,--version-script={exports}")
    _run_compiler([*FLAGS, *links, *(str(objects / f"{path.stem}.o") for path in SOURCES), "-o", str(library)], objects)


def _run_compiler(arguments: Sequence[str], folder: Path) -> None:
    compiler = (os.environ.get("CXX") or "g++").split()
    if shutil.which(compiler[0]) is None:
        pytest.skip(f"there is no {compiler[0]}, which the double of the CUDA driver is built with")
    result = subprocess.run([*compiler, *arguments], cwd=folder, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise DoubleError(f"the double of the CUDA driver does not build:\n{result.stdout}{result.stderr}")


def _offer(library: Path) -> None:
    """Put the library where C++ test programs look for it."""
    offered = BUILD / SONAME
    with suppress(OSError):
        if offered.readlink() == library.relative_to(BUILD):
            return
    link = BUILD / f".{SONAME}-{os.getpid()}-{threading.get_ident()}"
    link.symlink_to(library.relative_to(BUILD))
    link.replace(offered)


_SIGNATURES: dict[str, tuple[type | None, list[type]]] = {
    "reset": (None, [ctypes.c_int]),
    "clear": (None, []),
    "set_driver_version": (None, [ctypes.c_int]),
    "set_pci_bus_id": (None, [ctypes.c_int, ctypes.c_char_p]),
    "set_reads_host_pointers": (None, [ctypes.c_int]),
    "alloc": (ctypes.c_uint64, [ctypes.c_size_t]),
    "alloc_on": (ctypes.c_uint64, [ctypes.c_int, ctypes.c_size_t]),
    "free": (None, [ctypes.c_uint64]),
    "read": (ctypes.c_int, [ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t]),
    "write": (ctypes.c_int, [ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t]),
    "fail": (None, [ctypes.c_char_p, ctypes.c_int, ctypes.c_int]),
    "fail_async": (None, [ctypes.c_char_p, ctypes.c_int, ctypes.c_int]),
    "set_registration_limit": (None, [ctypes.c_uint64]),
    "set_pageable_waits": (None, [ctypes.c_int]),
    "delay_us": (None, [ctypes.c_int]),
    "stream_new": (ctypes.c_uint64, [ctypes.c_int]),
    "default_stream": (ctypes.c_uint64, [ctypes.c_int]),
    "stream_free": (None, [ctypes.c_uint64]),
    "stream_add_work": (
        None,
        [ctypes.c_uint64, ctypes.c_int, ctypes.c_uint64, ctypes.c_int, ctypes.c_size_t],
    ),
    "stream_add_copy": (
        None,
        [ctypes.c_uint64, ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t],
    ),
    "stream_wait": (None, [ctypes.c_uint64, ctypes.c_uint64]),
    "stream_block": (None, [ctypes.c_uint64]),
    "stream_unblock": (None, [ctypes.c_uint64]),
    "capture": (None, [ctypes.c_uint64, ctypes.c_int]),
    "stream_synchronize": (None, [ctypes.c_uint64]),
    "synchronize": (None, []),
    "hold_copies": (None, [ctypes.c_int64]),
    "hold_registrations": (None, [ctypes.c_int]),
    "wait_for_calls": (ctypes.c_int, [ctypes.c_char_p, ctypes.c_uint64, ctypes.c_int]),
    "wait_for_queued_copies": (ctypes.c_int, [ctypes.c_uint64, ctypes.c_int]),
    "call_count": (ctypes.c_uint64, [ctypes.c_char_p]),
    "has_call": (ctypes.c_int, [ctypes.c_char_p]),
    "violation_count": (ctypes.c_int, []),
    "violation": (ctypes.c_char_p, [ctypes.c_int]),
    "queued_copy_count": (ctypes.c_uint64, []),
    "peak_queued_copy_count": (ctypes.c_uint64, []),
    "pageable_copy_count": (ctypes.c_uint64, []),
    "copied_to_host_bytes": (ctypes.c_uint64, []),
    "copied_to_device_bytes": (ctypes.c_uint64, []),
    "registration_count": (ctypes.c_uint64, []),
    "registered_bytes": (ctypes.c_uint64, []),
    "is_registered": (ctypes.c_int, [ctypes.c_uint64, ctypes.c_size_t]),
    "stream_count": (ctypes.c_uint64, []),
    "event_count": (ctypes.c_uint64, []),
    "allocation_count": (ctypes.c_uint64, []),
    "context_depth": (ctypes.c_int, []),
}


class CudaDouble:
    """The double of this process. Thread-safe."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        self.device_count = DEVICE_COUNT
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, f"double_{name}")
            function.restype, function.argtypes = result, arguments

    def reset(self, device_count: int = DEVICE_COUNT) -> None:
        """Forget everything, contexts and streams too: only where the product has used no device yet."""
        self.device_count = device_count
        self.library.double_reset(device_count)

    def clear(self) -> None:
        """Lift holds, let queued work end, and forget errors, plans, counts and violations."""
        self.library.double_clear()

    def set_driver_version(self, version: int) -> None:
        self.library.double_set_driver_version(version)

    def set_pci_bus_id(self, device: int, text: str) -> None:
        self.library.double_set_pci_bus_id(device, text.encode())

    # memory

    def alloc(self, size_bytes: int, device: int = ANY_DEVICE) -> int:
        """Return the address of new memory, which the CPU cannot access."""
        address = int(self.library.double_alloc_on(device, size_bytes))
        if address == 0:
            raise DoubleError(f"there are no {size_bytes} bytes of device memory")
        return address

    def free(self, address: int) -> None:
        self.library.double_free(address)

    def read(self, address: int, size_bytes: int) -> bytes:
        target = ctypes.create_string_buffer(size_bytes)
        if self.library.double_read(address, target, size_bytes) != 0:
            raise DoubleError(f"{size_bytes} bytes at {address:#x} are not inside an allocation")
        return target.raw

    def write(self, address: int, data: bytes) -> None:
        if self.library.double_write(address, data, len(data)) != 0:
            raise DoubleError(f"{len(data)} bytes at {address:#x} are not inside an allocation")

    # failures

    def fail(self, call: str, nth: int, error: int) -> None:
        """Make the nth call (from 1; 0: each) by that name from now on return the error."""
        self.library.double_fail(self._name(call), nth, error)

    def fail_async(self, copy: str, nth: int, error: int) -> None:
        """Make the nth copy (from 1; 0: each) by that call from now on fail in its stream."""
        self.library.double_fail_async(self._name(copy), nth, error)

    def set_registration_limit(self, limit_bytes: int) -> None:
        self.library.double_set_registration_limit(limit_bytes)

    def set_pageable_waits(self, on: bool) -> None:
        """Say whether a copy with host memory that is not registered returns when it is done, or before."""
        self.library.double_set_pageable_waits(int(on))

    # time and order

    def delay_us(self, us: int) -> None:
        """Make every copy take so long in its stream."""
        self.library.double_delay_us(us)

    def stream_new(self, device: int = 0) -> int:
        """Return a new stream that does not wait for the default one, as torch's do not."""
        return int(self.library.double_stream_new(device))

    def default_stream(self, device: int) -> int:
        return int(self.library.double_default_stream(device))

    def stream_free(self, stream: int) -> None:
        self.library.double_stream_free(stream)

    def stream_add_work(self, stream: int, us: int, target: int, byte_value: int, size_bytes: int) -> None:
        """Add a kernel that, after so long, fills device memory with one byte value."""
        self.library.double_stream_add_work(stream, us, target, byte_value, size_bytes)

    def stream_add_copy(self, stream: int, target: int, source: int, size_bytes: int, us: int = 0) -> None:
        """Add a kernel that, after so long, copies device memory."""
        self.library.double_stream_add_copy(stream, us, target, source, size_bytes)

    def stream_wait(self, stream: int, other: int) -> None:
        """Let what the stream is given from now on come after all that the other one holds."""
        self.library.double_stream_wait(stream, other)

    def stream_block(self, stream: int) -> None:
        self.library.double_stream_block(stream)

    def stream_unblock(self, stream: int) -> None:
        self.library.double_stream_unblock(stream)

    def stream_synchronize(self, stream: int) -> None:
        self.library.double_stream_synchronize(stream)

    def synchronize(self) -> None:
        """Wait until all streams have done what they have."""
        self.library.double_synchronize()

    @contextmanager
    def blocked(self, stream: int) -> Iterator[None]:
        """Keep the stream from starting anything inside the block."""
        self.stream_block(stream)
        try:
            yield
        finally:
            self.stream_unblock(stream)

    @contextmanager
    def captured(self, stream: int) -> Iterator[None]:
        """Let the stream be captured into a graph by this thread inside the block."""
        self.library.double_capture(stream, 1)
        try:
            yield
        finally:
            self.library.double_capture(stream, 0)

    def hold_copies(self, allowed_count: int = 0) -> None:
        """Let so many more copies start, and hold the rest; -1: hold none."""
        self.library.double_hold_copies(allowed_count)

    @contextmanager
    def held_copies(self, allowed_count: int = 0) -> Iterator[None]:
        """Hold all copies but the first few inside the block."""
        self.hold_copies(allowed_count)
        try:
            yield
        finally:
            self.hold_copies(-1)

    @contextmanager
    def held_registrations(self) -> Iterator[None]:
        """Let no registration of host memory return inside the block."""
        self.library.double_hold_registrations(1)
        try:
            yield
        finally:
            self.library.double_hold_registrations(0)

    def wait_for_calls(self, call: str, count: int) -> None:
        """Wait until the call has been made so often."""
        if not self.library.double_wait_for_calls(self._name(call), count, WAIT_MS):
            raise DoubleError(f"{call}: {self.call_count(call)} calls after {WAIT_MS} ms, not {count}")

    def wait_for_queued_copies(self, count: int) -> None:
        """Wait until so many copies are queued at once."""
        if not self.library.double_wait_for_queued_copies(count, WAIT_MS):
            raise DoubleError(f"{self.queued_copy_count} copies are queued after {WAIT_MS} ms, not {count}")

    # what happened

    def call_count(self, call: str = "") -> int:
        """Return how often the call was made, failures included; without a name: how many calls were made."""
        return int(self.library.double_call_count(self._name(call) if call else b""))

    @property
    def violations(self) -> list[str]:
        """What was done that CUDA forbids, in words."""
        texts = (self.library.double_violation(i) for i in range(self.library.double_violation_count()))
        return [text.decode() for text in texts if text is not None]

    @property
    def queued_copy_count(self) -> int:
        return int(self.library.double_queued_copy_count())

    @property
    def peak_queued_copy_count(self) -> int:
        return int(self.library.double_peak_queued_copy_count())

    @property
    def pageable_copy_count(self) -> int:
        """How many copies had host memory that was not registered."""
        return int(self.library.double_pageable_copy_count())

    @property
    def copied_to_host_bytes(self) -> int:
        return int(self.library.double_copied_to_host_bytes())

    @property
    def copied_to_device_bytes(self) -> int:
        return int(self.library.double_copied_to_device_bytes())

    @property
    def registration_count(self) -> int:
        return int(self.library.double_registration_count())

    @property
    def registered_bytes(self) -> int:
        return int(self.library.double_registered_bytes())

    @property
    def stream_count(self) -> int:
        return int(self.library.double_stream_count())

    @property
    def event_count(self) -> int:
        return int(self.library.double_event_count())

    @property
    def allocation_count(self) -> int:
        return int(self.library.double_allocation_count())

    @property
    def context_depth(self) -> int:
        """How many contexts are on this thread's stack."""
        return int(self.library.double_context_depth())

    def _name(self, call: str) -> bytes:
        if not self.library.double_has_call(call.encode()):
            raise DoubleError(f"the double has no call named {call}")
        return call.encode()


@functools.cache
def cuda_double() -> CudaDouble:
    """Return the double of this process, loaded by the first call; skips the test where it cannot be had."""
    # Also, this makes a torch with CUDA decide that it has no device: it would look for one in the double.
    if torch.cuda.is_available():
        pytest.skip("torch uses a real CUDA driver in this process, which the double would be taken for")
    library = ctypes.CDLL(str(build_double()), mode=ctypes.RTLD_GLOBAL)
    if ctypes.CDLL(SONAME)._handle != library._handle:
        pytest.skip("a real CUDA driver is loaded in this process already, and found before the double")
    double = CudaDouble(library)
    double.reset()
    return double


@contextmanager
def checked_double() -> Iterator[CudaDouble]:
    """Give the double to a test, as if new; raise DoubleError when the test leaves violations. For fixtures."""
    double = cuda_double()
    double.clear()
    try:
        yield double
        double.hold_copies(-1)
        if violations := double.violations:
            raise DoubleError("CUDA was misused: " + "; ".join(violations))
    finally:
        double.clear()


# --- torch's storages in its memory ---


def cuda_storage(data: bytes | torch.Tensor, device: int = 0) -> torch.UntypedStorage:
    """Return a storage on "cuda:<device>" that holds the bytes, in memory that lives as long as it does.

    A torch without CUDA cannot view it as a tensor, but saves it within an object, and knows its address.

    Args:
        data: The bytes, or a tensor on the CPU whose bytes to take.
        device: The ordinal of the device.
    """
    if isinstance(data, torch.Tensor):
        data = data.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    double = cuda_double()
    address = double.alloc(max(len(data), 1), device)
    double.write(address, data)
    storage: Any = torch._C._construct_storage_from_data_pointer(address, torch.device("cuda", device), len(data))
    weakref.finalize(storage, double.free, address).atexit = False
    return cast(torch.UntypedStorage, storage)


def read_storage(storage: torch.UntypedStorage) -> bytes:
    """Return what the device memory of a storage holds now; no stream is waited for."""
    return cuda_double().read(storage.data_ptr(), storage.nbytes())
