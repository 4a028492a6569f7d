"""Write the chunks of one rank into the files of a HuggingFace checkpoint.

All ranks write to the same files at once, each to the places that `layout` gives its bytes. Tensors of many short runs
go through `shared_windows`; what the coordinator has to write goes to a scratch file (`coordinator`). CRCs are computed
while the bytes are written: for each chunk its term in the CRC of its tensor.
"""

from __future__ import annotations

import bisect
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from fastpersist.commit.filesystem import filesystem
from fastpersist.commit.freeing import reserve
from fastpersist.config import BLOCK_BYTES
from fastpersist.dcp.blobs import is_plain
from fastpersist.dcp.capture import ShardedCapture
from fastpersist.dcp.huggingface.captured_bytes import WINDOW_COUNT, CapturedBytes
from fastpersist.dcp.huggingface.crc_terms import term_of
from fastpersist.dcp.huggingface.layout import (
    ModelLayout,
    Place,
    Run,
    chunk_of,
    first_byte_of,
    runs_of,
)
from fastpersist.dcp.huggingface.shared_windows import SharedWindows, write_windows
from fastpersist.dcp.part_writer import Part
from fastpersist.errors import StorageError, UnsupportedError
from fastpersist.formats.layout import align_up
from fastpersist.transfer.engine_selection import refuse_null_engine
from fastpersist.transfer.tensor_file import TensorFile
from fastpersist.transfer.tensor_memory import byte_view
from fastpersist.transfer.tensor_requests import PendingIO
from fastpersist.transfer.writer import Pieces, Writer

__all__ = ["ModelPart", "make_files", "said_of", "scratch_engine", "submit_runs", "write_model_part"]

_BATCH_BYTES = 32 << 20
_BATCH_COUNT = 8192
"""The most bytes and runs of a batch; two batches are under way. Tensors of a device are copied in batches."""


@dataclass(frozen=True, slots=True)
class ModelPart(Part):
    """What the coordinator tells a rank of its part of a save, in files that all ranks share.

    Attributes:
        names: The names of the files.
        places: The places of the tensors that the rank has chunks of.
        unit_bytes: The rank writes whole units only; the rest goes through the coordinator.
        windows: The windows through which some of the tensors go; None if none does.
    """

    names: tuple[str, ...]
    places: dict[str, Place]
    unit_bytes: int
    windows: SharedWindows | None = None

    @property
    def scratch_path(self) -> str:
        """The scratch file, with what this rank leaves to the coordinator."""
        return os.path.join(self.directory, f".for-first-rank-{self.rank:05}")


def make_files(layout: ModelLayout, directory: str, final_path: str) -> None:
    """Make the files of a model, empty, in their full length.

    Raises:
        NoSpaceError: There is no room.
        StorageError: They cannot be made.
    """
    for file, name in enumerate(layout.names):
        shown_path, size_bytes = os.path.join(final_path, name), layout.size_bytes(file)
        fd = filesystem().create(os.path.join(directory, name))
        try:
            reserve(fd, align_up(size_bytes, BLOCK_BYTES), shown_path)
            filesystem().truncate(fd, size_bytes, shown_path)
        finally:
            os.close(fd)


# --- on each rank


def write_model_part(
    part: ModelPart,
    items: Sequence[WriteItem],
    planner: SavePlanner,
    *,
    engine: str,
    durable: bool,
    capture: ShardedCapture | None = None,
) -> list[WriteResult]:
    """Write all items of a rank to their places; each is resolved just before it is written.

    Args:
        part: The rank's part of the save, with the files to write to.
        items: The items to write, in the order of `in_file_order`.
        planner: Resolves items to tensors, on any device.
        engine: Engine name or "auto".
        durable: Sync the files.
        capture: Holds the bytes of these items; without it, the tensors do not change meanwhile.

    Returns:
        One result for each item; its `storage_data` is what the chunk adds to the CRC of its tensor.

    Raises:
        StorageError: A file could not be written; the message says which rank, and at which tensor.
        UnsupportedError: This rank does not see the directory that the coordinator has made; or what it has is no
            plain tensor.
    """
    by_file: dict[int, list[WriteItem]] = {}
    windowed = [item for item in items if part.places[item.index.fqn].windowed]
    for item in items[len(windowed) :]:
        by_file.setdefault(part.places[item.index.fqn].file, []).append(item)
    results = []
    with _Scratch(part, engine) as scratch, _Chunks(part, items, planner, capture) as chunks:
        if part.windows is not None:
            results += _write_windows(part, part.windows, windowed, chunks, engine, durable)
        for file, own in by_file.items():
            for item, crc in zip(own, _write_file(part, file, own, chunks, scratch, engine, durable), strict=True):
                place = part.places[item.index.fqn]
                results.append(WriteResult(index=item.index, size_in_bytes=place.size_bytes, storage_data=crc))
    return results


