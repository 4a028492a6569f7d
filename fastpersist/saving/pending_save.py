"""A save that is written while training goes on: its thread, its state, its costs, and its error.

A `PendingSave` is one save. It consists of tasks, lets everybody wait for them, and delivers its error exactly once.
`file_save`, `directory_save` and `Checkpointer` make the tasks. `capture` decides who may change the bytes meanwhile.

A `Lane` runs the tasks one after the other on a thread, which lives while there is work. Python waits for it before it
exits, so a normal end of the program finishes what was begun. Saves to the same path share a lane (`run_in_order`), so
the save that began last determines the final file.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from fastpersist.commit.filesystem import tell_free
from fastpersist.errors import FastPersistError, SkippedError
from fastpersist.events.delivery import emit, wake
from fastpersist.events.event import ENDS, Figure
from fastpersist.saving.capture import Capture
from fastpersist.saving.pacing import save_begun, save_over, take_step_times
from fastpersist.uncopied import Uncopied

__all__ = ["Lane", "PendingSave", "SaveStats", "await_earlier", "run_in_order"]

_log = logging.getLogger("fastpersist")

_ROOM_FOR_A_STEP = "old steps go only when the new one is durable, so keep=N needs room for N + 1 of them"


@dataclass(slots=True)
class SaveStats:
    """What a save cost, and where its bytes went.

    Attributes:
        path: The path that was written, from the root.
        step: The step, for a Checkpointer.
        bytes: The length of all files.
        stall_s: Seconds that the training thread lost: inside save(), and waiting at the gate.
        plan_s: The part of `stall_s` for pickling and layout.
        capture_s: Seconds from save() until everything could be changed again; training goes on during most of them.
        write_s: Seconds from the first byte to the last.
        sync_s: Seconds until the bytes, and the names, were durable.
        commit_s: Seconds to make it visible and to remove what is kept no longer, sync_s of names included.
        step_s: Mean seconds from one optimizer step to the next since the save before, where no save was under way;
            0.0 if there was no such step.
        step_beside_save_s: The same for steps during which a save was under way.
        bytes_by_writer: Tensor bytes that were written from where they are.
        bytes_at_gate: Stable bytes that were copied because a step came before the writer.
        bytes_before_return: Volatile bytes that were copied inside save().
        bytes_by_rank: With several ranks, on the coordinator: how many of the shared bytes each rank has written.
        engine: The engine that wrote.
        error: What went wrong, in one line; None if nothing did.
    """

    path: str
    step: int | None = None
    bytes: int = 0
    stall_s: float = 0.0
    plan_s: float = 0.0
    capture_s: float = 0.0
    write_s: float = 0.0
    sync_s: float = 0.0
    commit_s: float = 0.0
    step_s: float = 0.0
    step_beside_save_s: float = 0.0
    bytes_by_writer: int = 0
    bytes_at_gate: int = 0
    bytes_before_return: int = 0
    bytes_by_rank: list[int] = field(default_factory=list)
    engine: str = ""
    error: str | None = None

    def add_shares(self, bytes_by_rank: list[int]) -> None:
        """Count the shares of another file that several ranks have written."""
        before = self.bytes_by_rank or [0] * len(bytes_by_rank)
        self.bytes_by_rank = [sum(both) for both in zip(before, bytes_by_rank, strict=True)]

    def add_stall(self, seconds: float) -> None:
        """Count more time that the training thread has lost."""
        self.stall_s += seconds

    def figures(self) -> dict[str, Figure]:
        """Return what is known by now, by name, as an event has it."""
        return {name: value for name in _FIGURES if (value := getattr(self, name))}


_FIGURES = tuple(name for name in SaveStats.__dataclass_fields__ if name not in ("path", "step", "bytes_by_rank"))


class PendingSave(Uncopied):
    """A save that may still be under way. Thread-safe.

    Everything may be changed again once `captured`; the result is visible and durable once `done`.
    An error is logged at once, and raised once, by result() or by the owner (a Checkpointer: in wait, save or close);
    exception() always returns it.

    Args:
        path: The path that is written.
        stats: The figures of the save, which are filled in.
        rank: The rank of this process, for events.
        returns: The owner calls `returned`; the event "committed" follows after that, with the whole stall.
    """

    def __init__(self, path: str, stats: SaveStats, *, rank: int = 0, returns: bool = False) -> None:
        self._path = path
        self._captures: list[Capture] = []
        self._stats = stats
        self._finished = _Latch()
        self._written = _Latch()
        self._lock = threading.RLock()
        self._error: BaseException | None = None
        self._cancelled: BaseException | None = None
        self._delivered = False
        self._skipped = False
        self._begun = False
        self._over = False
        self._process = os.getpid()
        self._clean_up: list[Callable[[BaseException], None]] = []
        self._when_finished: list[Callable[[], None]] = []
        self._rank = rank
        self._has_returned = not returns
        self._committed_time_s: float | None = None  # told by `returned`
        self._told: set[str] = set()
        save_begun(self)
        self._tell("save_begun", time.time() - stats.plan_s, wakes=False)

    # --- for everybody

    def captured(self) -> bool:
        """Tell whether the state may be changed again. Once True, forever."""
        return self._finished.is_set() or all(capture.captured() for capture in self._captures)

    def done(self) -> bool:
        """Tell whether the save is over: published, failed or skipped."""
        return self._finished.is_set()

    def skipped(self) -> bool:
        """Tell whether it was skipped in favour of another save (busy="skip" or "latest")."""
        return self._skipped

    def wait_captured(self, timeout: float | None = None) -> None:
        """Return when the state may be changed; bytes that are not written by now are copied, if there is memory.

        Args:
            timeout: Seconds.

        Raises:
            TimeoutError: The state may not be changed yet.
        """
        self._refuse_child()
        if self._finished.is_set():
            return
        deadline_s = None if timeout is None else time.monotonic() + timeout
        for capture in reversed(self._captures):
            capture.wait_captured(None if deadline_s is None else max(0.0, deadline_s - time.monotonic()))

    def result(self, timeout: float | None = None) -> Path:
        """Wait until the save is published and return where, as a path from the root.

        Args:
            timeout: The most seconds to wait; None waits without limit.

        Raises:
            TimeoutError: The save is still under way.
            SkippedError: The save was skipped.
            TornStateError: The state was changed before it was captured; nothing was published.
            StorageError: An error of the disk; nothing was published.
        """
        error = self.exception(timeout)
        if error is not None:
            raise error
        return Path(self._path)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait until the save is over and return its error, or None. Counts as delivery.

        Raises:
            TimeoutError: The save is still under way.
        """
        self._refuse_child()
        if not self.join(timeout):
            raise TimeoutError(f"the save of {self._path} is still under way after {timeout} s")
        with self._lock:
            self._delivered = True
            return self._error

    # --- for owners

    def join(self, timeout: float | None = None) -> bool:
        """Wait until the save is over, however it ended; return whether it is."""
        self.hurry()
        return self._finished.wait(timeout)

    def hurry(self) -> None:
        """Let the writer go at full speed, because a caller waits."""
        for capture in self._captures:
            capture.hurry()

    @property
    def stats(self) -> SaveStats:
        """What the save has cost so far."""
        return self._stats

    def undelivered_error(self) -> BaseException | None:
        """Return the error if it was not delivered yet. Counts as delivery."""
        with self._lock:
            if self._delivered or self._skipped or self._error is None:
                return None
            self._delivered = True
            return self._error

    def when_failed(self, clean_up: Callable[[BaseException], None]) -> None:
        """Call a function with the error if the save fails, before anybody is told of it."""
        self._clean_up.append(clean_up)

    def when_finished(self, call: Callable[[], None]) -> None:
        """Call a function when the save is over, before those who wait are told; at once if it is over already."""
        with self._lock:
            if not self._over:
                self._when_finished.append(call)
                return
        call()

    def run(self, task: Callable[[], None], *, when_it_fails: Callable[[BaseException], None] | None = None) -> None:
        """Run a part of the save, unless the save has failed already; on the thread that writes.

        Args:
            task: The part.
            when_it_fails: Called with its error; None: the save fails with that at once.
        """
        with self._lock:
            if self._skipped or self._finished.is_set():
                return
            self._begun = True
        wake()  # here, on the thread that writes: to start another thread takes a while
        try:
            self._refuse_cancelled()
            task()
        except BaseException as error:  # noqa: BLE001 - the owner's thread gets it
            (when_it_fails or self.fail)(self._cancelled or error)

    def begin(self, capture: Capture, submit: Callable[[], None]) -> None:
        """Copy the volatile bytes of a file and let its writer begin; return when save() may return.

        Args:
            capture: The capture of a file that belongs to this save.
            submit: Gives the task that writes the file to a lane.

        Raises:
            BaseException: Something interrupted this; the save is cancelled then.
        """
        if not self._captures:
            self._stats.step_s, self._stats.step_beside_save_s = take_step_times(capture.optimizers)
        self._captures.append(capture)
        capture.when_sealed = self._tell_captured
        submitted = False
        try:
            all_copied = capture.copy_volatile(wait=False)
            capture.hold()
            submitted = True
            submit()
            if not all_copied:
                capture.copy_volatile(wait=True)
        except BaseException as error:
            self.cancel(error)
            if not submitted:
                submit()  # the task notices the cancellation, and cleans up after the tasks before it
            raise

    def check(self) -> None:
        """Raise if the save was cancelled, or if the state may be torn; called before anything is published.

        Raises:
            TornStateError: The state may be torn.
        """
        self._refuse_cancelled()
        for capture in self._captures:
            capture.check()
        self._tell("captured")  # of a save without tensors, too
        self._tell("written")

    def refuse_torn(self) -> None:
        """Raise if bytes are known to be torn, or gone; called before they are read from where they are.

        Raises:
            TornStateError: Such bytes are torn, or gone.
        """
        for capture in self._captures:
            if capture.is_torn():
                capture.check()

    def poll(self, _done_bytes: int) -> None:
        """Stop a transfer whose save was cancelled; let one whose process ends go at full speed."""
        self._refuse_cancelled()
        if not threading.main_thread().is_alive():  # the interpreter waits for this thread
            self.hurry()

    def cancel(self, error: BaseException) -> None:
        """Make the save fail, from another thread than the one that writes it."""
        self._cancelled = error
        for capture in self._captures:
            capture.release()

    def _refuse_cancelled(self) -> None:
        if self._cancelled is not None:
            raise self._cancelled

    def written(self) -> None:
        """Note that the result is visible and the writer free: the remaining work does not delay the next save."""
        self._let_captures_go()
        self._tell_committed()
        self._written.set()

    def returned(self, stall_s: float) -> None:
        """Note that the call which began the save has lost this time, and returns now."""
        self._stats.stall_s = stall_s
        with self._lock:
            self._has_returned = True
            committed_time_s, self._committed_time_s = self._committed_time_s, None
        if committed_time_s is not None:
            self._tell("committed", committed_time_s)

    def _tell_committed(self) -> None:
        now_s = time.time()
        with self._lock:
            if not self._has_returned:
                self._committed_time_s = self._committed_time_s or now_s
                return
        self._tell("committed", now_s)

    def _tell_captured(self) -> None:
        if self._has_returned and all(capture.is_sealed for capture in self._captures):
            self._stats.capture_s = max(capture.capture_s for capture in self._captures)
            self._tell("captured", wakes=False)

    def _tell(self, kind: str, time_s: float | None = None, *, wakes: bool = True) -> None:
        """Emit an event of this save, of each kind one."""
        with self._lock:
            if kind in self._told or self._told & ENDS:
                return
            self._told.add(kind)
        stats = self._stats
        figures: dict[str, Figure] = {}
        if kind == "captured":
            figures = {"stall_s": stats.stall_s, "plan_s": stats.plan_s, "capture_s": stats.capture_s}
        elif kind != "save_begun":
            figures = stats.figures()
        emit(kind, self._path, figures, step=stats.step, rank=self._rank, time_s=time_s, wakes=wakes)

    def wait_written(self) -> None:
        """Return when the writer is free for another save, however this one ends."""
        self.hurry()
        self._written.wait()

    def is_written(self) -> bool:
        """Tell whether the writer is free for another save."""
        return self._written.is_set()

    def succeed(self) -> None:
        """End the save: its last part is done, and the result is visible."""
        self._tell_committed()
        self._finish()

    def fail(self, error: BaseException) -> None:
        """End the save with an error: clean up, log it, and tell those who wait. Nothing is published."""
        if self._finished.is_set():
            return
        for clean_up in reversed(self._clean_up):
            try:
                clean_up(error)
            except Exception:  # noqa: BLE001 - the save's own error matters more
                _log.exception("cleaning up after a failed save of %s", self._path)
        tell_free(error, "" if self._stats.step is None else _ROOM_FOR_A_STEP)
        self._error = error
        self._stats.error = f"{type(error).__name__}: {error}"
        if not isinstance(error, SkippedError):
            _log.error("the save of %s failed: %s", self._path, self._stats.error)
        self._tell("skipped" if isinstance(error, SkippedError) else "failed")
        self._finish()

    def skip(self, why: str) -> bool:
        """Skip this save; return False if it is too late, because it is being written."""
        with self._lock:
            if self._begun or self._finished.is_set():
                return False
            self._skipped = True
        self.fail(SkippedError(f"the save of {self._path} was left out: {why}"))
        return True

    def count_bytes(self) -> None:
        """Update the counts of bytes, and capture_s, in the stats."""
        stats, captures = self._stats, self._captures
        stats.capture_s = max((capture.capture_s for capture in captures), default=0.0)
        stats.bytes_at_gate = sum(capture.count("stable_copied_bytes") for capture in captures)
        stats.bytes_before_return = sum(capture.count("volatile_copied_bytes") for capture in captures)
        taken_bytes = sum(capture.count("taken_bytes") for capture in captures)
        stats.bytes_by_writer = max(0, taken_bytes - stats.bytes_at_gate - stats.bytes_before_return)

    def _let_captures_go(self) -> None:
        if not self._captures:
            return
        try:
            for capture in self._captures:
                capture.seal()
            self.count_bytes()
        finally:
            for capture in self._captures:
                capture.release()
            self._captures = []

    def _finish(self) -> None:
        try:
            self._let_captures_go()
        finally:
            self._clean_up.clear()
            save_over(self)
            with self._lock:
                self._over = True
                calls = list(self._when_finished)
                self._when_finished.clear()
            try:
                for call in calls:
                    try:
                        call()
                    except Exception:  # noqa: BLE001 - the save itself is over
                        _log.exception("after the save of %s", self._path)
            finally:
                self._written.set()
                self._finished.set()

    def _refuse_child(self) -> None:
        if self._process != os.getpid():
            raise FastPersistError(f"the save of {self._path} belongs to the process that this one was forked from")

    def __repr__(self) -> str:
        state = "skipped" if self._skipped else "failed" if self._error else "done" if self.done() else "under way"
        return f"<PendingSave of {self._path}: {state}>"


