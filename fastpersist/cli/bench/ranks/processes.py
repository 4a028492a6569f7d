"""Processes that are the ranks of one gloo group on this machine.

Each rank holds its state in its own memory. A rank gets a function and its arguments over a pipe, and calls it
(`ranks.work`, `ranks.sharded_work`), so that ways of saving take turns in the same processes. All times are of
CLOCK_MONOTONIC, which the processes of one machine share: a save by several ranks lasts from the first that begins it
to the last that returns.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from fastpersist.cli.child_process import ConnectedProcess, connection_to_parent

__all__ = [
    "Failed",
    "Here",
    "RankProcesses",
    "Span",
    "main",
    "whole_span",
]

_PATIENCE_S = 5.0

Span = tuple[float, float]
"""When something began and ended, in seconds."""


class Failed(Exception):
    """A call failed on a rank: the rank, the call and the reason in one line; its traceback may follow."""


def whole_span(spans: Sequence[Span]) -> float:
    """Return the seconds from the first beginning to the last end."""
    return max(end for _, end in spans) - min(start for start, _ in spans)


# --- the parent's end ---


class RankProcesses:
    """Processes that are the ranks of one gloo group, and of a smaller group of the first ranks for each other size.

    A context manager; the processes end with it. One owner thread.

    Args:
        counts: Sizes of the groups.
        scratch: A directory for the file of their rendezvous.
        timeout_s: Limit for one call.
    """

    def __init__(
        self,
        counts: Sequence[int],
        scratch: str,
        timeout_s: float,
    ) -> None:
        self._timeout_s = timeout_s
        self._ranks: list[ConnectedProcess] = []
        self._broken = ""
        meeting_path = os.path.join(scratch, f"meeting-{max(counts)}-{time.monotonic_ns()}")
        try:
            for rank in range(max(counts)):
                self._ranks.append(ConnectedProcess("fastpersist.cli.bench.ranks.processes"))
                self._ranks[-1].connection.send((rank, sorted(counts), meeting_path, timeout_s))
        except BaseException:
            self._end(0.0)
            raise

    def call(self, count: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Have the first ranks call function(here, *arguments); return what it returned, by rank.

        Raises:
            Failed: It raised on one of them, took too long, or has ended one of them: then no more calls are answered.
        """
        if self._broken:
            raise Failed(self._broken)
        waiting = {self._ranks[rank].connection: rank for rank in range(count)}
        for connection in waiting:
            with contextlib.suppress(ConnectionError):  # it has ended, which shows when its answer is awaited
                connection.send((function, arguments))
        results: dict[int, Any] = {}
        failures: list[Failed] = []  # raised when all have answered: a late answer would look like one to the next call
        deadline_s = time.monotonic() + self._timeout_s
        while waiting:
            for ready in wait(list(waiting), max(0.0, deadline_s - time.monotonic())):
                rank = waiting.pop(ready)  # type: ignore[call-overload]
                try:
                    failed, result = self._ranks[rank].connection.recv()
                except (EOFError, ConnectionError):
                    self._broken = f"rank {rank} of {count} has died in {function.__name__}"
                    raise Failed(self._broken) from None
                if failed:
                    failures.append(Failed(f"rank {rank} of {count} failed in {function.__name__}: {result}"))
                results[rank] = result
            if waiting and time.monotonic() >= deadline_s:
                late = f"ranks {sorted(waiting.values())} of {count} still are in {function.__name__}"
                self._broken = "; ".join([*map(str, failures), f"{late} after {self._timeout_s:g} s"])
                raise Failed(self._broken)
        if failures:
            raise failures[0]
        return [results[rank] for rank in range(count)]

    def __enter__(self) -> RankProcesses:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(_PATIENCE_S if error is None and not self._broken else 0.0)

    def _end(self, patience_s: float) -> None:
        for rank in self._ranks:
            rank.connection.close()  # of all, before one is waited for: so all end at the same time
        for rank in self._ranks:
            rank.end(patience_s)
        self._ranks = []


# --- the ranks ---


class Here:
    """What a rank knows of itself.

    Attributes:
        rank: The number of this rank.
        groups: The process group of the first n ranks, by n.
        state: What this rank saves; its tensors are the same on all ranks.
    """

    def __init__(self, rank: int, counts: Sequence[int]) -> None:
        self.rank = rank
        self.groups = {count: dist.new_group(range(count)) for count in counts}
        self.state: dict[str, Any] = {}

    def together(self, count: int) -> None:
        """Wait for the other ranks."""
        if count > 1:
            dist.barrier(group=self.groups[count])


def main(descriptor: int) -> None:
    """Be a rank for the parent at the other end of a connection: do what comes over it until it closes.

    Args:
        descriptor: The file descriptor of this process's end.
    """
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with connection_to_parent(descriptor) as connection:
        rank, counts, meeting_path, timeout_s = connection.recv()
        timeout = datetime.timedelta(seconds=timeout_s)
        # Not by a file: URL, whose path cannot be relative.
        store = dist.FileStore(meeting_path, max(counts))  # type: ignore[attr-defined]
        store.set_timeout(timeout)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=max(counts), timeout=timeout)
        here = Here(rank, counts)
        while True:
            function, arguments = connection.recv()
            try:
                answer = (False, function(here, *arguments))
            except Exception as error:  # noqa: BLE001 - the parent reports it
                said = str(error).splitlines()[0] if str(error) else ""
                answer = (True, f"{type(error).__name__}: {said}\n{traceback.format_exc()}")
            connection.send(answer)
