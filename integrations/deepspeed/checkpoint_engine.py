"""A checkpoint engine as DeepSpeed wants it: saves into a directory that is being put together, loads with all threads.

DeepSpeed asks its checkpoint engine to save each file, and whether there is something to commit before each optimizer
step. While a checkpoint is put together, files below its tag are taken by whoever does that; all others are saved at
once, durably, by `fastpersist.save`. The question before the step passes the gate. Which directory, and when it becomes
visible, is `attachment`'s affair.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from fastpersist import load, save

from .._shared.requirements import require
from .views import without_waste

require("deepspeed", "deepspeed", "0.17.1")

from deepspeed.runtime.checkpoint_engine.checkpoint_engine import (  # type: ignore[import-not-found] # noqa: E402
    CheckpointEngine,
)

__all__ = ["FastPersistCheckpointEngine"]

_Taker = Callable[[Any, str, list[torch.Tensor]], None]


class FastPersistCheckpointEngine(CheckpointEngine):  # type: ignore[misc] # no types where it is not installed
    """What DeepSpeed saves and loads with. One thread uses it.

    Args:
        before_step: Called when the engine is about to step.
        before_load: Called before a file is loaded.
        on_cleanup: Called when the engine is destroyed.
        all_write: All data-parallel ranks save what they hold alike, each a part of it.
        many_files: A model is saved in many files, which are not to have all of the same flat buffers.
        engine: "auto", or an engine's name, for files that are saved at once and for loading.

    Attributes:
        failure: Why a file of the directory that is put together could not be saved; None if all could.
    """

    def __init__(
        self,
        *,
        before_step: Callable[[], None],
        before_load: Callable[[], None],
        on_cleanup: Callable[[], None],
        all_write: bool,
        many_files: bool,
        engine: str,
    ) -> None:
        super().__init__()
        self.name = "FastPersist"
        self.failure: Exception | None = None
        self._before_step = before_step
        self._before_load = before_load
        self._on_cleanup = on_cleanup
        self._all_write = all_write
        self._many_files = many_files
        self._engine = engine
        self._directory: str | None = None  # whose files are taken
        self._take: _Taker | None = None
        self._commits = False

    @contextmanager
    def taking(self, directory: str, take: _Taker) -> Iterator[None]:
        """In the block, what is saved below a directory is taken, and the directory is not made.

        `take` is given the object, its name there, and the tensors in it that nobody else has.
        An exception of `take` does not leave `save`, for the other ranks would wait for this one: `failure` has it.
        """
        self._directory, self._take, self.failure, self._commits = directory, take, None, False
        try:
            yield
        finally:
            self._directory, self._take = None, None

    # --- for DeepSpeed

    def create(self, info: Any) -> None:
        """Begin a checkpoint, or a file."""
        if self._take is None:  # somebody calls the class's save_checkpoint, or save_16bit_model
            self._before_load()
            self._commits = True

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Make a directory, unless it is in one that is being put together."""
        if self._name_of(path) is None:
            os.makedirs(path, exist_ok=exist_ok)

    def save(self, state_dict: Any, path: str) -> None:
        """Save a file.

        Raises:
            StorageError: It belongs to no directory that is being put together, and could not be saved.
        """
        name = self._name_of(path)
        if name is None or self._take is None:
            save(self._saved_as(state_dict)[0], path, engine=self._engine)
            return
        if self.failure is not None:
            return
        try:
            found, copies = self._saved_as(state_dict)
            self._take(found, name, copies)
        except Exception as error:  # noqa: BLE001 - it is raised on all ranks, when all have come so far
            self.failure = error

    def load(self, path: str, map_location: Any = None) -> Any:
        """Load a file.

        Raises:
            StorageError: The disk.
            CorruptionError: The file is damaged.
        """
        self._before_load()
        where = "cpu" if _stays_on_host(map_location) else map_location
        return load(path, map_location=where, weights_only=False, engine=self._engine)

    def commit(self, info: Any) -> bool:
        """Return when what was saved at once is durable on all ranks."""
        self._commits = False
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.barrier()  # rank 0 writes `latest` next, by itself
        return True

    def is_data_parallel_writer(self, dp_rank: int) -> bool:
        """Tell whether a data-parallel rank saves what all of them hold alike."""
        return self._all_write or dp_rank == 0

    def is_decoupled(self) -> bool:
        """Tell whether checkpoints are committed behind training: those that are put together are, and by us."""
        return not self._commits

    def get_commit_info(self) -> None:
        """Let the gate be passed: DeepSpeed asks before each optimizer step whether there is anything to commit."""
        self._before_step()

    def cleanup(self) -> None:
        """Wait for what is under way: the engine is about to go."""
        self._on_cleanup()

    def preserves_storage_sharing(self) -> bool:
        """Tell whether DeepSpeed has to copy what it saves into many files, so that each has its own part only."""
        return not self._many_files

    def _saved_as(self, state_dict: Any) -> tuple[Any, list[torch.Tensor]]:
        """Return what is saved in place of an object, and the tensors in it that nobody else has."""
        return without_waste(state_dict) if self._many_files else (state_dict, [])

    def _name_of(self, path: str) -> str | None:
        """Return the name of a file or directory in the one that is being put together, None for one elsewhere."""
        if self._directory is None:
            return None
        name = os.path.relpath(os.path.abspath(path), self._directory)
        return None if name == os.pardir or name.startswith(os.pardir + os.sep) else name


def _stays_on_host(map_location: Any) -> bool:
    """Tell a function that leaves storages where the unpickler puts them, which DeepSpeed passes for "cpu"."""
    if not callable(map_location):
        return False
    storage = object()
    try:
        return all(map_location(storage, place) is storage for place in ("cpu", "cuda:0", "meta"))
    except Exception:  # noqa: BLE001 - it looks at the storage
        return False
