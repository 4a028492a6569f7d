"""The operations of a handle that are under way, and their open files.

`handles` defines names, arguments and results; `fastpersist.TensorFile` moves the bytes.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import weakref
from collections import deque
from dataclasses import dataclass, field

import torch

from fastpersist import CorruptionError, PendingIO, StorageError, TensorFile, byte_view

__all__ = ["Operations", "Options"]

_log = logging.getLogger("fastpersist")

_OPEN_FILES_MAX = 12
"""Limit of files in use: each has its own queue, and perhaps threads."""

_COMPARED_BYTES = 8 << 20


# --------------------------------------------------------------------------------------------------- files


@dataclass(eq=False)
class Opened:
    """An open file and the number of operations that use it."""

    file: TensorFile
    key: tuple[int, int, bool]  # device, inode, and whether it may be written to
    users: int = 0


@dataclass(frozen=True)
class Options:
    """Options for opening files."""

    chunk_bytes: int
    queue_depth: int
    threads: int | None


class Files:
    """The open files of a handle: those in use, and the one that was read last. Thread-safe.

    Each operation looks up the inode, so it never uses a replaced file for the new one. All operations on an inode
    share one opening where they can, so that one queue writes its unaligned edges.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self._lock = threading.RLock()  # re-entrant, like all locks here: a signal handler may save
        self._opened: dict[tuple[int, int, bool], Opened] = {}
        self._idle: Opened | None = None

    def used_count(self) -> int:
        return len(self._opened) - (self._idle is not None)

    def take(self, path: str, *, write: bool) -> Opened:
        """Return an opening of the file that has this name now; create the file for writing if there is none."""
        with self._lock:
            try:
                status = os.stat(path)
            except (OSError, ValueError):  # opening the file raises the better error
                found = None
            else:
                place = (status.st_dev, status.st_ino)
                found = self._opened.get((*place, True)) or (None if write else self._opened.get((*place, False)))
            if found is None:
                found = self._open(path, write)
            if found is self._idle:
                self._idle = None
            found.users += 1
            return found

    def give_back(self, opened: Opened) -> None:
        with self._lock:
            opened.users -= 1
            if opened.users:
                return
            if opened.key[2]:  # a written file is cheap to reopen, and if it was removed, closing frees its space
                self._close(opened)
                return
            idle, self._idle = self._idle, opened
            if idle is not None:
                self._close(idle)

    def close(self) -> None:
        """Close all files, after the operations on them."""
        with self._lock:
            self._idle = None
            for opened in list(self._opened.values()):
                self._close(opened)

    def _open(self, path: str, write: bool) -> Opened:
        file = self._created(path) if write else self._tensor_file(path, "r")
        status = os.fstat(file.fileno())
        key = (status.st_dev, status.st_ino, write)
        there = self._opened.get(key)
        if there is not None:  # the name now refers to a file that is already open
            file.close()
            return there
        opened = self._opened[key] = Opened(file, key)
        return opened

    def _created(self, path: str) -> TensorFile:
        for mode in ("r+", "x"):
            try:
                return self._tensor_file(path, mode)
            except StorageError as error:
                if error.errno not in (errno.ENOENT, errno.EEXIST):
                    raise
        return self._tensor_file(path, "r+")  # another process has just created it; or the directory does not exist

    def _tensor_file(self, path: str, mode: str) -> TensorFile:
        options = self._options
        return TensorFile(
            path, mode, queue_depth=options.queue_depth, chunk_bytes=options.chunk_bytes, threads=options.threads
        )

    def _close(self, opened: Opened) -> None:
        del self._opened[opened.key]
        opened.file.close()


# ---------------------------------------------------------------------------------------------- operations


@dataclass(eq=False)
class Operation:
    """An asynchronous operation, from its start until `wait` has counted it."""

    pending: PendingIO
    opened: Opened
    buffer: torch.Tensor | None
    offset_bytes: int
    validate: bool
    error: Exception | None = None
    lock: threading.RLock = field(default_factory=threading.RLock)

    def settle(self, files: Files) -> None:
        """Wait for the operation, record its error, and give its file back. Idempotent."""
        with self.lock:
            if self.buffer is None:
                return
            try:
                self.pending.wait()
                if self.validate:
                    _compare(self.buffer, self.opened.file, self.offset_bytes)
            except Exception as error:  # noqa: BLE001 - wait() raises it
                self.error = error
            self.buffer = None
            files.give_back(self.opened)


