"""torch.distributed.checkpoint with our files: a storage writer, a storage reader, and a planner that shares the work.

    dcp.save(state, storage_writer=FastPersistWriter("ckpt"), planner=FastPersistSavePlanner())
    dcp.load(state, storage_reader=FastPersistReader("ckpt"))

A checkpoint is a directory with one part file of each rank, DCP's `.metadata` and our manifest, published as a whole.
DCP's FileSystemReader reads ours, FastPersistReader those of DCP's FileSystemWriter. DCP makes the ranks agree; who
writes which tensors is the planner's business (dcp_planning), what is in a part file dcp_writing's and dcp_reading's.
"""

from __future__ import annotations

import errno
import io
import os
import pathlib
import pickle
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import filesystem as dcp_filesystem
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from fastpersist import (
    CheckpointNotFoundError,
    ConfigError,
    DirectorySave,
    FormatError,
    StorageError,
    UnsupportedError,
    require_engine,
)
from fastpersist.formats.manifest import check_file_name

from .dcp_blobs import Shape
from .dcp_planning import FastPersistSavePlanner
from .dcp_reading import PartReader, Wanted
from .dcp_writing import Part, WrittenPart, write_part

__all__ = ["FastPersistReader", "FastPersistSavePlanner", "FastPersistWriter"]

_METADATA_NAME = ".metadata"


def _is_path(checkpoint_id: str | os.PathLike[str]) -> bool:
    return "://" not in os.fspath(checkpoint_id)


