"""Object → the bytes of a file, in the order they are written. Each container knows its size before a byte moves.

A container plans (pickle or header, storages, places) when it is made, and writes itself through a `pipeline.Writer`.
It leaves names, durability and visibility to `commit`, and encoding to `formats`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from fastpersist import _native
from fastpersist.config import BLOCK_BYTES
from fastpersist.errors import ConfigError
from fastpersist.formats import safetensors as safetensors_format
from fastpersist.formats import torch_zip
from fastpersist.formats.pickle_scan import iter_tensors, scan_pickle
from fastpersist.layout import align_up
from fastpersist.pickling import pickle_skeleton
from fastpersist.pipeline import Pieces, Poll, Writer, refuse_null_engine

__all__ = [
    "Container",
    "SafetensorsContainer",
    "Source",
    "TorchZipContainer",
    "WrittenFile",
    "container_for",
    "is_safetensors",
    "write_container",
]


@dataclass(frozen=True, slots=True)
class Source:
    """Bytes of a tensor that go into a file.

    Attributes:
        storage: Where they are.
        offset_bytes: The first, in the storage.
        size_bytes: How many.
    """

    storage: torch.UntypedStorage
    offset_bytes: int
    size_bytes: int


class Container(Protocol):
    """A file about to be written."""

    @property
    def sources(self) -> Sequence[Source]:
        """The bytes of its tensors, in the order in which `write` takes them."""

    @property
    def tensors(self) -> Sequence[Sequence[torch.Tensor]]:
        """For each source the tensors by which the object holds it."""

    @property
    def wrappers(self) -> Sequence[torch.Tensor]:
        """Tensors of a subclass in the object, whose storages lie inside other tensors."""

    def names_of(self, source: int) -> list[str]:
        """Return the names of the tensors in a source, as messages give them."""

    @property
    def size_bytes(self) -> int:
        """Exact length of the finished file."""

    @property
    def padded_bytes(self) -> int:
        """Length while it is being written: whole blocks."""

    def write(self, writer: Writer, snapshot: _native.Snapshot | None = None) -> None:
        """Write every byte; returns when all of them have been handed to the writer.

        Args:
            writer: Where to.
            snapshot: Holds `sources`, by index; without it they are read from where they are.
        """


def _add_source(
    pieces: Pieces, source: Source, index: int, crc_slot: int | None, snapshot: _native.Snapshot | None
) -> None:
    if snapshot is not None:
        pieces.add_captured(snapshot, index, source.size_bytes, crc_slot)
    else:
        pieces.add_storage(source.storage, crc_slot, offset_bytes=source.offset_bytes, size_bytes=source.size_bytes)


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
        path: Its name is the archive's.
        checksum: Compute and record CRCs.
        file_format: "torch", "safetensors", or "auto": `.safetensors` paths get that format, all others a torch zip.
        metadata: Text to text, for safetensors only.

    Raises:
        ConfigError, UnsupportedError: The object cannot be saved in this format; the message says how it can.
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
        raise ConfigError(f"format is 'auto', 'torch' or 'safetensors', not {file_format!r}")
    return path.endswith(".safetensors") if file_format == "auto" else file_format == "safetensors"


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """What became of a container.

    Attributes:
        engine: The engine that wrote it.
        crc32: CRC-32 of the whole file; None when it was written without checksums.
    """

    engine: str
    crc32: int | None


def write_container(
    container: Container,
    fd: int,
    path: str,
    *,
    engine: str,
    poll: Poll | None = None,
    snapshot: _native.Snapshot | None = None,
) -> WrittenFile:
    """Write a planned file to a descriptor whose space is reserved; its end is still padded to a whole block then.

    Args:
        container: What to write.
        fd: Open for reading and writing; stays the caller's.
        path: For messages: the final name.
        engine: Engine name or "auto".
        poll: See `pipeline.Poll`.
        snapshot: Holds the container's sources; without it they are read from where they are.

    Raises:
        ConfigError, UnsupportedError: Unknown or unusable engine.
        StorageError: An error of the disk.
    """
    with Writer(fd, path, engine=engine, poll=poll, sparing=snapshot is not None) as writer:
        container.write(writer, snapshot)
        used_engine = writer.finish()
        crc = writer.file_crc(container.size_bytes)
    refuse_null_engine(used_engine)
    return WrittenFile(used_engine, crc)


_BATCH_COUNT = 512
"""Records handed to the writer at a time: headers of up to a block each are not all held in memory."""


class TorchZipContainer:
    """A torch zip: pickle, storages, central directory, in file order, in one pass.

    A storage's CRC is complete when its last byte has been copied, which is just before its descriptor is written; so
    nothing is written twice and nothing waits.
    """

    def __init__(self, obj: object, prefix: str, *, checksum: bool) -> None:
        if not prefix:
            raise RuntimeError("invalid file name: an archive needs a name before its suffix")
        self.skeleton = pickle_skeleton(obj)
        # Storages without host memory behind them (meta, fake) are refused by torch here, before any file is touched.
        self.sources = [
            Source(storage.cpu() if storage.device.type == "meta" else storage, 0, storage.nbytes())
            for storage in self.skeleton.storages
        ]
        sizes = [source.size_bytes for source in self.sources]
        self._plan = torch_zip.plan_archive(prefix, len(self.skeleton.pickle), sizes)
        self._checksum = checksum

    @property
    def tensors(self) -> Sequence[Sequence[torch.Tensor]]:
        """For each source the tensors by which the object holds it."""
        return self.skeleton.tensors

    @property
    def wrappers(self) -> Sequence[torch.Tensor]:
        """Tensors of a subclass in the object, whose storages lie inside other tensors."""
        return self.skeleton.wrappers

    def names_of(self, source: int) -> list[str]:
        """Return the names of the tensors in a source, as messages give them."""
        key = str(source)
        return [
            name
            for name, tensor in iter_tensors(scan_pickle(self.skeleton.pickle).root)
            if tensor.storage is not None and tensor.storage.key == key
        ]

    @property
    def size_bytes(self) -> int:
        """Exact length of the finished file."""
        return self._plan.size_bytes

    @property
    def padded_bytes(self) -> int:
        """Length while it is being written: whole blocks."""
        return align_up(self._plan.size_bytes, BLOCK_BYTES)

    def write(self, writer: Writer, snapshot: _native.Snapshot | None = None) -> None:
        """Write every byte; see `Container.write`."""
        plan, records = self._plan, self._plan.records
        # CRC slot k belongs to storage k; the small records' CRCs are known at once.
        crcs = [0] * len(records)
        pieces = Pieces()
        pending = b""  # literal bytes between two storages, added as one piece
        for index, record in enumerate(records[:-1]):
            if index % _BATCH_COUNT == 0:
                writer.append(pieces)
                pieces = Pieces()
            pending += torch_zip.local_header(record)
            slot = index - plan.first_storage
            if 0 <= slot < plan.storage_count:
                pieces.add_bytes(pending)
                _add_source(pieces, self.sources[slot], slot, slot if self._checksum else None, snapshot)
                pending = torch_zip.descriptor_head(record)
                if pending and self._checksum:
                    pieces.add_bytes(pending)
                    pieces.add_crc(slot)
                    pending = torch_zip.descriptor_tail(record)
                elif pending:
                    pending += bytes(4) + torch_zip.descriptor_tail(record)
            else:
                data = self.skeleton.pickle if index == 0 else plan.small_records[index]
                crcs[index] = self._crc(data)
                pending += data + torch_zip.descriptor(record, crcs[index])
        pieces.add_bytes(pending)
        writer.append(pieces)

        first = plan.first_storage
        crcs[first : first + plan.storage_count] = writer.crcs(plan.storage_count)
        identity = torch_zip.serialization_id(records[:-1], crcs[:-1])
        crcs[-1] = self._crc(identity)
        tail = Pieces()
        tail.add_bytes(
            torch_zip.local_header(records[-1])
            + identity
            + torch_zip.descriptor(records[-1], crcs[-1])
            + torch_zip.central_directory(records, crcs)
        )
        writer.append(tail)

    def _crc(self, data: bytes) -> int:
        return _native.crc32(data) if self._checksum else 0


class SafetensorsContainer:
    """A safetensors file: the tensors first, the header that makes the file readable last."""

    def __init__(self, obj: object, *, checksum: bool, metadata: Mapping[str, str]) -> None:
        tensors = _savable_tensors(obj)
        described = [
            (name, safetensors_format.DTYPE_NAMES[_dtype_name(tensor.dtype)], tuple(tensor.shape))
            for name, tensor in tensors.items()
        ]
        self._plan = safetensors_format.place_tensors(described, metadata, checksum=checksum)
        self.sources = [
            Source(
                tensors[entry.name].untyped_storage(),
                int(tensors[entry.name].storage_offset()) * tensors[entry.name].element_size(),
                entry.size_bytes,
            )
            for entry in self._plan.header.entries
        ]
        self.tensors = [[tensors[entry.name]] for entry in self._plan.header.entries]
        self.wrappers: Sequence[torch.Tensor] = ()
        self._checksum = checksum

    def names_of(self, source: int) -> list[str]:
        """Return the names of the tensors in a source, as messages give them."""
        return [self._plan.header.entries[source].name]

    @property
    def size_bytes(self) -> int:
        """Exact length of the finished file."""
        return self._plan.header.size_bytes + sum(entry.size_bytes for entry in self._plan.header.entries)

    @property
    def padded_bytes(self) -> int:
        """Length while it is being written: whole blocks."""
        return align_up(self.size_bytes, BLOCK_BYTES)

    def write(self, writer: Writer, snapshot: _native.Snapshot | None = None) -> None:
        """Write every byte; see `Container.write`."""
        header = self._plan.header
        pieces = Pieces()
        for slot, source in enumerate(self.sources):
            _add_source(pieces, source, slot, slot if self._checksum else None, snapshot)
        writer.seek(header.size_bytes)
        writer.append(pieces)
        crcs = writer.crcs(len(header.entries)) if self._checksum else None
        head = Pieces()
        head.add_bytes(safetensors_format.encode_header(self._plan, crcs))
        writer.seek(0)
        writer.append(head)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _savable_tensors(obj: object) -> dict[str, torch.Tensor]:
    """Check that an object is what safetensors can hold; conjugate and negative views are resolved.

    Raises:
        ConfigError: It is not; the message names the tensor and the way out.
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
            raise ConfigError(f"{name!r} cannot go into a .safetensors file: {problem}")
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
        return f"it is a {type(tensor).__name__}; save a plain tensor made of it, or choose a .pt path"
    if tensor.device.type == "meta":
        return "it is on the meta device and has no data"
    if _dtype_name(tensor.dtype) not in safetensors_format.DTYPE_NAMES:
        return f"the format has no dtype for {tensor.dtype}; convert it, or choose a .pt path"
    if not tensor.is_contiguous():
        return "it is not contiguous; save tensor.contiguous(), or choose a .pt path, which keeps strides"
    return None


def _refuse_shared_memory(tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse tensors that overlap in memory: they would be stored twice and come back apart."""
    spans = sorted(
        (str(tensor.device), tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, name)
        for name, tensor in tensors.items()
        if tensor.numel()
    )
    for (device, _, end, name), (next_device, start, _, next_name) in itertools.pairwise(spans):
        if device == next_device and start < end:
            raise ConfigError(
                f"{name!r} and {next_name!r} share memory, which a .safetensors file cannot express; leave one of "
                "them out (tied weights come back by tying them again), save .clone() of one, or choose a .pt path, "
                "which stores shared memory once"
            )
