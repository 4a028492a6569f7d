"""Delivers events to callbacks and to the logs of roots, on a background thread.

    emit()      the thread that trains appends to a queue, and no more; the one that writes also wakes
    the thread  takes events out in their order: first the log of the root, then each callback

Errors of callbacks and of the disk never reach the program: they are logged once. If the queue is full, events are
dropped and counted. The thread ends soon after the last save, so a process that forks seldom has it. A forked child has
neither the thread nor the callbacks nor the logs: they belong to the parent.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias
from weakref import WeakValueDictionary

from fastpersist.errors import ConfigError
from fastpersist.events.event import ENDS, Event, Figure
from fastpersist.events.log import EventLog

__all__ = ["Callback", "emit", "flush", "log_of", "subscribe", "wake"]

_log = logging.getLogger("fastpersist")

Callback: TypeAlias = Callable[[Event], None]

_WAITING_COUNT = 10_000
"""The most events that wait; this bounds the memory that a hanging callback costs."""
_IDLE_S = 0.3
"""The thread ends if no event has come for so long and no save is under way; during a save, it looks this often."""
_FLUSH_S = 1.0


class _Subscriber:
    """A callback, and whether it has failed before."""

    def __init__(self, callback: Callback) -> None:
        self.callback = callback
        self.has_failed = False


class _Told(NamedTuple):
    event: Event
    log: EventLog | None


_queue: deque[_Told | threading.Event] = deque()
_news = threading.Event()
_subscribers: tuple[_Subscriber, ...] = ()
_logs: WeakValueDictionary[tuple[str, int], EventLog] = WeakValueDictionary()
_lock = threading.RLock()  # re-entrant, like all locks here: a signal handler may save
_thread: threading.Thread | None = None
_dropped_count = 0
_unfinished_count = 0  # saves that have begun, as far as is delivered


def subscribe(callback: Callable[[Event], None]) -> Callable[[], None]:
    """Have a function called with each event of this process from now on.

    It is called on a background thread, with one event after the other, in the order in which they came. An exception
    in it is logged the first time, and changes nothing else. While it runs, other events wait; beyond 10,000 that wait,
    events are dropped, and the log says so. When the program ends, what is left is delivered, for at most one second. A
    forked child starts without callbacks.

    Args:
        callback: Takes an `Event`.

    Returns:
        A function that ends this; it may be called again. An event that is being delivered may still come.

    Raises:
        ConfigError: `callback` cannot be called.

    Thread safety: any thread.
    """
    global _subscribers
    if not callable(callback):
        raise ConfigError(f"subscribe() takes a function of an Event; {type(callback).__name__} cannot be called")
    subscriber = _Subscriber(callback)
    with _lock:
        _subscribers = (*_subscribers, subscriber)

    def unsubscribe() -> None:
        global _subscribers
        with _lock:
            _subscribers = tuple(one for one in _subscribers if one is not subscriber)

    return unsubscribe


def log_of(root: str, rank: int) -> EventLog:
    """Return the log of a root in this process. It gets the events of the root as long as a reference to it exists.

    Args:
        root: The directory, absolute.
        rank: The rank of this process among those that save there.
    """
    with _lock:
        known = _logs.get((root, rank))
        if known is None:
            known = _logs[root, rank] = EventLog(root, rank)
        # A save gives the path with links followed. An earlier log of that path may vanish at any moment.
        _logs[os.path.realpath(root), rank] = known
        return known


def emit(
    kind: str,
    path: str,
    figures: Mapping[str, Figure],
    *,
    step: int | None = None,
    rank: int = 0,
    time_s: float | None = None,
    wakes: bool = True,
) -> None:
    """Tell of an event. This raises nothing and does not wait.

    Args:
        kind: One of `KINDS`.
        path: The path of the checkpoint.
        figures: The event's figures, by the names of `SaveStats`; the caller changes them no more.
        step: The step, if a Checkpointer saves: the event then goes to the log of the root too. None for other saves.
        rank: The rank of this process among those that save or load together.
        time_s: When it happened, Unix time; None for now.
        wakes: Wake or start the delivering thread, which takes a while. Otherwise, the caller soon calls `wake` or
            `flush`, or the thread looks by itself while a save is under way.
    """
    global _dropped_count
    log = None if step is None else _logs.get((path.rpartition("/")[0], rank))
    if log is None and not _subscribers:
        return
    if len(_queue) >= _WAITING_COUNT:
        _dropped_count += 1
        return
    root = None if log is None else log.root
    if root is not None:
        path = os.path.join(root, os.path.basename(path))
    event = Event(kind, time.time() if time_s is None else time_s, root, path, step, rank, figures)
    _queue.append(_Told(event, log))
    if wakes:
        wake()


def wake() -> None:
    """Wake the thread that delivers, or start it, if anything waits for it."""
    global _thread
    if not _queue:
        return
    _news.set()
    if _has_thread():
        return
    with _lock:
        if _has_thread():  # another one was faster
            return
        thread = _thread = threading.Thread(target=_deliver_all, name="fastpersist-events", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the interpreter ends, and lets none start: `flush` delivers then
        _thread = None


def _has_thread() -> bool:
    return _thread is not None


def flush(timeout_s: float = _FLUSH_S) -> bool:
    """Wait until everything that was emitted before is delivered; return whether it is.

    Args:
        timeout_s: Seconds to wait at most, as a callback or a disk may hang.
    """
    if _thread is threading.current_thread():
        return False  # in a callback
    if not _has_thread() and not _queue:
        return True
    reached = threading.Event()
    _queue.append(reached)
    wake()
    if not _has_thread():
        _deliver_now(time.monotonic() + timeout_s)
    return reached.wait(timeout_s)


def _deliver_all() -> None:
    """Deliver events until there are none for a while; the thread's body."""
    global _thread
    while True:
        while _queue:
            _deliver(_queue.popleft())
        _news.clear()
        if _queue or _news.wait(_IDLE_S) or _queue or _unfinished_count:
            continue
        _thread = None  # first: a later `wake` then starts another thread
        if not _queue:
            return
        with _lock:
            if _has_thread():
                return
            _thread = threading.current_thread()


def _deliver_now(deadline_s: float) -> None:
    while _queue and time.monotonic() < deadline_s:
        _deliver(_queue.popleft())


def _deliver(told: _Told | threading.Event) -> None:
    global _dropped_count, _unfinished_count
    if isinstance(told, threading.Event):
        told.set()
        return
    kind = told.event.kind
    _unfinished_count = max(0, _unfinished_count + (kind == "save_begun") - (kind in ENDS))
    if _dropped_count:
        count, _dropped_count = _dropped_count, 0
        _log.warning("%d events were dropped: a callback of fastpersist.events, or a disk, does not keep up", count)
    if told.log is not None:
        told.log.append(told.event)
    for subscriber in _subscribers:
        try:
            subscriber.callback(told.event)
        except BaseException:  # noqa: BLE001 - of whatever kind, sys.exit() too: other callbacks and the logs go on
            if not subscriber.has_failed:
                subscriber.has_failed = True
                _log.exception("a callback of fastpersist.events failed; this is logged once for each callback")


def _forget_all() -> None:
    """Forget everything in a forked child: callbacks and logs are the parent's."""
    global _queue, _news, _subscribers, _lock, _thread, _dropped_count, _unfinished_count
    _queue = deque()
    _news = threading.Event()
    _subscribers = ()
    _logs.clear()
    _lock = threading.RLock()
    _thread = None
    _dropped_count = _unfinished_count = 0


os.register_at_fork(after_in_child=_forget_all)
atexit.register(flush)
