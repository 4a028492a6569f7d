"""Train a little, save, lose the model, resume: the basic calls of FastPersist on one page.

python examples/quickstart.py [checkpoint.pt]
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch

import fastpersist as fp


def build() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Make a model and its optimizer; the seed stands for "a fresh process"."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> float:
    """Run some steps on data that depends on the step alone; return the last loss."""
    loss = torch.tensor(0.0)
    for step in steps:
        inputs = torch.randn(64, 256, generator=torch.Generator().manual_seed(step))
        loss = (model(inputs) - inputs.sum(dim=1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def main(path: Path) -> None:
    """Show save, verify, load, load_into, and that resuming gives the same loss bit for bit."""
    model, optimizer = build()
    train(model, optimizer, range(50))
    # --8<-- [start:save]
    report = fp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 50}, path)
    print(f"saved {report.size_bytes / 1e6:.1f} MB by {report.engine} in {report.total_s * 1e3:.1f} ms, durable")
    # --8<-- [end:save]
    uninterrupted = train(model, optimizer, range(50, 100))

    # --8<-- [start:look]
    print("verify:", "good" if fp.verify(path).ok else "damaged")
    for tensor in fp.inspect(path).tensors[:3]:
        print(f"  {tensor.name:24} {tensor.dtype:8} {tensor.shape} at {tensor.offset_bytes}")
    # --8<-- [end:look]

    model, optimizer = build()
    # --8<-- [start:load]
    state = fp.load(path)  # or torch.load(path): it is an ordinary torch.save file
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    # --8<-- [end:load]
    resumed = train(model, optimizer, range(state["step"], 100))
    print(f"loss without interruption {uninterrupted:.9f}, resumed {resumed:.9f}")
    if resumed != uninterrupted:
        raise SystemExit("the resumed run took another way")

    # --8<-- [start:safetensors]
    fp.save(model.state_dict(), path.with_suffix(".safetensors"), metadata={"format": "pt"})
    fp.load_into(path.with_suffix(".safetensors"), model)  # fills the parameters in place, no second copy
    # --8<-- [end:safetensors]
    print("also as", path.with_suffix(".safetensors").name)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", metavar="checkpoint.pt", nargs="?", type=Path, help="default: a file that is removed")
    path = parser.parse_args().path
    if path is not None:
        main(path)
    else:
        with tempfile.TemporaryDirectory(dir=".") as directory:
            main(Path(directory, "checkpoint.pt"))
