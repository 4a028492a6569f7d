"""The torch zip: our headers equal torch's beyond 4 GiB too, and a directory is believed only when it is proven."""

from __future__ import annotations

import errno
import os
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from support.archives import save_aligned
from support.sameness import assert_same
from support.torch_release import TORCH

import fastpersist as fp
from fastpersist.errors import FormatError, UnsupportedError
from fastpersist.formats import torch_zip
from fastpersist.saving.skeleton import pickle_skeleton

GIB = 1 << 30

# --------------------------------------------------------------------------------------------- beyond 32 bits


def compose(path: Path, plan: torch_zip.ArchivePlan, pickled: bytes) -> None:
    """Write everything of an archive but the storages, which stay holes; without checksums."""
    crcs = [0] * len(plan.records)
    contents = {0: pickled, **plan.small_records}
    contents[len(plan.records) - 1] = torch_zip.serialization_id(plan.records[:-1], crcs[:-1])
    with path.open("wb") as file:
        for index, record in enumerate(plan.records):
            file.seek(record.header_offset_bytes)
            file.write(torch_zip.local_header(record) + contents.get(index, b""))
            file.seek(record.data_offset_bytes + record.size_bytes)
            file.write(torch_zip.descriptor(record, 0))
        assert file.tell() == plan.directory_offset_bytes
        file.write(torch_zip.central_directory(plan.records, crcs))
    assert path.stat().st_size == plan.size_bytes


def data_regions(path: Path) -> Iterator[tuple[int, int]]:
    """Yield the parts of a sparse file that are not holes."""
    fd = os.open(path, os.O_RDONLY)
    end = 0
    try:
        while True:
            try:
                start = os.lseek(fd, end, os.SEEK_DATA)
            except OSError as error:
                if error.errno == errno.ENXIO:
                    return
                raise
            end = os.lseek(fd, start, os.SEEK_HOLE)
            yield start, end
    finally:
        os.close(fd)


def read_region(path: Path, start: int, end: int) -> bytes:
    with path.open("rb") as file:
        file.seek(start)
        return file.read(end - start)


def sparse_tensor(directory: Path, size_bytes: int) -> torch.Tensor:
    """Make a tensor of any size that takes neither memory nor disk."""
    path = directory / f"storage-{size_bytes}"
    with path.open("wb") as file:
        file.truncate(size_bytes)
    storage = torch.UntypedStorage.from_file(str(path), shared=False, nbytes=size_bytes)
    return torch.empty(0, dtype=torch.uint8).set_(storage)


BIG_STATES = {
    "one byte less than 32 bits": [0xFFFFFFFE, 3],
    "all of 32 bits": [0xFFFFFFFF, 3],
    "over 32 bits": [5 * GIB, 3, 0, 4096],
    "headers past 4 GiB": [3 * GIB, 2 * GIB, 1, 0, 5, 0xFFFFFFFF, 0],
}


@pytest.mark.parametrize("name", BIG_STATES)
def test_headers_beyond_four_gigabytes_equal_torchs(name: str, tmp_path: Path) -> None:
    for directory in ("ours", "stock", "storages"):
        (tmp_path / directory).mkdir()
    ours, stock = tmp_path / "ours" / "model.pt", tmp_path / "stock" / "model.pt"
    state = [sparse_tensor(tmp_path / "storages", size) for size in BIG_STATES[name]]
    with torch.serialization.skip_data():
        save_aligned(state, stock, checksum=False)
    if stock.stat().st_blocks * 512 > GIB:
        pytest.skip("the file system of the test directory has no sparse files")

    skeleton = pickle_skeleton(state)
    sizes = [storage.nbytes() for storage in skeleton.storages]
    plan = torch_zip.plan_archive("model", len(skeleton.pickle), sizes)
    compose(ours, plan, skeleton.pickle)

    assert ours.stat().st_size == stock.stat().st_size
    identity = plan.records[-1].data_offset_bytes
    for region in sorted({*data_regions(ours), *data_regions(stock)}):
        left, right = (bytearray(read_region(path, *region)) for path in (ours, stock))
        if region[0] <= identity < region[1]:
            for part in (left, right):
                place = identity - region[0]
                assert part[place : place + 40].isdigit()
                part[place : place + 40] = bytes(40)
        assert left == right

    offsets = [record.data_offset_bytes for record in plan.records[4 : 4 + len(sizes)]]
    for load in (fp.load, torch.load):
        loaded = load(ours, map_location="meta")
        assert [tensor.nbytes for tensor in loaded] == sizes
        if TORCH >= (2, 11):  # earlier ones note no offsets here
            assert [tensor.untyped_storage()._checkpoint_offset for tensor in loaded] == offsets
    assert [tensor.nbytes for tensor in torch.load(ours, mmap=True)] == sizes
    assert [tensor.offset_bytes for tensor in fp.inspect(ours).tensors] == offsets


