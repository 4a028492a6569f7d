"""`fastpersist bench ranks DIR`: one file written, and read, by several processes that hold the same state.

What the processes do is in `bench.ranks.processes`; here are rows, rounds and tables. As in the other benchmarks,
nothing fails because a machine is slow: the exit code is 0 unless a row of fastpersist itself fails.
"""

from __future__ import annotations

import argparse
import os
import shlex
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from tabulate import tabulate

from fastpersist.cli.bench.fio import fio_read_row, fio_write_bytes, fio_write_row
from fastpersist.cli.bench.load_rows import PageCache
from fastpersist.cli.bench.places import check_places, empty, positive, require_space, scratch_directory, write_json
from fastpersist.cli.bench.ranks import processes as work
from fastpersist.cli.bench.ranks.processes import Failed, RankProcesses, whole_span
from fastpersist.cli.bench.report import machine_facts, report_text, samples_json
from fastpersist.cli.bench.rows import Kind, Measured, Row, Sample, measure
from fastpersist.errors import ConfigError, UnsupportedError
from fastpersist.transfer.arena import available_host_bytes

__all__ = ["add_parser", "run"]

_MIB = 1 << 20
_FORMAT = 1
_COLUMNS = 118
_TIMEOUT_S = 300.0
_RANK_COUNT_MAX = 64


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
        "many jobs, and reads the same file.",
        epilog="One disk shows that several writers do no harm; what several disks would gain, it cannot show.",
    )
    parser.add_argument("directory", metavar="DIR", help="existing directory; a scratch directory in it is removed")
    parser.add_argument(
        "--ranks",
        type=_several,
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
        help="MiB of the state; each rank holds it (default: 1024)",
    )
    parser.add_argument("--repeat", type=positive, default=5, metavar="N", help="rounds (default: 5)")
    parser.add_argument("--json", metavar="FILE", help="write the results there as well")
    parser.set_defaults(run=run)


def _several(text: str) -> int:
    value = positive(text)
    if not 2 <= value <= _RANK_COUNT_MAX:
        raise argparse.ArgumentTypeError(f"must be 2 … {_RANK_COUNT_MAX}")
    return value


@dataclass(frozen=True, slots=True)
class _Result:
    """One row of a table.

    Attributes:
        measured: What came of it; its samples count the bytes of the file once.
        rank_count: Who took part.
        fio: The yardstick of this row.
        alone: The row of one rank without a group; None where that is no comparison.
    """

    measured: Measured
    rank_count: int
    fio: Measured
    alone: Measured | None = None

    def of(self, other: Measured | None) -> float | None:
        """Return by how much the rate is that of another row, None where one of them has none."""
        if other is None or not self.measured.samples or not other.samples:
            return None
        return self.measured.bytes_per_s / other.bytes_per_s


def run(arguments: argparse.Namespace) -> int:
    """Measure, print the tables, write the JSON.

    Returns:
        0, or 1 if a row of fastpersist failed.

    Raises:
        ConfigError: DIR is no directory, or there is not memory enough.
        StorageError: DIR has no room or takes no files; or the JSON file cannot be written.
        UnsupportedError: The ranks cannot be started, or cannot hold the state.
    """
    arguments.ranks = arguments.ranks or [2, 4]
    _check(arguments)
    counts = sorted(set(arguments.ranks))
    facts = machine_facts(arguments.directory)
    with scratch_directory(arguments.directory) as scratch, scratch_directory(arguments.directory) as meeting:
        with RankProcesses(counts, meeting, _TIMEOUT_S) as ranks:
            bench = _Bench(ranks, counts, scratch, arguments.repeat)
            with _one_line():
                size_bytes = bench.prepare(arguments.size_mb * _MIB)
            saves = bench.saves(size_bytes)
            with _one_line():
                file_bytes = bench.write_file()
            loads = bench.loads(file_bytes)
    command_line = _command_line(arguments)
    notes = _notes(facts, bench.cache)
    print(_text(command_line, facts, notes, size_bytes, {"save": saves, "load": loads}))
    if arguments.json:
        tables = {name: [_row_json(one, name) for one in table] for name, table in (("save", saves), ("load", loads))}
        write_json(
            arguments.json,
            {"format": _FORMAT, "command": "ranks", "command_line": command_line, "machine": facts, "notes": notes}
            | {"state_bytes": size_bytes, "file_bytes": file_bytes, **tables},
        )
    measured = [result.measured for result in [*saves, *loads]]
    return int(any(one.row.kind == "fastpersist" and one.note.startswith("failed") for one in measured))


