"""A rank is killed, stopped, or cut off for a while: all others know in time, and the next session works."""

from __future__ import annotations

import functools
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable

import pytest
from support.forking import Report
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
    connection_of,
    eventually,
    meet,
    ranks_in_processes,
    ranks_in_threads,
    say,
    say_all,
    stopped,
    wait_for,
)

from fastpersist.distributed import coordination
from fastpersist.distributed.connections import connection, io_thread
from fastpersist.distributed.connections.frames import MESSAGE, PULSE, frame
from fastpersist.distributed.connections.io_thread import IO_THREAD
from fastpersist.distributed.coordination import Ranks
from fastpersist.distributed.sessions import Session
from fastpersist.errors import (
    AgreementTimeoutError,
    CoordinationError,
    PeerError,
)


def seconds(call: Callable[[], object]) -> float:
    since_s = time.monotonic()
    call()
    return time.monotonic() - since_s


# --- a rank is gone, or silent


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("dead", [0, 1])
def test_a_killed_process_is_noticed_at_once_by_all(dead: int, point: str, leak_check: None) -> None:
    killed = threading.Event()

    def die(ranks: Ranks, report: Report) -> None:
        def stay(_session: Session, where: str) -> None:
            if where == point:
                report(0)
                signal.pause()

        say(ranks.begin(SUBJECT), stay)

    def live(ranks: Ranks, report: Report) -> None:
        with pytest.raises(PeerError) as caught:
            say(ranks.begin(SUBJECT))
        assert_failed(caught.value, dead, "is gone while")
        report(0)

    def not_too_early(session: Session, where: str) -> None:
        if where == POINTS[3] and session.rank == 0:
            assert killed.wait(TIMEOUT_S)  # or it would be over
            eventually(lambda: session.failure)

    with ranks_in_processes(3, {dead: die, 2: live}) as (own, children):
        caught: list[float | PeerError] = []

        def say_it() -> None:
            with pytest.raises(PeerError) as raised:
                say(own.begin(SUBJECT), not_too_early)
            caught.extend([time.monotonic(), raised.value])

        thread = threading.Thread(target=say_it)
        thread.start()
        wait_for(children[dead], 0)
        since_s = time.monotonic()
        children[dead].kill()
        killed.set()
        thread.join(TIMEOUT_S)
        ended_s, error = caught
        assert isinstance(ended_s, float)
        assert ended_s - since_s < AT_ONCE_S
        assert_failed(error, dead, "is gone while")
        wait_for(children[2], 0)
        assert time.monotonic() - since_s < AT_ONCE_S
        assert children[2].wait().verdict == "passed"


