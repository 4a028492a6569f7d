"""Computes where every record of a file lies: storages → extents, in pure integers.

The layout of a torch zip depends only on record names, sizes and alignment, so every offset is known before a byte
moves, and any writer can write any part. This module computes places; `torch_zip` encodes the bytes at those places.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

__all__ = ["Record", "align_up", "place_records"]

ZIP32_LIMIT = 0xFFFFFFFF
"""A size or header offset from here on needs the 64-bit fields of zip64."""

LOCAL_HEADER_BYTES = 30
_EXTRA_FIELD_HEADER_BYTES = 4


class Record(NamedTuple):
    """One record of a torch zip and where it lies.

    Attributes:
        name: Name in the archive, with the archive's prefix, as bytes.
        size_bytes: Length of the data.
        header_offset_bytes: Where the local header starts.
        data_offset_bytes: Where the data starts, a multiple of the alignment.
        descriptor_bytes: Length of the data descriptor behind the data: 0 (empty record), 16, or 24 (zip64).
    """

    name: bytes
    size_bytes: int
    header_offset_bytes: int
    data_offset_bytes: int
    descriptor_bytes: int

    @property
    def end_offset_bytes(self) -> int:
        """Where the next record's header starts."""
        return self.data_offset_bytes + self.size_bytes + self.descriptor_bytes


def align_up(value: int, alignment: int) -> int:
    """Round up to a multiple of `alignment` (> 0)."""
    return -(-value // alignment) * alignment


def zip64_extra_bytes(size_bytes: int, header_offset_bytes: int) -> int:
    """Return the length of the zip64 extra field in a record's local header: 0, 12, 20 or 28 bytes.

    Worked example: a 5 GiB storage whose header lies at 6 GiB has a 4-byte field header, two 8-byte sizes and one
    8-byte offset: 28.
    """
    if size_bytes < ZIP32_LIMIT and header_offset_bytes < ZIP32_LIMIT:
        return 0
    fields = (16 if size_bytes >= ZIP32_LIMIT else 0) + (8 if header_offset_bytes >= ZIP32_LIMIT else 0)
    return _EXTRA_FIELD_HEADER_BYTES + fields


def place_record(name: bytes, size_bytes: int, header_offset_bytes: int, alignment: int) -> Record:
    """Place one record whose local header starts at `header_offset_bytes`.

    After the header come the name, the zip64 field where needed, and a padding field that makes the data start on a
    multiple of `alignment`; the descriptor directly follows the data.
    """
    zip64_bytes = zip64_extra_bytes(size_bytes, header_offset_bytes)
    least = header_offset_bytes + LOCAL_HEADER_BYTES + len(name) + zip64_bytes + _EXTRA_FIELD_HEADER_BYTES
    descriptor_bytes = 0 if size_bytes == 0 else (24 if zip64_bytes else 16)
    return Record(name, size_bytes, header_offset_bytes, align_up(least, alignment), descriptor_bytes)


def place_records(records: Iterable[tuple[bytes, int]], alignment: int, *, start_offset_bytes: int = 0) -> list[Record]:
    """Place records one behind the other, as torch's writer does.

    Args:
        records: The full name and the size in bytes of each record, in file order.
        alignment: Every record's data starts on a multiple of it; 1 … 32768, because the padding field's length is a
            16-bit number.
        start_offset_bytes: Where the first local header starts.

    Returns:
        The records with their places; the last one's `end_offset_bytes` is where the central directory starts.
    """
    placed = []
    cursor = start_offset_bytes
    for name, size_bytes in records:
        record = place_record(name, size_bytes, cursor, alignment)
        placed.append(record)
        cursor = record.end_offset_bytes
    return placed