def _check(arguments: argparse.Namespace) -> None:
    """Refuse what cannot be measured here."""
    check_places(arguments.directory, [arguments.json])
    if not torch.distributed.is_available():
        raise ConfigError("this torch is built without torch.distributed, so there are no ranks to measure")
    needed_bytes = max(arguments.ranks) * arguments.size_mb * _MIB
    if needed_bytes > available_host_bytes():
        raise ConfigError(
            f"--ranks {max(arguments.ranks)} with --size-mb {arguments.size_mb} each is more memory than is available "
            f"({available_host_bytes() / 1e9:.1f} GB); ask for less"
        )
    most_bytes = fio_write_bytes(arguments.size_mb * _MIB, max(arguments.ranks))
    require_space(arguments.directory, most_bytes, smaller="--size-mb")


@contextmanager
def _one_line() -> Iterator[None]:
    """Make an answer of what ranks could not do outside a row."""
    try:
        yield
    except Failed as error:
        raise UnsupportedError(str(error).splitlines()[0]) from error


class _Bench:
    """Runs the rows.

    Args:
        ranks: The processes.
        counts: Ranks of each group.
        scratch: Directory for files.
        round_count: Samples of each row.
    """

    def __init__(self, ranks: RankProcesses, counts: Sequence[int], scratch: str, round_count: int) -> None:
        self._ranks, self._counts, self._scratch, self._round_count = ranks, counts, scratch, round_count
        self._file = os.path.join(scratch, "state.pt")
        self.cache = PageCache(warm=False, whole_machine=False)

    def prepare(self, size_bytes: int) -> int:
        """Have the ranks make their state, and each group save once: they connect, and map memory. Return its bytes."""
        made_bytes: int = self._ranks.call(max(self._counts), work.hold_state, size_bytes)[0]
        for count in self._counts:
            self._ranks.call(count, work.save_together, self._file, count)
        empty(self._scratch)
        return made_bytes

    def saves(self, size_bytes: int) -> list[_Result]:
        """Measure the ways to write one file."""

        def row(name: str, kind: Kind, count: int, function: Callable[..., Any], *more: Any) -> Row:
            def run(path: str) -> Sample:
                answers = self._ranks.call(count, function, path, *more)
                return Sample(whole_span([span for span, _ in answers]), size_bytes, answers[0][1])

            return Row(name, kind, run)

        alone = row("fp.save, one rank alone", "fastpersist", 1, work.save_alone)
        together = {
            count: row(f"fp.save, {count} ranks together", "fastpersist", count, work.save_together, count)
            for count in self._counts
        }
        by_torch = row("torch.save + fsync, rank 0", "peer", 1, work.save_by_torch)
        fio = {count: fio_write_row(size_bytes, job_count=count) for count in (1, *self._counts)}
        rows = [*fio.values(), alone, *together.values(), by_torch]

        def before(suffix: str) -> str:
            return os.path.join(self._scratch, f"run{suffix}")

        found = self._measure(rows, before, lambda: empty(self._scratch))
        return [
            *(_Result(found[row.name], count, found[row.name]) for count, row in fio.items()),
            _Result(found[alone.name], 1, found[fio[1].name]),
            *(
                _Result(found[row.name], count, found[fio[count].name], found[alone.name])
                for count, row in together.items()
            ),
            _Result(found[by_torch.name], 1, found[fio[1].name], found[alone.name]),
        ]

    def write_file(self) -> int:
        """Write the file that is loaded, and have the ranks give back the state's memory; return the file's bytes."""
        self._ranks.call(1, work.save_alone, self._file)
        self._ranks.call(max(self._counts), work.drop_state)
        return os.path.getsize(self._file)

    def loads(self, file_bytes: int) -> list[_Result]:
        """Measure the ways in which all ranks get what is in one file."""

        def row(name: str, kind: Kind, count: int, function: Callable[..., Any]) -> Row:
            def run(path: str) -> Sample:
                return Sample(whole_span(self._ranks.call(count, function, path, count)), file_bytes)

            return Row(name, kind, run)

        def before(_suffix: str) -> str:
            self.cache.prepare(self._file)
            return self._file

        fio = fio_read_row(".pt")
        rows = {
            count: [
                row(f"fp.load, {count} ranks together", "fastpersist", count, work.load_together),
                row(f"fp.load, {count} ranks, by each", "fastpersist", count, work.load_alone),
                row(f"torch.load, {count} ranks, by each", "peer", count, work.load_by_torch),
            ]
            for count in self._counts
        }
        found = self._measure([fio, *(row for some in rows.values() for row in some)], before, lambda: None)
        return [
            _Result(found[fio.name], 1, found[fio.name]),
            *(_Result(found[row.name], count, found[fio.name]) for count, some in rows.items() for row in some),
        ]

    def _measure(
        self, rows: Sequence[Row], before: Callable[[str], str], after: Callable[[], None]
    ) -> dict[str, Measured]:
        return {one.row.name: one for one in measure(rows, self._round_count, before=before, after=after)}


