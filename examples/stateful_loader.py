"""Train on shards of text until told to end; where each rank's loader stands survives another number of ranks.

Each rank reads some of the shards. With as many ranks as before, torchdata's StatefulDataLoader goes on where it was.
With another number, `on_resize` deals the shards out again, each at its position: no sample is left out, none comes
twice. SIGTERM, to torchrun or to any rank, makes all ranks save the same step and end.

torchrun --nproc-per-node 4 examples/stateful_loader.py [DIR] [--steps N] [--every N]
torchrun --nproc-per-node 2 examples/stateful_loader.py [DIR] [--steps N] [--every N]
"""

from __future__ import annotations

import argparse
import signal
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import fastpersist as fp

SHARD_COUNT = 10
CONTEXT = 16

Positions = dict[int, int]  # by shard: the number of its next sample


class Shards(IterableDataset):
    """Samples of some shards, evenly: the shard that is behind comes next. Its state is where it stands in each."""

    def __init__(self, positions: Positions) -> None:
        source = b"".join(path.read_bytes() for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))
        text = torch.frombuffer(bytearray(source), dtype=torch.uint8)
        self.shards = text[: len(text) // SHARD_COUNT * SHARD_COUNT].view(SHARD_COUNT, -1)
        self.positions = dict(positions)

    def __iter__(self) -> Iterator[tuple[int, int, torch.Tensor]]:
        while True:
            shard = min(self.positions, key=lambda shard: (self.positions[shard], shard))
            number = self.positions[shard]
            self.positions[shard] += 1
            start = number * CONTEXT % (self.shards.shape[1] - CONTEXT)
            yield shard, number, self.shards[shard, start : start + CONTEXT + 1].long()

    def state_dict(self) -> dict[str, Any]:
        """Return what the loader saves of each of its workers."""
        return {"positions": dict(self.positions)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.positions = dict(state["positions"])


def ignore_sigterm(_worker: int) -> None:
    """Let a worker of the loader outlive SIGTERM, which torchrun sends to it, too; it ends with its rank."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


# --8<-- [start:deal]
def deal(rank_states: list[Any], rank: int, count: int) -> dict[str, Any]:
    """Deal the shards of all ranks that saved out to `count` ranks; return those of this one."""
    positions = {shard: number for state in rank_states for shard, number in state["positions"].items()}
    return {"positions": {shard: positions[shard] for shard in sorted(positions)[rank::count]}}


# --8<-- [end:deal]


def main(root: Path, steps: int, every: int) -> None:
    """Train up to a step, from the newest checkpoint in `root` if there is one; save some steps."""
    rank, count = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(256, 64), nn.Flatten(), nn.Linear(CONTEXT * 64, 256))
    replica = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = 0
    own: dict[str, Any] = {"positions": dict.fromkeys(range(rank, SHARD_COUNT, count), 0)}

    # --8<-- [start:load]
    with fp.Checkpointer(root, optimizer=optimizer, keep=3, process_group=dist.group.WORLD) as checkpoints:
        targets = {"model": model, "optimizer": optimizer}
        found = checkpoints.load(into=targets, missing_ok=True, on_resize=deal)
        if found is not None:
            step, own = found["step"], found["rank_state"]
        positions: Positions = dict(own["positions"])
        loader = StatefulDataLoader(
            Shards(positions),
            batch_size=2,
            num_workers=1,
            worker_init_fn=ignore_sigterm,
            multiprocessing_context="fork",  # a worker that is started otherwise does not notice that its rank is gone
        )
        if "loader" in own:  # as many ranks as saved it
            loader.load_state_dict(own["loader"])
        # --8<-- [end:load]

        # --8<-- [start:signal]
        def now() -> tuple[int, dict[str, Any], dict[str, Any]]:
            state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
            return step, state, {"positions": positions, "loader": loader.state_dict()}

        checkpoints.save_on_signal(now, grace_s=25)  # torchrun kills what is still there after 30 s
        # --8<-- [end:signal]
        batches = iter(loader)
        while step < steps:
            shards, numbers, samples = next(batches)
            loss = nn.functional.cross_entropy(replica(samples[:, :-1]), samples[:, -1])
            optimizer.zero_grad()
            loss.backward()
            seen = dict(zip(shards.tolist(), numbers.tolist(), strict=True))
            print(f"step {step + 1} rank {rank} of {count} saw {seen}\n", end="", flush=True)
            # --8<-- [start:save]
            step += 1  # before the optimizer's step, as now() may be called in it
            positions.update({shard: number + 1 for shard, number in seen.items()})  # the loader's workers are ahead
            optimizer.step()
            if step % every == 0:
                number, state, own = now()
                checkpoints.save(number, state, rank_state=own)
            # --8<-- [end:save]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", metavar="DIR", nargs="?", type=Path, default=Path("runs/stateful_loader"))
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--every", type=int, default=5, help="save every so many steps")
    arguments = parser.parse_args()
    if not dist.is_torchelastic_launched():
        parser.error("it trains with several processes, which torchrun starts; --help shows how")
    dist.init_process_group("gloo")
    try:
        main(**vars(arguments))
    finally:
        dist.destroy_process_group()
