"""The Python face of the native writer and reader: open them, feed them, say which engine ran.

Tensor memory crosses into the native module as address and length; the objects here keep the tensors alive for as long
as the native side may look. It copies from and to CUDA devices itself (`cuda`); what is neither is copied in
ring-sized pieces by torch, through hooks. Which engines there are to try is `engine_selection`'s.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

import torch

from fastpersist import _native
from fastpersist.commit.filesystem import storage_errors
from fastpersist.config import config_for
from fastpersist.errors import StorageError
from fastpersist.formats.byte_ranges import ByteRange
from fastpersist.transfer import cuda
from fastpersist.transfer.engine_selection import announce_engine, engine_ladder, is_cufile, refuse_null_engine

__all__ = [
    "Extents",
    "Pieces",
    "Read",
    "Writer",
    "byte_tensor",
    "read_extents",
]

_QUEUE_DEPTH_MAX = 4096  # of every engine

Run: TypeAlias = tuple[int, int, int]
"""Bytes of a file that were written one after the other: offset, how many, their CRC-32."""

Poll = Callable[[int], None]
"""Called about every 50 ms with the bytes done so far; what it raises stops the transfer."""

# ------------------------------------------------------------------------------------------------------- memory


def byte_tensor(storage: torch.UntypedStorage) -> torch.Tensor:
    """View a storage as a uint8 tensor of shape [nbytes], on its own device, without a copy."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def host_tensor(address: int, size_bytes: int) -> torch.Tensor:
    """View host memory that somebody else owns as a uint8 tensor of shape [size_bytes]."""
    return torch.frombuffer((ctypes.c_char * size_bytes).from_address(address), dtype=torch.uint8)


def is_host_memory(storage: torch.UntypedStorage) -> bool:
    """Tell whether the native side can read the storage's bytes at its address."""
    return storage.device.type == "cpu"


# ------------------------------------------------------------------------------------------------------- writing


class Pieces:
    """What to write next, in order. Keeps the storages alive until it is dropped."""

    def __init__(self) -> None:
        self.native = _native.PieceList()
        self.pulled: list[torch.Tensor] = []
        self._kept: list[torch.UntypedStorage] = []
        self.devices: set[int] = set()  # whose memory is among them

    def add_bytes(self, data: bytes) -> None:
        """Add literal bytes."""
        self.native.add_bytes(data)

    def add_crc(self, crc_slot: int) -> None:
        """Add the four little-endian bytes of a slot's CRC, as it is when they are reached."""
        self.native.add_crc(crc_slot)

    def add_storage(
        self,
        storage: torch.UntypedStorage,
        crc_slot: int | None,
        *,
        offset_bytes: int = 0,
        size_bytes: int | None = None,
    ) -> None:
        """Add bytes of a storage on any device.

        Args:
            storage: Kept alive until this object is dropped.
            crc_slot: Where the CRC of these bytes goes; None for no CRC.
            offset_bytes: First byte, in the storage.
            size_bytes: How many; None for all from there.
        """
        if size_bytes is None:
            size_bytes = storage.nbytes() - offset_bytes
        slot = _native.NO_CRC if crc_slot is None else crc_slot
        if is_host_memory(storage):
            self._kept.append(storage)
            self.native.add_memory(storage.data_ptr() + offset_bytes, size_bytes, slot)
        elif (ordinal := cuda.ordinal_of(storage)) is not None:
            self.devices.add(ordinal)
            self._kept.append(storage)
            self.native.add_device(ordinal, storage.data_ptr() + offset_bytes, size_bytes, slot)
        else:
            self.native.add_pulled(len(self.pulled), size_bytes, slot)
            self.pulled.append(byte_tensor(storage)[offset_bytes : offset_bytes + size_bytes])

    def add_captured(self, snapshot: _native.Snapshot, source: int, size_bytes: int, crc_slot: int | None) -> None:
        """Add a whole source of a snapshot, wherever its bytes are by then."""
        self.native.add_captured(snapshot, source, size_bytes, _native.NO_CRC if crc_slot is None else crc_slot)


