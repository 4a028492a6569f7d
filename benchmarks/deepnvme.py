"""Tensors between memory and disk by DeepNVMe's own handle, by ours of the same name, by TensorFile, and by fio.

    python benchmarks/deepnvme.py DIR                                       1 GiB, 7 rounds, in turn; takes a minute
    python benchmarks/deepnvme.py DIR --block 1MiB --depth 128 --parallel 4

Needs DeepSpeed and the tools to build its module (`pip install deepspeed ninja`, libaio-dev); without them its rows are
left out, with a note. All move the same page-locked tensor, each from its own kind of locked allocation, in blocks of
the same size with the same number of requests in flight. Writes: a fresh file, from opening it until it is synced; this
program syncs for DeepNVMe, which does not. Reads: a file that was dropped from the page cache, until all bytes are in
memory. Each read is compared with the written bytes.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import sys
import time
from collections.abc import Callable
from typing import Any

from harness import argument_parser, run_benchmark

# isort: split
import torch

import fastpersist as fp
from fastpersist.cli.argument_types import size
from fastpersist.cli.bench.fio import FioJob, fio_row, run_fio
from fastpersist.cli.bench.load_rows import PageCache
from fastpersist.cli.bench.places import check_places, empty, require_space, scratch_directory, write_json
from fastpersist.cli.bench.report import StateResult, machine_facts, report_json, report_text
from fastpersist.cli.bench.rows import Row, Sample, exit_code, measure
from fastpersist.cli.bench.save_rows import sync_path
from fastpersist.integrations import deepnvme

_MIB = 1 << 20
_SEED = 7


def _arguments() -> argparse.Namespace:
    parser = argument_parser("deepnvme.py", __doc__)
    parser.add_argument("--size-mb", type=int, default=1024, metavar="MIB", help="of the tensor (default: 1024)")
    parser.add_argument("--block", type=size, default=8 * _MIB, metavar="SIZE", help="of a request (default: 8MiB)")
    parser.add_argument("--depth", type=int, default=8, metavar="N", help="requests in flight (default: 8)")
    parser.add_argument("--parallel", type=int, default=1, metavar="N", help="DeepNVMe's intra_op_parallelism")
    parser.add_argument("--rounds", type=int, default=7, metavar="N", help="(default: 7)")
    return parser.parse_args()


def _theirs() -> tuple[Any, str]:
    """Return DeepNVMe's module, or why there is none."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu" if not torch.cuda.is_available() else "cuda")
    try:
        # Its build talks a lot.
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            from deepspeed.ops.op_builder import AsyncIOBuilder

            return AsyncIOBuilder().load(verbose=False), ""
    except Exception as error:  # noqa: BLE001 - whatever it is, its rows are left out
        said = str(error).strip()
        return None, f"DeepNVMe is left out: {type(error).__name__}: {said.splitlines()[0] if said else ''}"


class _Handle:
    """A way to move a tensor: an aio_handle, DeepNVMe's or ours."""

    def __init__(self, module: Any, arguments: argparse.Namespace) -> None:
        self._handle = module.aio_handle(arguments.block, arguments.depth, False, True, arguments.parallel)
        self.tensor = self._handle.new_cpu_locked_tensor(arguments.size_mb * _MIB, torch.empty(0, dtype=torch.uint8))

    def write(self, path: str) -> None:
        self._handle.async_pwrite(self.tensor, path)
        self._handle.wait()
        sync_path(path)

    def read(self, path: str) -> None:
        self._handle.async_pread(self.tensor, path)
        self._handle.wait()


