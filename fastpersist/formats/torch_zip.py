"""The torch zip, byte for byte: layout ⇄ bytes. No I/O of its own, no torch, hostile input expected.

Writing: `plan_archive` places every record of an archive whose pickle and storages have given sizes, and the encoders
make the bytes between the storages; those of records are in csrc/binding/zip_records.cc, since a file may have many
thousands. The result equals what torch.save writes with `storage_alignment=4096`, except for the digits of
`.data/serialization_id`.

Reading: `read_directory` checks a central directory (bounds, overlaps, duplicates, method) before anybody uses it.

docs/reference/file-format.md describes the bytes.
"""

from __future__ import annotations

import functools
import hashlib
import struct
import sys
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fastpersist import _native
from fastpersist.config import BLOCK_BYTES
from fastpersist.errors import FormatError, UnsupportedError
from fastpersist.formats.layout import (
    LOCAL_HEADER_BYTES,
    ZIP32_LIMIT,
    Record,
    place_record,
    place_records,
    zip64_extra_bytes,
)

__all__ = [
    "LOCAL_HEADER_MAGIC",
    "ArchivePlan",
    "Directory",
    "DirectoryEntry",
    "archive_prefix",
    "central_directory",
    "descriptor",
    "descriptor_head",
    "descriptor_tail",
    "header_damages",
    "header_leads_to",
    "leading_header",
    "local_header",
    "plan_archive",
    "read_directory",
    "serialization_id",
]

LOCAL_HEADER_MAGIC = b"PK\x03\x04"
_CENTRAL_MAGIC = b"PK\x01\x02"
_END_MAGIC = b"PK\x05\x06"
_ZIP64_END_MAGIC = b"PK\x06\x06"
_ZIP64_LOCATOR_MAGIC = b"PK\x06\x07"
_DESCRIPTOR_MAGIC = b"PK\x07\x08"

_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_CENTRAL = struct.Struct("<4sHHHHHHIIIHHHHHII")
_END = struct.Struct("<4sHHHHIIH")
_ZIP64_END = struct.Struct("<4sQHHIIQQQQ")
_ZIP64_LOCATOR = struct.Struct("<4sIQI")

_FLAGS_ENCRYPTED = 0x0001 | 0x0020 | 0x0040  # what torch takes for it: also patched data, strong encryption
_FLAG_DESCRIPTOR = 0x0008
_ZIP64_FIELD = 0x0001
_DIRECTORY_ATTRIBUTE = 0x10
_COMMENT_LIMIT_BYTES = 0xFFFF
_UNIX_MADE_BY = 0x031E
_ZIP64_VERSION = 45
_DESCRIPTOR_BYTES_MAX = 24

FORMAT_VERSION = b"1"
"""`.format_version` 1: storages are contiguous and in numeric order, so a reader may compute their offsets."""

ARCHIVE_VERSION = b"3\n"
SERIALIZATION_ID_DIGITS = 40


# ------------------------------------------------------------------------------------------------------- writing


@dataclass(frozen=True, slots=True)
class ArchivePlan:
    """Where everything of one archive lies.

    Attributes:
        records: All records in file order: pickle, three small ones, the storages, two small ones.
        small_records: The contents of the small records, by their index in `records`; without the serialization id.
        first_storage: The index of `data/0` in `records`.
        storage_count: How many storages there are, from that index on.
        storage_offsets: Where the data of each storage starts.
        storage_bytes: The bytes of all storages together.
        directory_offset_bytes: Where the central directory starts.
        size_bytes: Length of the whole file.
    """

    records: Sequence[Record]
    small_records: Mapping[int, bytes]
    first_storage: int
    storage_count: int
    storage_offsets: Sequence[int]
    storage_bytes: int
    directory_offset_bytes: int
    size_bytes: int


