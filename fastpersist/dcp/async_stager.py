"""The base of our storage writers for dcp.async_save: it captures the state, and torch's thread writes it later.

torch asks a storage writer that is an AsyncStager for the state that its thread then plans and writes. Ours returns the
same tensors, captured (`dcp.capture`): stable tensors stay where they are, and the optimizer's next step waits for the
bytes that are not written by then. However a save ends, a step waits no longer than the save's thread lives.

The storage writers decide what is written, and where.
"""

from __future__ import annotations

import os
import threading
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from fastpersist.commit.filesystem import absolute_path
from fastpersist.dcp.capture import ShardedCapture
from fastpersist.dcp.checkpoint_directory import StoragePath, find_others, keep_others
from fastpersist.dcp.part_writer import Part
from fastpersist.dcp.plan_comparison import GetSums, StagedMeta, samples_of_state
from fastpersist.errors import ConfigError, UnsupportedError
from fastpersist.saving.capture import watch_steps
from fastpersist.saving.directory_save import DirectorySave
from fastpersist.saving.ownership import Owners
from fastpersist.saving.pacing import Spread
from fastpersist.transfer.arena import Arena
from fastpersist.transfer.engine_selection import require_engine
from fastpersist.transfer.torch_boundary import untraced

__all__ = ["CapturingWriter"]

_Part = TypeVar("_Part", bound=Part)

_COMES_S = 60.0
"""If torch's thread has not begun to write after this time, it never will."""
_SPREAD_MAX_S = 5.0
"""The longest time over which writes are spread: nothing tells us when code waits for torch's future."""
_CALLER_FIRST_S = 0.1
"""The longest time that torch's thread waits for the thread that started it to return from dcp.async_save."""


