"""The disk's own rate of writing: as `fastpersist tune` has found it, or by a probe of two seconds."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import time

from fastpersist.commit.filesystem import storage_errors
from fastpersist.config import tuning_path

__all__ = ["probed_rate", "rate_line", "tuned_rate"]

_PROBE_S = 2.0
_BLOCK_BYTES = 64 << 20
_PROBE_BYTES_MAX = 8 << 30
_FILE_BYTES_MAX = 1 << 16
_RATE = re.compile(r"^# Rate: ([0-9]{1,6}\.[0-9]{2}) GB/s", re.MULTILINE)


def rate_line(bytes_per_s: float) -> str:
    """Return the line of a tuning file that `tuned_rate` reads."""
    return f"Rate: {bytes_per_s / 1e9:.2f} GB/s until durable, the fastest choice (median)."


def tuned_rate(root: str) -> float | None:
    """Return what the tuning file of a directory's file system says, in bytes/s; None if it says nothing."""
    with storage_errors("opening", root):
        fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        path = tuning_path(fd)
    finally:
        os.close(fd)
    if path is None:
        return None
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            found = _RATE.search(file.read(_FILE_BYTES_MAX))
    except OSError:
        return None
    return float(found[1]) * 1e9 if found else None


def probed_rate(root: str) -> float:
    """Write a file into a directory for two seconds, sync it, remove it, and return the rate in bytes/s.

    Raises:
        StorageError: The directory takes no files, or has no room.
    """
    import torch

    from fastpersist import TensorFile

    path = os.path.join(root, f".probe-{secrets.token_hex(8)}")
    block = torch.randint(0, 256, (_BLOCK_BYTES,), dtype=torch.uint8)  # a disk that compresses gains nothing
    written_bytes = 0
    try:
        with TensorFile(path, "x") as file:
            started_s = time.monotonic()
            while time.monotonic() - started_s < _PROBE_S and written_bytes < _PROBE_BYTES_MAX:
                written_bytes += file.write(block, written_bytes)
            file.sync()
            return written_bytes / (time.monotonic() - started_s)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)