def archive_prefix(path: str) -> str:
    """Return the archive name that torch.save takes from a path: the file name without its last suffix.

    Names that are not ASCII go through a Python file object in torch, and all such archives are called "archive".

    An empty stem (".pt") is returned as ""; torch.save refuses it.
    """
    if not path.isascii():
        return "archive"
    name = path.replace("\\", "/").rpartition("/")[2]  # torch splits at both on every system
    stem, dot, _ = name.rpartition(".")
    return stem if dot else name


def plan_archive(
    prefix: str, pickle_bytes: int, storage_sizes: Sequence[int], alignment: int = BLOCK_BYTES
) -> ArchivePlan:
    """Place all records of an archive.

    Args:
        prefix: Archive name, as `archive_prefix` gives it.
        pickle_bytes: Length of data.pkl.
        storage_sizes: Length in bytes of each storage, in the order of their keys 0, 1, 2 …
        alignment: Every record's data starts on a multiple of it, 1 … 32768.
    """
    start = f"{prefix}/".encode()
    small = [FORMAT_VERSION, str(alignment).encode(), sys.byteorder.encode()]
    head = place_records(
        [
            (start + b"data.pkl", pickle_bytes),
            (start + b".format_version", len(small[0])),
            (start + b".storage_alignment", len(small[1])),
            (start + b"byteorder", len(small[2])),
        ],
        alignment,
    )
    sizes = storage_sizes if isinstance(storage_sizes, array) else array("Q", storage_sizes)
    placed = _place_storages(start, head[-1].end_offset_bytes, sizes.tobytes(), alignment)
    rest, storage_offsets, storage_bytes, rest_bytes = placed
    directory_offset_bytes = rest[-1].end_offset_bytes
    size_bytes = directory_offset_bytes + sum(map(_central_entry_bytes, head)) + rest_bytes
    size_bytes += _ZIP64_END.size + _ZIP64_LOCATOR.size + _END.size
    return ArchivePlan(
        [*head, *rest],
        {1: small[0], 2: small[1], 3: small[2], len(head) + len(sizes): ARCHIVE_VERSION},
        len(head),
        len(sizes),
        storage_offsets,
        storage_bytes,
        directory_offset_bytes,
        size_bytes,
    )


@functools.lru_cache(maxsize=2)  # those of the next step of a run lie there, too; 10,000 storages take 3 MB
def _place_storages(
    start: bytes, start_offset_bytes: int, storage_sizes: bytes, alignment: int
) -> tuple[list[Record], list[int], int, int]:
    """Place the storages and the records behind them.

    Args:
        start: The start of the names of all records.
        start_offset_bytes: Where the first local header starts.
        storage_sizes: The bytes of an array of type "Q".
        alignment: Every storage's data starts on a multiple of it, as in `plan_archive`.

    Returns:
        The records, where the data of each storage starts, the bytes of all storages, and those of the central entries.
    """
    sizes = array("Q", storage_sizes)
    data = start + b"data/"
    names_and_sizes = [(data + str(key).encode(), size) for key, size in enumerate(sizes)]
    names_and_sizes += [
        (start + b"version", len(ARCHIVE_VERSION)),
        (start + b".data/serialization_id", SERIALIZATION_ID_DIGITS),
    ]
    records = place_records(names_and_sizes, alignment, start_offset_bytes=start_offset_bytes)
    offsets = [record.data_offset_bytes for record in records[: len(sizes)]]
    return records, offsets, sum(sizes), sum(map(_central_entry_bytes, records))


def local_header(record: Record) -> bytes:
    """Encode everything from a record's header offset to its data: header, name, zip64 field, padding field."""
    return _native.zip_local_header(record)


def descriptor_head(record: Record) -> bytes:
    """Encode the part of the data descriptor before its CRC."""
    return _DESCRIPTOR_MAGIC if record.descriptor_bytes else b""


def descriptor_tail(record: Record) -> bytes:
    """Encode the part of the data descriptor behind its CRC: the size, twice."""
    return _native.zip_descriptor_tail(record)


