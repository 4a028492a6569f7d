"""Names on disk: create, size, sync, rename, remove. All calls of the commit protocol to the kernel are here.

Every operation whose order matters after a power failure goes through `filesystem`, so a test can record all of them,
make one fail, and replay any prefix. Data bytes go through the engines; only `sync` orders them against these
operations. Errors are `StorageError` with operation, path and errno.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

from fastpersist import _native
from fastpersist.errors import ConfigError, FormatError, NoSpaceError, StorageError, UnsupportedError

__all__ = [
    "Filesystem",
    "absolute_path",
    "allocate_pages",
    "close_quietly",
    "filesystem",
    "has_name",
    "hint_at_make_parents",
    "ignoring",
    "is_there",
    "make_directories",
    "open_regular",
    "reopened",
    "storage_errors",
    "tell_free",
    "using",
]

_log = logging.getLogger("fastpersist")

# The errors of rename() when a directory that is not empty, or a file, has the name.
_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG)  # the last: nothing can have such a name
_NAME_TAKEN = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR, errno.EISDIR)


@contextmanager
def storage_errors(operation: str, path: str) -> Iterator[None]:
    """Turn an OSError of the block into a StorageError (NoSpaceError) that names operation and path."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        kind = NoSpaceError if error.errno in (errno.ENOSPC, errno.EDQUOT) else StorageError
        raise kind(error.errno, f"{operation} {path}: {error.strerror}", path) from error


def absolute_path(path: str | os.PathLike[str]) -> str:
    """Return a path as it is from the root, so that a later chdir does not change what it names.

    Raises:
        StorageError: The path is relative, and the working directory was removed, or a parent of it cannot be read.
    """
    with storage_errors("looking up the working directory for", os.fspath(path)):
        return os.path.abspath(path)


@contextmanager
def ignoring(sys_errno: int) -> Iterator[None]:
    """Let a StorageError with this errno end the block, and nothing more: what the block was to do is done already."""
    try:
        yield
    except StorageError as error:
        if error.errno != sys_errno:
            raise


def tell_free(
    error: BaseException, hint: str = "", *, state: str = "now that the unfinished files are removed"
) -> None:
    """Add to a NoSpaceError how much space is free where its file was to be. Call it when the pending file is removed.

    A caller who knows more may call it again: its words then take the place of those of the first call.

    Args:
        error: Other errors stay as they are.
        hint: What to do, for the end of the message.
        state: What has become of the pending file.
    """
    if not isinstance(error, NoSpaceError) or not isinstance(error.filename, str):
        return
    directory = absolute_path(error.filename)
    while not os.path.isdir(directory):
        directory = os.path.dirname(directory)
    said = [vars(error).setdefault("_untold", str(error))]
    if error.errno == errno.ENOSPC:  # statvfs does not know what is left of a quota (EDQUOT)
        with suppress(OSError):
            room = os.statvfs(directory)
            free_bytes = room.f_bavail * room.f_frsize
            free = f"{free_bytes / 1e9:.2f} GB" if free_bytes >= 1e9 else f"{free_bytes / 1e6:.2f} MB"
            no_names = room.f_files > 0 and room.f_favail == 0
            if no_names:
                said.append(f"no more files can be made there, {free} are free")
            else:
                said.append(f"{free} are free there, {state}")
    error.args = (error.errno, "; ".join([*said, *([hint] if hint else [])]))


