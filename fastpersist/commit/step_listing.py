"""Which steps a root holds, and in which order they were committed.

A step is committed if its manifest can be read and all of its files are there. This module reads names, manifests and
lengths. `loading` proves what is inside the files.

The order of commits decides which step is the newest: for loads, for LATEST and for retention. Step numbers do not give
it: a run that goes back from step 30 to step 10 saves step 11, and 11 is the newest then. Times do not give it either:
clocks differ between hosts, and are set back. So each manifest has a number, one more than the greatest that its root
held. docs/reference/file-format.md, section 4, is the format.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, TypeVar

from fastpersist.commit.directory_commit import committed_path, hold_for_reading
from fastpersist.commit.filesystem import open_regular, storage_errors
from fastpersist.commit.locks import HeldDirectory
from fastpersist.errors import CheckpointNotFoundError, CorruptionError, FormatError, StorageError
from fastpersist.formats.manifest import (
    COMMIT_NUMBER_MAX,
    MANIFEST_LIMIT_BYTES,
    MANIFEST_NAME,
    CheckpointManifest,
    parse_manifest,
    step_name,
    step_of,
    writer_of,
)

__all__ = [
    "NO_FILE",
    "Commit",
    "candidate_steps",
    "check_files",
    "commit_of",
    "commits_of",
    "committed_steps",
    "in_commit_order",
    "next_commit_number",
    "read_commits",
    "read_committed",
    "read_manifest",
]

_log = logging.getLogger("fastpersist")

NO_FILE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
"""Errors of a stat that say that there is no such file; others are of the disk."""

_REPLACED_LIMIT = 5
_Read = TypeVar("_Read")


def candidate_steps(root: str) -> set[int]:
    """Return the steps that have a directory, final or retired, whatever is in it; none for a root that is missing.

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

    def read(step: int) -> bool:
        try:
            found[step] = read_committed(root, step, lambda _, manifest: manifest)
        except (CorruptionError, StorageError, CheckpointNotFoundError) as error:
            path = committed_path(root, step_name(step))
            if path is None:
                return False
            _log.warning("%s is no committed step: %s", path, error)
        return True

    _for_each_step(root, read)
    return found


def _for_each_step(root: str, read: Callable[[int], bool]) -> None:
    """Call `read` with each step that has a directory; it returns False if the step is gone.

    The root is then listed again: retention removes a step when it has newer ones, which the first listing may lack.
    """
    listed: set[int] = set()
    while new := candidate_steps(root) - listed:
        listed |= new
        gone = [step for step in new if not read(step)]
        if not gone:
            return


def read_committed(
    root: str,
    step: int,
    read: Callable[[HeldDirectory, CheckpointManifest], _Read],
    *,
    checks_files: Callable[[CheckpointManifest], bool] = lambda manifest: True,
) -> _Read:
    """Read a step, all of it from one directory, which is not removed meanwhile, even if a save replaces it.

    Args:
        root: The directory of the steps.
        step: The number of the step.
        read: Called with the step's directory and its manifest.
        checks_files: Takes the manifest; tells whether to check first that every file of it is there.

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
                if checks_files(manifest):
                    check_files(held.place, manifest)
                return read(held, manifest)
            except (CorruptionError, StorageError, CheckpointNotFoundError):
                if held.has_its_name():
                    raise
                # It was replaced, and without file locks it was removed while it was read; or it is damaged, and gone.
    raise StorageError(None, f"step {step} in {root} was replaced again and again while it was read", root)


def read_manifest(path: str) -> CheckpointManifest:
    """Read the manifest of a checkpoint directory.

    Raises:
        CheckpointNotFoundError: There is no manifest.
        FormatError: It cannot be parsed, or is no regular file.
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
        FormatError: One is missing, or is something else.
        StorageError: One cannot be looked up, which says nothing of what it is.
    """
    for entry in manifest.files:
        file_path = os.path.join(path, entry.name)
        rank = writer_of(entry.name)
        wrote = "" if rank is None else f" (rank {rank} wrote it)"
        try:
            with storage_errors("looking up", file_path):
                status = os.stat(file_path)
        except StorageError as error:
            if error.errno not in NO_FILE:
                raise
            message = f"it is in the manifest, but cannot be read: {os.strerror(error.errno)}{wrote}"
            raise FormatError(message, path=file_path) from error
        if not stat.S_ISREG(status.st_mode):
            raise FormatError(f"it is in the manifest, but is no regular file{wrote}", path=file_path)
        if status.st_size != entry.size_bytes:
            message = f"it has {status.st_size} bytes, its manifest says {entry.size_bytes}{wrote}"
            raise FormatError(message, path=file_path)


# ------------------------------------------------------------------------------------------- the order of commits


class Commit(NamedTuple):
    """When a step was committed, and how good it is, as its manifest says.

    Attributes:
        number: The place of the step in the order of commits; None in manifests that are older than this field.
        time_s: When the manifest was written, Unix time.
        metrics: The metrics of the step, by name.
    """

    number: int | None
    time_s: float
    metrics: Mapping[str, float]


def commit_of(manifest: CheckpointManifest) -> Commit:
    """Return the commit that a manifest describes."""
    return Commit(manifest.commit_number, manifest.time_s, manifest.metrics)


def read_commits(root: str) -> dict[int, Commit | None]:
    """Read the manifests of all steps that have a directory, and nothing else; None for one that cannot be read.

    Raises:
        StorageError: The root is no directory, or may not be listed.
    """
    found: dict[int, Commit | None] = {}

    def read(step: int) -> bool:
        path = committed_path(root, step_name(step))
        if path is None:
            return False
        try:
            found[step] = commit_of(read_manifest(path))
        except (CorruptionError, StorageError, CheckpointNotFoundError) as error:
            if committed_path(root, step_name(step)) is None:
                return False
            _log.info("the commit order of %s is not known: %s", path, error)
            found[step] = None
        return True

    _for_each_step(root, read)
    return found


def commits_of(root: str) -> dict[int, Commit]:
    """Return the commit of each committed step of a root: its order and its metrics."""
    return {step: commit_of(manifest) for step, manifest in committed_steps(root).items()}


def in_commit_order(commits: Mapping[int, Commit | None]) -> list[int]:
    """Return the steps in the order in which they were committed, the last one at the end.

    A step without a number is placed by its time among those with one. A step whose manifest cannot be read (None)
    comes right behind the step below it, which is its place in a run that never went back.

    Thread safety: safe, as long as no thread changes `commits` meanwhile.
    """
    numbered = sorted((found.time_s, found.number) for found in commits.values() if found and found.number is not None)
    times_s = [time_s for time_s, _ in numbered]
    greatest = [0]  # of the first so many by time
    for _, number in numbered:
        greatest.append(max(greatest[-1], number))
    places: dict[int, tuple[int, float, int]] = {}
    below = (0, -1.0)
    for step in sorted(commits):
        found = commits[step]
        if found is not None:
            number = greatest[bisect_right(times_s, found.time_s)] if found.number is None else found.number
            below = (number, found.time_s)
        places[step] = (*below, step)
    return sorted(places, key=places.__getitem__)


def next_commit_number(commits: Iterable[Commit | None]) -> int:
    """Return the number for the next commit."""
    numbers = [found.number for found in commits if found is not None and found.number is not None]
    return min(1 + max(numbers, default=0), COMMIT_NUMBER_MAX)  # steps with that number are ordered by time