def descriptor(record: Record, crc: int) -> bytes:
    """Encode the whole data descriptor of a record whose CRC is known; empty for an empty record."""
    if not record.descriptor_bytes:
        return b""
    return descriptor_head(record) + crc.to_bytes(4, "little") + descriptor_tail(record)


def _central_entry_bytes(record: Record) -> int:
    return _CENTRAL.size + len(record.name) + zip64_extra_bytes(record.size_bytes, record.header_offset_bytes)


def central_directory(records: Sequence[Record], crcs: Sequence[int]) -> bytes:
    """Encode the central directory and the end records: the commit mark inside the file, written last.

    Args:
        records: All records, in file order.
        crcs: The CRC-32 of each record's data (0 without checksums), in the same order.
    """
    directory = _native.zip_central_entries(list(records), crcs)
    return directory + _end_records(len(records), len(directory), records[-1].end_offset_bytes)


def _end_records(count: int, directory_bytes: int, offset_bytes: int) -> bytes:
    """Encode what follows the central directory."""
    zip64_end = _ZIP64_END.pack(
        _ZIP64_END_MAGIC,
        _ZIP64_END.size - 12,
        _UNIX_MADE_BY,
        _ZIP64_VERSION,
        0,
        0,
        count,
        count,
        directory_bytes,
        offset_bytes,
    )
    locator = _ZIP64_LOCATOR.pack(_ZIP64_LOCATOR_MAGIC, 0, offset_bytes + directory_bytes, 1)
    count16 = min(count, 0xFFFF)
    sizes = min(directory_bytes, ZIP32_LIMIT), min(offset_bytes, ZIP32_LIMIT)
    return zip64_end + locator + _END.pack(_END_MAGIC, 0, 0, count16, count16, *sizes, 0)


def serialization_id(records: Sequence[Record], crcs: Sequence[int]) -> bytes:
    """Return the 40 digits of `.data/serialization_id`: the same for the same names, sizes and CRCs.

    torch only logs this value; ours is a digest, torch's a hash of names and a combined CRC.
    """
    digest = hashlib.sha256(_native.zip_contents(list(records), crcs))
    return b"%040d" % (int.from_bytes(digest.digest(), "big") % 10**SERIALIZATION_ID_DIGITS)


# ------------------------------------------------------------------------------------------------------- reading


@dataclass(frozen=True, slots=True)
class DirectoryEntry:
    """One record as the central directory describes it, proven to lie inside the file and to overlap no other.

    Attributes:
        name: Name without the archive's prefix, such as `data/0`.
        size_bytes: Length of the data.
        crc: Recorded CRC-32; 0 also where the writer computed none.
        header_offset_bytes: Where the local header starts.
        data_offset_bytes: Where the data starts.
    """

    name: str
    size_bytes: int
    crc: int
    header_offset_bytes: int
    data_offset_bytes: int


@dataclass(frozen=True, slots=True)
class Directory:
    """A proven central directory: the archive's prefix and its entries by name, in directory order."""

    prefix: str
    entries: dict[str, DirectoryEntry]
    offset_bytes: int

    @property
    def has_checksums(self) -> bool:
        """Whether the writer computed CRCs: with them, hardly every non-empty record has CRC 0."""
        return any(entry.crc for entry in self.entries.values() if entry.size_bytes)


def leading_header(entry: DirectoryEntry) -> bytes:
    """Encode the fixed part of a local header that leads from `entry`'s header offset to its data.

    Readers use nothing else of a local header: sizes and CRC come from the directory. They do not care how much of the
    distance is name and how much extra fields.
    """
    distance_bytes = entry.data_offset_bytes - entry.header_offset_bytes - LOCAL_HEADER_BYTES
    name_bytes = min(distance_bytes, 0xFFFF)
    return _LOCAL.pack(LOCAL_HEADER_MAGIC, 0, 0, 0, 0, 0, 0, 0, 0, name_bytes, distance_bytes - name_bytes)


