"""Cold rows by GraphBolt itself (`TorchBasedFeature` over a mapped file), in turn with `fp.RowStore` and fio.

    python benchmarks/rows/graphbolt.py DIR --python /venv/with/dgl/bin/python

DGL 2.1.0, the newest on PyPI, runs with torch 2.2.1, with which fastpersist does not; so GraphBolt has an interpreter
of its own:

    python3.11 -m venv /venv/with/dgl
    /venv/with/dgl/bin/pip install torch==2.2.1 dgl==2.1.0 'numpy<2' torchdata==0.7.1 pyyaml pandas pydantic

It maps the table anew for each sample, outside of the time, and gathers as many rows as ours, uniform over the table,
which is not in the page cache.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import harness
import numpy as np
import torch

from fastpersist.cli.bench.load_rows import PageCache
from fastpersist.cli.bench.places import scratch_directory, write_json
from fastpersist.cli.bench.report import facts_text, machine_facts, report_head, samples_json, table
from fastpersist.cli.bench.row_store.ways import Case, Table, cold_rows, write_table
from fastpersist.cli.bench.rows import Measured, Row, Sample, exit_code, measure
from fastpersist.errors import CorruptionError, UnsupportedError

_OURS = "fastpersist.RowStore"
_GRAPHBOLT = """
import json, sys, time
import numpy, torch
import dgl.graphbolt
path, rows, width = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
print(json.dumps({"version": dgl.__version__}), flush=True)
for line in sys.stdin:
    ids = torch.from_numpy(numpy.load(line.strip()))
    mapped = numpy.memmap(path, dtype=numpy.int32, mode="r+", shape=(rows, width))
    feature = dgl.graphbolt.TorchBasedFeature(torch.from_numpy(mapped))
    start = time.perf_counter()
    found = feature.read(ids)
    seconds = time.perf_counter() - start
    del feature, mapped  # pages of a mapped file cannot be dropped from the page cache
    print(json.dumps({"seconds": seconds, "sum": int(found[:, 0].to(torch.int64).sum())}), flush=True)
"""


class _GraphBolt:
    """The other interpreter, which answers with seconds. It ends with the `with` block."""

    def __init__(self, python: str, made: Table) -> None:
        self._process = subprocess.Popen(
            [python, "-c", _GRAPHBOLT, made.path, str(made.row_count), str(made.width)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._made = made
        self.version = self._answer()["version"]

    def __enter__(self) -> _GraphBolt:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def run(self, case: Case) -> Sample:
        """Gather the ids of a case.

        Raises:
            CorruptionError: It returned other rows.
        """
        ids, path = case.ids(), f"{self._made.path}.ids.npy"
        np.save(path, ids.numpy())
        assert self._process.stdin is not None
        self._process.stdin.write(f"{path}\n")
        self._process.stdin.flush()
        answer = self._answer()
        if answer["sum"] != int(self._made.expected(ids).to(torch.int64).sum()):
            raise CorruptionError("GraphBolt returned other rows than those that were asked for")
        return Sample(answer["seconds"], case.count * self._made.row_bytes)

    def _answer(self) -> dict[str, float]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise UnsupportedError("GraphBolt's interpreter has ended; is dgl 2.1.0 installed there?")
        found: dict[str, float] = json.loads(line)
        return found


def main() -> int:
    """Measure, print a table, write the JSON."""
    parser = harness.argument_parser("graphbolt.py", __doc__)
    parser.add_argument("--python", required=True, help="an interpreter with DGL")
    parser.add_argument("--size-mb", type=int, default=2048, metavar="MIB", help="of the table (default: 2048)")
    parser.add_argument("--row-bytes", type=int, nargs="+", default=[512, 4096], metavar="N", help="default: 512 4096")
    parser.add_argument("--count", type=int, default=40_000, metavar="N", help="rows of a sample (default: 40000)")
    parser.add_argument("--repeat", type=int, default=5, metavar="N", help="rounds (default: 5)")
    arguments = parser.parse_args()
    facts = machine_facts(arguments.directory)
    parts = {}
    with scratch_directory(arguments.directory) as scratch:
        for row_bytes in arguments.row_bytes:
            made = write_table(os.path.join(scratch, "table"), row_bytes, arguments.size_mb << 20)
            parts[row_bytes] = _measured(arguments, Case(made, arguments.count, 256))
    command_line = " ".join(["python", "benchmarks/rows/graphbolt.py", *sys.argv[1:]])
    print(facts_text(command_line, facts))
    for row_bytes, results in parts.items():
        print(*(f"{one.row.name}: {one.note}" for one in results if one.note), sep="\n", end="")
        print(f"\n{arguments.count} rows of {row_bytes} bytes\n")
        cells = [_cells(one, arguments.count, facts["read_ahead_kb"]) for one in results]
        print(table(["way", "median s", "min – max s", "rows/s"], cells))
    if arguments.json:
        values = {
            row_bytes: {one.row.name: samples_json(one) for one in results if one.samples}
            for row_bytes, results in parts.items()
        }
        write_json(arguments.json, report_head("graphbolt", command_line, facts, []) | {"row_bytes": values})
    return exit_code(one for results in parts.values() for one in results)


def _measured(arguments: argparse.Namespace, case: Case) -> list[Measured]:
    cache = PageCache(warm=False, whole_machine=False)

    def before(_suffix: str) -> str:
        cache.prepare(case.table.path)
        return case.table.path

    rows = [row for row in cold_rows(case) if row.name in (_OURS, "fio")]
    with _GraphBolt(arguments.python, case.table) as graphbolt:
        rows.append(Row(f"GraphBolt, DGL {graphbolt.version}", "peer", lambda _path: graphbolt.run(case)))
        return measure(rows, arguments.repeat, before=before, after=lambda: None)


def _cells(one: Measured, count: int, read_ahead_kb: str) -> list[str]:
    name = f"{one.row.name}; read_ahead_kb {read_ahead_kb}" if one.row.kind == "peer" else one.row.name
    if not one.samples:
        return [name, one.note, "", ""]
    return [name, *one.time_cells()[:2], f"{count / one.median_s:.0f}"]


if __name__ == "__main__":
    harness.run_benchmark(main)
