"""Sidecars: stock readers read them, and only the table that they describe is taken for theirs."""

from __future__ import annotations

import errno
import os
import shutil
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.archives import flip_bit
from support.row_tables import make_rows, read_rows

from fastpersist.errors import CheckpointNotFoundError, ChecksumError, FormatError, StorageError
from fastpersist.loading.checkpoint_file import CheckpointSource
from fastpersist.rows.opening import open_rows
from fastpersist.rows.packing import pack_rows
from fastpersist.rows.sidecar import CHUNK_BYTES, chunk_crcs, has_positions, read_sidecar, sidecar_path
from fastpersist.rows.verification import verify_rows
from fastpersist.rows.writer import RowWriter, write_rows

COUNT = 10_001


def write_packed(path: Path) -> torch.Tensor:
    """Write rows in the reverse order of their ids; return them by id."""
    rows = make_rows(COUNT, 100)
    with RowWriter(path, (100,), torch.int32) as writer:
        writer.append(rows.flip(0))
        writer.keep_positions(torch.arange(COUNT - 1, -1, -1, dtype=torch.int32))
    return rows


def test_stock_readers_read_a_sidecar(tmp_path: Path) -> None:
    path = tmp_path / "table.npy"
    write_packed(path)
    name = sidecar_path(str(path))
    assert name == f"{path}.rows.safetensors"
    tensors = {key: value.clone() for key, value in load_file(name).items()}
    data = path.read_bytes()[4096:]
    assert tensors["crc32"].dtype == torch.uint32
    assert tensors["crc32"].tolist() == [
        zlib.crc32(data[at : at + CHUNK_BYTES]) for at in range(0, len(data), CHUNK_BYTES)
    ]
    assert tensors["position_of_row"].tolist() == list(range(COUNT - 1, -1, -1))
    with safe_open(name, "np") as file:
        metadata = file.metadata()
    assert metadata["fastpersist.rows"] == "1"
    assert int(metadata["file_bytes"]) == path.stat().st_size
    assert int(metadata["row_count"]) == COUNT
    assert int(metadata["header_crc32"], 16) == zlib.crc32(path.read_bytes()[:4096])


@pytest.mark.parametrize("suffix", [".npy", ".safetensors"])
def test_packed_rows_are_found_by_id(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"table{suffix}"
    rows = write_packed(path)
    assert has_positions(str(path))
    source = open_rows(path)
    assert source.position_of_row is not None
    assert source.position_of_row.dtype == torch.int32
    assert torch.equal(read_rows(source), rows)
    (tmp_path / "link").symlink_to(path)
    assert torch.equal(read_rows(open_rows(tmp_path / "link")), rows)


def test_packed_pieces_are_joined(tmp_path: Path) -> None:
    rows = write_packed(tmp_path / "packed.npy")
    write_rows(tmp_path / "plain.npy", rows[:7])
    source = open_rows([tmp_path / "plain.npy", tmp_path / "packed.npy", tmp_path / "plain.npy"])
    assert torch.equal(read_rows(source), torch.cat([rows[:7], rows, rows[:7]]))


def test_a_plain_table_needs_no_sidecar(tmp_path: Path) -> None:
    path = tmp_path / "table.npy"
    write_rows(path, make_rows(5))
    assert not has_positions(str(path))
    np.save(path, make_rows(6).numpy())  # by another program: the sidecar does not fit, and is not needed
    assert torch.equal(read_rows(open_rows(path)), make_rows(6))
    os.unlink(sidecar_path(str(path)))
    assert read_sidecar(str(path)) is None
    assert torch.equal(read_rows(open_rows(path)), make_rows(6))


def test_positions_of_another_table_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "table.npy"
    rows = write_packed(path)
    whole = path.read_bytes()
    for changed, word in (
        (whole.replace(b"<i4", b"<u4"), "header"),
        (whole[:5000] + b"x" + whole[5001:], "from offset 4096 on"),
        (whole[:-5] + b"x" + whole[-4:], "from offset 3149824 on"),
        (whole + b"x", "bytes, not"),
    ):
        path.write_bytes(changed)
        with pytest.raises(FormatError, match=rf"not this one \(.*{word}.*remove that file"):
            open_rows(path)
    path.write_bytes(whole)
    assert torch.equal(read_rows(open_rows(path)), rows)


def test_a_packed_safetensors_file_needs_its_sidecar(tmp_path: Path) -> None:
    path = tmp_path / "table.safetensors"
    write_packed(path)
    shutil.copy(path, tmp_path / "elsewhere.safetensors")
    with pytest.raises(FormatError, match=r"packed, and .*elsewhere.*missing; copy it"):
        open_rows(tmp_path / "elsewhere.safetensors")


def fail_lookups(monkeypatch: pytest.MonkeyPatch, path: str | Path, sys_errno: int) -> None:
    """Let each lstat of a path fail."""
    lstat = os.lstat

    def failing(name: str, *arguments: object, **options: object) -> os.stat_result:
        if os.fspath(name) == os.fspath(path):
            raise OSError(sys_errno, os.strerror(sys_errno), name)
        return lstat(name)

    monkeypatch.setattr(os, "lstat", failing)


@pytest.mark.parametrize("sys_errno", [errno.EIO, errno.ESTALE, errno.EACCES], ids=["EIO", "ESTALE", "EACCES"])
def test_a_sidecar_that_cannot_be_looked_up_is_not_taken_for_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sys_errno: int
) -> None:
    path = tmp_path / "table.npy"
    rows = write_packed(path)
    (tmp_path / "link.npy").symlink_to(path)
    with monkeypatch.context() as patched:
        fail_lookups(patched, sidecar_path(str(path)), sys_errno)
        for use in (open_rows, verify_rows, lambda table: pack_rows(table, tmp_path / "new.npy")):
            with pytest.raises(StorageError, match=r"looking up .*rows\.safetensors") as caught:
                use(path)
            assert caught.value.errno == sys_errno
        with pytest.raises(StorageError, match=r"looking up .*rows\.safetensors"):
            write_rows(path, rows[:2], overwrite=True)
    with monkeypatch.context() as patched:  # beside the link there is no sidecar
        fail_lookups(patched, tmp_path / "link.npy", sys_errno)
        with pytest.raises(StorageError, match=r"looking up .*link\.npy"):
            open_rows(tmp_path / "link.npy")
    assert torch.equal(read_rows(open_rows(tmp_path / "link.npy")), rows)
    assert not (tmp_path / "new.npy").exists()


