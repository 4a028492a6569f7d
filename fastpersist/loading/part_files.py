"""Reads and compares the parts of one save in the directories of several stores, and checks that they are complete.

`formats.split_manifest` defines the record of parts; `merge` and `node_local.exchange` put the bytes together.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from fastpersist import _native
from fastpersist.commit.filesystem import open_regular
from fastpersist.errors import ChecksumError, FormatError
from fastpersist.formats.byte_ranges import Extent, ExtentMap
from fastpersist.formats.manifest import CheckpointManifest, FileEntry
from fastpersist.formats.split_manifest import (
    PARTS_LIMIT_BYTES,
    PARTS_NAME,
    Part,
    PartsRecord,
    SplitFile,
    parse_parts,
    part_name,
)
from fastpersist.transfer.reader import read_exactly

__all__ = ["FoundPart", "OpenPart", "file_in_parts", "missing_stores", "read_record", "require_whole"]


@dataclass(frozen=True, slots=True)
class FoundPart:
    """A part of a file in the directory of a store.

    Attributes:
        path: The file of the part.
        entry: The part's entry in the manifest.
        part: The rank that wrote it, and the extents in it.
        host: The host of the store.
    """

    path: str
    entry: FileEntry
    part: Part
    host: str

    @property
    def author(self) -> str:
        """The rank and host that wrote the part, for messages."""
        return f"rank {self.part.rank} has written it on {self.host}"


def read_record(path: str, manifest: CheckpointManifest, name: str = PARTS_NAME) -> PartsRecord | None:
    """Read the record of parts, or of a copy, of a checkpoint directory; None if it has none.

    Args:
        path: The directory.
        manifest: The directory's manifest.
        name: The name of the record.

    Raises:
        FormatError, ChecksumError: The record is damaged, or does not fit the manifest.
        StorageError: An error of the disk.
    """
    entries = {entry.name: entry for entry in manifest.files}
    listed = entries.get(name)
    if listed is None:
        return None
    record_path = os.path.join(path, name)
    if listed.size_bytes > PARTS_LIMIT_BYTES:
        raise FormatError(f"it is longer than {PARTS_LIMIT_BYTES} bytes", path=record_path)
    fd = open_regular(record_path)
    try:
        data = read_exactly(fd, 0, listed.size_bytes, record_path)
    finally:
        os.close(fd)
    if listed.crc32 is not None and _native.crc32(data) != listed.crc32:
        raise ChecksumError("it is damaged: its CRC is not that of the manifest", path=record_path, offset_bytes=0)
    record = parse_parts(data, record_path)
    for file in record.files:
        for part in file.parts:
            entry = entries.get(part_name(file.name, part.rank))
            if entry is None or entry.size_bytes != part.size_bytes:
                raise FormatError(f"it does not fit the manifest: {part_name(file.name, part.rank)}", path=record_path)
    return record


def missing_stores(record: PartsRecord, found: Iterable[PartsRecord]) -> list[int]:
    """Return the numbers of the stores in a record that are not among those found."""
    present = {one.store for one in found if one.token == record.token}
    return [number for number in range(len(record.stores)) if number not in present]


def file_in_parts(path: str, record: PartsRecord, manifest: CheckpointManifest, file: SplitFile) -> list[FoundPart]:
    """Return the parts of a file that are in a store's directory."""
    entries = {entry.name: entry for entry in manifest.files}
    host = record.stores[record.store].host
    return [
        FoundPart(
            os.path.join(path, part_name(file.name, part.rank)), entries[part_name(file.name, part.rank)], part, host
        )
        for part in file.parts
    ]


def require_whole(size_bytes: int, parts: Sequence[Part], path: str) -> None:
    """Check that parts make up a file, each byte once.

    Raises:
        FormatError: The parts do not make up the file.
    """
    ends = [0]
    starts = []
    for offset_bytes, extent_bytes in sorted(extent for part in parts for extent in part.extents):
        starts.append(offset_bytes)
        ends.append(offset_bytes + extent_bytes)
    if [*starts, size_bytes] != ends:
        raise FormatError("the parts of the file do not make up all of it, each byte once", path=path)


class OpenPart:
    """A part, open for reading by offsets in the whole file. A context manager; one thread at a time uses it.

    Args:
        path: The file of the part.
        extents: The extents of the whole file that are in the part, in its order.
    """

    def __init__(self, path: str, extents: Sequence[Extent]) -> None:
        self.path = path
        self.map = ExtentMap(extents)
        self._stack = ExitStack()
        self.fd = self._open()
        self._small_fd = self._open()

    def _open(self) -> int:
        fd = open_regular(self.path)
        self._stack.callback(os.close, fd)
        return fd

    def read_small(self, offset_bytes: int, size_bytes: int) -> bytes:
        """Read bytes of the whole file; those in other parts are zeros."""
        data = bytearray(size_bytes)
        for low, length_bytes in self.map.within(offset_bytes, size_bytes):
            at = low - offset_bytes
            data[at : at + length_bytes] = read_exactly(self._small_fd, self.map.place_of(low), length_bytes, self.path)
        return bytes(data)

    def close(self) -> None:
        """Close it."""
        self._stack.close()

    def __enter__(self) -> OpenPart:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
