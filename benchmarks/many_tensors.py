"""What `Checkpointer.save` takes of the training thread when a state has many small tensors.

    .venv/bin/python benchmarks/many_tensors.py DIR [--tensors 10000 100000] [--saves 9] [--json FILE]

A model of parameters with 64 to 511 elements, and a fused AdamW, which has three more tensors for each. The first save
plans anew; the median is of those after it. Python's garbage collector is off, as it would add by chance.
"""

from __future__ import annotations

import gc
import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import harness  # first: it says what to do without an installed fastpersist
import torch

import fastpersist as fp


def main() -> int:
    """Measure, and print a line for each number of tensors."""
    parser = harness.argument_parser("many_tensors.py", __doc__)
    parser.add_argument("--tensors", type=int, nargs="+", default=[10_000, 100_000])
    parser.add_argument("--saves", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    gc.disable()
    found = {}
    for count in options.tensors:
        root = tempfile.mkdtemp(prefix="many-", dir=options.directory)
        try:
            first_ms, *others_ms = found[count] = measure(root, count // 4, options.saves + 1)
        finally:
            shutil.rmtree(root)
        spread = f"{min(others_ms):.2f} – {max(others_ms):.2f}"
        print(f"{count:7} tensors: first {first_ms:.1f} ms, then {statistics.median(others_ms):.2f} ms ({spread})")
    if options.json:
        Path(options.json).write_text(json.dumps({"torch": torch.__version__, "milliseconds": found}, indent=1))
    return 0


def measure(root: str, parameter_count: int, save_count: int) -> list[float]:
    """Return the milliseconds of each call of save."""
    generator = torch.Generator().manual_seed(0)
    sizes = (64 + number % 448 for number in range(parameter_count))
    model = torch.nn.Module()
    model.vectors = torch.nn.ParameterList(torch.randn(size, generator=generator) for size in sizes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    found = []
    with fp.Checkpointer(root, optimizer=optimizer, keep=1) as checkpoints:
        for step in range(save_count):
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            started_s = time.perf_counter()
            pending = checkpoints.save(step, state)
            found.append((time.perf_counter() - started_s) * 1e3)
            optimizer.step()
            pending.result()
            del state
    return found


if __name__ == "__main__":
    harness.run_benchmark(main)
