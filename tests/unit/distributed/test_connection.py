"""One connection over TCP: the handshake, frames that wait for it, and what is refused."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from support.ranks_in_threads import TIMEOUT_S, eventually

from fastpersist.distributed.connections.connection import Connection, Refused, close_socket, connection_over
from fastpersist.distributed.connections.frames import MESSAGE, digest_of, frame
from fastpersist.errors import InternalError

TOKEN = bytes(range(32))


@contextmanager
def two_ends(token_of_follower: bytes = TOKEN) -> Iterator[tuple[Connection, Connection]]:
    """Connect rank 0's end with the end of rank 3, which has said hello."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        follower = connection_over(socket.create_connection(listener.getsockname()), token_of_follower, 3)
        first = connection_over(listener.accept()[0], TOKEN, None)
    try:
        yield first, follower
    finally:
        for one in (first, follower):
            close_socket(one.socket)


def next_frame(end: Connection) -> tuple[int, int, bytes]:
    found: list[tuple[int, int, bytes]] = []

    def has_come() -> bool:
        end.receive()
        if (one := end.next_frame()) is not None:
            found.append(one)
        return bool(found)

    eventually(has_come)
    return found[0]


def shake_hands(first: Connection, follower: Connection) -> None:
    for end in (first, follower, first):
        kind, _, payload = next_frame(end)
        end.answer(kind, payload)


def send(end: Connection, payload: bytes) -> None:
    data = frame(MESSAGE, 7, payload)
    end.send(data, digest_of(data))


def test_both_sides_prove_themselves_and_then_hear_each_other(leak_check: None) -> None:
    with two_ends() as (first, follower):
        assert not first.is_proven
        assert not follower.is_proven
        shake_hands(first, follower)
        assert (first.rank, follower.rank) == (3, 0)
        send(follower, b"plan")
        assert next_frame(first) == (MESSAGE, 7, b"plan")
        send(first, b"go")
        assert next_frame(follower) == (MESSAGE, 7, b"go")


def test_what_is_sent_before_the_other_side_is_proven_goes_after_it_in_order() -> None:
    with two_ends() as (first, follower):
        for payload in (b"one", b"two"):
            send(follower, payload)
        assert follower.holds_back()
        shake_hands(first, follower)
        assert not follower.holds_back()
        assert [next_frame(first)[2] for _ in range(2)] == [b"one", b"two"]


def test_a_message_larger_than_the_kernel_takes_arrives_whole() -> None:
    large = bytes(8 << 20)
    with two_ends() as (first, follower):
        shake_hands(first, follower)
        send(follower, large)
        assert follower.unsent
        found: list[bytes] = []

        def has_come() -> bool:
            follower.flush()
            first.receive()
            if (one := first.next_frame()) is not None:
                found.append(one[2])
            return bool(found)

        eventually(has_come)
        assert found == [large]
        assert not follower.unsent


def test_a_follower_with_another_token_refuses_the_welcome() -> None:
    with two_ends(token_of_follower=TOKEN[::-1]) as (first, follower):
        kind, _, payload = next_frame(first)
        first.answer(kind, payload)
        with pytest.raises(Refused, match="does not know the token"):
            next_frame(follower)


def test_nothing_is_sent_to_a_side_that_was_not_heard() -> None:
    with two_ends() as (first, _), pytest.raises(InternalError):
        first._seal(b"go", digest_of(b"go"))


def test_the_end_comes_after_what_was_sent_before_it() -> None:
    with two_ends() as (first, follower):
        shake_hands(first, follower)
        send(follower, b"last")
        follower.socket.shutdown(socket.SHUT_WR)
        first.socket.settimeout(TIMEOUT_S)
        ended: list[str | None] = []
        eventually(lambda: ended.append(first.receive()) or ended[-1] is not None)
        assert ended[-1] == "it was closed at the other end"
        assert first.next_frame() == (MESSAGE, 7, b"last")


@pytest.mark.filterwarnings("error")
def test_a_connection_that_the_other_end_closes_at_once_is_not_left_open() -> None:
    made = socket.socket()  # not connected any more: getpeername() raises
    try:
        with pytest.raises(OSError):  # noqa: PT011 - the kernel's, whichever it is
            connection_over(made, b"", 1)
        assert made.fileno() == -1
    finally:
        made.close()
