"""Readers keep a directory, and one process at a time owns a root, however it ends."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.directories import NAME, begin, hidden, kill_alone, leave, lock_is_free, save, step_in, wait_for_report
from support.filesystems import FailingFilesystem
from support.forking import Child, Report, run_in_child
from support.sandbox import become_ordinary_user, open_directory

import fastpersist as fp
from fastpersist.commit import locks
from fastpersist.commit.directory_commit import (
    RootLock,
    hold_for_reading,
    remove_directory,
    sweep_directories,
)
from fastpersist.commit.filesystem import Filesystem, using
from fastpersist.errors import (
    CheckpointNotFoundError,
    ConfigError,
    StorageError,
)

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
    lock = locks._lock_open_file

    def replace_first(fd: int, kind: int, locked: str) -> locks.Lock:
        monkeypatch.undo()
        save(path, 2)
        return lock(fd, kind, locked)

    monkeypatch.setattr(locks, "_lock_open_file", replace_first)
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
    with using(FailingFilesystem(2, errno.ENOSPC, lasting=True)):
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


def refuse_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, *arguments: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "lockf", refuse)
    monkeypatch.setattr(fcntl, "fcntl", refuse)


def test_live_directory_of_a_job_without_locks_is_not_swept_by_a_job_that_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leak_check: None
) -> None:
    """A host without lockd saves to NFS, and a second job begins there from a host with it."""
    refuse_locks(monkeypatch)
    lock = RootLock.acquire(str(tmp_path))
    pending = begin(tmp_path / NAME)
    day_ago_s = time.time() - 25 * 3600
    old = leave(tmp_path)
    for path in (old, old / "MANIFEST.json"):
        os.utime(path, (day_ago_s, day_ago_s))

    def second_job(report: Report) -> None:
        monkeypatch.undo()
        with fp.Checkpointer(tmp_path) as checkpointer:
            checkpointer.save(2, {"step": 2}).result()

    run_in_child(second_job)
    assert hidden(tmp_path) == [Path(pending.path)]
    pending.publish(b'{"step": 1}\n')
    assert step_in(tmp_path / NAME) == 1
    lock.release()


def test_root_without_locks_is_told_loudly_and_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    refuse_locks(monkeypatch)
    for _ in range(2):
        lock = RootLock.acquire(str(tmp_path))
        assert not lock.excludes_others
        lock.release()
    (warning,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert str(tmp_path) in warning.getMessage()
    assert "nothing keeps two jobs from saving" in warning.getMessage()


@pytest.mark.parametrize(
    ("options", "excludes_others"),
    [
        ("rw,vers=3,nolock,local_lock=all", False),
        ("rw,vers=3,local_lock=posix,addr=10.0.0.1", False),
        ("rw,vers=4.2,local_lock=none", True),
        ("rw,localflock", False),
        ("rw,errors=remount-ro", True),
    ],
)
def test_locks_that_a_mount_keeps_to_this_host_are_none(
    options: str, excludes_others: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "root"
    root.mkdir()
    device = root.stat().st_dev
    mounts = tmp_path / "mounts"
    mounts.write_text(
        "21 1 0:999 / /proc rw - proc proc rw,nolock\n"
        f"36 35 {os.major(device)}:{os.minor(device)} / /mnt rw,noatime shared:1 - nfs server:/export {options}\n"
    )
    monkeypatch.setattr(locks, "_MOUNTS_PATH", str(mounts))
    lock = RootLock.acquire(str(root))
    assert lock.excludes_others is excludes_others
    lock.release()


@contextmanager
def owned_elsewhere(root: Path) -> Iterator[Child]:
    """Have a child own a root, with a hint that names another host."""

    def work(report: Report) -> None:
        _lock = RootLock.acquire(str(root))
        os.pwrite(_lock._fd, b"%d node-17\n" % os.getpid(), 0)
        report(os.getpid())
        signal.pause()

    with Child(work) as child:
        wait_for_report(child, 1)
        yield child


def test_owner_on_another_host_is_waited_for_until_its_lease_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, leak_check: None
) -> None:
    with owned_elsewhere(tmp_path) as child:
        waits = []

        def lease_ends(seconds: float) -> None:
            waits.append(seconds)
            if len(waits) == 3:
                monkeypatch.undo()
                child.kill()

        monkeypatch.setattr(time, "sleep", lease_ends)
        RootLock.acquire(str(tmp_path), timeout_s=3600).release()
    assert len(waits) >= 3
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "on node-17: waiting up to 3600 s" in warning


def test_owner_on_another_host_that_lives_is_told_when_the_time_is_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leak_check: None
) -> None:
    now_s = [0.0]
    with owned_elsewhere(tmp_path) as child, monkeypatch.context() as patch:
        patch.setattr(time, "monotonic", lambda: now_s[0])
        patch.setattr(time, "sleep", lambda seconds: now_s.__setitem__(0, now_s[0] + seconds))
        with pytest.raises(ConfigError, match=rf"process {child.pid} on node-17 \(also after waiting 90 s\)"):
            RootLock.acquire(str(tmp_path), timeout_s=90)
    assert 90 <= now_s[0] < 92


def test_owner_on_this_host_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(report: Report) -> None:
        _lock = RootLock.acquire(str(tmp_path))
        report(1)
        signal.pause()

    with Child(work) as child:
        wait_for_report(child, 1)
        with monkeypatch.context() as patch, pytest.raises(ConfigError, match="only one Checkpointer"):
            patch.setattr(time, "sleep", lambda seconds: pytest.fail("it waits"))
            RootLock.acquire(str(tmp_path), timeout_s=3600)


@pytest.mark.filterwarnings("ignore:a checkpoint was not saved")
def test_training_goes_on_without_a_root_that_another_host_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, leak_check: None
) -> None:
    now_s = [0.0]
    with owned_elsewhere(tmp_path) as child:
        with fp.Checkpointer(tmp_path, on_error="warn", lock_timeout_s=90) as checkpointer:
            with monkeypatch.context() as patch:
                patch.setattr(time, "monotonic", lambda: now_s[0])
                patch.setattr(time, "sleep", lambda seconds: now_s.__setitem__(0, now_s[0] + seconds))
                for step in (1, 2):
                    with pytest.raises(ConfigError, match="node-17"):
                        checkpointer.save(step, {}).result()
                    assert 90 <= now_s[0] < 92  # the second one does not wait any more
            child.kill()
            checkpointer.save(3, {}).result()
    with fp.Checkpointer(tmp_path, lock_timeout_s=0) as checkpointer:
        checkpointer.save(4, {}).result()
    for bad in (-1, float("nan"), "2"):
        with pytest.raises(ConfigError, match="lock_timeout_s"):
            fp.Checkpointer(tmp_path, lock_timeout_s=bad)  # type: ignore[arg-type]


def test_missing_root_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError) as caught:
        RootLock.acquire(str(tmp_path / "missing"))
    assert caught.value.errno == errno.ENOENT


def test_error_that_is_its_own_cause_is_named_as_well(tmp_path: Path) -> None:
    save(tmp_path / NAME)
    with pytest.raises(StorageError, match=NAME) as caught, hold_for_reading(str(tmp_path / NAME)) as held:
        error = StorageError(errno.EIO, f"reading {held.place}/state.pt", f"{held.place}/state.pt")
        error.__cause__ = ValueError(held.place)
        error.__cause__.__cause__ = error
        raise error
    assert caught.value.filename == f"{tmp_path / NAME}/state.pt"
    assert str(caught.value.__cause__) == str(tmp_path / NAME)


def test_directory_that_may_be_entered_but_not_listed_is_read(tmp_path: Path) -> None:
    with open_directory(tmp_path) as directory:
        save(directory / NAME, 1)
        (directory / NAME).chmod(0o711)

        def work(report: Report) -> None:
            become_ordinary_user()
            with hold_for_reading(str(directory / NAME)) as held:
                assert step_in(held.place) == 1

        run_in_child(work)
        (directory / NAME).chmod(0o755)