def _write_windows(
    part: ModelPart, windows: SharedWindows, items: Sequence[WriteItem], chunks: _Chunks, engine: str, durable: bool
) -> list[WriteResult]:
    """Write what goes through windows; return one result for each item, and one for what each tensor's windows add."""

    def open_file(file: int) -> TensorFile:
        return TensorFile(os.path.join(part.directory, part.names[file]), "r+", engine=engine)

    def parts(item: WriteItem) -> Iterator[torch.Tensor]:
        return chunks.next_parts(item, lambda: None)  # each part is copied when it comes

    _require_sight(part, windows.path)
    with said_of(part, None, ()):
        terms = write_windows(windows, part.rank, items, parts, open_file, durable=durable)
    results = [WriteResult(index=item.index, size_in_bytes=0, storage_data=0) for item in items]
    for name, term in terms.items():
        nowhere = MetadataIndex(name, torch.Size([-1]))  # no item's index
        results.append(WriteResult(index=nowhere, size_in_bytes=0, storage_data=term))
    return results


def _require_sight(part: ModelPart, path: str) -> None:
    if not os.path.exists(path):
        raise UnsupportedError(
            f"rank {part.rank} does not see {part.directory}, where the coordinator saves {part.final_path}: all ranks "
            "need one file system"
        )


def _write_file(
    part: ModelPart,
    file: int,
    items: Sequence[WriteItem],
    chunks: _Chunks,
    scratch: _Scratch,
    engine: str,
    durable: bool,
) -> list[int]:
    """Write a rank's items of one file; return what each adds to the CRC of its tensor."""
    path = os.path.join(part.directory, part.names[file])
    _require_sight(part, path)
    with said_of(part, file, items), TensorFile(path, "r+", engine=engine) as out:
        stream = _Stream(out)
        for number, item in enumerate(items):
            place = part.places[item.index.fqn]
            runs = runs_of(item, place, part.unit_bytes)
            stream.begin(number, place.offset_bytes + place.size_bytes)
            from_bytes = 0
            for data in chunks.next_parts(item, stream.turn):
                own, left = (_within(each, from_bytes, data.numel()) for each in runs)
                stream.write(data, own)
                scratch.add(data, left)
                if not place.gathered:
                    stream.count(data, left)
                from_bytes += data.numel()
        stream.end()
        if durable:
            out.sync()
    return stream.crcs


def _within(runs: Sequence[Run], from_bytes: int, size_bytes: int) -> Sequence[Run]:
    """Return the runs of a chunk that lie in a part of it, as runs of that part, in order."""
    until_bytes, found = from_bytes + size_bytes, []
    if not from_bytes and (not runs or runs[-1][0] + runs[-1][1] <= until_bytes):
        return runs  # all of them
    first = bisect.bisect_right(runs, from_bytes, key=lambda run: run[0] + run[1])
    end = bisect.bisect_left(runs, until_bytes, key=lambda run: run[0])
    for start, length_bytes, offset_bytes in runs[first:end]:
        low, high = max(start, from_bytes), min(start + length_bytes, until_bytes)
        found.append((low - from_bytes, high - low, offset_bytes + low - start))
    return found


