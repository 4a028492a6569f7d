"""The yardsticks of gpu.py: the rates of the disk, and of pinned copies between host and device.

The disk is measured by fio, if it is installed, and always by a plain loop of threads with O_DIRECT, whose requests are
those that fio would make: 8 at a time, 8 MiB each. The better of the two is the yardstick. Nothing of fastpersist moves
these bytes; the loops are gpu_disk's.
"""

from __future__ import annotations

import os

import torch
from gpu_disk import read_loop, remove, write_loop
from gpu_measure import Device, Row

from fastpersist.cli.bench.fio import fio_read_row, fio_write_row
from fastpersist.cli.bench.load_rows import PageCache

__all__ = ["copy_row", "disk_read_rows", "disk_write_rows"]

_COPY_BYTES_MAX = 1 << 30


# ------------------------------------------------------------------------------------------------ the disk


def disk_write_rows(directory: str, size_bytes: int) -> tuple[list[Row], str]:
    """Return the rows that write as much as a state has, and a note if fio is not among them."""
    path = os.path.join(directory, "yardstick")
    loop = Row(
        "disk write (O_DIRECT loop)", "yardstick", lambda: write_loop(path, size_bytes), size_bytes,
        clean=lambda: remove(path),
    )  # fmt: skip
    fio = fio_write_row(size_bytes).run
    if fio is None:
        return [loop], "fio is not installed; the disk's yardstick is a loop of 8 threads, O_DIRECT, 8 MiB each"

    def run() -> float:
        sample = fio(path)
        return float(sample.seconds * size_bytes / sample.size_bytes)  # fio writes whole blocks

    return [Row("disk write (fio)", "yardstick", run, size_bytes, clean=lambda: remove(path)), loop], ""


def disk_read_rows(path: str, cold: PageCache) -> list[Row]:
    """Return the rows that read the very file that the others load."""
    size_bytes = os.path.getsize(path)
    loop = Row(
        "disk read (O_DIRECT loop)", "yardstick", lambda: read_loop(path), size_bytes, lambda: cold.prepare(path)
    )
    fio = fio_read_row(".pt").run
    if fio is None:
        return [loop]

    def run() -> float:
        sample = fio(path)
        return float(sample.seconds * size_bytes / sample.size_bytes)

    return [Row("disk read (fio)", "yardstick", run, size_bytes, lambda: cold.prepare(path)), loop]


# ------------------------------------------------------------------------------------------------ pinned copies


def copy_row(device: Device, direction: str, size_bytes: int) -> Row:
    """Return the row of torch's own copies between device and pinned memory, the limit that PCIe sets.

    Args:
        device: The device. If it is the CPU, the copy goes from memory to memory, and only shows that the script works.
        direction: "D2H" or "H2D".
        size_bytes: The bytes that one run moves, in copies of 1 GiB at most.
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
