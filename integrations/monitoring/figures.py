"""Selects the numbers of an event for dashboards, and the step for which they are shown."""

from __future__ import annotations

import itertools

from fastpersist.events import Event

__all__ = ["Steps", "scalars"]

_OF_SAVES = ("stall_s", "capture_s", "write_s", "sync_s", "commit_s", "step_s", "step_beside_save_s", "bytes")


def scalars(event: Event) -> dict[str, float]:
    """Return numbers by name for a finished save or a load; nothing for all other events.

    A save that is committed gives stall_s, capture_s, write_s, sync_s, commit_s, bytes, bytes_per_s (while it wrote)
    and failed: 0; one that has failed gives failed: 1. A load gives load_s and load_bytes.
    """
    numbers = {name: float(value) for name, value in event.figures.items() if not isinstance(value, str)}
    if event.kind == "committed":
        found = {name: numbers[name] for name in _OF_SAVES if name in numbers}
        if numbers.get("write_s", 0.0) > 0:
            found["bytes_per_s"] = numbers.get("bytes", 0.0) / numbers["write_s"]
        return {**found, "failed": 0.0}
    if event.kind == "failed":
        return {"failed": 1.0}
    if event.kind == "loaded":
        return {"load_s": numbers.get("total_s", 0.0), "load_bytes": numbers.get("bytes", 0.0)}
    return {}


class Steps:
    """The x-axis: the steps of a Checkpointer; files without a step are counted."""

    def __init__(self) -> None:
        self._count = itertools.count()

    def of(self, event: Event) -> int:
        """Return the step for which an event is shown."""
        return next(self._count) if event.step is None else event.step
