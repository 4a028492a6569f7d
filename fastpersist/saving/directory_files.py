"""The files of a pending directory: writes and syncs them, and lists them for the manifest.

`directory_save` decides which files there are. `commit.directory_commit` makes the directory and publishes it. The
thread that writes does everything here but the names.

A `FileProducer` writes files in a way of its own, such as the shards of one tensor over many ranks. The save
(`directory_save`, on followers `distributed.follower_save`) owns the directory, the thread that writes, the barrier
before the optimizer's step, and the errors. The producer owns the content of its files, and the messages of the ranks
about them.
"""

from __future__ import annotations

import errno
import os
import platform
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from fastpersist import _native
from fastpersist.commit.directory_commit import PendingDirectory, files_in
from fastpersist.commit.filesystem import close_quietly, filesystem, storage_errors
from fastpersist.errors import ConfigError, StorageError
from fastpersist.formats.manifest import CheckpointManifest, FileEntry, check_file_name
from fastpersist.saving.ownership import Owners
from fastpersist.saving.pending_save import SaveStats
from fastpersist.saving.write_file import CapturedFile
from fastpersist.transfer.arena import Arena
from fastpersist.transfer.progress import Poll
from fastpersist.transfer.reader import Extents, read_extents

__all__ = [
    "DirectoryFiles",
    "FileProducer",
    "RankSession",
    "WriteSite",
    "check_lengths",
    "manifest_now",
    "own_version",
    "write_small",
]

_OPEN_COUNT_MAX = 64
"""Files written before the first is synced; more could need more descriptors than a process may have."""


class DirectoryFiles:
    """The files of a pending directory.

    Args:
        directory: The pending directory that they are in.
        stats: The figures of the save: bytes and seconds of syncs are added to them.

    Attributes:
        path: The path of the pending directory.
        final_path: The name that it gets.
    """

    def __init__(self, directory: PendingDirectory, stats: SaveStats) -> None:
        self.path = directory.path
        self.final_path = directory.final_path
        self._directory = directory
        self._stats = stats
        self._entries: dict[str, FileEntry | None] = {}  # None: it is not written yet
        self._unsynced: deque[tuple[int, str]] = deque()  # written; after an error the directory closes them

    # --- names, for the thread that saves

    def check_new(self, name: str) -> None:
        """Raise ConfigError if a name is no file name, or is taken."""
        check_file_name(name)
        self._refuse_taken(name, "")

    def add(self, name: str) -> None:
        """Take a name: its file will be written."""
        self._entries[name] = None

    def drop(self, name: str) -> None:
        """Release a name: its file is written under another name."""
        del self._entries[name]

    # --- for the thread that writes

    def create(self, name: str) -> int:
        """Create a file; return its descriptor, which belongs to the directory."""
        return self._directory.create_file(name)

    def write_bytes(self, fd: int, name: str, data: bytes) -> None:
        """Fill a small file that was created; it is synced later."""
        path = os.path.join(self.final_path, name)
        filesystem().write(fd, data, path)
        self.sync_later(fd, path)
        self.note(FileEntry(name, len(data), _native.crc32(data)))

    def write_small(self, name: str, data: bytes) -> FileEntry:
        """Write a small file that is listed elsewhere, and sync it."""
        return write_small(self._directory, name, data)

    def sync_later(self, fd: int, path: str) -> None:
        """Sync a written file later: a step waits for writes, not for syncs, so the next file is written first."""
        self._unsynced.append((fd, path))
        if len(self._unsynced) >= _OPEN_COUNT_MAX:
            self.sync(durable=True)

    def sync(self, *, durable: bool) -> None:
        """Sync what was written, and close it."""
        while self._unsynced:
            fd, path = self._unsynced.popleft()
            if durable:
                started_s = time.monotonic()
                filesystem().sync(fd, path)
                self._stats.sync_s += time.monotonic() - started_s
            self._directory.close_file(fd)

    def note(self, entry: FileEntry) -> None:
        """List a file that is written."""
        self._entries[entry.name] = entry
        self._stats.bytes += entry.size_bytes

    def note_written_elsewhere(self, entry: FileEntry, writer: str = "") -> None:
        """List a file here that other code has written and synced; its length is checked before publication.

        Args:
            entry: The file.
            writer: The name of the writer, for messages.

        Raises:
            ConfigError: The name of the file is taken.
        """
        self._refuse_taken(entry.name, f": {writer} and another one have saved such a file" if writer else "")
        self.note(entry)
        self._directory.note_durable(entry.name)

    def complete(self) -> list[FileEntry]:
        """Return all files of the directory for its manifest; read those that other code has put there.

        Raises:
            StorageError: A file is missing, or has another length than its writer has told.
            UnsupportedError: Something is neither a file nor a directory.
        """
        present = list(files_in(self.path))
        for name in present:
            if self._entries.get(name) is None:
                self.note(self._read(name))
        if missing := sorted(set(self._entries).difference(present)):
            message = f"cannot save {self.final_path}: {missing[0]} is gone: it was deleted"
            raise StorageError(errno.ENOENT, message, self.final_path)
        entries = {name: entry for name, entry in self._entries.items() if entry is not None}
        check_lengths(self.path, self.final_path, entries.values())
        return list(entries.values())

    def _read(self, name: str) -> FileEntry:
        """Find length and CRC of a file that other code wrote; the directory's publish syncs it."""
        path = os.path.join(self.path, name)
        with storage_errors("opening", path):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            size_bytes = filesystem().status(fd, path).st_size
            extents = Extents()
            extents.add_checked(0, size_bytes)
            crcs = read_extents(fd, path, extents).crcs if size_bytes else [0]
        finally:
            close_quietly(fd, path)
        return FileEntry(name, size_bytes, crcs[0])

    def _refuse_taken(self, name: str, why: str) -> None:
        if name in self._entries:
            raise ConfigError(f"{name} is in {self.final_path} already{why}")


