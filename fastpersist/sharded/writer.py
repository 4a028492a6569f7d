"""The StorageWriter of torch.distributed.checkpoint that writes our files; what `dcp.save` calls, in which order.

DCP makes the ranks agree; who writes which tensors is the planner's business (`planning`), what is in a part file
`writing`'s.
"""

from __future__ import annotations

import os
import pickle
import threading
import uuid
import weakref
from dataclasses import replace
from typing import Any, Literal

import torch.distributed as dist
from torch.distributed.checkpoint import filesystem as dcp_filesystem
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from fastpersist.arena import Arena
from fastpersist.capture import watch_steps
from fastpersist.directory_save import DirectorySave
from fastpersist.errors import ConfigError, UnsupportedError
from fastpersist.owners import Owners
from fastpersist.pacing import Spread
from fastpersist.pipeline import require_engine
from fastpersist.sharded.capturing import ShardedCapture
from fastpersist.sharded.metadata import METADATA_NAME
from fastpersist.sharded.storage_path import StoragePath
from fastpersist.sharded.writing import Part, WrittenPart, write_part
from fastpersist.untraced import untraced

__all__ = ["FastPersistWriter"]

_COMES_S = 60.0
"""After so long a thread that has not begun to write what was staged will not come."""


class FastPersistWriter(StoragePath, StorageWriter):
    """Writes a DCP checkpoint as a directory that appears when all ranks are done, durable, or not at all.

    Args:
        path: The directory; or `checkpoint_id=` of dcp.save says it.
        overwrite: Replace a checkpoint of that name, ours or DCP's own, as a whole. Without it, the name is free.
        engine: "auto", or an engine's name, which then never falls back.
        durable: Survive power loss once dcp.save has returned.
        optimizer: For dcp.async_save: whose tensors are in the state, as in `fastpersist.save_async`. They are written
            from where they are while forward and backward run, and its next step waits for what is not written by then.
            Without it, dcp.async_save copies the whole state before it returns.
        constant: For dcp.async_save: what never changes, as in `fastpersist.save_async`.
        gate: "optimizer" or "manual", as in `fastpersist.save_async`; with "manual" you call `wait_captured`.
        max_host_bytes: Host memory for copied state; None: the bytes of the state, but at most half of what is there.

    Raises:
        ConfigError: Unknown engine or gate, or something that is no optimizer.

    All ranks need to see the directory. A save that fails leaves what had the name as it was; what it has written is
    removed by its first rank with this writer, at its next save at the latest.

    dcp.async_save plans and writes on a thread of torch's, with collectives: give it a process_group of its own. It
    takes this writer for a stager, too; with AsyncCheckpointerType.PROCESS pass async_stager=DefaultStager().
    Thread safety: one save at a time; the next one waits for an async_save before it.
    """

    _synchronize_after_execute = True

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
        super().__init__(path)
        require_engine(engine)
        self._owners = Owners(optimizer, constant, gate)
        if self._owners.optimizers():
            watch_steps()
        self._arena = Arena(max_host_bytes)
        self._staged: _Staged | None = None
        self._overwrite = overwrite
        self._engine = engine
        self._durable = durable
        self._save_id = str(uuid.uuid4())
        self._directory: DirectorySave | None = None  # on the first rank, while a save is under way

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another save; called by dcp.save."""
        self._take_staged()
        self._give_up()
        if checkpoint_id is not None:
            self._path = os.fspath(checkpoint_id)
        self._save_id = str(uuid.uuid4())

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Begin a save on this rank; called by dcp.save."""
        alone = not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1
        if not kwargs.get("use_collectives", True) and not alone:
            raise UnsupportedError(
                "FastPersistWriter publishes what all ranks have written as one, so they have to agree: "
                "leave use_collectives=True, or let one process save with no_dist=True"
            )
        self._take_staged()
        self._give_up()

    def storage_meta(self) -> StorageMeta:
        """Return what DCP notes of a save; what it calls first."""
        self._take_staged()
        return StorageMeta(checkpoint_id=self._path, save_id=self._save_id)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan; called by dcp.save on each rank."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Make the directory, and tell each rank where its part goes; called by dcp.save on the first rank."""
        directory_path = self._known_path("dcp.save")
        overwrite: Any = self._overwrite
        if overwrite and os.path.exists(os.path.join(directory_path, METADATA_NAME)):
            overwrite = "foreign"  # DCP's own checkpoints have no manifest
        self._directory = DirectorySave(directory_path, overwrite=overwrite, engine=self._engine, make_parents=True)
        parts = [Part(rank, self._directory.path, os.path.abspath(directory_path)) for rank in range(len(plans))]
        return [replace(plan, storage_data=part) for plan, part in zip(plans, parts, strict=True)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's part, and sync it; called by dcp.save on each rank."""
        try:
            results = self._write(plan, planner)
        except BaseException:
            self._give_up()
            raise
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def _write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        part = plan.storage_data
        if not isinstance(part, Part) or (self._directory is not None and self._directory.path != part.directory):
            raise ConfigError(
                "this plan is of an earlier save: with enable_plan_caching=True, pass a FastPersistSavePlanner"
            )
        if self._staged is None:
            return self._write_items(part, plan, planner, None)
        try:
            capture = self._staged.sharded
            capture.settle(plan.items, planner)
            results = self._write_items(part, plan, planner, capture)
            capture.capture.check()
        finally:
            self._staged.release()
        return results

    def _write_items(
        self, part: Part, plan: SavePlan, planner: SavePlanner, capture: ShardedCapture | None
    ) -> list[WriteResult]:
        if not plan.items:
            return []
        results, written = write_part(
            part, plan.items, planner, engine=self._engine, durable=self._durable, capture=capture
        )
        # One more result, for `finish`: DCP takes all to the first rank.
        return [*results, replace(results[0], storage_data=written)]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Add DCP's metadata and make the directory visible and durable; called by dcp.save on the first rank."""
        directory, self._directory = self._directory, None
        if directory is None:
            raise ConfigError("finish() was called on a writer that has begun no save")
        with directory:
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
            metadata.storage_meta = self.storage_meta()
            if hasattr(metadata, "version"):  # not before torch 2.9
                metadata.version = dcp_filesystem.CURRENT_DCP_VERSION
            directory.add_bytes(METADATA_NAME, pickle.dumps(metadata))
            directory.publish(durable=self._durable).result()

    # --- torch's AsyncStager, which dcp.async_save takes a storage writer for

    @property
    def should_synchronize_after_execute(self) -> bool:
        """Have dcp.async_save call synchronize_staging before it returns."""
        return self._synchronize_after_execute

    @untraced
    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Capture a state, of which dcp.async_save then plans and writes what this returns; called by dcp.async_save.

        Args:
            state_dict: Of this rank.

        Returns:
            The same tensors, with copies of everything else.
        """
        if self._staged is not None:
            self._staged.wait()
        staged = _Staged(ShardedCapture(state_dict, self._owners, self._arena))
        try:
            staged.copy(wait=False)
        except BaseException:
            staged.release()
            raise
        spread = Spread()
        spread.expect_step(self._owners.optimizers(), manual=self._owners.gate == "manual")
        spread.add_file(staged.sharded.snapshot, staged.sharded.size_bytes)
        spread.begin()
        self._staged = staged
        state = _StagedState(staged.sharded.state)
        weakref.finalize(state, staged.end_unless_begun)
        return state

    def synchronize_staging(self) -> None:
        """Wait for what found no room while it was staged: it is written first; called by dcp.async_save."""
        if self._staged is not None:
            self._staged.is_async = True
            self._staged.copy(wait=True)

    def wait_captured(self, timeout: float | None = None) -> None:
        """Return when the state of the last dcp.async_save may be changed; with gate="manual", call it before that.

        Args:
            timeout: Seconds.

        Raises:
            TimeoutError: It may not be changed yet.
        """
        if self._staged is not None:
            self._staged.sharded.capture.wait_captured(timeout)

    def close(self) -> None:
        """Wait for the last dcp.async_save to end."""
        if self._staged is not None:
            self._staged.wait()

    def __getstate__(self) -> dict[str, Any]:
        """Be as good as new in another process."""
        return {**self.__dict__, "_directory": None, "_staged": None, "_arena": None, "_owners": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Be made of what __getstate__ gave."""
        self.__dict__.update(state, _arena=Arena(), _owners=Owners())

    def _take_staged(self) -> None:
        """A save begins, or goes on: of what was staged for it, or of what dcp.save was given."""
        if self._staged is not None and not self._staged.is_for_this_thread():
            self._staged.wait()  # it is of an earlier save
            self._staged = None

    def _give_up(self) -> None:
        directory, self._directory = self._directory, None
        if directory is not None:
            directory.abort()


class _StagedState(dict[str, Any]):
    """What `FastPersistWriter.stage` returns: live tensors, which are captured in this process only."""

    def __reduce__(self) -> Any:
        """Refuse to be sent to another process."""
        raise UnsupportedError(
            "FastPersistWriter captures the state in this process, and AsyncCheckpointerType.PROCESS writes it in "
            "another: leave that out, for writing takes no time from Python, or pass async_stager=DefaultStager()"
        )


class _Staged:
    """A state that dcp.async_save has staged, until torch's thread is through with it, or has failed."""

    def __init__(self, sharded: ShardedCapture) -> None:
        self.sharded = sharded
        self._over = threading.Event()
        self._staged_by = threading.current_thread()
        self.is_async = False  # a thread of torch's comes, or has come
        self._writer: threading.Thread | None = None

    def copy(self, *, wait: bool) -> None:
        """Copy what may change as soon as async_save has returned; then steps wait for the rest."""
        self.sharded.capture.copy_volatile(wait=wait)
        if not wait:
            self.sharded.capture.hold()

    def is_for_this_thread(self) -> bool:
        """Tell whether this thread writes it: the first one that asks, torch's.

        However the save ends, that thread ends with it, and then no step must wait any more: what fails in DCP is told
        to nobody but the future.
        """
        if self._over.is_set():
            return False
        this = threading.current_thread()
        if self._writer is None:
            if self.is_async and this is self._staged_by:
                return False  # it is on to the next save, and torch's thread has not begun yet
            self._writer = this
            if this is not self._staged_by:
                threading.Thread(target=self._end_with, args=(this,), name="fastpersist-dcp", daemon=True).start()
        return self._writer is this

    def _end_with(self, thread: threading.Thread) -> None:
        thread.join()
        self._end()

    def _end(self) -> None:
        self.sharded.capture.release()
        self._over.set()

    def end_unless_begun(self) -> None:
        """Nobody has the state any more: if nobody writes it either, nobody will."""
        if self._writer is None:
            self._end()

    def release(self) -> None:
        """This rank has written it, or never will; its save may still be under way."""
        self.sharded.capture.release()
        if self._writer in (None, self._staged_by):
            self._over.set()

    def wait(self) -> None:
        """Return when its save has ended."""
        if self._writer is self._staged_by:  # no async_save, but its parts: one after the other
            self._end()
        self.sharded.capture.hurry()
        while not self._over.wait(_COMES_S):
            if self._writer is None:  # it never came
                self._end()
