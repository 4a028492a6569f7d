"""Writes the part file of one rank of a DCP checkpoint: its items as blobs, in one stream.

A tensor that is not plain (sparse, quantized, a subclass) goes through torch.save, as in DCP's own writer. The planner
decides which items these are; `storage_writer` and `save_state` own the directory, its name and its durability.
"""

from __future__ import annotations

import bisect
import errno
import io
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from fastpersist.commit.filesystem import filesystem
from fastpersist.commit.freeing import reserve
from fastpersist.dcp.blobs import BLOCK_BYTES, QUANTIZED, SMALL_ALIGNMENT, is_plain, plain_blob
from fastpersist.dcp.capture import ShardedCapture
from fastpersist.errors import StorageError, UnsupportedError
from fastpersist.formats.layout import align_up
from fastpersist.transfer.engine_selection import refuse_null_engine
from fastpersist.transfer.progress import Poll
from fastpersist.transfer.writer import Pieces, Writer

__all__ = ["Part", "WrittenPart", "write_part"]

_BATCH_COUNT = 512
_BATCH_BYTES = 4 << 20
"""Items go to the writer in batches of at most this many items or bytes; then tensors made for them are freed."""

_DEVICE_BATCH_BYTES = 64 << 20
"""The same for batches with tensors of a device: each batch waits for its copies."""


def part_name(rank: int) -> str:
    """Return the name of a rank's file, as DCP's own writer has it."""
    return f"__{rank}_0.distcp"


@dataclass(frozen=True, slots=True)
class Part:
    """What a rank gets from the coordinator for its part of a save.

    Attributes:
        rank: The rank whose part it is.
        directory: The directory that the parts are written to; published when all are there.
        final_path: The name that the directory gets, for messages.
    """

    rank: int
    directory: str
    final_path: str


@dataclass(frozen=True, slots=True)
class WrittenPart:
    """A finished part file, for the manifest; and the engine that wrote it."""

    name: str
    size_bytes: int
    crc32: int | None
    engine: str


def write_part(
    part: Part,
    items: Sequence[WriteItem],
    planner: SavePlanner,
    *,
    engine: str,
    durable: bool,
    capture: ShardedCapture | None,
    poll: Poll | None = None,
) -> tuple[list[WriteResult], WrittenPart]:
    """Write all items of a rank to its file, in order; each is resolved just before it is written.

    Args:
        part: The file.
        items: The items to write: of a tensor its own bytes, not those of the storage that it views.
        planner: Resolves items to tensors, on any device.
        engine: Engine name or "auto".
        durable: Sync the file.
        capture: Holds the bytes of these items; without it, the tensors do not change meanwhile.
        poll: Called while data is written; see `progress.Poll`.

    Returns:
        Where each item lies, and the file.

    Raises:
        StorageError: The file could not be written; the message says which rank, and at which tensor. It is removed.
        UnsupportedError: This rank does not see the directory that the coordinator has made.
    """
    name = part_name(part.rank)
    path, shown_path = os.path.join(part.directory, name), os.path.join(part.final_path, name)
    try:
        fd = filesystem().create(path)
    except StorageError as error:
        if error.errno != errno.ENOENT:
            raise
        raise UnsupportedError(
            f"rank {part.rank} does not see {part.directory}, where the coordinator saves {part.final_path}: all ranks "
            "need one file system, and with enable_plan_caching=True the planner has to be FastPersistSavePlanner"
        ) from error
    places: list[tuple[int, WriteItem]] = []
    try:
        reserve(fd, align_up(_expected_bytes(items), BLOCK_BYTES), shown_path)
        with Writer(fd, shown_path, engine=engine, poll=poll, sparing=capture is not None) as writer:
            results = _write_items(_BlobStream(writer, capture), items, planner, name, places)
            size_bytes = writer.position
            used_engine = writer.finish()
            refuse_null_engine(used_engine)
            runs = writer.runs()
        filesystem().truncate(fd, size_bytes, shown_path)
        if durable:
            filesystem().sync(fd, shown_path)
    except BaseException as error:
        with suppress(StorageError):  # the part is useless, and the disk may be full
            filesystem().unlink(path)
        if not isinstance(error, StorageError):
            raise
        message = f"rank {part.rank}: {error}{_where(error, places)}"
        raise type(error)(error.errno, message, shown_path, error.offset_bytes) from error
    finally:
        os.close(fd)
    return results, WrittenPart(name, size_bytes, runs[0][2] if runs else None, used_engine)


def _where(error: StorageError, places: Sequence[tuple[int, WriteItem]]) -> str:
    """Return at which tensor an error occurred, if that is known."""
    if error.offset_bytes is None or not places:
        return ""
    index = bisect.bisect_right(places, error.offset_bytes, key=lambda place: place[0])
    return f" (at {places[max(0, index - 1)][1].index.fqn!r})"


