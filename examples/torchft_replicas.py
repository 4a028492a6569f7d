"""Train with torchft: a replica is killed, the other one goes on alone, and a new one joins it later.

torchft's Manager decides in each step which replicas take part. When that changes, the Checkpointer is bound to a
process group of the replicas that are there now, and all of them load the newest step, a new replica too.

python examples/torchft_replicas.py [DIR] [--steps N]        # needs torchft
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import tempfile
import time
from contextlib import nullcontext
from datetime import timedelta
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchft import Manager, ProcessGroupGloo
from torchft.coordination import LighthouseServer
from torchft.process_group import create_store_client

import fastpersist as fp

COUNT = 2
LOST_REPLICA = 1
LOST_AT_STEP = 7
ALONE_STEPS = 5  # that the other one takes meanwhile
PATIENCE = timedelta(seconds=60)


class Replicas(ProcessGroupGloo):
    """torchft's group of the replicas, which notes when it was made anew."""

    made: tuple[str, int, int] | None = None  # address of a store, rank and count

    def configure(self, store_addr: str, replica_id: str, rank: int, world_size: int, *more: Any, **named: Any) -> None:
        """Make the group of a new quorum."""
        super().configure(store_addr, replica_id, rank, world_size, *more, **named)
        self.made = store_addr, rank, world_size


def new_group(store_addr: str, rank: int, count: int) -> dist.ProcessGroup:
    """Make torch's own group of the same replicas: torchft's knows no collectives of objects."""
    if dist.is_initialized():
        dist.destroy_process_group()
    store = create_store_client(f"{store_addr}/fastpersist", timeout=PATIENCE)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count, timeout=PATIENCE)
    group = dist.group.WORLD
    assert group is not None
    return group


def train(root: Path, steps: int, lighthouse: str, replica: int, is_first: bool, was_alone: Event) -> None:
    """Train up to a step as one of the replicas."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # of the ranks of this replica: one
    replicas = Replicas(timeout=PATIENCE)
    manager = Manager(
        pg=replicas,
        load_state_dict=lambda state: None,
        state_dict=dict,
        min_replica_size=1,
        use_async_quorum=False,
        init_sync=False,
        timeout=PATIENCE,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=f"replica_{replica}",
        hostname="127.0.0.1",
    )
    checkpoints = None
    step = count = alone = 0
    while step < steps:
        manager.start_quorum(allow_heal=False)  # the state comes from the checkpoint, not from another replica
        # --8<-- [start:rebind]
        if replicas.made is not None:  # other replicas than in the step before
            made, replicas.made = replicas.made, None
            group, count = new_group(*made), made[2]
            if checkpoints is None:
                checkpoints = fp.Checkpointer(root, optimizer=optimizer, process_group=group, keep=3, on_error="warn")
            else:
                checkpoints.rebind(group)
            found = checkpoints.load(into={"model": model, "optimizer": optimizer}, missing_ok=True)
            step = 0 if found is None else found["step"]
            manager.load_state_dict({"step": step, "batches_committed": step})
            # --8<-- [end:rebind]
            print(f"replica {replica} goes on from step {step}, one of {count}\n", end="", flush=True)
        if count < COUNT and (step == 0 or alone == ALONE_STEPS):
            time.sleep(0.1)  # wait for the other one: all steps would be over before its process has begun
            continue
        if is_first and replica == LOST_REPLICA and step == LOST_AT_STEP:
            os.kill(os.getpid(), signal.SIGKILL)
        torch.manual_seed(step * COUNT + replica)
        samples = torch.randn(32, 64)
        loss = nn.functional.mse_loss(model(samples), samples)
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            manager.allreduce(parameter.grad).wait()
        if manager.should_commit() and checkpoints is not None:
            optimizer.step()
            step += 1
            alone += count == 1
            if alone == ALONE_STEPS:
                was_alone.set()
            checkpoints.save(step, {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()})
            print(f"replica {replica} took step {step}, one of {count}\n", end="", flush=True)
    if checkpoints is not None:
        checkpoints.close()
    manager.shutdown(wait=False)


def main(root: Path, steps: int) -> None:
    """Start the replicas, and a new one for the one that is killed."""
    spawned = multiprocessing.get_context("spawn")
    was_alone = spawned.Event()
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=1000, heartbeat_timeout_ms=2000)

    def start(replica: int, is_first: bool) -> BaseProcess:
        process = spawned.Process(target=train, args=(root, steps, lighthouse.address(), replica, is_first, was_alone))
        process.start()
        return process

    processes = [start(replica, True) for replica in range(COUNT)]
    processes[LOST_REPLICA].join()
    print(f"replica {LOST_REPLICA} is gone", flush=True)
    was_alone.wait(PATIENCE.total_seconds())  # or a machine that is fast would have the new one there at once
    processes[LOST_REPLICA] = start(LOST_REPLICA, False)
    for process in processes:
        process.join()
    lighthouse.shutdown()
    print(f"steps in {root}: {', '.join(map(str, fp.Checkpointer(root).steps()))}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", metavar="DIR", nargs="?", type=Path, help="default: a directory that is removed")
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() if arguments.root is None else nullcontext(arguments.root) as directory:
        main(Path(directory), arguments.steps)
