"""Fabric's FSDP and ModelParallel, which take no plugin: shards that are written while training goes on.

    fabric = Fabric(strategy=ModelParallelStrategy(...))
    io = attach(fabric)
    ...
    fabric.save("checkpoint", state)     # as ever; it is durable after io.wait()

With other strategies, the plugin itself is what Fabric takes: Fabric(plugins=[FastPersistCheckpointIO()]).
"""

from __future__ import annotations

from typing import Any

from fastpersist import ConfigError

from .fsdp import ShardedSaving
from .plugin import FastPersistCheckpointIO

__all__ = ["attach"]


def attach(fabric: Any, io: FastPersistCheckpointIO | None = None) -> FastPersistCheckpointIO:
    """Let a strategy of Fabric's that shards save and load through ours. All ranks call this.

    `fabric.save` returns when what may change is copied. Directories have the names and files of Lightning, and a
    MANIFEST.json; each becomes visible when all ranks have written it, whole.

    Args:
        fabric: With FSDPStrategy(state_dict_type="sharded") or ModelParallelStrategy.
        io: Says how; set its `optimizer` after `fabric.setup`, or all is copied before a save returns, as it is with
            FSDPStrategy. None: a new one.

    Returns:
        The plugin: `wait()` for what is saved, `pending()`.

    Raises:
        ConfigError: The strategy saves single files.
    """
    if not hasattr(fabric, "strategy"):
        raise ConfigError(f"attach() takes a lightning Fabric, not a {type(fabric).__name__}")
    io = io or FastPersistCheckpointIO()
    if not ShardedSaving.stand_in(fabric.strategy, io, is_of_fabric=True):
        raise ConfigError(
            f"{type(fabric.strategy).__name__} saves no shards as it is: where it takes plugins, write "
            "Fabric(plugins=[FastPersistCheckpointIO()]); else stock saving works there"
        )
    return io
