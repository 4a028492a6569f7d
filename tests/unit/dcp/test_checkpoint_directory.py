"""What `FastPersistWriter` replaces, what it leaves in the directory, and where it asks."""

from __future__ import annotations

import itertools
import os
import socket
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.filesystems import failing_lookup
from support.runs import hidden_names
from torch.distributed.checkpoint.format_utils import torch_save_to_dcp

import fastpersist as fp
from fastpersist.commit.filesystem import Filesystem, using
from fastpersist.dcp import checkpoint_directory
from fastpersist.integrations.torch_dcp import (
    FastPersistHuggingFaceReader,
    FastPersistHuggingFaceWriter,
    FastPersistReader,
    FastPersistWriter,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint:UserWarning"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),  # torch 2.7, of its own writer
]

STATE = {"w": torch.arange(1000.0)}
WRITERS = {"ours": FastPersistWriter, "stock": dcp.FileSystemWriter}


def save(writer: Any) -> None:
    dcp.save(STATE, storage_writer=writer, no_dist=True)


def failure_of(path: Path, **options: Any) -> BaseException:
    with pytest.raises(dcp.api.CheckpointException) as caught:
        save(FastPersistWriter(path, **options))
    return caught.value.failures[0][0]


def expect_loaded(path: Path) -> None:
    loaded = {"w": torch.zeros(1000)}
    for reader in (FastPersistReader, dcp.FileSystemReader):
        loaded["w"].zero_()
        dcp.load(loaded, storage_reader=reader(path), no_dist=True)
        assert torch.equal(loaded["w"], STATE["w"])
    assert fp.verify(path).ok


def contents(path: Path) -> dict[str, Any]:
    return {
        str(found.relative_to(path)): os.readlink(found) if found.is_symlink() else found.read_bytes()
        for found in path.rglob("*")
        if found.is_symlink() or found.is_file()
    }


def make_others(path: Path) -> None:
    (path / "logs" / "old").mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text("{}")
    (path / "logs" / "precious").write_text("mine")
    (path / "empty").mkdir()
    (path / "logs").chmod(0o500)
    (path / "empty").chmod(0o2775)
    (path / "config.json").chmod(0o640)


def expect_others(path: Path) -> None:
    assert (path / "config.json").read_text() == "{}"
    assert (path / "logs" / "precious").read_text() == "mine"
    assert (path / "logs" / "old").is_dir()
    modes = [stat.S_IMODE((path / name).stat().st_mode) for name in ("logs", "empty", "config.json")]
    assert modes == [0o500, 0o2775, 0o640]


@pytest.mark.parametrize("overwrite", [True, False])
def test_what_else_is_in_a_directory_stays(tmp_path: Path, overwrite: bool) -> None:
    path = tmp_path / "thesis"
    make_others(path)
    inode = (path / "config.json").stat().st_ino
    save(FastPersistWriter(path, overwrite=overwrite))
    expect_others(path)
    expect_loaded(path)
    assert (path / "config.json").stat().st_ino == inode
    assert {file.name: file.crc32 for file in fp.inspect(path).files}["config.json"] is None
    assert hidden_names(tmp_path) == []


@pytest.mark.parametrize("before", WRITERS)
def test_what_else_is_beside_an_older_checkpoint_stays(tmp_path: Path, before: str) -> None:
    path = tmp_path / "checkpoint"
    save(WRITERS[before](path))
    (path / "__7_0.distcp").write_bytes(b"of a rank that there is no more")
    make_others(path)
    for _ in range(2):
        save(FastPersistWriter(path))
        expect_others(path)
        expect_loaded(path)
        assert not (path / "__7_0.distcp").exists()


def test_what_torch_converts_stays_beside_what_comes_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save(STATE, tmp_path / "model.pt")
    monkeypatch.setattr("torch.distributed.checkpoint.format_utils.FileSystemWriter", FastPersistWriter, raising=False)
    monkeypatch.setattr("torch.distributed.checkpoint.FileSystemWriter", FastPersistWriter)
    torch_save_to_dcp(tmp_path / "model.pt", tmp_path)
    assert torch.equal(torch.load(tmp_path / "model.pt")["w"], STATE["w"])
    assert (tmp_path / "MANIFEST.json").exists()
    expect_loaded(tmp_path)


