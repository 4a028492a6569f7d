"""Doubles of the seam between the commit protocol and the kernel.

They see every operation before and after it, make one fail, or kill the process there. The rest is real.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Literal
from unittest import mock

from fastpersist.commit.filesystem import Filesystem, storage_errors
from fastpersist.errors import NoSpaceError, StorageError

FILE_OPERATIONS = ("create", "allocate", "truncate", "sync", "rename", "sync_directory", "unlink")
"""What saves of a file need."""

DIRECTORY_OPERATIONS = ("make_directory", "write", "rename_to_free_name", "exchange", "remove_directory")
"""What saves of a directory need besides."""


OPEN_FILE_OPERATIONS = ("status", "close")
"""What changes nothing below a name, so its order is free: `FailingOpenFiles` makes these fail."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of the commit protocol."""

    name: str
    path: str
    target: str = ""  # rename: the new name
    size_bytes: int = 0  # allocate, truncate
    offset_bytes: int = 0  # write: a request of an engine, which is not seen here but recorded there
    data: bytes = b""


class FullFor(Filesystem):
    """A disk without room for the data of files with this in their paths: of all files, unless it is told which."""

    def __init__(self, name: str = "") -> None:
        self._name = name

    def allocate(self, fd: int, size_bytes: int, path: str) -> None:
        """Find no room."""
        if self._name in path:
            raise NoSpaceError(errno.ENOSPC, f"reserving {size_bytes} bytes for {path}: disk full", path)
        super().allocate(fd, size_bytes, path)


class FullAtSync(Filesystem):
    """A disk that finds no room for the data of files with this in their paths when they are synced."""

    def __init__(self, name: str) -> None:
        self._name = name

    def sync(self, fd: int, path: str) -> None:
        """Find no room."""
        if self._name in path:
            raise NoSpaceError(errno.ENOSPC, f"syncing {path}: disk full", path)
        super().sync(fd, path)


class HeldUntil(Filesystem):
    """Begins no data of files with this in their paths before an event."""

    def __init__(self, event: threading.Event, name: str = "") -> None:
        self._event = event
        self._name = name

    def allocate(self, fd: int, size_bytes: int, path: str) -> None:
        """Wait."""
        if self._name in path and not self._event.wait(30):
            raise TimeoutError("it did not come")
        super().allocate(fd, size_bytes, path)