def write_small(directory: PendingDirectory, name: str, data: bytes, *, durable: bool = True) -> FileEntry:
    """Write a small file of a pending directory, and sync it."""
    path = os.path.join(directory.final_path, name)
    fd = directory.create_file(name)
    try:
        filesystem().write(fd, data, path)
        if durable:
            filesystem().sync(fd, path)
    finally:
        directory.close_file(fd)
    return FileEntry(name, len(data), _native.crc32(data))


def check_lengths(path: str, final_path: str, entries: Iterable[FileEntry]) -> None:
    """Check files that others have written, before they are published.

    Args:
        path: The path of the pending directory.
        final_path: The name that it gets, for messages.
        entries: The files, with the lengths that their writers have reported.

    Raises:
        StorageError: A file is missing, or has another length.
    """
    for entry in entries:
        file_path = os.path.join(path, entry.name)
        with storage_errors("looking at", file_path):
            size_bytes = os.stat(file_path).st_size
        if size_bytes != entry.size_bytes:
            told = f"{entry.name} has {size_bytes} bytes, and its writer wrote {entry.size_bytes}"
            raise StorageError(None, f"cannot save {final_path}: {told}", file_path)


def manifest_now(
    files: Iterable[FileEntry],
    *,
    step: int | None,
    metrics: Mapping[str, float],
    rank_count: int | None,
    stats: Mapping[str, float | int | str],
    commit_number: int | None,
) -> CheckpointManifest:
    """Return a manifest of files that this process has written just now.

    Args:
        files: The files that the manifest lists.
        step: The step of the training.
        metrics: The metrics of the training.
        rank_count: The number of ranks that have saved; None for one process.
        stats: What the save cost.
        commit_number: The number of the step in the order of commits of a root.
    """
    ranks = {} if rank_count is None else {"rank_count": rank_count}
    return CheckpointManifest(
        files=tuple(files),
        step=step,
        time_s=time.time(),
        metrics=dict(metrics),
        versions={"fastpersist": own_version(), "torch": torch.__version__, "python": platform.python_version()},
        host={"name": socket.gethostname(), "pid": os.getpid(), "kernel": platform.release(), **ranks},
        stats=dict(stats),
        commit_number=commit_number,
    )


def own_version() -> str:
    """Return the version of this package, as manifests record it."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("fastpersist")
    except PackageNotFoundError:  # imported from a source tree
        return "unknown"


# ------------------------------------------------------------------------------------------------------- producers


class RankSession(Protocol):
    """How the ranks of a save talk to each other: the part of `distributed.sessions.Session` that a producer uses."""

    @property
    def rank(self) -> int:
        """Return the rank of this process."""

    @property
    def count(self) -> int:
        """Return how many ranks there are."""

    def gather(self, own: bytes) -> list[bytes]:
        """Return a message of each rank, `own` for this one; on the coordinator."""

    def answer(self, message: bytes) -> None:
        """Send each follower a message; on the coordinator."""

    def answer_each(self, messages: list[bytes]) -> None:
        """Send each follower a message of its own; on the coordinator."""

    def tell(self, message: bytes) -> None:
        """Send the coordinator a message; on followers."""

    def hear(self) -> bytes:
        """Return the next message of the coordinator; on followers."""

    def check(self) -> None:
        """Raise PeerError if another rank is known to have failed."""


@dataclass(frozen=True, slots=True)
class WriteSite:
    """Where a producer writes, on the writing thread.

    Attributes:
        directory: The pending directory. None on followers that share a file system with the coordinator, which tells
            them where it is.
        final_path: The name that the directory gets.
        session: The session with the other ranks; None if there are none.
        label: The name of the save, the same on all ranks; "" for one process.
        engine: Engine name or "auto".
        poll: Called at least once a second; raises what makes the save fail.
        made: Called with the path of each file as soon as it is made: a save that fails removes these.
        write_small: Takes a name and bytes; writes a small file of the directory, and syncs it; on the coordinator.
        stats: The figures of the save; the producer notes engine and shares, the save itself times and bytes.
    """

    directory: str | None
    final_path: str
    session: RankSession | None
    label: str
    engine: str
    poll: Poll
    made: Callable[[str], None]
    write_small: Callable[[str, bytes], FileEntry] | None
    stats: SaveStats


class FileProducer(Protocol):
    """Writes files of a directory in a way of its own."""

    @property
    def owners(self) -> Owners:
        """Return the owners, whose step waits for the files."""

    def hold(self, arena: Arena, *, paranoid: bool, on_gate: Callable[[float], None]) -> CapturedFile:
        """Find what is to be written, and return it; on the thread that saves, which then captures it."""

    def write(self, site: WriteSite) -> list[FileEntry]:
        """Write the files, and sync them; return those of all ranks on the coordinator, on followers this rank's."""
