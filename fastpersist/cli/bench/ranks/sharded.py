"""Rows for a state that is sharded over all ranks: saving, loading, and saving in the background.

`ranks.sharded_work` has the code of a rank; this module decides which row is compared with which.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from typing import Any

from fastpersist.cli.bench.fio import CEILING_NAMES, FioJob, fio_row, fio_write_row, run_fio
from fastpersist.cli.bench.load_rows import PageCache
from fastpersist.cli.bench.places import empty
from fastpersist.cli.bench.ranks import sharded_work as work
from fastpersist.cli.bench.ranks.processes import Failed, RankProcesses, whole_span
from fastpersist.cli.bench.ranks.tables import AsyncSample, Result, Table
from fastpersist.cli.bench.rows import Kind, Measured, Row, Sample, measure

__all__ = ["Sharded"]

_MIB = 1 << 20
_BLOCK_BYTES = 8 * _MIB


class Sharded:
    """Runs the rows of one number of ranks.

    Args:
        ranks: The processes.
        count: The number of ranks.
        scratch: The directory for files.
        arguments: The parsed command line.

    Attributes:
        size_bytes: The size of the whole state.
    """

    def __init__(self, ranks: RankProcesses, count: int, scratch: str, arguments: argparse.Namespace) -> None:
        self._ranks, self._count, self._scratch, self._arguments = ranks, count, scratch, arguments
        self.cache = PageCache(warm=arguments.warm, whole_machine=False)
        self.size_bytes: int = self._call(work.hold_shards, arguments.size_mb * _MIB, count, arguments.flat)[0]
        self._wanted = self._call(work.digest)
        self._peaks: dict[str, int] = {}

    def _call(self, function: Callable[..., Any], *more: Any) -> list[Any]:
        return self._ranks.call(self._count, function, *more)

    def _row(self, name: str, run: Callable[[str], Sample], suffix: str) -> Row:
        kind: Kind = "fastpersist" if name == work.OURS else "peer"
        why_not = str(self._call(work.why_not, name)[0])
        return Row(name, kind, None if why_not else run, suffix, why_not)

    def _first_time(self, row: Row, do: Callable[[], object]) -> Row:
        """Do something uncounted: connections, and memory that is touched for the first time. Return the row."""
        if row.run is None:
            return row
        try:
            do()
        except Failed as error:
            return Row(row.name, row.kind, None, row.suffix, f"failed: {str(error).splitlines()[0]}")
        return row

    def _measure(self, rows: Sequence[Row], before: Callable[[str], str], after: Callable[[], None]) -> list[Measured]:
        self._peaks = {}
        found = measure(rows, self._arguments.repeat, before=before, after=after)
        for measured in found:
            measured.peak_bytes = self._peaks.get(measured.row.name)
        return found

    def _table(self, name: str, found: list[Measured]) -> Table:
        fio = next((one for one in found if one.row.kind == "ceiling"), None)
        ours = next((one for one in found if one.row.name == work.OURS), None)
        title = f"{name}, {self._count} ranks"
        results = [Result(one, self._count, fio, ours) for one in found]
        return Table(name, title, results, f"of {work.OURS}")

    def _note_peak(self, name: str, results: Sequence[Any]) -> None:
        self._peaks[name] = max(self._peaks.get(name, 0), *(result[1] for result in results))

    def saves(self) -> Table:
        """Save in all ways; fio writes as many bytes, one job a rank."""
        path = os.path.join(self._scratch, "first")

        def row(way: str) -> Row:
            def run(path: str) -> Sample:
                results = self._call(work.save, path, self._count, way)
                self._note_peak(way, results)
                return Sample(whole_span([result[0] for result in results]), self.size_bytes)

            made = self._first_time(self._row(way, run, ".dcp"), lambda: self._call(work.save, path, self._count, way))
            empty(self._scratch)
            return made

        rows = [fio_write_row(self.size_bytes, job_count=self._count), *map(row, work.SAVE_WAYS)]
        found = self._measure(
            rows, lambda suffix: os.path.join(self._scratch, f"run{suffix}"), lambda: empty(self._scratch)
        )
        return self._table("save", found)

    def loads(self) -> Table:
        """Load in all ways, each what it has saved; fio reads the files of ours, one job each."""

        def row(way: str, number: int) -> Row:
            def run(path: str) -> Sample:
                self._call(work.forget)
                for file in _data_files(path):
                    self.cache.prepare(file)
                results = self._call(work.load, path, self._count, way)
                self._check(way)
                self._note_peak(way, results)
                return Sample(whole_span([result[0] for result in results]), self.size_bytes)

            path = os.path.join(self._scratch, f"{number}")
            return self._first_time(
                self._row(way, run, f"{number}"),
                lambda: self._call(work.save, path, self._count, work.LOAD_WAYS[way]),
            )

        rows = [row(way, number) for number, way in enumerate(work.LOAD_WAYS)]
        found = self._measure(
            [_fio_read_row(self.cache), *rows], lambda suffix: os.path.join(self._scratch, suffix), lambda: None
        )
        empty(self._scratch)
        return self._table("load", found)

    def _check(self, way: str) -> None:
        if self._call(work.digest) != self._wanted:
            raise Failed(f"{way} has loaded other numbers than were saved")

    def in_background(self) -> Table:
        """Save in the background in all ways, each started anew for each round: none keeps another's memory."""

        def begun(way: str) -> list[Any]:
            """Start a way, and have it save once, which is not counted."""
            root = os.path.join(self._scratch, "run")
            os.mkdir(root)
            self._call(work.start_async, root, self._count, way)
            return self._call(work.save_async, self._count, 1, self._arguments.between, False)

        def row(way: str) -> Row:
            def run(_path: str) -> Sample:
                begun(way)
                try:
                    results = self._call(work.save_async, self._count, 2, self._arguments.between, False)
                finally:
                    self._call(work.close_async)
                self._note_peak(way, results)
                seconds = whole_span([result[0] for result in results])
                return AsyncSample(seconds, self.size_bytes, stall_s=max(result[2] for result in results))

            def prove() -> None:
                """Save a state that is changed as soon as it may be; what is loaded must be that of before."""
                begun(way)
                self._call(work.save_async, self._count, 2, self._arguments.between, True)
                path = os.path.join(self._scratch, "run", "step-00000002")
                self._call(work.load, path, self._count, work.ASYNC_WAYS[way])
                self._call(work.close_async)
                self._check(way)

            made = self._first_time(self._row(way, run, ""), prove)
            empty(self._scratch)
            return made

        found = self._measure([row(way) for way in work.ASYNC_WAYS], lambda _: "", lambda: empty(self._scratch))
        return self._table("async", found)


def _data_files(path: str) -> list[str]:
    return sorted(entry.path for entry in os.scandir(path) if entry.name.endswith((".distcp", ".pt")))


def _fio_read_row(cache: PageCache) -> Row:
    def run(path: str) -> Sample:
        files = _data_files(path)
        for file in files:
            cache.prepare(file)
        smallest_bytes = min(map(os.path.getsize, files))
        block_bytes = min(_BLOCK_BYTES, smallest_bytes // 4096 * 4096)
        return run_fio(FioJob("read", smallest_bytes // block_bytes * block_bytes, block_bytes=block_bytes), files)

    return fio_row(CEILING_NAMES["load"], run, suffix="0")  # what the first of LOAD_WAYS has saved
