"""PARTS.json ⇄ dataclasses: how one file lies in several directories. Pure: no I/O, no torch, hostile input expected.

Ranks that share no file system write one checkpoint into several directories, one in each file system: a *store*. A
file that several ranks write together does not exist there: each writer has a *part* of it, its extents in file order
without gaps. PARTS.json is in the directory of every store. It lists what each part holds, and all stores, so that a
reader of one store knows which others are missing. docs/reference/file-format.md, section 5, is the format.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from fastpersist.errors import ConfigError, FormatError
from fastpersist.formats.byte_ranges import Extent
from fastpersist.formats.manifest import check_file_name, file_entry_of, natural_number

__all__ = [
    "COPY_NAME",
    "PARTS_LIMIT_BYTES",
    "PARTS_NAME",
    "Part",
    "PartsRecord",
    "SplitFile",
    "Store",
    "encode_parts",
    "parse_parts",
    "part_name",
]

PARTS_NAME = "PARTS.json"
"""The name of the record in its checkpoint directory."""

COPY_NAME = "COPY.json"
"""The name of the record where each store has whole files: the same format, without files in parts."""

PARTS_LIMIT_BYTES = 64 << 20
"""The longest record that is read."""

_FORMAT = 1
_RANK_COUNT_MAX = 1_000_000
_TOKEN = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class Store:
    """The ranks that wrote to one file system, and the host that the first of them ran on."""

    ranks: tuple[int, ...]
    host: str


@dataclass(frozen=True, slots=True)
class Part:
    """The bytes of a file that one rank wrote.

    Attributes:
        rank: The rank that wrote the part.
        extents: Where the part's bytes belong in the file, ascending; the part holds them without gaps.
    """

    rank: int
    extents: tuple[Extent, ...]

    @property
    def size_bytes(self) -> int:
        """Length of the part."""
        return sum(extent.size_bytes for extent in self.extents)


@dataclass(frozen=True, slots=True)
class SplitFile:
    """A file that lies in parts.

    Attributes:
        name: The name of the file once it is whole.
        size_bytes: The length of the whole file.
        crc32: The CRC-32 of the whole file; None if it is not known.
        parts: The parts in this store.
    """

    name: str
    size_bytes: int
    crc32: int | None
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class PartsRecord:
    """What a PARTS.json says.

    Attributes:
        token: The token of the save: the same in all its stores, and in no other save.
        stores: All stores of the save.
        store: The index of the store that holds this record.
        files: The files that lie in parts.
        own_files: The names of the files of single ranks, in all stores; only where each store has a copy.
    """

    token: str
    stores: tuple[Store, ...]
    store: int
    files: tuple[SplitFile, ...]
    own_files: tuple[str, ...] = ()

    def host_of(self, rank: int) -> str:
        """Return the name of the host that a rank wrote on."""
        return next((store.host for store in self.stores if rank in store.ranks), "an unknown host")

    def describe(self, stores: Sequence[int]) -> str:
        """Name stores, for messages: "ranks 2, 3 (written on node-b)"."""
        told = []
        for number in stores:
            ranks = self.stores[number].ranks
            shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
            told.append(f"{'rank' if len(ranks) == 1 else 'ranks'} {shown} (written on {self.stores[number].host})")
        return "; ".join(told)


def part_name(file_name: str, rank: int) -> str:
    """Name the file that holds a rank's part of a file."""
    return f"{file_name}.part-{rank:05d}"


# ------------------------------------------------------------------------------------------------------- writing


def encode_parts(record: PartsRecord) -> bytes:
    """Encode a record as compact JSON: many tensors have many extents.

    Raises:
        ConfigError: Anything that `parse_parts` would refuse.
    """
    content = {
        "format": _FORMAT,
        "token": record.token,
        "store": record.store,
        "stores": [{"ranks": list(store.ranks), "host": store.host} for store in record.stores],
        "files": [
            {
                "name": file.name,
                "size_bytes": file.size_bytes,
                **({} if file.crc32 is None else {"crc32": f"{file.crc32:08x}"}),
                "parts": [
                    {"rank": part.rank, "extents": [number for extent in part.extents for number in extent]}
                    for part in file.parts
                ],
            }
            for file in record.files
        ],
        **({"own_files": list(record.own_files)} if record.own_files else {}),
    }
    try:
        data = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode() + b"\n"
        _record_of(json.loads(data))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"a record of parts cannot hold this: {error}") from None
    return data


