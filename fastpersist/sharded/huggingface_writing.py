"""Writes what a rank has of a model into the files of a HuggingFace checkpoint, and on the first rank what is left.

All ranks write to the same files at once, each where its own bytes belong; `huggingface_layout` says where. What goes
through the first rank is in a scratch file of each rank until then. CRCs are computed while the bytes are written: of
each chunk what it adds to the CRC of its tensor.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from fastpersist import _native
from fastpersist.config import BLOCK_BYTES
from fastpersist.errors import StorageError, UnsupportedError
from fastpersist.filesystem import filesystem
from fastpersist.formats import safetensors
from fastpersist.layout import align_up
from fastpersist.pending_io import PendingIO
from fastpersist.pipeline import Pieces, Writer, refuse_null_engine
from fastpersist.sharded.blobs import is_plain
from fastpersist.sharded.huggingface_layout import ModelLayout, Place, Run, chunk_of, in_file_order, runs_of
from fastpersist.tensor_file import TensorFile
from fastpersist.tensor_memory import byte_view

__all__ = ["ModelPart", "finish_files", "make_files", "write_model_part"]

_BATCH_BYTES = 32 << 20
_BATCH_COUNT = 8192
"""So much is handed over at a time; two such are under way at most. Tensors of a device are copied in such pieces."""

_WINDOW_BYTES = 16 << 20
"""So much of a tensor is put together at a time on the first rank."""


@dataclass(frozen=True, slots=True)
class ModelPart:
    """What a rank is told of a save.

    Attributes:
        rank: Its number.
        directory: Where the files are; published when all ranks are done.
        final_path: The name that the directory gets, for messages.
        names: Of the files.
        places: Of the tensors that it has chunks of.
        unit_bytes: It writes whole ones of these only; what is left goes through the first rank.
    """

    rank: int
    directory: str
    final_path: str
    names: tuple[str, ...]
    places: dict[str, Place]
    unit_bytes: int

    @property
    def scratch_path(self) -> str:
        """Where it puts what the first rank writes for it."""
        return os.path.join(self.directory, f".for-first-rank-{self.rank:05}")


def make_files(layout: ModelLayout, directory: str, final_path: str) -> None:
    """Make the files of a model, in their full length, with nothing in them.

    Raises:
        NoSpaceError: There is no room.
        StorageError: They cannot be made.
    """
    for file, name in enumerate(layout.names):
        shown_path, size_bytes = os.path.join(final_path, name), layout.size_bytes(file)
        fd = filesystem().create(os.path.join(directory, name))
        try:
            filesystem().allocate(fd, align_up(size_bytes, BLOCK_BYTES), shown_path)
            filesystem().truncate(fd, size_bytes, shown_path)
        finally:
            os.close(fd)


# --- on each rank


def write_model_part(
    part: ModelPart, items: Iterable[WriteItem], planner: SavePlanner, *, engine: str, durable: bool
) -> list[WriteResult]:
    """Write all items of a rank to their places; each is asked for when its turn comes.

    Args:
        part: Where to.
        items: What.
        planner: Knows the tensors, on whatever device.
        engine: Engine name or "auto".
        durable: Sync the files.

    Returns:
        One result for each item; its `storage_data` is what the chunk adds to the CRC of its tensor.

    Raises:
        StorageError: A file could not be written; the message says which rank, and at which tensor.
        UnsupportedError: This rank does not see the directory that the first rank has made; or what it has is no
            plain tensor.
    """
    by_file: dict[int, list[WriteItem]] = {}
    for item in in_file_order(items, part.places):
        by_file.setdefault(part.places[item.index.fqn].file, []).append(item)
    results = []
    with _Scratch(part, engine) as scratch:
        for file, own in by_file.items():
            for item, crc in zip(own, _write_file(part, file, own, planner, scratch, engine, durable), strict=True):
                place = part.places[item.index.fqn]
                results.append(WriteResult(index=item.index, size_in_bytes=place.size_bytes, storage_data=crc))
    return results


def _write_file(
    part: ModelPart,
    file: int,
    items: Sequence[WriteItem],
    planner: SavePlanner,
    scratch: _Scratch,
    engine: str,
    durable: bool,
) -> list[int]:
    """Write a rank's items of one file; return what each adds to the CRC of its tensor."""
    path = os.path.join(part.directory, part.names[file])
    if not os.path.exists(path):
        raise UnsupportedError(
            f"rank {part.rank} does not see {part.directory}, where the first rank saves {part.final_path}: all ranks "
            "need one file system"
        )
    with _said_of(part, file, items), TensorFile(path, "r+", engine=engine) as out:
        stream = _Stream(out)
        for number, item in enumerate(items):
            place = part.places[item.index.fqn]
            data = _bytes_of(planner.resolve_data(item), item)
            runs = runs_of(item, place, part.unit_bytes)
            stream.begin(number, place.offset_bytes + place.size_bytes)
            stream.write(data, runs.own)
            scratch.add(data, runs.left)
            if not place.gathered:
                stream.count(data, runs.left)
        stream.end()
        if durable:
            out.sync()
    return stream.crcs


