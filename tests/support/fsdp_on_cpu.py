"""FSDP of the frameworks, on ranks without an accelerator, and the comparison of what they saved.

torch shards on CPUs, and Accelerate's code for it runs there, but Accelerate decides for FSDP on accelerators only. For
the length of `accelerate_shards` it decides so here. `shards_of` reads a directory of torch.distributed.checkpoint with
torch's own reader, in this process alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # what ranks import on their way is imported here once: they are forks
import torch.distributed.checkpoint as dcp
from support.sameness import portrait
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

import fastpersist.integrations._shared.sharded_redirection  # noqa: F401

IGNORED = (
    "ignore:torch.distributed is disabled:UserWarning",
    "ignore:FSDP2-wrapped module:UserWarning",
    "ignore:.*FSDP.state_dict_type:FutureWarning",
    "ignore:.*FSDP.set_state_dict_type:FutureWarning",
    "ignore:.*NO_SHARD:FutureWarning",
    "ignore:Detected an existing checkpoint:UserWarning",
    "ignore:Multiple backends are registered:UserWarning",
    "ignore:.*ShardedTensor:FutureWarning",
    "ignore:.*ShardedTensor:UserWarning",
    "ignore:.*load_state_dict:FutureWarning",
    "ignore:.*_get_pg_default_device:UserWarning",
    "ignore:.*TypedStorage is deprecated:UserWarning",
)


@contextmanager
def accelerate_shards() -> Iterator[None]:
    """In the block, an Accelerator that is given a plugin for FSDP uses it on CPUs, too."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    stock = AcceleratorState.__init__

    def initialize(self: Any, *arguments: Any, fsdp_plugin: Any = None, **options: Any) -> None:
        stock(self, *arguments, fsdp_plugin=fsdp_plugin, **options)
        if fsdp_plugin is not None:
            self._shared_state["fsdp_plugin"] = fsdp_plugin
        if "fsdp_plugin" in self._shared_state:
            for state in (PartialState._shared_state, self._shared_state):
                state["distributed_type"] = DistributedType.FSDP

    AcceleratorState.__init__ = initialize
    before = dict(os.environ)
    os.environ.update(ACCELERATE_USE_CPU="true", OMP_NUM_THREADS="1")
    os.environ.setdefault("MASTER_PORT", "1")  # asked for, and not used: the ranks have met
    try:
        yield
    finally:
        AcceleratorState.__init__ = stock
        os.environ.clear()
        os.environ.update(before)


def shards_of(directory: Path) -> Any:
    """Return all that a directory of DCP holds, by name, as torch's own reader has it."""
    reader = dcp.FileSystemReader(directory)
    state: dict[str, Any] = {
        name: torch.zeros(item.size, dtype=item.properties.dtype) if isinstance(item, TensorStorageMetadata) else None
        for name, item in reader.read_metadata().state_dict_metadata.items()
    }
    dcp.load(state, storage_reader=reader, no_dist=True)
    return portrait(dict(sorted(state.items())))


def shard_directories(directory: Path) -> list[str]:
    """Name the directories of DCP in a checkpoint, "." for itself."""
    return sorted(str(path.parent.relative_to(directory)) for path in directory.rglob(".metadata"))
