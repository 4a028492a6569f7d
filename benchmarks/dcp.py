"""Sharded states through torch.distributed.checkpoint: our storage writer and reader beside their peers, and fio.

    python benchmarks/dcp.py DIR                                  2 and 4 ranks, 1.6 GB; takes ten minutes
    python benchmarks/dcp.py DIR --ranks 2 --size-mb 4096 --rounds 5 --parts save load

The state is that of an FSDP2 training: parameters and two moments of each as DTensors, sharded along their first
dimension over all ranks of a gloo group, in unequal tensors. All ways take turns in the same processes.

Save: from the first rank that begins until the last one returns; ours is durable then, DCP's has synced its files, but
not the directory, torch_checkpointing is made to sync both. Load: into tensors that are there, from files that were
dropped from the page cache (checked). fio writes as many bytes, and reads the very files that the ranks read, one job a
rank, after each turn of ours. Memory: what the process that grew most grew by during a save, beyond the state. Async:
dcp.async_save and its like, then --between seconds in which nothing is done, as the CPU has little to do while a GPU
computes, then the next step of the optimizer. Stall: how long the call and the step take, on the rank where they take
longest. Each way has had one save before the one that counts, so that memory it keeps is there; of the first of these
it is checked that the state of the step before is what was written.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import dcp_ways as ways
import ranks_parts as parts
from overlap_report import machine_facts, report_facts
from tabulate import tabulate

from fastpersist.cli.bench.fio import FioJob, fio_version, run_fio
from fastpersist.cli.bench.load_rows import PageCache

_MIB = 1 << 20
_SAVE_TIMES_MIN = 2.0
_LOAD_TIMES_MIN, _OF_FIO_MIN = 1.5, 0.9
_STALL_SHARE_MAX = 0.1
_GROWTH_BYTES_MAX = (64 + 100) * _MIB
_PARTS = ("save", "load", "async")


def _remove(path: str) -> None:
    shutil.rmtree(path, ignore_errors=True)
    descriptor = os.open(os.path.dirname(path), os.O_RDONLY)
    os.fsync(descriptor)  # lest removing gigabytes costs the next one its time
    os.close(descriptor)


def _data_files(path: str) -> list[str]:
    return sorted(entry.path for entry in os.scandir(path) if entry.name.endswith((".distcp", ".pt")))


def _fio_read(files: Sequence[str]) -> float:
    smallest_bytes = min(os.path.getsize(path) for path in files)
    block_bytes = min(8 * _MIB, smallest_bytes // 4096 * 4096)
    size_bytes = smallest_bytes // block_bytes * block_bytes
    sample = run_fio(FioJob("read", size_bytes, block_bytes=block_bytes), list(files))
    return sample.size_bytes / sample.seconds


def _fio_write(files: Sequence[str], size_bytes: int) -> float:
    block_bytes = min(8 * _MIB, size_bytes // 4096 * 4096)
    sample = run_fio(FioJob("write", size_bytes, block_bytes=block_bytes), list(files))
    return sample.size_bytes / sample.seconds


class _Measurement:
    """Has the ranks of one count do everything, and notes what it took.

    Attributes:
        found: The samples, as they go into the JSON.
    """

    def __init__(self, arguments: argparse.Namespace, count: int, directory: str, ranks: parts.RankProcesses) -> None:
        self._arguments = arguments
        self._count = count
        self._directory = directory
        self._ranks = ranks
        self._cache = PageCache(warm=False, whole_machine=False)
        self.found: dict[str, Any] = {"unavailable": {}, "cold": self._cache.describe()}
        self.found["size_bytes"] = self._call(ways.hold_shards, arguments.size_mb * _MIB, count, arguments.flat)[0]
        self._wanted = self._call(ways.digest)

    def _call(self, function: Callable[..., Any], *more: Any) -> list[Any]:
        return self._ranks.call(self._count, function, *more)

    def _available(self, what: str, names: Sequence[str], begin: Callable[[str], object]) -> list[str]:
        """Return the ways that can be tried here; what the others lack is noted and said."""
        found = []
        for name in names:
            if reason := self._call(ways.why_not, name)[0]:
                self.found["unavailable"][f"{what}, {name}"] = reason
                print(f"without {what} by {name}: {reason}", file=sys.stderr)
                continue
            begin(name)
            found.append(name)
        return found

    def _turns(self, what: str, names: Sequence[str]) -> Iterator[tuple[int, str]]:
        """Yield each round and the way whose turn it is, in an order that changes."""
        for number in range(self._arguments.rounds):
            for way in names if number % 2 == 0 else names[::-1]:
                said = f"round {number + 1} of {self._arguments.rounds}, {way}"
                print(f"… {self._count} ranks, {what}, {said}", file=sys.stderr)
                yield number, way

    def _path(self, name: str) -> str:
        return os.path.join(self._directory, name)

    def measure_saves(self) -> None:
        """Save in all ways."""

        def begin(way: str) -> None:  # not counted: connections, and memory that is touched for the first time
            self._call(ways.save, self._path("first"), self._count, way)
            _remove(self._path("first"))

        names = self._available("save", ways.SAVE_WAYS, begin)
        self.found["save"] = {way: [] for way in names}
        self.found["growth"] = {way: [] for way in names}
        self.found["fio_write"] = []
        for _, way in self._turns("save", names):
            results = self._call(ways.save, self._path("fresh"), self._count, way)
            self.found["save"][way].append(parts.whole_span([span for span, _ in results]))
            self.found["growth"][way].append(max(growth for _, growth in results))
            _remove(self._path("fresh"))
            if way == "fastpersist" and fio_version():
                os.mkdir(self._path("fresh"))
                files = [os.path.join(self._path("fresh"), f"{rank}.fio") for rank in range(self._count)]
                self.found["fio_write"].append(_fio_write(files, self.found["size_bytes"] // self._count))
                _remove(self._path("fresh"))

    def measure_loads(self) -> None:
        """Load in all ways, each what it has saved."""
        kept = {way: self._path(way.split(",")[0]) for way in ways.LOAD_WAYS}

        def begin(way: str) -> None:
            self._call(ways.save, kept[way], self._count, ways.SAVE_WAY_FOR_LOAD.get(way, way))

        names = self._available("load", ways.LOAD_WAYS, begin)
        self.found["load"] = {way: [] for way in names}
        self.found["fio_read"] = []
        for _, way in self._turns("load", names):
            self._call(ways.forget)
            for file in _data_files(kept[way]):
                self._cache.prepare(file)
            results = self._call(ways.load, kept[way], self._count, way)
            self.found["load"][way].append(parts.whole_span([span for span, _ in results]))
            self._check(way)
            if way == "fastpersist" and fio_version():
                files = _data_files(kept[way])
                for file in files:
                    self._cache.prepare(file)
                self.found["fio_read"].append(_fio_read(files))
        for way in names:
            _remove(kept[way])

    def _check(self, way: str) -> None:
        if self._call(ways.digest) != self._wanted:
            raise parts.Failed(f"{way} has loaded other numbers than were saved")

    def measure_async(self, chosen: Sequence[str]) -> None:
        """Save in the background in the chosen ways, each started anew for each round: none keeps another's memory."""
        load_ways: dict[str, str] = {}

        def start(way: str) -> None:
            load_ways[way] = self._call(ways.start_async, self._count, way)[0]

        def save(way: str, *, forgets: bool) -> list[Any]:
            between_s = self._arguments.between
            return self._call(ways.save_async, self._path("fresh"), self._count, way, between_s, forgets)

        def begin(way: str) -> None:
            start(way)
            save(way, forgets=True)
            self._call(ways.load, self._path("fresh"), self._count, load_ways[way])
            self._check(way)
            _remove(self._path("fresh"))
            self._call(ways.close_async, way)

        names = self._available("async", chosen, begin)
        self.found["async"] = {way: {"stall": [], "durable": [], "growth": []} for way in names}
        for _, way in self._turns("async", names):
            start(way)
            save(way, forgets=False)
            _remove(self._path("fresh"))
            results = save(way, forgets=False)
            samples = self.found["async"][way]
            samples["stall"].append(max(stall for _, _, stall in results))
            samples["durable"].append(parts.whole_span([span for span, _, _ in results]))
            samples["growth"].append(max(growth for _, growth, _ in results))
            _remove(self._path("fresh"))
            self._call(ways.close_async, way)


