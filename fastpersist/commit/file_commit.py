"""Make a finished file visible, all of it or none of it.

`<directory>/.<name>.pending-<token>` is being written. `<directory>/<name>` is committed and never changes again:
another file may only replace it, so readers that have it open or mapped keep their bytes.

1. Remove leftovers: pending files of this name whose writer is dead.
2. Create the pending file exclusively, readable only by those who may read the file that it replaces, and lock it
   (F_SETLK). If a sweeper has removed it between the two, begin again with a new token.
3. Reserve all of its space, so that a full disk is noticed before a byte is written.
4. Write every byte, cut the padding off, sync the file.
5. Rename the pending file to its final name.                       <- the commit point
6. Sync the directory. Only now has the save returned durable.

After a power failure before 5 there is the old file, and perhaps a pending file, which the next save of this name
removes. After one between 5 and 6 there is the old or the new file, each of them whole, because 4 came first. An error
before 5 removes the pending file.

A pending file is live while its writer holds a record lock on it. Record locks end with their process however it dies,
and a forked child does not inherit them. It would inherit flock() locks, which in data-loading workers would outlive
the writer. The kernel also drops a record lock when the process closes *any* descriptor of that file, so this process
must not open its own pending files: `_live` lists them, and `_live_guard` is held from creation to lock, and while a
leftover is examined. Where a file system has no locks, leftovers are reported, and removed when a day old.

A rename cannot replace every target (`why_not_replaceable` has the reason). Callers let torch write those in place, and
protected ones (`is_protected`, ClosedDirectoryError) only if their user has asked for it.
"""

from __future__ import annotations

import enum
import errno
import fcntl
import hashlib
import logging
import os
import re
import secrets
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from typing import Literal

from fastpersist import _native
from fastpersist.commit.filesystem import absolute_path, close_quietly, filesystem, has_name, storage_errors
from fastpersist.commit.freeing import freed_later, reserve
from fastpersist.commit.permissions import Permissions
from fastpersist.errors import ConfigError, InternalError, StorageError

__all__ = [
    "LEFTOVER_AGE_S",
    "TOKEN_BYTES",
    "ClosedDirectoryError",
    "Lock",
    "PendingFile",
    "Target",
    "close_live",
    "closing_published",
    "errors_in_log",
    "find_leftovers",
    "hidden_prefix",
    "is_being_written",
    "is_live",
    "live_guard",
    "lock_by",
    "lock_record",
    "mark_live",
    "refuse_existing",
    "replace_small_file",
    "resolve_target",
    "saving",
    "sweep",
]

_log = logging.getLogger("fastpersist")

# `directory_commit`, `locks` and `removal` share these.
TOKEN_BYTES = 8
LEFTOVER_AGE_S = 24 * 3600.0
_LOCK_HELD = (errno.EACCES, errno.EAGAIN)
_LOCK_UNSUPPORTED = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_NAME_LIMIT_BYTES = 255
_CREATE_REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS)


class Lock(enum.Enum):
    """The result of an attempt to lock a file."""

    TAKEN = enum.auto()
    BUSY = enum.auto()  # another process holds it, or may hold it
    UNSUPPORTED = enum.auto()
    NO_MANIFEST = enum.auto()  # a directory without a manifest has no file to lock


_live: set[tuple[int, int]] = set()  # device and inode: a directory can be reached by several paths
_live_guard = threading.RLock()  # re-entrant: a signal handler may save, whatever its thread is doing


def _forget_live_files() -> None:
    """Forget in a forked child what is being written: it is the parent's."""
    global _live_guard
    _live.clear()
    _live_guard = threading.RLock()


os.register_at_fork(after_in_child=_forget_live_files)


def live_guard() -> AbstractContextManager[object]:
    """Return the lock to hold from creation to lock of a pending file, and while a leftover is examined."""
    return _live_guard


def mark_live(fd: int, path: str) -> tuple[int, int]:
    """Note an open file as being written by this process; return its identity for `close_live`.

    Call it with the guard held.

    Raises:
        StorageError: Its status cannot be read; it is closed.
    """
    try:
        identity = _identity(filesystem().status(fd, path))
    except StorageError:
        close_quietly(fd, path)
        raise
    _live.add(identity)
    _native.close_in_forked_child(fd)
    return identity


def is_live(status: os.stat_result) -> bool:
    """Tell whether this process is writing a file: then it must not open it, because closing drops the record lock."""
    return _identity(status) in _live


def close_live(fd: int, identity: tuple[int, int], path: str) -> None:
    """Close a file that `mark_live` noted, and so drop its lock.

    Raises:
        StorageError: The kernel reports an error; the file is closed all the same.
    """
    _native.forget_descriptor(fd)
    with _live_guard:
        try:
            filesystem().close(fd, path)
        finally:
            _live.discard(identity)


