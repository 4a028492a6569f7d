"""Fabric's FSDP and ModelParallel, which take no plugin: writes their shards in the background.

    fabric = Fabric(strategy=ModelParallelStrategy(...))
    io = attach(fabric)
    ...
    fabric.save("checkpoint", state)     # unchanged; the checkpoint is durable after io.wait()

With other strategies, pass the plugin to Fabric: Fabric(plugins=[FastPersistCheckpointIO()]).
"""

from __future__ import annotations

from typing import Any

from fastpersist import ConfigError

from .fsdp import ShardedSaving
from .plugin import FastPersistCheckpointIO

__all__ = ["attach"]


def attach(fabric: Any, io: FastPersistCheckpointIO | None = None) -> FastPersistCheckpointIO:
    """Let a sharding strategy of Fabric save and load through FastPersist. All ranks call this.

    `fabric.save` returns when everything that may change is copied. Directories have Lightning's names and files, and a
    MANIFEST.json; each becomes visible when all ranks have written their parts.

    Args:
        fabric: A Fabric with FSDPStrategy(state_dict_type="sharded") or ModelParallelStrategy.
        io: The plugin, with its options. Set its `optimizer` after `fabric.setup`; else, and always with FSDPStrategy,
            a save copies everything before it returns. None: a new plugin.

    Returns:
        The plugin; `wait()` waits for saves, `pending()` lists them.

    Raises:
        ConfigError: The strategy saves single files.
    """
    if not hasattr(fabric, "strategy"):
        raise ConfigError(f"attach() takes a lightning Fabric, not a {type(fabric).__name__}")
    io = io or FastPersistCheckpointIO()
    if not ShardedSaving.stand_in(fabric.strategy, io, is_of_fabric=True):
        raise ConfigError(
            f"{type(fabric.strategy).__name__} saves no shards as configured: where it takes plugins, write "
            "Fabric(plugins=[FastPersistCheckpointIO()]); else stock saving works there"
        )
    return io
