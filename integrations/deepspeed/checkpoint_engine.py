"""DeepSpeed's checkpoint engine interface over FastPersist: saves into a checkpoint that is being assembled, and loads.

DeepSpeed lets its checkpoint engine save each file, and asks it before each optimizer step for commits; that call
passes the gate. While `attachment` assembles a checkpoint, it takes the files below the tag's directory;
`fastpersist.save` saves all others at once, durably. `attachment` chooses the directory and publishes it.
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
    """The engine that DeepSpeed saves and loads with. One thread uses it.

    Args:
        before_step: Called when the engine is about to step.
        before_load: Called before a file is loaded.
        on_cleanup: Called when the engine is destroyed.
        all_write: Whether each data-parallel rank saves a part of the replicated state.
        many_files: Whether a model is saved in many files, so that no file may hold a whole shared flat buffer.
        engine: "auto", or an engine's name, for files that are saved at once and for loading.

    Attributes:
        failure: The error of a file of the checkpoint that is being assembled; None if there is none.
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
        self._directory: str | None = None  # `_take` saves the files below it
        self._take: _Taker | None = None
        self._commits = False

    @contextmanager
    def taking(self, directory: str, take: _Taker) -> Iterator[None]:
        """Pass saves below a directory to `take`, in the block, and do not make the directory.

        `take` gets the object, its name there, and the tensors in it that no other code holds. `save` does not raise an
        exception of `take`, because the other ranks would wait for this one; `failure` keeps it.
        """
        self._directory, self._take, self.failure, self._commits = directory, take, None, False
        try:
            yield
        finally:
            self._directory, self._take = None, None

    # --- for DeepSpeed

    def create(self, info: Any) -> None:
        """Begin a checkpoint, or a file."""
        if self._take is None:  # the program calls the class's save_checkpoint, or save_16bit_model
            self._before_load()
            self._commits = True

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Make a directory, unless it belongs to the checkpoint that is being assembled."""
        if self._name_of(path) is None:
            os.makedirs(path, exist_ok=exist_ok)

    def save(self, state_dict: Any, path: str) -> None:
        """Save a file.

        Raises:
            StorageError: A file outside of the checkpoint that is being assembled could not be saved.
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
        except Exception as error:  # noqa: BLE001 - raised later, on all ranks
            self.failure = error

    def load(self, path: str, map_location: Any = None) -> Any:
        """Load a file.

        Raises:
            StorageError: The file cannot be read.
            CorruptionError: The file is damaged.
        """
        self._before_load()
        where = "cpu" if _stays_on_host(map_location) else map_location
        return load(path, map_location=where, weights_only=False, engine=self._engine)

    def commit(self, info: Any) -> bool:
        """Wait until all ranks have saved their files durably."""
        self._commits = False
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.barrier()  # DeepSpeed writes `latest` on rank 0 next
        return True

    def is_data_parallel_writer(self, dp_rank: int) -> bool:
        """Return whether a data-parallel rank saves replicated state."""
        return self._all_write or dp_rank == 0

    def is_decoupled(self) -> bool:
        """Return whether checkpoints are committed in the background; `attachment` does so for those it assembles."""
        return not self._commits

    def get_commit_info(self) -> None:
        """Pass the gate: DeepSpeed calls this before each optimizer step."""
        self._before_step()

    def cleanup(self) -> None:
        """Wait for the save under way, before the engine is destroyed."""
        self._on_cleanup()

    def preserves_storage_sharing(self) -> bool:
        """Return whether DeepSpeed must copy tensors out of shared storages; with many files, we copy them instead."""
        return not self._many_files

    def _saved_as(self, state_dict: Any) -> tuple[Any, list[torch.Tensor]]:
        """Return the object to save for `state_dict`, and its tensors that are copies of our own."""
        return without_waste(state_dict) if self._many_files else (state_dict, [])

    def _name_of(self, path: str) -> str | None:
        """Return a path's name below the directory that is being assembled; None for one elsewhere."""
        if self._directory is None:
            return None
        name = os.path.relpath(os.path.abspath(path), self._directory)
        return None if name == os.pardir or name.startswith(os.pardir + os.sep) else name


def _stays_on_host(map_location: Any) -> bool:
    """Recognize a function that leaves storages on the host, which DeepSpeed passes for "cpu"."""
    if not callable(map_location):
        return False
    storage = object()
    try:
        return all(map_location(storage, place) is storage for place in ("cpu", "cuda:0", "meta"))
    except Exception:  # noqa: BLE001 - a function that uses the storage is another one
        return False
