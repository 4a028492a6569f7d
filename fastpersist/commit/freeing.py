"""Free the space of a large replaced file in the background; and make room on a full disk.

The kernel frees a file's blocks and pages when its last name and its last descriptor are gone. Inside a rename this
takes a tenth of a second and more for a gigabyte. So this module keeps a descriptor of the file until the rename is
durable, and a thread then closes it.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from fastpersist.commit.filesystem import filesystem
from fastpersist.errors import NoSpaceError

__all__ = ["MakesRoom", "await_freed", "freed_later", "offer_room", "reserve"]

_LARGE_BYTES = 64 << 20  # less is freed faster than a thread starts

_lock = threading.RLock()  # re-entrant, like all locks here: a signal handler may save
_freeing: dict[threading.Thread, int | None] = {}  # its descriptor, until it closes that


class MakesRoom(Protocol):
    """Knows what may be removed when the disk is full."""

    def make_room(self, path: str) -> bool:
        """Free space for this file; return False if there is nothing to remove."""


_makers: weakref.WeakSet[MakesRoom] = weakref.WeakSet()


def offer_room(maker: MakesRoom) -> None:
    """Also ask this object, while it exists, when a file finds the disk full. Thread-safe."""
    with _lock:
        _makers.add(maker)


def reserve(fd: int, size_bytes: int, path: str) -> None:
    """Reserve space for a file; on a full disk, try once more after everything removable is gone. Thread-safe.

    Raises:
        NoSpaceError: The file system is full.
        StorageError: Any other error of the disk.
    """
    try:
        filesystem().allocate(fd, size_bytes, path)
    except NoSpaceError:
        was_freed = await_freed()
        with _lock:
            makers = list(_makers)
        was_made = any(maker.make_room(path) for maker in makers)
        if not (was_freed or was_made):
            raise
        filesystem().allocate(fd, size_bytes, path)


@contextmanager
def freed_later(path: str) -> Iterator[None]:
    """Keep the file with this name until the block ends; then a thread frees it. Thread-safe.

    Args:
        path: The name that is replaced in the block; nothing, a small file, or something else may have it.
    """
    fd = _held(path)
    try:
        yield
    finally:
        if fd is not None:
            _close_in_thread(fd)


def await_freed() -> bool:
    """Wait until the space of all files that were replaced is free; return False if it is already. Thread-safe."""
    with _lock:
        threads = list(_freeing)
    for thread in threads:
        thread.join()
    return bool(threads)


def _held(path: str) -> int | None:
    try:
        # O_PATH needs no right to read, and closing it drops no record lock of this process.
        fd = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    if os.fstat(fd).st_size >= _LARGE_BYTES:
        return fd
    os.close(fd)
    return None


def _close_in_thread(fd: int) -> None:
    def close() -> None:
        with _lock:
            _freeing[thread] = None  # before: a child would close what then has this number
        os.close(fd)
        with _lock:
            del _freeing[thread]

    thread = threading.Thread(target=close, name="fastpersist-freeing", daemon=True)
    with _lock:
        _freeing[thread] = fd
        try:
            thread.start()
        except RuntimeError:  # no more threads
            del _freeing[thread]
            os.close(fd)


def _close_in_child() -> None:
    """Close the descriptors that a child has inherited: they would keep the space as long as the child lives."""
    global _lock
    _lock = threading.RLock()
    for fd in _freeing.values():
        if fd is not None:
            os.close(fd)
    _freeing.clear()


os.register_at_fork(after_in_child=_close_in_child)
