"""What is agreed between a save of a directory and guests: those who write files of their own into it, their own way.

The save (`directory_save`, on other ranks than the first `follower_save`) owns the directory, the writing thread, the
gate and the errors. A guest owns what its files hold, and what the ranks say to each other about them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from fastpersist import _native
from fastpersist.distributed.coordination import Session
from fastpersist.formats.manifest import FileEntry
from fastpersist.saving.capture import Capture
from fastpersist.saving.ownership import Owners
from fastpersist.saving.pending_save import SaveStats
from fastpersist.transfer.arena import Arena
from fastpersist.transfer.pipeline import Poll

__all__ = ["Guest", "Held", "Site"]


@dataclass(frozen=True, slots=True)
class Held:
    """What a guest has captured: all its files together.

    Attributes:
        capture: For whoever waits, holds or raises.
        snapshot: What its files are written from.
        size_bytes: Of what was captured.
    """

    capture: Capture
    snapshot: _native.Snapshot
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Site:
    """Where a guest writes, on the writing thread.

    Attributes:
        directory: The pending directory; None on other ranks than the first, which hear of it, unless they share no
            file system with it: then their own.
        final_path: The name that the directory gets.
        session: With the other ranks; None without any.
        label: What all ranks mean that save the same; None without any.
        engine: Engine name or "auto".
        poll: To be called at least once a second: raises what makes the save fail.
        made: To be told the path of each file that is made, before anything else is: who gives up removes it.
        stats: Of the save; the guest notes engine and shares, the save itself times and bytes.
    """

    directory: str | None
    final_path: str
    session: Session | None
    label: str | None
    engine: str
    poll: Poll
    made: Callable[[str], None]
    stats: SaveStats


class Guest(Protocol):
    """Somebody who writes files of a directory."""

    @property
    def owners(self) -> Owners:
        """Whose step the files wait for."""

    def hold(self, arena: Arena, *, paranoid: bool, on_gate: Callable[[float], None]) -> Held:
        """Look at what is to be written; on the saving thread, which captures it then."""

    def write(self, site: Site) -> list[FileEntry]:
        """Write the files, and sync them; on the first rank, return those of all ranks, else those of this one."""
