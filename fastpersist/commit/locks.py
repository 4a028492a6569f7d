"""Locks of a directory of checkpoints, for its writer, its readers and a process that removes it; and locks of roots.

A writer's lock is a record lock (F_SETLK; `file_commit` has the reasons, and the list of files that this process has
locked). Readers and removers take locks of the open file (F_OFD_SETLK). These conflict with record locks, and stay when
another descriptor of the file is closed; forked children close theirs. `directory_commit` and `removal` work under
these locks.
"""

from __future__ import annotations

import errno
import fcntl
import gc
import logging
import os
import re
import socket
import stat
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

from fastpersist import _native
from fastpersist.commit.file_commit import (
    Lock,
    close_live,
    errors_in_log,
    is_live,
    live_guard,
    lock_by,
    lock_record,
    mark_live,
)
from fastpersist.commit.filesystem import close_quietly, filesystem, storage_errors
from fastpersist.errors import (
    CheckpointNotFoundError,
    ConfigError,
    FastPersistError,
    InternalError,
    StorageError,
)
from fastpersist.formats.manifest import MANIFEST_NAME

__all__ = ["ROOT_LOCK_NAME", "HeldDirectory", "Lock", "RootLock", "claimed", "hold_for_reading", "is_root_on"]

_log = logging.getLogger("fastpersist")

ROOT_LOCK_NAME = ".lock"
"""The file in a root that the process which saves there has locked."""

_ATTEMPT_COUNT = 100
_READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_WRITE_FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
# A committed manifest is locked only for moments: from its rename until its writer closes it, and during a removal
# until the directory has lost its name. A longer lock belongs to a process that was stopped at that point.
_READER_PATIENCE_S = 5.0
_HINT_BYTES = 512
_NO_LOCKS = "no locks"
_POLL_S = 0.5
_ENDING_S = 5.0
_WRITING_THREADS = ("fastpersist-save", "fastpersist-rm")
_MOUNTS_PATH = "/proc/self/mountinfo"
# With these mount options locks succeed, and no other host sees them.
_LOCAL_LOCKS = frozenset(("nolock", "local_lock=all", "local_lock=posix", "localflock"))
_told_roots: set[str] = set()  # roots for which the log has warned that locks do not work


def _record(kind: int) -> bytes:
    """Return the struct flock of a whole file."""
    return struct.pack("hhqqi4x", kind, os.SEEK_SET, 0, 0, 0)


def _lock_open_file(fd: int, kind: int, path: str) -> Lock:
    return lock_by(lambda: fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _record(kind)), path)


def _lock_for_removal(fd: int, writable: bool, path: str) -> Lock:
    """Lock out writers and readers. Without the right to write, lock out writers and look for locks of readers.

    Two sweepers that may only read find each other's locks, and both leave the directory alone.
    """
    if writable:
        return _lock_open_file(fd, fcntl.F_WRLCK, path)
    lock = _lock_open_file(fd, fcntl.F_RDLCK, path)
    if lock is Lock.TAKEN:
        conflict = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _record(fcntl.F_WRLCK))
        if struct.unpack_from("h", conflict)[0] != fcntl.F_UNLCK:
            return Lock.BUSY
    return lock


@contextmanager
def claimed(path: str, name: str = MANIFEST_NAME) -> Iterator[Lock]:
    """Keep writers and readers out of a directory while the block removes or renames it, if the lock is TAKEN.

    Args:
        path: The directory.
        name: The name of its manifest.
    """
    manifest_path = os.path.join(path, name)
    fd, process = -1, os.getpid()
    lock = Lock.BUSY
    with live_guard():
        try:
            if not is_live(os.lstat(manifest_path)):
                writable = True
                try:
                    fd = os.open(manifest_path, _WRITE_FLAGS)
                except PermissionError:
                    writable = False
                    fd = os.open(manifest_path, _READ_FLAGS)
                _native.close_in_forked_child(fd)
                lock = _lock_for_removal(fd, writable, manifest_path)
                if not os.path.samestat(os.lstat(manifest_path), os.fstat(fd)):
                    lock = Lock.BUSY  # since it was opened, another directory has got its name
        except (FileNotFoundError, NotADirectoryError):
            lock = Lock.NO_MANIFEST
        except OSError as error:
            _log.debug("%s cannot be locked: %s", manifest_path, error)
    try:
        yield lock
    finally:
        _close_lock(fd, process, manifest_path)


def _close_lock(fd: int, process: int, path: str) -> None:
    """Close a descriptor, and so drop its lock; a child that was forked meanwhile has closed it already."""
    if fd >= 0 and process == os.getpid():
        _native.forget_descriptor(fd)
        close_quietly(fd, path)