class FullForWrites(Filesystem):
    """A disk on which a file that the commit protocol writes itself ends half-way."""

    def write(self, fd: int, data: bytes | memoryview, path: str) -> None:
        """Write half of it."""
        super().write(fd, data[: len(data) // 2], path)
        raise NoSpaceError(errno.ENOSPC, f"writing {path}: disk full", path)


class FullForNames(Filesystem):
    """A disk without room for directories with this in their paths: for any, unless it is told which."""

    def __init__(self, name: str = "") -> None:
        self._name = name

    def make_directory(self, path: str, mode: int = 0o777) -> None:
        """Find no room."""
        if self._name in path:
            raise NoSpaceError(errno.ENOSPC, f"creating directory {path}: disk full", path)
        super().make_directory(path, mode)


class FailingOpenFiles(Filesystem):
    """The n-th look at an open file, or the n-th closing of one, fails: nothing else does. What is closed is closed."""

    def __init__(self, operation: Literal["status", "close"], nth: int) -> None:
        self._operation = operation
        self._nth = nth
        self.count = 0
        self.failed_path = ""

    def status(self, fd: int, path: str) -> os.stat_result:
        """Look at a file, or fail."""
        found = super().status(fd, path)
        self._fail("status", "looking at", path)
        return found

    def close(self, fd: int, path: str) -> None:
        """Close a file, and perhaps fail."""
        super().close(fd, path)
        self._fail("close", "closing", path)

    def _fail(self, operation: str, told: str, path: str) -> None:
        if operation != self._operation:
            return
        self.count += 1
        if self.count == self._nth:
            self.failed_path = path
            with storage_errors(told, path):
                raise OSError(errno.EIO, os.strerror(errno.EIO))


class SillyRenames(Filesystem):
    """Does as NFS does: a file that this host has open is not removed, but renamed within its directory.

    The server would remove it at the close; nothing here waits for that, as who removes the directory does not.
    """

    def __init__(self) -> None:
        self.renamed: list[str] = []

    def unlink(self, path: str) -> None:
        """Remove a name, or hide a file that is open."""
        if os.path.basename(path).startswith(".nfs"):
            raise StorageError(errno.EBUSY, f"removing {path}: {os.strerror(errno.EBUSY)}", path)
        if not _is_open(path):
            super().unlink(path)
            return
        hidden = os.path.join(os.path.dirname(path), f".nfs{len(self.renamed):024x}")
        os.rename(path, hidden)
        self.renamed.append(path)


def _is_open(path: str) -> bool:
    """Tell whether this process has a file open."""
    try:
        wanted = os.lstat(path)
    except FileNotFoundError:
        return False
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(int(name)), wanted):
                return True
    return False


class WatchedFilesystem(Filesystem):
    """The real file system, each operation wrapped in `around`."""

    def around(self, operation: Operation) -> AbstractContextManager[None]:
        """Run around an operation: behind the yield only if it succeeded."""
        raise NotImplementedError

    def create(self, path: str, mode: int = 0o666) -> int:
        with self.around(Operation("create", path)):
            return super().create(path, mode)

    def allocate(self, fd: int, size_bytes: int, path: str) -> None:
        with self.around(Operation("allocate", path, size_bytes=size_bytes)):
            super().allocate(fd, size_bytes, path)

    def truncate(self, fd: int, size_bytes: int, path: str) -> None:
        with self.around(Operation("truncate", path, size_bytes=size_bytes)):
            super().truncate(fd, size_bytes, path)

    def sync(self, fd: int, path: str) -> None:
        with self.around(Operation("sync", path)):
            super().sync(fd, path)

    def rename(self, source: str, target: str) -> None:
        with self.around(Operation("rename", source, target=target)):
            super().rename(source, target)

    def sync_directory(self, path: str) -> None:
        with self.around(Operation("sync_directory", path)):
            super().sync_directory(path)

    def unlink(self, path: str) -> None:
        with self.around(Operation("unlink", path)):
            super().unlink(path)

    def make_directory(self, path: str, mode: int = 0o777) -> None:
        with self.around(Operation("make_directory", path)):
            super().make_directory(path, mode)

    def write(self, fd: int, data: bytes, path: str) -> None:
        with self.around(Operation("write", path, data=data)):
            super().write(fd, data, path)

    def rename_to_free_name(self, source: str, target: str) -> None:
        with self.around(Operation("rename_to_free_name", source, target=target)):
            super().rename_to_free_name(source, target)

    def exchange(self, first: str, second: str) -> None:
        with self.around(Operation("exchange", first, target=second)):
            super().exchange(first, second)

    def remove_directory(self, path: str) -> None:
        with self.around(Operation("remove_directory", path)):
            super().remove_directory(path)


class FailingFilesystem(WatchedFilesystem):
    """The n-th operation fails with an errno instead of being done; with `lasting`, so do all that follow."""

    def __init__(self, nth: int, sys_errno: int, *, lasting: bool = False) -> None:
        self.names: list[str] = []  # of all operations so far
        self._nth = nth
        self._errno = sys_errno
        self._lasting = lasting

    @property
    def failed(self) -> str:
        """The operation that failed, the first of them; empty when there were not that many."""
        return self.names[self._nth - 1] if len(self.names) >= self._nth else ""

    @contextmanager
    def around(self, operation: Operation) -> Iterator[None]:
        self.names.append(operation.name)
        count = len(self.names)
        if count == self._nth or (self._lasting and count > self._nth):
            with storage_errors(f"{operation.name} (made to fail) of", operation.path):
                raise OSError(self._errno, os.strerror(self._errno))
        yield


class KillingFilesystem(WatchedFilesystem):
    """This process dies by SIGKILL right before or right after the first operation of a name."""

    def __init__(self, name: str, when: Literal["before", "after"]) -> None:
        self._name = name
        self._when = when

    @contextmanager
    def around(self, operation: Operation) -> Iterator[None]:
        self._die_at(operation, "before")
        yield
        self._die_at(operation, "after")

    def _die_at(self, operation: Operation, when: str) -> None:
        if (operation.name, when) == (self._name, self._when):
            os.kill(os.getpid(), signal.SIGKILL)


class KillingBeforeNth(WatchedFilesystem):
    """This process dies by SIGKILL right before its n-th operation."""

    def __init__(self, nth: int) -> None:
        self._left_count = nth

    @contextmanager
    def around(self, operation: Operation) -> Iterator[None]:
        self._left_count -= 1
        if self._left_count == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        yield


@contextmanager
def failing_lookup(path: str | os.PathLike[str], nth: int = 1) -> Iterator[list[str]]:
    """The n-th look at a path, a stat, a listing or an open, fails with EIO, and no other; yields what has failed."""
    wanted = os.fspath(path)
    count = 0
    failed: list[str] = []

    def failing(name: str) -> Callable[..., Any]:
        real = getattr(os, name)

        def call(path: Any = ".", *arguments: Any, **options: Any) -> Any:
            nonlocal count
            count += path == wanted
            if path == wanted and count == nth:
                failed.append(name)
                raise OSError(errno.EIO, os.strerror(errno.EIO), path)
            return real(path, *arguments, **options)

        return call

    with contextlib.ExitStack() as stack:
        for name in ("stat", "lstat", "listdir", "scandir", "open"):
            stack.enter_context(mock.patch.object(os, name, failing(name)))
        yield failed