@dataclass(frozen=True, slots=True)
class Target:
    """Where a save goes.

    Attributes:
        path: The path with symbolic links followed: the file that is replaced.
        permissions: Those of the file that is replaced; None if there is none: then open() gives the new file its own.
        why_not_replaceable: Why a rename cannot put a new file there; None where it can.
        is_protected: This user may write the file, but not replace it. A failure while it is overwritten in place would
            lose the old file, so that is done only on request.
    """

    path: str
    permissions: Permissions | None = None
    why_not_replaceable: str | None = None
    is_protected: bool = False

    @property
    def directory(self) -> str:
        """The directory that holds the file, its pending file and leftovers."""
        return os.path.dirname(self.path)


def resolve_target(path: str, *, replace_links: bool = False) -> Target:
    """Find out what a save to `path` replaces, following symbolic links.

    Args:
        path: The file's path.
        replace_links: Replace a file that has several hard links; its other names keep the old one.

    Raises:
        StorageError: The path is a directory, or cannot be looked up.
    """
    parent = os.path.realpath(os.path.dirname(absolute_path(path)))
    if parent == "/dev" or parent.startswith(("/proc/", "/dev/fd")):
        return Target(path, why_not_replaceable="it names a device or an open descriptor, not a file")
    real = os.path.realpath(path)
    with storage_errors("looking up", path):
        try:
            status = os.stat(path)
        except FileNotFoundError:
            return Target(real)
    if stat.S_ISDIR(status.st_mode):
        raise StorageError(errno.EISDIR, f"cannot save to {path}: it is a directory", path)
    permissions = Permissions.of(status)
    why_not = _why_not_replaceable(real, status, replace_links)
    if why_not is None and _is_protected(real, status):
        why_not = "it belongs to another user in a directory with the sticky bit"
        return Target(real, permissions, why_not, is_protected=True)
    return Target(real, permissions, why_not)


def _why_not_replaceable(path: str, status: os.stat_result, replace_links: bool) -> str | None:
    if not stat.S_ISREG(status.st_mode):
        return "it is no regular file"
    if status.st_nlink > 1 and not replace_links:
        return f"it has {status.st_nlink} hard links, which a rename would split"
    if _native.is_mount_point(os.fsencode(path)):
        return "something is mounted on it"
    return None


def _is_protected(path: str, status: os.stat_result) -> bool:
    """Tell whether the sticky bit of a directory, as that of /tmp, keeps this user from replacing a file."""
    with storage_errors("looking up", os.path.dirname(path)):
        directory = os.stat(os.path.dirname(path))
    return bool(directory.st_mode & stat.S_ISVTX) and os.geteuid() not in (0, status.st_uid, directory.st_uid)


class ClosedDirectoryError(StorageError):
    """A directory takes no new file, but the file to replace can be written."""


