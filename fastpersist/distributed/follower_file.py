"""A follower's part of a file that several ranks write, and its own files.

`coordinator_file` is the coordinator's half of a shared file, `file_agreement` has the messages. A rank's own file
needs no agreement, only a directory, which the coordinator offers (`sessions`): each rank writes its own files there in
the order in which it saves them. A file is created exclusively, so if two ranks save the same name, the second gets an
error, and no mixture results. At the end each rank reports what it has written (`commit_agreement`).
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from fastpersist import _native
from fastpersist.commit.filesystem import filesystem, ignoring, storage_errors
from fastpersist.distributed.file_agreement import follow_plans, offsets_in, tell_done
from fastpersist.distributed.messages import checking, preferring_failure_of_others
from fastpersist.distributed.node_local.copies import receive_rest
from fastpersist.distributed.node_local.detection import StoreSeeker
from fastpersist.distributed.shared_file import SaveGroup, Share, refusing_second
from fastpersist.errors import InternalError, StorageError
from fastpersist.formats.byte_ranges import ExtentMap
from fastpersist.formats.manifest import FileEntry
from fastpersist.formats.split_manifest import part_name
from fastpersist.saving.capture import Capture
from fastpersist.saving.containers import Container
from fastpersist.saving.write_file import PieceStream, write_container, write_file
from fastpersist.transfer.engine_selection import refuse_null_engine
from fastpersist.transfer.progress import Poll
from fastpersist.transfer.writer import Writer

__all__ = ["FollowerFile", "OwnFile", "needs_same_filesystem"]


class FollowerFile(Share):
    """A follower's part of a file."""

    def __init__(self, container: Container, cut: Sequence[int], group: SaveGroup, name: str = "") -> None:
        super().__init__(container, cut, group, name)
        self._file_name = name
        self._made: Callable[[str], None] | None = None
        for part in self._shard_of(group.session.rank):
            self._add_range(part)

    def write(
        self,
        path: str,
        *,
        engine: str,
        durable: bool,
        poll: Poll | None = None,
        snapshot: _native.Snapshot | None = None,
        check: Callable[[], object] | None = None,
        made: Callable[[str], None] | None = None,
        store: StoreSeeker | None = None,
    ) -> str:
        """Write this rank's part into the pending file of the coordinator, which is in `CoordinatorFile.write`.

        Args:
            path: The final name, for messages.
            engine: Engine name or "auto".
            durable: Sync what was written.
            poll: Called while data is written; see `progress.Poll`.
            snapshot: Holds `sources`; without it, they are read from where they are.
            check: Called when the part is written, before the coordinator is told: raises if the part may be torn.
            made: Called with the path of a file that this rank makes; the file is removed if the save fails.
            store: Where this rank writes if it does not see the coordinator's files; None if it has to see them.

        Returns:
            The engine that wrote; "" if there was nothing to write.

        Raises:
            PeerError: Another rank has failed.
            ConfigError, UnsupportedError, StorageError: As in `write_container`.
        """
        self._made = made
        go = follow_plans(self._session, self._plan(), self._description, _no_reply if store is None else store.reply)
        with preferring_failure_of_others(self._session):
            directory = None if store is None else store.directory(go)
            is_part = directory is not None and not self._group.copies
            if directory is None:
                pending_path = go["path"]
            else:
                name = part_name(self._file_name, self._session.rank) if is_part else self._file_name
                pending_path = os.path.join(directory, name)
            used_engine, crcs = self._write_part(
                go, pending_path, is_part, path, engine, durable, checking(poll, self._session), snapshot
            )
            if check is not None:
                check()
        tell_done(self._session, crcs)
        if store is not None and store.copied_fd is not None:
            self._receive_rest(go, store, store.copied_fd, path, durable)
        return used_engine

    def _receive_rest(self, go: dict[str, Any], store: StoreSeeker, fd: int, path: str, durable: bool) -> None:
        """Write what only the coordinator has into the copy of this store."""
        rest = self._rest(dict(zip(self._cut, offsets_in(go), strict=True)), int(go["size_bytes"]))
        with preferring_failure_of_others(self._session):
            receive_rest(self._session, fd, path, rest)
            if durable:
                filesystem().sync(fd, path)
            store.close_copied()

    def _write_part(
        self,
        go: dict[str, Any],
        pending_path: str,
        is_part: bool,
        path: str,
        engine: str,
        durable: bool,
        poll: Poll,
        snapshot: _native.Snapshot | None,
    ) -> tuple[str, list[int]]:
        """Write the ranges of this rank, into the coordinator's file or into a part; return engine and CRCs."""
        if not self.ranges:
            return "", []
        offsets = dict(zip(self._cut, offsets_in(go), strict=True))
        places = [offsets[part.source] + part.from_bytes for part in self.ranges]
        if is_part:
            extents = ExtentMap(self.extents_of(self._session.rank, offsets))
            places = [extents.place_of(offset_bytes) for offset_bytes in places]
            fd = filesystem().create(pending_path)
            if self._made is not None:
                self._made(pending_path)
            _native.close_in_forked_child(fd)
        else:
            fd = _open_pending(pending_path, path, self._session.rank)
        try:
            if is_part:
                filesystem().allocate(fd, extents.size_bytes, path)
            else:
                engine = self._engine_for(fd, path, engine)
            written = self._write_ranges(fd, path, places, engine, poll, snapshot, shared=not is_part)
            if durable:
                filesystem().sync(fd, path)
        finally:
            _native.forget_descriptor(fd)
            os.close(fd)
        return written

    def _write_ranges(
        self,
        fd: int,
        path: str,
        places: Sequence[int],
        engine: str,
        poll: Poll,
        snapshot: _native.Snapshot | None,
        *,
        shared: bool,
    ) -> tuple[str, list[int]]:
        with_crc = self.container.has_checksums
        sources = self._for_gpudirect(engine)
        sparing = snapshot is not None
        with Writer(fd, path, engine=engine, poll=poll, sparing=sparing, shared=shared, sources=sources) as writer:
            stream = PieceStream(writer, snapshot)
            for index, place in enumerate(places):
                stream.seek(place)
                stream.add_source(self.sources[index], index, index if with_crc else None)
            stream.flush()
            used = writer.finish()
            crcs = writer.crcs(len(self.ranges)) if with_crc else [0] * len(self.ranges)
        refuse_null_engine(used)
        return used, crcs


