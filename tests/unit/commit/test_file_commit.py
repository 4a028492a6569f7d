"""The commit protocol: its order, its failures, the mode of the new file, and what becomes of leftovers.

Which places a save takes at all is in test_file_commit_targets.py.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import logging
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.directories import lock_is_free
from support.filesystems import FailingFilesystem, FailingOpenFiles, Operation, WatchedFilesystem
from support.forking import Child, Report, run_in_child
from support.sandbox import become_ordinary_user, bind_mounted, needs_root, open_directory
from support.states import load_step, make_state, pending_files

import fastpersist as fp
from fastpersist.commit import file_commit
from fastpersist.commit.file_commit import (
    PendingFile,
    Target,
    find_leftovers,
    replace_small_file,
    resolve_target,
    sweep,
)
from fastpersist.commit.filesystem import Filesystem, using
from fastpersist.errors import InternalError, StorageError


@contextmanager
def umask(bits: int) -> Iterator[None]:
    before = os.umask(bits)
    try:
        yield
    finally:
        os.umask(before)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def begin(path: Path) -> PendingFile:
    pending = PendingFile.create(resolve_target(str(path)))
    assert pending is not None
    return pending


def leftover_name(path: Path) -> str:
    """Return a name as a save to `path` that died would have left."""
    return f".{path.name}.pending-{secrets.token_hex(8)}"


# --- the protocol


class RecordingFilesystem(WatchedFilesystem):
    def __init__(self) -> None:
        self.operations: list[Operation] = []

    @contextmanager
    def around(self, operation: Operation) -> Iterator[None]:
        yield
        self.operations.append(operation)

    @property
    def names(self) -> list[str]:
        return [operation.name for operation in self.operations]


def test_file_is_complete_and_synced_before_it_gets_its_name(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    recording = RecordingFilesystem()
    with using(recording):
        fp.save(make_state(1), path)
    assert recording.names == ["create", "allocate", "truncate", "sync", "rename", "sync_directory"]
    create, allocate, truncate, _, rename, sync_directory = recording.operations
    assert Path(create.path).parent == tmp_path
    assert Path(create.path).name.startswith(".model.pt.pending-")
    assert allocate.size_bytes % 4096 == 0
    assert 0 <= allocate.size_bytes - truncate.size_bytes < 4096
    assert truncate.size_bytes == path.stat().st_size
    assert (rename.path, rename.target) == (create.path, str(path))
    assert sync_directory.path == str(tmp_path)


def test_save_that_need_not_be_durable_syncs_nothing(tmp_path: Path) -> None:
    recording = RecordingFilesystem()
    with using(recording):
        report = fp.save(make_state(1), tmp_path / "model.pt", durable=False)
    assert recording.names == ["create", "allocate", "truncate", "rename"]
    assert report.sync_s == 0.0
    assert load_step(tmp_path / "model.pt") == 1


@pytest.mark.parametrize("nth", range(1, 6))
def test_failure_before_the_commit_point_changes_nothing(nth: int, tmp_path: Path, leak_check: None) -> None:
    path = tmp_path / "model.pt"
    fp.save(make_state(1), path)
    failing = FailingFilesystem(nth, errno.EIO)
    with using(failing), pytest.raises(StorageError) as caught:
        fp.save(make_state(2), path)
    assert caught.value.errno == errno.EIO
    assert failing.failed != "sync_directory"
    assert load_step(path) == 1
    assert os.listdir(tmp_path) == ["model.pt"]


def test_directory_that_fails_to_sync_is_an_error_of_a_file_that_is_there(tmp_path: Path, leak_check: None) -> None:
    path = tmp_path / "model.pt"
    fp.save(make_state(1), path)
    with using(FailingFilesystem(6, errno.EIO)), pytest.raises(StorageError, match="sync_directory"):
        fp.save(make_state(2), path)
    assert load_step(path) == 2
    assert pending_files(tmp_path) == []


@pytest.mark.parametrize("durable", [True, False])
def test_file_that_fails_to_close_is_published_and_the_error_says_so(
    durable: bool, tmp_path: Path, leak_check: None
) -> None:
    """As NFS answers when its last bytes cannot be sent."""
    path = tmp_path / "model.pt"
    fp.save(make_state(1), path)
    meaning = "all was synced before" if durable else "save again"
    with using(FailingOpenFiles("close", 1)), pytest.raises(StorageError, match=f"is published.*{meaning}") as caught:
        fp.save(make_state(2), path, durable=durable)
    assert (caught.value.errno, caught.value.filename) == (errno.EIO, str(path))
    assert "closing" in str(caught.value)
    assert load_step(path) == 2
    assert os.listdir(tmp_path) == ["model.pt"]


def test_directory_is_synced_also_when_the_file_fails_to_close(tmp_path: Path) -> None:
    class Both(RecordingFilesystem, FailingOpenFiles):
        def __init__(self) -> None:
            RecordingFilesystem.__init__(self)
            FailingOpenFiles.__init__(self, "close", 1)

    with using(double := Both()), pytest.raises(StorageError, match="is published and durable"):
        fp.save(make_state(1), tmp_path / "model.pt")
    assert double.names[-2:] == ["rename", "sync_directory"]


def test_open_file_that_cannot_be_looked_at_is_an_error_with_its_path_and_leaves_nothing(
    tmp_path: Path, leak_check: None
) -> None:
    path = tmp_path / "model.pt"
    for nth in itertools.count(1):
        fp.save(make_state(1), path)
        error: StorageError | None = None
        with using(double := FailingOpenFiles("status", nth)):
            try:
                fp.save(make_state(2), path)
            except StorageError as raised:
                error = raised.with_traceback(None)
        if error is None:
            assert not double.failed_path
            break
        assert (error.errno, error.filename) == (errno.EIO, str(path))
        assert f"looking at {double.failed_path}" in str(error)
        assert load_step(path) == 1
        assert os.listdir(tmp_path) == ["model.pt"]
    assert nth > 3


def test_abort_removes_the_pending_file_and_may_come_again(tmp_path: Path, leak_check: None) -> None:
    pending = begin(tmp_path / "model.pt")
    os.write(pending.fd, b"half a file")
    assert os.listdir(tmp_path) == [Path(pending.path).name]
    pending.abort()
    pending.abort()
    assert os.listdir(tmp_path) == []


def test_pending_file_that_cannot_be_removed_is_reported_and_the_error_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with using(FailingFilesystem(4, errno.EIO, lasting=True)):  # the sync, and the removal after it
        with pytest.raises(StorageError, match=r"sync \(made to fail\)"):
            fp.save(make_state(1), tmp_path / "model.pt")
    assert "a pending file is left behind" in caplog.text
    assert len(pending_files(tmp_path)) == 1
    fp.save(make_state(2), tmp_path / "model.pt")
    assert pending_files(tmp_path) == []


def test_pending_file_that_was_swept_before_it_was_locked_is_made_anew(tmp_path: Path, leak_check: None) -> None:
    class Swept(Filesystem):
        count = 0

        def create(self, path: str, mode: int = 0o666) -> int:
            fd = super().create(path, mode)
            self.count += 1
            if self.count <= 2:
                os.unlink(path)  # as another process does that takes it for a leftover
            return fd

    with using(swept := Swept()):
        fp.save(make_state(1), tmp_path / "model.pt")
    assert swept.count == 3
    assert load_step(tmp_path / "model.pt") == 1


def test_pending_file_that_is_swept_every_time_is_given_up(tmp_path: Path, leak_check: None) -> None:
    class Swept(Filesystem):
        def create(self, path: str, mode: int = 0o666) -> int:
            fd = super().create(path, mode)
            os.unlink(path)
            return fd

    with using(Swept()), pytest.raises(InternalError, match="100 attempts"):
        fp.save(make_state(1), tmp_path / "model.pt")


def test_small_file_is_replaced_through_a_link_and_else_written_in_place(tmp_path: Path, leak_check: None) -> None:
    (tmp_path / "file").write_bytes(b"older and longer")
    (tmp_path / "link").symlink_to("file")
    replace_small_file(str(tmp_path / "link"), b"new")
    assert (tmp_path / "link").is_symlink()
    os.link(tmp_path / "file", tmp_path / "other")
    replace_small_file(str(tmp_path / "other"), b"newer")
    assert (tmp_path / "file").read_bytes() == b"newer"
    replace_small_file(os.devnull, b"nothing")


def test_save_and_its_report_name_the_path_as_it_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for path in ("model.pt", "./model.pt", Path("model.pt"), tmp_path / "model.pt"):
        report = fp.save(make_state(1), path)
        assert report.path == os.fspath(path)
        assert report.size_bytes == (tmp_path / "model.pt").stat().st_size
    assert os.listdir(tmp_path) == ["model.pt"]


# --- modes and owners


@pytest.mark.parametrize("bits", [0o000, 0o022, 0o027, 0o077])
def test_new_file_has_the_mode_that_open_gives(bits: int, tmp_path: Path) -> None:
    with umask(bits):
        fp.save(make_state(1), tmp_path / "model.pt")
        (tmp_path / "opened").touch()
    assert mode_of(tmp_path / "model.pt") == mode_of(tmp_path / "opened") == 0o666 & ~bits


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o664, 0o777, 0o400])
def test_mode_of_a_file_that_is_replaced_is_kept(mode: int, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    fp.save(make_state(1), path)
    path.chmod(mode)
    fp.save(make_state(2), path)
    assert mode_of(path) == mode
    assert load_step(path) == 2


def test_private_file_is_never_readable_by_others_while_it_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    fp.save(make_state(1), path)
    path.chmod(0o600)
    modes = []

    class Watching(WatchedFilesystem):
        @contextmanager
        def around(self, operation: Operation) -> Iterator[None]:
            modes.extend(mode_of(pending) for pending in pending_files(tmp_path))
            yield

    with umask(0o022), using(Watching()):
        fp.save(make_state(2), path)
    assert modes
    assert not [oct(mode) for mode in modes if mode & 0o077]


@needs_root
def test_owner_of_a_file_that_is_replaced_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    fp.save(make_state(1), path)
    os.chown(path, 1234, 5678)
    fp.save(make_state(2), path)
    assert (path.stat().st_uid, path.stat().st_gid) == (1234, 5678)


@needs_root
def test_ordinary_user_replaces_a_file_of_somebody_else(tmp_path: Path) -> None:
    with open_directory(tmp_path) as directory:
        path = directory / "model.pt"
        fp.save(make_state(1), path)
        path.chmod(0o644)

        def work(report: Report) -> None:
            become_ordinary_user()
            fp.save(make_state(2), path)

        run_in_child(work)
        assert load_step(path) == 2
        assert mode_of(path) == 0o644
        assert path.stat().st_uid != 0


# --- leftovers


def test_leftover_of_a_killed_save_is_removed_by_the_next_save(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    fp.save(make_state(1), path)

    def work(report: Report) -> None:
        os.write(begin(path).fd, b"half a file")
        report(1)
        time.sleep(60)

    with Child(work) as child:
        while child.reported < 1:
            assert not child.ended(), child.wait().message
        (left,) = pending_files(tmp_path)
        assert find_leftovers(resolve_target(str(path))) == [str(left)]
        fp.save(make_state(2), path)
        assert pending_files(tmp_path) == [left]  # its writer lives
        child.kill()
    fp.save(make_state(3), path)
    assert pending_files(tmp_path) == []
    assert load_step(path) == 3


@pytest.mark.parametrize("name", ["model.pt", "a" * 252 + ".pt", "[a-z]*.pt"], ids=["short", "long", "pattern"])
def test_leftovers_are_removed_whatever_the_name(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    prefix = Path(begun := begin(path).path).name[: -len("0123456789abcdef")]
    file_commit._live.clear()  # as in a new process
    for _ in range(3):
        (tmp_path / f"{prefix}{secrets.token_hex(8)}").write_bytes(b"half a file")
    os.unlink(begun)
    target = resolve_target(str(path))
    assert len(find_leftovers(target)) == 3
    assert len(sweep(target)) == 3
    assert os.listdir(tmp_path) == []


def test_leftover_that_its_owner_may_not_write_is_removed(tmp_path: Path) -> None:
    """A save that replaced a file of mode 0444 died when its pending file had that mode already."""
    with open_directory(tmp_path) as directory:
        path = directory / "model.pt"

        def work(report: Report) -> None:
            become_ordinary_user()
            left = directory / leftover_name(path)
            left.write_bytes(b"half a file")
            left.chmod(0o444)
            fp.save(make_state(1), path)

        run_in_child(work)
        assert os.listdir(directory) == ["model.pt"]


def test_what_only_looks_like_a_leftover_stays(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    token = secrets.token_hex(8)
    names = {
        f"model.pt.pending-{token}",
        f".other.pt.pending-{token}",
        f".xmodel.pt.pending-{token}",
        f".model.pt.pending{token}",
        f".model.pt.retired-{token}",
        f".MODEL.PT.pending-{token}",
        ".model.pt.pending-",
        ".model.pt.pending-notes.txt",
        f".model.pt.pending-{token}.bak",
        f".model.pt.pending-{token[:-1]}",
        f".model.pt.pending-{token[:-1]}z",
    }
    for name in names:
        (tmp_path / name).write_bytes(b"somebody's")
    fp.save(make_state(1), path)
    assert names - set(os.listdir(tmp_path)) == set()


@pytest.mark.parametrize("make", [Path.mkdir, lambda path: path.symlink_to("model.pt")], ids=["directory", "link"])
def test_what_is_no_file_is_no_leftover(make: Callable[[Path], None], tmp_path: Path) -> None:
    odd = tmp_path / leftover_name(tmp_path / "model.pt")
    fp.save(make_state(0), tmp_path / "model.pt")
    make(odd)
    fp.save(make_state(1), tmp_path / "model.pt")
    assert os.path.lexists(odd)
    assert load_step(tmp_path / "model.pt") == 1


def test_save_of_another_thread_is_live_and_keeps_its_lock(tmp_path: Path, leak_check: None) -> None:
    path = tmp_path / "model.pt"
    pending = begin(path)
    assert not lock_is_free(Path(pending.path))
    assert sweep(resolve_target(str(path))) == []
    fp.save(make_state(1), path)
    assert [str(left) for left in pending_files(tmp_path)] == [pending.path]
    assert not lock_is_free(Path(pending.path))  # closing any descriptor of the file would have dropped it
    pending.abort()


@needs_root
def test_live_file_is_known_under_another_path_of_its_directory(tmp_path: Path) -> None:
    directory, second = tmp_path / "directory", tmp_path / "second"
    directory.mkdir()
    second.mkdir()
    with bind_mounted(directory, second):
        pending = begin(directory / "model.pt")
        fp.save(make_state(1), second / "model.pt")
        assert os.path.exists(pending.path), "a save of this process was taken for a dead one"
        assert not lock_is_free(Path(pending.path))
        pending.abort()


def test_lock_is_held_until_the_file_has_its_name(tmp_path: Path) -> None:
    held = []

    class Asking(WatchedFilesystem):
        @contextmanager
        def around(self, operation: Operation) -> Iterator[None]:
            if operation.name in ("allocate", "truncate", "sync", "rename"):
                held.append(not lock_is_free(Path(operation.path)))
            yield

    with using(Asking()):
        fp.save(make_state(1), tmp_path / "model.pt")
    assert held == [True] * 4


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL])
def test_without_locks_leftovers_are_reported_and_removed_when_a_day_old(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(fd: int, command: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "lockf", refuse)
    path = tmp_path / "model.pt"
    young, old = (tmp_path / leftover_name(path) for _ in range(2))
    for left in (young, old):
        left.write_bytes(b"half a file")
    day_ago_s = time.time() - 25 * 3600
    os.utime(old, (day_ago_s, day_ago_s))
    fp.save(make_state(1), path)
    assert load_step(path) == 1
    assert pending_files(tmp_path) == [young]
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert str(young) in warning
    assert "a day old" in warning


def test_lock_that_fails_otherwise_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leak_check: None
) -> None:
    def refuse(fd: int, command: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(fcntl, "lockf", refuse)
    with pytest.raises(StorageError, match="locking"):
        fp.save(make_state(1), tmp_path / "model.pt")
    assert os.listdir(tmp_path) == []


def test_directory_that_cannot_be_listed_has_no_leftovers() -> None:
    assert find_leftovers(Target("/missing/model.pt")) == []
    assert sweep(Target("/missing/model.pt")) == []


def test_an_error_of_the_disk_is_not_taken_for_no_leftovers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(path: str) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), path)

    target = resolve_target(str(tmp_path / "model.pt"))
    monkeypatch.setattr(os, "scandir", fail)
    with pytest.raises(StorageError, match=f"listing {tmp_path}"):
        find_leftovers(target)
    assert sweep(target) == []  # a save does without
    assert "stay" in caplog.text
