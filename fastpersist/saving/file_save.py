"""Saves one object to one file: the bodies of `api.save` and `api.save_async`.

Both resolve where the file goes, plan it, write it and publish it (`write_file`). `save_file` does so before it
returns. `save_file_async` captures the object and leaves the rest to a thread. For a file that several ranks write
together, `distributed.group_save` passes a `SharedFile`.

A rename cannot replace everything that can be written to, such as a FIFO, a device or a file with several hard links.
In these cases stock torch.save writes in place, without the guarantees of a rename.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from fastpersist import _native
from fastpersist.arguments import require_bools
from fastpersist.commit.file_commit import ClosedDirectoryError, PendingFile, Target, refuse_existing, resolve_target
from fastpersist.commit.filesystem import (
    absolute_path,
    close_quietly,
    filesystem,
    hint_at_make_parents,
    make_directories,
    storage_errors,
    tell_free,
)
from fastpersist.display import duration_text, html_table, size_text
from fastpersist.errors import ConfigError, StorageError, UnsupportedError
from fastpersist.saving.capture import Sources
from fastpersist.saving.containers import Container, container_for, is_safetensors
from fastpersist.saving.ownership import Owners, Ownership
from fastpersist.saving.pacing import Spread
from fastpersist.saving.pending_save import PendingSave, SaveStats, await_earlier, run_in_order
from fastpersist.saving.refused_globals import warn_of_file
from fastpersist.saving.write_file import WrittenFile, capture_file, publish_file, write_container
from fastpersist.transfer.arena import Arena
from fastpersist.transfer.engine_selection import require_engine
from fastpersist.transfer.progress import Poll, showing_progress
from fastpersist.transfer.torch_boundary import stock_save

__all__ = [
    "FileOptions",
    "SaveReport",
    "SharedFile",
    "async_arena",
    "save_file",
    "save_file_async",
    "save_to_stream",
]

_log = logging.getLogger("fastpersist")

async_arena = Arena()
"""Host memory for what `api.save_async` copies, on all ranks."""


@dataclass(frozen=True, slots=True)
class SaveReport:
    """What a save did.

    Attributes:
        path: The file that was written, as the caller gave it.
        size_bytes: The length of the file.
        engine: The engine that wrote it; "torch.save" where the target could not be replaced by a rename.
        plan_s: Seconds until every offset was known: pickling and layout.
        write_s: Seconds from the first byte to the last.
        sync_s: Seconds until the bytes and the name were durable; 0.0 with durable=False.
        total_s: Seconds of the whole call.
    """

    path: str
    size_bytes: int
    engine: str
    plan_s: float
    write_s: float
    sync_s: float
    total_s: float

    def _repr_html_(self) -> str:
        facts = [("file", self.path), ("size", size_text(self.size_bytes)), ("engine", self.engine)]
        times = [(name, duration_text(getattr(self, f"{name}_s"))) for name in ("plan", "write", "sync", "total")]
        written_s = self.write_s + self.sync_s
        rate = [("rate", f"{self.size_bytes / 1e9 / written_s:.2f} GB/s")] if written_s > 0 else []
        return html_table("Saved", (), [*facts, *times, *rate])


@dataclass(frozen=True, slots=True)
class FileOptions:
    """The options that `api.save` and `api.save_async` have in common, as their callers gave them.

    Attributes:
        overwrite: Replace a file that is there, as both do; without it, one that appears meanwhile stays, too.

    Raises:
        ConfigError: An option that is True or False has another value.
    """

    durable: bool = True
    checksum: bool = True
    engine: str = "auto"
    file_format: str = "auto"
    metadata: Mapping[str, str] | None = None
    replace_links: bool = False
    make_parents: bool = False
    in_place: bool = False
    overwrite: bool = True

    def __post_init__(self) -> None:
        require_bools(
            durable=self.durable,
            checksum=self.checksum,
            replace_links=self.replace_links,
            make_parents=self.make_parents,
            in_place=self.in_place,
        )

    def plan(self, obj: object, path: str) -> Container:
        """Plan the file for an object; see `container_for`."""
        return container_for(obj, path, checksum=self.checksum, file_format=self.file_format, metadata=self.metadata)

    def target(self, path: str) -> Target:
        """Make the directories above if that is asked for, and find out what the file replaces.

        Raises:
            ConfigError: The path ends like one of a directory.
        """
        if not os.path.basename(path):
            raise ConfigError(f"{path} names a directory: a checkpoint is saved to a file, or by a Checkpointer")
        if self.make_parents:
            make_directories(os.path.dirname(absolute_path(path)))
        return resolve_target(path, replace_links=self.replace_links)


def save_file(obj: object, path: str, options: FileOptions, *, progress: bool = False) -> SaveReport:
    """Save an object to a file, which is published when this returns; see `api.save`."""
    started_s = time.monotonic()
    require_engine(options.engine)
    target = options.target(path)
    await_earlier(target.path)  # or an asynchronous save would replace this newer state
    why_in_place = _why_in_place(target, path, options)
    if why_in_place is not None:
        return _save_in_place(obj, path, options, why_in_place, started_s)
    container = options.plan(obj, path)
    warn_of_file(container)
    planned_s = time.monotonic()
    file = None
    try:
        file = _create(target, path, options)
        if file is None:
            return _save_in_place(obj, path, options, _CLOSED_DIRECTORY, started_s)
        write = functools.partial(write_container, container, file.fd, target.path, engine=options.engine)
        with showing_progress(path, container.size_bytes, progress) as poll:
            published = publish_file(file, container.size_bytes, lambda: write(poll=poll), durable=options.durable)
    except BaseException as error:
        if file is not None:
            file.abort()
        tell_free(error)
        raise
    plan_s, total_s = planned_s - started_s, time.monotonic() - started_s
    return SaveReport(
        path, container.size_bytes, published.engine, plan_s, published.write_s, published.sync_s, total_s
    )


class SharedFile(Sources, Protocol):
    """The coordinator's side of a file that all ranks write and it publishes. Its sources are this rank's share."""

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks that the save has failed here."""

    def write_pending(
        self, file: PendingFile, *, engine: str, poll: Poll | None = None, snapshot: _native.Snapshot | None = None
    ) -> WrittenFile:
        """Write this rank's share, and return when the others have written theirs."""

    def settle(self) -> None:
        """Return when no other rank can make the save fail any more; raise if one has failed."""

    def tell_published(self) -> None:
        """Tell the other ranks that the file is visible."""

    def bytes_by_rank(self) -> list[int]:
        """Return how many of the shared bytes each rank writes."""