class _Chunks:
    """The bytes of this rank's items, in order."""

    def __init__(
        self, part: ModelPart, items: Sequence[WriteItem], planner: SavePlanner, capture: ShardedCapture | None
    ) -> None:
        self._planner = planner
        self._capture = capture
        self._slot = -1
        self._captured: CapturedBytes | None = None
        if capture is not None:
            self._captured = CapturedBytes(capture)
            for slot, item in enumerate(items):
                self._captured.expect(slot, first_byte_of(item, part.places[item.index.fqn]))

    def __enter__(self) -> _Chunks:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._captured is not None:
            self._captured.close()

    def next_parts(self, item: WriteItem, before_turn: Callable[[], None]) -> Iterator[torch.Tensor]:
        """Return the bytes of the next item, in order: all at once, on any device, or in captured parts.

        Args:
            item: The next item.
            before_turn: Called before a window is filled, as in `CapturedBytes.parts_of`.
        """
        self._slot += 1
        if self._captured is None or self._capture is None:
            return iter([_bytes_of(_checked(self._planner.resolve_data(item), item))])
        data = _checked(self._capture.tensor_of(self._slot), item)
        if self._capture.pieces_of(self._slot):
            return self._captured.parts_of(self._slot, before_turn)
        return iter([_bytes_of(data)])


def _checked(data: object, item: WriteItem) -> torch.Tensor:
    """Return the tensor of an item, if it is as planned."""
    name, shape = item.index.fqn, tuple(chunk_of(item).sizes)
    if not isinstance(data, torch.Tensor) or not is_plain(data):
        raise UnsupportedError(
            f"{name!r} is a {type(data).__name__} and no plain tensor, which a safetensors file does not hold: save it "
            "with FastPersistWriter"
        )
    if tuple(data.shape) != shape:
        raise UnsupportedError(
            f"{name!r} is planned with shape {shape}, and the planner gives a tensor of shape {tuple(data.shape)}"
        )
    return data


