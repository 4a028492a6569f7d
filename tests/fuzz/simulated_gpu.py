"""What a training has on its devices, over the double of the driver: memory, streams, tensors, and what is in them.

The allocator behaves as torch's: what is freed is given out again at once, in the order of the stream, which here means
that other bytes come there as soon as that stream gets to it. So whoever reads memory that nobody keeps finds nonsense.
"""

from __future__ import annotations

import ctypes
import math
import random
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from support.cuda_double import CudaDouble, read_storage

GRANULE_BYTES = 512
SMALL_BYTES = 1 << 20
SEGMENT_BYTES = 2 << 20
NOISE_BYTES = 4 << 20
POISON = 0xEE

Contents = dict[str, bytes]
"""What the tensors of a state hold, by name."""

DTYPES = {  # code and bits of DLPack
    torch.float32: (2, 32),
    torch.bfloat16: (4, 16),
    torch.float16: (2, 16),
    torch.float64: (2, 64),
    torch.uint8: (1, 8),
    torch.int8: (0, 8),
    torch.int16: (0, 16),
    torch.int32: (0, 32),
    torch.int64: (0, 64),
    torch.complex64: (5, 64),
    torch.complex128: (5, 128),
    torch.bool: (6, 8),
}


class _Device(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int), ("ordinal", ctypes.c_int))


