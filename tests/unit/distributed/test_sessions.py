"""What ranks say in a session: both ends hear it, in order; what fails on one rank reaches all of them."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest
from support.forking import Report
from support.ranks_in_threads import (
    AT_ONCE_S,
    FULL,
    SUBJECT,
    TIMEOUT_S,
    assert_failed,
    assert_went_well,
    at_once,
    begin,
    eventually,
    ranks_in_processes,
    ranks_in_threads,
    say,
    say_all,
    stopped,
    wait_for,
)

from fastpersist.distributed import sessions as session_room
from fastpersist.distributed.coordination import Ranks
from fastpersist.distributed.sessions import Session
from fastpersist.errors import (
    AgreementTimeoutError,
    CoordinationError,
    InternalError,
    PeerError,
)


def test_the_coordinator_does_not_look_at_all_ranks_for_each_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """That would be the square of their number. Messages of the next round that are early count for that one."""
    monkeypatch.setattr(Session, "missing", lambda _: pytest.fail("all ranks were looked at"))
    with ranks_in_threads(8) as ranks:
        first, *others = begin(ranks)
        assert not first.has_all()
        for session in others:
            session.tell(b"one")
        others[3].tell(b"two")
        assert first.gather(b"") == [b"", *[b"one"] * 7]
        assert not first.has_all()
        assert not first.lacks(4)
        assert [first.lacks(rank) for rank in (1, 2, 3, 5, 6, 7)] == [True] * 6
        for session in others:
            if session is not others[3]:
                session.tell(b"two")
        assert first.gather(b"") == [b"", *[b"two"] * 7]


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
        eventually(lambda: here._offer)
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
        eventually(lambda: one.failure)
        with pytest.raises(PeerError):
            one.check()


# --- late, silent, or waiting for each other


@pytest.mark.slow  # lets a deadline pass three times
@pytest.mark.parametrize("begins", [True, False])
@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_is_late_by_more_than_the_deadline_is_waited_for_and_named(
    late: int, begins: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It evaluates, or is in one system call for long: none of its threads uses the session, or has begun it."""
    monkeypatch.setattr(session_room, "_LATE_S", 0.2)
    with ranks_in_threads(2, timeout_s=1.0) as ranks:
        sessions = {rank: one.begin(SUBJECT) for rank, one in enumerate(ranks) if begins or rank != late}

        def save(rank: int) -> Any:
            if rank == late:
                time.sleep(3.0)
            return say(sessions[rank] if rank in sessions else ranks[rank].begin(SUBJECT))

        assert_went_well(at_once([lambda: save(0), lambda: save(1)]))
    assert f"{SUBJECT}: waiting for rank {late}, alive and late by" in caplog.text


def test_a_rank_that_is_killed_while_it_is_late_is_noticed_at_once() -> None:
    def evaluate(_ranks: Ranks, report: Report) -> None:
        report(0)
        time.sleep(TIMEOUT_S)

    with ranks_in_processes(2, {1: evaluate}) as (own, children):
        session = own.begin(SUBJECT)
        wait_for(children[1], 0)
        threading.Timer(0.3, os.kill, (children[1].pid, signal.SIGKILL)).start()
        since_s = time.monotonic()
        with pytest.raises(PeerError) as caught:
            session.gather(b"")
        assert_failed(caught.value, 1, "is gone while")
        assert 0.3 <= time.monotonic() - since_s < 0.3 + AT_ONCE_S


@pytest.mark.parametrize("call", ["hear", "offered"])
def test_ranks_that_wait_for_each_other_fail_at_the_deadline(call: str) -> None:
    with ranks_in_threads(3, timeout_s=0.5) as ranks:
        first, one, two = begin(ranks)

        def wait_for_the_end() -> bytes:
            two.tell(b"done")
            return two.hear()

        outcomes = at_once([lambda: first.gather(b""), getattr(one, call), wait_for_the_end])
        for outcome in outcomes:
            assert_failed(outcome, 1, "rank 1 and rank 0 waited for each other", AgreementTimeoutError)


@pytest.mark.parametrize("silent", [0, 2])
def test_a_stopped_rank_is_named_to_all_within_the_deadline(silent: int) -> None:
    with ranks_in_threads(3, timeout_s=1.0) as ranks:
        sessions = begin(ranks)
        since_s = time.monotonic()
        with stopped(ranks[silent]):
            outcomes = say_all([session for session in sessions if session.rank != silent])
        assert time.monotonic() - since_s > 0.7
        for outcome in outcomes:
            assert_failed(outcome, silent, "for 1 s" if silent == 0 else "for 0.8 s", AgreementTimeoutError)
        assert isinstance(outcomes[0], TimeoutError)
        eventually(lambda: sessions[silent].failure)
        with pytest.raises(PeerError):
            sessions[silent].check()
        sessions[silent].finish()
        assert_went_well(say_all(begin(ranks)))


def test_all_stopped_ranks_are_named() -> None:
    with ranks_in_threads(12, timeout_s=0.2) as ranks:
        sessions = begin(ranks)
        sessions[1].tell(b"")
        caught = []

        def gather() -> None:
            with pytest.raises(AgreementTimeoutError) as error:
                sessions[0].gather(b"")
            caught.append(error.value)

        with stopped(*ranks[2:]):
            at_once([gather])
        assert "ranks 2, 3, 4, 5, 6, 7, 8, 9 and 2 more for" in str(caught[0])
        assert caught[0].rank == 2


def test_a_rank_that_does_not_hear_what_rank_0_sends_holds_only_so_much_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_room, "_HELD_BYTES", 1 << 20)
    piece = os.urandom(1 << 20)
    with ranks_in_threads(2) as ranks:
        first, other = begin(ranks)
        sender = threading.Thread(target=lambda: [first.answer(piece) for _ in range(64)])
        sender.start()
        eventually(lambda: other._held_bytes > 1 << 20)
        time.sleep(0.2)
        assert other._held_bytes <= 4 << 20  # with what is read at once
        assert [other.hear() == piece for _ in range(64)] == [True] * 64
        sender.join(TIMEOUT_S)
        assert other._held_bytes == 0


def test_a_rank_that_is_lost_while_rank_0_settles_fails_the_save_before_it_or_not_at_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with ranks_in_threads(3) as ranks:
        sessions = begin(ranks)
        first = sessions[0]
        looked = first._raise_failure

        def lose_rank_2() -> None:
            """Be another thread of rank 0 that serves its connections: the end of one is the next thing it sees."""
            with ranks[0].connections.lock:
                ranks[0].lost(2, "for the test", False)

        another = threading.Thread(target=lose_rank_2)

        def look_and_lose() -> None:
            looked()
            another.start()
            another.join(AT_ONCE_S / 4)  # it gets as far as it can before the session is settled

        monkeypatch.setattr(first, "_raise_failure", look_and_lose)
        first.settle()
        monkeypatch.undo()
        another.join(TIMEOUT_S)
        first.check()
        first.answer(b"published")
        assert sessions[1].hear() == b"published"
        sessions[1].check()  # else this rank undid what rank 0 has published
