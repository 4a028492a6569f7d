"""The trainer of `fastpersist demo`: a small GPT that learns to write Python, with a checkpoint after every step.

`python -m fastpersist.cli.demo.gpt` is one run, in its own process, because the demo kills one. Two runs of the same
steps give the same bits, so a resumed run needs *all* of the state: parameters, AdamW's moments, step, place in the
text, and the generator that dropout draws from. The run reports events on standard output, one JSON object a line;
`demo.run` reads them.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import os
import sys
import sysconfig
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional

import fastpersist
from fastpersist.cli.terminal import run_command

__all__ = ["GPT", "KEPT_COUNT", "TURN_COUNT", "WAYS", "Sizes", "Training", "sizes", "stdlib_modules"]

WAYS = ("nothing", "fastpersist", "torch")
KEPT_COUNT = 3  # checkpoints
TURN_COUNT = 5  # steps; what the first of them waits for was begun in the turn before
WARM_UP_COUNT = 3  # steps whose times are no measure: memory is touched for the first time, the arena is made
DROPOUT = 0.1
VOCABULARY = 256  # bytes


@dataclass(frozen=True, slots=True)
class Sizes:
    """How big model and batch are."""

    width: int
    layers: int
    heads: int
    context: int
    batch: int


def sizes(*, quick: bool) -> Sizes:
    """Return the sizes of the demo, or of its quick version."""
    return Sizes(128, 2, 4, 64, 4) if quick else Sizes(256, 4, 8, 128, 4)


class Block(nn.Module):
    """One transformer layer: causal attention, then a feed-forward network."""

    def __init__(self, size: Sizes) -> None:
        super().__init__()
        self.heads = size.heads
        self.norm_1, self.norm_2 = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.look, self.join = nn.Linear(size.width, 3 * size.width), nn.Linear(size.width, size.width)
        self.think = nn.Sequential(
            nn.Linear(size.width, 4 * size.width),
            nn.GELU(),
            nn.Linear(4 * size.width, size.width),
            nn.Dropout(DROPOUT),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [batch, context, width] to the same shape."""
        batch, context, width = x.shape
        split = self.look(self.norm_1(x)).view(batch, context, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.join(seen.transpose(1, 2).reshape(batch, context, width))
        return cast(torch.Tensor, x + self.think(self.norm_2(x)))


class GPT(nn.Module):
    """Bytes in, the logits of the next byte out."""

    def __init__(self, size: Sizes) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(VOCABULARY, size.width), nn.Embedding(size.context, size.width)
        self.blocks = nn.Sequential(*(Block(size) for _ in range(size.layers)))
        self.head = nn.Sequential(nn.LayerNorm(size.width), nn.Linear(size.width, VOCABULARY))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map [batch, context] of int64 to [batch, context, 256]."""
        return cast(torch.Tensor, self.head(self.blocks(self.token(tokens) + self.place.weight[: tokens.shape[1]])))


def stdlib_modules() -> list[Path]:
    """List the top-level modules of the standard library by name: text that every machine has.

    Raises:
        UnsupportedError: This Python came without the source of its library.
    """
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"), key=lambda path: path.name)
    if not modules:
        raise fastpersist.UnsupportedError(
            f"the demo trains on the source of Python's library, and {sysconfig.get_path('stdlib')} has no *.py files"
        )
    return modules


class Training:
    """A run in progress: the state, and how one step changes it."""

    def __init__(self, size: Sizes) -> None:
        torch.manual_seed(1)
        self.size = size
        self.text = torch.frombuffer(
            bytearray(b"".join(path.read_bytes() for path in stdlib_modules())), dtype=torch.uint8
        )
        self.model = GPT(size)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.step_count = 0
        self.position = 0  # of the batch's first row; row k reads k batch-ths of the text further on

    def step(self) -> float:
        """Learn from the next batch; return its loss."""
        size, stride = self.size, len(self.text) // self.size.batch
        last = stride - size.context - 1
        rows = [self.text[row * stride + self.position % last :][: size.context + 1] for row in range(size.batch)]
        batch = torch.stack(rows).long()
        logits = self.model(batch[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.step_count += 1
        self.position += size.context
        return loss.item()

    def state(self) -> dict[str, Any]:
        """Return the state that all ranks of a larger job would share."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "step": self.step_count}

    def rank_state(self) -> dict[str, Any]:
        """Return the state of this process alone: the place in its data, and its random generator."""
        return {"position": self.position, "rng": torch.get_rng_state()}

    def resume(self, checkpoints: fastpersist.Checkpointer) -> None:
        """Go back to the newest checkpoint; model and optimizer are filled in place."""
        state = checkpoints.load(into={"model": self.model, "optimizer": self.optimizer})
        self.step_count = state["step"]
        self.position = state["rank_state"]["position"]
        torch.set_rng_state(state["rank_state"]["rng"])

    def digest(self) -> str:
        """Return the SHA-256 of every parameter, every moment, the place in the text and the generator."""
        digest = hashlib.sha256(f"{self.step_count} {self.position}".encode())
        moments = (value for state in self.optimizer.state.values() for value in state.values())
        for tensor in (*self.model.state_dict().values(), *moments, torch.get_rng_state()):
            tensor = tensor.detach().contiguous()
            digest.update(ctypes.string_at(tensor.data_ptr(), tensor.nbytes))
        return digest.hexdigest()


def main() -> int:
    """Train up to a step, and report events on standard output, one JSON object a line."""
    parser = argparse.ArgumentParser(prog="python -m fastpersist.cli.demo.gpt", description=main.__doc__)
    parser.add_argument("directory", type=Path, metavar="DIR")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--save-with", choices=(*WAYS, "turns"), required=True, help="turns: each of them, in turn")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in DIR")
    arguments = parser.parse_args()
    return run_command(lambda: _train(arguments))


