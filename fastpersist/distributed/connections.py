"""The connections between the ranks of a group: they carry whole frames, whatever these mean.

The coordinator, rank 0, listens on a TCP port; each follower keeps one connection to it. One thread of each rank, the
*I/O thread*, serves its connections from the first one until they are closed: it accepts, reads, sends what the kernel
did not take before, and tells the owner what has come. All other threads only queue frames, which never blocks, and
wait on a condition. Forked children, such as the workers of a DataLoader, keep no connection open, so a connection ends
when the process ends.

    frame    magic with the protocol's number, kind, size, number of the session: 17 bytes; that many bytes; 16 of a tag
    hello    the first frame of a connection, the only one without a tag: which rank it is, and 32 random bytes
    welcome  rank 0's answer: 32 random bytes
    proof    the follower's answer to the welcome, empty; its messages follow
    goodbye  the end of the connection after this is no failure

Each rank of the group has the group's *token*, 32 random bytes that rank 0 hands out through the process group, whose
members trust each other. The token never goes over a connection. Token and random bytes of both sides give two keys for
this connection alone, one for each direction. The tag of a frame is an HMAC-SHA-256, by the key of its direction, over
the frame and the number of frames before it. So the welcome proves to the follower that it talks to rank 0, and the
proof proves the follower to rank 0. Before that, each side accepts the frames of the handshake only, which have fixed
sizes, and sends no message.

An attacker who connects to the port, answers in rank 0's place, or relays between both sides learns nothing of the
token. No frame of his is accepted, and none of ours changed, repeated or out of its place. He can keep the ranks from
talking, which fails their saves; and he can read frames, which are not encrypted.

What frames say is left to `coordination` and `sessions`.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import hashlib
import hmac
import logging
import math
import os
import secrets
import selectors
import socket
import struct
import sys
import termios
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

from fastpersist import _native
from fastpersist.distributed.peers import listening_socket, require_descriptors
from fastpersist.errors import CoordinationError, InternalError

__all__ = [
    "ALIVE",
    "ASK",
    "FAILED",
    "FRAME_BYTES",
    "IO_THREAD",
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

PROTOCOL = 7
"""The version of the messages between ranks (docs/explanation/ranks.md); all ranks must have the same."""
MESSAGE_LIMIT_BYTES = 64 << 20
TOKEN_BYTES = 32

_MAGIC = b"FPR%d" % PROTOCOL
_HEADER = struct.Struct("<4sBIQ")
_TAG_BYTES = 16
FRAME_BYTES = _HEADER.size + _TAG_BYTES
"""Length of a frame without its message."""
MESSAGE, FAILED, _HELLO, _WELCOME, _GOODBYE, PULSE, ASK, OFFER, KNOWN, _PROOF, ALIVE = range(1, 12)

IO_THREAD = "fastpersist-ranks"
"""The name of the thread that serves the connections of a rank."""

_NONCE_BYTES = 32
_HELLO_BODY = struct.Struct(f"<I{_NONCE_BYTES}s")  # rank, and its random bytes
_HELLO_FRAME = (_HELLO, _HELLO_BODY.size)  # kind and size of each frame of the handshake
_PROOF_FRAME = (_PROOF, 0)
_WELCOME_FRAME = (_WELCOME, _NONCE_BYTES)
_HANDSHAKE_BYTES = 1 << 10  # the most that is read at once before the other side has proven who it is
_NO_MESSAGE = "what came is no message of ours"
_READ_BYTES = 64 << 10
_READS_AT_ONCE = 32  # then it is another connection's turn
_STRANGER_S = 10.0  # how long a connection may take to prove that it is a rank's
_STRANGER_COUNT = 64  # the most connections that have not proven it yet
_CONNECT_S = 0.45  # how long the I/O thread tries to connect again
_RETURN_S = 1.0  # from one try to the next
_JOIN_S = 2.0  # how long close() waits for the I/O thread
_SILENT_MACHINE_S = 25  # a machine that acknowledges nothing for this long is down: Linux answers for a busy process
_TCP_INFO = struct.Struct("<44xI8xI")  # linux/tcp.h: ms since data was sent, and since an ACK was received


def frame(kind: int, number: int = 0, payload: bytes = b"") -> bytes:
    """Return the bytes of a frame, without the tag, which each connection appends.

    Args:
        kind: `MESSAGE`, `FAILED`, `KNOWN`, `PULSE`, `ALIVE`, `ASK` or `OFFER`.
        number: Of the session.
        payload: The message.
    """
    return _HEADER.pack(_MAGIC, kind, len(payload), number) + payload


class Owner(Protocol):
    """Is called when something happens on the connections, with their lock held, on the I/O thread."""

    def connected(self) -> None:
        """This follower has connected, for the first time or again."""

    def greeted(self, rank: int) -> None:
        """A follower has connected with this coordinator, for the first time or again."""

    def took(self, rank: int, kind: int, number: int, payload: bytes) -> None:
        """A frame of a rank has arrived. Raises ValueError or TypeError if it makes no sense."""

    def lost(self, rank: int, why: str, said_goodbye: bool) -> None:
        """The connection with a rank has ended."""

    def tick(self) -> float:
        """Some time has passed. Returns in how many seconds the next call is due."""


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


class _Refused(ValueError):
    """The other side has sent what it may not send; the message says why."""


class _Seal:
    """Makes the tags of the frames of one direction of one connection.

    Args:
        token: Of the group.
        way: "up" to rank 0, "down" from it.
        hello: The payload of the follower's hello.
        nonce: The payload of rank 0's welcome.
    """

    def __init__(self, token: bytes, way: str, hello: bytes, nonce: bytes) -> None:
        self._key = hmac.digest(token, b"%b %b " % (_MAGIC, way.encode()) + hello + nonce, "sha256")
        self._count = 0

    def tag(self, digest: bytes) -> bytes:
        """Return the tag of the next frame, given its digest."""
        self._count += 1
        return hmac.digest(self._key, self._count.to_bytes(8, "little") + digest, "sha256")[:_TAG_BYTES]


def _digest(data: bytes | memoryview) -> bytes:
    return hashlib.sha256(data).digest()


class _Connection:
    """One end of a connection: whole frames in, whole frames out, never blocking.

    Args:
        connected: The socket; this object closes it.
        token: Of the group.
        own_rank: On a follower, its rank, for the hello. None on the coordinator, which waits for a hello.
    """

    def __init__(self, connected: socket.socket, token: bytes, own_rank: int | None) -> None:
        self.socket = connected
        self.rank = None if own_rank is None else 0  # of the other side; None until that has proven it
        self.claimed_rank = 0
        self.unsent: deque[memoryview] = deque()
        self.held: list[tuple[bytes, bytes]] = []  # frames with their digests, until the other side has proven itself
        self.said_goodbye = False
        self._token = token
        self._hello = b"" if own_rank is None else _HELLO_BODY.pack(own_rank, secrets.token_bytes(_NONCE_BYTES))
        self._awaited: tuple[int, int] | None = _HELLO_FRAME if own_rank is None else _WELCOME_FRAME
        self._seals: tuple[_Seal, _Seal] | None = None  # of frames that come, and of frames that go
        self.made_s = time.monotonic()
        self.watched = 0  # the events that the selector waits for
        self._inbound = bytearray()
        self._error: str | None = None
        self._unanswered_since_s: float | None = None
        connected.setblocking(False)
        # NODELAY: frames are small. Keepalive notices a machine that is down while nothing is sent to it.
        for level, option, value in (
            (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
            (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
            (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _SILENT_MACHINE_S * 2 // 5),
            (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _SILENT_MACHINE_S // 5),
            (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
        ):
            connected.setsockopt(level, option, value)
        _keep_from_children(connected)
        if own_rank is not None:
            self.unsent.append(memoryview(frame(_HELLO, 0, self._hello)))
            self.flush()

    @property
    def is_proven(self) -> bool:
        """The other side has proven who it is."""
        return self._awaited is None

    def send(self, data: bytes, digest: bytes) -> None:
        """Queue a frame, and send of the queue what the kernel takes."""
        if not self.is_proven:
            self.held.append((data, digest))
            return
        self._seal(data, digest)
        self.flush()

    def answer(self, kind: int, payload: bytes) -> bool:
        """Answer a valid frame of the handshake. Return whether the other side has now proven who it is."""
        if kind == _HELLO:
            self.claimed_rank, _ = _HELLO_BODY.unpack(payload)
            self._hello, nonce = payload, secrets.token_bytes(_NONCE_BYTES)
            self._seals = _Seal(self._token, "up", payload, nonce), _Seal(self._token, "down", payload, nonce)
            self._awaited = _PROOF_FRAME
            welcome = frame(_WELCOME, 0, nonce)
            self._seal(welcome, _digest(welcome))
        elif kind == _PROOF:
            self.rank, self._awaited = self.claimed_rank, None
        else:
            self._awaited = None
            proof = frame(_PROOF)
            for data, digest in [(proof, _digest(proof)), *self.held]:
                self._seal(data, digest)
            self.held.clear()
        self.flush()
        return self.is_proven

    def _seal(self, data: bytes, digest: bytes) -> None:
        if self._seals is None:
            raise InternalError("a frame is sent before the other side was heard")
        self.unsent += memoryview(data), memoryview(self._seals[1].tag(digest))

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
            self.unsent.clear()  # receive() reports the end, after what the other side had sent before

    def receive(self) -> str | None:
        """Read what has arrived, for `next_frame`; return why nothing more will, None if more may."""
        ended = None
        try:
            for _ in range(_READS_AT_ONCE if self.is_proven else 1):
                data = self.socket.recv(_READ_BYTES if self.is_proven else _HANDSHAKE_BYTES)
                self._inbound += data
                if not data:
                    ended = self._error or "it was closed at the other end"
                    break  # not before: an end that is here now belongs to this session, not to the next one
        except (BlockingIOError, InterruptedError):
            ended = self._error
        except OSError as error:
            ended = self._error or error.strerror
        return ended

    def next_frame(self) -> tuple[int, int, bytes] | None:
        """Return the next whole frame (kind, session number, payload) after checking its tag; None if there is none.

        Raises:
            _Refused: No such frame may come now, or its tag is wrong.
        """
        if len(self._inbound) < _HEADER.size:
            return None
        magic, kind, size_bytes, number = _HEADER.unpack_from(self._inbound)
        if magic != _MAGIC and magic[:3] == _MAGIC[:3]:
            raise _Refused(
                f"it speaks protocol {magic[3:].decode(errors='replace')} of fastpersist, and this rank protocol "
                f"{PROTOCOL}: all ranks need the same version"
            )
        too_large = size_bytes > MESSAGE_LIMIT_BYTES
        if magic != _MAGIC or too_large or self._awaited not in (None, (kind, size_bytes)):
            raise _Refused(_NO_MESSAGE)
        tag_from = _HEADER.size + size_bytes
        end = tag_from + (0 if self._awaited == _HELLO_FRAME else _TAG_BYTES)
        if len(self._inbound) < end:
            return None
        with memoryview(self._inbound) as view:
            payload = bytes(view[_HEADER.size : tag_from])
            if self._awaited != _HELLO_FRAME:
                self._refuse_wrong_tag(payload, _digest(view[:tag_from]), bytes(view[tag_from:end]))
        del self._inbound[:end]
        return kind, number, payload

    def _refuse_wrong_tag(self, payload: bytes, digest: bytes, tag: bytes) -> None:
        if self._awaited == _WELCOME_FRAME:  # the keys are made of its payload
            down, up = (_Seal(self._token, way, self._hello, payload) for way in ("down", "up"))
            self._seals = down, up
        if self._seals is None or not hmac.compare_digest(self._seals[0].tag(digest), tag):
            raise _Refused(_NO_MESSAGE if self.is_proven else "the other side does not know the token of this group")

    def holds_back(self) -> bool:
        """Tell whether frames have not been given to the kernel yet."""
        return bool(self.unsent or self.held)

    def is_unanswered(self) -> bool:
        """Tell whether the machine at the other end has not acknowledged what was sent, for `_SILENT_MACHINE_S`.

        Keepalive is suspended while bytes are unacknowledged, and TCP gives up after a quarter of an hour only.
        TCP_USER_TIMEOUT would also end the connection with a live process that does not read (its window is zero). So
        this asks the kernel for the times.
        """
        info = self.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
        if len(info) < _TCP_INFO.size:
            return False
        sent_ms_ago, acked_ms_ago = _TCP_INFO.unpack(info)
        # What is not acknowledged, or not even sent: the own interface may be down.
        queued_bytes = int.from_bytes(fcntl.ioctl(self.socket, termios.TIOCOUTQ, bytes(4)), sys.byteorder)
        if not queued_bytes or acked_ms_ago <= sent_ms_ago:
            self._unanswered_since_s = None  # a receiver whose buffer is full acknowledges what it drops
            return False
        if self._unanswered_since_s is None:
            self._unanswered_since_s = time.monotonic()
        limit_s = _SILENT_MACHINE_S
        return time.monotonic() - self._unanswered_since_s > limit_s and int(acked_ms_ago) > 1000 * limit_s

    def is_open(self) -> bool:
        """Tell whether this end has not closed it."""
        return self.socket.fileno() >= 0


def _connection(connected: socket.socket, token: bytes, own_rank: int | None) -> _Connection:
    try:
        if own_rank is not None and connected.getsockname() == connected.getpeername():
            # Nobody listens at the port any more, and the kernel has picked it for this end: TCP allows that.
            raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
        return _Connection(connected, token, own_rank)
    except OSError:
        connected.close()
        raise


# ---------------------------------------------------------------------------------- the connections of a rank

_Event = tuple[selectors.SelectorKey, int]
_all_connections: weakref.WeakSet[Connections] = weakref.WeakSet()


class Connections:
    """The connections of one rank: the coordinator's with all followers, or a follower's with the coordinator.

    Args:
        rank: Of this process.
        count: How many ranks there are.
        owner: Told what happens.

    Attributes:
        lock: Held while connections are served, never while a thread waits; re-entrant, as a signal handler may save.
        changed: A condition with that lock: something has come, or the connections are closed.
        token: Of the group; set before the first connection.
        addresses: Host and port of rank 0; the first is used.

    Thread safety: any thread.
    """

    def __init__(self, rank: int, count: int, owner: Owner) -> None:
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
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
        self._is_paused = False
        self._return_s = math.inf  # when this follower, which has lost its connection, tries to connect again
        self._returned_s = 0.0  # when it has tried last
        self._tick_s = 0.0  # when the next one is due
        self._thread: threading.Thread | None = None
        self._selector: selectors.BaseSelector | None = None
        self._wake_fd = -1  # readable when the I/O thread is to end

    def listen(self, hosts: list[str], ports: Iterable[int] = (0,), *, only_there: bool = False) -> None:
        """Listen for followers; on the coordinator.

        Args:
            hosts: Where followers may connect; ["127.0.0.1"] if they are all on this machine.
            ports: The first of these that is free is taken; 0 for one that the kernel picks.
            only_there: Listen at the first of `hosts` alone.

        Raises:
            OSError: It cannot listen, or this process may not have so many open files.
        """
        require_descriptors(self._count)
        own = hosts[0] if only_there or hosts == ["127.0.0.1"] else ""
        both = not own and socket.has_dualstack_ipv6()
        self._listener = listening_socket(own, both, ports, self._count + _STRANGER_COUNT)
        self._listener.setblocking(False)
        _keep_from_children(self._listener)
        self._start()
        self.take_connections()
        port = self._listener.getsockname()[1]
        self.addresses = [(host, port) for host in hosts]

    def take_connections(self, on: bool = True) -> None:
        """Start or stop to accept connections; on the coordinator."""
        if self._listener is not None and self._selector is not None and self._is_listening != on:
            self._is_listening = on
            if on:
                self._selector.register(self._listener, selectors.EVENT_READ)
            else:
                self._selector.unregister(self._listener)

    def connect(self, limit_s: float) -> None:
        """Connect with the coordinator, unless this follower is connected already.

        Raises:
            OSError: The coordinator cannot be reached. ConnectionRefusedError: nobody listens there.
        """
        with self._connecting:
            if 0 in self._by_rank:
                return
            made = socket.create_connection(self.addresses[0], timeout=limit_s)
            connection = _connection(made, self.token, self._rank)
            with self.lock:
                if self._why_closed:
                    _close_socket(made)
                    return
                self._start()
                self._return_s, self._is_paused = math.inf, False
                self._by_rank[0] = connection
                self._watch(connection)
                self._owner.connected()

    def wait_welcome(self, limit_s: float) -> bool:
        """Wait until rank 0 has proven itself; return whether it has. If not, close the connection."""
        connection = self._by_rank.get(0)
        if connection is None:
            return False
        self.wait_until(lambda: connection.is_proven or not connection.is_open(), limit_s)
        with self.lock:
            if not connection.is_proven:
                self._drop(connection)
        return connection.is_proven and connection.is_open()

    def ranks(self) -> list[int]:
        """Return the ranks with which this one is connected."""
        with self.lock:
            return list(self._by_rank)

    def unsent(self) -> list[int]:
        """Return the ranks that have not read all that was sent to them."""
        with self.lock:
            return [rank for rank, connection in self._by_rank.items() if connection.unsent]

    def send(self, data: bytes, ranks: Iterable[int]) -> None:
        """Send a frame to those of these ranks that are connected."""
        digest = _digest(data)
        with self.lock:
            for rank in ranks:
                if rank in self._by_rank:
                    self._by_rank[rank].send(data, digest)
                    self._watch(self._by_rank[rank])

    def catch_up(self) -> None:
        """Serve the connections that are ready, here and now. Never blocks.

        Raises:
            CoordinationError: The connections are closed.
        """
        with self.lock:
            self.refuse_closed()
            if self._selector is not None:
                self._serve(self._selector.select(0))

    def wait_until(self, over: Callable[[], bool], limit_s: float) -> bool:
        """Wait until a function returns true, which is asked whenever something has come; return what it says last.

        Raises:
            CoordinationError: The connections are closed.
        """
        with self.lock:
            self.refuse_closed()
            if self.changed.wait_for(lambda: over() or self.is_closed(), limit_s) and not over():
                self.refuse_closed()
            return over()

    def is_closed(self) -> bool:
        """Tell whether the connections are closed, or were closed in this process by fork()."""
        return bool(self._why_closed)

    def refuse_closed(self) -> None:
        """Raise if the connections are closed.

        Raises:
            CoordinationError: They are.
        """
        if self._why_closed:
            raise CoordinationError(self._why_closed)

    def drop(self, rank: int) -> None:
        """Close the connection with a rank; its owner is not told."""
        with self.lock:
            if rank in self._by_rank:
                self._drop(self._by_rank[rank])
                self._return_soon()

    def pause(self, on: bool = True) -> None:
        """Stop to read what rank 0 sends, until too much of it is held here, or go on; on a follower."""
        with self.lock:
            if self._is_paused != on:
                self._is_paused = on
                for connection in self._by_rank.values():
                    self._watch(connection)

    def flush(self, limit_s: float) -> None:
        """Wait for ranks that read slowly, but no longer than this; what is left goes later."""
        with contextlib.suppress(CoordinationError):
            self.wait_until(lambda: not any(one.holds_back() for one in self._by_rank.values()), limit_s)

    def close(self, why: str, limit_s: float) -> None:
        """Say goodbye, close everything, and end the I/O thread; may be called again.

        Args:
            why: The error of later calls.
            limit_s: How long to wait for ranks that read slowly.
        """
        with self.lock:
            if self._why_closed:
                return
            self._why_closed = why
            self.changed.notify_all()
            self._end_thread()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)  # it may wait for a lock that is held below this call, in a signal handler
        with self.lock:
            if self._selector is not None:
                self._selector.unregister(self._wake_fd)
            self.send(frame(_GOODBYE), self.ranks())
            end_s = time.monotonic() + limit_s
            while any(one.holds_back() for one in self._by_rank.values()) and (left_s := end_s - time.monotonic()) > 0:
                with contextlib.suppress(ReferenceError):  # no owner is left
                    self._serve(self._selector.select(left_s) if self._selector is not None else [])
            self._close_sockets()

    # --- the I/O thread

    def _start(self) -> None:
        """Start the I/O thread, unless it runs."""
        if self._selector is not None:
            return
        self._selector = selectors.DefaultSelector()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector.register(self._wake_fd, selectors.EVENT_READ)
        _all_connections.add(self)
        self._thread = threading.Thread(target=self._run, name=IO_THREAD, daemon=True)
        self._thread.start()

    def _end_thread(self) -> None:
        if self._wake_fd >= 0:
            os.eventfd_write(self._wake_fd, 1)

    def _run(self) -> None:
        try:
            while True:
                with self.lock:
                    if self.is_closed() or self._selector is None:
                        return
                    selector = self._selector
                    wait_s = max(0.0, min(self._tick_s, self._return_s) - time.monotonic())
                events = selector.select(wait_s)
                with self.lock:
                    if self.is_closed():
                        return
                    self._serve(events)
                    if time.monotonic() >= self._tick_s:
                        self._tick()
                    self.changed.notify_all()
                if time.monotonic() >= self._return_s:
                    self._return()
        except ReferenceError:  # nobody uses these ranks any more
            return
        except Exception as error:  # noqa: BLE001 - else calls would wait for a thread that is gone
            _log.exception("the thread %s has failed", IO_THREAD)
            with self.lock:
                self._why_closed = f"the thread {IO_THREAD} has failed: {type(error).__name__}: {error}"
                self._close_sockets()  # the other ranks notice
                self.changed.notify_all()

    def _tick(self) -> None:
        now_s = time.monotonic()
        for stranger in list(self._strangers):
            if now_s - stranger.made_s > _STRANGER_S:
                self._drop(stranger)
        for rank, connection in list(self._by_rank.items()):
            if connection.is_unanswered():
                self._lose(connection, rank, f"nothing was acknowledged for {_SILENT_MACHINE_S:g} s")
        self._tick_s = now_s + min(self._owner.tick(), _SILENT_MACHINE_S / 5, _STRANGER_S / 5)

    def _return(self) -> None:
        """Try to connect with rank 0 again, so that it knows that this follower is alive, also between two saves."""
        self._returned_s, self._return_s = time.monotonic(), math.inf
        try:
            self.connect(_CONNECT_S)
        except ConnectionRefusedError:
            pass  # nobody listens there any more
        except OSError:
            self._return_soon()

    def _return_soon(self) -> None:
        if self._rank:
            self._return_s = self._returned_s + _RETURN_S

    def _close_sockets(self) -> None:
        for connection in [*self._by_rank.values(), *self._strangers]:
            with contextlib.suppress(OSError):
                connection.socket.shutdown(socket.SHUT_WR)
            # Unread bytes would make the kernel reset the connection, and the reset overtakes the goodbye.
            connection.receive()
            self._drop(connection)
        if self._listener is not None:
            _close_socket(self._listener)
        self._close_selector()

    def _close_selector(self) -> None:
        if self._selector is not None:
            self._selector.close()
            os.close(self._wake_fd)
            self._selector, self._wake_fd = None, -1

    # --- inside, with the lock held

    def _watch(self, connection: _Connection) -> None:
        if self._selector is None or not connection.is_open():
            return
        wanted = selectors.EVENT_WRITE if connection.unsent else 0
        wanted |= 0 if self._is_paused else selectors.EVENT_READ
        if connection.watched == wanted:
            return
        if not wanted:
            self._selector.unregister(connection.socket)
        elif connection.watched:
            self._selector.modify(connection.socket, wanted, connection)
        else:
            self._selector.register(connection.socket, wanted, connection)
        connection.watched = wanted

    def _serve(self, events: Iterable[_Event]) -> None:
        for key, mask in events:
            connection = key.data
            if key.fd == self._wake_fd:
                continue
            if connection is None:
                self._accept()
            elif connection.is_open():  # a frame of another connection may have closed it
                connection.flush()
                self._watch(connection)
                if mask & selectors.EVENT_READ:
                    self._read(connection)

    def _accept(self) -> None:
        while self._listener is not None:
            try:
                accepted = self._listener.accept()[0]
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                _log.warning("rank 0 accepts no connections of other ranks until the next save: %s", error)
                self.take_connections(False)  # else every wait would end at once
                return
            try:
                connection = _connection(accepted, self.token, None)
            except OSError:  # the other side has closed it already
                continue
            self._strangers.append(connection)
            self._watch(connection)
            self._read(connection)
            if len(self._strangers) > self._count + _STRANGER_COUNT:
                self._drop(self._strangers[0])

    def _read(self, connection: _Connection) -> None:
        ended = connection.receive()
        try:
            while connection.is_open() and (one := connection.next_frame()) is not None:
                self._take(connection, *one)
        except (ValueError, TypeError) as error:
            ended = str(error) if isinstance(error, _Refused) else _NO_MESSAGE
            if connection.rank is None:
                _log.warning("rank 0 has refused a connection: %s", ended)
        if ended is not None and connection.is_open():
            self._lose(connection, connection.rank, ended)

    def _lose(self, connection: _Connection, rank: int | None, why: str) -> None:
        self._drop(connection)
        if rank is not None:
            if not connection.said_goodbye:
                self._return_soon()
            self._owner.lost(rank, why, connection.said_goodbye)

    def _take(self, connection: _Connection, kind: int, number: int, payload: bytes) -> None:
        if connection.rank is None:
            is_proven = connection.answer(kind, payload)
            if connection.claimed_rank not in range(1, self._count):
                raise _Refused(f"there is no rank {connection.claimed_rank}")
            self._watch(connection)
            if is_proven:
                self._greet(connection, connection.claimed_rank)
        elif not connection.is_proven:
            connection.answer(kind, payload)
        elif kind == _GOODBYE:
            connection.said_goodbye = True
        else:
            self._owner.took(connection.rank, kind, number, payload)

    def _greet(self, connection: _Connection, rank: int) -> None:
        """Take the connection of a follower that has proven itself, in place of its older one."""
        if rank in self._by_rank:
            self._read(self._by_rank[rank])  # what it sent before it lost that connection
        if rank in self._by_rank:
            self._drop(self._by_rank[rank])  # the follower itself tells which sessions this has failed
        self._strangers.remove(connection)
        self._by_rank[rank] = connection
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
        """Let go of the sockets; in a forked child, where their descriptors are closed."""
        self.lock, self._connecting = threading.RLock(), threading.RLock()
        self.changed, self._thread = threading.Condition(self.lock), None
        self._why_closed = "the connections to the other ranks belong to the process that this one was forked from"
        for connection in [*self._by_rank.values(), *self._strangers]:
            connection.socket.detach()
        if self._listener is not None:
            self._listener.detach()
        self._close_selector()


def _leave_sockets_to_parent() -> None:
    # The native module has closed the sockets in its table, which is bounded. A descriptor that still has the inode of
    # its socket was not closed.
    for fd, inode in _inodes.items():
        with contextlib.suppress(OSError):
            if os.fstat(fd).st_ino == inode:
                os.close(fd)
    _inodes.clear()
    for connections in list(_all_connections):
        connections._leave_to_parent()


def _close_all() -> None:
    # Before the interpreter ends its daemon threads: one may hold a lock then, for ever.
    for connections in list(_all_connections):
        connections.close("the program ends", _CONNECT_S)


os.register_at_fork(after_in_child=_leave_sockets_to_parent)
atexit.register(_close_all)
