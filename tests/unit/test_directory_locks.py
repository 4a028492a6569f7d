"""Readers keep a directory, and one process at a time owns a root, however it ends."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.directories import (
    NAME,
    Failing,
    hidden,
    kill_alone,
    lock_is_free,
    save,
    step_in,
    wait_for_report,
)
from support.forking import Child, Report, run_in_child

from fastpersist import directory_locks
from fastpersist.directory_commit import (
    RootLock,
    hold_for_reading,
    remove_directory,
    sweep_directories,
)
from fastpersist.errors import (
    CheckpointNotFoundError,
    ConfigError,
    StorageError,
)
from fastpersist.filesystem import Filesystem, using

# --- reading


def reading(path: Path) -> Child:
    """Return a child that reads the directory until it is killed."""

    def work(report: Report) -> None:
        with hold_for_reading(str(path)):
            report(0)
            signal.pause()

    child = Child(work)
    wait_for_report(child)
    return child


def test_directory_that_is_being_read_is_not_removed(tmp_path: Path, leak_check: None) -> None:
    path = tmp_path / NAME
    save(path)
    with reading(path), reading(path):
        assert not remove_directory(str(path))
    with hold_for_reading(str(path)), hold_for_reading(str(path)):
        assert not remove_directory(str(path))
        run_in_child(lambda report: report(int(remove_directory(str(path)))))
        assert step_in(path) == 1
    assert remove_directory(str(path))


def test_directory_that_is_being_read_is_replaced_and_stays_until_it_is_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "fastpersist")
    path = tmp_path / NAME
    save(path, 1)
    with reading(path):
        save(path, 2)
        assert "is being read" in caplog.text
        assert step_in(path) == 2
        (old,) = hidden(tmp_path)
        assert step_in(old) == 1
        assert sweep_directories(str(tmp_path), NAME) == []
    save(path, 3)
    assert os.listdir(tmp_path) == [NAME]


def test_forked_child_does_not_hold_what_its_parent_reads(tmp_path: Path) -> None:
    path = tmp_path / NAME
    save(path)

    def work(report: Report) -> None:
        report(0)
        signal.pause()

    with hold_for_reading(str(path)):
        worker = Child(work)
        wait_for_report(worker)  # now it has closed what it inherited
    with worker:
        assert remove_directory(str(path))


def test_reader_waits_for_a_lock_that_is_let_go(tmp_path: Path) -> None:
    """As a writer holds it between the rename and the closing, and a remover until the rename."""
    path = tmp_path / NAME
    save(path)

    def work(report: Report) -> None:
        fd = os.open(path / "MANIFEST.json", os.O_RDWR)
        fcntl.lockf(fd, fcntl.LOCK_EX)
        report(0)
        time.sleep(0.1)
        report(1)

    with Child(work) as child:
        wait_for_report(child)
        with hold_for_reading(str(path)):
            assert child.reported == 1
        assert child.wait().verdict == "passed"


def test_reader_that_waits_for_a_removal_finds_nothing(tmp_path: Path) -> None:
    path = tmp_path / NAME
    save(path)

    class Slow(Filesystem):
        def __init__(self, report: Report) -> None:
            self.report = report

        def rename(self, source: str, target: str) -> None:
            self.report(0)
            time.sleep(0.1)
            super().rename(source, target)

    def work(report: Report) -> None:
        with using(Slow(report)):
            assert remove_directory(str(path))

    with Child(work) as child:
        wait_for_report(child)
        with pytest.raises(CheckpointNotFoundError), hold_for_reading(str(path)):
            pass
        assert child.wait().verdict == "passed", child.wait().message


def test_reader_that_has_locked_what_was_just_replaced_takes_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / NAME
    save(path, 1)
    lock = directory_locks._lock_open_file

    def replace_first(fd: int, kind: int, locked: str) -> directory_locks.Lock:
        monkeypatch.undo()
        save(path, 2)
        return lock(fd, kind, locked)

    monkeypatch.setattr(directory_locks, "_lock_open_file", replace_first)
    with hold_for_reading(str(path)):
        assert not remove_directory(str(path))
        assert step_in(path) == 2


@pytest.mark.parametrize("make", [lambda path: None, Path.mkdir, Path.touch])
def test_what_is_no_checkpoint_cannot_be_held(make: Callable[[Path], None], tmp_path: Path, leak_check: None) -> None:
    make(tmp_path / NAME)
    with pytest.raises(CheckpointNotFoundError, match=r"MANIFEST\.json"), hold_for_reading(str(tmp_path / NAME)):
        pass


# --- the root's lock


def test_second_owner_of_a_root_is_told_who_has_it(tmp_path: Path, leak_check: None) -> None:
    def work(report: Report) -> None:
        _lock = RootLock.acquire(str(tmp_path))
        report(os.getpid())
        signal.pause()

    with Child(work) as child:
        wait_for_report(child, 1)
        with pytest.raises(ConfigError, match=rf"process {child.pid} on \S+, and only one .* another directory"):
            RootLock.acquire(str(tmp_path))
        child.kill()
        RootLock.acquire(str(tmp_path)).release()


def test_second_owner_in_one_process_is_refused_and_the_lock_stays(tmp_path: Path, leak_check: None) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "link").symlink_to("root")
    lock = RootLock.acquire(str(tmp_path / "root"))
    for _ in range(2):
        with pytest.raises(ConfigError, match=rf"this process \({os.getpid()}\)"):
            RootLock.acquire(str(tmp_path / "link"))
    assert not lock_is_free(tmp_path / "root" / ".lock")
    lock.release()
    lock.release()
    assert lock_is_free(tmp_path / "root" / ".lock")
    RootLock.acquire(str(tmp_path / "root")).release()


def test_root_is_free_at_once_when_its_owner_is_killed_and_a_forked_worker_lives(tmp_path: Path) -> None:
    def work(report: Report) -> None:
        lock = RootLock.acquire(str(tmp_path))
        worker = os.fork()
        if worker == 0:
            lock.release()  # not its own to release
            signal.pause()
        report(worker)
        signal.pause()

    with Child(work) as child:
        wait_for_report(child, 1)
        worker = child.reported
        try:
            with pytest.raises(ConfigError, match=f"process {child.pid}"):
                RootLock.acquire(str(tmp_path))
            kill_alone(child)
            RootLock.acquire(str(tmp_path)).release()
            os.kill(worker, 0)  # it lived all the time
        finally:
            os.kill(worker, signal.SIGKILL)


def test_forked_child_finds_its_parent_in_the_root(tmp_path: Path) -> None:
    lock = RootLock.acquire(str(tmp_path))

    def work(report: Report) -> None:
        lock.release()
        with pytest.raises(ConfigError, match=f"process {os.getppid()} on"):
            RootLock.acquire(str(tmp_path))

    run_in_child(work)
    assert not lock_is_free(tmp_path / ".lock")
    lock.release()


def test_lock_file_that_is_deleted_before_it_is_locked_is_made_anew(tmp_path: Path, leak_check: None) -> None:
    class Deleted(Filesystem):
        count = 0

        def create(self, path: str, mode: int = 0o666) -> int:
            fd = super().create(path, mode)
            self.count += 1
            if self.count == 1:
                os.unlink(path)
            return fd

    with using(double := Deleted()):
        lock = RootLock.acquire(str(tmp_path))
    assert double.count == 2
    assert not lock_is_free(tmp_path / ".lock")
    lock.release()


def test_lock_is_had_on_a_full_disk_once_its_file_is_there(tmp_path: Path) -> None:
    RootLock.acquire(str(tmp_path)).release()
    with using(Failing(2, errno.ENOSPC, lasting=True)):
        lock = RootLock.acquire(str(tmp_path))
    assert not lock_is_free(tmp_path / ".lock")
    lock.release()


def test_root_is_free_again_after_ctrl_c_behind_its_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leak_check: None
) -> None:
    def interrupted(_lock: RootLock, _path: str) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt) as caught:
        patch.setattr(RootLock, "_leave_hint", interrupted)
        RootLock.acquire(str(tmp_path))
    RootLock.acquire(str(tmp_path)).release()  # while the traceback lives, as in a notebook
    assert caught.traceback


def test_missing_root_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError) as caught:
        RootLock.acquire(str(tmp_path / "missing"))
    assert caught.value.errno == errno.ENOENT
