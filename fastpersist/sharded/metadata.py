"""The `.metadata` of a DCP checkpoint: a pickle of which part holds what, read without running anything else."""

from __future__ import annotations

import errno
import io
import os
import pathlib
import pickle
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import Metadata

from fastpersist.errors import CheckpointNotFoundError, FormatError, StorageError
from fastpersist.formats.manifest import DCP_METADATA_NAME

__all__ = ["METADATA_NAME", "Found", "pickled", "read_metadata"]

METADATA_NAME = DCP_METADATA_NAME


class Found(NamedTuple):
    """Which file the metadata were read from: its path, and device and number of its inode."""

    path: str
    identity: tuple[int, int]


class _Pieces:
    """A file for a pickler, whose other threads get their turn with each piece: pickling keeps Python's lock."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []

    def write(self, piece: bytes | memoryview) -> int:
        """Take a piece; called by the pickler."""
        self.pieces.append(bytes(piece))
        return len(piece)


def pickled(value: object) -> bytes:
    """Pickle a plan, or metadata, which may be megabytes, without keeping training from running meanwhile."""
    file = _Pieces()
    pickle.Pickler(file, protocol=4).dump(value)
    return b"".join(file.pieces)


def read_metadata(path: str) -> tuple[Metadata, Found]:
    """Read what is in a checkpoint.

    Args:
        path: Of the metadata's file.

    Raises:
        CheckpointNotFoundError: There is none.
        FormatError: The metadata are damaged, or name classes that do not belong there.
        StorageError: They cannot be read.
    """
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            metadata = _MetadataUnpickler(file, path).load()
    except FileNotFoundError:
        message = f"there is no checkpoint at {os.path.dirname(path)}: it has no {os.path.basename(path)}"
        raise CheckpointNotFoundError(errno.ENOENT, message, path) from None
    except OSError as error:
        raise StorageError(error.errno, f"reading {path}: {error.strerror}", path) from error
    except FormatError:
        raise
    except Exception as error:  # whatever a damaged pickle makes of itself
        raise FormatError(f"its metadata cannot be read: {error}", path=path) from error
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise FormatError("these are no metadata of a DCP checkpoint", path=path)
    return metadata, Found(path, (status.st_dev, status.st_ino))


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
