"""What each rank of `test_megatron` does: saves with our strategy, and loads with Megatron's own.

torchrun --nproc-per-node N megatron_ranks.py save DIR
torchrun --nproc-per-node M megatron_ranks.py load DIR
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor

from fastpersist.integrations.megatron import FastPersistSaveStrategy

ROW_COUNT = 24


def values(scale: float) -> torch.Tensor:
    """Return the whole tensor, of which each rank holds some rows."""
    return torch.arange(ROW_COUNT * 1000, dtype=torch.float32).view(ROW_COUNT, 1000) * scale


def sharded(scale: float) -> dict[str, Any]:
    """Return this rank's part of a state: rows, a tensor that all ranks have, an object, and what is common."""
    rank, rank_count = dist.get_rank(), dist.get_world_size()
    rows = values(scale).chunk(rank_count)[rank].clone()
    return {
        "layers": [{"weight": ShardedTensor.from_rank_offsets("weight", rows, (0, rank, rank_count))}],
        "norm": ShardedTensor.from_rank_offsets("norm", torch.ones(5) * scale, replica_id=rank),
        "rng": ShardedObject("rng", {"seed": 3 * scale}, (1,), (0,), replica_id=rank),
        "step": 7,
    }


def main() -> None:
    """Save, or load and compare."""
    what, directory = sys.argv[1], Path(sys.argv[2])
    dist.init_process_group("gloo")
    if what == "save":
        if dist.get_rank() == 0:
            directory.mkdir(exist_ok=True)
        dist.barrier()
        dist_checkpointing.save(sharded(1.0), str(directory), FastPersistSaveStrategy())
    else:
        found = dist_checkpointing.load(sharded(0.0), str(directory))
        wanted = sharded(1.0)
        assert torch.equal(found["layers"][0]["weight"], wanted["layers"][0]["weight"].data)
        assert torch.equal(found["norm"], torch.ones(5))
        assert found["rng"] == {"seed": 3.0}
        assert found["step"] == 7
    dist.barrier()
    dist.destroy_process_group()
    print(f"{what}: done")


if __name__ == "__main__":
    main()
