"""DeepNVMe's handles and builders, with its arguments and results.

`operations` keeps the operations under way and their open files.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import sys
import weakref
from types import ModuleType
from typing import Any, TypeAlias, overload

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from fastpersist import ConfigError, StorageError, UnsupportedError, locked_tensor

from .operations import Operations, Options

__all__ = ["AsyncIOBuilder", "GDSBuilder", "aio_handle", "gds_handle"]

_log = logging.getLogger("fastpersist")

Filename: TypeAlias = "str | bytes | os.PathLike[str] | os.PathLike[bytes]"

_ALIGNMENT_BYTES = 4096
_CHUNK_BYTES_MAX = 1 << 30
_QUEUE_DEPTH_MAX = 4096
_THREADS_MAX = 256

# ------------------------------------------------------------------------------------------- known tensors


class _KnownTensors:
    """Registered tensors, for as long as they live. Thread-safe: single dictionary operations."""

    def __init__(self) -> None:
        self._storages: dict[int, tuple[int, StorageWeakRef]] = {}

    def add(self, tensor: torch.Tensor) -> None:
        if tensor.numel():
            storage = tensor.untyped_storage()
            self._storages[storage.data_ptr()] = (storage.nbytes(), StorageWeakRef(storage))

    def remove(self, tensor: torch.Tensor) -> bool:
        """Forget the tensor that begins at the same address; return whether it was known."""
        known = tensor.numel() > 0 and self.has(tensor)
        return known and self._storages.pop(tensor.data_ptr(), None) is not None

    def has(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor lies inside a known one."""
        for address, (_, storage) in list(self._storages.items()):
            if storage.expired():
                self._storages.pop(address, None)
        start = tensor.data_ptr()
        known = list(self._storages.items())
        return any(first <= start and start + tensor.nbytes <= first + size for first, (size, _) in known)


_locked_tensors = _KnownTensors()  # of all handles: one may free the tensors of another
_device_tensors = _KnownTensors()


# ------------------------------------------------------------------------------------------------- handles


