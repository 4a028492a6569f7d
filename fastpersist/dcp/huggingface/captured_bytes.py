"""Provides the captured bytes of a rank's items in order, with few windows of bytes in memory at a time.

A snapshot gives its bytes only to a `Writer`, in order and once, because they may be in the arena or still in the
tensors. Here, this writer fills an in-memory file that consists of a few windows, used in turn. While one window is
written to the disk the next one is filled, so little is in memory beside the arena, however large the tensors are.
"""

from __future__ import annotations

import mmap
import os
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from fastpersist.config import BLOCK_BYTES
from fastpersist.dcp.capture import ShardedCapture
from fastpersist.formats.layout import align_up
from fastpersist.transfer.writer import Pieces, Writer

__all__ = ["PIECE_BYTES", "WINDOW_COUNT", "CapturedBytes"]

PIECE_BYTES = 8 << 20
"""A tensor is captured in sources of this many bytes, since a source is taken as a whole."""

WINDOW_COUNT = 4
"""A window's memory is used again after this many windows."""

_WINDOW_BYTES = 16 << 20
_ENGINE = "threads-buffered"


class _Span(NamedTuple):
    """Contiguous bytes of an item in a window."""

    slot: int
    at_bytes: int
    size_bytes: int


class _Expected(NamedTuple):
    """A source that is still to be taken, and where its first byte goes."""

    slot: int
    source: int
    size_bytes: int
    offset_bytes: int


class CapturedBytes:
    """Gives out the bytes of items, in the order of `expect`. One thread uses it.

    Args:
        capture: Holds the bytes; its sources are of PIECE_BYTES at most.
    """

    def __init__(self, capture: ShardedCapture) -> None:
        self._capture = capture
        self._window_bytes = align_up(max(_WINDOW_BYTES, PIECE_BYTES + BLOCK_BYTES), mmap.PAGESIZE)
        self._memory: torch.Tensor | None = None
        self._fd = -1
        self._turn = 0
        self._left: deque[_Expected] = deque()
        self._spans: deque[_Span] = deque()

    def close(self) -> None:
        """Give the memory back as soon as no part of it is in use."""
        self._memory = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def expect(self, slot: int, offset_bytes: int) -> None:
        """Append an item to those that will be asked for.

        Args:
            slot: The item's place among those that were settled.
            offset_bytes: Where its first byte goes. It lies in memory so that direct I/O takes its blocks from there.
        """
        for source, size_bytes in self._capture.pieces_of(slot):
            self._left.append(_Expected(slot, source, size_bytes, offset_bytes))
            offset_bytes += size_bytes

    def parts_of(self, slot: int, before_turn: Callable[[], None]) -> Iterator[torch.Tensor]:
        """Yield the captured bytes of an item, part by part; nothing of an item that is a private copy.

        Args:
            slot: The item's place among those that were settled.
            before_turn: Called before a window is filled. When it returns, what was yielded before the last
                WINDOW_COUNT calls, this one included, is no longer in use.

        Raises:
            StorageError: There is no memory.
        """
        while True:
            if not self._spans and self._left and self._left[0].slot == slot:
                before_turn()
                self._fill()
            if not self._spans or self._spans[0].slot != slot or self._memory is None:
                return
            span = self._spans.popleft()
            yield self._memory[span.at_bytes : span.at_bytes + span.size_bytes]

    def _fill(self) -> None:
        """Take as many bytes as a window holds."""
        if self._memory is None:
            self._fd = os.memfd_create("fastpersist", os.MFD_CLOEXEC)
            os.ftruncate(self._fd, WINDOW_COUNT * self._window_bytes)
            self._memory = torch.frombuffer(mmap.mmap(self._fd, WINDOW_COUNT * self._window_bytes), dtype=torch.uint8)
        start_bytes, self._turn = self._turn * self._window_bytes, (self._turn + 1) % WINDOW_COUNT
        end_bytes = start_bytes + self._window_bytes
        at_bytes = start_bytes
        pieces = Pieces()
        while self._left:
            slot, source, size_bytes, offset_bytes = self._left[0]
            gap_bytes = (offset_bytes - at_bytes) % BLOCK_BYTES
            if at_bytes + gap_bytes + size_bytes > end_bytes:
                break
            self._left.popleft()
            if gap_bytes:
                pieces.add_bytes(bytes(gap_bytes))
            pieces.add_captured(self._capture.snapshot, source, size_bytes, None)
            at_bytes += gap_bytes
            last = self._spans[-1] if self._spans else None
            if last is not None and last.slot == slot and not gap_bytes:
                self._spans[-1] = last._replace(size_bytes=last.size_bytes + size_bytes)
            else:
                self._spans.append(_Span(slot, at_bytes, size_bytes))
            at_bytes += size_bytes
        with Writer(self._fd, "memory for what is captured", engine=_ENGINE, sparing=True) as writer:
            writer.seek(start_bytes)
            writer.append(pieces)
            writer.finish()
