"""Frames and their tags: a tag fits one frame, at its place, in its direction, in its connection."""

from __future__ import annotations

import _blake2
import hashlib
import hmac
import itertools

import pytest

from fastpersist.distributed.connections.frames import FRAME_BYTES, MESSAGE, PROTOCOL, TAG_BYTES, Seal, digest_of, frame

TOKEN, HELLO, NONCE = bytes(range(32)), b"hello", b"nonce"


def test_a_frame_names_protocol_kind_length_and_session() -> None:
    assert frame(MESSAGE, 0x0102, b"go") == b"FPR%d\x01\x02\0\0\0\x02\x01\0\0\0\0\0\0go" % PROTOCOL
    assert len(frame(MESSAGE)) + TAG_BYTES == FRAME_BYTES


def test_both_sides_make_the_same_tags() -> None:
    ours, theirs = (Seal(TOKEN, "up", HELLO, NONCE) for _ in range(2))
    for data in (b"first", b"second"):
        tag = ours.tag(digest_of(data))
        assert tag == theirs.tag(digest_of(memoryview(data)))
        assert len(tag) == TAG_BYTES


def test_tags_need_no_openssl_whose_locks_a_fork_may_leave_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("this is OpenSSL's")

    for module, name in ((hmac, "digest"), (hmac, "new"), (hashlib, "sha256"), (hashlib, "new")):
        monkeypatch.setattr(module, name, refuse)
    Seal(TOKEN, "up", HELLO, NONCE).tag(digest_of(b"go"))
    assert hashlib.blake2b is _blake2.blake2b


def test_a_tag_depends_on_token_direction_both_greetings_the_frame_and_its_place() -> None:
    seals = [
        Seal(TOKEN, "up", HELLO, NONCE),
        Seal(TOKEN[::-1], "up", HELLO, NONCE),
        Seal(TOKEN, "down", HELLO, NONCE),
        Seal(TOKEN, "up", HELLO[::-1], NONCE),
        Seal(TOKEN, "up", HELLO, NONCE[::-1]),
    ]
    tags = [seal.tag(digest_of(data)) for seal, data in itertools.product(seals, (b"go", b"go", b"no"))]
    assert len(set(tags)) == len(tags)
