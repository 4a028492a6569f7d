"""The content of one event; docs/reference/events.md lists the kinds and their figures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

__all__ = ["ENDS", "KINDS", "Event", "Figure", "Figures"]

Figure: TypeAlias = float | int | str
Figures: TypeAlias = Mapping[str, Figure]

KINDS = ("save_begun", "captured", "written", "committed", "failed", "skipped", "removed", "loaded")
"""All kinds. A save begins once, and ends once, with one of `ENDS`."""

ENDS = frozenset({"committed", "failed", "skipped"})


class Event(NamedTuple):
    """Something that happened to a checkpoint.

    Attributes:
        kind: One of `KINDS`.
        time_s: When it happened, Unix time in seconds.
        root: The directory of the Checkpointer; None for single files and for directories of your own layout.
        path: The path of the checkpoint, absolute or as the caller gave it.
        step: The step, for a Checkpointer.
        rank: The rank of the process that reports the event, in the group that saves.
        figures: Numbers and text by name, with the names of `SaveStats`: stall_s, write_s, bytes, engine, error …
    """

    kind: str
    time_s: float
    root: str | None
    path: str
    step: int | None
    rank: int
    figures: Figures
