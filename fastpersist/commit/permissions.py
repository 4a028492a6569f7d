"""Permissions of a file or directory that a save replaces: the new one gets its owner, group, mode and POSIX ACL.

open() of an existing file keeps all of them, so a save that puts a new file in its place keeps them, too. Only root may
give a file to another owner, and only members of a group may give a file to that group. What cannot be kept is not
replaced by more rights: without the group, group and others get only what both had; without the ACL, only the owner has
any rights.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
from dataclasses import dataclass

from fastpersist.commit.filesystem import filesystem, storage_errors

__all__ = ["Permissions", "copy_permissions"]

_log = logging.getLogger("fastpersist")

# EINVAL: this user namespace does not map the id. The same holds for ids in an ACL.
_REFUSED = (errno.EPERM, errno.EACCES, errno.EINVAL, errno.EOPNOTSUPP)
_NO_ACL = (errno.ENODATA, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOENT)
_ACCESS_ACL = "system.posix_acl_access"
_DEFAULT_ACL = "system.posix_acl_default"  # of directories: what new files in it get


@dataclass(frozen=True, slots=True)
class Permissions:
    """Who may use a file or directory.

    Attributes:
        mode: The permission bits, and for a directory the set-group-ID bit and the sticky bit.
        uid: The user who owns it.
        gid: The group that owns it.
    """

    mode: int
    uid: int
    gid: int

    @classmethod
    def of(cls, status: os.stat_result) -> Permissions:
        """Return the permissions that a status tells. An ACL is read later, where it is given to the new file."""
        bits = 0o777 | (stat.S_ISGID | stat.S_ISVTX if stat.S_ISDIR(status.st_mode) else 0)
        return cls(stat.S_IMODE(status.st_mode) & bits, status.st_uid, status.st_gid)

    def give_inherited(self, fd: int, path: str, replaced: str) -> None:
        """Give a new directory what the files inherit that are made in it: group, set-group-ID bit and default ACL.

        The arguments and errors are those of `give_to`.
        """
        status = filesystem().status(fd, path)
        if self._give_group(fd, path, status):
            _set_mode(fd, path, status, stat.S_IMODE(status.st_mode) | self.mode & stat.S_ISGID)
            _give_acl(_DEFAULT_ACL, fd, path, _acl(_DEFAULT_ACL, replaced))

    def give_to(self, fd: int, path: str, replaced: str) -> None:
        """Give these permissions, and the ACL of the file or directory that is replaced, to a new one.

        Args:
            fd: A descriptor of the new one.
            path: The path of the new one, for messages.
            replaced: The path of the one that is replaced.

        Raises:
            StorageError: They cannot be read or set. That this user may not keep them is no error.
        """
        status = filesystem().status(fd, path)
        acl = _acl(_ACCESS_ACL, replaced)
        keeps_group = self._give_group(fd, path, status)
        mode = self.mode
        if not keeps_group:
            both = mode >> 3 & mode & 0o007
            mode = mode & 0o700 | both << 3 | both
        if not _give_acl(_ACCESS_ACL, fd, path, acl if keeps_group else None) or (acl and not keeps_group):
            mode &= 0o700
        if mode != self.mode:
            _log.warning("%s: this user cannot keep its group or its ACL, so its mode becomes %o", replaced, mode)
        _set_mode(fd, path, status, mode | stat.S_IMODE(status.st_mode) & ~0o777)
        if stat.S_ISDIR(status.st_mode) and keeps_group:
            _give_acl(_DEFAULT_ACL, fd, path, _acl(_DEFAULT_ACL, replaced))
        if self.uid != status.st_uid:  # last: then the file may not be ours to change any more
            _chown(fd, path, uid=self.uid)

    def _give_group(self, fd: int, path: str, status: os.stat_result) -> bool:
        """Give the group; return whether it is the new one's group now."""
        return self.gid == status.st_gid or _chown(fd, path, gid=self.gid)


def copy_permissions(source: str, target: str) -> None:
    """Give a new file or directory the permissions of another one. Raises as `Permissions.give_to`."""
    with storage_errors("opening", target):
        fd = os.open(target, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with storage_errors("looking up", source):
            found = os.stat(source)
        Permissions.of(found).give_to(fd, target, source)
    finally:
        os.close(fd)


def _set_mode(fd: int, path: str, status: os.stat_result, mode: int) -> None:
    if mode != stat.S_IMODE(status.st_mode):
        with storage_errors("setting the mode of", path):
            os.chmod(fd, mode)


def _chown(fd: int, path: str, *, uid: int = -1, gid: int = -1) -> bool:
    """Give a file to a user or a group; return whether this user may do that."""
    if not (_is_mapped("uid", uid) and _is_mapped("gid", gid)):
        return False
    with storage_errors("setting the owner of", path):
        try:
            os.chown(fd, uid, gid)
        except OSError as error:
            if error.errno not in _REFUSED:
                raise
            return False
    return True


def _is_mapped(kind: str, number: int) -> bool:
    """Tell whether an id is a real one, not that by which stat() shows all ids that a user namespace does not map."""
    try:
        with open(f"/proc/self/{kind}_map") as file:
            maps_all = file.read().split() == ["0", "0", "4294967295"]
        with open(f"/proc/sys/kernel/overflow{kind}") as file:
            return maps_all or number != int(file.read())
    except (OSError, ValueError):
        return True


def _acl(name: str, path: str) -> bytes | None:
    """Return an ACL of a file; None if it has none."""
    with storage_errors("reading the ACL of", path):
        return _read_acl(name, path)


def _give_acl(name: str, fd: int, path: str, wanted: bytes | None) -> bool:
    """Set an ACL, or remove what the parent's default ACL gave; return whether this user may do that."""
    with storage_errors("setting the ACL of", path):
        try:
            if wanted == _read_acl(name, fd):
                return True
            os.removexattr(fd, name) if wanted is None else os.setxattr(fd, name, wanted)
        except OSError as error:
            if error.errno not in _REFUSED:
                raise
            return False
    return True


def _read_acl(name: str, file: str | int) -> bytes | None:
    try:
        return os.getxattr(file, name)
    except OSError as error:
        if error.errno in _NO_ACL:
            return None
        raise
