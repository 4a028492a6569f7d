"""Megatron-Core's distributed checkpoints: a save strategy for its format "torch_dist".

    from fastpersist.integrations.megatron import FastPersistSaveStrategy

    dist_checkpointing.save(sharded_state_dict, directory, FastPersistSaveStrategy())

"torch_dist" is DCP's format, with Megatron's own common.pt and metadata.json beside it, so Megatron's own strategy
loads it. This module lets Megatron translate a sharded state dict, and passes the result to `FastPersistWriter`.
"""

from __future__ import annotations

import os
from typing import Any

from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from fastpersist import require_engine

from ._shared.requirements import require
from .torch_dcp import FastPersistWriter

require("megatron", "megatron", "0.16")

from megatron.core.dist_checkpointing.strategies.base import (  # type: ignore[import-not-found] # noqa: E402
    SaveShardedStrategy,
)
from megatron.core.dist_checkpointing.strategies.torch import (  # type: ignore[import-not-found] # noqa: E402
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)

__all__ = ["FastPersistSaveStrategy"]


class FastPersistSaveStrategy(SaveShardedStrategy):  # type: ignore[misc]
    """Writes the sharded part of a Megatron checkpoint, in its format "torch_dist", version 1.

    Megatron writes common.pt before it, and metadata.json after it, which marks the checkpoint as complete.

    Args:
        engine: "auto", or an engine's name, which then never falls back.

    Raises:
        ConfigError: Unknown engine.

    Thread safety: one save at a time.
    """

    can_handle_sharded_objects = True

    def __init__(self, *, engine: str = "auto") -> None:
        super().__init__("torch_dist", 1)
        require_engine(engine)
        self._engine = engine

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | os.PathLike[str]) -> None:
        """Write the shards of this rank; returns when those of all ranks are durable. Megatron calls it on all ranks.

        Args:
            sharded_state_dict: ShardedTensors and ShardedObjects, nested in dicts and lists.
            checkpoint_dir: The directory, in which common.pt is; it stays.

        Raises:
            CheckpointException: A rank has failed; it names the rank, and holds its error.
        """
        by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, True)
        dcp_save(
            mcore_to_pyt_state_dict(by_key, False),
            storage_writer=FastPersistWriter(checkpoint_dir, engine=self._engine),
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        )