def test_directory_beyond_four_gigabytes_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    plan = torch_zip.plan_archive("model", 9, [5 * GIB, 3, 0xFFFFFFFF, 0, 7])
    compose(path, plan, b"\x80\x02]q\x00.xxx")
    with path.open("rb") as file:

        def read_at(offset: int, size: int) -> bytes:
            file.seek(offset)
            return file.read(size)

        directory = torch_zip.read_directory(read_at, plan.size_bytes, path=str(path))
    assert not directory.has_checksums
    assert list(directory.entries) == [record.name.decode().partition("/")[2] for record in plan.records]
    for record, entry in zip(plan.records, directory.entries.values(), strict=True):
        assert (entry.size_bytes, entry.data_offset_bytes) == (record.size_bytes, record.data_offset_bytes)
        assert entry.header_offset_bytes == record.header_offset_bytes


# --------------------------------------------------------------------------------------------- names and digits


@pytest.mark.parametrize(
    ("path", "prefix"),
    [
        ("model.pt", "model"),
        ("/a.b/model.tar.pt", "model.tar"),
        ("a/b", "b"),
        (".hidden.pt", ".hidden"),
        (".pt", ""),
        ("dir/.pt", ""),
        ("trailing.", "trailing"),
        ("dir\\model.pt", "model"),
        ("ä/model.pt", "archive"),
        ("mödel.pt", "archive"),
        ("\udcff.pt", "archive"),
    ],
)
def test_archive_prefix(path: str, prefix: str) -> None:
    assert torch_zip.archive_prefix(path) == prefix


def test_serialization_id_is_a_function_of_names_sizes_and_crcs() -> None:
    records = torch_zip.plan_archive("m", 5, [3, 4]).records
    digits = torch_zip.serialization_id(records, [1] * len(records))
    assert len(digits) == 40
    assert digits.isdigit()
    assert digits == torch_zip.serialization_id(records, [1] * len(records))
    others = [
        torch_zip.serialization_id(records, [2] + [1] * (len(records) - 1)),
        torch_zip.serialization_id(torch_zip.plan_archive("n", 5, [3, 4]).records, [1] * len(records)),
        torch_zip.serialization_id(torch_zip.plan_archive("m", 5, [4, 3]).records, [1] * len(records)),
    ]
    assert len({digits, *others}) == 4


# --------------------------------------------------------------------------------------------- hostile directories


def archive(sizes: list[int] | None = None, alignment: int = 64) -> tuple[bytearray, torch_zip.ArchivePlan]:
    """Make a whole archive in memory: a pickle of no meaning and storages of 'd'."""
    sizes = [5, 0, 100] if sizes is None else sizes
    plan = torch_zip.plan_archive("m", 7, sizes, alignment)
    contents = {0: b"pickled", **plan.small_records, len(plan.records) - 1: b"1" * 40}
    contents |= {plan.first_storage + key: b"d" * size for key, size in enumerate(sizes)}
    crcs = [zlib.crc32(contents[index]) for index in range(len(plan.records))]
    data = bytearray()
    for index, record in enumerate(plan.records):
        data += torch_zip.local_header(record) + contents[index] + torch_zip.descriptor(record, crcs[index])
    return data + torch_zip.central_directory(plan.records, crcs), plan


def read(data: bytes) -> torch_zip.Directory:
    def read_at(offset: int, size: int) -> bytes:
        assert 0 <= offset <= offset + size <= len(data), "a read outside the file, which its size forbids"
        return bytes(data[offset : offset + size])

    return torch_zip.read_directory(read_at, len(data), path="m.pt")


@pytest.mark.parametrize("alignment", [1, 3, 64, 4096, 32768])
def test_directory_of_a_good_archive(alignment: int) -> None:
    data, plan = archive(alignment=alignment)
    directory = read(data)
    assert directory.prefix == "m"
    assert directory.has_checksums
    assert list(directory.entries) == [
        *("data.pkl", ".format_version", ".storage_alignment", "byteorder"),
        *("data/0", "data/1", "data/2", "version", ".data/serialization_id"),
    ]
    for record, entry in zip(plan.records, directory.entries.values(), strict=True):
        assert entry.data_offset_bytes == record.data_offset_bytes


