"""Ranges of bytes in a source and in a file: joined, intersected, subtracted, mapped. Pure integers.

A box of a row-major tensor (offsets and lengths by dimension) lies in a file as runs of elements without gaps.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

__all__ = ["ByteRange", "Extent", "ExtentMap", "merged", "overlaps", "row_major_strides", "runs_of_box", "without"]


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Bytes of a source.

    Attributes:
        source: The index of the source.
        from_bytes: The offset of the first byte from the source's start.
        size_bytes: The number of bytes.
    """

    source: int
    from_bytes: int
    size_bytes: int


class Extent(NamedTuple):
    """Bytes of a file.

    Attributes:
        offset_bytes: The offset of the first byte.
        size_bytes: The number of bytes.
    """

    offset_bytes: int
    size_bytes: int

    @classmethod
    def between(cls, low_bytes: int, high_bytes: int) -> Extent:
        """Return the bytes from one offset up to another, exclusive."""
        return cls(low_bytes, high_bytes - low_bytes)

    @property
    def end_bytes(self) -> int:
        """The offset after the last byte."""
        return self.offset_bytes + self.size_bytes


def _end(extent: Extent) -> int:
    return extent.end_bytes


def overlaps(extent: Extent, taken: Sequence[Extent]) -> list[Extent]:
    """Return the parts of an extent that lie in `taken`, whose extents are sorted and do not overlap."""
    found = []
    index = bisect.bisect_right(taken, extent.offset_bytes, key=_end)
    while index < len(taken) and taken[index].offset_bytes < extent.end_bytes:
        low = max(extent.offset_bytes, taken[index].offset_bytes)
        high = min(extent.end_bytes, taken[index].end_bytes)
        if low < high:
            found.append(Extent.between(low, high))
        index += 1
    return found


def without(extent: Extent, taken: Sequence[Extent]) -> list[Extent]:
    """Return the parts of an extent that lie outside `taken`, whose extents are sorted and do not overlap."""
    left = []
    position = extent.offset_bytes
    for one in overlaps(extent, taken):
        if position < one.offset_bytes:
            left.append(Extent.between(position, one.offset_bytes))
        position = one.end_bytes
    if position < extent.end_bytes:
        left.append(Extent.between(position, extent.end_bytes))
    return left


def merged(extents: Iterable[Extent]) -> list[Extent]:
    """Return extents in order, with those that touch or overlap joined."""
    found: list[Extent] = []
    for one in sorted(extents):
        if found and one.offset_bytes <= found[-1].end_bytes:
            found[-1] = Extent.between(found[-1].offset_bytes, max(found[-1].end_bytes, one.end_bytes))
        else:
            found.append(one)
    return found


class ExtentMap:
    """Maps extents of a file to places in a part, a file that holds only their bytes, without gaps.

    Args:
        extents: Ascending; none overlaps another.
    """

    def __init__(self, extents: Sequence[Extent]) -> None:
        self.extents = list(extents)
        self._starts = [one.offset_bytes for one in extents]
        self._places = list(accumulate((one.size_bytes for one in extents), initial=0))

    @property
    def size_bytes(self) -> int:
        """Bytes of all extents."""
        return self._places[-1]

    def place_of(self, offset_bytes: int) -> int:
        """Return the place of a byte of the file; for one in no extent, the end of the extent before it."""
        index = bisect.bisect_right(self._starts, offset_bytes) - 1
        if index < 0:
            return 0
        return self._places[index] + min(offset_bytes - self._starts[index], self.extents[index].size_bytes)

    def belonging(self, place_bytes: int, size_bytes: int) -> list[Extent]:
        """Return where the bytes from a place on belong in the file."""
        found = []
        index = max(0, bisect.bisect_right(self._places, place_bytes) - 1)
        end = place_bytes + size_bytes
        while index < len(self.extents) and self._places[index] < end:
            low, high = max(place_bytes, self._places[index]), min(end, self._places[index + 1])
            if low < high:
                found.append(Extent(self._starts[index] + low - self._places[index], high - low))
            index += 1
        return found

    def within(self, offset_bytes: int, size_bytes: int) -> list[Extent]:
        """Return the parts of a range of the file that lie in these extents, ascending; each has one place."""
        return overlaps(Extent(offset_bytes, size_bytes), self.extents)


@functools.lru_cache(maxsize=256)
def row_major_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a row-major tensor without gaps, in elements."""
    return tuple(math.prod(shape[dimension + 1 :]) for dimension in range(len(shape)))


def runs_of_box(shape: tuple[int, ...], lengths: tuple[int, ...]) -> tuple[int, int]:
    """Return how many leading dimensions a box has to be split along into runs, and the elements of a run.

    Worked example: (2, 3, 8) of a tensor of (5, 4, 8) lies in two runs, one for each index of the first dimension, of
    3 * 8 elements: (1, 24).
    """
    run = 1
    for dimension in reversed(range(len(shape))):
        run *= lengths[dimension]
        if lengths[dimension] != shape[dimension]:
            return dimension, run
    return 0, run
