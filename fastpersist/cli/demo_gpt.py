"""The trainer of `fastpersist demo`: a small GPT that learns to write Python, and saves everything it needs to go on.

`python -m fastpersist.cli.demo_gpt` is one run of it, in a process of its own, because the demo kills one. Two runs of
the same steps give the same bits, so whoever resumes must find *all* of the state: parameters, AdamW's moments, step,
place in the text, and the generator that dropout draws from.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import logging
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional

import fastpersist
from fastpersist.cli.terminal import run_command, size_text

__all__ = ["GPT", "RESULT_NAME", "STATE_NAME", "Sizes", "Training", "sizes", "stdlib_modules"]

STATE_NAME = "state.pt"
RESULT_NAME = "result.json"
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
    """One layer: look back over the text, then think about what was seen."""

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
        """Return all that the next step depends on."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step_count,
            "position": self.position,
            "rng": torch.get_rng_state(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Go back to where `state` was taken."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step_count, self.position = state["step"], state["position"]
        torch.set_rng_state(state["rng"])

    def digest(self) -> str:
        """Return the SHA-256 of every parameter and every moment."""
        digest = hashlib.sha256()
        moments = (value for state in self.optimizer.state.values() for value in state.values())
        for tensor in (*self.model.state_dict().values(), *moments):
            tensor = tensor.detach().contiguous()
            digest.update(ctypes.string_at(tensor.data_ptr(), tensor.nbytes))
        return digest.hexdigest()


def main() -> int:
    """Train in DIR up to a step, saving to DIR/state.pt, and leave losses and digest in DIR/result.json."""
    parser = argparse.ArgumentParser(prog="python -m fastpersist.cli.demo_gpt", description=main.__doc__)
    parser.add_argument("directory", type=Path, metavar="DIR")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--save-every", type=int, required=True, metavar="STEPS")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--resume", action="store_true", help="go on from DIR/state.pt")
    arguments = parser.parse_args()
    return run_command(lambda: _train(arguments))


def _train(arguments: argparse.Namespace) -> int:
    logging.basicConfig(format="   log: %(message)s", stream=sys.stdout)
    logging.getLogger("fastpersist").setLevel(logging.INFO)
    # One thread adds up the same numbers in the same order, and does not spin while it waits for another on a busy
    # machine, where a run on two threads was five times slower than on one.
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)

    training = Training(sizes(quick=arguments.quick))
    path = arguments.directory / STATE_NAME
    if arguments.resume:
        training.load_state(fastpersist.load(path))
        print(f"   resumed at step {training.step_count}", flush=True)
    losses = {}
    while training.step_count < arguments.steps:
        loss = training.step()
        losses[training.step_count] = loss.hex()
        if training.step_count % arguments.save_every == 0:
            report = fastpersist.save(training.state(), path)
            saved = f"saved {size_text(report.size_bytes)} in {report.total_s:.3f} s"
            print(f"   step {training.step_count:4}  loss {loss:.4f}  {saved}", flush=True)
    result = {"losses": losses, "digest": training.digest()}
    (arguments.directory / RESULT_NAME).write_text(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