# ------------------------------------------------------------------------------------------------ what is printed


def _cell(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds):.3f} ({min(seconds):.3f} – {max(seconds):.3f})"


def _times_ours(samples: dict[str, list[float]], way: str) -> str:
    ratios = [other / own for other, own in zip(samples[way], samples["fastpersist"], strict=True)]
    return f"{statistics.median(ratios):.2f}"


def _grown(growth_bytes: Sequence[int]) -> str:
    return f"{max(growth_bytes) / _MIB:.0f}"


def _report(count: int, found: dict[str, Any]) -> None:
    """Print the tables of one number of ranks."""
    size_bytes = found["size_bytes"]
    rows = []
    for what in ("save", "load"):
        for way, seconds in found.get(what, {}).items():
            rate = f"{size_bytes / statistics.median(seconds) / 1e9:.2f}"
            grown = _grown(found["growth"][way]) if what == "save" else ""
            rows.append([what, way, _cell(seconds), rate, _times_ours(found[what], way), grown])
    for what in ("write", "read"):
        if found.get(f"fio_{what}"):
            rows.append([what, "fio", "", f"{statistics.median(found[f'fio_{what}']) / 1e9:.2f}", "", ""])
    print(f"\n{count} ranks, {size_bytes / 1e9:.2f} GB; {found['cold']}")
    headers = ["what", "by", "median s (min – max)", "GB/s", "times ours", "grew by MiB at most"]
    if rows:
        print("\n" + tabulate(rows, headers, disable_numparse=True, tablefmt="pipe"))
    rows = []
    for way, samples in found.get("async", {}).items():
        milliseconds = [1000 * stall_s for stall_s in samples["stall"]]
        stall = f"{statistics.median(milliseconds):.1f} ({min(milliseconds):.1f} – {max(milliseconds):.1f})"
        rows.append([way, stall, _cell(samples["durable"]), _grown(samples["growth"])])
    headers = ["async by", "stall, median ms (min – max)", "durable after s", "grew by MiB at most"]
    if rows:
        print("\n" + tabulate(rows, headers, disable_numparse=True, tablefmt="pipe"))
    for what, reason in found["unavailable"].items():
        print(f"\nnot tried: {what}: {reason}")
    sys.stdout.flush()