class Filesystem:
    """The real file system. It has no state, so it is thread-safe."""

    def create(self, path: str, mode: int = 0o666) -> int:
        """Create a file exclusively, with `mode` as open() takes it (less the umask); return its descriptor."""
        with storage_errors("creating", path):  # O_EXCL follows no symbolic link; libcufile refuses O_NOFOLLOW
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)

    def make_directory(self, path: str, mode: int = 0o777) -> None:
        """Create a directory that is not there yet, with `mode` as mkdir() takes it (less the umask)."""
        with storage_errors("creating directory", path):
            os.mkdir(path, mode)

    def allocate(self, fd: int, size_bytes: int, path: str) -> None:
        """Reserve `size_bytes` of space and make that the size of the file; on tmpfs, only check that there is room."""
        _native.allocate(fd, size_bytes, os.fsencode(path))

    def write(self, fd: int, data: bytes | memoryview, path: str) -> None:
        """Write all of `data` at the descriptor's position. For a few bytes: tensors go through the engines."""
        with storage_errors("writing", path):
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(fd, rest) :]

    def truncate(self, fd: int, size_bytes: int, path: str) -> None:
        """Cut the file to `size_bytes`."""
        with storage_errors("truncating", path):
            os.ftruncate(fd, size_bytes)

    def sync(self, fd: int, path: str) -> None:
        """Make the file's bytes and size durable."""
        with storage_errors("syncing", path):
            os.fdatasync(fd)

    def status(self, fd: int, path: str) -> os.stat_result:
        """Return the status of an open file."""
        with storage_errors("looking at", path):
            return os.fstat(fd)

    def close(self, fd: int, path: str) -> None:
        """Close a file; after an error it is closed, too. Network file systems report lost writes here."""
        with storage_errors("closing", path):
            os.close(fd)

    def rename(self, source: str, target: str) -> None:
        """Give a file its new name in one step, and replace what has that name."""
        with storage_errors(f"renaming {source} to", target):
            os.rename(source, target)

    def rename_to_free_name(self, source: str, target: str) -> None:
        """Give a file or directory a name that is free, in one step; EEXIST when it is taken.

        Where the kernel cannot do that in one step, an empty directory that appears in between is replaced.
        """
        try:
            _native.rename_to_free_name(os.fsencode(source), os.fsencode(target))
        except UnsupportedError:
            with storage_errors(f"renaming {source} to", target):
                if has_name(target):
                    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST)) from None
                try:
                    os.rename(source, target)
                except OSError as error:
                    if error.errno in _NAME_TAKEN:
                        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST)) from error
                    raise

    def exchange(self, first: str, second: str) -> None:
        """Exchange two names in one step; UnsupportedError where the kernel or file system cannot."""
        _native.exchange_names(os.fsencode(first), os.fsencode(second))

    def sync_directory(self, path: str) -> None:
        """Make the names in a directory durable."""
        with storage_errors("syncing directory", path):
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            except OSError as error:
                # Some network file systems order names themselves and refuse to sync a directory; a program can do
                # nothing more there.
                if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                    raise
            finally:
                os.close(fd)

    def unlink(self, path: str) -> None:
        """Remove a name."""
        with storage_errors("removing", path):
            os.unlink(path)

    def remove_directory(self, path: str) -> None:
        """Remove an empty directory."""
        with storage_errors("removing directory", path):
            os.rmdir(path)


def close_quietly(fd: int, path: str) -> None:
    """Close a file whose written bytes are not needed any more; an error only goes to the log."""
    try:
        filesystem().close(fd, path)
    except StorageError as error:
        _log.warning("%s; nothing was written there", error)


_current = Filesystem()


def filesystem() -> Filesystem:
    """Return the file system that saves go to: the real one, or that of a test."""
    return _current


@contextmanager
def using(replacement: Filesystem) -> Iterator[None]:
    """Send all saves of the process through `replacement` while the block runs. For tests; not thread-safe."""
    global _current
    previous, _current = _current, replacement
    try:
        yield
    finally:
        _current = previous


def allocate_pages(fd: int, size_bytes: int, path: str) -> None:
    """Allocate every page of a file that will be mapped: a write to a page without space would end in SIGBUS."""
    filesystem().allocate(fd, size_bytes, path)
    with storage_errors("reserving space for", path):
        os.posix_fallocate(fd, 0, size_bytes)


def make_directories(path: str) -> list[str]:
    """Make a directory, and those above it that are missing; their names are durable when this returns.

    Returns:
        The directories that were missing, each before those in it.

    Raises:
        StorageError: One of them cannot be made, or its name is that of something else.
    """
    missing: list[str] = []
    above = absolute_path(path)
    while not os.path.isdir(above):
        missing.insert(0, above)
        above = os.path.dirname(above)
    for directory in missing:
        try:
            filesystem().make_directory(directory)
        except StorageError as error:
            if error.errno != errno.EEXIST or not os.path.isdir(directory):  # another process may have made it
                raise
        filesystem().sync_directory(os.path.dirname(directory))
    return missing


