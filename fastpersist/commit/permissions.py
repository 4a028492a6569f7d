"""Permissions of a file or directory that a save replaces: the new one gets its owner, group, mode and POSIX ACL.

open() of an existing file keeps all of them, so a save that puts a new file in its place keeps them, too. Only root may
give a file to another owner, and only members of a group may give a file to that group. What cannot be kept is never
replaced by more: a group that is new to the file gets the rights of all others.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
from dataclasses import dataclass

from fastpersist.commit.filesystem import filesystem, storage_errors

__all__ = ["Permissions"]

_log = logging.getLogger(__name__)

# Who is no owner may not give a file away (EPERM); an id that this user namespace does not map is EINVAL.
_OWNER_REFUSED = (errno.EPERM, errno.EACCES, errno.EINVAL)
_NO_ACL = (errno.ENODATA, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOENT)
_ACCESS_ACL = "system.posix_acl_access"
_DEFAULT_ACL = "system.posix_acl_default"  # of directories: what new files in it get


@dataclass(frozen=True, slots=True)
class Permissions:
    """Who may use a file or directory.

    Attributes:
        mode: The permission bits, without the set-user-ID, set-group-ID and sticky bits.
        uid: The user who owns it.
        gid: The group that owns it.
    """

    mode: int
    uid: int
    gid: int

    @classmethod
    def of(cls, status: os.stat_result) -> Permissions:
        """Return the permissions that a status tells. An ACL is read later, where it is given to the new file."""
        return cls(stat.S_IMODE(status.st_mode) & 0o777, status.st_uid, status.st_gid)

    def give_to(self, fd: int, path: str, replaced: str) -> None:
        """Give these permissions, and the ACL of the file or directory that is replaced, to a new one.

        Args:
            fd: A descriptor of the new one.
            path: The path of the new one, for messages.
            replaced: The path of the one that is replaced.

        Raises:
            StorageError: They cannot be read or set. That only root may keep the owner is no error.
        """
        status = filesystem().status(fd, path)
        with storage_errors("setting the owner of", path):
            keeps_group = self._give_owner(fd, status, replaced)
        mode = self.mode if keeps_group else self.mode & ~0o070 | (self.mode & 0o007) << 3
        mode |= stat.S_IMODE(status.st_mode) & ~0o777
        if mode != stat.S_IMODE(status.st_mode):
            with storage_errors("setting the mode of", path):
                os.chmod(fd, mode)
        if keeps_group:  # with another group, the rights that an ACL gives the group would be that other group's
            _copy_acl(_ACCESS_ACL, fd, path, replaced)
            if stat.S_ISDIR(status.st_mode):
                _copy_acl(_DEFAULT_ACL, fd, path, replaced)

    def _give_owner(self, fd: int, status: os.stat_result, replaced: str) -> bool:
        """Give the owner and the group, or else the group alone; return whether the group is the wanted one."""
        if (self.uid, self.gid) == (status.st_uid, status.st_gid):
            return True
        for uid in (self.uid, -1):
            try:
                os.chown(fd, uid, self.gid)
                return True
            except OSError as error:
                if error.errno not in _OWNER_REFUSED:
                    raise
        _log.debug("%s: this user may keep neither the owner nor the group of what is replaced", replaced)
        return self.gid == status.st_gid


def _copy_acl(name: str, fd: int, path: str, replaced: str) -> None:
    """Give the new one the ACL of `replaced`; remove the ACL that it got from its parent where `replaced` has none."""
    with storage_errors("reading the ACL of", replaced):
        wanted = _acl(name, replaced)
    with storage_errors("setting the ACL of", path):
        if wanted == _acl(name, fd):
            return
        if wanted is None:
            os.removexattr(fd, name)
        else:
            os.setxattr(fd, name, wanted)


def _acl(name: str, file: str | int) -> bytes | None:
    try:
        return os.getxattr(file, name)
    except OSError as error:
        if error.errno in _NO_ACL:
            return None
        raise
