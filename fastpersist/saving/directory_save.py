"""Saves many files, published at once as one directory with a manifest, while training goes on.

This is for trainers that choose the names of their files: `save` and `add_bytes` put files into a hidden pending
directory, other code may put its own there too, and `publish` makes all of it visible in one step, or nothing. A
`Checkpointer` adds steps, retention and resume. `directory_commit` is the protocol, and `capture` captures tensors.

One process saves alone, or several ranks save together. A strategy object covers the differences: `Alone` here, and
`distributed.coordinator_save` on rank 0 of several ranks. This module does not know about other ranks.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Protocol

from fastpersist import _native
from fastpersist.arguments import local_path, require_bools
from fastpersist.commit.directory_commit import Overwrite, PendingDirectory
from fastpersist.commit.filesystem import absolute_path, hint_at_make_parents, make_directories
from fastpersist.errors import ConfigError, SkippedError
from fastpersist.formats.manifest import FileEntry, checked_step, encode_manifest
from fastpersist.saving.capture import Capture, Sources
from fastpersist.saving.containers import Container, TorchZipContainer, container_for
from fastpersist.saving.directory_files import DirectoryFiles, FileProducer, RankSession, WriteSite, manifest_now
from fastpersist.saving.file_save import FileOptions, save_file
from fastpersist.saving.ownership import Owners, Ownership, step_count
from fastpersist.saving.pacing import Spread
from fastpersist.saving.pending_save import Lane, PendingSave, SaveStats
from fastpersist.saving.write_file import WrittenFile, capture_file, write_container, write_file
from fastpersist.transfer.arena import Arena, ArenaOfSave
from fastpersist.transfer.engine_selection import require_engine
from fastpersist.transfer.progress import Poll
from fastpersist.transfer.torch_boundary import untraced
from fastpersist.uncopied import Uncopied

__all__ = ["Alone", "DirectorySave", "PlannedFile", "Publication", "WholeFile"]

_log = logging.getLogger("fastpersist")

_arena = Arena()  # of all saves that bring none of their own
_apart = Lane("fastpersist-after")


class PlannedFile(Protocol):
    """A file of the directory, planned on the thread that saves."""

    @property
    def captured(self) -> Sources:
        """The part of it that this process writes."""

    def create(self) -> tuple[int, FileEntry]:
        """Create the file that this process writes to; on the writing thread.

        Returns:
            Its descriptor; its name and length, and no CRC yet.
        """

    def write(self, fd: int, *, engine: str, poll: Poll, snapshot: _native.Snapshot) -> WrittenFile:
        """Write it; on the writing thread. Its space is reserved."""


class WholeFile:
    """A file that this process writes alone.

    Args:
        container: The content of the file.
        name: The path of the file below the directory.
        files: The files of the directory.
        create: Takes a name, creates the file, and returns its descriptor.
    """

    def __init__(self, container: Container, name: str, files: DirectoryFiles, create: Callable[[str], int]) -> None:
        self._container = container
        self._name = name
        self._final_path = os.path.join(files.final_path, name)
        self._create = create

    @property
    def captured(self) -> Sources:
        """The part of it that this process writes: everything."""
        return self._container

    def create(self) -> tuple[int, FileEntry]:
        """See `PlannedFile.create`."""
        return self._create(self._name), FileEntry(self._name, self._container.size_bytes, None)

    def write(self, fd: int, *, engine: str, poll: Poll, snapshot: _native.Snapshot) -> WrittenFile:
        """See `PlannedFile.write`."""
        return write_container(self._container, fd, self._final_path, engine=engine, poll=poll, snapshot=snapshot)


@dataclass(frozen=True, slots=True)
class Publication:
    """How to make a directory visible, for the strategy to do when all ranks are ready.

    Attributes:
        step: The step, for the manifest.
        metrics: The metrics, for the manifest.
        number: The number of the step in the order of commits of a root.
        durable: Survive power loss once done.
        publish: Publishes the directory.
    """

    step: int | None
    metrics: Mapping[str, float]
    number: int | None
    durable: bool
    publish: Callable[[], None]


class Alone:
    """How one process saves a directory. Where several ranks do more, rank 0 has a subclass of this.

    Attributes:
        rank_count: How many ranks save; None for one process.
        session: The session with the other ranks; None if there are none.
        label: The name of the save, the same on all ranks.
    """

    rank_count: int | None = None
    session: RankSession | None = None
    label: str = ""

    def begin(self, files: DirectoryFiles, pending: PendingSave, stats: SaveStats, *, overwrite: Overwrite) -> None:
        """Take the directory, which is made and empty."""
        self._files = files

    def fail(self, error: BaseException) -> None:
        """Report that the save fails, or is given up; the writing thread may still be writing."""

    def planning(self) -> AbstractContextManager[None]:
        """Return the context in which a file is planned, on the thread that saves."""
        return nullcontext()

    def writing(self) -> AbstractContextManager[None]:
        """Return the context in which a file is written, on the writing thread."""
        return nullcontext()

    def plan(self, container: Container, name: str, look: Callable[[], Ownership], *, own: bool) -> PlannedFile:
        """Plan a file.

        Args:
            container: The content of the file.
            name: The path of the file below the directory.
            look: Finds the owners of storages.
            own: Only this rank writes it.
        """
        return WholeFile(container, name, self._files, self.create)

    def create(self, name: str) -> int:
        """Create a file of this process; on the writing thread, like all methods below."""
        return self._files.create(name)

    def before_producer(self) -> None:
        """Prepare for files that a producer writes."""

    def take(self, entry: FileEntry) -> None:
        """List a file that another process or library has written and synced."""
        self._files.note_written_elsewhere(entry)

    def collect(self, *, durable: bool) -> None:
        """Make sure that all files are there and synced; no more will come."""
        self._files.sync(durable=durable)

    def commit(self, publication: Publication) -> None:
        """Publish the directory, of which all files are there and listed."""
        publication.publish()


class DirectorySave(Uncopied):
    """A directory that is being put together. One thread uses it; everything is written on another.

    Args:
        path: The directory's final name.
        overwrite: Replace a checkpoint of that name. Without it, an existing one is an error, now and at publish().
            "foreign": also a directory with files and no MANIFEST.json, such as another program's checkpoint.
        engine: "auto", or an engine's name, which then never falls back.
        make_parents: Make the directories above that are missing, durably. Without it, the parent exists.
        pending_in: Make the pending directory there, in the same file system, and not beside the final name: for
            parents whose readers take hidden names for checkpoints. Leftovers of dead saves there are removed.

    Raises:
        ConfigError: The path exists and overwrite is False; unknown engine, or value of overwrite; `pending_in` is on
            another file system.
        StorageError: The pending directory cannot be made.

    As a context manager it removes everything if publish() was not called in the block.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        overwrite: Overwrite = False,
        engine: str = "auto",
        make_parents: bool = False,
        pending_in: str | os.PathLike[str] | None = None,
        _arena: Arena = _arena,
        _lane: Lane | None = None,
        _stats: SaveStats | None = None,
        _paranoid: bool = False,
        _strategy: Alone | None = None,
    ) -> None:
        self._closed = True  # until there is something to close
        require_engine(engine)
        if overwrite not in (False, True, "foreign"):
            raise ConfigError(f"overwrite must be False, True or 'foreign', not {overwrite!r}")
        self._overwrite = overwrite
        self._engine = engine
        self._arena = ArenaOfSave(_arena)
        self._lane = _lane or Lane("fastpersist-save")
        self._paranoid = _paranoid
        self._strategy = _strategy or Alone()
        self._spread = Spread()
        self._failed = False
        self._looked: tuple[int, tuple[object, ...], Ownership] | None = None
        self.captures: list[Capture] = []
        self.pickle = b""  # of the object that was saved last, for a warning
        self._tasks: deque[Callable[[], None]] = deque()  # what the lane has yet to do; it may come to it much later
        require_bools(make_parents=make_parents)
        final_path = absolute_path(local_path(path))
        if make_parents:
            make_directories(os.path.dirname(final_path))
        hidden_in = None if pending_in is None else local_path(pending_in, "pending_in")
        with hint_at_make_parents(final_path):
            self._directory = PendingDirectory.create(final_path, overwrite=overwrite, pending_in=hidden_in)
        abort = self._directory.abort  # without a reference to this object: it may be forgotten
        try:
            self._process = os.getpid()
            self._stats = _stats or SaveStats(path=self._directory.final_path)
            self._pending = PendingSave(self._directory.final_path, self._stats, returns=_stats is not None)
            self._files = DirectoryFiles(self._directory, self._stats)
            self._strategy.begin(self._files, self._pending, self._stats, overwrite=overwrite)
            self._pending.when_failed(lambda _: abort())
            self._pending.when_failed(self._strategy.fail)  # done first
            self._pending.when_finished(self._tasks.clear)  # they hold the state
            self._closed = False
        except BaseException as error:  # such as Ctrl-C
            self._strategy.fail(error)
            abort()
            raise

    @property
    def path(self) -> str:
        """The pending directory; files that others put there are published with the rest."""
        return self._directory.path

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
        """Save an object to a file of the directory; return when everything that may change at once is copied.

        Args:
            obj: Any object that torch.save takes; for a name that ends in `.safetensors`, a dict of str to tensors.
            name: The path of the file relative to the directory, with "/" between its parts.
            optimizer: The optimizer whose tensors are in `obj`, as in `save_async`.
            constant: Tensors that never change, as in `save_async`.
            gate: "optimizer" or "manual", as in `save_async`.
            format: "torch", "safetensors", or "auto", as in `save`.
            metadata: Text by name, for safetensors only.
            owners: The owners of stable storages, in place of optimizer, constant and gate.
            own: With several ranks: the object is this rank's own, and only this rank writes it. Each rank writes such
                files while the others write theirs, under names that no other rank has.

        Raises:
            ConfigError: The name is no relative file name or is taken, or the format cannot hold the object.

        Once a file could not be written, nothing more is done, and publish().result() raises the error; until then the
        pending directory stays.
        """
        started_s = time.monotonic()
        self._check_new(name)
        if self._failed:
            return
        given = (owners, optimizer, constant, gate)
        owners = owners or Owners(optimizer, constant, gate)
        final_path = os.path.join(self._directory.final_path, name)
        with self._strategy.planning():
            container = container_for(obj, final_path, checksum=True, file_format=format, metadata=metadata)
            planned = self._strategy.plan(container, name, lambda: self._look(owners, given), own=own)
            capture, snapshot, _ = capture_file(
                planned.captured,
                owners,
                arena=self._arena,
                spread=self._spread,
                on_gate=self._stats.add_stall,
                look=lambda: self._look(owners, given),
                paranoid=self._paranoid,
            )
        self._files.add(name)
        self.captures.append(capture)
        self.pickle = container.skeleton.pickle if isinstance(container, TorchZipContainer) else b""
        self._stats.plan_s += time.monotonic() - started_s
        self._pending.begin(capture, lambda: self._submit(lambda: self._write_file(name, planned, snapshot)))
        self._stats.stall_s += time.monotonic() - started_s

    @untraced
    def save_at_once(
        self, obj: object, name: str, *, format: str = "auto", metadata: Mapping[str, str] | None = None
    ) -> None:
        """Write a file before this returns, for code that then reads, renames or replaces it.

        `publish` lists and syncs what has become of it.

        Args:
            obj: The object, as in `save`.
            name: The path of the file relative to `path`; its directory exists.
            format: "torch", "safetensors", or "auto", as in `save`.
            metadata: Text by name, for safetensors only, as in `save`.

        Raises:
            ConfigError: A file of that name is being written in the background, or the format cannot hold the object.
            StorageError: It cannot be written.
        """
        self._check_new(name)
        options = FileOptions(durable=False, engine=self._engine, file_format=format, metadata=metadata)
        save_file(obj, os.path.join(self.path, name), options)

    def save_produced(self, producer: FileProducer) -> None:
        """Have a producer write files of the directory, on the writing thread; return as `save` does.

        Raises:
            FastPersistError, …: What `producer.hold` raises.
        """
        started_s = time.monotonic()
        self._refuse_closed()
        if self._failed:
            return
        owners = producer.owners
        self._spread.expect_step(owners.optimizers(), manual=owners.gate == "manual")
        with self._strategy.planning():
            held = producer.hold(self._arena, paranoid=self._paranoid, on_gate=self._stats.add_stall)
        self._spread.add_file(held.snapshot, held.size_bytes)
        self.captures.append(held.capture)
        self._stats.plan_s += time.monotonic() - started_s
        self._pending.begin(held.capture, lambda: self._submit(lambda: self._write_produced(producer)))
        self._stats.stall_s += time.monotonic() - started_s

    def add_bytes(self, name: str, data: bytes) -> None:
        """Add a small file with these bytes (configuration, tokenizer …).

        Raises:
            ConfigError: The name is no relative file name or is taken; the data are no bytes.
        """
        self._check_new(name)
        try:
            kept = memoryview(data).tobytes()
        except TypeError as error:
            raise ConfigError(f"the data of {name} are bytes: {error}") from None
        self._files.add(name)
        self._submit(lambda: self._write_bytes(name, kept))

    def add_written(self, name: str, size_bytes: int, crc32: int | None) -> None:
        """Take a file that other code (such as another rank) has written and synced below `path`.

        It is neither read nor synced again. Without this, such files are published, too, after both.

        Args:
            name: The path of the file relative to `path`.
            size_bytes: The length of the file.
            crc32: The CRC-32 of the whole file; None if it is not known, and then `verify` cannot check the file.

        Raises:
            ConfigError: The name is no relative file name or is taken. If the file is missing or has another length,
                `publish` fails with a StorageError.
        """
        self._check_new(name)
        self._files.note_written_elsewhere(FileEntry(name, size_bytes, crc32))

    @untraced
    def publish(
        self,
        *,
        durable: bool = True,
        step: int | None = None,
        metrics: Mapping[str, float] | None = None,
        after: Callable[[], None] | None = None,
        apart: bool = False,
        _lane: Lane | None = None,
        _next_commit_number: Callable[[], int] | None = None,
    ) -> PendingSave:
        """Make everything visible under the final name when all of it is written, with a MANIFEST.json.

        Args:
            durable: Survive power loss once done.
            step: The step, for the manifest.
            metrics: Numbers by name, for the manifest.
            after: Called when the directory is visible and durable, before the save counts as done.
            apart: Call `after` on another thread than the one that writes, so that the next save is written meanwhile.

        Returns:
            The save; result() returns the final path. Errors of every file are raised there.

        Raises:
            ConfigError: It was published or aborted before, or an argument makes no sense.
        """
        self._refuse_closed()
        require_bools(durable=durable, apart=apart)
        step = None if step is None else checked_step(step)
        self._closed = True
        self._looked = None  # it keeps the optimizer's tensors
        self._spread.begin()
        kept_metrics = dict(metrics or {})
        after_lane = _lane or (_apart if apart else None)
        self._lane.submit(
            lambda: self._pending.run(
                lambda: self._publish(durable, step, kept_metrics, _next_commit_number, after, after_lane)
            )
        )
        return self._pending

    def abort(self) -> None:
        """Remove everything; the final name stays as it was. May be called again, and does nothing after publish()."""
        if self._give_up():
            self._pending.join()

    def _give_up(self, why: BaseException | None = None) -> bool:
        """Have the writing thread remove everything; return False if it was published or given up before."""
        if self._closed:
            return False
        self._closed = True
        self._looked = None
        skipped = SkippedError(f"{self._directory.final_path} was given up before it was published")
        self._strategy.fail(why or skipped)  # first, as the thread that writes may wait for other ranks
        if not self._failed:
            self._pending.cancel(why or skipped)
        self._lane.submit(lambda: self._pending.run(lambda: None))
        return True

    def __enter__(self) -> DirectorySave:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self._give_up(error):
            self._pending.join()

    def __del__(self) -> None:
        # This may be the writing thread, so nothing waits here. A forked child has no part in the save.
        if not getattr(self, "_closed", True) and self._process == os.getpid() and self._give_up():
            _log.warning("%s was never published and is removed", self._directory.final_path)

    def _look(self, owners: Owners, given: tuple[object, ...]) -> Ownership:
        """Find the owners of storages; for another file of the same optimizer only if there was a step since."""
        if self._looked is not None:
            count, before, found = self._looked
            if count == step_count() and all(one is other for one, other in zip(given, before, strict=True)):
                return found
        found = owners.look()
        self._looked = step_count(), given, found
        return found

    # --- on the writing thread

    def _submit(self, task: Callable[[], None]) -> None:
        def write() -> None:
            with self._strategy.writing():
                self._tasks.popleft()()

        self._tasks.append(task)
        self._lane.submit(lambda: self._pending.run(write, when_it_fails=self._file_failed))

    def _file_failed(self, error: BaseException) -> None:
        """End all waits for the capture; the directory stays, because other code may still put files into it."""
        if self._closed:
            self._pending.fail(error)
        else:
            self._failed = True
            self._pending.cancel(error)
            self._strategy.fail(error)

    def _write_file(self, name: str, planned: PlannedFile, snapshot: _native.Snapshot) -> None:
        begun_s = time.monotonic()
        final_path = os.path.join(self._directory.final_path, name)
        fd, entry = planned.create()

        def write() -> WrittenFile:
            self._pending.refuse_torn()
            return planned.write(fd, engine=self._engine, poll=self._pending.poll, snapshot=snapshot)

        written = write_file(fd, final_path, entry.size_bytes, write)
        self._stats.write_s += time.monotonic() - begun_s
        self._files.sync_later(fd, final_path)
        self._stats.engine = written.engine
        if entry.name != name:
            self._files.drop(name)
        self._files.note(FileEntry(entry.name, entry.size_bytes, written.crc32))

    def _write_produced(self, producer: FileProducer) -> None:
        begun_s = time.monotonic()
        self._pending.refuse_torn()
        self._strategy.before_producer()
        site = WriteSite(
            directory=self._directory.path,
            final_path=self._directory.final_path,
            session=self._strategy.session,
            label=self._strategy.label,
            engine=self._engine,
            poll=self._pending.poll,
            made=lambda _: None,  # what is in the directory goes with it
            write_small=self._files.write_small,
            stats=self._stats,
        )
        for entry in producer.write(site):
            self._strategy.take(entry)
        self._stats.write_s += time.monotonic() - begun_s

    def _write_bytes(self, name: str, data: bytes) -> None:
        self._files.write_bytes(self._strategy.create(name), name, data)

    def _publish(
        self,
        durable: bool,
        step: int | None,
        metrics: dict[str, float],
        next_commit_number: Callable[[], int] | None,
        after: Callable[[], None] | None,
        after_lane: Lane | None,
    ) -> None:
        self._strategy.collect(durable=durable)
        entries = self._files.complete()
        self._pending.check()
        begun_s = time.monotonic()
        number = None if next_commit_number is None else next_commit_number()
        manifest = manifest_now(
            entries,
            step=step,
            metrics=metrics,
            rank_count=self._strategy.rank_count,
            stats=self._stats_so_far(),
            commit_number=number,
        )

        def make_visible() -> None:
            self._directory.publish(encode_manifest(manifest), durable=durable, overwrite=self._overwrite)
            self._stats.sync_s += self._directory.sync_s

        self._strategy.commit(Publication(step, metrics, number, durable, make_visible))
        self._stats.commit_s = time.monotonic() - begun_s
        self._pending.written()

        def finish() -> None:
            if after is not None:
                after()
            self._stats.commit_s = time.monotonic() - begun_s
            self._pending.succeed()

        if after_lane is None:
            finish()
        else:
            after_lane.submit(lambda: self._pending.run(finish))

    def _stats_so_far(self) -> dict[str, float | int | str]:
        self._pending.count_bytes()
        found = asdict(self._stats)
        return {
            name: found[name] for name in found if name not in ("path", "step", "error", "commit_s", "bytes_by_rank")
        }

    # --- checks

    def _check_new(self, name: str) -> None:
        self._refuse_closed()
        self._files.check_new(name)

    def _refuse_closed(self) -> None:
        if self._closed:
            raise ConfigError(f"{self._directory.final_path} was published or aborted already")
