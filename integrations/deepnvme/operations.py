"""What a handle of `handles` has under way, and the files that it has open for that.

What the names, arguments and results are is left to `handles`, how bytes move to `fastpersist.TensorFile`.
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
"""With operations under way: each has a queue, and perhaps threads, of its own."""

_COMPARED_BYTES = 8 << 20


# --------------------------------------------------------------------------------------------------- files


@dataclass(eq=False)
class Opened:
    """A file and how many operations use it."""

    file: TensorFile
    key: tuple[int, int, bool]  # device, inode, and whether it may be written to
    users: int = 0


@dataclass(frozen=True)
class Options:
    """How files are opened."""

    chunk_bytes: int
    queue_depth: int
    threads: int | None


class Files:
    """The files of a handle: open while operations use them, the last one read until there is another. Thread-safe.

    They are told apart by inode, looked up at each operation, so a file that was replaced is never taken for the new
    one. All operations on an inode share one opening where they can: its edges are then written by one queue.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self._lock = threading.RLock()  # re-entrant, like all locks here: a signal handler may save
        self._opened: dict[tuple[int, int, bool], Opened] = {}
        self._idle: Opened | None = None

    def used_count(self) -> int:
        return len(self._opened) - (self._idle is not None)

    def take(self, path: str, *, write: bool) -> Opened:
        """Return an opening of what has this name now, which is made for writing if there is nothing."""
        with self._lock:
            try:
                status = os.stat(path)
            except OSError:  # the opening says it better
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
            if opened.key[2]:  # cheap to open again, and if it was removed meanwhile its space is wanted
                self._close(opened)
                return
            idle, self._idle = self._idle, opened
            if idle is not None:
                self._close(idle)

    def close(self) -> None:
        """Close all files; operations on them are waited for."""
        with self._lock:
            self._idle = None
            for opened in list(self._opened.values()):
                self._close(opened)

    def _open(self, path: str, write: bool) -> Opened:
        file = self._created(path) if write else self._tensor_file(path, "r")
        status = os.fstat(file.fileno())
        key = (status.st_dev, status.st_ino, write)
        there = self._opened.get(key)
        if there is not None:  # the name has come back to a file that is in use
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
        return self._tensor_file(path, "r+")  # somebody has just made it; or there is no such directory

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
    """An asynchronous operation, from its start until `wait` has told of it."""

    pending: PendingIO
    opened: Opened
    buffer: torch.Tensor | None
    offset_bytes: int
    validate: bool
    error: Exception | None = None
    lock: threading.RLock = field(default_factory=threading.RLock)

    def settle(self, files: Files) -> None:
        """Wait for it, look at what came of it, and give its file back. May be called again."""
        with self.lock:
            if self.buffer is None:
                return
            try:
                self.pending.wait()
                if self.validate:
                    _compare(self.buffer, self.opened.file, self.offset_bytes)
            except Exception as error:  # noqa: BLE001 - wait() raises it, whatever it is
                self.error = error
            self.buffer = None
            files.give_back(self.opened)


class Operations:
    """What a handle has under way."""

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
        """In a forked child: what is under way is the parent's; only descriptors have to be closed here."""
        files = self._files
        self._renew()
        files._lock = threading.RLock()
        files.close()

    def run(self, write: bool, buffer: torch.Tensor, path: str, offset_bytes: int, *, validate: bool) -> int:
        """Read or write now; return 1, the operations done."""
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
        """Wait for all; return how many they were, or raise the first error."""
        with self._waiting:  # who waits beside another must not return before what that one waits for
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
        """The handle is gone: finish what nobody has waited for."""
        try:
            self.wait()
        except Exception as error:  # noqa: BLE001 - nobody is left to raise it to
            _log.error("an operation that nobody waited for failed: %s", error)
        self._files.close()

    def _make_room(self) -> None:
        """Settle operations, the oldest first, until few enough files are open; `wait` still tells of them."""
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
    """Read what was moved once more, through the page cache, and compare.

    Raises:
        CorruptionError: The file has other bytes than the tensor.
    """
    ours = byte_view(buffer)
    same_file = f"/proc/self/fd/{file.fileno()}"  # whatever has the name by now
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