class Writer:
    """Writes pieces to an open file. One owner thread; a context manager that gives everything back.

    Args:
        fd: Open for reading and writing; stays the caller's.
        path: For messages.
        engine: Engine name or "auto".
        poll: See `Poll`.
        sparing: Keep half the requests in flight: enough for the disk, less memory, and less in the way of others.
        sources: What will be written to a file from its start, if no piece wants a CRC. With the engine "cufile" the
            ring is then memory of the device on which they lie, and nothing goes through host memory that need not.

    Raises:
        ConfigError, UnsupportedError: Unknown or unusable engine.
        StorageError: No memory for the ring.
    """

    def __init__(
        self,
        fd: int,
        path: str,
        *,
        engine: str = "auto",
        poll: Poll | None = None,
        sparing: bool = False,
        sources: Collection[torch.UntypedStorage] = (),
    ) -> None:
        self._path = path
        self._wanted = engine
        self._pulled = _Pulled()
        placed = ((cuda.ordinal_of(storage), storage.nbytes()) for storage in sources)
        options = _options(fd, path, engine_ladder(engine, fd), placed, sparing=sparing)
        self._native = _native.FileWriter(options, pull=self._pulled.copy, poll=poll)

    def append(self, pieces: Pieces) -> None:
        """Write pieces behind what is there; returns when their bytes have been copied, not when they are on disk.

        Bytes of devices are those that the caller's current streams have made of them by now.
        """
        for ordinal in pieces.devices:
            cuda.follow_caller(ordinal, to_host=True)
        self._pulled.tensors = pieces.pulled
        self._native.append(pieces.native)

    def seek(self, offset_bytes: int) -> None:
        """Go on at another block; the block that is left is padded with zeros."""
        self._native.seek(offset_bytes)

    def crcs(self, count: int) -> list[int]:
        """Return the CRCs of slots 0 … count - 1."""
        return self._native.crcs(count)

    @property
    def position(self) -> int:
        """Offset in the file of what is appended next."""
        return self._native.position

    def runs(self) -> list[Run] | None:
        """Return offset, bytes and CRC of what was written between two seeks; None if some piece has no CRC."""
        return self._native.runs()

    def rest(self) -> None:
        """Wait for every write, and keep no more of the ring than a transfer needs: before a wait for other ranks.

        Whoever else saves in this process may be who they wait for. What is appended next comes after a seek.
        """
        self._native.finish()

    def finish(self) -> str:
        """Wait for every write; return the name of the engine that did them."""
        self._native.finish()
        cuda.tell_of_pinning()
        announce_engine(self._path, self._wanted, self._native.engine, self._native.demotions)
        return self._native.engine

    def close(self) -> None:
        """Wait for the kernel and give buffers and engine back. May be called again."""
        self._native.close()

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.close()


class _Pulled:
    """What the native side pulls of the pieces that are appended; not the writer itself, which would keep itself."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []

    def copy(self, index: int, offset_bytes: int, address: int, size_bytes: int) -> None:
        """Copy bytes of a tensor to host memory."""
        source = self.tensors[index][offset_bytes : offset_bytes + size_bytes]
        host_tensor(address, size_bytes).copy_(source)


# ------------------------------------------------------------------------------------------------------- options


Placed: TypeAlias = Iterable[tuple[int | None, int]]
"""What is moved, thing by thing: the ordinal of the CUDA device it lies on (None: elsewhere), and how many bytes."""


def _largest_share(placed: Placed) -> int | None:
    """Return the device that most of the bytes are on; None if nothing is on any."""
    found: Counter[int] = Counter()
    for device, size_bytes in placed:
        if device is not None:
            found[device] += size_bytes
    return found.most_common(1)[0][0] if found else None


def _options(
    fd: int, path: str, ladder: list[str], placed: Placed, *, sparing: bool = False
) -> _native.TransferOptions:
    """Return the options of a transfer.

    Args:
        fd: The open file.
        path: For messages.
        ladder: The engines to try.
        placed: What is moved. The ring of the engine "cufile" is memory of the device that most of it lies on.
        sparing: See `Writer`.
    """
    limits = config_for(fd)
    queue_depth = limits.queue_depth or min(limits.ring_bytes // limits.chunk_bytes, _QUEUE_DEPTH_MAX)
    return _native.TransferOptions(
        fd=fd,
        path=os.fsencode(path),
        engines=ladder,
        ring_bytes=limits.ring_bytes,
        chunk_bytes=limits.chunk_bytes,
        queue_depth=max(1, queue_depth // 2) if sparing else queue_depth,
        thread_count=limits.threads,
        ring_device=_largest_share(placed) if is_cufile(ladder[0]) else None,
    )


# ------------------------------------------------------------------------------------------------------- reading

Push = Callable[[int, torch.Tensor], None]
"""push(offset_bytes, bytes): take a uint8 host tensor that holds the extent's bytes from that offset on."""


