"""What `Checkpointer.save` takes of the training thread where it has to copy the state, beside torch's own copy of it.

    python benchmarks/copied_state.py DIR [--megabytes 1000] [--saves 6] [--json FILE]

The state has 16 tensors, and no optimizer was given: all of it may change as soon as save() has returned. For one
thread (`torch.set_num_threads`) and for as many as torch takes: the first save, whose memory is fresh, and the median
of the others. Each save is written before torch copies, and before the next one begins.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from pathlib import Path
from statistics import median

import harness  # first: it says what to do without an installed fastpersist
import torch

import fastpersist as fp


def main() -> int:
    """Measure, and print a line for each number of threads."""
    parser = harness.argument_parser("copied_state.py", __doc__)
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--saves", type=int, default=6)
    options = parser.parse_args()
    state = {f"w{number}": torch.rand(options.megabytes * 1_000_000 // 64) for number in range(16)}
    found = {}
    for thread_count in sorted({1, torch.get_num_threads()}):
        torch.set_num_threads(thread_count)
        root = tempfile.mkdtemp(prefix="copied-", dir=options.directory)
        try:
            saves_ms, copies_ms = found[thread_count] = measure(root, state, options.saves)
        finally:
            shutil.rmtree(root)
        print(
            f"{thread_count} threads: first save {saves_ms[0]:.0f} ms, then {median(saves_ms[1:]):.0f} "
            f"({min(saves_ms[1:]):.0f} – {max(saves_ms[1:]):.0f}); torch copies in {median(copies_ms):.0f} ms"
        )
    if options.json:
        Path(options.json).write_text(json.dumps({"torch": torch.__version__, "saves and copies, ms": found}, indent=1))
    return 0


def measure(root: str, state: dict[str, torch.Tensor], save_count: int) -> tuple[list[float], list[float]]:
    """Return the milliseconds of each call of save, and of each copy by torch."""
    copies = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    size_bytes = sum(tensor.nbytes for tensor in state.values())
    saves_ms, copies_ms = [], []
    with fp.Checkpointer(root, keep=1, max_host_bytes=2 * size_bytes) as checkpoints:
        for step in range(save_count):
            started_s = time.perf_counter()
            save = checkpoints.save(step, state)
            saves_ms.append(1e3 * (time.perf_counter() - started_s))
            save.result()
            for _ in range(2):  # the second one counts
                started_s = time.perf_counter()
                for name, tensor in state.items():
                    copies[name].copy_(tensor)
            copies_ms.append(1e3 * (time.perf_counter() - started_s))
    return saves_ms, copies_ms


if __name__ == "__main__":
    harness.run_benchmark(main)