def _bytes_of(data: object, item: WriteItem) -> torch.Tensor:
    """Return the bytes of a chunk, in order, wherever it is."""
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
    return byte_view(data.detach().resolve_conj().resolve_neg().contiguous())


@contextmanager
def _said_of(part: ModelPart, file: int, items: Sequence[WriteItem]) -> Iterator[None]:
    """Say of an error which rank met it, and at which tensor."""
    path = os.path.join(part.final_path, part.names[file])
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
    """Runs whose CRCs are still to be computed: of host memory, for an item that ends there."""

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
        self._pending: deque[PendingIO] = deque()
        self._begin_batch()

    def _begin_batch(self) -> None:
        self._parts: list[tuple[int, int, int]] = []
        self._kept: list[torch.Tensor] = []
        self._counted: list[_Counted] = []
        self._bytes = 0

    def begin(self, number: int, end_bytes: int) -> None:
        """Go on with another chunk, of a tensor that ends there."""
        self.crcs.extend([0] * (number + 1 - len(self.crcs)))
        self._end_bytes = end_bytes

    def write(self, data: torch.Tensor, runs: Sequence[Run]) -> None:
        """Write runs of this chunk, whose bytes are `data`, on whatever device."""
        for host, some in _on_host(data, runs):
            address = host.data_ptr()
            self._parts += [(address + start, size_bytes, offset_bytes) for start, size_bytes, offset_bytes in some]
            self._add(host, some)

    def count(self, data: torch.Tensor, runs: Sequence[Run]) -> None:
        """Add runs of this chunk to its CRC; somebody else writes them."""
        for host, some in _on_host(data, runs):
            self._add(host, some)

    def end(self) -> None:
        """Wait until all is written."""
        self._flush()
        while self._pending:
            self._pending.popleft().result()

    def _add(self, host: torch.Tensor, runs: Sequence[Run]) -> None:
        self._kept.append(host)
        self._counted.append(_Counted(host.data_ptr(), runs, len(self.crcs) - 1, self._end_bytes))
        self._bytes += sum(size_bytes for _, size_bytes, _ in runs)
        if self._bytes >= _BATCH_BYTES or len(self._parts) >= _BATCH_COUNT:
            self._flush()

    def _flush(self) -> None:
        parts, kept, counted = self._parts, self._kept, self._counted
        self._begin_batch()
        if parts:
            self._pending.append(_submit_runs(self._file, parts, kept))
        for one in counted:
            self.crcs[one.number] ^= _term_of(one.address, one.runs, one.end_bytes)
        while len(self._pending) > 1:
            self._pending.popleft().result()


def _submit_runs(file: TensorFile, parts: Sequence[tuple[int, int, int]], kept: object) -> PendingIO:
    """Write memory (address, bytes, offset in the file) as `write_list_async` does, without a tensor for each run."""
    return PendingIO(file._submit(True, [parts], kept), file.path, None)


def _on_host(data: torch.Tensor, runs: Sequence[Run]) -> Iterator[tuple[torch.Tensor, Sequence[Run]]]:
    """Yield host memory with runs of `data`, and where they are in it, a batch at a time."""
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
    """What a rank leaves for the first one to write, in a file that is made when there is something."""

    def __init__(self, part: ModelPart, engine: str) -> None:
        self._part = part
        self._engine = engine
        self._fd = -1
        self._writer: Writer | None = None

    def __enter__(self) -> _Scratch:
        return self

    def add(self, data: torch.Tensor, runs: Iterable[Run]) -> None:
        """Add runs of a chunk, whose bytes are `data`, on whatever device."""
        pieces = Pieces()
        for start, size_bytes, _ in runs:
            first = int(data.storage_offset()) + start
            pieces.add_storage(data.untyped_storage(), None, offset_bytes=first, size_bytes=size_bytes)
        if not pieces.native.size_bytes:
            return
        if self._writer is None:
            path = self._part.scratch_path
            self._fd = filesystem().create(path)
            self._writer = Writer(self._fd, path, engine=_scratch_engine(self._engine))
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


