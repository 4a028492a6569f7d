"""Writes whole pages to any place of a new file, for long-lived writers with their own buffers.

`writer` takes the ring, which all transfers of the process share, and must give it back soon. `TensorFile` is for files
that others may also write, so it locks them, which conflicts with the record lock of a pending file. This module does
neither.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from fastpersist import _native
from fastpersist.config import BLOCK_BYTES, config_for
from fastpersist.errors import ConfigError
from fastpersist.transfer.engine_selection import announce_engine, engine_ladder, refuse_null_engine, require_engine
from fastpersist.transfer.tensor_requests import PendingIO

__all__ = ["PageWriter", "page_tensor"]

_QUEUE_DEPTH = 64
_STAGING_BYTES = 64 << 20


def page_tensor(size_bytes: int) -> torch.Tensor:
    """Make an uninitialised uint8 tensor of host memory that begins on a page."""
    memory = torch.empty(size_bytes + BLOCK_BYTES, dtype=torch.uint8, device="cpu")
    start_bytes = -memory.data_ptr() % BLOCK_BYTES
    return memory[start_bytes : start_bytes + size_bytes]


class PageWriter:
    """Writes pages to an open file, many at once. Close it before the descriptor.

    Args:
        fd: A descriptor, open for reading and writing; no other code writes to the file. The caller closes it. Its flag
            O_DIRECT may be changed.
        path: The path of the file, for messages.
        engine: Engine name or "auto".

    Raises:
        ConfigError, UnsupportedError: Unknown or unusable engine.

    Thread safety: any thread; not in a forked child.
    """

    def __init__(self, fd: int, path: str, *, engine: str = "auto") -> None:
        self._path = path
        refuse_null_engine(require_engine(engine))
        ladder = engine_ladder(engine, fd, one_writer=True)
        if engine == "auto" and _native.block_bytes(fd) > BLOCK_BYTES:
            ladder = ["threads-buffered"]  # a page is less than what direct I/O can write there
        self._native = _open(fd, path, ladder)
        announce_engine(path, engine, self._native.engine, self._native.demotions)

    def write_async(self, pages: torch.Tensor, offset_bytes: int) -> PendingIO:
        """Start to write a uint8 tensor of host memory, contiguous, which must not change until that is done.

        Args:
            pages: Whole pages; the tensor begins on a page.
            offset_bytes: The offset in the file that they are written to, a multiple of a page.

        Raises:
            ConfigError: The tensor is not whole pages, or the offset is no multiple of a page.
        """
        size_bytes = pages.numel()
        if (size_bytes | offset_bytes | pages.data_ptr()) % BLOCK_BYTES:
            raise ConfigError(f"{size_bytes} bytes for offset {offset_bytes} of {self._path} are no whole pages")
        request = self._native.submit(True, [[(pages.data_ptr(), size_bytes, offset_bytes)]], pages)
        return PendingIO(request, self._path, None)

    def close(self) -> None:
        """Wait for all writes, and give everything back. Errors that no call has asked about are lost."""
        self._native.wait_for_all()
        self._native.close()
        _native.forget_done_requests()


def _open(fd: int, path: str, ladder: Sequence[str]) -> _native.RandomAccess:
    tuned = config_for(fd)
    return _native.RandomAccess(
        fd=fd,
        buffered_fd=-1,
        direct_lock_fd=-1,
        edge_lock_fd=-1,
        path=os.fsencode(path),
        engines=ladder,
        edge_engines=[],
        queue_depth=tuned.queue_depth or _QUEUE_DEPTH,
        thread_count=tuned.threads,
        chunk_bytes=tuned.chunk_bytes,
        staging_bytes=_STAGING_BYTES,
    )
