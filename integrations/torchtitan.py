"""TorchTitan's checkpoints, saved while training goes on: a checkpoint manager that a run's configuration names.

    from fastpersist.integrations.torchtitan import FastPersistCheckpointManager

    config.checkpoint = FastPersistCheckpointManager.Config(enable=True, interval=500)

The files are those of TorchTitan: directories step-N with DCP's `.metadata`, which either manager loads. Policy is
TorchTitan's own, inherited: when to save, what to load, how many steps to keep. This module replaces its calls of DCP:
`save_sharded` writes in the background while training goes on, and `FastPersistReader` reads.

HuggingFace's format and remote folders (gs://…) stay with TorchTitan's own code.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.stateful import Stateful

from fastpersist import FastPersistError, PendingSave, directory_save_together, require_engine

from ._shared.requirements import require
from .torch_dcp import FastPersistReader, SharedPlans, save_sharded

require("torchtitan", "torchtitan", "0.3")

from torchtitan.components.checkpointer import (  # type: ignore[import-not-found] # noqa: E402
    MODEL,
    OPTIMIZER,
    AsyncMode,
    CheckpointManager,
)
from torchtitan.tools import filesystem  # type: ignore[import-not-found] # noqa: E402

__all__ = ["FastPersistCheckpointManager"]

_log = logging.getLogger("fastpersist")


class FastPersistCheckpointManager(CheckpointManager):  # type: ignore[misc]
    """TorchTitan's checkpoint manager with FastPersist's files; a run's configuration builds it.

    A save returns when all state that the optimizers do not own has been copied. The optimizers' next step copies the
    bytes that are not written by then. A directory step-N appears when it is whole and durable on all ranks.

    Args:
        config: The configuration of TorchTitan's manager, with `engine` added.
        options: The other options that TorchTitan passes.

    Raises:
        ConfigError: Unknown engine.
        FastPersistError: A save failed; raised by the next save, or by `close`.

    Thread safety: the training thread alone uses it.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):  # type: ignore[misc]
        """TorchTitan's options, and the engine."""

        async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "async"
        """"disabled": a save returns when it is durable. The others are the same here: training goes on meanwhile."""

        engine: str = "auto"
        """What writes and reads: "auto", or an engine's name, which then never falls back."""

    async_mode: AsyncMode
    save_future: Future[Path] | None

    def __init__(self, config: Config, **options: Any) -> None:
        require_engine(config.engine)
        super().__init__(config, **options)
        if not self.enable:
            return
        if self.async_mode is not AsyncMode.DISABLED:
            self.async_mode = AsyncMode.ASYNC
        self._engine = config.engine
        self._plans = SharedPlans()

    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: AsyncMode,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Any:
        """Save a state; called by TorchTitan's policy.

        Args:
            state_dict: The parameters by name, and the optimizers and other objects with a state of their own.
            checkpoint_id: The directory.
            async_mode: Whether to return before the save is durable.
            enable_garbage_collection: Only for TorchTitan's own saves; ours make no garbage that collection finds.
            to_hf: Save in HuggingFace's format, by TorchTitan's own code.

        Returns:
            A future of the directory, None if the save is durable already.
        """
        if to_hf or filesystem.is_remote(checkpoint_id):
            return super().dcp_save(state_dict, checkpoint_id, async_mode, enable_garbage_collection, to_hf)
        state = {key: value.state_dict() if isinstance(value, Stateful) else value for key, value in state_dict.items()}
        everybody: Any = self.pg or dist.group.WORLD
        files = directory_save_together(
            checkpoint_id, everybody, overwrite="foreign", engine=self._engine, make_parents=True
        )
        with files:
            save_sharded(files, state, optimizer=list(self.states[OPTIMIZER].optimizers), plans=self._plans)
            pending = files.publish()
        if async_mode is AsyncMode.DISABLED:
            pending.result()
            return None
        return _SaveFuture(pending)

    def dcp_load(self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool) -> None:
        """Load a checkpoint into a state; called by TorchTitan's policy.

        Args:
            state_dict: The state, as in `dcp_save`; it is filled in place.
            checkpoint_id: The directory.
            from_hf: The checkpoint has HuggingFace's format, so TorchTitan's own code loads it.
            from_quantized: The option of TorchTitan.
        """
        if from_hf or filesystem.is_remote(checkpoint_id):
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
            return
        dcp_load(state_dict, storage_reader=FastPersistReader(checkpoint_id, engine=self._engine))
        if MODEL in self.states:
            self.states[MODEL].load_state_dict(state_dict)

    def _wait_for_saving(self) -> None:
        future, self.save_future = self.save_future, None
        if future is not None:
            future.result()

    def _find_load_step(self, folder: str = "") -> int:
        """Find the newest step; TorchTitan's own search takes the hidden directories of saves that were cut off too."""
        folder = folder or self.folder
        if filesystem.is_remote(folder) or not os.path.isdir(folder):
            return int(super()._find_load_step(folder))
        found = [-1]
        for name in os.listdir(folder):
            match = re.fullmatch(r"step-(\d+)", name)
            marks = (".metadata", "model.safetensors.index.json")
            if match and any(os.path.isfile(os.path.join(folder, name, mark)) for mark in marks):
                found.append(int(match[1]))
        return max(found)

    def _close(self) -> None:
        """Wait for the save under way."""
        is_unwinding = sys.exc_info()[0] is not None
        try:
            self.maybe_wait_for_saving()
        except FastPersistError:
            if not is_unwinding:
                raise
            _log.exception("a checkpoint failed while another error ends the training")
        finally:
            super()._close()


class _SaveFuture(Future[Path]):
    """What TorchTitan waits for: a save under way."""

    def __init__(self, pending: PendingSave) -> None:
        super().__init__()
        self._pending = pending

    def done(self) -> bool:
        """Return whether the save has ended."""
        return self._pending.done()

    def result(self, timeout: float | None = None) -> Path:
        """Wait for the save; raise why it failed."""
        return self._pending.result(timeout)