def _expected_bytes(items: Iterable[WriteItem]) -> int:
    """Return about how long the file will be, by the plan: no item is resolved yet."""
    blobs = [
        plain_blob(item.tensor_data.properties.dtype, tuple(item.tensor_data.chunk.sizes))
        for item in items
        if item.tensor_data is not None and item.tensor_data.properties.dtype not in QUANTIZED
    ]
    return BLOCK_BYTES + sum(align_up(blob.size_bytes, blob.alignment) for blob in blobs)


def _write_items(
    stream: _BlobStream,
    items: Sequence[WriteItem],
    planner: SavePlanner,
    name: str,
    places: list[tuple[int, WriteItem]],
) -> list[WriteResult]:
    results = []
    for slot, item in enumerate(items):
        captured = stream.captured(slot)
        data = planner.resolve_data(item) if captured is None else captured
        if isinstance(data, torch.Tensor):
            data = data.detach()
            offset_bytes, length_bytes = stream.add_tensor(data, slot)
        else:
            if item.type != WriteItemType.BYTE_IO:
                raise UnsupportedError(f"{item.index.fqn!r} is planned as a tensor, and the planner gives bytes")
            offset_bytes, length_bytes = stream.add_bytes(data.getvalue())
        places.append((offset_bytes, item))
        info = _StorageInfo(name, offset_bytes, length_bytes)
        results.append(WriteResult(index=item.index, size_in_bytes=length_bytes, storage_data=info))
    stream.end()
    return results


class _BlobStream:
    """Passes blobs to a writer: many small ones at once, large ones one at a time, to hold little memory."""

    def __init__(self, writer: Writer, capture: ShardedCapture | None) -> None:
        self._writer = writer
        self._capture = capture
        self._pieces = Pieces()
        self._count = 0
        self._bytes = 0
        self._position = writer.position

    def captured(self, slot: int) -> torch.Tensor | None:
        """Return the tensor of a captured item, for its dtype and shape: its bytes may have changed."""
        return None if self._capture is None else self._capture.tensor_of(slot)

    def add_tensor(self, tensor: torch.Tensor, slot: int) -> tuple[int, int]:
        """Add a tensor, with its CRC in this slot; return offset and length of its blob."""
        if not is_plain(tensor):
            file = io.BytesIO()
            torch.save(_compact(tensor), file)
            return self.add_bytes(file.getvalue())
        blob = plain_blob(tensor.dtype, tuple(tensor.shape))
        offset_bytes = self._begin(blob.alignment)
        self._pieces.add_bytes(blob.head)
        is_captured = self._capture is not None and self._capture.add_to(self._pieces, slot)
        if blob.payload_bytes and not is_captured:
            own = tensor.resolve_conj().resolve_neg().contiguous()
            first_byte = int(own.storage_offset()) * own.element_size()
            storage = own.untyped_storage()
            self._pieces.add_storage(storage, slot, offset_bytes=first_byte, size_bytes=blob.payload_bytes)
        for index, part in enumerate(blob.tail):
            if index:
                self._pieces.add_crc(slot)
            self._pieces.add_bytes(part)
        self._added(blob.size_bytes)
        return offset_bytes, blob.size_bytes

    def add_bytes(self, data: bytes) -> tuple[int, int]:
        """Add bytes as they are; return their offset and length."""
        offset_bytes = self._begin(SMALL_ALIGNMENT)
        self._pieces.add_bytes(data)
        self._added(len(data))
        return offset_bytes, len(data)

    def end(self) -> None:
        """Fill the last block and hand over what is left."""
        self._begin(BLOCK_BYTES)
        self._flush()

    def _begin(self, alignment: int) -> int:
        offset_bytes = align_up(self._position, alignment)
        if gap_bytes := offset_bytes - self._position:
            self._pieces.add_bytes(bytes(gap_bytes))
            self._position = offset_bytes
        return offset_bytes

    def _added(self, size_bytes: int) -> None:
        self._position += size_bytes
        self._bytes += size_bytes
        self._count += 1
        limit_bytes = _DEVICE_BATCH_BYTES if self._pieces.devices else _BATCH_BYTES
        if self._count >= _BATCH_COUNT or self._bytes >= limit_bytes:
            self._flush()

    def _flush(self) -> None:
        self._writer.append(self._pieces)
        self._pieces = Pieces()
        self._count = self._bytes = 0


def _compact(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the host whose storage, if it has one, holds nothing else."""
    tensor = tensor.cpu()
    if tensor.layout is torch.strided and not tensor.is_nested and tensor.untyped_storage().nbytes() != tensor.nbytes:
        return tensor.clone()
    return tensor
