"""Saves by the ranks of a process group: a file that all of them write, and a directory of such files.

The ranks of a group connect once, at its first save. This module begins each save on all ranks. The coordinator
continues in `coordinator_file` and `coordinator_save`, each follower in `follower_file` and `follower_save`.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch.distributed as dist

from fastpersist import _native
from fastpersist.arguments import local_path
from fastpersist.commit.directory_commit import Overwrite
from fastpersist.commit.file_commit import PendingFile
from fastpersist.commit.filesystem import absolute_path, hint_at_make_parents
from fastpersist.config import config_at
from fastpersist.distributed.coordination import Ranks
from fastpersist.distributed.coordinator_file import CoordinatorFile
from fastpersist.distributed.coordinator_save import CoordinatorSave
from fastpersist.distributed.follower_file import FollowerFile
from fastpersist.distributed.follower_save import FollowerSave
from fastpersist.distributed.partition import choose_writers, require_writers
from fastpersist.distributed.peers import rank_in
from fastpersist.distributed.replica_check import replicas_in, replicas_of
from fastpersist.distributed.shared_file import SaveGroup
from fastpersist.errors import ConfigError, SkippedError, UnsupportedError
from fastpersist.formats.manifest import check_file_name
from fastpersist.saving import file_save
from fastpersist.saving.containers import Container
from fastpersist.saving.directory_files import FileProducer
from fastpersist.saving.directory_save import DirectorySave
from fastpersist.saving.file_save import FileOptions, SaveReport
from fastpersist.saving.ownership import Owners, Ownership
from fastpersist.saving.pending_save import Lane, PendingSave, SaveStats
from fastpersist.saving.refused_globals import warn_of_file
from fastpersist.saving.write_file import WrittenFile, publish_file
from fastpersist.transfer.arena import Arena
from fastpersist.transfer.engine_selection import require_engine
from fastpersist.transfer.progress import Poll
from fastpersist.transfer.torch_boundary import untraced
from fastpersist.uncopied import Uncopied

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = [
    "PeerDirectorySave",
    "Writers",
    "directory_save_together",
    "save_together",
    "save_together_async",
    "together_with",
    "tuned_writer_count",
]

Writers: TypeAlias = Literal["auto", "all", "node"] | int
"""Which ranks write what is shared: see `partition.choose_writers`."""

_directory_arena = Arena()

_met: weakref.WeakKeyDictionary[ProcessGroup, tuple[Ranks, int | None]] = weakref.WeakKeyDictionary()


def ranks_of(process_group: ProcessGroup, path: str) -> tuple[Ranks, int | None]:
    """Return the connected ranks of a group. They meet in the first call, which all of them make.

    Args:
        process_group: The process group of these ranks.
        path: The path that is saved first. The tuning of its file system counts for all saves of this group.

    Returns:
        The ranks, and what `tuned_writer_count` returns.

    Raises:
        ConfigError: This process is not in the group.
        CoordinationError: The ranks cannot reach each other.
    """
    rank_in(process_group)
    met = _met.get(process_group)
    if met is None:
        ranks = Ranks.meet(process_group)
        met = _met[process_group] = (ranks, tuned_writer_count(process_group, path))
    return met


def tuned_writer_count(process_group: ProcessGroup, path: str) -> int | None:
    """Return from rank 0's tuning file how many ranks of one node write best; None if it does not say.

    A collective: each rank may have another tuning file, and all ranks have to choose the same writers.

    Raises:
        ConfigError: Rank 0's configuration is invalid; on all ranks.
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
) -> Iterator[SaveGroup | None]:
    """Begin a save with all ranks of a group; tell them of an error in the block.

    Args:
        process_group: The group; None to save alone.
        path: The path that is saved; its last part is the same on all ranks.
        writers: The ranks that write.
        check_replicas: Compare all bytes of the replicas, as in `shared_file.SaveGroup`.

    Yields:
        How the ranks save; None without a group, and with a group of one rank.
    """
    ranks, tuned_count = (None, None) if process_group is None else ranks_of(process_group, path)
    if ranks is None or ranks.count == 1:
        require_writers(writers)
        yield None
        return
    session = ranks.begin(path)
    try:
        label = os.path.basename(absolute_path(path))
        yield SaveGroup(session, label, choose_writers(writers, ranks.nodes, tuned_count), check_replicas)
    except BaseException as error:
        session.fail(error)
        raise


