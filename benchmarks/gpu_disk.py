"""Disk and host memory without torch: loops of direct writes and reads, syncing, free space.

gpu.py measures the disk with this before it starts the processes that import torch. No code of fastpersist moves these
bytes; gpu_yardsticks uses the loops as yardsticks.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import mmap
import os
import threading
import time
from collections.abc import Callable

__all__ = [
    "available_host_bytes",
    "free_bytes",
    "memory_file_system",
    "probe_write_bytes_per_s",
    "read_loop",
    "remove",
    "sync",
    "write_loop",
]

_CHUNK_BYTES = 8 << 20
_DEPTH = 8
_ALIGNMENT_BYTES = 4096


def _open_direct(path: str, flags: int) -> tuple[int, bool]:
    """Open a file past the page cache, or, where the file system has no such thing, through it; say which."""
    try:
        return os.open(path, flags | os.O_DIRECT | os.O_CLOEXEC, 0o600), True
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, flags | os.O_CLOEXEC, 0o600), False


def _in_threads(work: Callable[[memoryview, int, int], None], size_bytes: int) -> float:
    """Call `work(buffer, offset, bytes)` for each chunk, from as many threads as there shall be requests in flight.

    Returns:
        The time.perf_counter() when the threads began; their buffers are filled before.
    """
    offsets = itertools.count(0, _CHUNK_BYTES)  # one count for all threads, as next() of it is one step
    errors: list[BaseException] = []

    def run(buffer: mmap.mmap) -> None:
        with memoryview(buffer) as view:
            try:
                for offset in offsets:
                    if offset >= size_bytes or errors:
                        break
                    work(view, offset, min(_CHUNK_BYTES, size_bytes - offset))
            except OSError as error:
                errors.append(error)

    buffers = [mmap.mmap(-1, _CHUNK_BYTES) for _ in range(_DEPTH)]  # page-aligned
    numbers = os.urandom(_CHUNK_BYTES)  # zeros may cost a disk less
    for buffer in buffers:
        buffer.write(numbers)
    threads = [threading.Thread(target=run, args=(buffer,), name="yardstick") for buffer in buffers]
    started_s = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for buffer in buffers:
        buffer.close()
    if errors:
        raise errors[0]
    return started_s


def write_loop(path: str, size_bytes: int) -> float:
    """Write a fresh, preallocated file, and sync it and its name; return the seconds."""
    whole_bytes = -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    fd, _ = _open_direct(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)

    def write(buffer: memoryview, offset: int, wanted: int) -> None:
        done = 0
        while done < wanted:
            done += os.pwrite(fd, buffer[done:wanted], offset + done)

    try:
        begun_s = time.perf_counter()
        with contextlib.suppress(OSError):  # no fallocate here: the C library would write single bytes
            os.posix_fallocate(fd, 0, whole_bytes)
        allocated_s = time.perf_counter() - begun_s
        started_s = _in_threads(write, whole_bytes)
        os.fsync(fd)
        sync(os.path.dirname(path))
        return time.perf_counter() - started_s + allocated_s
    finally:
        os.close(fd)


def read_loop(path: str) -> float:
    """Read a whole file; return the seconds."""
    fd, is_direct = _open_direct(path, os.O_RDONLY)
    size_bytes = os.fstat(fd).st_size

    def read(buffer: memoryview, offset: int, wanted: int) -> None:
        done = 0
        # Direct reads want whole blocks: the last request reaches beyond the end of the file, and is cut there.
        asked = -(-wanted // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES if is_direct else wanted
        while done < wanted:
            got = os.preadv(fd, [buffer[done:asked]], offset + done)
            if not got:
                raise OSError(errno.EIO, f"{path} ends early")
            done += got

    try:
        started_s = _in_threads(read, size_bytes)
        return time.perf_counter() - started_s
    finally:
        os.close(fd)


def probe_write_bytes_per_s(directory: str, size_bytes: int) -> float:
    """Return the approximate write rate of the disk, from one small file; gpu.py chooses sizes by it."""
    path = os.path.join(directory, "probe")
    try:
        return size_bytes / write_loop(path, size_bytes)
    finally:
        remove(path)


def sync(path: str) -> None:
    """Make a file of another writer, or the names in a directory, durable."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def remove(path: str) -> None:
    """Remove a file or a directory, if it is there, durably, so that the next run does not pay for it."""
    if os.path.isdir(path):
        for name in os.listdir(path):
            remove(os.path.join(path, name))
        os.rmdir(path)
    elif os.path.lexists(path):
        os.unlink(path)
        sync(os.path.dirname(path))


def free_bytes(directory: str) -> int:
    """Return the bytes that a user may still write to a file system."""
    room = os.statvfs(directory)
    return room.f_bavail * room.f_frsize


def available_host_bytes() -> int:
    """Return how much memory a process could still take, page cache that can be dropped included."""
    with open("/proc/meminfo") as lines:
        found = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
    return found.get("MemAvailable", found.get("MemFree", 0))


def memory_file_system() -> str | None:
    """Return the tmpfs with most room that this process may write to."""
    with open("/proc/self/mounts") as mounts:
        entries = [line.split() for line in mounts]
    points = [entry[1].encode().decode("unicode_escape") for entry in entries if entry[2] == "tmpfs"]  # blanks: \040
    points = [point for point in points if not point.startswith(("/sys/", "/proc/"))]  # those are the kernel's
    usable = [point for point in points if os.path.isdir(point) and os.access(point, os.W_OK)]
    return max(usable, key=free_bytes, default=None)
