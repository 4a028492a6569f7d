"""Where directories come into being: parents that are made, and pending directories that lie elsewhere."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.filesystems import FullFor
from support.sandbox import overlay_mounted

import fastpersist as fp
from fastpersist.commit.filesystem import Filesystem, make_directories, using
from fastpersist.errors import StorageError


class Recording(Filesystem):
    """The real file system, and what was made, renamed and synced there."""

    def __init__(self) -> None:
        self.done: list[tuple[str, str]] = []

    def make_directory(self, path: str, mode: int = 0o777) -> None:
        self.done.append(("make", path))
        super().make_directory(path, mode)

    def sync_directory(self, path: str) -> None:
        self.done.append(("sync", path))
        super().sync_directory(path)

    def rename_to_free_name(self, source: str, target: str) -> None:
        self.done.append(("rename", target))
        super().rename_to_free_name(source, target)


def save_into(files: fp.DirectorySave) -> None:
    files.save({"w": torch.ones(3)}, "w.pt")
    files.add_bytes("b", b"text")
    files.publish().result()


# --- make_parents


def test_each_directory_that_was_missing_has_a_durable_name(tmp_path: Path) -> None:
    with using(recording := Recording()):
        make_directories(str(tmp_path / "a" / "b"))
    a, b = str(tmp_path / "a"), str(tmp_path / "a" / "b")
    assert recording.done == [("make", a), ("sync", str(tmp_path)), ("make", b), ("sync", a)]


def test_a_directory_that_somebody_else_makes_meanwhile_is_taken(tmp_path: Path) -> None:
    class Racing(Filesystem):
        def make_directory(self, path: str, mode: int = 0o777) -> None:
            os.mkdir(path)
            super().make_directory(path, mode)

    with using(Racing()):
        make_directories(str(tmp_path / "a" / "b"))
    assert (tmp_path / "a" / "b").is_dir()


def test_a_file_in_the_way_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x")
    with pytest.raises(fp.StorageError, match=str(tmp_path / "a")):
        make_directories(str(tmp_path / "a" / "b"))
    assert (tmp_path / "a").read_text() == "x"


def test_save_makes_parents_only_when_told(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "x.pt"
    for save in (fp.save, fp.save_async):
        with pytest.raises(fp.StorageError):
            save(1, path)  # type: ignore[operator]
        assert not (tmp_path / "a").exists()
    fp.save(1, path, make_parents=True)
    assert fp.load(path) == 1
    other = tmp_path / "c" / "x.pt"
    fp.save_async(2, other, make_parents=True).result()
    assert fp.load(other) == 2


@pytest.mark.parametrize(
    "save",
    [
        lambda path: fp.save(1, path),
        lambda path: fp.save_async(1, path),
        lambda path: fp.DirectorySave(path),
        lambda path: fp.DirectorySave(path, pending_in=path.parent),
        lambda path: fp.save({"w": torch.ones(3)}, path.with_suffix(".safetensors")),
    ],
)
def test_a_missing_directory_is_named_with_the_argument_that_makes_it(
    save: Callable[[Path], object], tmp_path: Path
) -> None:
    with pytest.raises(fp.StorageError) as raised:
        save(tmp_path / "a" / "b" / "x")
    assert f"there is no directory {tmp_path / 'a' / 'b'}: make it, or save with make_parents=True" in str(raised.value)
    assert raised.value.errno == errno.ENOENT
    assert os.listdir(tmp_path) == []


def test_the_argument_is_not_offered_where_it_would_not_help(tmp_path: Path) -> None:
    (tmp_path / "x.pt").symlink_to(tmp_path / "none" / "x.pt")  # the parent of the path itself is there
    with pytest.raises(fp.StorageError, match="No such file or directory") as raised:
        fp.save(1, tmp_path / "x.pt", make_parents=True)
    assert "make_parents" not in str(raised.value)
    (tmp_path / "file").touch()
    with pytest.raises(fp.StorageError) as raised:
        fp.save(1, tmp_path / "file" / "x.pt")
    assert "make_parents" not in str(raised.value)


def test_a_new_root_of_a_checkpointer_has_a_durable_name(tmp_path: Path) -> None:
    with using(recording := Recording()), fp.Checkpointer(tmp_path / "runs" / "a") as checkpoints:
        checkpoints.save(1, {"x": 1})
    assert ("sync", str(tmp_path)) in recording.done
    assert recording.done.index(("sync", str(tmp_path / "runs"))) > recording.done.index(
        ("make", str(tmp_path / "runs" / "a"))
    )


# --- pending_in


def test_the_parent_shows_nothing_until_all_is_published(tmp_path: Path) -> None:
    parent = tmp_path / "checkpoints"
    with using(recording := Recording()):
        files = fp.DirectorySave(parent / "one", make_parents=True, pending_in=tmp_path)
        assert Path(files.path).parent == tmp_path
        assert os.listdir(parent) == []
        save_into(files)
    assert fp.verify(parent / "one").ok
    assert os.listdir(parent) == ["one"]
    assert os.listdir(tmp_path) == ["checkpoints"]
    renamed = recording.done.index(("rename", str(parent / "one")))
    assert recording.done[renamed + 1 :] == [("sync", str(parent)), ("sync", str(tmp_path))]


def test_what_a_dead_save_of_another_name_left_there_is_removed_and_what_lives_stays(tmp_path: Path) -> None:
    parent = tmp_path / "checkpoints"
    parent.mkdir()
    dead = tmp_path / f".one.pending-{'0' * 16}"
    dead.mkdir()
    (dead / "MANIFEST.json").touch()
    (dead / "w.pt").write_text("half")
    with fp.DirectorySave(parent / "two", pending_in=tmp_path) as alive:
        save_into(fp.DirectorySave(parent / "three", pending_in=tmp_path))
        assert not dead.exists()
        assert os.path.isdir(alive.path)
        save_into(alive)
    assert sorted(os.listdir(parent)) == ["three", "two"]


def test_a_checkpoint_is_replaced_from_elsewhere(tmp_path: Path) -> None:
    parent = tmp_path / "checkpoints"
    save_into(fp.DirectorySave(parent / "one", make_parents=True))
    with fp.DirectorySave(parent / "one", overwrite=True, pending_in=tmp_path) as files:
        files.add_bytes("new", b"new")
        files.publish().result()
    assert sorted(os.listdir(parent / "one")) == ["MANIFEST.json", "new"]
    assert os.listdir(parent) == ["one"]
    assert os.listdir(tmp_path) == ["checkpoints"]


def test_what_is_given_up_leaves_nothing_elsewhere(tmp_path: Path) -> None:
    with fp.DirectorySave(tmp_path / "a" / "one", make_parents=True, pending_in=tmp_path) as files:
        files.add_bytes("b", b"text")
    assert os.listdir(tmp_path) == ["a"]
    assert os.listdir(tmp_path / "a") == []


def test_a_pending_directory_on_another_file_system_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    real = os.stat

    def other_device(path: os.PathLike[str] | str, **options: object) -> os.stat_result:
        status = real(path, **options)  # type: ignore[arg-type]
        if os.fspath(path) != str(elsewhere):
            return status
        return os.stat_result((*status[:2], status.st_dev + 1, *status[3:]))

    monkeypatch.setattr(os, "stat", other_device)
    with pytest.raises(fp.ConfigError, match=f"pending_in {elsewhere} is on another file system than {tmp_path}"):
        fp.DirectorySave(tmp_path / "one", pending_in=elsewhere)
    assert os.listdir(tmp_path) == ["elsewhere"]
    assert os.listdir(elsewhere) == []


# --- a file that cannot be written


def failed_files(tmp_path: Path) -> fp.DirectorySave:
    """Return a directory whose first file is known to have failed."""
    files = fp.DirectorySave(tmp_path / "one")
    files.save({"w": torch.ones(3)}, "w.pt")
    reached = threading.Event()
    files._lane.submit(reached.set)  # behind the file
    assert reached.wait(60)
    return files


@pytest.mark.parametrize("end", ["publish", "abort"])
def test_the_pending_directory_stays_for_others_until_it_is_published_or_given_up(tmp_path: Path, end: str) -> None:
    with using(FullFor()):
        files = failed_files(tmp_path)
        Path(files.path, "config.json").write_text("somebody else's")
        files.save({"w": torch.ones(3)}, "more.pt")
        files.add_bytes("b", b"text")
        if end == "publish":
            with pytest.raises(fp.NoSpaceError, match="disk full"):
                files.publish().result()
        else:
            files.abort()
    assert os.listdir(tmp_path) == []


def test_a_step_does_not_wait_for_a_file_that_has_failed(tmp_path: Path) -> None:
    weights = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weights], lr=0.1)
    with using(FullFor()):
        files = fp.DirectorySave(tmp_path / "one")
        files.save({"w": weights.data}, "w.pt", optimizer)
        weights.grad = torch.ones(3)
        optimizer.step()
        with pytest.raises(fp.NoSpaceError):
            files.publish().result()


# --- syncs come after all writes


class Counting(Filesystem):
    """The real file system, and how many files were open, and written, when each was synced."""

    def __init__(self) -> None:
        self.written: list[str] = []
        self.written_at_sync: list[int] = []
        self.open_count = 0

    def create(self, path: str, mode: int = 0o666) -> int:
        fd = super().create(path, mode)
        self.written.append(path)
        self.open_count = max(self.open_count, len(os.listdir("/proc/self/fd")))
        return fd

    def sync(self, fd: int, path: str) -> None:
        self.written_at_sync.append(len(self.written))
        super().sync(fd, path)


def test_files_are_synced_when_all_are_written(tmp_path: Path) -> None:
    with using(counting := Counting()):
        save_into(fp.DirectorySave(tmp_path / "one"))
    assert counting.written_at_sync == [3, 3, 3]  # two files and the manifest


def test_what_need_not_be_durable_is_not_synced(tmp_path: Path) -> None:
    with using(counting := Counting()):
        files = fp.DirectorySave(tmp_path / "one")
        files.save({"w": torch.ones(3)}, "w.pt")
        files.publish(durable=False).result()
    assert counting.written_at_sync == []
    assert fp.verify(tmp_path / "one").ok


def test_hundreds_of_files_do_not_use_up_the_descriptors(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with using(counting := Counting()):
        files = fp.DirectorySave(tmp_path / "one")
        for number in range(200):
            files.add_bytes(f"{number}", b"text")
        files.publish().result()
    assert counting.open_count <= before + 70
    assert len(counting.written_at_sync) == 201
    assert len(os.listdir("/proc/self/fd")) == before


# --- in the image of a container


def test_steps_of_an_image_are_removed_by_retention_and_replaced_when_deleted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    image = tmp_path / "image"
    with fp.Checkpointer(image / "root") as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, {"step": step})
    with overlay_mounted(image, tmp_path) as merged:
        root = merged / "root"
        with fp.Checkpointer(root, keep=2) as checkpointer:
            with pytest.raises(StorageError, match=r"cannot be renamed.*remove it first.*Checkpointer\.delete"):
                checkpointer.save(3, {"step": 33}, overwrite=True).result()
            assert checkpointer.load() == {"step": 3}
            checkpointer.save(4, {"step": 4})
            checkpointer.wait()
        caplog.clear()
        with fp.Checkpointer(root, keep=2) as checkpointer:
            assert checkpointer.steps() == [3, 4]
            assert sorted(name for name in os.listdir(root) if "step" in name) == ["step-00000003", "step-00000004"]
            checkpointer.delete(3)
            checkpointer.save(3, {"step": 33})
            checkpointer.wait()
            assert checkpointer.load() == {"step": 33}
