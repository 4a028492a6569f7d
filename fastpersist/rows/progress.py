"""The progress record of a table being written: encodes and parses the first page of its pending file. Pure.

The page becomes the file's header when all rows are written; before that, no reader accepts it as a header. It has room
for two records, and each new record replaces the older one. So if a power failure tears the page, the previous record
is still whole. A record is valid once it is in the file: the rows that it counts were synced before it was written.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from fastpersist import _native
from fastpersist.errors import ConfigError

__all__ = ["PAGE_BYTES", "Progress", "encode_page", "newest_of", "records_of"]

PAGE_BYTES = 4096
_SLOT_BYTES = PAGE_BYTES // 2
_MAGIC = b"unfinished rows of fastpersist 1\n"


@dataclass(frozen=True, slots=True)
class Progress:
    """What is durable of a table.

    Attributes:
        spec: The description of the table that is written; a writer of another kind must not go on with it.
        done_bytes: Bytes of durable rows; whole rows, since a continuing writer may write other rows
            after them.
        crc32: The CRC-32 of these bytes.
    """

    spec: str
    done_bytes: int
    crc32: int


def encode_page(records: Sequence[Progress | None]) -> bytes:
    """Encode a page with two records, each in its place.

    Raises:
        ConfigError: A record is too long.
    """
    first, second = (bytes(_SLOT_BYTES) if record is None else _encode(record) for record in records)
    return first + second


def _encode(record: Progress) -> bytes:
    text = json.dumps(asdict(record)).encode()
    encoded = _MAGIC + b"%08x\n" % _native.crc32(text) + text + b"\n"
    if len(encoded) > _SLOT_BYTES:
        raise ConfigError(f"rows of that many dimensions cannot be described in {_SLOT_BYTES} bytes")
    return encoded.ljust(_SLOT_BYTES, b"\0")


def records_of(page: bytes) -> list[Progress | None]:
    """Return the records of a page, each in its place; None where there is no whole one."""
    return [_decode(page[:_SLOT_BYTES]), _decode(page[_SLOT_BYTES:PAGE_BYTES])]


def newest_of(records: Iterable[Progress | None]) -> Progress | None:
    """Return the record that counts the most bytes."""
    return max(filter(None, records), key=lambda record: record.done_bytes, default=None)


def _decode(slot: bytes) -> Progress | None:
    if not slot.startswith(_MAGIC):
        return None
    crc, _, rest = slot[len(_MAGIC) :].partition(b"\n")
    text = rest.partition(b"\n")[0]
    if crc != b"%08x" % _native.crc32(text):
        return None
    try:
        match json.loads(text):
            case {"spec": str(spec), "done_bytes": int(done_bytes), "crc32": int(crc32)} if done_bytes >= 0:
                return Progress(spec, done_bytes, crc32)
    except (ValueError, RecursionError):
        pass
    return None
