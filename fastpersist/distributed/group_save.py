"""`fp.save` and `fp.save_async` by several ranks: all of them write one file, the first one publishes it.

The file is planned and written by `shared_file`, made visible by `file_commit`, what the ranks say to each other goes
through `coordination`. The ranks of a process group meet once, at its first save.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch.distributed as dist

from fastpersist import _native
from fastpersist.commit.file_commit import PendingFile
from fastpersist.commit.filesystem import hint_at_make_parents
from fastpersist.config import config_at
from fastpersist.distributed.coordination import Ranks
from fastpersist.distributed.follower_file import OtherShare
from fastpersist.distributed.follower_save import PeerSave
from fastpersist.distributed.partition import choose_writers
from fastpersist.distributed.replica_check import replicas_in, replicas_of
from fastpersist.distributed.shared_file import FirstShare, Together
from fastpersist.errors import ConfigError, UnsupportedError
from fastpersist.saving import file_save
from fastpersist.saving.containers import Container
from fastpersist.saving.file_save import FileOptions, SaveReport
from fastpersist.saving.ownership import Owners, Ownership
from fastpersist.saving.pending_save import PendingSave, SaveStats
from fastpersist.saving.refused_globals import warn_of_file
from fastpersist.saving.work_queue import Lane
from fastpersist.saving.write_file import WrittenFile, publish_file
from fastpersist.transfer.engine_selection import require_engine
from fastpersist.transfer.pipeline import Poll

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Writers", "save_together", "save_together_async", "together_with", "tuned_writer_count"]

Writers: TypeAlias = Literal["auto", "all", "node"] | int
"""Which ranks write what is shared: see `partition.choose_writers`."""

_met: weakref.WeakKeyDictionary[ProcessGroup, tuple[Ranks, int | None]] = weakref.WeakKeyDictionary()


def ranks_of(process_group: ProcessGroup, path: str) -> tuple[Ranks, int | None]:
    """Return the line between the ranks of a group; they meet the first time, so all of them call this.

    Args:
        process_group: Of these ranks.
        path: What is saved first: its file system is the one whose tuning counts for all that this group saves.

    Returns:
        The line, and what `tuned_writer_count` says.

    Raises:
        ConfigError: This process is not in the group.
        CoordinationError: The ranks cannot reach each other.
    """
    if dist.get_rank(process_group) < 0:
        raise ConfigError("this process is not a rank of the process group that it wants to save with")
    met = _met.get(process_group)
    if met is None:
        ranks = Ranks.meet(process_group)
        met = _met[process_group] = (ranks, tuned_writer_count(process_group, path))
    return met


def tuned_writer_count(process_group: ProcessGroup, path: str) -> int | None:
    """Return how many ranks of one node write best, as rank 0's tuning file has it; None if it does not say.

    A collective: each rank may have another tuning file, and all of them have to choose the same writers.

    Raises:
        ConfigError: Rank 0 has a configuration that makes no sense; on all ranks.
    """
    own: Any = None
    if dist.get_rank(process_group) == 0:
        try:
            own = config_at(path).writers
        except ConfigError as error:
            own = str(error)
    told: list[Any] = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(told, own, group=process_group)
    first = told[0]
    if isinstance(first, str):
        raise ConfigError(f"rank 0: {first}")
    return None if first is None else int(first)


@contextmanager
def together_with(
    process_group: ProcessGroup | None, path: str, writers: Writers, *, check_replicas: bool
) -> Iterator[Together | None]:
    """Begin a save with all ranks of a group; what is raised in the block, they are told.

    Args:
        process_group: With whom.
        path: What is saved; its last part is the same on all ranks.
        writers: The ranks that write.
        check_replicas: See `shared_file.Together`.

    Yields:
        With whom; None without a group, and with a group of one rank.
    """
    ranks, tuned_count = (None, None) if process_group is None else ranks_of(process_group, path)
    if ranks is None or ranks.count == 1:
        yield None
        return
    session = ranks.begin(path)
    try:
        label = os.path.basename(os.path.abspath(path))
        yield Together(session, label, choose_writers(writers, ranks.nodes, tuned_count), check_replicas)
    except BaseException as error:
        session.fail(error)
        raise


def save_together(obj: object, path: str, together: Together, options: FileOptions) -> SaveReport:
    """Save an object with all ranks; see `api.save`. Each rank returns when the file is published."""
    started_s = time.monotonic()
    require_engine(options.engine)
    container = options.plan(obj, path)
    with together.session.working():
        if together.session.rank:
            return _write_part(container, path, together, options.durable, options.engine, started_s)
        warn_of_file(container, obj)
        return _write_and_publish(container, path, together, options, started_s)


def save_together_async(
    obj: object, path: str, owners: Owners, together: Together, options: FileOptions
) -> PendingSave:
    """Save an object with all ranks while training goes on; see `api.save_async`."""
    arena = file_save.async_arena
    if together.session.rank:
        require_engine(options.engine)
        peer = PeerSave(
            path,
            together,
            engine=options.engine,
            durable=options.durable,
            arena=arena,
            lane=Lane("fastpersist-save"),  # the first rank keeps saves to the same path in order
            stats=SaveStats(path=path),
        )
        checksum, file_format, metadata = options.checksum, options.file_format, options.metadata
        peer.save(obj, "", owners, owners.look, checksum=checksum, file_format=file_format, metadata=metadata)
        return peer.publish()

    def share(container: Container, look: Callable[[], Ownership]) -> PublishedShare:
        return PublishedShare(container, replicas_in(container, look() if container.sources else None), together)

    return file_save.save_file_async(obj, path, owners, options, share=share)


class PublishedShare(FirstShare):
    """The first rank's share of a file that this rank publishes under a name of its own: a `file_save.SharedFile`."""

    def working(self) -> AbstractContextManager[None]:
        """Return the context in which this rank talks to the others."""
        return self._session.working()

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks that the save has failed here."""
        self._session.fail(error)

    def write_pending(
        self, file: PendingFile, *, engine: str, poll: Poll | None = None, snapshot: _native.Snapshot | None = None
    ) -> WrittenFile:
        """Write this rank's share; see `FirstShare.write`."""
        return self.write(
            file.fd, file.target.path, engine=engine, pending_path=file.path, poll=poll, snapshot=snapshot
        )

    def settle(self) -> None:
        """Return when no other rank can make the save fail any more."""
        self._session.settle()

    def tell_published(self) -> None:
        """Tell the other ranks that the file is published, and how long it is."""
        self._session.answer(str(self.container.size_bytes).encode())
        self._session.finish()


