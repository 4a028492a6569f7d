"""List the tensors of sharded state in a checkpoint directory, and name those that are damaged. Changes nothing."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from fastpersist.dcp.blobs import QUANTIZED, plain_blob
from fastpersist.dcp.metadata import METADATA_NAME, read_metadata
from fastpersist.dcp.part_reader import PartReader, Wanted
from fastpersist.errors import CorruptionError, FastPersistError, FormatError
from fastpersist.formats.manifest import writer_of
from fastpersist.formats.torch_zip import LOCAL_HEADER_MAGIC
from fastpersist.loading.file_inspection import Damage, Manifest, TensorEntry, VerifyReport

__all__ = ["with_damaged_tensors", "with_sharded_tensors"]

_SHOWN_COUNT = 5
_SEVERAL = "__*_0.distcp"


def with_sharded_tensors(found: Manifest) -> Manifest:
    """Add the tensors that `.metadata` describes, with their global shapes, to what is known of a directory.

    A tensor that lies in several parts has no place of its own.

    Raises:
        FormatError: The metadata cannot be read.
        StorageError: An error of the disk.
    """
    path = os.path.join(found.path, METADATA_NAME)
    metadata, _ = read_metadata(path)
    try:
        tensors = tuple(_entries_of(metadata))
    except (AttributeError, TypeError, ValueError) as error:
        raise FormatError(f"its metadata cannot be read: {error}", path=path) from error
    return replace(found, tensors=tensors + found.tensors)


def _entries_of(metadata: Metadata) -> Iterator[TensorEntry]:
    places: dict[str, list[Any]] = {}
    for index, info in (metadata.storage_data or {}).items():
        places.setdefault(index.fqn, []).append(info)
    for name, described in metadata.state_dict_metadata.items():
        if not isinstance(described, TensorStorageMetadata):
            continue
        own = places.get(name, [])
        files = {info.relative_path for info in own}
        dtype, shape = described.properties.dtype, tuple(described.size)
        offset_bytes = None
        size_bytes = described.size.numel() * dtype.itemsize
        if len(own) == 1 and dtype not in QUANTIZED and size_bytes < own[0].length:
            blob = plain_blob(dtype, shape)
            offset_bytes = own[0].offset + len(blob.head) if blob.size_bytes == own[0].length else None
        yield TensorEntry(
            name=name,
            dtype=str(dtype).removeprefix("torch."),
            shape=shape,
            size_bytes=size_bytes,
            offset_bytes=offset_bytes,
            record="",
            crc32=None,
            file=files.pop() if len(files) == 1 else _SEVERAL,
        )


def with_damaged_tensors(report: VerifyReport) -> VerifyReport:
    """Add to damaged parts which rank wrote them, and which of their tensors are damaged."""
    return replace(report, damages=tuple(_explained(report.path, damage) for damage in report.damages))


def _explained(root: str, damage: Damage) -> Damage:
    rank = writer_of(damage.file)
    if rank is None:
        return damage
    directory, part = os.path.split(os.path.join(root, damage.file))
    message = f"{damage.message}; rank {rank} wrote it"
    if not part.endswith(".distcp"):
        return replace(damage, message=message)
    try:
        tensors = tuple(_damaged_in(directory, part))
    except FastPersistError:  # neither the part nor the metadata can be read
        return replace(damage, message=message)
    if tensors:
        more = f" and {len(tensors) - _SHOWN_COUNT} more" if len(tensors) > _SHOWN_COUNT else ""
        message += f", and in it {', '.join(tensors[:_SHOWN_COUNT])}{more}"
    return replace(damage, message=message, tensors=tensors)


def _damaged_in(directory: str, part: str) -> Iterable[str]:
    """Return the names of the items in a part whose bytes do not have their checksums."""
    metadata, _ = read_metadata(os.path.join(directory, METADATA_NAME))
    found: dict[str, None] = {}
    with PartReader(directory, part, engine="auto", verify=True) as reader:
        for index, info in (metadata.storage_data or {}).items():
            if isinstance(info, _StorageInfo) and info.relative_path == part:
                wanted = Wanted(index.fqn, info.offset, info.length, None, (), (), None, _require_zip)
                try:
                    reader.read([wanted])
                except FastPersistError:
                    found[index.fqn] = None
    return found


def _require_zip(data: bytes) -> None:
    if not data.startswith(LOCAL_HEADER_MAGIC):
        raise CorruptionError("it does not begin as what torch.save writes does")