def _bytes_of(data: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a chunk, in order, on any device."""
    return byte_view(data.detach().resolve_conj().resolve_neg().contiguous())


@contextmanager
def said_of(part: ModelPart, file: int | None, items: Sequence[WriteItem]) -> Iterator[None]:
    """Add to an error the rank and the tensor at which it occurred."""
    path = part.final_path if file is None else os.path.join(part.final_path, part.names[file])
    try:
        yield
    except StorageError as error:
        at = [
            item.index.fqn
            for item in items
            if error.offset_bytes is not None and part.places[item.index.fqn].offset_bytes <= error.offset_bytes
        ]
        message = str(error).replace(part.directory, part.final_path) + (f" (at {at[-1]!r})" if at else "")
        raise type(error)(error.errno, f"rank {part.rank}: {message}", path, error.offset_bytes) from error


class _Counted(NamedTuple):
    """Runs in host memory whose CRCs are still to be computed."""

    address: int
    runs: Sequence[Run]
    number: int
    end_bytes: int


class _Stream:
    """Hands runs to a file, in batches of which two are under way, and computes CRCs meanwhile."""

    def __init__(self, file: TensorFile) -> None:
        self.crcs: list[int] = []
        self._file = file
        self._end_bytes = 0
        self._pending: deque[tuple[PendingIO, int]] = deque()
        self._turns: deque[list[tuple[PendingIO, int]]] = deque()
        self._begin_batch()

    def _begin_batch(self) -> None:
        self._parts: list[tuple[int, int, int]] = []
        self._kept: list[torch.Tensor] = []
        self._counted: list[_Counted] = []
        self._bytes = 0

    def begin(self, number: int, end_bytes: int) -> None:
        """Begin another chunk, of a tensor that ends at this offset of the file."""
        self.crcs.extend([0] * (number + 1 - len(self.crcs)))
        self._end_bytes = end_bytes

    def write(self, data: torch.Tensor, runs: Sequence[Run]) -> None:
        """Write runs of this chunk, whose bytes are `data`, on any device."""
        for host, some in _on_host(data, runs):
            address = host.data_ptr()
            self._parts += [(address + start, size_bytes, offset_bytes) for start, size_bytes, offset_bytes in some]
            self._add(host, some)

    def count(self, data: torch.Tensor, runs: Sequence[Run]) -> None:
        """Add runs of this chunk to its CRC; the coordinator writes them."""
        for host, some in _on_host(data, runs):
            self._add(host, some)

    def turn(self) -> None:
        """Wait for batches that use the memory of the window that is filled next; called for each window."""
        self._flush()
        self._turns.append(list(self._pending))
        if len(self._turns) == WINDOW_COUNT:
            for pending, _ in self._turns.popleft():
                pending.wait()

    def end(self) -> None:
        """Wait until all is written."""
        self._flush()
        while self._pending:
            self._pending.popleft()[0].wait()

    def _add(self, host: torch.Tensor, runs: Sequence[Run]) -> None:
        self._kept.append(host)
        self._counted.append(_Counted(host.data_ptr(), runs, len(self.crcs) - 1, self._end_bytes))
        self._bytes += sum(size_bytes for _, size_bytes, _ in runs)
        if self._bytes >= _BATCH_BYTES or len(self._parts) >= _BATCH_COUNT:
            self._flush()

    def _flush(self) -> None:
        parts, kept, counted, size_bytes = self._parts, self._kept, self._counted, self._bytes
        self._begin_batch()
        if parts:
            self._pending.append((submit_runs(self._file, parts, kept), size_bytes))
        for one in counted:
            self.crcs[one.number] ^= term_of(one.address, one.runs, one.end_bytes)
        while len(self._pending) > 1 and sum(each for _, each in self._pending) > 2 * _BATCH_BYTES:
            self._pending.popleft()[0].wait()


def submit_runs(file: TensorFile, parts: Sequence[tuple[int, int, int]], kept: object) -> PendingIO:
    """Write memory (address, bytes, offset in the file) as `write_list_async` does, without a tensor for each run."""
    return PendingIO(file._submit(True, [parts], kept), file.path, None)


def _on_host(data: torch.Tensor, runs: Sequence[Run]) -> Iterator[tuple[torch.Tensor, Sequence[Run]]]:
    """Yield host memory with runs of `data`, and their places in it, batch by batch."""
    batch: list[Run] = []
    batch_bytes = 0
    for start, size_bytes, offset_bytes in runs:
        for done in range(0, size_bytes, _BATCH_BYTES):
            part_bytes = min(_BATCH_BYTES, size_bytes - done)
            if batch and (batch_bytes + part_bytes > _BATCH_BYTES or len(batch) >= _BATCH_COUNT):
                yield _part_on_host(data, batch)
                batch, batch_bytes = [], 0
            batch.append((start + done, part_bytes, offset_bytes + done))
            batch_bytes += part_bytes
    if batch:
        yield _part_on_host(data, batch)


def _part_on_host(data: torch.Tensor, runs: list[Run]) -> tuple[torch.Tensor, Sequence[Run]]:
    if data.device.type == "cpu":
        return data, runs
    first, end = runs[0][0], runs[-1][0] + runs[-1][1]
    return data[first:end].cpu(), [(start - first, size_bytes, place) for start, size_bytes, place in runs]


class _Scratch:
    """What a rank leaves to the coordinator, in a file that is made with the first bytes."""

    def __init__(self, part: ModelPart, engine: str) -> None:
        self._part = part
        self._engine = engine
        self._fd = -1
        self._writer: Writer | None = None

    def __enter__(self) -> _Scratch:
        return self

    def add(self, data: torch.Tensor, runs: Iterable[Run]) -> None:
        """Add runs of a chunk, whose bytes are `data`, on any device."""
        pieces = Pieces()
        for start, size_bytes, _ in runs:
            first = int(data.storage_offset()) + start
            pieces.add_storage(data.untyped_storage(), None, offset_bytes=first, size_bytes=size_bytes)
        if not pieces.native.size_bytes:
            return
        if self._writer is None:
            path = self._part.scratch_path
            self._fd = filesystem().create(path)
            self._writer = Writer(self._fd, path, engine=scratch_engine(self._engine))
        self._writer.append(pieces)

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self._writer is None:
            return
        try:
            with self._writer:
                if error is None:
                    refuse_null_engine(self._writer.finish())
        finally:
            os.close(self._fd)


def scratch_engine(engine: str) -> str:
    """Return the engine for scratch files: buffered, as most are removed before the kernel writes them to disk."""
    return "threads-buffered" if engine == "auto" else engine
