"""An opened file is told from its first bytes, read inside its bounds, and gives every descriptor back."""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.archives import read_records, write_records

import fastpersist as fp
from fastpersist.source import CheckpointSource, SkippingFile


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "model.pt"
    fp.save({"a": torch.arange(50), "b": torch.ones(3)}, path)
    return path


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"", "other"),
        (b"P", "other"),
        (b"PK\x03\x04", "torch_zip"),
        (b"PK\x05\x06" + bytes(18), "other"),
        (b"\x02\0\0\0\0\0\0\0{}", "safetensors"),
        (b"\x02\0\0\0\0\0\0\0[]", "other"),
        (b"\xff" * 8 + b"{", "other"),
        (b"\x80\x02", "other"),
        (bytes(20), "other"),
    ],
)
def test_kind_is_told_from_the_first_bytes(data: bytes, kind: str, tmp_path: Path) -> None:
    (tmp_path / "file.pt").write_bytes(data)
    with CheckpointSource(str(tmp_path / "file.pt")) as source:
        assert source.kind == kind
        assert source.size_bytes == len(data)


def test_reads_outside_the_file_are_refused(path: Path) -> None:
    with CheckpointSource(str(path)) as source:
        size = source.size_bytes
        for offset, length in ((-1, 1), (0, size + 1), (size, 1), (1 << 63, 1)):
            with pytest.raises(fp.FormatError, match="outside the file"):
                source.read_at(offset, length)
        assert source.read_at(size, 0) == b""


def test_what_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(fp.CheckpointNotFoundError) as raised:
        CheckpointSource(str(tmp_path / "nothing.pt"))
    assert isinstance(raised.value, FileNotFoundError)
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(fp.CheckpointNotFoundError):
        CheckpointSource(str(tmp_path / "file" / "below.pt"))
    with pytest.raises(fp.StorageError, match="directory"):
        CheckpointSource(str(tmp_path))
    os.symlink("loop", tmp_path / "loop")
    with pytest.raises(fp.StorageError):
        CheckpointSource(str(tmp_path / "loop"))


@pytest.mark.usefixtures("leak_check")
def test_descriptors_are_closed_whatever_happens(path: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.pt").write_bytes(b"PK\x03\x04 and nothing")
    calls: list[Callable[[str], object]] = [fp.load, fp.inspect, fp.verify, lambda p: fp.load(p, map_location=5)]
    for name in ("bad.pt", "model.pt", "nothing.pt", "."):
        for call in calls:
            try:
                call(str(tmp_path / name))
            except (fp.FastPersistError, TypeError):
                pass


def test_file_that_is_replaced_while_open_stays_what_it_was(path: Path) -> None:
    with CheckpointSource(str(path)) as source:
        before = source.directory.entries["data/0"]
        fp.save({"other": torch.zeros(1)}, path)
        assert list(source.directory.entries) != []
        assert source.scan().root is not None
        assert source.read_at(before.data_offset_bytes, 16) == torch.arange(2).numpy().tobytes()


def test_names_of_the_tensors_in_a_storage(path: Path) -> None:
    with CheckpointSource(str(path)) as source:
        assert source.tensor_names(["1", "0", "7"]) == {"1": ["b"], "0": ["a"], "7": []}


def test_zip_without_a_pickle_is_no_checkpoint(path: Path) -> None:
    records = read_records(path)
    del records["model/data.pkl"]
    write_records(path, records)
    for look in (fp.load, fp.inspect, lambda p: fp.load_into(p, {})):
        with pytest.raises(fp.FormatError, match=r"no data\.pkl"):
            look(path)
    assert not fp.verify(path).ok


def test_deflated_archive_is_left_to_torch(path: Path) -> None:
    records = read_records(path)
    write_records(path, records, zipfile.ZIP_DEFLATED)
    assert fp.load(path)["b"].tolist() == [1, 1, 1]
    for look in (fp.inspect, lambda p: fp.load_into(p, {}), lambda p: fp.load(p, verify=True)):
        with pytest.raises(fp.UnsupportedError, match="compressed"):
            look(path)
    assert not fp.verify(path).ok


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_documents_in_zip_form_are_refused(compression: int, tmp_path: Path) -> None:
    path = tmp_path / "letter.docx"
    names = ["[Content_Types].xml", "_rels/.rels", "word/document.xml"]
    write_records(path, dict.fromkeys(names, b"<xml/>" * 100), compression)
    for look in (fp.inspect, lambda p: fp.load(p, verify=True), lambda p: fp.load_into(p, {})):
        with pytest.raises(fp.FastPersistError):
            look(path)
    with pytest.raises((fp.FastPersistError, RuntimeError)):  # torch's own words are as good
        fp.load(path)
    assert not fp.verify(path).ok


def test_cut_file_is_told_from_a_foreign_one(path: Path) -> None:
    good = path.read_bytes()
    for length in (0, 1, 2, 3, 4, 30, 4096, len(good) - 1):
        path.write_bytes(good[:length])
        with pytest.raises(fp.FormatError):
            fp.load(path)


def test_file_of_zeros_is_an_unfinished_save(tmp_path: Path) -> None:
    for size in (1, 9, 100_000):
        (tmp_path / "model.pt").write_bytes(bytes(size))
        for load in (fp.load, lambda p: fp.load(p, verify=True), lambda p: fp.load_into(p, {})):
            with pytest.raises(fp.FastPersistError, match="never finished"):
                load(tmp_path / "model.pt")


# --------------------------------------------------------------------------------------------- SkippingFile


def test_storages_are_passed_over_and_all_else_is_read(path: Path) -> None:
    data = path.read_bytes()
    with CheckpointSource(str(path)) as source:
        entry = source.directory.entries["data/0"]
        start, size = entry.data_offset_bytes, entry.size_bytes
        file = SkippingFile(source, [entry])
        assert file.readable()
        assert file.seekable()

        def read(offset: int, length: int) -> bytes:
            buffer = bytearray(b"?" * length)
            file.seek(offset)
            count = file.readinto(memoryview(buffer))
            assert file.tell() == offset + count
            return bytes(buffer[:count])

        assert read(start, size) == b"?" * size
        assert file.skipped_offset_bytes == start
        assert read(start, size - 1) == data[start : start + size - 1]
        assert read(start - 8, 16) == data[start - 8 : start + 8]
        assert read(0, 100) == data[:100]
        assert read(len(data) - 5, 100) == data[-5:]
        assert read(len(data), 100) == b""
        assert file.seek(-10, io.SEEK_END) == len(data) - 10
        assert file.seek(4, io.SEEK_CUR) == len(data) - 6
