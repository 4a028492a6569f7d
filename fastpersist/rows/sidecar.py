"""The sidecar of a table: CRCs of its chunks, and for a packed table the position of each id's row.

`<name>.rows.safetensors` holds "crc32", one CRC-32 for each `CHUNK_BYTES` of the rows' bytes, and perhaps
"position_of_row". Any reader of safetensors reads it. Table and sidecar cannot become visible in one step, so a sidecar
is trusted only if it matches the existing file: its length, its header, its first and its last chunk. The writer
replaces the two in an order in which a sidecar never lies beside another table (`writer`).

A table without its sidecar is a table without checksums, unless it is packed: then ids would find the wrong rows. So
a packed safetensors file says in its header that it needs one, and positions for another table are an error.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from fastpersist import _native
from fastpersist.commit.filesystem import has_name, storage_errors
from fastpersist.errors import ChecksumError, FormatError
from fastpersist.formats.safetensors import Entry
from fastpersist.loading.checkpoint_file import CheckpointSource
from fastpersist.saving.file_save import FileOptions, save_file
from fastpersist.transfer.reader import Extents, read_extents

__all__ = [
    "CHUNK_BYTES",
    "PACKED_KEY",
    "ChunkCheck",
    "Sidecar",
    "chunk_crcs",
    "has_positions",
    "read_positions",
    "read_sidecar",
    "save_sidecar",
    "sidecar_path",
]

CHUNK_BYTES = 1 << 20
"""Bytes per CRC. Changing it breaks existing sidecars: then change _FORMAT, too."""

PACKED_KEY = "fastpersist.packed"
"""In the metadata of a safetensors table whose rows are not in the order of their ids."""

_FORMAT = "1"
_FORMAT_KEY = "fastpersist.rows"
_SUFFIX = ".rows.safetensors"
_BATCH_COUNT = 2048  # chunks of one read: 2 GiB, so that starting an engine costs nothing
_CRCS, _POSITIONS = "crc32", "position_of_row"


@dataclass(frozen=True, slots=True)
class Sidecar:
    """What a sidecar says of its table.

    Attributes:
        path: The path of the sidecar.
        file_bytes: The length of the table's file.
        offset_bytes: Where the rows begin.
        row_count: The number of rows.
        header_crc32: The CRC-32 of the bytes before the rows.
        crcs: The CRC-32 of each chunk of the rows; the last chunk may be shorter.
    """

    path: str
    file_bytes: int
    offset_bytes: int
    row_count: int
    header_crc32: int
    crcs: list[int]

    def misfits(self, table: CheckpointSource) -> str:
        """Say how the file differs from the sidecar's description; an empty string if it does not.

        Raises:
            StorageError: The file cannot be read.
        """
        if table.size_bytes != self.file_bytes:
            return f"the file has {table.size_bytes} bytes, not {self.file_bytes}"
        if _native.crc32(table.read_at(0, self.offset_bytes)) != self.header_crc32:
            return "the header is another"
        for index in {0, len(self.crcs) - 1} if self.crcs else ():
            start_bytes = self.offset_bytes + index * CHUNK_BYTES
            chunk = table.read_at(start_bytes, min(CHUNK_BYTES, self.file_bytes - start_bytes))
            if _native.crc32(chunk) != self.crcs[index]:
                return f"the bytes from offset {start_bytes} on are others"
        return ""


class ChunkCheck:
    """Compares a table with its sidecar while it is read from its first byte on, in parts of any length.

    Args:
        facts: What the sidecar says.
        path: The path of the table, for messages.
    """

    def __init__(self, facts: Sidecar, path: str) -> None:
        self._facts = facts
        self._path = path
        self._ends = iter([facts.offset_bytes, *range(facts.offset_bytes + CHUNK_BYTES, facts.file_bytes, CHUNK_BYTES)])
        self._expected = iter([facts.header_crc32, *facts.crcs])
        self._start_bytes, self._end_bytes = 0, next(self._ends)
        self._at_bytes, self._crc = 0, 0

    def take(self, part: torch.Tensor) -> None:
        """Take the next bytes, a uint8 tensor of host memory, contiguous.

        Raises:
            ChecksumError: The bytes complete a chunk, which is damaged.
        """
        rest = memoryview((ctypes.c_char * part.numel()).from_address(part.data_ptr()))
        while rest:
            taken = rest[: self._end_bytes - self._at_bytes]
            self._crc = _native.crc32(taken, self._crc)
            self._at_bytes += len(taken)
            rest = rest[len(taken) :]
            if self._at_bytes == self._end_bytes:
                self._compare()

    def _compare(self) -> None:
        expected = next(self._expected)
        if self._crc != expected:
            raise ChecksumError(
                f"the bytes up to offset {self._end_bytes} are damaged: their CRC is {self._crc:08x}, not "
                f"{expected:08x}; use another copy (if they were changed on purpose, and the table is not packed, "
                f"remove {self._facts.path})",
                path=self._path,
                offset_bytes=self._start_bytes,
            )
        self._start_bytes, self._end_bytes = self._end_bytes, next(self._ends, self._facts.file_bytes)
        self._crc = 0


def sidecar_path(path: str) -> str:
    """Return the path of a table's sidecar, whichever name of the table is given.

    Raises:
        StorageError: The name cannot be looked up: it may be a link, and the sidecar elsewhere.
    """
    with storage_errors("looking up", path):
        try:
            return os.path.realpath(path, strict=True) + _SUFFIX
        except (FileNotFoundError, NotADirectoryError):  # there is no table yet
            return os.path.realpath(path) + _SUFFIX


def save_sidecar(path: str, facts: Sidecar, positions: torch.Tensor | None, *, engine: str) -> None:
    """Write the sidecar of a table, durable when this returns.

    Args:
        path: The path of the table.
        facts: What the sidecar says.
        positions: Where the row of each id lies, for a packed table.
        engine: Engine name or "auto".

    Raises:
        StorageError: An error of the disk; no sidecar was published.
    """
    tensors = {_CRCS: torch.tensor(facts.crcs, dtype=torch.uint32, device="cpu")}
    if positions is not None:
        tensors[_POSITIONS] = positions
    metadata = {
        _FORMAT_KEY: _FORMAT,
        "file_bytes": str(facts.file_bytes),
        "offset_bytes": str(facts.offset_bytes),
        "header_crc32": f"{facts.header_crc32:08x}",
        "row_count": str(facts.row_count),
    }
    save_file(tensors, sidecar_path(path), FileOptions(metadata=metadata, engine=engine))


def read_sidecar(path: str) -> Sidecar | None:
    """Read what the sidecar of a table says; None if there is none.

    Raises:
        FormatError, ChecksumError: The sidecar is damaged.
        StorageError: The sidecar cannot be read.
    """
    name = sidecar_path(path)
    if not has_name(name):
        return None
    with CheckpointSource(name) as source:
        return _read(source)


def has_positions(path: str) -> bool:
    """Tell whether there is a sidecar of a packed table beside this path. Raises as `read_sidecar`."""
    name = sidecar_path(path)
    if not has_name(name):
        return False
    with CheckpointSource(name) as source:
        return _POSITIONS in _entries(source)


def read_positions(table: CheckpointSource, offset_bytes: int, row_count: int) -> torch.Tensor | None:
    """Return where a packed table has the row of each id; None if ids are positions.

    Args:
        table: The open file.
        offset_bytes: The offset at which the rows begin.
        row_count: The number of rows.

    Raises:
        FormatError: The sidecar of a packed table is missing, damaged, or that of another table.
        ChecksumError: The positions are damaged.
        StorageError: An error of the disk.
    """
    name = sidecar_path(table.path)
    if not has_name(name):
        if table.kind == "safetensors" and PACKED_KEY in table.header.metadata:
            raise FormatError(
                f"its rows are packed, and {name}, which says where the row of each id is, is missing; copy it there "
                "too",
                path=table.path,
            )
        return None
    with CheckpointSource(name) as source:
        entry = _entries(source).get(_POSITIONS)
        if entry is None:
            return None
        facts = _read(source)
        why_not = facts.misfits(table)
        if not why_not and (facts.offset_bytes != offset_bytes or entry.shape != (row_count,)):
            why_not = "its rows are others"
        if why_not:
            raise FormatError(
                f"{name} says where a packed table has its rows, but not this one ({why_not}); if the table was "
                "written anew, remove that file, else restore the table",
                path=table.path,
            )
        dtype = {"I32": torch.int32, "I64": torch.int64}.get(entry.dtype)
        if dtype is None:
            raise FormatError(f"its positions are {entry.dtype}, not I32 or I64", path=name)
        positions = _read_tensor(source, entry, dtype)
    if row_count and not 0 <= int(positions.min()) <= int(positions.max()) < row_count:
        raise FormatError(f"it has positions outside of the {row_count} rows", path=name)
    return positions


def _entries(source: CheckpointSource) -> dict[str, Entry]:
    if source.kind != "safetensors" or source.header.metadata.get(_FORMAT_KEY) != _FORMAT:
        raise FormatError(
            f"it has the name of a table's sidecar, but is none, or has another version; remove it (format {_FORMAT})",
            path=source.path,
        )
    return {entry.name: entry for entry in source.header.entries}


def _read(source: CheckpointSource) -> Sidecar:
    entry = _entries(source).get(_CRCS)
    metadata = source.header.metadata
    try:
        file_bytes, offset_bytes = int(metadata["file_bytes"]), int(metadata["offset_bytes"])
        row_count = int(metadata["row_count"])
        header_crc32 = int(metadata["header_crc32"], 16)
    except (KeyError, ValueError) as error:
        raise FormatError(f"the metadata lacks a number: {error!r}", path=source.path) from None
    if entry is None or entry.dtype != "U32" or not 0 <= offset_bytes <= file_bytes or row_count < 0:
        raise FormatError("it has no CRCs, or impossible metadata", path=source.path)
    count = -(-(file_bytes - offset_bytes) // CHUNK_BYTES)
    if entry.shape != (count,):
        raise FormatError(f"it has {entry.shape} CRCs for {count} chunks", path=source.path)
    crcs = _read_tensor(source, entry, torch.uint32).tolist()
    return Sidecar(source.path, file_bytes, offset_bytes, row_count, header_crc32, crcs)


def _read_tensor(source: CheckpointSource, entry: Entry, dtype: torch.dtype) -> torch.Tensor:
    tensor = torch.empty(entry.shape, dtype=dtype, device="cpu")
    extents = Extents()
    extents.add_storage(entry.offset_bytes, tensor.untyped_storage(), with_crc=True, fresh=True)
    (crc,) = read_extents(source.fd, source.path, extents).crcs
    if entry.crc != crc:
        raise ChecksumError(f"the bytes of {entry.name} are damaged", path=source.path, offset_bytes=entry.offset_bytes)
    return tensor


def chunk_crcs(fd: int, path: str, start_bytes: int, end_bytes: int, *, engine: str = "auto") -> Iterator[int]:
    """Read a part of a file, and yield the CRC-32 of each chunk of it, at the speed of the disk.

    Args:
        fd: A descriptor of the file, as in `read_extents`.
        path: The path of the file, for messages.
        start_bytes: The offset at which the first chunk begins.
        end_bytes: The offset at which the last chunk ends.
        engine: Engine name or "auto".

    Raises:
        StorageError: An error of the disk, or the file ends first.
    """
    while start_bytes < end_bytes:
        extents = Extents()
        batch_end = min(end_bytes, start_bytes + _BATCH_COUNT * CHUNK_BYTES)
        for chunk_start in range(start_bytes, batch_end, CHUNK_BYTES):
            extents.add_checked(chunk_start, min(CHUNK_BYTES, batch_end - chunk_start))
        yield from read_extents(fd, path, extents, engine=engine).crcs
        start_bytes = batch_end
