"""Many files, published at once as one directory with a manifest, while training goes on.

For trainers that own their layout: `save` and `add_bytes` put files into a hidden pending directory, other code may
put its own there too, and `publish` makes all of it visible in one step, or nothing. A `Checkpointer` is this with
steps, retention and resume on top. The protocol is `directory_commit`'s, the capture of tensors `capture`'s.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from fastpersist import _native
from fastpersist.arguments import local_path, require_bools
from fastpersist.commit.directory_commit import Overwrite, PendingDirectory, files_in
from fastpersist.commit.filesystem import (
    close_quietly,
    filesystem,
    hint_at_make_parents,
    make_directories,
    storage_errors,
)
from fastpersist.commit.step_listing import candidate_steps
from fastpersist.distributed.file_producer import Guest, Site
from fastpersist.distributed.node_local.detection import Split, Stores, find_stores, manifest_now
from fastpersist.distributed.rank_files import confirmed, refusing_second
from fastpersist.distributed.replica_check import replicas_in
from fastpersist.distributed.shared_file import (
    FirstShare,
    Together,
    checking,
    decoded,
    encoded,
    preferring_failure_of_others,
    telling,
)
from fastpersist.errors import ConfigError, CoordinationError, SkippedError, StorageError
from fastpersist.formats.manifest import FileEntry, check_file_name, checked_step, encode_manifest
from fastpersist.formats.split_manifest import PARTS_NAME, part_name
from fastpersist.saving.capture import Capture
from fastpersist.saving.containers import Container, container_for
from fastpersist.saving.ownership import Owners, Ownership, step_count
from fastpersist.saving.pacing import Spread
from fastpersist.saving.pending_save import PendingSave, SaveStats
from fastpersist.saving.work_queue import Lane
from fastpersist.saving.write_file import WrittenFile, capture_file, write_container, write_file
from fastpersist.transfer.arena import Arena, ArenaOfSave
from fastpersist.transfer.engine_selection import require_engine
from fastpersist.transfer.pipeline import Extents, Poll, read_extents
from fastpersist.transfer.torch_boundary import untraced

__all__ = ["DirectorySave"]

_log = logging.getLogger("fastpersist")

_OPEN_COUNT_MAX = 64
"""So many files are written before the first is synced: more would need more descriptors than a process may have."""

_arena = Arena()  # for those that bring none of their own
_apart = Lane("fastpersist-after")


class DirectorySave:
    """A directory that is being put together. One thread uses it; everything is written on another.

    Args:
        path: Its final name.
        overwrite: Replace a checkpoint of that name. Without it, an existing one is an error, now and at publish().
            "foreign": also a directory with files and no MANIFEST.json, such as another program's checkpoint.
        engine: "auto", or an engine's name, which then never falls back.
        make_parents: Make the directories above that are missing, durably. Without it, the parent exists.
        pending_in: Where the pending directory is made, in the same file system, if not beside the final name: for
            parents whose readers take hidden names for checkpoints. What dead saves have left there is removed.

    Raises:
        ConfigError: The path exists and overwrite is False; unknown engine, or value of overwrite.
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
        _together: Together | None = None,
    ) -> None:
        self._closed = True  # until there is something to close
        require_engine(engine)
        if overwrite not in (False, True, "foreign"):
            raise ConfigError(f"overwrite is False, True or 'foreign', not {overwrite!r}")
        self._overwrite = overwrite
        self._engine = engine
        self._arena = ArenaOfSave(_arena)
        self._lane = _lane or Lane("fastpersist-save")
        self._paranoid = _paranoid
        self._together = _together
        self._split: Split | None = None  # among several file systems
        self._entries: dict[str, FileEntry | None] = {}
        self._written_elsewhere: list[str] = []
        self._spread = Spread()
        self._failed = False
        self._unsynced: deque[tuple[int, str]] = deque()  # written; after an error the directory closes them
        self._looked: tuple[int, tuple[object, ...], Ownership] | None = None
        self.captures: list[Capture] = []
        require_bools(make_parents=make_parents)
        final_path = os.path.abspath(local_path(path))
        if make_parents:
            make_directories(os.path.dirname(final_path))
        hidden_in = None if pending_in is None else local_path(pending_in, "pending_in")
        with hint_at_make_parents(final_path):
            self._directory = PendingDirectory.create(final_path, overwrite=overwrite, pending_in=hidden_in)
        self._process = os.getpid()
        self._closed = False
        self._stats = _stats or SaveStats(path=self._directory.final_path)
        self._pending = PendingSave(self._directory.final_path, self._stats)
        if _together is not None and (stores := _together.stores) is not None:
            self._pending.when_failed(lambda _: stores.forget())  # what is given first is done last, so after the abort
        abort = self._directory.abort  # without a reference to this object: it may be forgotten
        self._pending.when_failed(lambda _: abort())
        if _together is not None:
            self._pending.around_parts(_together.session.working)
            self._pending.when_failed(_together.session.fail)
            if _together.stores is None or _together.stores.are_one():
                self._offer(_together)

    @property
    def path(self) -> str:
        """The pending directory; what others put there is published with the rest."""
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
        """Save an object to a file of the directory; returns when what may change at once is copied.

        Args:
            obj: Whatever torch.save takes; for a name that ends in `.safetensors`, a dict of str to tensors.
            name: Relative to the directory, with "/" between its parts.
            optimizer: Whose tensors are in `obj`, as in `save_async`.
            constant: What never changes, as in `save_async`.
            gate: "optimizer" or "manual", as in `save_async`.
            format: "torch", "safetensors", or "auto", as in `save`.
            metadata: Text to text, for safetensors only.
            owners: Optimizer, constant and gate, for those who have them already.
            own: With several ranks: the object is this rank's own, and no other has a part in writing it. Each rank
                writes such files while the others write theirs, under names that no other rank has.

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
        share = None
        with telling(self._together):
            container = container_for(obj, final_path, checksum=True, file_format=format, metadata=metadata)
            if self._together is not None and not own:
                found = self._look(owners, given) if container.sources else None
                share = FirstShare(container, replicas_in(container, found), self._together, name)
            capture, snapshot, _ = capture_file(
                share or container,
                owners,
                arena=self._arena,
                spread=self._spread,
                on_gate=self._stats.add_stall,
                look=lambda: self._look(owners, given),
                paranoid=self._paranoid,
            )
        self._entries[name] = None
        self.captures.append(capture)
        self._stats.plan_s += time.monotonic() - started_s
        self._submit_file(name, container, share, capture, snapshot)
        self._stats.stall_s += time.monotonic() - started_s

    def save_guest(self, guest: Guest) -> None:
        """Have somebody else write files of the directory, on the writing thread; returns as `save` does.

        Raises:
            FastPersistError, …: What `guest.hold` raises.
        """
        started_s = time.monotonic()
        self._refuse_closed()
        if self._failed:
            return
        owners = guest.owners
        self._spread.expect_step(owners.optimizers(), manual=owners.gate == "manual")
        with telling(self._together):
            held = guest.hold(self._arena, paranoid=self._paranoid, on_gate=self._stats.add_stall)
        self._spread.add_file(held.snapshot, held.size_bytes)
        self.captures.append(held.capture)
        self._stats.plan_s += time.monotonic() - started_s
        self._pending.begin(held.capture, lambda: self._submit(lambda: self._write_guest(guest)))
        self._stats.stall_s += time.monotonic() - started_s

    def add_bytes(self, name: str, data: bytes) -> None:
        """Add a small file with these bytes (configuration, tokenizer …).

        Raises:
            ConfigError: The name is no relative file name or is taken.
        """
        self._check_new(name)
        self._entries[name] = None
        kept = bytes(data)
        self._submit(lambda: self._write_bytes(name, kept))

    def add_written(self, name: str, size_bytes: int, crc32: int | None) -> None:
        """Take a file that somebody else (another rank) has written and synced below `path`; it is not read again.

        Without this, such files are published, too, and are read for their CRC.

        Args:
            name: Relative to `path`.
            size_bytes: Its length.
            crc32: Of the whole file; None if it is not known, and then `verify` cannot check the file.

        Raises:
            ConfigError: The name is no relative file name or is taken. If the file is missing or has another length,
                `publish` fails with a StorageError.
        """
        self._check_new(name)
        self._note(name, size_bytes, crc32)
        self._written_elsewhere.append(name)

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
            step: For the manifest.
            metrics: Names to numbers, for the manifest.
            after: Done when the directory is visible and durable, before the save counts as done.
            apart: Do `after` on another thread than the one that writes, so that the next save is written meanwhile.

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
        """Have everything removed, behind what is being written; False if it was published or given up before."""
        if self._closed:
            return False
        self._closed = True
        self._looked = None
        skipped = SkippedError(f"{self._directory.final_path} was given up before it was published")
        if self._together is not None:
            self._together.session.fail(why or skipped)  # first, as the thread that writes may wait for them
        if not self._failed:
            self._pending.cancel(skipped)
        self._lane.submit(lambda: self._pending.run(lambda: None))
        return True

    def __enter__(self) -> DirectorySave:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self._give_up(error):
            self._pending.join()

    def __del__(self) -> None:
        # Perhaps on the writing thread itself, which must not wait for what it has to do. A forked child has no part.
        if not getattr(self, "_closed", True) and self._process == os.getpid() and self._give_up():
            _log.warning("%s was never published and is removed", self._directory.final_path)

    def _look(self, owners: Owners, given: tuple[object, ...]) -> Ownership:
        """Find whose which storages are; for further files with the same optimizer only if a step came between."""
        if self._looked is not None:
            count, before, found = self._looked
            if count == step_count() and all(one is other for one, other in zip(given, before, strict=True)):
                return found
        found = owners.look()
        self._looked = step_count(), given, found
        return found

    # --- on the writing thread

    def _submit_file(
        self, name: str, container: Container, share: FirstShare | None, capture: Capture, snapshot: _native.Snapshot
    ) -> None:
        def write() -> None:
            begun_s = time.monotonic()
            final_path = os.path.join(self._directory.final_path, name)
            own_name, size_bytes = name, container.size_bytes
            if share is not None and self._find_stores(share) is not None:
                del self._entries[name]
                own_name, size_bytes = part_name(name, 0), share.size_bytes
            fd = self._create(own_name, own=share is None)
            written = write_file(fd, final_path, size_bytes, lambda: self._write(name, container, share, fd, snapshot))
            self._stats.write_s += time.monotonic() - begun_s
            self._sync_later(fd, final_path)
            self._stats.engine = written.engine
            self._note(own_name, size_bytes, written.crc32)

        self._pending.begin(capture, lambda: self._submit(write))

    def _write(
        self, name: str, container: Container, share: FirstShare | None, fd: int, snapshot: _native.Snapshot
    ) -> WrittenFile:
        self._pending.refuse_torn()
        final_path = os.path.join(self._directory.final_path, name)
        engine = self._engine
        poll: Poll = self._pending.poll
        if share is None:
            if self._together is not None:
                poll = checking(poll, self._together.session)
            return write_container(container, fd, final_path, engine=engine, poll=poll, snapshot=snapshot)
        pending_path = os.path.join(self._directory.path, name)
        written = share.write(fd, final_path, engine=engine, pending_path=pending_path, poll=poll, snapshot=snapshot)
        split = self._split
        if split is not None and share.split_shares is not None:
            split.files.append(share.split_shares)
            for rank in share.split_shares.extents:
                if rank and split.is_first(rank):
                    entry = share.split_shares.entry(rank)
                    self._note(entry.name, entry.size_bytes, entry.crc32)
                    self._written_elsewhere.append(entry.name)
        self._stats.add_shares(share.bytes_by_rank())
        return written

    def _find_stores(self, share: FirstShare) -> Split | None:
        """Find out, if it is to be found out, which ranks see this directory."""
        stores = None if self._together is None else self._together.stores
        if stores is not None and not stores.are_one():
            share.meet(lambda say: self._found_stores(stores, say))
        return self._split

    def _found_stores(self, stores: Stores, say: Callable[[dict[str, Any]], list[dict[str, Any]]]) -> Split | None:
        if self._split is None and not stores.are_one():
            self._split = find_stores(say, stores, self._directory.path, overwrite=bool(self._overwrite))
            if self._together is not None:
                self._offer(self._together)
        return self._split

    def _offer(self, together: Together) -> None:
        """Tell the other ranks, as they ask for it, where they write files of their own."""
        split = {} if self._split is None else {"split": self._split.go()}
        together.session.offer(encoded({"path": self._directory.path, **split}))

    def _find_stores_for_guest(self) -> Split | None:
        """Find out before a guest writes, and tell the other ranks where they do."""
        together = self._together
        if together is None or together.stores is None:
            return None

        def hear() -> list[dict[str, Any]]:
            return [decoded(answer, rank) for rank, answer in enumerate(together.session.gather(b"{}"))]

        def say(message: dict[str, Any]) -> list[dict[str, Any]]:
            together.session.answer(encoded(message))
            return hear()

        for rank, said in enumerate(hear()):
            if rank and not said.get("guest"):
                raise CoordinationError(
                    f"the ranks do not save the same in the same way: {together.label} is sharded on rank 0, and "
                    f"{said.get('name')} is not on rank {rank}"
                )
        split = self._found_stores(together.stores, say)
        together.session.answer(encoded({"ready": True, **({} if split is None else {"split": split.go()})}))
        return split

    def _write_guest(self, guest: Guest) -> None:
        begun_s = time.monotonic()
        self._pending.refuse_torn()
        site = Site(
            directory=self._directory.path,
            final_path=self._directory.final_path,
            session=None if self._together is None else self._together.session,
            label=None if self._together is None else self._together.label,
            engine=self._engine,
            poll=self._pending.poll,
            made=lambda _: None,  # what is in the directory goes with it
            stats=self._stats,
        )
        split = self._find_stores_for_guest()
        for entry in guest.write(site):
            if entry.name in self._entries:
                raise ConfigError(f"{entry.name} is in {self._directory.final_path} already")
            if split is None or split.takes(entry):
                self._note(entry.name, entry.size_bytes, entry.crc32)
                self._written_elsewhere.append(entry.name)
        self._stats.write_s += time.monotonic() - begun_s

    def _submit(self, write_file: Callable[[], None]) -> None:
        def write() -> None:
            with preferring_failure_of_others(self._together.session if self._together else None):
                write_file()

        self._lane.submit(lambda: self._pending.run(write, when_it_fails=self._file_failed))

    def _file_failed(self, error: BaseException) -> None:
        """Nobody waits for the capture any more; but others may still put files into the directory, so it stays."""
        if self._closed:
            self._pending.fail(error)
        else:
            self._failed = True
            self._pending.cancel(error)
            if self._together is not None:
                self._together.session.fail(error)  # what they write now is for nothing

    def _write_bytes(self, name: str, data: bytes) -> None:
        final_path = os.path.join(self._directory.final_path, name)
        fd = self._create(name)
        filesystem().write(fd, data, final_path)
        self._sync_later(fd, final_path)
        self._note(name, len(data), _native.crc32(data))

    def _create(self, name: str, *, own: bool = False) -> int:
        if self._together is None:
            return self._directory.create_file(name)
        if own:
            self._together.session.announce()  # the others have such files, too
        else:
            self._together.session.check()  # and answer who has asked, before space is reserved, which may take long
        with refusing_second(name, os.path.join(self._directory.final_path, name)):
            return self._directory.create_file(name)

    def _sync_later(self, fd: int, path: str) -> None:
        """A file is written. A step waits for what is written, not for what is synced, so the next file comes first."""
        self._unsynced.append((fd, path))
        if len(self._unsynced) >= _OPEN_COUNT_MAX:
            self._close_files(durable=True)

    def _close_files(self, *, durable: bool) -> None:
        while self._unsynced:
            fd, path = self._unsynced.popleft()
            if durable:
                started_s = time.monotonic()
                filesystem().sync(fd, path)
                self._stats.sync_s += time.monotonic() - started_s
            self._directory.close_file(fd)

    def _note(self, name: str, size_bytes: int, crc32: int | None) -> None:
        self._entries[name] = FileEntry(name, size_bytes, crc32)
        self._stats.bytes += size_bytes

    def _publish(
        self,
        durable: bool,
        step: int | None,
        metrics: dict[str, float],
        next_commit_number: Callable[[], int] | None,
        after: Callable[[], None] | None,
        after_lane: Lane | None,
    ) -> None:
        if self._split is not None:
            self._split.read_common(self._directory.path)
            self._write_bytes(PARTS_NAME, self._split.record_of(0))
        self._close_files(durable=durable)
        if self._together is not None:
            for rank, entry in confirmed(self._together.session.gather(b"")):
                self._take_own(rank, entry)
        present = list(files_in(self._directory.path))
        for name in present:
            if self._entries.get(name) is None:
                self._adopt(name)
        if missing := sorted(set(self._entries).difference(present)):
            path = self._directory.final_path
            raise StorageError(errno.ENOENT, f"cannot save {path}: {missing[0]} is gone; somebody has deleted it", path)
        for name in self._written_elsewhere:
            self._check_length(name)
        self._pending.check()
        begun_s = time.monotonic()
        number = None if next_commit_number is None else next_commit_number()
        manifest = manifest_now(
            (entry for entry in self._entries.values() if entry is not None),
            step=step,
            metrics=metrics,
            rank_count=None if self._together is None else self._together.session.count,
            stats=self._stats_so_far(),
            commit_number=number,
        )
        if self._together is not None:
            if self._split is not None:
                self._together.session.answer_each(self._split.commits(step, metrics, number, durable=durable))
                self._split.send_common(self._together.session)
                self._together.session.gather(b"")  # all other stores have published
            self._together.session.settle()
        try:
            self._directory.publish(encode_manifest(manifest), durable=durable, overwrite=self._overwrite)
        except BaseException:
            if self._together is not None and self._split is not None:
                self._split.let_others_undo(self._together.session, self._directory.final_path)
            raise
        self._stats.sync_s += self._directory.sync_s
        if self._together is not None:
            self._together.session.answer(self._end_message(metrics))
            self._together.session.finish()
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

    def _end_message(self, metrics: dict[str, float]) -> bytes:
        """Say that it is published; to other stores also what they need to know of those that came before."""
        if self._split is None:
            return b"{}"
        steps = sorted(candidate_steps(os.path.dirname(self._directory.final_path)))
        return json.dumps({"metrics": metrics, "steps": steps}).encode()

    def _take_own(self, rank: int, entry: FileEntry) -> None:
        if self._split is not None and not self._split.is_first(rank):
            self._split.own_entries.setdefault(rank, []).append(entry)
            return
        if entry.name in self._entries:
            path = self._directory.final_path
            raise ConfigError(f"{entry.name} is in {path} already: rank {rank} and another one have saved such a file")
        self._note(entry.name, entry.size_bytes, entry.crc32)
        self._written_elsewhere.append(entry.name)

    def _adopt(self, name: str) -> None:
        """Put a file that somebody else wrote into the manifest, with its CRC; the directory's publish syncs it."""
        path = os.path.join(self._directory.path, name)
        with storage_errors("opening", path):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            size_bytes = filesystem().status(fd, path).st_size
            extents = Extents()
            extents.add_checked(0, size_bytes)
            crcs = read_extents(fd, path, extents).crcs if size_bytes else [0]
        finally:
            close_quietly(fd, path)
        self._note(name, size_bytes, crcs[0])

    def _check_length(self, name: str) -> None:
        path = os.path.join(self._directory.path, name)
        entry = self._entries[name]
        with storage_errors("looking at", path):
            size_bytes = os.stat(path).st_size
        if entry is not None and entry.size_bytes != size_bytes:
            told = f"{name} has {size_bytes} bytes, and its writer wrote {entry.size_bytes}"
            raise StorageError(None, f"cannot save {self._directory.final_path}: {told}", path)

    def _stats_so_far(self) -> dict[str, float | int | str]:
        self._pending.count_bytes()
        found = asdict(self._stats)
        return {
            name: found[name] for name in found if name not in ("path", "step", "error", "commit_s", "bytes_by_rank")
        }

    # --- checks

    def _check_new(self, name: str) -> None:
        self._refuse_closed()
        check_file_name(name)
        if name in self._entries:
            raise ConfigError(f"{name} is in {self._directory.final_path} already")

    def _refuse_closed(self) -> None:
        if self._closed:
            raise ConfigError(f"{self._directory.final_path} was published or aborted already")