def _scratch_engine(engine: str) -> str:
    """Return the engine for scratch files, which as a rule are gone again before the kernel writes them to the disk."""
    return "threads-buffered" if engine == "auto" else engine


# --- CRCs of parts
#
# The CRC of bytes of which some are exchanged for zeros differs from theirs by a term that only depends on what was
# exchanged, and on how far from the end it lay. So each chunk of a tensor, whoever has it, adds a term of its own to
# the CRC of as many zeros, and it does not matter in which order: crc(a b) = crc(0 0) ^ term(a, behind=|b|) ^ term(b).


def _term_of(address: int, runs: Sequence[Run], end_bytes: int) -> int:
    """Return what runs add to the CRC of a tensor that ends at `end_bytes` of the file."""
    first, end = runs[0][0], runs[-1][0] + runs[-1][1]
    data = memoryview((ctypes.c_char * (end - first)).from_address(address + first))
    term = 0
    for start, size_bytes, offset_bytes in runs:
        crc = _native.crc32(data[start - first : start - first + size_bytes])
        term ^= _native.combine_crc32(crc ^ _crc_of_zeros(size_bytes), 0, end_bytes - offset_bytes - size_bytes)
    return term


def _crc_of(data: torch.Tensor, crc: int) -> int:
    return _native.crc32((ctypes.c_char * data.numel()).from_address(data.data_ptr()), crc)


@functools.lru_cache(maxsize=4096)
def _crc_of_zeros(size_bytes: int) -> int:
    if not size_bytes:
        return 0
    half = _crc_of_zeros(size_bytes // 2)
    crc = _native.combine_crc32(half, half, size_bytes // 2)
    return _native.combine_crc32(crc, _native.crc32(b"\0"), 1) if size_bytes % 2 else crc


# --- on the first rank


def finish_files(
    layout: ModelLayout,
    parts: Sequence[ModelPart],
    items: Sequence[Sequence[WriteItem]],
    results: Iterable[WriteResult],
    *,
    engine: str,
    durable: bool,
) -> Iterator[tuple[str, int, int]]:
    """Write what the ranks have left, and the headers that make the files readable.

    Args:
        layout: Of the model.
        parts: Of all ranks.
        items: Of all ranks.
        results: Of all ranks, as `write_model_part` gives them.
        engine: Engine name or "auto".
        durable: Sync the files.

    Yields:
        Name, length and CRC of each file, when it is finished.

    Raises:
        StorageError: A file could not be written, or what a rank has left not be read.
    """
    crcs = {name: _crc_of_zeros(place.size_bytes) for name, place in layout.places.items()}
    for result in results:
        crcs[result.index.fqn] ^= result.storage_data
    left = [_Left(part, own, engine) for part, own in zip(parts, items, strict=True)]
    try:
        for file, (name, header) in enumerate(zip(layout.names, layout.headers, strict=True)):
            path = os.path.join(parts[0].directory, name)
            with _said_of(parts[0], file, ()), TensorFile(path, "r+", engine=engine) as out:
                for rank_left in left:
                    rank_left.write_edges(file, out)
                entries = header.header.entries
                for entry in entries:
                    if layout.places[entry.name].gathered:
                        crcs[entry.name] = _put_together(entry, left, out)
                own_crcs = [crcs[entry.name] for entry in entries]
                text = safetensors.encode_header(header, own_crcs)
                out.write(torch.frombuffer(bytearray(text), dtype=torch.uint8), 0)
                if durable:
                    out.sync()
            file_crc = _native.crc32(text)
            for entry, crc in zip(entries, own_crcs, strict=True):
                file_crc = _native.combine_crc32(file_crc, crc, entry.size_bytes)
            yield name, layout.size_bytes(file), file_crc
        for rank_left in left:
            rank_left.remove()
    finally:
        for rank_left in left:
            rank_left.close()


@dataclass(frozen=True, slots=True)
class _Box:
    """A chunk of a tensor in a scratch file."""

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    dtype: torch.dtype
    scratch_bytes: int


class _Left:
    """What a rank has left in its scratch file."""

    def __init__(self, part: ModelPart, items: Iterable[WriteItem], engine: str) -> None:
        self._path = part.scratch_path
        self._engine = engine
        self._file: TensorFile | None = None
        self._edges: dict[int, list[Run]] = {}
        self.boxes: dict[str, list[_Box]] = {}
        position = 0
        for item in in_file_order(items, part.places):
            place, data = part.places[item.index.fqn], item.tensor_data
            for _, size_bytes, offset_bytes in runs_of(item, place, part.unit_bytes).left:
                if place.gathered and data is not None:
                    box = _Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes), data.properties.dtype, position)
                    self.boxes.setdefault(item.index.fqn, []).append(box)
                else:
                    self._edges.setdefault(place.file, []).append((position, size_bytes, offset_bytes))
                position += size_bytes
        self._size_bytes = position

    def write_edges(self, file: int, out: TensorFile) -> None:
        """Write pieces of tensors whose bulk the rank has written."""
        edges = self._edges.get(file, [])
        while edges:
            some, edges = _first_of(edges)
            start, (last, last_bytes, _) = some[0][0], some[-1]
            data = self.read(start, last + last_bytes - start)
            parts = [(data.data_ptr() + at - start, size_bytes, place) for at, size_bytes, place in some]
            _submit_runs(out, parts, data).result()

    def read(self, offset_bytes: int, size_bytes: int) -> torch.Tensor:
        """Read bytes of the scratch file."""
        if self._file is None:
            self._file = TensorFile(self._path, engine=_scratch_engine(self._engine))
        data = torch.empty(size_bytes, dtype=torch.uint8, device="cpu")
        self._file.read(data, offset_bytes)
        return data

    def close(self) -> None:
        """Close the scratch file."""
        if self._file is not None:
            self._file.close()

    def remove(self) -> None:
        """Remove the scratch file, if there is one: everything in the directory becomes part of the checkpoint."""
        self.close()
        if self._size_bytes:
            filesystem().unlink(self._path)


