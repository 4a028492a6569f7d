"""What a save replaces keeps its owner, group, mode and ACL; what this user may not keep is never replaced by more."""

from __future__ import annotations

import errno
import os
import stat
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from support.forking import Report, run_in_child
from support.sandbox import become_ordinary_user, needs_root, open_directory
from support.states import load_step, make_state

import fastpersist as fp
from fastpersist.commit import permissions
from fastpersist.errors import StorageError

PROJECT = 4321
ACCESS, DEFAULT = "system.posix_acl_access", "system.posix_acl_default"


def acl(mask: int) -> bytes:
    """Return an ACL: all for the owner, nothing for the owning group, and for user 77 what `mask` lets through."""
    nobody = 0xFFFFFFFF
    entries = [(0x01, 6, nobody), (0x02, 6, 77), (0x04, 0, nobody), (0x10, mask, nobody), (0x20, 0, nobody)]
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)


def set_acl(path: Path, name: str, value: bytes) -> None:
    try:
        os.setxattr(path, name, value)
    except OSError as error:
        if error.errno != errno.EOPNOTSUPP:
            raise
        pytest.skip("this file system has no POSIX ACLs")


def save_file(path: Path, step: int) -> None:
    fp.save(make_state(step), path)


def save_directory(path: Path, step: int) -> None:
    with fp.DirectorySave(path, overwrite=True) as files:
        files.save(make_state(step), "model.pt")
        files.publish().result()


def step_of(path: Path) -> int:
    return load_step(path / "model.pt" if path.is_dir() else path)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


SAVES = pytest.mark.parametrize("save", [save_file, save_directory])
Save = Callable[[Path, int], None]


@SAVES
def test_acl_is_kept(save: Save, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    save(path, 1)
    path.chmod(0o600 if path.is_file() else 0o700)
    set_acl(path, ACCESS, acl(mask=4))
    before = mode_of(path)
    save(path, 2)
    assert step_of(path) == 2
    assert os.getxattr(path, ACCESS) == acl(mask=4)
    assert mode_of(path) == before


def test_default_acl_of_a_directory_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "step"
    save_directory(path, 1)
    set_acl(path, DEFAULT, acl(mask=6))
    save_directory(path, 2)
    assert os.getxattr(path, DEFAULT) == acl(mask=6)


@SAVES
def test_default_acl_of_the_parent_gives_no_rights_that_the_old_one_had_not(save: Save, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    save(path, 1)
    path.chmod(0o640)
    set_acl(tmp_path, DEFAULT, acl(mask=6))
    save(path, 2)
    assert not [name for name in os.listxattr(path) if name in (ACCESS, DEFAULT)]
    assert mode_of(path) == 0o640


@needs_root
@SAVES
def test_owner_and_group_are_kept(save: Save, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    save(path, 1)
    os.chown(path, 1234, PROJECT)
    save(path, 2)
    assert (path.stat().st_uid, path.stat().st_gid) == (1234, PROJECT)


@needs_root
@SAVES
def test_member_of_the_group_who_is_not_the_owner_keeps_the_group(save: Save, tmp_path: Path) -> None:
    with open_directory(tmp_path) as directory:
        path = directory / "model.pt"
        save(path, 1)
        os.chown(path, 1234, PROJECT)
        path.chmod(0o770)

        def work(report: Report) -> None:
            become_ordinary_user(PROJECT)
            save(path, 2)

        run_in_child(work)
        assert step_of(path) == 2
        assert path.stat().st_uid not in (0, 1234)
        assert path.stat().st_gid == PROJECT
        assert mode_of(path) == 0o770


@needs_root
@pytest.mark.parametrize(("mode", "expected"), [(0o660, 0o600), (0o664, 0o644), (0o606, 0o666)])
def test_group_that_is_new_gets_the_rights_of_all_others(mode: int, expected: int, tmp_path: Path) -> None:
    with open_directory(tmp_path) as directory:
        path = directory / "model.pt"
        save_file(path, 1)
        os.chown(path, 1234, PROJECT)
        path.chmod(mode)

        def work(report: Report) -> None:
            become_ordinary_user()
            save_file(path, 2)

        run_in_child(work)
        assert step_of(path) == 2
        assert path.stat().st_gid != PROJECT
        assert mode_of(path) == expected


@needs_root
def test_acl_is_dropped_where_the_group_cannot_be_kept(tmp_path: Path) -> None:
    with open_directory(tmp_path) as directory:
        path = directory / "model.pt"
        save_file(path, 1)
        os.chown(path, 1234, PROJECT)
        set_acl(path, ACCESS, acl(mask=6))

        def work(report: Report) -> None:
            become_ordinary_user()
            save_file(path, 2)

        run_in_child(work)
        assert ACCESS not in os.listxattr(path)
        assert mode_of(path) & 0o077 == 0


def test_acl_that_cannot_be_read_fails_the_save_and_keeps_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.pt"
    save_file(path, 1)

    def fail(*_args: object) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(permissions.os, "getxattr", fail)
    with pytest.raises(StorageError, match=f"reading the ACL of {path}: Input/output error"):
        save_file(path, 2)
    assert step_of(path) == 1
    assert os.listdir(tmp_path) == ["model.pt"]


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.ENOSYS])
def test_file_system_without_acls_is_no_error(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.pt"
    save_file(path, 1)

    def refuse(*_args: object) -> bytes:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(permissions.os, "getxattr", refuse)
    save_file(path, 2)
    assert step_of(path) == 2
