"""Save sharded state as files of a directory while training goes on: a `FileProducer` of `DirectorySave`.

Each rank captures the tensors that it holds. On the writing thread the ranks plan which rank writes what
(`plan_agreement`), and each writes its part (`part_writer`). The coordinator adds DCP's `.metadata`, so that any reader
of DCP can load it.
"""

from __future__ import annotations

import errno
import os
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import SavePlanner

from fastpersist.commit.filesystem import filesystem, ignoring
from fastpersist.dcp.capture import ShardedCapture
from fastpersist.dcp.metadata import METADATA_NAME
from fastpersist.dcp.part_writer import Part, WrittenPart, part_name, write_part
from fastpersist.dcp.plan_agreement import Done, Planned, SharedPlans, gather_done, tell_done
from fastpersist.dcp.plan_comparison import GetSums, sample
from fastpersist.distributed.group_save import PeerDirectorySave
from fastpersist.distributed.messages import preferring_failure_of_others
from fastpersist.errors import ConfigError, InternalError
from fastpersist.formats.manifest import FileEntry, check_file_name
from fastpersist.saving.directory_files import WriteSite
from fastpersist.saving.directory_save import DirectorySave
from fastpersist.saving.ownership import Owners
from fastpersist.saving.write_file import CapturedFile
from fastpersist.transfer.arena import Arena
from fastpersist.transfer.garbage import no_garbage_collection
from fastpersist.transfer.progress import Poll

__all__ = ["ShardedFiles", "required_mapping", "save_sharded"]


class ShardedFiles:
    """This rank's part of a sharded state, as a producer of files of a save.

    Args:
        state: Nested dicts and lists of tensors (plain, DTensor, ShardedTensor) and objects.
        owners: The owners of stable storages.
        plans: The plans, kept from save to save.
        name: The directory below that of the save; "" for the save's own directory.
    """

    def __init__(self, state: Mapping[str, Any], owners: Owners, plans: SharedPlans, name: str = "") -> None:
        self.owners = owners
        self._state: Mapping[str, Any] | None = state
        self._plans = plans
        self._name = name
        self._captured: ShardedCapture | None = None
        self._get_sums: GetSums | None = None

    def hold(self, arena: Arena, *, paranoid: bool, on_gate: Callable[[float], None]) -> CapturedFile:
        """Look at what is to be written; called by the save.

        Raises:
            UnsupportedError, RuntimeError, …: A tensor or object that cannot be copied.
        """
        ownership = self.owners.look()
        captured = ShardedCapture(
            self._state, self.owners, arena, paranoid=paranoid, on_gate=on_gate, look=lambda: ownership
        )
        self._get_sums = sample(captured.state, ownership)
        self._state = None
        self._captured = captured
        return CapturedFile(captured.capture, captured.snapshot, captured.size_bytes)

    def write(self, site: WriteSite) -> list[FileEntry]:
        """Plan and write with the other ranks; called by the save, on its writing thread.

        Returns:
            On the coordinator, the files of all ranks; on a follower, its own files.

        Raises:
            ConfigError, CoordinationError, PeerError: As `SharedPlans.agree`.
            StorageError, UnsupportedError, TornStateError: As `write_part`, or the state changed.
        """
        captured, self._captured = self._captured, None
        if captured is None:
            raise InternalError("what a rank is to write was not captured")
        directory = None if site.directory is None else self._made_directory(site.directory)
        label = f"{site.label}/{self._name}" if self._name else site.label
        with self._plans.taken() as plans:
            planned = plans.agree(captured.state, site.session, label, directory, self._get_sums)
            return self._write(planned, plans.planner, captured, site)

    def _made_directory(self, path: str) -> str:
        """Make the directories of the name, before the followers are told of them."""
        for part in filter(None, self._name.split("/")):
            path = os.path.join(path, part)
            with ignoring(errno.EEXIST):
                filesystem().make_directory(path)
        return path

    def _write(
        self, planned: Planned, planner: SavePlanner, captured: ShardedCapture, site: WriteSite
    ) -> list[FileEntry]:
        session = site.session
        rank = 0 if session is None else session.rank
        if rank and site.directory is not None:  # this rank does not see the coordinator's directory
            planned = replace(planned, directory=os.path.join(site.directory, self._name))
        with no_garbage_collection():
            captured.settle(planned.items, planner)
        part = Part(rank, planned.directory, os.path.join(site.final_path, self._name))
        with preferring_failure_of_others(session):
            done = self._write_part(part, planned, planner, captured, site)
        if rank and session is not None:
            tell_done(session, done, planned)
            return [FileEntry(*done.part)] if done.part else []
        return self._complete(planned, gather_done(session, done, planned), site)

    def _write_part(
        self, part: Part, planned: Planned, planner: SavePlanner, captured: ShardedCapture, site: WriteSite
    ) -> Done:
        items = planned.items
        written: WrittenPart | None = None
        places: list[tuple[int, int]] = []
        poll = _checking(site)
        if items:
            site.made(os.path.join(part.directory, part_name(part.rank)))
            results, written = write_part(
                part,
                items,
                planner,
                engine=site.engine,
                durable=True,
                capture=captured,
                poll=poll,
            )
            places = [(result.storage_data.offset, result.storage_data.length) for result in results]
            site.stats.engine = written.engine
        if part.rank:
            captured.capture.check()  # before the coordinator is told; later files may still be uncaptured
        entry = None if written is None else (written.name, written.size_bytes, written.crc32)
        return Done.of(entry, places, planned.tensor_count)

    @no_garbage_collection()
    def _complete(self, planned: Planned, done: list[Done], site: WriteSite) -> list[FileEntry]:
        """Write DCP's metadata; return the files of all ranks."""
        parts = [of_rank.part for of_rank in done]
        prefix = f"{self._name}/" if self._name else ""
        entries = [FileEntry(prefix + part[0], part[1], part[2]) for part in parts if part is not None]
        if len(done) > 1:
            site.stats.add_shares([0 if part is None else part[1] for part in parts])
        if planned.whole is None or site.write_small is None:
            raise InternalError("the coordinator has no metadata of what it has planned")
        meta = StorageMeta(checkpoint_id=os.path.join(site.final_path, self._name), save_id=str(uuid.uuid4()))
        planned.whole.kept = ""
        data = planned.whole.metadata.pickle(
            [of_rank.places for of_rank in done], [of_rank.object_places for of_rank in done], meta
        )
        planned.whole.kept = planned.save
        return [*entries, site.write_small(prefix + METADATA_NAME, data)]


