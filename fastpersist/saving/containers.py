"""Plans the file for an object: its sources, its length, and the place of every byte, before a byte moves.

A container pickles the object, or lists its tensors, when it is made, and then knows every offset. `write_file` writes
the planned file. `commit` handles names, durability and visibility, and `formats` encodes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeAlias

import torch

from fastpersist import _native
from fastpersist.errors import ConfigError, UnsavableTensorError
from fastpersist.formats import safetensors as safetensors_format
from fastpersist.formats import torch_zip
from fastpersist.formats.layout import Record
from fastpersist.formats.pickle_scan import iter_tensors, scan_pickle
from fastpersist.saving.skeleton import ZERO_TENSOR, pickle_skeleton
from fastpersist.saving.sources import Holders, SourceTable
from fastpersist.transfer.garbage import no_garbage_collection

__all__ = [
    "Checksum",
    "Container",
    "Literal",
    "Part",
    "SafetensorsContainer",
    "Stored",
    "StoredRecords",
    "TorchZipContainer",
    "container_for",
    "is_safetensors",
]


_BATCH_COUNT = 512
"""Records in one batch: their headers, of up to a block each, are all held in memory."""


class Literal(NamedTuple):
    """Bytes between the sources: headers, the pickle, small records."""

    offset_bytes: int
    data: bytes


class Stored(NamedTuple):
    """All bytes of a source."""

    offset_bytes: int
    source: int


class Checksum(NamedTuple):
    """The four little-endian bytes of a source's CRC; the source comes before it."""

    offset_bytes: int
    source: int


class StoredRecords(NamedTuple):
    """Consecutive records of consecutive sources, each with header and descriptor."""

    offset_bytes: int
    records: list[Record]
    first_source: int


Part: TypeAlias = Literal | Stored | Checksum


class Container(Protocol):
    """A file about to be written: which bytes lie where.

    `parts` are what can be written as soon as it is reached, `closing` is the rest, which depends on all CRCs. Together
    they are the whole file, each byte once.
    """

    @property
    def sources(self) -> SourceTable:
        """The bytes of its tensors, in the order of the file."""

    @property
    def offsets(self) -> Sequence[int]:
        """Where each source lies in the file."""

    @property
    def holders(self) -> Holders:
        """The plain tensors by which the object holds its storages, with the index of each one's source."""

    @property
    def wrappers(self) -> Sequence[torch.Tensor]:
        """Return the object's tensors of a subclass, whose storages lie inside other tensors."""

    @property
    def has_checksums(self) -> bool:
        """Whether CRCs are computed and recorded."""

    @property
    def size_bytes(self) -> int:
        """Exact length of the finished file."""

    @property
    def closing_extent(self) -> tuple[int, int]:
        """Offset and length of what `closing` returns; the offset is 0, or where the parts end."""

    def names_of(self, source: int) -> list[str]:
        """Return the names of the tensors in a source, as messages give them."""

    def parts(self) -> Iterator[Part]:
        """Yield all but the closing bytes, in file order and without gaps."""

    def batches(self) -> Iterator[Part | StoredRecords]:
        """Yield the same bytes, those of many small sources at a time."""

    def closing(self, crcs: Sequence[int]) -> bytes:
        """Return the bytes that make the file readable, written last.

        Args:
            crcs: The CRC-32 of each source; 0 without checksums.
        """


@no_garbage_collection()
def container_for(
    obj: object,
    path: str,
    *,
    checksum: bool,
    file_format: str = "auto",
    metadata: Mapping[str, str] | None = None,
) -> Container:
    """Plan the file for an object.

    Args:
        obj: Any object for a torch zip, a dict of str to tensors for safetensors.
        path: The path of the file; its name becomes that of the archive.
        checksum: Compute and record CRCs.
        file_format: "torch", "safetensors", or "auto": `.safetensors` paths get that format, all others a torch zip.
        metadata: Text by name, for safetensors only.

    Raises:
        ConfigError, UnsupportedError: The object cannot be saved in this format; the message says how it can.
        UnsavableTensorError: A tensor cannot be saved in this format; the message names it.
        RuntimeError: What torch.save refuses.
    """
    if is_safetensors(path, file_format):
        return SafetensorsContainer(obj, checksum=checksum, metadata=metadata or {})
    if metadata is not None:
        raise ConfigError(
            "metadata= is for .safetensors files and format='safetensors'; put it into the object instead"
        )
    return TorchZipContainer(obj, torch_zip.archive_prefix(path), checksum=checksum)


def is_safetensors(path: str, file_format: str) -> bool:
    """Tell whether a file is to be a safetensors file, and not a torch zip.

    Raises:
        ConfigError: There is no such format.
    """
    if file_format not in ("auto", "torch", "safetensors"):
        raise ConfigError(f"format must be 'auto', 'torch' or 'safetensors', not {file_format!r}")
    return path.endswith(".safetensors") if file_format == "auto" else file_format == "safetensors"