@pytest.mark.parametrize("before", [*WRITERS, "nothing"])
@pytest.mark.parametrize("name", ["step-1/.metadata", "inner/deep/MANIFEST.json", "LATEST", ".lock", "step-00000001/x"])
def test_what_looks_like_another_checkpoint_is_asked_about(tmp_path: Path, before: str, name: str) -> None:
    path = tmp_path / "checkpoint"
    path.mkdir()
    if before != "nothing":
        save(WRITERS[before](path))
    other = path / name
    other.parent.mkdir(parents=True, exist_ok=True)
    other.write_text("mine")
    files = contents(path)
    error = failure_of(path)
    assert isinstance(error, fp.ConfigError)
    assert f"{name.removesuffix('/x')} in {path} looks like a part of another checkpoint" in str(error)
    assert contents(path) == files
    assert hidden_names(tmp_path) == []


@pytest.mark.parametrize("name", ["__0_0.distcp", "__3.metadata", ".metadata.tmp"])
def test_parts_without_metadata_are_asked_about(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("somebody is writing this")
    assert f"{name} in {tmp_path} looks like a part of another checkpoint" in str(failure_of(tmp_path))
    assert contents(tmp_path) == {name: b"somebody is writing this"}


def test_another_kind_of_checkpoint_of_ours_is_asked_about(tmp_path: Path) -> None:
    with fp.Checkpointer(tmp_path / "run", sharded=True) as checkpoints:
        checkpoints.save(1, STATE, rank_state={"own": 1}).result()
    path = tmp_path / "run" / "step-00000001"
    files = contents(path)
    assert "rank-00000.pt in" in str(failure_of(path))
    model = tmp_path / "model"
    dcp.save(STATE, storage_writer=FastPersistHuggingFaceWriter(model), no_dist=True)
    assert "model.safetensors in" in str(failure_of(model))
    assert contents(path) == files
    assert FastPersistHuggingFaceReader(model).read_metadata().state_dict_metadata.keys() == {"w"}


def test_a_directory_that_cannot_be_kept_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "thesis"
    (path / "inner").mkdir(parents=True)
    (path / "inner" / "chapter").write_text("one")

    def expect(kind: type[BaseException], said: str) -> None:
        error = failure_of(path)
        assert isinstance(error, kind)
        assert said in str(error)
        assert hidden_names(tmp_path) == []

    (path / "data").symlink_to(tmp_path)
    expect(fp.UnsupportedError, "is a link to a directory")
    (path / "data").unlink()
    os.mkfifo(path / "inner" / "pipe")
    expect(fp.UnsupportedError, "inner/pipe is no file")
    (path / "inner" / "pipe").unlink()
    with socket.socket(socket.AF_UNIX) as listening:
        monkeypatch.chdir(path)
        listening.bind("door")
        monkeypatch.undo()
        expect(fp.UnsupportedError, "door is no file")
    (path / "door").unlink()
    (path / "a\\b").write_text("")
    expect(fp.ConfigError, "cannot be the name of a file")
    (path / "a\\b").unlink()
    (path / "nowhere").symlink_to(tmp_path / "missing")
    expect(fp.StorageError, "nowhere")
    (path / "nowhere").unlink()
    (path / "inner" / (".c.pending-" + "0" * 16)).mkdir()
    expect(fp.UnsupportedError, "inner is where checkpoints are saved to")
    (path / "inner" / (".c.pending-" + "0" * 16)).rmdir()
    for directory in (path, path / "inner"):
        monkeypatch.chdir(directory)
        expect(fp.ConfigError, "this process works in it")
    monkeypatch.undo()
    assert contents(path) == {"inner/chapter": b"one"}
    save(FastPersistWriter(path))
    expect_loaded(path)


def test_what_cannot_be_linked_is_copied_and_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "thesis"
    path.mkdir()
    (path / "chapter").write_text("one")
    (path / "chapter").chmod(0o640)
    synced = []

    class Watched(type(checkpoint_directory.filesystem())):  # type: ignore[misc]
        def sync(self, fd: int, path: str) -> None:
            synced.append(os.path.basename(path))
            super().sync(fd, path)

    def refuse(source: str, target: str) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(checkpoint_directory, "filesystem", Watched)
    save(FastPersistWriter(path))
    assert (path / "chapter").read_text() == "one"
    assert stat.S_IMODE((path / "chapter").stat().st_mode) == 0o640
    assert synced == ["chapter"]
    expect_loaded(path)


def test_a_save_that_fails_leaves_what_else_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "thesis"
    make_others(path)
    before = contents(path)

    def fail(*arguments: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "link", fail)
    assert isinstance(failure_of(path), fp.StorageError)
    assert contents(path) == before
    expect_others(path)
    assert hidden_names(tmp_path) == []


@pytest.mark.parametrize("below", ["", "config.json", "logs"])
@pytest.mark.parametrize("writer", [FastPersistWriter, FastPersistHuggingFaceWriter])
def test_one_look_that_fails_does_not_lose_what_else_is_there(tmp_path: Path, writer: Any, below: str) -> None:
    path = tmp_path / "thesis"
    save(writer(path))
    make_others(path)
    for nth in itertools.count(1):
        error: BaseException = fp.StorageError(None, "", "")
        with failing_lookup(path / below, nth) as failed:
            try:
                save(writer(path))
            except dcp.api.CheckpointException as raised:
                error = raised.failures[0][0]
        assert isinstance(error, fp.StorageError)
        expect_others(path)
        assert hidden_names(tmp_path) == []
        if not failed:
            return


@pytest.mark.parametrize("below", ["", "MANIFEST.json"])
@pytest.mark.parametrize("overwrite", [True, False])
def test_one_look_that_fails_does_not_let_another_checkpoint_be_replaced(
    tmp_path: Path, overwrite: bool, below: str
) -> None:
    path = tmp_path / "step"
    with fp.DirectorySave(path) as other:
        other.save(STATE, "state.pt")
        other.publish().result()
    files = contents(path)
    for nth in itertools.count(1):
        with failing_lookup(path / below, nth) as failed:
            failure_of(path, overwrite=overwrite)
        assert contents(path) == files
        if not failed:
            return


@pytest.mark.parametrize("before", WRITERS)
def test_a_checkpoint_is_replaced(tmp_path: Path, before: str) -> None:
    save(WRITERS[before](tmp_path / "checkpoint"))
    save(FastPersistWriter(tmp_path / "checkpoint"))
    expect_loaded(tmp_path / "checkpoint")


@pytest.mark.parametrize("before", WRITERS)
def test_without_overwrite_a_checkpoint_is_refused_in_torchs_words(tmp_path: Path, before: str) -> None:
    save(WRITERS[before](tmp_path / "checkpoint"))
    files = contents(tmp_path / "checkpoint")
    for writer in (FastPersistWriter, dcp.FileSystemWriter):
        with pytest.raises(dcp.api.CheckpointException, match="Checkpoint already exists"):
            save(writer(tmp_path / "checkpoint", overwrite=False))
    assert isinstance(failure_of(tmp_path / "checkpoint", overwrite=False), fp.ConfigError)
    assert contents(tmp_path / "checkpoint") == files


def test_without_overwrite_an_empty_directory_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").mkdir()
    save(FastPersistWriter(tmp_path / "checkpoint", overwrite=False))
    expect_loaded(tmp_path / "checkpoint")


def test_each_save_and_each_load_has_an_id_as_torchs_have(tmp_path: Path) -> None:
    for writer in (FastPersistWriter(tmp_path / "ours"), dcp.FileSystemWriter(tmp_path / "stock")):
        save_ids = []
        for _ in range(2):
            dcp.save(STATE, storage_writer=writer, checkpoint_id=writer.checkpoint_id, no_dist=True)
            save_ids.append(writer.save_id)
            assert FastPersistReader(writer.checkpoint_id).read_metadata().storage_meta.save_id == writer.save_id
        assert len(set(save_ids)) == 2
    for reader in (FastPersistReader(tmp_path / "ours"), dcp.FileSystemReader(tmp_path / "ours")):
        first = reader.load_id
        assert reader.read_metadata().storage_meta.load_id == first
        reader.reset()
        assert reader.read_metadata().storage_meta.load_id == reader.load_id != first


@pytest.mark.parametrize("linked", [True, False])
def test_a_file_that_is_kept_is_synced_once(tmp_path: Path, linked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Syncing(Filesystem):
        def sync(self, fd: int, path: str) -> None:
            synced.append(os.path.basename(path))
            super().sync(fd, path)

    def refusing(*_: Any) -> None:
        raise PermissionError

    synced: list[str] = []
    save(FastPersistWriter(tmp_path / "a"))
    (tmp_path / "a" / "notes.txt").write_text("written by somebody else, who may not have synced it")
    if not linked:
        monkeypatch.setattr(os, "link", refusing)
    with using(Syncing()):
        save(FastPersistWriter(tmp_path / "a"))
    assert synced.count("notes.txt") == 1
    assert synced.count("__0_0.distcp") == 1
    assert (tmp_path / "a" / "notes.txt").exists()
