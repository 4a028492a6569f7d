"""Places in the ring: a queue of bytes in one piece of memory, given back in any order and reused in queue order.

Integers only; `reading` has the memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["ByteRing", "Room", "ring_bytes_for"]


@dataclass(eq=False, slots=True)
class Room:
    """Some blocks of the ring that were taken together.

    Attributes:
        offsets: The offset of each block, from the start of the ring.
        end: Where the next room begins, counted in bytes that were ever taken.
        is_free: The room was given back, though an older room may still hold up its bytes.
    """

    offsets: tuple[int, ...]
    end: int
    is_free: bool = False


class ByteRing:
    """A queue of bytes. A block never wraps: where it does not fit before the end, it begins at the start.

    Args:
        size_bytes: The size of the ring.

    Thread safety: none.
    """

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._head = 0  # both only grow; modulo the size they are places
        self._tail = 0
        self._rooms: deque[Room] = deque()

    def take(self, sizes: Sequence[int]) -> Room | None:
        """Take room for blocks of these sizes; None if there is not enough now."""
        head = self._head
        offsets = []
        for size in sizes:
            place = head % self.size_bytes if self.size_bytes else 0
            if place + size > self.size_bytes:
                head += self.size_bytes - place
                place = 0
            offsets.append(place)
            head += size
            if head - self._tail > self.size_bytes:
                return None
        self._head = head
        room = Room(tuple(offsets), head)
        self._rooms.append(room)
        return room

    def give_back(self, room: Room) -> None:
        """Give a room back. Its bytes can be taken again when all older, or all newer, rooms are given back, too."""
        room.is_free = True
        while self._rooms and self._rooms[0].is_free:
            self._tail = self._rooms.popleft().end
        while self._rooms and self._rooms[-1].is_free:
            self._rooms.pop()
            self._head = self._rooms[-1].end  # there is one: the oldest is not free
        if not self._rooms:
            self._head = self._tail = 0  # from the start, so that anything fits that is not larger than the ring


def ring_bytes_for(units: Iterable[Sequence[int]]) -> int:
    """Return how large a ring must be to hold any two units at once, wherever it wraps.

    Args:
        units: The sizes of the blocks of each unit.
    """
    units = list(units)
    totals = sorted((sum(blocks) for blocks in units), reverse=True)
    if len(totals) < 2:
        return sum(totals)
    return sum(totals[:2]) + max(max(blocks, default=0) for blocks in units)
