"""The yardsticks of gpu.py: what the disk takes and gives, and what pinned copies move between host and device.

The disk is measured by fio, if it is installed, and always by a plain loop of threads with O_DIRECT, whose requests are
those that fio would make: 8 at a time, 8 MiB each. The better of the two is the yardstick. Nothing of fastpersist moves
these bytes.
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

import torch
from gpu_measure import Device, Row, remove, sync_directory

__all__ = ["ColdFiles", "copy_row", "disk_read_rows", "disk_write_rows", "probe_write_bytes_per_s"]

_CHUNK_BYTES = 8 << 20
_DEPTH = 8
_ALIGNMENT_BYTES = 4096
_COPY_BYTES_MAX = 1 << 30


# ------------------------------------------------------------------------------------------------ the disk


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
        sync_directory(os.path.dirname(path))
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
    """Return about what the disk takes, from one small file; sizes are chosen by it."""
    path = os.path.join(directory, "probe")
    try:
        return size_bytes / write_loop(path, size_bytes)
    finally:
        remove(path)


def disk_write_rows(directory: str, size_bytes: int) -> tuple[list[Row], str]:
    """Return the rows that write as much as a state has, and a note if fio is not among them."""
    path = os.path.join(directory, "yardstick")
    loop = Row(
        "disk write (O_DIRECT loop)", "yardstick", lambda: write_loop(path, size_bytes), size_bytes,
        clean=lambda: remove(path),
    )  # fmt: skip
    try:
        from fastpersist.cli.bench_fio import fio_version, fio_write_row

        version, fio = fio_version(), fio_write_row(size_bytes).run
    except ImportError as error:
        return [loop], f"fio is not used: {error}"
    if not version or fio is None:
        return [loop], "fio is not installed; the disk's yardstick is a loop of 8 threads, O_DIRECT, 8 MiB each"

    def run() -> float:
        sample = fio(path)
        return sample.seconds * size_bytes / sample.size_bytes  # fio writes whole blocks

    return [Row("disk write (fio)", "yardstick", run, size_bytes, clean=lambda: remove(path)), loop], ""


def disk_read_rows(path: str, cold: ColdFiles) -> list[Row]:
    """Return the rows that read the very file that the others load."""
    size_bytes = os.path.getsize(path)
    loop = Row(
        "disk read (O_DIRECT loop)", "yardstick", lambda: read_loop(path), size_bytes, lambda: cold.prepare(path)
    )
    try:
        from fastpersist.cli.bench_fio import fio_read_row, fio_version

        version, fio = fio_version(), fio_read_row(".pt").run
    except ImportError:
        return [loop]
    if not version or fio is None:
        return [loop]

    def run() -> float:
        sample = fio(path)
        return sample.seconds * size_bytes / sample.size_bytes

    return [Row("disk read (fio)", "yardstick", run, size_bytes, lambda: cold.prepare(path)), loop]


class ColdFiles:
    """Drops files from the page cache, and looks whether they are gone."""

    def __init__(self) -> None:
        self._left_bytes_max = 0
        self._why_unchecked = ""

    def prepare(self, path: str) -> None:
        """Drop a file, or all files of a directory."""
        if os.path.isdir(path):
            for name in os.listdir(path):
                self.prepare(os.path.join(path, name))
            return
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)  # dirty pages stay
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            self._left_bytes_max = max(self._left_bytes_max, self._cached_bytes(fd))
        finally:
            os.close(fd)

    def _cached_bytes(self, fd: int) -> int:
        """Ask mincore which pages of the file are in memory."""
        import ctypes

        size_bytes = os.fstat(fd).st_size
        if not size_bytes or self._why_unchecked:
            return 0
        page_bytes = mmap.PAGESIZE
        pages = (ctypes.c_ubyte * -(-size_bytes // page_bytes))()
        with mmap.mmap(fd, size_bytes, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE) as mapped:  # not touched
            start = ctypes.c_char.from_buffer(mapped)
            libc = ctypes.CDLL(None, use_errno=True)
            failed = libc.mincore(ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(size_bytes), pages)
            del start
        if failed:
            self._why_unchecked = os.strerror(ctypes.get_errno())
            return 0
        return int(torch.frombuffer(pages, dtype=torch.uint8).bitwise_and(1).sum(dtype=torch.int64)) * page_bytes

    def describe(self) -> str:
        """Say what was done before each load, and what came of it."""
        done = "before each load the file is dropped from the page cache by fsync + posix_fadvise(DONTNEED)"
        if self._why_unchecked:
            return f"{done}; not checked, as mincore fails: {self._why_unchecked}"
        if self._left_bytes_max:
            return f"{done}; up to {self._left_bytes_max} bytes were left: NOT COLD"
        return f"{done}; checked each time by mincore: none of it was left"


# ------------------------------------------------------------------------------------------------ pinned copies


def copy_row(device: Device, direction: str, size_bytes: int) -> Row:
    """Return the row of torch's own copies between device and pinned memory, the limit that PCIe sets.

    Args:
        device: With the CPU, the copy goes from memory to memory, and only shows that the script works.
        direction: "D2H" or "H2D".
        size_bytes: What one run moves, in copies of 1 GiB at most.
    """
    buffers: list[torch.Tensor] = []

    def prepare() -> None:
        if not buffers:
            count = min(size_bytes, _COPY_BYTES_MAX)
            buffers.append(torch.empty(count, dtype=torch.uint8, pin_memory=device.is_cuda).fill_(1))
            buffers.append(torch.ones(count, dtype=torch.uint8, device=device.torch))

    def run() -> None:
        host, other = buffers
        source, target = (other, host) if direction == "D2H" else (host, other)
        left_bytes = size_bytes
        while left_bytes > 0:
            count = min(left_bytes, source.numel())
            target[:count].copy_(source[:count], non_blocking=True)
            left_bytes -= count
        device.synchronize()

    kind = f"pinned {direction} copy" if device.is_cuda else f"{direction} (rehearsal: from memory to memory)"
    return Row(kind, "yardstick", run, size_bytes, prepare)