def header_leads_to(header: bytes, entry: DirectoryEntry) -> int | None:
    """Return where the fixed part of a local header says that the data of `entry` starts; None if it is no header."""
    magic, *_, name_bytes, extra_bytes = _LOCAL.unpack(header)
    if magic != LOCAL_HEADER_MAGIC:
        return None
    return entry.header_offset_bytes + LOCAL_HEADER_BYTES + int(name_bytes) + int(extra_bytes)


ReadAt = Callable[[int, int], bytes]
"""read_at(offset_bytes, size_bytes): exactly these bytes of the file, which the caller has proven to be inside it."""


def read_directory(read_at: ReadAt, file_bytes: int, *, path: str) -> Directory:
    """Parse and prove the central directory of a torch zip.

    A local header is read only where the directory alone does not give the record's place (a writer other than torch),
    so a file of ten thousand storages is opened without ten thousand reads.

    Args:
        read_at: Reads from the file.
        file_bytes: Length of the file.
        path: The path of the file, for messages.

    Raises:
        FormatError: The file is no whole zip archive, or its records lie outside the file, overlap, or share a name.
        UnsupportedError: It is a legal zip that torch.save did not write (compressed, encrypted, several disks); stock
            torch.load may be able to read it.
    """
    count, directory_bytes, directory_offset = _read_end(read_at, file_bytes, path)
    if directory_offset + directory_bytes > file_bytes or count * _CENTRAL.size > directory_bytes:
        raise FormatError("the central directory does not fit into the file", path=path, offset_bytes=directory_offset)
    raw = _parse_entries(read_at(directory_offset, directory_bytes), count, directory_offset, path)
    prefix = raw[0].name.partition(b"/")[0]
    _check_order(raw, directory_offset, path)
    alignment = _storage_alignment(raw, prefix, read_at, directory_offset, path)
    entries: dict[str, DirectoryEntry] = {}
    ends = _ends(raw, directory_offset)
    for entry in raw:
        head, slash, name = entry.name.partition(b"/")
        if not slash or head != prefix:
            raise UnsupportedError(f"{path}: record {entry.name!r} is outside the archive folder {prefix!r}")
        data_offset = _data_offset(entry, ends[entry.header_offset], alignment, read_at, path)
        text = name.decode("utf-8", "surrogateescape")
        if text in entries:
            raise FormatError(f"record {text!r} occurs twice", path=path, offset_bytes=entry.header_offset)
        entries[text] = DirectoryEntry(text, entry.size, entry.crc, entry.header_offset, data_offset)
    return Directory(prefix.decode("utf-8", "surrogateescape"), entries, directory_offset)


@dataclass(frozen=True, slots=True)
class _RawEntry:
    name: bytes
    size: int
    crc: int
    header_offset: int
    has_descriptor: bool


def _read_end(read_at: ReadAt, file_bytes: int, path: str) -> tuple[int, int, int]:
    """Find the end records; return entry count, directory length and directory offset."""
    tail_bytes = min(file_bytes, _END.size + _COMMENT_LIMIT_BYTES + _ZIP64_LOCATOR.size)
    tail = read_at(file_bytes - tail_bytes, tail_bytes)
    place = tail.rfind(_END_MAGIC)
    while place >= 0:
        end = tail[place : place + _END.size]
        if len(end) == _END.size and place + _END.size + _END.unpack(end)[7] == tail_bytes:
            break
        place = tail.rfind(_END_MAGIC, 0, place)
    if place < 0:
        _refuse_surplus(read_at, file_bytes, tail, path)
        raise FormatError(
            "there is no central directory at the end: the file is truncated, or its save never finished",
            path=path,
            offset_bytes=file_bytes,
        )
    _, disk, directory_disk, _, count, directory_bytes, directory_offset, _ = _END.unpack(end)
    if disk or directory_disk:
        raise UnsupportedError(f"{path}: a zip archive over several disks")
    locator = tail[place - _ZIP64_LOCATOR.size : place] if place >= _ZIP64_LOCATOR.size else b""
    if not locator.startswith(_ZIP64_LOCATOR_MAGIC):
        return count, directory_bytes, directory_offset
    zip64_offset = _ZIP64_LOCATOR.unpack(locator)[2]
    if zip64_offset + _ZIP64_END.size > file_bytes:
        raise FormatError("the zip64 end record lies outside the file", path=path, offset_bytes=zip64_offset)
    magic, _, _, _, disk, directory_disk, _, count, directory_bytes, directory_offset = _ZIP64_END.unpack(
        read_at(zip64_offset, _ZIP64_END.size)
    )
    if magic != _ZIP64_END_MAGIC:
        raise FormatError("the zip64 end record is damaged", path=path, offset_bytes=zip64_offset)
    if disk or directory_disk:
        raise UnsupportedError(f"{path}: a zip archive over several disks")
    return count, directory_bytes, directory_offset