class FastPersistWriter(StorageWriter):
    """Writes a DCP checkpoint as a directory that appears when all ranks are done, durable, or not at all.

    Args:
        path: The directory; or `checkpoint_id=` of dcp.save says it.
        overwrite: Replace a checkpoint of that name, ours or DCP's own, as a whole. Without it, the name is free.
        engine: "auto", or an engine's name, which then never falls back.
        durable: Survive power loss once dcp.save has returned.

    Raises:
        ConfigError: Unknown engine.

    All ranks need to see the directory. A save that fails leaves what had the name as it was; what it has written is
    removed by its first rank with this writer, at its next save at the latest. Thread safety: one save at a time.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        overwrite: bool = True,
        engine: str = "auto",
        durable: bool = True,
    ) -> None:
        super().__init__()
        require_engine(engine)
        self._path = None if path is None else os.fspath(path)
        self._overwrite = overwrite
        self._engine = engine
        self._durable = durable
        self._save_id = str(uuid.uuid4())
        self._directory: DirectorySave | None = None  # on the first rank, while a save is under way

    @property
    def checkpoint_id(self) -> str | None:
        """The directory."""
        return self._path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Tell whether this is a path."""
        return _is_path(checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another save; called by dcp.save."""
        self._give_up()
        if checkpoint_id is not None:
            self._path = os.fspath(checkpoint_id)
        self._save_id = str(uuid.uuid4())

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Begin a save on this rank; called by dcp.save."""
        alone = not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1
        if not kwargs.get("use_collectives", True) and not alone:
            raise UnsupportedError(
                "FastPersistWriter publishes what all ranks have written as one, so they have to agree: "
                "leave use_collectives=True, or let one process save with no_dist=True"
            )
        self._give_up()

    def storage_meta(self) -> StorageMeta:
        """Return what DCP notes of a save."""
        return StorageMeta(checkpoint_id=self._path, save_id=self._save_id)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan; called by dcp.save on each rank."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Make the directory, and tell each rank where its part goes; called by dcp.save on the first rank."""
        if self._path is None:
            raise ConfigError("FastPersistWriter does not know where to: pass path, or checkpoint_id= to dcp.save")
        overwrite: Any = self._overwrite
        if overwrite and os.path.exists(os.path.join(self._path, _METADATA_NAME)):
            overwrite = "foreign"  # DCP's own checkpoints have no manifest
        self._directory = DirectorySave(self._path, overwrite=overwrite, engine=self._engine, make_parents=True)
        parts = [Part(rank, self._directory.path, os.path.abspath(self._path)) for rank in range(len(plans))]
        return [replace(plan, storage_data=part) for plan, part in zip(plans, parts, strict=True)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's part, and sync it; called by dcp.save on each rank."""
        try:
            results = self._write(plan, planner)
        except BaseException:
            self._give_up()
            raise
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def _write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        part = plan.storage_data
        if not isinstance(part, Part) or (self._directory is not None and self._directory.path != part.directory):
            raise ConfigError(
                "this plan is of an earlier save: with enable_plan_caching=True, pass a FastPersistSavePlanner"
            )
        if not plan.items:
            return []
        results, written = write_part(part, plan.items, planner, engine=self._engine, durable=self._durable)
        # One more result, for `finish`: DCP takes all to the first rank.
        return [*results, replace(results[0], storage_data=written)]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Add DCP's metadata and make the directory visible and durable; called by dcp.save on the first rank."""
        directory, self._directory = self._directory, None
        if directory is None:
            raise ConfigError("finish() was called on a writer that has begun no save")
        with directory:
            found = [result for of_rank in results for result in of_rank]
            for result in found:
                if isinstance(result.storage_data, WrittenPart):
                    written = result.storage_data
                    directory.add_written(written.name, written.size_bytes, written.crc32)
            metadata.storage_data = {
                result.index: result.storage_data
                for result in found
                if not isinstance(result.storage_data, WrittenPart)
            }
            metadata.storage_meta = self.storage_meta()
            if hasattr(metadata, "version"):  # not before torch 2.9
                metadata.version = dcp_filesystem.CURRENT_DCP_VERSION
            directory.add_bytes(_METADATA_NAME, pickle.dumps(metadata))
            directory.publish(durable=self._durable).result()

    def _give_up(self) -> None:
        directory, self._directory = self._directory, None
        if directory is not None:
            directory.abort()


class FastPersistReader(StorageReader):
    """Reads a DCP checkpoint that FastPersistWriter or DCP's FileSystemWriter has written, on any number of ranks.

    Args:
        path: The directory; or `checkpoint_id=` of dcp.load says it.
        engine: "auto", or an engine's name, which then never falls back.
        verify: Check the CRC of every tensor that a rank reads as a whole.

    Raises:
        ConfigError: Unknown engine.

    Thread safety: one load at a time.
    """

    def __init__(
        self, path: str | os.PathLike[str] | None = None, *, engine: str = "auto", verify: bool = True
    ) -> None:
        super().__init__()
        require_engine(engine)
        self._path = None if path is None else os.fspath(path)
        self._engine = engine
        self._verify = verify
        self._load_id = str(uuid.uuid4())
        self._metadata: Metadata | None = None
        self._found: tuple[str, tuple[int, int]] | None = None  # the metadata's file, and which one it was
        self._shapes: dict[str, dict[Shape, Shape]] = {}

    @property
    def checkpoint_id(self) -> str | None:
        """The directory."""
        return self._path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Tell whether this is a path."""
        return _is_path(checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another load; called by dcp.load."""
        if checkpoint_id is not None:
            self._path = os.fspath(checkpoint_id)
        self._load_id = str(uuid.uuid4())
        self._metadata = self._found = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read what is in the checkpoint.

        Args:
            args: None.
            kwargs: `rank=`: of the save, for checkpoints that DCP's own writer made without collectives.

        Raises:
            CheckpointNotFoundError: There is none.
            FormatError: The metadata are damaged, or name classes that do not belong there.
        """
        if self._path is None:
            raise ConfigError("FastPersistReader does not know where from: pass path, or checkpoint_id= to dcp.load")
        rank = kwargs.get("rank")
        path = os.path.join(self._path, _METADATA_NAME if rank is None else f"__{rank}{_METADATA_NAME}")
        try:
            with open(path, "rb") as file:
                status = os.fstat(file.fileno())
                metadata = _MetadataUnpickler(file, path).load()
        except FileNotFoundError:
            message = f"there is no checkpoint at {self._path}: it has no {os.path.basename(path)}"
            raise CheckpointNotFoundError(errno.ENOENT, message, path) from None
        except OSError as error:
            raise StorageError(error.errno, f"reading {path}: {error.strerror}", path) from error
        except FormatError:
            raise
        except Exception as error:  # whatever a damaged pickle makes of itself
            raise FormatError(f"its metadata cannot be read: {error}", path=path) from error
        if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
            raise FormatError("these are no metadata of a DCP checkpoint", path=path)
        self._found = (path, (status.st_dev, status.st_ino))
        metadata.storage_meta = replace(metadata.storage_meta or StorageMeta(), load_id=self._load_id)
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Begin a load on this rank; called by dcp.load."""
        self._metadata = metadata
        self._shapes = {}

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan; called by dcp.load on each rank."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans; called by dcp.load on the first rank."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what this rank wants; called by dcp.load on each rank.

        Raises:
            CheckpointNotFoundError: A part is missing, or the checkpoint was replaced since its metadata were read.
            ChecksumError, CorruptionError: A part is damaged; the message says where, and which rank wrote it.
            UnsupportedError: It was written through an extension of DCP's writer, or torch.load does not load it.
            StorageError: An error of the disk.
        """
        if self._path is None or self._metadata is None:
            raise ConfigError("read_data() was called on a reader that has begun no load")
        by_part: dict[str, list[tuple[Any, ReadItem]]] = {}
        for item in plan.items:
            info = self._info_of(item)
            by_part.setdefault(info.relative_path, []).append((info, item))
        for name, items in sorted(by_part.items()):
            items.sort(key=lambda placed: placed[0].offset)
            try:
                reader = PartReader(self._path, name, engine=self._engine, verify=self._verify)
            except CheckpointNotFoundError:
                self._refuse_replaced()
                raise
            with reader:
                self._refuse_replaced()
                reader.read(self._wanted(items, planner))
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _info_of(self, item: ReadItem) -> Any:
        info = self._metadata.storage_data.get(item.storage_index)  # type: ignore[union-attr]
        if info is None:
            raise FormatError(f"the metadata do not say where {item.storage_index} lies", path=self._path)
        if info.transform_descriptors:
            raise UnsupportedError(
                f"{self._path}: {item.storage_index.fqn!r} was written through {list(info.transform_descriptors)}; "
                "read it with DCP's FileSystemReader, which knows these extensions"
            )
        try:
            check_file_name(info.relative_path)
        except ConfigError as error:
            raise FormatError(f"the metadata name no file of the checkpoint: {error}", path=self._path) from None
        return info

    def _wanted(self, items: list[tuple[Any, ReadItem]], planner: LoadPlanner) -> Iterator[Wanted]:
        """Ask the planner for each target when its turn comes."""
        for info, item in items:
            name = item.storage_index.fqn
            if item.type == LoadItemType.BYTE_IO:
                take = _bytes_taker(planner, item)
                yield Wanted(name, info.offset, info.length, None, (), (), None, take)
            else:
                target = planner.resolve_tensor(item).detach()
                done = _tensor_committer(planner, item, target)
                offsets, lengths = tuple(item.storage_offsets), tuple(item.lengths)
                yield Wanted(name, info.offset, info.length, self._stored(item), offsets, lengths, target, done)

    def _stored(self, item: ReadItem) -> tuple[torch.dtype, Shape] | None:
        """Return dtype and shape of the chunk that is to be read, as the metadata have them."""
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
        """Refuse to mix two checkpoints: what was opened is of the one whose metadata were read, if those are there."""
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


def _tensor_committer(planner: LoadPlanner, item: ReadItem, target: torch.Tensor) -> Callable[[bytes], None]:
    return lambda _: planner.commit_tensor(item, target)


_KNOWN_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta"),
        *("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
    },
    "torch.distributed._shard.sharded_tensor.metadata": {"MEM_FORMAT_ENCODING", "TensorProperties"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", "device"},
    "collections": {"OrderedDict"},
    "pathlib": {"Path", "PosixPath", "PurePath", "PurePosixPath"},
    "pathlib._local": {"Path", "PosixPath", "PurePath", "PurePosixPath"},
}


class _MetadataUnpickler(pickle.Unpickler):
    """Makes of a pickle what DCP's metadata consist of, and nothing else: the file may come from anywhere."""

    def __init__(self, file: io.BufferedReader, path: str) -> None:
        super().__init__(file)
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module == "pathlib._local":  # what Python 3.13 calls it
            return getattr(pathlib, name)
        if name in _KNOWN_CLASSES.get(module, ()):
            return super().find_class(module, name)
        raise FormatError(
            f"its metadata want {module}.{name}, which is no part of DCP's: if you trust the file, load it with "
            "FileSystemReader",
            path=self._path,
        )
