"""The yardsticks of gpu.py: what the disk takes and gives, and what pinned copies move between host and device.

The disk is measured by fio, if it is installed, and always by a plain loop of threads with O_DIRECT, whose requests are
those that fio would make: 8 at a time, 8 MiB each. The better of the two is the yardstick. Nothing of fastpersist moves
these bytes; the loops are gpu_disk's.
"""

from __future__ import annotations

import mmap
import os
import sys
import types
from typing import Any

import torch
from gpu_disk import read_loop, remove, write_loop
from gpu_measure import Device, Row

__all__ = ["ColdFiles", "copy_row", "disk_read_rows", "disk_write_rows"]

_COPY_BYTES_MAX = 1 << 30


# ------------------------------------------------------------------------------------------------ the disk


def _fio() -> Any:
    """Return the module that runs fio; an ImportError says why there is none.

    The commands of fastpersist, which it is one of, import tabulate for their tables. A bare machine may lack it, and
    no table is made here: then something empty stands in for it.
    """
    try:
        from fastpersist.cli.bench import fio
    except ModuleNotFoundError as error:
        if error.name != "tabulate":
            raise
        stand_in: Any = types.ModuleType("tabulate")
        stand_in.tabulate = None
        before = {name for name in sys.modules if name.startswith("fastpersist.cli")}
        sys.modules["tabulate"] = stand_in
        try:
            from fastpersist.cli.bench import fio
        finally:
            del sys.modules["tabulate"]
        # Whoever wants a table later shall be told that tabulate is missing.
        for name in [name for name in sys.modules if name.startswith("fastpersist.cli") and name not in before]:
            del sys.modules[name]
    return fio


def disk_write_rows(directory: str, size_bytes: int) -> tuple[list[Row], str]:
    """Return the rows that write as much as a state has, and a note if fio is not among them."""
    path = os.path.join(directory, "yardstick")
    loop = Row(
        "disk write (O_DIRECT loop)", "yardstick", lambda: write_loop(path, size_bytes), size_bytes,
        clean=lambda: remove(path),
    )  # fmt: skip
    try:
        fio = _fio()
    except ImportError as error:
        return [loop], f"fio is not used: {error}"
    fio = fio.fio_write_row(size_bytes).run
    if fio is None:
        return [loop], "fio is not installed; the disk's yardstick is a loop of 8 threads, O_DIRECT, 8 MiB each"

    def run() -> float:
        sample = fio(path)
        return float(sample.seconds * size_bytes / sample.size_bytes)  # fio writes whole blocks

    return [Row("disk write (fio)", "yardstick", run, size_bytes, clean=lambda: remove(path)), loop], ""


def disk_read_rows(path: str, cold: ColdFiles) -> list[Row]:
    """Return the rows that read the very file that the others load."""
    size_bytes = os.path.getsize(path)
    loop = Row(
        "disk read (O_DIRECT loop)", "yardstick", lambda: read_loop(path), size_bytes, lambda: cold.prepare(path)
    )
    try:
        fio = _fio().fio_read_row(".pt").run
    except ImportError:
        return [loop]
    if fio is None:
        return [loop]

    def run() -> float:
        sample = fio(path)
        return float(sample.seconds * size_bytes / sample.size_bytes)

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
