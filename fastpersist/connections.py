"""The connections between the ranks of a group: whole frames, whatever they mean, on the threads that wait for them.

Rank 0 listens on a TCP port, every other rank keeps one connection to it. Whoever waits for something serves all
connections of this rank; two threads may do so. Sends never block: what the kernel does not take waits here. Forked
children, such as the workers of a DataLoader, keep no connection open, so its end is the end of the process.

    frame   magic with the protocol's number, kind, size, number of the session: 17 bytes; then that many bytes
    hello   the first frame of a connection: the token that only this group knows, and which rank has it
    welcome, the answer to it;  goodbye, after which the end of the connection is no failure

Messages and failures, and the sessions that they belong to, are `coordination`'s affair.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import json
import logging
import os
import selectors
import socket
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

from fastpersist import _native
from fastpersist.errors import CoordinationError

__all__ = [
    "ASK",
    "FAILED",
    "HEADER_BYTES",
    "KNOWN",
    "MESSAGE",
    "MESSAGE_LIMIT_BYTES",
    "OFFER",
    "PROTOCOL",
    "PULSE",
    "TOKEN_BYTES",
    "Connections",
    "Owner",
    "frame",
]

_log = logging.getLogger("fastpersist")

PROTOCOL = 3
"""What the ranks say to each other, here and in `session`, `sharing` and `own_files`; all must speak the same."""
MESSAGE_LIMIT_BYTES = 64 << 20
TOKEN_BYTES = 32

_MAGIC = b"FPR%d" % PROTOCOL
_HEADER = struct.Struct("<4sBIQ")
HEADER_BYTES = _HEADER.size
MESSAGE, FAILED, _HELLO, _WELCOME, _GOODBYE, PULSE, ASK, OFFER, KNOWN = range(1, 10)

_HELLO_LIMIT_BYTES = 64 << 10  # of somebody who has not shown the token yet
_READ_BYTES = 64 << 10
_READS_AT_ONCE = 32  # then it is another connection's turn
_STRANGER_S = 10.0  # so long a connection may take to show the token
_STRANGER_COUNT = 64  # so many of them may be open beside those of the ranks
_SILENT_MACHINE_S = 25  # a machine that acknowledges nothing for so long is down; Linux answers even for a busy process
_TCP_INFO = struct.Struct("<24xI16xI8xI")  # linux/tcp.h: tcpi_unacked, and ms since data was sent and an ACK received


def frame(kind: int, number: int = 0, payload: bytes = b"") -> bytes:
    """Return the bytes of a frame.

    Args:
        kind: `MESSAGE`, `FAILED`, `KNOWN`, `PULSE`, `ASK` or `OFFER`.
        number: Of the session.
        payload: What it says.
    """
    return _HEADER.pack(_MAGIC, kind, len(payload), number) + payload


class Owner(Protocol):
    """Who is told what happens on the connections; with their lock held, on whatever thread serves them."""

    def connected(self) -> None:
        """This rank has connected, for the first time or anew; on others than rank 0."""

    def greeted(self, rank: int) -> None:
        """A rank has connected, for the first time or anew; on rank 0."""

    def took(self, rank: int, kind: int, number: int, payload: bytes) -> None:
        """A rank has said something. ValueError or TypeError if it makes no sense."""

    def lost(self, rank: int, why: str, said_goodbye: bool) -> None:
        """The connection with a rank has come to its end."""


# ----------------------------------------------------------------------------------------- one connection

_inodes: dict[int, int] = {}  # by descriptor: the sockets that a forked child inherits


def _keep_from_children(open_socket: socket.socket) -> None:
    _inodes[open_socket.fileno()] = os.fstat(open_socket.fileno()).st_ino
    _native.close_in_forked_child(open_socket.fileno())


def _close_socket(open_socket: socket.socket) -> None:
    if open_socket.fileno() >= 0:
        _native.forget_descriptor(open_socket.fileno())
        _inodes.pop(open_socket.fileno(), None)
        open_socket.close()


class _Connection:
    """One end of a connection: whole frames in, whole frames out, never blocking.

    Args:
        connected: The socket; becomes this object's.
        rank: Of the other side; None until it has shown the token.
    """

    def __init__(self, connected: socket.socket, rank: int | None) -> None:
        self.socket = connected
        self.rank = rank
        self.unsent: deque[memoryview] = deque()
        self.said_goodbye = False
        self.is_welcome = False
        self.made_s = time.monotonic()
        self.watched = 0  # the events that rank 0's selector was asked for
        self._inbound = bytearray()
        self._error: str | None = None
        self._unanswered_since_s: float | None = None
        connected.setblocking(False)
        # Small frames, one after the other. Keepalive notices a machine that is down while nothing is sent to it.
        for level, option, value in (
            (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
            (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
            (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _SILENT_MACHINE_S * 2 // 5),
            (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _SILENT_MACHINE_S // 5),
            (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
        ):
            connected.setsockopt(level, option, value)
        _keep_from_children(connected)

    def send(self, data: bytes) -> None:
        """Send a frame behind those that were not sent yet, as far as the kernel takes it."""
        self.unsent.append(memoryview(data))
        self.flush()

    def flush(self) -> None:
        """Send what the kernel takes."""
        try:
            while self.unsent:
                sent_bytes = self.socket.send(self.unsent[0], socket.MSG_NOSIGNAL)
                if sent_bytes < len(self.unsent[0]):
                    self.unsent[0] = self.unsent[0][sent_bytes:]
                else:
                    self.unsent.popleft()
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            self._error = error.strerror
            self.unsent.clear()  # what the other side said before it went is still there: receive() tells the end

    def receive(self) -> tuple[list[tuple[int, int, bytes]], str | None]:
        """Return the frames that have come (kind, session number, bytes), and why no more will, if so."""
        ended = None
        try:
            for _ in range(_READS_AT_ONCE):
                data = self.socket.recv(_READ_BYTES)
                self._inbound += data
                if not data:
                    ended = self._error or "it was closed at the other end"
                    break  # not before: the end that is here already shall be known now, not in the next session
        except (BlockingIOError, InterruptedError):
            ended = self._error
        except OSError as error:
            ended = self._error or error.strerror
        frames: list[tuple[int, int, bytes]] = []
        while len(self._inbound) >= HEADER_BYTES:
            magic, kind, size_bytes, number = _HEADER.unpack_from(self._inbound)
            if magic != _MAGIC or size_bytes > (_HELLO_LIMIT_BYTES if self.rank is None else MESSAGE_LIMIT_BYTES):
                self._inbound.clear()
                return frames, "what came is no message of ours"
            end = HEADER_BYTES + size_bytes
            if len(self._inbound) < end:
                break
            frames.append((kind, number, bytes(self._inbound[HEADER_BYTES:end])))
            del self._inbound[:end]
        return frames, ended

    def wanted(self) -> int:
        """Return the events to wait for."""
        return selectors.EVENT_READ | (selectors.EVENT_WRITE if self.unsent else 0)

    def is_unanswered(self) -> bool:
        """Tell whether the machine at the other end has not acknowledged what was sent, for `_SILENT_MACHINE_S`.

        Keepalive is suspended meanwhile, and TCP gives up after a quarter of an hour. TCP_USER_TIMEOUT also ends the
        connection with a process that is alive and does not read (its window is zero), so the kernel is asked instead.
        """
        info = self.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
        if len(info) < _TCP_INFO.size:
            return False
        unacked_count, sent_ms_ago, acked_ms_ago = _TCP_INFO.unpack(info)
        if not unacked_count or acked_ms_ago <= sent_ms_ago:
            self._unanswered_since_s = None  # a receiver whose buffer is full acknowledges what it drops
            return False
        if self._unanswered_since_s is None:
            self._unanswered_since_s = time.monotonic()
        limit_s = _SILENT_MACHINE_S
        return time.monotonic() - self._unanswered_since_s > limit_s and int(acked_ms_ago) > 1000 * limit_s

    def is_open(self) -> bool:
        """Tell whether it was not closed at this end."""
        return self.socket.fileno() >= 0


def _connection(connected: socket.socket, rank: int | None) -> _Connection:
    try:
        return _Connection(connected, rank)
    except OSError:
        connected.close()
        raise


# ---------------------------------------------------------------------------------- the connections of a rank

_Event = tuple[selectors.SelectorKey, int]
_all_connections: weakref.WeakSet[Connections] = weakref.WeakSet()


class Connections:
    """The connections of one rank: of rank 0 with all others, of another with rank 0. Thread-safe.

    Args:
        rank: Of this process.
        count: How many ranks there are.
        owner: Told what happens.

    Attributes:
        lock: Held while something happens, never while waiting; re-entrant, as a signal handler may save.
        token: What a rank has to show; to be set before the first connection.
        addresses: Host and port of rank 0; the first is used.
    """

    def __init__(self, rank: int, count: int, owner: Owner) -> None:
        self.lock = threading.RLock()
        self.token = b""
        self.addresses: list[tuple[str, int]] = []
        self._rank = rank
        self._count = count
        self._owner = weakref.proxy(owner)
        self._connecting = threading.RLock()
        self._why_closed = ""
        self._by_rank: dict[int, _Connection] = {}
        self._strangers: list[_Connection] = []
        self._listener: socket.socket | None = None
        self._is_listening = False
        self._answers_looked_at_s = 0.0
        self._selector: selectors.BaseSelector | None = None  # rank 0's
        _all_connections.add(self)

    def listen(self, hosts: list[str]) -> None:
        """Listen at a port that the kernel picks; on rank 0.

        Args:
            hosts: What the others may connect to; ["127.0.0.1"] if they are all on this machine.

        Raises:
            OSError: It cannot be.
        """
        local = hosts == ["127.0.0.1"]
        both = not local and socket.has_dualstack_ipv6()
        self._listener = socket.create_server(
            ("127.0.0.1" if local else "", 0),
            family=socket.AF_INET6 if both else socket.AF_INET,
            dualstack_ipv6=both,
            backlog=self._count + _STRANGER_COUNT,
        )
        self._listener.setblocking(False)
        _keep_from_children(self._listener)
        self._selector = selectors.DefaultSelector()
        self.take_connections()
        port = self._listener.getsockname()[1]
        self.addresses = [(host, port) for host in hosts]

    def take_connections(self, on: bool = True) -> None:
        """Take connections, or stop it for a while; on rank 0."""
        if self._listener is not None and self._selector is not None and self._is_listening != on:
            self._is_listening = on
            if on:
                self._selector.register(self._listener, selectors.EVENT_READ)
            else:
                self._selector.unregister(self._listener)

    def connect(self, limit_s: float) -> None:
        """Connect with rank 0, unless this rank is; on the others.

        Raises:
            OSError: It cannot be reached. ConnectionRefusedError: nobody listens there.
        """
        with self._connecting:
            if 0 in self._by_rank:
                return
            made = socket.create_connection(self.addresses[0], timeout=limit_s)
            if made.getsockname() == made.getpeername():
                # Nobody listens at the port any more, and the kernel has picked it for this end: TCP allows that.
                made.close()
                raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
            connection = _connection(made, 0)
            with self.lock:
                if self._why_closed:
                    _close_socket(made)
                    return
                self._by_rank[0] = connection
                self._send(connection, frame(_HELLO, 0, self.token + json.dumps(self._rank).encode()))
                self._owner.connected()

    def wait_welcome(self, end_s: float) -> bool:
        """Wait until rank 0 has answered the hello; return whether it has. If not, the connection is closed."""
        connection = self._by_rank[0]
        while connection.is_open() and time.monotonic() < end_s:
            if self.serve_until(lambda: connection.is_welcome, 0.5):
                return True
        with self.lock:
            self._drop(connection)
        return False

    def ranks(self) -> list[int]:
        """Return the ranks that this one is connected with."""
        with self.lock:
            return list(self._by_rank)

    def unsent(self) -> list[int]:
        """Return the ranks that have not read all that was sent to them."""
        with self.lock:
            return [rank for rank, connection in self._by_rank.items() if connection.unsent]

    def send(self, data: bytes, ranks: Iterable[int]) -> None:
        """Send a frame to some ranks; nothing to those that are not connected."""
        with self.lock:
            for rank in ranks:
                if rank in self._by_rank:
                    self._send(self._by_rank[rank], data)

    def look(self) -> None:
        """Serve what is ready. Never blocks.

        Raises:
            CoordinationError: They are closed.
        """
        with self.lock:
            self._refuse_closed()
            if self._by_rank or self._selector is not None:
                self._serve(self._watching().select(0))

    def serve_until(self, over: Callable[[], bool], limit_s: float) -> bool:
        """Wait until a connection is ready, and serve it; return whether something is over, before or thereafter.

        Raises:
            CoordinationError: They are closed.
        """
        with self.lock:
            self._refuse_closed()
            if over():
                return True
            selector = self._watching()
        events: list[_Event] = []
        with contextlib.suppress(OSError, ValueError):  # another thread closes it
            events = selector.select(limit_s)
        with self.lock:
            if not self._why_closed:
                self._serve(events)
            return over()

    def flush(self, limit_s: float) -> None:
        """Give those who read slowly a moment; what is left goes with the next call.

        Raises:
            CoordinationError: They are closed.
        """
        end_s = time.monotonic() + limit_s
        while (left_s := end_s - time.monotonic()) > 0 and not self.serve_until(lambda: not self.unsent(), left_s):
            pass

    def close(self, why: str, limit_s: float) -> None:
        """Say goodbye and close everything; may be called again.

        Args:
            why: What later calls say.
            limit_s: So long for those who read slowly.
        """
        if self._why_closed:
            return
        self.send(frame(_GOODBYE), self.ranks())
        with contextlib.suppress(CoordinationError, ReferenceError):  # another thread was faster; the owner is dead
            self.flush(limit_s)
        with self.lock:
            self._why_closed = self._why_closed or why
            for connection in [*self._by_rank.values(), *self._strangers]:
                with contextlib.suppress(OSError):
                    connection.socket.shutdown(socket.SHUT_WR)
                # What is left unread would make the kernel reset the connection, which overtakes the goodbye.
                connection.receive()
                self._drop(connection)
            if self._listener is not None:
                _close_socket(self._listener)
            if self._selector is not None:
                self._selector.close()

    # --- inside, with the lock held

    def _refuse_closed(self) -> None:
        if self._why_closed:
            raise CoordinationError(self._why_closed)

    def _watching(self) -> selectors.BaseSelector:
        """Return a selector for all connections; for others than rank 0 a fresh one, which holds no descriptor."""
        if self._selector is not None:
            return self._selector
        selector = selectors.PollSelector()
        for connection in self._by_rank.values():
            selector.register(connection.socket, connection.wanted(), connection)
        return selector

    def _watch(self, connection: _Connection) -> None:
        if self._selector is not None and connection.is_open() and connection.watched != connection.wanted():
            watch = self._selector.modify if connection.watched else self._selector.register
            connection.watched = connection.wanted()
            watch(connection.socket, connection.watched, connection)

    def _send(self, connection: _Connection, data: bytes) -> None:
        connection.send(data)
        self._watch(connection)

    def _serve(self, events: Iterable[_Event]) -> None:
        for key, mask in events:
            connection = key.data
            if connection is None:
                self._accept()
            elif connection.is_open():  # it may be closed because of what another one has said
                connection.flush()
                self._watch(connection)
                if mask & selectors.EVENT_READ:
                    self._read(connection)
        now_s = time.monotonic()
        for stranger in list(self._strangers):
            if now_s - stranger.made_s > _STRANGER_S:
                self._drop(stranger)
        if now_s - self._answers_looked_at_s > _SILENT_MACHINE_S / 25:
            self._answers_looked_at_s = now_s
            for rank, connection in list(self._by_rank.items()):
                if connection.is_unanswered():
                    self._drop(connection)
                    self._owner.lost(rank, f"nothing was acknowledged for {_SILENT_MACHINE_S:g} s", False)

    def _accept(self) -> None:
        while self._listener is not None:
            try:
                accepted = self._listener.accept()[0]
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                _log.warning("rank 0 cannot take connections of other ranks, until the next save: %s", error)
                self.take_connections(False)  # else every wait would end at once
                return
            try:
                connection = _connection(accepted, None)
            except OSError:  # it is gone again
                continue
            self._strangers.append(connection)
            self._watch(connection)
            self._read(connection)  # who it is, and whether it is lost again, shall be known before the next session
            if len(self._strangers) > self._count + _STRANGER_COUNT:
                self._drop(self._strangers[0])

    def _read(self, connection: _Connection) -> None:
        frames, ended = connection.receive()
        for one in frames:
            try:
                self._take(connection, *one)
            except (ValueError, TypeError):
                ended = "what came is no message of ours"
                break
            if not connection.is_open():
                return
        if ended is not None:
            self._drop(connection)
            if connection.rank is not None:
                self._owner.lost(connection.rank, ended, connection.said_goodbye)

    def _take(self, connection: _Connection, kind: int, number: int, payload: bytes) -> None:
        if connection.rank is None:
            self._greet(connection, kind, payload)
        elif kind == _WELCOME:
            connection.is_welcome = True
        elif kind == _GOODBYE:
            connection.said_goodbye = True
        else:
            self._owner.took(connection.rank, kind, number, payload)

    def _greet(self, connection: _Connection, kind: int, payload: bytes) -> None:
        if kind != _HELLO or not hmac.compare_digest(payload[:TOKEN_BYTES], self.token):
            _log.warning("somebody who is no rank of this group has connected to rank 0, and was not let in")
            self._drop(connection)
            return
        rank = json.loads(payload[TOKEN_BYTES:])
        if rank not in range(1, self._count):
            raise ValueError
        if rank in self._by_rank:
            self._read(self._by_rank[rank])  # what came before the rank has lost it
        if rank in self._by_rank:
            self._drop(self._by_rank[rank])  # its end has not come: what was under way the rank tells
        self._strangers.remove(connection)
        self._by_rank[rank] = connection
        connection.rank = rank
        self._send(connection, frame(_WELCOME))
        self._owner.greeted(rank)

    def _drop(self, connection: _Connection) -> None:
        if self._selector is not None and connection.watched:
            self._selector.unregister(connection.socket)
            connection.watched = 0
        _close_socket(connection.socket)
        if connection in self._strangers:
            self._strangers.remove(connection)
        if connection.rank is not None and self._by_rank.get(connection.rank) is connection:
            del self._by_rank[connection.rank]

    def _leave_to_parent(self) -> None:
        """In a forked child, where the descriptors are closed."""
        self.lock, self._connecting = threading.RLock(), threading.RLock()
        self._why_closed = "the connections to the other ranks belong to the process that this one was forked from"
        for connection in [*self._by_rank.values(), *self._strangers]:
            connection.socket.detach()
        if self._listener is not None:
            self._listener.detach()
        if self._selector is not None:
            self._selector.close()


def _leave_sockets_to_parent() -> None:
    # The native module has closed those that found room in its table. What still has its inode is not closed.
    for fd, inode in _inodes.items():
        with contextlib.suppress(OSError):
            if os.fstat(fd).st_ino == inode:
                os.close(fd)
    _inodes.clear()
    for connections in list(_all_connections):
        connections._leave_to_parent()


os.register_at_fork(after_in_child=_leave_sockets_to_parent)


# ------------------------------------------------------------------------------------------- where ranks run