# ------------------------------------------------------------------------------------------------------- reading


def parse_parts(data: bytes, path: str) -> PartsRecord:
    """Parse and prove a record.

    Args:
        data: The whole file.
        path: The path of the record, for messages.

    Raises:
        FormatError: The data is no record of format 1, or breaks one of its rules.
    """
    try:
        if len(data) > PARTS_LIMIT_BYTES:
            raise ValueError(f"it is longer than {PARTS_LIMIT_BYTES} bytes")
        return _record_of(json.loads(data.decode()))
    except (ValueError, RecursionError) as error:
        raise FormatError(f"this is no valid record of parts: {error}", path=path) from None


def _record_of(content: Any) -> PartsRecord:
    if not isinstance(content, dict):
        raise ValueError("it is JSON, but no object")
    if content.get("format") != _FORMAT:
        raise ValueError(f"this FastPersist reads format {_FORMAT} only; upgrade it")
    token = content.get("token")
    if not isinstance(token, str) or not _TOKEN.fullmatch(token):
        raise ValueError('"token" is missing, or not 32 hexadecimal digits')
    stores = tuple(_store_of(one) for one in _list(content, "stores"))
    ranks = [rank for store in stores for rank in store.ranks]
    if sorted(ranks) != list(range(len(ranks))):
        raise ValueError("a rank is in no store, or in two")
    own = natural_number(content.get("store"), '"store"')
    if own >= len(stores):
        raise ValueError(f"there is no store {own}")
    files = tuple(_file_of(one, set(stores[own].ranks)) for one in _list(content, "files"))
    if len({file.name for file in files}) != len(files):
        raise ValueError("a file occurs twice")
    return PartsRecord(token, stores, own, files, _own_files_of(content))


def _own_files_of(content: dict[str, Any]) -> tuple[str, ...]:
    names = _list(content, "own_files") if "own_files" in content else []
    for name in names:
        if not isinstance(name, str):
            raise ValueError("a name of a file is no text")
        check_file_name(name)
    return tuple(names)


def _store_of(item: Any) -> Store:
    if not isinstance(item, dict) or not isinstance(item.get("host"), str):
        raise ValueError("a store is no object with a host")
    item["host"].encode()  # escapes can spell half a surrogate pair, which is no text
    ranks = tuple(natural_number(rank, "a rank") for rank in _list(item, "ranks"))
    if not ranks or len(ranks) > _RANK_COUNT_MAX or any(one >= next_one for one, next_one in pairwise(ranks)):
        raise ValueError("the ranks of a store are none, too many, or not ascending")
    return Store(ranks, "".join(character for character in item["host"][:255] if character.isprintable()))


def _file_of(item: Any, ranks: set[int]) -> SplitFile:
    whole = file_entry_of(item)
    parts = tuple(_part_of(one, whole.size_bytes) for one in _list(item, "parts"))
    writers = [part.rank for part in parts]
    if len(set(writers)) != len(writers) or not ranks.issuperset(writers):
        raise ValueError("a rank has two parts of a file, or is of another store")
    return SplitFile(whole.name, whole.size_bytes, whole.crc32, parts)


def _part_of(item: Any, file_bytes: int) -> Part:
    if not isinstance(item, dict):
        raise ValueError("a part is no object")
    numbers = [natural_number(one, "an extent") for one in _list(item, "extents")]
    if len(numbers) % 2:
        raise ValueError("an extent has an offset and a size")
    extents = tuple(Extent(*pair) for pair in zip(numbers[::2], numbers[1::2], strict=True))
    end_bytes = 0
    for extent in extents:
        if extent.offset_bytes < end_bytes or not extent.size_bytes or extent.end_bytes > file_bytes:
            raise ValueError("extents are empty, overlap, are not ascending, or lie outside of the file")
        end_bytes = extent.end_bytes
    return Part(natural_number(item.get("rank"), "a rank"), extents)


def _list(content: dict[str, Any], key: str) -> list[Any]:
    found = content.get(key)
    if not isinstance(found, list):
        raise ValueError(f'"{key}" is missing or no list')
    return found
