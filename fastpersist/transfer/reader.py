"""Read extents of an open file through the native side, to memory of any device, with their CRCs.

Tensor memory crosses into the native module as address and length; `Extents` keeps the destinations alive for as long
as the native side may write there. It copies to CUDA devices itself (`cuda`). Torch copies to other devices, in
ring-sized pieces. `engine_selection` chooses the engine, and `writer` writes.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from fastpersist import _native
from fastpersist.commit.filesystem import storage_errors
from fastpersist.errors import StorageError
from fastpersist.formats.byte_ranges import ByteRange
from fastpersist.transfer import cuda
from fastpersist.transfer.cuda import is_host_memory
from fastpersist.transfer.engine_selection import Placed, announce_engine, refuse_null_engine, transfer_options
from fastpersist.transfer.progress import Poll, counted
from fastpersist.transfer.tensor_memory import byte_tensor, host_tensor

__all__ = ["Extents", "Push", "Read", "ReadResult", "read_exactly", "read_extents"]

Push = Callable[[int, torch.Tensor], None]
"""push(offset_bytes, bytes): take a uint8 host tensor that holds the extent's bytes from that offset on."""


class _Extent(NamedTuple):
    """One extent and where its bytes go: to host memory, to a push, or only into a CRC.

    With a device, the address is in the memory of that, and the push takes bytes there that another rank has read.
    """

    offset_bytes: int
    size_bytes: int
    with_crc: bool
    address: int | None = None
    push_index: int | None = None
    fresh: bool = False
    device: int | None = None


class Extents:
    """What to read, in any order. Keeps the destinations alive until it is dropped."""

    def __init__(self) -> None:
        self._wanted: list[_Extent] = []
        self._pushes: list[Push] = []
        self._kept: list[object] = []

    def __len__(self) -> int:
        return len(self._wanted)

    def add_memory(self, offset_bytes: int, size_bytes: int, address: int, owner: object, *, with_crc: bool) -> int:
        """Read to host memory at `address`, which `owner` keeps alive; return the index of the extent."""
        return self._add(_Extent(offset_bytes, size_bytes, with_crc, address=address), owner)

    def add_pushed(self, offset_bytes: int, size_bytes: int, push: Push, *, with_crc: bool) -> int:
        """Read and hand the bytes to `push`, at most a chunk at a time, in no particular order."""
        self._pushes.append(push)
        return self._add(_Extent(offset_bytes, size_bytes, with_crc, push_index=len(self._pushes) - 1))

    def add_storage(
        self,
        offset_bytes: int,
        storage: torch.UntypedStorage,
        *,
        with_crc: bool,
        fresh: bool = False,
        from_bytes: int = 0,
        size_bytes: int | None = None,
    ) -> int:
        """Read bytes of a storage on any device; return the index of the extent.

        Args:
            offset_bytes: The offset of the bytes in the file.
            storage: The storage to fill, kept alive until this object is dropped.
            with_crc: Compute the CRC of these bytes.
            fresh: The storage was just allocated and not touched, so its pages may be prepared ahead.
            from_bytes: The offset of the first byte in the storage.
            size_bytes: The number of bytes; None for all from there.
        """
        if size_bytes is None:
            size_bytes = storage.nbytes() - from_bytes
        address = storage.data_ptr() + from_bytes
        if is_host_memory(storage):
            return self._add(_Extent(offset_bytes, size_bytes, with_crc, address=address, fresh=fresh), storage)

        def push(offset: int, source: torch.Tensor) -> None:
            start = from_bytes + offset
            byte_tensor(storage)[start : start + source.numel()].copy_(source)

        index = self.add_pushed(offset_bytes, size_bytes, push, with_crc=with_crc)
        ordinal = cuda.ordinal_of(storage)
        if ordinal is not None:
            self._wanted[index] = self._wanted[index]._replace(address=address, device=ordinal)
        return index

    def add_checked(self, offset_bytes: int, size_bytes: int) -> int:
        """Read for the CRC alone; return the index of the extent."""
        return self._add(_Extent(offset_bytes, size_bytes, True))

    def places(self) -> list[tuple[int, int]]:
        """Return offset in the file and length of each extent, by index."""
        return [(extent.offset_bytes, extent.size_bytes) for extent in self._wanted]

    def host_memory(self, index: int) -> torch.Tensor | None:
        """View the destination of an extent as a uint8 tensor; None if that is no host memory."""
        extent = self._wanted[index]
        if extent.address is None or extent.device is not None:
            return None
        return host_tensor(extent.address, extent.size_bytes)

    def wants_crc(self, index: int) -> bool:
        """Tell whether the CRC of an extent is asked for."""
        return self._wanted[index].with_crc

    def bring(self, index: int, from_bytes: int, data: torch.Tensor) -> None:
        """Bring bytes of an extent, which another rank has read, to where they belong.

        Args:
            index: The index of the extent.
            from_bytes: The offset of the first byte from the extent's start.
            data: The bytes, as a uint8 host tensor.
        """
        extent = self._wanted[index]
        if extent.address is not None and extent.device is None:
            host_tensor(extent.address + from_bytes, data.numel()).copy_(data)
        elif extent.push_index is not None:
            self._pushes[extent.push_index](from_bytes, data)

    def keeps_nothing(self) -> bool:
        """Tell whether all extents are read for their CRCs alone."""
        return all(extent.address is None and extent.push_index is None for extent in self._wanted)

    def parts(self, wanted: Iterable[ByteRange]) -> Extents:
        """Return parts of these extents, with the same destinations, as extents of their own.

        Args:
            wanted: The parts, each of the extent with index `source`. For destinations that convert elements, parts
                are whole elements.
        """
        found = Extents()
        found._kept.append(self)
        for part in wanted:
            extent = self._wanted[part.source]
            offset_bytes = extent.offset_bytes + part.from_bytes
            address = None if extent.address is None else extent.address + part.from_bytes
            extent = extent._replace(offset_bytes=offset_bytes, size_bytes=part.size_bytes, address=address)
            if extent.push_index is not None:
                found._pushes.append(functools.partial(_push_behind, self._pushes[extent.push_index], part.from_bytes))
                extent = extent._replace(push_index=len(found._pushes) - 1)
            found._add(extent)
        return found

    def _add(self, extent: _Extent, owner: object = None) -> int:
        self._wanted.append(extent)
        if owner is not None:
            self._kept.append(owner)
        return len(self._wanted) - 1

    def read(self, fd: int, path: str, *, engine: str, poll: Poll | None) -> ReadResult:
        """Read everything; see `read_extents`."""
        order = sorted(range(len(self._wanted)), key=lambda index: self._wanted[index].offset_bytes)
        native = _native.ExtentList()
        for ordinal in {extent.device for extent in self._wanted if extent.device is not None}:
            cuda.follow_caller(ordinal, to_host=False)
        for index in order:
            extent = self._wanted[index]
            if extent.device is not None and extent.address is not None:
                native.add_device(
                    extent.offset_bytes, extent.size_bytes, extent.device, extent.address, extent.with_crc
                )
            elif extent.address is not None:
                native.add_memory(extent.offset_bytes, extent.size_bytes, extent.address, extent.with_crc, extent.fresh)
            elif extent.push_index is not None:
                native.add_pushed(extent.offset_bytes, extent.size_bytes, extent.push_index, extent.with_crc)
            else:
                native.add_checked(extent.offset_bytes, extent.size_bytes)

        options = transfer_options(fd, path, engine, for_reading=True, placed=self._placed())
        report = _native.read_extents(options, native, push=self._push, poll=poll)
        crcs = [0] * len(order)
        for index, crc in zip(order, report.crcs, strict=True):
            crcs[index] = crc
        cuda.tell_of_pinning()
        announce_engine(path, engine, report.engine, report.demotions)
        return ReadResult(crcs, report.engine)

    def _placed(self) -> Placed:
        """Yield where the extents go; nothing if there are CRCs to compute, which the host does."""
        if not any(extent.with_crc for extent in self._wanted):
            for extent in self._wanted:
                yield extent.device, extent.size_bytes

    def _push(self, index: int, offset_bytes: int, address: int, size_bytes: int) -> None:
        self._pushes[index](offset_bytes, host_tensor(address, size_bytes))