class PendingFile:
    """A file being written under a hidden name. One owner thread.

    Use `create` or `adopt`, write through `fd`, then `publish`, `abort` or `leave`; each closes it.

    Attributes:
        overwrite: Whether `publish` may replace a file; if not, one that has appeared meanwhile is an error.
    """

    def __init__(self, target: Target, path: str, fd: int) -> None:
        self.target = target
        self.path = path
        self.fd = fd
        self.sync_s = 0.0
        self.overwrite = True
        self._process = os.getpid()
        self._identity = mark_live(fd, path)

    @classmethod
    def create(cls, target: Target) -> PendingFile:
        """Do steps 1 and 2 of the protocol.

        Raises:
            ClosedDirectoryError: The directory takes no new file, but the target itself can be written.
            StorageError: It could not be created.
        """
        sweep(target)
        for _ in range(100):
            path = os.path.join(target.directory, hidden_prefix(target.path) + secrets.token_hex(TOKEN_BYTES))
            with _live_guard, saving(target.path):
                try:
                    old = target.permissions
                    fd = filesystem().create(path, 0o666 if old is None else old.mode & 0o600)
                except StorageError as error:
                    refused = error.errno in _CREATE_REFUSED
                    if refused and old is not None and os.access(target.path, os.W_OK):
                        raise ClosedDirectoryError(error.errno, str(error), target.path) from error
                    raise
                try:
                    pending = cls(target, path, fd)
                except StorageError:
                    _unlink_quietly(path)
                    raise
                kept = False
                try:
                    kept = lock_record(fd, path) is not Lock.BUSY and filesystem().status(fd, path).st_nlink == 1
                finally:
                    if not kept:
                        pending.abort()
                if kept:
                    return pending
        raise InternalError(f"no pending file for {target.path} could be made in 100 attempts")

    @classmethod
    def adopt(cls, target: Target, path: str) -> PendingFile | None:
        """Go on with a pending file of a save that has died, or has left it with `leave`.

        Args:
            target: The target of that save, unchanged.
            path: A path that `find_leftovers` returned.

        Returns:
            The file, locked; None if it is gone, or is being written, or the file system has no locks to tell.

        Raises:
            StorageError: It cannot be opened.
        """
        with _live_guard, saving(target.path), storage_errors("opening", path):
            try:
                status = os.lstat(path)
                if is_live(status) or not stat.S_ISREG(status.st_mode):
                    return None
                fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            except FileNotFoundError:
                return None
            kept = False
            try:
                kept = lock_record(fd, path) is Lock.TAKEN and filesystem().status(fd, path).st_nlink == 1
            finally:
                if not kept:
                    close_quietly(fd, path)
            return cls(target, path, fd) if kept else None

    def allocate(self, size_bytes: int) -> None:
        """Do step 3; raise NoSpaceError before a byte is written."""
        with saving(self.target.path):
            reserve(self.fd, size_bytes, self.path)

    def publish(self, size_bytes: int, *, durable: bool) -> None:
        """Do steps 4 (from the truncation on) to 6, and close.

        Args:
            size_bytes: Exact length of the finished file.
            durable: Sync file and directory; without it, the file is complete for readers, but a power failure may lose
                or tear it.

        Raises:
            ConfigError: The file exists, and `overwrite` is False.
            StorageError: Nothing was published, unless the message says that the file is, and what has failed.
        """
        with freed_later(self.target.path):
            self._publish(size_bytes, durable=durable)

    def _publish(self, size_bytes: int, *, durable: bool) -> None:
        try:
            with saving(self.target.path):
                if self.target.permissions is not None:
                    self.target.permissions.give_to(self.fd, self.path, self.target.path)
                filesystem().truncate(self.fd, size_bytes, self.path)
                if durable:
                    started_s = time.monotonic()
                    filesystem().sync(self.fd, self.path)
                    self.sync_s = time.monotonic() - started_s
                self._rename()
        except BaseException:
            self.abort()
            raise
        with closing_published(self.target.path, self._close, durable=durable):
            if durable:
                started_s = time.monotonic()
                filesystem().sync_directory(self.target.directory)
                self.sync_s += time.monotonic() - started_s

    def _rename(self) -> None:
        if self.overwrite:
            filesystem().rename(self.path, self.target.path)
            return
        try:
            filesystem().rename_to_free_name(self.path, self.target.path)
        except StorageError as error:
            if error.errno == errno.EEXIST:
                refuse_existing(self.target.path)
            raise

    def abort(self) -> None:
        """Remove the pending file and close it; the target stays as it was. May be called again.

        In a forked child this does nothing: the file is the parent's, and the descriptor is closed already.
        """
        if self.fd >= 0 and self._process == os.getpid():
            _unlink_quietly(self.path)
            with errors_in_log():
                self._close()

    def leave(self) -> None:
        """Close the pending file, and leave it for `adopt`; the next save of this name would remove it."""
        if self.fd >= 0 and self._process == os.getpid():
            with errors_in_log():
                self._close()

    def _close(self) -> None:
        fd, self.fd = self.fd, -1
        close_live(fd, self._identity, self.path)


def refuse_existing(path: str) -> None:
    """Refuse a name that is taken, for commands with an option --overwrite.

    Raises:
        ConfigError: The name is taken.
        StorageError: The path cannot be looked up.
    """
    if has_name(path):
        raise ConfigError(f"{path} exists already; choose another name, or say that it may be replaced (--overwrite)")


def replace_small_file(path: str, data: bytes) -> None:
    """Write a durable file of a few bytes, all of it or none; in place where it cannot be replaced, as /dev/stdout.

    Raises:
        StorageError: It cannot be written. An older file is there as before, unless it was to be written in place.
    """
    target = resolve_target(path)
    pending = None
    if target.why_not_replaceable is None:
        with suppress(ClosedDirectoryError):
            pending = PendingFile.create(target)
    if pending is None:
        with storage_errors("writing", path), open(path, "wb") as file:
            file.write(data)
        return
    try:
        with saving(path):
            filesystem().write(pending.fd, data, pending.path)
        pending.publish(len(data), durable=True)
    finally:
        pending.abort()  # which does nothing when it is published


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


@contextmanager
def saving(path: str) -> Iterator[None]:
    """Let errors name the file that the caller has asked for, in place of the pending file."""
    try:
        yield
    except StorageError as error:
        raise type(error)(error.errno, f"cannot save {path}: {error}", path) from error


@contextmanager
def errors_in_log() -> Iterator[None]:
    """Log errors of the block, because another one is being raised."""
    try:
        yield
    except StorageError as error:
        _log.warning("%s", error)