class aio_handle:
    """Reads and writes tensors from and to files, as DeepNVMe's `aio_handle` does.

    Each call looks the file up by its name, so it never uses a replaced file. The file that was read last stays open
    until another is read, or the handle is deleted. Writing creates a missing file, and changes only the written bytes.
    Asynchronous operations are done when `wait` has returned; until then do not change their buffers; you may drop
    them. Synchronous operations do not affect those under way, and return 1.

    Args:
        block_size: Bytes of one request to the kernel, rounded down to a power of two from 4 KiB to 1 GiB.
        queue_depth: Requests to the kernel at once; at most 4096.
        single_submit: Has no effect: requests are submitted together where the kernel can.
        overlap_events: Has no effect: they always overlap.
        intra_op_parallelism: If more than 1, the number of threads, for engines that use threads.

    Raises:
        ConfigError: Here, numbers below 1. In all methods, at once: a buffer that is no contiguous tensor, or a
            negative offset.
        StorageError: In all methods: an error of the kernel. `wait` raises it for asynchronous operations.
        EndOfFileError: In reading methods: the file ends before the buffer is full. Likewise.
        CorruptionError: With validate=True: read again, the file has other bytes than the buffer. Likewise.

    Thread safety: any thread; any thread may wait for the handle's operations. A forked child may use the handle too,
    without the operations under way.
    """

    def __init__(
        self,
        block_size: int = 1 << 20,
        queue_depth: int = 128,
        single_submit: bool = False,
        overlap_events: bool = False,
        intra_op_parallelism: int = 1,
    ) -> None:
        self._block_size = _positive("block_size", block_size)
        self._queue_depth = _positive("queue_depth", queue_depth)
        self._single_submit = bool(single_submit)
        self._overlap_events = bool(overlap_events)
        self._intra_op_parallelism = _positive("intra_op_parallelism", intra_op_parallelism)
        chunk_bytes = 1 << (min(max(self._block_size, _ALIGNMENT_BYTES), _CHUNK_BYTES_MAX).bit_length() - 1)
        threads = min(self._intra_op_parallelism, _THREADS_MAX) if self._intra_op_parallelism > 1 else None
        self._operations = Operations(Options(chunk_bytes, min(self._queue_depth, _QUEUE_DEPTH_MAX), threads))
        weakref.finalize(self, self._operations.close)

    # --- options

    def get_block_size(self) -> int:
        """Return block_size as it was given."""
        return self._block_size

    def get_queue_depth(self) -> int:
        """Return queue_depth as it was given."""
        return self._queue_depth

    def get_single_submit(self) -> bool:
        """Return single_submit as it was given."""
        return self._single_submit

    def get_overlap_events(self) -> bool:
        """Return overlap_events as it was given."""
        return self._overlap_events

    def get_intra_op_parallelism(self) -> int:
        """Return intra_op_parallelism as it was given."""
        return self._intra_op_parallelism

    def get_alignment(self) -> int:
        """Return 4096: multiples of it, in size, offset and address, move without a copy. Other values work too."""
        return _ALIGNMENT_BYTES

    # --- reading and writing

    def read(self, buffer: torch.Tensor, filename: Filename, validate: bool, file_offset: int = 0) -> int:
        """Fill a tensor from a file; return 0. The file may be longer than the tensor."""
        self._run(False, buffer, _path_of(filename), file_offset, validate=validate)
        return 0

    def write(self, buffer: torch.Tensor, filename: Filename, validate: bool, file_offset: int = 0) -> int:
        """Write a tensor to a file; return 0."""
        self._run(True, buffer, _path_of(filename), file_offset, validate=validate)
        return 0

    def pread(
        self,
        buffer: torch.Tensor,
        filename: Filename,
        validate: bool,
        is_async: bool | None = None,
        file_offset: int = 0,
        **keywords: bool,
    ) -> int:
        """Fill a tensor from a file: now, and return 1, or asynchronously, and return 0.

        Args:
            buffer: A contiguous tensor.
            filename: The path of the file.
            validate: Read again, and compare; for asynchronous operations, during `wait`.
            is_async: Read asynchronously; also accepted as **{"async": …}.
            file_offset: The offset from the start of the file, in bytes.
            keywords: Only "async" is accepted.
        """
        run = self._start if _asked_async(is_async, keywords) else self._run
        return run(False, buffer, _path_of(filename), file_offset, validate=validate)

    def pwrite(
        self,
        buffer: torch.Tensor,
        filename: Filename,
        validate: bool,
        is_async: bool | None = None,
        file_offset: int = 0,
        **keywords: bool,
    ) -> int:
        """Write a tensor to a file: now, and return 1, or asynchronously, and return 0. Arguments: see `pread`."""
        run = self._start if _asked_async(is_async, keywords) else self._run
        return run(True, buffer, _path_of(filename), file_offset, validate=validate)

    def sync_pread(self, buffer: torch.Tensor, filename: Filename, file_offset: int = 0) -> int:
        """Fill a tensor from a file; return 1."""
        return self._run(False, buffer, _path_of(filename), file_offset)

    def sync_pwrite(self, buffer: torch.Tensor, filename: Filename, file_offset: int = 0) -> int:
        """Write a tensor to a file; return 1."""
        return self._run(True, buffer, _path_of(filename), file_offset)

    def async_pread(self, buffer: torch.Tensor, filename: Filename, file_offset: int = 0) -> int:
        """Begin to fill a tensor from a file; return 0. The tensor's content is undefined until `wait`."""
        return self._start(False, buffer, _path_of(filename), file_offset)

    @overload
    def async_pwrite(self, buffer: torch.Tensor, filename: Filename, file_offset: int = 0) -> int: ...
    @overload
    def async_pwrite(self, buffer: torch.Tensor, fd: int, file_offset: int = 0) -> int: ...

    def async_pwrite(self, *arguments: Any, **keywords: Any) -> int:
        """Begin to write a tensor to a file, given by name or as a descriptor that is open for writing; return 0.

        The caller may close the descriptor at once; its file position is neither used nor changed.
        """
        if "fd" in keywords:
            keywords["place"] = keywords.pop("fd")
        elif "filename" in keywords:
            keywords["place"] = keywords.pop("filename")
        return self._start_writing(*arguments, **keywords)

    def _start_writing(self, buffer: torch.Tensor, place: Filename | int, file_offset: int = 0) -> int:
        path = _path_of_descriptor(place) if isinstance(place, int) else _path_of(place)
        return self._start(True, buffer, path, file_offset)

    def wait(self) -> int:
        """Wait for all asynchronous operations; return how many were done since the last call.

        If some failed, raise the first error when all are done; the others are logged.
        """
        return self._operations.wait()

    def _run(self, write: bool, buffer: torch.Tensor, path: str, offset_bytes: int, *, validate: bool = False) -> int:
        return self._operations.run(write, buffer, path, offset_bytes, validate=validate)

    def _start(self, write: bool, buffer: torch.Tensor, path: str, offset_bytes: int, *, validate: bool = False) -> int:
        return self._operations.start(write, buffer, path, offset_bytes, validate=validate)

    # --- memory

    def new_cpu_locked_tensor(
        self,
        num_elem: int,
        example_tensor: torch.Tensor | None = None,
        *,
        example_tenosr: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Make a page-locked host tensor of shape [num_elem]; see `fastpersist.locked_tensor`.

        Args:
            num_elem: Number of elements.
            example_tensor: The new tensor gets its dtype.
            example_tenosr: The same, under DeepNVMe's name.
        """
        tensor = locked_tensor(num_elem, _example(example_tensor, example_tenosr).dtype)
        _locked_tensors.add(tensor)
        return tensor

    def free_cpu_locked_tensor(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is from `new_cpu_locked_tensor`, and was not freed before.

        Its memory is freed with the last reference to it, so this call is optional, and the tensor stays usable.
        """
        return _locked_tensors.remove(tensor)

    def is_pinned(self, buffer: torch.Tensor) -> bool:
        """Return whether a tensor is pinned, or lies in one from `new_cpu_locked_tensor`."""
        return buffer.is_pinned() or _locked_tensors.has(buffer)


class gds_handle(aio_handle):
    """`aio_handle` with the methods for device tensors, as DeepNVMe's `gds_handle`.

    This class does not use GPUDirect: `TensorFile` copies device tensors through host memory of their size, with every
    engine, and logs that once. So pinning device memory only registers the tensor. (`fastpersist.save` and `load`
    bypass host memory with engine="cufile" and without checksums.)

    Args, Raises, Thread safety: as `aio_handle`.
    """

    def new_pinned_device_tensor(
        self,
        num_elem: int,
        example_tensor: torch.Tensor | None = None,
        *,
        example_tenosr: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Make a CUDA tensor of shape [num_elem], on the device of the example if that is on one.

        Raises:
            UnsupportedError: There is no CUDA.
        """
        example = _example(example_tensor, example_tenosr)
        _require_cuda("new_pinned_device_tensor")
        device = example.device if example.is_cuda else "cuda"
        tensor = torch.empty(num_elem, dtype=example.dtype, device=device)
        _device_tensors.add(tensor)
        return tensor

    def free_pinned_device_tensor(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is from `new_pinned_device_tensor`, and was not freed before. torch frees it."""
        return _device_tensors.remove(tensor)

    def pin_device_tensor(self, tensor: torch.Tensor) -> bool:
        """Register a CUDA tensor as pinned; return True.

        Raises:
            UnsupportedError: There is no CUDA.
            ConfigError: The tensor is on no CUDA device.
        """
        _require_cuda("pin_device_tensor")
        if not tensor.is_cuda:
            raise ConfigError(f"pin_device_tensor: a CUDA tensor is needed, not one on {tensor.device}")
        _device_tensors.add(tensor)
        return True

    def unpin_device_tensor(self, tensor: torch.Tensor) -> bool:
        """Unregister a tensor of `pin_device_tensor`; return whether it was registered."""
        return _device_tensors.remove(tensor)

    def is_pinned(self, buffer: torch.Tensor) -> bool:
        """Return whether a tensor is pinned as for `aio_handle`, or lies in a registered device tensor."""
        return super().is_pinned(buffer) or _device_tensors.has(buffer)

    def _run(self, write: bool, buffer: torch.Tensor, path: str, offset_bytes: int, *, validate: bool = False) -> int:
        _note_device(buffer)
        return super()._run(write, buffer, path, offset_bytes, validate=validate)

    def _start(self, write: bool, buffer: torch.Tensor, path: str, offset_bytes: int, *, validate: bool = False) -> int:
        _note_device(buffer)
        return super()._start(write, buffer, path, offset_bytes, validate=validate)


_device_noted = False


def _note_device(buffer: object) -> None:
    global _device_noted
    if not _device_noted and isinstance(buffer, torch.Tensor) and buffer.device.type != "cpu":
        _device_noted = True
        _log.warning("GPUDirect is not in use here: tensors on %s go through host memory", buffer.device.type)


def _require_cuda(method: str) -> None:
    if not torch.cuda.is_available():
        raise UnsupportedError(f"{method}: there is no CUDA device here; tensors in host memory need no pinning")


# ----------------------------------------------------------------------------------------------- arguments


def _positive(name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} is {value!r}; it must be a whole number, 1 or more")
    return value


def _path_of(filename: Filename) -> str:
    try:
        return os.fsdecode(filename)
    except TypeError:
        raise ConfigError(f"filename is {filename!r}; it must be a path") from None


def _path_of_descriptor(fd: int) -> str:
    """Return a path that opens the file of a descriptor independently."""
    if fd < 0:
        raise StorageError(errno.EBADF, f"writing to descriptor {fd}: {os.strerror(errno.EBADF)}")
    try:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise ConfigError(f"descriptor {fd} is open for reading only; async_pwrite needs one to write to")
        return f"/proc/self/fd/{fd}"
    except OSError as error:
        raise StorageError(error.errno, f"writing to descriptor {fd}: {error.strerror}") from error


def _example(first: torch.Tensor | None, second: torch.Tensor | None) -> torch.Tensor:
    examples = [example for example in (first, second) if example is not None]
    if len(examples) != 1 or not isinstance(examples[0], torch.Tensor):
        raise ConfigError("the second argument must be one tensor: the new tensor gets its dtype")
    return examples[0]


def _asked_async(is_async: bool | None, keywords: dict[str, bool]) -> bool:
    """Return the argument that DeepNVMe calls `async`, a reserved word in Python."""
    asked = keywords.pop("async", is_async)
    if keywords or asked is None:
        raise TypeError(f"there is no argument {next(iter(keywords))!r}" if keywords else "argument `async` is missing")
    return bool(asked)


# ------------------------------------------------------------------------------------------------ builders


class AsyncIOBuilder:
    """Replaces DeepSpeed's builder for asynchronous I/O: `AsyncIOBuilder().load().aio_handle(…)`."""

    NAME = "async_io"

    def load(self, verbose: bool = True) -> ModuleType:
        """Return the module with the handles; nothing is compiled."""
        return sys.modules[__name__.rpartition(".")[0]]

    def is_compatible(self, verbose: bool = False) -> bool:
        """Return True: the handles work wherever fastpersist does."""
        return True


class GDSBuilder(AsyncIOBuilder):
    """Replaces DeepSpeed's builder for GPUDirect I/O: `GDSBuilder().load().gds_handle(…)`."""

    NAME = "gds"
