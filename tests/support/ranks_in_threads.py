"""Ranks without torch: the threads of this process, or forked processes beside it, that meet by a fake collective.

with ranks_in_threads(3) as ranks:
    sessions = [one.begin("step 1") for one in ranks]
    outcomes = at_once([lambda: sessions[0].gather(b""), ...])     # a result, or what was raised, of each

with ranks_in_processes(3, {1: work, 2: work}) as (own, children):   # work(ranks, report) runs in rank 1, and 2
    children[1].kill()
"""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection, Pipe
from typing import Any

from support.forking import Child, Report

from fastpersist.distributed.coordination import Exchange, Ranks
from fastpersist.distributed.sessions import Session
from fastpersist.errors import NoSpaceError, PeerError

TIMEOUT_S = 40.0
"""Of ranks that are not to run into it."""

AT_ONCE_S = 4.0
"""What should be noticed at once must be noticed within this."""

SUBJECT = "step 100"
FULL = NoSpaceError(errno.ENOSPC, "no room on /data")
POINTS = ("before the plan", "before the answer", "before it is done", "at the end")
Hook = Callable[[Session, str], None]


def at_once(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Run functions on a thread each; return what they return, or the exception that they raise."""

    def run(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(run, calls))


def exchanges(count: int) -> list[Exchange]:
    """Return a collective for each of so many threads."""
    barrier = threading.Barrier(count)
    told: list[Any] = [None] * count

    def of(rank: int) -> Exchange:
        def exchange(own: Any) -> list[Any]:
            told[rank] = own
            barrier.wait(TIMEOUT_S)
            found = list(told)
            barrier.wait(TIMEOUT_S)
            return found

        return exchange

    return [of(rank) for rank in range(count)]


def meet(count: int, *, timeout_s: float = TIMEOUT_S) -> list[Ranks]:
    """Return connected ranks."""
    collective = exchanges(count)
    calls = [
        lambda rank=rank: Ranks.of(rank, count, collective[rank], timeout_s=timeout_s)  # type: ignore[misc]
        for rank in range(count)
    ]
    found = at_once(calls)
    for one in found:
        if isinstance(one, BaseException):
            raise one
    return found


@contextlib.contextmanager
def ranks_in_threads(count: int, *, timeout_s: float = TIMEOUT_S) -> Iterator[list[Ranks]]:
    """Give connected ranks, which are closed at the end."""
    ranks = meet(count, timeout_s=timeout_s)
    try:
        yield ranks
    finally:
        for one in ranks:
            one.close()


@contextlib.contextmanager
def ranks_in_processes(
    count: int,
    works: Mapping[int, Callable[[Ranks, Report], None]],
    *,
    timeout_s: float = TIMEOUT_S,
    before: Callable[[int], object] = lambda _rank: None,
) -> Iterator[tuple[Ranks, dict[int, Child]]]:
    """Run ranks in forked processes; give the one that is left, connected, and the processes by rank.

    Args:
        count: How many ranks there are.
        works: What each of the other ranks does, by rank.
        timeout_s: The seconds of silence after which a rank counts as failed, as in `Ranks.of`.
        before: Called in each of the processes, with its rank, before the ranks meet.
    """
    (own,) = set(range(count)) - set(works)
    pipes: dict[int, Connection] = {}
    children: dict[int, Child] = {}

    def child_of(rank: int, theirs: Connection) -> Child:
        def exchange(said: Any) -> list[Any]:
            theirs.send(said)
            return list(theirs.recv())

        def work(report: Report) -> None:
            before(rank)
            ranks = Ranks.of(rank, count, exchange, timeout_s=timeout_s)
            works[rank](ranks, report)
            ranks.close()

        return Child(work)

    def exchange(said: Any) -> list[Any]:
        told = {own: said, **{rank: pipe.recv() for rank, pipe in pipes.items()}}
        found = [told[rank] for rank in range(count)]
        for pipe in pipes.values():
            pipe.send(found)
        return found

    with contextlib.ExitStack() as stack:
        for rank in works:
            ours, theirs = Pipe()
            children[rank] = stack.enter_context(child_of(rank, theirs))
            theirs.close()
            pipes[rank] = stack.enter_context(ours)
        ranks = Ranks.of(own, count, exchange, timeout_s=timeout_s)
        try:
            yield ranks, children
        finally:
            ranks.close()


def nothing(_session: Session, _point: str) -> None:
    """Do nothing at a point of a save."""


def say(session: Session, hook: Hook = nothing) -> Any:
    """Do what one rank does in a save."""
    hook(session, POINTS[0])
    if session.rank == 0:
        plans = session.gather(b"plan 0")
        hook(session, POINTS[1])
        session.answer(b"go")
        hook(session, POINTS[2])
        session.check()
        done = session.gather(b"done 0")
        hook(session, POINTS[3])
        session.check()
        session.answer(b"end")
        session.finish()
        return plans, done
    session.tell(b"plan %d" % session.rank)
    hook(session, POINTS[1])
    go = session.hear()
    hook(session, POINTS[2])
    session.check()
    session.tell(b"done %d" % session.rank)
    hook(session, POINTS[3])
    end = session.hear()
    session.finish()
    return go, end


def say_all(sessions: Sequence[Session], hook: Hook = nothing) -> list[Any]:
    """Let all ranks do it, each on a thread; return what each gets, or raises."""

    def one(session: Session) -> Any:
        try:
            return say(session, hook)
        except BaseException as error:
            session.fail(error)
            raise

    return at_once([lambda session=session: one(session) for session in sessions])  # type: ignore[misc]


def begin(ranks: Sequence[Ranks], subject: str = SUBJECT) -> list[Session]:
    """Begin a session on all ranks."""
    return [one.begin(subject) for one in ranks]


def assert_went_well(outcomes: Sequence[Any]) -> None:
    """Check what `say_all` returns when nobody fails."""
    count = len(outcomes)
    assert outcomes[0] == ([b"plan %d" % rank for rank in range(count)], [b"done %d" % rank for rank in range(count)])
    assert outcomes[1:] == [(b"go", b"end")] * (count - 1)


def assert_failed(outcome: Any, rank: int, text: str, kind: type[PeerError] = PeerError) -> None:
    """Check what a rank raises when another one is to blame."""
    assert type(outcome) is kind, repr(outcome)
    assert outcome.rank == rank
    assert outcome.subject == SUBJECT
    assert f"rank {rank}" in str(outcome)
    assert SUBJECT in str(outcome)
    assert text in str(outcome)


def connection_of(ranks: Ranks, other: int) -> socket.socket:
    """Return the socket by which one rank is connected with another."""
    return ranks.connections._by_rank[other].socket


@contextlib.contextmanager
def stopped(*ranks: Ranks) -> Iterator[None]:
    """Let the I/O threads of ranks do nothing, as if their processes were stopped; this thread may use the ranks."""
    with contextlib.ExitStack() as stack:
        for one in ranks:
            stack.enter_context(one.connections.lock)
        yield


def eventually(true: Callable[[], object]) -> None:
    """Wait until something is true that an I/O thread brings about."""
    end_s = time.monotonic() + TIMEOUT_S
    while not true():
        assert time.monotonic() < end_s, "it never happens"
        time.sleep(0.001)


def wait_for(child: Child, step: int) -> None:
    """Wait until a child has reported a step."""
    end_s = time.monotonic() + TIMEOUT_S
    while child.reported != step:
        assert not child.ended(), child.wait().message
        assert time.monotonic() < end_s
        time.sleep(0.001)
