"""Who is connected with rank 0, and who is not: strangers, forked children, and more than there are descriptors for."""

from __future__ import annotations

import errno
import os
import signal
import socket
import threading
import time

import pytest
from support.forking import Report, run_in_child
from support.ranks_in_threads import (
    AT_ONCE_S,
    FULL,
    SUBJECT,
    TIMEOUT_S,
    assert_failed,
    assert_went_well,
    begin,
    connection_of,
    ranks_in_processes,
    ranks_in_threads,
    say_all,
    wait_for,
)

from fastpersist import _native, connections
from fastpersist.connections import MESSAGE, TOKEN_BYTES, frame
from fastpersist.coordination import Ranks
from fastpersist.errors import (
    CoordinationError,
    PeerError,
)

# --- strangers


HELLO = 3


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        frame(HELLO, 0, bytes(TOKEN_BYTES) + b"1"),
        frame(MESSAGE, 1, b"plan 1"),
        frame(HELLO)[:5] + b"\xff" * 12,
        b"",
    ],
    ids=["garbage", "wrong token", "no hello", "endless hello", "nothing"],
)
def test_a_stranger_is_not_let_in_and_disturbs_nobody(
    said: bytes, monkeypatch: pytest.MonkeyPatch, leak_check: None
) -> None:
    if not said:
        monkeypatch.setattr(connections, "_STRANGER_S", 0.2)
    with (
        ranks_in_threads(2) as ranks,
        socket.create_connection(ranks[0]._connections.addresses[0], timeout=TIMEOUT_S) as stranger,
    ):
        stranger.sendall(said)
        session, other = begin(ranks)
        thread = threading.Thread(target=session.gather, args=(b"",))
        since_s = time.monotonic()
        thread.start()
        assert closed_by_peer(stranger)
        assert time.monotonic() - since_s < AT_ONCE_S
        assert thread.is_alive()
        other.tell(b"")
        thread.join(TIMEOUT_S)
        session.check()
        assert_went_well(say_all(begin(ranks)))


def closed_by_peer(stranger: socket.socket) -> bool:
    try:
        return stranger.recv(1) == b""
    except ConnectionResetError:
        return True


def test_a_member_with_the_token_that_talks_nonsense_is_lost_and_rank_0_lives() -> None:
    with ranks_in_threads(3) as ranks:
        sessions = begin(ranks)
        ranks[1]._connections.send(b"nonsense" * 8, [0])
        with pytest.raises(PeerError) as caught:
            sessions[0].gather(b"")
        assert_failed(caught.value, 1, "no message of ours")
        assert_went_well(say_all(begin(ranks)))


def test_rank_0_without_descriptors_does_not_spin_and_listens_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Full:
        def __init__(self, listener: socket.socket) -> None:
            self.fileno = listener.fileno

        def accept(self) -> None:
            raise OSError(errno.EMFILE, "Too many open files")

    with ranks_in_threads(2) as ranks:
        begin(ranks, "step 1")
        board = ranks[0]._connections
        assert board._listener is not None
        connection_of(ranks[1], 0).shutdown(socket.SHUT_RDWR)
        ranks[1]._connections.look()
        other = ranks[1].begin(SUBJECT)
        other.tell(b"")  # a new connection waits to be accepted
        with monkeypatch.context() as patch:
            patch.setattr(board, "_listener", Full(board._listener))
            session = ranks[0].begin(SUBJECT)
            for _ in range(5):
                session.check()
        assert [record.getMessage() for record in caplog.records] == [
            "rank 0 cannot take connections of other ranks, until the next save: [Errno 24] Too many open files"
        ]
        assert_went_well(say_all(begin(ranks)))


# --- forked children


@pytest.mark.parametrize("in_table", [True, False])
def test_a_forked_child_does_not_keep_the_connection_of_a_killed_rank_open(
    in_table: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not in_table:  # the native module's table is full
        monkeypatch.setattr(_native, "close_in_forked_child", lambda fd: None)
    until, end = os.pipe()

    def work(_ranks: Ranks, report: Report) -> None:
        if os.fork() == 0:
            os.close(end)
            report(0)
            os.read(until, 1)
            os._exit(0)
        signal.pause()

    try:
        with ranks_in_processes(2, {1: work}) as (own, children):
            wait_for(children[1], 0)
            session = own.begin(SUBJECT)
            os.kill(children[1].pid, signal.SIGKILL)
            since_s = time.monotonic()
            with pytest.raises(PeerError) as caught:
                session.gather(b"")
            assert_failed(caught.value, 1, "is gone")
            assert time.monotonic() - since_s < AT_ONCE_S
            os.close(end)
            end = -1
    finally:
        os.close(until)
        if end >= 0:
            os.close(end)


def test_a_forked_child_cannot_use_the_connections_and_leaves_them_alone() -> None:
    with ranks_in_threads(2) as ranks:
        sessions = begin(ranks)

        def child(_report: Report) -> None:
            numbers = [os.open("/dev/null", os.O_RDONLY) for _ in range(32)]  # takes the numbers that have become free
            for one, session in zip(ranks, sessions, strict=True):
                for call in (lambda one=one: one.begin("x"), session.check):  # type: ignore[misc]
                    with pytest.raises(CoordinationError, match="forked"):
                        call()
                session.fail(FULL)
                one.close()
            ranks.clear()
            sessions.clear()
            for fd in numbers:
                os.fstat(fd)

        run_in_child(child)
        assert_went_well(say_all(sessions))