def _first_of(edges: list[Run]) -> tuple[list[Run], list[Run]]:
    """Part as many edges from the others as may be in memory at once."""
    end = next((n for n, edge in enumerate(edges) if edge[0] - edges[0][0] >= _WINDOW_BYTES), len(edges))
    return edges[:end], edges[end:]


def _put_together(entry: safetensors.Entry, left: Sequence[_Left], out: TensorFile) -> int:
    """Write a tensor of which the ranks have left all chunks, some of it at a time; return its CRC."""
    boxes = [(rank_left, box) for rank_left in left for box in rank_left.boxes.get(entry.name, ())]
    dtype, crc, offset_bytes = boxes[0][1].dtype, 0, entry.offset_bytes
    # The first dimension that can be cut: in any chunk, too, each index of it lies in one piece.
    cut = next(dimension for dimension, length in enumerate(entry.shape) if length > 1)
    step = max(1, _WINDOW_BYTES // (entry.size_bytes // entry.shape[cut]))
    pending: PendingIO | None = None
    for first in range(0, entry.shape[cut], step):
        end = min(first + step, entry.shape[cut])
        window = torch.empty((*entry.shape[:cut], end - first, *entry.shape[cut + 1 :]), dtype=dtype, device="cpu")
        for rank_left, box in boxes:
            low, high = max(first, box.offsets[cut]), min(end, box.offsets[cut] + box.lengths[cut])
            if low >= high:
                continue
            lengths = (*box.lengths[:cut], high - low, *box.lengths[cut + 1 :])
            row_bytes = math.prod(lengths[cut + 1 :]) * dtype.itemsize
            own = rank_left.read(box.scratch_bytes + (low - box.offsets[cut]) * row_bytes, (high - low) * row_bytes)
            target = window.narrow(cut, low - first, high - low)
            for dimension in range(cut + 1, len(lengths)):
                target = target.narrow(dimension, box.offsets[dimension], lengths[dimension])
            target.copy_(own.view(dtype).view(lengths))
        if pending is not None:
            pending.result()
        data = byte_view(window)
        pending = out.write_async(data, offset_bytes)
        crc = _crc_of(data, crc)
        offset_bytes += data.numel()
    if pending is not None:
        pending.result()
    return crc