class Mount(NamedTuple):
    """A line of the kernel's table of mounts.

    Attributes:
        point: The directory at which it is mounted.
        type_name: The type of the file system, such as "ext4".
        source: What is mounted: a device, or "server:/export".
        options: The mount options, such as "rw,relatime".
    """

    point: str
    type_name: str
    source: str
    options: str


def mount_of(path: str) -> Mount | None:
    """Return the mount that a path lies on; None if the kernel does not tell.

    Args:
        path: The path; it need not exist.

    Source: proc_pid_mountinfo(5). statfs has only a number, which ext2, ext3 and ext4 share.
    """
    found = None
    try:
        path = os.path.realpath(path)
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as mounts:
            for line in mounts:
                before, _, after = line.partition(" - ")
                point = _unescaped(before.split()[4])
                inside = path == point or path.startswith(point.rstrip("/") + "/")
                if inside and (found is None or len(point) >= len(found.point)):  # of equals, the later one is on top
                    type_name, source, *_ = after.split()
                    found = Mount(point, type_name, _unescaped(source), before.split()[5])
    except OSError:
        return None  # no /proc, or no working directory: this is for people only
    return found


def _unescaped(field: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)


def is_there(path: str) -> bool:
    """Tell whether there is a file of any kind at a path. Links are followed: a mount may be missing behind one.

    Raises:
        StorageError: It cannot be looked up; `os.path.exists` returns False for an error of the disk, too.
    """
    return _can_be_looked_up(path, os.stat)


def has_name(path: str) -> bool:
    """Tell whether something has this name, be it a link that leads nowhere. Raises as `is_there`."""
    return _can_be_looked_up(path, os.lstat)


def _can_be_looked_up(path: str, look: Callable[[str], object]) -> bool:
    with storage_errors("looking up", path):
        try:
            look(path)
        except OSError as error:
            if error.errno not in _ABSENT:
                raise
            return False
    return True


@contextmanager
def hint_at_make_parents(path: str) -> Iterator[None]:
    """Add a remedy to an error of the block if the directory of `path` is missing.

    This is for callers that have an argument make_parents. It would not help where the path is a symbolic link to a
    missing directory, so nothing is added there.
    """
    try:
        yield
    except StorageError as error:
        directory = os.path.dirname(absolute_path(path))
        if error.errno != errno.ENOENT or os.path.lexists(directory):
            raise
        hint = f"there is no directory {directory}: make it, or save with make_parents=True"
        raise StorageError(error.errno, f"{error} ({hint})", error.filename) from error


def open_regular(path: str) -> int:
    """Open a file of a checkpoint for reading; return its descriptor.

    A FIFO or a device in its place is refused without a wait.

    Raises:
        FormatError: It is no regular file.
        StorageError: The kernel reports an error.
    """
    with storage_errors("opening", path):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    kept = False
    try:
        if not stat.S_ISREG(filesystem().status(fd, path).st_mode):
            raise FormatError("it is no regular file", path=path)
        with storage_errors("looking at", path):
            os.set_blocking(fd, True)  # with O_NONBLOCK, io_uring would read only what is in the page cache
        kept = True
    finally:
        if not kept:
            os.close(fd)
    return fd


def reopened(fd: int, path: str, flags: int) -> int:
    """Open the same file once more: another open file description, with its own flags.

    Raises:
        ConfigError: There is no /proc, and another file has the path by now.
        StorageError: The kernel reports an error.
    """
    with storage_errors("opening again", path):
        try:
            return os.open(f"/proc/self/fd/{fd}", flags | os.O_CLOEXEC)
        except FileNotFoundError:  # no /proc here
            again = os.open(path, flags | os.O_CLOEXEC)
    if not os.path.samestat(os.fstat(fd), os.fstat(again)):
        os.close(again)
        raise ConfigError(f"{path} is another file by now, and without /proc the open file cannot be opened again")
    return again
