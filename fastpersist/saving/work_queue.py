"""Tasks that run one after the other on a thread of their own: the writing of saves.

The thread of a `Lane` lives while there is work. Python waits for it before it exits, so a normal end of the program
finishes what was begun. Saves to the same path share a lane (`run_in_order`), so the last one that was begun stays.
What the tasks do, and what becomes of their errors, is left to `pending_save`.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable

__all__ = ["Lane", "run_in_order"]

_log = logging.getLogger("fastpersist")


class Lane:
    """A line of tasks, run one after the other on a thread of its own. Thread-safe.

    Args:
        name: The thread's name.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.RLock()  # re-entrant, like all locks here: a signal handler may save
        self._turn = threading.Lock()
        self._tasks: deque[Callable[[], None]] = deque()
        self._busy = False
        self._process = os.getpid()

    def submit(self, task: Callable[[], None]) -> None:
        """Run a task when those before it are done. It catches its own exceptions."""
        if self._process != os.getpid():
            self._reset()  # forked: the line, and the thread, are the parent's
        with self._lock:
            self._tasks.append(task)
            if self._busy:
                return
            self._busy = True
        # Not a daemon: the interpreter waits for it, and so the save that is under way is finished.
        thread = threading.Thread(target=self._work, name=self._name, daemon=False)
        try:
            # In atexit handlers the interpreter has stopped waiting for threads, or takes none any more.
            if threading.main_thread().is_alive():
                thread.start()
                return
        except RuntimeError:
            pass
        self._work()

    def is_idle(self) -> bool:
        """Tell whether nothing runs or waits."""
        if self._process != os.getpid():
            return True
        with self._lock:
            return not self._busy

    def _work(self) -> None:
        with self._turn:  # a signal handler in the middle of submit() may have started a thread, too
            while True:
                with self._lock:
                    if not self._tasks:
                        self._busy = False
                        return
                    task = self._tasks.popleft()
                try:
                    task()
                except BaseException:  # noqa: BLE001 - the tasks behind it belong to other saves
                    _log.exception("a bug in fastpersist: a task did not catch its own error")
                del task  # it holds the state that was saved


_lane_of: dict[str, Lane] = {}
_lane_of_lock = threading.RLock()


def run_in_order(path: str, task: Callable[[], None]) -> None:
    """Run a task on a background thread, behind the tasks of earlier saves to the same path.

    Args:
        path: Of the file, with symbolic links followed.
        task: Catches its own exceptions.

    Thread safety: any thread.
    """
    with _lane_of_lock:
        for idle in [known for known, lane in _lane_of.items() if known != path and lane.is_idle()]:
            del _lane_of[idle]
        _lane_of.setdefault(path, Lane("fastpersist-save")).submit(task)


def _forget_lanes() -> None:
    """In a forked child: the saves under way are the parent's."""
    global _lane_of_lock
    _lane_of_lock = threading.RLock()
    _lane_of.clear()


os.register_at_fork(after_in_child=_forget_lanes)
