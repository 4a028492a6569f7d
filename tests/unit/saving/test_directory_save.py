"""DirectorySave: many files of a trainer's own layout, published at once or not at all."""

from __future__ import annotations

import gc
import json
import logging
import os
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.forking import Report, run_in_child
from support.runs import Run, copied, held_writers, hidden_names, wait_for_writers
from support.sameness import assert_same
from support.training import PATIENCE_S

import fastpersist as fp
from fastpersist.commit.filesystem import Filesystem, using
from fastpersist.events.delivery import flush
from fastpersist.saving.capture import Kind
from fastpersist.saving.directory_save import Alone
from fastpersist.saving.ownership import Owners

STATE = {"weights": torch.arange(1000.0), "name": "a state"}


def manifest_in(path: Path) -> Any:
    return json.loads((path / "MANIFEST.json").read_text())


def test_files_of_every_kind_are_published_together(tmp_path: Path, leak_check: None) -> None:
    run = Run().advance()
    path = tmp_path / "checkpoint-10"
    directory = fp.DirectorySave(path)
    pending_path = Path(directory.path)
    assert pending_path.parent == tmp_path
    directory.save(run.model.state_dict(), "model.safetensors", optimizer=run.optimizer)
    directory.save(run.optimizer.state_dict(), "parts/optimizer.pt", optimizer=run.optimizer)
    directory.add_bytes("config.json", b'{"a": 1}')
    directory.add_bytes("parts/empty", b"")
    (pending_path / "tokenizer").mkdir()
    (pending_path / "tokenizer" / "vocabulary.txt").write_bytes(b"words" * 1000)
    (pending_path / "nothing").touch()
    model, optimizer = copied(dict(run.model.state_dict())), copied(run.optimizer.state_dict())
    pending = directory.publish(step=10, metrics={"loss": 0.5})
    run.advance()
    assert pending.result() == path
    assert not pending_path.exists()
    assert_same(fp.load(path / "parts" / "optimizer.pt"), optimizer)
    assert all(torch.equal(tensor, model[name]) for name, tensor in load_file(path / "model.safetensors").items())
    manifest = manifest_in(path)
    assert manifest["step"] == 10
    assert manifest["metrics"] == {"loss": 0.5}
    names = [str(file.relative_to(path)) for file in sorted(path.rglob("*")) if file.is_file()]
    assert sorted([*(entry["name"] for entry in manifest["files"]), "MANIFEST.json"]) == sorted(names)
    for entry in manifest["files"]:
        data = (path / entry["name"]).read_bytes()
        assert (entry["size_bytes"], int(entry["crc32"], 16)) == (len(data), zlib.crc32(data)), entry["name"]
    assert pending.stats.bytes == sum(entry["size_bytes"] for entry in manifest["files"])


def test_nothing_is_visible_before_publish(tmp_path: Path) -> None:
    directory = fp.DirectorySave(tmp_path / "a")
    directory.save(STATE, "a.pt")
    directory.add_bytes("b", b"b")
    wait_for_writers()
    assert not (tmp_path / "a").exists()
    directory.abort()


def give_up(directory: fp.DirectorySave) -> None:
    directory.abort()
    directory.abort()


def leave_block(directory: fp.DirectorySave) -> None:
    with directory:
        pass


def fail_in_block(directory: fp.DirectorySave) -> None:
    with pytest.raises(KeyError, match="mine"):
        with directory:
            raise KeyError("mine")


endings = pytest.mark.parametrize("end", [give_up, leave_block, fail_in_block])


@endings
@pytest.mark.parametrize("state", ["idle", "writing", "queued"])
@pytest.mark.parametrize("replaces", [True, False], ids=["replaces", "first"])
def test_what_was_not_published_is_removed(
    tmp_path: Path, end: Callable[[fp.DirectorySave], None], state: str, replaces: bool, leak_check: None
) -> None:
    path = tmp_path / "a"
    if replaces:
        with fp.DirectorySave(path) as old:
            old.add_bytes("old", b"old")
            old.publish().result()
    with held_writers() as writers:
        directory = fp.DirectorySave(path, overwrite=True)
        directory.save(STATE, "a.pt")
        if state == "writing":
            assert writers.reached.wait(PATIENCE_S)
        directory.save(STATE, "b.pt")
        threading.Timer(0.05, writers.release).start()
        if state == "idle":
            writers.release()
            wait_for_writers()
        end(directory)
    assert os.listdir(tmp_path) == (["a"] if replaces else [])
    assert not replaces or (path / "old").read_bytes() == b"old"
    for call in (directory.publish, lambda: directory.save(STATE, "c.pt"), lambda: directory.add_bytes("d", b"")):
        with pytest.raises(fp.ConfigError, match="published or aborted"):
            call()


