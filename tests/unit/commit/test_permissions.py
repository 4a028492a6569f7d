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


def acl(mask: int, others: int = 0) -> bytes:
    """Return an ACL: all for the owner, nothing for the owning group, and for user 77 what `mask` lets through."""
    no_id = 0xFFFFFFFF
    entries = [(0x01, 6, no_id), (0x02, 6, 77), (0x04, 0, no_id), (0x10, mask, no_id), (0x20, others, no_id)]
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
@pytest.mark.parametrize(("mode", "expected"), [(0o660, 0o600), (0o664, 0o644), (0o606, 0o600)])
def test_without_the_group_group_and_others_get_what_both_had(mode: int, expected: int, tmp_path: Path) -> None:
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
def test_without_its_acl_a_file_is_its_owners_alone(tmp_path: Path) -> None:
    """Here the group cannot be kept, either."""
    with open_directory(tmp_path) as directory:
        path = directory / "model.pt"
        save_file(path, 1)
        os.chown(path, 1234, PROJECT)
        set_acl(path, ACCESS, acl(mask=6, others=4))

        def work(report: Report) -> None:
            become_ordinary_user()
            save_file(path, 2)

        run_in_child(work)
        assert ACCESS not in os.listxattr(path)
        assert mode_of(path) == 0o600


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


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EPERM])
def test_an_acl_that_may_not_be_set_leaves_the_owners_rights_and_a_warning(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """EINVAL: it names a user that this user namespace does not map."""
    path = tmp_path / "model.pt"
    save_file(path, 1)
    set_acl(path, ACCESS, acl(mask=6, others=4))

    def refuse(*_args: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(permissions.os, "setxattr", refuse)
    save_file(path, 2)
    assert step_of(path) == 2
    assert mode_of(path) == 0o600
    assert f"{path}: this user cannot keep its group or its ACL, so its mode becomes 600" in caplog.text


@needs_root
def test_an_id_that_the_user_namespace_does_not_map_is_not_taken_for_a_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """stat() shows 65534 for it, which may be the number of a user inside."""
    path = tmp_path / "model.pt"
    save_file(path, 1)
    os.chown(path, 65534, 65534)
    path.chmod(0o660)
    (tmp_path / "map").write_text("0 1000 1\n1 100000 65536\n")
    monkeypatch.setattr(
        permissions, "open", lambda name: open(tmp_path / "map" if "_map" in name else name), raising=False
    )
    save_file(path, 2)
    assert (path.stat().st_uid, path.stat().st_gid) == (os.geteuid(), os.getegid())
    assert mode_of(path) == 0o600


@needs_root
def test_the_owner_is_given_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With CAP_CHOWN alone, a file that belongs to another user can be changed no more."""
    path = tmp_path / "model.pt"
    save_file(path, 1)
    os.chown(path, 1234, PROJECT)
    path.chmod(0o660)
    chmod = os.chmod

    def own_files_only(fd: int, mode: int) -> None:
        assert os.stat(fd).st_uid == os.geteuid()
        chmod(fd, mode)

    monkeypatch.setattr(permissions.os, "chmod", own_files_only)
    save_file(path, 2)
    assert (path.stat().st_uid, path.stat().st_gid, mode_of(path)) == (1234, PROJECT, 0o660)


@needs_root
def test_files_of_a_directory_inherit_what_they_did_in_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "step"
    save_directory(path, 1)
    os.chown(path, 0, PROJECT)
    path.chmod(0o3770)
    set_acl(path, DEFAULT, acl(mask=6))
    save_directory(path, 2)
    assert mode_of(path) == 0o3770
    for name in ("model.pt", "MANIFEST.json"):
        assert (path / name).stat().st_gid == PROJECT
        assert os.getxattr(path / name, ACCESS) == acl(mask=6)


@needs_root
def test_copied_permissions_are_those_of_the_source(tmp_path: Path) -> None:
    for make in (os.mkdir, lambda path: path.touch()):
        source, target = tmp_path / f"source-{make.__name__}", tmp_path / f"target-{make.__name__}"
        make(source), make(target)
        os.chown(source, 1234, PROJECT)
        source.chmod(0o650)
        set_acl(source, ACCESS, acl(mask=4))
        permissions.copy_permissions(str(source), str(target))
        assert os.getxattr(target, ACCESS) == acl(mask=4)
        assert (target.stat().st_uid, target.stat().st_gid) == (1234, PROJECT)
