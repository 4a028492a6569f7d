"""Train with FSDP2 and torch.distributed.checkpoint; go on with another number of ranks.

The second run finds the newest checkpoint of the first, whose shards were cut for 4 ranks, and cuts them for 2:

torchrun --nproc-per-node 4 examples/fsdp_dcp_reshard.py [DIR] [--steps N] [--every N] [--width N]
torchrun --nproc-per-node 2 examples/fsdp_dcp_reshard.py [DIR] [--steps N] [--every N] [--width N]

DCP's FileSystemReader reads DIR/step-… as well, without fastpersist.
"""

from __future__ import annotations

import argparse
import math
import sysconfig
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from train_gpt import CONTEXT, GPT

from fastpersist.integrations.torch_dcp import FastPersistReader, FastPersistSavePlanner, FastPersistWriter

ROWS = 12  # of all ranks together


def main(root: Path, steps: int, every: int, width: int) -> None:
    """Train a number of further steps, from the newest checkpoint in `root` if there is one."""
    rank, count = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    torch.manual_seed(0)  # all ranks begin with the same weights
    source = b"".join(path.read_bytes() for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))
    text = torch.frombuffer(bytearray(source), dtype=torch.uint8)
    model = GPT(width)
    warnings.filterwarnings("ignore", "FSDP2-wrapped module", UserWarning)  # its output is not changed in place
    mesh = init_device_mesh("cpu", (count,))
    for layer in model.layers.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def loss_of(step: int, rows: torch.Tensor) -> torch.Tensor:
        starts = (step * CONTEXT + rows * (len(text) // ROWS)) % (len(text) - CONTEXT - 1)
        batch = text[starts[:, None] + torch.arange(CONTEXT + 1)].long()
        return nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    def measure() -> float:  # always the same rows, without dropout
        model.eval()
        with torch.no_grad():
            loss = loss_of(-1, torch.arange(ROWS)).item()
        model.train()
        return loss

    def state(step: int, loss: float) -> dict[str, Any]:
        weights, moments = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": moments, "step": step, "loss": loss}

    def save(step: int) -> None:
        loss = measure()
        writer = FastPersistWriter(root / f"step-{step:08d}")  # it is there when all ranks have written, durable
        dcp.save(state(step, loss), storage_writer=writer, planner=FastPersistSavePlanner())
        say(f"step {step}  loss {loss:.6f}  saved")

    def load(path: Path) -> int:
        found = state(0, 0.0)
        dcp.load(found, storage_reader=FastPersistReader(path))  # reads only the bytes of this rank's shards
        set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
        loss, before = measure(), found["loss"]
        if not math.isclose(loss, before, rel_tol=1e-5):
            raise SystemExit(f"{path}: the loss is {loss}, and was {before} when it was saved")
        say(f"resumed at step {found['step']} (ranks: {count})  loss {loss:.6f}, and {before:.6f} when it was saved")
        return found["step"]

    def say(line: str) -> None:
        if rank == 0:
            print(line, flush=True)

    paths = sorted(root.glob("step-*"))  # whole ones: what is unfinished has another name
    step = load(paths[-1]) if paths else 0
    torch.manual_seed(step * count + rank)  # dropout differs from rank to rank
    last = step + steps
    while step < last:
        optimizer.zero_grad()
        loss_of(step, torch.arange(rank, ROWS, count)).backward()
        optimizer.step()
        step += 1
        if step % every == 0:
            save(step)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", metavar="DIR", nargs="?", type=Path, default=Path("runs/fsdp_dcp_reshard"))
    parser.add_argument("--steps", type=int, default=20, help="more than there are (default: 20)")
    parser.add_argument("--every", type=int, default=5, help="steps from one checkpoint to the next (default: 5)")
    parser.add_argument("--width", type=int, default=128)
    arguments = parser.parse_args()
    if not dist.is_torchelastic_launched():
        parser.error("it trains with several processes, which torchrun starts; --help shows how")
    dist.init_process_group("gloo")
    try:
        main(**vars(arguments))
    finally:
        dist.destroy_process_group()
