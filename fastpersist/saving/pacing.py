"""How long after a save the next optimizer step comes, so that the writer can spread its work over that time.

The time is measured for each optimizer, from a save to the beginning of the step that follows it, where the gate is.
With gate="manual" it ends at the caller's wait, or at the end of the step if nobody waited: the beginning is too early
where forward and backward run inside `step(closure)`.
"""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence

from torch.optim.optimizer import Optimizer

from fastpersist import _native

__all__ = ["Spread", "note_save", "note_step", "spread_s"]

PACE_SHARE = 0.8
"""The part of that time over which the writes are spread: the rest is room for steps that come sooner."""

_SAMPLE_COUNT = 5


class _Clock:
    """When the last save before a step of one optimizer began, and after how long its steps came."""

    __slots__ = ("delays_s", "is_manual", "started_s")

    def __init__(self) -> None:
        self.started_s: float | None = None
        self.is_manual = False
        self.delays_s: deque[float] = deque(maxlen=_SAMPLE_COUNT)


_clocks: weakref.WeakKeyDictionary[Optimizer, _Clock] = weakref.WeakKeyDictionary()
_lock = threading.RLock()  # re-entrant, like all locks here: a signal handler may save


def note_save(optimizers: Sequence[Optimizer], *, manual: bool) -> None:
    """Note that a save begins, which the next step of one of these optimizers waits for; `manual`: with that gate."""
    now_s = time.monotonic()
    with _lock:
        for optimizer in optimizers:
            clock = _clocks.setdefault(optimizer, _Clock())
            clock.started_s, clock.is_manual = now_s, manual


def note_step(optimizer: Optimizer, *, manual: bool) -> None:
    """Note that an optimizer is about to step; with `manual`: that its caller has waited, or that it has stepped."""
    clock = _clocks.get(optimizer)
    if clock is None or clock.started_s is None or clock.is_manual != manual:
        return
    with _lock:
        if clock.started_s is not None:
            clock.delays_s.append(time.monotonic() - clock.started_s)
            clock.started_s = None


def spread_s(optimizers: Sequence[Optimizer]) -> float:
    """Return the seconds over which to spread the writing of a save; 0.0 while no step has followed one.

    It is a share of the shortest of the last delays: a writer that is done too early costs next to nothing, and one
    that is done too late costs a copy at the gate.
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
