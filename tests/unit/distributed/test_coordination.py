"""The ranks of a group meet, and hear each other in one session after the other; a failure reaches all of them."""

from __future__ import annotations

import itertools
import logging
import os
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
    exchanges,
    ranks_in_threads,
    say,
    say_all,
)

from fastpersist.distributed import connections, coordination, peers
from fastpersist.distributed import sessions as session_room
from fastpersist.distributed.coordination import Ranks, Session
from fastpersist.errors import (
    AgreementTimeoutError,
    ConfigError,
    CoordinationError,
    InternalError,
    NoSpaceError,
    PeerError,
)

# --- all goes well, and what is offered


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


def test_a_save_takes_four_messages_of_a_rank_and_64_ranks_are_at_it_together() -> None:
    with ranks_in_threads(64) as ranks:
        sessions = begin(ranks)
        assert_went_well(say_all(sessions))
        assert [session.message_count for session in sessions] == [4 * 63] + [4] * 63
        assert sessions[1].message_bytes == 4 * (17 + 16) + len(b"plan 1" + b"go" + b"done 1" + b"end")
        assert sessions[0].message_bytes == sum(session.message_bytes for session in sessions[1:])


def test_large_messages_pass_both_ways_at_once() -> None:
    large = os.urandom(1 << 20) * 24
    with ranks_in_threads(3) as ranks:
        first, *others = begin(ranks)

        def other(session: Session) -> bytes:
            session.tell(large)
            return session.hear()

        def answer() -> list[bytes]:
            first.answer(large)  # before it has read anything
            return first.gather(b"")

        outcomes = at_once([answer, lambda: other(others[0]), lambda: other(others[1])])
        assert outcomes == [[b"", large, large], large, large]


def test_a_message_beyond_the_limit_is_refused_where_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_room, "MESSAGE_LIMIT_BYTES", 1000)
    with ranks_in_threads(2) as ranks:
        first, other = begin(ranks)
        other.tell(b"x" * 1000)
        assert first.gather(b"")[1] == b"x" * 1000
        with pytest.raises(CoordinationError, match="1001 bytes"):
            other.tell(b"x" * 1001)
        with pytest.raises(CoordinationError, match="1001 bytes"):
            first.answer(b"x" * 1001)


def test_who_asks_hears_what_is_offered_whoever_comes_first_and_nobody_else_hears_anything() -> None:
    with ranks_in_threads(4) as ranks:
        asking = ranks[1].begin("a")  # before rank 0 knows of it
        found: list[bytes] = []
        thread = threading.Thread(target=lambda: found.append(asking.offered()))
        thread.start()
        first = ranks[0].begin("a")
        late, silent = ranks[2].begin("a"), ranks[3].begin("a")
        first.offer(b"here")
        calls = [
            lambda: first.gather(b""),
            lambda: (late.offered(), late.offered(), late.tell(b"2")),
            lambda: silent.tell(b"3"),
            lambda: (thread.join(TIMEOUT_S), asking.tell(b"1")),
        ]
        outcomes = at_once(calls)
        assert outcomes[0] == [b"", b"1", b"2", b"3"], "what is asked for has no place in the order of messages"
        assert (found, outcomes[1]) == ([b"here"], (b"here", b"here", None))
        assert [one.message_count for one in (asking, late, silent)] == [3, 3, 1]
        assert first.message_count == 7


def test_what_is_announced_is_told_once_and_waits_for_who_has_not_begun() -> None:
    with ranks_in_threads(3) as ranks:
        first, here = ranks[0].begin("a"), ranks[1].begin("a")
        first.offer(b"here")
        first.announce()
        first.announce()
        assert here.offered() == b"here"
        late = ranks[2].begin("a")
        first.answer(b"next")
        assert late.hear() == b"next"
        assert late.offered() == b"here"
        assert (first.message_count, late.message_count) == (2 * 2, 2)


@pytest.mark.parametrize("failing", [0, 2])
def test_who_waits_for_an_offer_is_told_of_a_failure(failing: int) -> None:
    with ranks_in_threads(3) as ranks:
        sessions = begin(ranks)
        outcomes = at_once([sessions[1].offered, lambda: sessions[failing].fail(FULL), lambda: sessions[0].gather(b"")])
        assert_failed(outcomes[0], failing, "no room on /data")


def test_rank_that_never_offers_what_is_asked_for_is_silent() -> None:
    with ranks_in_threads(2, timeout_s=0.5) as ranks:
        _, other = begin(ranks)
        with pytest.raises(AgreementTimeoutError, match="rank 0 was silent"):
            other.offered()


def test_each_role_has_its_own_calls() -> None:
    with ranks_in_threads(2) as ranks:
        first, other = begin(ranks)
        of_first = (lambda: other.gather(b""), lambda: other.answer(b""), lambda: other.answer_each([b"", b""]))
        of_first = (*of_first, lambda: other.offer(b""), other.announce)
        for call in (lambda: first.tell(b""), first.hear, first.offered, *of_first):
            with pytest.raises(InternalError):
                call()


