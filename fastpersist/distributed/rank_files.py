"""Files that are one rank's alone, in a directory that several ranks save: each rank writes its own, all at once.

The directory is the first rank's, hidden until everything in it is durable. So the others need its place, and the first
one needs to know what they have written there:

1. The first rank *offers* the place as soon as it has made the directory (`sessions`). Who has a file of its own asks,
   on the thread that writes; the first rank answers whenever it creates, writes or waits. Right before a file of its
   own it tells the others without being asked: they have such files, too. Where nobody has any, nothing is said.
2. Each rank creates its files there, writes and syncs them, in the order in which it saves them, whatever the others
   are doing: ranks meet only in files that they share. A file is created exclusively, so a name that two ranks save is
   an error of whoever comes second, and never a mixture.
3. When no more files come, each rank *confirms*: it tells name, length and CRC of its own ones. The first rank gathers
   that when its own are durable, and then publishes: it puts them into the manifest, checks that they are there with
   that length, and syncs the directories; what is missing fails the save.

When a rank fails, is gone or stays silent, the session fails: all ranks learn which one it was, while they write, wait
or publish. Each removes what it has made; nothing was visible. No training thread waits for another rank in any of it.

The ranks of a Checkpointer need not share a file system (`node_local`). There the place is offered when it is known who
sees whose files, that is when the state is planned; so a rank saves the state first, then files of its own.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from fastpersist import _native
from fastpersist.commit.filesystem import filesystem
from fastpersist.distributed.follower_file import needs_same_filesystem
from fastpersist.distributed.shared_file import decoded, encoded
from fastpersist.errors import ConfigError, CoordinationError, StorageError
from fastpersist.formats.manifest import FileEntry, check_file_name
from fastpersist.saving.capture import Capture
from fastpersist.saving.containers import Container
from fastpersist.saving.write_file import write_container, write_file
from fastpersist.transfer.pipeline import Poll

__all__ = ["OwnFile", "Told", "confirmation", "confirmed", "refusing_second"]

Told = tuple[str, int, int | None]
"""Name, length and CRC of a file, as ranks tell it to each other."""


@dataclass(frozen=True, slots=True)
class OwnFile:
    """A file of a rank that is not the first one, captured.

    Attributes:
        name: Below the directory.
        final_path: That it will have.
        container: What it is to hold.
        capture: Of that.
        snapshot: Likewise.
    """

    name: str
    final_path: str
    container: Container
    capture: Capture
    snapshot: _native.Snapshot

    def write(
        self, directory: str, rank: int, *, engine: str, durable: bool, poll: Poll, made: Callable[[str], None]
    ) -> tuple[Told, str]:
        """Write it; on the writing thread.

        Args:
            directory: The pending one.
            rank: This one.
            engine: Engine name or "auto".
            durable: Sync it.
            poll: See `pipeline.Poll`.
            made: Told the path of each file and directory that is made: who gives up removes them.

        Returns:
            What the first rank is told of it, and the engine that wrote.

        Raises:
            ConfigError: Another rank has a file of this name.
            StorageError, UnsupportedError: As in `write_container`; or this rank does not see the directory.
            TornStateError: The object was changed before it was captured.
        """
        with refusing_second(self.name, self.final_path), needs_same_filesystem(self.final_path, rank):
            fd = _created(directory, self.name, made)
        _native.close_in_forked_child(fd)
        container, path, size_bytes = self.container, self.final_path, self.container.size_bytes
        try:
            written = write_file(
                fd,
                path,
                size_bytes,
                lambda: write_container(container, fd, path, engine=engine, poll=poll, snapshot=self.snapshot),
            )
            if durable:
                filesystem().sync(fd, self.final_path)
        finally:
            _native.forget_descriptor(fd)
            filesystem().close(fd, self.final_path)
        self.capture.check()  # of this file alone: steps go on waiting for those that come
        return (self.name, size_bytes, written.crc32), written.engine


def _created(directory: str, name: str, made: Callable[[str], None]) -> int:
    """Create a file and the directories above it, which other ranks may make at the same time."""
    *above, _ = name.split("/")
    path = directory
    for part in above:
        path = os.path.join(path, part)
        try:
            filesystem().make_directory(path)
        except StorageError as error:
            if error.errno != errno.EEXIST:
                raise
        made(path)  # who did not make it removes it, too: only if it is empty, and the save has failed
    path = os.path.join(directory, name)
    fd = filesystem().create(path)
    made(path)
    return fd


@contextmanager
def refusing_second(name: str, final_path: str) -> Iterator[None]:
    """Say what is wrong when a file is there that a rank is about to create.

    Raises:
        ConfigError: It is there.
    """
    try:
        yield
    except StorageError as error:
        if error.errno != errno.EEXIST:
            raise
        raise ConfigError(
            f"{name} is in {final_path.removesuffix('/' + name)} already: another rank has saved a file of this name, "
            "or somebody has put one there. Files with own=True have other names on each rank"
        ) from error


def confirmation(files: Sequence[Told]) -> bytes:
    """Return what a rank tells when it has no more files, of those that are its own."""
    return encoded({"own": files})


def confirmed(messages: Sequence[bytes]) -> Iterator[tuple[int, FileEntry]]:
    """Read what all ranks tell at the end; return the files of those that are not the first, and whose they are.

    Raises:
        CoordinationError: It is no confirmation.
    """
    for rank, message in enumerate(messages):
        if rank == 0:
            continue
        try:
            for name, size_bytes, crc32 in decoded(message, rank)["own"]:
                check_file_name(name)
                yield rank, FileEntry(name, int(size_bytes), None if crc32 is None else int(crc32))
        except (KeyError, TypeError, ValueError) as error:
            raise CoordinationError(f"rank {rank} tells of its files what makes no sense: {error}") from error
