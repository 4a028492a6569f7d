"""Collects the costs of finished saves, which a trainer logs on the training thread when it is ready."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from fastpersist import PendingSave

__all__ = ["SaveFigures"]

_log = logging.getLogger("fastpersist")


class SaveFigures:
    """Saves that have begun, and whose costs are not yet logged. Only the training thread uses it.

    Args:
        prefix: The prefix of the figures' names.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._unlogged: list[PendingSave] = []

    def add(self, pending: PendingSave) -> None:
        """Add a save that has begun."""
        self._unlogged.append(pending)

    def take(self) -> dict[str, float]:
        """Return the costs of the saves that have finished by now; nothing if there are none. This does not wait.

        Returns:
            stall_s: seconds that training lost to all of them; write_s and bytes_per_s: of the last one.
        """
        over = [pending for pending in self._unlogged if pending.is_written()]
        self._unlogged = [pending for pending in self._unlogged if not pending.is_written()]
        stats = [pending.stats for pending in over if pending.stats.error is None]
        if not stats:
            return {}
        last = stats[-1]
        return {
            f"{self._prefix}stall_s": sum(one.stall_s for one in stats),
            f"{self._prefix}write_s": last.write_s,
            f"{self._prefix}bytes_per_s": last.bytes / max(last.write_s, 1e-9),
        }

    def log_by(self, log: Callable[[Mapping[str, float]], object]) -> None:
        """Log the costs of finished saves; an error of the trainer's logger is only written to our log."""
        if found := self.take():
            try:
                log(found)
            except Exception:  # noqa: BLE001 - of whatever logger: training goes on
                _log.exception("what a save has cost could not be logged")
