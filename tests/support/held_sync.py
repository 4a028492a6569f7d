"""A disk on which nothing becomes durable for a while."""

from __future__ import annotations

import threading

from fastpersist.commit.filesystem import Filesystem

PATIENCE_S = 60.0


class HeldSync(Filesystem):
    """Files become durable once the gate is open."""

    def __init__(self) -> None:
        self.gate = threading.Event()

    def sync(self, fd: int, path: str) -> None:
        """Wait for the gate first."""
        assert self.gate.wait(PATIENCE_S)
        super().sync(fd, path)
