"""What a rank writes of a file that is not the first one; `shared_file` says what the ranks do and tell each other."""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from fastpersist import _native
from fastpersist.commit.filesystem import filesystem, storage_errors
from fastpersist.distributed.node_local.detection import PeerStore
from fastpersist.distributed.shared_file import (
    Share,
    Together,
    checking,
    decoded,
    encoded,
    preferring_failure_of_others,
    unpacked_offsets,
)
from fastpersist.errors import StorageError
from fastpersist.formats.byte_ranges import ExtentMap
from fastpersist.formats.split_manifest import part_name
from fastpersist.saving.containers import Container
from fastpersist.saving.write_file import PieceStream
from fastpersist.transfer.engine_selection import refuse_null_engine
from fastpersist.transfer.pipeline import Poll, Writer

__all__ = ["OtherShare", "needs_same_filesystem"]


class OtherShare(Share):
    """The part of a rank that is not the first."""

    def __init__(self, container: Container, cut: Sequence[int], together: Together, name: str = "") -> None:
        super().__init__(container, cut, together, name)
        self._file_name = name
        self._made: Callable[[str], None] | None = None
        for part in self._shard_of(together.session.rank):
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
        store: PeerStore | None = None,
    ) -> str:
        """Write this rank's part into the pending file of the first rank, which is in `FirstShare.write`.

        Args:
            path: For messages: the final name.
            engine: Engine name or "auto".
            durable: Sync what was written.
            poll: See `pipeline.Poll`.
            snapshot: Holds `sources`; without it they are read from where they are.
            check: Called when the part is written, before that is told: raises if it may be torn.
            made: Told the path of a file that this rank makes: who gives up removes it.
            store: Where this rank writes if it does not see the files of the first one; None: it has to.

        Returns:
            The engine that wrote; "" if there was nothing to write.

        Raises:
            PeerError: Another rank has failed.
            ConfigError, UnsupportedError, StorageError: As in `write_container`.
        """
        self._made = made
        go = self._hear_go(store)
        with preferring_failure_of_others(self._session):
            directory = None if store is None else store.directory(go)
            if directory is None:
                pending_path = go["path"]
            else:
                pending_path = os.path.join(directory, part_name(self._file_name, self._session.rank))
            used_engine, crcs = self._write_part(
                go, pending_path, directory is not None, path, engine, durable, checking(poll, self._session), snapshot
            )
            if check is not None:
                check()
        self._session.tell(struct.pack(f"<{len(crcs)}I", *crcs))
        return used_engine

    def _hear_go(self, store: PeerStore | None) -> dict[str, Any]:
        """Tell the plan, answer what the first rank asks, and return where to write."""
        self._session.tell(self._plan_message())
        while True:
            go = decoded(self._session.hear(), 0)
            if go.get("describe"):  # what is heard next tells what differs
                self._session.tell(self._description())
            elif "path" in go or store is None:
                return go
            else:
                self._session.tell(encoded(store.reply(go)))

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
        """Write the ranges of this rank, into the first one's file or into a part; return engine and CRCs."""
        if not self.ranges:
            return "", []
        offsets = dict(zip(self._cut, unpacked_offsets(go["offsets"]), strict=True))
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
            written = self._write_ranges(fd, path, places, engine, poll, snapshot)
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
    ) -> tuple[str, list[int]]:
        with_crc = self.container.has_checksums
        sources = self._for_gpudirect(engine)
        with Writer(fd, path, engine=engine, poll=poll, sparing=snapshot is not None, sources=sources) as writer:
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
    """Open the file that the first rank has made."""
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
    """Say what is wrong when a rank does not find what the first rank has made."""
    try:
        yield
    except StorageError as error:
        raise type(error)(
            error.errno,
            f"cannot save {path}: rank {rank} cannot open what rank 0 has made ({error}). All ranks that write need "
            "the same file system (a Checkpointer finds out at its next save, and writes parts where there is none); "
            "writers=1 lets rank 0 write alone, without rank_state of the others",
            path,
        ) from error