def _push_behind(push: Push, from_bytes: int, offset_bytes: int, source: torch.Tensor) -> None:
    push(from_bytes + offset_bytes, source)


@dataclass(frozen=True, slots=True)
class ReadResult:
    """What a read found: the CRC of each extent by index (0 where none was asked for) and the engine that read."""

    crcs: list[int]
    engine: str


class Read(Protocol):
    """A function that reads extents for a load: `read_extents`, or one by which several ranks read together."""

    def __call__(self, fd: int, path: str, extents: Extents, *, engine: str = "auto") -> ReadResult:
        """Read extents of a file to where they belong; see `read_extents`."""
        ...


def read_extents(fd: int, path: str, extents: Extents, *, engine: str = "auto", poll: Poll | None = None) -> ReadResult:
    """Read extents of a file to where they belong, whatever the alignment of file and memory.

    Args:
        fd: Open for reading; the caller closes it. O_DIRECT may be set or cleared on it: read small things by another.
        path: The path of the file, for messages.
        extents: What to read, and where to.
        engine: Engine name or "auto".
        poll: Called while data is read; see `Poll`. What `showing_progress` shows around this call is told as well.

    Raises:
        ConfigError, UnsupportedError: Unknown or unusable engine.
        StorageError: An error of the disk, or the file ends before an extent does; destinations may be partly filled.
    """
    if not len(extents):
        return ReadResult([], "")
    result = extents.read(fd, path, engine=engine, poll=counted(poll))
    refuse_null_engine(result.engine)
    return result


def read_exactly(fd: int, offset_bytes: int, size_bytes: int, path: str) -> bytes:
    """Read small things (directories, headers) by pread, whole.

    Raises:
        StorageError: An error of the disk, or the file ends first.
    """
    parts = []
    done_bytes = 0
    while done_bytes < size_bytes:
        try:
            part = os.pread(fd, size_bytes - done_bytes, offset_bytes + done_bytes)
        except OSError:  # caught first: ten thousand local headers are read one by one
            with storage_errors(f"reading at offset {offset_bytes + done_bytes} of", path):
                raise
        if not part:
            end_bytes = offset_bytes + done_bytes
            raise StorageError(None, f"{path} ends at offset {end_bytes}, in the middle of a record", path, end_bytes)
        parts.append(part)
        done_bytes += len(part)
    return b"".join(parts)
