"""Writes tensors of which each rank has many short runs: assembles them in a file that all ranks map.

Such a tensor is processed in *windows* of some whole rows. Each rank copies its part of a window to its place there.
When all ranks have done so, one of them, a different one for each window, writes the window to the file and computes
its CRC. The windows use a few slots of the mapped file in turn, so no byte is on the disk twice, and few are in memory.

Windows need ranks of one machine, and a file system that reserves space, so that mapped memory cannot run out.
Otherwise the coordinator writes such tensors. A rank that fails marks this in the mapped file, and the others notice if
a rank dies, so none waits for it.

With 4 ranks and runs of 2 KiB (columns of 4096 x 4096, bfloat16, 512 MiB in all), a save took 0.7 s, and 3.0 s through
scratch files; with runs of 32 KiB it took 0.67 s, and 0.80 s without windows (medians of 5, on a busy machine).
"""

from __future__ import annotations

import itertools
import math
import mmap
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

import torch
from torch.distributed.checkpoint.planner import WriteItem

from fastpersist.commit.filesystem import allocate_pages, filesystem, storage_errors
from fastpersist.config import BLOCK_BYTES, filesystem_type_name
from fastpersist.dcp.blobs import Shape
from fastpersist.dcp.huggingface.crc_terms import term_of
from fastpersist.dcp.huggingface.layout import Place, chunk_of
from fastpersist.distributed.peers import is_dead
from fastpersist.errors import AgreementTimeoutError, PeerError
from fastpersist.formats.layout import align_up
from fastpersist.transfer.tensor_file import TensorFile
from fastpersist.transfer.tensor_requests import PendingIO

__all__ = [
    "SharedWindows",
    "WindowedTensor",
    "failure_told",
    "is_for_windows",
    "make_windows",
    "windowed",
    "write_windows",
]

WINDOWS_NAME = ".windows"
"""The name of the mapped file in the pending directory; it is removed before the directory is published."""

_RUN_BYTES_MIN = 32 << 10
"""Only chunks of shorter runs go through windows; each rank writes longer runs to their places itself.

Columns of 4 ranks, in turn (2026-11-23, a busy machine): windows were 4.4 times as fast with runs of 2 KiB, and 1.22
times with runs of 32 KiB.
"""

_WINDOW_BYTES = 4 << 20
_SLOT_COUNT_MAX = 32
_UNDER_WAY_COUNT = 2
"""How many windows one rank writes at a time."""

_FILESYSTEMS = frozenset(("ext4", "xfs", "tmpfs"))
"""On these, a first write to mapped memory finds its space reserved. On others, it could kill the process."""

_LOOK_S = 0.25
_COMES_S = 60.0
"""How long a rank may take to begin: all ranks begin when they have the plan."""

_SILENCE_S = 1800.0
"""How long no rank may make progress: a rank that paces its writes is slow."""

_HERE, _FAILED = 1, 2
"""The state of a rank; at first 0."""

Process: TypeAlias = tuple[int, str, str]


