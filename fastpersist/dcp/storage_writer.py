"""The StorageWriter of torch.distributed.checkpoint that writes our files; `dcp.save` calls it.

DCP makes the ranks agree, `save_planner` decides which rank writes which tensors, `part_writer` writes a part file.
"""

from __future__ import annotations

import os
import pickle
import re
import uuid
from dataclasses import replace
from typing import Literal

from torch.distributed.checkpoint import filesystem as dcp_filesystem
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult

from fastpersist.commit.directory_commit import Overwrite
from fastpersist.commit.filesystem import storage_errors
from fastpersist.dcp.async_stager import CapturingWriter
from fastpersist.dcp.capture import ShardedCapture
from fastpersist.dcp.checkpoint_directory import files_of_ours, find_others
from fastpersist.dcp.metadata import METADATA_NAME
from fastpersist.dcp.part_writer import Part, WrittenPart, write_part
from fastpersist.errors import ConfigError
from fastpersist.formats.manifest import MANIFEST_NAME, step_of
from fastpersist.saving.directory_save import DirectorySave
from fastpersist.saving.ownership import Owners

__all__ = ["FastPersistWriter"]


_FILE_OF_DCP = re.compile(r"__\d+_\d+\.distcp|(?:__\d+)?\.metadata(?:\.tmp)?")


class FastPersistWriter(CapturingWriter, StorageWriter):
    """Writes a DCP checkpoint as a directory that appears when all ranks are done, durable, or not at all.

    Args:
        path: The directory; None to take `checkpoint_id=` of dcp.save.
        overwrite: Replace an existing checkpoint, ours or DCP's own; without it, one is an error. Other files in the
            directory stay, but the save is refused if they look like another checkpoint.
        engine: "auto", or an engine's name, which then never falls back.
        durable: Survive power loss once dcp.save has returned.
        optimizer: For dcp.async_save: the owner of the tensors, as in `fastpersist.save_async`. They are written
            from where they are while forward and backward run, and its next step waits for what is not written by then.
            Without it, dcp.async_save copies the whole state before it returns.
        constant: For dcp.async_save: what never changes, as in `fastpersist.save_async`.
        gate: "optimizer" or "manual", as in `fastpersist.save_async`; with "manual" you call `wait_captured`.
        max_host_bytes: Host memory for copied state; None: the bytes of the state, at most half of what is free, shared
            out among the ranks of the machine.

    Attributes:
        save_id: The id of the last save, as in torch's writer.

    Raises:
        ConfigError: Unknown engine or gate, or something that is no optimizer.

    All ranks need to see the directory. If a save fails, the existing directory stays as it was. The coordinator's
    writer removes what such a save has written, at its next save at the latest.

    dcp.async_save plans and writes on a thread of torch's, with collectives: give it a process_group of its own. This
    writer is its stager, too; with AsyncCheckpointerType.PROCESS pass async_stager=DefaultStager().
    Thread safety: one save at a time; a save waits for an async_save before it.
    """

    _why_collectives = "publishes what all ranks have written as one checkpoint"

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        overwrite: bool = True,
        engine: str = "auto",
        durable: bool = True,
        optimizer: object = None,
        constant: object = (),
        gate: Literal["optimizer", "manual"] = "optimizer",
        max_host_bytes: int | None = None,
    ) -> None:
        owners = Owners(optimizer, constant, gate)
        super().__init__(path, owners, max_host_bytes, overwrite=overwrite, engine=engine, durable=durable)
        self.save_id = str(uuid.uuid4())

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another save; called by dcp.save."""
        super().reset(checkpoint_id)
        self.save_id = str(uuid.uuid4())

    def storage_meta(self) -> StorageMeta:
        """Return what DCP notes of a save; the first method that dcp.save calls."""
        self._take_staged()
        return self._known_to_planner(self._noted_meta())

    def _noted_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=self._path, save_id=self.save_id)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan; called by dcp.save on each rank."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Make the directory, and tell each rank where its part goes; called by dcp.save on the coordinator.

        Raises:
            ConfigError: There is a checkpoint, and overwrite is False; or there are files of another one.
            UnsupportedError: The directory holds what cannot stay in it.
            StorageError: The directory cannot be looked at.
        """
        final_path = self._final_path()
        overwrite = self._may_replace(final_path)
        self._directory = DirectorySave(final_path, overwrite=overwrite, engine=self._engine, make_parents=True)
        parts = [Part(rank, self._directory.path, final_path) for rank in range(len(plans))]
        return [replace(plan, storage_data=part) for plan, part in zip(plans, parts, strict=True)]

    def _may_replace(self, path: str) -> Overwrite:
        """Look at what is in the directory.

        Raises:
            ConfigError, StorageError, UnsupportedError: As `prepare_global_plan`.
        """
        if os.path.islink(path):
            return self._overwrite
        with storage_errors("listing", path):
            try:
                names = os.listdir(path)
            except (FileNotFoundError, NotADirectoryError):
                return self._overwrite
        exists = METADATA_NAME in names or MANIFEST_NAME in names
        if exists and not self._overwrite:
            raise ConfigError(
                f"Checkpoint already exists: {path}, and overwrite is False"
            )  # the first words are torch's
        others = find_others(path, _FILE_OF_DCP.fullmatch)
        files_of_others = [name for name in names if step_of(name) is not None or name in ("LATEST", ".lock")]
        files_of_others += [name for name in others.files if os.path.basename(name) in (METADATA_NAME, MANIFEST_NAME)]
        if MANIFEST_NAME in names:
            files_of_others += [name for name in files_of_ours(path) if not _FILE_OF_DCP.fullmatch(name)]
        if not exists:  # another save is writing them, or has not finished
            files_of_others += [name for name in names if _FILE_OF_DCP.fullmatch(name)]
        if files_of_others:
            raise ConfigError(
                f"{min(files_of_others)} in {path} looks like a part of another checkpoint: save into a directory of "
                "its own, or move it away"
            )
        return True if MANIFEST_NAME in names or not names else "foreign"

    def _write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        part = self._part_in(plan, Part)
        with self._captured(plan.items, planner) as capture:
            return self._write_items(part, plan, planner, capture)

    def _write_items(
        self, part: Part, plan: SavePlan, planner: SavePlanner, capture: ShardedCapture | None
    ) -> list[WriteResult]:
        if not plan.items:
            return []
        results, written = write_part(
            part, plan.items, planner, engine=self._engine, durable=self._durable, capture=capture
        )
        # One more result, for `finish`: DCP gathers all results on the coordinator.
        return [*results, replace(results[0], storage_data=written)]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Add DCP's metadata and make the directory visible and durable; called by dcp.save on the coordinator."""
        with self._to_finish() as directory:
            found = [result for of_rank in results for result in of_rank]
            for result in found:
                if isinstance(result.storage_data, WrittenPart):
                    written = result.storage_data
                    directory.add_written(written.name, written.size_bytes, written.crc32)
            metadata.storage_data = {
                result.index: result.storage_data
                for result in found
                if not isinstance(result.storage_data, WrittenPart)
            }
            metadata.storage_meta = self._noted_meta()
            if hasattr(metadata, "version"):  # not before torch 2.9
                metadata.version = dcp_filesystem.CURRENT_DCP_VERSION
            directory.add_bytes(METADATA_NAME, pickle.dumps(metadata))
            self._keep_others(directory, _FILE_OF_DCP.fullmatch)
            directory.publish(durable=self._durable).result()
