"""HuggingFace's Trainer with FSDP: which of its functions save and load shards, and how a directory of them looks.

The Trainer leaves this to Accelerate, and that to torch.distributed.checkpoint, where `sharded_redirection` catches it.
That module is imported only where FSDP is used: DCP is slow to import, and few need it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from fastpersist import DirectorySave, PeerDirectorySave

__all__ = ["LOADING_NAMES", "is_sharding", "moves_parameters", "sharded_loads", "sharded_saves", "shards_in"]

LOADING_NAMES = ("_load_from_checkpoint", "_load_optimizer_and_scheduler", "_load_best_model")
"""The functions of a Trainer that load what is sharded."""

_MODEL_NAME = "pytorch_model_fsdp"
_SHARD_SUFFIX = ".distcp"
_METADATA_NAME = ".metadata"


def is_sharding(trainer: Any) -> bool:
    """Tell whether a Trainer uses FSDP of torch."""
    return bool(getattr(trainer, "is_fsdp_enabled", False))


def moves_parameters(trainer: Any) -> bool:
    """Tell whether parameters are gathered and freed between two steps, where the optimizer has them: by FSDP1."""
    return is_sharding(trainer) and not getattr(trainer.accelerator, "is_fsdp2", False)


def sharded_saves(
    files: DirectorySave | PeerDirectorySave, path: str, optimizer: object, plans: dict[str, Any]
) -> AbstractContextManager[None]:
    """In the block, let a Trainer with FSDP put its shards into `files`.

    Args:
        files: With several ranks, what `directory_save_together` has returned.
        path: The directory of the first rank.
        optimizer: Whose tensors are written from where they are.
        plans: Kept from one save to the next.
    """
    from .._shared.sharded_redirection import shards_into

    return shards_into(files, path, optimizer=optimizer, plans=plans)


def sharded_loads(trainer: Any, engine: str) -> AbstractContextManager[None]:
    """In the block, let the Trainer's shards be read by us."""
    if not is_sharding(trainer):
        return nullcontext()
    from .._shared.sharded_redirection import reads_shards

    return reads_shards(engine=engine)


def shards_in(path: str, names: Iterable[str]) -> tuple[bool, str | None]:
    """Look at the shards of a checkpoint.

    Args:
        path: Its directory.
        names: Of its files.

    Returns:
        Whether there are shards of a model, and what is wrong with any shards, None if nothing is.
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
