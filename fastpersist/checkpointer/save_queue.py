"""The saves of a Checkpointer, in order: which are unfinished or failed, what each cost, what `busy` leaves out."""

from __future__ import annotations

import logging
import time
from collections import deque

from fastpersist.errors import SkippedError
from fastpersist.saving.pending_save import PendingSave, SaveStats
from fastpersist.saving.refused_globals import warn_caller

__all__ = ["SaveQueue"]

_log = logging.getLogger("fastpersist")

_STATS_COUNT = 1000
_FAILED_COUNT = 16


class SaveQueue:
    """Knows the saves that were begun.

    Args:
        root: For messages.
        on_error: As in `Checkpointer`.

    Attributes:
        stats: What each save cost, oldest first.

    Thread safety: the training thread calls everything but `note_finished`, which any may.
    """

    def __init__(self, root: str, on_error: str) -> None:
        self._root = root
        self._on_error = on_error
        self._unfinished: deque[PendingSave] = deque()
        self._failed: deque[PendingSave] = deque(maxlen=_FAILED_COUNT)
        self.stats: deque[SaveStats] = deque(maxlen=_STATS_COUNT)

    def make_room(self, busy: str) -> bool:
        """Wait for, or leave out, saves that are unfinished; False if the new one is to be left out.

        Args:
            busy: As in `Checkpointer`.
        """
        self._forget_finished()
        while unwritten := [pending for pending in self._unfinished if not pending.is_written()]:
            if busy == "skip":
                return False
            if len(unwritten) < 2:
                break
            if busy != "latest" or not unwritten[-1].skip("a newer one came before it had begun"):
                unwritten[0].wait_written()
        return True

    def add(self, pending: PendingSave) -> None:
        """Add a save that has begun."""
        self._unfinished.append(pending)
        pending.when_finished(lambda: self.note_finished(pending))

    def note_finished(self, pending: PendingSave) -> None:
        """Note what a save has cost, and whether it failed."""
        stats = pending.stats
        self.stats.append(stats)
        if stats.error is not None:
            if not pending.skipped():
                self._failed.append(pending)
            return
        _log.info(
            "step %s: %.2f GB in %.3f s (%.2f GB/s, %s), training stalled for %.1f ms, synced in %.3f s",
            stats.step,
            stats.bytes / 1e9,
            stats.write_s,
            stats.bytes / 1e9 / max(stats.write_s, 1e-9),
            stats.engine,
            stats.stall_s * 1e3,
            stats.sync_s,
        )

    def unfinished(self) -> list[PendingSave]:
        """Return the saves that are not over."""
        return [pending for pending in list(self._unfinished) if not pending.done()]

    def wait_captured(self, timeout: float | None) -> None:
        """Return when the state of every save may be changed; raise TimeoutError after so many seconds."""
        deadline_s = None if timeout is None else time.monotonic() + timeout
        for pending in list(self._unfinished):
            pending.wait_captured(_left_s(deadline_s))

    def join(self, timeout: float | None) -> None:
        """Return when every save is over; raise TimeoutError after so many seconds."""
        deadline_s = None if timeout is None else time.monotonic() + timeout
        for pending in list(self._unfinished):
            if not pending.join(_left_s(deadline_s)):
                raise TimeoutError(f"a save to {self._root} is still under way after {timeout} s")
        self._forget_finished()

    def _forget_finished(self) -> None:
        self._unfinished = deque(pending for pending in self._unfinished if not pending.done())

    # --- failures

    def take_failed(self) -> deque[PendingSave]:
        """Return the saves that have failed so far; they are the caller's to deliver, or to give back."""
        failed, self._failed = self._failed, deque(maxlen=_FAILED_COUNT)
        return failed

    def give_back(self, failed: deque[PendingSave]) -> None:
        """Put failed saves back before those that have failed since."""
        self._failed.extendleft(reversed(failed))

    def deliver(self, failed: deque[PendingSave] | None = None) -> None:
        """Raise, or warn of, the oldest failure that nobody was told of yet; of all, or of these."""
        if failed is None:
            failed = self._failed
        while failed:
            pending = failed.popleft()
            error = pending.undelivered_error()
            if error is None or isinstance(error, SkippedError):
                continue
            if self._on_error == "raise":
                if failed is not self._failed:
                    self.give_back(failed)
                raise error
            warn_caller(f"a checkpoint was not saved, training goes on: {error}")

    def log_failed(self) -> None:
        """Log the failures that nobody was told of: another exception is being raised."""
        for pending in self.take_failed():
            if failure := pending.undelivered_error():
                _log.error("while another exception was being raised: %s", failure)


def _left_s(deadline_s: float | None) -> float | None:
    return None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