class HeldDirectory(NamedTuple):
    """A directory that is being read.

    Attributes:
        path: The name that the directory had when it was opened; for messages.
        place: A path that leads to it even if it has lost its name; for access. Without /proc it is the name.
        identity: The device and inode of the directory.
    """

    path: str
    place: str
    identity: tuple[int, int]

    def has_its_name(self) -> bool:
        """Tell whether the name still leads to it: no save has replaced it, and it was not removed."""
        try:
            status = os.stat(self.path)
        except OSError:
            return False
        return (status.st_dev, status.st_ino) == self.identity

    def named(self, text: str) -> str:
        """Return a message with the name in place of `place`."""
        return re.sub(re.escape(self.place) + r"(?!\d)", lambda _: self.path, text)


@contextmanager
def hold_for_reading(path: str) -> Iterator[HeldDirectory]:
    """Keep other processes from removing a committed directory while the block reads it.

    A save may replace it meanwhile: the directory then loses its name, and stays until it has been read. So the block
    reads below `place`, which is one directory from beginning to end. Our errors name `path`.
    Where the file system cannot lock, or refuses to, there is no protection against removal, and no error.

    Raises:
        CheckpointNotFoundError: There is no directory with a MANIFEST.json, or it has gone.
        StorageError: It cannot be opened.

    Thread safety: any thread, any number at once.
    """
    (directory_fd, fd), process = _open_locked_for_reading(path), os.getpid()
    try:
        status = filesystem().status(directory_fd, path)
        place = f"/proc/self/fd/{directory_fd}"
        held = HeldDirectory(path, place if os.path.isdir(place) else path, (status.st_dev, status.st_ino))
        try:
            yield held
        except FastPersistError as error:
            _name_in(error, held)
            raise
    finally:
        _close_lock(fd, process, os.path.join(path, MANIFEST_NAME))
        _close_lock(directory_fd, process, path)


def _name_in(error: BaseException | None, held: HeldDirectory) -> None:
    """Put the name of the directory into an error and its causes."""
    seen = set()
    while error is not None and id(error) not in seen:  # an error that a future raises again may be its own cause
        seen.add(id(error))
        error.args = tuple(held.named(arg) if isinstance(arg, str) else arg for arg in error.args)
        for attribute in ("filename", "message", "path", "strerror"):
            if isinstance(text := getattr(error, attribute, None), str):
                setattr(error, attribute, held.named(text))
        error = error.__cause__


def _open_locked_for_reading(path: str) -> tuple[int, int]:
    """Open a directory and its manifest, and lock that."""
    deadline_s = time.monotonic() + _READER_PATIENCE_S
    manifest_path = os.path.join(path, MANIFEST_NAME)
    while True:
        directory_fd, process = _open_directory(path), os.getpid()
        fd = -1
        try:
            fd = _open_locked_manifest(directory_fd, path, manifest_path, deadline_s)
        finally:
            if fd < 0:
                _close_lock(directory_fd, process, path)
        if fd >= 0:
            return directory_fd, fd
        time.sleep(0.002)


def _no_checkpoint(path: str) -> CheckpointNotFoundError:
    return CheckpointNotFoundError(f"{path} holds no {MANIFEST_NAME}: it is no checkpoint, or removed")


def _open_directory(path: str) -> int:
    try:
        with storage_errors("opening", path):
            fd = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)  # it need not be listed
    except StorageError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            raise _no_checkpoint(path) from error
        raise
    _native.close_in_forked_child(fd)
    return fd


def _open_locked_manifest(directory_fd: int, path: str, manifest_path: str, deadline_s: float) -> int:
    """Open and lock the manifest of a directory; return -1 if the directory must be opened again by its name."""
    try:
        with live_guard(), storage_errors("opening", manifest_path):
            is_ours = is_live(os.stat(MANIFEST_NAME, dir_fd=directory_fd, follow_symlinks=False))
            fd = -1 if is_ours else os.open(MANIFEST_NAME, _READ_FLAGS, dir_fd=directory_fd)
    except StorageError as error:
        if error.errno != errno.ENOENT:
            raise
        with suppress(OSError):
            if not os.path.samestat(os.stat(path), os.fstat(directory_fd)):
                return -1  # it was replaced, and what was opened is removed already
        raise _no_checkpoint(path) from error
    if fd < 0:  # a thread of this process is writing it, or has just published it and closes it now
        if os.path.basename(path).startswith(".") or time.monotonic() > deadline_s:
            raise CheckpointNotFoundError(f"{path} is still being written")
        return -1
    _native.close_in_forked_child(fd)
    kept = False
    try:
        lock = _lock_open_file(fd, fcntl.F_RDLCK, manifest_path)
        if lock is Lock.BUSY and time.monotonic() > deadline_s:
            _log.warning("%s is read without a lock, because another lock is held on %s", path, MANIFEST_NAME)
            lock = Lock.UNSUPPORTED
        # Between the opening and the lock, the directory may have lost its name, perhaps to another one.
        with suppress(OSError):
            kept = lock is not Lock.BUSY and os.path.samestat(os.lstat(manifest_path), os.fstat(fd))
    finally:
        if not kept:
            _close_lock(fd, os.getpid(), manifest_path)
    return fd if kept else -1


