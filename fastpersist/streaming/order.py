"""The order in which units are used: learned while the model runs, and predicted from the last two. Integers only."""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["UseOrder"]


class UseOrder:
    """Predicts the next unit: the one that followed the last two units the last time.

    If this pair was not seen yet, it predicts the unit that last followed the second of them. If that is unknown, too,
    it predicts the lowest number that was never used: modules are mostly registered in the order of use, but norms are
    often registered after the modules that they precede. The order is cyclic: after the last unit comes the first.

    Args:
        count: How many units there are; they are numbered in the order of registration.

    Thread safety: none.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._after_pair: dict[tuple[int, int], int] = {}
        self._after: dict[int, int] = {}
        self._used: dict[int, None] = {}  # in the order of the first use
        self._last = -1
        self._current = -1

    def note(self, unit: int) -> None:
        """Note that a unit is used now."""
        if self._current >= 0:
            self._after_pair[self._last, self._current] = unit
            self._after[self._current] = unit
        self._last, self._current = self._current, unit
        self._used[unit] = None

    def foretell(self) -> Iterator[int]:
        """Yield the units that are likely to come, the next one first, without an end."""
        last, current = self._last, self._current
        unused = (number for number in range(self._count) if number not in self._used)
        guessed: dict[int, int] = {}  # predicted successors of units of which nothing is known yet
        while self._count:
            following = self._after_pair.get((last, current))
            if following is None:
                following = self._after.get(current, guessed.get(current))
            if following is None:
                following = guessed[current] = next(unused, next(iter(self._used), 0))
            last, current = current, following
            yield following