def _checking(site: WriteSite) -> Poll:
    """Stop writing when the save is cancelled, or another rank has failed."""

    def check(done_bytes: int) -> None:
        if site.session is not None:
            site.session.check()
        site.poll(done_bytes)

    return check


def save_sharded(
    files: DirectorySave | PeerDirectorySave,
    state: object,
    name: str = "",
    optimizer: object = None,
    *,
    constant: object = (),
    gate: str = "optimizer",
    owners: Owners | None = None,
    plans: SharedPlans | None = None,
) -> None:
    """Save sharded state among the files of a directory; returns when what may change at once is copied.

    Of a directory that several ranks save (`directory_save_together`) all of them call this, in the same order, each
    with the shards that it holds. What is written is a DCP checkpoint: a part file of each rank, and `.metadata`.

    Args:
        files: A DirectorySave, or what `directory_save_together` returns.
        state: Nested dicts and lists of tensors (plain, DTensor, ShardedTensor) and objects.
        name: A directory below that of `files`; "" for that directory itself.
        optimizer: The optimizer whose tensors are in the state, as in `save_async`.
        constant: What never changes, as in `save_async`.
        gate: "optimizer" or "manual", as in `save_async`.
        owners: The owners of stable storages, in place of optimizer, constant and gate.
        plans: Plans that are kept from one save to the next, so that unchanged state is not planned again.

    Raises:
        ConfigError: The state is no dict, or the name no relative path. All else `publish().result()` raises.
    """
    if name:
        check_file_name(name)
    owners = owners or Owners(optimizer, constant, gate)
    files.save_produced(ShardedFiles(required_mapping(state), owners, plans or SharedPlans(), name))


def required_mapping(state: object) -> Mapping[str, Any]:
    """Return a state that is a dict; raise ConfigError of any other."""
    if not isinstance(state, Mapping):
        raise ConfigError(f"sharded state is a dict, not a {type(state).__name__}")
    return state
