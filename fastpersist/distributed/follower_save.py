"""A follower's part in a save: its part of the coordinator's files, and its own files.

The counterpart of `api.save_async` and of a `DirectorySave` with `coordinator_save`, which rank 0 runs meanwhile. All
ranks save shared files in the same order; each may save files of its own at any time in between. A follower publishes
nothing: the coordinator publishes for all, and reports the result (`commit_agreement`).
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

from fastpersist.commit.filesystem import filesystem
from fastpersist.distributed.commit_agreement import hear_published, tell_own_files
from fastpersist.distributed.follower_file import FollowerFile, OwnFile
from fastpersist.distributed.messages import checking, decoded, preferring_failure_of_others, telling
from fastpersist.distributed.node_local.publishing import FollowerStore
from fastpersist.distributed.replica_check import replicas_in
from fastpersist.distributed.shared_file import SaveGroup
from fastpersist.errors import StorageError
from fastpersist.formats.manifest import FileEntry
from fastpersist.saving.capture import Capture, Sources
from fastpersist.saving.containers import container_for
from fastpersist.saving.directory_files import FileProducer, WriteSite
from fastpersist.saving.ownership import Owners, Ownership
from fastpersist.saving.pacing import Spread
from fastpersist.saving.pending_save import Lane, PendingSave, SaveStats
from fastpersist.saving.write_file import CapturedFile, capture_file
from fastpersist.transfer.arena import Arena, ArenaOfSave

__all__ = ["FollowerSave"]


class FollowerSave:
    """This rank's part of what the coordinator publishes. One thread uses it; another one writes.

    Args:
        path: The final name of the file or directory.
        group: The ranks that save.
        engine: "auto", or an engine's name, which then never falls back.
        durable: Sync what was written.
        arena: Host memory for copied bytes.
        lane: The queue in which this save is written.
        stats: The figures of the save, which this fills in.
        paranoid: The option of `capture`.
        confirms: The save is of a directory: when it has no more files, this rank tells which are its own.
    """

    def __init__(
        self,
        path: str,
        group: SaveGroup,
        *,
        engine: str,
        durable: bool,
        arena: Arena,
        lane: Lane,
        stats: SaveStats,
        paranoid: bool = False,
        confirms: bool = False,
    ) -> None:
        self._path = path
        self._group = group
        self._session = group.session
        self._engine = engine
        self._durable = durable
        self._arena = ArenaOfSave(arena)
        self._lane = lane
        self._stats = stats
        self._paranoid = paranoid
        self._confirms = confirms
        self._spread = Spread()
        self._own_files: list[FileEntry] = []  # written; the coordinator is told at the end
        made_paths: list[str] = []
        self._made_paths = made_paths
        self._pending = PendingSave(stats.path, stats, rank=group.session.rank, returns=stats.step is not None)
        self._pending.when_failed(group.session.fail)
        self._pending.when_failed(lambda _: _remove_made(made_paths))
        self._store = FollowerStore(path, group.session.rank, group.stores)
        self._pending.when_failed(self._store.abort)

    def save(
        self,
        obj: object,
        name: str,
        owners: Owners,
        look: Callable[[], Ownership],
        *,
        checksum: bool = True,
        file_format: str = "auto",
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        """Write this rank's part of a file; returns when what may change at once is copied.

        Args:
            obj: This rank's counterpart of what the coordinator saves.
            name: The path of the file below the directory; "" if `path` is the file.
            owners: The owners of stable storages, which are therefore replicas.
            look: `owners.look`, or a cache of it.
            checksum: The coordinator's value.
            file_format: The coordinator's value.
            metadata: The coordinator's value.
        """
        if self._pending.done():
            return  # a file before this one has failed
        started_s = time.monotonic()
        look = functools.cache(look)
        final_path = os.path.join(self._path, name) if name else self._path
        with telling(self._session):
            container = container_for(obj, final_path, checksum=checksum, file_format=file_format, metadata=metadata)
            found = look() if container.sources else None
            share = FollowerFile(container, replicas_in(container, found), self._group, name)
            capture, snapshot, size_bytes = self._capture(share, owners, look)

        def write() -> None:
            begun_s = time.monotonic()
            self._pending.refuse_torn()
            used_engine = share.write(
                final_path,
                engine=self._engine,
                durable=self._durable,
                poll=self._pending.poll,
                snapshot=snapshot,
                check=capture.check,  # of this file alone: later ones may still be uncaptured
                made=self._made_paths.append,
                store=self._store,
            )
            self._stats.engine = used_engine or self._stats.engine
            self._stats.bytes += size_bytes
            self._stats.write_s += time.monotonic() - begun_s

        self._begin(capture, write, started_s)

    def save_produced(self, producer: FileProducer) -> None:
        """Have a producer write this rank's part of files; returns as `save` does."""
        if self._pending.done():
            return
        started_s = time.monotonic()
        with telling(self._session):
            self._spread.expect_step(producer.owners.optimizers(), manual=producer.owners.gate == "manual")
            held = producer.hold(self._arena, paranoid=self._paranoid, on_gate=self._stats.add_stall)
            self._spread.add_file(held.snapshot, held.size_bytes)
        site = WriteSite(
            directory=None,
            final_path=self._path,
            session=self._session,
            label=self._group.label,
            engine=self._engine,
            poll=self._pending.poll,
            made=self._made_paths.append,
            write_small=None,
            stats=self._stats,
        )

        def write() -> None:
            begun_s = time.monotonic()
            self._pending.refuse_torn()
            own_site = replace(site, directory=self._store.directory_for(self._session, self._group.label))
            self._stats.bytes += sum(entry.size_bytes for entry in producer.write(own_site))
            self._stats.write_s += time.monotonic() - begun_s

        self._begin(held.capture, write, started_s)

    def _leave_made(self) -> None:
        """Hand the files of this rank over to the coordinator, before the coordinator may publish them.

        Raises:
            PeerError: Another rank has failed. Only this rank removes what it made after the coordinator's clean-up.
        """
        self._session.check()
        self._made_paths.clear()

    def add_own(
        self,
        obj: object,
        name: str,
        owners: Owners,
        *,
        file_format: str = "auto",
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        """Write a file of this rank's own, of a directory, when its turn comes; returns when what may change is copied.

        Args:
            obj: Any object that torch.save takes.
            name: The path of the file below the directory; no other rank writes a file of this name.
            owners: The owners of stable storages.
            file_format: The format of the file, as in `container_for`.
            metadata: Text for the header of a safetensors file, as in `container_for`.
        """
        if self._pending.done():
            return
        started_s = time.monotonic()
        final_path = os.path.join(self._path, name)
        with telling(self._session):
            container = container_for(obj, final_path, checksum=True, file_format=file_format, metadata=metadata)
            capture, snapshot, _ = self._capture(container, owners, owners.look)
            file = OwnFile(name, final_path, container, capture, snapshot)
        self._begin(capture, lambda: self._write_own(file), started_s)

    def _write_own(self, file: OwnFile) -> None:
        """Write an own file into the directory that the coordinator offers, or into that of this rank's store."""
        session = self._session
        offer = decoded(session.offered(), 0)
        begun_s = time.monotonic()
        self._pending.refuse_torn()
        with preferring_failure_of_others(session):
            entry, used_engine = file.write(
                self._store.directory(offer) or offer["path"],
                session.rank,
                engine=self._engine,
                durable=self._durable,
                poll=checking(self._pending.poll, session),
                made=self._made_paths.append,
            )
        self._own_files.append(entry)
        self._stats.engine = used_engine
        self._stats.bytes += entry.size_bytes
        self._stats.write_s += time.monotonic() - begun_s

    def publish(self, after: Callable[[Mapping[str, Any]], None] | None = None) -> PendingSave:
        """Return the save, done when the coordinator has published it; no more files come.

        Args:
            after: Called at the end, if this rank has published a store of its own, with what the coordinator then
                says ("steps" that are there, "metrics").
        """
        self._spread.begin()
        self._lane.submit(lambda: self._pending.run(lambda: self._end(after)))
        return self._pending

    def abort(self, error: BaseException) -> None:
        """Give up; the other ranks learn why."""
        self._session.fail(error)
        self._pending.cancel(error)
        self._lane.submit(lambda: self._pending.run(lambda: None))

    def _begin(self, capture: Capture, write: Callable[[], None], started_s: float) -> None:
        """Have a planned file written when its turn comes; wait for bytes that have no room in the arena."""
        self._stats.plan_s += time.monotonic() - started_s
        self._pending.begin(capture, lambda: self._lane.submit(lambda: self._pending.run(write)))
        if self._pending.done():  # the save has failed meanwhile, so nothing else releases this capture
            capture.release()
        self._stats.stall_s += time.monotonic() - started_s

    def _end(self, after: Callable[[Mapping[str, Any]], None] | None) -> None:
        if self._confirms:
            self._leave_made()
            tell_own_files(self._session, self._own_files)
        said = hear_published(self._session, self._store, asdict(self._stats), self._pending.check)
        self._pending.written()
        if after is not None and self._store.is_first():
            after(decoded(said, 0))
        self._pending.succeed()

    def _capture(self, sources: Sources, owners: Owners, look: Callable[[], Ownership]) -> CapturedFile:
        return capture_file(
            sources,
            owners,
            arena=self._arena,
            spread=self._spread,
            on_gate=self._stats.add_stall,
            look=look,
            paranoid=self._paranoid,
        )


def _remove_made(paths: list[str]) -> None:
    """Remove what this rank has made: it may have been made after the coordinator removed its directory."""
    for path in reversed(paths):
        with suppress(StorageError):
            filesystem().unlink(path)
        for directory in (path, os.path.dirname(path)):  # which fails while anything is in it
            with suppress(StorageError):
                filesystem().remove_directory(directory)