def _refuse_surplus(read_at: ReadAt, file_bytes: int, tail: bytes, path: str) -> None:
    """Refuse a whole archive with more bytes behind it.

    Raises:
        UnsupportedError: There are such bytes; torch looks for the last end record, and ignores what lies behind it.
    """
    place = tail.rfind(_END_MAGIC, 0, len(tail) - _END.size + len(_END_MAGIC))
    if place < 0:
        return
    surplus_bytes = len(tail) - place - _END.size - _END.unpack_from(tail, place)[7]
    if surplus_bytes <= 0:
        return
    try:
        read_directory(read_at, file_bytes - surplus_bytes, path=path)
    except FormatError:
        return  # it is no end of an archive that begins where the file does
    raise UnsupportedError(
        f"{path}: {surplus_bytes} bytes follow the archive, which torch.load ignores: load it, and save it again"
    )


def _parse_entries(directory: bytes, count: int, directory_offset: int, path: str) -> list[_RawEntry]:
    entries = []
    unsupported = b""
    cursor = 0
    for _ in range(count):
        if cursor + _CENTRAL.size > len(directory):
            raise FormatError("the central directory is cut off", path=path, offset_bytes=directory_offset + cursor)
        fields = _CENTRAL.unpack_from(directory, cursor)
        (
            magic,
            _,
            _,
            flags,
            method,
            _,
            _,
            crc,
            packed,
            size,
            name_len,
            extra_len,
            comment_len,
            disk,
            _,
            attributes,
            offset,
        ) = fields
        name_start = cursor + _CENTRAL.size
        extra_start = name_start + name_len
        end = extra_start + extra_len + comment_len
        if magic != _CENTRAL_MAGIC or end > len(directory):
            raise FormatError("the central directory is damaged", path=path, offset_bytes=directory_offset + cursor)
        name = directory[name_start:extra_start]
        if attributes & _DIRECTORY_ATTRIBUTE and size:
            # torch's reader would return no bytes for it, and torch would take what memory holds.
            place = directory_offset + cursor
            raise FormatError(f"record {name!r} claims to be a directory", path=path, offset_bytes=place)
        if ZIP32_LIMIT in (packed, size, offset):
            extra = directory[extra_start : extra_start + extra_len]
            size, packed, offset = _zip64_values(extra, size, packed, offset, name, path, directory_offset + cursor)
        if method != 0 or packed != size or flags & _FLAGS_ENCRYPTED or disk:
            unsupported = unsupported or name
        entries.append(_RawEntry(name, size, crc, offset, bool(flags & _FLAG_DESCRIPTOR)))
        cursor = end
    _require_pickle([entry.name for entry in entries], path)
    if unsupported:
        raise UnsupportedError(f"{path}: record {unsupported!r} is compressed, encrypted or on another disk")
    return entries


