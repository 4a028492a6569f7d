"""Why a save or a load of several ranks came to nothing: which rank it was, how, in whose words; as all are told."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

from fastpersist import errors
from fastpersist.distributed.connections import FAILED, frame
from fastpersist.errors import AgreementTimeoutError, FastPersistError, PeerError

__all__ = ["Failure", "error_as_json", "error_from_json", "named"]


class Failure(NamedTuple):
    """Why a session came to nothing, as rank 0 tells it to all.

    Attributes:
        rank: Which one it was.
        how: "failed", "gone" or "silent".
        text: What is known of it.
    """

    rank: int
    how: str
    text: str

    def error(self, subject: str) -> PeerError:
        """Return what the other ranks raise."""
        if self.how == "silent":
            return AgreementTimeoutError(f"{self.text} while saving {subject}", rank=self.rank, subject=subject)
        verb = "is gone" if self.how == "gone" else "failed"
        return PeerError(
            f"rank {self.rank} {verb} while saving {subject}: {self.text}", rank=self.rank, subject=subject
        )

    def frame(self, number: int) -> bytes:
        """Return what says it about a session."""
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
