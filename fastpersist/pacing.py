"""How long after a save the next optimizer step comes, so that the writer can spread its work over that time."""

from __future__ import annotations

import statistics
import time
import weakref
from collections import deque

from torch.optim.optimizer import Optimizer

from fastpersist.owners import Owners

__all__ = ["StepClock", "note_step"]

_SAMPLE_COUNT = 5


class StepClock:
    """Measures from each save to the step that follows it.

    Args:
        owners: Whose steps count.
    """

    def __init__(self, owners: Owners) -> None:
        self._owners = owners
        self._started_s: float | None = None
        self._delays_s: deque[float] = deque(maxlen=_SAMPLE_COUNT)
        _clocks.add(self)

    def start(self) -> None:
        """A save has begun."""
        self._started_s = time.monotonic()

    def note(self, optimizer: Optimizer) -> None:
        """An optimizer is about to step."""
        if self._started_s is not None and any(optimizer is known for known in self._owners.optimizers()):
            self._delays_s.append(time.monotonic() - self._started_s)
            self._started_s = None

    def expected_s(self) -> float:
        """Return the median of the last delays, in seconds; 0.0 while none is known."""
        return statistics.median(self._delays_s) if self._delays_s else 0.0


_clocks: weakref.WeakSet[StepClock] = weakref.WeakSet()


def note_step(optimizer: Optimizer) -> None:
    """Tell all clocks that an optimizer is about to step."""
    for clock in list(_clocks):
        clock.note(optimizer)
