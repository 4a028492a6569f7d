"""The sources of a file (ranges of memory that go into it), and the tensors that hold their storages.

Both are stored as columns. Training waits while they are made, and a state may have many thousands of tensors: making
an object for each would take longer than all other work on it.
"""

from __future__ import annotations

import operator
from array import array
from collections.abc import MutableSequence, Sequence
from typing import NamedTuple, overload

import torch

from fastpersist.transfer import cuda

__all__ = ["Holders", "Source", "SourceTable", "StorageFacts", "facts_of"]


class Source(NamedTuple):
    """Bytes of a tensor that go into a file.

    Attributes:
        storage: The storage that holds the bytes.
        offset_bytes: The offset of the first byte in the storage.
        size_bytes: The number of bytes.
    """

    storage: torch.UntypedStorage
    offset_bytes: int
    size_bytes: int


class StorageFacts(NamedTuple):
    """Properties of storages at one moment.

    Attributes:
        keys: The key of each storage, which identifies the storage while it lives.
        addresses: The address of each storage; 0 if it has no byte.
        sizes_bytes: The length of each.
        are_on_host: Whether all storages lie in memory that the native side can read.
        versions: The version of each tensor of the file's `Holders`; -1 if it has no counter. Empty if not read yet.
    """

    keys: MutableSequence[int]
    addresses: MutableSequence[int]
    sizes_bytes: MutableSequence[int]
    are_on_host: bool
    versions: Sequence[int] = ()


_key_of = operator.attrgetter("_cdata")


def facts_of(storages: Sequence[torch.UntypedStorage]) -> StorageFacts:
    """Return what storages are now."""
    return StorageFacts(
        array("Q", map(_key_of, storages)),
        array("Q", map(torch.UntypedStorage.data_ptr, storages)),
        array("Q", map(torch.UntypedStorage.nbytes, storages)),
        all(map(cuda.is_host_memory, storages)),
    )


class SourceTable(Sequence[Source]):
    """Sources in the order of their file.

    Args:
        offsets_bytes: Where each source begins in its storage; None if each source begins with its storage.
        facts: The properties of the storages, if they are known already.
        total_bytes: The bytes of all sources, if they are known already.

    Attributes:
        storages: The storage of each source.
        offsets_bytes: Where each source begins in its storage.
        sizes_bytes: The number of bytes of each source.
    """

    __slots__ = ("_are_at_starts", "_facts", "_total_bytes", "offsets_bytes", "sizes_bytes", "storages")

    def __init__(
        self,
        storages: list[torch.UntypedStorage],
        offsets_bytes: MutableSequence[int] | None,
        sizes_bytes: MutableSequence[int],
        facts: StorageFacts | None = None,
        total_bytes: int | None = None,
    ) -> None:
        self.storages = storages
        self.offsets_bytes = [0] * len(storages) if offsets_bytes is None else offsets_bytes
        self.sizes_bytes = sizes_bytes
        self._are_at_starts = offsets_bytes is None
        self._facts = facts
        self._total_bytes = total_bytes

    def total_bytes(self) -> int:
        """Return the bytes of all sources."""
        if self._total_bytes is None:
            self._total_bytes = sum(self.sizes_bytes)
        return self._total_bytes

    def facts(self) -> StorageFacts:
        """Return what the storages were when the table was made; what they are now if they were not looked at then."""
        return facts_of(self.storages) if self._facts is None else self._facts

    def addresses(self, facts: StorageFacts) -> MutableSequence[int]:
        """Return where each source lies, by the facts of the storages."""
        starts = facts.addresses
        return starts if self._are_at_starts else array("Q", map(operator.add, starts, self.offsets_bytes))

    def append(self, source: Source) -> None:
        """Add a source behind the others."""
        self._facts = self._total_bytes = None
        self._are_at_starts = False
        self.storages.append(source.storage)
        self.offsets_bytes.append(source.offset_bytes)
        self.sizes_bytes.append(source.size_bytes)

    def __len__(self) -> int:
        return len(self.storages)

    @overload
    def __getitem__(self, index: int) -> Source: ...
    @overload
    def __getitem__(self, index: slice) -> SourceTable: ...
    def __getitem__(self, index: int | slice) -> Source | SourceTable:
        if isinstance(index, slice):
            return SourceTable(self.storages[index], self.offsets_bytes[index], self.sizes_bytes[index])
        return Source(self.storages[index], self.offsets_bytes[index], self.sizes_bytes[index])


class Holders(NamedTuple):
    """Tensors, and for each what it holds.

    Attributes:
        tensors: The tensors; a tensor stands here as often as it holds something.
        held: For each tensor, the index of a source, or the key of a storage (`ownership.storage_key`).
    """

    tensors: list[torch.Tensor]
    held: MutableSequence[int]

    def add(self, tensor: torch.Tensor, held: int) -> None:
        """Add a tensor and what it holds."""
        self.tensors.append(tensor)
        self.held.append(held)
