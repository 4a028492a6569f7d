"""Gathers of rows that are all in the cache, beside torch.index_select of the same table in memory.

    python benchmarks/rows/cached.py DIR [--row-bytes 1024] [--counts 1000 10000 100000] [--json FILE]
    python benchmarks/rows/cached.py DIR --device cuda        to the device, beside a copy of as many bytes to it

Both write into the same `out=`, in turn, with ids at random; the copy to a device is one of pinned memory, and the time
lasts until the device has the bytes. A line for each count: medians of both, and the ratio.
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

_Way = Callable[[torch.Tensor, torch.Tensor], object]


def main() -> int:
    """Measure, print the table, write the JSON."""
    parser = harness.argument_parser("cached.py", __doc__)
    parser.add_argument("--table-bytes", type=int, default=400 << 20, metavar="N", help="default: 400 MiB")
    parser.add_argument("--row-bytes", type=int, default=1024, metavar="N", help="default: 1024")
    parser.add_argument("--counts", type=int, nargs="+", default=[1000, 10_000, 100_000], metavar="N")
    parser.add_argument("--repeat", type=int, default=31, metavar="N", help="default: 31")
    parser.add_argument(
        "--device", metavar="DEVICE", help="where the rows go, such as cuda (default: a tensor on the CPU)"
    )
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
            ways = _to_device(store, arguments.device) if arguments.device else _to_memory(store, features)
            found = {count: _in_turn(*ways, store, count, arguments.repeat) for count in arguments.counts}
    peer = "copy" if arguments.device else "torch"
    command_line = " ".join(["python", "benchmarks/rows/cached.py", *sys.argv[1:]])
    rows = [
        [
            f"{count:,}",
            f"{1e3 * median(ours):.2f}",
            f"{1e3 * median(of_peer):.2f}",
            f"{median(of_peer) / median(ours):.2f}",
        ]
        for count, (ours, of_peer) in found.items()
    ]
    print(
        facts_text(command_line, facts), table(["rows", "ours, ms", f"{peer}, ms", f"{peer} / ours"], rows), sep="\n\n"
    )
    if arguments.json:
        seconds = {str(count): {"ours": ours, peer: of_peer} for count, (ours, of_peer) in found.items()}
        write_json(arguments.json, report_head("rows cached", command_line, facts, []) | {"seconds": seconds})
    return 0


def _to_memory(store: fp.RowStore, features: torch.Tensor) -> tuple[_Way, _Way]:
    """Return our gather and torch's, of ids and `out=`."""
    return (
        lambda ids, out: store.gather(ids, out=out),
        lambda ids, out: torch.index_select(features, 0, ids, out=out),
    )


def _to_device(store: fp.RowStore, device: str) -> tuple[_Way, _Way]:
    """Return our gather to the device, and a copy of as many bytes as `out=` has."""

    def copy(ids: torch.Tensor, out: torch.Tensor) -> None:
        out.to(device, non_blocking=True)
        torch.cuda.synchronize(device)

    def gather(ids: torch.Tensor, out: torch.Tensor) -> None:
        store.gather(ids, device=device)
        torch.cuda.synchronize(device)

    return gather, copy


def _in_turn(gather: _Way, peer: _Way, store: fp.RowStore, count: int, repeat: int) -> tuple[list[float], list[float]]:
    """Return the seconds of our gathers, and of the peer's."""
    every_ids = torch.randint(0, len(store), (_IDS_COUNT, count))
    out = torch.empty(count, *store.row_shape, pin_memory=torch.cuda.is_available())
    ours, of_peer = [], []
    for turn in range(repeat):
        ids = every_ids[turn % _IDS_COUNT]
        ours.append(_seconds_of(gather, ids, out))
        of_peer.append(_seconds_of(peer, ids, out))
    return ours, of_peer


def _seconds_of(way: _Way, ids: torch.Tensor, out: torch.Tensor) -> float:
    started_s = time.perf_counter()
    way(ids, out)
    return time.perf_counter() - started_s


if __name__ == "__main__":
    harness.run_benchmark(main)
