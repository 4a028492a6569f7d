"""Ranks, here threads, agree at which of their occasions all of them stop."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.ranks_in_threads import at_once, ranks_in_threads

from fastpersist.distributed import stop_agreement
from fastpersist.distributed.coordination import Ranks
from fastpersist.distributed.stop_agreement import StopAgreement
from fastpersist.errors import AgreementTimeoutError, CoordinationError, PeerError


@pytest.fixture(params=[2, 3])
def ranks(request: pytest.FixtureRequest) -> Iterator[list[Ranks]]:
    with ranks_in_threads(request.param) as found:
        yield found


def no_limit() -> None:
    return None


def stop(
    ranks: list[Ranks], told: dict[int, tuple[int, int]], step: Callable[[int, int], object], limit: int = 400
) -> list[tuple[int, list[int]]]:
    """Run ranks until they stop; return at which occasion each does, and the signals.

    Args:
        ranks: The `Ranks` of all ranks.
        told: By rank, the occasion before which a signal comes, and the signal's number.
        step: Called by each rank before each occasion.
        limit: The most occasions.
    """

    def run(rank: int, agreement: StopAgreement) -> tuple[int, list[int]]:
        signals: list[int] = []
        for count in range(1, limit):
            step(rank, count)
            if rank in told and told[rank][0] == count:
                signals.append(told[rank][1])
            if found := agreement.occasion(signals, no_limit):
                return count, found
        return limit, []

    agreements = [StopAgreement(one.begin("when to stop")) for one in ranks]
    calls = [lambda rank=rank: run(rank, agreements[rank]) for rank in range(len(ranks))]  # type: ignore[misc]
    found = at_once(calls)
    for one in found:
        if isinstance(one, BaseException):
            raise one
    return found


def in_step(ranks: list[Ranks]) -> Callable[[int, int], object]:
    """Return a step in which each rank waits for all others."""
    barrier = threading.Barrier(len(ranks))
    return lambda rank, count: barrier.wait(30)


@pytest.mark.parametrize("told", [{0: (5, 15)}, {1: (5, 15)}])
def test_all_stop_soon_after_one_is_told(ranks: list[Ranks], told: dict[int, tuple[int, int]]) -> None:
    found = stop(ranks, told, in_step(ranks))
    assert all(one == found[0] for one in found)
    count, signals = found[0]
    assert 5 < count <= 8
    assert signals == [15]


def test_each_learns_of_the_signals_of_all(ranks: list[Ranks]) -> None:
    found = stop(ranks, {0: (5, 15), 1: (5, 10)}, in_step(ranks))
    assert all(one == found[0] for one in found)
    assert set(found[0][1]) <= {15, 10}
    assert 15 in found[0][1]


@pytest.mark.parametrize("slow", [0, 1])
def test_ranks_far_apart_find_an_occasion_that_none_has_passed(
    ranks: list[Ranks], slow: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others run ahead, by 30 occasions: collective calls let nobody get further."""
    monkeypatch.setattr(stop_agreement, "_ANSWER_S", 0.1)
    moved = threading.Condition()
    reached = [0]  # by the slow one
    has_begun = threading.Event()

    def step(rank: int, count: int) -> None:
        if rank == slow and count == 1:
            assert has_begun.wait(30)  # until the others are at their 30th
        with moved:
            if rank == slow:
                reached[0] = count
                moved.notify_all()
            else:
                if count == 30:
                    has_begun.set()
                assert moved.wait_for(lambda: count - reached[0] <= 30, 30)

    found = stop(ranks, {slow: (1, 15)}, step, limit=100_000)
    assert all(one == found[0] for one in found)
    assert found[0][1] == [15]


def test_nothing_is_said_while_nobody_is_told(ranks: list[Ranks]) -> None:
    sessions = [one.begin("when to stop") for one in ranks]
    agreements = [StopAgreement(session) for session in sessions]
    for _ in range(50):
        calls = [lambda one=one: one.occasion([], no_limit) for one in agreements]  # type: ignore[misc]
        assert at_once(calls) == [[]] * len(ranks)
    assert [session.message_count for session in sessions] == [0] * len(ranks)


def test_they_may_stop_again(ranks: list[Ranks]) -> None:
    agreements = [StopAgreement(one.begin("when to stop")) for one in ranks]
    barrier = threading.Barrier(len(ranks))

    def run(rank: int) -> list[tuple[int, list[int]]]:
        found = []
        signals: list[int] = []
        for count in range(1, 40):
            barrier.wait(30)
            if count in (3, 20):
                signals = [15]  # on all ranks
            if stopped := agreements[rank].occasion(signals, no_limit):
                found.append((count, stopped))
                signals = []
        return found

    found = at_once([lambda rank=rank: run(rank) for rank in range(len(ranks))])  # type: ignore[misc]
    assert all(one == found[0] for one in found), found
    assert len(found[0]) == 2


def test_rank_that_is_gone_ends_the_agreement_for_all(ranks: list[Ranks]) -> None:
    agreements = [StopAgreement(one.begin("when to stop")) for one in ranks]
    ranks[-1].close()

    def run(agreement: StopAgreement) -> None:
        while time.monotonic() < end_s:
            agreement.occasion([15], no_limit)
            time.sleep(0.001)

    end_s = time.monotonic() + 30

    for error in at_once([lambda one=one: run(one) for one in agreements[:-1]]):  # type: ignore[misc]
        assert isinstance(error, PeerError)


def test_rank_waits_no_longer_than_it_may(ranks: list[Ranks]) -> None:
    agreements = [StopAgreement(one.begin("when to stop")) for one in ranks]
    assert agreements[0].occasion([15], no_limit) == []  # it names the second one, and never comes there
    with pytest.raises(AgreementTimeoutError):
        for _ in range(2):
            agreements[1].occasion([], lambda: 0.05)


def test_message_that_makes_no_sense_is_an_error(ranks: list[Ranks]) -> None:
    sessions = [one.begin("when to stop") for one in ranks]
    agreement: Any = StopAgreement(sessions[1])
    sessions[0].answer(b'{"at": "soon"}')
    with pytest.raises(CoordinationError, match="makes no sense"):
        for _ in range(1000):
            agreement.occasion([], no_limit)
