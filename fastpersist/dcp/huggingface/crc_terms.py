"""Compute what a chunk of a tensor contributes to the CRC of the whole tensor, wherever the chunk lies.

If some bytes are replaced by zeros, the CRC changes by a term that depends only on these bytes and on their distance
from the end. So the CRC of a tensor is the CRC of as many zeros, XORed with one term for each chunk, in any order and
from any rank: crc(a b) = crc(0 0) ^ term(a, behind=|b|) ^ term(b).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence

from fastpersist import _native
from fastpersist.dcp.huggingface.layout import Run

__all__ = ["crc_of_zeros", "term_of"]


def term_of(address: int, runs: Sequence[Run], end_bytes: int) -> int:
    """Return what runs add to the CRC of a tensor that ends at `end_bytes` of the file."""
    first, end = runs[0][0], runs[-1][0] + runs[-1][1]
    data = memoryview((ctypes.c_char * (end - first)).from_address(address + first))
    term = 0
    for start, size_bytes, offset_bytes in runs:
        crc = _native.crc32(data[start - first : start - first + size_bytes])
        term ^= _native.combine_crc32(crc ^ crc_of_zeros(size_bytes), 0, end_bytes - offset_bytes - size_bytes)
    return term


@functools.lru_cache(maxsize=4096)
def crc_of_zeros(size_bytes: int) -> int:
    """Return the CRC of this many zeros."""
    if not size_bytes:
        return 0
    half = crc_of_zeros(size_bytes // 2)
    crc = _native.combine_crc32(half, half, size_bytes // 2)
    return _native.combine_crc32(crc, _native.crc32(b"\0"), 1) if size_bytes % 2 else crc
