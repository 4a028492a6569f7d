"""What events cost the training thread: the time of each save that it spends telling of it.

    .venv/bin/python benchmarks/events.py DIR [--saves 200]

Real saves of a small model, of which all goes to the log in the root and to one callback. Each call by which the
training thread tells of a save is timed: "save_begun" in save(), "captured" at the optimizer's step, and "committed" if
the disk was faster than save(). The bar is 50 µs for each save.
"""

from __future__ import annotations

import argparse
import functools
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import fastpersist as fp
from fastpersist.saving.pending_save import PendingSave

BAR_US = 50.0


def main() -> None:
    """Measure, and print one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--saves", type=int, default=200)
    options = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="events-", dir=options.directory))
    try:
        per_save = measure(root / "run", options.saves)
    finally:
        shutil.rmtree(root)
    ordered = sorted(per_save)
    print(
        f"{len(per_save)} saves: median {statistics.median(per_save):.1f} µs, "
        f"95 % within {ordered[int(0.95 * len(ordered))]:.1f} µs, most {ordered[-1]:.1f} µs; bar {BAR_US:.0f} µs"
    )


def measure(root: Path, count: int) -> list[float]:
    """Return the microseconds that the training thread took to tell of each save."""
    spent_us = 0.0
    here = threading.current_thread()

    def timed(tell: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(tell)
        def timing(pending: PendingSave, *arguments: Any, **options: Any) -> None:
            nonlocal spent_us
            started = time.perf_counter_ns()
            tell(pending, *arguments, **options)
            if threading.current_thread() is here:
                spent_us += (time.perf_counter_ns() - started) / 1e3

        return timing

    PendingSave._tell = timed(PendingSave._tell)  # type: ignore[method-assign]
    stop = fp.events.subscribe(lambda event: None)
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(8)))
    optimizer = torch.optim.AdamW(model.parameters())
    per_save = []
    with fp.Checkpointer(root, optimizer=optimizer, keep=2) as checkpoints:
        for step in range(count + 5):
            spent_us = 0.0
            model(torch.randn(8, 256)).sum().backward()
            checkpoints.save(step, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
            optimizer.step()
            checkpoints.wait()
            per_save.append(spent_us)
    stop()
    return per_save[5:]  # the first ones import, and make threads


if __name__ == "__main__":
    main()