def test_a_table_that_cannot_be_looked_up_is_not_taken_for_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = write_packed(tmp_path / "table.npy")
    write_rows(tmp_path / "plain.npy", rows[:2])
    with monkeypatch.context() as patched:
        fail_lookups(patched, tmp_path / "table.npy", errno.EIO)
        with pytest.raises(StorageError, match=r"looking up .*table\.npy"):
            write_rows(tmp_path / "table.npy", rows[:2])
        with pytest.raises(StorageError, match=r"looking up .*table\.npy"):
            pack_rows(tmp_path / "plain.npy", tmp_path / "table.npy")
    assert torch.equal(read_rows(open_rows(tmp_path / "table.npy")), rows)


def test_a_sidecar_that_is_a_link_to_nothing_is_not_taken_for_absent(tmp_path: Path) -> None:
    write_packed(tmp_path / "table.npy")
    name = Path(sidecar_path(str(tmp_path / "table.npy")))
    name.rename(tmp_path / "elsewhere")
    name.symlink_to(tmp_path / "nothing")
    with pytest.raises(CheckpointNotFoundError, match=r"rows\.safetensors"):
        open_rows(tmp_path / "table.npy")


def test_misfits(tmp_path: Path) -> None:
    path = tmp_path / "table.npy"
    write_rows(path, make_rows(COUNT, 100))
    facts = read_sidecar(str(path))
    assert facts is not None
    with CheckpointSource(str(path)) as source:
        assert facts.misfits(source) == ""
    write_rows(tmp_path / "none.npy", make_rows(0))
    facts = read_sidecar(str(tmp_path / "none.npy"))
    assert facts is not None
    assert facts.crcs == []
    with CheckpointSource(str(tmp_path / "none.npy")) as source:
        assert facts.misfits(source) == ""


def test_damaged_sidecars(tmp_path: Path) -> None:
    path = tmp_path / "table.npy"
    write_packed(path)
    name = Path(sidecar_path(str(path)))
    whole = name.read_bytes()
    tensors = {key: value.clone() for key, value in load_file(name).items()}
    with safe_open(name, "pt") as file:
        metadata = file.metadata()
    flip_bit(name, len(whole) // 2)
    with pytest.raises(ChecksumError, match="position_of_row are damaged"):
        open_rows(path)
    name.write_bytes(whole[:100])
    with pytest.raises(FormatError):
        open_rows(path)
    name.write_bytes(b"something else")
    with pytest.raises(FormatError, match="is none"):
        read_sidecar(str(path))
    for changed in ({"fastpersist.rows": "2"}, {"file_bytes": "x"}, {"offset_bytes": "-1"}, {"file_bytes": "99999"}):
        save_file(tensors, name, metadata | changed)
        with pytest.raises(FormatError):
            read_sidecar(str(path))
    save_file({"crc32": tensors["crc32"].float()}, name, metadata)
    with pytest.raises(FormatError, match="no CRCs"):
        read_sidecar(str(path))


def test_positions_outside_of_the_table_are_refused(tmp_path: Path) -> None:
    import fastpersist as fp

    path = tmp_path / "table.npy"
    write_packed(path)
    name = sidecar_path(str(path))
    with safe_open(name, "pt") as file:
        metadata = file.metadata()
    tensors = {key: value.clone() for key, value in load_file(name).items()}
    metadata = {key: value for key, value in metadata.items() if key != "fastpersist.crc32"}
    for wrong in (-1, COUNT):
        tensors["position_of_row"][3] = wrong
        fp.save(tensors, name, metadata=metadata)
        with pytest.raises(FormatError, match="outside of the 10001 rows"):
            open_rows(path)
    fp.save(tensors | {"position_of_row": tensors["position_of_row"].float()}, name, metadata=metadata)
    with pytest.raises(FormatError, match="F32, not I32"):
        open_rows(path)


@pytest.mark.parametrize("size_bytes", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, 5 * CHUNK_BYTES + 7])
def test_crcs_of_chunks(tmp_path: Path, size_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastpersist.rows.sidecar._BATCH_COUNT", 2)
    data = bytes(100) + np.random.default_rng(1).bytes(size_bytes)
    (tmp_path / "data").write_bytes(data)
    fd = os.open(tmp_path / "data", os.O_RDONLY)
    try:
        found = list(chunk_crcs(fd, "data", 100, len(data)))
    finally:
        os.close(fd)
    assert found == [zlib.crc32(data[at : at + CHUNK_BYTES]) for at in range(100, len(data), CHUNK_BYTES)]
