"""GraphSAGE on a table larger than memory: where the time of a batch goes, with rows from each way there is.

    python benchmarks/rows/epoch.py DIR                      8.2 GB of features; DIR keeps the graph (1 GB)
    python benchmarks/rows/epoch.py DIR --scale 20 --seconds 20

Each way trains in a process of its own, which has memory for a quarter of the table, for the graph, and 0.5 GB for
Python and torch, by a cgroup: this needs root. The table in memory is the way without a limit. All ways sample the same
batches and are checked: the first number of row i is i, scaled. Ways take turns; a turn ends after --batches or
--seconds, and has one batch at least. The first batch of a turn is left out of the means if there are others, since
caches are empty then. Fetching is what the training loop waits for rows.
"""

from __future__ import annotations

import argparse
import json
import mmap
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import graphs
import numpy as np
import torch

import fastpersist as fp
from fastpersist.cli.bench.places import check_places, require_space, scratch_directory, write_json
from fastpersist.cli.bench.report import facts_text, machine_facts, report_head, table
from fastpersist.cli.bench.stream.memory_limit import MemoryLimit
from fastpersist.cli.terminal import run_command
from fastpersist.errors import CorruptionError

_EDGES_PER_NODE = 15
_CLASSES = 16
_HIDDEN = 128
_WINDOW = 8
_PYTHON_BYTES = 500_000_000
_WAYS = {
    "memory": "in memory",
    "rows": "fp.RowStore",
    "memmap-random": "np.memmap, MADV_RANDOM",
    "memmap": "np.memmap",
}
_MAPPED = ("memmap-random", "memmap")
_PARTS = ("sample", "fetch", "compute")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", metavar="DIR", help="existing directory on the disk to measure")
    parser.add_argument("--json", metavar="FILE", help="write the results there as well")
    parser.add_argument("--scale", type=int, default=23, help="the graph has 2**SCALE nodes (default: 23)")
    parser.add_argument("--width", type=int, default=256, help="float32 numbers of a node (default: 256)")
    parser.add_argument("--seeds", type=int, default=1024, help="of a batch (default: 1024)")
    parser.add_argument("--fan-outs", type=int, nargs="+", default=[10, 10, 5], metavar="N", help="default: 10 10 5")
    parser.add_argument("--ways", nargs="+", choices=_WAYS, default=list(_WAYS), help="default: all")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="turns of each way (default: 3)")
    parser.add_argument("--batches", type=int, default=40, metavar="N", help="of a turn (default: 40)")
    parser.add_argument("--seconds", type=float, default=60, metavar="N", help="of a turn, at most (default: 60)")
    parser.add_argument("--train", nargs=2, metavar=("WAY", "SEED"), help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    """Measure, print the table, write the JSON."""
    arguments = _arguments()
    if arguments.train:
        _train(arguments, *arguments.train)
        return 0
    check_places(arguments.directory, [arguments.json])
    node_count = 1 << arguments.scale
    table_bytes = node_count * arguments.width * 4
    require_space(arguments.directory, table_bytes + 24 * node_count * _EDGES_PER_NODE, instead="a smaller --scale")
    facts = machine_facts(arguments.directory)
    indptr, indices = graphs.open_graph(arguments.directory, arguments.scale, _EDGES_PER_NODE)
    graph_bytes = indptr.nbytes + indices.nbytes
    limit_bytes = table_bytes // 4 + graph_bytes + _PYTHON_BYTES
    turns: dict[str, list[dict[str, float]]] = {way: [] for way in arguments.ways}
    with scratch_directory(arguments.directory) as scratch:
        _write_table(Path(scratch, "features.npy"), node_count, arguments.width)
        for seed in range(arguments.rounds):
            for way in arguments.ways[seed % len(arguments.ways) :] + arguments.ways[: seed % len(arguments.ways)]:
                turns[way].append(_turn(arguments, scratch, way, seed, limit_bytes if way != "memory" else None))
                print(f"round {seed + 1}, {_WAYS[way]}: {turns[way][-1]}", file=sys.stderr)
    notes = [
        f"{node_count} nodes, {indices.numel()} edges, a table of {table_bytes / 1e9:.1f} GB",
        f"{arguments.seeds} seeds a batch, fan-outs {arguments.fan_outs}, hidden width {_HIDDEN}",
        f"memory: {limit_bytes / 1e9:.2f} GB, of which the graph has {graph_bytes / 1e9:.2f} GB",
        "medians of the turns' means; a batch of PyG, sampled in this process, without workers",
    ]
    command_line = " ".join(["python", "benchmarks/rows/epoch.py", *sys.argv[1:]])
    print(facts_text(command_line, facts), _text(turns, facts["read_ahead_kb"]), "\n".join(notes), sep="\n\n")
    if arguments.json:
        write_json(arguments.json, report_head("rows epoch", command_line, facts, notes) | {"ways": turns})
    return 0


def _write_table(path: Path, node_count: int, width: int) -> None:
    generator = torch.Generator().manual_seed(0)
    with fp.RowWriter(path, (width,), torch.float32) as writer:
        for ids in torch.arange(node_count).split(1 << 16):
            rows = torch.randn(ids.numel(), width, generator=generator)
            rows[:, 0] = ids / node_count
            writer.append(rows)


def _turn(arguments: argparse.Namespace, scratch: str, way: str, seed: int, limit_bytes: int | None) -> dict[str, Any]:
    words = [sys.executable, __file__, *sys.argv[1:], "--train", way, str(seed)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        limit = None
        try:
            if limit_bytes is not None:
                limit = MemoryLimit(f"fastpersist-rows-{process.pid}")
                limit.add(process.pid)
                limit.hold_down(limit_bytes)
            answer, _ = process.communicate(f"{scratch}\n")
            if process.returncode:
                raise CorruptionError(f"{_WAYS[way]}: the process ended with {process.returncode}")
        finally:
            process.kill()
            process.wait()
            if limit is not None:
                limit.close()
    found: dict[str, Any] = json.loads(answer)
    return found


def _text(turns: dict[str, list[dict[str, float]]], read_ahead_kb: str) -> str:
    median = {
        way: {part: statistics.median(turn[part] for turn in some) for part in (*_PARTS, "rows", "batch")}
        for way, some in turns.items()
    }
    limit_s = median["memory"]["batch"] if "memory" in median else None
    columns = ["way", "batches", *(f"{part} ms" for part in _PARTS), "batch ms", "min – max ms", "of in memory"]
    lines = []
    for way, parts in median.items():
        whole = [1e3 * turn["batch"] for turn in turns[way]]
        name = f"{_WAYS[way]}; read_ahead_kb {read_ahead_kb}" if way in _MAPPED else _WAYS[way]
        cells = [name, str(sum(int(turn["batches"]) for turn in turns[way]))]
        cells += [f"{1e3 * parts[part]:.0f}" for part in (*_PARTS, "batch")]
        cells += [f"{min(whole):.0f} – {max(whole):.0f}", f"{parts['batch'] / limit_s:.2f}" if limit_s else ""]
        lines.append(cells)
    rows = statistics.median(turn["rows"] for some in turns.values() for turn in some)
    return f"{table(columns, lines)}\n\nrows of a batch: {rows:.0f}"


# ------------------------------------------------------------------------------------------------------- a turn


def _train(arguments: argparse.Namespace, way: str, seed: str) -> None:
    """Train for some batches; print what they took."""
    scratch = Path(sys.stdin.readline().strip())  # comes when the memory is held down
    from torch_geometric.nn import GraphSAGE

    from fastpersist.integrations.torch_geometric import CompressedGraph, TorchNeighborSampler

    node_count = 1 << arguments.scale
    torch.manual_seed(int(seed))
    indptr, indices = (one.clone() for one in graphs.open_graph(arguments.directory, arguments.scale, _EDGES_PER_NODE))
    graph = CompressedGraph()
    graph.put_edge_index((indices, indptr), edge_type=None, layout="csc", size=(node_count, node_count))
    spent = dict.fromkeys(_PARTS, 0.0)

    class Timed(TorchNeighborSampler):
        def sample_from_nodes(self, *words: Any, **options: Any) -> Any:
            start_s = time.perf_counter()
            sampled = super().sample_from_nodes(*words, **options)
            spent["sample"] += time.perf_counter() - start_s
            return sampled

    seeds = (indptr[1:] > indptr[:-1]).nonzero().squeeze(1)
    labels = torch.arange(node_count) % _CLASSES
    loader = _loader(way, scratch, Timed(graph, arguments.fan_outs), graph, labels, seeds, arguments.seeds)
    model = GraphSAGE(arguments.width, _HIDDEN, len(arguments.fan_outs), _CLASSES)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    turns: list[tuple[float, float, float, int]] = []
    begun_s = start_s = time.perf_counter()
    for batch in loader:
        computing_s = time.perf_counter()
        out = model(batch.x, batch.edge_index)[: batch.batch_size]
        loss = torch.nn.functional.cross_entropy(out, batch.y[: batch.batch_size])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        end_s = time.perf_counter()
        sample_s, spent["sample"] = spent["sample"], 0.0
        turns.append((sample_s, computing_s - start_s - sample_s, end_s - computing_s, batch.x.shape[0]))
        if not torch.equal(batch.x[:, 0], batch.n_id / node_count):
            raise CorruptionError(f"{_WAYS[way]} returned other rows than those that were asked for")
        start_s = time.perf_counter()
        if len(turns) == arguments.batches or start_s - begun_s > arguments.seconds:
            break
    counted = turns[1:] or turns
    parts = {part: statistics.mean(turn[index] for turn in counted) for index, part in enumerate(_PARTS)}
    whole = {"batch": sum(parts.values()), "rows": statistics.mean(turn[3] for turn in counted), "batches": len(turns)}
    print(json.dumps(parts | whole))


def _loader(way: str, scratch: Path, sampler: Any, graph: Any, labels: Any, seeds: Any, seed_count: int) -> Any:
    from torch_geometric.data import Data
    from torch_geometric.loader import NodeLoader

    from fastpersist.integrations.torch_geometric import AheadNodeLoader, RowFeatureStore

    path = scratch / "features.npy"
    options: dict[str, Any] = {"batch_size": seed_count, "shuffle": True, "input_nodes": seeds}
    if way == "rows":
        features = RowFeatureStore()
        features.add(path, cache_bytes=path.stat().st_size // 8, ahead_bytes=path.stat().st_size // 32)
        features.put_tensor(labels, group_name=None, attr_name="y", index=None)
        return AheadNodeLoader((features, graph), sampler, window=_WINDOW, **options)
    x: Any
    if way == "memory":
        with fp.RowStore(path) as store:
            x = torch.empty(store.row_count, *store.row_shape)
            for ids in torch.arange(store.row_count).split(1 << 18):
                store.gather(ids, out=x[ids[0] : ids[-1] + 1])
    else:
        x = np.load(path, mmap_mode="r")
        if way == "memmap-random":
            x._mmap.madvise(mmap.MADV_RANDOM)
    # The edges are in the sampler; PyG wants some in a Data.
    return NodeLoader(Data(x=x, y=labels, edge_index=torch.empty(2, 0).long()), sampler, **options)


if __name__ == "__main__":
    sys.exit(run_command(main))
