"""The directory of a Checkpointer: its lock, what follows a durable step, and what is told where that fails."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from support.filesystems import failing_lookup

import fastpersist as fp
from fastpersist.checkpointer import root as root_module
from fastpersist.checkpointer.root import RetentionPolicy, Root, why_no_root
from fastpersist.commit.directory_commit import hold_for_reading
from fastpersist.commit.filesystem import Filesystem, using
from fastpersist.formats.manifest import step_name


def save_steps(path: Path, *steps: int) -> None:
    with fp.Checkpointer(path) as checkpointer:
        for step in steps:
            checkpointer.save(step, {"w": torch.ones(3)})


def steps_in(path: Path) -> list[int]:
    return fp.Checkpointer(path).steps()


def test_what_cannot_be_a_root_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert why_no_root(str(tmp_path)) == why_no_root(str(tmp_path / "new" / "root")) == ""
    assert "is a file" in why_no_root(str(tmp_path / "file"))
    assert "a file is where one of its parents should be" in why_no_root(str(tmp_path / "file" / "root"))


def test_lock_is_taken_once_and_again_after_the_directory_went_away(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b"
    root, other = (Root(str(path), RetentionPolicy()) for _ in range(2))
    assert root.take() == [str(tmp_path / "a"), str(path)]
    assert root.take() is None
    with pytest.raises(fp.ConfigError):
        other.take()
    path.rename(tmp_path / "elsewhere")
    assert root.take() == [str(path)]
    root.release()
    assert other.take() == []
    other.release()


def test_each_look_at_the_root_that_fails_is_an_error_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stat, path = os.stat, str(tmp_path)
    until_failure = 0
    failures = []

    def failing(what: Any, **options: Any) -> os.stat_result:
        nonlocal until_failure
        until_failure -= what == path
        if until_failure == 0 and what == path:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return stat(what, **options)

    monkeypatch.setattr(os, "stat", failing)
    for nth in range(1, 10):
        root, until_failure = Root(path, RetentionPolicy()), nth
        try:
            root.take()
        except fp.StorageError as error:
            failures.append(error.filename)
        root.release()
    assert len(failures) >= 2
    assert set(failures) == {path}


def test_steps_that_were_put_there_meanwhile_are_known_once_the_lock_is_taken_again(tmp_path: Path) -> None:
    root = Root(str(tmp_path), RetentionPolicy(keep=1))
    root.take()
    assert root.next_commit_number() == 1
    root.release()
    save_steps(tmp_path, 5, 6)
    root.take()
    assert root.next_commit_number() == 3
    root.release()


def test_step_is_damaged_if_a_load_has_said_so_until_it_is_saved_again(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    root = Root(str(tmp_path), RetentionPolicy())
    assert not root.is_damaged(1)
    root.unloadable.update((1, 2))
    assert root.is_damaged(1)
    root.after_commit(1, {})
    assert [root.is_damaged(step) for step in (1, 2, 3)] == [False, True, False]
    root.unloadable.add(3)
    assert not root.is_damaged(3)  # it is not there
    (tmp_path / "step-00000001" / "state.pt").write_bytes(b"short")
    assert root.is_damaged(1)
    removed = root.remove_together(lambda found: [step for step in found if step == 2], lambda: None, None, 0)
    assert (removed, root.unloadable) == ([2], {3})


def test_step_that_a_load_went_back_from_is_damaged_even_if_it_cannot_be_looked_at(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    root = Root(str(tmp_path), RetentionPolicy())
    root.unloadable.add(1)
    with failing_lookup(tmp_path / step_name(1) / "state.pt"):
        assert root.is_damaged(1)


def test_step_that_cannot_be_looked_at_is_not_damaged_and_stays(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    before = (tmp_path / step_name(2) / "state.pt").read_bytes()
    for nth in itertools.count(1):
        with fp.Checkpointer(tmp_path) as checkpoints, failing_lookup(tmp_path / step_name(2) / "state.pt", nth) as at:
            with pytest.raises(fp.ConfigError, match="exists already"):
                checkpoints.save(2, {"other": 1})
        assert (tmp_path / step_name(2) / "state.pt").read_bytes() == before
        if not at:
            return


class NoLatest(Filesystem):
    def rename(self, source: str, target: str) -> None:
        if target.endswith("LATEST"):
            raise fp.StorageError(errno.EIO, f"renaming {source} failed", source)
        super().rename(source, target)


def test_step_stays_saved_if_the_upkeep_after_it_fails(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_steps(tmp_path, 1, 2)
    root = Root(str(tmp_path), RetentionPolicy(keep=1))
    with using(NoLatest()):
        root.after_commit(2, {})
    assert "step 2 is saved, but LATEST and the older steps were not updated" in caplog.text
    assert steps_in(tmp_path) == [1, 2]
    root.after_commit(2, {})
    assert steps_in(tmp_path) == [2]
    assert (tmp_path / "LATEST").read_text() == "step-00000002\n"


def test_steps_are_kept_and_removed_beside_a_directory_named_latest(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "LATEST").mkdir()
    save_steps(tmp_path, 1, 2, 3)
    root = Root(str(tmp_path), RetentionPolicy(keep=2))
    root.after_commit(3, {})
    assert steps_in(tmp_path) == [2, 3]
    assert f"{tmp_path / 'LATEST'} is a directory" in caplog.text
    assert root.remove([3]) == [3]
    assert root.remove([2]) == [2]


class FullUntil(Filesystem):
    """A full disk as long as these steps are there."""

    def __init__(self, root: Path, *steps: int, names: str = "") -> None:
        self._paths = [root / f"step-{step:08d}" for step in steps]
        self._names = names
        self.refused = threading.Event()

    def _require_room(self, path: str) -> None:
        if any(step.exists() for step in self._paths):
            self.refused.set()
            raise fp.NoSpaceError(errno.ENOSPC, f"no space for {path}", path)

    def allocate(self, fd: int, size_bytes: int, path: str) -> None:
        if not self._names:
            self._require_room(path)
        super().allocate(fd, size_bytes, path)

    def create(self, path: str, mode: int = 0o666) -> int:
        if self._names and self._names in path:
            self._require_room(path)
        return super().create(path, mode)


def test_steps_that_a_dead_process_left_make_room_for_the_first_save(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2, 3)
    with using(FullUntil(tmp_path, 1)), fp.Checkpointer(tmp_path, keep=2) as checkpointer:
        checkpointer.save(4, {"w": torch.ones(3)}).result()
    assert steps_in(tmp_path) == [3, 4]


def test_a_full_disk_removes_no_step_that_a_rule_keeps(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2, 3)
    with using(FullUntil(tmp_path, 1)), fp.Checkpointer(tmp_path, keep=3, on_error="warn") as checkpointer:
        assert isinstance(checkpointer.save(4, {}).exception(), fp.NoSpaceError)
    assert steps_in(tmp_path) == [1, 2, 3]


def test_a_full_disk_removes_no_step_beside_one_that_no_load_can_read(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    root = Root(str(tmp_path), RetentionPolicy(keep=1))
    assert not root.make_room()  # another process may have the lock
    root.take()
    root.unloadable.add(2)
    assert not root.make_room()
    root.unloadable.clear()
    assert root.make_room()
    assert not root.make_room()
    root.release()
    assert steps_in(tmp_path) == [2]


def test_a_save_that_finds_the_disk_full_waits_for_removals_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove_directory = root_module.remove_directory
    disk = FullUntil(tmp_path, 1)

    def late(path: str) -> bool:
        assert disk.refused.wait(60)
        return remove_directory(path)

    with fp.Checkpointer(tmp_path, keep=1) as checkpointer:
        checkpointer.save(1, {"w": torch.ones(3)}).result()
        monkeypatch.setattr(root_module, "remove_directory", late)
        second = checkpointer.save(2, {"w": torch.ones(3)})
        second.wait_written()
        with using(disk):
            checkpointer.save(3, {"w": torch.ones(3)}).result()
    assert steps_in(tmp_path) == [3]


def test_old_steps_go_where_the_disk_is_too_full_for_latest(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_steps(tmp_path, 1, 2)
    root = Root(str(tmp_path), RetentionPolicy(keep=1))
    with using(FullUntil(tmp_path, 1, names="LATEST")):
        root.after_commit(2, {})
    assert steps_in(tmp_path) == [2]
    assert (tmp_path / "LATEST").read_text() == "step-00000002\n"
    assert not caplog.records
    with using(FullUntil(tmp_path, 2, names="LATEST")):
        root.after_commit(2, {})
    assert "step 2 is saved, but LATEST does not name it" in caplog.text


def test_steps_that_somebody_has_removed_by_hand_do_not_count_where_the_disk_is_full(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    root = Root(str(tmp_path), RetentionPolicy(keep=1))
    root.take()
    root.next_commit_number()  # knows both
    shutil.rmtree(tmp_path / "step-00000002")
    assert not root.make_room()
    root.release()
    assert steps_in(tmp_path) == [1]


@pytest.mark.parametrize("keep", [1, 2])
def test_a_save_that_fails_beside_removals_costs_no_other_step(
    keep: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove_directory = root_module.remove_directory
    go = threading.Event()

    def late(path: str) -> bool:
        assert go.wait(60)
        return remove_directory(path)

    with fp.Checkpointer(tmp_path, keep=keep, on_error="warn") as checkpointer:
        for step in range(keep):
            checkpointer.save(step, {}).result()
        monkeypatch.setattr(root_module, "remove_directory", late)
        for step in range(keep, 2 * keep + 1):
            checkpointer.save(step, {}).wait_written()
        with using(Without("state.pt")):
            failed = checkpointer.save(100, {"w": torch.ones(3)})
            failed.wait_written()
        go.set()
        assert isinstance(failed.exception(), fp.StorageError)
        checkpointer.wait()
    assert steps_in(tmp_path) == list(range(2 * keep + 1))[-keep:]


class Without(Filesystem):
    def __init__(self, name: str) -> None:
        self._name = name

    def create(self, path: str, mode: int = 0o666) -> int:
        if path.endswith(self._name):
            raise fp.StorageError(errno.EIO, f"creating {path} failed", path)
        return super().create(path, mode)


def test_step_that_is_read_stays_until_a_later_one_is_durable(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_steps(tmp_path, 1, 2)
    root = Root(str(tmp_path), RetentionPolicy(keep=1))
    with hold_for_reading(str(tmp_path / "step-00000001")):
        root.after_commit(2, {})
        assert steps_in(tmp_path) == [1, 2]
        with pytest.raises(fp.StorageError, match=r"step 1 of .* is being read, so it was not removed") as caught:
            root.remove([1])
    assert caught.value.errno == errno.EBUSY
    root.after_commit(2, {})
    assert steps_in(tmp_path) == [2]
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


@pytest.mark.parametrize("for_room", [False, True])
def test_step_that_is_read_when_it_is_replaced_goes_later(tmp_path: Path, for_room: bool) -> None:
    with fp.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"w": torch.ones(3)}).result()
        with hold_for_reading(str(tmp_path / "step-00000001")):
            checkpointer.save(1, {"w": torch.zeros(3)}, overwrite=True).result()
            assert not checkpointer._root.make_room()
            assert len(list(tmp_path.glob(".step-*"))) == 1
        if for_room:
            assert checkpointer._root.make_room()
        else:
            checkpointer.save(2, {"w": torch.ones(3)}).result()
        assert list(tmp_path.glob(".step-*")) == []


def test_latest_follows_what_is_left_and_goes_with_the_last_step(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    root = Root(str(tmp_path), RetentionPolicy())
    assert root.remove([2, 7]) == [2]
    assert (tmp_path / "LATEST").read_text() == "step-00000001\n"
    assert root.remove([1]) == [1]
    assert not (tmp_path / "LATEST").exists()
    assert root.remove([1]) == []


def test_a_step_that_was_removed_by_hand_takes_no_place_of_another(tmp_path: Path) -> None:
    with fp.Checkpointer(tmp_path, keep=2, keep_best=(1, "loss", "min")) as checkpointer:
        for step, loss in ((1, 0.1), (2, 0.9), (3, 0.5)):
            checkpointer.save(step, {"w": torch.ones(3)}, metrics={"loss": loss}).result()
        checkpointer.wait()
        for step in (1, 3):  # the best one, and one of the newest
            shutil.rmtree(tmp_path / f"step-{step:08}")
        for step, loss in ((4, 0.2), (5, 0.8), (6, 0.7)):
            checkpointer.save(step, {"w": torch.ones(3)}, metrics={"loss": loss}).result()
            if step == 4:
                checkpointer.wait()
                assert checkpointer.steps() == [2, 4]
    assert steps_in(tmp_path) == [4, 5, 6]
