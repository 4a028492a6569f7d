"""Who is connected with rank 0, and who is not: strangers, forked children, and more than there are descriptors for."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable

import pytest
from support.forking import Report, run_in_child
from support.ranks_in_threads import (
    AT_ONCE_S,
    FULL,
    SUBJECT,
    TIMEOUT_S,
    assert_failed,
    assert_went_well,
    at_once,
    begin,
    connection_of,
    eventually,
    exchanges,
    ranks_in_processes,
    ranks_in_threads,
    say_all,
    wait_for,
)

from fastpersist import _native
from fastpersist.distributed.connections import io_thread
from fastpersist.distributed.connections.frames import FAILED, HELLO, MESSAGE, PROOF, PROTOCOL, WELCOME, frame
from fastpersist.distributed.coordination import Ranks
from fastpersist.errors import (
    CoordinationError,
    PeerError,
)

# --- strangers


NONCE = bytes(32)


def hello(rank: int, protocol: int = PROTOCOL) -> bytes:
    """Return what a rank says first."""
    return (b"FPR%d" % protocol) + frame(HELLO, 0, rank.to_bytes(4, "little") + NONCE)[4:]


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", "no message of ours"),
        (hello(1) + frame(PROOF) + bytes(16), "does not know the token"),
        (hello(1) + frame(MESSAGE, 1, b"plan 1") + bytes(16), "no message of ours"),
        (hello(1) + frame(PROOF, 0, b"more") + bytes(16), "no message of ours"),
        (hello(2), "there is no rank 2"),
        (hello(0), "there is no rank 0"),
        (frame(MESSAGE, 1, b"plan 1") + bytes(16), "no message of ours"),
        (frame(HELLO)[:5] + b"\xff" * 12, "no message of ours"),
        (hello(1, 3), f"it speaks protocol 3 of fastpersist, and this rank protocol {PROTOCOL}"),
        (hello(1), ""),
        (b"", ""),
    ],
    ids=[
        *("garbage", "wrong proof", "no proof", "long proof", "no such rank", "rank 0 itself", "no hello"),
        *("endless hello", "older protocol", "nothing more", "nothing"),
    ],
)
def test_a_stranger_is_not_let_in_and_disturbs_nobody(
    said: bytes, why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, leak_check: None
) -> None:
    if not why:
        monkeypatch.setattr(io_thread, "_STRANGER_S", 0.2)
    with (
        ranks_in_threads(2) as ranks,
        socket.create_connection(ranks[0].connections.addresses[0], timeout=TIMEOUT_S) as stranger,
    ):
        before = connection_of(ranks[0], 1)
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
        assert connection_of(ranks[0], 1) is before
        assert_went_well(say_all(begin(ranks)))
    if why:
        assert why in caplog.text


class Relay:
    """Somebody between rank 0 and another rank, who passes on what both say: as it is, or as a test changes it."""

    def __init__(self, change: Callable[[bytes, bool], bytes] = lambda data, _is_up: data) -> None:
        self.up, self.down = b"", b""
        self._change = change
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = [self._listener]
        self._threads: list[threading.Thread] = []

    def stand_between(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Have the ranks that meet from now on be told this one's address."""
        listen = io_thread.Connections.listen

        def listen_behind(board: io_thread.Connections, hosts: list[str], ports: range) -> None:
            listen(board, hosts, ports)
            thread = threading.Thread(target=self._pass_on, args=board.addresses)
            board.addresses = [self._listener.getsockname()]
            self._start(thread)

        monkeypatch.setattr(io_thread.Connections, "listen", listen_behind)

    def close(self) -> None:
        for one in self._open:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(TIMEOUT_S)
        for one in self._open:
            one.close()

    def _start(self, thread: threading.Thread) -> None:
        self._threads.append(thread)
        thread.start()

    def _pass_on(self, address: tuple[str, int]) -> None:
        with contextlib.suppress(OSError):
            while True:
                self._open.append(rank := self._listener.accept()[0])
                self._open.append(first := socket.create_connection(address))
                self._start(threading.Thread(target=self._pass, args=(rank, first, True)))
                self._start(threading.Thread(target=self._pass, args=(first, rank, False)))

    def _pass(self, source: socket.socket, target: socket.socket, is_up: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if is_up:
                    self.up += data
                else:
                    self.down += data
                target.sendall(self._change(data, is_up))
        for one in (source, target):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


def test_who_passes_on_what_the_ranks_say_hears_no_token_and_cannot_say_it_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    relay = Relay()
    relay.stand_between(monkeypatch)
    with contextlib.closing(relay), ranks_in_threads(2) as ranks:
        board = ranks[0].connections
        assert_went_well(say_all(begin(ranks)))
        assert b"plan 1" in relay.up
        assert b"go" in relay.down
        for length in (32, 16, 8):
            assert board.token[:length] not in relay.up + relay.down
        assert board._listener is not None
        with socket.create_connection(board._listener.getsockname()) as again:
            again.sendall(relay.up)
            again.settimeout(TIMEOUT_S)
            session = ranks[0].begin(SUBJECT)
            thread = threading.Thread(target=lambda: closed_by_peer(again) and ranks[1].begin(SUBJECT).tell(b""))
            thread.start()
            session.gather(b"")  # until that one has said so
            thread.join()
        assert "does not know the token" in caplog.text
        assert_went_well(say_all(begin(ranks)))


@pytest.mark.parametrize("is_up", [True, False], ids=["to rank 0", "from rank 0"])
@pytest.mark.parametrize("how", ["changed", "put in", "said twice"])
def test_who_passes_on_what_the_ranks_say_gets_no_word_of_his_own_taken(
    how: str, is_up: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = b"plan 1" if is_up else b"go"

    def change(data: bytes, goes_up: bool) -> bytes:
        if goes_up != is_up or said not in data:
            return data
        if how == "changed":
            return data.replace(said, said.upper())
        if how == "put in":
            return data + frame(MESSAGE, 1, b"done 1") + bytes(16)
        return data + data

    relay = Relay(change)
    relay.stand_between(monkeypatch)
    with contextlib.closing(relay), ranks_in_threads(2) as ranks:
        outcomes = say_all(begin(ranks))
        # Rank 1 may tell of it over its next connection before rank 0 sees the end of this one.
        told = "it had lost its connection" in str(outcomes[0])
        assert_failed(outcomes[0], 1, "it had lost its connection to rank 0" if told else "connection was lost")
        assert_failed(outcomes[1], 0, "connection was lost")
        assert any("no message of ours" in str(outcome) for outcome in outcomes)


@pytest.mark.parametrize(
    "answer",
    [
        frame(WELCOME, 0, NONCE) + bytes(16),
        frame(FAILED, 1, b'[0, "failed", "of an impostor"]') + bytes(16),
        frame(MESSAGE, 1, b"go") + bytes(16),
        b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(64),
    ],
    ids=["wrong welcome", "failure", "message", "garbage"],
)
def test_who_answers_in_the_place_of_rank_0_is_told_nothing_and_not_believed(answer: bytes) -> None:
    with ranks_in_threads(2) as ranks, socket.create_server(("127.0.0.1", 0)) as impostor:
        own, ranks[1].connections.addresses = ranks[1].connections.addresses, [impostor.getsockname()]
        connection_of(ranks[1], 0).shutdown(socket.SHUT_RDWR)
        session = ranks[1].begin(SUBJECT)
        session.tell(b"plan 1")
        with impostor.accept()[0] as accepted:
            accepted.sendall(answer)
            with pytest.raises(PeerError) as caught:
                session.hear()
            heard = b""
            while data := accepted.recv(1 << 16):
                heard += data
        assert "of an impostor" not in str(caught.value)
        assert "does not know the token" in str(caught.value) or "no message of ours" in str(caught.value)
        assert heard[:5] == frame(HELLO)[:5]
        assert len(heard) == len(hello(1))
        with ranks[1].connections._connecting:  # its I/O thread may be on its way to the impostor again
            ranks[1].connections.addresses = own
            ranks[1].connections.drop(0)
        ranks[0].begin(SUBJECT)
        session.fail(caught.value)
        assert_went_well(say_all(begin(ranks)))


def closed_by_peer(stranger: socket.socket) -> bool:
    try:
        while stranger.recv(1 << 16):  # it may have been answered before
            pass
    except ConnectionResetError:
        pass
    return True


def test_a_member_with_the_token_that_talks_nonsense_is_lost_and_rank_0_lives() -> None:
    with ranks_in_threads(3) as ranks:
        sessions = begin(ranks)
        ranks[1].connections.send(b"nonsense" * 8, [0])
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
        board = ranks[0].connections
        assert board._listener is not None
        with monkeypatch.context() as patch:
            patch.setattr(board, "_listener", Full(board._listener))
            connection_of(ranks[1], 0).shutdown(socket.SHUT_RDWR)
            eventually(lambda: caplog.records)  # a new connection waits to be accepted
            time.sleep(0.1)
        ranks[1].begin(SUBJECT)
        ranks[0].begin(SUBJECT)
        assert [record.getMessage() for record in caplog.records] == [
            "rank 0 accepts no connections of other ranks until the next save: [Errno 24] Too many open files"
        ]
        assert_went_well(say_all(begin(ranks)))


def meet_with_limits(count: int, soft_count: int, hard_count: int) -> tuple[int, int]:
    """Let ranks meet in a process with these limits of open files; return the limits that it has then."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft_count, hard_count))
    with ranks_in_threads(count) as ranks:
        assert_went_well(say_all(begin(ranks)))
    return resource.getrlimit(resource.RLIMIT_NOFILE)


def test_rank_0_raises_its_limit_of_open_files_for_its_followers() -> None:
    def work(_report: Report) -> None:
        held_count = len(os.listdir("/proc/self/fd"))
        soft_count, hard_count = meet_with_limits(8, held_count + 60, 1000)
        assert held_count + 60 < soft_count < 1000
        assert hard_count == 1000

    run_in_child(work)


def test_a_hard_limit_of_open_files_is_named_on_all_ranks() -> None:
    def work(_report: Report) -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
        given = exchanges(4)
        calls = [functools.partial(Ranks.of, rank, 4, given[rank]) for rank in range(4)]
        outcomes = at_once(calls)
        for outcome in outcomes:
            assert isinstance(outcome, CoordinationError)
            assert "rank 0 has a connection with each of 3 followers" in str(outcome)
            assert "may have 200: raise the limit" in str(outcome)

    run_in_child(work)


def test_ranks_that_have_descriptors_enough_keep_their_limit() -> None:
    def work(_report: Report) -> None:
        assert meet_with_limits(4, 900, 1000) == (900, 1000)

    run_in_child(work)


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


# --- where rank 0 listens


def port_of(ranks: list[Ranks]) -> int:
    return ranks[0].connections.addresses[0][1]


def test_ports_that_are_allowed_are_taken_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        first = taken.getsockname()[1]
        monkeypatch.setenv("FASTPERSIST_PORTS", f"{first}-{min(first + 50, 65535)}")
        with ranks_in_threads(2) as ranks, ranks_in_threads(2) as others:
            assert first < port_of(ranks) < port_of(others) <= first + 50
            assert_went_well(say_all(begin(ranks)))
            assert_went_well(say_all(begin(others)))


@pytest.mark.parametrize("wrong", ["taken", "none"])
def test_ports_that_cannot_be_had_are_an_error_on_all_ranks(monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        monkeypatch.setenv("FASTPERSIST_PORTS", port if wrong == "taken" else "all")
        with pytest.raises(CoordinationError, match=r"rank 0 cannot listen.*FASTPERSIST_PORTS"):
            with ranks_in_threads(2):
                pass
