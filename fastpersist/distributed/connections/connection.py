"""One connection: sends and receives whole frames without blocking; and its handshake.

Forked children, such as the workers of a DataLoader, keep no connection open, so a connection ends when the process
ends.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hmac
import os
import secrets
import socket
import struct
import sys
import termios
import time
from collections import deque

from fastpersist import _native
from fastpersist.distributed.connections.frames import (
    HEADER,
    HELLO,
    MAGIC,
    MESSAGE_LIMIT_BYTES,
    PROOF,
    PROTOCOL,
    TAG_BYTES,
    WELCOME,
    Seal,
    digest_of,
    frame,
)
from fastpersist.errors import InternalError

__all__ = [
    "NO_MESSAGE",
    "SILENT_MACHINE_S",
    "Connection",
    "Refused",
    "close_inherited",
    "close_socket",
    "connection_over",
    "keep_from_children",
]

SILENT_MACHINE_S = 25
"""A machine that acknowledges nothing for this long is down: Linux answers for a busy process."""
NO_MESSAGE = "what came is no message of ours"

_NONCE_BYTES = 32
_HELLO_BODY = struct.Struct(f"<I{_NONCE_BYTES}s")  # rank, and its random bytes
_HELLO_FRAME = (HELLO, _HELLO_BODY.size)  # kind and size of each frame of the handshake
_PROOF_FRAME = (PROOF, 0)
_WELCOME_FRAME = (WELCOME, _NONCE_BYTES)
_HANDSHAKE_BYTES = 1 << 10  # the most that is read at once before the other side has proven who it is
_READ_BYTES = 64 << 10
_READS_AT_ONCE = 32  # then it is another connection's turn
_TCP_INFO = struct.Struct("<44xI8xI")  # linux/tcp.h: ms since data was sent, and since an ACK was received

_inodes: dict[int, int] = {}  # by descriptor: the sockets that a forked child inherits


def keep_from_children(open_socket: socket.socket) -> None:
    """Register a socket to be closed in forked children."""
    _inodes[open_socket.fileno()] = os.fstat(open_socket.fileno()).st_ino
    _native.close_in_forked_child(open_socket.fileno())


def close_socket(open_socket: socket.socket) -> None:
    """Close a socket that was kept from children, once."""
    if open_socket.fileno() >= 0:
        _native.forget_descriptor(open_socket.fileno())
        _inodes.pop(open_socket.fileno(), None)
        open_socket.close()


def close_inherited() -> None:
    """Close the sockets of the parent, in a forked child."""
    # The native module has closed the sockets in its table, which is bounded. A descriptor that still has the inode of
    # its socket was not closed.
    for fd, inode in _inodes.items():
        with contextlib.suppress(OSError):
            if os.fstat(fd).st_ino == inode:
                os.close(fd)
    _inodes.clear()


class Refused(ValueError):
    """The other side has sent what it may not send; the message says why."""


class Connection:
    """One end of a connection: whole frames in, whole frames out, never blocking.

    Args:
        connected: The socket; this object closes it.
        token: The token of the group.
        own_rank: On a follower, its rank, for the hello. None on the coordinator, which waits for a hello.
    """

    def __init__(self, connected: socket.socket, token: bytes, own_rank: int | None) -> None:
        self.socket = connected
        self.rank = None if own_rank is None else 0  # of the other side; None until it has proven its identity
        self.claimed_rank = 0
        self.unsent: deque[memoryview] = deque()
        self.held: list[tuple[bytes, bytes]] = []  # frames with their digests, until the other side has proven itself
        self.said_goodbye = False
        self._token = token
        self._hello = b"" if own_rank is None else _HELLO_BODY.pack(own_rank, secrets.token_bytes(_NONCE_BYTES))
        self._awaited: tuple[int, int] | None = _HELLO_FRAME if own_rank is None else _WELCOME_FRAME
        self._seals: tuple[Seal, Seal] | None = None  # of frames that come, and of frames that go
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
            (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENT_MACHINE_S * 2 // 5),
            (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, SILENT_MACHINE_S // 5),
            (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
        ):
            connected.setsockopt(level, option, value)
        keep_from_children(connected)
        if own_rank is not None:
            self.unsent.append(memoryview(frame(HELLO, 0, self._hello)))
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
        if kind == HELLO:
            self.claimed_rank, _ = _HELLO_BODY.unpack(payload)
            self._hello, nonce = payload, secrets.token_bytes(_NONCE_BYTES)
            self._seals = Seal(self._token, "up", payload, nonce), Seal(self._token, "down", payload, nonce)
            self._awaited = _PROOF_FRAME
            welcome = frame(WELCOME, 0, nonce)
            self._seal(welcome, digest_of(welcome))
        elif kind == PROOF:
            self.rank, self._awaited = self.claimed_rank, None
        else:
            self._awaited = None
            proof = frame(PROOF)
            for data, digest in [(proof, digest_of(proof)), *self.held]:
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
            self.unsent.clear()  # receive() reports the end, after frames that the other side sent before it

    def receive(self) -> str | None:
        """Read what has arrived, for `next_frame`; return why nothing more will, None if more may."""
        ended = None
        try:
            for _ in range(_READS_AT_ONCE if self.is_proven else 1):
                data = self.socket.recv(_READ_BYTES if self.is_proven else _HANDSHAKE_BYTES)
                self._inbound += data
                if not data:
                    ended = self._error or "it was closed at the other end"
                    break  # not before: an end that has arrived belongs to this session, not to the next one
        except (BlockingIOError, InterruptedError):
            ended = self._error
        except OSError as error:
            ended = self._error or error.strerror
        return ended

    def next_frame(self) -> tuple[int, int, bytes] | None:
        """Return the next whole frame (kind, session number, payload) after checking its tag; None if there is none.

        Raises:
            Refused: No such frame may come now, or its tag is wrong.
        """
        if len(self._inbound) < HEADER.size:
            return None
        magic, kind, size_bytes, number = HEADER.unpack_from(self._inbound)
        if magic != MAGIC and magic[:3] == MAGIC[:3]:
            raise Refused(
                f"it speaks protocol {magic[3:].decode(errors='replace')} of fastpersist, and this rank protocol "
                f"{PROTOCOL}: all ranks need the same version"
            )
        too_large = size_bytes > MESSAGE_LIMIT_BYTES
        if magic != MAGIC or too_large or self._awaited not in (None, (kind, size_bytes)):
            raise Refused(NO_MESSAGE)
        tag_from = HEADER.size + size_bytes
        end = tag_from + (0 if self._awaited == _HELLO_FRAME else TAG_BYTES)
        if len(self._inbound) < end:
            return None
        with memoryview(self._inbound) as view:
            payload = bytes(view[HEADER.size : tag_from])
            if self._awaited != _HELLO_FRAME:
                self._refuse_wrong_tag(payload, digest_of(view[:tag_from]), bytes(view[tag_from:end]))
        del self._inbound[:end]
        return kind, number, payload

    def _refuse_wrong_tag(self, payload: bytes, digest: bytes, tag: bytes) -> None:
        if self._awaited == _WELCOME_FRAME:  # the keys are made of its payload
            down, up = (Seal(self._token, way, self._hello, payload) for way in ("down", "up"))
            self._seals = down, up
        if self._seals is None or not hmac.compare_digest(self._seals[0].tag(digest), tag):
            raise Refused(NO_MESSAGE if self.is_proven else "the other side does not know the token of this group")

    def holds_back(self) -> bool:
        """Tell whether frames have not been given to the kernel yet."""
        return bool(self.unsent or self.held)

    def is_unanswered(self) -> bool:
        """Tell whether the machine at the other end has not acknowledged what was sent, for `SILENT_MACHINE_S`.

        Keepalive is suspended while bytes are unacknowledged, and TCP gives up after a quarter of an hour only.
        TCP_USER_TIMEOUT would also end the connection with a live process that does not read (its window is zero). So
        this asks the kernel for the times.
        """
        info = self.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
        if len(info) < _TCP_INFO.size:
            return False
        sent_ms_ago, acked_ms_ago = _TCP_INFO.unpack(info)
        # Bytes not acknowledged, or not even sent: this machine's interface may be down.
        queued_bytes = int.from_bytes(fcntl.ioctl(self.socket, termios.TIOCOUTQ, bytes(4)), sys.byteorder)
        if not queued_bytes or acked_ms_ago <= sent_ms_ago:
            self._unanswered_since_s = None  # a receiver whose buffer is full acknowledges what it drops
            return False
        if self._unanswered_since_s is None:
            self._unanswered_since_s = time.monotonic()
        limit_s = SILENT_MACHINE_S
        return time.monotonic() - self._unanswered_since_s > limit_s and int(acked_ms_ago) > 1000 * limit_s

    def is_open(self) -> bool:
        """Tell whether this end has not closed it."""
        return self.socket.fileno() >= 0


def connection_over(connected: socket.socket, token: bytes, own_rank: int | None) -> Connection:
    """Return the connection over a socket, which is closed if there can be none.

    Args:
        connected: The socket.
        token: The token of the group.
        own_rank: On a follower, its rank; None on the coordinator, as in `Connection`.

    Raises:
        OSError: The other end has closed the socket already, or the socket is connected to itself.
    """
    try:
        if own_rank is not None and connected.getsockname() == connected.getpeername():
            # No process listens at the port any more, and the kernel has picked it for this end: TCP allows that.
            raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
        return Connection(connected, token, own_rank)
    except OSError:
        connected.close()
        raise