def _checks(count: int, found: dict[str, Any]) -> list[list[str]]:
    """Return what is expected of one number of ranks, what was found, and whether that will do."""
    checks = []

    def add(what: str, said: str, ok: bool) -> None:
        checks.append([f"{count} ranks: {what}", said, "PASS" if ok else "FAIL"])

    def times(samples: dict[str, list[float]], ways_of_stock: Sequence[str]) -> float:
        own = statistics.median(samples["fastpersist"])
        return min(statistics.median(samples[way]) for way in ways_of_stock) / own

    def of_fio(what: str, fio: str) -> float:
        own_s = statistics.median(found[what]["fastpersist"])
        return found["size_bytes"] / own_s / statistics.median(found[fio]) if found[fio] else 0.0

    def stock_of(samples: dict[str, Any]) -> list[str]:
        return [way for way in samples if way.startswith("stock")]

    if "save" in found:
        saved, growth_bytes = times(found["save"], stock_of(found["save"])), max(found["growth"]["fastpersist"])
        said = f"{saved:.2f} times, {100 * of_fio('save', 'fio_write'):.0f} % of fio"
        add("save 2 × stock", said, saved >= _SAVE_TIMES_MIN)
        add("memory ≤ ring + 100 MiB", f"{growth_bytes / _MIB:.0f} MiB", growth_bytes <= _GROWTH_BYTES_MAX)
    if "load" in found:
        loaded, share = times(found["load"], stock_of(found["load"])), of_fio("load", "fio_read")
        said = f"{loaded:.2f} times, {100 * share:.0f} % of fio"
        add("load 1.5 × stock or 90 % of fio", said, loaded >= _LOAD_TIMES_MIN or share >= _OF_FIO_MIN)
    stalls = {way: samples["stall"] for way, samples in found.get("async", {}).items()}
    if {"fastpersist", "stock"} <= stalls.keys():
        share, of_best = 1 / times(stalls, ["stock"]), 1 / times(stalls, stock_of(stalls))
        said = f"{share:.3f}, of the best setting's {of_best:.2f}"
        add("stall ≤ a tenth of async_save's own", said, share <= _STALL_SHARE_MAX)
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
    parser.add_argument("--parts", nargs="+", choices=_PARTS, default=_PARTS, help="what to measure (default: all)")
    parser.add_argument("--async-ways", nargs="+", choices=ways.ASYNC_WAYS, default=ways.ASYNC_WAYS, metavar="WAY")
    parser.add_argument("--flat", action="store_true", help="one dict of all tensors, of which DCP logs each")
    parser.add_argument("--between", type=float, default=0.5, metavar="S", help="from async_save to the step")
    parser.add_argument("--timeout", type=int, default=300, metavar="S", help="of one save")
    parser.add_argument("--json", metavar="PATH", help="write all samples there as well")
    arguments = parser.parse_args()
    if not os.path.isdir(arguments.directory):
        raise SystemExit(f"{arguments.directory} is no directory; name one on the disk that shall be measured")
    facts = {**machine_facts(arguments.directory), "fio": fio_version()}
    print(report_facts(" ".join(["python", "benchmarks/dcp.py", *sys.argv[1:]]), facts), flush=True)
    results, checks = {}, []
    for count in arguments.ranks:
        with (
            tempfile.TemporaryDirectory(prefix=".dcp-", dir=arguments.directory) as directory,
            parts.RankProcesses([count], directory, arguments.timeout) as ranks,
        ):
            measurement = _Measurement(arguments, count, directory, ranks)
            if "save" in arguments.parts:
                measurement.measure_saves()
            if "load" in arguments.parts:
                measurement.measure_loads()
            if "async" in arguments.parts:
                measurement.measure_async(arguments.async_ways)
        results[count] = measurement.found
        _report(count, results[count])
        checks += _checks(count, results[count])
    print()
    print(tabulate(checks, ["check", "found", ""], disable_numparse=True, tablefmt="pipe"))
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump({"machine": facts, "results": results, "checks": checks}, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