SharePlan = Callable[[Container, Callable[[], Ownership]], SharedFile]
"""share(container, look): plan who writes which bytes of a planned file; `look` finds whose storages are stable."""


def save_file_async(
    obj: object, path: str, owners: Owners, options: FileOptions, *, share: SharePlan | None = None
) -> PendingSave:
    """Save an object to a file while training goes on; see `api.save_async`.

    Args:
        obj: Any object that torch.save takes.
        path: The file's path.
        owners: The owners of stable storages.
        options: The caller's options.
        share: Divides the file among several ranks; on the coordinator. None for other saves.
    """
    started_s = time.monotonic()
    require_engine(options.engine)
    target = options.target(path)
    why_in_place = _why_in_place(target, path, options)
    if why_in_place is not None:
        if share is not None:
            raise UnsupportedError(f"several ranks cannot write {path}: {why_in_place}; choose another path")
        return _save_now(obj, path, options)
    container = options.plan(obj, path)
    file = _create(target, path, options, refuses_in_place=share is not None)
    if file is None:
        return _save_now(obj, path, options)
    stats = SaveStats(path=str(Path(path).absolute()))
    spread = Spread()
    look = functools.cache(owners.look)
    try:
        shared = None if share is None else share(container, look)
        capture, snapshot, _ = capture_file(
            shared or container, owners, arena=async_arena, spread=spread, on_gate=stats.add_stall, look=look
        )
    except BaseException:
        file.abort()
        raise
    spread.begin()
    stats.plan_s = time.monotonic() - started_s
    stats.bytes = container.size_bytes
    pending = _pending_save(stats, file, shared)

    def write() -> None:
        _write_captured(pending, file, container, snapshot, shared, options)

    pending.begin(capture, lambda: run_in_order(target.path, lambda: pending.run(write)))
    pending.returned(stats.stall_s + time.monotonic() - started_s)
    return pending


def _pending_save(stats: SaveStats, file: PendingFile, shared: SharedFile | None) -> PendingSave:
    """Return the save of a file, which is removed if the save fails; the other ranks are told of that first."""
    pending = PendingSave(stats.path, stats, returns=True)
    pending.when_failed(lambda _: file.abort())
    if shared is not None:
        pending.when_failed(shared.fail)
    return pending


