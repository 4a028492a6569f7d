"""The ranks of a group meet, begin one session after the other, and each failure reaches the session it is of."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
from support.ranks_in_threads import (
    AT_ONCE_S,
    FULL,
    POINTS,
    SUBJECT,
    TIMEOUT_S,
    assert_failed,
    assert_went_well,
    at_once,
    begin,
    eventually,
    exchanges,
    ranks_in_threads,
    say,
    say_all,
)

from fastpersist.distributed import coordination, peers
from fastpersist.distributed.connections import frames, io_thread
from fastpersist.distributed.coordination import Ranks
from fastpersist.distributed.sessions import Session
from fastpersist.errors import (
    ConfigError,
    CoordinationError,
    PeerError,
)


def test_what_is_cut_is_cut_at_the_largest_page_of_any_rank() -> None:
    pages = [4096, 1 << 16, 1 << 14]
    given = exchanges(3)

    def of(rank: int) -> Ranks:
        def exchange(own: Any) -> Sequence[Any]:
            if isinstance(own, dict) and "page_bytes" in own:
                own = {**own, "page_bytes": pages[rank]}
            return given[rank](own)

        return Ranks.of(rank, 3, exchange)

    ranks = at_once([lambda rank=rank: of(rank) for rank in range(3)])  # type: ignore[misc]
    try:
        assert [one.block_bytes for one in ranks] == [1 << 16] * 3
        assert [one.begin("step 1").block_bytes for one in ranks] == [1 << 16] * 3
    finally:
        for one in ranks:
            one.close()


@pytest.mark.parametrize("count", [1, 2, 5])
def test_ranks_hear_each_other_in_one_session_after_the_other(count: int, leak_check: None) -> None:
    with ranks_in_threads(count) as ranks:
        assert [(one.rank, one.count, one.nodes) for one in ranks] == [(r, count, (0,) * count) for r in range(count)]
        for step in range(3):
            sessions = begin(ranks, f"step {step}")
            assert [(s.rank, s.count, s.nodes, s.subject) for s in sessions] == [
                (rank, count, (0,) * count, f"step {step}") for rank in range(count)
            ]
            assert_went_well(say_all(sessions))


def test_two_groups_of_the_same_ranks_do_not_hear_each_other() -> None:
    with ranks_in_threads(2) as one, ranks_in_threads(2) as two:
        first, second = begin(one), begin(two)
        first[1].tell(b"of the first")
        second[1].tell(b"of the second")
        assert second[0].gather(b"")[1] == b"of the second"
        second[1].fail(FULL)
        assert first[0].gather(b"")[1] == b"of the first"
        first[0].check()


def test_a_session_is_begun_on_one_thread_while_another_waits_in_the_one_before() -> None:
    with ranks_in_threads(2) as ranks:
        session, other = begin(ranks)
        got: list[float] = []

        def gather() -> None:
            session.gather(b"")
            got.append(time.monotonic())

        thread = threading.Thread(target=gather)
        thread.start()
        eventually(lambda: session.awaited)
        since_s = time.monotonic()
        begin(ranks)
        assert time.monotonic() - since_s < AT_ONCE_S / 4
        said_s = time.monotonic()
        other.tell(b"")
        thread.join(TIMEOUT_S)
        assert got[0] - said_s < AT_ONCE_S / 4


# --- a rank fails


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("culprit", [0, 2])
def test_a_failure_reaches_all_others_with_who_and_why_and_the_next_session_works(culprit: int, point: str) -> None:
    told = threading.Event()

    def fail_there(session: Session, where: str) -> None:
        if where == point and session.rank == culprit:
            session.fail(FULL)
            told.set()
            raise FULL
        if where == point == POINTS[3] and session.rank == 0:
            assert told.wait(TIMEOUT_S)  # or it would be over
            eventually(lambda: session.failure is not None)  # the I/O thread has read it

    with ranks_in_threads(4) as ranks:
        since_s = time.monotonic()
        outcomes = say_all(begin(ranks), fail_there)
        assert time.monotonic() - since_s < AT_ONCE_S
        for rank, outcome in enumerate(outcomes):
            if rank == culprit:
                assert outcome is FULL
            else:
                assert_failed(outcome, culprit, "failed while saving step 100: NoSpaceError: no room on /data")
        assert_went_well(say_all(begin(ranks)))


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_failure_ahead_of_the_others_waits_for_them(culprit: int) -> None:
    with ranks_in_threads(3) as ranks:
        early = begin(ranks, "step 1")
        ahead = ranks[culprit].begin(SUBJECT)
        ahead.fail(FULL)  # the others have not begun it
        assert_went_well(say_all(early))
        rest = {rank: one.begin(SUBJECT) for rank, one in enumerate(ranks) if rank != culprit}
        for session in sorted(rest.values(), key=lambda session: session.rank):
            with pytest.raises(PeerError) as caught:
                say(session)
            assert_failed(caught.value, culprit, "no room")
        assert_went_well(say_all(begin(ranks)))


def test_messages_of_later_sessions_are_kept_and_those_of_older_ones_are_dropped() -> None:
    with ranks_in_threads(2) as ranks:
        one, late = begin(ranks)
        two = ranks[1].begin("step 101")
        two.tell(b"of two")
        late.tell(b"of one")
        assert one.gather(b"")[1] == b"of one"
        late.tell(b"of one again")
        one.finish()
        late.finish()
        assert ranks[0].begin("step 101").gather(b"")[1] == b"of two"
        assert not ranks[0]._early
        assert_went_well(say_all(begin(ranks)))


def test_the_first_of_two_failures_ahead_of_the_others_is_the_one_they_hear_of() -> None:
    with ranks_in_threads(4) as ranks:
        begin(ranks, "step 1")
        for session in [ranks[2].begin(SUBJECT), ranks[1].begin(SUBJECT)]:
            session.fail(FULL)
            ranks[0].connections.catch_up()
        for one in (ranks[0], ranks[3]):
            with pytest.raises(PeerError) as caught:
                say(one.begin(SUBJECT))
            assert_failed(caught.value, 2, "no room")


# --- a rank drops a session: save() was interrupted by the exception of a signal handler


@pytest.mark.parametrize("is_made", [True, False])
@pytest.mark.parametrize("culprit", [0, 2])
def test_a_session_that_a_rank_has_begun_and_dropped_fails_on_the_others(
    culprit: int, is_made: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_arguments: object) -> Session:
        raise KeyboardInterrupt

    monkeypatch.setattr(coordination, "_PULSE_S", 0.05)
    with ranks_in_threads(3) as ranks:
        rest = [one.begin(SUBJECT) for rank, one in enumerate(ranks) if rank != culprit]
        if is_made:
            ranks[culprit].begin(SUBJECT)  # nobody holds it
        else:
            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                patch.setattr(coordination, "Session", interrupted)
                ranks[culprit].begin(SUBJECT)
        for outcome in say_all(rest):
            assert_failed(outcome, culprit, "its call was interrupted")
        assert_went_well(say_all(begin(ranks)))


@pytest.mark.parametrize("asked", [0, 1])
def test_to_be_asked_for_a_session_that_is_over_or_not_begun_makes_none_fail(asked: int) -> None:
    with ranks_in_threads(2) as ranks:
        first, other = begin(ranks)
        first.answer(b"end")
        (first, other)[asked].finish()
        ahead = ranks[1 - asked].begin("step 2")
        for number in (first.number, ahead.number):
            ranks[1 - asked].connections.send(frames.frame(frames.PULSE, number), [asked])
        late = ranks[asked].begin("step 2")
        assert_went_well(say_all(sorted([late, ahead], key=lambda session: session.rank)))
        assert [one._failures for one in ranks] == [{}, {}]
        if asked == 0:
            assert other.hear() == b"end"
        (first, other)[1 - asked].check()


# --- meeting


def places(*names: str) -> list[coordination.Exchange]:
    """Return collectives of ranks that seem to run on machines of these names."""

    def of(rank: int, exchange: coordination.Exchange) -> coordination.Exchange:
        def other(own: Any) -> Sequence[Any]:
            return exchange({**own, "place": (names[rank], "net")} if isinstance(own, dict) and "place" in own else own)

        return other

    return [of(rank, exchange) for rank, exchange in enumerate(exchanges(len(names)))]


def meet_at(*names: str, **versions: Sequence[str]) -> list[Any]:
    collective = places(*names)
    return at_once(
        [
            lambda rank=rank: Ranks.of(  # type: ignore[misc]
                rank,
                len(names),
                collective[rank],
                versions={key: value[rank] for key, value in versions.items()},
            )
            for rank in range(len(names))
        ]
    )


def test_ranks_of_several_machines_meet_at_the_first_address_that_answers(
    monkeypatch: pytest.MonkeyPatch, leak_check: None
) -> None:
    monkeypatch.setattr(coordination, "own_hosts", lambda: ["0.0.0.1", "127.0.0.1"])
    ranks = meet_at("b", "a", "b", "c")
    assert [one.nodes for one in ranks] == [(0, 1, 0, 2)] * 4
    assert_went_well(say_all(begin(ranks)))
    for one in ranks:
        one.close()


def test_ranks_meet_at_the_real_addresses_of_this_machine(leak_check: None) -> None:
    hosts = peers.own_hosts()
    if not hosts:
        pytest.skip("this machine has no address but its own loopback")
    assert not any(host.startswith("127.") for host in hosts)
    ranks = meet_at("a", "b")
    assert_went_well(say_all(begin(ranks)))
    for one in ranks:
        one.close()


def test_ranks_that_cannot_reach_each_other_all_say_so(monkeypatch: pytest.MonkeyPatch, leak_check: None) -> None:
    monkeypatch.setattr(coordination, "own_hosts", lambda: ["0.0.0.1"])
    monkeypatch.setattr(coordination, "_MEETING_S", 0.3)
    for outcome in meet_at("a", "b", "c"):
        assert type(outcome) is CoordinationError, repr(outcome)
        assert "0.0.0.1" in str(outcome)
    monkeypatch.setattr(coordination, "own_hosts", list)
    for outcome in meet_at("a", "b", "c"):
        assert type(outcome) is CoordinationError, repr(outcome)


def test_an_address_where_somebody_else_listens_is_left_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordination, "_WELCOME_S", 0.2)
    real = io_thread.Connections.listen
    with socket.create_server(("127.0.0.2", 0)) as other:

        def listen(board: io_thread.Connections, hosts: list[str], ports: range) -> None:
            real(board, hosts, ports)
            board.addresses.insert(0, other.getsockname())

        monkeypatch.setattr(io_thread.Connections, "listen", listen)
        with ranks_in_threads(2) as ranks:
            assert_went_well(say_all(begin(ranks)))


def test_different_versions_of_torch_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "fastpersist"):
        for one in meet_at("a", "a", "a", torch=("2.7.0", "2.13.0", "2.13.0")):
            one.close()
        assert [record.getMessage() for record in caplog.records] == [
            "the ranks run different versions of torch (2.13.0, 2.7.0); rank 0's writes"
        ]


def test_versions_that_do_not_understand_each_other_are_refused_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    collective = exchanges(2)

    def old(own: Any) -> Sequence[Any]:
        return collective[1]({**own, "protocol": 0})

    versions = [{"fastpersist": "0.2"}, {"fastpersist": "0.1"}]
    outcomes = at_once(
        [
            lambda: Ranks.of(0, 2, collective[0], versions=versions[0]),
            lambda: Ranks.of(1, 2, old, versions=versions[1]),
        ]
    )
    for outcome in outcomes:
        assert type(outcome) is ConfigError
        assert f"0.2 and 0.1 (protocols {frames.PROTOCOL} and 0)" in str(outcome)


def test_ranks_need_time() -> None:
    with pytest.raises(ConfigError, match="0 s"):
        Ranks.of(0, 1, list, timeout_s=0)
