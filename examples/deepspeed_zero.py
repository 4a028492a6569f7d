"""Train with DeepSpeed's ZeRO, with a checkpoint every few steps, written while the next steps compute.

Two lines differ from a program with DeepSpeed's own saving: attach, and close. Stop it in any way and start it again,
with or without those lines: it resumes from the newest checkpoint, with the same result.

torchrun --nproc-per-node 2 examples/deepspeed_zero.py [DIR] [--steps N] [--every N] [--width N] [--stage N]

DeepSpeed compiles a part of itself when it runs on CPUs for the first time, which takes a minute.
"""

from __future__ import annotations

import argparse
import logging
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from train_gpt import CONTEXT, GPT

ROWS = 8  # of each rank


def main(root: Path, steps: int, every: int, width: int, stage: int) -> None:
    """Train up to a step, from the newest checkpoint in `root` if there is one."""
    import deepspeed  # here, so that --help needs none of it

    from fastpersist.integrations.deepspeed import attach

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    deepspeed.init_distributed(verbose=False)
    rank, count = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    torch.manual_seed(0)  # all ranks begin with the same weights
    source = b"".join(path.read_bytes() for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))
    text = torch.frombuffer(bytearray(source), dtype=torch.uint8)
    model = GPT(width)
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "zero_optimization": {"stage": stage},
        "zero_force_ds_cpu_optimizer": False,  # torch's will do, and needs no compiler
        "steps_per_print": steps + 1,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def loss_of(step: int) -> torch.Tensor:
        rows = torch.arange(rank, count * ROWS, count)
        starts = (step * CONTEXT + rows * (len(text) // (count * ROWS))) % (len(text) - CONTEXT - 1)
        batch = text[starts[:, None] + torch.arange(CONTEXT + 1)].long().to(engine.device)
        return nn.functional.cross_entropy(engine(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    saving = attach(engine)
    if (root / "latest").exists():
        engine.load_checkpoint(root)
        if rank == 0:
            print(f"resumed at step {engine.global_steps}", flush=True)
    while engine.global_steps < steps:
        torch.manual_seed(engine.global_steps * count + rank)  # for dropout
        loss = loss_of(engine.global_steps)
        engine.backward(loss)
        engine.step()  # waits for what is neither written nor copied
        if rank == 0:
            print(f"step {engine.global_steps}  loss {loss.item():.6f}", flush=True)
        if engine.global_steps % every == 0:
            engine.save_checkpoint(root)  # returns at once; root/latest names it when all ranks have written
    saving.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", metavar="DIR", nargs="?", type=Path, default=Path("runs/deepspeed_zero"))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--every", type=int, default=5, help="steps from one checkpoint to the next (default: 5)")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--stage", type=int, default=2, choices=range(4), help="of ZeRO (default: 2)")
    arguments = parser.parse_args()
    if not dist.is_torchelastic_launched():
        parser.error("it trains with several processes, which torchrun starts; --help shows how")
    try:
        main(**vars(arguments))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
