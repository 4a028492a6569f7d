"""The bare loop: as many bytes as a checkpoint, out of one fixed buffer, straight to the disk, and nothing else.

It copies nothing, computes nothing and touches no cache that training uses. So what a step beside it loses, the disk
and the kernel take, and no way of saving can be expected to take less.
"""

from __future__ import annotations

import errno
import itertools
import mmap
import os
import threading
import time

from overlap_ways import Unavailable

__all__ = ["BareLoop"]

_ALIGNMENT_BYTES = 4096


class BareLoop:
    """One writing of a fresh, preallocated file by direct I/O. One owner thread; its own threads only write.

    Call prepare, start, join and remove in this order, as often as wanted.

    Args:
        directory: Where the file is made.
        size_bytes: How much is written, rounded up to what direct I/O takes.
        depth: Requests in flight, each waited for by a thread of its own.
        chunk_bytes: Of a request, a multiple of 4096.
    """

    def __init__(self, directory: str, size_bytes: int, *, depth: int, chunk_bytes: int) -> None:
        self._directory = directory
        self._size_bytes = -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        self._depth = depth
        self._buffer = mmap.mmap(-1, chunk_bytes)
        self._buffer.write(os.urandom(chunk_bytes))  # zeros may cost a disk less
        self._fd = -1
        self._path = os.path.join(directory, ".bare-loop")
        self._threads: list[threading.Thread] = []
        self._errors: list[BaseException] = []

    def prepare(self) -> None:
        """Make the file and the threads, which then wait for `start`.

        Raises:
            Unavailable: The file system has no direct I/O.
        """
        try:
            self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            raise Unavailable("this file system has no direct I/O") from error
        os.posix_fallocate(self._fd, 0, self._size_bytes)
        self._offsets = itertools.count(0, len(self._buffer))
        self._go = threading.Event()
        self._left = self._depth
        self._lock = threading.Lock()
        self._finished_at = 0.0
        self._threads = [threading.Thread(target=self._write, name="bare-loop") for _ in range(self._depth)]
        for thread in self._threads:
            thread.start()

    def start(self) -> None:
        """Let the threads go, and return at once."""
        self._started_at = time.perf_counter()
        self._go.set()

    def join(self) -> float:
        """Wait until the bytes are durable; return the seconds that took since `start`."""
        for thread in self._threads:
            thread.join()
        if self._errors:
            raise self._errors[0]
        return self._finished_at - self._started_at

    def remove(self) -> None:
        """Remove the file, and wait until that is on disk too, lest it cost the next step its time."""
        if self._fd < 0:
            return
        if not self._go.is_set():  # never started, so there is nothing to write
            self._offsets = itertools.count(self._size_bytes)
            self._go.set()
        for thread in self._threads:
            thread.join()
        os.close(self._fd)
        self._fd = -1
        os.unlink(self._path)
        directory_fd = os.open(self._directory, os.O_RDONLY)
        try:
            os.fsync(directory_fd)
        finally:
            os.close(directory_fd)

    def _write(self) -> None:
        """Write one chunk after the other until none is left; the last thread syncs."""
        self._go.wait()
        view = memoryview(self._buffer)
        try:
            for offset in self._offsets:  # one count for all threads, as next() of it is one step
                if offset >= self._size_bytes:
                    break
                done = 0
                wanted = min(len(view), self._size_bytes - offset)
                while done < wanted:
                    done += os.pwrite(self._fd, view[done:wanted], offset + done)
        except OSError as error:
            self._errors.append(error)
        finally:
            view.release()
            with self._lock:
                self._left -= 1
                is_last = self._left == 0
            if is_last:
                try:
                    os.fdatasync(self._fd)
                except OSError as error:
                    self._errors.append(error)
                self._finished_at = time.perf_counter()

    def once(self) -> float:
        """Write the bytes with nothing beside; return the seconds until they are durable."""
        try:
            self.prepare()
            self.start()
            return self.join()
        finally:
            self.remove()