class _DType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int),
        ("dtype", _DType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", _DLTensor), ("context", ctypes.c_void_p), ("deleter", _Deleter))


_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.restype = ctypes.py_object
_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_KIND_CUDA = 2
_alive: dict[int, tuple[Any, ...]] = {}  # what DLPack points to, until torch lets it go


def tensor_at(
    address: int, ordinal: int, dtype: torch.dtype, shape: tuple[int, ...], when_freed: Callable[[], None]
) -> torch.Tensor:
    """Return a tensor on "cuda:<ordinal>" over memory there. A torch without CUDA takes one from DLPack only."""
    managed = _Managed()
    key = ctypes.addressof(managed)

    def delete(_address: int) -> None:
        when_freed()
        _alive.pop(key, None)

    sizes = (ctypes.c_int64 * max(1, len(shape)))(*shape)
    steps = (ctypes.c_int64 * max(1, len(shape)))(*(math.prod(shape[axis + 1 :]) for axis in range(len(shape))))
    deleter = _Deleter(delete)
    code, bits = DTYPES[dtype]
    managed.tensor = _DLTensor(
        address, _Device(_KIND_CUDA, ordinal), len(shape), _DType(code, bits, 1), sizes, steps, 0
    )
    managed.deleter = deleter
    _alive[key] = (managed, sizes, steps, deleter)
    tensor: torch.Tensor = torch._C._from_dlpack(_capsule(key, b"dltensor", None))  # type: ignore[attr-defined]
    return tensor


_library = torch.library.Library("aten", "IMPL")


def teach_views() -> None:
    """Let a torch without CUDA view tensors there under another shape; the storage is one of its own."""

    def view(tensor: torch.Tensor, size: list[int]) -> torch.Tensor:
        known = -math.prod(size) if -1 in size else 1
        shape = tuple(tensor.numel() // max(known, 1) if length == -1 else length for length in size)
        kept = [tensor]  # as long as the view lives
        return tensor_at(tensor.data_ptr(), tensor.device.index, tensor.dtype, shape, kept.clear)

    _library.impl("view", view, "CUDA")


class Streams(threading.local):
    """The current streams of a thread, by device."""

    def __init__(self) -> None:
        self.current: dict[int, int] = {}


class Gpus:
    """The devices of a process, as a training sees them. Thread-safe."""

    def __init__(self, cuda: CudaDouble, count: int, rng: random.Random) -> None:
        self.cuda = cuda
        self.count = count
        self._streams = Streams()
        self.stream_count = 0
        self._lock = threading.RLock()
        self._free: dict[int, list[tuple[int, int]]] = {ordinal: [] for ordinal in range(count)}
        self._returned: deque[tuple[int, int, int]] = deque()  # appended to by whoever drops a tensor, on any thread
        self._live: set[tuple[int, int]] = set()
        self.noise = rng.randbytes(NOISE_BYTES)
        self._noise_at = [cuda.alloc(NOISE_BYTES, ordinal) for ordinal in range(count)]
        for address in self._noise_at:
            cuda.write(address, self.noise)

    # --- streams

    def stream(self, ordinal: int = 0) -> int:
        """Return the calling thread's current stream of a device."""
        current = self._streams.current
        if ordinal not in current:
            current[ordinal] = self.new_stream(ordinal)
        return current[ordinal]

    def new_stream(self, ordinal: int) -> int:
        with self._lock:
            self.stream_count += 1
        return self.cuda.stream_new(ordinal)

    def switch_stream(self, ordinal: int) -> None:
        """Make another stream the current one, behind what the one before holds."""
        fresh = self.new_stream(ordinal)
        self.cuda.stream_wait(fresh, self.stream(ordinal))
        self._streams.current[ordinal] = fresh

    # --- memory

    def live_count(self) -> int:
        """Return how many blocks are given out."""
        self._take_back()
        return len(self._live)

    def alloc(self, ordinal: int, size_bytes: int) -> tuple[int, Callable[[], None]]:
        """Return the address of memory for the calling thread's current stream, and what frees it."""
        size_bytes = max(1, -(-size_bytes // GRANULE_BYTES)) * GRANULE_BYTES
        stream = self.stream(ordinal)
        with self._lock:
            self._take_back()
            free = self._free[ordinal]
            found = next((index for index, (_, room) in enumerate(free) if room >= size_bytes), None)
            if found is None:
                room = SEGMENT_BYTES if size_bytes <= SMALL_BYTES else size_bytes
                free.append((self.cuda.alloc(room, ordinal), room))
                found = len(free) - 1
            address, room = free[found]
            if room == size_bytes:
                del free[found]
            else:
                free[found] = (address + size_bytes, room - size_bytes)
            self._live.add((address, size_bytes))

        def free_it() -> None:
            # Whoever gets it next has it behind what this stream holds, and does this there.
            self.cuda.stream_add_work(stream, 0, address, POISON, size_bytes)
            self._returned.append((ordinal, address, size_bytes))

        return address, free_it

    def _take_back(self) -> None:
        with self._lock:
            while self._returned:
                ordinal, address, size_bytes = self._returned.popleft()
                self._live.discard((address, size_bytes))
                self._free[ordinal].append((address, size_bytes))

    def storage(self, ordinal: int, size_bytes: int) -> torch.UntypedStorage:
        address, free = self.alloc(ordinal, size_bytes)
        device = torch.device("cuda", ordinal)
        storage: Any = torch._C._construct_storage_from_data_pointer(address, device, size_bytes)
        weakref.finalize(storage, free).atexit = False
        return storage  # type: ignore[no-any-return]

    def tensor(self, ordinal: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        address, free = self.alloc(ordinal, math.prod(shape) * dtype.itemsize)
        return tensor_at(address, ordinal, dtype, shape, free)

    # --- kernels

    def fill(self, ordinal: int, address: int, size_bytes: int, rng: random.Random, stream: int = 0) -> bytes:
        """Give the current stream, or another, work that changes every byte; return what will be there."""
        if not size_bytes:
            return b""
        stream = stream or self.stream(ordinal)
        us = rng.choice([0, 0, 0, 50, 300])
        if size_bytes > NOISE_BYTES or rng.random() < 0.1:
            value = rng.randrange(256)
            self.cuda.stream_add_work(stream, us, address, value, size_bytes)
            return bytes([value]) * size_bytes
        start = rng.randrange(NOISE_BYTES - size_bytes + 1)
        self.cuda.stream_add_copy(stream, address, self._noise_at[ordinal] + start, size_bytes, us)
        return self.noise[start : start + size_bytes]


class Entry:
    """A tensor or storage of a state, and what it holds where its stream has come to now."""

    def __init__(self, value: Any, ordinal: int | None) -> None:
        self.value = value
        self.ordinal = ordinal
        self.contents = b""
        self.changed_at = 0  # of the training's count of events
        self.saved_at = 0

    @property
    def storage(self) -> torch.UntypedStorage:
        value = self.value
        return value.untyped_storage() if isinstance(value, torch.Tensor) else value  # type: ignore[no-any-return]

    def change(self, gpus: Gpus, rng: random.Random, stream: int = 0, now: int = 1) -> None:
        self.changed_at = now
        storage = self.storage
        size_bytes = storage.nbytes()
        if self.ordinal is not None:
            self.contents = gpus.fill(self.ordinal, storage.data_ptr(), size_bytes, rng, stream)
            if isinstance(self.value, torch.Tensor):
                torch.autograd.graph.increment_version(self.value)
            return
        self.contents = rng.randbytes(size_bytes)
        if size_bytes:
            flat = torch.empty(0, dtype=torch.uint8).set_(storage)
            flat.copy_(torch.frombuffer(bytearray(self.contents), dtype=torch.uint8))
            if isinstance(self.value, torch.Tensor):
                torch.autograd.graph.increment_version(self.value)


def contents_of(value: Any) -> bytes:
    """Return the bytes of a loaded tensor's or storage's memory, wherever it is."""
    if isinstance(value, torch.storage.TypedStorage):
        value = value._untyped_storage
    elif isinstance(value, torch.Tensor):
        value = value.untyped_storage()
    if value.device.type == "cuda":
        return read_storage(value)
    return torch.empty(0, dtype=torch.uint8).set_(value).numpy().tobytes()


def differences(found: Contents, wanted: Contents) -> str:
    names = [name for name in wanted if found.get(name) != wanted[name]]
    texts = []
    for name in names[:4]:
        got, due = found.get(name), wanted[name]
        if got is None or len(got) != len(due):
            texts.append(f"{name}: {None if got is None else len(got)} bytes, not {len(due)}")
            continue
        places = [index for index, (a, b) in enumerate(zip(got, due, strict=True)) if a != b]
        texts.append(
            f"{name}: {len(places)} of {len(due)} bytes are others, from {places[0]} to {places[-1]}: "
            f"{got[places[0] : places[0] + 8].hex()} for {due[places[0] : places[0] + 8].hex()}"
        )
    return f"{len(names)} of {len(wanted)} differ: " + "; ".join(texts) + f"; more: {sorted(set(found) - set(wanted))}"
