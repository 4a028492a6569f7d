"""The seam between the commit protocol and the kernel: what each operation does to a real directory, and its errors."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from fastpersist.commit.filesystem import (
    Filesystem,
    filesystem,
    has_name,
    is_there,
    open_regular,
    storage_errors,
    using,
)
from fastpersist.errors import FormatError, NoSpaceError, StorageError

real = Filesystem()


def raise_errno(number: int) -> None:
    raise OSError(number, os.strerror(number))


# --- errors


def test_oserror_becomes_storage_error_with_operation_and_path() -> None:
    with pytest.raises(StorageError, match=r"^syncing model\.pt: Input/output error$") as caught:
        with storage_errors("syncing", "model.pt"):
            raise_errno(errno.EIO)
    assert type(caught.value) is StorageError
    assert (caught.value.errno, caught.value.filename) == (errno.EIO, "model.pt")
    assert isinstance(caught.value.__cause__, OSError)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_full_disk_and_full_quota_are_no_space(number: int) -> None:
    with pytest.raises(NoSpaceError) as caught, storage_errors("truncating", "model.pt"):
        raise_errno(number)
    assert caught.value.errno == number


def test_storage_error_and_other_exceptions_go_through_as_they_are() -> None:
    original = StorageError(errno.EIO, "write to model.pt at offset 5: I/O error", "model.pt", 5)
    with pytest.raises(StorageError) as caught, storage_errors("syncing", "other.pt"):
        raise original
    assert caught.value is original
    with pytest.raises(KeyError), storage_errors("syncing", "model.pt"):
        raise KeyError("model.pt")


@pytest.mark.parametrize(
    ("operation", "number"),
    [
        (lambda path: real.create(path), errno.ENOENT),
        (lambda path: real.rename(path, path + ".new"), errno.ENOENT),
        (lambda path: real.sync_directory(path), errno.ENOENT),
        (lambda path: real.unlink(path), errno.ENOENT),
        (lambda path: real.truncate(123456, 1, path), errno.EBADF),
        (lambda path: real.sync(123456, path), errno.EBADF),
        (lambda path: real.allocate(123456, 1, path), errno.EBADF),
    ],
    ids=["create", "rename", "sync_directory", "unlink", "truncate", "sync", "allocate"],
)
def test_every_operation_names_the_path_it_failed_on(
    operation: Callable[[str], object], number: int, tmp_path: Path
) -> None:
    path = str(tmp_path / "missing" / "model.pt")
    with pytest.raises(StorageError) as caught:
        operation(path)
    assert caught.value.errno == number
    assert path in str(caught.value)
    assert os.strerror(number) in str(caught.value)


# --- operations


def test_create_makes_a_new_file_that_children_do_not_inherit(tmp_path: Path) -> None:
    path = str(tmp_path / "model.pt")
    before = os.umask(0o027)
    try:
        fd = real.create(path)
    finally:
        os.umask(before)
    assert not os.get_inheritable(fd)
    assert os.write(fd, b"written") == 7
    assert os.pread(fd, 7, 0) == b"written"
    assert stat.S_IMODE(os.fstat(fd).st_mode) == 0o640
    os.close(fd)


@pytest.mark.parametrize("what", ["file", "link"])
def test_create_takes_no_file_or_link_that_is_there(what: str, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    if what == "file":
        path.write_bytes(b"old")
    else:
        path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StorageError) as caught:
        real.create(str(path))
    assert caught.value.errno == errno.EEXIST
    assert not (tmp_path / "elsewhere").exists()


def test_a_name_that_is_too_long_is_absent(tmp_path: Path) -> None:
    path = str(tmp_path / ("n" * 256))
    assert not has_name(path)
    assert not is_there(path)


def test_allocate_sets_the_size_and_truncate_cuts_it(tmp_path: Path) -> None:
    path = str(tmp_path / "model.pt")
    fd = real.create(path)
    real.allocate(fd, 1 << 20, path)
    assert os.fstat(fd).st_size == 1 << 20
    assert os.pread(fd, 1 << 20, 0) == bytes(1 << 20)
    real.truncate(fd, 1234, path)
    real.sync(fd, path)
    assert os.fstat(fd).st_size == 1234
    os.close(fd)


def test_allocate_of_more_than_there_is_changes_nothing(tmp_path: Path) -> None:
    path = str(tmp_path / "model.pt")
    fd = real.create(path)
    with pytest.raises(StorageError, match=r"reserving 1152921504606846976 bytes for .*model\.pt"):
        real.allocate(fd, 1 << 60, path)
    assert os.fstat(fd).st_size == 0
    os.close(fd)


def test_rename_replaces_the_target(tmp_path: Path) -> None:
    (tmp_path / "new").write_bytes(b"new")
    (tmp_path / "model.pt").write_bytes(b"old")
    real.rename(str(tmp_path / "new"), str(tmp_path / "model.pt"))
    assert (tmp_path / "model.pt").read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["model.pt"]


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP])
def test_directory_that_cannot_be_synced_is_no_error(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leak_check: None
) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: raise_errno(number))
    real.sync_directory(str(tmp_path))


def test_directory_whose_sync_fails_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leak_check: None
) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: raise_errno(errno.EIO))
    with pytest.raises(StorageError, match="syncing directory") as caught:
        real.sync_directory(str(tmp_path))
    assert caught.value.errno == errno.EIO


@pytest.mark.parametrize(
    ("call", "told"), [(real.status, "looking at"), (real.close, "closing")], ids=["status", "close"]
)
def test_errors_of_open_files_say_operation_and_path(call: Callable[[int, str], object], told: str) -> None:
    fd = os.open("/", os.O_RDONLY)
    os.close(fd)
    with pytest.raises(StorageError, match=f"{told} /data/model.pt: Bad file descriptor") as caught:
        call(fd, "/data/model.pt")
    assert (caught.value.errno, caught.value.filename) == (errno.EBADF, "/data/model.pt")


def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path, leak_check: None) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", tmp_path, Path("/dev/zero")):
        with pytest.raises(FormatError, match="no regular file") as caught:
            open_regular(str(path))
        assert caught.value.path == str(path)
    (tmp_path / "file").write_bytes(b"x")
    fd = open_regular(str(tmp_path / "file"))
    assert os.get_blocking(fd)
    os.close(fd)


# --- the seam


def test_replacement_is_in_force_for_the_block_only() -> None:
    before = filesystem()
    outer, inner = Filesystem(), Filesystem()
    with using(outer):
        assert filesystem() is outer
        with pytest.raises(KeyError), using(inner):
            assert filesystem() is inner
            raise KeyError
        assert filesystem() is outer
    assert filesystem() is before
