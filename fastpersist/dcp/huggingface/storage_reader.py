"""The StorageReader of torch.distributed.checkpoint that reads HuggingFace checkpoints of any writer.

It reads a directory of safetensors files, with an index or without: ours, those of `save_pretrained`, and those of
DCP's own HuggingFace writer, whose files may hold parts of tensors. The planner decides what each rank wants; each rank
reads only that, straight into its targets (`part_reader`).
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from fastpersist.commit.filesystem import open_regular
from fastpersist.dcp.blobs import Shape
from fastpersist.dcp.coverage import require_filled
from fastpersist.dcp.part_reader import Batch, PartReader, Payload, Wanted, pieces
from fastpersist.dcp.storage_reader import CheckpointReader, tensor_committer
from fastpersist.errors import CheckpointNotFoundError, ConfigError, FormatError, StorageError
from fastpersist.formats import safetensors
from fastpersist.formats.safetensors import INDEX_NAME
from fastpersist.loading.safetensors_directory import file_names, read_index
from fastpersist.loading.unpickle import torch_dtype
from fastpersist.transfer.reader import read_exactly

__all__ = ["FastPersistHuggingFaceReader"]

_SHARDS_KEY = "DCP_SHARDING_INFO"
"""The key in a file's metadata under which DCP's own writer tells where its parts of tensors begin."""


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor in a file, or a part of one.

    Attributes:
        file: The name of the file.
        dtype: The dtype of its elements.
        entry: The entry of the header, which says where it lies.
        offsets: The position of its first element in the whole tensor, in each dimension.
    """

    file: str
    dtype: torch.dtype
    entry: safetensors.Entry
    offsets: Shape


class FastPersistHuggingFaceReader(CheckpointReader):
    """Reads the safetensors files of a model, on any number of ranks, into any sharding.

    Args:
        path: The directory; None to take `checkpoint_id=` of dcp.load.
        engine: "auto", or an engine's name, which then never falls back.
        verify: Check the CRC of every tensor that a rank reads as a whole, where one is recorded: in our own files.

    Attributes:
        load_id: The id of the load that was begun last, as in torch's reader.

    Raises:
        ConfigError: Unknown engine.

    Thread safety: one load at a time.
    """

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read what is in the files, from their headers; called by dcp.load on each rank.

        Args:
            args: Not used.
            kwargs: Not used.

        Raises:
            CheckpointNotFoundError: There are no safetensors files, or one that the index names is missing.
            FormatError: A header or the index is damaged, or they contradict each other.
            UnsupportedError: A tensor has a dtype that torch lacks.
        """
        directory_path = self._known_path("dcp.load")
        weight_map = read_index(directory_path)
        names = file_names(directory_path) if weight_map is None else sorted(set(weight_map.values()))
        self._files: dict[str, tuple[int, int]] = {}  # device and inode of each when its header was read
        found: dict[str, list[_Stored]] = {}
        for name in names:
            self._files[name], stored = _read_file(directory_path, name)
            for one in stored:
                found.setdefault(one.entry.name, []).append(one)
        for tensor, name in (weight_map or {}).items():
            if name not in [one.file for one in found.get(tensor, ())]:
                raise FormatError(
                    f"{INDEX_NAME} says that {tensor!r} is in {name}, and it is not",
                    path=os.path.join(directory_path, name),
                )
        every = [one for stored in found.values() for one in stored]
        return Metadata(
            state_dict_metadata={
                tensor: _described(tensor, stored, directory_path) for tensor, stored in found.items()
            },
            storage_data={MetadataIndex(one.entry.name, torch.Size(one.offsets)): one for one in every},
            storage_meta=StorageMeta(checkpoint_id=directory_path, load_id=self.load_id),
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Begin a load on this rank; called by dcp.load."""
        self._stored: dict[MetadataIndex, _Stored] = metadata.storage_data

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read this rank's items; called by dcp.load on each rank.

        Raises:
            CheckpointNotFoundError: A file is missing, or was replaced since its header was read.
            ChecksumError: The bytes of a tensor have changed since they were written.
            FormatError: The files do not have all elements of a tensor that this rank wants.
            StorageError: An error of the disk.
        """
        if self._path is None:
            raise ConfigError("read_data() was called on a reader that has begun no load")
        require_filled(plan, planner, self._path)
        by_file: dict[str, list[tuple[_Stored, ReadItem]]] = {}
        for item in plan.items:
            stored = self._stored[item.storage_index]
            by_file.setdefault(stored.file, []).append((stored, item))
        for name, items in sorted(by_file.items()):
            items.sort(key=lambda placed: placed[0].entry.offset_bytes)
            reader = _FileReader(self._path, name, engine=self._engine, verify=self._verify)
            with reader:
                self._refuse_replaced(reader)
                reader.read_tensors(self._wanted(items, planner))
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _wanted(
        self, items: list[tuple[_Stored, ReadItem]], planner: LoadPlanner
    ) -> Iterator[tuple[Wanted, int | None]]:
        """Yield the items of a file; the planner resolves each target just before it is read."""
        for stored, item in items:
            target = planner.resolve_tensor(item).detach()
            entry = stored.entry
            wanted = Wanted(
                entry.name,
                entry.offset_bytes,
                entry.size_bytes,
                (stored.dtype, entry.torch_shape),
                tuple(item.storage_offsets),
                tuple(item.lengths),
                target,
                tensor_committer(planner, item, target),
            )
            yield wanted, entry.crc

    def _refuse_replaced(self, reader: _FileReader) -> None:
        """Refuse a file that was replaced since its header was read."""
        if reader.identity != self._files[os.path.basename(reader.path)]:
            message = f"{reader.path} was replaced while {self._path} was being loaded: load it again"
            raise CheckpointNotFoundError(errno.ENOENT, message, reader.path)


class _FileReader(PartReader):
    """Reads tensors of a safetensors file."""

    @property
    def identity(self) -> tuple[int, int]:
        """Device and inode of the open file."""
        status = os.fstat(self._fd)
        return status.st_dev, status.st_ino

    def read_tensors(self, wanted: Iterator[tuple[Wanted, int | None]]) -> None:
        """Read tensors, and parts of them, into their targets.

        Args:
            wanted: The parts to read, each with the CRC of the whole tensor, if one is recorded.
        """
        batch = Batch(self)
        for one, crc in wanted:
            self.check_place(one)
            dtype, shape = one.stored or (torch.uint8, ())
            for piece in pieces(one):
                batch.add_found(piece, Payload(one.offset_bytes, dtype, shape, crc))
                batch.run_if_full()
        batch.run()


# --- what is in a directory


def _read_file(directory: str, name: str) -> tuple[tuple[int, int], list[_Stored]]:
    """Return the identity of the file that has this name now, and its header."""
    path = os.path.join(directory, name)
    try:
        fd = open_regular(path)
    except StorageError as error:
        if error.errno != errno.ENOENT:
            raise
        message = f"{path} is missing, which {INDEX_NAME} names: {directory} is not the whole checkpoint"
        raise CheckpointNotFoundError(errno.ENOENT, message, path) from None
    try:
        status = os.fstat(fd)
        header = safetensors.read_header(
            lambda offset_bytes, size_bytes: read_exactly(fd, offset_bytes, size_bytes, path), status.st_size, path=path
        )
    finally:
        os.close(fd)
    starts = _starts_of_parts(header, path)
    return (status.st_dev, status.st_ino), [
        _Stored(name, torch_dtype(entry, path), entry, starts.get(entry.name, (0,) * len(entry.torch_shape)))
        for entry in header.entries
    ]


def _starts_of_parts(header: safetensors.Header, path: str) -> dict[str, Shape]:
    """Return where parts of tensors begin, in files of DCP's own writer."""
    text = header.metadata.get(_SHARDS_KEY)
    if not text:
        return {}
    try:
        said = json.loads(text)
        starts = {entry.name: tuple(said[entry.name]["saved_offsets"]) for entry in header.entries}
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise FormatError(f"its {_SHARDS_KEY} does not say where its parts begin: {error!r}", path=path) from None
    for entry in header.entries:
        start = starts[entry.name]
        if len(start) != len(entry.shape) or not all(type(first) is int and 0 <= first < 1 << 62 for first in start):
            raise FormatError(f"its {_SHARDS_KEY} lets {entry.name!r} begin at {start}", path=path)
    return starts


def _described(tensor: str, stored: list[_Stored], directory: str) -> TensorStorageMetadata:
    """Return DCP's description of a tensor that lies in one piece, or in several."""
    first = stored[0]
    seen: dict[Shape, _Stored] = {}
    for one in stored:
        other = seen.setdefault(one.offsets, one)
        if other is not one:
            raise FormatError(f"{tensor!r} is in two files, {other.file} and {one.file}", path=directory)
        if (one.dtype, len(one.offsets)) != (first.dtype, len(first.offsets)):
            raise FormatError(f"{first.file} and {one.file} have parts of {tensor!r} that do not match", path=directory)
    size = [max(one.offsets[n] + one.entry.torch_shape[n] for one in stored) for n in range(len(first.offsets))]
    chunks = [ChunkStorageMetadata(torch.Size(one.offsets), torch.Size(one.entry.torch_shape)) for one in stored]
    return TensorStorageMetadata(TensorProperties(dtype=first.dtype), torch.Size(size), chunks)
