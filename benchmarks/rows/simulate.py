"""Which rows a cache keeps: traces of the workloads, replayed against policies; prints a table for each trace.

    python benchmarks/rows/simulate.py DIR          compiles the simulator; DIR keeps the traces (1 GB)
    python benchmarks/rows/simulate.py DIR --traces graph drift --policies "sampled k=8" "sampled k=32" --shares 5

`degree` keeps the nodes that most others have as a neighbour, so only traces of a graph have it.
The first quarter of each trace warms the cache and is not counted. A batch's unique ids are what is asked for. Cells
are hits in percent, and in parentheses the share of what Belady with bypass has, who knows the whole trace.
"""

from __future__ import annotations

import argparse
import struct
import subprocess
from collections.abc import Iterable, Sequence
from itertools import chain, repeat
from pathlib import Path

import graphs
import torch

POLICIES = (
    "lru",
    "clock",
    "sieve",
    "s3fifo",
    "s3fifo promote=1",
    "static",
    "degree",
    *(f"sampled window={window}" for window in (0, 1, 2, 4, 8, 16)),
)
"""As cache_simulator.cc reads them. S3-FIFO twice: a row comes into its main queue after two hits, or after one."""

_OF_A_GRAPH = ("graph", "epochs")
TRACES = (*_OF_A_GRAPH, "zipf-0.9", "zipf-1.1", "drift", "uniform")
SHARES = (1.0, 5.0, 10.0, 20.0)
_EDGES_PER_NODE = 15


def main(words: Sequence[str] | None = None) -> None:
    """Make what is missing of traces and simulator, and print a table for each trace."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, metavar="DIR", help="existing directory for graph, traces, simulator")
    parser.add_argument("--traces", nargs="+", choices=TRACES, default=TRACES)
    parser.add_argument("--policies", nargs="+", default=POLICIES, metavar="WORDS")
    parser.add_argument("--shares", nargs="+", type=float, default=SHARES, metavar="PERCENT", help="cache, of the rows")
    parser.add_argument("--scale", type=int, default=23, help="the graph has 2**SCALE nodes (default: 23)")
    parser.add_argument("--batches", type=int, default=240, metavar="N", help="of each trace (default: 240)")
    options = parser.parse_args(words)
    source = Path(__file__).with_name("cache_simulator.cc")
    simulator = options.directory / "cache_simulator"
    subprocess.run(["g++", "-std=c++20", "-O2", "-Wall", "-Wextra", "-o", simulator, source], check=True)
    for name in options.traces:
        path = options.directory / f"{name}-{options.scale}-{options.batches}.trace"
        if not path.exists():
            row_count, batches = _make(name, options.directory, options.scale, options.batches)
            _write(path, row_count, options.batches, batches)
        files, policies = [path], options.policies
        if name in _OF_A_GRAPH:
            files.append(_by_degree(options.directory, options.scale))
        else:
            policies = [policy for policy in policies if policy != "degree"]
        print(f"\n## {name}\n\n{_table(simulator, files, policies, options.shares)}", flush=True)


def _make(name: str, directory: Path, scale: int, batch_count: int) -> tuple[int, Iterable[torch.Tensor]]:
    """Return row count and batches; the traces without a graph have a quarter of its rows."""
    if name in _OF_A_GRAPH:
        graph = graphs.open_graph(directory, scale, _EDGES_PER_NODE)
        seed_count = min(1024, (1 << scale) // (4 * batch_count))
        if name == "graph":
            return 1 << scale, graphs.graph_trace(*graph, batch_count, seed_count)
        epoch = list(graphs.graph_trace(*graph, batch_count // 2, seed_count))
        return 1 << scale, chain.from_iterable(repeat(epoch, 2))
    row_count = 1 << (scale - 2)
    draw_count = row_count // 16
    if name == "uniform":
        return row_count, graphs.uniform_trace(row_count, batch_count, draw_count // 2)
    if name == "drift":
        return row_count, graphs.drifting_trace(row_count, 0.9, batch_count, draw_count, moved_share=0.01)
    return row_count, graphs.zipf_trace(row_count, float(name.split("-")[1]), batch_count, draw_count)


def _by_degree(directory: Path, scale: int) -> Path:
    """Return the file of all nodes, those first that most others have as a neighbour; made if it is not there."""
    path = directory / f"degree-{scale}.ids"
    if not path.exists():
        _, indices = graphs.open_graph(directory, scale, _EDGES_PER_NODE)
        order = graphs.by_degree(indices, 1 << scale)
        pending = path.with_suffix(".pending")
        pending.write_bytes(order.numpy().tobytes())
        pending.rename(path)
    return path


def _write(path: Path, row_count: int, batch_count: int, batches: Iterable[torch.Tensor]) -> None:
    pending = path.with_suffix(".pending")
    with pending.open("wb") as file:
        file.write(struct.pack("<qq", row_count, batch_count))
        for batch in batches:
            file.write(struct.pack("<q", batch.numel()))
            file.write(batch.numpy().tobytes())
    pending.rename(path)


def _table(simulator: Path, files: Sequence[Path], policies: Sequence[str], shares: Sequence[float]) -> str:
    with files[0].open("rb") as file:
        row_count, batch_count = struct.unpack("<qq", file.read(16))
    runs = [
        f"policy={policy} slots={int(row_count * share / 100)} warm={batch_count // 4}"
        for policy in ("belady", *policies)
        for share in shares
    ]
    done = subprocess.run([simulator, *files], input="\n".join(runs), stdout=subprocess.PIPE, text=True, check=True)
    percents = [100 * int(hits) / int(asked) for hits, asked, _ in map(str.split, done.stdout.splitlines())]
    bounds = percents[: len(shares)]
    lines = [
        "| policy | " + " | ".join(f"{share:g} %" for share in shares) + " |",
        "|---" * (len(shares) + 1) + "|",
        "| Belady with bypass | " + " | ".join(f"{bound:.1f}" for bound in bounds) + " |",
    ]
    for number, policy in enumerate(policies, 1):
        row = percents[number * len(shares) : (number + 1) * len(shares)]
        cells = (f"{percent:.1f} ({100 * percent / bound:.0f})" for percent, bound in zip(row, bounds, strict=True))
        lines.append(f"| {policy} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