@contextmanager
def closing_published(path: str, close: Callable[[], None], *, durable: bool) -> Iterator[None]:
    """Close what has got its final name, then run the block that makes the name durable.

    Raises:
        StorageError: One of the two failed. `path` is published all the same, and the message says so.
    """
    failed = None
    try:
        close()
    except StorageError as error:
        failed = error
    try:
        yield
    except StorageError as error:
        message = f"{path} is published, but a power failure may undo that: {error}"
        raise type(error)(error.errno, message, path) from error
    if failed is not None:
        rest = " and durable: all was synced before" if durable else ", but perhaps not all was written: save again"
        raise type(failed)(failed.errno, f"{path} is published{rest}. What failed: {failed}", path) from failed


def hidden_prefix(path: str, kind: Literal["pending", "retired"] = "pending") -> str:
    """Return the prefix of the names of all pending (or retired) files and directories of this target.

    A long final name is shortened to a digest, so that the hidden name fits wherever the final one does.
    """
    name = os.path.basename(path)
    suffix = f".{kind}-"
    if len(os.fsencode(name)) + len(suffix) + 1 + 2 * TOKEN_BYTES > _NAME_LIMIT_BYTES:
        name = hashlib.sha256(os.fsencode(name)).hexdigest()[:32]
    return f".{name}{suffix}"


def lock_record(fd: int, path: str) -> Lock:
    """Take the record lock of a writer. Where it is UNSUPPORTED, leftovers are removed by their age."""
    return lock_by(lambda: fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB), path)


def lock_by(take: Callable[[], object], path: str) -> Lock:
    """Take a lock by a system call that does not wait."""
    try:
        take()
    except OSError as error:
        if error.errno in _LOCK_HELD:
            return Lock.BUSY
        if error.errno not in _LOCK_UNSUPPORTED:
            raise StorageError(error.errno, f"locking {path}: {error.strerror}", path) from error
        _log.debug("%s: the file system has no record locks", path)
        return Lock.UNSUPPORTED
    return Lock.TAKEN


def _unlink_quietly(path: str) -> None:
    """Remove a pending file while another error is being raised; if that fails, the next save removes it."""
    try:
        filesystem().unlink(path)
    except StorageError as error:
        if error.errno != errno.ENOENT:
            _log.warning("a pending file is left behind: %s", error)


def find_leftovers(target: Target) -> list[str]:
    """List the pending files of a target, those that are being written by this or another process included.

    Raises:
        StorageError: The directory could not be read. Without the permission to list it, there are none.
    """
    name = re.compile(re.escape(hidden_prefix(target.path)) + f"[0-9a-f]{{{2 * TOKEN_BYTES}}}")
    with storage_errors("listing", target.directory):
        try:
            with os.scandir(target.directory) as entries:
                return [entry.path for entry in entries if name.fullmatch(entry.name)]
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            return []  # it may be writable and not listable; if not, creating the file will raise


def is_being_written(path: str) -> bool:
    """Tell whether a process writes a pending file; False also where the file system has no locks to tell."""
    with _live_guard:
        try:
            if is_live(os.lstat(path)):
                return True
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return False
        try:
            return lock_by(lambda: fcntl.lockf(fd, fcntl.LOCK_SH | fcntl.LOCK_NB), path) is Lock.BUSY
        finally:
            close_quietly(fd, path)


def sweep(target: Target) -> list[str]:
    """Do step 1: remove the pending files of dead saves to this target, never those of live ones.

    Returns:
        The paths that were removed.
    """
    removed: list[str] = []
    try:
        leftovers = find_leftovers(target)
    except StorageError as error:
        _log.warning("leftovers of %s stay: %s", target.path, error)
        return removed
    for path in leftovers:
        with _live_guard:
            try:
                if is_live(os.lstat(path)):
                    continue
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            except OSError:
                continue  # it is gone meanwhile, or another user's
            try:
                if _is_dead(fd, path):
                    filesystem().unlink(path)
                    removed.append(path)
                    _log.info("removed %s, left by a save that died", path)
            except StorageError as error:
                if error.errno != errno.ENOENT:  # its writer has just published it
                    _log.warning("a leftover stays: %s", error)
            finally:
                close_quietly(fd, path)
    return removed


def _is_dead(fd: int, path: str) -> bool:
    """Tell whether no process holds the writer's lock, by a shared lock, which needs no right to write."""
    try:
        fcntl.lockf(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _LOCK_HELD:
            return False
        if time.time() - filesystem().status(fd, path).st_mtime > LEFTOVER_AGE_S:
            return True
        _log.warning("%s may be a leftover; without file locks it is removed when a day old", path)
        return False
    return stat.S_ISREG(filesystem().status(fd, path).st_mode)
