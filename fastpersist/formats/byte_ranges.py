"""Ranges of bytes: of a source, and of a file."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ByteRange"]


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Bytes of a source.

    Attributes:
        source: Which, by index.
        from_bytes: The first, counted from the source's start.
        size_bytes: How many.
    """

    source: int
    from_bytes: int
    size_bytes: int