class _Extent(NamedTuple):
    """One extent and where its bytes go: to host memory, to a push, or nowhere but into a CRC.

    With a device, the address is one of its memory, and the push brings bytes there that somebody else has read.
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
            offset_bytes: Where they lie in the file.
            storage: Kept alive until this object is dropped.
            with_crc: Compute their CRC.
            fresh: Nobody has touched the storage since it was allocated, so its pages may be prepared ahead.
            from_bytes: First byte, in the storage.
            size_bytes: How many; None for all from there.
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
        """View where an extent goes as a uint8 tensor; None if that is no host memory."""
        extent = self._wanted[index]
        if extent.address is None or extent.device is not None:
            return None
        return host_tensor(extent.address, extent.size_bytes)

    def wants_crc(self, index: int) -> bool:
        """Whether the CRC of an extent is asked for."""
        return self._wanted[index].with_crc

    def bring(self, index: int, from_bytes: int, data: torch.Tensor) -> None:
        """Bring bytes of an extent, which somebody else has read, to where they belong.

        Args:
            index: Of the extent.
            from_bytes: The first, counted from the extent's start.
            data: A uint8 host tensor.
        """
        extent = self._wanted[index]
        if extent.address is not None and extent.device is None:
            host_tensor(extent.address + from_bytes, data.numel()).copy_(data)
        elif extent.push_index is not None:
            self._pushes[extent.push_index](from_bytes, data)

    def keeps_nothing(self) -> bool:
        """Whether all extents are read for their CRCs alone."""
        return all(extent.address is None and extent.push_index is None for extent in self._wanted)

    def parts(self, wanted: Iterable[ByteRange]) -> Extents:
        """Return parts of these extents, with the same destinations, as extents of their own.

        Args:
            wanted: Of the extent `source`, by index. Destinations that convert elements want parts of whole elements.
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

        options = _options(fd, path, engine_ladder(engine, fd, for_reading=True), self._placed())
        report = _native.read_extents(options, native, push=self._push, poll=poll)
        crcs = [0] * len(order)
        for index, crc in zip(order, report.crcs, strict=True):
            crcs[index] = crc
        cuda.tell_of_pinning()
        announce_engine(path, engine, report.engine, report.demotions)
        return ReadResult(crcs, report.engine)

    def _placed(self) -> Placed:
        """Say where the extents go; nothing when there are CRCs to compute, which the host does."""
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
    """What reads extents for a load: `read_extents`, or several ranks together."""

    def __call__(
        self, fd: int, path: str, extents: Extents, *, engine: str = "auto", poll: Poll | None = None
    ) -> ReadResult:
        """Read extents of a file to where they belong; see `read_extents`."""
        ...


def read_extents(fd: int, path: str, extents: Extents, *, engine: str = "auto", poll: Poll | None = None) -> ReadResult:
    """Read extents of a file to where they belong, whatever the alignment of file and memory.

    Args:
        fd: Open for reading; stays the caller's. Its O_DIRECT flag may be changed: read small things through another.
        path: For messages.
        extents: What to read and where to.
        engine: Engine name or "auto".
        poll: See `Poll`.

    Raises:
        ConfigError, UnsupportedError: Unknown or unusable engine.
        StorageError: An error of the disk, or the file ends before an extent does; destinations may be partly filled.
    """
    if not len(extents):
        return ReadResult([], "")
    result = extents.read(fd, path, engine=engine, poll=poll)
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