@dataclass(frozen=True, slots=True)
class WindowedTensor:
    """A tensor that goes through windows.

    Attributes:
        name: The tensor's name.
        shape: The shape of the whole tensor.
        dtype: The dtype of its elements.
        place: Where the tensor lies.
        cut: The dimension that is cut into windows; its indices are the *rows*. It is the first that is longer than 1.
        row_count: The number of rows in a window.
    """

    name: str
    shape: Shape
    dtype: torch.dtype
    place: Place
    cut: int
    row_count: int

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.place.size_bytes // self.shape[self.cut]

    @property
    def window_count(self) -> int:
        """How many windows it takes."""
        return -(-self.shape[self.cut] // self.row_count)


@dataclass(frozen=True, slots=True)
class SharedWindows:
    """The windows that the ranks share, as the coordinator tells them.

    Attributes:
        path: The path of the file that the ranks map.
        slot_bytes: The size of a slot.
        slot_count: The number of slots.
        processes: The ranks, as `own_process` names them.
        tensors: The tensors, in the order of processing.
    """

    path: str
    slot_bytes: int
    slot_count: int
    processes: tuple[Process, ...]
    tensors: tuple[WindowedTensor, ...]

    @property
    def head_bytes(self) -> int:
        """Length of the counts before the slots: three for each rank."""
        return align_up(3 * 8 * len(self.processes), mmap.PAGESIZE)

    @property
    def size_bytes(self) -> int:
        """Length of the file."""
        return self.head_bytes + self.slot_count * self.slot_bytes


# --- on the coordinator


def is_for_windows(place: Place) -> bool:
    """Tell whether the runs of a tensor are so short that windows are faster."""
    return 0 < place.run_bytes < _RUN_BYTES_MIN


def windowed(name: str, place: Place, items: Sequence[Sequence[WriteItem]]) -> WindowedTensor | None:
    """Return how a tensor goes through windows; None if it cannot.

    Args:
        name: The tensor's name.
        place: Where the tensor lies.
        items: For each rank, its chunks of the tensor.
    """
    data = items[0][0].tensor_data if items and items[0] else None
    if data is None:
        return None
    shape = tuple(data.size)
    cut = next((dimension for dimension, length in enumerate(shape) if length > 1), None)
    if cut is None:
        return None
    row_bytes = place.size_bytes // shape[cut]
    if row_bytes > _WINDOW_BYTES:
        return None
    for own in items:  # a rank delivers them one after the other
        rows = sorted((chunk_of(item).offsets[cut], chunk_of(item).sizes[cut]) for item in own)
        if any(low + length > after for (low, length), (after, _) in itertools.pairwise(rows)):
            return None
    row_count = max(1, _WINDOW_BYTES // row_bytes)
    rows_of_blocks = BLOCK_BYTES // math.gcd(row_bytes, BLOCK_BYTES)  # the fewest that are whole blocks
    if row_count > rows_of_blocks:
        row_count -= row_count % rows_of_blocks
    through = replace(place, gathered=False, windowed=True)
    return WindowedTensor(name, shape, data.properties.dtype, through, cut, row_count)


def make_windows(
    directory: str, final_path: str, processes: Sequence[Process | None], tensors: Sequence[WindowedTensor]
) -> SharedWindows | None:
    """Make the file that the ranks map; return None if they cannot share memory.

    Args:
        directory: The directory in which the file is made.
        final_path: The name that the directory gets, for messages.
        processes: The processes of the ranks, all on one machine; None for a rank that cannot share memory.
        tensors: The tensors that go through the windows.

    Raises:
        NoSpaceError: There is no room.
        StorageError: It cannot be made.
    """
    known = [process for process in processes if process is not None and process[2]]
    if len(known) < 2 or len(known) < len(processes) or len({process[1] for process in known}) > 1 or not tensors:
        return None
    longest_bytes = max(tensor.row_count * tensor.row_bytes for tensor in tensors)
    shared = SharedWindows(
        os.path.join(directory, WINDOWS_NAME),
        align_up(longest_bytes, BLOCK_BYTES) + BLOCK_BYTES,
        min(3 * len(known), _SLOT_COUNT_MAX),
        tuple(known),
        tuple(tensors),
    )
    fd = filesystem().create(shared.path)
    try:
        if filesystem_type_name(fd) in _FILESYSTEMS:
            allocate_pages(fd, shared.size_bytes, os.path.join(final_path, WINDOWS_NAME))
            return shared
    finally:
        os.close(fd)
    filesystem().unlink(shared.path)
    return None


# --- on each rank


@contextmanager
def failure_told(shared: SharedWindows | None, rank: int) -> Iterator[None]:
    """Tell waiting ranks of an error in the block, unless it is another rank's: that rank tells it itself."""
    try:
        yield
    except PeerError:
        raise
    except BaseException:
        if shared is not None:
            with suppress(OSError), open(shared.path, "r+b", buffering=0) as file:
                os.pwrite(file.fileno(), _FAILED.to_bytes(8, sys.byteorder), 8 * (2 * len(shared.processes) + rank))
        raise


Parts = Callable[[WriteItem], Iterator[torch.Tensor]]
"""Returns the bytes of the next chunk, in order."""


def write_windows(
    shared: SharedWindows,
    rank: int,
    items: Sequence[WriteItem],
    parts: Parts,
    open_file: Callable[[int], TensorFile],
    *,
    durable: bool,
) -> dict[str, int]:
    """Copy this rank's chunks into the windows, and write the windows that are its turn.

    Args:
        shared: The windows.
        rank: The number of this rank.
        items: This rank's chunks of these tensors, in file order.
        parts: Gives the bytes of the chunks.
        open_file: Opens a file of the model by its number.
        durable: Sync the files.

    Returns:
        By name of the tensor: what the windows that this rank has written add to the tensor's CRC.

    Raises:
        PeerError: Another rank has failed, or is gone.
        StorageError: The kernel reported an error of a write.
    """
    with _Mapping(shared, rank) as mapping:
        writing = _Writing(mapping, open_file, durable=durable)
        writing.start()
        try:
            _hand_over(mapping, items, parts)
        except BaseException as error:  # noqa: BLE001 - raised below, unless the other thread was first
            mapping.stop(error)
        writing.join()
        if mapping.error is not None:
            raise mapping.error
        return writing.terms


class _Window(NamedTuple):
    """Rows of a tensor, and the number of the window among all."""

    number: int
    tensor: WindowedTensor
    first: int
    end: int

    @property
    def offset_bytes(self) -> int:
        return self.tensor.place.offset_bytes + self.first * self.tensor.row_bytes

    @property
    def size_bytes(self) -> int:
        return (self.end - self.first) * self.tensor.row_bytes


class _Mapping:
    """The mapped file: how many windows each rank has put and written, and the slots."""

    def __init__(self, shared: SharedWindows, rank: int) -> None:
        self.shared = shared
        self.rank = rank
        self.count = len(shared.processes)
        with storage_errors("mapping", shared.path), open(shared.path, "r+b", buffering=0) as file:
            mapped = mmap.mmap(file.fileno(), shared.size_bytes)
        self._memory = torch.frombuffer(mapped, dtype=torch.uint8)
        self._counts = memoryview(mapped)[: 3 * 8 * self.count].cast("q")
        self._fence = threading.Lock()
        self._come_s = time.monotonic()
        self._counts[2 * self.count + rank] = _HERE
        self.error: BaseException | None = None

    def __enter__(self) -> _Mapping:
        return self

    def __exit__(self, *exception: object) -> None:
        self._counts.release()

    def windows(self) -> Iterator[_Window]:
        """Yield all windows."""
        number = 0
        for tensor in self.shared.tensors:
            row_count = tensor.shape[tensor.cut]
            for first in range(0, row_count, tensor.row_count):
                yield _Window(number, tensor, first, min(first + tensor.row_count, row_count))
                number += 1

    def slot_of(self, window: _Window) -> torch.Tensor:
        """Return the memory of a window: aligned to blocks as in the file, for direct I/O."""
        start_bytes = self.shared.head_bytes + window.number % self.shared.slot_count * self.shared.slot_bytes
        start_bytes += window.offset_bytes % BLOCK_BYTES
        return self._memory[start_bytes : start_bytes + window.size_bytes]

    def is_free(self, number: int) -> bool:
        """Tell whether the slot of a window is free: the window before it there has been written."""
        before = number - self.shared.slot_count
        return before < 0 or self._counts[self.count + before % self.count] > before // self.count

    def is_whole(self, number: int) -> bool:
        """Tell whether all ranks have copied their chunks of a window."""
        return all(self._counts[rank] > number for rank in range(self.count))

    def has_put(self, number: int) -> None:
        """Note that this rank has copied its chunks of all windows up to this one."""
        self._tell(self.rank, number + 1)

    def has_written(self, number: int) -> None:
        """Note that this rank has written a window, and all its earlier ones."""
        self._tell(self.count + self.rank, number // self.count + 1)

    def _tell(self, index: int, value: int) -> None:
        with self._fence:  # what was written to the slot is seen before the count is
            pass
        with self._fence:
            self._counts[index] = value

    def stop(self, error: BaseException) -> None:
        """Note that a thread of this rank has failed, so that its other thread stops waiting."""
        with self._fence:
            if self.error is None:
                self.error = error

    def wait(self, ready: Callable[[], bool]) -> None:
        """Wait until the condition holds.

        Raises:
            PeerError: A rank has failed, or is gone, or silent; or the other thread of this one has failed.
        """
        pause_s = 0.0001
        look_s = time.monotonic() + _LOOK_S
        silent_s, before = time.monotonic() + _SILENCE_S, bytes(self._counts)
        while not ready():
            states = list(self._counts[2 * self.count :])
            failed = [rank for rank, state in enumerate(states) if state == _FAILED]
            if self.error is not None or failed:
                raise self._peer_error("failed", failed[0] if failed else self.rank)
            if time.monotonic() > look_s:
                for rank, process in enumerate(self.shared.processes):
                    if is_dead(process):
                        raise self._peer_error("is gone", rank)
                look_s = time.monotonic() + _LOOK_S
                if 0 in states and time.monotonic() > self._come_s + _COMES_S:
                    message = (
                        f"rank {states.index(0)} has not come for {_COMES_S:.0f} s to where the ranks write together: "
                        f"{self.shared.path}. All ranks need one file system"
                    )
                    raise AgreementTimeoutError(message, rank=states.index(0))
                if bytes(self._counts) != before:
                    silent_s, before = time.monotonic() + _SILENCE_S, bytes(self._counts)
                if time.monotonic() > silent_s:
                    raise AgreementTimeoutError(f"no rank has handed over anything for {_SILENCE_S:.0f} s")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.002)

    def _peer_error(self, what: str, rank: int) -> PeerError:
        return PeerError(f"rank {rank} {what} while the ranks write together", rank=rank)


def _hand_over(mapping: _Mapping, items: Sequence[WriteItem], parts: Parts) -> None:
    """Copy this rank's chunks to their places in the windows, one after the other."""
    by_name: dict[str, deque[_Chunk]] = {}
    for item in items:
        by_name.setdefault(item.index.fqn, deque()).append(_Chunk(item))
    for window in mapping.windows():
        chunks = by_name.get(window.tensor.name, deque())
        while chunks and chunks[0].is_over_before(window):
            chunks.popleft()
        mapping.wait(lambda: mapping.is_free(window.number))  # noqa: B023 - called at once
        if chunks:
            cut = window.tensor.cut
            inner = window.tensor.shape[cut + 1 :]
            rows = mapping.slot_of(window).view(window.tensor.dtype).view(window.end - window.first, *inner)
            for chunk in chunks:
                chunk.copy_to(rows, window, parts)
        mapping.has_put(window.number)


class _Chunk:
    """A chunk of which the bytes arrive in order."""

    def __init__(self, item: WriteItem) -> None:
        self._item = item
        self._offsets, self._lengths = tuple(chunk_of(item).offsets), tuple(chunk_of(item).sizes)
        self._parts: Iterator[torch.Tensor] | None = None
        self._part = torch.empty(0, dtype=torch.uint8)

    def is_over_before(self, window: _Window) -> bool:
        """Tell whether its last row comes before a window."""
        cut = window.tensor.cut
        return self._offsets[cut] + self._lengths[cut] <= window.first

    def copy_to(self, rows: torch.Tensor, window: _Window, parts: Parts) -> None:
        """Copy the rows that it has of a window."""
        cut = window.tensor.cut
        low = max(window.first, self._offsets[cut])
        high = min(window.end, self._offsets[cut] + self._lengths[cut])
        if low >= high:
            return
        if self._parts is None:
            self._parts = parts(self._item)
        lengths = (high - low, *self._lengths[cut + 1 :])
        target = rows.narrow(0, low - window.first, high - low)
        for dimension in range(1, len(lengths)):
            target = target.narrow(dimension, self._offsets[cut + dimension], lengths[dimension])
        data = self._next(self._parts, math.prod(lengths) * window.tensor.dtype.itemsize)
        target.copy_(data.view(window.tensor.dtype).view(lengths))

    def _next(self, parts: Iterator[torch.Tensor], size_bytes: int) -> torch.Tensor:
        found: list[torch.Tensor] = []
        while size_bytes:
            if not self._part.numel():
                self._part = next(parts)
            some, self._part = self._part[:size_bytes], self._part[size_bytes:]
            size_bytes -= some.numel()
            found.append(some if not size_bytes and not found else some.clone())  # the memory of a part is used again
        return found[0] if len(found) == 1 else torch.cat(found)


class _Writing(threading.Thread):
    """Writes each window that is this rank's turn, once all ranks have copied their chunks of it."""

    def __init__(self, mapping: _Mapping, open_file: Callable[[int], TensorFile], *, durable: bool) -> None:
        super().__init__(name="fastpersist-windows", daemon=True)
        self._mapping = mapping
        self._open_file = open_file
        self._durable = durable
        self._pending: deque[tuple[_Window, PendingIO]] = deque()
        self.terms: dict[str, int] = {}

    def run(self) -> None:
        """Write until all windows are written or a rank has failed."""
        try:
            with ExitStack() as stack:
                self._write_all(stack)
        except BaseException as error:  # noqa: BLE001 - raised by the thread that joins this one
            self._mapping.stop(error)

    def _write_all(self, stack: ExitStack) -> None:
        mapping, files = self._mapping, dict[int, TensorFile]()
        for window in mapping.windows():
            if window.number % mapping.count != mapping.rank:
                continue
            mapping.wait(lambda: self._note_written() or mapping.is_whole(window.number))  # noqa: B023 - called at once
            place = window.tensor.place
            if place.file not in files:
                files[place.file] = stack.enter_context(self._open_file(place.file))
            data = mapping.slot_of(window)
            self._pending.append((window, files[place.file].write_async(data, window.offset_bytes)))
            term = term_of(data.data_ptr(), [(0, window.size_bytes, window.offset_bytes)], _end_of(place))
            self.terms[window.tensor.name] = self.terms.get(window.tensor.name, 0) ^ term
            while len(self._pending) > _UNDER_WAY_COUNT:
                self._pending[0][1].wait()
                self._note_written()
        while self._pending:
            self._pending[0][1].wait()
            self._note_written()
        if self._durable:
            for file in files.values():
                file.sync()

    def _note_written(self) -> bool:
        while self._pending and self._pending[0][1].done():
            window, pending = self._pending.popleft()
            pending.wait()  # raises the error of the write
            self._mapping.has_written(window.number)
        return False


def _end_of(place: Place) -> int:
    return place.offset_bytes + place.size_bytes