def _require_pickle(names: Sequence[bytes], path: str) -> None:
    """Refuse an archive that torch.save cannot have written, and say what it is instead."""
    if any(name.endswith(b"data.pkl") for name in names):
        return
    if not names:
        raise FormatError("the archive has no records", path=path)
    what = f"a zip archive of other things, such as {names[0][:80]!r}"
    if all(name.endswith(b".npy") for name in names):
        what = "an npz file of NumPy; use numpy.load"
    raise FormatError(f"the archive has no data.pkl: it is {what}, not a file of torch.save", path=path)


def _zip64_values(
    extra: bytes, size: int, packed: int, offset: int, name: bytes, path: str, place: int
) -> tuple[int, int, int]:
    """Replace the values that say 0xFFFFFFFF by those of the zip64 extra field, which holds just these, in order."""
    cursor = 0
    while cursor + 4 <= len(extra):
        field, length = struct.unpack_from("<HH", extra, cursor)
        body = extra[cursor + 4 : cursor + 4 + length]
        cursor += 4 + length
        if field != _ZIP64_FIELD:
            continue
        values = [size, packed, offset]
        at = 0
        for i, value in enumerate(values):
            if value != ZIP32_LIMIT:
                continue
            if at + 8 > len(body):
                break
            values[i] = int.from_bytes(body[at : at + 8], "little")
            at += 8
        else:
            return values[0], values[1], values[2]
        break
    raise FormatError(f"record {name!r} lacks its 64-bit sizes", path=path, offset_bytes=place)


def _check_order(entries: list[_RawEntry], directory_offset: int, path: str) -> None:
    """Prove that records neither overlap nor reach into the directory."""
    end = 0
    for entry in sorted(entries, key=lambda entry: entry.header_offset):
        least_end = entry.header_offset + LOCAL_HEADER_BYTES + len(entry.name) + entry.size
        if entry.header_offset < end:
            raise FormatError(f"record {entry.name!r} overlaps another", path=path, offset_bytes=entry.header_offset)
        if least_end > directory_offset:
            raise FormatError(
                f"record {entry.name!r} reaches beyond the data", path=path, offset_bytes=entry.header_offset
            )
        end = least_end


def _ends(entries: list[_RawEntry], directory_offset: int) -> dict[int, int]:
    """Return, by the offset of each record's header, where the next header or the directory starts."""
    offsets = sorted(entry.header_offset for entry in entries)
    return dict(zip(offsets, [*offsets[1:], directory_offset], strict=True))


def _storage_alignment(
    entries: list[_RawEntry], prefix: bytes, read_at: ReadAt, directory_offset: int, path: str
) -> int:
    """Read the alignment that the writer recorded; torch's default where it recorded none."""
    for entry in entries:
        if entry.name == prefix + b"/.storage_alignment" and 0 < entry.size <= 5:
            data_offset = _data_offset_from_header(entry, directory_offset, read_at, path)
            text = read_at(data_offset, entry.size)
            if text.isdigit() and 0 < int(text) <= 1 << 15:
                return int(text)
    return 64


def _data_offset(entry: _RawEntry, end: int, alignment: int, read_at: ReadAt, path: str) -> int:
    """Return where a record's data starts.

    With torch's writer and its alignment, the data can start at one place only, and the descriptor ends where the
    next header starts. If both hold, nothing needs to be read.
    """
    expected = place_record(entry.name, entry.size, entry.header_offset, alignment)
    if expected.end_offset_bytes == end and entry.has_descriptor == bool(expected.descriptor_bytes):
        return expected.data_offset_bytes
    return _data_offset_from_header(entry, end, read_at, path)


def _data_offset_from_header(entry: _RawEntry, end: int, read_at: ReadAt, path: str) -> int:
    magic, *_, name_len, extra_len = _LOCAL.unpack(read_at(entry.header_offset, LOCAL_HEADER_BYTES))
    data_offset: int = entry.header_offset + LOCAL_HEADER_BYTES + name_len + extra_len
    if magic != LOCAL_HEADER_MAGIC:
        raise FormatError(f"record {entry.name!r} has no local header", path=path, offset_bytes=entry.header_offset)
    if data_offset + entry.size > end:
        raise FormatError(f"record {entry.name!r} runs into the next one", path=path, offset_bytes=entry.header_offset)
    return data_offset


