"""The memory of the ring and of residents, and the reads into it: one request per unit and file, direct from the disk.

`ring` manages the places in the ring, `stream` decides what is read when. The memory is not locked: direct reads hold
their pages, and locking would touch all of it before the first read.
"""

from __future__ import annotations

import itertools
import mmap
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress

import torch

from fastpersist import _native
from fastpersist.config import BLOCK_BYTES
from fastpersist.errors import ChecksumError, ConfigError, StorageError
from fastpersist.streaming.ring import ByteRing, Room
from fastpersist.streaming.source import WeightSource
from fastpersist.streaming.units import Block, Weight
from fastpersist.transfer.tensor_memory import byte_view, crc32_of
from fastpersist.transfer.tensor_requests import PendingIO

__all__ = [
    "Filling",
    "Memory",
    "SparseMemory",
    "check_values",
    "has_rows",
    "new_memory",
    "read_rows",
    "start_filling",
    "values_in",
]


def new_memory(size_bytes: int, device: torch.device, *, for_children: bool = True) -> torch.Tensor:
    """Return fresh memory as a uint8 tensor; it begins on a page, on a device on a multiple of 256.

    Args:
        size_bytes: The length of the memory.
        device: The device of the memory.
        for_children: Whether forked children have the memory, too, if it is the host's.
    """
    if device.type != "cpu":
        with torch.inference_mode(False):
            return torch.empty(size_bytes, dtype=torch.uint8, device=device)
    return _tensor_of(_map(size_bytes, for_children=for_children))


