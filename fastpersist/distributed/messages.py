"""Encodes messages between ranks: the JSON of a save, and failures and errors that are sent to other ranks.

It also handles failures: a rank reports its own at once, and checks whether another rank's caused its own error.
"""

from __future__ import annotations

import errno
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

from fastpersist import errors
from fastpersist.distributed.connections.frames import FAILED, frame
from fastpersist.errors import (
    AgreementTimeoutError,
    CoordinationError,
    FastPersistError,
    PeerError,
    StorageError,
    UnsupportedError,
)
from fastpersist.transfer.progress import Poll

__all__ = [
    "Failure",
    "checking",
    "decoded",
    "encoded",
    "error_as_json",
    "error_from_json",
    "named",
    "preferring_failure_of_others",
    "telling",
]

_NEWS_S = 1.0


def encoded(message: dict[str, Any]) -> bytes:
    """Return what is sent."""
    return json.dumps(message, separators=(",", ":")).encode()


def decoded(message: bytes, rank: int) -> dict[str, Any]:
    """Return what another rank says.

    Raises:
        CoordinationError: The bytes are no message of a save.
    """
    try:
        found = json.loads(message)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise CoordinationError(
            f"rank {rank} sent something that is no message of a save; do all ranks run this version?"
        )
    return found


class Failure(NamedTuple):
    """Why a session has failed, as the coordinator tells all followers.

    Attributes:
        rank: The rank that has failed.
        how: "failed", "gone" or "silent".
        text: What is known of the failure.
    """

    rank: int
    how: str
    text: str

    def error(self, subject: str) -> PeerError:
        """Return the error that the other ranks raise."""
        if self.how == "silent":
            return AgreementTimeoutError(f"{self.text} while saving {subject}", rank=self.rank, subject=subject)
        verb = "is gone" if self.how == "gone" else "failed"
        return PeerError(
            f"rank {self.rank} {verb} while saving {subject}: {self.text}", rank=self.rank, subject=subject
        )

    def frame(self, number: int) -> bytes:
        """Return the frame that tells it, for a session."""
        return frame(FAILED, number, json.dumps(self).encode())


def error_as_json(error: BaseException) -> str:
    """Return what other ranks rebuild an error of ours from: its class, arguments and attributes; "" for any other."""
    ours = [kind.__name__ for kind in type(error).__mro__ if getattr(errors, kind.__name__, None) is kind]
    if not isinstance(error, FastPersistError):
        return ""
    attributes = {name: value for name, value in vars(error).items() if isinstance(value, _PLAIN)}
    try:
        return json.dumps({"class": ours[0], "arguments": error.__reduce__()[1], "attributes": attributes})
    except TypeError:  # a path that is no text, say
        return ""


def error_from_json(text: str) -> FastPersistError | None:
    """Rebuild what `error_as_json` returned; None from anything else. Only classes of `errors` are made."""
    try:
        told = json.loads(text)
        if told["class"] not in errors.__all__ or not all(isinstance(one, _PLAIN) for one in told["arguments"]):
            return None
        error: FastPersistError = getattr(errors, told["class"])(*told["arguments"])
        for name, value in told["attributes"].items():
            if name in vars(error) and isinstance(value, _PLAIN):
                setattr(error, name, value)
        return error
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


_PLAIN = (str, int, float, type(None))


def named(ranks: Sequence[int]) -> str:
    """Name ranks, the first few of them."""
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks[:8])) + more


# --- failures, in the way of a rank that saves


class _Checked(Protocol):
    def check(self) -> None: ...


class _Failing(Protocol):
    def fail(self, error: BaseException) -> None: ...


def checking(poll: Poll | None, session: _Checked) -> Poll:
    """Stop a transfer when another rank has failed."""

    def check(done_bytes: int) -> None:
        session.check()
        if poll is not None:
            poll(done_bytes)

    return check


@contextmanager
def telling(session: _Failing) -> Iterator[None]:
    """Tell the other ranks of an error in the block at once, before this rank cleans up."""
    try:
        yield
    except BaseException as error:
        session.fail(error)
        raise


@contextmanager
def preferring_failure_of_others(session: _Checked | None) -> Iterator[None]:
    """Look for a failure of another rank behind an error in the block: a rank that gives up removes what others need.

    Args:
        session: The session with the other ranks; None for a rank that saves alone.

    Raises:
        PeerError: Another rank has failed; instead of StorageError or UnsupportedError.
    """
    try:
        yield
    except (StorageError, UnsupportedError) as error:
        if session is not None:
            session.check()
            if isinstance(error, UnsupportedError) or error.errno in (errno.ENOENT, errno.ESTALE):
                end_s = time.monotonic() + _NEWS_S  # over a network, the news may come later than the removal
                while time.monotonic() < end_s:
                    time.sleep(0.02)
                    session.check()
        raise