def is_root_on(root: str, device: int, former: int) -> bool:
    """Tell whether what is on a device now is a root that was on `former`; else its file system is not mounted.

    A directory on another device is taken for the root if it has a lock file: it is mounted again.
    """
    return device == former or os.path.lexists(os.path.join(root, ROOT_LOCK_NAME))


class _Owner(NamedTuple):
    """The holder of a root's lock, in words; if it is on another host, the lock may outlive it for a while."""

    name: str
    is_elsewhere: bool
    is_here: bool = False


def _await_writing_threads() -> None:
    """Wait a while until threads that have finished a save have ended: they hold its Checkpointer until then."""
    deadline_s = time.monotonic() + _ENDING_S
    for thread in threading.enumerate():
        if thread.name in _WRITING_THREADS and thread.is_alive() and thread is not threading.current_thread():
            thread.join(max(0.0, deadline_s - time.monotonic()))


class RootLock:
    """The right to save checkpoints below a directory, one process at a time. One owner thread.

    It is a record lock on `<root>/.lock`, so it ends with this process however that dies, and no forked child has it.
    This process must not open that file again: closing it would drop the lock.

    Attributes:
        root: The directory.
        excludes_others: False where file locks do not work, on this host or on the one that saved last: then another
            process may be saving below the root, and locks do not show which pending directories are live.
    """

    def __init__(self, root: str, fd: int) -> None:
        self.root = root
        self.excludes_others = True
        self._locks_work = True
        self._is_told_of = False  # the kernel tells whether the lock is there
        self._fd = fd
        self._identity = mark_live(fd, self._path)
        self._process = os.getpid()

    @classmethod
    def acquire(cls, root: str, *, timeout_s: float = 0.0) -> RootLock:
        """Take the lock.

        A host that has died keeps its locks on a file server until its lease ends (NFSv4: 90 s), so an owner on another
        host is waited for. Where the file system has no locks, this succeeds, and the log warns once per root.

        Args:
            root: An existing directory.
            timeout_s: The longest wait for an owner on another host, in seconds.

        Raises:
            ConfigError: Another process holds it; the message names the process, and says what to do.
            StorageError: The lock file cannot be made or locked.
        """
        root = os.path.realpath(root)
        deadline_s = time.monotonic() + timeout_s
        waited = ""
        has_collected = False
        while not isinstance(found := cls._try(root), RootLock):
            if found.is_here and not has_collected:
                has_collected = True
                _await_writing_threads()
                gc.collect()  # an unreferenced Checkpointer keeps its lock until Python collects cycles
                continue
            if not found.is_elsewhere or time.monotonic() >= deadline_s:
                raise ConfigError(
                    f"{root} is being saved to by {found.name}{waited}, and only one Checkpointer at a time may do "
                    "that: close it or end that process first, or save to another directory"
                )
            if timeout_s and not waited:
                waited = f" (also after waiting {timeout_s:g} s)"
                _log.warning(
                    "%s is being saved to by %s: waiting up to %g s for its lock, in case that host is gone",
                    root,
                    found.name,
                    timeout_s,
                )
            time.sleep(_POLL_S)
        try:
            found._take_over()
        except BaseException:  # such as Ctrl-C: no other code would release it
            found.release()
            raise
        return found

    @classmethod
    def _try(cls, root: str) -> RootLock | _Owner:
        path = os.path.join(root, ROOT_LOCK_NAME)
        for _ in range(_ATTEMPT_COUNT):
            with live_guard(), storage_errors("opening", path):
                if _lock_file_is_live(path):
                    return _Owner(f"this process ({os.getpid()})", is_elsewhere=False, is_here=True)
                lock = cls(root, _open_lock_file(path))
                kept = False
                try:
                    taken = lock_record(lock._fd, path)
                    kept = taken is not Lock.BUSY and _lock_file_is_live(path)  # and not deleted meanwhile
                    lock._locks_work = taken is Lock.TAKEN and not _are_locks_local(lock._identity[0])
                    lock._is_told_of = taken is Lock.TAKEN and _is_own_record_lock(lock._fd)
                    owner = _owner_of(lock._fd, path) if taken is Lock.BUSY else None
                finally:
                    if not kept:
                        lock.release()
            if kept:
                return lock
            if owner is not None:
                return owner
        raise InternalError(f"{path} was locked and released by other processes {_ATTEMPT_COUNT} times")

    def _take_over(self) -> None:
        """Leave a hint for people and other hosts. The one before may say that locks did not work for its owner."""
        before = _hint_in(self._fd, self._path).split("\n")
        self.excludes_others = self._locks_work and _NO_LOCKS not in before[1:]
        if not self.excludes_others and self.root not in _told_roots:
            _told_roots.add(self.root)
            _log.warning(
                "%s: file locks do not work between all hosts that save here (the last one was %s), so nothing keeps "
                "two jobs from saving to it at once: make sure that only one does. Leftovers of dead saves are "
                "removed when they are a day old",
                self.root,
                before[0] or "this one",
            )
        self._leave_hint(self._path)

    def _leave_hint(self, path: str) -> None:
        """Write who holds the lock. On a full disk there is no hint, and nothing worse."""
        hint = f"{os.getpid()} {socket.gethostname()}\n" + ("" if self._locks_work else f"{_NO_LOCKS}\n")
        try:
            filesystem().truncate(self._fd, 0, path)
            filesystem().write(self._fd, hint.encode(), path)
        except StorageError as error:
            _log.debug("the owner of the lock is not noted: %s", error)

    def is_held(self) -> bool:
        """Tell whether the lock is still that of the directory.

        The root may have been removed or renamed. Also, the kernel drops a record lock when this process closes any
        other descriptor of the file, as when it copies the root.
        """
        try:
            found = os.lstat(self._path)
        except OSError:
            return False
        if self._fd < 0 or (found.st_dev, found.st_ino) != self._identity:
            return False
        return not self._is_told_of or _is_own_record_lock(self._fd)

    def release(self) -> None:
        """Release the lock. May be called again; does nothing in a forked child, which does not hold it."""
        if self._fd >= 0 and self._process == os.getpid():
            fd, self._fd = self._fd, -1
            with errors_in_log():
                close_live(fd, self._identity, self._path)

    @property
    def _path(self) -> str:
        return os.path.join(self.root, ROOT_LOCK_NAME)

    def __del__(self) -> None:
        if hasattr(self, "_process"):  # or the constructor has failed
            self.release()