def test_a_file_that_another_rank_has_written_is_published_with_what_it_told(tmp_path: Path, leak_check: None) -> None:
    path = tmp_path / "a"
    directory = fp.DirectorySave(path)
    for name in ("told.bin", "unknown.bin"):
        (Path(directory.path) / name).write_bytes(b"bytes of another rank")
    directory.add_written("told.bin", 21, zlib.crc32(b"not read, so not noticed"))
    directory.add_written("unknown.bin", 21, None)
    with pytest.raises(fp.ConfigError, match=r"told\.bin is in"):
        directory.add_written("told.bin", 21, None)
    directory.publish().result()
    entries = {entry["name"]: entry for entry in manifest_in(path)["files"]}
    assert entries["told.bin"]["crc32"] == f"{zlib.crc32(b'not read, so not noticed'):08x}"
    assert "crc32" not in entries["unknown.bin"]
    assert not fp.verify(path).ok


class Syncing(Filesystem):
    """Notes which files are synced."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def sync(self, fd: int, path: str) -> None:
        self.names.append(os.path.basename(path))
        super().sync(fd, path)


def test_what_another_rank_has_synced_is_not_synced_again(tmp_path: Path, leak_check: None) -> None:
    synced = Syncing()
    with using(synced):
        directory = fp.DirectorySave(tmp_path / "a")
        for name in ("told.bin", "found.bin"):
            (Path(directory.path) / name).write_bytes(b"bytes of another rank")
        directory.add_written("told.bin", 21, None)
        directory.publish().result()
    assert "told.bin" not in synced.names
    assert synced.names.count("found.bin") == 1


@pytest.mark.parametrize(("size_bytes", "said"), [(None, "is gone"), (20, r"has 20 bytes, and its writer wrote 21")])
def test_a_file_of_another_rank_that_is_missing_or_short_is_not_published(
    tmp_path: Path, size_bytes: int | None, said: str, leak_check: None
) -> None:
    directory = fp.DirectorySave(tmp_path / "a")
    if size_bytes is not None:
        (Path(directory.path) / "told.bin").write_bytes(b"x" * size_bytes)
    directory.add_written("told.bin", 21, None)
    with pytest.raises(fp.StorageError, match=said):
        directory.publish().result()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("state", ["idle", "writing"])
def test_what_is_forgotten_is_removed_and_the_process_can_end(
    tmp_path: Path, state: str, caplog: pytest.LogCaptureFixture, leak_check: None
) -> None:
    caplog.set_level(logging.WARNING, logger="fastpersist")
    with held_writers() as writers:
        directory = fp.DirectorySave(tmp_path / "a")
        directory.save(STATE, "a.pt")
        assert writers.reached.wait(PATIENCE_S)
        if state == "idle":
            writers.release()
            wait_for_writers()
        del directory
        gc.collect()
        writers.release()
        wait_for_writers()
    wait_for_writers()  # also one that was begun to clear up
    assert os.listdir(tmp_path) == []
    assert any("never published" in record.message for record in caplog.records)


def test_published_save_may_be_forgotten(tmp_path: Path) -> None:
    with held_writers():
        directory = fp.DirectorySave(tmp_path / "a")
        directory.save(STATE, "a.pt")
        directory.publish()
        del directory
    assert_same(fp.load(tmp_path / "a" / "a.pt"), STATE)


def test_publish_twice_is_refused(tmp_path: Path) -> None:
    with fp.DirectorySave(tmp_path / "a") as directory:
        directory.add_bytes("a", b"a")
        pending = directory.publish()
        with pytest.raises(fp.ConfigError, match="published"):
            directory.publish()
        directory.abort()  # too late, and no error
    assert pending.result() == tmp_path / "a"


def test_existing_directory_needs_overwrite(tmp_path: Path) -> None:
    with fp.DirectorySave(tmp_path / "a") as directory:
        directory.add_bytes("a", b"1")
        directory.publish().result()
    with pytest.raises(fp.ConfigError, match="overwrite=True"):
        fp.DirectorySave(tmp_path / "a")
    with fp.DirectorySave(tmp_path / "a", overwrite=True) as directory:
        directory.add_bytes("b", b"2")
        directory.publish().result()
    assert sorted(os.listdir(tmp_path / "a")) == ["MANIFEST.json", "b"]
    assert hidden_names(tmp_path) == []


def test_name_that_was_taken_meanwhile_is_an_error_and_stays(tmp_path: Path, leak_check: None) -> None:
    with fp.DirectorySave(tmp_path / "a") as directory:
        directory.add_bytes("a", b"mine")
        (tmp_path / "a").mkdir()
        (tmp_path / "a" / "theirs").touch()
        with pytest.raises(fp.ConfigError, match="overwrite=True"):
            directory.publish().result()
    assert os.listdir(tmp_path / "a") == ["theirs"]
    assert hidden_names(tmp_path) == []


@pytest.mark.parametrize(
    "name", ["", ".", "..", "/etc/passwd", "a/../b", "a//b", "a/", "MANIFEST.json", "a\0b", "x" * 256, "a\\b", "C:a"]
)
def test_names_that_leave_the_directory_are_refused(tmp_path: Path, name: str) -> None:
    with fp.DirectorySave(tmp_path / "a") as directory:
        for call in (lambda: directory.save(STATE, name), lambda: directory.add_bytes(name, b"")):
            with pytest.raises(fp.ConfigError):
                call()
        directory.add_bytes("good", b"")
        directory.publish().result()
    assert sorted(os.listdir(tmp_path / "a")) == ["MANIFEST.json", "good"]
    assert os.listdir(tmp_path) == ["a"]


def test_name_that_was_used_is_refused(tmp_path: Path) -> None:
    with fp.DirectorySave(tmp_path / "a") as directory:
        directory.save(STATE, "a.pt")
        for call in (lambda: directory.save(STATE, "a.pt"), lambda: directory.add_bytes("a.pt", b"")):
            with pytest.raises(fp.ConfigError, match=r"a\.pt"):
                call()
        directory.publish().result()
    assert_same(fp.load(tmp_path / "a" / "a.pt"), STATE)


@pytest.mark.parametrize(("first", "second"), [("a", "a/b"), ("a/b", "a")])
def test_name_that_is_a_file_and_a_directory_fails_the_save(tmp_path: Path, first: str, second: str) -> None:
    with fp.DirectorySave(tmp_path / "a") as directory:
        with pytest.raises(fp.FastPersistError):
            directory.add_bytes(first, b"1")
            directory.add_bytes(second, b"2")
            directory.publish().result()
    assert os.listdir(tmp_path) == []


def test_link_that_others_put_there_fails_the_save(tmp_path: Path, leak_check: None) -> None:
    with fp.DirectorySave(tmp_path / "a") as directory:
        Path(directory.path, "link").symlink_to("/etc/passwd")
        with pytest.raises(fp.UnsupportedError, match="symbolic link"):
            directory.publish().result()
    assert os.listdir(tmp_path) == []


def test_object_that_cannot_be_saved_takes_nothing_with_it(tmp_path: Path) -> None:
    with fp.DirectorySave(tmp_path / "a") as directory:
        directory.save(STATE, "a.pt")
        with pytest.raises(Exception, match=r"pickle|lambda"):
            directory.save({"a": lambda: 1}, "b.pt")
        with pytest.raises(fp.ConfigError):
            directory.save({"a": 1}, "c.safetensors")
        directory.publish().result()
    assert sorted(os.listdir(tmp_path / "a")) == ["MANIFEST.json", "a.pt"]


def test_torn_file_fails_the_whole_directory(tmp_path: Path, leak_check: None) -> None:
    run = Run().advance()
    with held_writers() as writers, fp.DirectorySave(tmp_path / "a") as directory:
        directory.save(run.model.state_dict(), "model.pt", optimizer=run.optimizer)
        directory.save(run.optimizer.state_dict(), "optimizer.pt", optimizer=run.optimizer)
        pending = directory.publish()
        with torch.no_grad():
            run.model[1].zero_()
        writers.release()
        with pytest.raises(fp.TornStateError):
            pending.result()
    assert os.listdir(tmp_path) == []


def test_step_waits_for_every_file_of_the_directory(tmp_path: Path, leak_check: None) -> None:
    run = Run().advance()
    model, optimizer = copied(run.model.state_dict()), copied(run.optimizer.state_dict())
    with held_writers() as writers, fp.DirectorySave(tmp_path / "a") as directory:
        directory.save(run.model.state_dict(), "model.pt", optimizer=run.optimizer)
        directory.save(run.optimizer.state_dict(), "optimizer.pt", optimizer=run.optimizer)
        pending = directory.publish()
        run.advance()
        assert pending.captured()
        assert not pending.done()
        writers.release()
        pending.result()
    assert_same(fp.load(tmp_path / "a" / "model.pt"), model)
    assert_same(fp.load(tmp_path / "a" / "optimizer.pt"), optimizer)


def test_optimizer_is_searched_once_for_all_files_between_two_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    look, looks = Owners.look, []
    monkeypatch.setattr(Owners, "look", lambda self: looks.append(self) or look(self))
    run = Run()
    with fp.DirectorySave(tmp_path / "checkpoint") as directory:
        directory.save(run.model.state_dict(), "model.pt", optimizer=run.optimizer)
        directory.save(run.model.state_dict(), "again.pt", optimizer=run.optimizer)
        assert len(looks) == 1
        directory.save(run.model.state_dict(), "copy.pt")
        assert len(looks) == 2
        run.advance()  # makes the tensors of the optimizer's state
        directory.save(run.optimizer.state_dict(), "optimizer.pt", optimizer=run.optimizer)
        assert len(looks) == 3
        assert Kind.STABLE in directory.captures[3].kinds
        assert Kind.STABLE not in directory.captures[2].kinds


def test_forked_child_cannot_end_what_its_parent_writes(tmp_path: Path) -> None:
    with fp.DirectorySave(tmp_path / "a") as directory:
        directory.save(STATE, "a.pt")

        def work(report: Report) -> None:
            directory.abort()

        run_in_child(work)
        directory.publish().result()
    assert_same(fp.load(tmp_path / "a" / "a.pt"), STATE)
    assert hidden_names(tmp_path) == []


def test_parent_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises((fp.StorageError, fp.CheckpointNotFoundError), match="none"):
        fp.DirectorySave(tmp_path / "none" / "a")


def test_an_interrupt_while_a_save_begins_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_arguments: object, **_keywords: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("fastpersist.saving.directory_save.PendingSave", interrupt)
        with pytest.raises(KeyboardInterrupt):
            fp.DirectorySave(tmp_path / "step")
    assert list(tmp_path.iterdir()) == []


def test_other_ranks_are_told_of_an_error_while_a_save_begins(tmp_path: Path) -> None:
    told: list[BaseException] = []

    class Fails(Alone):
        def begin(self, *_arguments: Any, **_keywords: Any) -> None:
            raise KeyboardInterrupt

        def fail(self, error: BaseException) -> None:
            told.append(error)

    with pytest.raises(KeyboardInterrupt) as caught:
        fp.DirectorySave(tmp_path / "step", _strategy=Fails())
    assert told == [caught.value]
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_saved_at_once_is_there_and_is_published_as_it_is_then(tmp_path: Path, leak_check: None) -> None:
    kinds: list[str] = []
    stop = fp.events.subscribe(lambda event: kinds.append(event.path))
    with fp.DirectorySave(tmp_path / "a") as directory:
        for value in (1, 2):
            directory.save_at_once({"x": torch.full((3,), value)}, "x.pt")
            assert torch.load(Path(directory.path) / "x.pt")["x"].tolist() == [value] * 3
        directory.save_at_once({"y": torch.ones(2)}, "y", format="safetensors", metadata={"format": "pt"})
        os.rename(Path(directory.path) / "y", Path(directory.path) / "z")
        directory.save(STATE, "background.pt")
        with pytest.raises(fp.ConfigError, match=r"background\.pt is in .* already"):
            directory.save_at_once({}, "background.pt")
        directory.publish().result()
    flush()
    stop()
    assert sorted(os.listdir(tmp_path / "a")) == ["MANIFEST.json", "background.pt", "x.pt", "z"]
    assert fp.verify(tmp_path / "a").ok
    assert not [path for path in kinds if "pending" in path]


def test_what_is_no_bytes_takes_no_name(tmp_path: Path) -> None:
    directory = fp.DirectorySave(tmp_path / "step")
    for data in ("{}", 7):
        with pytest.raises(fp.ConfigError, match=r"the data of config\.json are bytes"):
            directory.add_bytes("config.json", data)  # type: ignore[arg-type]
    directory.add_bytes("config.json", b"{}")
    directory.publish().result()
    assert (tmp_path / "step" / "config.json").read_bytes() == b"{}"