def _train(arguments: argparse.Namespace) -> int:
    # One thread adds up the same numbers in the same order, and leaves the other cores to the writer.
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    training = Training(sizes(quick=arguments.quick))
    told_count = 0

    def new_saves() -> list[dict[str, Any]]:
        nonlocal told_count
        new = checkpoints.stats()[told_count:]
        told_count += len(new)
        return [asdict(stats) for stats in new]

    with fastpersist.Checkpointer(arguments.directory, optimizer=training.optimizer, keep=KEPT_COUNT) as checkpoints:
        if arguments.resume:
            training.resume(checkpoints)
            _tell("resumed", step=training.step_count)
        settled_after = training.step_count + WARM_UP_COUNT
        way = ""
        while training.step_count < arguments.steps:
            wanted_way = _way(arguments.save_with, training.step_count)
            if wanted_way != way:
                checkpoints.wait()  # of this turn's saves nothing reaches into the next
                way, settled_after = wanted_way, max(settled_after, training.step_count + 1)
            started_s = time.perf_counter()
            loss = training.step()
            if way == "fastpersist":
                checkpoints.save(
                    training.step_count, training.state(), rank_state=training.rank_state(), metrics={"loss": loss}
                )
            elif way == "torch":
                _save_with_torch(training, arguments.directory / "state.pt")
            step_s = time.perf_counter() - started_s
            settled_s = step_s if training.step_count > settled_after else None
            _tell("step", step=training.step_count, way=way, loss=loss.hex(), step_s=settled_s, saves=new_saves())
    _tell("end", digest=training.digest(), saves=new_saves())
    return 0


def _way(save_with: str, step_count: int) -> str:
    return WAYS[step_count // TURN_COUNT % len(WAYS)] if save_with == "turns" else save_with


def _save_with_torch(training: Training, path: Path) -> None:
    """Save with torch.save, durably and so that a whole checkpoint exists at any time."""
    temporary = path.with_suffix(".new")
    with temporary.open("wb") as file:
        torch.save({**training.state(), **training.rank_state()}, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    fd = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _tell(event: str, **facts: object) -> None:
    print(json.dumps({"event": event, **facts}), flush=True)


if __name__ == "__main__":
    sys.exit(main())