class CapturingWriter(StoragePath):
    """A storage writer that captures, as torch's AsyncStager, what dcp.async_save saves.

    Args:
        path: The directory, as in `StoragePath`.
        owners: The owners of tensors in the state.
        max_host_bytes: Host memory for copied state; None: the bytes of the state, at most half of what is free, shared
            out among the ranks of the machine.
        overwrite: Replace a checkpoint that is there.
        engine: "auto", or an engine's name.
        durable: Survive power loss once dcp.save has returned.
        piece_bytes: The most bytes of one source, as in `ShardedCapture`.

    Raises:
        ConfigError: Unknown engine.
    """

    _synchronize_after_execute = True
    _why_collectives = ""
    """The operation for which all ranks have to agree, for messages."""

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        owners: Owners,
        max_host_bytes: int | None,
        *,
        overwrite: bool,
        engine: str,
        durable: bool,
        piece_bytes: int | None = None,
    ) -> None:
        require_engine(engine)
        super().__init__(path)
        self._overwrite = overwrite
        self._engine = engine
        self._durable = durable
        self._alone = False
        self._owners = owners
        if owners.optimizers():
            watch_steps()
        self._arena = Arena(max_host_bytes)
        self._piece_bytes = piece_bytes
        self._staged: _Staged | None = None
        self._directory: DirectorySave | None = None  # on the coordinator, while a save is under way

    # --- torch's AsyncStager

    @property
    def should_synchronize_after_execute(self) -> bool:
        """Make dcp.async_save call synchronize_staging before it returns."""
        return self._synchronize_after_execute

    @untraced
    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Capture a state, and return what dcp.async_save then plans and writes; called by dcp.async_save.

        Args:
            state_dict: The state dict of this rank.

        Returns:
            The same tensors, and copies of everything else.
        """
        if (before := self._own_staged()) is not None:
            before.wait()
        captured = ShardedCapture(state_dict, self._owners, self._arena, piece_bytes=self._piece_bytes)
        staged = _Staged(captured, samples_of_state(captured.state))
        try:
            staged.copy(wait=False)
        except BaseException:
            staged.release()
            raise
        spread = Spread(_SPREAD_MAX_S)
        spread.expect_step(self._owners.optimizers(), manual=self._owners.gate == "manual")
        spread.add_file(staged.sharded.snapshot, staged.sharded.size_bytes)
        spread.begin()
        self._staged = staged
        state = _StagedState(staged.sharded.state)
        weakref.finalize(state, staged.end_unless_begun)
        return state

    def synchronize_staging(self) -> None:
        """Wait until the bytes for which the arena had no room are written; called by dcp.async_save."""
        if (staged := self._own_staged()) is not None:
            staged.come()
            staged.copy(wait=True)

    def wait_captured(self, timeout: float | None = None) -> None:
        """Return when the state of the last dcp.async_save may be changed; with gate="manual", call it before a step.

        Args:
            timeout: The most seconds to wait; None waits without limit.

        Raises:
            TimeoutError: It may not be changed yet.
        """
        if (staged := self._own_staged()) is not None:
            staged.sharded.capture.wait_captured(timeout)

    def close(self) -> None:
        """Wait for the last dcp.async_save to end; in a forked child, where it is the parent's, do nothing."""
        if (staged := self._own_staged()) is not None:
            staged.wait()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to this process; in another process, the writer is like a new one."""
        return {**self.__dict__, "_staged": None, "_arena": None, "_owners": None, "_directory": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Recreate the members that __getstate__ has left out."""
        self.__dict__.update(state, _arena=Arena(), _owners=Owners())

    # --- what our storage writers share of torch's StorageWriter

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another save; called by dcp.save."""
        self._take_staged()
        self._give_up()
        if checkpoint_id is not None:
            self._path = os.fspath(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Begin a save on this rank; called by dcp.save."""
        self._alone = not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1
        if not kwargs.get("use_collectives", True) and not self._alone:
            raise UnsupportedError(
                f"{type(self).__name__} {self._why_collectives}, so all ranks have to agree: leave "
                "use_collectives=True, or let one process save with no_dist=True"
            )
        self._take_staged()
        self._give_up()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's items, and sync them; called by dcp.save on each rank."""
        try:
            results = self._write(plan, planner)
        except BaseException:
            if self._alone:  # else other ranks may still write there, until DCP tells them of this error
                self._give_up()
            raise
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    # --- for the storage writers

    @abstractmethod
    def _write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]: ...

    def _give_up(self) -> None:
        """Remove what an unfinished save has written; on the coordinator."""
        directory, self._directory = self._directory, None
        if directory is not None:
            directory.abort()

    def _to_finish(self) -> DirectorySave:
        """Return the directory of the save that ends; on the coordinator."""
        directory, self._directory = self._directory, None
        if directory is None:
            raise ConfigError("finish() was called on a writer that has begun no save")
        return directory

    def _part_in(self, plan: SavePlan, kind: type[_Part]) -> _Part:
        """Return what the coordinator has put into the plan of a rank.

        Raises:
            ConfigError: The plan is of an earlier save.
        """
        part = plan.storage_data
        if type(part) is not kind or (self._directory is not None and self._directory.path != part.directory):
            raise ConfigError(
                "this plan is of an earlier save: with enable_plan_caching=True, pass a FastPersistSavePlanner"
            )
        return part

    def _keep_others(self, directory: DirectorySave, is_own: Callable[[str], object]) -> None:
        """Keep the files beside the checkpoint that is replaced.

        Args:
            directory: The directory that replaces it.
            is_own: Tells by its name whether a file is part of the checkpoint, as in `find_others`.
        """
        final_path = absolute_path(self._known_path("dcp.save"))
        for name, size_bytes in keep_others(find_others(final_path, is_own), final_path, directory.path):
            directory.add_written(name, size_bytes, None)  # without a CRC: the file may be long

    def _take_staged(self) -> None:
        """Keep the staged state if this thread's save is of it; else wait for the save of it, and forget it."""
        if (staged := self._own_staged()) is not None and not staged.is_for_this_thread():
            staged.wait()
            self._staged = None

    def _own_staged(self) -> _Staged | None:
        """Return what is staged; nothing in a forked child, where no thread of its parent would ever end it."""
        if self._staged is not None and self._staged.process != os.getpid():
            self._staged = None
        return self._staged

    def _known_to_planner(self, meta: StorageMeta) -> StorageMeta:
        """Add the samples of the staged state for the planner: the tensors may change before it compares them."""
        if self._staged is None:
            return meta
        return StagedMeta(meta.checkpoint_id, meta.save_id, get_sums=self._staged.get_sums)

    @contextmanager
    def _captured(self, items: Sequence[WriteItem], planner: SavePlanner) -> Iterator[ShardedCapture | None]:
        """Yield the staged state while it is written; None if none was staged, so that no tensor changes.

        Args:
            items: The items that this rank writes, in that order.
            planner: The planner that resolves the items, as in `ShardedCapture.settle`.

        Raises:
            UnsupportedError: As by `ShardedCapture.settle`.
            TornStateError: When all is written: the state was changed before it was captured.
        """
        if self._staged is None:
            yield None
            return
        try:
            captured = self._staged.sharded
            captured.settle(items, planner)
            yield captured
            captured.capture.check()
        finally:
            self._staged.release()


