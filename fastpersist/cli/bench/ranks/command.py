"""`fastpersist bench ranks DIR`: one checkpoint written, and read, by several processes: replicated, or sharded.

Here is the command line; rows are `ranks.one_file`'s and `ranks.sharded`'s, tables `ranks.tables`'. As in the other
benchmarks, nothing fails because a machine is slow: the exit code is 0 unless a row of fastpersist itself fails.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fastpersist.cli.argument_types import positive, whole_number
from fastpersist.cli.bench.fio import fio_write_bytes
from fastpersist.cli.bench.load_rows import PageCache
from fastpersist.cli.bench.places import check_places, require_space, scratch_directory, write_json
from fastpersist.cli.bench.ranks.one_file import OneFile
from fastpersist.cli.bench.ranks.processes import Failed, RankProcesses
from fastpersist.cli.bench.ranks.tables import Table, ranks_text, row_json
from fastpersist.cli.bench.report import command_line_text, machine_facts, report_head
from fastpersist.cli.bench.rows import exit_code
from fastpersist.cli.terminal import HelpFormatter, examples_text
from fastpersist.errors import ConfigError, UnsupportedError
from fastpersist.transfer.arena import available_host_bytes

__all__ = ["add_parser", "run"]

_MIB = 1 << 20
_TIMEOUT_S = 300.0
_RANK_COUNT_MAX = 64
_PARTS = ("save", "load", "agreement", "async")
_KEPT_COUNT = 3  # what several ways have saved lies there for each to load; one more is a margin


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `ranks` to the commands of `bench.command`."""
    parser = commands.add_parser(
        "ranks",
        help="time of several processes that write one file together, and load it",
        description="Processes on this machine, in a gloo group over loopback, hold the same state, as data-parallel "
        "ranks do. Measured is the time until one fresh file of it is durable: written by all of them, each a part "
        "(fastpersist.save with process_group), by one of them alone, and by torch.save on rank 0 with fsync. Then the "
        "time until the last of them has it in memory, the file being out of the page cache: loaded together "
        "(fastpersist.load with process_group), by each for itself, and by each with torch.load. fio writes with as "
        "many jobs, and reads the same file. With --sharded each rank holds its shards of one state (DTensors), which "
        "torch.distributed.checkpoint saves and loads with FastPersistWriter, with its own FileSystemWriter, and "
        "torch_checkpointing if it is installed; then they save it in the background.",
        epilog=examples_text(
            "fastpersist bench ranks /mnt/nvme --ranks 2 4 8", "fastpersist bench ranks /mnt/nvme --sharded"
        )
        + "One disk shows that several writers do no harm; what several disks would gain, it cannot show.",
        formatter_class=HelpFormatter,
    )
    parser.add_argument("directory", metavar="DIR", help="existing directory; a scratch directory in it is removed")
    parser.add_argument(
        "--ranks",
        type=whole_number(2, _RANK_COUNT_MAX),
        nargs="+",
        action="extend",
        metavar="N",
        help="ranks of a group (default: 2 4)",
    )
    parser.add_argument(
        "--size-mb",
        type=positive,
        default=1024,
        metavar="N",
        help="MiB of the state; each rank holds it, or with --sharded a part of it (default: 1024)",
    )
    parser.add_argument(
        "--parts",
        nargs="+",
        action="extend",
        choices=_PARTS,
        metavar="PART",
        help="what to measure: save, load, agreement (saves of 4 KiB, of which most is agreement), async (with "
        "--sharded; default: save load, with --sharded also async)",
    )
    parser.add_argument("--warm", action="store_true", help="load files that are in the page cache")
    parser.add_argument(
        "--load-ways", action="store_true", help="rows for each way in which ranks can read one file, not the best only"
    )
    parser.add_argument(
        "--limits",
        action="store_true",
        help="rows for what limits several writers: bare pwrite into one file and into one each, all of a save but the "
        "kernel's part (null engine), memcpy; none of it durable",
    )
    parser.add_argument("--one-core-each", action="store_true", help="keep each rank on one core")
    parser.add_argument("--sharded", action="store_true", help="a state in shards, by torch.distributed.checkpoint")
    parser.add_argument(
        "--flat", action="store_true", help="with --sharded: one dict of all tensors, each of which DCP logs"
    )
    parser.add_argument(
        "--between",
        type=float,
        default=0.5,
        metavar="S",
        help="with --sharded: seconds from a save in the background to the optimizer's next step (default: 0.5)",
    )
    parser.add_argument("--repeat", type=positive, default=5, metavar="N", help="rounds (default: 5)")
    parser.add_argument("--json", metavar="FILE", help="write the results there as well")
    parser.set_defaults(run=run, parser=parser)


def run(arguments: argparse.Namespace) -> int:
    """Measure, print the tables, write the JSON.

    Returns:
        0, or 1 if a row of fastpersist failed.

    Raises:
        ConfigError: DIR is no directory, or there is not memory enough.
        StorageError: DIR has no room or takes no files; or the JSON file cannot be written.
        UnsupportedError: The ranks cannot be started, or cannot hold the state.
    """
    arguments.ranks = sorted(set(arguments.ranks or [2, 4]))
    _check(arguments)
    facts = machine_facts(arguments.directory)
    command_line = command_line_text(arguments)
    measure = _sharded if arguments.sharded else _one_file
    with scratch_directory(arguments.directory) as scratch, scratch_directory(arguments.directory) as meeting:
        sizes, tables, cache = measure(arguments, scratch, meeting)
    notes = _notes(arguments, facts, cache)
    held = "in shards, on all ranks together" if arguments.sharded else "on each rank"
    print(ranks_text(command_line, facts, notes, tables, f"a state of {sizes['state_bytes'] / 1e9:.3f} GB {held}"))
    if arguments.json:
        report: dict[str, Any] = report_head("ranks", command_line, facts, notes) | sizes
        for one in tables:
            report[one.name] = report.get(one.name, []) + [row_json(result, one.name) for result in one.results]
        write_json(arguments.json, report)
    return exit_code(result.measured for one in tables for result in one.results)


