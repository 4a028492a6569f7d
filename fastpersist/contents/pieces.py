"""Reads the bytes of stored tensors, piece by piece: several pieces are read ahead while one is processed.

Reads are whole blocks into page-aligned memory, so a direct engine needs no second copy, wherever tensors begin; pieces
that lie close together are read at once. A tensor whose elements are not in order in the file (a transposed view, for
example) is the exception: its whole span of the storage is read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from fastpersist.config import BLOCK_BYTES
from fastpersist.contents.stored import Stored
from fastpersist.formats.layout import align_up
from fastpersist.loading.unpickle import new_storage
from fastpersist.streaming.reading import new_memory
from fastpersist.transfer.tensor_file import TensorFile
from fastpersist.transfer.tensor_memory import byte_view
from fastpersist.transfer.tensor_requests import PendingIO

__all__ = ["Piece", "read_pieces"]

_BATCH_BYTES = 4 << 20
_BUFFER_COUNT = 6
"""One is looked at, the others are being filled: 24 MiB for each source."""

_PIECE_BYTES = _BATCH_BYTES - 2 * BLOCK_BYTES
"""Of one tensor at most: a multiple of the size of every dtype's elements."""


_ROWS_BYTES = 4 * _PIECE_BYTES
"""Rows of a tensor in shards that are read at a time, or one row if that is larger."""