class _StagedState(dict[str, Any]):
    """What `CapturingWriter.stage` returns: live tensors, which only this process has captured."""

    def __reduce__(self) -> Any:
        """Refuse to be sent to another process."""
        raise UnsupportedError(
            "FastPersist's writers capture the state in this process, and AsyncCheckpointerType.PROCESS writes it in "
            "another: leave that out, because writing hardly needs the GIL, or pass async_stager=DefaultStager()"
        )


class _Staged:
    """A state that dcp.async_save has staged, until torch's thread has written it or failed."""

    def __init__(self, sharded: ShardedCapture, get_sums: GetSums) -> None:
        self.sharded = sharded
        self.get_sums = get_sums
        self.process = os.getpid()
        self._over = threading.Event()
        self._staged_by = threading.current_thread()
        self._is_async = threading.Event()  # torch has started its thread, or is about to
        self._writer: threading.Thread | None = None

    def copy(self, *, wait: bool) -> None:
        """Copy what may change once async_save has returned; from then on, steps wait for the rest."""
        self.sharded.capture.copy_volatile(wait=wait)
        if not wait:
            self.sharded.capture.hold()

    def come(self) -> None:
        """Note that dcp.async_save has started its thread, and is about to return."""
        self._is_async.set()

    def is_for_this_thread(self) -> bool:
        """Tell whether this thread writes it: the first thread that asks does, which is torch's.

        That thread ends with the save, however the save ends. Then no step may wait any more: DCP tells errors to the
        future only.
        """
        if self._over.is_set():
            return False
        this = threading.current_thread()
        if self._writer is None:
            if self._is_async.is_set() and this is self._staged_by:
                return False  # this thread begins the next save, and torch's thread has not begun this one
            self._writer = this
            if this is not self._staged_by:
                # Planning holds the GIL: let dcp.async_save return first.
                self._is_async.wait(_CALLER_FIRST_S)
                threading.Thread(target=self._end_with, args=(this,), name="fastpersist-dcp", daemon=True).start()
        return self._writer is this

    def _end_with(self, thread: threading.Thread) -> None:
        thread.join()
        self._end()

    def _end(self) -> None:
        self.sharded.capture.release()
        self._over.set()

    def end_unless_begun(self) -> None:
        """Free the captured bytes if no thread writes them: the state is freed, so none will."""
        if self._writer is None:
            self._end()

    def release(self) -> None:
        """Free the captured bytes: this rank has written them, or has failed. Its save may go on."""
        self.sharded.capture.release()
        if self._writer in (None, self._staged_by):
            self._over.set()

    def wait(self) -> None:
        """Return when its save has ended."""
        if self._writer is self._staged_by:  # one thread has called the steps of async_save one after the other
            self._end()
        self.sharded.capture.hurry()
        while not self._over.wait(_COMES_S):
            if self._writer is None:  # torch's thread has never begun
                self._end()
