"""What is committed below a root: directories of steps whose manifest can be read and whose files are all there.

Reads names, manifests and lengths, nothing else; what is inside the files `loading` proves.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Callable
from typing import TypeVar

from fastpersist.commit.directory_commit import committed_path, hold_for_reading
from fastpersist.commit.filesystem import open_regular, storage_errors
from fastpersist.commit.locks import HeldDirectory
from fastpersist.errors import CheckpointNotFoundError, CorruptionError, FormatError, StorageError
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
        try:
            found[step] = read_committed(root, step, lambda _, manifest: manifest)
        except (CorruptionError, StorageError, CheckpointNotFoundError) as error:
            if (path := committed_path(root, step_name(step))) is not None:
                _log.warning("%s is no committed step: %s", path, error)
    return found


def read_committed(root: str, step: int, read: Callable[[HeldDirectory, CheckpointManifest], _Read]) -> _Read:
    """Read a step that nobody removes meanwhile, all of it from one directory, even if a save replaces it.

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
        with hold_for_reading(path) as held:
            try:
                manifest = read_manifest(held.place)
                check_files(held.place, manifest)
                return read(held, manifest)
            except (CorruptionError, StorageError, CheckpointNotFoundError):
                if held.has_its_name():
                    raise
                # It was replaced, and without file locks what is read is removed; or it is damaged, and now gone.
    raise StorageError(None, f"step {step} in {root} was replaced again and again while it was read", root)


def read_manifest(path: str) -> CheckpointManifest:
    """Read the manifest of a checkpoint directory.

    Raises:
        CheckpointNotFoundError: There is none.
        FormatError: It cannot be parsed, or is no file.
        StorageError: An error of the disk.
    """
    manifest_path = os.path.join(path, MANIFEST_NAME)
    try:
        fd = open_regular(manifest_path)
    except StorageError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            raise CheckpointNotFoundError(
                errno.ENOENT, f"{path} holds no {MANIFEST_NAME}: it was never finished, or is no checkpoint", path
            ) from None
        raise
    with storage_errors("reading", manifest_path), open(fd, "rb") as file:
        data = file.read(MANIFEST_LIMIT_BYTES + 1)
    return parse_manifest(data, manifest_path)


def check_files(path: str, manifest: CheckpointManifest) -> None:
    """Check that every file of a manifest is there, a regular file of its length.

    Raises:
        FormatError: One is not.
    """
    for entry in manifest.files:
        file_path = os.path.join(path, entry.name)
        rank = writer_of(entry.name)
        wrote = "" if rank is None else f" (rank {rank} wrote it)"
        try:
            status = os.stat(file_path)
        except OSError as error:
            message = f"it is in the manifest, but cannot be read: {error.strerror}{wrote}"
            raise FormatError(message, path=file_path) from error
        if not stat.S_ISREG(status.st_mode):
            raise FormatError(f"it is in the manifest, but is no regular file{wrote}", path=file_path)
        if status.st_size != entry.size_bytes:
            message = f"it has {status.st_size} bytes, its manifest says {entry.size_bytes}{wrote}"
            raise FormatError(message, path=file_path)
