"""A training that uses only torch.save and torch.load, run directly, and unchanged through `fastpersist run`.

python examples/torch_save_unchanged.py                      show both, kill the second in the middle, and resume it
python examples/torch_save_unchanged.py DIR                  train, with torch's own save and load
fastpersist run examples/torch_save_unchanged.py DIR         train, with fastpersist's in their place
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import torch
from torch import nn

STEPS, CONTEXT, ROWS, WIDTH = 40, 16, 32, 64


def train(directory: Path) -> None:
    """Train a model of Python text, with a checkpoint after every step, from the last one if there is one."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    library = Path(sysconfig.get_path("stdlib"))
    text = torch.frombuffer(bytearray((library / "argparse.py").read_bytes()), dtype=torch.uint8)
    model = nn.Sequential(
        nn.Embedding(256, WIDTH),
        nn.Flatten(),
        nn.Linear(CONTEXT * WIDTH, 4 * WIDTH),
        nn.GELU(),
        nn.Linear(4 * WIDTH, 256),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first = 1
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "checkpoint.pt"
    if path.exists():
        checkpoint = torch.load(path)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        first = checkpoint["step"] + 1
    for step in range(first, STEPS + 1):
        starts = torch.randint(len(text) - CONTEXT - 1, [ROWS], generator=torch.Generator().manual_seed(step))
        batch = text[starts[:, None] + torch.arange(CONTEXT + 1)].long()
        loss = nn.functional.cross_entropy(model(batch[:, :-1]), batch[:, -1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, path)
        print(f"step {step}  loss {loss.item():.6f}", flush=True)


def show() -> None:
    """Run the training three times, each in its own process: with torch's functions, with ours, and resumed."""
    with tempfile.TemporaryDirectory() as stock, tempfile.TemporaryDirectory() as ours:
        python = [sys.executable, "-W", "error"]
        whole = run([*python, __file__, stock])
        print(f"as it is:                       {whole[0]}  …  {whole[-1]}")
        through_us = [*python, "-m", "fastpersist", "run", "--async", __file__, ours]
        before = run(through_us, kill_after=STEPS // 2)
        print(f"through `fastpersist run`:      {before[0]}  …  {before[-1]}, then kill -9")
        after = run(through_us)
        print(f"the same command again:         {after[0]}  …  {after[-1]}")
        if not before == whole[: len(before)] or not after == whole[-len(after) :]:
            raise SystemExit("the losses are not those of the training that was not stopped")
        checkpoint = torch.load(Path(ours) / "checkpoint.pt")
        print(f"read by torch's own torch.load: step {checkpoint['step']}; the losses are the same, digit by digit")


def run(command: list[str], kill_after: int = 0) -> list[str]:
    """Run a training and return its output; kill it when it has reported a given step."""
    lines = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for line in child.stdout:
            lines.append(line.strip())
            if len(lines) == kill_after:
                child.kill()
    if child.returncode and not kill_after:
        raise SystemExit(f"{' '.join(command)} ended with {child.returncode}")
    return lines


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", metavar="DIR", nargs="?", type=Path)
    directory = parser.parse_args().directory
    if directory is not None:
        train(directory)
    else:
        show()
