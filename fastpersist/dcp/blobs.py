"""The format of one tensor in a part file of a DCP checkpoint: a *blob*, the bytes that torch.save writes of it.

A blob is a small torch zip with the bytes of one tensor, CRCs included, so DCP's own reader reads it from its offset
and length. Head and tail of a plain tensor's blob follow from its dtype and shape; the tensor's bytes lie between. So a
blob is written in one stream, and its tensor is found by arithmetic. Blobs of larger tensors begin at a block.
"""

from __future__ import annotations

import ctypes
import functools
import math
import sys
import zlib
from dataclasses import dataclass
from typing import TypeAlias

import torch

from fastpersist.formats import torch_zip
from fastpersist.formats.layout import place_records
from fastpersist.saving.skeleton import pickle_skeleton
from fastpersist.transfer.tensor_memory import storage_without_memory

__all__ = ["BLOCK_BYTES", "QUANTIZED", "SMALL_ALIGNMENT", "Blob", "Shape", "is_plain", "plain_blob"]

BLOCK_BYTES = 4096
SMALL_ALIGNMENT = 64
_BLOCKS_FROM_BYTES = 64 << 10
"""Smaller tensors are not aligned to blocks: they could take twice their size and more."""

QUANTIZED = frozenset((torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4))

Shape: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Blob:
    """A plain tensor's blob without the tensor's bytes and their CRC.

    Attributes:
        head: Bytes before those of the tensor.
        payload_bytes: Length of the tensor's bytes.
        tail: Bytes after those of the tensor, in parts; the CRC is between them.
    """

    head: bytes
    payload_bytes: int
    tail: tuple[bytes, ...]

    @property
    def alignment(self) -> int:
        """Alignment of the blob in its file; the tensor's bytes have the same alignment."""
        return _alignment(self.payload_bytes)

    @property
    def size_bytes(self) -> int:
        """Length of the whole blob."""
        return len(self.head) + self.payload_bytes + self.tail_bytes

    @property
    def tail_bytes(self) -> int:
        """Length of the tail."""
        return sum(map(len, self.tail)) + 4 * (len(self.tail) - 1)

    def tail_with(self, crc: int) -> bytes:
        """Return the tail for bytes with this CRC."""
        return crc.to_bytes(4, "little").join(self.tail)


def _alignment(size_bytes: int) -> int:
    return BLOCK_BYTES if size_bytes >= _BLOCKS_FROM_BYTES else SMALL_ALIGNMENT


@functools.lru_cache(maxsize=1024)
def plain_blob(dtype: torch.dtype, shape: Shape) -> Blob:
    """Plan the blob of a contiguous tensor: the same for all of one dtype and shape.

    Without `.format_version`, which would promise that offsets follow from one alignment alone.
    """
    payload_bytes = math.prod(shape) * dtype.itemsize
    stand_in = torch.empty(0, dtype=dtype, device="cpu")
    storage = storage_without_memory(payload_bytes, ctypes.addressof(_BYTE))
    stand_in.set_(storage, 0, shape)  # type: ignore[call-overload]
    small = {b"data.pkl": pickle_skeleton(stand_in).pickle, b"byteorder": sys.byteorder.encode(), b"version": b"3\n"}
    sizes = {b"archive/" + name: len(data) for name, data in small.items()}
    version_size = sizes.popitem()
    records = place_records(sizes.items(), SMALL_ALIGNMENT)
    payload = place_records(
        [(b"archive/data/0", payload_bytes)],
        _alignment(payload_bytes),
        start_offset_bytes=records[-1].end_offset_bytes,
    )[0]
    version = place_records([version_size], SMALL_ALIGNMENT, start_offset_bytes=payload.end_offset_bytes)[0]
    *before, behind = [
        torch_zip.local_header(record) + data + torch_zip.descriptor(record, zlib.crc32(data))
        for record, data in zip([*records, version], small.values(), strict=True)
    ]
    head = b"".join(before) + torch_zip.local_header(payload)
    crcs = [zlib.crc32(data) for data in small.values()]
    records = [*records, payload, version]
    closings = [torch_zip.central_directory(records, [*crcs[:-1], crc, crcs[-1]]) for crc in (0, 0xFFFFFFFF)]
    if not payload_bytes:
        return Blob(head, 0, (behind + closings[0],))
    crc_place = next(place for place, (zero, one) in enumerate(zip(*closings, strict=True)) if zero != one)
    middle = torch_zip.descriptor_tail(payload) + behind + closings[0][:crc_place]
    tail = (torch_zip.descriptor_head(payload), middle, closings[0][crc_place + 4 :])
    return Blob(head, payload_bytes, tail)


_BYTE = ctypes.c_char()


def is_plain(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is plain: nothing but elements in memory."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_nested
        and tensor.device.type != "meta"
    )
