"""Why a save of several ranks came to nothing: which rank it was, how, and in whose words; as all ranks are told."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

from fastpersist.connections import FAILED, frame
from fastpersist.errors import AgreementTimeoutError, PeerError

__all__ = ["Failure", "named"]


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


def named(ranks: Sequence[int]) -> str:
    """Name ranks, the first few of them."""
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks[:8])) + more
