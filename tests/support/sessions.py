"""Sessions of ranks that are threads of one process: what `coordination.Session` does, without sockets."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

from support.training import PATIENCE_S

import fastpersist as fp
from fastpersist.config import BLOCK_BYTES


class _Line:
    """What the ranks of one save share."""

    def __init__(self, count: int) -> None:
        self.to_first: list[queue.Queue[Any]] = [queue.Queue() for _ in range(count)]
        self.to_others: list[queue.Queue[Any]] = [queue.Queue() for _ in range(count)]


class ThreadSession:
    """One rank's end of a save."""

    def __init__(self, rank: int, count: int, line: _Line, block_bytes: int) -> None:
        self.rank = rank
        self.count = count
        self.nodes = (0,) * count
        self.block_bytes = block_bytes
        self.subject = "a test"
        self.message_count = 0
        self._line = line

    def gather(self, own: bytes) -> list[bytes]:
        return [own, *(self._take(self._line.to_first[rank]) for rank in range(1, self.count))]

    def answer(self, message: bytes) -> None:
        for rank in range(1, self.count):
            self._line.to_others[rank].put(message)

    def tell(self, message: bytes) -> None:
        self.message_count += 1
        self._line.to_first[self.rank].put(message)

    def hear(self) -> bytes:
        self.message_count += 1
        return self._take(self._line.to_others[self.rank])

    def check(self) -> None:
        pass

    def fail(self, error: BaseException) -> None:
        told = fp.PeerError(f"rank {self.rank} failed: {error}", rank=self.rank, subject=self.subject)
        if self.rank:
            self._line.to_first[self.rank].put(told)
        else:
            self.answer(told)  # type: ignore[arg-type]

    def finish(self) -> None:
        pass

    @staticmethod
    def _take(messages: queue.Queue[Any]) -> bytes:
        message = messages.get(timeout=PATIENCE_S)
        if isinstance(message, BaseException):
            raise message
        return bytes(message)


def run_threads(count: int, work: Callable[[ThreadSession], Any], block_bytes: int = BLOCK_BYTES) -> list[Any]:
    """Run a function as every rank, and return by rank what came of it: its result, or what it raised."""
    line = _Line(count)
    outcomes: list[Any] = [None] * count

    def run(rank: int) -> None:
        session = ThreadSession(rank, count, line, block_bytes)
        try:
            outcomes[rank] = work(session)
        except Exception as error:  # noqa: BLE001 - the test looks at it
            session.fail(error)
            outcomes[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes
