"""The StorageReader of torch.distributed.checkpoint that reads our files and DCP's own; `dcp.load` calls it.

The planner decides what each rank reads. `part_reader` finds it in a part file and reads it into its target.
"""

from __future__ import annotations

import errno
import io
import os
import stat
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from fastpersist.commit.filesystem import storage_errors
from fastpersist.dcp.blobs import Shape
from fastpersist.dcp.checkpoint_directory import StoragePath
from fastpersist.dcp.coverage import require_filled
from fastpersist.dcp.metadata import METADATA_NAME, Found, read_metadata
from fastpersist.dcp.part_reader import PartReader, Wanted, load_object, require_place
from fastpersist.errors import (
    CheckpointNotFoundError,
    ConfigError,
    CorruptionError,
    FormatError,
    UnsupportedError,
)
from fastpersist.formats.manifest import check_file_name
from fastpersist.transfer.engine_selection import require_engine

__all__ = ["CheckpointReader", "FastPersistReader", "tensor_committer"]

_PACKED_MAX = 128
"""An element takes 16 bytes at most, and where a subclass packs it, one bit at least."""


class CheckpointReader(StoragePath, StorageReader):
    """What our storage readers have in common.

    Args:
        path: The directory, as in `StoragePath`.
        engine: "auto", or an engine's name.
        verify: Check CRCs.

    Raises:
        ConfigError: Unknown engine.
    """

    def __init__(
        self, path: str | os.PathLike[str] | None = None, *, engine: str = "auto", verify: bool = True
    ) -> None:
        super().__init__(path)
        require_engine(engine)
        self._engine = engine
        self._verify = verify
        self.load_id = str(uuid.uuid4())

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another load; called by dcp.load."""
        if checkpoint_id is not None:
            self._path = os.fspath(checkpoint_id)
        self.load_id = str(uuid.uuid4())

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan; called by dcp.load on each rank."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans; called by dcp.load on the coordinator."""
        return plans


class FastPersistReader(CheckpointReader):
    """Reads a DCP checkpoint that FastPersistWriter or DCP's FileSystemWriter has written, on any number of ranks.

    Args:
        path: The directory; None to take `checkpoint_id=` of dcp.load.
        engine: "auto", or an engine's name, which then never falls back.
        verify: Check the CRC of every tensor that a rank reads as a whole.

    Attributes:
        load_id: The id of the last load, as in torch's reader.

    Raises:
        ConfigError: Unknown engine.

    Thread safety: one load at a time.
    """

    _metadata: Metadata | None = None
    _found: Found | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another load; called by dcp.load."""
        super().reset(checkpoint_id)
        self._metadata = self._found = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read what is in the checkpoint.

        Args:
            args: Not used.
            kwargs: `rank=`: the rank that saved, for checkpoints that DCP's own writer made without collectives.

        Raises:
            CheckpointNotFoundError: There is no checkpoint.
            FormatError: The metadata are damaged, or name other classes than DCP's.
        """
        directory_path = self._known_path("dcp.load")
        rank = kwargs.get("rank")
        path = os.path.join(directory_path, METADATA_NAME if rank is None else f"__{rank}{METADATA_NAME}")
        metadata, self._found = read_metadata(path)
        metadata.storage_meta = replace(metadata.storage_meta or StorageMeta(), load_id=self.load_id)
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Begin a load on this rank; called by dcp.load."""
        self._metadata = metadata
        self._shapes: dict[str, dict[Shape, Shape]] = {}

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what this rank wants; called by dcp.load on each rank.

        Raises:
            CheckpointNotFoundError: A part is missing, or the checkpoint was replaced since its metadata were read.
            ChecksumError, CorruptionError: A part is damaged, and the message says where, and which rank wrote it; or
                the checkpoint lacks elements of a tensor that this rank reads.
            UnsupportedError: An extension of DCP's writer wrote it, or torch.load refuses an item.
            StorageError: An error of the disk.
        """
        if self._path is None or self._metadata is None:
            raise ConfigError("read_data() was called on a reader that has begun no load")
        require_filled(plan, planner, self._path)
        by_part: dict[str, list[tuple[Any, ReadItem]]] = {}
        for item in plan.items:
            info = self._info_of(item.storage_index)
            by_part.setdefault(info.relative_path, []).append((info, item))
        for name, items in sorted(by_part.items()):
            items.sort(key=lambda placed: placed[0].offset)
            try:
                reader = self._open_part(self._path, name)
            except CheckpointNotFoundError:
                self._refuse_replaced()
                raise
            with reader:
                self._refuse_replaced()
                reader.read(self._wanted(items, planner))
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _open_part(self, path: str, name: str) -> PartReader:
        return PartReader(path, name, engine=self._engine, verify=self._verify)

    def require_places(self, metadata: Metadata, known_bytes: Mapping[str, int] | None) -> None:
        """Refuse metadata that place an item outside of its part, or describe a tensor larger than its bytes.

        Called before memory is allocated for tensors, and before a target is changed. Parts may be missing here.

        Args:
            metadata: The metadata of this checkpoint.
            known_bytes: The lengths of parts by name, from the manifest; the lengths of other parts are looked up.

        Raises:
            CorruptionError: The metadata do one of these; the message names the item.
            FormatError: A place is in no file of the checkpoint, or an item has no place.
            UnsupportedError: An extension of DCP's writer wrote the checkpoint.
            StorageError: An error of the disk.
        """
        self._metadata = metadata
        sizes: dict[str, int | None] = dict(known_bytes or {})
        for index in metadata.storage_data:
            info = self._info_of(index)
            name = info.relative_path
            if name not in sizes:
                sizes[name] = self._part_bytes(name)
            size_bytes = sizes[name]
            if size_bytes is not None:
                require_place(os.path.join(self._path or "", name), index.fqn, info.offset, info.length, size_bytes)
        for name, described in metadata.state_dict_metadata.items():
            if isinstance(described, TensorStorageMetadata):
                self._require_elements(name, described)

    def _require_elements(self, name: str, described: TensorStorageMetadata) -> None:
        """Refuse chunks of more elements than their bytes can hold."""
        if described.properties.layout is not torch.strided:
            return
        for chunk in described.chunks:
            size_bytes = chunk.sizes.numel() * described.properties.dtype.itemsize
            if not size_bytes:
                continue
            info = self._info_of(MetadataIndex(name, chunk.offsets))
            if size_bytes > _PACKED_MAX * info.length:
                raise CorruptionError(
                    f"a chunk of {name!r} has sizes {tuple(chunk.sizes)}, which do not lie in {info.length} bytes of "
                    f"{info.relative_path}",
                    path=self._path,
                )

    def _part_bytes(self, name: str) -> int | None:
        """Return the length of a part; None if it is missing."""
        path = os.path.join(self._path or "", name)
        with storage_errors("looking up", path):
            try:
                status = os.stat(path)
            except (FileNotFoundError, NotADirectoryError):
                return None
        if not stat.S_ISREG(status.st_mode):
            raise FormatError("it is no regular file", path=path)
        return status.st_size

    def _info_of(self, index: MetadataIndex) -> Any:
        info = self._metadata.storage_data.get(index)  # type: ignore[union-attr]
        if info is None:
            raise FormatError(f"the metadata do not say where {index} lies", path=self._path)
        if not isinstance(info, _StorageInfo):
            raise UnsupportedError(
                f"{self._path}: {index.fqn!r} lies in files of a {type(info).__name__}, not of DCP's"
            )
        if info.transform_descriptors:
            raise UnsupportedError(
                f"{self._path}: {index.fqn!r} was written through {list(info.transform_descriptors)}; "
                "read it with DCP's FileSystemReader, which knows these extensions"
            )
        try:
            check_file_name(info.relative_path)
        except ConfigError as error:
            raise FormatError(f"the metadata name no file of the checkpoint: {error}", path=self._path) from None
        return info

    def _wanted(self, items: list[tuple[Any, ReadItem]], planner: LoadPlanner) -> Iterator[Wanted]:
        """Yield the items of a part; the planner resolves each target just before it is read."""
        for info, item in items:
            name = item.storage_index.fqn
            if item.type == LoadItemType.BYTE_IO:
                take = _bytes_taker(planner, item)
                yield Wanted(name, info.offset, info.length, None, (), (), None, take)
                continue
            target = planner.resolve_tensor(item)
            if target.layout is not torch.strided:
                take = _copying_taker(planner, item, target)
                yield Wanted(name, info.offset, info.length, None, (), (), None, take)
            else:
                target = target.detach()
                done = tensor_committer(planner, item, target)
                offsets, lengths = tuple(item.storage_offsets), tuple(item.lengths)
                yield Wanted(name, info.offset, info.length, self._stored(item), offsets, lengths, target, done)

    def _stored(self, item: ReadItem) -> tuple[torch.dtype, Shape] | None:
        """Return dtype and shape of the chunk to read, by the metadata; None if they do not tell."""
        fqn, offset = item.storage_index.fqn, item.storage_index.offset
        described = self._metadata.state_dict_metadata.get(fqn)  # type: ignore[union-attr]
        if not isinstance(described, TensorStorageMetadata) or offset is None:
            return None
        shapes = self._shapes.get(fqn)
        if shapes is None:
            shapes = {tuple(chunk.offsets): tuple(chunk.sizes) for chunk in described.chunks}
            self._shapes[fqn] = shapes
        shape = shapes.get(tuple(offset))
        return None if shape is None else (described.properties.dtype, shape)

    def _refuse_replaced(self) -> None:
        """Refuse to mix two checkpoints: if the metadata file was replaced, so may be the part that was opened."""
        if self._found is None:
            return
        path, identity = self._found
        try:
            status = os.stat(path)
        except OSError:
            status = None
        if status is None or (status.st_dev, status.st_ino) != identity:
            message = f"{self._path} was replaced or removed while it was being loaded: load it again"
            raise CheckpointNotFoundError(errno.ENOENT, message, self._path)


def _bytes_taker(planner: LoadPlanner, item: ReadItem) -> Callable[[bytes], None]:
    return lambda data: planner.load_bytes(item, io.BytesIO(data))


def _copying_taker(planner: LoadPlanner, item: ReadItem, target: torch.Tensor) -> Callable[[bytes], None]:
    """Return a function that copies a loaded tensor into a sparse target, which has no memory to read into.

    It copies into the target itself: `copy_` gives a detached sparse tensor new indices and values, not the target.
    """

    def take(data: bytes) -> None:
        loaded = load_object(io.BytesIO(data), weights_only=True)
        with torch.no_grad():
            target.copy_(loaded)
        planner.commit_tensor(item, target)

    return take


def tensor_committer(planner: LoadPlanner, item: ReadItem, target: torch.Tensor) -> Callable[[bytes], None]:
    """Return a function that tells the planner that a target is filled."""
    return lambda _: planner.commit_tensor(item, target)
