"""Train with FSDP2; shards are saved while the next steps compute, and loaded on another number of ranks.

The second run finds the newest step of the first, whose shards were cut for 4 ranks, and fills its own in place:

torchrun --nproc-per-node 4 examples/fsdp_checkpointer.py [DIR] [--steps N] [--width N]
torchrun --nproc-per-node 2 examples/fsdp_checkpointer.py [DIR] [--steps N] [--width N]

DCP reads DIR/step-… as well, without fastpersist.
"""

from __future__ import annotations

import argparse
import sysconfig
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from train_gpt import CONTEXT, GPT

import fastpersist as fp

ROWS = 12  # of all ranks together


def main(root: Path, steps: int, width: int) -> None:
    """Train a number of further steps, from the newest step in `root` if there is one."""
    rank, count = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    torch.manual_seed(0)  # all ranks begin with the same weights
    source = b"".join(path.read_bytes() for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))
    text = torch.frombuffer(bytearray(source), dtype=torch.uint8)
    model = GPT(width)
    warnings.filterwarnings("ignore", "FSDP2-wrapped module", UserWarning)  # its output is not changed in place
    warnings.filterwarnings("ignore", ".*rank_state is left out", RuntimeWarning)  # with other ranks, dropout differs
    # --8<-- [start:shard]
    mesh = init_device_mesh("cpu", (count,))
    for layer in model.layers.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    # --8<-- [end:shard]
    step = 0

    def loss_of(number: int, rows: torch.Tensor) -> torch.Tensor:
        starts = (number * CONTEXT + rows * (len(text) // ROWS)) % (len(text) - CONTEXT - 1)
        batch = text[starts[:, None] + torch.arange(CONTEXT + 1)].long()
        return nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    def measure() -> float:  # always the same rows, without dropout
        model.eval()
        with torch.no_grad():
            loss = loss_of(-1, torch.arange(ROWS)).item()
        model.train()
        return loss

    def say(line: str) -> None:
        if rank == 0:
            print(line, flush=True)

    # --8<-- [start:load]
    group = dist.group.WORLD
    with fp.Checkpointer(root, sharded=True, process_group=group, optimizer=optimizer, keep=3) as checkpoints:
        torch.manual_seed(rank)
        targets = {"model": model, "optimizer": optimizer}
        found = checkpoints.load(into=targets, missing_ok=True)  # its own shards, in place; None on all, or on none
        if found is not None:
            step = found["step"]
            if "rank_state" in found:  # as many ranks as saved it
                torch.set_rng_state(found["rank_state"]["rng"])
            before = found["loss"]
            say(f"resumed at step {step} (ranks: {count})  loss {measure():.6f}, and {before:.6f} when it was saved")
        # --8<-- [end:load]
        for _ in range(steps):
            optimizer.zero_grad()
            loss_of(step, torch.arange(rank, ROWS, count)).backward()
            optimizer.step()
            step, loss = step + 1, measure()
            # --8<-- [start:save]
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step, "loss": loss}
            checkpoints.save(step, state, rank_state={"rng": torch.get_rng_state()})  # written while the next computes
            # --8<-- [end:save]
            say(f"step {step}  loss {loss:.6f}")
    say(f"checkpoints in {root}: steps {', '.join(map(str, checkpoints.steps()))}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", metavar="DIR", nargs="?", type=Path, default=Path("runs/fsdp_checkpointer"))
    parser.add_argument("--steps", type=int, default=20, help="more than there are (default: 20)")
    parser.add_argument("--width", type=int, default=128)
    arguments = parser.parse_args()
    if not dist.is_torchelastic_launched():
        parser.error("it trains with several processes, which torchrun starts; --help shows how")
    dist.init_process_group("gloo")
    try:
        main(**vars(arguments))
    finally:
        dist.destroy_process_group()