@pytest.mark.parametrize("count", [1, 2, 5])
def test_each_rank_hears_its_own_answer_among_those_for_all(count: int) -> None:
    with ranks_in_threads(count) as ranks:
        first, *others = begin(ranks)
        first.answer(b"to all")
        first.answer_each([b"nobody's", *(b"to rank %d" % rank for rank in range(1, count))])
        first.answer_each([b"x"] * count)  # one and the same goes out once for all, and is heard by each
        for other in others:
            assert [other.hear() for _ in range(3)] == [b"to all", b"to rank %d" % other.rank, b"x"]
        assert first.message_count == 3 * (count - 1)
        with pytest.raises(InternalError, match=f"{count + 1} messages for {count} ranks"):
            first.answer_each([b""] * (count + 1))


def test_an_answer_beyond_the_limit_is_refused_before_any_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_room, "MESSAGE_LIMIT_BYTES", 1000)
    with ranks_in_threads(3) as ranks:
        first, *others = begin(ranks)
        with pytest.raises(CoordinationError, match="1001 bytes"):
            first.answer_each([b"", b"short", b"x" * 1001])
        first.answer(b"after")
        assert [other.hear() for other in others] == [b"after", b"after"]


def test_large_answers_of_each_rank_pass_while_they_tell(leak_check: None) -> None:
    large = [os.urandom(1 << 20) * 8 for _ in range(3)]
    with ranks_in_threads(3) as ranks:
        first, *others = begin(ranks)

        def other(session: Session) -> bytes:
            session.tell(large[session.rank])
            return session.hear()

        def answer() -> list[bytes]:
            first.answer_each(large)  # before it has read anything
            return first.gather(b"")

        outcomes = at_once([answer, lambda: other(others[0]), lambda: other(others[1])])
        assert outcomes == [[b"", *large[1:]], *large[1:]]


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
        waits = threading.Event()
        session.poll = waits.set
        got: list[float] = []

        def gather() -> None:
            session.gather(b"")
            got.append(time.monotonic())

        thread = threading.Thread(target=gather)
        thread.start()
        assert waits.wait(TIMEOUT_S)
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


def test_the_first_failure_is_the_one_that_all_hear_of() -> None:
    with ranks_in_threads(3) as ranks:
        sessions = begin(ranks)
        sessions[1].fail(FULL)
        sessions[1].fail(ValueError("another"))
        with pytest.raises(PeerError):
            sessions[0].gather(b"")
        sessions[0].fail(ValueError("mine, because of that"))
        with pytest.raises(PeerError) as caught:
            sessions[2].hear()
        assert_failed(caught.value, 1, "no room")
        for session in (sessions[0], sessions[2]):  # again and again
            with pytest.raises(PeerError, match="no room"):
                session.check()


def test_the_first_of_two_failures_ahead_of_the_others_is_the_one_they_hear_of() -> None:
    with ranks_in_threads(4) as ranks:
        begin(ranks, "step 1")
        for session in [ranks[2].begin(SUBJECT), ranks[1].begin(SUBJECT)]:
            session.fail(FULL)
            ranks[0]._connections.look()
        for one in (ranks[0], ranks[3]):
            with pytest.raises(PeerError) as caught:
                say(one.begin(SUBJECT))
            assert_failed(caught.value, 2, "no room")


def test_after_its_end_a_session_cannot_fail() -> None:
    with ranks_in_threads(2) as ranks:
        first, other = begin(ranks)
        other.finish()
        other.fail(FULL)
        first.check()
        first.finish()
        first.fail(FULL)
        assert_went_well(say_all(begin(ranks)))


def test_an_answer_that_came_before_a_failure_is_heard() -> None:
    with ranks_in_threads(3) as ranks:
        first, one, two = begin(ranks)
        one.tell(b"")
        two.tell(b"")
        first.gather(b"")
        first.answer(b"published")
        two.fail(FULL)
        with pytest.raises(PeerError):
            first.gather(b"")
        assert one.hear() == b"published"
        with pytest.raises(PeerError):
            one.check()


@pytest.mark.parametrize("culprit", [0, 1])
def test_what_poll_raises_is_raised_and_told(culprit: int) -> None:
    calls: list[float] = []

    def poll() -> None:
        calls.append(time.monotonic())
        if len(calls) == 4:
            raise FULL

    with ranks_in_threads(2) as ranks:
        sessions = begin(ranks)
        sessions[culprit].poll = poll
        wait = [lambda: sessions[0].gather(b""), sessions[1].hear][culprit]
        with pytest.raises(NoSpaceError):
            wait()
        assert max(after - before for before, after in itertools.pairwise(calls)) < AT_ONCE_S
        with pytest.raises(PeerError) as caught:
            sessions[1 - culprit].check()
        assert_failed(caught.value, culprit, "no room")
        assert_went_well(say_all(begin(ranks)))


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
    real = connections.Connections.listen
    with socket.create_server(("127.0.0.2", 0)) as other:

        def listen(board: connections.Connections, hosts: list[str]) -> None:
            real(board, hosts)
            board.addresses.insert(0, other.getsockname())

        monkeypatch.setattr(connections.Connections, "listen", listen)
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
        assert f"0.2 and 0.1 (protocols {connections.PROTOCOL} and 0)" in str(outcome)


def test_ranks_need_time() -> None:
    with pytest.raises(ConfigError, match="0 s"):
        Ranks.of(0, 1, list, timeout_s=0)
