"""Requests of a `TensorFile`: checks the caller's tensors and offsets, and has the object that the caller waits for.

`looked_at` turns tensors and offsets into addresses, fast enough for ten thousand rows in one call. `tensor_memory`
decides whether the bytes of a tensor can be reached at all. A `PendingIO` is a request under way: the native side keeps
its tensors alive until it is done, even if no caller waits. `tensor_file` has files, engines and queues.
"""

from __future__ import annotations

import itertools
import operator
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import torch

from fastpersist import _native
from fastpersist.errors import ConfigError, EndOfFileError, FastPersistError
from fastpersist.transfer.cuda import ordinal_of
from fastpersist.transfer.tensor_memory import PLAIN_TYPES, byte_view

__all__ = [
    "SLICE_COUNT",
    "Item",
    "Part",
    "Parts",
    "PendingIO",
    "Slice",
    "checked_number",
    "checked_offset",
    "failure_of",
    "in_slices",
    "looked_at",
]

SLICE_COUNT = 1024
"""Items of a list that is read are submitted so many at a time, while the next ones are checked."""

Item: TypeAlias = "tuple[torch.Tensor, int]"
"""A tensor and where its bytes are in the file."""

Part: TypeAlias = "tuple[int, int, int]"
"""Address, bytes, offset in the file."""

Slice: TypeAlias = "Sequence[Part] | tuple[int, Sequence[Part]]"
"""Parts in host memory (in no tuple), or a tuple: the ordinal of a CUDA device, and parts in its memory."""


class Parts(NamedTuple):
    """Some items, sorted by who moves their bytes.

    Attributes:
        tensors: All tensors, in order.
        in_host_memory: Parts that the native side moves directly.
        on_devices: Parts by the ordinal of their CUDA device, which the native side copies to and from.
        elsewhere: Items on other devices, which torch copies.
    """

    tensors: list[torch.Tensor]
    in_host_memory: list[Part]
    on_devices: dict[int, list[Part]]
    elsewhere: list[Item]


