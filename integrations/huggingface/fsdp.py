"""HuggingFace's Trainer with FSDP: saving, loading and checking its shards.

The Trainer leaves shards to Accelerate, which calls torch.distributed.checkpoint (DCP); `sharded_redirection`
intercepts these calls. Only programs with FSDP import that module, because DCP is slow to import.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from fastpersist import DirectorySave, PeerDirectorySave

__all__ = ["LOADING_NAMES", "is_sharding", "moves_parameters", "sharded_loads", "sharded_saves", "shards_in"]

LOADING_NAMES = ("_load_from_checkpoint", "_load_optimizer_and_scheduler", "_load_best_model")
"""The functions of a Trainer that load shards."""

_MODEL_NAME = "pytorch_model_fsdp"
_SHARD_SUFFIX = ".distcp"
_METADATA_NAME = ".metadata"


def is_sharding(trainer: Any) -> bool:
    """Return whether a Trainer uses torch's FSDP."""
    return bool(getattr(trainer, "is_fsdp_enabled", False))


def moves_parameters(trainer: Any) -> bool:
    """Return whether parameters are gathered and freed between two optimizer steps, as FSDP1 does."""
    return is_sharding(trainer) and not getattr(trainer.accelerator, "is_fsdp2", False)


def sharded_saves(
    files: DirectorySave | PeerDirectorySave, path: str, optimizer: object, plans: dict[str, Any]
) -> AbstractContextManager[None]:
    """Redirect the shards of a Trainer with FSDP into `files`, in the block.

    Args:
        files: The directory to save to; with several ranks, the result of `directory_save_together`.
        path: The coordinator's directory.
        optimizer: The optimizer whose tensors are written in place.
        plans: Plans of earlier saves, kept for the next save.
    """
    from .._shared.sharded_redirection import shards_into

    return shards_into(files, path, optimizer=optimizer, plans=plans)


def sharded_loads(trainer: Any, engine: str) -> AbstractContextManager[None]:
    """Read the Trainer's shards with `FastPersistReader`, in the block."""
    if not is_sharding(trainer):
        return nullcontext()
    from .._shared.sharded_redirection import reads_shards

    return reads_shards(engine=engine)


def shards_in(path: str, names: Iterable[str]) -> tuple[bool, str | None]:
    """Check the shards of a checkpoint.

    Args:
        path: The checkpoint's directory.
        names: The names of its files.

    Returns:
        Whether there are shards of a model, and what is wrong with any shards; None if nothing is.
    """
    folders = {
        os.path.dirname(name)
        for name in names
        if name.endswith(_SHARD_SUFFIX) or os.path.basename(name) == _METADATA_NAME
    }
    if not folders:
        return False, None
    from .._shared.sharded_redirection import why_not_whole

    reasons = (why_not_whole(os.path.join(path, folder)) for folder in sorted(folders))
    has_model = any(os.path.basename(folder).startswith(_MODEL_NAME) for folder in folders)
    return has_model, next((reason for reason in reasons if reason is not None), None)
