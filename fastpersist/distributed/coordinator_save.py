"""The coordinator's (rank 0's) part in saving a directory with several ranks: the strategy of its `DirectorySave`.

`follower_save` is the other ranks' half. All ranks save shared files in the same order; each may save files of its own
at any time in between. The messages: `file_agreement` for each shared file, the offer of the directory for files of
single ranks (`sessions`), and `commit_agreement` at the end.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from fastpersist import _native
from fastpersist.commit.directory_commit import Overwrite
from fastpersist.distributed.commit_agreement import gather_own_files, publish_for_all
from fastpersist.distributed.coordinator_file import CoordinatorFile
from fastpersist.distributed.messages import checking, encoded, preferring_failure_of_others, telling
from fastpersist.distributed.node_local.detection import Say
from fastpersist.distributed.node_local.publishing import CoordinatorStores
from fastpersist.distributed.replica_check import replicas_in
from fastpersist.distributed.sessions import Session
from fastpersist.distributed.shared_file import SaveGroup, refusing_second
from fastpersist.formats.manifest import FileEntry
from fastpersist.formats.split_manifest import COPY_NAME, PARTS_NAME, part_name
from fastpersist.saving.capture import Sources
from fastpersist.saving.containers import Container
from fastpersist.saving.directory_files import DirectoryFiles
from fastpersist.saving.directory_save import Alone, PlannedFile, Publication, WholeFile
from fastpersist.saving.ownership import Ownership
from fastpersist.saving.pending_save import PendingSave, SaveStats
from fastpersist.saving.write_file import WrittenFile
from fastpersist.transfer.progress import Poll

__all__ = ["CoordinatorSave"]


class CoordinatorSave(Alone):
    """How rank 0 saves a directory with the followers of a group.

    Args:
        group: The ranks that save.
    """

    session: Session

    def __init__(self, group: SaveGroup) -> None:
        self.session = group.session
        self.label = group.label
        self.rank_count = group.session.count
        self.stores = CoordinatorStores(group.stores, group.session)
        self._group = group

    def begin(self, files: DirectoryFiles, pending: PendingSave, stats: SaveStats, *, overwrite: Overwrite) -> None:
        """The directory is made: offer it to the followers, if they are known to see it."""
        super().begin(files, pending, stats, overwrite=overwrite)
        self._stats = stats
        self._overwrite = bool(overwrite)
        pending.when_failed(lambda _: self.stores.forget())  # called last, after the directory was removed
        if not self.stores.may_be_several():
            self.offer()

    def fail(self, error: BaseException) -> None:
        """Notify the followers of the failure, so that they stop writing."""
        self.session.fail(error)

    def planning(self) -> AbstractContextManager[None]:
        """Tell the followers of an error at once."""
        return telling(self.session)

    def writing(self) -> AbstractContextManager[None]:
        """Look for the failure of a follower behind an error."""
        return preferring_failure_of_others(self.session)

    def plan(self, container: Container, name: str, look: Callable[[], Ownership], *, own: bool) -> PlannedFile:
        """Plan a file that all ranks write, or one of this rank's own."""
        if own:
            self.stores.note_own(0, name)
            return _OwnFile(container, name, self._files, self._create_own, self.session)
        found = look() if container.sources else None
        share = CoordinatorFile(container, replicas_in(container, found), self._group, name)
        return _SharedFile(share, name, self, self._files, self._stats)

    def create(self, name: str) -> int:
        """Create a file; first answer followers that ask for the directory, as reserving space may take long."""
        self.session.check()
        return self._create(name)

    def _create_own(self, name: str) -> int:
        """Create a file of this rank's own; first tell all followers the directory, as they have such files, too."""
        self.session.announce()
        return self._create(name)

    def _create(self, name: str) -> int:
        with refusing_second(name, os.path.join(self._files.final_path, name)):
            return self._files.create(name)

    def before_producer(self) -> None:
        """Find the stores, unless they are known."""
        self.stores.find_for_producer(self.label, self.find_stores)

    def take(self, entry: FileEntry) -> None:
        """List a file that a producer has written, on any rank."""
        if self.stores.takes(entry):
            self._files.note_written_elsewhere(entry)

    def collect(self, *, durable: bool) -> None:
        """Sync the files of this rank, and wait until the followers have written theirs."""
        self._write_record(copies=False)
        self._files.sync(durable=durable)
        for rank, entry in gather_own_files(self.session):
            if self.stores.takes_own(rank, entry):
                self._files.note_written_elsewhere(entry, f"rank {rank}")
        self._write_record(copies=True)  # which names the own files of all
        self._files.sync(durable=durable)

    def _write_record(self, *, copies: bool) -> None:
        name = COPY_NAME if copies else PARTS_NAME
        record = self.stores.record(self._files.path) if copies == self.stores.copies else None
        if record is not None:
            self._files.write_bytes(self.create(name), name, record)

    def commit(self, publication: Publication) -> None:
        """Publish the directory for all."""
        publish_for_all(self.session, self.stores, publication, self._files.final_path)

    def find_stores(self, say: Say) -> dict[str, Any]:
        """Find the stores, then offer the directory; return what *go* says of stores."""
        self.stores.find(say, self._files.path, overwrite=self._overwrite)
        self.offer()
        return self.stores.go()

    def offer(self) -> None:
        """Tell the followers, as they ask for it, where they write files of their own. May be called again."""
        self.session.offer(encoded({"path": self._files.path, **self.stores.go()}))


class _OwnFile(WholeFile):
    """A file of rank 0's own."""

    def __init__(
        self, container: Container, name: str, files: DirectoryFiles, create: Callable[[str], int], session: Session
    ) -> None:
        super().__init__(container, name, files, create)
        self._session = session

    def write(self, fd: int, *, engine: str, poll: Poll, snapshot: _native.Snapshot) -> WrittenFile:
        """See `PlannedFile.write`."""
        return super().write(fd, engine=engine, poll=checking(poll, self._session), snapshot=snapshot)


class _SharedFile:
    """A file that all ranks write, as a `PlannedFile` of rank 0."""

    def __init__(
        self, share: CoordinatorFile, name: str, save: CoordinatorSave, files: DirectoryFiles, stats: SaveStats
    ) -> None:
        self._share = share
        self._name = name
        self._save = save
        self._files = files
        self._stats = stats

    @property
    def captured(self) -> Sources:
        """What this rank writes of it."""
        return self._share

    def create(self) -> tuple[int, FileEntry]:
        """Create the file; or where there are several stores, the part of it that this rank writes."""
        entry = FileEntry(self._name, self._share.container.size_bytes, None)
        if self._save.stores.may_be_several() and self._share.agree(self._save.find_stores):
            entry = FileEntry(part_name(self._name, 0), self._share.size_bytes, None)
        self._save.offer()  # needed if this save began before the last one found that all ranks see one file system
        return self._save.create(entry.name), entry

    def write(self, fd: int, *, engine: str, poll: Poll, snapshot: _native.Snapshot) -> WrittenFile:
        """See `PlannedFile.write`."""
        written = self._share.write(
            fd,
            os.path.join(self._files.final_path, self._name),
            engine=engine,
            pending_path=os.path.join(self._files.path, self._name),
            poll=poll,
            snapshot=snapshot,
        )
        if self._share.split_shares is not None:
            for entry in self._save.stores.take_shares(self._share.split_shares):
                self._files.note_written_elsewhere(entry)
        else:
            self._save.stores.take_whole(FileEntry(self._name, self._share.container.size_bytes, written.crc32))
        self._stats.add_shares(self._share.bytes_by_rank())
        return written
