"""Rows for one file of a replicated state: saving it, loading it, and the cost of agreement.

`ranks.work` has the code of a rank; this module decides which row is the yardstick of which.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from typing import Any

from fastpersist.cli.bench.fio import fio_read_row, fio_write_row
from fastpersist.cli.bench.load_rows import PageCache
from fastpersist.cli.bench.places import empty
from fastpersist.cli.bench.ranks import work
from fastpersist.cli.bench.ranks.processes import RankProcesses, whole_span
from fastpersist.cli.bench.ranks.tables import AsyncSample, Result, Table
from fastpersist.cli.bench.rows import Kind, Measured, Row, Sample, measure

__all__ = ["OneFile"]

_SAVE_COUNT = 20  # of those that are nothing but agreement
_TINY_BYTES = 4096


class OneFile:
    """Runs the rows.

    Args:
        ranks: The processes.
        counts: The numbers of ranks to measure.
        scratch: The directory for files.
        arguments: The parsed command line.
    """

    def __init__(
        self, ranks: RankProcesses, counts: Sequence[int], scratch: str, arguments: argparse.Namespace
    ) -> None:
        self._ranks, self._counts, self._scratch, self._arguments = ranks, counts, scratch, arguments
        self._file = os.path.join(scratch, "state.pt")
        self.cache = PageCache(warm=arguments.warm, whole_machine=False)

    def prepare(self, size_bytes: int) -> int:
        """Have the ranks make their state, and each group save once: they connect, and map memory. Return its bytes."""
        everybody = max(self._counts)
        made_bytes: int = self._ranks.call(everybody, work.hold_state, size_bytes)[0]
        if self._arguments.one_core_each:
            self._ranks.call(everybody, work.stay_on_cores, True)
        for count in self._counts:
            self._ranks.call(count, work.save_together, self._file, count)
        empty(self._scratch)
        return made_bytes

    def saves(self, size_bytes: int) -> Table:
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
        limits = {row.name: (count, row) for count, row in self._limit_rows(size_bytes)}
        rows = [*fio.values(), alone, *together.values(), by_torch, *(row for _, row in limits.values())]

        def before(suffix: str) -> str:
            return os.path.join(self._scratch, f"run{suffix}")

        found = self._measure(rows, before, lambda: empty(self._scratch))
        first = found[alone.name]
        results = [
            *(Result(found[row.name], count, found[row.name]) for count, row in fio.items()),
            Result(first, 1, found[fio[1].name]),
            *(Result(found[row.name], count, found[fio[count].name], first) for count, row in together.items()),
            Result(found[by_torch.name], 1, found[fio[1].name], first),
            *(Result(found[name], count, None, first) for name, (count, _) in limits.items()),
        ]
        return Table("save", "save", results, "of one rank alone")

    def _limit_rows(self, size_bytes: int) -> list[tuple[int, Row]]:
        """Return what ranks could do at most, each with its part of the state: nothing of it is durable."""
        ways: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
            "bare pwrite, one file": (work.write_bare, (False,)),
            "bare pwrite, a file each": (work.write_bare, (True,)),
            "null engine": (work.pump_nowhere, ()),
            "memcpy": (work.copy_memory, ()),
        }

        def row(name: str, count: int) -> Row:
            function, more = ways[name]

            def run(path: str) -> Sample:
                return Sample(whole_span(self._ranks.call(count, function, path, count, *more)), size_bytes)

            return Row(f"{name}, {count} rank{'s' if count > 1 else ''}", "ceiling", run)

        counts = (1, *self._counts) if self._arguments.limits else ()
        return [(count, row(name, count)) for name in ways for count in counts]

    def write_file(self) -> int:
        """Write the file that is loaded, and have the ranks give back the state's memory; return the file's bytes."""
        self._ranks.call(1, work.save_alone, self._file)
        self._ranks.call(max(self._counts), work.drop_state)
        return os.path.getsize(self._file)

    def loads(self, file_bytes: int) -> Table:
        """Measure the ways in which all ranks get what is in one file."""

        def row(name: str, kind: Kind, count: int, function: Callable[..., Any], *more: Any) -> Row:
            def run(path: str) -> Sample:
                return Sample(whole_span(self._ranks.call(count, function, path, count, *more)), file_bytes)

            return Row(name, kind, run)

        def before(_suffix: str) -> str:
            self.cache.prepare(self._file)
            return self._file

        fio = fio_read_row(".pt")
        ways = work.LOAD_WAYS if self._arguments.load_ways else ()
        rows = {
            count: [
                row(f"fp.load, {count} ranks together", "fastpersist", count, work.load_together),
                *(
                    row(f"fp.load, {count} ranks together: {way}", "fastpersist", count, work.load_together, way)
                    for way in ways
                ),
                row(f"fp.load, {count} ranks, by each", "fastpersist", count, work.load_alone),
                row(f"torch.load, {count} ranks, by each", "peer", count, work.load_by_torch),
            ]
            for count in self._counts
        }
        found = self._measure([fio, *(row for some in rows.values() for row in some)], before, lambda: None)
        results = [Result(found[row.name], count, found[fio.name]) for count, some in rows.items() for row in some]
        return Table("load", "load", [Result(found[fio.name], 1, found[fio.name]), *results])

    def agreement(self) -> Table:
        """Measure saves of next to nothing, of which most is agreement."""
        results = []
        for count in (1, *self._counts):
            row = Row(f"4 KiB, {count} rank{'s' if count > 1 else ''}", "fastpersist", None)
            by_rank = self._ranks.call(count, work.save_tiny, self._file, count, _SAVE_COUNT)
            samples: list[Sample] = [
                AsyncSample(
                    whole_span([(start, end) for start, _, end in save]),
                    _TINY_BYTES,
                    stall_s=max(returned - start for start, returned, _ in save),
                )
                for save in zip(*by_rank, strict=True)
            ]
            results.append(Result(Measured(row, "", samples), count))
            empty(self._scratch)
        return Table("agreement", "agreement", results)

    def _measure(
        self, rows: Sequence[Row], before: Callable[[str], str], after: Callable[[], None]
    ) -> dict[str, Measured]:
        return {one.row.name: one for one in measure(rows, self._arguments.repeat, before=before, after=after)}
