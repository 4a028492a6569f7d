"""A pending file that its writer has left is adopted by one writer at most, and never one that is being written."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from support.forking import run_in_child
from support.leaks import no_leaks
from support.states import pending_files

from fastpersist.commit.file_commit import PendingFile, find_leftovers, resolve_target


def left(path: Path, content: bytes = b"") -> str:
    """Leave a pending file of `path`; return its path."""
    pending = PendingFile.create(resolve_target(str(path)))
    os.write(pending.fd, content)
    pending.leave()
    assert pending.fd == -1
    pending.leave()
    pending.abort()  # which is too late
    return pending.path


def test_what_was_left_is_adopted_and_published(tmp_path: Path) -> None:
    with no_leaks(tmp_path):
        path = left(tmp_path / "file", b"half")
        target = resolve_target(str(tmp_path / "file"))
        assert find_leftovers(target) == [path]
        pending = PendingFile.adopt(target, path)
        assert pending is not None
        assert PendingFile.adopt(target, path) is None  # this process writes it
        os.lseek(pending.fd, 0, os.SEEK_END)
        os.write(pending.fd, b" and half")
        pending.publish(13, durable=True)
    assert (tmp_path / "file").read_bytes() == b"half and half"


def test_what_another_process_writes_is_not_adopted(tmp_path: Path) -> None:
    target = resolve_target(str(tmp_path / "file"))
    pending = PendingFile.create(target)

    def other(report: Any) -> None:
        assert PendingFile.adopt(target, pending.path) is None

    run_in_child(other)
    pending.leave()

    def taker(report: Any) -> None:
        assert PendingFile.adopt(target, pending.path) is not None

    run_in_child(taker)


def test_an_adopted_file_is_not_swept(tmp_path: Path) -> None:
    path = left(tmp_path / "file")
    target = resolve_target(str(tmp_path / "file"))
    adopted = PendingFile.adopt(target, path)
    assert adopted is not None

    def other(report: Any) -> None:
        PendingFile.create(target).abort()

    run_in_child(other)
    assert [str(found) for found in pending_files(tmp_path)] == [path]
    adopted.abort()
    assert pending_files(tmp_path) == []


@pytest.mark.parametrize("kind", ["missing", "directory", "link", "pipe"])
def test_what_is_no_file_is_not_adopted(tmp_path: Path, kind: str) -> None:
    path = tmp_path / ".file.pending-0011223344556677"
    (tmp_path / "elsewhere").touch()
    if kind == "directory":
        path.mkdir()
    elif kind == "link":
        path.symlink_to(tmp_path / "elsewhere")
    elif kind == "pipe":
        os.mkfifo(path)
    with no_leaks():
        assert PendingFile.adopt(resolve_target(str(tmp_path / "file")), str(path)) is None


def test_the_next_save_removes_what_was_left(tmp_path: Path) -> None:
    left(tmp_path / "file")
    PendingFile.create(resolve_target(str(tmp_path / "file"))).abort()
    assert pending_files(tmp_path) == []