def test_local_headers_are_not_read_where_the_layout_is_torchs() -> None:
    data, _ = archive([10] * 50)
    reads = []

    def read_at(offset: int, size: int) -> bytes:
        reads.append((offset, size))
        return bytes(data[offset : offset + size])

    torch_zip.read_directory(read_at, len(data), path="m.pt")
    assert len(reads) < 8


@pytest.mark.parametrize("comment_bytes", [1, 22, 4000, 65535])
def test_archive_comment_is_legal(comment_bytes: int) -> None:
    data, _ = archive()
    comment = (b"PK\x05\x06" + b"c" * comment_bytes)[:comment_bytes]  # looks like an end record itself
    data[-2:] = comment_bytes.to_bytes(2, "little")
    assert len(read(data + comment).entries) == 9


def test_every_truncation_is_a_format_error() -> None:
    data, _ = archive()
    for length in range(len(data)):
        with pytest.raises(FormatError) as raised:
            read(data[:length])
        assert 0 <= (raised.value.offset_bytes or 0) <= len(data)


@pytest.mark.parametrize("surplus", [b"\0", bytes(100), b"PK\x05\x06", b"x" * 65000], ids=len)
def test_bytes_behind_the_archive_are_named(surplus: bytes, tmp_path: Path) -> None:
    data, _ = archive()
    with pytest.raises(UnsupportedError, match=rf"m\.pt: {len(surplus)} bytes follow the archive.*save it again"):
        read(data + surplus)
    path = tmp_path / "model.pt"
    torch.save({"a": torch.arange(6.0)}, path)
    path.write_bytes(path.read_bytes() + surplus)
    assert_same(fp.load(path), torch.load(path))
    (damage,) = fp.verify(path).damages
    assert f"{len(surplus)} bytes follow the archive" in damage.message


def test_bytes_behind_a_damaged_archive_are_not_taken_for_the_reason() -> None:
    data, _ = archive()
    inner = bytes(data)
    for cut in (bytes(data[1:]), bytes(1000) + inner, inner[: data.find(b"PK\x01\x02")] + inner[-22:]):
        with pytest.raises(FormatError, match="truncated"):
            read(cut + b"more")


CENTRAL = struct.Struct("<4sHHHHHHIIIHHHHHII")
FIELDS = "magic made_by needed flags method time date crc packed size name extra comment disk internal external offset"
Fields = dict[str, int | bytes]


def changed(data: bytearray, index: int, change: Callable[[Fields], None]) -> bytearray:
    """Change the fields of the n-th entry of the central directory."""
    at = data.find(b"PK\x01\x02")
    for _ in range(index):
        fields = CENTRAL.unpack_from(data, at)
        at += CENTRAL.size + fields[10] + fields[11] + fields[12]
    values: Fields = dict(zip(FIELDS.split(), CENTRAL.unpack_from(data, at), strict=True))
    change(values)
    CENTRAL.pack_into(data, at, *values.values())
    return data


def both_sizes(value: int) -> Callable[[Fields], None]:
    return lambda fields: fields.update(size=value, packed=value)


FORMAT_ERRORS: dict[str, tuple[int, Callable[[Fields], None]]] = {
    "wrong signature": (0, lambda fields: fields.update(magic=b"PK\x01\x03")),
    "size beyond the file": (4, both_sizes(0x7FFFFFFF)),
    "size beyond the directory": (8, both_sizes(500)),
    "offset beyond the file": (4, lambda fields: fields.update(offset=0x7FFFFFFF)),
    "offset of another record": (6, lambda fields: fields.update(offset=0)),
    "overlap of the next record": (0, both_sizes(200)),
    # torch reads nothing for such a record, and takes what memory holds for its bytes.
    "record that claims to be a directory": (4, lambda fields: fields.update(external=0x10)),
    "64-bit size without its field": (4, both_sizes(0xFFFFFFFF)),
    "64-bit offset without its field": (4, lambda fields: fields.update(offset=0xFFFFFFFF)),
    "no local header there": (4, lambda fields: fields.update(offset=int(fields["offset"]) + 1)),
    "name longer than the directory": (8, lambda fields: fields.update(name=0xFFFF)),
    "extra longer than the directory": (8, lambda fields: fields.update(extra=0xFFFF)),
    "comment longer than the directory": (8, lambda fields: fields.update(comment=0xFFFF)),
}


