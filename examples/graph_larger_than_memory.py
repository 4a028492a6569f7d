"""Train on a graph whose features do not fit into memory: rows are read from disk, ahead of the batches that need them.

It makes a graph with hubs and a table of features, and trains GraphSAGE with PyTorch Geometric for some batches, in a
process that may have less memory than the table has bytes: with rows from `fp.RowStore`, then from np.memmap as PyG
reads it, and from np.memmap with the advice that accesses are random. For each it says where the time of a batch goes.
How much np.memmap reads around a row without that advice is the disk's read_ahead_kb. A memory cgroup needs root;
without it nothing limits the process, and np.memmap may have all memory.

python examples/graph_larger_than_memory.py [DIR] [--nodes N] [--width N] [--seconds N] [--memory-mb N]
"""

from __future__ import annotations

import argparse
import json
import mmap
import tempfile
import time
from pathlib import Path
from typing import Any

from memory_group import join_group, run_held_down

NEIGHBORS = 10
CLASSES = 8
SEEDS = 64
LABELED_SHARE = 0.1
FAN_OUTS = [10, 5]
CACHE, AHEAD = "128MiB", "64MiB"  # of rows, and of rows that wait for their batch
WAYS = {"rows": "fp.RowStore", "memmap-random": "np.memmap with MADV_RANDOM", "memmap": "np.memmap"}
BATCH_COUNT_MAX = 200


def make_data(directory: Path, node_count: int, width: int) -> None:
    """Write a graph in compressed rows, a label for each node, and a table of features."""
    import torch

    import fastpersist as fp

    # A few nodes are neighbours of many. Their ids are no hint.
    generator = torch.Generator().manual_seed(0)
    ranks = (node_count * torch.rand(node_count * NEIGHBORS, generator=generator) ** 4).long()
    indices = torch.randperm(node_count, generator=generator).to(torch.int32)[ranks]
    indptr = torch.arange(0, indices.numel() + 1, NEIGHBORS)
    labels = torch.randint(CLASSES, (node_count,), generator=generator)
    torch.save((indptr, indices, labels, width), directory / "graph.pt")
    centers = torch.randn(CLASSES, width, generator=generator)
    with fp.RowWriter(directory / "features.npy", (width,), torch.float32) as writer:
        for some in labels.split(1 << 16):
            writer.append(centers[some] + 8 * torch.randn(some.numel(), width, generator=generator))


def batches_from(way: str, directory: Path, sampler: Any, graph: Any, labels: Any) -> Any:
    """Return a loader of PyG whose batches have x and y."""
    import numpy as np
    import torch
    from torch_geometric.data import Data
    from torch_geometric.loader import NodeLoader

    options: dict[str, Any] = {"batch_size": SEEDS, "shuffle": True}
    options["input_nodes"] = torch.arange(int(LABELED_SHARE * labels.numel()))
    if way != "rows":
        x = np.load(directory / "features.npy", mmap_mode="r")
        if way == "memmap-random":
            x._mmap.madvise(mmap.MADV_RANDOM)
        return NodeLoader(Data(x=x, y=labels, edge_index=torch.empty(2, 0).long()), sampler, **options)
    # --8<-- [start:loader]
    from fastpersist.integrations.torch_geometric import AheadNodeLoader, RowFeatureStore

    features = RowFeatureStore()
    features.add(directory / "features.npy", cache_bytes=CACHE, ahead_bytes=AHEAD)
    features.put_tensor(labels, group_name=None, attr_name="y", index=None)
    return AheadNodeLoader((features, graph), sampler, window=8, **options)
    # --8<-- [end:loader]


