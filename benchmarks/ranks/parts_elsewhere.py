"""Load shards whose parts lie in the stores of other nodes: time, and bytes that go between the ranks.

    torchrun --nproc-per-node 8 benchmarks/ranks/parts_elsewhere.py DIR --megabytes 32

Two ranks of the group share a store, as if they were a node. Each saves a tensor, and loads it from the store of other
ranks, as after a restart that has put ranks on other nodes. What goes over loopback is counted by the kernel.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
import torch.distributed as dist

import fastpersist as fp

_LOAD_COUNT = 3


def main() -> None:
    """Save, load several times, and print the figures of rank 0."""
    parser = argparse.ArgumentParser(description="Load shards that lie in the stores of other nodes.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--megabytes", type=int, default=32, help="of each rank")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, count = dist.get_rank(), dist.get_world_size()
    options.directory.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    roots = [options.directory / f"node-{one // 2}" for one in range(count)]
    name, tensor = f"of rank {rank}", torch.full((options.megabytes * 250_000,), float(rank))
    with fp.Checkpointer(roots[rank], process_group=dist.group.WORLD, sharded=True, node_local="parts") as checkpoints:
        checkpoints.save(1, {name: tensor}).result()
    with fp.Checkpointer(roots[(rank + 2) % count], process_group=dist.group.WORLD) as checkpoints:
        for _ in range(_LOAD_COUNT):
            target = torch.zeros_like(tensor)
            dist.barrier()
            before_bytes, begun_s = _loopback_bytes(), time.monotonic()
            checkpoints.load(1, into={name: target})
            dist.barrier()
            took_s, moved_bytes = time.monotonic() - begun_s, _loopback_bytes() - before_bytes
            if not torch.equal(target, tensor):
                raise SystemExit(f"rank {rank} has loaded something else")
            if rank == 0:
                print(f"{count} ranks, {options.megabytes} MB each: {took_s:.2f} s, {moved_bytes / 1e6:.0f} MB moved")
    dist.destroy_process_group()


def _loopback_bytes() -> int:
    return int(Path("/sys/class/net/lo/statistics/rx_bytes").read_text())


if __name__ == "__main__":
    main()