class TorchZipContainer:
    """A torch zip: pickle, storages, central directory."""

    def __init__(self, obj: object, prefix: str, *, checksum: bool) -> None:
        if not prefix:
            raise RuntimeError("invalid file name: an archive needs a name before its suffix")
        self.skeleton = pickle_skeleton(obj)
        storages, facts = self.skeleton.storages, self.skeleton.facts
        sizes = facts.sizes_bytes
        if self.skeleton.cut_bytes:
            sizes = sizes[:]
            for index, whole_bytes in self.skeleton.cut_bytes.items():
                sizes[index] = whole_bytes
        self._plan = plan = torch_zip.plan_archive(prefix, len(self.skeleton.pickle), sizes)
        self.sources = SourceTable(storages, None, sizes, facts, plan.storage_bytes)
        self.offsets = plan.storage_offsets
        self.has_checksums = checksum

    @property
    def holders(self) -> Holders:
        """The plain tensors by which the object holds its storages, with the index of each one's source."""
        return self.skeleton.holders

    @property
    def wrappers(self) -> Sequence[torch.Tensor]:
        """Tensors of a subclass in the object, whose storages lie inside other tensors."""
        return self.skeleton.wrappers

    @property
    def size_bytes(self) -> int:
        """Exact length of the finished file."""
        return self._plan.size_bytes

    @property
    def closing_extent(self) -> tuple[int, int]:
        """The serialization id, which is made of all CRCs, and the central directory."""
        offset_bytes = self._plan.records[-1].header_offset_bytes
        return offset_bytes, self._plan.size_bytes - offset_bytes

    def names_of(self, source: int) -> list[str]:
        """Return the names of the tensors in a source, as messages give them."""
        key = str(source)
        return [
            name
            for name, tensor in iter_tensors(scan_pickle(self.skeleton.pickle).root)
            if tensor.storage is not None and tensor.storage.key == key
        ]

    def parts(self) -> Iterator[Part]:
        """Yield pickle, small records and storages, with their headers and descriptors."""
        return self._parts_of(range(len(self._plan.records) - 1))

    def batches(self) -> Iterator[Part | StoredRecords]:
        """Yield the same, many storages at a time."""
        plan, records = self._plan, self._plan.records
        end = plan.first_storage + plan.storage_count
        yield from self._parts_of(range(plan.first_storage))
        for first in range(plan.first_storage, end, _BATCH_COUNT):
            batch = list(records[first : min(first + _BATCH_COUNT, end)])
            yield StoredRecords(batch[0].header_offset_bytes, batch, first - plan.first_storage)
        yield from self._parts_of(range(end, len(records) - 1))

    def _parts_of(self, indices: range) -> Iterator[Part]:
        plan = self._plan
        for index in indices:
            record = plan.records[index]
            yield Literal(record.header_offset_bytes, torch_zip.local_header(record))
            source = index - plan.first_storage
            if not 0 <= source < plan.storage_count:
                data = self._small_record(index)
                yield Literal(record.data_offset_bytes, data + torch_zip.descriptor(record, self._crc(data)))
                continue
            yield Stored(record.data_offset_bytes, source)
            if head := torch_zip.descriptor_head(record):
                offset_bytes = record.data_offset_bytes + record.size_bytes
                yield Literal(offset_bytes, head)
                yield Checksum(offset_bytes + len(head), source)
                yield Literal(offset_bytes + len(head) + 4, torch_zip.descriptor_tail(record))

    def closing(self, crcs: Sequence[int]) -> bytes:
        """Return serialization id and central directory."""
        plan, records = self._plan, self._plan.records
        end = plan.first_storage + plan.storage_count
        before, behind = range(plan.first_storage), range(end, len(records) - 1)
        all_crcs = [self._crc(self._small_record(index)) for index in before]
        all_crcs += crcs
        all_crcs += [self._crc(self._small_record(index)) for index in behind]
        identity = torch_zip.serialization_id(records[:-1], all_crcs)
        all_crcs.append(self._crc(identity))
        return (
            torch_zip.local_header(records[-1])
            + identity
            + torch_zip.descriptor(records[-1], all_crcs[-1])
            + torch_zip.central_directory(records, all_crcs)
        )

    def _small_record(self, index: int) -> bytes:
        return self.skeleton.pickle if index == 0 else self._plan.small_records[index]

    def _crc(self, data: bytes) -> int:
        return _native.crc32(data) if self.has_checksums else 0