def _write_captured(
    pending: PendingSave,
    file: PendingFile,
    container: Container,
    snapshot: _native.Snapshot,
    shared: SharedFile | None,
    options: FileOptions,
) -> None:
    """Write and publish a captured file, on the background thread."""
    stats = pending.stats

    def write() -> WrittenFile:
        begun_s = time.monotonic()
        pending.refuse_torn()
        if shared is not None:
            written = shared.write_pending(file, engine=options.engine, poll=pending.poll, snapshot=snapshot)
        else:
            written = write_container(
                container, file.fd, file.target.path, engine=options.engine, poll=pending.poll, snapshot=snapshot
            )
        stats.engine, stats.write_s = written.engine, time.monotonic() - begun_s  # what `check` tells
        return written

    def check() -> None:
        pending.check()
        if shared is not None:
            shared.settle()

    published = publish_file(file, container.size_bytes, write, durable=options.durable, check=check)
    stats.engine, stats.write_s, stats.sync_s = published
    if shared is not None:
        stats.add_shares(shared.bytes_by_rank())
        shared.tell_published()
    pending.succeed()


def _save_now(obj: object, path: str, options: FileOptions) -> PendingSave:
    """Save to a target that can only be written in place, before `save_file_async` returns."""
    report = save_file(obj, path, options)
    full_path = str(Path(path).absolute())
    stats = SaveStats(path=full_path, bytes=report.size_bytes, engine=report.engine, stall_s=report.total_s)
    done = PendingSave(full_path, stats)
    done.succeed()
    return done


def save_to_stream(obj: object, file: Any, options: FileOptions) -> SaveReport:
    """Let torch write to a file object."""
    if options.metadata is not None:
        raise ConfigError("a file object goes to torch.save, which keeps no metadata; pass a .safetensors path")
    started_s = time.monotonic()
    stock_save(obj, file)
    return SaveReport("", 0, "torch.save", 0.0, 0.0, 0.0, time.monotonic() - started_s)


# ------------------------------------------------------------------------------------------ what no rename replaces

_CLOSED_DIRECTORY = "its directory takes no new file"


def _why_in_place(target: Target, path: str, options: FileOptions) -> str | None:
    """Return why torch has to write a file where it is; None where a new file can take its place.

    Raises:
        StorageError: A failure would lose the old file, and the caller has not asked for saving in place.
    """
    if target.is_protected and not options.in_place:
        raise _in_place_only(path, errno.EPERM, str(target.why_not_replaceable))
    if target.why_not_replaceable is None and torch.serialization._serialization_tls.skip_data:
        return "torch's skip_data() is active"
    return target.why_not_replaceable


def _create(target: Target, path: str, options: FileOptions, *, refuses_in_place: bool = False) -> PendingFile | None:
    """Create the pending file; None where the directory takes none, and the caller has asked for saving in place.

    Args:
        target: The place that the file goes to.
        path: The same path as the caller gave it, for messages.
        options: The caller's options.
        refuses_in_place: Do not save in place, whatever the caller has asked for.

    Raises:
        StorageError: It could not be created.
    """
    try:
        with hint_at_make_parents(path):
            file = PendingFile.create(target)
            file.overwrite = options.overwrite
            return file
    except ClosedDirectoryError as error:
        if options.in_place and not refuses_in_place:
            return None
        raise _in_place_only(path, error.errno, _CLOSED_DIRECTORY) from error


def _in_place_only(path: str, sys_errno: int | None, why: str) -> StorageError:
    return StorageError(
        sys_errno,
        f"cannot save {path}: {why}, so it cannot be replaced, and overwriting it where it is leaves no checkpoint at "
        "all if that fails. Save to a directory of your own, or let torch.save overwrite it with in_place=True",
        path,
    )


def _save_in_place(obj: object, path: str, options: FileOptions, why: str, started_s: float) -> SaveReport:
    """Let torch write a target that a rename cannot replace; this is not atomic, as torch.save never is."""
    if not options.overwrite:
        refuse_existing(path)
    if is_safetensors(path, options.file_format):
        raise UnsupportedError(f"cannot write a safetensors file to {path}: {why}; choose another path")
    if os.path.isfile(path) and not torch.serialization._serialization_tls.skip_data:
        options.plan(obj, path)  # what cannot be pickled is refused while the old file is still there
    _log.warning("torch.save itself writes %s, in place and without our guarantees: %s", path, why)
    try:
        stock_save(obj, path)
    except (OSError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "inline_container" not in str(error):
            raise  # not torch's writer, but the pickling of the object
        lost = ", and what it held before is lost" if os.path.isfile(path) else ""
        message = f"torch.save could not write {path} in place ({why}){lost}: {error}"
        raise StorageError(getattr(error, "errno", None), message, path) from error
    written_s = time.monotonic()
    size_bytes = 0
    if os.path.isfile(path):
        size_bytes = os.path.getsize(path)
        if options.durable:
            with storage_errors("opening", path):
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                filesystem().sync(fd, path)
            finally:
                close_quietly(fd, path)
    ended_s = time.monotonic()
    return SaveReport(
        path, size_bytes, "torch.save", 0.0, written_s - started_s, ended_s - written_s, ended_s - started_s
    )