class _TensorFile:
    """The same by TensorFile."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._options = {"queue_depth": arguments.depth, "chunk_bytes": arguments.block}
        self.tensor = fp.locked_tensor(arguments.size_mb * _MIB, torch.uint8)

    def write(self, path: str) -> None:
        with fp.TensorFile(path, "x", **self._options) as file:
            file.write(self.tensor)
            file.sync()

    def read(self, path: str) -> None:
        with fp.TensorFile(path, **self._options) as file:
            file.read(self.tensor)


def _fill(tensor: torch.Tensor) -> None:
    tensor.view(torch.int64).random_(generator=torch.Generator().manual_seed(_SEED))


def _rows(direction: Any, ways: dict[str, Any], arguments: argparse.Namespace) -> list[Row]:
    """Return the rows of reading or writing, fio's last."""
    size_bytes = arguments.size_mb * _MIB

    def row(name: str, way: Any) -> Row:
        move: Callable[[str], object] = getattr(way, direction)

        def run(path: str) -> Sample:
            if direction == "read":
                way.tensor.zero_()
            start_s = time.monotonic()
            move(path)
            seconds = time.monotonic() - start_s
            if direction == "read":
                wanted = torch.empty_like(way.tensor)
                _fill(wanted)
                if not torch.equal(way.tensor, wanted):
                    raise fp.CorruptionError(f"{name} has read other bytes than were written", path=path)
            return Sample(seconds, size_bytes)

        return Row(name, "peer" if name == "DeepNVMe" else "fastpersist", run)

    job = FioJob(direction, size_bytes, block_bytes=arguments.block, depth=arguments.depth)
    return [
        *(row(name, way) for name, way in ways.items()),
        fio_row(f"fio {direction}", lambda path: run_fio(job, [path])),
    ]


def _measure(ways: dict[str, Any], arguments: argparse.Namespace, scratch: str, cache: PageCache) -> list[StateResult]:
    """Run all ways in turn, each round in another order, writing first."""
    kept, fresh = os.path.join(scratch, "kept"), os.path.join(scratch, "fresh")
    os.mkdir(fresh)
    _fill(ways["TensorFile"].tensor)
    ways["TensorFile"].write(kept)

    def before_read(_suffix: str) -> str:
        cache.prepare(kept)
        return kept

    for way in ways.values():
        _fill(way.tensor)
    writes = measure(
        _rows("write", ways, arguments),
        arguments.rounds,
        before=lambda _suffix: os.path.join(fresh, "file"),
        after=lambda: empty(fresh),
    )
    reads = measure(_rows("read", ways, arguments), arguments.rounds, before=before_read, after=lambda: None)
    size_bytes = arguments.size_mb * _MIB
    return [StateResult(name, size_bytes, 1, "", rows) for name, rows in (("write", writes), ("read", reads))]


def main() -> int:
    """Measure and print."""
    arguments = _arguments()
    check_places(arguments.directory, [arguments.json])
    require_space(arguments.directory, 2 * arguments.size_mb * _MIB, instead="a smaller --size-mb")
    command_line = shlex.join(["python", "benchmarks/deepnvme.py", *sys.argv[1:]])
    facts = machine_facts(arguments.directory)
    ways: dict[str, Any] = {"TensorFile": _TensorFile(arguments), "our aio_handle": _Handle(deepnvme, arguments)}
    theirs, why_not = _theirs()
    notes = [why_not] if why_not else []
    if theirs is not None:
        import deepspeed

        facts["deepspeed"] = deepspeed.__version__
        notes.append(f"DeepSpeed {deepspeed.__version__}")
        ways["DeepNVMe"] = _Handle(theirs, arguments)
    cache = PageCache(warm=False, whole_machine=False)
    with scratch_directory(arguments.directory) as scratch:
        states = _measure(ways, arguments, scratch, cache)
    notes += [f"blocks of {arguments.block} bytes, {arguments.depth} in flight", f"reads: {cache.describe()}"]
    if arguments.json:
        write_json(arguments.json, report_json("deepnvme", command_line, facts, notes, states))
    print(report_text("deepnvme", command_line, facts, notes, states))
    return exit_code(one for state in states for one in state.rows)


if __name__ == "__main__":
    run_benchmark(main)
