"""Gathers of rows that are all in the cache, beside torch.index_select of the same table in memory.

    python benchmarks/rows/cached.py DIR [--row-bytes 1024] [--counts 1000 10000 100000] [--json FILE]

Both write into the same `out=`, in turn, with ids at random. A line for each count: medians of both, and the ratio.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1]))

import harness
import torch

import fastpersist as fp
from fastpersist.cli.bench.places import write_json
from fastpersist.cli.bench.report import facts_text, machine_facts, report_head, table

_IDS_COUNT = 8
_WARM_ROWS = 50_000


def main() -> int:
    """Measure, print the table, write the JSON."""
    parser = harness.argument_parser("cached.py", __doc__)
    parser.add_argument("--table-bytes", type=int, default=400 << 20, metavar="N", help="default: 400 MiB")
    parser.add_argument("--row-bytes", type=int, default=1024, metavar="N", help="default: 1024")
    parser.add_argument("--counts", type=int, nargs="+", default=[1000, 10_000, 100_000], metavar="N")
    parser.add_argument("--repeat", type=int, default=31, metavar="N", help="default: 31")
    arguments = parser.parse_args()
    facts = machine_facts(arguments.directory)
    torch.manual_seed(0)
    features = torch.rand(arguments.table_bytes // arguments.row_bytes, arguments.row_bytes // 4)
    with tempfile.TemporaryDirectory(prefix="cached-", dir=arguments.directory) as directory:
        path = Path(directory, "features.npy")
        fp.write_rows(path, features)
        with fp.RowStore(path, cache_bytes=2 * arguments.table_bytes) as store:
            for ids in torch.arange(len(features)).split(_WARM_ROWS):
                store.gather(ids)
            found = {count: _in_turn(store, features, count, arguments.repeat) for count in arguments.counts}
    command_line = " ".join(["python", "benchmarks/rows/cached.py", *sys.argv[1:]])
    rows = [
        [
            f"{count:,}",
            f"{1e3 * median(ours):.2f}",
            f"{1e3 * median(of_torch):.2f}",
            f"{median(of_torch) / median(ours):.2f}",
        ]
        for count, (ours, of_torch) in found.items()
    ]
    print(facts_text(command_line, facts), table(["rows", "ours, ms", "torch, ms", "torch / ours"], rows), sep="\n\n")
    if arguments.json:
        seconds = {str(count): {"ours": ours, "torch": of_torch} for count, (ours, of_torch) in found.items()}
        write_json(arguments.json, report_head("rows cached", command_line, facts, []) | {"seconds": seconds})
    return 0


def _in_turn(store: fp.RowStore, features: torch.Tensor, count: int, repeat: int) -> tuple[list[float], list[float]]:
    """Return the seconds of our gathers, and of torch's."""
    every_ids = torch.randint(0, len(features), (_IDS_COUNT, count))
    out = torch.empty(count, features.shape[1])
    ours, of_torch = [], []
    for turn in range(repeat):
        ids = every_ids[turn % _IDS_COUNT]
        ours.append(_seconds_of(store.gather, ids, out=out))
        of_torch.append(_seconds_of(torch.index_select, features, 0, ids, out=out))
    return ours, of_torch


def _seconds_of(call: Callable[..., object], *arguments: object, out: torch.Tensor) -> float:
    started_s = time.perf_counter()
    call(*arguments, out=out)
    return time.perf_counter() - started_s


if __name__ == "__main__":
    harness.run_benchmark(main)
