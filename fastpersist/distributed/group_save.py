"""`fp.save` by several ranks: all of them write one file, the first one publishes it.

The file is planned and written by `shared_file`, made visible by `file_commit`, what the ranks say to each other goes
through `coordination`. The ranks of a process group meet once, at its first save.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch.distributed as dist

from fastpersist.commit.file_commit import PendingFile, resolve_target
from fastpersist.commit.filesystem import hint_at_make_parents, make_directories
from fastpersist.config import config_at
from fastpersist.distributed.coordination import Ranks, Session
from fastpersist.distributed.follower_file import OtherShare
from fastpersist.distributed.partition import choose_writers
from fastpersist.distributed.replica_check import replicas_of
from fastpersist.distributed.shared_file import FirstShare, Together
from fastpersist.errors import ConfigError, UnsupportedError
from fastpersist.saving.containers import Container, SaveReport, container_for, padded_bytes
from fastpersist.saving.refused_globals import warn_of_file
from fastpersist.transfer.engine_selection import require_engine

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Writers", "end_session", "save_together", "together_with", "tuned_writer_count"]

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


def save_together(
    obj: object,
    path: str,
    together: Together,
    *,
    durable: bool,
    checksum: bool,
    engine: str,
    file_format: str,
    metadata: Mapping[str, str] | None,
    replace_links: bool,
    make_parents: bool,
) -> SaveReport:
    """Save an object with all ranks; see `api.save`. Each rank returns when the file is published."""
    started_s = time.monotonic()
    require_engine(engine)
    container = container_for(obj, path, checksum=checksum, file_format=file_format, metadata=metadata)
    with together.session.working():
        if together.session.rank:
            return _write_part(container, path, together, durable, engine, started_s)
        warn_of_file(container, obj)
        if make_parents:
            make_directories(os.path.dirname(os.path.abspath(path)))
        return _write_and_publish(container, path, together, durable, engine, replace_links, started_s)


def _write_and_publish(
    container: Container,
    path: str,
    together: Together,
    durable: bool,
    engine: str,
    replace_links: bool,
    started_s: float,
) -> SaveReport:
    target = resolve_target(path, replace_links=replace_links)
    if target.why_not_replaceable is not None:
        raise UnsupportedError(
            f"several ranks cannot write {path}: {target.why_not_replaceable}; choose another path, or let one rank "
            "save"
        )
    with hint_at_make_parents(path):
        pending = PendingFile.create(target)
    try:
        share = FirstShare(container, replicas_of(container), together)
        planned_s = time.monotonic()
        pending.allocate(padded_bytes(container))
        written = share.write(pending.fd, target.path, engine=engine, pending_path=pending.path)
        written_s = time.monotonic()
        together.session.settle()
        pending.publish(container.size_bytes, durable=durable)
    except BaseException:
        pending.abort()
        raise
    end_session(together.session, container.size_bytes)
    return SaveReport(
        path=path,
        size_bytes=container.size_bytes,
        engine=written.engine,
        plan_s=planned_s - started_s,
        write_s=written_s - planned_s,
        sync_s=pending.sync_s,
        total_s=time.monotonic() - started_s,
    )


def end_session(session: Session, size_bytes: int) -> None:
    """Tell the other ranks that the file is published, and how long it is."""
    session.answer(str(size_bytes).encode())
    session.finish()


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
