"""Parts of files that lie in the directories of several stores: their record is read, and their bytes are found."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import pytest

import fastpersist as fp
from fastpersist.formats.byte_ranges import Extent
from fastpersist.formats.manifest import CheckpointManifest, FileEntry
from fastpersist.formats.split_manifest import PARTS_NAME, Part, PartsRecord, SplitFile, Store, encode_parts, part_name
from fastpersist.loading.part_files import OpenPart, file_in_parts, missing_stores, read_record, require_whole

FILE = SplitFile("state.pt", 20, None, (Part(1, (Extent(4, 6), Extent(12, 8))), Part(3, (Extent(10, 2),))))
RECORD = PartsRecord("ab" * 16, (Store((0, 2), "node-a"), Store((1, 3), "node-b")), 1, (FILE,))
NAMES = [part_name("state.pt", rank) for rank in (1, 3)]


def manifest_of(directory: Path, **changes: FileEntry) -> CheckpointManifest:
    """Return a manifest of the files that are in a directory, with other entries for some."""
    entries = [FileEntry(one.name, one.stat().st_size, zlib.crc32(one.read_bytes())) for one in directory.iterdir()]
    listed = tuple(changes.get(entry.name, entry) for entry in entries)
    return CheckpointManifest(listed, None, 0.0, {}, {}, {}, {})


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A directory with the parts that store 1 has of the file 0, 1, 2 … 19, and their record."""
    whole = bytes(range(20))
    (tmp_path / NAMES[0]).write_bytes(whole[4:10] + whole[12:20])
    (tmp_path / NAMES[1]).write_bytes(whole[10:12])
    (tmp_path / PARTS_NAME).write_bytes(encode_parts(RECORD))
    return tmp_path


# --- the record


def test_record_is_read_where_the_manifest_lists_one(store: Path) -> None:
    assert read_record(str(store), manifest_of(store)) == RECORD
    (store / PARTS_NAME).unlink()
    assert read_record(str(store), manifest_of(store)) is None


@pytest.mark.parametrize("byte", [0, 40, -1])
def test_damaged_record_is_refused(store: Path, byte: int) -> None:
    manifest = manifest_of(store)
    data = bytearray((store / PARTS_NAME).read_bytes())
    data[byte] ^= 1
    (store / PARTS_NAME).write_bytes(data)
    with pytest.raises(fp.ChecksumError, match="it is damaged: its CRC is not that of the manifest"):
        read_record(str(store), manifest)


@pytest.mark.parametrize("change", ["missing", "longer"])
def test_record_of_other_parts_than_the_manifest_lists_is_refused(store: Path, change: str) -> None:
    if change == "missing":
        (store / NAMES[1]).unlink()
    else:
        (store / NAMES[1]).write_bytes(b"abc")
    with pytest.raises(fp.FormatError, match=f"it does not fit the manifest: {NAMES[1]}"):
        read_record(str(store), manifest_of(store))


def test_record_of_absurd_length_is_not_read(store: Path) -> None:
    manifest = manifest_of(store, **{PARTS_NAME: FileEntry(PARTS_NAME, 1 << 40, None)})
    with pytest.raises(fp.FormatError, match="it is longer than"):
        read_record(str(store), manifest)


def test_record_that_says_nonsense_is_refused(store: Path) -> None:
    content = json.loads((store / PARTS_NAME).read_bytes())
    (store / PARTS_NAME).write_text(json.dumps({**content, "format": 7}))
    with pytest.raises(fp.FormatError, match="this is no valid record of parts"):
        read_record(str(store), manifest_of(store))


def test_stores_of_another_save_count_as_missing() -> None:
    other = PartsRecord("cd" * 16, RECORD.stores, 0, ())
    assert missing_stores(RECORD, [RECORD, other]) == [0]


# --- the parts


def test_parts_of_a_file_are_found_with_their_authors(store: Path) -> None:
    found = file_in_parts(str(store), RECORD, manifest_of(store), FILE)
    assert [part.path for part in found] == [str(store / name) for name in NAMES]
    assert [part.author for part in found] == [f"rank {rank} has written it on node-b" for rank in (1, 3)]
    assert [part.entry.size_bytes for part in found] == [14, 2]


def test_bytes_are_read_by_their_place_in_the_file(store: Path) -> None:
    with OpenPart(str(store / NAMES[0]), FILE.parts[0].extents) as part:
        assert part.read_small(4, 6) == bytes(range(4, 10))
        assert part.read_small(13, 1) == bytes([13])
        assert part.read_small(0, 20) == bytes([0, 0, 0, 0, 4, 5, 6, 7, 8, 9, 0, 0, *range(12, 20)])
        assert part.read_small(0, 4) == bytes(4)


def test_parts_make_up_a_file_together_and_not_alone() -> None:
    rest = Part(0, (Extent(0, 4),))
    require_whole(20, [rest, *FILE.parts], "x")
    with pytest.raises(fp.FormatError, match="do not make up all of it, each byte once"):
        require_whole(20, FILE.parts, "x")
