"""Measures the steps of optimizers: their delay after a save, and their lengths during a save and without one.

The writer spreads its work over the time from a save to the next step. This time is measured for each optimizer, from a
save to the beginning of the next step, where the gate is. With gate="manual" it ends at the caller's wait, or at the
end of the step if there was none: the beginning would be too early if forward and backward run inside `step(closure)`.
"""

from __future__ import annotations

import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence

from torch.optim.optimizer import Optimizer

from fastpersist import _native

__all__ = ["Spread", "note_save", "note_step", "save_begun", "save_over", "spread_s", "take_step_times"]

PACE_SHARE = 0.8
"""The part of that time over which the writes are spread; the rest is a margin for steps that come sooner."""

_SAMPLE_COUNT = 5


class _Clock:
    """The times of one optimizer: the start of the last save before a step, delays of steps, and their lengths."""

    __slots__ = ("delays_s", "is_beside", "is_manual", "lengths", "started_s", "stepped_s")

    def __init__(self) -> None:
        self.started_s: float | None = None
        self.is_manual = False
        self.delays_s: deque[float] = deque(maxlen=_SAMPLE_COUNT)
        self.stepped_s: float | None = None
        self.is_beside = False  # a save was under way since that step
        self.lengths = {False: (0, 0.0), True: (0, 0.0)}  # beside a save or not: how many, and seconds

    def note_length(self, now_s: float) -> None:
        """Count the time from one step to the next."""
        if self.stepped_s is not None:
            beside = self.is_beside or len(_under_way) > 0
            count, seconds = self.lengths[beside]
            self.lengths[beside] = count + 1, seconds + now_s - self.stepped_s
        self.stepped_s, self.is_beside = now_s, len(_under_way) > 0


_under_way: weakref.WeakSet[object] = weakref.WeakSet()  # saves; one that is dropped unended is forgotten
_clocks: weakref.WeakKeyDictionary[Optimizer, _Clock] = weakref.WeakKeyDictionary()
_lock = threading.RLock()  # re-entrant, like all locks here: a signal handler may save


def note_save(optimizers: Sequence[Optimizer], *, manual: bool) -> None:
    """Note that a save begins, which the next step of one of these optimizers waits for; `manual`: with that gate."""
    now_s = time.monotonic()
    with _lock:
        for optimizer in optimizers:
            clock = _clocks.setdefault(optimizer, _Clock())
            clock.started_s, clock.is_manual, clock.is_beside = now_s, manual, True


def note_step(optimizer: Optimizer, *, manual: bool) -> None:
    """Note that an optimizer is about to step; with `manual`: that its caller has waited, or that it has stepped."""
    clock = _clocks.get(optimizer)
    if clock is None:
        return
    with _lock:
        now_s = time.monotonic()
        if not manual:
            clock.note_length(now_s)
        if clock.started_s is not None and clock.is_manual == manual:
            clock.delays_s.append(now_s - clock.started_s)
            clock.started_s = None


def save_begun(save: object) -> None:
    """Note that a save is under way, which steps may be beside of."""
    with _lock:
        _under_way.add(save)


def save_over(save: object) -> None:
    """Note that a save is over, however it ended."""
    with _lock:
        _under_way.discard(save)


def take_step_times(optimizers: Sequence[Optimizer]) -> tuple[float, float]:
    """Return the mean seconds from step to step since the last call, without a save and beside one.

    0.0 says that there was no such step.

    Args:
        optimizers: The first of them that has stepped counts.
    """
    with _lock:
        for optimizer in optimizers:
            clock = _clocks.get(optimizer)
            if clock is not None and any(count for count, _ in clock.lengths.values()):
                alone, beside = (seconds / max(count, 1) for count, seconds in clock.lengths.values())
                clock.lengths = dict.fromkeys(clock.lengths, (0, 0.0))
                return alone, beside
    return 0.0, 0.0


def _forget_saves() -> None:
    global _lock
    _lock = threading.RLock()
    _under_way.clear()


os.register_at_fork(after_in_child=_forget_saves)


def spread_s(optimizers: Sequence[Optimizer]) -> float:
    """Return the seconds over which to spread the writing of a save; 0.0 while no step has followed one.

    It is a share of the shortest of the last delays: finishing too early costs next to nothing, and finishing too late
    costs a copy at the gate.
    """
    with _lock:
        known = [_clocks[optimizer].delays_s for optimizer in optimizers if optimizer in _clocks]
        return PACE_SHARE * min((min(delays_s) for delays_s in known if delays_s), default=0.0)


class Spread:
    """The files of one save, written one after the other until shortly before the next step.

    Args:
        at_most_s: Seconds, the longest time to spread over.
    """

    def __init__(self, at_most_s: float = math.inf) -> None:
        self._at_most_s = at_most_s
        self._optimizers: list[Optimizer] = []
        self._files: list[tuple[_native.Snapshot, int]] = []
        self._started_s: float | None = None  # of the first file that a step waits for
        self._spread_s = 0.0

    def expect_step(self, optimizers: Sequence[Optimizer], *, manual: bool) -> None:
        """Expect the next step of these optimizers, which a file's tensors belong to, and measure when it comes."""
        new = [one for one in optimizers if not any(one is known for known in self._optimizers)]
        if not new:
            return
        if self._started_s is None:
            self._started_s = time.monotonic()
            self._spread_s = min(spread_s(new), self._at_most_s)
        note_save(new, manual=manual)
        self._optimizers += new

    def add_file(self, snapshot: _native.Snapshot, size_bytes: int) -> None:
        """Add a file that is written behind those before it."""
        self._files.append((snapshot, size_bytes))

    def begin(self) -> None:
        """Spread the writing of the files that were added: each file gets its share of the time."""
        files, total_bytes = self._files, sum(size_bytes for _, size_bytes in self._files)
        self._files = []  # they keep the arena's blocks
        if self._started_s is None or not total_bytes:
            return
        remaining_s = self._spread_s - (time.monotonic() - self._started_s)
        delay_s = 0.0
        if remaining_s > 0:
            for snapshot, size_bytes in files:
                share_s = remaining_s * size_bytes / total_bytes
                snapshot.pace(delay_s, share_s)
                delay_s += share_s
