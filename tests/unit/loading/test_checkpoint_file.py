"""An opened file is told from its first bytes, read inside its bounds, and gives every descriptor back."""

from __future__ import annotations

import errno
import gzip
import io
import lzma
import os
import pickle
import re
import socket
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.archives import read_records, write_records

import fastpersist as fp
from fastpersist.formats.foreign import LOOK_BYTES, is_older_torch_file
from fastpersist.loading.checkpoint_file import CheckpointSource, SkippingFile
from fastpersist.loading.unpickle import new_storage, unpickle_with


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
    for look in (fp.inspect, lambda p: fp.load_into(p, {}), lambda p: fp.load(p, verify=True), fp.verify):
        with pytest.raises(fp.UnsupportedError, match="compressed"):
            look(path)


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


# --------------------------------------------------------------------------------------------- what is no checkpoint


def tar_of(name: str) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        archive.addfile(tarfile.TarInfo(name))
    return file.getvalue()


def npz(*, compressed: bool) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED if compressed else zipfile.ZIP_STORED) as archive:
        archive.writestr("weight.npy", b"\x93NUMPY" + bytes(200))
    return file.getvalue()


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n"

FOREIGN: dict[str, tuple[bytes, str]] = {
    "HTML": (b"<!DOCTYPE html>\n<html><title>404</title></html>", "an HTML or XML page"),
    "XML of a store": (b"<?xml version='1.0'?><Error><Code>AccessDenied</Code></Error>", "an HTML or XML page"),
    "LFS pointer": (POINTER, "a Git LFS pointer; `git lfs pull`"),
    "GGUF": (b"GGUF\3\0\0\0" + bytes(100), "a GGUF file"),
    "HDF5": (b"\x89HDF\r\n\x1a\n" + bytes(100), "an HDF5 file"),
    "npy": (b"\x93NUMPY\1\0v\0{'descr': '<f4'}", r"an array of NumPy"),
    "npz": (npz(compressed=False), "an npz file of NumPy; use numpy.load"),
    "compressed npz": (npz(compressed=True), "an npz file of NumPy; use numpy.load"),
    "7z": (b"7z\xbc\xaf\x27\x1c" + bytes(100), "a 7z archive"),
    "gzip": (gzip.compress(b"state"), "a gzip file; unpack it first"),
    "xz": (lzma.compress(b"state"), "an xz file; unpack it first"),
    "tar": (tar_of("model.pt"), "a tar archive; unpack it first"),
    "JSON": (b'{"architectures": ["LlamaForCausalLM"]}', "JSON"),
    "text": (b"hello, this is no checkpoint", "text"),
    "text cut in a character": (b"a" * (LOOK_BYTES - 1) + "é".encode(), "text"),
    "plain pickle": (pickle.dumps({"a": [1, 2, 3]}), "a pickle that torch.save did not write"),
    "pickle of a class": (pickle.dumps(Path("x"), 2), "a pickle that torch.save did not write"),
    "noise": (b"\xde\xad\xbe\xef" * 40, "of an unknown kind"),
    "empty": (b"", "the file is empty"),
    "some bytes": (b"abc", "3 bytes are too few"),
}


@pytest.mark.parametrize("name", FOREIGN)
@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_what_is_no_checkpoint_is_refused_by_what_it_looks_like(name: str, suffix: str, tmp_path: Path) -> None:
    data, kind = FOREIGN[name]
    path = tmp_path / f"model.{suffix}"
    path.write_bytes(data)
    for load in (
        fp.load,
        lambda p: fp.load(p, weights_only=False),
        lambda p: fp.load(p, verify=True),
        lambda p: fp.load_into(p, torch.nn.Linear(1, 1)),
    ):
        with pytest.raises(fp.FormatError, match=kind) as raised:
            load(path)
        assert str(path) in str(raised.value)
        assert "weights_only" not in str(raised.value)
    with pytest.raises(fp.FastPersistError, match=kind):
        fp.inspect(path)
    assert any(re.search(kind, damage.message) for damage in fp.verify(path).damages)


@pytest.mark.parametrize("protocol", range(1, 6))  # torch cannot read its own files of protocol 0
def test_every_older_file_of_torch_is_left_to_torch(protocol: int, tmp_path: Path) -> None:
    path = tmp_path / "legacy.pt"
    torch.save({"w": torch.ones(3)}, path, _use_new_zipfile_serialization=False, pickle_protocol=protocol)
    assert fp.load(path, weights_only=False)["w"].tolist() == [1.0] * 3
    with pytest.raises(fp.UnsupportedError, match=r"a file of an older torch\.save: neither"):
        fp.inspect(path)


@pytest.mark.parametrize("name", ["sys_info", "pickle", "tensors", "storages", "./storages"])
def test_tar_archives_that_torch_once_wrote_are_left_to_torch(name: str) -> None:
    assert is_older_torch_file(tar_of(name)[:LOOK_BYTES])