def _write_and_publish(
    container: Container, path: str, together: Together, options: FileOptions, started_s: float
) -> SaveReport:
    target = options.target(path)
    if target.why_not_replaceable is not None:
        raise UnsupportedError(
            f"several ranks cannot write {path}: {target.why_not_replaceable}; choose another path, or let one rank "
            "save"
        )
    with hint_at_make_parents(path):
        file = PendingFile.create(target)
    try:
        share = PublishedShare(container, replicas_of(container), together)
        planned_s = time.monotonic()
        published = publish_file(
            file,
            container.size_bytes,
            lambda: share.write_pending(file, engine=options.engine),
            durable=options.durable,
            check=share.settle,
        )
    except BaseException:
        file.abort()
        raise
    share.tell_published()
    plan_s, total_s = planned_s - started_s, time.monotonic() - started_s
    return SaveReport(
        path, container.size_bytes, published.engine, plan_s, published.write_s, published.sync_s, total_s
    )


def _write_part(
    container: Container, path: str, together: Together, durable: bool, engine: str, started_s: float
) -> SaveReport:
    share = OtherShare(container, replicas_of(container), together)
    planned_s = time.monotonic()
    used_engine = share.write(os.path.realpath(path), engine=engine, durable=durable)
    written_s = time.monotonic()
    size_bytes = int(together.session.hear())
    together.session.finish()
    ended_s = time.monotonic()
    return SaveReport(
        path=path,
        size_bytes=size_bytes,
        engine=used_engine,
        plan_s=planned_s - started_s,
        write_s=written_s - planned_s,
        sync_s=ended_s - written_s,
        total_s=ended_s - started_s,
    )
