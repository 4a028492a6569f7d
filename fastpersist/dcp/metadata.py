"""The `.metadata` of a DCP checkpoint: a pickle of which part holds what, read without running anything else."""

from __future__ import annotations

import errno
import os
import pickle
from typing import NamedTuple

from torch.distributed.checkpoint.metadata import Metadata

from fastpersist.commit.filesystem import open_regular, storage_errors
from fastpersist.dcp.metadata_pickle import build_pickled
from fastpersist.errors import CheckpointNotFoundError, FormatError, StorageError
from fastpersist.formats.manifest import DCP_METADATA_NAME

__all__ = ["METADATA_NAME", "Found", "pickled", "read_metadata"]

METADATA_NAME = DCP_METADATA_NAME

_SIZE_BYTES_MAX = 1 << 30
"""Some millions of chunks. They take ten times as much in memory, and a file of holes takes nothing."""


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
        with storage_errors("reading", path), open(open_regular(path), "rb") as file:
            status = os.fstat(file.fileno())
            if status.st_size > _SIZE_BYTES_MAX:
                raise FormatError(f"{status.st_size} bytes are too many for the metadata of a checkpoint", path=path)
            data = file.read()
    except StorageError as error:
        if error.errno != errno.ENOENT:
            raise
        message = f"there is no checkpoint at {os.path.dirname(path)}: it has no {os.path.basename(path)}"
        raise CheckpointNotFoundError(errno.ENOENT, message, path) from None
    try:
        metadata = build_pickled(data)
    except FormatError as error:
        message = f"its metadata cannot be read: {error.message}"
        raise FormatError(message, path=path, offset_bytes=error.offset_bytes) from None
    if type(metadata) is not Metadata:
        raise FormatError("these are no metadata of a DCP checkpoint", path=path)
    return metadata, Found(path, (status.st_dev, status.st_ino))
