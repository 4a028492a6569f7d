"""A training loop of Accelerate, with a checkpoint after every step, written while the next step computes.

Two lines differ from a loop with Accelerate's own saving. Without arguments it kills a training in the middle
(SIGKILL), resumes it from its newest checkpoint, and compares the bits with those of an undisturbed training.

python examples/accelerate_loop.py [DIR] [--steps N] [--width N]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fastpersist.integrations.accelerate import load_state, save_state, wait

CONTEXT, ROWS, SAMPLE_BYTES = 32, 16, 1 << 19

torch.set_num_threads(1)


class Writer(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.token = nn.Embedding(256, width)
        self.memory = nn.GRU(width, width, batch_first=True)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map [rows, CONTEXT] of bytes to [rows, CONTEXT, 256]."""
        return self.head(self.dropout(self.memory(self.token(tokens))[0]))


def train(root: Path, steps: int, width: int) -> None:
    """Train up to a step, from the newest whole checkpoint in `root` if there is one."""
    configuration = ProjectConfiguration(project_dir=str(root), automatic_checkpoint_naming=True, total_limit=3)
    shuffled = DataLoaderConfiguration(use_seedable_sampler=True)  # the same order again when it resumes
    accelerator = Accelerator(cpu=True, project_config=configuration, dataloader_config=shuffled)
    torch.manual_seed(0)
    source = b"".join(path.read_bytes() for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))
    text = torch.frombuffer(bytearray(source[:SAMPLE_BYTES]), dtype=torch.uint8)
    windows = TensorDataset(text[: len(text) // (CONTEXT + 1) * (CONTEXT + 1)].view(-1, CONTEXT + 1))
    model = Writer(width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 500)
    chance = torch.Generator().manual_seed(0)  # its own: to begin again draws nothing from what dropout draws from
    batches = DataLoader(windows, batch_size=ROWS, shuffle=True, generator=chance)
    model, optimizer, schedule, batches = accelerator.prepare(model, optimizer, schedule, batches)
    step = 0
    if (root / "checkpoints").is_dir():
        newest = load_state(accelerator)  # in place of accelerator.load_state()
        step = int(newest.name.removeprefix("checkpoint_"))
        configuration.iteration = step + 1
        print(f"resumed at step {step}", flush=True)
    else:
        configuration.iteration = 1  # so that checkpoint_N is the state after N steps
    for (rows,) in accelerator.skip_first_batches(batches, step):
        if step == steps:
            break
        rows = rows.long()
        loss = nn.functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        step += 1
        save_state(accelerator)  # in place of accelerator.save_state()
        print(f"step {step}  loss {loss.item():.6f}", flush=True)
    wait(accelerator)  # a normal end of the program waits, too; this raises the error if there is one
    accelerator.end_training()


def show(steps: int, width: int) -> None:
    """Kill a training, resume it, and compare it with an undisturbed one."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-W", "error", __file__, "--steps", str(steps), "--width", str(width)]
        whole = subprocess.run([*command, f"{folder}/whole"], stdout=subprocess.PIPE, text=True, check=True)
        with subprocess.Popen([*command, f"{folder}/killed"], stdout=subprocess.PIPE, text=True) as child:
            before = [child.stdout.readline() for _ in range(steps // 2)]
            child.kill()
        print(f"killed after:  {before[-1]}", end="")
        after = subprocess.run([*command, f"{folder}/killed"], stdout=subprocess.PIPE, text=True, check=True)
        resumed, *lines = after.stdout.splitlines()
        print(f"then:          {resumed}")
        print(f"at its end:    {lines[-1]}")
        expected = whole.stdout.splitlines()
        print(f"left alone:    {expected[-1]}")
        if lines != expected[-len(lines) :]:
            raise SystemExit("the training that was killed took another way")
        print(f"checkpoints:   {', '.join(sorted(path.name for path in Path(folder).glob('killed/checkpoints/*')))}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", metavar="DIR", nargs="?", type=Path, help="train there, without the kill")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--width", type=int, default=64)
    arguments = parser.parse_args()
    if arguments.root is None:
        show(arguments.steps, arguments.width)
    else:
        train(arguments.root, arguments.steps, arguments.width)
