"""The grace period: the time for a last save, from the signal on; a thread notices when it is over.

The training thread may be in a collective that never ends, where it runs no Python. So another thread waits. It gets
its messages through a pipe, because a signal handler must not take a lock that the interrupted code may hold.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable

__all__ = ["GracePeriod"]

_MORE_S = 0.5  # the thread waits so much longer: the training thread may notice the end by itself


class GracePeriod:
    """Counts the seconds since a signal has come.

    Args:
        limit_s: The length of the period, in seconds.
        when_over: Called on the period's own thread if the period was not ended in time.

    Thread safety: any thread may call `left_s`; the training thread, and signal handlers on it, call the others.
    """

    def __init__(self, limit_s: float, when_over: Callable[[], None]) -> None:
        self._limit_s = limit_s
        self._when_over = when_over
        self._end_s: float | None = None
        self._pipe = os.pipe()
        self._thread = threading.Thread(target=self._watch, name="fastpersist-grace", daemon=True)
        self._thread.start()

    def begin(self) -> None:
        """Begin, unless it has begun."""
        if self._end_s is None:
            self._end_s = time.monotonic() + self._limit_s
            os.write(self._pipe[1], b"b")

    def left_s(self) -> float:
        """Return how many seconds are left; all of them if it has not begun."""
        return self._limit_s if self._end_s is None else max(0.0, self._end_s - time.monotonic())

    def end(self) -> None:
        """End the period in time: the save is done."""
        if self._end_s is not None:
            self._end_s = None
            os.write(self._pipe[1], b"e")

    def close(self) -> None:
        """End the thread."""
        os.write(self._pipe[1], b"c")
        if threading.current_thread() is not self._thread:
            self._thread.join()
        for fd in self._pipe:
            os.close(fd)

    def _watch(self) -> None:
        wait_s: float | None = None
        while True:
            if not select.select([self._pipe[0]], [], [], wait_s)[0]:
                wait_s = None
                self._when_over()
                continue
            for word in os.read(self._pipe[0], 64):
                if word == ord("c"):
                    return
                wait_s = self._limit_s + _MORE_S if word == ord("b") else None
