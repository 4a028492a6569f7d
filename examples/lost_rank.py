"""Lose a rank in the middle of training, and go on in the same processes with one that takes its place.

Three ranks train together. One of them kills itself. The others leave the broken process group, make a new one with the
process that replaces it, and go on from the newest checkpoint: rebind() instead of a restart.

python examples/lost_rank.py [DIR] [--steps N]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import tempfile
from contextlib import nullcontext
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import fastpersist as fp

COUNT = 3
LOST_RANK = 1
LOST_AT_STEP = 7


def new_group(port: int, generation: int, rank: int) -> dist.ProcessGroup:
    """Leave the group of this process, if it has one, and make that of the next generation with the others."""
    if dist.is_initialized():
        dist.destroy_process_group()
    store = dist.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=dist.PrefixStore(str(generation), store), rank=rank, world_size=COUNT)
    group = dist.group.WORLD
    assert group is not None
    return group


def train(root: Path, steps: int, port: int, generation: int, rank: int) -> None:
    """Train up to a step as one of the ranks, whatever happens to the others."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def resume() -> int:
        found = checkpoints.load(into={"model": model, "optimizer": optimizer}, missing_ok=True)
        step = 0 if found is None else found["step"]
        print(f"generation {generation}: rank {rank} goes on from step {step}\n", end="", flush=True)
        return step

    group = new_group(port, generation, rank)
    checkpoints = fp.Checkpointer(root, optimizer=optimizer, process_group=group, keep=3, on_error="warn")
    step = resume()
    while step < steps:
        try:
            if (generation, rank, step) == (0, LOST_RANK, LOST_AT_STEP):
                os.kill(os.getpid(), signal.SIGKILL)
            torch.manual_seed(step * COUNT + rank)
            samples = torch.randn(32, 64)
            loss = nn.functional.mse_loss(model(samples), samples)
            optimizer.zero_grad()
            loss.backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= COUNT
        except RuntimeError:  # gloo's, when a rank is gone
            generation += 1
            # --8<-- [start:rebind]
            checkpoints.rebind(new_group(port, generation, rank))  # saves under way are given up
            step = resume()
            # --8<-- [end:rebind]
            continue
        optimizer.step()
        step += 1
        checkpoints.save(step, {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()})
        if rank == 0:
            print(f"step {step}  loss {loss.item():.4f}\n", end="", flush=True)
    checkpoints.close()
    dist.destroy_process_group()


def main(root: Path, steps: int) -> None:
    """Start the ranks, and another process for one that is killed."""
    spawned = multiprocessing.get_context("spawn")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def start(rank: int, generation: int) -> BaseProcess:
        process = spawned.Process(target=train, args=(root, steps, store.port, generation, rank))
        process.start()
        return process

    processes = [start(rank, 0) for rank in range(COUNT)]
    processes[LOST_RANK].join()
    if code := processes[LOST_RANK].exitcode:  # 0 if it resumed behind the step at which it is killed
        print(f"rank {LOST_RANK} is gone ({signal.Signals(-code).name})", flush=True)
        processes[LOST_RANK] = start(LOST_RANK, 1)
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * COUNT
    print(f"steps in {root}: {', '.join(map(str, fp.Checkpointer(root).steps()))}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", metavar="DIR", nargs="?", type=Path, help="default: a directory that is removed")
    parser.add_argument("--steps", type=int, default=15)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() if arguments.root is None else nullcontext(arguments.root) as directory:
        main(Path(directory), arguments.steps)