# --- what is said ---


def _command_line(arguments: argparse.Namespace) -> str:
    """Spell out the command, as it would be typed to run the same again."""
    words = ["fastpersist", "bench", "ranks", arguments.directory, "--ranks", *map(str, sorted(set(arguments.ranks)))]
    return shlex.join([*words, "--size-mb", str(arguments.size_mb), "--repeat", str(arguments.repeat)])


def _notes(facts: dict[str, Any], cache: PageCache) -> list[str]:
    return [
        "seconds run from the first rank that begins to the last that returns; GB/s are 10^9 bytes of the one file per "
        "second of the median, of all ranks: what they all have got per second; the rows took turns, each round in "
        "another order",
        "save: a fresh file, durable with its name; its removal is synced before the next run",
        f"load: {cache.describe()}; what the drive itself or the host of a virtual disk caches is out of our reach",
        f"every rank computes on one thread, and one rank alone may use several for writing; this machine has "
        f"{facts['cpu_count']} CPUs, and more ranks than that take turns",
        "fio: io_uring, direct, bs=8M, iodepth=8 of each job; writes a fresh, preallocated file, a range by each job, "
        "with --end_fsync=1; reads the file that the ranks load, by one job",
    ]


def _row_json(result: _Result, table: str) -> dict[str, Any]:
    measured = result.measured
    row = {"name": measured.row.name, "kind": measured.row.kind, "rank_count": result.rank_count, "note": measured.note}
    if not measured.samples:
        return row
    return row | {
        **samples_json(measured),
        # A file that several write is written once; what each of them loads is loaded by each.
        "all_ranks_bytes_per_s": result.rank_count * measured.bytes_per_s if table == "load" else None,
        "ratio_to_fio": result.of(result.fio),
        "ratio_to_one_rank": result.of(result.alone),
    }


def _text(
    command_line: str, facts: dict[str, Any], notes: Sequence[str], size_bytes: int, tables: dict[str, list[_Result]]
) -> str:
    lines = [report_text("ranks", command_line, facts, [], []).rstrip()]
    lines += ["", f"a state of {size_bytes / 1e9:.3f} GB on each rank"]
    for name, results in tables.items():
        last = "of one rank alone" if name == "save" else "all ranks, GB/s"
        headers = [name, "engine", "median s", "min – max s", "GB/s", "of fio", last]
        rows = [_cells(result, name) for result in results]
        align = ("left", "left", "right", "right", "right", "right", "right")
        lines += ["", tabulate(rows, headers=headers, disable_numparse=True, colalign=align)]
        lines += [f"{one.row.name}: {one.note}" for one in (result.measured for result in results) if one.note]
    lines += ["", *(textwrap.fill(f"- {note}", _COLUMNS, subsequent_indent="  ") for note in notes)]
    return "\n".join(lines)


def _cells(result: _Result, table: str) -> list[str]:
    measured = result.measured
    if not measured.samples:
        return [measured.row.name, "", "–"]
    last = (
        f"{result.rank_count * measured.bytes_per_s / 1e9:.2f}"
        if table == "load"
        else _percent(result.of(result.alone))
    )
    return [
        measured.row.name,
        measured.samples[0].engine,
        *measured.time_cells(),
        _percent(result.of(result.fio)),
        last,
    ]


def _percent(ratio: float | None) -> str:
    return "" if ratio is None else f"{100 * ratio:.0f} %"
