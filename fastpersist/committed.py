"""What is committed below a root: directories of steps whose manifest can be read and whose files are all there.

Reads names, manifests and lengths, nothing else; what is inside the files `source` and `inspection` prove.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Callable
from typing import TypeVar

from fastpersist.directory_commit import committed_path, hold_for_reading
from fastpersist.errors import CheckpointNotFoundError, CorruptionError, FormatError, StorageError
from fastpersist.filesystem import storage_errors
from fastpersist.formats.manifest import (
    MANIFEST_LIMIT_BYTES,
    MANIFEST_NAME,
    CheckpointManifest,
    parse_manifest,
    step_name,
    step_of,
    writer_of,
)

__all__ = ["candidate_steps", "check_files", "committed_steps", "read_committed", "read_manifest"]

_log = logging.getLogger("fastpersist")

_REPLACED_LIMIT = 5
_Read = TypeVar("_Read")


def candidate_steps(root: str) -> set[int]:
    """Return the steps that have a directory, final or retired, whatever is in it; none for a root that is not there.

    Raises:
        StorageError: The root is no directory, or may not be listed.
    """
    with storage_errors("listing", root):
        try:
            names = os.listdir(root)
        except FileNotFoundError:
            return set()
    found = {step_of(name.removeprefix(".").split(".retired-")[0]) for name in names if ".pending-" not in name}
    return {step for step in found if step is not None}


def committed_steps(root: str) -> dict[int, CheckpointManifest]:
    """Return the manifests of the committed steps; of those that are not whole, the log says why."""
    found = {}
    for step in candidate_steps(root):
        path = committed_path(root, step_name(step))
        if path is None:
            continue
        try:
            manifest = read_manifest(path)
            check_files(path, manifest)
        except (CorruptionError, StorageError, CheckpointNotFoundError) as error:
            _log.warning("%s is no committed step: %s", path, error)
            continue
        found[step] = manifest
    return found


def read_committed(root: str, step: int, read: Callable[[str, CheckpointManifest], _Read]) -> _Read:
    """Read a step that nobody removes meanwhile; again if it was replaced while it was read.

    Args:
        root: Where the steps are.
        step: Which.
        read: Given its directory and its manifest, of which every file is there.

    Returns:
        What `read` returns.

    Raises:
        CheckpointNotFoundError: There is no such step.
        FormatError: Its manifest is damaged, or a file of it is missing or has another length.
        StorageError: An error of the disk.
        Exception: What `read` raises.
    """
    for _ in range(_REPLACED_LIMIT):
        path = committed_path(root, step_name(step))
        if path is None:
            raise CheckpointNotFoundError(f"there is no step {step} in {root}")
        with hold_for_reading(path):
            before = _identity(path)
            try:
                manifest = read_manifest(path)
                check_files(path, manifest)
                found = read(path, manifest)
            except (CorruptionError, StorageError, CheckpointNotFoundError):
                if _identity(path) == before:
                    raise
                continue  # what was read are pieces of two checkpoints
            if _identity(path) == before:
                return found
    raise StorageError(None, f"step {step} in {root} was replaced again and again while it was read", root)


def _identity(path: str) -> tuple[int, int] | None:
    """Return what tells this directory from another that takes its name."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return (status.st_dev, status.st_ino)


def read_manifest(path: str) -> CheckpointManifest:
    """Read the manifest of a checkpoint directory.

    Raises:
        CheckpointNotFoundError: There is none.
        FormatError: It cannot be parsed, or is no file.
        StorageError: An error of the disk.
    """
    manifest_path = os.path.join(path, MANIFEST_NAME)
    try:
        with storage_errors("opening", manifest_path):
            # A FIFO that has taken its place must not make us wait for a writer.
            fd = os.open(manifest_path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except StorageError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            raise CheckpointNotFoundError(
                errno.ENOENT, f"{path} holds no {MANIFEST_NAME}: it was never finished, or is no checkpoint", path
            ) from None
        raise
    try:
        with storage_errors("reading", manifest_path):
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise FormatError("it is no regular file", path=manifest_path)
            with open(fd, "rb", closefd=False) as file:
                data = file.read(MANIFEST_LIMIT_BYTES + 1)
    finally:
        os.close(fd)
    return parse_manifest(data, manifest_path)


def check_files(path: str, manifest: CheckpointManifest) -> None:
    """Check that every file of a manifest is there, at its length.

    Raises:
        FormatError: One is not.
    """
    for entry in manifest.files:
        file_path = os.path.join(path, entry.name)
        rank = writer_of(entry.name)
        wrote = "" if rank is None else f" (rank {rank} wrote it)"
        try:
            size_bytes = os.stat(file_path).st_size
        except OSError as error:
            message = f"it is in the manifest, but cannot be read: {error.strerror}{wrote}"
            raise FormatError(message, path=file_path) from error
        if size_bytes != entry.size_bytes:
            message = f"it has {size_bytes} bytes, its manifest says {entry.size_bytes}{wrote}"
            raise FormatError(message, path=file_path)
