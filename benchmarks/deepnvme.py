"""Tensors between memory and disk by DeepNVMe's own handle, by ours of the same name, by TensorFile, and by fio.

    python benchmarks/deepnvme.py DIR                                       1 GiB, 7 rounds, in turn; takes a minute
    python benchmarks/deepnvme.py DIR --block 1M --depth 128 --parallel 4

Needs DeepSpeed and what it builds its module with (`pip install deepspeed ninja`, libaio-dev); without them its rows
are left out, and the reason is said. All move the same page-locked tensor, each from a locked allocation of its own
kind, in blocks of the same size with the same number of requests in flight. Writes: a fresh file, from opening it until
it is synced; DeepNVMe does not sync, so this does it for it. Reads: of a file that was dropped from the page cache,
until all bytes are in memory. What was read is compared with what was written, once for each way.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from overlap_report import machine_facts, report_facts
from tabulate import tabulate

import fastpersist as fp
from fastpersist.cli.bench.fio import FioJob, fio_version, run_fio
from fastpersist.cli.bench.io.points import parse_size
from fastpersist.cli.bench.load_rows import PageCache
from fastpersist.integrations import deepnvme

_MIB = 1 << 20
_SEED = 7

Move = Callable[[str], float]
"""Moves the tensor to or from a file, and returns the seconds."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="deepnvme.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", metavar="DIR", help="existing directory on the disk to measure; left as it was")
    parser.add_argument("--size-mb", type=int, default=1024, metavar="MIB", help="of the tensor (default: 1024)")
    parser.add_argument("--block", type=parse_size, default=8 * _MIB, metavar="SIZE", help="of a request (default: 8M)")
    parser.add_argument("--depth", type=int, default=8, metavar="N", help="requests in flight (default: 8)")
    parser.add_argument("--parallel", type=int, default=1, metavar="N", help="DeepNVMe's intra_op_parallelism")
    parser.add_argument("--rounds", type=int, default=7, metavar="N")
    parser.add_argument("--json", metavar="PATH", help="write all samples there as well")
    return parser


def _theirs() -> tuple[Any, str]:
    """Return DeepNVMe's module, or why there is none."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu" if not torch.cuda.is_available() else "cuda")
    try:
        # Its build talks a lot.
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            from deepspeed.ops.op_builder import AsyncIOBuilder

            return AsyncIOBuilder().load(verbose=False), ""
    except Exception as error:  # noqa: BLE001 - whatever it is, its rows are left out
        return None, f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"


class _Handle:
    """A way to move a tensor: an aio_handle, DeepNVMe's or ours."""

    def __init__(self, module: Any, arguments: argparse.Namespace) -> None:
        self._handle = module.aio_handle(arguments.block, arguments.depth, False, True, arguments.parallel)
        self.tensor = self._handle.new_cpu_locked_tensor(arguments.size_mb * _MIB, torch.empty(0, dtype=torch.uint8))
        _fill(self.tensor)

    def write(self, path: str) -> float:
        start_s = time.monotonic()
        self._handle.async_pwrite(self.tensor, path)
        self._handle.wait()
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)
        return time.monotonic() - start_s

    def read(self, path: str) -> float:
        start_s = time.monotonic()
        self._handle.async_pread(self.tensor, path)
        self._handle.wait()
        return time.monotonic() - start_s