class _Latch:
    """An event that is set once, whose waiters may be interrupted at any moment.

    Ctrl-C while a threading.Event begins to wait can leave its lock locked for ever, so that no thread can set it.
    """

    def __init__(self) -> None:
        self._is_set = False
        self._locked_until_set = threading.Lock()
        self._locked_until_set.acquire()

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        with suppress(RuntimeError):  # it was set before
            self._locked_until_set.release()

    def wait(self, timeout: float | None = None) -> bool:
        """Return whether it is set, after `timeout` seconds at most."""
        end_s = math.inf if timeout is None else time.monotonic() + timeout
        while not self._is_set:
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                break
            # Not for ever: a waiter that is interrupted right here does not wake the next one.
            if self._locked_until_set.acquire(timeout=min(left_s, 1.0)):
                with suppress(RuntimeError):  # another thread has set it first
                    self._locked_until_set.release()
        return self._is_set


# ------------------------------------------------------------------------------------------- the threads that write


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
        self._is_running = False
        self._worker: threading.Thread | None = None  # which runs them, or is about to
        self._runner: int | None = None  # the thread that does
        self._process = os.getpid()

    def submit(self, task: Callable[[], None]) -> None:
        """Run a task when those before it are done. It catches its own exceptions."""
        if self._process != os.getpid():
            self._reset()  # in a forked child: the line, and its thread, are the parent's
        with self._lock:
            self._tasks.append(task)
            # One that Ctrl-C has kept from being started is not alive.
            if self._worker is not None and self._worker.is_alive():
                return
            # Not a daemon: the interpreter waits for it, so a save that is under way is finished.
            thread = self._worker = threading.Thread(target=self._work, name=self._name, daemon=False)
        try:
            # In atexit handlers the interpreter does not wait for threads any more, or lets none start.
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
            return not (self._is_running or self._tasks)

    def is_this_thread(self) -> bool:
        """Tell whether the caller is one of the tasks."""
        return self._runner == threading.get_ident()

    def await_idle(self) -> bool:
        """Wait until the tasks so far are done; return False if there are none. Not from one of them."""
        if self.is_idle():
            return False
        done = threading.Event()
        self.submit(done.set)
        done.wait()
        return True

    def _work(self) -> None:
        if self.is_this_thread():
            return  # a task that runs without a thread has submitted another one, which comes next
        with self._turn:  # there may be two threads for a moment
            self._runner = threading.get_ident()
            while True:
                with self._lock:
                    self._is_running = bool(self._tasks)
                    if not self._tasks:
                        self._worker = self._runner = None
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
        path: The path of the file, with symbolic links followed.
        task: Catches its own exceptions.

    Thread safety: any thread.
    """
    with _lane_of_lock:
        for idle in [known for known, lane in _lane_of.items() if known != path and lane.is_idle()]:
            del _lane_of[idle]
        _lane_of.setdefault(path, Lane("fastpersist-save")).submit(task)


def await_earlier(path: str) -> None:
    """Wait until the earlier saves to a path are over, unless one of them calls this.

    Args:
        path: The path of the file, with symbolic links followed.

    Thread safety: any thread.
    """
    with _lane_of_lock:
        lane = _lane_of.get(path)
    if lane is not None and not lane.is_this_thread():
        lane.await_idle()


def _forget_lanes() -> None:
    """Forget all lanes in a forked child: the saves under way are the parent's."""
    global _lane_of_lock
    _lane_of_lock = threading.RLock()
    _lane_of.clear()


os.register_at_fork(after_in_child=_forget_lanes)
