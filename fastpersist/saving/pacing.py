"""How long after a save the next optimizer step comes, so that the writer can spread its work over that time.

Measured from each save to the step that follows it, for each optimizer: to the beginning of the step, where the gate
is. With gate="manual" to the caller's wait, or to the step's end if nobody had to wait: where forward and backward run
inside `step(closure)`, its beginning is too early.
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
    """What is known of one optimizer: when a save has begun, and how long its last steps were in coming."""

    __slots__ = ("delays_s", "is_manual", "started_s")

    def __init__(self) -> None:
        self.started_s: float | None = None
        self.is_manual = False
        self.delays_s: deque[float] = deque(maxlen=_SAMPLE_COUNT)


_clocks: weakref.WeakKeyDictionary[Optimizer, _Clock] = weakref.WeakKeyDictionary()
_lock = threading.RLock()  # re-entrant, like all locks here: a signal handler may save


def note_save(optimizers: Sequence[Optimizer], *, manual: bool) -> None:
    """A save has begun whose gate is before the next step of one of these optimizers; with `manual`: in it."""
    now_s = time.monotonic()
    with _lock:
        for optimizer in optimizers:
            clock = _clocks.setdefault(optimizer, _Clock())
            clock.started_s, clock.is_manual = now_s, manual


def note_step(optimizer: Optimizer, *, manual: bool) -> None:
    """An optimizer is about to step; with `manual`: the caller has waited for that, or it has stepped."""
    clock = _clocks.get(optimizer)
    if clock is None or clock.started_s is None or clock.is_manual != manual:
        return
    with _lock:
        if clock.started_s is not None:
            clock.delays_s.append(time.monotonic() - clock.started_s)
            clock.started_s = None


def spread_s(optimizers: Sequence[Optimizer]) -> float:
    """Return the seconds over which to spread the writing of a save; 0.0 while no step has followed one.

    By the shortest of the last delays: to be through too early costs next to nothing, too late a copy at the gate.
    """
    with _lock:
        known = [_clocks[optimizer].delays_s for optimizer in optimizers if optimizer in _clocks]
        return PACE_SHARE * min((min(delays_s) for delays_s in known if delays_s), default=0.0)


class Spread:
    """The files of one save, written one after the other until shortly before the next step.

    Args:
        at_most_s: Seconds after which all is written in any case, as far as pacing goes.
    """

    def __init__(self, at_most_s: float = math.inf) -> None:
        self._at_most_s = at_most_s
        self._optimizers: list[Optimizer] = []
        self._files: list[tuple[_native.Snapshot, int]] = []
        self._started_s: float | None = None  # of the first file that a step waits for
        self._spread_s = 0.0

    def expect_step(self, optimizers: Sequence[Optimizer], *, manual: bool) -> None:
        """A file's tensors belong to these optimizers: learn when the next step is expected, and measure it."""
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
        """All files are there: let the writer take its time, each file its share of it."""
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