def _lock_file_is_live(path: str) -> bool:
    try:
        return is_live(os.lstat(path))
    except FileNotFoundError:
        return False


def _open_lock_file(path: str) -> int:
    try:
        return filesystem().create(path)
    except StorageError as error:
        if error.errno != errno.EEXIST:
            raise
    fd = os.open(path, _WRITE_FLAGS)
    if not stat.S_ISREG(os.fstat(fd).st_mode):  # a FIFO could be locked, but holds no hint to its owner
        os.close(fd)
        raise StorageError(errno.EINVAL, f"{path} is no regular file, so it cannot be the root's lock: remove it", path)
    return fd


def _owner_of(fd: int, path: str) -> _Owner | None:
    """Return who holds the record lock of a root; None if it has just been released."""
    kind, _, _, _, pid = struct.unpack("hhqqi4x", fcntl.fcntl(fd, fcntl.F_GETLK, _record(fcntl.F_WRLCK)))
    if kind == fcntl.F_UNLCK:
        return None
    hinted_pid, _, host = _hint_in(fd, path).partition("\n")[0].partition(" ")
    # For a process in another container or on another machine the kernel gives no process number, or a made-up one.
    is_hinted = hinted_pid.isdecimal() and (pid <= 0 or hinted_pid == str(pid))
    if is_hinted:
        return _Owner(f"process {hinted_pid} on {host}", is_elsewhere=host != socket.gethostname())
    return _Owner("a process elsewhere" if pid <= 0 else f"process {pid}", is_elsewhere=pid <= 0)


def _is_own_record_lock(fd: int) -> bool:
    """Tell whether this process has a record lock on an open file; False, too, where the kernel does not say."""
    try:
        found = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _record(fcntl.F_WRLCK))
    except OSError:
        return False
    kind, _, _, _, pid = struct.unpack("hhqqi4x", found)
    return bool(kind != fcntl.F_UNLCK and pid == os.getpid())


def _hint_in(fd: int, path: str) -> str:
    """Return the hint of a lock's owner, or of the owner before."""
    with storage_errors("reading", path):
        return os.pread(fd, _HINT_BYTES, 0).decode("utf-8", "replace")


def _are_locks_local(device: int) -> bool:
    """Tell whether a file system is mounted so that its locks stay on this host, and no other host sees them."""
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        with open(_MOUNTS_PATH, encoding="utf-8", errors="replace") as mounts:
            lines = [line.split() for line in mounts]
    except OSError:
        return False
    # "36 35 98:0 / /mnt rw,noatime - nfs server:/export rw,vers=3,nolock,local_lock=all"
    return any(fields[2] == number and not _LOCAL_LOCKS.isdisjoint(fields[-1].split(",")) for fields in lines)
