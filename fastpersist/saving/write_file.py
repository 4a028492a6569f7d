"""Writes a planned file and publishes it: the one sequence by which every save writes a file.

A save of a file takes these steps. Each step is one function, used for one process and several ranks, for a single file
and a directory of files, and whether training waits or goes on.

1. `containers.container_for` plans the file: every offset is known, and no byte has moved.
2. `capture_file` finds out when which bytes may change while training goes on. A save for which training waits skips
   this step.
3. `write_file` reserves the space, has all bytes written, and truncates the padding. Its argument writes the bytes:
   `write_container`, or with several ranks the writer of this rank's share.
4. `publish_file` is step 3 for a file that gets a name of its own: it also makes the file durable and visible. A file
   in a directory becomes visible with that directory.

`commit` handles names and durability, `containers` the content, and `transfer` the engines.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

from fastpersist import _native
from fastpersist.commit.file_commit import PendingFile
from fastpersist.commit.filesystem import filesystem
from fastpersist.commit.freeing import reserve
from fastpersist.config import BLOCK_BYTES
from fastpersist.formats.layout import align_up
from fastpersist.saving.capture import Capture, Sources
from fastpersist.saving.containers import Container, Literal, Stored, StoredRecords
from fastpersist.saving.ownership import Owners, Ownership
from fastpersist.saving.pacing import Spread
from fastpersist.saving.sources import Source, SourceTable
from fastpersist.transfer import cuda
from fastpersist.transfer.arena import Arena
from fastpersist.transfer.engine_selection import refuse_null_engine
from fastpersist.transfer.progress import Poll
from fastpersist.transfer.writer import Pieces, Writer

__all__ = [
    "CapturedFile",
    "PieceStream",
    "PublishedFile",
    "WrittenFile",
    "capture_file",
    "publish_file",
    "write_container",
    "write_file",
]


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """What was written of a container.

    Attributes:
        engine: The engine that wrote it.
        crc32: CRC-32 of the whole file; None when it was written without checksums.
    """

    engine: str
    crc32: int | None


class CapturedFile(NamedTuple):
    """The bytes of a file, protected from changes by training.

    Attributes:
        capture: Lets others wait until the bytes may be changed.
        snapshot: The snapshot that the file is written from.
        size_bytes: The number of bytes that were captured.
    """

    capture: Capture
    snapshot: _native.Snapshot
    size_bytes: int


def capture_file(
    sources: Sources,
    owners: Owners,
    *,
    arena: Arena,
    spread: Spread,
    on_gate: Callable[[float], None],
    look: Callable[[], Ownership],
    paranoid: bool = False,
) -> CapturedFile:
    """Capture what this process writes of a planned file; `PendingSave.begin` copies what may change at once.

    Args:
        sources: The container, or a share of it.
        owners: The owners of stable storages.
        arena: Host memory for copied bytes.
        spread: Spreads the writing over the time until the owners' next step; the file is added to it.
        on_gate: Called with the seconds that a thread waited at the gate, each time.
        look: `owners.look`, or a function that knows the answer already.
        paranoid: The option of `Capture`.
    """
    capture = Capture(owners, arena, paranoid=paranoid, on_gate=on_gate, look=look)
    spread.expect_step(owners.optimizers(), manual=owners.gate == "manual")
    snapshot = capture.add(sources)
    size_bytes = sources.sources.total_bytes()
    spread.add_file(snapshot, size_bytes)
    return CapturedFile(capture, snapshot, size_bytes)


def write_file(fd: int, path: str, size_bytes: int, write: Callable[[], WrittenFile]) -> WrittenFile:
    """Write a file of a directory: all of its bytes and its length, which the caller then syncs.

    Args:
        fd: A descriptor of the new file, open for reading and writing; the caller closes it.
        path: The final name, for messages.
        size_bytes: Exact length of the finished file.
        write: Writes all bytes, up to the end of the last block.

    Raises:
        NoSpaceError: The file system is full. Found before a byte is written, where it can reserve space.
        StorageError: Any other error of the disk.
    """
    reserve(fd, align_up(size_bytes, BLOCK_BYTES), path)
    written = write()
    filesystem().truncate(fd, size_bytes, path)
    return written


class PublishedFile(NamedTuple):
    """How a file was written.

    Attributes:
        engine: The engine that wrote it.
        write_s: Seconds until all bytes were written.
        sync_s: Seconds until bytes and name were durable; 0.0 without that.
    """

    engine: str
    write_s: float
    sync_s: float


def publish_file(
    file: PendingFile,
    size_bytes: int,
    write: Callable[[], WrittenFile],
    *,
    durable: bool,
    check: Callable[[], None] = lambda: None,
) -> PublishedFile:
    """Write a pending file, and let it take its final name. After an error the caller aborts it.

    Args:
        file: The pending file, just created.
        size_bytes: Exact length of the finished file.
        write: Writes all bytes, up to the end of the last block.
        durable: Sync file and name.
        check: Called when all is written and nothing is visible; what it raises keeps the file from being published.

    Raises:
        NoSpaceError: The file system is full. Found before a byte is written, where it can reserve space.
        StorageError: Any other error of the disk.
    """
    started_s = time.monotonic()
    file.allocate(align_up(size_bytes, BLOCK_BYTES))
    written = write()
    written_s = time.monotonic()
    check()
    file.publish(size_bytes, durable=durable)
    return PublishedFile(written.engine, written_s - started_s, file.sync_s)


def write_container(
    container: Container,
    fd: int,
    path: str,
    *,
    engine: str,
    poll: Poll | None = None,
    snapshot: _native.Snapshot | None = None,
) -> WrittenFile:
    """Write a planned file to a descriptor whose space is reserved; its end stays padded to a whole block.

    One pass in file order is enough: a source's CRC is complete when its last byte has been copied, which is just
    before its descriptor is written. So nothing is written twice and nothing waits.

    Args:
        container: The planned file to write.
        fd: A descriptor, open for reading and writing; the caller closes it.
        path: The final name, for messages.
        engine: Engine name or "auto".
        poll: Called while data is written; see `progress.Poll`.
        snapshot: Holds the container's sources, by index; without it, they are read from where they are.

    Raises:
        ConfigError, UnsupportedError: Unknown or unusable engine.
        StorageError: An error of the disk.
    """
    storages = container.sources.storages
    without_crcs = () if container.has_checksums else storages
    on_host = snapshot is None and all(map(cuda.is_host_memory, storages))
    gathering = None if on_host or snapshot is not None else _gathering_snapshot(container)
    with (
        nullcontext() if gathering is None else closing(gathering),
        Writer(fd, path, engine=engine, poll=poll, sparing=snapshot is not None, sources=without_crcs) as writer,
    ):
        snapshot = snapshot or gathering
        stream = PieceStream(writer, snapshot)
        # A storage that torch has to copy is a piece of its own.
        for part in container.batches() if on_host or snapshot is not None else container.parts():
            stream.seek(part.offset_bytes)
            if isinstance(part, Literal):
                stream.add_bytes(part.data)
            elif isinstance(part, StoredRecords):
                stream.add_records(part, container.sources, with_crcs=container.has_checksums)
            elif isinstance(part, Stored):
                slot = part.source if container.has_checksums else None
                stream.add_source(container.sources[part.source], part.source, slot)
            else:
                stream.add_crc(part.source if container.has_checksums else None)
        stream.flush()
        crcs = writer.crcs(len(container.sources)) if container.has_checksums else [0] * len(container.sources)
        stream.seek(container.closing_extent[0])
        stream.add_bytes(container.closing(crcs))
        stream.flush()
        used_engine = writer.finish()
        runs = writer.runs()
    refuse_null_engine(used_engine)
    return WrittenFile(used_engine, None if runs is None else _native.combine_runs(runs, container.size_bytes))


_gathering = Arena(8 << 20)  # through which small tensors leave a device when nothing is captured


def _gathering_snapshot(container: Container) -> _native.Snapshot | None:
    """Return a snapshot that copies small tensors of devices many at a time; None where all is on the host."""
    sources = container.sources
    ordinals = [cuda.ordinal_of(storage) for storage in sources.storages]
    on_devices = {ordinal for ordinal in ordinals if ordinal is not None}
    if not on_devices:
        return None
    if any(
        ordinal is None and not cuda.is_host_memory(storage)
        for ordinal, storage in zip(ordinals, sources.storages, strict=True)
    ):
        return None  # torch has to copy some of them
    for device in on_devices:
        cuda.follow_caller(device, to_host=True)
    snapshot = _native.Snapshot(_gathering.for_state(container.size_bytes))
    snapshot.add(
        [storage.data_ptr() + start for storage, start in zip(sources.storages, sources.offsets_bytes, strict=True)],
        sources.sizes_bytes,
        [_native.SourceKind.CONSTANT] * len(ordinals),
        ordinals,
    )
    return snapshot


_BATCH_COUNT = 2048
"""Parts handed to the writer at a time: headers of up to a block each are not all held in memory."""


class PieceStream:
    """Collects small pieces for a writer: it hands over many in one call, and literal bytes in a row as one piece.

    Args:
        writer: Gets the pieces.
        snapshot: Holds the sources; without it, they are read from where they are.
    """

    def __init__(self, writer: Writer, snapshot: _native.Snapshot | None) -> None:
        self._writer = writer
        self._snapshot = snapshot
        self._pieces = Pieces()
        self._count = 0
        self._literal: list[bytes] = []
        self._position = writer.position

    def seek(self, offset_bytes: int) -> None:
        """Go on at an offset of the file: where the last piece ended, or at another block."""
        if offset_bytes != self._position:
            self.flush()
            self._writer.seek(offset_bytes)
            self._position = offset_bytes

    def add_bytes(self, data: bytes) -> None:
        """Add literal bytes."""
        self._literal.append(data)
        self._added(len(data))

    def add_crc(self, slot: int | None) -> None:
        """Add the CRC of a slot as it is when it is written; without a slot, four zeros."""
        if slot is None:
            self.add_bytes(bytes(4))
            return
        self._end_literal()
        self._pieces.add_crc(slot)
        self._added(4)

    def add_source(self, source: Source, index: int, slot: int | None) -> None:
        """Add a source, which the snapshot has under this index."""
        self._end_literal()
        if self._snapshot is not None:
            self._pieces.add_captured(self._snapshot, index, source.size_bytes, slot)
        else:
            self._pieces.add_storage(
                source.storage, slot, offset_bytes=source.offset_bytes, size_bytes=source.size_bytes
            )
        self._added(source.size_bytes)

    def add_records(self, part: StoredRecords, sources: SourceTable, *, with_crcs: bool) -> None:
        """Add records; without a snapshot all of their sources are in host memory. Each source has a slot of its own.

        Args:
            part: The records to add.
            sources: All sources of the file.
            with_crcs: Compute and record CRCs.
        """
        self._end_literal()
        self._pieces.add_records(part.records, sources, part.first_source, self._snapshot, with_crcs)
        self._added(part.records[-1].end_offset_bytes - part.offset_bytes)
        self.flush()

    def flush(self) -> None:
        """Hand over all pieces; return when their bytes have been copied."""
        if not self._count:
            return
        self._end_literal()
        self._writer.append(self._pieces)
        self._pieces = Pieces()
        self._count = 0

    def _added(self, size_bytes: int) -> None:
        self._position += size_bytes
        self._count += 1
        if self._count >= _BATCH_COUNT:
            self.flush()

    def _end_literal(self) -> None:
        if self._literal:
            self._pieces.add_bytes(b"".join(self._literal))
            self._literal.clear()