@pytest.mark.parametrize("make", ["zip", "legacy", "plain"])
def test_pickle_with_the_name_of_a_safetensors_file_is_not_run(make: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    if make == "plain":
        path.write_bytes(pickle.dumps(Runs()))
    else:
        torch.save(Runs(), path, _use_new_zipfile_serialization=make == "zip")
    Runs.count = 0
    with pytest.raises(fp.FormatError, match=r"no safetensors file|a pickle that torch\.save did not write"):
        fp.load(path, weights_only=False)
    assert Runs.count == 0
    torch.save({"w": torch.ones(2)}, path, _use_new_zipfile_serialization=make == "zip")
    assert fp.load(path)["w"].tolist() == [1.0, 1.0]  # no code can be run so
    with pytest.raises(fp.FormatError, match="rename it if you trust it"):
        fp.load(path, weights_only=False)


class Runs:
    count = 0

    def __reduce__(self) -> Any:
        return run, ()


def run() -> None:
    Runs.count += 1


def special_file(kind: str, path: Path) -> str:
    """Make a special file; return what an error calls it."""
    if kind == "FIFO":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(path))
    else:
        path.symlink_to("/dev/null")
    return {"FIFO": "a FIFO", "socket": "a socket", "device": "a character device"}[kind]


@pytest.mark.timeout(30)
@pytest.mark.usefixtures("leak_check")
@pytest.mark.parametrize("kind", ["FIFO", "socket", "device"])
def test_special_files_are_refused_and_not_waited_for(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the path of a socket must be short
    path = Path("model.pt")
    name = special_file(kind, path)
    for call in (fp.load, fp.verify, fp.inspect, lambda p: fp.load_into(p, {}), lambda p: fp.load(p, verify=True)):
        with pytest.raises(fp.StorageError, match=f"cannot read {path}: it is {name}"):
            call(path)


def test_directory_is_refused_with_the_call_that_loads_it(tmp_path: Path) -> None:
    root = tmp_path / "run"
    with fp.Checkpointer(root) as checkpoints:
        checkpoints.save(3, {"w": torch.ones(2)}).result()
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").write_bytes(b"")
    save = fp.DirectorySave(tmp_path / "saved")
    save.save({"w": torch.ones(2)}, "state.pt")
    save.publish().result()
    wanted = {
        root: f"Checkpointer('{root}').load()",
        root / "step-00000003": f"Checkpointer('{root}').load(3)",
        tmp_path / "saved": f"load {tmp_path}/saved/state.pt",
        tmp_path / "dcp": "torch.distributed.checkpoint.load",
        tmp_path: "it is a directory, not a checkpoint file",
    }
    for path, call in wanted.items():
        for load in (fp.load, lambda p: fp.load_into(p, {})):
            with pytest.raises(fp.StorageError) as raised:
                load(path)
            assert call in str(raised.value)
            assert str(path) in str(raised.value)
            assert raised.value.errno == errno.EISDIR


@pytest.mark.parametrize("operation", ["fstat", "close", "pread"])
def test_errors_of_the_disk_name_operation_and_path(
    operation: str, path: Path, monkeypatch: pytest.MonkeyPatch, leak_check: None
) -> None:
    real = getattr(os, operation)

    def broken(fd: int, *arguments: int) -> Any:
        if not os.path.samestat(status(fd), status_of_file):
            return real(fd, *arguments)
        if operation == "close":
            real(fd)  # as in the kernel: the descriptor is gone all the same
        raise OSError(errno.EIO, "Input/output error")

    status = os.fstat
    status_of_file = os.stat(path)
    word = {"fstat": "looking at", "close": "closing", "pread": "reading at offset"}[operation]
    with monkeypatch.context() as patch:
        patch.setattr(os, operation, broken)
        for call in (fp.load, fp.inspect):
            with pytest.raises(fp.StorageError) as raised:
                call(path)
            assert raised.value.errno == errno.EIO
            assert raised.value.filename == str(path)
            assert word in str(raised.value)
            assert str(path) in str(raised.value)


@pytest.mark.parametrize("fill", [b"\0", b"P", b"PK"])
@pytest.mark.parametrize("length", [65_515, 65_535])
def test_comment_that_torch_cannot_seek_over_is_a_format_error(length: int, fill: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.save({"a": torch.ones(3)}, path)
    data = path.read_bytes()
    path.write_bytes(data[:-2] + length.to_bytes(2, "little") + (fill * length)[:length])
    with pytest.raises(OSError, match="Invalid argument"):
        torch.load(path)
    with pytest.raises(fp.FormatError, match="outside the file"):
        fp.load(path)


def test_error_of_the_disk_while_torch_reads_keeps_its_words(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with CheckpointSource(str(path)) as source:

        def fail(*arguments: Any) -> bytes:
            raise fp.StorageError(errno.EIO, "reading failed", str(path))

        references = source.summary.references
        storages = {r.key: new_storage(r.size_bytes, torch.device("cpu")) for r in references}
        monkeypatch.setattr(source, "read_at", fail)
        with pytest.raises(fp.StorageError, match="reading failed"):
            unpickle_with(source, storages, map_location=None, weights_only=True)