def checked_number(name: str, value: int | None, low: int, high: int) -> int | None:
    """Return an option that may be left out.

    Raises:
        ConfigError: The value is no whole number from low to high.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"{name} is {value!r}; it must be a whole number from {low} to {high}")
    return value


def checked_offset(value: int, what: str) -> int:
    """Return a number of bytes as an int.

    Raises:
        ConfigError: The value is no number of bytes; `what` names it.
    """
    try:
        number = operator.index(value)
    except TypeError:
        raise ConfigError(f"{what} is {value!r}; it must be a whole number of bytes") from None
    if not 0 <= number < 1 << 63:
        raise ConfigError(f"{what} is {number}; it must be a number of bytes from 0 to 2**63 - 1")
    return number


def in_slices(items: Iterable[Item]) -> Iterator[list[Item]]:
    """Yield `SLICE_COUNT` items at a time."""
    try:
        rest = iter(items)
    except TypeError:
        raise ConfigError(f"items is {items!r}; it must be a list of pairs of a tensor and an offset") from None
    while some := list(itertools.islice(rest, SLICE_COUNT)):
        yield some


def looked_at(items: Sequence[Item], before_count: int) -> Parts:
    """Check items of a request, and sort them; `before_count` items of it came before."""
    found = Parts([], [], {}, [])
    tensors, parts = found.tensors, found.in_host_memory
    for item in items:
        try:
            if isinstance(item, torch.Tensor):  # a tensor could be unpacked, too
                raise TypeError
            tensor, offset_bytes = item
        except (TypeError, ValueError):
            raise ConfigError(
                f"item {before_count + len(tensors)} is {item!r}; it must be a tensor and an offset"
            ) from None
        if type(offset_bytes) is not int or not 0 <= offset_bytes < 1 << 63:
            offset_bytes = checked_offset(offset_bytes, "the offset")
        view = tensor if _is_plain(tensor) else byte_view(tensor)
        size_bytes = view.nbytes
        if size_bytes > (1 << 63) - 1 - offset_bytes:
            raise ConfigError(f"{size_bytes} bytes at offset {offset_bytes} end beyond the largest possible file")
        tensors.append(tensor)
        if view.is_cpu:
            parts.append((view.data_ptr(), size_bytes, offset_bytes))
        elif (ordinal := ordinal_of(view.untyped_storage())) is not None:
            found.on_devices.setdefault(ordinal, []).append((view.data_ptr(), size_bytes, offset_bytes))
        else:
            found.elsewhere.append((tensor, offset_bytes))
    return found


def _is_plain(tensor: torch.Tensor) -> bool:
    """Tell whether byte_view would surely take a tensor, in less than a microsecond; byte_view takes ten times that."""
    if type(tensor) not in PLAIN_TYPES:
        return False
    try:
        return (
            (tensor.is_cpu or tensor.is_cuda)
            and tensor.dtype in _PLAIN_DTYPES
            and tensor.layout is torch.strided
            and not tensor.is_nested
            and tensor.is_contiguous()
            and not tensor.is_conj()
            and not tensor.is_neg()
            and tensor.data_ptr() != 0
            and tensor.untyped_storage().nbytes() >= tensor.storage_offset() * tensor.itemsize + tensor.nbytes
        )
    except (RuntimeError, NotImplementedError):  # such as inside a transformation of torch.func
        return False


_PLAIN_DTYPES = frozenset(
    {
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float64,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.complex64,
        torch.complex128,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.bool,
    }
)


class PendingIO:
    """Reads or writes under way. `TensorFile.read_async` and the like make it.

    Until it is done, the tensors of a read hold anything, and those of a write must not be changed. The tensors are
    kept alive until then, even if this object is not. A read into a tensor of a device that is neither the CPU nor CUDA
    is done when one of the methods here has said so: these make its last step, the copy to the device.

    Thread safety: any thread, but not in a forked child.
    """

    def __init__(self, request: _native.FileRequest, path: str, then: Callable[[], None] | None) -> None:
        self._request = request
        self._path = path
        self._then = then
        self._process_id = os.getpid()
        self._lock = threading.Lock()

    def done(self) -> bool:
        """Tell whether it is done, with or without an error."""
        self._refuse_child()
        if not self._request.done():
            return False
        self._settle()
        return True

    def wait(self, timeout: float | None = None) -> None:
        """Return when it is done.

        Args:
            timeout: The most seconds to wait; None waits without limit.

        Raises:
            TimeoutError: It is still under way; nothing is lost.
            EndOfFileError: A read reached beyond the end of the file; the bytes before its end were read.
            StorageError: The kernel reports an error. Of several failures in one request, the first that was met.
            DeviceError: The driver of a CUDA device reports an error.
        """
        error = self.exception(timeout)
        if error is not None:
            raise error

    def result(self, timeout: float | None = None) -> int:
        """Wait as `wait` does, and return how many bytes were moved."""
        self.wait(timeout)
        return self._request.done_bytes

    def exception(self, timeout: float | None = None) -> FastPersistError | None:
        """Wait until it is done, and return its error, or None. Counts as delivery.

        Raises:
            TimeoutError: The request is still under way.
        """
        self._refuse_child()
        if not self._request.wait(timeout):
            raise TimeoutError(f"a request of {self._path} is still under way after {timeout} s")
        self._settle()
        return failure_of(self._request, self._path)

    def _settle(self) -> None:
        """Make the last step of a request whose bytes have arrived, once, and release the tensors."""
        with self._lock:
            # Nothing of a failed read is copied on: its buffer holds anything. If the step fails here, the next caller
            # of a method repeats it.
            if self._then is not None and self._request.failed_count == 0:
                self._then()
            self._then = None
            self._request.let_go()

    def _refuse_child(self) -> None:
        if os.getpid() != self._process_id:
            raise ConfigError(f"this request of {self._path} belongs to the process that forked this one; wait there")


def failure_of(request: _native.FileRequest, path: str) -> FastPersistError | None:
    """Return the error of a request that is done, or None. Counts as delivery."""
    try:
        request.raise_failure()
    except FastPersistError as error:
        ended = request.ended_early
        if ended is None:
            return error
        offset_bytes, done_bytes, asked_bytes = ended
        message = f"read {done_bytes} of {asked_bytes} bytes at offset {offset_bytes} of {path}: the file ends there"
        return EndOfFileError(None, message, path, offset_bytes, done_bytes, asked_bytes)
    return None
