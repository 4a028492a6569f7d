"""The directory of a DCP checkpoint: its path, and its other files, which stay when a new checkpoint replaces it.

Each other file gets a second name in the new directory (a hard link, or a copy where there are no links) before the two
directories are exchanged, so it has a name at all times. A file that is added between these two moments is lost
with the old directory.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import stat
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from fastpersist.arguments import local_path
from fastpersist.commit.filesystem import absolute_path, filesystem, is_there, storage_errors
from fastpersist.commit.locks import ROOT_LOCK_NAME
from fastpersist.commit.permissions import copy_permissions
from fastpersist.commit.step_listing import read_manifest
from fastpersist.errors import CheckpointNotFoundError, ConfigError, CorruptionError, UnsupportedError
from fastpersist.formats.manifest import MANIFEST_NAME, check_file_name

__all__ = ["Others", "StoragePath", "files_of_ours", "find_others", "keep_others"]

_log = logging.getLogger("fastpersist")

_BEING_SAVED = re.compile(r"\..+\.(?:pending|retired)-[0-9a-f]{16}", re.DOTALL)


class StoragePath:
    """The base of our storage writers and readers: their directory, given at once or later by DCP.

    Args:
        path: The directory; None if DCP will tell it.
    """

    def __init__(self, path: str | os.PathLike[str] | None) -> None:
        super().__init__()
        self._path = None if path is None else os.fspath(path)

    @property
    def checkpoint_id(self) -> str | None:
        """The directory."""
        return self._path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Tell whether this is a path."""
        return "://" not in os.fspath(checkpoint_id)

    def _known_path(self, call: str) -> str:
        """Return the directory.

        Raises:
            ConfigError: No directory was given.
        """
        if self._path is None:
            name = type(self).__name__
            raise ConfigError(f"{name} has no directory: pass path, or checkpoint_id= to {call}")
        return self._path

    def _final_path(self) -> str:
        """Return the directory that is to be written, absolute; a leading `~` is a name in it, as for torch's writer.

        Raises:
            ConfigError: No directory was given, or a URL.
        """
        path = self._known_path("dcp.save")
        local_path(path)
        return absolute_path(path)


@dataclass(slots=True)
class Others:
    """The other entries of a directory beside the checkpoint, by their relative names.

    Attributes:
        directories: The directories, each before what is in it.
        files: All files, also those in these directories.
    """

    directories: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)


def find_others(path: str, is_own: Callable[[str], object]) -> Others:
    """Find the other entries of a directory, and refuse those that could not stay there.

    Args:
        path: The directory's path; it need not exist.
        is_own: Tells by its name whether a file is part of the checkpoint; MANIFEST.json is one.

    Raises:
        ConfigError: It contains the working directory, which would lose its name; or a name that no manifest takes.
        UnsupportedError: A directory of checkpoints, which may be saved to at this moment; a link to a directory; or
            what is neither file nor directory.
        StorageError: It cannot be listed, or something in it not be looked up.
    """
    found = Others()

    def fail(error: OSError) -> None:
        raise error

    with storage_errors("listing", path):
        walked = list(os.walk(path, onerror=fail)) if is_there(path) else []
    for directory, inner, names in walked:
        below = os.path.relpath(directory, path)
        if below != ".":
            found.directories.append(below)
        if (below != "." and ROOT_LOCK_NAME in names) or any(map(_BEING_SAVED.fullmatch, inner)):
            raise UnsupportedError(
                f"{directory} is where checkpoints are saved to, perhaps at this moment, and would be moved: save "
                f"{path} elsewhere"
            )
        if links := [name for name in inner if _is_link(os.path.join(directory, name))]:
            raise UnsupportedError(
                f"{os.path.join(directory, links[0])} is a link to a directory, which a checkpoint cannot keep: remove "
                "it, or save elsewhere"
            )
        for file in names:
            name = os.path.normpath(os.path.join(below, file))
            if name != MANIFEST_NAME and not is_own(name):
                found.files.append(name)
    for name in found.files:
        check_file_name(name)
        with storage_errors("looking up", os.path.join(path, name)):
            mode = os.stat(os.path.join(path, name)).st_mode
        if not stat.S_ISREG(mode):
            raise UnsupportedError(f"{os.path.join(path, name)} is no file, so a checkpoint cannot keep it: remove it")
    if found.files or found.directories:
        _refuse_working_directory(path, found)
    return found


def _is_link(path: str) -> bool:
    with storage_errors("looking up", path):
        return stat.S_ISLNK(os.lstat(path).st_mode)


def _refuse_working_directory(path: str, found: Others) -> None:
    with storage_errors("looking up", path):
        working = os.stat(".")
        directories = [os.stat(os.path.join(path, name)) for name in (".", *found.directories)]
    for status in directories:
        if os.path.samestat(status, working):
            raise ConfigError(
                f"{path} would be replaced, and this process works in it: save into a directory below it instead"
            )


def files_of_ours(path: str) -> list[str]:
    """Return the files that the manifest of a directory lists, but those that a save has kept, which have no CRC.

    A damaged or missing manifest lists none: what it listed is replaced by its name, or kept.
    """
    try:
        manifest = read_manifest(path)
    except (CorruptionError, CheckpointNotFoundError) as error:
        _log.info("%s is replaced without its manifest: %s", path, error)
        return []
    return [entry.name for entry in manifest.files if entry.crc32 is not None]


def keep_others(others: Others, from_path: str, to_path: str) -> list[tuple[str, int]]:
    """Give the other entries of a directory a second name in the directory that replaces it.

    Args:
        others: The entries that `find_others` has found there.
        from_path: The path of the directory that is replaced.
        to_path: The path of the directory that replaces it. Names that are there already are left out.

    Returns:
        The names of these files, and their lengths.

    Raises:
        StorageError: A file cannot be linked and not be copied.
    """
    kept = []
    for name in others.directories:
        with storage_errors("keeping", os.path.join(from_path, name)):
            os.makedirs(os.path.join(to_path, name), exist_ok=True)
    for name in others.files:
        source, target = os.path.join(from_path, name), os.path.join(to_path, name)
        if not os.path.lexists(target):
            with storage_errors("keeping", source):
                _link_or_copy(source, target)
                kept.append((name, os.stat(target).st_size))
    for name in reversed(others.directories):  # last: they may be read-only
        copy_permissions(os.path.join(from_path, name), os.path.join(to_path, name))
    return kept


def _link_or_copy(source: str, target: str) -> None:
    is_linked = False
    if not os.path.islink(source):  # which would lead elsewhere
        with suppress(PermissionError):  # another user's file, or a file system without links
            os.link(source, target)
            is_linked = True
    if not is_linked:
        shutil.copyfile(source, target)
        copy_permissions(source, target)
    fd = os.open(target, os.O_RDONLY | os.O_CLOEXEC)
    try:
        filesystem().sync(fd, target)  # the directory's publish counts on that
    finally:
        os.close(fd)