def _map(size_bytes: int, *, for_children: bool) -> mmap.mmap:
    # Private: shared memory gets no huge pages where the kernel's shmem_enabled says so, as it does by default.
    mapping = mmap.mmap(-1, max(size_bytes, BLOCK_BYTES), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in ("MADV_HUGEPAGE",) if for_children else ("MADV_HUGEPAGE", "MADV_DONTFORK"):
        with suppress(OSError, AttributeError):  # a kernel without it
            mapping.madvise(getattr(mmap, advice))
    return mapping


def _tensor_of(mapping: mmap.mmap) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.frombuffer(mapping, dtype=torch.uint8)


class SparseMemory:
    """Memory that takes room only where something was read into it; the rest is zeros.

    Args:
        size_bytes: The length of the memory; it is mapped at the first use.

    Thread safety: none.
    """

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._mapping: mmap.mmap | None = None
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")

    def cut(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Return the memory of blocks of these sizes, one after the other."""
        if self._mapping is None:
            self._mapping = _map(self._size_bytes, for_children=False)
            self._memory = _tensor_of(self._mapping)
        ends = list(itertools.accumulate(sizes))
        return [self._memory[end - size : end] for size, end in zip(sizes, ends, strict=True)]

    def has(self, tensor: torch.Tensor) -> bool:
        """Tell whether the memory of a tensor is here."""
        return tensor.untyped_storage().data_ptr() == self._memory.untyped_storage().data_ptr()

    def clear(self) -> None:
        """Give all of it back to the kernel, and make it zeros again."""
        if self._mapping is not None:
            self._mapping.madvise(mmap.MADV_DONTNEED)


class Memory:
    """The memory of a stream: the ring, and pieces of their own.

    On a device, memory can be given back while work still uses it: a `TensorFile` copies to it only after all work that
    the current stream has when the read begins.

    Args:
        ring_bytes: The size of the ring; 0 for no ring.
        device: The device of the memory.

    Attributes:
        device: The device of the memory.

    Thread safety: none.
    """

    def __init__(self, ring_bytes: int, device: torch.device) -> None:
        self.device = device
        self._ring = ByteRing(ring_bytes)
        self._ring_memory = new_memory(ring_bytes, device, for_children=False) if ring_bytes else None

    def outside(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Return memory of their own for blocks."""
        return [new_memory(size, self.device) for size in sizes]

    def clear_ahead(self, others: Sequence[torch.Tensor]) -> None:
        """Let a thread touch the ring and other memory: the first reads then need not wait until pages are cleared.

        A virtual machine's host has to find each page first. That takes longer than reading it.
        """
        ring = [] if self._ring_memory is None else [self._ring_memory]
        memory = [tensor for tensor in (*ring, *others) if tensor.device.type == "cpu"]
        self._clearing = _native.Prefault([(each.data_ptr(), each.nbytes) for each in memory], memory)

    def in_ring(self, sizes: Sequence[int]) -> tuple[Room, list[torch.Tensor]] | None:
        """Take room in the ring for blocks; None if there is not enough now."""
        if self._ring_memory is None:
            return None
        room = self._ring.take(sizes)
        if room is None:
            return None
        return room, [self._ring_memory[at : at + size] for at, size in zip(room.offsets, sizes, strict=True)]

    def give_back(self, room: Room) -> None:
        """Give room in the ring back."""
        self._ring.give_back(room)

    def is_in_ring(self, tensor: torch.Tensor) -> bool:
        """Tell whether the memory of a tensor is, or may be, the ring's."""
        if self._ring_memory is None:
            return False
        try:
            return tensor.untyped_storage().data_ptr() == self._ring_memory.untyped_storage().data_ptr()
        except (NotImplementedError, RuntimeError):  # of a transform of torch.func: its memory cannot be asked for
            return True


class Filling:
    """Blocks of memory that are being filled, or are full. `start_filling` makes it.

    Attributes:
        blocks: The blocks.
        memory: The memory of each block.
        room: The room in the ring; None if the blocks have memory of their own.
        size_bytes: The number of bytes that are read.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        memory: Sequence[torch.Tensor],
        room: Room | None,
        requests: list[tuple[int, PendingIO]],
    ) -> None:
        self.blocks = blocks
        self.memory = memory
        self.room = room
        self.size_bytes = sum(each.size_bytes for block in blocks for each in block.ranges)
        self._requests = requests

    def add(self, more: Filling) -> None:
        """Wait for another one of the same memory, too."""
        self._requests += more._requests

    def done(self) -> bool:
        """Tell whether nothing is under way any more."""
        return all(request.done() for _, request in self._requests)

    def wait(self) -> None:
        """Wait until all is there.

        Raises:
            StorageError, EndOfFileError: A read failed; the message names a weight that it was for.
        """
        while self._requests:
            file, request = self._requests[0]
            try:
                request.wait()
            except StorageError as error:
                self.land()
                _say_weight(error, self._weight_at(file, error.offset_bytes or 0))
                raise
            self._requests.pop(0)

    def land(self) -> None:
        """Wait until no read is under way, whether the reads succeed or fail."""
        while self._requests:
            self._requests[0][1].exception()
            self._requests.pop(0)

    def _weight_at(self, file: int, offset_bytes: int) -> str:
        """Return the name of the first weight of a file that ends behind an offset: reads begin before it."""
        found = [
            (place.offset_bytes + place.size_bytes, weight.name)
            for block in self.blocks
            for weight, _ in block.weights
            for place in weight.pieces
            if place.file == file
        ]
        return min((one for one in found if one[0] > offset_bytes), default=max(found))[1]


def _say_weight(error: StorageError, name: str) -> None:
    """Add the name of a weight to an error of the disk."""
    error.args = (error.args[0], f"{error}; it was for the weight {name}")


def start_filling(
    source: WeightSource, blocks: Sequence[Block], memory: Sequence[torch.Tensor], room: Room | None
) -> Filling:
    """Start to read blocks to their memory.

    Raises:
        StorageError: A file has changed.
    """
    items: dict[int, list[tuple[torch.Tensor, int]]] = defaultdict(list)
    for block, there in zip(blocks, memory, strict=True):
        for each in block.ranges:
            items[each.file].append((there[each.at_bytes : each.at_bytes + each.size_bytes], each.offset_bytes))
    files = {number: source.file(number) for number in items}
    filling = Filling(blocks, memory, room, [])
    try:
        for number, parts in items.items():
            filling._requests.append((number, files[number].read_list_async(parts)))
    except BaseException:
        filling.land()
        raise
    return filling


def values_in(memory: torch.Tensor, weight: Weight, at_bytes: int) -> torch.Tensor:
    """View a block's memory as the values of a weight; another dtype than the file's is a copy."""
    with torch.inference_mode(False), torch.no_grad():
        flat = memory[at_bytes : at_bytes + weight.file_bytes].view(weight.file_dtype)
        values = flat.view(weight.shape)
        return values if weight.dtype == weight.file_dtype else values.to(weight.dtype)


def check_values(source: WeightSource, memory: torch.Tensor, weight: Weight, at_bytes: int) -> None:
    """Compare the CRCs that were recorded of a weight.

    Raises:
        ChecksumError: A CRC differs.
    """
    for place in weight.pieces:
        data = memory[at_bytes : at_bytes + place.size_bytes].cpu()
        at_bytes += place.size_bytes
        if place.crc32 is None:
            continue
        crc = crc32_of(data)
        if crc != place.crc32:
            raise ChecksumError(
                f"the bytes of {weight.name} are damaged: their CRC is {crc:08x}, not {place.crc32:08x}",
                path=source.file(place.file).path,
                offset_bytes=place.offset_bytes,
            )


def has_rows(weight: Weight) -> bool:
    """Tell whether single rows of a weight can be read."""
    return len(weight.pieces) == 1 and len(weight.shape) > 1 and weight.file_bytes > 0


def read_rows(source: WeightSource, weight: Weight, ids: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Read the rows of a weight that ids name; return them in the ids' shape, and how many bytes were read.

    Raises:
        ConfigError: The ids are of another dtype than int32 or int64.
        IndexError: An id is negative or too large.
        StorageError: A read failed, or the file has changed.
    """
    if ids.dtype not in (torch.int32, torch.int64):
        raise ConfigError(f"ids of rows of {weight.name} are int32 or int64, not {ids.dtype}")
    place = weight.pieces[0]
    row_bytes = place.size_bytes // weight.shape[0]
    with torch.inference_mode(False), torch.no_grad():
        unique, inverse = torch.unique(ids.reshape(-1).cpu(), return_inverse=True)
        wanted = unique.tolist()
        if wanted and not 0 <= wanted[0] <= wanted[-1] < weight.shape[0]:
            outside = wanted[0] if wanted[0] < 0 else wanted[-1]
            raise IndexError(f"{weight.name} has {weight.shape[0]} rows; the id {outside} is outside of them")
        rows = torch.empty((len(wanted), *weight.shape[1:]), dtype=weight.file_dtype, device="cpu")
        if rows.numel():
            flat = byte_view(rows).view(len(wanted), row_bytes)
            items = [(flat[at], place.offset_bytes + row * row_bytes) for at, row in enumerate(wanted)]
            file = source.file(place.file)
            try:
                file.read_list(items)
            except StorageError as error:
                _say_weight(error, weight.name)
                raise
        rows = rows.to(weight.dtype)
        rows = rows[inverse].view(*ids.shape, *weight.shape[1:]).to(weight.stand_in.device)
    return rows, len(wanted) * row_bytes
