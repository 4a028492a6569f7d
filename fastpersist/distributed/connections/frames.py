"""Frames, as they go over a connection, and the tags that prove who has sent them.

    frame    magic with the protocol's number, kind, size, number of the session: 17 bytes; that many bytes; 16 of a tag
    hello    the first frame of a connection, the only one without a tag: which rank it is, and 32 random bytes
    welcome  rank 0's answer: 32 random bytes
    proof    the follower's answer to the welcome, empty; its messages follow
    goodbye  the end of the connection after this is no failure

Each rank of the group has the group's *token*, 32 random bytes that rank 0 hands out through the process group, whose
members trust each other. The token never goes over a connection. Token and random bytes of both sides give two keys for
this connection alone, one for each direction. The tag of a frame is a keyed BLAKE2b, by the key of its direction, over
the frame and the number of frames before it. So the welcome proves to the follower that it talks to rank 0, and the
proof proves the follower to rank 0. Before that, each side accepts the frames of the handshake only, which have fixed
sizes, and sends no message.

An attacker who connects to the port, answers in rank 0's place, or relays between both sides learns nothing of the
token. No frame of his is accepted, and none of ours changed, repeated or out of its place. He can keep the ranks from
talking, which fails their saves; and he can read frames, which are not encrypted.

BLAKE2b is Python's own code. HMAC is OpenSSL's, which takes locks of the whole process without the interpreter's: if
the training thread forks a data-loading worker while the I/O thread holds one, the worker's first use of OpenSSL never
ends.
"""

from __future__ import annotations

import hashlib
import struct

__all__ = [
    "ALIVE",
    "ASK",
    "FAILED",
    "FRAME_BYTES",
    "GOODBYE",
    "HEADER",
    "HELLO",
    "KNOWN",
    "MAGIC",
    "MESSAGE",
    "MESSAGE_LIMIT_BYTES",
    "OFFER",
    "PROOF",
    "PROTOCOL",
    "PULSE",
    "TAG_BYTES",
    "TOKEN_BYTES",
    "WELCOME",
    "Seal",
    "digest_of",
    "frame",
]

PROTOCOL = 9
"""The version of the messages between ranks (docs/explanation/ranks.md); all ranks must have the same."""
MESSAGE_LIMIT_BYTES = 64 << 20
TOKEN_BYTES = 32

MAGIC = b"FPR%d" % PROTOCOL
HEADER = struct.Struct("<4sBIQ")
TAG_BYTES = 16
FRAME_BYTES = HEADER.size + TAG_BYTES
"""Length of a frame without its message."""
MESSAGE, FAILED, HELLO, WELCOME, GOODBYE, PULSE, ASK, OFFER, KNOWN, PROOF, ALIVE = range(1, 12)


def frame(kind: int, number: int = 0, payload: bytes = b"") -> bytes:
    """Return the bytes of a frame, without the tag, which each connection appends.

    Args:
        kind: `MESSAGE`, `FAILED`, `KNOWN`, `PULSE`, `ALIVE`, `ASK` or `OFFER`.
        number: The number of the session.
        payload: The message.
    """
    return HEADER.pack(MAGIC, kind, len(payload), number) + payload


class Seal:
    """Makes the tags of the frames of one direction of one connection.

    Args:
        token: The token of the group.
        way: "up" to rank 0, "down" from it.
        hello: The payload of the follower's hello.
        nonce: The payload of rank 0's welcome.
    """

    def __init__(self, token: bytes, way: str, hello: bytes, nonce: bytes) -> None:
        context = b"%b %b " % (MAGIC, way.encode()) + hello + nonce
        self._key = hashlib.blake2b(context, key=token, digest_size=TOKEN_BYTES).digest()
        self._count = 0

    def tag(self, digest: bytes) -> bytes:
        """Return the tag of the next frame, given its digest."""
        self._count += 1
        numbered = self._count.to_bytes(8, "little") + digest
        return hashlib.blake2b(numbered, key=self._key, digest_size=TAG_BYTES).digest()


def digest_of(data: bytes | memoryview) -> bytes:
    """Return what a tag is made of, once for all connections that a frame goes over."""
    return hashlib.blake2b(data, digest_size=32).digest()