def _open_pending(pending_path: str, path: str, rank: int) -> int:
    """Open the file that the coordinator has made."""
    with needs_same_filesystem(path, rank), storage_errors("opening", pending_path):
        fd = os.open(pending_path, os.O_RDWR | os.O_CLOEXEC)  # libcufile refuses O_NOFOLLOW
        try:
            if not os.path.samestat(os.fstat(fd), os.lstat(pending_path)):
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        except BaseException:
            os.close(fd)
            raise
    _native.close_in_forked_child(fd)
    return fd


@contextmanager
def needs_same_filesystem(path: str, rank: int) -> Iterator[None]:
    """Explain the error of a rank that does not find the coordinator's file or directory."""
    try:
        yield
    except StorageError as error:
        raise type(error)(
            error.errno,
            f"cannot save {path}: rank {rank} cannot open what rank 0 has made ({error}). All ranks that write need "
            "the same file system (a Checkpointer can keep steps on a disk of each node: node_local=); "
            "writers=1 lets rank 0 write alone, without rank_state of the others",
            path,
        ) from error


def _no_reply(said: dict[str, Any]) -> dict[str, Any]:
    raise InternalError(f"rank 0 asks for stores, and this rank has none: {sorted(said)}")


@dataclass(frozen=True, slots=True)
class OwnFile:
    """A file of a follower's own, captured.

    Attributes:
        name: The path of the file below the directory.
        final_path: The path that the file will have.
        container: The planned content.
        capture: The capture of this content.
        snapshot: The snapshot of this content.
    """

    name: str
    final_path: str
    container: Container
    capture: Capture
    snapshot: _native.Snapshot

    def write(
        self, directory: str, rank: int, *, engine: str, durable: bool, poll: Poll, made: Callable[[str], None]
    ) -> tuple[FileEntry, str]:
        """Write it; on the writing thread.

        Args:
            directory: The path of the pending directory.
            rank: The number of this rank.
            engine: Engine name or "auto".
            durable: Sync the file.
            poll: Called while data is written; see `progress.Poll`.
            made: Called with the path of each file and directory that this rank makes, and removes if the save fails.

        Returns:
            The entry for the coordinator, and the engine that wrote.

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
        self.capture.check()  # of this file alone: later ones may still be uncaptured
        return FileEntry(self.name, size_bytes, written.crc32), written.engine


def _created(directory: str, name: str, made: Callable[[str], None]) -> int:
    """Create a file and the directories above it, which other ranks may make at the same time."""
    *above, _ = name.split("/")
    path = directory
    for part in above:
        path = os.path.join(path, part)
        with ignoring(errno.EEXIST):
            filesystem().make_directory(path)
        made(path)  # also of another rank's directory: it is removed only if it is empty and the save has failed
    path = os.path.join(directory, name)
    fd = filesystem().create(path)
    made(path)
    return fd