def save_together(obj: object, path: str, group: SaveGroup, options: FileOptions) -> SaveReport:
    """Save an object with all ranks; see `api.save`. Each rank returns when the file is published."""
    started_s = time.monotonic()
    require_engine(options.engine)
    container = options.plan(obj, path)
    if group.session.rank:
        return _write_part(container, path, group, options.durable, options.engine, started_s)
    warn_of_file(container)
    return _write_and_publish(container, path, group, options, started_s)


def save_together_async(obj: object, path: str, owners: Owners, group: SaveGroup, options: FileOptions) -> PendingSave:
    """Save an object with all ranks while training goes on; see `api.save_async`."""
    arena = file_save.async_arena
    if group.session.rank:
        require_engine(options.engine)
        follower = FollowerSave(
            path,
            group,
            engine=options.engine,
            durable=options.durable,
            arena=arena,
            lane=Lane("fastpersist-save"),  # the coordinator keeps saves to the same path in order
            stats=SaveStats(path=str(Path(path).absolute())),
        )
        checksum, file_format, metadata = options.checksum, options.file_format, options.metadata
        follower.save(obj, "", owners, owners.look, checksum=checksum, file_format=file_format, metadata=metadata)
        return follower.publish()

    def share(container: Container, look: Callable[[], Ownership]) -> PublishedShare:
        return PublishedShare(container, replicas_in(container, look() if container.sources else None), group)

    return file_save.save_file_async(obj, path, owners, options, share=share)


class PublishedShare(CoordinatorFile):
    """The coordinator's share of a file that is published under a name of its own: a `file_save.SharedFile`."""

    def fail(self, error: BaseException) -> None:
        """Tell the followers that the save has failed here."""
        self._session.fail(error)

    def write_pending(
        self, file: PendingFile, *, engine: str, poll: Poll | None = None, snapshot: _native.Snapshot | None = None
    ) -> WrittenFile:
        """Write the coordinator's share; see `CoordinatorFile.write`."""
        return self.write(
            file.fd, file.target.path, engine=engine, pending_path=file.path, poll=poll, snapshot=snapshot
        )

    def settle(self) -> None:
        """Go on without the followers: from now on the loss of one does not make the save fail."""
        self._session.settle()

    def tell_published(self) -> None:
        """Tell the followers that the file is published, and how long it is."""
        self._session.answer(str(self.container.size_bytes).encode())
        self._session.finish()


def _write_and_publish(
    container: Container, path: str, group: SaveGroup, options: FileOptions, started_s: float
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
        share = PublishedShare(container, replicas_of(container), group)
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
    container: Container, path: str, group: SaveGroup, durable: bool, engine: str, started_s: float
) -> SaveReport:
    share = FollowerFile(container, replicas_of(container), group)
    planned_s = time.monotonic()
    used_engine = share.write(os.path.realpath(path), engine=engine, durable=durable)
    written_s = time.monotonic()
    size_bytes = int(group.session.hear())
    group.session.finish()
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


# --- a directory


def directory_save_together(
    path: str | os.PathLike[str],
    process_group: ProcessGroup,
    *,
    writers: Writers = "auto",
    check_replicas: bool = False,
    overwrite: Overwrite = False,
    engine: str = "auto",
    make_parents: bool = False,
    pending_in: str | os.PathLike[str] | None = None,
) -> DirectorySave | PeerDirectorySave:
    """Make a DirectorySave with all ranks of a group, which save the same files in the same order.

    Of each file, rank 0's object is saved. What an optimizer owns, or constant= names, is the same on all ranks, and
    each writer writes a part of its storages of 1 MiB and more. A file with `own=True` belongs to one rank: each rank
    writes as many of them as it likes, with names that no other rank uses. All ranks call publish(), and the directory
    is visible when rank 0 has published it for all.

    Args:
        path: The directory's final name; rank 0's counts.
        process_group: The process group of the ranks; only the first call for a group uses torch's collectives.
        writers: The ranks that write, as in `fastpersist.save`.
        check_replicas: Compare all bytes of the replicas, as in `fastpersist.save`.
        overwrite: The option of `DirectorySave`; rank 0's counts.
        engine: "auto", or an engine's name, which then never falls back; each rank's own.
        make_parents: The option of `DirectorySave`; rank 0's counts.
        pending_in: The option of `DirectorySave`; rank 0's counts.

    Returns:
        On rank 0, and with a group of one rank, a DirectorySave. On other ranks a PeerDirectorySave; there `path` is a
        directory that is thrown away, and `add_bytes` adds nothing.

    Raises:
        ConfigError, StorageError: As by `DirectorySave`; the other ranks learn of it when they publish.

    Thread safety: any thread, but all ranks begin their saves in the same order.
    """
    final_path = absolute_path(local_path(path))
    with together_with(process_group, final_path, writers, check_replicas=check_replicas) as group:
        require_engine(engine)
        if group is not None and group.session.rank:
            return PeerDirectorySave(final_path, group, engine=engine)
        return DirectorySave(
            path,
            overwrite=overwrite,
            engine=engine,
            make_parents=make_parents,
            pending_in=pending_in,
            _strategy=None if group is None else CoordinatorSave(group),
        )