@pytest.mark.parametrize("is_seen", [True, False])
def test_a_session_without_a_dead_rank_does_not_wait_for_the_deadline(
    is_seen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_seen:  # as on another machine: it may come back
        monkeypatch.setattr(coordination, "is_dead", lambda _: False)
        monkeypatch.setattr(coordination, "_RETURN_S", 0.3)

    def leave(_ranks: Ranks, _report: Report) -> None:
        os._exit(0)  # without goodbye

    with ranks_in_processes(2, {1: leave}) as (own, children):
        children[1].wait()
        session = own.begin(SUBJECT)
        since_s = time.monotonic()
        with pytest.raises(PeerError) as caught:
            session.gather(b"")
        assert_failed(caught.value, 1, "is gone")
        assert (0.0 if is_seen else 0.3) <= time.monotonic() - since_s < 0.3 + AT_ONCE_S
    with ranks_in_processes(2, {0: leave}) as (own, children):
        children[0].wait()
        session = own.begin(SUBJECT)
        since_s = time.monotonic()
        with pytest.raises(PeerError) as caught:
            session.tell(b"")
        assert_failed(caught.value, 0, "cannot be reached")
        assert time.monotonic() - since_s < AT_ONCE_S


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_stopped_process_holds_nobody_up(stopped: int) -> None:
    def work(_ranks: Ranks, report: Report) -> None:
        report(0)
        signal.pause()

    with ranks_in_processes(2, {stopped: work}) as (own, children):
        wait_for(children[stopped], 0)
        os.kill(children[stopped].pid, signal.SIGSTOP)
        os.waitpid(children[stopped].pid, os.WUNTRACED)
        session = own.begin(SUBJECT)
        own.connections.send(frame(MESSAGE, 1, bytes(48 << 20)), [stopped])  # more than any kernel keeps
        assert own.connections.unsent() == [stopped]
        assert seconds(session.check) < AT_ONCE_S / 4
        assert seconds(lambda: own.begin("step 101")) < AT_ONCE_S / 4
        assert seconds(lambda: session.fail(FULL)) < AT_ONCE_S
        assert seconds(own.close) < AT_ONCE_S


@pytest.mark.slow  # lets a deadline pass
@pytest.mark.parametrize("deaf", [0, 1])
def test_a_peer_that_does_not_read_runs_into_the_deadline(deaf: int) -> None:
    large = bytes(48 << 20)  # more than any kernel keeps
    with ranks_in_threads(2, timeout_s=0.4) as ranks:
        first, other = begin(ranks)
        with stopped(ranks[deaf]):
            if deaf:
                first.answer(large)  # nobody waits for it any longer
                call: Callable[[], object] = first.check
            else:
                call = functools.partial(other.tell, large)
            (outcome,) = at_once([call])
        assert_failed(outcome, deaf, "nothing came from", AgreementTimeoutError)


@pytest.mark.slow  # lets a deadline pass
def test_a_peer_that_does_not_read_is_not_taken_for_a_machine_that_is_down(monkeypatch: pytest.MonkeyPatch) -> None:
    large = bytes(48 << 20)
    with ranks_in_threads(2) as ranks:
        for module in (connection, io_thread):
            monkeypatch.setattr(module, "SILENT_MACHINE_S", 0.2)
        first, other = begin(ranks)
        ranks[0].connections.send(frame(MESSAGE, 1, large), [1])  # its window is closed from now on
        end_s = time.monotonic() + 2.0
        while time.monotonic() < end_s:
            first.check()
            time.sleep(0.02)
        outcomes = at_once([lambda: first.answer(b"more"), lambda: (other.hear(), other.hear())])
        assert outcomes == [None, (large, b"more")]


def test_nobody_waits_for_a_rank_that_has_given_up_to_read() -> None:
    with ranks_in_threads(3) as ranks:
        first, one, two = begin(ranks)
        one.tell(b"plan 1")
        two.tell(b"plan 2")
        first.gather(b"")
        one.fail(FULL)
        eventually(lambda: first.failure)
        with stopped(*ranks[1:]):
            (took_s,) = at_once([lambda: seconds(lambda: first.answer(bytes(48 << 20)))])  # more than any kernel keeps
        assert took_s < AT_ONCE_S
        with pytest.raises(PeerError) as caught:
            first.gather(b"")
        assert_failed(caught.value, 1, "no room")


# --- connections are lost, and made anew


@pytest.mark.parametrize("breaker", [0, 2])
def test_a_connection_that_is_lost_between_sessions_is_made_anew(breaker: int, leak_check: None) -> None:
    with ranks_in_threads(3) as ranks:
        for _ in range(2):
            assert_went_well(say_all(begin(ranks)))
            connection_of(ranks[breaker], 2 - breaker).shutdown(socket.SHUT_RDWR)
            assert_went_well(say_all(begin(ranks)))


@pytest.mark.parametrize("breaker", [0, 1])
def test_a_connection_that_is_lost_right_behind_other_news_is_lost_before_the_session(breaker: int) -> None:
    with ranks_in_threads(2) as ranks:
        ranks[breaker].connections.send(frame(PULSE), [1 - breaker])
        connection_of(ranks[breaker], 1 - breaker).shutdown(socket.SHUT_RDWR)
        assert_went_well(say_all(begin(ranks)))


def test_a_connection_that_is_made_and_lost_before_rank_0_has_seen_it_is_lost_before_the_session() -> None:
    with ranks_in_threads(2) as ranks:
        with stopped(ranks[0]):
            for _ in range(2):
                connection_of(ranks[1], 0).shutdown(socket.SHUT_RDWR)
                ranks[1].connections.catch_up()
                ranks[1].connections.connect(TIMEOUT_S)
            connection_of(ranks[1], 0).shutdown(socket.SHUT_RDWR)
        assert_went_well(say_all(begin(ranks)))


@pytest.mark.parametrize("breaker", [0, 2])
def test_a_connection_that_is_lost_in_a_session_fails_this_one_only(breaker: int) -> None:
    def cut(session: Session, where: str) -> None:
        if where == POINTS[2] and session.rank == breaker:
            connection_of(ranks[breaker], 2 - breaker).shutdown(socket.SHUT_RDWR)

    with ranks_in_threads(3) as ranks:
        outcomes = say_all(begin(ranks), cut)
        assert_failed(outcomes[0], 2, "connection was lost")
        assert_failed(outcomes[1], 2, "connection was lost")
        assert_failed(outcomes[2], 0, "connection was lost")
        assert_went_well(say_all(begin(ranks)))


@pytest.mark.parametrize("breaker", [0, 1])
def test_what_is_offered_reaches_a_rank_whose_connection_was_lost_before(breaker: int) -> None:
    def other_asks() -> bytes:
        offered = other.offered()
        other.tell(offered)
        return offered

    with ranks_in_threads(2) as ranks:
        connection_of(ranks[breaker], 1 - breaker).shutdown(socket.SHUT_RDWR)
        first, other = begin(ranks)
        first.offer(b"here")
        first.announce()  # to nobody, if it sees by now that nobody is there
        assert at_once([lambda: first.gather(b""), other_asks]) == [[b"", b"here"], b"here"]


def lose_on_this_side_only(ranks: Ranks) -> socket.socket:
    """Lose the connection with rank 0, which does not hear of it until what this returns is closed."""
    with ranks.connections.lock:
        kept = socket.socket(fileno=os.dup(connection_of(ranks, 0).fileno()))
        ranks.connections._drop(ranks.connections._by_rank[0])
        ranks.lost(0, "for the test", False)
    return kept


def test_what_is_offered_and_lost_on_its_way_is_told_again_to_who_asks() -> None:
    def other_asks() -> bytes:
        offered = other.offered()
        other.tell(offered)
        return offered

    with ranks_in_threads(2) as ranks:
        first = ranks[0].begin(SUBJECT)
        with ranks[1].connections.lock:  # its I/O thread does not read the offer meanwhile
            first.offer(b"here")
            first.announce()
            lost = lose_on_this_side_only(ranks[1])
        with lost as kept:
            kept.setblocking(True)
            assert b"here" in kept.recv(1 << 16)
            other = ranks[1].begin(SUBJECT)
            since_s = time.monotonic()
            assert at_once([lambda: first.gather(b""), other_asks]) == [[b"", b"here"], b"here"]
            assert time.monotonic() - since_s < AT_ONCE_S


def test_a_rank_that_comes_twice_is_taken_by_its_last_connection() -> None:
    with ranks_in_threads(2) as ranks:
        before = connection_of(ranks[0], 1)
        session = ranks[1].begin(SUBJECT)
        kept = lose_on_this_side_only(ranks[1])
        first = ranks[0].begin(SUBJECT)
        session.fail(FULL)
        with pytest.raises(PeerError) as caught:
            first.gather(b"")
        assert_failed(caught.value, 1, "had lost its connection")
        assert before.fileno() == -1
        kept.close()
        assert_went_well(say_all(begin(ranks)))


def accept(listener: socket.socket) -> socket.socket:
    """Accept the next connection of a socket that does not block."""
    eventually(lambda: select.select([listener], [], [], 0)[0])
    return listener.accept()[0]


def read_away(connected: socket.socket, what: bytes) -> bytes:
    """Let what has come over a connection be lost, and then the connection; return what it was."""
    connected.setblocking(True)
    connected.settimeout(TIMEOUT_S)
    came = b""
    while what not in came:
        came += connected.recv(1 << 16)
    connected.shutdown(socket.SHUT_RDWR)
    return came


@pytest.mark.parametrize("how", ["gives up", "loses its connection"])
def test_a_failure_that_is_lost_on_its_way_to_rank_0_is_told_over_the_next_connection(
    how: str, leak_check: None
) -> None:
    with ranks_in_threads(3) as ranks:
        session = ranks[1].begin(SUBJECT)
        if how == "gives up":
            with stopped(ranks[0]):
                session.fail(FULL)
                read_away(connection_of(ranks[0], 1), b"no room")
        else:
            with stopped(ranks[0]):
                connection_of(ranks[1], 0).shutdown(socket.SHUT_RDWR)
                eventually(lambda: session.failure)
                with pytest.raises(PeerError) as noticed:
                    session.check()
                session.fail(noticed.value)  # over a connection that is lost, too
                listener = ranks[0].connections._listener
                assert listener is not None
                with accept(listener) as accepted:
                    assert b"had lost" not in read_away(accepted, b"FPR")  # the hello; the rest is for who is rank 0
        later = ranks[1].begin("step 101")
        later.tell(b"plan 1")  # it is at the next session when rank 0 begins this one
        since_s = time.monotonic()
        for late in begin([ranks[0], ranks[2]]):
            with pytest.raises(PeerError) as caught:
                say(late)
            assert_failed(caught.value, 1, "no room" if how == "gives up" else "had lost its connection")
        assert time.monotonic() - since_s < AT_ONCE_S
        first, other = (ranks[rank].begin("step 101") for rank in (0, 2))
        other.tell(b"plan 2")
        assert first.gather(b"") == [b"", b"plan 1", b"plan 2"]


def test_a_rank_that_was_away_hears_what_it_has_missed() -> None:
    with ranks_in_threads(3) as ranks:
        with stopped(ranks[2]):
            connection_of(ranks[0], 2).shutdown(socket.SHUT_RDWR)
            ranks[1].begin(SUBJECT).fail(FULL)
            session = ranks[0].begin(SUBJECT)  # sees the end of the connection, so rank 2 cannot be told
            with pytest.raises(PeerError, match="no room"):
                session.gather(b"")
            assert ranks[0].connections.ranks() == [1]
            session.finish()
        ranks[0].begin("step 101")  # rank 0 is busy with its next save
        (away,) = begin(ranks[2:])
        with pytest.raises(PeerError) as caught:
            say(away)
        assert_failed(caught.value, 1, "no room")


@pytest.mark.parametrize("how", ["gives up", "notices"])
@pytest.mark.parametrize("breaker", [0, 1])
def test_who_begins_late_over_a_new_connection_hears_of_a_failure_though_rank_0_does_other_things(
    breaker: int, how: str, leak_check: None
) -> None:
    with ranks_in_threads(2) as ranks:
        session = ranks[0].begin(SUBJECT)
        if how == "gives up":
            with stopped(ranks[0]):  # else it could notice first
                connection_of(ranks[breaker], 1 - breaker).shutdown(socket.SHUT_RDWR)
                session.fail(FULL)
        else:
            connection_of(ranks[breaker], 1 - breaker).shutdown(socket.SHUT_RDWR)
            eventually(lambda: session.failure)
            with pytest.raises(PeerError) as noticed:
                session.check()
            session.fail(noticed.value)
        (late,) = begin(ranks[1:])
        since_s = time.monotonic()
        with pytest.raises(PeerError) as caught:
            say(late)
        assert_failed(caught.value, *((0, "no room") if how == "gives up" else (1, "connection was lost")))
        assert time.monotonic() - since_s < AT_ONCE_S
        assert_went_well(say_all(begin(ranks)))


def test_who_loses_its_connection_after_a_failure_was_sent_to_it_hears_of_it(leak_check: None) -> None:
    with ranks_in_threads(2) as ranks:
        with stopped(ranks[1]):
            ranks[0].begin(SUBJECT).fail(FULL)
            read_away(connection_of(ranks[1], 0), b"no room")
        (late,) = begin(ranks[1:])
        since_s = time.monotonic()
        with pytest.raises(PeerError) as caught:
            say(late)
        assert_failed(caught.value, 0, "no room")
        assert time.monotonic() - since_s < AT_ONCE_S
        assert_went_well(say_all(begin(ranks)))


def test_a_follower_connects_again_by_itself_and_so_is_late_but_not_lost(
    monkeypatch: pytest.MonkeyPatch, leak_check: None
) -> None:
    monkeypatch.setattr(coordination, "_RETURN_S", 3.0)
    with ranks_in_threads(2) as ranks:
        before = connection_of(ranks[0], 1)
        before.shutdown(socket.SHUT_RDWR)
        eventually(lambda: ranks[0].connections.ranks() == [1] and connection_of(ranks[0], 1) is not before)
        session = ranks[0].begin(SUBJECT)

        def be_late() -> None:
            time.sleep(3.5)
            say(ranks[1].begin(SUBJECT))

        assert at_once([lambda: say(session)[0], be_late]) == [[b"plan 0", b"plan 1"], None]


def test_each_rank_has_one_thread_for_its_connections_which_ends_with_them(leak_check: None) -> None:
    def io_threads() -> list[threading.Thread]:
        return [one for one in threading.enumerate() if one.name == IO_THREAD and one not in before]

    before = set(threading.enumerate())
    with ranks_in_threads(3) as ranks:
        begin(ranks)
        assert len(io_threads()) == 3
        ranks[1].close()
        assert len(io_threads()) == 2
    assert io_threads() == []


def test_calls_do_not_wait_for_an_io_thread_that_has_failed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("for the test")

    with ranks_in_threads(2) as ranks:
        first, other = begin(ranks)
        monkeypatch.setattr(ranks[0], "took", fail)
        other.tell(b"plan 1")
        with pytest.raises(CoordinationError, match="has failed: RuntimeError: for the test"):
            first.gather(b"")
        with pytest.raises(PeerError):
            other.hear()
    assert "the thread fastpersist-ranks has failed" in caplog.text


def test_after_goodbye_the_end_of_a_connection_is_no_failure(leak_check: None) -> None:
    with ranks_in_threads(3) as ranks:
        first, one, two = begin(ranks)
        for session in (one, two):
            session.tell(b"all that it has to say")
        two.finish()
        ranks[2].close()
        eventually(lambda: ranks[0].connections.ranks() == [1])
        first.check()
        assert first.gather(b"") == [b"", *[b"all that it has to say"] * 2]
        first.answer(b"end")
        assert one.hear() == b"end"
        one.tell(b"more")
        since_s = time.monotonic()
        with pytest.raises(PeerError) as caught:
            first.gather(b"")
        assert_failed(caught.value, 2, "has closed")
        assert time.monotonic() - since_s < AT_ONCE_S / 4


def test_a_rank_that_waits_for_a_closed_one_is_told_at_once() -> None:
    with ranks_in_threads(2) as ranks:
        session = ranks[1].begin(SUBJECT)
        ranks[0].close()
        with pytest.raises(PeerError) as caught:
            session.hear()
        assert_failed(caught.value, 0, "has closed")


def test_closed_ranks_refuse_and_say_so(leak_check: None) -> None:
    ranks = meet(2)
    sessions = begin(ranks)
    for one in ranks:
        one.close()
        one.close()
    for call in (lambda: ranks[0].begin(SUBJECT), lambda: sessions[0].gather(b""), sessions[1].hear):
        with pytest.raises(CoordinationError, match="closed"):
            call()
    for session in sessions:
        session.fail(FULL)
        session.finish()


def test_ranks_that_are_let_go_close_their_connections(leak_check: None) -> None:
    ranks = meet(3)
    begin(ranks)
    del ranks
