"""Train a small transformer to write Python, with a checkpoint after every step, and resume.

Stop it in any way (Ctrl-C, kill, kill -9) and start it again: it resumes and reaches the same bits.

python examples/train_gpt.py [DIR] [--steps N] [--width N]
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

import torch
from torch import nn

import fastpersist as fp

CONTEXT, ROWS = 64, 8


class GPT(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map [rows, CONTEXT] of bytes to [rows, CONTEXT, 256]."""
        return self.head(self.layers(self.token(tokens) + self.place.weight, mask=self.mask, is_causal=True))


def main(root: Path, steps: int, width: int) -> None:
    """Train up to a step, from the newest checkpoint in `root` if there is one."""
    torch.manual_seed(0)
    source = b"".join(path.read_bytes() for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))
    text = torch.frombuffer(bytearray(source), dtype=torch.uint8)
    model = GPT(width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step, position = 0, 0

    # --8<-- [start:state]
    def state() -> dict[str, object]:  # everything that the next step depends on; dropout uses the generator
        own = {"step": step, "position": position, "rng": torch.get_rng_state()}
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), **own}

    # --8<-- [end:state]

    # --8<-- [start:resume]
    with fp.Checkpointer(root, optimizer=optimizer, keep=3) as checkpoints:
        targets = {"model": model, "optimizer": optimizer}  # filled in place
        found = checkpoints.load(into=targets, keys=["rng"], missing_ok=True)
        if found is not None:
            step, position = found["step"], found["position"]
            torch.set_rng_state(found["rng"])
            print(f"resumed at step {step}", flush=True)
        checkpoints.save_on_signal(lambda: (step, state()))  # SIGTERM: saved after the step, then the process ends
        # --8<-- [end:resume]
        # --8<-- [start:loop]
        while step < steps:
            starts = (position + torch.arange(ROWS) * (len(text) // ROWS)) % (len(text) - CONTEXT - 1)
            batch = text[starts[:, None] + torch.arange(CONTEXT + 1)].long()
            loss = nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            step, position = step + 1, position + CONTEXT
            optimizer.step()
            checkpoints.save(step, state(), metrics={"loss": loss.item()})  # written while the next step computes
            print(f"step {step}  loss {loss.item():.6f}", flush=True)
        # --8<-- [end:loop]
    print(f"checkpoints in {root}: steps {', '.join(map(str, checkpoints.steps()))}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", metavar="DIR", nargs="?", type=Path, default=Path("runs/train_gpt"))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--width", type=int, default=256)
    main(**vars(parser.parse_args()))
