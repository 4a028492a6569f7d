"""Writes to an open file through the native side: bytes, storages of any device, captured bytes, and their CRCs.

Tensor memory crosses into the native module as address and length; `Pieces` keeps the tensors alive for as long as the
native side may look. It copies from CUDA devices itself (`cuda`). Torch copies from other devices, in ring-sized
pieces. `engine_selection` chooses the engine, and `reader` reads.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TypeAlias

import torch

from fastpersist import _native
from fastpersist.formats.layout import Record
from fastpersist.transfer import cuda
from fastpersist.transfer.cuda import is_host_memory
from fastpersist.transfer.engine_selection import announce_engine, transfer_options
from fastpersist.transfer.progress import Poll
from fastpersist.transfer.tensor_memory import byte_tensor, host_tensor

__all__ = ["Pieces", "Run", "Writer"]

Run: TypeAlias = tuple[int, int, int]
"""Bytes of a file that were written one after the other: offset, how many, their CRC-32."""


class Pieces:
    """What to write next, in order. Keeps the storages alive until it is dropped."""

    def __init__(self) -> None:
        self.native = _native.PieceList()
        self.pulled: list[torch.Tensor] = []
        self._kept: list[torch.UntypedStorage] = []
        self.devices: set[int] = set()  # ordinals of those whose memory is among the pieces

    def add_bytes(self, data: bytes) -> None:
        """Add literal bytes."""
        self.native.add_bytes(data)

    def add_crc(self, crc_slot: int) -> None:
        """Add the four little-endian bytes of a slot's CRC, as it is when the writer reaches them."""
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
            storage: The storage with the bytes, kept alive until this object is dropped.
            crc_slot: The slot for the CRC of these bytes; None for no CRC.
            offset_bytes: The offset of the first byte in the storage.
            size_bytes: The number of bytes; None for all from there.
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
        """Add a whole source of a snapshot, wherever its bytes are when the writer reaches them."""
        self.native.add_captured(snapshot, source, size_bytes, _native.NO_CRC if crc_slot is None else crc_slot)

    def add_records(
        self,
        records: list[Record],
        storages: Sequence[tuple[torch.UntypedStorage, int, int]],
        first_source: int,
        snapshot: _native.Snapshot | None,
        with_crcs: bool,
    ) -> None:
        """Add records of a torch zip in a row, each with header and descriptor.

        Args:
            records: The records, which say where they lie.
            storages: For each source of the file: its storage, its offset there, and its length.
            first_source: The first record's data are this source, and its CRC goes into this slot.
            snapshot: Holds the data. Without it they are read from their storages, in host memory, which are kept alive
                until this object is dropped.
            with_crcs: Compute and record CRCs.
        """
        addresses = []
        if snapshot is None:
            of_records = storages[first_source : first_source + len(records)]
            addresses = [storage.data_ptr() + offset_bytes for storage, offset_bytes, _ in of_records]
            self._kept += [storage for storage, _, _ in of_records]
        self.native.add_records(records, first_source, with_crcs, snapshot, addresses)


class Writer:
    """Writes pieces to an open file. One owner thread; a context manager that gives everything back.

    Args:
        fd: A descriptor, open for reading and writing; the caller closes it.
        path: The path of the file, for messages.
        engine: Engine name or "auto".
        poll: Called while data is written; see `Poll`.
        sparing: Keep half the requests in flight, unless a depth was tuned or set: enough for the disk, less memory,
            and less load during training.
        shared: Others write to the file meanwhile, such as other ranks.
        sources: The storages of a file that is written from its start without CRCs. With the engine "cufile" the
            ring is then memory of the device on which they lie, so that their bytes need not go through host memory.

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
        shared: bool = False,
        sources: Collection[torch.UntypedStorage] = (),
    ) -> None:
        self._path = path
        self._wanted = engine
        self._pulled = _Pulled()
        placed = ((cuda.ordinal_of(storage), storage.nbytes()) for storage in sources)
        options = transfer_options(fd, path, engine, placed=placed, one_writer=not shared, sparing=sparing)
        self._native = _native.FileWriter(options, pull=self._pulled.copy, poll=poll)

    def append(self, pieces: Pieces) -> None:
        """Write pieces behind those before; return when their bytes have been copied, not when they are on disk.

        The copies from devices come after the work that the caller's current streams have now.
        """
        for ordinal in pieces.devices:
            cuda.follow_caller(ordinal, to_host=True)
        self._pulled.tensors = pieces.pulled
        self._native.append(pieces.native)

    def seek(self, offset_bytes: int) -> None:
        """Go on at another block; the rest of the current one is filled with zeros."""
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
        """Wait for every write, and keep no more of the ring than a transfer needs.

        Call it before a wait for other ranks: those may wait for another save of this process, which needs the rest of
        the ring. Call `seek` before the next `append`.
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
    """Tensors of which the native side pulls bytes; apart from the writer, which would otherwise keep itself alive."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []

    def copy(self, index: int, offset_bytes: int, address: int, size_bytes: int) -> None:
        """Copy bytes of a tensor to host memory."""
        source = self.tensors[index][offset_bytes : offset_bytes + size_bytes]
        host_tensor(address, size_bytes).copy_(source)