def train(way: str, directory: Path, most_s: float) -> None:
    """Train for some batches, and write down where the time went."""
    import torch
    from torch_geometric.nn import SAGEConv

    from fastpersist.integrations.torch_geometric import CompressedGraph, TorchNeighborSampler

    class Timed(TorchNeighborSampler):
        """Takes the time that it samples; in this process, as there are no workers."""

        seconds = 0.0

        def sample_from_nodes(self, *words: Any, **options: Any) -> Any:
            started_s = time.perf_counter()
            sampled = super().sample_from_nodes(*words, **options)
            self.seconds += time.perf_counter() - started_s
            return sampled

    class Model(torch.nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList([SAGEConv(width, 64), SAGEConv(64, CLASSES)])

        def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
            return self.layers[1](self.layers[0](x, edges).relu(), edges)

    torch.manual_seed(0)
    indptr, indices, labels, width = torch.load(directory / "graph.pt", mmap=True)
    graph = CompressedGraph()
    graph.put_edge_index((indices, indptr), edge_type=None, layout="csc", size=(labels.numel(), labels.numel()))
    sampler = Timed(graph, FAN_OUTS)
    model = Model(width)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    compute_s, losses, row_count = 0.0, [], 0
    started_s = time.perf_counter()
    for batch in batches_from(way, directory, sampler, graph, labels):
        computing_s = time.perf_counter()
        out = model(batch.x, batch.edge_index)[: batch.batch_size]
        loss = torch.nn.functional.cross_entropy(out, batch.y[: batch.batch_size])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        row_count += batch.x.shape[0]
        compute_s += time.perf_counter() - computing_s
        if len(losses) == BATCH_COUNT_MAX or time.perf_counter() - started_s > most_s:
            break
    total_s = time.perf_counter() - started_s
    parts = {"sample": sampler.seconds, "fetch": total_s - sampler.seconds - compute_s, "compute": compute_s}
    parts = {name: seconds / len(losses) for name, seconds in parts.items()}
    result = {"parts": parts, "rows": row_count / len(losses), "losses": losses}
    (directory / f"{way}.json").write_text(json.dumps(result))


def show(directory: Path, options: argparse.Namespace) -> None:
    """Make the data, and train both ways in processes that are held down."""
    make_data(directory, options.nodes, options.width)
    table_bytes = (directory / "features.npy").stat().st_size
    print(f"{options.nodes} nodes, {NEIGHBORS * options.nodes} edges, features of {table_bytes / 1e6:.0f} MB")
    epoch_batch_count = -(-int(LABELED_SHARE * options.nodes) // SEEDS)
    epoch_s = {}
    for way, name in WAYS.items():
        words = ["--train", way, str(directory), str(options.seconds)]
        run_held_down(__file__, words, options.memory_mb * 1_000_000)
        result = json.loads((directory / f"{way}.json").read_text())
        losses = result["losses"]
        epoch_s[way] = epoch_batch_count * sum(result["parts"].values())
        parts = ", ".join(f"{part} {1e3 * seconds:.0f} ms" for part, seconds in result["parts"].items())
        print(f"{name}: {len(losses)} batches of {result['rows']:.0f} rows, each {parts}")
        print(f"  loss {losses[0]:.2f} → {losses[-1]:.2f}; an epoch at this speed: {epoch_s[way]:.0f} s")
    for way in list(WAYS)[1:]:
        print(f"{WAYS[way]} takes {epoch_s[way] / epoch_s['rows']:.1f} times as long as {WAYS['rows']}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", nargs="?", default=".", help="on the disk to use")
    parser.add_argument("--nodes", type=int, default=2_000_000)
    parser.add_argument("--width", type=int, default=128, help="numbers of a node's features")
    parser.add_argument("--seconds", type=float, default=10, help="how long to train, at least a batch")
    parser.add_argument("--memory-mb", type=int, default=700)
    parser.add_argument("--train", nargs=3, metavar=("WAY", "DIR", "SECONDS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        join_group()
        train(options.train[0], Path(options.train[1]), float(options.train[2]))
    else:
        Path(options.directory).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=options.directory) as scratch:
            show(Path(scratch), options)