def header_damages(read_at: ReadAt, file_bytes: int, directory: Directory, *, path: str) -> dict[str, str]:
    """Compare values that an archive holds twice, and find values that no writer of such archives writes.

    Reading needs none of them, so `read_directory` does not look; but a difference shows that the file was damaged.

    Args:
        read_at: Reads from the file.
        file_bytes: Length of the file.
        directory: The directory of this file.
        path: The path of the file, for messages.

    Returns:
        What is wrong, by the name of the record, or by "" for the end of the file.

    Raises:
        FormatError, UnsupportedError: As `read_directory`, if the file has changed since.
    """
    count, directory_bytes, offset = _read_end(read_at, file_bytes, path)
    data = read_at(offset, directory_bytes)
    entries: list[tuple[DirectoryEntry, bytes, list[int]]] = []
    cursor = 0
    for entry in directory.entries.values():
        _, *fields = _CENTRAL.unpack_from(data, cursor)
        name_start = cursor + _CENTRAL.size
        behind = name_start + fields[9]
        entries.append((entry, data[name_start:behind], fields))
        cursor = behind + fields[10] + fields[11]
    # torch writes version 0, and 0 in a dozen other fields. Other writers have values of their own.
    of_torch = any(fields[0] == fields[1] == 0 for _, _, fields in entries)
    damages = {}
    for entry, name, fields in entries:
        if of_torch and any(fields[index] for index in _ZERO_FIELDS):
            damages[entry.name] = "its entry in the central directory has fields that torch never sets"
            continue
        local = read_at(entry.header_offset_bytes, LOCAL_HEADER_BYTES)
        if header_leads_to(local, entry) != entry.data_offset_bytes:
            damages[entry.name] = "its header does not lead to its data"
        elif why := _contradiction(read_at, file_bytes, entry, name, fields, local):
            damages[entry.name] = why
    end = _end_records(count, directory_bytes, offset)
    if of_torch and (cursor != directory_bytes or read_at(file_bytes - len(end), len(end)) != end):
        damages[""] = "the records at the end of the file are not those that torch writes"
    return damages


# Of a central entry without its magic: made by, version, method, time, date, comment, disk, internal and external.
_ZERO_FIELDS = (0, 1, 3, 4, 5, 11, 12, 13, 14)


def _contradiction(
    read_at: ReadAt, file_bytes: int, entry: DirectoryEntry, name: bytes, fields: list[int], local: bytes
) -> str | None:
    """Compare an entry of the central directory with the local header of its record, and what follows its data."""
    _, *said = _LOCAL.unpack(local)
    _, version, flags, method, time, date, crc, packed, size = fields[:9]
    if read_at(entry.header_offset_bytes + LOCAL_HEADER_BYTES, said[8]) != name:
        return "its header has another name"
    if said[:5] != [version, flags, method, time, date]:
        return "its header has other flags, or another version, method or time"
    has_descriptor = flags & _FLAG_DESCRIPTOR  # then the header need not say what was not known yet
    for own, value in zip(said[5:8], (crc, packed, size), strict=True):
        if own != value and not (has_descriptor and own in (0, ZIP32_LIMIT)):
            return "its header has another CRC or size"
    if not has_descriptor:
        return None
    end = entry.data_offset_bytes + entry.size_bytes
    found = read_at(end, min(_DESCRIPTOR_BYTES_MAX, file_bytes - end))
    head = _DESCRIPTOR_MAGIC + entry.crc.to_bytes(4, "little")
    sizes = (struct.pack("<II", size, size), struct.pack("<QQ", entry.size_bytes, entry.size_bytes))
    if found.startswith((head + sizes[0], head + sizes[1])):
        return None
    return "what follows its data has another CRC or size"
