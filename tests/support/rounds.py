"""The rounds of a load by ranks that are threads: what `SharedReader` says and hears, without a process group."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

from support.ranks_in_threads import at_once, exchanges


class Rounds:
    """One rank's end of the rounds."""

    def __init__(self, rank: int, count: int, exchange: Callable[[Any], Any]) -> None:
        self.rank = rank
        self.count = count
        self.stack = contextlib.ExitStack()
        self._exchange = exchange

    def say(self, stage: str, told: Any) -> list[tuple[str, Any]]:
        return list(self._exchange((stage, told)))

    def wait_for_all(self, stage: str, told: Any = None) -> list[Any]:
        while True:
            heard = self.say(stage, told)
            if all(one == stage for one, _ in heard):
                return [one for _, one in heard]


def in_rounds(count: int, work: Callable[[Any], Any]) -> list[Any]:
    """Run a function as every rank, given its `Rounds`; return by rank what it returned, or raised."""

    def run(rank: int) -> Any:
        with contextlib.closing(ends[rank].stack):
            return work(ends[rank])

    ends = [Rounds(rank, count, exchange) for rank, exchange in enumerate(exchanges(count))]
    return at_once([partial(run, rank) for rank in range(count)])
