"""What it gains to pack a table by degree, and to read over gaps: batches of a graph, gathered from either table.

    python benchmarks/rows/layout.py DIR [--cache 0 10] [--gaps 0 8 32] [--json FILE]

DIR keeps the graph, the table, and the packed one (1 + 2 × 4.3 GB), so that a second run begins at once. A gap is the
number of KiB that the store reads for nothing where that saves a request; it has 8, and no option for it. --cache is
the cache, in percent of the table; such a store gathers the first half of the batches before the time is taken. Ways
take turns, each round in another order. Rows are checked: row i begins with i, scaled.
"""

from __future__ import annotations

import sys
import time
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import graphs
import harness
import torch

import fastpersist as fp
from fastpersist.cli.bench.places import require_space, write_json
from fastpersist.cli.bench.report import facts_text, machine_facts, report_head, samples_json, table
from fastpersist.cli.bench.rows import Measured, Row, Sample, exit_code, measure
from fastpersist.errors import CorruptionError
from fastpersist.rows import store as store_module

_EDGES_PER_NODE = 15
_TABLES = {"features": "by id", "packed": "by degree"}


def main() -> int:
    """Make what is missing, measure, print the table, write the JSON."""
    parser = harness.argument_parser("layout.py", __doc__)
    parser.add_argument("--scale", type=int, default=23, help="the graph has 2**SCALE nodes (default: 23)")
    parser.add_argument("--width", type=int, default=128, help="float32 numbers of a node (default: 128)")
    parser.add_argument("--seeds", type=int, default=1024, help="of a batch (default: 1024)")
    parser.add_argument("--batches", type=int, default=4, metavar="N", help="of a turn (default: 4)")
    parser.add_argument("--repeat", type=int, default=3, metavar="N", help="rounds (default: 3)")
    parser.add_argument("--gaps", type=int, nargs="+", default=[0, 8, 32], metavar="KIB", help="default: 0 8 32")
    parser.add_argument("--cache", type=int, nargs="+", default=[0, 10], metavar="PERCENT", help="default: 0 10")
    arguments = parser.parse_args()
    directory, node_count = Path(arguments.directory), 1 << arguments.scale
    facts = machine_facts(arguments.directory)
    graph = graphs.open_graph(directory, arguments.scale, _EDGES_PER_NODE)
    paths = _tables(directory, arguments.scale, arguments.width, graph[1])
    trace = [ids.long() for ids in graphs.graph_trace(*graph, 2 * arguments.batches, arguments.seeds)]
    counts: dict[str, tuple[float, float, float]] = {}

    def turn(name: str, path: Path, gap_bytes: int, cache_bytes: int, _path: str) -> Sample:
        warm, timed = trace[: arguments.batches], trace[arguments.batches :]
        with _opened(path, gap_bytes, cache_bytes) as store:
            for ids in warm if cache_bytes else ():
                store.gather(ids)
            before, seconds = store.stats(), 0.0
            for ids in timed:
                start = time.perf_counter()
                rows = store.gather(ids)
                seconds += time.perf_counter() - start
                if not torch.equal(rows[:, 0], ids / node_count):
                    raise CorruptionError(f"{name}: other rows came than those that were asked for")
            after = store.stats()
        row_count, hit_count, read_count, read_bytes = (
            getattr(after, field) - getattr(before, field)
            for field in ("row_count", "hit_count", "read_count", "read_bytes")
        )
        counts[name] = (hit_count / row_count, read_count / len(timed), read_bytes / len(timed))
        return Sample(seconds / len(timed), row_count // len(timed) * arguments.width * 4)

    ways = []
    for percent in arguments.cache:
        cache_bytes = node_count * arguments.width * 4 * percent // 100
        for file, order in _TABLES.items():
            for gap_kib in arguments.gaps:
                name = f"{order}, gap {gap_kib} KiB, cache {percent} %"
                ways.append(Row(name, "fastpersist", partial(turn, name, paths[file], gap_kib << 10, cache_bytes)))
    results = measure(ways, arguments.repeat, before=lambda _suffix: "", after=lambda: None)
    command_line = " ".join(["python", "benchmarks/rows/layout.py", *sys.argv[1:]])
    columns = ["table, gap, cache", "s a batch", "min – max s", "reads a batch", "MB a batch", "hits"]
    print(facts_text(command_line, facts), table(columns, [_cells(one, counts) for one in results]), sep="\n\n")
    print(f"\nrows of a batch: {sum(map(len, trace)) // len(trace)}, of {arguments.width * 4} bytes")
    if arguments.json:
        values = {one.row.name: samples_json(one) | {"counts": counts[one.row.name]} for one in results if one.samples}
        write_json(arguments.json, report_head("rows layout", command_line, facts, []) | {"ways": values})
    return exit_code(results)


def _tables(directory: Path, scale: int, width: int, indices: torch.Tensor) -> dict[str, Path]:
    paths = {name: directory / f"{name}-{scale}-{width}.npy" for name in _TABLES}
    node_count = 1 << scale
    if not all(path.exists() for path in paths.values()):
        require_space(str(directory), 2 * node_count * width * 4, instead="a smaller --scale")
    if not paths["features"].exists():
        generator = torch.Generator().manual_seed(0)
        with fp.RowWriter(paths["features"], (width,), torch.float32) as writer:
            for ids in torch.arange(node_count).split(1 << 16):
                rows = torch.randn(ids.numel(), width, generator=generator)
                rows[:, 0] = ids / node_count
                writer.append(rows)
    if not paths["packed"].exists():
        degree = torch.empty(node_count, dtype=torch.int64)
        degree[graphs.by_degree(indices, node_count).long()] = torch.arange(node_count, 0, -1)
        fp.pack_rows(paths["features"], paths["packed"], order=degree)
    return paths


def _opened(path: Path, gap_bytes: int, cache_bytes: int) -> fp.RowStore:
    whole = store_module._GAP_BYTES
    store_module._GAP_BYTES = gap_bytes  # read when a store opens
    try:
        return fp.RowStore(path, cache_bytes=cache_bytes)
    finally:
        store_module._GAP_BYTES = whole


def _cells(one: Measured, counts: dict[str, tuple[float, float, float]]) -> list[str]:
    if not one.samples:
        return [one.row.name, one.note]
    hit_rate, read_count, read_bytes = counts[one.row.name]
    cells = [f"{read_count:.0f}", f"{read_bytes / 1e6:.1f}", f"{100 * hit_rate:.0f} %"]
    return [one.row.name, *one.time_cells()[:2], *cells]


if __name__ == "__main__":
    harness.run_benchmark(main)