class PeerDirectorySave(Uncopied):
    """A follower's part of a `DirectorySave`; `directory_save_together` makes it. One thread uses it."""

    def __init__(self, path: str, group: SaveGroup, *, engine: str) -> None:
        self._final_path = path
        self._scratch_path = tempfile.mkdtemp(prefix="fastpersist-")
        self._names: set[str] = set()
        self._closed = False
        self._process = os.getpid()
        self._follower = FollowerSave(
            path,
            group,
            engine=engine,
            durable=True,
            arena=_directory_arena,
            lane=Lane("fastpersist-save"),
            stats=SaveStats(path=path),
            confirms=True,
        )

    @property
    def path(self) -> str:
        """A directory that is thrown away: files that other code puts there count on rank 0 only."""
        return self._scratch_path

    @untraced
    def save(
        self,
        obj: object,
        name: str,
        optimizer: object = None,
        *,
        constant: object = (),
        gate: str = "optimizer",
        format: str = "auto",
        metadata: Mapping[str, str] | None = None,
        owners: Owners | None = None,
        own: bool = False,
    ) -> None:
        """Write this rank's part of a file, or with `own` a file that no other rank has; see `DirectorySave.save`.

        Raises:
            ConfigError: The name is no relative file name or is taken, or the format cannot hold the object.
        """
        self._check_new(name)
        owners = owners or Owners(optimizer, constant, gate)
        if own:
            self._follower.add_own(obj, name, owners, file_format=format, metadata=metadata)
        else:
            self._follower.save(obj, name, owners, owners.look, file_format=format, metadata=metadata)
        self._names.add(name)

    def save_produced(self, producer: FileProducer) -> None:
        """Have a producer write this rank's part of files; see `DirectorySave.save_produced`."""
        self._refuse_closed()
        self._follower.save_produced(producer)

    def add_bytes(self, name: str, data: bytes) -> None:
        """Add nothing: rank 0's bytes count.

        Raises:
            ConfigError: The name is no relative file name or is taken.
        """
        self._check_new(name)
        self._names.add(name)

    def publish(
        self,
        *,
        durable: bool = True,
        step: int | None = None,
        metrics: Mapping[str, float] | None = None,
        after: Callable[[], None] | None = None,
        apart: bool = False,
    ) -> PendingSave:
        """Return the save, done when rank 0 has published; only rank 0's arguments count.

        Raises:
            ConfigError: It was published or aborted before.
        """
        self._close()
        return self._follower.publish()

    def abort(self) -> None:
        """Give up, on all ranks. May be called again, and does nothing after publish()."""
        if not self._closed:
            self._close()
            self._follower.abort(SkippedError(f"{self._final_path} was given up before it was published"))

    def __enter__(self) -> PeerDirectorySave:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None and not self._closed:
            self._close()
            self._follower.abort(error)
        self.abort()

    def __del__(self) -> None:
        # In a forked child, the save and the scratch directory are the parent's.
        if not getattr(self, "_closed", True) and self._process == os.getpid():
            self.abort()

    def _close(self) -> None:
        self._refuse_closed()
        self._closed = True
        shutil.rmtree(self._scratch_path, ignore_errors=True)

    def _check_new(self, name: str) -> None:
        self._refuse_closed()
        check_file_name(name)
        if name in self._names:
            raise ConfigError(f"{name} is in {self._final_path} already")

    def _refuse_closed(self) -> None:
        if self._closed:
            raise ConfigError(f"{self._final_path} was published or aborted already")
