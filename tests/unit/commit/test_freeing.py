"""Large files that a rename replaces: who frees their space, when, and what a full disk and a fork make of it."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest
from support.forking import Report, run_in_child
from support.training import PATIENCE_S

import fastpersist as fp
from fastpersist.commit import freeing
from fastpersist.commit.file_commit import PendingFile, resolve_target
from fastpersist.commit.filesystem import Filesystem, using
from fastpersist.commit.freeing import await_freed, freed_later

LARGE_BYTES = freeing._LARGE_BYTES


@pytest.fixture
def held_back(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Make the threads that free wait for this."""
    may_close = threading.Event()
    thread_class = threading.Thread

    class Waiting(thread_class):  # type: ignore[valid-type, misc]
        def run(self) -> None:
            may_close.wait()
            super().run()

    monkeypatch.setattr(freeing.threading, "Thread", Waiting)
    return may_close


def sparse(path: Path, size_bytes: int) -> Path:
    path.touch()
    os.truncate(path, size_bytes)
    return path


def holders(inode: int) -> list[str]:
    """Return the descriptors of this process that hold a file."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.stat(f"/proc/self/fd/{name}").st_ino == inode:
                found.append(name)
        except FileNotFoundError:  # that of listdir itself
            continue
    return found


def test_large_file_is_kept_in_the_block_and_freed_by_a_thread(tmp_path: Path, held_back: threading.Event) -> None:
    path = sparse(tmp_path / "old", LARGE_BYTES)
    inode = path.stat().st_ino
    with freed_later(str(path)):
        path.unlink()
        assert holders(inode)
    assert holders(inode)
    held_back.set()
    assert await_freed()
    assert not holders(inode)
    assert not await_freed()


@pytest.mark.parametrize("what", ["small", "missing", "link", "directory"])
def test_all_else_is_let_go_at_once(what: str, tmp_path: Path) -> None:
    path = tmp_path / "name"
    if what == "small":
        sparse(path, LARGE_BYTES - 1)
    elif what == "link":
        path.symlink_to(sparse(tmp_path / "large", LARGE_BYTES))
    elif what == "directory":
        path.mkdir()
    before = len(os.listdir("/proc/self/fd"))
    with freed_later(str(path)):
        assert len(os.listdir("/proc/self/fd")) == before
    assert not await_freed()


def test_a_failure_in_the_block_lets_it_go_too(tmp_path: Path) -> None:
    path = sparse(tmp_path / "old", LARGE_BYTES)
    with pytest.raises(RuntimeError), freed_later(str(path)):
        raise RuntimeError
    await_freed()
    assert not holders(path.stat().st_ino)


def test_without_threads_the_caller_frees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    path = sparse(tmp_path / "old", LARGE_BYTES)
    with freed_later(str(path)):
        pass
    assert not holders(path.stat().st_ino)
    assert not await_freed()


def test_a_signal_handler_may_save_at_any_moment(tmp_path: Path) -> None:
    path = sparse(tmp_path / "old", LARGE_BYTES)

    def interrupted() -> None:
        with freeing._lock, freed_later(str(path)):  # the handler comes while its own thread holds the lock
            pass

    thread = threading.Thread(target=interrupted, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert await_freed() or not holders(path.stat().st_ino)


def test_a_child_lets_go_of_what_it_inherits(tmp_path: Path, held_back: threading.Event) -> None:
    path = sparse(tmp_path / "old", LARGE_BYTES)
    inode = path.stat().st_ino
    with freed_later(str(path)):
        pass

    def in_child(_report: Report) -> None:
        assert not holders(inode)
        assert not await_freed()

    run_in_child(in_child)
    assert holders(inode)
    held_back.set()
    assert await_freed()


def test_a_save_waits_for_space_that_is_being_freed(tmp_path: Path, held_back: threading.Event) -> None:
    target = tmp_path / "model.pt"
    with freed_later(str(sparse(target, LARGE_BYTES))):
        pass
    refusals = []

    class Full(Filesystem):
        def allocate(self, fd: int, size_bytes: int, path: str) -> None:
            if not refusals:
                refusals.append(path)
                held_back.set()
                raise fp.NoSpaceError(errno.ENOSPC, "no space")
            super().allocate(fd, size_bytes, path)

    with using(Full()):
        file = PendingFile.create(resolve_target(str(target)))
        file.allocate(4096)
        assert refusals
        assert not await_freed()
        refusals.clear()
        with pytest.raises(fp.NoSpaceError):  # nothing is being freed, so it is full
            file.allocate(4096)
        file.abort()
