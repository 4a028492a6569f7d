"""What a part of a tensor adds to the CRC of all of it, wherever it lies and whoever computes that.

The CRC of bytes of which some are exchanged for zeros differs from theirs by a term that only depends on what was
exchanged, and on how far from the end it lay. So each chunk of a tensor, whoever has it, adds a term of its own to the
CRC of as many zeros, and it does not matter in which order: crc(a b) = crc(0 0) ^ term(a, behind=|b|) ^ term(b).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence

import torch

from fastpersist import _native
from fastpersist.dcp.huggingface.layout import Run

__all__ = ["crc_of", "crc_of_zeros", "term_of"]


def term_of(address: int, runs: Sequence[Run], end_bytes: int) -> int:
    """Return what runs add to the CRC of a tensor that ends at `end_bytes` of the file."""
    first, end = runs[0][0], runs[-1][0] + runs[-1][1]
    data = memoryview((ctypes.c_char * (end - first)).from_address(address + first))
    term = 0
    for start, size_bytes, offset_bytes in runs:
        crc = _native.crc32(data[start - first : start - first + size_bytes])
        term ^= _native.combine_crc32(crc ^ crc_of_zeros(size_bytes), 0, end_bytes - offset_bytes - size_bytes)
    return term


def crc_of(data: torch.Tensor, crc: int) -> int:
    """Continue a CRC with bytes in host memory."""
    return _native.crc32((ctypes.c_char * data.numel()).from_address(data.data_ptr()), crc)


@functools.lru_cache(maxsize=4096)
def crc_of_zeros(size_bytes: int) -> int:
    """Return the CRC of so many zeros."""
    if not size_bytes:
        return 0
    half = crc_of_zeros(size_bytes // 2)
    crc = _native.combine_crc32(half, half, size_bytes // 2)
    return _native.combine_crc32(crc, _native.crc32(b"\0"), 1) if size_bytes % 2 else crc
