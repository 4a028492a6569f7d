"""Train with DistributedDataParallel; all ranks write each checkpoint together, as one ordinary file.

Kill any process, or all of them, and start again with any number of ranks: the training resumes from the newest
checkpoint. `torch.load(DIR/step-…/state.pt)` reads it without fastpersist and without ranks.

torchrun --nproc-per-node 4 examples/ddp_partitioned.py [DIR] [--steps N] [--width N]
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from train_gpt import CONTEXT, GPT

import fastpersist as fp

ROWS = 12  # of all ranks together


def main(root: Path, steps: int, width: int) -> None:
    """Train up to a step, from the newest checkpoint in `root` if there is one."""
    rank, count = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    source = b"".join(path.read_bytes() for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))
    text = torch.frombuffer(bytearray(source), dtype=torch.uint8)
    model = GPT(width)
    replica = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = 0
    torch.manual_seed(rank)  # dropout differs from rank to rank

    # --8<-- [start:load]
    with fp.Checkpointer(root, optimizer=optimizer, keep=3, process_group=dist.group.WORLD) as checkpoints:
        targets = {"model": model, "optimizer": optimizer}
        found = checkpoints.load(into=targets, missing_ok=True)  # each rank reads a part of it; None on all, or on none
        if found is not None:
            step = found["step"]
            if "rank_state" in found:  # not with another number of ranks
                torch.set_rng_state(found["rank_state"]["rng"])
            print(f"rank {rank} of {count} resumed at step {step}", flush=True)
        # --8<-- [end:load]
        while step < steps:
            rows = torch.arange(rank, ROWS, count)
            starts = (step * CONTEXT + rows * (len(text) // ROWS)) % (len(text) - CONTEXT - 1)
            batch = text[starts[:, None] + torch.arange(CONTEXT + 1)].long()
            loss = nn.functional.cross_entropy(replica(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            # --8<-- [start:save]
            state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
            own = {"rng": torch.get_rng_state()}  # which differs from rank to rank
            checkpoints.save(step, state, rank_state=own)  # written by all ranks while the next step computes
            # --8<-- [end:save]
            if rank == 0:
                print(f"step {step}  loss {loss.item():.6f}", flush=True)
    if rank == 0:
        shares = [stats.bytes_by_rank for stats in checkpoints.stats()][-1:]
        print(f"checkpoints in {root}: steps {', '.join(map(str, checkpoints.steps()))}; bytes by rank {shares}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", metavar="DIR", nargs="?", type=Path, default=Path("runs/ddp_partitioned"))
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--width", type=int, default=384)
    arguments = parser.parse_args()
    if not dist.is_torchelastic_launched():
        parser.error("it trains with several processes, which torchrun starts; --help shows how")
    dist.init_process_group("gloo")
    try:
        main(**vars(arguments))
    finally:
        dist.destroy_process_group()