class SafetensorsContainer:
    """A safetensors file: the tensors first, the header that makes the file readable last."""

    def __init__(self, obj: object, *, checksum: bool, metadata: Mapping[str, str]) -> None:
        tensors = _savable_tensors(obj)
        described = [
            (name, safetensors_format.DTYPE_NAMES[_dtype_name(tensor.dtype)], tuple(tensor.shape))
            for name, tensor in tensors.items()
        ]
        self._plan = safetensors_format.place_tensors(described, metadata, checksum=checksum)
        entries = self._plan.header.entries
        in_order = [tensors[entry.name] for entry in entries]
        self.sources = SourceTable(
            [tensor.untyped_storage() for tensor in in_order],
            [int(tensor.storage_offset()) * tensor.element_size() for tensor in in_order],
            [entry.size_bytes for entry in entries],
        )
        self.offsets = [entry.offset_bytes for entry in entries]
        self.holders = Holders(in_order, list(range(len(in_order))))
        self.wrappers: Sequence[torch.Tensor] = ()
        self.has_checksums = checksum

    @property
    def size_bytes(self) -> int:
        """Exact length of the finished file."""
        return self._plan.header.size_bytes + sum(self.sources.sizes_bytes)

    @property
    def closing_extent(self) -> tuple[int, int]:
        """The header, whole blocks of it."""
        return 0, self._plan.header.size_bytes

    def names_of(self, source: int) -> list[str]:
        """Return the names of the tensors in a source, as messages give them."""
        return [self._plan.header.entries[source].name]

    def parts(self) -> Iterator[Part]:
        """Yield the tensors."""
        for source, offset_bytes in enumerate(self.offsets):
            yield Stored(offset_bytes, source)

    def batches(self) -> Iterator[Part | StoredRecords]:
        """Yield the tensors, too."""
        return self.parts()

    def closing(self, crcs: Sequence[int]) -> bytes:
        """Return the header."""
        return safetensors_format.encode_header(self._plan, crcs if self.has_checksums else None)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _savable_tensors(obj: object) -> dict[str, torch.Tensor]:
    """Check that an object is what safetensors can hold; conjugate and negative views are resolved.

    Raises:
        ConfigError: The object is no dict.
        UnsavableTensorError: A tensor cannot be saved; the message names it, and the way out.
    """
    if not isinstance(obj, Mapping):
        raise ConfigError(
            f"a .safetensors file holds a dict of str to tensors, not {type(obj).__name__}; "
            "save a state_dict(), or choose a .pt path for any other object"
        )
    tensors = {}
    for name, tensor in obj.items():
        problem = _why_not_savable(name, tensor)
        if problem:
            raise UnsavableTensorError(f"{name!r} cannot go into a .safetensors file: {problem}")
        if tensor.is_conj() or tensor.is_neg():
            tensor = tensor.resolve_conj().resolve_neg()
        tensors[name] = tensor
    _refuse_shared_memory(tensors)
    return tensors


def _why_not_savable(name: object, tensor: object) -> str | None:
    if not isinstance(name, str) or name == "__metadata__":
        return "names are text, and '__metadata__' is taken: pass metadata="
    if not isinstance(tensor, torch.Tensor):
        return f"it is {type(tensor).__name__}, not a tensor; choose a .pt path, or leave it out"
    if tensor.layout != torch.strided:
        return "it is sparse; save tensor.to_dense(), or choose a .pt path"
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return _why_not_subclass(tensor)
    if tensor.device.type == "meta":
        return "it is on the meta device and has no data"
    if tensor._is_zerotensor():
        return ZERO_TENSOR
    if _dtype_name(tensor.dtype) not in safetensors_format.DTYPE_NAMES:
        return f"the format has no dtype for {tensor.dtype}; convert it, or choose a .pt path"
    if not tensor.is_contiguous():
        return "it is not contiguous; save tensor.contiguous(), or choose a .pt path, which keeps strides"
    return None


def _why_not_subclass(tensor: torch.Tensor) -> str:
    try:
        tensor.data_ptr()
    except ConfigError as error:  # a weight of a streamed model, which no other kind of file takes either
        return str(error)
    except Exception:  # noqa: BLE001 - a subclass without memory of its own
        pass
    return f"it is a {type(tensor).__name__}; save a plain tensor made of it, or choose a .pt path"


def _refuse_shared_memory(tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse tensors that overlap in memory: they would be stored twice and come back apart."""
    spans = sorted(
        (str(tensor.device), tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, name)
        for name, tensor in tensors.items()
        if tensor.numel()
    )
    for (device, _, end, name), (next_device, start, _, next_name) in itertools.pairwise(spans):
        if device == next_device and start < end:
            raise UnsavableTensorError(
                f"{name!r} and {next_name!r} share memory, which a .safetensors file cannot express; leave one of "
                "them out (tied weights come back by tying them again), save .clone() of one, or choose a .pt path, "
                "which stores shared memory once"
            )