class _TensorFile:
    """The same by TensorFile."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._options = {"queue_depth": arguments.depth, "chunk_bytes": arguments.block}
        self.tensor = fp.locked_tensor(arguments.size_mb * _MIB, torch.uint8)
        _fill(self.tensor)

    def write(self, path: str) -> float:
        start_s = time.monotonic()
        with fp.TensorFile(path, "x", **self._options) as file:
            file.write(self.tensor)
            file.sync()
        return time.monotonic() - start_s

    def read(self, path: str) -> float:
        start_s = time.monotonic()
        with fp.TensorFile(path, **self._options) as file:
            file.read(self.tensor)
        return time.monotonic() - start_s


def _fill(tensor: torch.Tensor) -> None:
    tensor.view(torch.int64).random_(generator=torch.Generator().manual_seed(_SEED))


def _fio(direction: Any, arguments: argparse.Namespace, path: str) -> float:
    job = FioJob(direction, arguments.size_mb * _MIB, block_bytes=arguments.block, depth=arguments.depth)
    return run_fio(job, [path]).seconds


def _sync_directory(directory: str) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def _measure(
    ways: dict[str, dict[str, Move]], checks: dict[str, torch.Tensor], directory: str, round_count: int
) -> dict[str, dict[str, list[float]]]:
    """Run all ways in turn, each round in another order."""
    samples: dict[str, dict[str, list[float]]] = {
        direction: {way: [] for way in ways} for direction in ("write", "read")
    }
    cache = PageCache(warm=False, whole_machine=False)
    kept = os.path.join(directory, "kept")
    next(iter(ways.values()))["write"](kept)
    names = list(ways)
    for direction, number in itertools.product(("write", "read"), range(round_count)):
        for way in names if number % 2 == 0 else names[::-1]:
            print(f"… {direction}: round {number + 1} of {round_count}, {way}", file=sys.stderr, flush=True)
            if direction == "write":
                path = os.path.join(directory, "fresh")
                samples[direction][way].append(ways[way][direction](path))
                os.unlink(path)
                _sync_directory(directory)  # lest removing a gigabyte costs the next one its time
                continue
            tensor = checks.get(way) if number == 0 else None
            if tensor is not None:
                tensor.zero_()
            cache.prepare(kept)
            samples[direction][way].append(ways[way][direction](kept))
            if tensor is not None:
                wanted = torch.empty_like(tensor)
                _fill(wanted)
                if not torch.equal(tensor, wanted):
                    raise SystemExit(f"{way} has read other bytes than were written")
    print(f"\nreads: {cache.describe()}", flush=True)
    return samples


def main() -> int:
    """Measure and print."""
    arguments = _parser().parse_args()
    if not os.path.isdir(arguments.directory):
        raise SystemExit(f"{arguments.directory} is no directory; name one on the disk that shall be measured")
    facts = {**machine_facts(arguments.directory), "fio": fio_version()}
    print(report_facts(" ".join(["python", "benchmarks/deepnvme.py", *sys.argv[1:]]), facts))
    ways: dict[str, dict[str, Move]] = {}
    checks: dict[str, torch.Tensor] = {}

    def add(name: str, way: Any) -> None:
        ways[name] = {"write": way.write, "read": way.read}
        checks[name] = way.tensor

    add("TensorFile", _TensorFile(arguments))
    add("our aio_handle", _Handle(deepnvme, arguments))
    theirs, why_not = _theirs()
    if theirs is None:
        print(f"DeepNVMe is left out: {why_not}")
    else:
        import deepspeed

        facts["deepspeed"] = deepspeed.__version__
        print(f"DeepSpeed {deepspeed.__version__}")
        add("DeepNVMe", _Handle(theirs, arguments))
    if facts["fio"]:
        ways["fio"] = {
            "write": functools.partial(_fio, "write", arguments),
            "read": functools.partial(_fio, "read", arguments),
        }
    else:
        print("fio is left out: it is not installed")
    with tempfile.TemporaryDirectory(prefix=".deepnvme-", dir=arguments.directory) as directory:
        samples = _measure(ways, checks, directory, arguments.rounds)
    size_bytes = arguments.size_mb * _MIB
    rows = []
    for direction, found in samples.items():
        for way, seconds in found.items():
            of_fio = [fio / own for fio, own in zip(found.get("fio", []), seconds, strict=False)]
            ratio = f"{100 * statistics.median(of_fio):.0f} %" if of_fio else ""
            spread = f"{statistics.median(seconds):.3f} ({min(seconds):.3f} – {max(seconds):.3f})"
            rows.append([direction, way, spread, f"{size_bytes / statistics.median(seconds) / 1e9:.2f}", ratio])
    print(f"\n{size_bytes / 1e9:.2f} GB, blocks of {arguments.block} bytes, {arguments.depth} in flight\n")
    headers = ["what", "by", "median s (min – max)", "GB/s", "of fio, by round"]
    print(tabulate(rows, headers, disable_numparse=True, tablefmt="pipe"))
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump({"machine": facts, "samples": samples}, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
