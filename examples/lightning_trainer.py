"""Train a small transformer on Python's own source with Lightning, kill it with SIGKILL, and resume.

A child process trains with a checkpoint after every step, each written while the next step computes, and is killed in
the middle. This process resumes from the newest whole checkpoint, and compares with an undisturbed training.

python examples/lightning_trainer.py [--steps N] [--width N]
"""

from __future__ import annotations

import argparse
import logging
import signal
import subprocess
import sys
import sysconfig
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from fastpersist.integrations.lightning import FastPersistCallback, FastPersistCheckpointIO, last_checkpoint

# Lightning's advice (more workers, a validation loop), and what it uses that torch deprecates. Ours are not ignored.
warnings.filterwarnings("ignore", module="lightning")

CONTEXT, ROWS, KILLED_AT = 32, 8, 5
logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
torch.set_num_threads(1)


class Text(torch.utils.data.IterableDataset):
    """Batches of bytes, from the step on at which the training stands."""

    def __init__(self, trainer: lightning.Trainer) -> None:
        source = b"".join(path.read_bytes() for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))
        self.text = torch.frombuffer(bytearray(source), dtype=torch.uint8)
        self.trainer = trainer

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Yield [ROWS, CONTEXT + 1] of bytes."""
        step = self.trainer.global_step
        while True:
            starts = (step * CONTEXT + torch.arange(ROWS) * (len(self.text) // ROWS)) % (len(self.text) - CONTEXT - 1)
            yield self.text[starts[:, None] + torch.arange(CONTEXT + 1)].long()
            step += 1


class GPT(lightning.LightningModule):
    """Bytes in, logits of the next byte out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT))

    def training_step(self, batch: torch.Tensor, _number: int) -> torch.Tensor:
        """Return the loss of a batch."""
        hidden = self.layers(self.token(batch[:, :-1]) + self.place.weight, mask=self.mask, is_causal=True)
        loss = nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), batch[:, 1:].flatten())
        self.log("loss", loss)
        print(f"step {self.global_step + 1}  loss {loss.item():.6f}", flush=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def train_dataloader(self) -> torch.utils.data.DataLoader[torch.Tensor]:
        """Return the batches."""
        return torch.utils.data.DataLoader(Text(self.trainer), batch_size=None)


def train(root: Path, steps: int, width: int) -> GPT:
    """Train up to a step, from the newest whole checkpoint in `root` if there is one."""
    torch.manual_seed(0)
    newest = last_checkpoint(root)  # one that was damaged would be skipped
    if newest is not None:
        print(f"resuming from {Path(newest).name}")
    model = GPT(width)
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_steps=steps,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        plugins=[FastPersistCheckpointIO()],  # these two are all that it takes
        callbacks=[
            FastPersistCallback(),
            ModelCheckpoint(
                root, filename="{step}", monitor="loss", save_top_k=3, every_n_train_steps=1, save_last=True
            ),
        ],
    )
    trainer.fit(model, ckpt_path=newest)
    return model


def main(steps: int, width: int) -> None:
    """Train, kill, resume, compare."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["--child", str(Path(folder, "killed")), "--steps", str(steps), "--width", str(width)]
        with subprocess.Popen([sys.executable, __file__, *words], stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            for line in child.stdout:
                print(f"child: {line}", end="")
                if line.startswith(f"step {KILLED_AT} "):
                    child.send_signal(signal.SIGKILL)
                    break
        print("child: killed")
        resumed = train(Path(folder, "killed"), steps, width)
        whole = train(Path(folder, "whole"), steps, width)
        same = all(torch.equal(one, resumed.state_dict()[name]) for name, one in whole.state_dict().items())
        print("the killed training has reached", "the same weights, bit for bit" if same else "OTHER WEIGHTS")
        print("checkpoints:", ", ".join(sorted(path.name for path in Path(folder, "killed").iterdir())))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        train(options.child, options.steps, options.width)
    else:
        main(options.steps, options.width)
