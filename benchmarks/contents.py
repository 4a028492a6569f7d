"""How fast `fastpersist diff`, `stats` and `convert` are, beside reading (and writing) the same files.

    .venv/bin/python benchmarks/contents.py DIR [--rounds 5] [--states large small] [--json FILE]

The yardsticks move the same bytes and look at none: files are read in blocks of 8 MiB, eight at once of each; a copy is
also written and synced. All rows run in turn, with files that are not in the page cache, for several rounds. The bar is
80 % of the yardstick's speed. What is timed is the command's work, opening included, without the start of Python.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import harness  # first: it says what to do without an installed fastpersist
import torch

import fastpersist as fp
from fastpersist.cli.bench.places import scratch_directory
from fastpersist.cli.bench.worker import forget_peak, resident_bytes
from fastpersist.contents.comparison import compare
from fastpersist.contents.conversion import Wish, convert
from fastpersist.contents.statistics import iter_statistics
from fastpersist.contents.stored import open_contents
from fastpersist.streaming.reading import new_memory

BLOCK_BYTES = 8 << 20
DEPTH = 8
BAR = 0.80
STATES = {"large": (288, 1_048_576), "small": (2030, 125_000), "tiny": (10_000, 8_192)}
"""How many tensors of single precision, and how many elements each has."""


MEMORY = new_memory(2 * DEPTH * BLOCK_BYTES, torch.device("cpu")).zero_().split(BLOCK_BYTES)
"""Of the yardsticks: there before the time begins."""


def make_state(name: str) -> dict[str, torch.Tensor]:
    """Return normal values, the same each time."""
    count, element_count = STATES[name]
    generator = torch.Generator().manual_seed(0)
    return {f"layer.{number}.weight": torch.randn(element_count, generator=generator) for number in range(count)}


def read_files(paths: list[str]) -> None:
    """Read files side by side, and look at nothing."""
    memory = deque(MEMORY[: DEPTH * len(paths)])
    files = [fp.TensorFile(path) for path in paths]
    places = [
        (file, start, min(BLOCK_BYTES, file.size() - start))
        for start in range(0, max(file.size() for file in files), BLOCK_BYTES)
        for file in files
        if start < file.size()
    ]
    under_way: deque[tuple[fp.PendingIO, torch.Tensor]] = deque()
    for file, start, size_bytes in places:
        if not memory:
            request, used = under_way.popleft()
            request.result()
            memory.append(used)
        one = memory.popleft()
        under_way.append((file.read_async(one[:size_bytes], start), one))
    for request, _ in under_way:
        request.result()
    for file in files:
        file.close()


def copy_file(path: str, out: str) -> None:
    """Read a file and write it to another place, durable."""
    with fp.TensorFile(path) as source, fp.TensorFile(out, "w") as target:
        reads: deque[tuple[int, fp.PendingIO]] = deque()
        writes: dict[int, fp.PendingIO] = {}
        starts = range(0, source.size(), BLOCK_BYTES)

        def write_first() -> None:
            number, request = reads.popleft()
            size_bytes = request.result()
            writes[number % DEPTH] = target.write_async(MEMORY[number % DEPTH][:size_bytes], starts[number])

        with open(out, "r+b") as file:
            os.posix_fallocate(file.fileno(), 0, source.size())
        for number, start in enumerate(starts):
            if number >= DEPTH // 2:
                write_first()
            if number >= DEPTH:
                writes.pop(number % DEPTH).result()
            part = MEMORY[number % DEPTH][: min(BLOCK_BYTES, source.size() - start)]
            reads.append((number, source.read_async(part, start)))
        while reads:
            write_first()
        target.sync()


def differ(a: str, b: str) -> None:
    """Compare as `fastpersist diff` does."""
    with open_contents(a) as ours, open_contents(b, like=ours) as theirs:
        compare(ours, theirs)


def look_at(path: str) -> None:
    """Calculate as `fastpersist stats` does."""
    with open_contents(path) as contents:
        for _ in iter_statistics(list(contents.tensors.values())):
            pass


def convert_to(path: str, out: str) -> None:
    """Write another form as `fastpersist convert` does."""
    with open_contents(path) as contents:
        convert(contents, out, Wish())


def peak_bytes(run: Callable[[], None]) -> int:
    """Return by how much memory grew at most."""
    forget_peak()
    before_bytes = resident_bytes("VmRSS")
    run()
    return resident_bytes("VmHWM") - before_bytes


def timed(run: Callable[[], None], directory: str) -> float:
    """Run with nothing of the directory in the page cache; what is written there is removed outside the time."""
    os.sync()
    for entry in os.scandir(directory):
        with open(entry.path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    started = time.perf_counter()
    run()
    seconds = time.perf_counter() - started
    for entry in os.scandir(directory):
        if entry.name.startswith("out"):
            os.unlink(entry.path)
    return seconds


def measure(name: str, directory: str, rounds: int) -> list[dict[str, object]]:
    """Measure one state and print its table."""
    a, equal, different = (os.path.join(directory, f"{one}.pt") for one in ("a", "equal", "different"))
    out_pt, out_safetensors = os.path.join(directory, "out.pt"), os.path.join(directory, "out.safetensors")
    state = make_state(name)
    fp.save(state, a)
    fp.save(state, equal)
    for tensor in state.values():
        tensor.mul_(1.001)
    fp.save(state, different)
    size_bytes = os.path.getsize(a)
    print(f"\n{name}: {len(state)} tensors, {size_bytes / 1e9:.2f} GB, medians of {rounds}")
    del state
    rows: dict[str, tuple[str, Callable[[], None]]] = {
        "read both": ("", lambda: read_files([a, equal])),
        "diff, equal": ("read both", lambda: differ(a, equal)),
        "diff, every element differs": ("read both", lambda: differ(a, different)),
        "read": ("", lambda: read_files([a])),
        "stats": ("read", lambda: look_at(a)),
        "copy": ("", lambda: copy_file(a, out_pt)),
        "convert to safetensors": ("copy", lambda: convert_to(a, out_safetensors)),
    }
    seconds: dict[str, list[float]] = {row: [] for row in rows}
    for _ in range(rounds):
        for row, (_, run) in rows.items():
            seconds[row].append(timed(run, directory))
    found: list[dict[str, object]] = []
    for row, (beside, run) in rows.items():
        middle = statistics.median(seconds[row])
        ratio = statistics.median(seconds[beside]) / middle if beside else None
        peak = peak_bytes(lambda run=run: timed(run, directory))  # type: ignore[misc]
        found.append(
            {"state": name, "row": row, "seconds": seconds[row], "beside": beside, "ratio": ratio, "peak_bytes": peak}
        )
        said = "" if ratio is None else f"{100 * ratio:4.0f} % of {beside}{'' if ratio >= BAR else ', below the bar'}"
        print(
            f"  {row:28} {middle:6.3f} s ({min(seconds[row]):.3f} – {max(seconds[row]):.3f})"
            f"  {peak / 2**20:4.0f} MiB  {said}"
        )
    return found


def main() -> int:
    """Measure, and print a table for each state."""
    parser = harness.argument_parser("contents.py", __doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--states", nargs="+", choices=list(STATES), default=["large", "small"])
    options = parser.parse_args()
    results: list[dict[str, object]] = []
    for name in options.states:
        with scratch_directory(options.directory) as scratch:
            results += measure(name, scratch, options.rounds)
    if options.json:
        about = {"date": time.strftime("%Y-%m-%d"), "kernel": platform.release(), "cpu_count": os.cpu_count()}
        Path(options.json).write_text(json.dumps({**about, "torch": torch.__version__, "rows": results}, indent=1))
    return 0


if __name__ == "__main__":
    harness.run_benchmark(main)
