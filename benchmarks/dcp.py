"""Sharded states through torch.distributed.checkpoint: our storage writer and reader beside DCP's own, and fio.

    python benchmarks/dcp.py DIR                                  2 and 4 ranks, 1.6 GB; takes three minutes
    python benchmarks/dcp.py DIR --ranks 2 --size-mb 4096 --rounds 5

The state is that of an FSDP2 training: parameters and two moments of each as DTensors, sharded along their first
dimension over all ranks of a gloo group, in unequal tensors. All ways take turns in the same processes. Save: from the
first rank that begins until the last one returns; ours is durable then, DCP's has synced its files, but not the
directory. Load: into tensors that are there, from files that were dropped from the page cache (checked). fio reads the
very files that the ranks read, one job a rank. Memory: what the process that grew most grew by during a save, beyond
the state.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import ranks_parts as parts
import torch
import torch.distributed.checkpoint as dcp
from overlap_report import machine_facts, report_facts
from tabulate import tabulate
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from fastpersist.cli.bench_fio import FioJob, fio_version, run_fio
from fastpersist.cli.bench_load_rows import PageCache
from fastpersist.integrations.torch_dcp import FastPersistReader, FastPersistSavePlanner, FastPersistWriter

_MIB = 1 << 20
_SEED = 11
_SAVE_TIMES_MIN = 2.0
_LOAD_TIMES_MIN, _OF_FIO_MIN = 1.5, 0.9
_GROWTH_BYTES_MAX = (64 + 100) * _MIB

# ------------------------------------------------------------------------------------------------ what ranks do


def hold_shards(here: parts.Here, size_bytes: int, count: int) -> int:
    """Make this rank's shards of the state; return the bytes of the whole."""
    mesh = init_device_mesh("cpu", (count,)) if count > 1 else None
    column_count = 1024
    layer_count = max(2, min(48, size_bytes // (4 * _MIB)))
    row_count = size_bytes // layer_count // 3 // 4 // column_count
    generator = torch.Generator().manual_seed(_SEED + here.rank)
    state: dict[str, Any] = {"step": 7}
    total_bytes = 0
    for layer in range(layer_count):
        rows = max(count, row_count + 16 * (layer - layer_count // 2))
        for name in ("weight", "exp_avg", "exp_avg_sq"):
            chunk_count = -(-rows // count)
            low = min(rows, chunk_count * here.rank)
            local = torch.rand(min(rows, low + chunk_count) - low, column_count, generator=generator)
            total_bytes += rows * column_count * 4
            state[f"layers.{layer}.{name}"] = (
                local
                if mesh is None
                else DTensor.from_local(
                    local, mesh, [Shard(0)], run_check=False, shape=(rows, column_count), stride=(column_count, 1)
                )
            )
    here.state = state
    here.state_resident_bytes = _resident("VmRSS")  # type: ignore[attr-defined]
    return total_bytes


def _span_of(here: parts.Here, count: int, do: Callable[[], object]) -> tuple[parts.Span, int]:
    """Return when it began and ended, and how much larger the process was at most than with the state alone."""
    here.together(count)
    with open("/proc/self/clear_refs", "w") as control:
        control.write("5")  # the peak begins here
    start_s = time.monotonic()
    with warnings.catch_warnings(), contextlib.redirect_stdout(None):
        warnings.simplefilter("ignore")
        do()
    end_s = time.monotonic()
    return (start_s, end_s), _resident("VmHWM") - here.state_resident_bytes  # type: ignore[attr-defined]


def _resident(name: str) -> int:
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def save(here: parts.Here, path: str, count: int, way: str) -> tuple[parts.Span, int]:
    """Save the state in one of the ways."""
    planner = FastPersistSavePlanner() if way == "fastpersist" else None
    if way == "fastpersist":
        writer: Any = FastPersistWriter(path)
    else:
        writer = FileSystemWriter(path, thread_count=int(way.split()[1]))
    save_it = functools.partial(dcp.save, here.state, storage_writer=writer, planner=planner, no_dist=count == 1)
    return _span_of(here, count, save_it)


def load(here: parts.Here, path: str, count: int, way: str) -> tuple[parts.Span, int]:
    """Load the state in one of the ways, over what it is."""
    reader: Any = FastPersistReader(path) if way == "fastpersist" else FileSystemReader(path)
    return _span_of(here, count, functools.partial(dcp.load, here.state, storage_reader=reader, no_dist=count == 1))


def digest(here: parts.Here) -> float:
    """Return a number that other shards would not give."""
    return sum(
        float((tensor.to_local() if isinstance(tensor, DTensor) else tensor).double().sum())
        for tensor in here.state.values()
        if isinstance(tensor, torch.Tensor)
    )


def forget(here: parts.Here) -> None:
    """Fill the shards with something else, so that a load has to bring them back."""
    for tensor in here.state.values():
        if isinstance(tensor, torch.Tensor):
            (tensor.to_local() if isinstance(tensor, DTensor) else tensor).fill_(-1)


# ------------------------------------------------------------------------------------------------ the benchmark

_SAVE_WAYS = ("fastpersist", "stock, 1 thread", "stock, 2 threads")
_WAYS = {"fastpersist": "fastpersist", "stock, 1 thread": "stock 1", "stock, 2 threads": "stock 2"}
_LOAD_WAYS = ("fastpersist", "stock")


def _remove(path: str) -> None:
    shutil.rmtree(path, ignore_errors=True)
    descriptor = os.open(os.path.dirname(path), os.O_RDONLY)
    os.fsync(descriptor)  # lest removing gigabytes costs the next one its time
    os.close(descriptor)


def _data_files(path: str) -> list[str]:
    return sorted(entry.path for entry in os.scandir(path) if entry.name.endswith(".distcp"))


def _fio_read(files: Sequence[str]) -> float:
    smallest_bytes = min(os.path.getsize(path) for path in files)
    block_bytes = min(8 * _MIB, smallest_bytes // 4096 * 4096)
    size_bytes = smallest_bytes // block_bytes * block_bytes
    sample = run_fio(FioJob("read", size_bytes, block_bytes=block_bytes), list(files))
    return sample.size_bytes / sample.seconds


def _measure(arguments: argparse.Namespace, count: int, directory: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        "save": {way: [] for way in _SAVE_WAYS},
        "growth": {way: [] for way in _SAVE_WAYS},
        "load": {way: [] for way in _LOAD_WAYS},
        "fio_read": [],
    }
    cache = PageCache(warm=False, whole_machine=False)
    with parts.RankProcesses([count], directory, arguments.timeout) as ranks:
        found["size_bytes"] = ranks.call(count, hold_shards, arguments.size_mb * _MIB, count)[0]
        wanted = ranks.call(count, digest)
        kept = {"fastpersist": os.path.join(directory, "ours"), "stock": os.path.join(directory, "stock")}
        for way, path in kept.items():  # not counted: connections, and memory that is touched for the first time
            ranks.call(count, save, path, count, way if way == "fastpersist" else "stock 1")
        for number in range(arguments.rounds):
            for way in _SAVE_WAYS if number % 2 == 0 else _SAVE_WAYS[::-1]:
                print(f"… {count} ranks, save, round {number + 1} of {arguments.rounds}, {way}", file=sys.stderr)
                path = os.path.join(directory, "fresh")
                results = ranks.call(count, save, path, count, _WAYS[way])
                found["save"][way].append(parts.whole_span([span for span, _ in results]))
                found["growth"][way].append(max(growth for _, growth in results))
                _remove(path)
        for number in range(arguments.rounds):
            for way in _LOAD_WAYS if number % 2 == 0 else _LOAD_WAYS[::-1]:
                print(f"… {count} ranks, load, round {number + 1} of {arguments.rounds}, {way}", file=sys.stderr)
                ranks.call(count, forget)
                for file in _data_files(kept[way]):
                    cache.prepare(file)
                results = ranks.call(count, load, kept[way], count, way)
                found["load"][way].append(parts.whole_span([span for span, _ in results]))
                if ranks.call(count, digest) != wanted:
                    raise parts.Failed(f"{way} has loaded other numbers than were saved")
            if fio_version():
                files = _data_files(kept["fastpersist"])
                for file in files:
                    cache.prepare(file)
                found["fio_read"].append(_fio_read(files))
        for path in kept.values():
            _remove(path)
    found["cold"] = cache.describe()
    return found


def _cell(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds):.3f} ({min(seconds):.3f} – {max(seconds):.3f})"


def _report(count: int, found: dict[str, Any]) -> list[list[str]]:
    """Print the tables of one number of ranks; return the checks."""
    size_bytes, checks = found["size_bytes"], []
    rows = []
    for way, seconds in found["save"].items():
        rate = f"{size_bytes / statistics.median(seconds) / 1e9:.2f}"
        growth = f"{max(found['growth'][way]) / _MIB:.0f}"
        ratios = [other / own for other, own in zip(seconds, found["save"]["fastpersist"], strict=True)]
        rows.append(["save", way, _cell(seconds), rate, f"{statistics.median(ratios):.2f}", growth])
    for way, seconds in found["load"].items():
        rate = f"{size_bytes / statistics.median(seconds) / 1e9:.2f}"
        ratios = [other / own for other, own in zip(seconds, found["load"]["fastpersist"], strict=True)]
        rows.append(["load", way, _cell(seconds), rate, f"{statistics.median(ratios):.2f}", ""])
    if found["fio_read"]:
        rows.append(["read", "fio", "", f"{statistics.median(found['fio_read']) / 1e9:.2f}", "", ""])
    print(f"\n{count} ranks, {size_bytes / 1e9:.2f} GB; {found['cold']}\n")
    headers = ["what", "by", "median s (min – max)", "GB/s", "times ours", "grew by MiB at most"]
    print(tabulate(rows, headers, disable_numparse=True, tablefmt="pipe"), flush=True)

    def times(what: str, ways: Sequence[str]) -> float:
        own = statistics.median(found[what]["fastpersist"])
        return min(statistics.median(found[what][way]) for way in ways) / own

    saved, loaded = times("save", _SAVE_WAYS[1:]), times("load", _LOAD_WAYS[1:])
    own_rate = size_bytes / statistics.median(found["load"]["fastpersist"])
    of_fio = own_rate / statistics.median(found["fio_read"]) if found["fio_read"] else 0.0
    growth_bytes = max(found["growth"]["fastpersist"])
    name = f"{count} ranks"
    load_found = f"{loaded:.2f} times, {100 * of_fio:.0f} % of fio"
    load_ok = loaded >= _LOAD_TIMES_MIN or of_fio >= _OF_FIO_MIN
    growth_ok = growth_bytes <= _GROWTH_BYTES_MAX
    checks.append([f"{name}: save 2 × stock", f"{saved:.2f}", "PASS" if saved >= _SAVE_TIMES_MIN else "FAIL"])
    checks.append([f"{name}: load 1.5 × stock or 90 % of fio", load_found, "PASS" if load_ok else "FAIL"])
    grown = f"{growth_bytes / _MIB:.0f} MiB"
    checks.append([f"{name}: memory ≤ ring + 100 MiB", grown, "PASS" if growth_ok else "FAIL"])
    return checks


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="dcp.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", metavar="DIR", help="existing directory on the disk to measure; left as it was")
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4], metavar="N")
    parser.add_argument("--size-mb", type=int, default=1536, metavar="MIB", help="of the whole state (default: 1536)")
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    parser.add_argument("--timeout", type=int, default=300, metavar="S", help="of one save")
    parser.add_argument("--json", metavar="PATH", help="write all samples there as well")
    arguments = parser.parse_args()
    if not os.path.isdir(arguments.directory):
        raise SystemExit(f"{arguments.directory} is no directory; name one on the disk that shall be measured")
    facts = {**machine_facts(arguments.directory), "fio": fio_version()}
    print(report_facts(" ".join(["python", "benchmarks/dcp.py", *sys.argv[1:]]), facts), flush=True)
    results, checks = {}, []
    for count in arguments.ranks:
        with tempfile.TemporaryDirectory(prefix=".dcp-", dir=arguments.directory) as directory:
            results[count] = _measure(arguments, count, directory)
        checks += _report(count, results[count])
    print()
    print(tabulate(checks, ["check", "found", ""], disable_numparse=True, tablefmt="pipe"))
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump({"machine": facts, "results": results, "checks": checks}, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