def _one_file(
    arguments: argparse.Namespace, scratch: str, meeting: str
) -> tuple[dict[str, int], list[Table], PageCache]:
    """Measure what ranks do that hold the same state; return sizes, tables, and how files came to be cold."""
    tables = []
    with RankProcesses(arguments.ranks, meeting, _TIMEOUT_S) as ranks:
        bench = OneFile(ranks, arguments.ranks, scratch, arguments)
        with _one_line():
            sizes = {"state_bytes": bench.prepare(arguments.size_mb * _MIB)}
        if "save" in arguments.parts:
            tables.append(bench.saves(sizes["state_bytes"]))
        if "agreement" in arguments.parts:
            with _one_line():
                tables.append(bench.agreement())
        if "load" in arguments.parts:
            with _one_line():
                sizes["file_bytes"] = bench.write_file()
            tables.append(bench.loads(sizes["file_bytes"]))
    return sizes, tables, bench.cache


def _sharded(
    arguments: argparse.Namespace, scratch: str, meeting: str
) -> tuple[dict[str, int], list[Table], PageCache]:
    """Measure what ranks do with a sharded state, one number of ranks after the other; return the same."""
    from fastpersist.cli.bench.ranks.sharded import Sharded  # here: it needs a torch with torch.distributed

    tables = []
    for count in arguments.ranks:
        with RankProcesses([count], meeting, _TIMEOUT_S) as ranks:
            with _one_line():
                bench = Sharded(ranks, count, scratch, arguments)
            ways = {"save": bench.saves, "load": bench.loads, "async": bench.in_background}
            tables += [measure() for part, measure in ways.items() if part in arguments.parts]
    return {"state_bytes": bench.size_bytes}, tables, bench.cache


def _check(arguments: argparse.Namespace) -> None:
    """Refuse what cannot be measured here."""
    check_places(arguments.directory, [arguments.json])
    if not torch.distributed.is_available():
        raise ConfigError("this torch is built without torch.distributed, so there are no ranks to measure")
    arguments.parts = arguments.parts or ["save", "load"] + ["async"] * arguments.sharded
    if "async" in arguments.parts and not arguments.sharded:
        raise ConfigError("--parts async is about a sharded state: --sharded")
    if arguments.sharded:
        for option in ("load_ways", "limits", "one_core_each"):
            if getattr(arguments, option):
                raise ConfigError(f"--{option.replace('_', '-')} is about one file, and --sharded about another state")
        if "agreement" in arguments.parts:
            raise ConfigError("--parts agreement is about one file, and --sharded about another state")
    held_count = 2 if arguments.sharded else max(arguments.ranks)  # DCP stages a copy of all shards
    needed_bytes = held_count * arguments.size_mb * _MIB
    if needed_bytes > available_host_bytes():
        raise ConfigError(
            f"--ranks {max(arguments.ranks)} with --size-mb {arguments.size_mb} each is more memory than is available "
            f"({available_host_bytes() / 1e9:.1f} GB); ask for less"
        )
    most_bytes = fio_write_bytes(arguments.size_mb * _MIB, max(arguments.ranks))
    kept_count = _KEPT_COUNT if arguments.sharded else 1
    require_space(arguments.directory, kept_count * most_bytes, instead="a smaller --size-mb")


@contextmanager
def _one_line() -> Iterator[None]:
    """Make an answer of what ranks could not do outside a row."""
    try:
        yield
    except Failed as error:
        raise UnsupportedError(str(error).splitlines()[0]) from error


def _notes(arguments: argparse.Namespace, facts: dict[str, Any], cache: PageCache) -> list[str]:
    load = f"load: {cache.describe()}; caches in the drive, or in the host of a virtual disk, cannot be dropped"
    notes = [
        "seconds run from the first rank that begins to the last that returns; GB/s are 10^9 bytes of the one state "
        "per second of the median, of all ranks: what they all have got per second; the rows took turns, each round in "
        "another order"
    ]
    cores = "is kept on one core" if arguments.one_core_each else "alone may use several for writing"
    if arguments.sharded:
        return [
            *notes,
            "save: ours is durable when it returns, DCP has synced its files, torch_checkpointing is made to sync; "
            "each keeps what it has planned",
            load,
            "peak: the largest growth of any rank's memory during a run, on top of the state",
            f"async: the call, then {arguments.between:g} s in which nothing is done, then the optimizer's step; "
            "stall: the call and that step, on the rank where they take longest; each way was started anew for each "
            "round, and had one save before, with memory that it keeps; of each it was checked that what is loaded "
            "is the state of before the step",
            "fio: io_uring, direct, bs=8M, iodepth=8 of one job a rank; writes as many bytes into one fresh, "
            "preallocated file, with --end_fsync=1; reads the files of FastPersistWriter",
        ]
    return [
        *notes,
        "save: a fresh file, durable with its name; its removal is synced before the next run",
        load,
        f"every rank computes on one thread, and one rank {cores}; this machine has {facts['cpu_count']} CPUs, and "
        "more ranks than that take turns",
        "fio: io_uring, direct, bs=8M, iodepth=8 of each job; writes a fresh, preallocated file, a range by each job, "
        "with --end_fsync=1; reads the file that the ranks load, by one job",
    ]
