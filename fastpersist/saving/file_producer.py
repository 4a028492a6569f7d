"""What is agreed between a save of a directory and those who write files of their own into it, their own way.

The save (`directory_save`, on followers `distributed.follower_save`) owns the directory, the writing thread, the
barrier before the optimizer's step, and the errors. A producer owns what its files hold, and what the ranks tell each
other about them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from fastpersist.formats.manifest import FileEntry
from fastpersist.saving.ownership import Owners
from fastpersist.saving.pending_save import SaveStats
from fastpersist.saving.write_file import CapturedFile
from fastpersist.transfer.arena import Arena
from fastpersist.transfer.progress import Poll

__all__ = ["FileProducer", "RankSession", "WriteSite"]


class RankSession(Protocol):
    """What the ranks of a save tell each other: the part of `distributed.sessions.Session` that a producer uses."""

    @property
    def rank(self) -> int:
        """Of this process."""

    @property
    def count(self) -> int:
        """How many ranks there are."""

    def gather(self, own: bytes) -> list[bytes]:
        """Return one message of each rank; on the coordinator."""

    def answer(self, message: bytes) -> None:
        """Send each follower a message; on the coordinator."""

    def answer_each(self, messages: list[bytes]) -> None:
        """Send each follower a message of its own; on the coordinator."""

    def tell(self, message: bytes) -> None:
        """Send the coordinator a message; on followers."""

    def hear(self) -> bytes:
        """Return the next message of the coordinator; on followers."""

    def check(self) -> None:
        """Raise PeerError if another rank is known to have failed."""


@dataclass(frozen=True, slots=True)
class WriteSite:
    """Where a producer writes, on the writing thread.

    Attributes:
        directory: The pending directory. None on followers that share a file system with the coordinator, which tells
            them where it is.
        final_path: The name that the directory gets.
        session: With the other ranks; None without any.
        label: What all ranks mean that save the same; "" without any.
        engine: Engine name or "auto".
        poll: To be called at least once a second: raises what makes the save fail.
        made: To be told the path of each file that is made, before anything else is: who gives up removes it.
        write_small: Given name and bytes, writes a small file of the directory, and syncs it; on the coordinator.
        stats: Of the save; the producer notes engine and shares, the save itself times and bytes.
    """

    directory: str | None
    final_path: str
    session: RankSession | None
    label: str
    engine: str
    poll: Poll
    made: Callable[[str], None]
    write_small: Callable[[str, bytes], FileEntry] | None
    stats: SaveStats


class FileProducer(Protocol):
    """Somebody who writes files of a directory."""

    @property
    def owners(self) -> Owners:
        """Whose step the files wait for."""

    def hold(self, arena: Arena, *, paranoid: bool, on_gate: Callable[[float], None]) -> CapturedFile:
        """Look at what is to be written; on the saving thread, which captures it then."""

    def write(self, site: WriteSite) -> list[FileEntry]:
        """Write the files, and sync them; return those of all ranks on the coordinator, on followers this rank's."""