@pytest.mark.parametrize("name", FORMAT_ERRORS)
def test_directory_that_lies_is_a_format_error(name: str) -> None:
    data, _ = archive()
    with pytest.raises(FormatError) as raised:
        read(changed(data, *FORMAT_ERRORS[name]))
    assert raised.value.path == "m.pt"


UNSUPPORTED: dict[str, tuple[int, Callable[[Fields], None]]] = {
    "deflated": (4, lambda fields: fields.update(method=8)),
    "encrypted": (4, lambda fields: fields.update(flags=0x809)),
    "packed": (4, lambda fields: fields.update(packed=4)),
    "on another disk": (4, lambda fields: fields.update(disk=1)),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_legal_zip_that_is_not_torchs_is_unsupported(name: str) -> None:
    data, _ = archive()
    with pytest.raises(UnsupportedError):
        read(changed(data, *UNSUPPORTED[name]))


def test_duplicate_names_are_refused() -> None:
    data, _ = archive([5, 5])
    place = data.rfind(b"m/data/1")
    data[place : place + 8] = b"m/data/0"
    with pytest.raises(FormatError, match="occurs twice"):
        read(data)


def test_records_outside_the_archive_folder_are_unsupported() -> None:
    data, _ = archive()
    place = data.rfind(b"m/data/2")
    data[place : place + 8] = b"x/data/2"
    with pytest.raises(UnsupportedError, match="outside the archive folder"):
        read(data)


@pytest.mark.parametrize(
    ("place", "width", "value"),
    [
        (24, 8, 0),  # entries on this disk: not looked at, like miniz
        (32, 8, 1 << 60),  # entries
        (32, 8, 0),
        (40, 8, 1 << 62),  # directory length
        (48, 8, (1 << 64) - 1),  # directory offset
        (48, 8, 5),
        (0, 4, 0),  # signature
    ],
)
def test_zip64_end_record_that_lies_is_refused_in_no_time(place: int, width: int, value: int) -> None:
    data, _ = archive()
    end = data.rfind(b"PK\x06\x06")
    data[end + place : end + place + width] = value.to_bytes(width, "little")
    if place == 24:
        assert len(read(data).entries) == 9
        return
    with pytest.raises(FormatError):
        read(data)


def test_zip64_locator_that_points_outside_is_refused() -> None:
    data, _ = archive()
    locator = data.rfind(b"PK\x06\x07")
    data[locator + 8 : locator + 16] = (1 << 63).to_bytes(8, "little")
    with pytest.raises(FormatError, match="outside the file"):
        read(data)


def test_several_disks_are_unsupported() -> None:
    for magic, place in ((b"PK\x06\x06", 16), (b"PK\x05\x06", 4)):
        data, _ = archive()
        data[data.rfind(magic) + place] = 1
        with pytest.raises(UnsupportedError, match="disks"):
            read(data)


def test_storage_alignment_that_lies_changes_no_place() -> None:
    for text in (b"4096", b"9999", b"abcd", b"0000"):
        data, plan = archive(alignment=1024)
        place = plan.records[2].data_offset_bytes
        assert data[place : place + 4] == b"1024"
        data[place : place + 4] = text
        directory = read(data)
        for record, entry in zip(plan.records, directory.entries.values(), strict=True):
            assert entry.data_offset_bytes == record.data_offset_bytes


def test_foreign_layouts_are_read_through_their_local_headers(tmp_path: Path) -> None:
    path = tmp_path / "foreign.pt"
    with zipfile.ZipFile(path, "w") as archive_file:
        for name, data in (("x/data.pkl", b"pickle"), ("x/data/0", b"d" * 1000), ("x/version", b"3\n")):
            archive_file.writestr(name, data)
    data = path.read_bytes()
    directory = read(data)
    for name, content in (("data.pkl", b"pickle"), ("data/0", b"d" * 1000)):
        entry = directory.entries[name]
        assert data[entry.data_offset_bytes : entry.data_offset_bytes + entry.size_bytes] == content


def test_encoders_and_reader_agree_with_zipfile(tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    data, plan = archive()
    path.write_bytes(data)
    with zipfile.ZipFile(path) as stock:
        assert stock.testzip() is None
        assert [info.filename.encode() for info in stock.infolist()] == [record.name for record in plan.records]
        assert [info.header_offset for info in stock.infolist()] == [r.header_offset_bytes for r in plan.records]
    assert len(data) == plan.size_bytes