class Operations:
    """The operations of a handle that are under way."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._renew()
        _all_operations.add(self)

    def _renew(self) -> None:
        self._files = Files(self._options)
        self._waiting = threading.RLock()
        self._pending: deque[Operation] = deque()
        self._errors: list[Exception] = []

    def forget_parent(self) -> None:
        """Drop, in a forked child, the parent's operations; close only the descriptors."""
        files = self._files
        self._renew()
        files._lock = threading.RLock()
        files.close()

    def run(self, write: bool, buffer: torch.Tensor, path: str, offset_bytes: int, *, validate: bool) -> int:
        """Read or write now; return 1, the operations done."""
        byte_view(buffer)  # raises for a tensor that cannot be moved, before a file is made
        opened = self._files.take(path, write=write)
        try:
            if write:
                opened.file.write(buffer, offset_bytes)
            else:
                opened.file.read(buffer, offset_bytes)
            if validate:
                _compare(buffer, opened.file, offset_bytes)
        finally:
            self._files.give_back(opened)
        return 1

    def start(self, write: bool, buffer: torch.Tensor, path: str, offset_bytes: int, *, validate: bool) -> int:
        """Begin to read or write; return 0."""
        self._make_room()
        byte_view(buffer)  # raises for a tensor that cannot be moved, before a file is made
        opened = self._files.take(path, write=write)
        try:
            if write:
                pending = opened.file.write_async(buffer, offset_bytes)
            else:
                pending = opened.file.read_async(buffer, offset_bytes)
        except BaseException:
            self._files.give_back(opened)
            raise
        self._pending.append(Operation(pending, opened, buffer, offset_bytes, validate))
        return 0

    def wait(self) -> int:
        """Wait for all operations; return their number, or raise the first error."""
        with self._waiting:  # of two concurrent callers, neither may return before the other's operations are done
            count = 0
            for _ in range(len(self._pending)):
                operation = self._pending[0]
                operation.settle(self._files)
                self._pending.popleft()
                count += 1
                if operation.error is not None:
                    self._errors.append(operation.error)
            if self._errors:
                first, *others = self._errors
                self._errors = []
                for other in others:
                    _log.error("another operation failed too: %s", other)
                raise first
            return count

    def close(self) -> None:
        """Finish the remaining operations when the handle is deleted."""
        try:
            self.wait()
        except Exception as error:  # noqa: BLE001 - there is no caller to raise it to
            _log.error("an operation that no call waited for failed: %s", error)
        self._files.close()

    def _make_room(self) -> None:
        """Settle operations, the oldest first, until few enough files are open; `wait` still counts them."""
        if self._files.used_count() < _OPEN_FILES_MAX:
            return
        for operation in list(self._pending):
            operation.settle(self._files)
            if self._files.used_count() < _OPEN_FILES_MAX:
                return


_all_operations: weakref.WeakSet[Operations] = weakref.WeakSet()


def _forget_parents() -> None:
    for operations in list(_all_operations):
        operations.forget_parent()


os.register_at_fork(after_in_child=_forget_parents)


def _compare(buffer: torch.Tensor, file: TensorFile, offset_bytes: int) -> None:
    """Read the moved bytes again, through the page cache, and compare.

    Raises:
        CorruptionError: The file has other bytes than the tensor.
    """
    ours = byte_view(buffer)
    same_file = f"/proc/self/fd/{file.fileno()}"  # the name may refer to another file by now
    try:
        with open(same_file if os.path.exists(same_file) else file.path, "rb") as again:
            again.seek(offset_bytes)
            for start_bytes in range(0, ours.numel(), _COMPARED_BYTES):
                piece = ours[start_bytes : start_bytes + _COMPARED_BYTES].cpu()
                data = bytearray(piece.numel())
                read_bytes = again.readinto(data)
                theirs = torch.frombuffer(data, dtype=torch.uint8)
                if read_bytes == piece.numel() and torch.equal(piece, theirs):
                    continue
                differing = piece[:read_bytes].ne(theirs[:read_bytes]).nonzero()
                first_bytes = int(differing[0]) if differing.numel() else read_bytes
                raise CorruptionError(
                    "read once more, it has other bytes than the tensor",
                    path=file.path,
                    offset_bytes=offset_bytes + start_bytes + first_bytes,
                )
    except OSError as error:
        raise StorageError(error.errno, f"reading {file.path} once more: {error.strerror}", file.path) from error
