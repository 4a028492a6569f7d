"""Torch zips seen through Python's zipfile, which shares no code with ours: compare, damage and forge them."""

from __future__ import annotations

import io
import mmap
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch.utils.serialization import config


def save_aligned(obj: object, path: Path, *, checksum: bool = True, alignment: int = 4096) -> None:
    """Save with stock torch.save, storages aligned as ours are."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(checksum)
    try:
        with config.patch("save.storage_alignment", alignment):
            torch.save(obj, path)
    finally:
        torch.serialization.set_crc32_options(before)


def data_offset(data: bytes | bytearray, info: zipfile.ZipInfo) -> int:
    """Return where a record's data starts, by its local header."""
    start = info.header_offset
    name_bytes = int.from_bytes(data[start + 26 : start + 28], "little")
    extra_bytes = int.from_bytes(data[start + 28 : start + 30], "little")
    return start + 30 + name_bytes + extra_bytes


def record_places(data: bytes) -> dict[str, tuple[int, int]]:
    """Return offset and length of each record's data, by its name without the archive's prefix."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {
            info.filename.partition("/")[2]: (data_offset(data, info), info.file_size) for info in archive.infolist()
        }


def open_ranges(data: mmap.mmap) -> list[tuple[int, int]]:
    """Return what may differ between two writers: the digits of the serialization id, and that record's CRCs.

    It is the last record, so its entry is the last of the central directory.
    """
    entry = data.rfind(b"PK\x01\x02")
    name = data.rfind(b"/.data/serialization_id", 0, entry)
    digits = data.find(b"PK\x07\x08", name) - 40
    assert data[digits : digits + 40].isdigit()
    return [(digits, digits + 40), (digits + 44, digits + 48), (entry + 16, entry + 20)]


def assert_same_files(ours: Path, stock: Path) -> None:
    """Fail at the first byte that differs, the serialization id left aside."""
    assert ours.stat().st_size == stock.stat().st_size
    with open(ours, "rb") as first, open(stock, "rb") as second:
        with (
            mmap.mmap(first.fileno(), 0, access=mmap.ACCESS_READ) as left,
            mmap.mmap(second.fileno(), 0, access=mmap.ACCESS_READ) as right,
        ):
            ranges = open_ranges(right)
            assert open_ranges(left) == ranges
            borders = [0, *(border for pair in ranges for border in pair), len(right)]
            for start, end in zip(borders[::2], borders[1::2], strict=True):
                for at in range(start, end, 1 << 22):
                    block = slice(at, min(at + (1 << 22), end))
                    if left[block] != right[block]:
                        first_difference = next(i for i in range(at, end) if left[i] != right[i])
                        raise AssertionError(f"the first difference is at {first_difference}")


def flip_bit(path: Path, offset_bytes: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset_bytes)
        byte = file.read(1)[0]
        file.seek(offset_bytes)
        file.write(bytes([byte ^ 1]))


def read_records(path: Path) -> dict[str, bytes]:
    """Return the contents of every record by its full name."""
    with zipfile.ZipFile(path) as archive:
        return {info.filename: archive.read(info) for info in archive.infolist()}


def write_records(
    path: Path,
    records: Mapping[str, bytes] | Iterable[tuple[str, bytes]],
    compression: int = zipfile.ZIP_STORED,
) -> None:
    """Write an archive with Python's zipfile: another layout than torch's, and any contents."""
    pairs = records.items() if isinstance(records, Mapping) else records
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in pairs:
            archive.writestr(name, data)


def with_pickle(path: Path, data_pkl: bytes) -> None:
    """Replace data.pkl of an archive; everything else stays, and all CRCs are right."""
    records = read_records(path)
    write_records(path, {n: data_pkl if n.endswith("/data.pkl") else d for n, d in records.items()})