class Piece(NamedTuple):
    """Bytes of one tensor.

    Attributes:
        number: The index of the tensor among those that are read.
        from_bytes: The offset of the first byte, from the tensor's start, in row-major order.
        data: The bytes, as a uint8 tensor; they stay until the next batch is asked for.
    """

    number: int
    from_bytes: int
    data: torch.Tensor

    def values(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the elements, which may lie in the memory of `data`."""
        data = self.data.clone() if self.data.data_ptr() % dtype.itemsize else self.data
        return data.view(dtype)


class _Part(NamedTuple):
    number: int
    from_bytes: int
    size_bytes: int


def read_pieces(tensors: Sequence[Stored]) -> Iterator[list[Piece]]:
    """Read tensors in the order given, and yield their bytes a few MiB at a time.

    Two sequences of tensors of the same sizes are cut in the same way, so they can be read side by side.

    Args:
        tensors: Best in the order of their files.

    Yields:
        Pieces in the order of the tensors, those of each from its start to its end. Tensors without elements have none.

    Raises:
        EndOfFileError: A file was cut since it was opened.
        StorageError: An error of the disk.

    Thread safety: one thread at a time advances an iterator.
    """
    buffers = deque(new_memory(_BATCH_BYTES, torch.device("cpu")) for _ in range(_BUFFER_COUNT))
    on_the_way: deque[_Batch] = deque()
    whole = _WholeTensors(tensors)
    try:
        for parts in _cut([tensor.size_bytes for tensor in tensors]):
            if not buffers:
                batch = on_the_way.popleft()
                yield batch.pieces()
                buffers.append(batch.buffer)
            on_the_way.append(_Batch(parts, tensors, whole, buffers.popleft()))
        while on_the_way:
            yield on_the_way.popleft().pieces()
    finally:
        for batch in on_the_way:  # they are not needed any more, but the kernel still writes to their memory
            batch.wait()


def _cut(sizes_bytes: Sequence[int]) -> Iterator[list[_Part]]:
    """Divide tensors into batches that fit a buffer, whatever the offsets of the tensors are."""
    batch: list[_Part] = []
    room_bytes = _BATCH_BYTES
    for index, size_bytes in enumerate(sizes_bytes):
        for from_bytes in range(0, size_bytes, _PIECE_BYTES):
            part = _Part(index, from_bytes, min(_PIECE_BYTES, size_bytes - from_bytes))
            taken_bytes = align_up(part.size_bytes, BLOCK_BYTES) + 2 * BLOCK_BYTES
            if taken_bytes > room_bytes:
                yield batch
                batch, room_bytes = [], _BATCH_BYTES
            batch.append(part)
            room_bytes -= taken_bytes
    if batch:
        yield batch


class _WholeTensors:
    """Tensors that do not lie in order, read whole, and tensors in shards, many rows at a time; the last is kept."""

    def __init__(self, tensors: Sequence[Stored]) -> None:
        self._tensors = tensors
        self._number = -1
        self._from_bytes = 0
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def read(self, part: _Part) -> torch.Tensor:
        """Return a part of the values, row-major."""
        start_bytes = part.from_bytes - self._from_bytes
        if self._number != part.number or start_bytes + part.size_bytes > self._bytes.numel():
            self._bytes, self._from_bytes = _read_around(self._tensors[part.number], part)
            self._number = part.number
            start_bytes = part.from_bytes - self._from_bytes
        return self._bytes[start_bytes : start_bytes + part.size_bytes]


def _read_around(tensor: Stored, part: _Part) -> tuple[torch.Tensor, int]:
    """Read a tensor, or rows of it with the part in them; return the bytes, and where they begin in it."""
    if tensor.rows is None:
        return byte_view(_read_whole(tensor)).flatten(), 0
    count = tensor.shape[0] if tensor.shape else 1
    row_bytes = tensor.size_bytes // count
    first = part.from_bytes // row_bytes
    end = max(-(-(part.from_bytes + part.size_bytes) // row_bytes), first + _ROWS_BYTES // row_bytes)
    return byte_view(tensor.rows(first, min(end, count))).flatten(), first * row_bytes


def _read_whole(tensor: Stored) -> torch.Tensor:
    layout = tensor.layout
    span = new_storage(layout.span_bytes, torch.device("cpu"))
    tensor.opened().read(torch.empty(0, dtype=torch.uint8).set_(span), tensor.offset_bytes)
    found = torch.empty(0, dtype=tensor.dtype).set_(span, 0, tensor.shape, tensor.stride)
    if tensor.is_conj:
        found = found.conj_physical()
    if tensor.is_neg:
        found = found.neg()
    return found.contiguous()


class _Window(NamedTuple):
    """Blocks of a file that are read at once.

    Attributes:
        file: The file.
        start_bytes: The offset of the first byte in the file.
        end_bytes: The offset behind the last byte.
        at_bytes: The offset in the buffer that the blocks are read to.
    """

    file: TensorFile
    start_bytes: int
    end_bytes: int
    at_bytes: int


class _Batch:
    """Parts on their way into a buffer."""

    def __init__(
        self, parts: Sequence[_Part], tensors: Sequence[Stored], whole: _WholeTensors, buffer: torch.Tensor
    ) -> None:
        self.buffer = buffer
        self._pieces: list[Piece] = []
        self._requests: list[PendingIO] = []
        windows: list[_Window] = []
        for part in parts:
            tensor = tensors[part.number]
            if not tensor.lies_in_order:
                self._pieces.append(Piece(part.number, part.from_bytes, whole.read(part)))
                continue
            start_bytes = tensor.offset_bytes + part.from_bytes
            window = _widened(windows, tensor.opened(), start_bytes, start_bytes + part.size_bytes)
            at_bytes = window.at_bytes + start_bytes - window.start_bytes
            self._pieces.append(Piece(part.number, part.from_bytes, buffer[at_bytes : at_bytes + part.size_bytes]))
        reads: dict[TensorFile, list[tuple[torch.Tensor, int]]] = {}
        for window in windows:
            size_bytes = min(window.end_bytes, window.file.size()) - window.start_bytes
            memory = buffer[window.at_bytes : window.at_bytes + size_bytes]
            reads.setdefault(window.file, []).append((memory, window.start_bytes))
        try:
            for file, items in reads.items():
                self._requests.append(file.read_list_async(items))
        except BaseException:
            self.wait()
            raise

    def pieces(self) -> list[Piece]:
        """Wait for the bytes, and return them."""
        requests, self._requests = self._requests, []
        try:
            while requests:
                requests.pop().result()
        finally:
            self._requests = requests
            self.wait()
        return self._pieces

    def wait(self) -> None:
        """Wait until nothing writes to the buffer any more; errors are ignored."""
        for request in self._requests:
            request.exception()
        self._requests = []


def _widened(windows: list[_Window], file: TensorFile, start_bytes: int, end_bytes: int) -> _Window:
    """Return a window with these bytes: the last one if they begin in it or just behind it, else a new one."""
    start_bytes -= start_bytes % BLOCK_BYTES
    end_bytes = align_up(end_bytes, BLOCK_BYTES)
    last = windows[-1] if windows else None
    if last and last.file is file and last.start_bytes <= start_bytes <= last.end_bytes + BLOCK_BYTES:
        windows[-1] = last._replace(end_bytes=max(last.end_bytes, end_bytes))
    else:
        at_bytes = last.at_bytes + last.end_bytes - last.start_bytes if last else 0
        windows.append(_Window(file, start_bytes, end_bytes, at_bytes))
    return windows[-1]
