"""Read and compare the parts of one save that lie in the directories of several stores, and check that they are whole.

`formats.split_manifest` defines the record of parts. What is done with the bytes is the business of `merge` and of
`node_local.exchange`.
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
    """A part of a file that lies in some store's directory.

    Attributes:
        path: Where.
        entry: What the manifest says of it.
        part: Who wrote it, and what is in it.
        host: Of the store that it lies in.
    """

    path: str
    entry: FileEntry
    part: Part
    host: str

    @property
    def author(self) -> str:
        """Who wrote it, for messages."""
        return f"rank {self.part.rank} has written it on {self.host}"


def read_record(path: str, manifest: CheckpointManifest) -> PartsRecord | None:
    """Read the record of parts of a checkpoint directory, None if it has none.

    Args:
        path: The directory.
        manifest: Of it.

    Raises:
        FormatError, ChecksumError: The record is damaged, or does not fit the manifest.
        StorageError: An error of the disk.
    """
    entries = {entry.name: entry for entry in manifest.files}
    listed = entries.get(PARTS_NAME)
    if listed is None:
        return None
    record_path = os.path.join(path, PARTS_NAME)
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
    """Return the stores that a record names and that are not among those found."""
    present = {one.store for one in found if one.token == record.token}
    return [number for number in range(len(record.stores)) if number not in present]


def file_in_parts(path: str, record: PartsRecord, manifest: CheckpointManifest, file: SplitFile) -> list[FoundPart]:
    """Return the parts of a file that lie in a store's directory."""
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
        FormatError: They do not.
    """
    ends = [0]
    starts = []
    for offset_bytes, extent_bytes in sorted(extent for part in parts for extent in part.extents):
        starts.append(offset_bytes)
        ends.append(offset_bytes + extent_bytes)
    if [*starts, size_bytes] != ends:
        raise FormatError("the parts of the file do not make up all of it, each byte once", path=path)


class OpenPart:
    """A part, open for reading by offsets of the file. A context manager; one thread uses it.

    Args:
        path: Where.
        extents: Where its bytes belong.
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
        """Read bytes of the file; what lies in other parts is zeros."""
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
